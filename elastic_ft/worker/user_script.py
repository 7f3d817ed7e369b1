"""Runs the user's script in a worker, as ``python script.py arguments`` would."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from elastic_ft.config import LoopConfig
from elastic_ft.errors import UsageError


class Released(SystemExit):
    """The job has ended, or goes on without this worker: nothing of the user's code comes after."""


def run_script(loop: LoopConfig | None) -> None:
    """Raises what the script does; UsageError if it is not there, or exits with an error."""
    assert loop is not None and loop.script is not None
    path = Path(loop.script)
    if not path.is_file():
        raise UsageError(f"loop.script: {path} is no file on this node")
    sys.argv = [str(path), *loop.arguments]
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        runpy.run_path(str(path), run_name="__main__")
    except Released:
        raise
    except SystemExit as error:
        if error.code not in (None, 0):
            raise UsageError(f"{path.name} exited with {error.code}") from None
