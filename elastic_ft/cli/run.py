"""A job, run: where, on plain processes or Ray, and how it ended."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elastic_ft.cli import extensions
from elastic_ft.cli.progress import ProgressDisplay, say
from elastic_ft.cli.terminal import Ending, interrupt_on_sigterm, interrupts, result_of, stay
from elastic_ft.cli.where import Where
from elastic_ft.config import Job
from elastic_ft.errors import ConfigError, ElasticError, StoreFailed
from elastic_ft.observe.outcome import complete
from elastic_ft.observe.run_reader import RunReader
from elastic_ft.storage.mounts import plain_path

if TYPE_CHECKING:
    from elastic_ft.cli.check_model import ModelAndData
    from elastic_ft.cli.preflight import Checked
    from elastic_ft.hosts.ray.trainer import ElasticTrainer

COMPLETED, FAILED, BAD_USAGE, INTERRUPTED = 0, 1, 2, 130
NEWEST_WITHIN_S = 2.0  # of a store, while the job stops


def complain(message: object, code: int) -> int:
    print(f"elastic-ft: {' '.join(str(message).split())}", file=sys.stderr)
    return code


# ------------------------------------------------------------------------------ running


@dataclass(frozen=True, slots=True)
class How:
    """What a start was asked for beside the job."""

    chaos: str | None = None  # a scenario
    resumed: bool = False
    accept_changes: bool = False
    foreground: bool = False  # the controller of plain processes is this very process


def begun_anew(job: Job, from_scratch: bool) -> Job:
    """With ``--from-scratch`` the job may begin from the seed although steps are recorded."""
    if not from_scratch:
        return job
    checkpoint = job.checkpoint.model_copy(update={"from_scratch": True})
    return job.model_copy(update={"checkpoint": checkpoint})


def train_job(job: Job, out: str, where: Where, how: How) -> int:
    """Checks, runs, says how it ended. Raises UsageError while nothing has been started."""
    from elastic_ft.observe.handover import NEXT_S, await_handover

    if _is_complete(job, out):
        return COMPLETED
    with contextlib.ExitStack() as unless_run:
        checked = check_start(job, out, where, how, unless_run)
        await_handover(out, say, next_s=NEXT_S)
        if _is_complete(job, out):  # by the one that was asked
            return COMPLETED
        return conclude(run(job, out, where, checked, how, unless_run), out)


def _is_complete(job: Job, out: str) -> bool:
    ended = complete(RunReader(out).result(), job.steps)
    if not ended or job.checkpoint.from_scratch:
        return False
    say(f"{job.name} {ended}: nothing was started; run folder: {out}")
    return True


def check_start(
    job: Job, out: str, where: Where, how: How, unless_run: contextlib.ExitStack
) -> Checked:
    """``unless_run``: takes what ends the processes that are started early."""
    from elastic_ft.cli.check_model import check_model_and_data
    from elastic_ft.cli.preflight import check_job

    def meanwhile() -> None:
        if where.processes:
            _start_fork_server(unless_run)

    made = _made_in_warm_process if where.processes else check_model_and_data
    checked = check_job(job, out, where, how.chaos, how.accept_changes, meanwhile, made)
    say_checked(job, checked)
    return checked


def say_checked(job: Job, checked: Checked) -> None:
    size = "" if job.loop is not None else f"{checked.parameters:,} parameters; "
    say(f"{job.name}: {size}{checked.data}")
    for warning in checked.warnings:
        say(f"warning: {warning}")


def _start_fork_server(unless_run: contextlib.ExitStack) -> None:
    """For workers: it imports torch, once for them and for the checks."""
    from elastic_ft.hosts.local.warm import start_warm, stop_warm

    if start_warm():
        unless_run.callback(stop_warm)


def _made_in_warm_process(job: Job) -> ModelAndData:
    from elastic_ft.cli import check_model
    from elastic_ft.hosts.local.forked_call import call_forked

    function = check_model.check_model_and_data
    if "torch" in sys.modules:  # what there is to be saved
        return function(job)
    found = call_forked(f"{function.__module__}:{function.__name__}", job)
    return function(job) if found is None else found


@dataclass(slots=True)
class EndOfRun:
    """How a run ended. ``result``: what is in result.json; {} if it did not come so far.

    ``left``: it has not, it goes on without this process.
    """

    result: dict[str, Any]
    error: str = ""
    unfired: list[str] = field(default_factory=list)
    left: bool = False


def run(
    job: Job, out: str, where: Where, checked: Checked, how: How, unless_run: contextlib.ExitStack
) -> EndOfRun:
    url = checked.checkpoint_url
    with (
        extensions.disturbed(checked.faults, out, url, how.resumed) as by,
        ProgressDisplay(job, out),
    ):
        _forget_result(out)
        unless_run.pop_all()
        if where.processes and (how.foreground or by.in_foreground):
            return _run_in_foreground(job, out, where, url, by, how)
        if where.processes:
            return _run_on_processes(job, out, where, url, by, how)
        return _run_on_ray(job, out, where, checked, by, how)


def conclude(ended: EndOfRun, out: str) -> int:
    if ended.left:
        return COMPLETED
    result = ended.result
    status, reason = result.get("status", "failed"), result.get("reason") or ended.error
    if _is_handed_over(result, reason, out):
        say(f"the job was handed over to another start of it: elastic-ft attach {out} shows it")
        return COMPLETED
    if status == "stopped":
        say(f"stopped: {reason}; run folder: {out}")
        return INTERRUPTED
    if status != "completed":
        return complain(f"{status}: {reason}; run folder: {out}", FAILED)
    loss, goodput = result["final_loss"], result["goodput"]
    last = f"loss {loss:.4f}, " if loss is not None else ""
    say(f"completed: {result['steps']} steps, {last}goodput {goodput:.0%}; run folder: {out}")
    if ended.unfired:
        return complain(f"faults that never fired: {'; '.join(ended.unfired)}", FAILED)
    return COMPLETED


def _is_handed_over(result: dict[str, Any], reason: str, out: str) -> bool:
    from elastic_ft.observe import handover
    from elastic_ft.storage import owners
    from elastic_ft.storage.store import open_store

    if result or reason:
        return handover.is_given(result | {"reason": reason})
    owner, ended = owners.newest(open_store(out))  # it may have removed our result.json
    return owner is not None and not ended


def _run_on_processes(job: Job, out: str, where: Where, url: str, by: Any, how: How) -> EndOfRun:
    """Processes that nobody owns are started, and looked at until they have done the job."""
    from elastic_ft.hosts.local.detached import DetachedRun

    nodes = {f"n{i}": where.cpus_per_node for i in range(where.nodes)}
    detached = DetachedRun(job, out, url, nodes, by.inside, how.accept_changes)
    with by.injected(detached), interrupts() as came:  # from here on it goes on without us
        detached.start()
        say(f"what its processes print is in {detached.log}")
        ended = stay(detached, out, came, stops=True)
    if ended is None:
        return EndOfRun({}, left=True)
    result = result_of(ended, out)
    return EndOfRun(result, unfired=by.unfired(result))


def _run_in_foreground(job: Job, out: str, where: Where, url: str, by: Any, how: How) -> EndOfRun:
    """As ``hosts.local.run_local``, with a controller that signals can stop."""
    from elastic_ft.controller.controller import Controller
    from elastic_ft.hosts.interrupts import stopping
    from elastic_ft.hosts.local import LocalHost
    from elastic_ft.observe.run_folder import RunFolder
    from elastic_ft.transport.title import set_title

    set_title("ef-controller")
    slots = where.cpus_per_node
    host = LocalHost({f"n{i}": slots for i in range(where.nodes)})
    with by.injected(host):
        folder = RunFolder(out)
        controller = Controller(
            job, host, folder, url, faults=by.inside, accept_changes=how.accept_changes
        )
        with stopping(lambda: controller.stop("interrupted")):
            result = controller.run()
    return EndOfRun(result, unfired=by.unfired(result))


def _run_on_ray(job: Job, out: str, where: Where, checked: Checked, by: Any, how: How) -> EndOfRun:
    with contextlib.ExitStack() as stack:
        cluster = None
        if where.address is not None:
            stack.enter_context(connected(where.address))
        else:
            say(f"starting a Ray cluster of {where.nodes} nodes on this machine")
            cluster = stack.enter_context(by.local_cluster(where.nodes, where.cpus_per_node))
            cluster.connect()
        _quieten_ray()
        stack.enter_context(by.injected(cluster))
        trainer = _trainer(job, out, checked, how)
        if cluster is None:
            fitting = Fitting(trainer, checked.checkpoint_url)
            with interrupts() as came:
                ended = stay(fitting, out, came, stops=True)
            if ended is None:
                return EndOfRun({}, left=True)
            error = ended.line
        else:  # it ends with this process
            # Ray has a handler of its own for SIGTERM; the trainer's, for SIGINT, stops cleanly.
            interrupt_on_sigterm()
            error = _fit(trainer)
        result = RunReader(out).result()
        return EndOfRun(result, error, by.unfired(result))


class Fitting:
    """``fit`` in a thread: the job is the cluster's, and goes on without it."""

    def __init__(self, trainer: ElasticTrainer, checkpoint_url: str) -> None:
        self._trainer, self._error = trainer, ""
        self._checkpoint_url, self._is_asked = checkpoint_url, False
        self._raised: BaseException | None = None
        self._thread = threading.Thread(target=self._fit, name="fit", daemon=True)
        self._thread.start()

    def _fit(self) -> None:
        try:
            self._error = _fit(self._trainer)
        except BaseException as error:
            self._raised = error

    def poll(self, timeout_s: float) -> Ending | None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return None
        if self._raised is not None:
            raise self._raised
        return Ending(int(bool(self._error)), self._error)

    def stop(self) -> None:
        """Says what there is by now: ``ray job stop`` leaves 3 s before it kills this process."""
        self._trainer.stop("interrupted")
        if not self._is_asked:
            self._is_asked = True
            say(f"asked to stop with a checkpoint; {_newest_checkpoint(self._checkpoint_url)}")


