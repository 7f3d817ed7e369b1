"""Each mutation stands for something in the code as it is."""

import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["core", "blinded"])
def test_what_is_replaced_is_there_once(name: str) -> None:
    found = tomllib.loads((ROOT / "tests" / "mutants" / f"{name}.toml").read_text())["mutant"]
    assert len({mutant["name"] for mutant in found}) == len(found) > 10
    texts = {m["file"]: (ROOT / "elastic_ft" / m["file"]).read_text() for m in found}
    assert [m["name"] for m in found if texts[m["file"]].count(m["old"]) != 1] == []


def test_every_name_in_a_mutant_is_defined(tmp_path: Path) -> None:
    """Else whatever runs that line notices, and the fault itself was never tried."""
    for mutant in runpy.run_path(str(ROOT / "tests" / "mutants" / "__main__.py"))["mutants"]():
        text = (ROOT / mutant.path).read_text()
        (tmp_path / f"{mutant.name}.py").write_text(text.replace(mutant.old, mutant.new))
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F821"]
    done = subprocess.run([*ruff, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_the_tests_import_is_copied_for_them() -> None:
    """Else no mutant was ever tried, and ``make mutants`` ended in a traceback."""
    copied = runpy.run_path(str(ROOT / "tests" / "mutants" / "__main__.py"))["COPIED"]
    packages = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"tests"}
    texts = [
        path.read_text() for tier in ("core", "sim") for path in ROOT.glob(f"tests/{tier}/*.py")
    ]
    imported = {
        name for text in texts for name in re.findall(r"^(?:from|import) (\w+)", text, re.M)
    }
    assert imported & packages <= set(copied)


def test_what_the_tests_read_is_copied_for_them() -> None:
    """Else what reads it fails whatever the mutant is, and each that nobody else notices passes
    for killed: twenty of 140 did so, by a test that reads docs."""
    copied = runpy.run_path(str(ROOT / "tests" / "mutants" / "__main__.py"))["COPIED"]
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"tests"}
    texts = [
        path.read_text() for tier in ("core", "sim") for path in ROOT.glob(f"tests/{tier}/*.py")
    ]
    reading = re.compile(r'(?:(?:\]|ROOT) / "|^from )(\w+)', re.M)
    read = {name for text in texts for name in reading.findall(text)}
    assert "docs" in read & folders <= set(copied)


def test_who_runs_out_of_time_has_killed_nobody() -> None:
    """A busy machine's mutants passed for killed by "tests that never ended"."""
    of = runpy.run_path(str(ROOT / "tests" / "mutants" / "__main__.py"))
    of["try_one"].__globals__["TIMEOUT_S"] = 0.001
    verdict = of["try_one"](of["mutants"]()[0], ROOT, True)
    assert (verdict.killer, verdict.ended) == ("", False)
