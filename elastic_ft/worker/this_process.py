"""The worker of this process: for the hosts that start it, and for a train loop that runs in it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from elastic_ft.core.assignment import Member
from elastic_ft.transport.tls import JobKey
from elastic_ft.worker.line import CUT_OFF, ControllerLost
from elastic_ft.worker.step import Step
from elastic_ft.worker.user_script import Released, run_script
from elastic_ft.worker.worker import Worker

_current: Worker | None = None


def run_worker(
    address: tuple[str, int],
    key: JobKey,
    member: Member,
    *,
    train_loop: Callable[[], Any] | None = None,
    on_generation: Callable[[Any], None] | None = None,
    on_called: Callable[[], None] | None = None,
) -> None:
    """Takes part in a job until released or until the controller is gone. Blocks.

    Args:
        address, key: of the controller.
        member: who this is and where.
        train_loop: user code; it iterates over ``elastic_ft.train()``. None: nothing but that.
        on_generation: called in the training thread with the host's extra, before forming.
        on_called: called once the controller has answered.
    """
    global _current
    worker = Worker(address, key, member, on_generation)
    _current = worker
    try:
        if on_called is not None:
            on_called()
        script = worker.job.loop.script if worker.job.loop is not None else None
        if train_loop is None and script is not None:
            train_loop = partial(run_script, worker.job.loop)
        if train_loop is None:
            worker.run()
        else:
            with contextlib.suppress(Released):
                train_loop()
            worker.check_iterated()
            worker.finish()
    except ControllerLost:
        if worker.cut_off:  # a host would keep the process, which nobody can reach to end it (I1)
            os._exit(CUT_OFF)
        return
    except GeneratorExit:
        raise
    except Exception as error:
        worker.raised(error)
        raise
    finally:
        _current = None
        worker.close()


def train() -> Iterator[Step]:
    """Yields each step of the job that this worker takes part in; elasticity happens inside.

    For use in a train loop given to ``ElasticTrainer``. Raises RuntimeError elsewhere.
    """
    return steps_that()


def steps_that(is_seen: Callable[[Step], bool] | None = None) -> Iterator[Step]:
    """The same, of some steps: see ``Worker.steps``."""
    if _current is None:
        raise RuntimeError("elastic_ft.train() works inside a train loop run by ElasticTrainer")
    return _current.steps(is_seen)


def current_worker() -> Worker | None:
    """This process's, while its train loop runs."""
    return _current


def current_step() -> int:
    """The step that this process's worker is at, 0 if there is none."""
    return _current.step if _current is not None else 0


def member_here(worker: str, node: str, host: str) -> Member:
    return Member(worker, node, host, os.getpid())