def _newest_checkpoint(url: str) -> str:
    from elastic_ft.storage.checkpoints import committed
    from elastic_ft.storage.store import open_store

    try:
        refs = committed(open_store(url, deadline_s=NEWEST_WITHIN_S))
    except StoreFailed as error:
        return f"which is the newest till then is not known: {error}"
    if not refs:
        return f"till then there is none under {url}"
    return (
        f"till then the newest checkpoint is of step {max(ref.step for ref in refs)}, under {url}"
    )


def _trainer(job: Job, out: str, checked: Checked, how: How) -> ElasticTrainer:
    from ray.train import RunConfig

    from elastic_ft.hosts.ray.trainer import ElasticTrainer

    folder = plain_path(out)
    url = out.rstrip("/") if folder is None else str(folder)
    parent, _, name = url.rpartition("/")
    return ElasticTrainer(
        job,
        run_config=RunConfig(name=name, storage_path=parent or "/"),
        faults=checked.faults.inside if checked.faults else (),
        accept_changes=how.accept_changes,
    )


def _fit(trainer: ElasticTrainer) -> str:
    """Returns the error, one line; empty if there is none. result.json has the details."""
    from ray.train import TrainingFailedError

    try:
        trainer.fit()
    except (TrainingFailedError, ElasticError) as error:
        return " ".join(str(error).split())
    return ""


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """Raises ConfigError if there is no cluster at the address."""
    import ray

    from elastic_ft.cli.preflight import check_address

    check_address(address)
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


def _forget_result(out: str) -> None:
    """An earlier run's result must not be taken for this one's."""
    import fsspec

    fs, path = fsspec.core.url_to_fs(f"{out.rstrip('/')}/result.json", use_listings_cache=False)
    with contextlib.suppress(OSError):
        fs.rm(path)
