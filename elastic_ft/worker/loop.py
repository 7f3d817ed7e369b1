"""The training loop of one generation, and its safe points.

    data -> forward, backward -> [snapshot of the last step complete] -> agree -> optimizer
         -> report -> start this step's snapshot -> boundary

``agree`` is one small collective in host memory: loss, tokens, the gradients' norm, and whether
anyone was asked to pause or stop, so that all members stop after the same step. It is the step's
last collective. Once it has passed, nothing between it and the boundary can keep a healthy member
from applying the step; who fails before it has not applied it (I4).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from elastic_ft.config import Job
from elastic_ft.core.batches import DataOrder, deal, step_batch
from elastic_ft.core.events import RecordStep, StepApplied, StepHeld, WorkerDone
from elastic_ft.core.intervals import Cadence
from elastic_ft.data.dataset import DataBundle
from elastic_ft.data.prefetch import Prefetcher
from elastic_ft.engines.base import Engine, MicroBatch, Update
from elastic_ft.engines.learning_rates import learning_rate
from elastic_ft.errors import GroupBroken
from elastic_ft.faults import Points
from elastic_ft.groups.groups import Groups
from elastic_ft.state.checkpointer import Checkpointer, Owned
from elastic_ft.state.digest import state_digest
from elastic_ft.state.snapshot import Schema, Snapshots
from elastic_ft.transport.control import Note
from elastic_ft.worker.agreement import Agreed, places, sum_over_members
from elastic_ft.worker.layer_timer import LayerTimer

UPLOAD_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Step:
    """What a train loop sees of one step.

    A step is yielded once all members have applied it. If its state does not survive a failure it
    is run, and yielded, again.
    """

    number: int
    loss: float  # mean per token (or per term) over the global batch
    learning_rate: float
    grad_norm: float
    tokens: int
    step_time_s: float
    generation: int
    world_size: int
    rank: int
    eval_loss: float | None = None
    checkpointed: bool = False  # a checkpoint of this step has been started
    last: bool = False


@dataclass(slots=True)
class Flags:
    """What the controller asks of a running generation; read at the next agreement."""

    pause: bool = False
    stop: bool = False
    checkpoint: bool = False


@dataclass(slots=True)
class Formed:
    """One formed generation, ready to train."""

    groups: Groups
    owned: Owned
    peer_schemas: dict[int, Schema]  # of the ranks whose copies are kept here
    step: int


@dataclass(slots=True)
class Tools:
    """What outlives every generation (I6)."""

    job: Job
    worker: str
    engine: Engine
    data: DataBundle
    prefetcher: Prefetcher
    snapshots: Snapshots
    checkpointer: Checkpointer
    points: Points
    send: Callable[[Any], object]
    checkpointed_step: int = 0  # the newest step with a checkpoint, committed or begun here


class Spent:
    """What the training thread waited for since the last step was reported, in seconds."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def on(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._add(name, time.perf_counter() - began)

    def take(self) -> dict[str, float]:
        taken, self._seconds = self._seconds, {}
        return {name: round(seconds, 6) for name, seconds in taken.items()}

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds


