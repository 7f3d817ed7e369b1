"""A trial of Ray Tune's, in whose process an elastic job was started: the job ends with it.

A scheduler that ends a trial tells its session so and lets its actor go, whose process ends at any
moment then, as it does where its node dies. Workers and controller are nobody's children: so the
controller looks for the trial, and ends the job as ``elastic-ft stop`` does, with a checkpoint.
It listens for it, too: a process that is stopped is not gone, and takes no reports.
"""

from __future__ import annotations

import logging
import pickletools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util.queue import Full, Queue

from elastic_ft.errors import ConfigError, JobFailed
from elastic_ft.hosts.ray.ray_private import (
    actor_is_gone,
    reporting_by,
    reports_waiting,
    sweep_as_written,
    tune_session,
)

log = logging.getLogger(__name__)
LOOK_S = 0.5  # between two looks for the trial, and at what it is told
TOLD_S = 20.0  # a controller that comes back is, by then
PUT_S = 1.0  # for which a report waits between them
TAKEN_S = 600.0  # within which Tune takes a report, of a trial that is not over
SAID_S = 5.0  # between two words of a trial that it is there
SILENT_LOOKS = 240  # at a trial that says nothing: two minutes
TRIAL_OVER = "Ray Tune has ended its trial, or it is gone"
TRIAL_SILENT = "the process of its trial of Ray Tune's was not heard of: it is stopped, or cut off"
PAUSING = {  # modules of ``ray.tune.schedulers``, and what is in them; subclasses first
    "pb2": "PB2",
    "pbt": "PopulationBasedTraining",
    "hb_bohb": "HyperBandForBOHB",
    "hyperband": "HyperBandScheduler",
    "resource_changing_scheduler": "ResourceChangingScheduler",
}


class TuneTrial:
    """Args:
    actor: id of the trial's actor, in hex.
    stopped: set, in that actor's process, where Tune ends the trial and the process may go on.
    """

    def __init__(self, actor: str, stopped: threading.Event | None = None) -> None:
        self.actor, self._stopped = actor, stopped
        self._over, self._unheard = threading.Event(), 0

    def __reduce__(self) -> Any:
        return TuneTrial, (self.actor,)

    def wait_for(self, answer: Any, controller: Any) -> None:
        """In the trial's process: returns once ``answer`` is there. Raises SystemExit where Tune
        ends the trial, as a report of the trial's own would; ``controller`` ends its job then."""
        said_s = 0.0
        while not ray.wait([answer], timeout=LOOK_S)[0]:
            if self._is_stopped():
                _end(controller)
                sys.exit(0)
            if time.monotonic() > said_s + SAID_S:
                said_s = time.monotonic()
                controller.hear_trial.remote(is_over=False)  # nobody waits for its answer

    def wait_for_reports(self) -> None:
        """In the trial's process, after its job: returns once Tune has taken the last report of
        ``TrialReports``. A function that returns ends its trial, whatever is still in that queue.
        Tune that does not take it is left after TAKEN_S, with a line of the log. Raises SystemExit
        where Tune ends the trial."""
        queue, until_s = reports_waiting(), time.monotonic() + TAKEN_S
        while queue is not None and not _is_empty(queue):
            if time.monotonic() > until_s:
                log.error(
                    "Ray Tune has not taken the last report of this trial within %g s: its job has "
                    "ended, and the trial ends without that report",
                    TAKEN_S,
                )
                return
            if self._is_stopped(LOOK_S):
                sys.exit(0)
        # Between the queue and the session it is in the hands of another thread of this process.
        if queue is not None and self._is_stopped(LOOK_S):
            sys.exit(0)

    def _is_stopped(self, within_s: float = 0.0) -> bool:
        return self._stopped is not None and self._stopped.wait(within_s)

    @property
    def is_over(self) -> bool:
        """In the controller's process: nobody takes reports any more."""
        return self._over.is_set()

    def end(self) -> None:
        self._over.set()

    def hear(self, is_over: bool) -> None:
        """In the controller's process: a word of the trial's own."""
        self._unheard = 0
        if is_over:
            self.end()

    def watch(self, on_end: Callable[[str], object]) -> None:
        """Calls ``on_end`` with the reason once it is over, in a thread of its own."""
        threading.Thread(target=self._watch, args=(on_end,), name="trial", daemon=True).start()

    def _watch(self, on_end: Callable[[str], object]) -> None:
        """A stopped process is not gone: looks are counted, and not seconds, in which this one may
        have been stopped with it."""
        while not self._over.wait(LOOK_S):
            try:
                if actor_is_gone(self.actor):
                    self._over.set()
                    break
            except Exception as error:  # the head comes back, or the job ends without it
                log.warning("no news of the trial: %s: %s", type(error).__name__, error)
                continue
            self._unheard += 1
            if self._unheard > SILENT_LOOKS:
                self._over.set()
                return on_end(TRIAL_SILENT)
        on_end(TRIAL_OVER)


