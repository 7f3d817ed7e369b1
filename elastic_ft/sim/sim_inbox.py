"""The simulated inbox.jsonl: what a next controller replays, and what waits until it is durable."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from elastic_ft.core import commands as cmd
from elastic_ft.core.assignment import WorkerId
from elastic_ft.core.events import Event, TimerFired
from elastic_ft.core.policy import Policy
from elastic_ft.core.state import State

Decide = Callable[[State, Event, Policy], tuple[State, tuple[cmd.Command, ...]]]
Timer = tuple[str, int]


@dataclass(frozen=True, slots=True)
class InboxLine:
    """``number``: the sender's of what it told; 0 where nobody counts."""

    event: Event
    sender: WorkerId = ""
    number: int = 0


@dataclass(slots=True)
class SimReplay:
    """What follows from an inbox's lines.

    Attributes:
        recorded: (step, generation): what steps.jsonl is to have.
        formed: generations that events.jsonl is to have as formed.
        timers: pending ones, and when each is due.
        avoided: nodes, and until when.
    """

    state: State = field(default_factory=State)
    recorded: list[tuple[int, int]] = field(default_factory=list)
    formed: set[int] = field(default_factory=set)
    rollbacks: list[tuple[int, int]] = field(default_factory=list)
    timers: list[tuple[float, Timer]] = field(default_factory=list)
    avoided: dict[str, float] = field(default_factory=dict)
    finish: cmd.FinishJob | None = None

    def follow(self, at_s: float, commands: Iterable[cmd.Command]) -> None:
        for command in commands:
            match command:
                case cmd.RecordStep(step=step, generation=generation):
                    self.recorded.append((step, generation))
                case cmd.RollBack(step=step):
                    self.rollbacks.append((len(self.recorded), step))
                    self.recorded = self.recorded[:step]
                case cmd.StartTimer(timer=name, generation=generation, after_s=after_s):
                    self.timers.append((at_s + after_s, (name, generation)))
                case cmd.AvoidNode(node=node, for_s=for_s):
                    self.avoided[node] = at_s + for_s
                case cmd.Journal(event="generation_formed", generation=generation):
                    self.formed.add(generation)
                case cmd.FinishJob():
                    self.finish = command

    def fired(self, event: TimerFired) -> None:
        same = [due for due in self.timers if due[1] == (event.timer, event.generation)]
        self.timers.remove(min(same))


@dataclass(slots=True)
class SimInbox:
    """Since the newest JobStarted.

    Attributes:
        recorded: the steps that were there by then.
        durable: so many lines outlive the controller's machine.
        heard: by worker, the number of the last thing that it told.
        waiting: commands, and how many lines are to be durable before.
    """

    recorded: list[tuple[int, int]] = field(default_factory=list)
    lines: list[InboxLine] = field(default_factory=list)
    durable: int = 0
    heard: dict[WorkerId, int] = field(default_factory=dict)
    waiting: deque[tuple[int, tuple[cmd.Command, ...]]] = field(default_factory=deque)

    def is_new(self, sender: WorkerId, number: int) -> bool:
        return not number or number > self.heard.get(sender, 0)

    def write(self, line: InboxLine) -> None:
        self.lines.append(line)
        if line.number:
            self.heard[line.sender] = line.number

    def may_do(self, commands: tuple[cmd.Command, ...]) -> tuple[cmd.Command, ...]:
        """What of it is to be done at once; the rest waits, in order."""
        if not self.waiting and not _last(commands):
            return commands
        self.waiting.append((len(self.lines), commands))
        return ()

    def synced(self, lines: int) -> tuple[cmd.Command, ...]:
        """So many lines are durable now. Returns what has waited for it."""
        self.durable, ready = lines, list[cmd.Command]()
        while self.waiting and (self.waiting[0][0] <= lines or not _last(self.waiting[0][1])):
            ready += self.waiting.popleft()[1]
        return tuple(ready)

    def acknowledged(self) -> dict[WorkerId, int]:
        """By worker, the number of the last thing told that is durable."""
        numbered = (line for line in self.lines[: self.durable] if line.number)
        return {line.sender: line.number for line in numbered}

    def cut(self) -> None:
        """What was not durable is lost with the machine."""
        del self.lines[self.durable :]
        self.heard = self.acknowledged()

    def replay(self, decide: Decide, policy: Policy) -> SimReplay:
        done = SimReplay(recorded=list(self.recorded))
        for line in self.lines:
            if isinstance(line.event, TimerFired):
                done.fired(line.event)
            done.state, commands = decide(done.state, line.event, policy)
            done.follow(line.event.at_s, commands)
        return done


def _last(commands: Iterable[cmd.Command]) -> bool:
    return any(type(command) in cmd.LASTING for command in commands)
