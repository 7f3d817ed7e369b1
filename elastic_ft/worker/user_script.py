"""Runs the user's script in a worker, as ``python script.py arguments`` would."""

from __future__ import annotations

import runpy
import sys
import traceback
from pathlib import Path

from elastic_ft.config import LoopConfig
from elastic_ft.errors import UsageError

OF_TORCHRUN = (  # what a script that was left as it was runs into, and what it should have instead
    (
        "Error initializing torch.distributed",
        "leave out init_process_group; what needs it comes after elastic_ft.init",
    ),
    (
        "process group has not been initialized",
        "leave out init_process_group; what needs it comes after elastic_ft.init",
    ),
    ("RANK'", "take ctx.rank, ctx.world_size and ctx.device"),
    ("WORLD_SIZE'", "take ctx.rank, ctx.world_size and ctx.device"),
    ("has no attribute 'module'", "the model is not wrapped: write model for model.module"),
    (
        "name 'loss' is not defined",
        "it is the step's function's own: behind the loop take ctx.latest.loss",
    ),
)


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
    except (ValueError, KeyError, AttributeError, NameError) as error:
        for found, instead in OF_TORCHRUN:
            if found in str(error):
                raise UsageError(f"{_where(error, path)}: {error}: {instead}") from error
        raise


def _where(error: BaseException, path: Path) -> str:
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).resolve() == path.resolve()
    ]
    return f"{path.name}, line {lines[-1]}" if lines else path.name
