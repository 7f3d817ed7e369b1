"""The core by hand: one event in, the exact commands out. For examples and tests.

script = Script(Policy(min_workers=2, max_workers=3))
script.run(a="n1", b="n2")                # two workers that train in generation 1
script.tell(WorkerLost, "b", "killed")    # -> [PauseWorkers(2, ("a",), True, ...), ...]
"""

from __future__ import annotations

from typing import Any

from elastic_ft.core import events as ev
from elastic_ft.core.assignment import Assignment, CheckpointRef, Holding, Keeper, Member, Tier
from elastic_ft.core.commands import Command, FormGeneration, Journal
from elastic_ft.core.membership import step
from elastic_ft.core.policy import Policy
from elastic_ft.core.state import State


class Script:
    """Attributes:
    journal: (event, reason) of every journal line so far.
    now_s: the time of the next event; each takes a second.
    """

    def __init__(self, policy: Policy, *checkpoints: CheckpointRef) -> None:
        self.policy, self.state = policy, State()
        self.now_s = 100.0
        self.journal: list[tuple[str, str]] = []
        self.tell(ev.JobStarted, checkpoints)

    def tell(self, kind: type[Any], /, *args: Any, **fields: Any) -> list[Command]:
        """Returns what is to be done about ``kind(now, *args)``, its journal lines aside."""
        event: ev.Event = kind(self.now_s, *args, **fields)
        self.now_s += 1.0
        self.state, commands = step(self.state, event, self.policy)
        lines = [c for c in commands if isinstance(c, Journal)]
        self.journal += [(line.event, line.reason) for line in lines]
        return [c for c in commands if not isinstance(c, Journal)]

    def fire(self, timer: str, generation: int | None = None) -> list[Command]:
        """The timer goes off: by default, that of the present generation."""
        if generation is None:
            generation = self.state.generation
        return self.tell(ev.TimerFired, timer, generation)

    def ready(self, worker: str, node: str) -> list[Command]:
        return self.tell(ev.WorkerReady, member(worker, node))

    def keeper(self, node: str) -> list[Command]:
        """The node's keeper is up, perhaps again."""
        return self.tell(ev.KeeperReady, keeper_on(node))

    @property
    def status(self) -> str:
        """How the job has ended; empty if it has not."""
        return self.state.finish.status if self.state.finish else ""

    @property
    def assignment(self) -> Assignment:
        assert self.state.assignment is not None
        return self.state.assignment

    @property
    def ranks(self) -> tuple[str, ...]:
        """The members of the newest assignment, in rank order."""
        return tuple(m.worker for m in self.assignment.members)

    def journalled(self, event: str) -> list[str]:
        """The reasons of its lines."""
        return [reason for name, reason in self.journal if name == event]

    # ------------------------------------------------------------- longer passages

    def run(self, **nodes: str) -> Script:
        """Workers ``name=node`` get ready, form the first generation and train."""
        for worker, node in nodes.items():
            self.ready(worker, node)
        if self.state.phase == "starting":
            self.fire("gather")
        self.resume()
        return self

    def resume(self) -> list[Command]:
        """Every member of the forming generation says that it trains on."""
        commands: list[Command] = []
        for worker in self.ranks:
            commands += self.tell(
                ev.Resumed, worker, self.state.generation, self.assignment.source.step
            )
        return commands

    def train(self, *steps: int, held: bool = True) -> list[Command]:
        """Every member applies the steps, and holds them where the layout is held."""
        commands: list[Command] = []
        for number in steps:
            for worker in self.ranks:
                commands += self.applied(worker, number)
            for rank in self.assignment.holding if held else ():
                worker = self.assignment.members[rank].worker
                commands += self.tell(ev.StepHeld, worker, self.assignment.generation, number)
        return commands

    def applied(self, worker: str, number: int) -> list[Command]:
        metrics = {"loss": 1.0 / number}
        return self.tell(ev.StepApplied, worker, self.assignment.generation, number, metrics)

    def paused(self, worker: str, *holdings: Holding) -> list[Command]:
        return self.tell(ev.Paused, worker, self.state.generation, holdings)

    def live(self, worker: str, number: int) -> Holding:
        """What ``worker`` has on its device, if it has applied ``number``."""
        rank = self.assignment.rank_of(worker)
        assert rank is not None
        return self.holding(number, rank, Tier.LIVE)

    def copies(self, worker: str, number: int) -> tuple[Holding, ...]:
        """What ``worker`` has in host memory once ``number`` is held: its own and its peers'."""
        rank = self.assignment.rank_of(worker)
        assert rank is not None
        peers = [owner for owner, who in enumerate(self.assignment.buddies) if rank in who]
        own = self.holding(number, rank, Tier.HOST)
        return (own, *(self.holding(number, peer, Tier.PEER) for peer in peers))

    def holding(self, number: int, rank: int, tier: Tier) -> Holding:
        """The shard of ``rank``, as the newest generation has it after ``number``."""
        layout = self.assignment.layout
        generation = self.assignment.computed_by(number)
        return Holding(number, layout.shard_space, layout.shard_of(rank), tier, generation)


def keeper_on(node: str) -> Keeper:
    return Keeper(node, (node, 1))


def member(worker: str, node: str) -> Member:
    return Member(worker, node, node, sum(worker.encode()))


def assignment_in(commands: list[Command]) -> Assignment:
    """The assignment that ``commands`` hand out: exactly one."""
    (form,) = [c for c in commands if isinstance(c, FormGeneration)]
    return form.assignment
