"""A simulated process group: forming, moving state, and training in step."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Protocol

from elastic_ft.core import events as ev
from elastic_ft.core.assignment import Assignment, Tier, WorkerId
from elastic_ft.core.commands import RecordStep
from elastic_ft.core.state import State
from elastic_ft.sim.nodes import ComputedBy
from elastic_ft.sim.sim_ending import EndingWorld, SimEnding
from elastic_ft.sim.sim_keeper import SimKeeper
from elastic_ft.sim.sim_worker import Live, SimWorker

RESTORING_EVERY_S = 3.0  # a worker says that bytes of its state come


class GroupWorld(EndingWorld, Protocol):
    core: State
    up: bool
    formed: int
    retain_live: bool
    hold_late: bool

    @property
    def workers(self) -> Mapping[WorkerId, SimWorker]: ...
    def keeper_of(self, holder: str) -> tuple[SimKeeper | None, WorkerId]: ...
    def watch_stall(self, group: Group) -> None: ...
    def true_source(self, group: Group) -> ComputedBy: ...
    def look_at_restored(self, worker: SimWorker, group: Group, lineage: ComputedBy) -> None: ...
    def look_at_applied(self, worker: SimWorker, group: Group, step: int) -> None: ...


class Group:
    """All events of one generation's collectives. ``failed``: nothing collective works any more."""

    def __init__(self, world: GroupWorld, assignment: Assignment) -> None:
        self.world, self.assignment = world, assignment
        self.generation = assignment.generation
        self.members = [world.workers[m.worker] for m in assignment.members]
        everyone = (*assignment.members, *assignment.donors)
        self.all: dict[WorkerId, SimWorker] = {m.worker: world.workers[m.worker] for m in everyone}
        self.joined: set[WorkerId] = set()
        self.given: dict[WorkerId, ComputedBy | None] = {}  # live states, as who has one offers it
        self.laid: set[WorkerId] = set()
        self.filled: set[WorkerId] = set()
        self.resumed: set[WorkerId] = set()
        self.arrived: dict[int, set[WorkerId]] = {}
        self.copied: dict[int, set[int]] = {}  # step -> ranks with their own copy
        self.sent: dict[int, set[tuple[int, int]]] = {}  # step -> (owner, buddy) of copies made
        self.copies_of: dict[int, set[tuple[int, int]]] = {
            r: set() for r in range(len(self.members))
        }
        for pair in ((o, b) for o, who in enumerate(assignment.buddies) for b in who):
            for rank in pair:  # the copies that it sends or keeps
                self.copies_of[rank].add(pair)
        self.then: dict[tuple[int, int], Callable[[], None]] = {}  # (step, rank): once held
        refs = world.core.checkpoints
        self.checkpointed = refs[0].step if refs else 0  # sent along: the same for every member
        self.holding = assignment.holding
        self.ending = SimEnding(world, self)
        self.failed = ""

    # ----------------------------------------------------------------------- failing

    def fail(self, why: str) -> None:
        if self.failed:
            return
        self.failed = why
        for worker in self.all.values():
            if worker.group is self:
                self._notice(worker)
        self.world.watch_stall(self)

    def _notice(self, worker: SimWorker) -> None:
        """Some get an error soon, some late, some wait until they are told."""
        rng = self.world.rng
        if rng.random() < 0.7:
            after_s = rng.choice((rng.uniform(0.005, 0.05), rng.uniform(0.1, 2.0)))
            self.world.after(after_s, lambda: worker.broken(self))

    def connected(self) -> bool:
        """Whether every member can talk to every other: a cut node to itself alone."""
        if any(not w.alive or w.hung for w in self.all.values()):
            return False
        cut = {w.node.id for w in self.all.values() if w.node.cut}
        return not cut or ({w.node.id for w in self.all.values()} == cut and len(cut) == 1)

    def _works(self, worker: SimWorker) -> bool:
        return worker.works() and worker.group is self and not self.failed

    def trains(self, worker: SimWorker) -> bool:
        return not self.failed and worker.id in self.resumed and not worker.is_done

    def end(self, worker: SimWorker) -> None:
        """It has made its last step."""
        if self.failed:
            self._notice(worker)
        else:
            self.ending.wait(worker)

    # ----------------------------------------------------------------------- forming

    def join(self, worker: SimWorker) -> None:
        self.joined.add(worker.id)
        if self.failed:
            self._notice(worker)
        elif self.joined == self.all.keys():
            self.world.after(self.world.rng.uniform(0.01, 0.3), self._move)

    def _move(self) -> None:
        if len(self.all) > 1 and any(worker.unreachable for worker in self.all.values()):
            self.fail("a port can't be reached")
        if self.failed or not self.connected():
            return
        lineage = self.world.true_source(self)
        if unread := self._unread():
            after_s = self.world.rng.uniform(0.1, 3.0)  # what the client's own retries take
            url = self.assignment.source.url
            self.world.after(after_s, lambda: self._refuse_unread(url, unread))
            return
        if holder := self._unanswered():
            everyone = list(self.all)
            after_s = self._answers_after_s(holder)
            self.world.after(after_s, lambda: self._refuse_unread(holder, everyone))
            return
        if (damaged := self._damaged()) is not None:
            self.world.after(self._answers_after_s(damaged[0]), lambda: self._refuse(*damaged))
            return
        after_s = self.world.rng.choice((0.05, self.world.rng.uniform(0.1, RESTORING_EVERY_S)))
        whole_s = max(after_s, self.world.scenario.restore_s)
        chance = random.Random(f"restore {self.world.scenario.seed} {self.generation}")
        for rank, worker in enumerate(self.members):
            laid_s, filled_s = chance.uniform(0.0, 0.4), chance.uniform(0.45, 0.95)
            self.world.after(laid_s * whole_s, lambda r=rank, w=worker: self._lay_out(r, w))  # type: ignore[misc]
            self.world.after(filled_s * whole_s, lambda w=worker: self._fill(w, lineage))  # type: ignore[misc]
        self._receive_bytes(whole_s, lineage)

    def _receive_bytes(self, left_s: float, lineage: ComputedBy) -> None:
        """Where it takes long, each member tells again and again that bytes come."""
        if left_s <= RESTORING_EVERY_S:
            self.world.after(left_s, lambda: self._moved(lineage))
            return

        def tell() -> None:
            for worker in self.all.values():
                if self._works(worker):
                    worker.send(ev.Restoring(self.world.now_s, worker.id, self.generation, 1))
            self._receive_bytes(left_s - RESTORING_EVERY_S, lineage)

        self.world.after(RESTORING_EVERY_S, tell)

    def _unread(self) -> list[WorkerId]:
        """Who can't read the store, of those who are to."""
        source, store = self.assignment.source, self.world.store
        if store.base_away:
            return [worker.id for worker in self.members]
        if not source.url:
            return []
        readers = self.all.values() if source.holders else self.members
        return [w.id for w in readers if store.down or w.node.id in store.unread_on]

    def _unanswered(self) -> str:
        """What a keeper has that does not answer, asked where nobody else has it."""
        for holders in self.assignment.source.holders.values():
            keeper, _ = self.world.keeper_of(holders[0][0])
            is_left = all(tier is Tier.KEEPER for _, tier in holders)
            if is_left and (keeper is None or not keeper.answers()):
                return holders[0][0]
        return ""

    def _refuse_unread(self, holder: str, unread: list[WorkerId]) -> None:
        """All know who could not, and say the same."""
        world = self.world
        if self.failed:
            return
        alone = tuple(unread) if len(unread) < len(self.members) else ()
        for worker in self.members:
            if worker.works() and worker.group is self:
                worker.send(
                    ev.SourceRefused(
                        world.now_s,
                        worker.id,
                        self.generation,
                        holder,
                        "cannot read: unreachable",
                        kind=ev.UNREACHABLE,
                        unread_by=alone,
                    )
                )

    def _damaged(self) -> tuple[str, str] | None:
        """Who has something damaged, and which shard."""
        source = self.assignment.source
        if source.url and self.world.store.is_damaged(source.url):
            return source.url, ""
        for shard, holders in source.holders.items():
            key = (source.step, source.generation, source.space, shard)
            for name, tier in holders:
                if tier in (Tier.KEEPER, Tier.CHECKPOINT):
                    continue
                copy = self.all[name].copies.get(key)
                if tier is not Tier.LIVE and copy is not None and copy.damaged:
                    return name, shard
            if all(tier is Tier.KEEPER for _, tier in holders):  # asked where nobody else has it
                keeper, worker = self.world.keeper_of(holders[0][0])
                copy = keeper.find(worker, key) if keeper else None
                if copy is None or copy.damaged:
                    return holders[0][0], shard
        return None

    def _answers_after_s(self, holder: str) -> float:
        """A keeper that hangs is waited for: until some deadline, or this group is broken off."""
        keeper, _ = self.world.keeper_of(holder)
        is_slow = keeper is not None and keeper.alive and not keeper.answers()
        return self.world.rng.uniform(0.5, 6.0) if is_slow else 0.0

    def _refuse(self, holder: str, shard: str) -> None:
        """A worker looks at what it gives; what others have is looked at by who gets it."""
        if self.failed:
            return  # broken off while it waited
        refuser = self.all.get(holder) or self.world.rng.choice(self.members)
        source = self.assignment.source
        refuser.copies.pop((source.step, source.generation, source.space, shard), None)
        now_s, generation = self.world.now_s, self.generation
        refuser.send(ev.SourceRefused(now_s, refuser.id, generation, holder, "bad digest", shard))

    def _lay_out(self, rank: int, worker: SimWorker) -> None:
        """As ``worker.restore``: a state in place that is not what is gone on from is gone now."""
        if not self._works(worker):
            return
        layout, holders = self.assignment.layout, self.assignment.source.holders.values()
        is_filled = worker.lay_out(layout.shard_space, layout.shard_of(rank))
        live, laid = worker.live, worker.laid
        is_source = live is not None and any((worker.id, Tier.LIVE) in who for who in holders)
        if live is not None and laid is not None and is_source:
            self.given[worker.id] = laid.lineage if is_filled else live.lineage
        if not (is_filled and is_source):
            worker.intact = False
            if is_filled:
                worker.live = None
        self.laid.add(worker.id)

    def _fill(self, worker: SimWorker, lineage: ComputedBy) -> None:
        """Once all have laid theirs out, and said what they have."""
        if not self._works(worker) or len(self.laid) < len(self.members):
            return
        assert worker.laid is not None
        if not worker.intact:  # else it is in place
            is_good = all(given == lineage for given in self.given.values())
            worker.laid.lineage = lineage if is_good else None
        self.filled.add(worker.id)

    def _moved(self, lineage: ComputedBy) -> None:
        """The barrier after the transfer: who passes it trains on."""
        if self.failed or not self.connected() or len(self.filled) < len(self.members):
            return
        self.world.formed = max(self.world.formed, self.generation)
        for worker in self.all.values():
            after_s = self.world.rng.uniform(0, 0.2)
            self.world.after(after_s, lambda w=worker: self._resume(w, lineage))  # type: ignore[misc]

    def _resume(self, worker: SimWorker, lineage: ComputedBy) -> None:
        if not worker.works() or worker.group is not self:
            return
        source, layout = self.assignment.source, self.assignment.layout
        step, rank = source.step, self.assignment.rank_of(worker.id)
        if rank is not None:
            self._retain(worker)
            worker.drop(after=step)
            worker.intact = True
            self.world.look_at_restored(worker, self, lineage)
            name = layout.shard_of(rank)
            worker.live = Live(step, source.generation, layout.shard_space, name, lineage)
            self.resumed.add(worker.id)
        worker.send(ev.Resumed(self.world.now_s, worker.id, self.generation, step))
        if rank is None:
            return
        if rank in self.holding and step > 0:
            self._snapshot(rank, worker, pause=False, stop=False)
        else:
            self._go_on(worker, pause=False, stop=False)

    def _retain(self, worker: SimWorker) -> None:
        """The source's shards stay until the new cut of the state is held in two places."""
        live, source = worker.live, self.assignment.source
        if not self.world.retain_live or self.assignment.rank_of(worker.id) not in self.holding:
            return
        if live is not None and (live.step, live.space) == (source.step, source.space):
            worker.keep(live.key, Tier.HOST, live.lineage, sealed=False)

    # ---------------------------------------------------------------------- training

    def _go_on(self, worker: SimWorker, *, pause: bool, stop: bool) -> None:
        if not worker.works() or worker.group is not self:
            return
        assert worker.live is not None
        if pause:
            worker.rest()  # at once, or when PauseWorkers comes: the flag of others was faster
        elif stop or worker.live.step >= self.world.scenario.steps:
            worker.finish(self)
        elif self.failed:
            self._notice(worker)
        else:
            self._arrive(worker)

    def _arrive(self, worker: SimWorker) -> None:
        assert worker.live is not None
        step = worker.live.step + 1
        arrived = self.arrived.setdefault(step, set())
        arrived.add(worker.id)
        if len(arrived) == len(self.members):
            self.world.after(self.world.rng.uniform(0.3, 1.0), lambda: self._reduce(step))

    def _reduce(self, step: int) -> None:
        """The all-reduce before the optimizer: gradients, and who wants to pause or stop."""
        if self.failed or not self.connected():
            return
        pause = any(worker.pause_flag for worker in self.members)
        stop = any(worker.stop_flag for worker in self.members)
        for worker in self.members:
            after_s = self.world.rng.uniform(0, self.world.scenario.spread_s)
            self.world.after(after_s, lambda w=worker: self._receive(w, step, pause, stop))  # type: ignore[misc]

    def _receive(self, worker: SimWorker, step: int, pause: bool, stop: bool) -> None:
        """Whoever has the result applies it, whatever happens to the group then."""
        if not self._works(worker):
            return
        worker.unapplied = step
        worker.drop(before=worker.newest_own())  # everyone passed here with that one held
        after_s = self.world.rng.uniform(0, self.world.scenario.spread_s / 2)
        self.world.after(after_s, lambda: self._apply(worker, step, pause, stop))

    def _apply(self, worker: SimWorker, step: int, pause: bool, stop: bool) -> None:
        if not worker.works() or worker.group is not self:
            return
        world, scenario = self.world, self.world.scenario
        world.look_at_applied(worker, self, step)
        live = worker.live
        assert live is not None
        lineage = (*live.lineage, self.generation)
        computed_by = self.assignment.computed_by(step)
        worker.live = Live(step, computed_by, live.space, live.shard, lineage)
        if worker.laid is not None:
            worker.laid.lineage = lineage
        worker.unapplied = None
        metrics = {"loss": round(1.0 / step, 6)}
        new = self.assignment
        worker.record[step] = RecordStep(
            step, self.generation, len(new.members), str(new.layout), metrics
        )
        pace_s = worker.pace_s
        worker.send(
            ev.StepApplied(world.now_s, worker.id, self.generation, step, metrics, pace_s=pace_s)
        )
        if self._stands(worker):
            return
        final = stop or step == scenario.steps
        if final or (scenario.checkpoint_every and step % scenario.checkpoint_every == 0):
            worker.upload(self.generation)
        rank = self.assignment.rank_of(worker.id)
        assert rank is not None
        holds = rank in self.holding
        if worker.owes_answer and self.failed:
            if holds and step % scenario.snapshot_every == 0:
                worker.keep(worker.live.key, Tier.HOST, lineage)
            worker.rest()
        elif holds and (final or step % scenario.snapshot_every == 0):
            self._snapshot(rank, worker, pause, stop)
        else:
            self._go_on(worker, pause=pause, stop=stop)

    def _stands(self, worker: SimWorker) -> bool:
        """Whether its first report is never answered, as nobody is in charge: it once was so."""
        if worker.is_heard or "first-report" not in self.world.undone or self.world.up:
            worker.is_heard = True
            return False
        self.world.watch_silent(worker, lambda: worker.group is self)
        return True

    # --------------------------------------------------------------------- snapshots

    def _snapshot(self, rank: int, worker: SimWorker, pause: bool, stop: bool) -> None:
        live = worker.live
        assert live is not None

        def copied() -> None:
            if not worker.works() or worker.group is not self or worker.live != live:
                if worker.works() and worker.live is not None and self.world.hold_late:
                    worker.keep(live.key, Tier.HOST, worker.live.lineage)  # what it was copied from
                return
            worker.keep(live.key, Tier.HOST, live.lineage)
            self.copied.setdefault(live.step, set()).add(rank)
            self.sent.setdefault(live.step, set())
            self._exchange(live.step, rank)
            self.then[live.step, rank] = lambda: self._go_on(worker, pause=False, stop=stop)
            self._report_held(live.step)
            if pause:  # the boundary does not wait for buddies
                self._go_on(worker, pause=True, stop=False)

        self.world.after(self.world.rng.uniform(0.01, self.world.scenario.copy_s), copied)

    def _exchange(self, step: int, rank: int) -> None:
        """Sends the copies whose both ends are ready."""
        for owner, buddy in sorted(self.copies_of[rank]):
            if {owner, buddy} <= self.copied[step]:
                after_s = self.world.rng.uniform(0.01, 0.3)
                self.world.after(after_s, lambda o=owner, b=buddy: self._arrived(step, o, b))  # type: ignore[misc]

    def _arrived(self, step: int, owner: int, buddy: int) -> None:
        sender, keeper = self.members[owner], self.members[buddy]
        if not self._works(sender) or not self._works(keeper) or not self.connected():
            return
        layout, computed_by = self.assignment.layout, self.assignment.computed_by(step)
        key = (step, computed_by, layout.shard_space, layout.shard_of(owner))
        copy = sender.copies.get(key)
        if copy is None:
            return
        keeper.keep(key, Tier.PEER, copy.lineage)
        self.sent[step].add((owner, buddy))
        self._report_held(step)

    def _report_held(self, step: int) -> None:
        """A member's part is done: own copy, copy sent, copies received. Then it goes on."""
        copied, sent = self.copied[step], self.sent[step]
        for rank, worker in enumerate(self.members):
            if rank in copied and self.copies_of[rank] <= sent and (step, rank) in self.then:
                go_on = self.then.pop((step, rank))
                if worker.is_held(cut=self.assignment.is_cut):
                    worker.send(ev.StepHeld(self.world.now_s, worker.id, self.generation, step))
                go_on()
