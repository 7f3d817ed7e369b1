"""Steps that a function of the user's makes: see ``worker.loop.Maker`` and ``worker.steering``.

the user is dealt micro-batches -> its function: forward, backward, [agree], optimizer,
schedulers -> its step -> its code between two steps -> it asks for the next batch: what that
code has done is captured, and belongs to the step
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any

from elastic_ft.engines.base import MicroBatch, Update
from elastic_ft.engines.own_attempt import Running
from elastic_ft.errors import ConfigError
from elastic_ft.worker.agreement import sum_over_members
from elastic_ft.worker.loop import Loop, Made, Making
from elastic_ft.worker.party import Party, furthest, place
from elastic_ft.worker.steering import Dealt, Done, Ended, Steering
from elastic_ft.worker.step import Step

Handed = Dealt | Done | Ended | Step


class ByUser:
    """Args:
    own: what the user's thread wants.
    """

    def __init__(self, own: Steering) -> None:
        self._own, self._engine = own, own.engine
        self._over = False  # somebody's loop has ended
        self._rate = 0.0
        # A rank whose code has gone on from the state that others had this generation.
        self._ahead_of_others: int | None = None
        self._untold: dict[str, Any] | None = None  # the metrics of a step not told of yet
        self._moved = False  # the user's code may have, since what it registered was captured

    def enter(self, loop: Loop) -> None:
        """Who joined since somebody's loop has ended has no more to train either. Who is in the
        middle of what others do not know goes on with it by themselves."""
        own, groups = self._own, loop.groups
        places = [0.0] * groups.world_size
        places[groups.rank or 0] = place(own.errands, own.pending, own.in_step)
        ending, *places = sum_over_members([float(own.ending), *places], groups.world_size)
        self._over = ending > 0
        loop.party = Party(groups, places)
        self._ahead_of_others = furthest(places)

    @property
    def is_over(self) -> bool:
        return self._over or self._own.ending

    # ------------------------------------------------------------------------- one step

    def make(self, loop: Loop, attempt: Making) -> Generator[Handed, None, Update | None]:
        running = self._begin(loop, attempt)
        groups = loop.groups
        dealt = Dealt(running, groups.world_size, groups.rank or 0, groups.generation)
        yield from self._given(loop, dealt)
        own = self._own
        if own.ending:
            return None
        assert own.body is not None
        body, own.body = own.body, None
        loop.party = Party(groups)
        if own.checkpoint:
            own.checkpoint, loop.flags.checkpoint = False, True
        source, self._ahead_of_others = self._ahead_of_others, None
        if self._moved or source is not None:
            self._engine.capture()
        if self._moved:  # an errand of the step before came with its logs: it was told of
            self._note_logged(loop, own.take_logged())
            self._moved = False
        if source is not None:
            self._engine.own.take_from(source, loop.step)
        own.errands, own.in_step = 0, True  # not before: who breaks off above is where it was
        self._engine.own.look_ahead(loop.step)
        own.result = body()
        self._engine.end_attempt()
        return Update(running.norm or 0.0)

    def _begin(self, loop: Loop, attempt: Making) -> Running:
        def agree(
            loss: float, terms: int, squares: float, sums: Sequence[float]
        ) -> tuple[int, float]:
            return self._agree(loop, attempt, loss, terms, squares, sums)

        running = Running(attempt.number, attempt.micro_batches, agree, loop.tools.points)
        self._engine.attempt(running)
        return running

    def _agree(
        self,
        loop: Loop,
        attempt: Making,
        loss: float,
        terms: int,
        squares: float,
        sums: Sequence[float],
    ) -> tuple[int, float]:
        """Also that what is registered is the same everywhere, of which ``sums`` are checksums."""
        if attempt.agreed is not None:  # another optimizer's, of the same step
            agreed = attempt.agree(loss, terms, squares)
            return agreed.tokens, agreed.squares
        compared = [*map(float, sums), *(float(x) * x for x in sums)]
        agreed = attempt.agree(loss, terms, squares, compared)
        count, world = len(sums), loop.groups.world_size
        summed, squared = list(agreed.more[:count]), list(agreed.more[count:])
        if name := self._engine.own.differing(summed, squared, world):
            raise ConfigError(
                f"register: the state of {name} differs between ranks after step {loop.step}: make "
                "it of what all ranks have (the step's loss, sums of ctx.evaluate), or leave it out"
            )
        self._rate = self._engine.optimizers[0].param_groups[0]["lr"]
        return agreed.tokens, agreed.squares

    def rate(self, step: int) -> float:
        return float(self._rate)

    # -------------------------------------------------------------------- between two steps

    def settle(self, loop: Loop, made: Made) -> Generator[Handed, None, Step | None]:
        self._untold = made.metrics
        self._own.in_step = False
        yield from self._given(loop, made.step)
        self._own.errands = 0
        self._capture(loop)
        loop.keep()
        if loop.tools.snapshots.newest():
            self._engine.forget_initial()
        return None

    def _given(self, loop: Loop, item: Handed) -> Iterator[Handed]:
        """To the user's thread, until it wants more than an errand."""
        outside = loop.tools.points.outside
        with outside():
            yield item
        while (errand := self._own.take_errand()) is not None:
            if self._untold is not None:
                self._capture(loop)
            self._engine.own.look_ahead(loop.step)
            if not self._own.pending:
                self._own.errands += 1
            self._own.pending = True
            with outside():
                done = Done(errand(loop))
            self._own.pending = False
            with outside():
                yield done
            self._moved = True

    def _capture(self, loop: Loop) -> None:
        """What the user's code has done belongs to the step made last, which is told of."""
        self._engine.capture()
        self._moved = False
        logged = self._own.take_logged()
        if self._untold is None:
            self._note_logged(loop, logged)
            return
        metrics, self._untold = self._untold, None
        if logged:
            metrics["logged"] = logged
        loop.tell(metrics)

    def _note_logged(self, loop: Loop, logged: dict[str, Any]) -> None:
        """What came after an evaluation, which needs its step to be told of."""
        if logged and loop.party.rank == 0:
            fields = {"step": loop.step, "values": logged}
            loop.note("logged", f"logged after step {loop.step}", fields)

    def leave(self, loop: Loop) -> Iterator[Handed]:
        if not self._own.ending:
            finished = self._over or loop.step >= loop.job.steps
            yield from self._given(loop, Ended("" if finished else "it was stopped"))


def summed(run: Any, micro_batches: Iterator[MicroBatch]) -> tuple[float, float]:
    """Of ``run(micro_batch)``, which returns (sum, count), over all of them."""
    total, terms = 0.0, 0.0
    for micro_batch in micro_batches:
        found, count = run(micro_batch)
        total += float(found) * micro_batch.weight
        terms += float(count) * micro_batch.weight
    return total, terms
