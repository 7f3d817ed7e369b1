"""What others see of a job: its run folder's lines, its metrics, where its time went.

It is told everything and decides nothing. All of it happens in the controller's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from elastic_ft.config import Job
from elastic_ft.core import commands as cmd
from elastic_ft.core import events as ev
from elastic_ft.core.policy import Policy
from elastic_ft.core.records import Recovery
from elastic_ft.core.state import State
from elastic_ft.core.typed import fields_of
from elastic_ft.observe import snapshots
from elastic_ft.observe.accounts import Accounts
from elastic_ft.observe.metrics import Metrics
from elastic_ft.observe.run_folder import RunFolder
from elastic_ft.observe.startup import Startup
from elastic_ft.transport.control import NodeHealth

log = logging.getLogger(__name__)


class Numbering(Protocol):
    """What a sender has numbered: ``hearing.Said``."""

    @property
    def sender(self) -> str: ...
    @property
    def number(self) -> int: ...


class Observer:
    """Writes down what happens to a job.

    Attributes:
        started_at_s: unix time of this start of a controller.
        last_step: the newest line of steps.jsonl; {} if there is none.
        on_step: called with each such line as it is written.
    """

    def __init__(self, job: Job, policy: Policy, run_folder: RunFolder) -> None:
        elastic = job.elastic
        self._batch = job.batch.global_batch_size
        self._folder = run_folder
        self.started_at_s = time.time()
        self.metrics = Metrics(job.name, policy)
        self._accounts = Accounts(self.started_at_s, elastic.workers_per_node, elastic.max_workers)
        self._startup = Startup(self.started_at_s)
        self._recoveries: dict[int, Recovery] = {}  # by generation; the core keeps the last ones
        self._unshown = 0  # events that the metrics have not been told of
        self.last_step: dict[str, Any] = {}
        self.on_step: Callable[[dict[str, Any]], None] | None = None
        self.is_adoptable = False  # the inbox has all that the next controller needs

    # ------------------------------------------------------------------- each event

    def snapshot(
        self, now_s: float, state: State, policy: Policy, beside: Callable[[], dict[str, Any]]
    ) -> None:
        """Before ``record``, now and then: what came before need not be told again."""
        is_full = self._folder.inbox_is_full
        if not is_full and not (self.is_adoptable and self._folder.snapshot_is_due):
            return
        write = self._folder.begin_inbox if is_full else self._folder.snapshot
        found = beside() if self.is_adoptable else None
        write(now_s, self._policy_line(policy), snapshots.as_plain_values(state), found)

    def record(
        self, event: ev.Event, now_s: float, state: State, said: Numbering | None = None
    ) -> None:
        """First: what the core is about to be told, so that it can be told again
        (``observe.replay``).

        Steps come by the thousand: without their metrics, which decide nothing. Those that are a
        step's, told by the first of its workers, stay where its line may have to be made up.
        """
        self._unshown += 1
        line = {"type": type(event).__name__, "told_at_s": now_s, **fields_of(event)}
        if not (self.is_adoptable and isinstance(event, ev.StepApplied) and is_first(event, state)):
            line.pop("metrics", None)
        self._folder.record_inbox(line | self._numbered(said))

    def _numbered(self, said: Numbering | None) -> dict[str, Any]:
        if said is None or not said.number or not self.is_adoptable:
            return {}
        return {"from": said.sender, "n": said.number}

    def decides(self, now_s: float, event: ev.Event, state: State) -> None:
        """Before the commands that follow: one of them may write the job's last line."""
        if self._startup.on(now_s, event, state):
            self.journal("startup", state.generation, self._startup.reason, self._startup.parts)

    def on(
        self,
        now_s: float,
        event: ev.Event,
        commands: Sequence[cmd.Command],
        before: State,
        state: State,
    ) -> None:
        """Last: ``event`` has made ``state`` of ``before``, and ``commands`` are under way."""
        if state.recoveries is not before.recoveries:
            self._recoveries |= {found.generation: found for found in state.recoveries}
        self._accounts.on(now_s, event, commands, state)
        if is_formed(before, state) and state.assignment is not None:
            self.metrics.formed(state.assignment)
        if isinstance(event, ev.StepApplied):
            self.metrics.rank(event, state.ranks.get(event.worker))
        elif not isinstance(event, ev.StepHeld):
            self.metrics.nodes(self._accounts.nodes)
        if isinstance(event, ev.KeeperLost):
            self.metrics.forget_node(event.node)

    def health(self, message: NodeHealth) -> None:
        self.metrics.node(message.node, asdict(message))

    # -------------------------------------------------------------------- the lines

    def begin(self, policy: Policy, beside: dict[str, Any]) -> None:
        """The core's own journal begins with the policy that it follows."""
        line = self._policy_line(policy)
        self._folder.record_inbox(line | ({"beside": beside} if self.is_adoptable else {}))

    def as_json(self) -> dict[str, Any]:
        """Of ``Standing``, what is kept here."""
        return {"accounts": self._accounts.as_json(), "startup": self._startup.parts}

    def go_on(self, accounts: Accounts, startup: dict[str, Any], state: State) -> None:
        """As an earlier controller that was here."""
        self._accounts = accounts
        self._startup.parts = startup
        self._recoveries = {found.generation: found for found in state.recoveries}
        self._unshown = 1
        if state.phase == "running" and state.assignment is not None:
            self.metrics.formed(state.assignment)

    def _policy_line(self, policy: Policy) -> dict[str, Any]:
        return {"type": "Policy", "at_s": self.started_at_s, **asdict(policy)}

    def decided(self, event: str, generation: int, reason: str, fields: dict[str, Any]) -> None:
        """A line of the journal that the core has asked for."""
        self._write(time.time(), event, generation, reason, fields)

    def journal(
        self,
        event: str,
        generation: int,
        reason: str,
        fields: dict[str, Any],
        said: Numbering | None = None,
    ) -> None:
        """A line of the journal that the core did not ask for: a replay leaves it out."""
        self._note(self._write(time.time(), event, generation, reason, fields), said)

    def finished(
        self, at_s: float, generation: int, finish: cmd.FinishJob, is_decided: bool
    ) -> None:
        """The last line, with the time of its decision. Not ``is_decided``: the core has decided
        another end, and more was found out since."""
        status = {"status": finish.status}
        line = self._write(at_s, cmd.FINISHED, generation, finish.reason, status)
        if not is_decided:
            self._note(line)

    def _note(self, line: dict[str, Any], said: Numbering | None = None) -> None:
        noted = {"type": "Noted", "at_s": line["at_s"], "seq": line["seq"]} | self._numbered(said)
        self._folder.record_inbox(noted | ({"noted": line} if self.is_adoptable else {}))

    def _write(
        self, at_s: float, event: str, generation: int, reason: str, fields: dict[str, Any]
    ) -> dict[str, Any]:
        line = self._folder.journal(at_s, event, generation, reason, fields)
        self.metrics.event(event, line)
        log.info("g%d %s: %s", generation, event, reason)
        return line

    def step(self, command: cmd.RecordStep) -> None:
        """A line of steps.jsonl, and of the ledger."""
        metrics = dict(command.metrics)
        sample_ids = metrics.pop("sample_ids", None)
        line = metrics | {
            "step": command.step,
            "generation": command.generation,
            "world_size": command.world_size,
            "layout": command.layout,
            "samples": command.step * self._batch,
            "committed_at_s": round(time.time(), 6),
        }
        self._folder.record_step(line, sample_ids)
        self.last_step = line
        self.metrics.step(line, self._batch)
        if self.on_step is not None:
            self.on_step(line)

    # --------------------------------------------------------------------- now and then

    def show(self, state: State) -> None:
        """After a batch of events: in the metrics, where the job stands."""
        if self._unshown:
            self.metrics.show(state, self._unshown)
            self._unshown = 0

    def account(self) -> None:
        self.metrics.goodput(self._accounts.totals(time.time()))

    def result(
        self, finish: cmd.FinishJob, state: State, ended_at_s: float, fired: Collection[int]
    ) -> dict[str, Any]:
        """What is in result.json. ``fired``: indices of faults."""
        self._folder.record_inbox({"type": "Ended", "at_s": ended_at_s})
        accounts = self._accounts.totals(ended_at_s)
        return {
            "status": finish.status,
            "reason": finish.reason,
            "steps": state.committed,
            "samples": state.committed * self._batch,
            "final_loss": self.last_step.get("loss"),
            "state_digest": finish.state_digest,
            "goodput": accounts.goodput,
            "badput": accounts.badput,
            "startup": self._startup.parts,
            "wall_s": accounts.wall_s,
            "worker_seconds": accounts.as_dict(),
            "generations": state.generation,
            "recoveries": [asdict(recovery) for recovery in self._recoveries.values()],
            "checkpoints": [asdict(ref) for ref in state.checkpoints],
            "faults_fired": sorted(fired),
            "ended_at_s": round(ended_at_s, 3),
        }


def is_first(event: ev.StepApplied, state: State) -> bool:
    """Whether the metrics of a step are those that ``event`` has (``core.commits``)."""
    pending = state.pending.get(event.step)
    return event.step > state.committed and (pending is None or not pending.metrics)


def is_formed(before: State, state: State) -> bool:
    """A generation trains since just now."""
    return state.phase == "running" != before.phase and state.assignment is not None
