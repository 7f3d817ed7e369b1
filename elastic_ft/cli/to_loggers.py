"""``elastic-ft tensorboard``, ``wandb`` and ``mlflow``: a run's committed steps, for others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Protocol

import typer

from elastic_ft.cli.options import RunFolderOf
from elastic_ft.errors import UsageError
from elastic_ft.observe.lines import Line
from elastic_ft.observe.run_reader import RunReader
from elastic_ft.observe.step_cursor import Cursor
from elastic_ft.storage.mounts import plain_path

LOOK_S = 1.0

Follow = Annotated[bool, typer.Option("--follow", help="Until the run has ended.")]
Name = Annotated[str | None, typer.Option(help="Of the run there (default: the run folder's).")]


class Log(Protocol):
    cursor: Cursor

    def write(self, lines: Iterable[Line]) -> int: ...
    def close(self) -> None: ...


def tensorboard(
    run_folder: RunFolderOf,
    out: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Where to (default: tensorboard in the run folder)."),
    ] = None,
    follow: Follow = False,
) -> int:
    """Write each committed step for TensorBoard.

    Each is written once, also if this is killed and begun again.
    """
    from elastic_ft.observe.tensorboard import TensorBoardLog

    return _write(run_folder, "tensorboard", out, follow, lambda reader, to: TensorBoardLog(to))


def wandb(
    run_folder: RunFolderOf,
    out: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Where to (default: wandb in the run folder)."),
    ] = None,
    project: Annotated[str, typer.Option(help="Of Weights & Biases.")] = "elastic_ft",
    name: Name = None,
    follow: Follow = False,
) -> int:
    """Write each committed step as an offline run for `wandb sync`."""
    from elastic_ft.observe.whole_logs import WandbLog

    name = name or _name(run_folder)
    return _write(
        run_folder, "wandb", out, follow, lambda r, to: WandbLog(to, r.steps, name, project)
    )


def mlflow(
    run_folder: RunFolderOf,
    tracking_uri: Annotated[
        str | None, typer.Option(help="Where to (default: MLflow's own, MLFLOW_TRACKING_URI).")
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Of its cursor (default: RUN/mlflow)."),
    ] = None,
    experiment: Annotated[str, typer.Option(help="Of MLflow.")] = "elastic_ft",
    name: Name = None,
    follow: Follow = False,
) -> int:
    """Write each committed step to MLflow.

    Each is written once, also if this is killed and begun again.
    """
    from elastic_ft.observe.whole_logs import MlflowLog

    name = name or _name(run_folder)

    def make(reader: RunReader, folder: Path) -> Log:
        return MlflowLog(folder, reader.steps, name, experiment, tracking_uri)

    return _write(run_folder, "mlflow", out, follow, make)


def _name(run_folder: str) -> str:
    return run_folder.rstrip("/").rpartition("/")[2]


def _write(
    run_folder: str,
    tool: str,
    out: str | None,
    follow: bool,
    make: Callable[[RunReader, Path], Log],
) -> int:
    reader = RunReader(run_folder)
    reader.content("events.jsonl")
    folder = plain_path(out if out is not None else f"{run_folder.rstrip('/')}/{tool}")
    if folder is None:
        raise UsageError(f"--out: say where to: {run_folder} is remote, {tool} needs a folder")
    log, tail = make(reader, folder), reader.tail("steps.jsonl")
    try:
        while True:
            is_last = not follow or bool(reader.result())  # before the look at its steps
            log.write(tail.read(whole=is_last))
            if is_last:
                break
            time.sleep(LOOK_S)
    finally:
        log.close()
    print(f"{folder}: up to step {log.cursor.step}")
    return 0
