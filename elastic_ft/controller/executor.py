"""The executor: does what the core's commands ask for, a function each.

Nothing here waits: what takes long happens elsewhere (the host's threads, the publisher's), and its
outcome comes back as an event.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any

from elastic_ft.controller.continuity import Continuity, most_common
from elastic_ft.controller.diagnosis import Inquiries
from elastic_ft.controller.host import Host
from elastic_ft.controller.observer import Observer
from elastic_ft.controller.publisher import Publisher
from elastic_ft.controller.timers import Timers
from elastic_ft.core import commands as cmd
from elastic_ft.core.assignment import KEEPER, NodeId, WorkerId
from elastic_ft.core.state import State
from elastic_ft.observe.run_folder import RunFolder
from elastic_ft.transport.control import forms, to_each


@dataclass(slots=True)
class Executor:
    """Attributes:
    send: to a worker or keeper. One that can't be reached is lost; its connection's end says so.
    fired: indices of the faults that have fired.
    data_read: by workers that are ready: what tells their data from other data.
    avoided: nodes, and until when (unix time).
    finish: how the job ends, once that is decided.
    finished_at_s: unix time of the decision.
    """

    host: Host
    send: Callable[[WorkerId, Any], bool]
    observer: Observer
    run_folder: RunFolder
    publisher: Publisher
    continuity: Continuity
    inquiries: Inquiries
    timers: Timers
    fired: Set[int]
    data_read: dict[WorkerId, dict[str, Any]] = field(default_factory=dict)
    avoided: dict[NodeId, float] = field(default_factory=dict)
    finish: cmd.FinishJob | None = None
    finished_at_s: float = 0.0

    def execute(self, command: cmd.Command, state: State) -> None:
        """``state``: after the event that ``command`` came of."""
        EXECUTORS[type(command)](self, command, state)

    def avoid_node(self, node: NodeId, for_s: float) -> None:
        self.avoided[node] = time.time() + for_s
        self.host.avoid_node(node, for_s)

    def _to_worker(
        self,
        command: cmd.ReleaseWorker | cmd.Bench | cmd.UseKeeper | cmd.TakeCheckpoint,
        state: State,
    ) -> None:
        self.send(command.worker, command)

    def _pause(self, command: cmd.PauseWorkers, state: State) -> None:
        fields = {"abort": command.abort}
        self.observer.decided("pausing", command.generation, command.reason, fields)
        self._to_workers(command, state)

    def _to_workers(self, command: cmd.PauseWorkers | cmd.StopAtBoundary, state: State) -> None:
        message = to_each(command)
        for worker in command.workers:
            self.send(worker, message)

    def _form(self, command: cmd.FormGeneration, state: State) -> None:
        assignment = command.assignment
        read = [self.data_read.get(member.worker, {}) for member in assignment.members]
        self.continuity.opened(most_common(read), assignment.generation - 1)
        extras = self.host.prepare(assignment)
        refs = state.checkpoints
        checkpointed = refs[0].step if refs else 0
        for worker, form in forms(assignment, extras, frozenset(self.fired), checkpointed):
            self.send(worker, form)

    def _journal(self, command: cmd.Journal, state: State) -> None:
        if command.event == cmd.FINISHED:
            return  # while the job ends more may be found out (``ControllerEnding``)
        self.observer.decided(command.event, command.generation, command.reason, command.fields)

    def _commit_checkpoint(self, command: cmd.CommitCheckpoint, state: State) -> None:
        layout = str(state.assignment.layout) if state.assignment else ""
        self.publisher.commit(command, layout, self.continuity.terms)

    def _finish_job(self, command: cmd.FinishJob, state: State) -> None:
        self.finish, self.finished_at_s = command, time.time()


EXECUTORS: dict[type, Callable[[Executor, Any, State], object]] = {
    cmd.WantWorkers: lambda me, command, _: me.host.want_workers(command.total),
    cmd.AvoidNode: lambda me, command, _: me.avoid_node(command.node, command.for_s),
    cmd.KillWorker: lambda me, command, _: me.inquiries.kill(command.worker),
    cmd.ReleaseWorker: Executor._to_worker,
    cmd.Bench: Executor._to_worker,
    cmd.UseKeeper: Executor._to_worker,
    cmd.TakeCheckpoint: Executor._to_worker,
    cmd.DropKept: lambda me, command, _: me.send(KEEPER + command.node, command),
    cmd.PauseWorkers: Executor._pause,
    cmd.StopAtBoundary: Executor._to_workers,
    cmd.FormGeneration: Executor._form,
    cmd.RecordStep: lambda me, command, _: me.observer.step(command),
    cmd.RollBack: lambda me, command, _: me.run_folder.truncate(command.step),
    cmd.Journal: Executor._journal,
    cmd.CommitCheckpoint: Executor._commit_checkpoint,
    cmd.AbandonCheckpoint: lambda me, command, _: me.publisher.abandon(command),
    cmd.StartTimer: lambda me, command, _: me.timers.start(command),
    cmd.FinishJob: Executor._finish_job,
}
