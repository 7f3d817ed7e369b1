"""A controller's process, of a run that its launcher has controllers for."""

from __future__ import annotations

import signal
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from types import FrameType

from elastic_ft.controller.controller import Controller
from elastic_ft.errors import ElasticError, UsageError
from elastic_ft.hosts.local.local_host import LocalHost
from elastic_ft.hosts.local.orders import LocalRun, Order, RunEnded
from elastic_ft.observe.run_folder import RunFolder

FAILED, BAD_USAGE = 1, 2  # exit codes of ``elastic-ft``
INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
SAME_S = 2.0  # within which signals are one request to stop


class StopRequests:
    """Those that come by signal. One that goes to a whole control group comes by several ways:
    to the controller itself, by its launcher, and by who waits at the terminal.
    """

    def __init__(self) -> None:
        self._controller: Controller | None = None
        self._early = 0  # while there is no controller yet
        self._heard_at_s = -SAME_S

    def listen(self) -> None:
        """Also to one that came since this process was forked."""
        for number in INTERRUPTS:
            signal.signal(number, self.hear)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)

    def hear(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if now_s - self._heard_at_s < SAME_S:
            return
        self._heard_at_s = now_s
        if self._controller is None:
            self._early += 1
        else:
            self._controller.stop("interrupted")

    def lead_to(self, controller: Controller) -> None:
        self._controller = controller
        for _ in range(self._early):
            controller.stop("interrupted")


def run_controller(order: Order, folder: Path, is_first: bool) -> None:
    """Blocks until the job has ended, or is another's. Raises what no successor is to be spared.

    Args:
        folder: the launcher's.
        is_first: none was there before it. Others go on from what there is.
    """
    run = order.run
    assert run is not None
    if not is_first:
        run = going_on(run)
    requests = StopRequests()
    requests.listen()
    host = LocalHost(run.nodes, launched=order)
    outcome = RunEnded(0)
    try:
        controller = Controller(
            run.job,
            host,
            RunFolder(run.out),
            run.checkpoint_url,
            faults=run.faults,
            accept_changes=run.accept_changes,
            key=run.key,
        )
        controller.on_step = lambda line: host.trained()
        requests.lead_to(controller)
        controller.run()
    except ElasticError as error:  # the next one would end the same way
        code = BAD_USAGE if isinstance(error, UsageError) else FAILED
        outcome = RunEnded(code, " ".join(str(error).split()))
    except Exception:
        traceback.print_exc()
        sys.exit(FAILED)
    host.depart(outcome)


def going_on(run: LocalRun) -> LocalRun:
    """What only the job's start was asked for is done."""
    checkpoint = run.job.checkpoint.model_copy(update={"from_scratch": False})
    return replace(run, job=run.job.model_copy(update={"checkpoint": checkpoint}))
