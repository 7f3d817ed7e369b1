"""Processes of a job can be told apart from outside."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
from pathlib import Path
from elastic_ft.transport.title import set_title
set_title({title!r})
print(Path("/proc/self/comm").read_text(), end="")
"""


@pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="Linux alone shows it so")
@pytest.mark.parametrize(
    ("title", "shown"),
    [("ef-worker w12", "ef-worker w12"), ("ef-keeper node-7.example", "ef-keeper node-")],
)
def test_a_process_is_shown_by_its_title(title: str, shown: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(title=title)],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout == f"{shown}\n"
