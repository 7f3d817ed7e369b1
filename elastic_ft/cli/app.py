"""``elastic-ft``: run a job file, watch it, break it on purpose.

Exit codes: 0 completed; 1 failed or suspended, or a fault of the scenario never fired; 2 bad usage
or a bad job file, one line says which key and why, nothing was started; 130 interrupted, after a
clean stop. What is heavy (torch, ray) is imported once the cheap checks have passed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from elastic_ft.cli import checkpoint, extensions, plan, resize, show_events, simulate
from elastic_ft.config import Job, load_job, parse_job, parse_text
from elastic_ft.errors import ConfigError, ElasticError, UsageError
from elastic_ft.observe.outcome import complete, read_result

if TYPE_CHECKING:
    from elastic_ft.cli.preflight import Checked, Place

COMPLETED, FAILED, BAD_USAGE, INTERRUPTED = 0, 1, 2, 130
STEP_LINE_EVERY_S = 5.0  # where there is no terminal
WATCH_EVERY_S = 0.2
RATE_STEPS, RATE_S = 500, 5.0  # tokens/s and ETA: over the last seconds, at most so many steps

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Fault-tolerant, elastic training on Ray: a lost node costs a pause, not the job.",
)
app.add_typer(checkpoint.app, name="checkpoint")
app.command("plan")(plan.plan)
app.command("events")(show_events.events)
app.command("replay")(show_events.replay)
app.command("resize")(resize.resize)
app.command("simulate")(simulate.simulate)
extensions.add_commands(app)


def main() -> None:
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: list[str]) -> int:
    """Returns the exit code. A user's mistake is one line on stderr."""
    signal.signal(signal.SIGTERM, lambda signum, frame: signal.raise_signal(signal.SIGINT))
    try:
        return int(typer.main.get_command(app).main(arguments, "elastic-ft", standalone_mode=False))
    except UsageError as error:
        return _complain(error, BAD_USAGE)
    except ElasticError as error:
        return _complain(error, FAILED)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:
        if hasattr(error, "format_message"):  # click's own, of a module that typer moves about
            message = error.format_message()
            return _complain(f"{message} (see elastic-ft --help)", BAD_USAGE) if message else 2
        raise


def _complain(message: object, code: int) -> int:
    print(f"elastic-ft: {' '.join(str(message).split())}", file=sys.stderr)
    return code


# ----------------------------------------------------------------------------- commands

JobFile = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file.")]
Address = Annotated[str | None, typer.Option(metavar="RAY", help="Address of a Ray cluster.")]
LocalNodes = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Start a Ray cluster of N nodes on this machine."),
]
Processes = Annotated[
    bool, typer.Option("--processes", help="Plain processes, no Ray: for debugging.")
]
Chaos = Annotated[
    str | None, typer.Option(metavar="SCENARIO", help="Faults to inject: a file, or a name.")
]
AcceptChanges = Annotated[
    bool,
    typer.Option(
        "--accept-changes",
        help="Go on from a checkpoint of another seed, batch, optimizer, data, or job name.",
    ),
]
Out = Annotated[
    str | None, typer.Option(metavar="DIR", help="The run folder, any fsspec URL [runs/<name>].")
]
FromScratch = Annotated[
    bool,
    typer.Option(
        "--from-scratch",
        help="Begin anew from the seed where steps are recorded and no checkpoint is good.",
    ),
]


@app.command()
def run(
    job_file: JobFile,
    address: Address = None,
    local_nodes: LocalNodes = None,
    processes: Processes = False,
    chaos: Chaos = None,
    out: Out = None,
    accept_changes: AcceptChanges = False,
    from_scratch: FromScratch = False,
) -> int:
    """Train a job; in a run folder that has checkpoints, go on from the newest good one.

    Without --address, --local-nodes and --processes: on the cluster at RAY_ADDRESS if that is set,
    else on a local one of as many nodes as the job asks for.
    """
    job = _allowed(load_job(job_file), from_scratch)
    where = _where(job, address, local_nodes, processes)
    how = How(chaos, accept_changes=accept_changes)
    return _train(job, out or f"runs/{job.name}", where, how)


