"""A generation that breaks off while its state moves, and the next one: nothing half-filled is
trained on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from elastic_ft.core.assignment import Source, Tier
from elastic_ft.errors import GroupBroken
from elastic_ft.worker import restore
from tests.oneproc.generations import Generations, copied, same, small_job, source_of

POINTS = ("_offers", "exchange_placed", "move", "settle_residuals")


@pytest.fixture
def generations() -> Iterator[Generations]:
    """The live state of a shard that was cut otherwise: the next layout is made anew, and then is
    one that engines keep (DDP, or FSDP in a world of one)."""
    made = Generations(small_job(parallel={"strategy": "fsdp"}))
    made.train_two_steps()
    made.engine = made.made()
    yield made
    made.snapshots.close()


def breaks(*_: Any) -> None:
    raise GroupBroken("a second loss")


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("point", POINTS)
def test_a_layout_that_was_never_filled_is_no_source(
    generations: Generations, monkeypatch: pytest.MonkeyPatch, point: str, times: int
) -> None:
    """It was taken for the live state of before, whose memory is elsewhere: training went on with
    whatever the new tensors held."""
    assert generations.live is not None
    holding, state = generations.live
    expected, source = copied(state), source_of(holding, Tier.LIVE)
    for _ in range(times):
        with (
            generations.next(source) as groups,
            monkeypatch.context() as patched,
            pytest.raises(GroupBroken, match="a second loss"),
        ):
            patched.setattr(restore, point, breaks)
            generations.restored(groups)
        assert generations.live is not None  # its memory is untouched
    with generations.next(source) as groups:
        generations.restored(groups)
        assert same(copied(generations.engine.state()), expected)


def test_one_that_all_had_not_restored_is_filled_again(
    generations: Generations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state may be of another step than the one that is live."""
    assert generations.live is not None
    holding, state = generations.live
    expected = copied(state)
    with (
        generations.next(Source(0, Tier.INITIAL)) as groups,
        monkeypatch.context() as patched,
        pytest.raises(GroupBroken, match="a second loss"),
    ):
        patched.setattr(groups, "barrier", breaks)
        generations.restored(groups)
    with generations.next(source_of(holding, Tier.LIVE)) as groups:
        generations.restored(groups)
        assert same(copied(generations.engine.state()), expected)


def test_what_is_kept_in_place_is_still_the_live_state_after_a_break(
    generations: Generations, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert generations.live is not None
    holding, state = generations.live
    expected, source = copied(state), source_of(holding, Tier.LIVE)
    with generations.next(source) as groups:
        generations.restored(groups)
        now = replace(holding, generation=groups.generation)
        generations.live = now, generations.engine.detach()
    places = {name: tensor.local.data_ptr() for name, tensor in generations.live[1].items()}
    source = source_of(now, Tier.LIVE)
    with (
        generations.next(source) as groups,
        monkeypatch.context() as patched,
        pytest.raises(GroupBroken, match="a second loss"),
    ):
        patched.setattr(restore, "exchange_placed", breaks)
        generations.restored(groups)
    with generations.next(source) as groups:
        generations.restored(groups)
        found = generations.engine.state()
        assert same(copied(found), expected)
        assert {name: tensor.local.data_ptr() for name, tensor in found.items()} == places
