"""Ranks whose loops over epochs are not the same: who is refused, and who steps aside."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from elastic_ft.errors import ConfigError, ElasticError, GroupBroken, ScriptDiffers, UsageError
from elastic_ft.training.context import Context
from elastic_ft.worker import by_user
from elastic_ft.worker.by_user import ByUser
from elastic_ft.worker.party import Party
from elastic_ft.worker.steering import Ended, Steering
from elastic_ft.worker.step import Step
from tests.oneproc.test_own_context import context, trained
from tests.oneproc.test_party import SteppedAside, groups

PASS = 2  # steps of an epoch


def loop_of(ctx: Context, step: int) -> Any:
    """Of a generation of this process alone, that begins with ``step``."""
    of_world: Any = groups(0, [0.0], HashStore())
    of_world.generation = 1
    tools = SimpleNamespace(
        points=SimpleNamespace(outside=contextlib.nullcontext),
        data=SimpleNamespace(stream=None),
        prefetcher=SimpleNamespace(renew=lambda: False),
        worker="w0",
    )

    def note(event: str, reason: str, fields: Any) -> None:
        raise SteppedAside(f"{event}: {reason}")

    loop = SimpleNamespace(job=ctx.job, tools=tools, groups=of_world, step=step, note=note)
    loop.party, loop.pausing, loop.stopping = Party(of_world), False, False
    return loop


def by_makers(ctx: Context, first: int, last: int) -> None:
    """Has the context's steps made by what makes them in a job. One that breaks has been made by
    others: the next generation begins with it."""
    own = ctx._steering("a test")

    def items() -> Any:
        generation = 1
        for number in range(first, last + 1):
            loop = loop_of(ctx, number - 1)
            loop.groups.generation = generation
            attempt: Any = SimpleNamespace(number=number, micro_batches=[], is_compared=False)
            own.engine.end_attempt = lambda: None  # type: ignore[method-assign]
            try:
                update = yield from ByUser(own).make(loop, attempt)
            except GroupBroken:
                generation += 1
                continue
            if update is None:
                return
            own.at.end_step()
            own.made = number
            step = Step(number, 0.0, 0.1, 0.0, 0, 0.0, 1, 1, 0)
            if own.goes_on is None or not own.goes_on(step):
                yield step
        yield Ended("")

    ctx.worker.next_item = items().__next__  # type: ignore[method-assign]


def in_a_function(ctx: Context, loader: Any, make: Callable[[int], None]) -> None:
    step = ctx.step(lambda batch: make(batch.number))
    for batch in loader:
        step(batch)


def in_a_block(ctx: Context, loader: Any, make: Callable[[int], None]) -> None:
    for _ in loader:
        with ctx.attempt() as attempt:
            make(attempt.batch.number)


def in_each(ctx: Context, loader: Any, make: Callable[[int], None]) -> None:
    ctx.each(loader, whole=True)(lambda batch: make(batch.number))


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize(
    ("how", "broken", "workers", "error"),
    [
        (in_a_function, 6, 1, UsageError),
        (in_a_function, 6, 2, SteppedAside),
        (in_a_function, 4, 2, None),
        (in_a_block, 6, 2, None),
        (in_each, 6, 2, None),  # the function of a step that nobody looks at
    ],
)
def test_who_broke_off_in_the_last_step_of_its_epochs_makes_no_step_behind_them(
    how: Any, broken: int, workers: int, error: type[Exception] | None, tail: bool
) -> None:
    """Others have made that one. It made the next in the function of the loop that was over, and
    was taken for one whose epochs are others."""
    (ctx, loader), seen = context(workers=workers), list[tuple[str, int]]()
    by_makers(ctx, first=1, last=12)
    phase = "first"

    def make(number: int) -> None:
        seen.append((phase, number))
        if number == broken and len(seen) == broken:
            raise GroupBroken("a worker was lost")

    refused = pytest.raises(error, match=r"is in step 6 .* ends with 6") if error else None
    with refused or contextlib.nullcontext():
        for _ in ctx.epochs(3):
            how(ctx, loader, make)
        phase = "second"
        for _ in range(1) if tail else ctx.epochs(3, 6):
            how(ctx, loader, make)
    made = [("first", number) for number in range(1, 7)]
    assert seen == made + [("second", number) for number in range(7, 13) if error is None]


@pytest.mark.parametrize(("span", "before"), [((0,), True), ((3,), True), ((4,), False)])
def test_epochs_that_are_over_with_the_job_s_step(span: tuple[int, ...], before: bool) -> None:
    """Of who joins after step 8, the last of four epochs; or before it."""
    ctx, loader = context(first=9)
    assert trained(ctx, loader, *span) == []
    own = ctx._steering("a test")
    assert not own.ends_early(made=8), "the script goes on"
    own.ending = True
    assert own.ends_early(made=8) and own.ends_early(made=7) is before
    own.at.begin_step(9)
    assert not own.ends_early(made=9), "it has trained"


def joined(passed: int, step: int) -> Steering:
    """Of a script that has come in, or was restarted, with ``step``, and is over, as its epochs
    end with ``passed``."""
    ctx, loader = context(first=step + 1)
    assert trained(ctx, loader, passed // PASS) == []
    own = ctx._steering("a test")
    own.ending = True
    return own


def asking(step: int, made: int, wanted: int) -> Steering:
    """Of a script that goes on, and has made ``made``."""
    ctx, _ = context(first=step + 1)
    own = ctx._steering("a test")
    own.made, own.wanted = made, wanted
    own.at.is_new = not made
    return own


def entered(
    monkeypatch: pytest.MonkeyPatch, ranks: Sequence[Steering], step: int
) -> list[tuple[type[Exception] | None, bool]]:
    """What each has raised as a generation with ``step`` began; whether its training is over."""
    said = list[list[float]]()

    def enter(rank: int) -> tuple[type[Exception] | None, bool]:
        of_world = groups(rank, [0.0] * len(ranks), HashStore())
        maker = ByUser(ranks[rank])
        try:
            maker.enter(SimpleNamespace(groups=of_world, step=step))  # type: ignore[arg-type]
        except ElasticError as error:
            return type(error), False
        return None, maker.is_over

    def says(values: list[float], world: int) -> list[float]:
        said.append(values)
        return values

    monkeypatch.setattr(by_user, "sum_over_members", says)
    for rank in range(len(ranks)):
        enter(rank)
    sums = [sum(each) for each in zip(*said, strict=True)]
    monkeypatch.setattr(by_user, "sum_over_members", lambda values, world: sums)
    return [enter(rank) for rank in range(len(ranks))]


@pytest.mark.parametrize("passed", [8, 10])
def test_ranks_of_whom_one_is_over_at_a_restart_fail_by_name(
    monkeypatch: pytest.MonkeyPatch, passed: int
) -> None:
    """One had a snapshot of its script's. Ten generations broke, and no failure named the cause;
    or the job had completed, half trained."""
    ranks = [joined(passed, 10), asking(10, 0, 11), asking(10, 0, 11)]
    assert entered(monkeypatch, ranks, 10) == [(ConfigError, False)] * 3


@pytest.mark.parametrize("passed", [8, 10])
def test_ranks_that_are_all_over_at_a_restart_end(
    monkeypatch: pytest.MonkeyPatch, passed: int
) -> None:
    ranks = [joined(passed, 10), joined(passed, 10)]
    assert entered(monkeypatch, ranks, 10) == [(None, True)] * 2


def test_who_was_not_dealt_its_step_yet_may_be_over_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generation broke as one had ended: the others' scripts had not been asked."""
    for made in (0, 10):
        ranks = [joined(10, 10), asking(10, made, made)]
        assert entered(monkeypatch, ranks, 10) == [(None, True), (None, False)]