@app.command()
def resume(
    run_folder: Annotated[str, typer.Argument(metavar="RUN", help="The folder of an earlier run.")],
    address: Address = None,
    local_nodes: LocalNodes = None,
    processes: Processes = False,
    chaos: Chaos = None,
    accept_changes: AcceptChanges = False,
    from_scratch: FromScratch = False,
) -> int:
    """Go on with an earlier run, from its newest good checkpoint, at any number of workers."""
    content = show_events.read(run_folder, "job.yaml")
    job = parse_text(content.encode(), f"{run_folder}/job.yaml")
    job = _allowed(job, from_scratch)
    if imported := job.imports():
        say(f"{run_folder}/job.yaml imports {', '.join(imported)}")  # whoever wrote it chose it
    where = _where(job, address, local_nodes, processes)
    return _train(job, run_folder, where, How(chaos, True, accept_changes))


def _allowed(job: Job, from_scratch: bool) -> Job:
    if not from_scratch:
        return job
    checkpoint = job.checkpoint.model_copy(update={"from_scratch": True})
    return job.model_copy(update={"checkpoint": checkpoint})


@app.command()
def demo(out: Out = None) -> int:
    """Lose a node of four and get one back; then show that nothing else was lost."""
    job_file = Path(__file__).parents[1] / "examples" / "demo.yaml"
    if not job_file.is_file():
        raise ConfigError(f"{job_file} is missing: the demo runs from a checkout of the repository")
    return _demo(load_job(job_file), out or "runs/demo")


# ------------------------------------------------------------------------ where it runs


@dataclass(frozen=True, slots=True)
class Where:
    """One of: a Ray cluster at ``address``, one of ``nodes`` made here, plain processes."""

    address: str | None = None
    nodes: int = 0
    processes: bool = False
    cpus_per_node: int = 1

    def place(self) -> Place:
        from elastic_ft.cli.preflight import Place

        slots = self.nodes * self.cpus_per_node
        if self.address is not None:
            name = f"the Ray cluster at {self.address}"
            return Place(name, address=self.address, can_add=False)
        if self.processes:
            return Place("this machine (--processes)", slots)
        return Place(f"a local cluster of {self.nodes} nodes", slots, has_raylets=True)