class Loop:
    """Attributes:
    step: the last step applied here: the live state is that of this step.
    """

    def __init__(self, tools: Tools, formed: Formed, flags: Flags) -> None:
        self.tools, self.formed, self.flags = tools, formed, flags
        self.groups, self.job, self.engine = formed.groups, tools.job, tools.engine
        self.step = formed.step
        self.order = DataOrder(self.job.seed, len(tools.data.train))
        layout = self.groups.assignment.layout
        assert self.groups.rank is not None
        self._layout = str(layout)
        self.data_rank = layout.data_rank(self.groups.rank)
        self.dealt = deal(self.job.batch.micro_batches, layout.data_parallel_size)
        self.holds = self.groups.assignment.holds
        snapshot = self.job.snapshot
        every = None if snapshot.every_steps == "auto" else snapshot.every_steps
        self.cadence = Cadence(every, snapshot.max_cost, snapshot.max_steps)
        self._step_s = 0.0  # of the step before
        self._spent = Spent()
        self._pace: LayerTimer | None = None
        if not layout.waits_within_layers:
            self._pace = LayerTimer(self.engine.blocks, self.engine.device)
        # As all members agreed in the running step:
        self._pausing = self._stopping = self._checkpointing = False

    def steps(self) -> Iterator[Step]:
        """Runs until the last step, a pause or a stop. Raises GroupBroken and user errors."""
        try:
            yield from self._steps()
        finally:
            if self._pace is not None:
                self._pace.close()

    def _steps(self) -> Iterator[Step]:
        if self.holds and 0 < self.step < self.job.steps:
            self._snapshot(hold=True)  # the restored state has no second copy yet
        self._request(self.step + 1)
        while self.step < self.job.steps:
            result = self._one_step()
            yield result
            if self._pausing:  # with the second copies: they are a source, and survive a loss
                self.tools.snapshots.wait(self.groups.deadline())
                return
            if self._stopping:
                break
        self._finish()

    # ---------------------------------------------------------------- one step

    def _one_step(self) -> Step:
        began = time.perf_counter()
        number, points = self.step + 1, self.tools.points
        agreed = self._compute(number)
        update = self.engine.apply(number, agreed.tokens, agreed.squares, points)
        self.step = number  # from here on the live state is that of this step
        points("after_optimizer")
        metrics = self._report(agreed, update, began)
        with self._spent.on("save_s"):
            checkpointed = self._keep(number)
        eval_loss = self._evaluate_if_due(number)
        self._step_s = time.perf_counter() - began
        return Step(
            number=number,
            loss=agreed.loss,
            learning_rate=metrics["lr"],
            grad_norm=update.grad_norm,
            tokens=agreed.tokens,
            step_time_s=metrics["step_time_s"],
            generation=self._generation,
            world_size=self.groups.world_size,
            rank=self.groups.rank or 0,
            eval_loss=eval_loss,
            checkpointed=checkpointed,
            last=number == self.job.steps,
        )

    def _compute(self, number: int) -> Agreed:
        """Up to the agreement, the step's last collective: the gradients are here."""
        points, spent, snapshots = self.tools.points, self._spent, self.tools.snapshots
        points.begin(number)
        if self._pace is not None:
            self._pace.begin()
        points("data")
        with spent.on("data_s"):
            micro_batches = self._load(number)
        loss, tokens = self.engine.run_batch(number, micro_batches, points)
        squares = self.engine.square_norm()
        with spent.on("save_s"):
            snapshots.wait(self.groups.deadline())
        cost_s = snapshots.take_cost_s()
        consumed = self._consumed(micro_batches)
        agreed = self._agree(loss, tokens, squares, cost_s, consumed)
        snapshots.drop_before(snapshots.newest())
        return agreed

    def _report(self, agreed: Agreed, update: Update, began: float) -> dict[str, Any]:
        """Tells of the step that has just been applied. Returns its metrics."""
        number, at_s = self.step, time.time()
        metrics: dict[str, Any] = {
            "loss": agreed.loss,
            "lr": learning_rate(self.job.optimizer, self.job.steps, number),
            "grad_norm": update.grad_norm,
            "tokens": agreed.tokens,
            "step_time_s": round(time.perf_counter() - began, 6),
            "applied_at_s": round(at_s, 6),
        }
        if update.skipped:
            metrics["skipped"] = True
            self._note_skip(number, update.note)
        if agreed.sample_ids:
            metrics["sample_ids"] = agreed.sample_ids
        world = self.groups.world_size
        line = RecordStep(number, self._generation, world, self._layout, metrics)
        self.tools.snapshots.note_step(line)
        self._send(
            StepApplied(
                at_s,
                self.tools.worker,
                self._generation,
                number,
                metrics,
                pace_s=self._pace.take() if self._pace is not None else 0.0,
                took_s=metrics["step_time_s"],
                spent=self._spent.take(),
            )
        )
        return metrics

    @property
    def _generation(self) -> int:
        return self.groups.generation

    def _send(self, message: Any) -> None:
        self.tools.send(message)

    def _planned(self, number: int) -> list[tuple[int, ...]]:
        """The samples of this rank's micro-batches, padded where the engine must (I2, I3)."""
        batch, dealt = self.job.batch, self.dealt[self.data_rank]
        size = batch.micro_batch_size
        ids = list(step_batch(self.order, number, batch.global_batch_size, size, dealt))
        wanted = self.engine.micro_batches_per_rank([len(d) for d in self.dealt])
        return ids + ids[:1] * (wanted - len(ids))

    def _request(self, number: int) -> None:
        if number <= self.job.steps:
            self.tools.prefetcher.request(number, self._planned(number))

    def _load(self, number: int) -> list[MicroBatch]:
        loaded = self.tools.prefetcher.get(number, self.job.elastic.hang_timeout_s)
        self._request(number + 1)
        dealt = self.dealt[self.data_rank]
        return [
            MicroBatch(dealt.start + index, read.data, float(index < len(dealt)), read.ids)
            for index, read in enumerate(loaded)
        ]

    def _agree(
        self, loss: float, tokens: int, squares: float, cost_s: float, consumed: list[int]
    ) -> Agreed:
        """Settles whether to pause or stop, and how often to take snapshots.

        Args:
            loss, tokens, squares: this rank's sums, see ``Engine.run_batch`` and ``square_norm``.
            cost_s: of the snapshot that has ended, 0 if none has.
            consumed: see ``_consumed``.
        """
        asked, self.flags.checkpoint = self.flags.checkpoint, False
        wishes = [float(self.flags.pause), float(self.flags.stop), float(asked)]
        values = [loss, float(tokens), squares, *wishes, cost_s, self._step_s, *consumed]
        world, holding = self.groups.world_size, self.groups.assignment.holding
        summed = sum_over_members(values, world)
        total, count, squares, pause, stop, checkpoint, cost, step, *samples = summed
        learned = self.cadence.learn(cost / max(holding, 1), step / world)
        if learned and self.groups.rank == 0:
            self._note_cadence()
        # Not into the flags: a request that came during the all-reduce would be lost.
        self._pausing, self._stopping = pause > 0, stop > 0
        self._checkpointing = checkpoint > 0
        ids = [int(sample) - 1 for sample in samples]
        return Agreed(total / max(count, 1.0), int(count), squares, ids)

    def _consumed(self, micro_batches: list[MicroBatch]) -> list[int]:
        """With ``audit``, what this member really consumed, see ``places``."""
        if not self.job.audit:
            return []
        batch = self.job.batch
        assert self.groups.rank is not None
        counts = self.groups.assignment.layout.counts_samples(self.groups.rank)
        consumed = micro_batches if counts else []
        return places(consumed, batch.global_batch_size, batch.micro_batch_size)

    # ---------------------------------------------------------- keeping the state

    def _keep(self, number: int) -> bool:
        """Starts the snapshot and the checkpoint that are due. Returns if a checkpoint was."""
        every = self.job.checkpoint.every_steps
        final = number == self.job.steps or self._stopping
        due = self._checkpointing or bool(every and number % every == 0)
        checkpoint = due or (final and self.job.checkpoint.final)
        hold = self.holds and (final or number >= self.cadence.next)
        if hold or checkpoint:
            self._snapshot(hold, checkpoint)
        return checkpoint

    def _snapshot(self, hold: bool, upload: bool = False) -> None:
        """Copies the live state to host memory: to hold it there, for an upload, or for both."""
        if hold:
            self.cadence.taken(self.step)
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
            tools.checkpointer.write(shard, owned, state, self.groups)

    def _note_cadence(self) -> None:
        every, cost_s, step_s = self.cadence.every, self.cadence.cost_s, self.cadence.step_s
        reason = (
            f"a snapshot costs {cost_s * 1e3:.1f} ms, a step takes {step_s * 1e3:.0f} ms: one "
            f"every {every} steps is {cost_s / (step_s * every):.1%} of the time"
        )
        fields = {"every_steps": every, "cost_s": round(cost_s, 6), "step_s": round(step_s, 6)}
        self._send(Note(self.tools.worker, self._generation, "snapshot_interval", reason, fields))

    def _note_skip(self, step: int, note: str) -> None:
        if note and self.groups.rank == 0:
            worker, fields = self.tools.worker, {"step": step}
            self._send(Note(worker, self._generation, "step_skipped", note, fields))

    def _held(self, step: int) -> None:
        self._send(StepHeld(time.time(), self.tools.worker, self._generation, step))

    # ------------------------------------------------------------------ evaluation

    def _evaluate_if_due(self, number: int) -> float | None:
        every = self.job.data.eval_every_steps
        held_out = self.tools.data.evaluation
        if not every or held_out is None or (number % every and number != self.job.steps):
            return None
        self.tools.points("data")
        loss, tokens = self.engine.evaluate(self._eval_batches(number, held_out))
        total, count = sum_over_members([loss, float(tokens)], self.groups.world_size)
        mean = total / max(count, 1.0)
        if self.groups.rank == 0:
            fields = {"step": number, "loss": mean, "tokens": int(count)}
            reason = f"held-out loss after step {number}"
            self._send(Note(self.tools.worker, self._generation, "evaluated", reason, fields))
        return mean

    def _eval_batches(self, number: int, held_out: Any) -> Iterator[MicroBatch]:
        """Each is loaded, and a mark of progress, when the engine comes to it."""
        size = self.job.batch.micro_batch_size
        count = min(self.job.data.eval_samples, len(held_out))
        starts = range(0, count, size)
        dealt = deal(len(starts), len(self.dealt))
        mine = [starts[i] for i in dealt[self.data_rank]]
        padding = max(len(d) for d in dealt) - len(mine)
        for weight, first in [*((1.0, s) for s in mine), *((0.0, 0) for _ in range(padding))]:
            self.tools.points("data", number)
            samples = [held_out[i] for i in range(first, min(first + size, count))]
            yield MicroBatch(first, held_out.collate(samples), weight)

    # --------------------------------------------------------------------- the end

    def _note_memory(self) -> None:
        own = sum(t.local.numel() * t.local.element_size() for t in self.engine.state().values())
        held = self.tools.snapshots.bytes_allocated
        fields = {"state_bytes": own, "snapshot_bytes": held, "rank": self.groups.rank}
        reason = f"snapshots take {held / max(own, 1):.2f} bytes per byte of this rank's state"
        self._send(Note(self.tools.worker, self._generation, "host_memory", reason, fields))

    def _finish(self) -> None:
        """Everything durable, then the digest, then WorkerDone. A pause comes before either."""
        tools = self.tools
        tools.snapshots.wait(self.groups.deadline())
        tools.points("finishing")
        hold = self.holds and self.formed.step == self.step > 0
        upload = (
            self.job.checkpoint.final and self.step > 0 and tools.checkpointed_step != self.step
        )
        if hold or upload:
            self._snapshot(hold, upload)
            tools.snapshots.wait(self.groups.deadline())
        if not self._await_uploads():
            return
        self._note_memory()
        owned = tools.checkpointer.owned_state(self.engine.state(), self.formed.owned)
        # It takes as long as the state is large: this is no hang.
        digest = state_digest(self.groups, owned, lambda: tools.points("finishing", self.step))
        self._send(WorkerDone(time.time(), tools.worker, self._generation, self.step, digest))

    def _await_uploads(self) -> bool:
        """Returns whether they have ended, each by its own deadline; False if a pause came first.

        Raises GroupBroken.
        """
        while not self.tools.checkpointer.wait_all(UPLOAD_POLL_S):
            self.tools.points("finishing")  # an upload takes as long as it takes: this is no hang
            if self.groups.aborted:
                raise GroupBroken(self.groups.aborted)
            if self.flags.pause:
                return False
        return True
