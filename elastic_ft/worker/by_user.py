"""Steps that a function of the user's makes: see ``worker.loop.Maker`` and ``worker.steering``.

the user is dealt micro-batches -> its function: forward, backward, [agree], optimizer,
schedulers -> its step -> its code between two steps -> it asks for the next batch: what that
code has done is captured, and belongs to the step
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch

from elastic_ft.engines.base import MicroBatch, Update
from elastic_ft.engines.own_attempt import Running
from elastic_ft.errors import ConfigError, ElasticError, ScriptDiffers, UsageError
from elastic_ft.models.named import NamedSums, checked, fetched
from elastic_ft.worker import same_losses
from elastic_ft.worker.agreement import sum_over_members
from elastic_ft.worker.loop import Loop, Made, Making
from elastic_ft.worker.odd_ranks import check_checksum, odd_sum
from elastic_ft.worker.party import Party
from elastic_ft.worker.same_losses import Compared, check_same_losses
from elastic_ft.worker.steering import Dealt, Done, Ended, MakeHere, Steering
from elastic_ft.worker.step import Step
from elastic_ft.worker.traces import user_frames
from elastic_ft.worker.whereabouts import furthest, without_catching_up

ASIDE = 75  # exit code of a worker that came in at a moment when it could not (EX_TEMPFAIL)
COMES_LATE = (
    "it has come in between two steps, and can't take part in an evaluation or export that is "
    "made again, as the model is cut: another worker comes in after the next step"
)
# What a script raises where something is not there; a collective that broke raises RuntimeError.
LACKING = (AssertionError, AttributeError, LookupError, NameError, TypeError, ValueError)
DIFFERS = (
    "register: the state of {name} differs between ranks after step {step}: make it of what all "
    "ranks have (the step's loss, sums of ctx.evaluate), or leave it out"
)
RATES = (
    "@ctx.step: an optimizer's groups (its rate, here {rates}) are others on another rank as step "
    "{step} is made: they are made of what ranks do not share, a count of the script's own, say: "
    "make them of the step's place (batch.number, enumerated=True, the epoch), or give the count "
    "to ctx.register"
)
COUNTED = (
    "a count of the script's own (of its snapshot, say) begins elsewhere on some ranks: give the "
    "whole range, as the job knows its epoch, and leave out what loads the script's snapshot"
)
EPOCHS = (
    "ctx.epochs: here over {span}, on another rank over others, as step {step} is made: " + COUNTED
)
OVER = "ctx.epochs: {left}, are over here, and the others make step {step}: " + COUNTED
OVER_THERE = "ctx.epochs: over on another rank, and here step {step} is made: " + COUNTED
GATHERED, ALIKE = 3, 1e-3  # numbers of ``take_gathered``; by which its ranks may differ
GATHERED_DIFFERS = (
    "what the script gathers over ranks differs between them: gather, reduce and the like return "
    "this rank's, as a held-out set is gone through whole by each; of what micro-batches add up to "
    "take a named metric of ctx.backward, or ctx.latest.loss"
)
Handed = MakeHere | Dealt | Done | Ended | Step


class ByUser:
    """Args:
    own: what the user's thread wants.
    """

    def __init__(self, own: Steering) -> None:
        self._own, self._engine = own, own.engine
        self._over = False  # somebody's loop has ended
        self._rate = 0.0
        self._metrics: dict[str, float] = {}  # named, of the step
        self._alike = False  # ranks are known to name the same
        self._has_told_gathered = False
        self._has_trained = True  # this process has made the steps before
        self._others_have = False  # some have
        # A rank whose code has gone on from the state that others had this generation.
        self._ahead_of_others: int | None = None
        self._untold: dict[str, Any] | None = None  # the metrics of a step not told of yet
        self._moved = False  # the user's code may have, since what it registered was captured

    def enter(self, loop: Loop) -> None:
        """Who joined since somebody's loop has ended has no more to train either. Who is in the
        middle of what others do not know goes on with it by themselves."""
        own, groups = self._own, loop.groups
        places = [0.0] * groups.world_size
        places[groups.rank or 0] = own.at.place(loop.step)
        self._has_trained = own.made >= loop.step
        early, goes_on = own.ends_early(loop.step), own.wanted > loop.step and not own.ending
        said = [own.ending and not early, early, goes_on, self._has_trained, *places]
        sums = sum_over_members([float(value) for value in said], groups.world_size)
        ending, ended, going, trained, *places = sums
        self._others_have = trained > 0
        if ended and going:
            self._part(loop)
        self._over = ending > 0
        places = without_catching_up(places)
        loop.party = Party(groups, places)
        self._ahead_of_others = furthest(places)

    def _part(self, loop: Loop) -> None:
        """Some scripts are over that have made no step, and others go on: raises ScriptDiffers in
        the first where the others have made the steps before, and ConfigError in all if nobody
        has."""
        ends_early, step = self._own.ends_early(loop.step), loop.step + 1
        over = OVER.format(left=self._own.left, step=step)
        if loop.step == 0 or not self._others_have:
            raise ConfigError(over if ends_early else OVER_THERE.format(step=step))
        if ends_early:
            raise ScriptDiffers(over)

    @property
    def is_over(self) -> bool:
        return self._over or self._own.ending

    # ------------------------------------------------------------------------- one step

    def make(self, loop: Loop, attempt: Making) -> Generator[Handed, None, Update | None]:
        if attempt.number <= self._own.passed:
            cannot_go_back(loop, attempt.number, self._own.passed)
        running = self._begin(loop, attempt)
        groups = loop.groups
        dealt = Dealt(running, groups.world_size, groups.rank or 0, groups.generation)
        has_run = yield from self._given(loop, dealt)
        own = self._own
        if own.ending:
            if own.ends_early(loop.step - 1) and self._others_have:
                self._part(loop)
            return None  # who ends early with the others' step may end as they do
        check_follows(loop, own, attempt.number)
        own.wanted = attempt.number
        body, own.body = own.body, None
        attempting, own.attempting = own.attempting, False
        assert attempting or body is not None
        loop.party.meet(partial(step_aside, loop))
        loop.party = Party(groups)
        if own.checkpoint:
            own.checkpoint, loop.flags.checkpoint = False, True
        source, self._ahead_of_others = self._ahead_of_others, None
        if self._moved or source is not None:  # over what a snapshot may still be copying
            loop.tools.snapshots.wait(loop.groups.deadline())
            self._engine.capture()
        if self._moved:  # an errand of the step before came with its logs: it was told of
            self._note_logged(loop, own.take_logged())
            self._moved = False
        if source is not None:
            self._engine.own.take_from(source, loop.step, self._engine.check_groups)
        if loop.tools.data.stream is None and loop.tools.prefetcher.renew():
            attempt.micro_batches = running.micro_batches = loop.load(attempt.number)
        own.at.begin_step(attempt.number)  # not before: who breaks off above is where it was
        if has_run or source is not None:  # else nobody has changed what was captured
            self._engine.own.look_ahead(loop.step)
        if body is not None:
            own.result = self._result_of(body)
        else:
            yield from self._attempted()
        self._engine.end_attempt()
        return Update(running.norm or 0.0, metrics=self._metrics)

    def _result_of(self, body: Callable[[], Any]) -> Any:
        """Raises ScriptDiffers for what is raised by who has come in, where others have made the
        steps before: what they have may be what is missing. If not, they raise the same."""
        try:
            return body()
        except LACKING as error:
            if self._has_trained or not self._others_have or isinstance(error, ElasticError):
                raise
            where = f"; {frames[-1]}" if (frames := user_frames(error)) else ""
            raise ScriptDiffers(
                f"{type(error).__name__}: {error}, in a step's function of a worker that has come "
                f"in: what others keep between two steps belongs to ctx.register{where}"
            ) from error

    def _attempted(self) -> Iterator[Handed]:
        own = self._own
        own.raised, own.result = None, None
        yield MakeHere()
        if (raised := own.raised) is not None:
            own.raised = None
            raise raised

    def _begin(self, loop: Loop, attempt: Making) -> Running:
        def agree(
            loss: float, terms: int, squares: float, sums: Sequence[float]
        ) -> tuple[int, float]:
            return self._agree(loop, attempt, loss, terms, squares, sums)

        running = Running(attempt.number, attempt.micro_batches, agree, loop.tools.points)
        running.is_compared = attempt.is_compared
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
        span = zlib.crc32(self._own.span.encode()) >> 12  # squares add up exactly
        sums = [*sums, span, self._engine.own.sum_of_groups()]
        count, world, named = len(sums), loop.groups.world_size, self._engine.named
        if not self._alike:
            check_named_alike(named.names, world)
            self._alike = True
        compared = [*map(float, sums), *(float(x) * x for x in sums)]
        made = self._compared()
        shown = same_losses.told(made) if attempt.is_compared else []
        gathered, before = self._own.take_gathered(), len(shown) + GATHERED
        sent = [*shown, *gathered, *compared, *named.sums()]
        agreed = attempt.agree(loss, terms, squares, sent)
        seen, more = agreed.more[: len(shown)], agreed.more[before:]
        self._note_gathered(loop, agreed.more[len(shown) : before])
        summed, squared = more[:count], more[count : 2 * count]
        self._metrics = named.means(more[2 * count :])
        self._check_alike(loop, sums, list(summed), list(squared))
        if seen:
            self._check_first(loop, made, seen)
        self._rate = self._engine.optimizers[0].param_groups[0]["lr"]
        return agreed.tokens, agreed.squares

    def _note_gathered(self, loop: Loop, seen: Sequence[float]) -> None:
        """Of ``Steering.take_gathered``, all ranks' sums."""
        count, summed, squares = seen
        spread = count * squares - summed * summed  # of the values, times their count squared
        if spread > (ALIKE * summed) ** 2 and not self._has_told_gathered:
            self._has_told_gathered = True
            if loop.party.rank == 0:
                loop.note("ranks_differ", GATHERED_DIFFERS, {"step": loop.step})

    def _check_alike(
        self, loop: Loop, sums: Sequence[float], summed: list[float], squared: list[float]
    ) -> None:
        """Raises where ranks have other checksums. The last ones are of what is now: the loop
        over epochs, and optimizers' groups, as who has come in may have a rate of its own."""
        world = loop.groups.world_size
        number = odd_sum(summed, squared, world)
        if number is None:
            return
        names = self._engine.own.names
        if number < len(names):
            why = DIFFERS.format(name=names[number], step=loop.step)
        elif number == len(names):
            why = EPOCHS.format(span=self._own.span or "none", step=loop.step + 1)
        else:
            rates = ", ".join(
                f"{group['lr']:g}" for o in self._engine.optimizers for group in o.param_groups
            )
            why = RATES.format(step=loop.step + 1, rates=rates)
        place = (loop.groups.rank or 0, world, self._has_trained)
        check_checksum(float(sums[number]), *place, why, self._engine.check_groups)

    def _compared(self) -> Compared:
        """The losses of the global batch's first micro-batch here. None: the function told none of
        padding."""
        found = self._engine.running.compared if self._engine.running is not None else []
        losses = [float(loss) or None for loss in found]
        return Compared(*losses[:2]) if losses else Compared(None)

    def _check_first(self, loop: Loop, made: Compared, seen: Sequence[float]) -> None:
        engine, groups = self._engine, loop.groups
        place = (groups.rank or 0, groups.world_size, self._has_trained, loop.step + 1)
        check_same_losses(made, seen, *place, engine.device, engine.check_groups)

    def rate(self, step: int) -> float:
        return float(self._rate)

    # -------------------------------------------------------------------- between two steps

    def settle(self, loop: Loop, made: Made) -> Generator[Handed, None, Step | None]:
        self._untold = made.metrics
        self._own.at.end_step()
        self._own.made = loop.step
        yield from self._given(loop, made.step)
        self._capture(loop)
        loop.keep()
        if loop.tools.snapshots.newest():
            self._engine.forget_initial()
        return None

    def _given(self, loop: Loop, item: Dealt | Step | Ended) -> Generator[Handed, None, bool]:
        """To the user's thread, until it wants more than an errand; or not, where it has nothing to
        do between two steps. Returns whether that has run."""
        goes_on = self._own.goes_on
        if goes_on is not None and not isinstance(item, Ended):
            is_last = loop.pausing or loop.stopping or self.is_over
            if not is_last and goes_on(item):
                return False
        outside = loop.tools.points.outside
        with outside():
            yield item
        while (errand := self._own.take_errand()) is not None:
            if self._untold is not None:
                self._capture(loop)
            self._engine.own.look_ahead(loop.step)
            self._own.at.begin_errand()
            with outside():
                done = Done(errand(loop))
            self._own.at.is_pending = False
            with outside():
                yield done
            self._moved = True
        return True

    def _capture(self, loop: Loop) -> None:
        """What the user's code has done belongs to the step made last, which is told of."""
        self._engine.capture()
        self._moved = False
        logged = self._own.take_logged()
        if self._untold is None:
            self._note_logged(loop, logged)
            return
        metrics, self._untold = self._untold, None
        self._note_told(loop)
        if logged:
            metrics["logged"] = logged
        loop.tell(metrics)

    def _note_told(self, loop: Loop) -> None:
        told, self._own.told = self._own.told, []
        for why in told if loop.party.rank == 0 else ():
            loop.note("unregistered", why, {"worker": loop.tools.worker})

    def _note_logged(self, loop: Loop, logged: dict[str, Any]) -> None:
        """What came after an evaluation, which needs its step to be told of."""
        if logged and loop.party.rank == 0:
            fields = {"step": loop.step, "values": logged}
            loop.note("logged", f"logged after step {loop.step}", fields)

    def leave(self, loop: Loop) -> Iterator[Handed]:
        if not self._own.ending:
            finished = self._over or loop.step >= loop.job.steps
            yield from self._given(loop, Ended("" if finished else "it was stopped"))
        if loop.groups.world_size > 1:
            loop.tools.points.begin(loop.step + 2)  # ahead of whoever makes another step
            Party(loop.groups).leave(loop.step)