def _where(job: Job, address: str | None, local_nodes: int | None, processes: bool) -> Where:
    given = {"--address": address, "--local-nodes": local_nodes, "--processes": processes or None}
    named = [option for option, value in given.items() if value is not None]
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(named)}: expected at most one of them")
    elastic = job.elastic
    needed = -(-elastic.workers_wanted // elastic.workers_per_node)
    if processes:
        return Where(nodes=needed, processes=True, cpus_per_node=elastic.workers_per_node)
    if not named:
        address = os.environ.get("RAY_ADDRESS") or None
    if address is not None:
        return Where(address=address)
    return Where(nodes=local_nodes or needed, cpus_per_node=elastic.workers_per_node)


# ------------------------------------------------------------------------------ running


@dataclass(frozen=True, slots=True)
class How:
    """What a start was asked for beside the job."""

    chaos: str | None = None  # a scenario
    resumed: bool = False
    accept_changes: bool = False


def _train(job: Job, out: str, where: Where, how: How) -> int:
    """Checks, runs, says how it ended. Raises UsageError while nothing has been started."""
    from elastic_ft.observe.handover import await_handover

    if _is_complete(job, out):
        return COMPLETED
    checked = _check(job, out, where, how)
    await_handover(out, say)
    if _is_complete(job, out):  # by the one that was asked
        return COMPLETED
    return _conclude(_run(job, out, where, checked, how), out)


def _is_complete(job: Job, out: str) -> bool:
    ended = complete(read_result(out), job.steps)
    if not ended or job.checkpoint.from_scratch:
        return False
    say(f"{job.name} {ended}: nothing was started; run folder: {out}")
    return True


def _check(job: Job, out: str, where: Where, how: How) -> Checked:
    from elastic_ft.cli.preflight import check

    checked = check(job, out, where.place(), how.chaos, how.accept_changes)
    say(f"{job.name}: {checked.parameters:,} parameters; {checked.data}")
    for warning in checked.warnings:
        say(f"warning: {warning}")
    return checked


@dataclass(slots=True)
class EndOfRun:
    """How a run ended. ``result``: what is in result.json; {} if it did not come so far."""

    result: dict[str, Any]
    error: str = ""
    unfired: list[str] = field(default_factory=list)


def _run(job: Job, out: str, where: Where, checked: Checked, how: How) -> EndOfRun:
    _forget_result(out)
    url = checked.checkpoint_url
    with (
        ProgressDisplay(job, out),
        extensions.faults().disturbed(checked.faults, out, url, how.resumed) as by,
    ):
        if where.processes:
            return _run_on_processes(job, out, where, url, by, how)
        return _run_on_ray(job, out, where, checked, by, how)


def _conclude(ended: EndOfRun, out: str) -> int:
    result = ended.result
    status, reason = result.get("status", "failed"), result.get("reason") or ended.error
    if status == "stopped":
        say(f"stopped: {reason}; run folder: {out}")
        return INTERRUPTED
    if status != "completed":
        return _complain(f"{status}: {reason}; run folder: {out}", FAILED)
    loss, goodput = result["final_loss"], result["goodput"]
    last = f"loss {loss:.4f}, " if loss is not None else ""
    say(f"completed: {result['steps']} steps, {last}goodput {goodput:.0%}; run folder: {out}")
    if ended.unfired:
        return _complain(f"faults that never fired: {'; '.join(ended.unfired)}", FAILED)
    return COMPLETED


def _run_on_processes(job: Job, out: str, where: Where, url: str, by: Any, how: How) -> EndOfRun:
    """As ``hosts.local.run_local``, with a controller that signals can stop."""
    from elastic_ft.controller.controller import Controller
    from elastic_ft.hosts.local import LocalHost
    from elastic_ft.observe.run_folder import RunFolder

    slots = where.cpus_per_node
    host = LocalHost({f"n{i}": slots for i in range(where.nodes)})
    with by.injected(extensions.faults().ProcessNodes(host, slots)):
        folder = RunFolder(out)
        controller = Controller(
            job, host, folder, url, faults=by.inside, accept_changes=how.accept_changes
        )
        with _stopping(lambda: controller.stop("interrupted")):
            result = controller.run()
    return EndOfRun(result, unfired=by.unfired(result))


def _run_on_ray(job: Job, out: str, where: Where, checked: Checked, by: Any, how: How) -> EndOfRun:
    with contextlib.ExitStack() as stack:
        cluster = None
        if where.address is not None:
            stack.enter_context(_connected(where.address))
        else:
            say(f"starting a Ray cluster of {where.nodes} nodes on this machine")
            cluster = stack.enter_context(by.local_cluster(where.nodes, where.cpus_per_node))
            cluster.connect()
        _quieten_ray()
        stack.enter_context(by.injected(cluster))
        error = _fit(job, out, checked, how)
        result = read_result(out)
        return EndOfRun(result, error, by.unfired(result))


def _fit(job: Job, out: str, checked: Checked, how: How) -> str:
    """Returns the error, one line; empty if there is none. result.json has the details."""
    from ray.train import RunConfig, TrainingFailedError

    from elastic_ft.hosts.ray.trainer import ElasticTrainer
    from elastic_ft.observe.follow import local_path

    folder = local_path(out)
    url = out.rstrip("/") if folder is None else str(folder)
    parent, _, name = url.rpartition("/")
    trainer = ElasticTrainer(
        job,
        run_config=RunConfig(name=name, storage_path=parent or "/"),
        faults=checked.faults.inside if checked.faults else (),
        accept_changes=how.accept_changes,
    )
    # Ray has a handler of its own for SIGTERM; the trainer's, for SIGINT, stops cleanly.
    signal.signal(signal.SIGTERM, lambda signum, frame: signal.raise_signal(signal.SIGINT))
    try:
        trainer.fit()
    except (TrainingFailedError, ElasticError) as error:
        return " ".join(str(error).split())
    return ""


@contextlib.contextmanager
def _connected(address: str) -> Iterator[None]:
    """Raises ConfigError if there is no cluster at the address."""
    import ray

    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        line = " ".join(str(error).split())
        raise ConfigError(f"--address: no Ray cluster at {address}: {line[:200]}") from None
    try:
        yield
    finally:
        ray.shutdown()


def _quieten_ray() -> None:
    """What Ray Train logs about the run, Progress says from the journal."""
    for name in ("ray", "ray.train", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextlib.contextmanager
def _stopping(stop: Callable[[], object]) -> Iterator[None]:
    """The first two interrupts ask the controller, who obeys the second at once."""
    count = 0

    def on_interrupt(signum: int, frame: Any) -> None:
        nonlocal count
        count += 1
        if count > 2:
            raise KeyboardInterrupt
        stop()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _forget_result(out: str) -> None:
    """An earlier run's result must not be taken for this one's."""
    import fsspec

    fs, path = fsspec.core.url_to_fs(f"{out.rstrip('/')}/result.json", use_listings_cache=False)
    with contextlib.suppress(OSError):
        fs.rm(path)


# ----------------------------------------------------------------------------- progress

console = Console(highlight=False, soft_wrap=True)


def say(text: str) -> None:
    console.print(text, markup=False)


class ProgressDisplay:
    """Says what a run does, from its folder: lines, and on a terminal a status below them."""

    def __init__(self, job: Job, out: str) -> None:
        from elastic_ft.observe.follow import Watch
        from elastic_ft.observe.journal_text import brief

        self._job = job
        self._brief = brief
        self._watch = Watch(out)
        self._recent: deque[dict[str, Any]] = deque(maxlen=RATE_STEPS)
        self._began_s = time.monotonic()
        self._next_line_s = 0.0
        self._over = threading.Event()
        self._status = console.status("starting") if console.is_terminal else None
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)

    def __enter__(self) -> ProgressDisplay:
        if self._status is not None:
            self._status.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10)
        if self._status is not None:
            self._status.stop()

    def _follow(self) -> None:
        last = False
        while not last:
            last = self._over.wait(WATCH_EVERY_S)
            news, steps = self._watch.poll()
            for line in news:
                if told := self._brief(line):
                    self._say(told)
            self._recent.extend(steps)
            if steps:
                self._show_step(steps[-1], last)

    def _say(self, text: str) -> None:
        say(f"{time.monotonic() - self._began_s:7.1f} s  {text}")

    def _show_step(self, line: dict[str, Any], last: bool) -> None:
        text = self._describe(line)
        if self._status is not None:
            self._status.update(text)
            return
        now = time.monotonic()
        if now >= self._next_line_s or last or line["step"] == self._job.steps:
            self._next_line_s = now + STEP_LINE_EVERY_S
            self._say(text)

    def _describe(self, line: dict[str, Any]) -> str:
        recent = list(self._recent)
        long_ago = line["committed_at_s"] - RATE_S  # several steps may be committed at once
        start = max((i for i, s in enumerate(recent) if s["committed_at_s"] <= long_ago), default=0)
        first, after = recent[start], recent[start + 1 :]
        text = f"step {line['step']}/{self._job.steps}  loss {line['loss']:.4f}"
        spent_s = line["committed_at_s"] - first["committed_at_s"]
        if after and spent_s > 1:
            tokens = sum(step["tokens"] for step in after)
            left_s = (self._job.steps - line["step"]) * spent_s / len(after)
            text += f"  {tokens / spent_s:,.0f} tokens/s  ETA {_clock(left_s)}"
        workers = line["world_size"]
        return f"{text}  {workers} worker{'s' * (workers != 1)}  generation {line['generation']}"


