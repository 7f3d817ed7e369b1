"""What a controller knows beside the core's state, and the next one needs: told with snapshots.

Whoever goes on where a controller was reads the newest snapshot in inbox.jsonl, with this beside
it, and tells itself the lines after it: the same core decides the same. So what was decided and not
written is known, and which timers run, up to which number each worker was heard, and so on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from elastic_ft.controller.hearing import UNREADABLE
from elastic_ft.core import commands as cmd
from elastic_ft.core import events as ev
from elastic_ft.core.assignment import NodeId, WorkerId
from elastic_ft.core.membership import step as decide
from elastic_ft.core.policy import Policy
from elastic_ft.core.state import State
from elastic_ft.core.typed import decoder
from elastic_ft.observe.accounts import Accounts
from elastic_ft.observe.replay import (
    Begun,
    InboxItem,
    Line,
    Noted,
    Snapshot,
    ToldLine,
    journal_line_of,
)

SHOWN = ("event", "generation", "reason")
OWN = frozenset({*SHOWN, "at_s", "seq"})


@dataclass(frozen=True, slots=True)
class DueTimer:
    due_s: float  # unix time
    timer: str
    generation: int


@dataclass(slots=True)
class Standing:
    """Attributes:
    run: of the controller that started the workers.
    heard: of each sender, the number up to which its messages were journalled.
    timers: that run.
    avoided: nodes, and until when (unix time).
    fired: indices of the faults that have fired.
    data_read: by workers that are ready.
    terms: of ``Continuity``.
    accounts: of ``Accounts``.
    startup: where the time before the first step went.
    request: the last one for another number of workers.
    """

    run: str = ""
    heard: dict[str, int] = field(default_factory=dict)
    timers: list[DueTimer] = field(default_factory=list)
    avoided: dict[NodeId, float] = field(default_factory=dict)
    fired: set[int] = field(default_factory=set)
    data_read: dict[WorkerId, dict[str, Any]] = field(default_factory=dict)
    terms: dict[str, Any] = field(default_factory=dict)
    accounts: dict[str, Any] = field(default_factory=dict)
    startup: dict[str, Any] = field(default_factory=dict)
    request: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"fired": sorted(self.fired)}

    @staticmethod
    def of_json(values: dict[str, Any]) -> Standing:
        """Raises ValueError."""
        found: Standing = decoder(Standing)(values)
        return found

    def hear(self, sender: str, number: int) -> None:
        if sender:
            self.heard[sender] = max(number, self.heard.get(sender, 0))

    def told(self, event: ev.Event) -> None:
        if isinstance(event, ev.TimerFired):
            fired = (event.timer, event.generation)
            left = (t for t in self.timers if (t.timer, t.generation) == fired)
            if (first := min(left, key=lambda t: t.due_s, default=None)) is not None:
                self.timers.remove(first)
        elif isinstance(event, ev.WorkerReady):
            self.data_read[event.member.worker] = event.data
        elif isinstance(event, ev.ResizeRequested):
            self.request = event.request

    def did(self, at_s: float, command: cmd.Command) -> None:
        if isinstance(command, cmd.StartTimer):
            self.timers.append(DueTimer(at_s + command.after_s, command.timer, command.generation))
        elif isinstance(command, cmd.AvoidNode):
            self.avoided[command.node] = at_s + command.for_s

    def noted(self, line: Line) -> None:
        """A line of the journal that the core did not ask for."""
        if line.get("event") == "fault_fired":
            self.fired.add(int(line["index"]))
        elif line.get("event") == "data_opened":
            self.terms |= {"opened": True, "data": line["data"]}
        elif line.get("event") == "startup":
            self.startup = {name: value for name, value in line.items() if name not in OWN}


@dataclass(slots=True)
class Heritage:
    """Where a controller was when it ended, from what it was told.

    Attributes:
        lines: of the journal, by number, that it decided or noted since the snapshot.
        seq: the number of the next one.
        records: the steps that it recorded since, that count.
        floor: the step before those.
        begun: there is a snapshot, or an event, to go on from.
        told: how many events were told again.
        last_s: when it was told the last one, or had its snapshot (unix time, its clock).
    """

    policy: Policy | None
    state: State
    standing: Standing
    accounts: Accounts
    seq: int = 0
    lines: dict[int, Line] = field(default_factory=dict)
    records: dict[int, cmd.RecordStep] = field(default_factory=dict)
    floor: int = 0
    begun: bool = False
    told: int = 0
    last_s: float = 0.0

    def tell(self, items: Iterable[InboxItem]) -> None:
        """Raises ValueError, KeyError, TypeError of what no controller writes."""
        for item in items:
            if isinstance(item, Begun):
                self.policy = item.policy
                self._go_on(item.beside)
            elif isinstance(item, Snapshot):
                if not self.told:
                    self.begun, self.last_s = True, item.at_s
                    self.state, self.seq = item.state, item.seq
                    self.floor = item.state.committed
                    self._go_on(item.beside)
            elif isinstance(item, Noted):
                self._note(item)
            elif isinstance(item, ToldLine):
                self._tell(item)

    def _go_on(self, beside: dict[str, Any]) -> None:
        if beside:
            self.standing = Standing.of_json(beside)
            self.accounts.go_on(self.standing.accounts, self.state)

    def _note(self, item: Noted) -> None:
        if item.line.get("event") == cmd.FINISHED:
            return
        if item.seq < self.seq:  # an earlier one was killed before it wrote what it had decided
            for seq in range(item.seq, self.seq):
                self.lines.pop(seq, None)
        self.seq = item.seq + 1
        if item.line:
            self.lines[item.seq] = item.line
        self.standing.noted(item.line)
        self.standing.hear(item.sender, item.number)

    def _tell(self, item: ToldLine) -> None:
        event, standing = item.event, self.standing
        if self.policy is None:
            raise ValueError("inbox.jsonl has no policy before the first event")
        self.begun, self.told, self.last_s = True, self.told + 1, item.at_s
        standing.told(event)
        standing.hear(item.sender, item.number)
        if isinstance(event, ev.JobStarted):
            self.state, self.records = State(), {}
        try:
            self.state, commands = decide(self.state, event, self.policy)
        except UNREADABLE:
            if not item.sender:
                raise
            return  # it was refused then, too
        if isinstance(event, ev.JobStarted):
            self.floor = self.state.committed
        for command in commands:
            self._do(item.at_s, command)
        self.accounts.on(item.at_s, event, commands, self.state)

    def _do(self, at_s: float, command: cmd.Command) -> None:
        self.standing.did(at_s, command)
        for line in journal_line_of(command):
            if line["event"] == cmd.FINISHED:
                continue  # whoever is in charge at the end writes that
            self.lines[self.seq] = {"at_s": round(at_s, 6), "seq": self.seq, **line}
            self.seq += 1
        if isinstance(command, cmd.RecordStep):
            self.records[command.step] = command
        elif isinstance(command, cmd.RollBack):
            self.records = {s: r for s, r in self.records.items() if s <= command.step}
            self.floor = min(self.floor, command.step)
