"""The training loop of one generation, and its safe points: one for every job.

    load -> compute -> [snapshot of the last step complete] -> agree -> apply
         -> record -> keep (this step's snapshot, checkpoint) -> boundary

Who computes and applies is a ``Maker``: the job's own engine (``worker.by_engine``), or a function
of the user's (``worker.by_user``). ``agree`` is one small collective in host memory: loss, tokens,
the gradients' norm, and whether anyone was asked to pause or stop, so that all members stop after
the same step. It is the step's last collective, but for an optimizer's own, which come before its
first write; where it can it travels along with the gradients (``engines.along``). Once it has
passed, nothing else between it and the boundary can keep a healthy member from applying the step;
who fails before it has not applied it (I4).
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

from elastic_ft.core.batches import job_order
from elastic_ft.core.commands import RecordStep
from elastic_ft.core.events import StepApplied, StepHeld, WorkerDone
from elastic_ft.core.intervals import Cadence
from elastic_ft.engines.along import Along
from elastic_ft.engines.base import Engine, MicroBatch, Update
from elastic_ft.state.checkpointer import StorePatience
from elastic_ft.state.digest import state_digest
from elastic_ft.transport.control import Note
from elastic_ft.worker import notes
from elastic_ft.worker.agreement import Agreed, Contribution, places, sum_over_members
from elastic_ft.worker.device_marks import DeviceMarks
from elastic_ft.worker.last_uploads import await_uploads, is_called_off
from elastic_ft.worker.layer_timer import LayerTimer
from elastic_ft.worker.overlap import Overlap
from elastic_ft.worker.party import Party
from elastic_ft.worker.planned import Planned, StepPlan
from elastic_ft.worker.spent import Spent
from elastic_ft.worker.step import Step
from elastic_ft.worker.tools import Flags, Formed, Tools


class Making:
    """One attempt at a step.

    Attributes:
    agreed: what all members did, once they have.
    is_compared: see ``worker.planned.StepPlan``.
    """

    def __init__(self, loop: Loop, number: int, micro_batches: list[MicroBatch]) -> None:
        self._loop, self.number, self.micro_batches = loop, number, micro_batches
        self.is_compared = loop.plan.compared_at(number)
        self.agreed: Agreed | None = None
        self._said: Contribution | None = None

    @property
    def along(self) -> Along | None:
        """What takes this step's agreement along with the gradients. None: a collective of its own
        is needed, as snapshots under way have to be complete before it, or the engine can't."""
        return None if self._loop.is_copying else cast(Engine, self._loop.engine).along

    def say(self, loss: float, tokens: int, more: Sequence[float] = ()) -> list[float]:
        """What this rank has to say before its last backward, see ``agree``. All but the norm."""
        self._said = self._loop.say(self.micro_batches, loss, tokens, more)
        return self._said.values

    def agree_along(self, along: Along, squares: float) -> Agreed:
        """The same as ``agree``, of what all members have said. ``squares``: of all gradients."""
        assert self._said is not None
        self.agreed = self._loop.settle(self._said, along.told(), squares)
        return self.agreed

    def agree(self, loss: float, tokens: int, squares: float, more: Sequence[float] = ()) -> Agreed:
        """Settles with all members that the step is made, from what each has computed.

        Once: what comes later, of the same step, are other gradients' sums and no more.

        Args:
            loss, tokens, squares: this rank's sums, see ``engines.base.BatchSums``.
            more: any other sums.
        """
        world = self._loop.groups.world_size
        if self.agreed is not None:
            terms, squares = sum_over_members([float(tokens), squares], world)
            return replace(self.agreed, tokens=int(terms), squares=squares)
        said = self._said or self._loop.say(self.micro_batches, loss, tokens, more)
        loss, terms, *rest = said.values
        loss, terms, squares, *rest = sum_over_members([loss, terms, squares, *rest], world)
        self.agreed = self._loop.settle(said, [loss, terms, *rest], squares)
        return self.agreed


@dataclass(frozen=True, slots=True)
class Made:
    """A step that was made, before anybody is told of it."""

    step: Step
    metrics: dict[str, Any]


class Maker(Protocol):
    """Who makes the steps that a loop deals, agrees on and keeps. Generators yield what the
    thread is to see that iterates over ``Worker.steps``."""

    def enter(self, loop: Loop) -> None:
        """Before the first step of a generation."""

    @property
    def is_over(self) -> bool:
        """There is no more to make, whatever steps are left."""

    def make(self, loop: Loop, attempt: Making) -> Generator[Any, None, Update | None]:
        """Computes, has ``attempt.agree``, and applies. None if there is no more to make."""

    def rate(self, step: int) -> float:
        """The learning rate of the step just made."""

    def settle(self, loop: Loop, made: Made) -> Generator[Any, None, Step | None]:
        """Has the step told of and kept. Returns what is to be seen of it, if nobody has yet."""

    def leave(self, loop: Loop) -> Iterator[Any]:
        """After the last step."""