@pytest.mark.parametrize("passed", [8, 10])
def test_who_joins_with_epochs_that_end_with_the_step_of_the_others_is_refused(
    monkeypatch: pytest.MonkeyPatch, passed: int
) -> None:
    """All were over with it, half trained."""
    ranks = [asking(10, 10, 11), joined(passed, 10), asking(10, 10, 11)]
    others = (None, False)
    assert entered(monkeypatch, ranks, 10) == [others, (ScriptDiffers, False), others]


@pytest.mark.parametrize(("passed", "error"), [(8, ScriptDiffers), (10, None)])
def test_who_joins_is_refused_at_once_where_its_epochs_end_before(
    passed: int, error: type[Exception] | None
) -> None:
    """With the others' step they may be over in all."""
    ctx, loader = context()
    by_makers(ctx, first=11, last=12)
    assert trained(ctx, loader, passed // PASS) == []
    own = ctx._steering("a test")
    own.ending = True
    maker = ByUser(own)
    maker._others_have = True
    attempt: Any = SimpleNamespace(number=11, micro_batches=[], is_compared=False)
    with pytest.raises(error) if error else contextlib.nullcontext():
        list(maker.make(loop_of(ctx, 10), attempt))


@pytest.mark.parametrize("second", [True, False])
def test_a_loop_behind_epochs_that_the_script_breaks_off_ends_for_all(second: bool) -> None:
    """Who joined as they broke it off was refused for the epochs before, which it had left."""
    ctx, loader = context(first=9)
    assert trained(ctx, loader, 3) == []
    for _ in ctx.epochs(3, 6) if second else range(1):
        if second:
            break
        for _ in loader:
            break
    own = ctx._steering("a test")
    own.ending = True
    assert not own.ends_early(8)


def test_another_epoch_is_told_of_before_the_rate_that_was_made_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its rate is of the epoch, as that line says it should be."""
    ctx, _ = context()
    own, epochs = ctx._steering("a test"), ctx.epochs(3)
    next(epochs)
    own.engine.named = SimpleNamespace(names=(), sums=lambda: [], means=lambda sums: {})  # type: ignore[assignment]

    def agree(loss: float, terms: int, squares: float, sent: Sequence[float]) -> Any:
        """With another rank, whose epochs and rate are others."""
        mine = sent[3 : 3 + 2]
        other = [value + 1 for value in mine]
        both = [a + b for a, b in zip(mine, other, strict=True)]
        squared = [a * a + b * b for a, b in zip(mine, other, strict=True)]
        return SimpleNamespace(more=[*sent[:3], *both, *squared], tokens=1, squares=1.0)

    loop: Any = loop_of(ctx, 3)
    loop.groups.world_size = 2
    attempt: Any = SimpleNamespace(number=4, agreed=None, is_compared=False, agree=agree)

    def checked(value: float, rank: int, world: int, has: bool, why: str, check: Any) -> None:
        raise GroupBroken(why)

    monkeypatch.setattr(by_user, "check_named_alike", lambda names, world: None)
    monkeypatch.setattr(by_user, "check_checksum", checked)
    with pytest.raises(GroupBroken, match=r"ctx.epochs: here over range\(0, 3\)"):
        ByUser(own)._agree(loop, attempt, 1.0, 1, 1.0, [])