def _end(controller: Any) -> None:
    """Of a trial whose process goes on it would not see that it is over: one that is just coming
    back is told again."""
    until_s = time.monotonic() + TOLD_S
    while time.monotonic() < until_s:
        try:
            return ray.get(controller.hear_trial.remote(is_over=True), timeout=PUT_S)
        except (ActorUnavailableError, GetTimeoutError):
            time.sleep(LOOK_S)
        except RayError:  # it has ended
            return None
    log.warning(
        "the job's controller has not answered for %g s: it ends once it misses the trial", TOLD_S
    )


def _is_empty(queue: Queue) -> bool:
    try:
        return bool(ray.get(queue.actor.empty.remote(), timeout=PUT_S))
    except (ActorUnavailableError, GetTimeoutError):
        return False
    except RayActorError:  # nobody takes what was in it
        return True


class TrialReports:
    """In the place of the queue of a ``TuneReportCallback``, which holds one report: the next one
    waits for the trial to take it, and none waits for a trial that is over."""

    def __init__(self, queue: Queue, trial: TuneTrial) -> None:
        self._queue, self._trial = queue, trial

    def put(self, item: Any) -> None:
        """Returns when ``item`` is in the queue, or nobody is to take it. Raises JobFailed where a
        trial that is not over takes none for TAKEN_S."""
        until_s = time.monotonic() + TAKEN_S
        while not self._trial.is_over:
            try:
                return self._queue.put(item, timeout=PUT_S)
            except (Full, ActorUnavailableError) as error:
                if time.monotonic() > until_s:
                    why = f"Ray Tune has taken no report for {TAKEN_S:g} s: {type(error).__name__}"
                    raise JobFailed(why) from error
            except RayActorError:  # the queue is the trial's own, and goes with it
                self._trial.end()


def trial_here() -> TuneTrial | None:
    """The one whose function this process runs. Raises ConfigError where its sweep pauses trials,
    or gives one's state to another."""
    if (session := tune_session()) is None:
        return None
    if (scheduler := pausing_scheduler(sweep_as_written())) is not None:
        raise ConfigError(
            f"Ray Tune's {scheduler} pauses trials and gives one's checkpoint to another, which a "
            "job's own checkpoints know nothing of: expected a scheduler that only ends trials, "
            "as ASHAScheduler and MedianStoppingRule do, or none"
        )
    actor = ray.get_runtime_context().get_actor_id()
    return TuneTrial(actor, session.stop_event) if actor is not None else None


def pausing_scheduler(sweep: bytes) -> str | None:
    """The class of ``PAUSING`` that a pickled sweep names. Nothing of it is unpickled."""
    opcodes = pickletools.genops(sweep) if sweep else ()
    named = {value for _, value, _ in opcodes if isinstance(value, str)}
    modules = {text.split(" ")[0] for text in named}  # older pickles say class and module in one
    found = (kind for name, kind in PAUSING.items() if f"ray.tune.schedulers.{name}" in modules)
    return next(found, None)


def with_patience(trial: TuneTrial | None, callbacks: Sequence[Any] | None) -> list[Any] | None:
    """``callbacks``, of which those that report to ``trial`` do so by ``TrialReports``."""
    if trial is None or callbacks is None:
        return list(callbacks) if callbacks is not None else None
    return [reporting_by(callback, lambda q: TrialReports(q, trial)) for callback in callbacks]
