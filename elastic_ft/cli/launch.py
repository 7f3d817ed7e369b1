"""``elastic-ft launch script.py``: a training script that calls ``elastic_ft.init``."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from elastic_ft.cli import options
from elastic_ft.cli.own_script import calls_init, init_of
from elastic_ft.cli.progress import say
from elastic_ft.cli.run import COMPLETED, FAILED, How, begun_anew, train_job
from elastic_ft.cli.where import where_to_run
from elastic_ft.config import Job, parse_job, parse_yaml
from elastic_ft.errors import ConfigError, UsageError

SETTINGS = {"allow_interspersed_args": False}  # what comes after the script is the script's
FILE_BYTES_MAX = 4 << 20
RESTARTS_MAX = 3  # of a script that is torchrun's

WorkersOption = Annotated[
    int | None,
    typer.Option(
        "--workers",
        "--nproc-per-node",
        "--nproc_per_node",
        metavar="N",
        min=1,
        help="At most so many processes (elastic.max_workers).",
    ),
]
MinWorkers = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Go on with as few as these (elastic.min_workers; 1)."),
]
JobFileIfAny = Annotated[
    Path | None,
    typer.Option("--job", metavar="JOB.yaml", help="For what the script's init() does not say."),
]


def launch(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT.py", help="The script.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Its arguments.")
    ] = None,
    workers: WorkersOption = None,
    min_workers: MinWorkers = None,
    job_file: JobFileIfAny = None,
    address: options.RayAddress = None,
    local_nodes: options.LocalNodes = None,
    processes: options.Processes = False,
    chaos: options.ScenarioName = None,
    foreground: options.Foreground = False,
    out: options.Out = None,
    accept_changes: options.AcceptChanges = False,
    from_scratch: options.FromScratch = False,
) -> int:
    """Run a training script of your own, elastically.

    Its processes survive the loss of others.

    One that never calls elastic_ft.init() is torchrun's: all its processes restart after a loss.
    """
    if processes and script.is_file() and not calls_init(script):
        given = {
            "--job": job_file,
            "--min-workers": min_workers,
            "--chaos": chaos,
            "--out": out,
            "--accept-changes": accept_changes or None,
            "--from-scratch": from_scratch or None,
        }
        for option in (option for option, value in given.items() if value is not None):
            raise UsageError(f"{option}: {script.name} never calls elastic_ft.init(): leave it out")
        return _as_torchrun(script, arguments or [], workers or 1)
    job = job_of_script(script, tuple(arguments or ()), job_file, workers, min_workers)
    job = begun_anew(job, from_scratch)
    where = where_to_run(job, address, local_nodes, processes)
    how = How(chaos, accept_changes=accept_changes, foreground=foreground)
    return train_job(job, out or f"runs/{job.name}", where, how)


def _as_torchrun(script: Path, arguments: list[str], workers: int) -> int:
    """TorchElastic's contract: a fresh environment and new processes after each loss, and what the
    script has in its own checkpoints."""
    say(f"{script.name} never calls elastic_ft.init(): all {workers} processes restart on a loss")
    places = ["--standalone", "--nproc-per-node", str(workers), "--max-restarts", str(RESTARTS_MAX)]
    command = [sys.executable, "-m", "torch.distributed.run", *places, str(script), *arguments]
    # A session of its own, so that it has each signal once; it gives its workers 30 s to end. By a
    # second one torchrun would leave them behind.
    process = subprocess.Popen(command, start_new_session=True)
    came: list[int] = []

    def pass_on(number: int, frame: Any) -> None:
        came.append(number)
        if len(came) == 1:
            process.send_signal(number)
        elif process.poll() is None:  # they have sessions of their own
            for each in (*psutil.Process(process.pid).children(recursive=True), process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()

    told = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, pass_on) for number in told}
    try:
        return COMPLETED if process.wait() == 0 else FAILED
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def job_of_script(
    script: Path,
    arguments: tuple[str, ...] = (),
    job_file: Path | None = None,
    workers: int | None = None,
    min_workers: int | None = None,
) -> Job:
    """What the script's ``init()`` says, the job file, and these options, which win, in turn.

    Raises ConfigError.
    """
    name, said = init_of(script, arguments)
    named = job_file or (script.parent / name if name else None)
    values: dict[str, Any] = {"name": script.stem}
    for more in (_file(named) if named else {}, said):
        for key, value in more.items():
            known = values.get(key)
            both = isinstance(known, dict) and isinstance(value, dict)
            values[key] = known | value if both else value
    loop = {"script": str(script.resolve()), "arguments": list(arguments)}
    elastic = dict(values.get("elastic") or {})
    if workers is not None:
        elastic["max_workers"] = workers
    if min_workers is not None:
        elastic["min_workers"] = min_workers
    values |= {"loop": (values.get("loop") or {}) | loop, "elastic": elastic}
    return parse_job(values, str(named or script))


def _file(path: Path) -> dict[str, Any]:
    try:
        content = path.read_bytes()[:FILE_BYTES_MAX]
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    values = parse_yaml(content, str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping of sections")
    return values
