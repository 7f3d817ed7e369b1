"""``elastic-ft tensorboard``: a run's committed steps, for TensorBoard."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from elastic_ft.errors import UsageError
from elastic_ft.observe.lines import local_path
from elastic_ft.observe.run_reader import RunReader

LOOK_S = 1.0


def tensorboard(
    run_folder: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run.")],
    out: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Where to [tensorboard in the run folder].")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Until the run has ended.")] = False,
) -> int:
    """Write each committed step for TensorBoard, once, also if this is killed and begun again."""
    from elastic_ft.observe.tensorboard import TensorBoardLog

    reader = RunReader(run_folder)
    reader.content("events.jsonl")
    folder = Path(out) if out is not None else local_path(f"{run_folder.rstrip('/')}/tensorboard")
    if folder is None:
        raise UsageError(f"--out: say where to: {run_folder} is remote, TensorBoard reads folders")
    log, tail = TensorBoardLog(folder), reader.tail("steps.jsonl")
    try:
        while True:
            has_ended = bool(reader.result())  # before the last look at its steps
            log.write(tail.read())
            if has_ended or not follow:
                break
            time.sleep(LOOK_S)
    finally:
        log.close()
    print(f"{folder}: up to step {log.cursor.step}")
    return 0