def step_aside(loop: Loop, why: str = COMES_LATE) -> NoReturn:
    """Ends this process: the others can't go on with it. What takes its place comes in later."""
    loop.note("stepped_aside", why, {"worker": loop.tools.worker})
    os._exit(ASIDE)


def cannot_go_back(loop: Loop, step: int, passed: int) -> NoReturn:
    """No process goes back in its script. Raises UsageError where no other takes its place."""
    leave_to_another(
        loop, f"step {step} is made again, of a ctx.epochs that its script has left after {passed}"
    )


def check_follows(loop: Loop, own: Steering, step: int) -> None:
    """Nobody is in the middle of a ctx.epochs that ends before ``step``: who broke off in its last
    step, which others have made, is, and would make ``step`` with the function of that loop."""
    if own.at.step > 0 and own.span_last < step and own.span:
        why = f"its script is in step {own.at.step} of a ctx.epochs that ends with {own.span_last}"
        leave_to_another(loop, f"{why}, and the others, who have made that, make step {step}")


def leave_to_another(loop: Loop, why: str) -> NoReturn:
    if loop.job.elastic.max_workers == 1:
        raise UsageError(f"ctx.epochs: {why}: start the job again, it goes on from there")
    step_aside(loop, f"{why}: another worker begins there")


def check_named_alike(names: Sequence[str] | None, world: int) -> None:
    """Raises ConfigError where ranks have other named metrics than this one. A collective."""
    found = float(zlib.crc32(repr(names or ()).encode()) >> 12)  # squares add up exactly
    total, squares = sum_over_members([found, found * found], world)
    if world * squares != total * total:
        raise ConfigError(
            f"ctx.backward: ranks have different named metrics, here {', '.join(names or ['none'])}"
        )


def summed(run: Any, micro_batches: Iterator[MicroBatch]) -> tuple[float, float, NamedSums]:
    """Of ``run(micro_batch)``, which returns (sum, count), and named metrics if it likes."""
    total: Any = 0.0
    terms: Any = 0.0
    sums = NamedSums()
    for micro_batch in micro_batches:
        found, count, *named = run(micro_batch)
        sums.add(checked(named[0]) if named else {}, micro_batch.weight)
        if micro_batch.weight:
            total, terms = total + _number(found), terms + _number(count)
    told, counted = fetched([total, terms])
    return told, counted, sums


def _number(value: Any) -> torch.Tensor | float:
    """In double precision; of a tensor, where it is."""
    return value.detach().double().reshape(()) if isinstance(value, torch.Tensor) else float(value)
