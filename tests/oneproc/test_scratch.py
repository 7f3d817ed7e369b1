"""What a killed command leaves in the temporary folder is gone with the next start."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import psutil

from elastic_ft.observe import scratch

MAKE = (
    "import sys; from elastic_ft.observe import scratch; print(scratch.make('eft-', sys.argv[1]))"
)
STAY = "; sys.stdout.flush(); sys.stdin.read()"


def left_behind(folder: Path) -> Path:
    """By a process that was killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAKE + STAY, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    made = Path(process.stdout.readline().strip())
    process.kill()
    process.communicate()
    return made


def test_the_folders_of_the_dead_go_and_no_others(tmp_path: Path) -> None:
    """D11: 556 kB of a Ray session stayed after each kill -9 of the command."""
    own = scratch.make("eft-", str(tmp_path))
    dead = left_behind(tmp_path)
    assert dead.is_dir() and dead.parent == tmp_path
    (dead / "session").mkdir()
    anybodys = tmp_path / "eft-of-someone"
    anybodys.mkdir()
    elsewhere = tmp_path / "eft-elsewhere"
    elsewhere.mkdir()
    found = json.loads((dead / scratch.OWNER).read_text())
    (elsewhere / scratch.OWNER).write_text(json.dumps(found | {"host": "another"}))
    broken = tmp_path / "eft-broken"
    broken.mkdir()
    (broken / scratch.OWNER).write_text("[")
    scratch.make("eft-", str(tmp_path))
    assert not dead.exists()
    assert all(path.is_dir() for path in (own, anybodys, elsewhere, broken))


def test_a_number_that_another_process_has_by_now_is_no_owner(tmp_path: Path) -> None:
    own = scratch.make("eft-", str(tmp_path))
    owner = scratch.ScratchOwner(**json.loads((own / scratch.OWNER).read_text()))
    assert not owner.gone
    assert owner.started_s == psutil.Process().create_time()
    (own / scratch.OWNER).write_text(json.dumps(asdict(replace(owner, started_s=1.0))))
    scratch.make("eft-", str(tmp_path))
    assert not own.exists()