def _clock(seconds: float) -> str:
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


# --------------------------------------------------------------------------------- demo


def _demo(job: Job, out: str) -> int:
    """The job with its scenario on a Ray cluster, then undisturbed, then the comparison."""
    began_s = time.monotonic()
    for folder in (out, f"{out}-undisturbed"):
        _start_afresh(folder)
    where = _where(job, None, job.elastic.max_workers, False)
    checked = _check(job, out, where, How())
    say(f"the scenario: {'; '.join(map(str, checked.faults.scenario.faults))}")
    code = _conclude(_run(job, out, where, checked, How()), out)
    if code != COMPLETED:
        return code
    say("")
    say("the same job undisturbed, on two plain processes")
    calm = _undisturbed(job)
    beside = f"{out}-undisturbed"
    where = _where(calm, None, None, True)
    checked = _check(calm, beside, where, How())
    code = _conclude(_run(calm, beside, where, checked, How()), beside)
    if code != COMPLETED:
        return code
    say("")
    verdicts = extensions.faults().compare_runs(Path(out), Path(beside), job, checked.samples)
    for verdict in verdicts:
        say(f"{'PASS' if verdict.passed else 'FAIL'}  {verdict.claim}: {verdict.found}")
    failures = sum(not verdict.passed for verdict in verdicts)
    say(f"{'FAIL' if failures else 'PASS'}  demo in {time.monotonic() - began_s:.0f} s")
    return FAILED if failures else COMPLETED


def _undisturbed(job: Job) -> Job:
    """The same training, without faults and checkpoints, at another number of workers."""
    values = job.model_dump()
    values["elastic"] |= {"min_workers": 2, "max_workers": 2}
    values["checkpoint"] |= {"every_steps": 0, "final": False}
    values["faults"] = {}
    return parse_job(values)


def _start_afresh(folder: str) -> None:
    """Removes an earlier demo's run folder, and nothing that is not one."""
    import shutil

    path = Path(folder)
    if (path / "job.yaml").is_file() and (path / "events.jsonl").is_file():
        shutil.rmtree(path)