class Loop:
    """Attributes:
    step: the last step applied here: the live state is that of this step.
    party: with whom what comes between two steps is done.
    pausing, stopping: as all members agreed in the running step.
    """

    def __init__(self, tools: Tools, formed: Formed, flags: Flags, maker: Maker) -> None:
        self.tools, self.formed, self.flags = tools, formed, flags
        self.groups, self.job = formed.groups, tools.job
        self.engine, self._maker = tools.engine, maker
        self.step = formed.step
        order = tools.data.order or job_order(self.job.seed, len(tools.data.train))
        layout = self.groups.assignment.layout
        assert self.groups.rank is not None
        self._layout = str(layout)
        self.data_rank = layout.data_rank(self.groups.rank)
        own = self.job.loop is not None and self.job.loop.compare_losses
        own, ranks = own and tools.data.stream is None, layout.data_parallel_size
        self.plan = StepPlan(self.job, order, ranks, self.data_rank, self.step + 1, own)
        self.holds = self.groups.assignment.holds
        snapshot = self.job.snapshot
        every = None if snapshot.every_steps == "auto" else snapshot.every_steps
        self.cadence = Cadence(every, snapshot.max_cost, snapshot.max_steps)
        self._step_s = 0.0  # of the step before
        self._held_step = 0  # of the newest copy made here for others
        self._spent = Spent()
        self._overlap = Overlap(tools.snapshots, self.engine.device, layout)
        self._pace: LayerTimer | None = None
        if layout.ranks_together == 1:  # nobody waits for others inside a layer
            self._pace = LayerTimer(self.engine.blocks, self.engine.device)
        counted = self.engine.device.type == "cuda" and not layout.has_stages  # their layers differ
        self._marks = DeviceMarks(self.engine.blocks if counted else [], tools.points)
        self.pausing = self.stopping = self._checkpointing = False
        self.is_copying = True  # whoever holds may have a snapshot under way; the same everywhere
        self.party = Party(self.groups)

    def steps(self) -> Iterator[Step]:
        """Runs until the last step, a pause or a stop. Raises GroupBroken and user errors."""
        try:
            yield from self._steps()
        finally:
            if self._pace is not None:
                self._pace.close()
            self._marks.close()
            self._overlap.close()

    def _steps(self) -> Iterator[Any]:
        self._resume()
        self._maker.enter(self)
        while self.step < self.job.steps and not (self._maker.is_over or self.stopping):
            yield from self._one_step()
            if self.pausing:  # with the second copies: they are a source, and survive a loss
                self.tools.snapshots.wait(self.groups.deadline())
                return
        yield from self._maker.leave(self)
        self._finish()

    def _resume(self) -> None:
        if 0 < self.step < self.job.steps:
            self.cadence.taken(self.step)
            if self.holds:
                self._snapshot(hold=True)  # the restored state has no second copy yet
        self._request(self.step + 1)

    # ---------------------------------------------------------------- one step

    def _one_step(self) -> Iterator[Any]:
        began, number = time.perf_counter(), self.step + 1
        attempt = Making(self, number, self._begin(number))
        update = yield from self._maker.make(self, attempt)
        if update is None:
            return
        assert attempt.agreed is not None
        self._marks.end()
        self.step = number  # from here on the live state is that of this step
        self.tools.points("after_optimizer")
        shown = yield from self._maker.settle(self, self._made(attempt.agreed, update, began))
        self._step_s = time.perf_counter() - began
        if shown is not None:
            yield shown

    def _begin(self, number: int) -> list[MicroBatch]:
        """Returns this rank's micro-batches of the step."""
        self.tools.points.begin(number)
        if self._pace is not None:
            self._pace.begin()
        self._marks.begin()
        self._overlap.begin()
        self.tools.points("data")
        with self._spent.on("data_s"):
            return self.load(number)

    def _made(self, agreed: Agreed, update: Update, began: float) -> Made:
        metrics = self._metrics(agreed, update, began)
        step = Step(
            number=self.step,
            loss=agreed.loss,
            learning_rate=metrics["lr"],
            grad_norm=update.grad_norm,
            tokens=agreed.tokens,
            step_time_s=metrics["step_time_s"],
            generation=self.generation,
            world_size=self.groups.world_size,
            rank=self.groups.rank or 0,
            last=self.step == self.job.steps,
            metrics=update.metrics,
        )
        return Made(step, metrics)

    def _metrics(self, agreed: Agreed, update: Update, began: float) -> dict[str, Any]:
        """Of the step that has just been applied."""
        metrics: dict[str, Any] = {
            "loss": agreed.loss,
            "lr": self._maker.rate(self.step),
            "grad_norm": update.grad_norm,
            "tokens": agreed.tokens,
            "step_time_s": round(time.perf_counter() - began, 6),
            "applied_at_s": round(time.time(), 6),
        }
        note = self.note if self.groups.rank == 0 else None
        metrics |= self._overlap.told(self.step, metrics["step_time_s"], self._spent, note)
        if update.metrics:
            metrics["metrics"] = dict(update.metrics)
        if update.skipped:
            metrics["skipped"] = True
            if update.note and self.groups.rank == 0:
                self.note("step_skipped", update.note, {"step": self.step})
        if update.compiled is not None:
            told = notes.note_on_compiling(self.step, update.compiled, self.tools.worker)
            self.note("compiled", *told)
        if agreed.sample_ids:
            metrics["sample_ids"] = agreed.sample_ids
        return metrics

    def tell(self, metrics: dict[str, Any]) -> None:
        """Tells of the step that has just been applied."""
        number = self.step
        world = self.groups.world_size
        line = RecordStep(number, self.generation, world, self._layout, metrics)
        self.tools.snapshots.note_step(line)
        self.send(
            StepApplied(
                time.time(),
                self.tools.worker,
                self.generation,
                number,
                metrics,
                pace_s=self._pace.take() if self._pace is not None else 0.0,
                took_s=metrics["step_time_s"],
                spent=self._spent.take(),
            )
        )

    @property
    def generation(self) -> int:
        return self.groups.generation

    def progress(self) -> None:
        """What comes between two steps goes on: this is no hang. Raises GroupBroken."""
        self.groups.check()
        self.tools.points("data", self.step)

    def send(self, message: Any) -> None:
        self.tools.send(message)

    def note(self, event: str, reason: str, fields: dict[str, Any]) -> None:
        self.send(Note(self.tools.worker, self.generation, event, reason, fields))

    def _planned(self, number: int) -> list[Planned]:
        wanted = self.plan.wanted(number, self.engine.micro_batches_per_rank)
        return self.plan.micro_batches(number, wanted)

    def _request(self, number: int) -> None:
        if number <= self.job.steps:
            self.tools.prefetcher.request(number, [p.ids for p in self._planned(number)])

    def load(self, number: int) -> list[MicroBatch]:
        hang_s = self.job.elastic.hang_timeout_s
        loaded = self.tools.prefetcher.get(number, hang_s, self.progress)
        self._request(number + 1)
        return [
            MicroBatch(planned.number, read.data, planned.weight, read.ids)
            for planned, read in zip(self._planned(number), loaded, strict=True)
        ]

    def say(
        self, micro_batches: list[MicroBatch], loss: float, tokens: int, more: Sequence[float]
    ) -> Contribution:
        """What ``Making.agree`` says, whether to pause or stop, and how often to take snapshots.
        The one under way is complete before."""
        snapshots = self.tools.snapshots
        with self._spent.on("save_s"):
            snapshots.wait(self.groups.deadline())
        asked = self.flags.take()
        values = [loss, float(tokens), *asked, snapshots.take_cost_s(), self._step_s, *more]
        positions = self._positions(micro_batches)
        return Contribution(
            [*values, *positions, *self._consumed(micro_batches)], len(more), len(positions)
        )

    def settle(self, said: Contribution, summed: list[float], squares: float) -> Agreed:
        """Of what all members have ``said``, ``summed`` over them."""
        world, holding = self.groups.world_size, self.groups.assignment.holding
        total, count, pause, stop, checkpoint, snapshot, cost, step, *others = summed
        learned = self.cadence.learn(cost / max(holding, 1), step / world)
        if learned and self.groups.rank == 0:
            self.note("snapshot_interval", *notes.note_on_cadence(self.cadence))
        # Not into the flags: a request that came during the all-reduce would be lost.
        self.pausing, self.stopping = pause > 0, stop > 0
        self._checkpointing = checkpoint > 0
        if snapshot > 0:
            self.cadence.hurry()
        self.tools.snapshots.drop_before(self.tools.snapshots.newest())
        more, read = said.more, said.more + said.positions
        if said.positions and self.tools.data.stream is not None:
            self.tools.data.stream.take(others[more:read])
        ids = [int(sample) - 1 for sample in others[read:]]
        mean = total / max(count, 1.0)
        return Agreed(mean, int(count), squares, ids, others[:more])

    def _consumed(self, micro_batches: list[MicroBatch]) -> list[int]:
        """With ``audit``, what this member really consumed, see ``places``."""
        if not self.job.audit:
            return []
        batch = self.job.batch
        assert self.groups.rank is not None
        counts = self.groups.assignment.layout.counts_samples(self.groups.rank)
        consumed = micro_batches if counts else []
        return places(consumed, batch.global_batch_size, batch.micro_batch_size)

    def _positions(self, micro_batches: list[MicroBatch]) -> list[float]:
        """How far a stream was read: as many numbers on each member, see ``SampleStream.tell``."""
        if (stream := self.tools.data.stream) is None:
            return []
        assert self.groups.rank is not None
        counts = self.groups.assignment.layout.counts_samples(self.groups.rank)
        numbers = (micro.number for micro in micro_batches if micro.weight and counts)
        return stream.tell(self.step + 1, numbers)

    # ---------------------------------------------------------- keeping the state

    def keep(self) -> bool:
        """Starts the snapshot and the checkpoint that are due. Returns if a checkpoint was."""
        with self._spent.on("save_s"):
            return self._keep(self.step)

    def _keep(self, number: int) -> bool:
        every = self.job.checkpoint.every_steps
        final = number == self.job.steps or self.stopping
        asked = self._checkpointing or bool(every and number % every == 0)
        checkpoint = asked or (final and self.job.checkpoint.final)
        if self.pausing:  # before the snapshot: a leaver's state may be had from that alone
            self._share_residuals()
        if due := final or number >= self.cadence.next:
            self.cadence.taken(number)
        self.is_copying = due or checkpoint
        if (hold := due and self.holds) or checkpoint:
            self._snapshot(hold, checkpoint)
        return checkpoint

    def _snapshot(self, hold: bool, upload: bool = False) -> None:
        """Copies the live state to host memory: to hold it there, for an upload, or for both."""
        if upload:
            self._share_residuals()
        if hold:
            self._held_step = self.step
        tools, state = self.tools, self.engine.state()
        owned = self.formed.owned
        shard = tools.snapshots.take(
            self.step,
            state if hold else tools.checkpointer.owned_state(state, owned),
            self.groups,
            self.formed.peer_schemas,
            tools.points,
            on_held=self._held if hold else None,
            partial=not hold,
        )
        if upload:
            tools.checkpointed_step = self.step
            away_s, insists = self.job.elastic.suspend_timeout_s, partial(self._insists, self.step)
            what = "the last" if self._is_last(self.step) else "the last so far"
            patience = StorePatience(away_s, insists, what)
            tools.checkpointer.write(shard, owned, state, self.groups, patience)

    def _is_last(self, step: int) -> bool:
        return step == self.step and (step >= self.job.steps or self._maker.is_over)

    def _insists(self, step: int) -> bool:
        """Whether no later checkpoint may have what it has: a loop of the user's ends where it
        likes, so that its newest step may have been its last."""
        may_be = self._is_last(step) or (self.job.loop is not None and step == self.step)
        return may_be and not self.stopping and not is_called_off(self.groups, self.flags)

    def _share_residuals(self) -> None:
        """All members call it: before they change, and before one of them is written for all."""
        if self.job.comm.compress_replicas is not None:
            cast(Engine, self.engine).share_residuals(self.progress)

    def _held(self, step: int) -> None:
        self.send(StepHeld(time.time(), self.tools.worker, self.generation, step))

    # --------------------------------------------------------------------- the end

    def _finish(self) -> None:
        """Everything durable, then the digest, then WorkerDone. A pause comes before either."""
        tools = self.tools
        tools.snapshots.wait(self.groups.deadline())
        tools.points("finishing")
        # A loop of the user's ends where it likes: nobody knew that this step was the last.
        hold = self.holds and self.step > self._held_step
        upload = self.job.checkpoint.final and 0 < self.step != tools.checkpointed_step
        if hold or upload:
            self._snapshot(hold, upload)
            tools.snapshots.wait(self.groups.deadline())
        if not await_uploads(tools, self.groups, self.flags):
            return
        state, held = self.engine.state(), tools.snapshots.bytes_allocated
        self.note("host_memory", *notes.note_on_memory(state, held, self.groups.rank))
        owned = tools.checkpointer.owned_state(self.engine.state(), self.formed.owned)
        # It takes as long as the state is large: this is no hang.
        digest = state_digest(self.groups, owned, lambda: tools.points("finishing", self.step))
        self.send(WorkerDone(time.time(), tools.worker, self.generation, self.step, digest))
