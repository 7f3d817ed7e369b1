"""What a controller is made of, and how its parts are wired."""

from __future__ import annotations

import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from elastic_ft.config import Job
from elastic_ft.controller.connections import Connections
from elastic_ft.controller.continuity import Continuity
from elastic_ft.controller.diagnosis import Inquiries
from elastic_ft.controller.durability import Durability
from elastic_ft.controller.executor import Executor
from elastic_ft.controller.hearing import Hearing, Said
from elastic_ft.controller.heir import Heir
from elastic_ft.controller.host import Host
from elastic_ft.controller.inbox import Inbox
from elastic_ft.controller.job_policy import policy_of
from elastic_ft.controller.kills import Kills
from elastic_ft.controller.observer import Observer
from elastic_ft.controller.publisher import Publisher
from elastic_ft.controller.takeover import Takeover
from elastic_ft.controller.timers import Timers
from elastic_ft.controller.watchdog import Watchdog
from elastic_ft.core import commands as cmd
from elastic_ft.core import events as ev
from elastic_ft.core.hangs import Progress
from elastic_ft.core.state import State
from elastic_ft.faults import PointFault
from elastic_ft.observe.alive import Alive
from elastic_ft.observe.report import ReportAtEnd
from elastic_ft.observe.run_folder import RunFolder
from elastic_ft.transport.tls import JobKey


class ControllerParts(ABC):
    """Of a ``Controller``, which says what they do together.

    Args:
        job: the job.
        host: starts and kills workers.
        run: the run folder; an earlier run in it is continued.
        checkpoint_url: where checkpoints are.
        address: this machine's, as workers reach it.
        faults: to inject at named points.
        accept_changes: go on from a checkpoint that was trained under other terms, or another name.
        key: the job's, the same for each of its controllers, which can adopt each other's workers
            then. None: a new one, and nobody does.
    """

    def __init__(
        self,
        job: Job,
        host: Host,
        run: RunFolder,
        checkpoint_url: str,
        *,
        address: str = "127.0.0.1",
        faults: Sequence[PointFault] = (),
        accept_changes: bool = False,
        key: JobKey | None = None,
    ) -> None:
        self.job, self.host, self.run_folder = job, host, run
        self.policy = policy_of(job)
        self.state = State()
        self.run_id = uuid.uuid4().hex[:12]
        self.checkpoint_url = checkpoint_url
        network = job.network
        self._connections = Connections(address, network.port_range, tls=network.tls, key=key)
        self._faults = tuple(faults)
        self._fired: set[int] = set()
        self._inbox = Inbox()
        self._timers = Timers()
        self._observer = Observer(job, self.policy, run)
        self._publisher = Publisher(
            job, self.run_id, checkpoint_url, self.post, self._restoring_from, run.make_durable
        )
        self._is_adoptable = self._observer.is_adoptable = key is not None
        self._continuity = Continuity(job, accept_changes, self._observer.journal)
        self._takeover = Takeover(
            job, self.run_id, run, self._publisher, self._continuity, self._inbox, self._observer
        )
        self._alive = Alive(run.path, self._is_adoptable, host.successor_within_s)
        self._report = ReportAtEnd(run.path, job, run.check_owner)
        self._in_charge = threading.Event()
        self._ended_at_s = time.time()
        self._turned_at_s = time.monotonic()
        self._stop_reason = ""  # of who was the first to ask
        self._closed = self._is_superseded = False
        self._make_ways()
        self._make_watchers()

    def _make_ways(self) -> None:
        """The parts through which an event comes, and what follows from it goes out."""
        host, run, elastic = self.host, self.run_folder, self.job.elastic
        self._progress = Progress(elastic.hang_timeout_s, elastic.heartbeat_timeout_s)
        self._kills = Kills(
            host, self._publisher.confirm, elastic.heartbeat_timeout_s, is_remote=run.is_remote
        )
        self._unexplained = set[str]()  # workers, whose connection ended
        self._inquiries = Inquiries(
            self._connections.send, self._kills.worker, self._observer.journal
        )
        self._executor = Executor(
            host,
            self._connections.send,
            self._observer,
            run,
            self._publisher,
            self._continuity,
            self._inquiries,
            self._timers,
            self._fired,
        )
        self._hearing = Hearing(
            self._inbox,
            self._step,
            lambda: self.state,
            self._observer,
            self._progress,
            self._inquiries,
            self._connections.hang_up,
            self._faults,
            self._fired,
        )

    def _make_watchers(self) -> None:
        """Of who is silent, of the controller before this one, and of what is durable."""
        self._watchdog = Watchdog(
            lambda: self.state,
            self._kills,
            self._connections,
            self._observer,
            self.run_folder,
            self._publisher,
            self._inquiries,
            self._progress,
            self.job.elastic.heartbeat_timeout_s,
            lambda places: self.host.use_places(places),
        )
        self._heir = Heir(
            self.job,
            self.host,
            self.run_folder,
            self._takeover,
            self._connections,
            self._observer,
            self._executor,
            self._hearing,
            self._timers,
            self._watchdog,
            self._continuity,
        )
        self._durability = Durability(
            self.run_folder, self._hearing.heard, self._connections.send, self.post
        )

    @property
    def _finish(self) -> cmd.FinishJob | None:
        """How the job ends, once that is decided."""
        return self._takeover.finish or self._executor.finish

    def _restoring_from(self) -> tuple[str, ...]:
        """The checkpoint that workers may be reading."""
        state = self.state
        if state.phase == "running" or state.assignment is None:
            return ()
        return (state.assignment.source.url,)

    def post(self, event: Any) -> None:
        """Puts an event into the inbox; from any thread."""
        self._inbox.put(event)

    def _handle(self, message: Any) -> None:
        self._hearing.handle(message)

    @abstractmethod
    def _step(self, event: ev.Event, said: Said | None = None) -> None:
        """``said``: how it came, if over the wire."""
