"""What ranks say to each other at the store of where they stand."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from elastic_ft.worker import parting
from elastic_ft.worker.parting import Parting, elsewhere
from elastic_ft.worker.party import LEFT, Party
from elastic_ft.worker.whereabouts import Whereabouts

FIFTH, SIXTH = "is in the function of step 5", "is in the function of step 6"


class Rank:
    """One of two, as it looks with each heartbeat."""

    def __init__(self, rank: int, store: HashStore) -> None:
        check = {"check": lambda: None}
        self.groups: Any = SimpleNamespace(rank=rank, world_size=2, store=store, **check)
        self._said, self._heard = 0, dict[int, tuple[int, str]]()

    def looks(self, where: str) -> str:
        self._said += 1
        return elsewhere(self.groups, where, self._said, self._heard)


@pytest.fixture
def ranks() -> list[Rank]:
    store = HashStore()
    return [Rank(0, store), Rank(1, store)]


def test_who_waits_at_one_place_does_so_for_as_long_as_it_takes(ranks: list[Rank]) -> None:
    assert [ranks[turn % 2].looks(FIFTH) for turn in range(8)] == [""] * 8


def test_what_was_said_of_an_earlier_step_is_no_parting(ranks: list[Rank]) -> None:
    """It has gone on since, and has had no time to say so."""
    ranks[1].looks(FIFTH)
    assert [ranks[0].looks(SIXTH) for _ in range(4)] == [""] * 4
    ranks[1].looks(SIXTH)
    assert ranks[0].looks(SIXTH) == ""


def test_who_says_it_again_stands_elsewhere(ranks: list[Rank]) -> None:
    ranks[1].looks(FIFTH)
    assert ranks[0].looks(SIXTH) == ""
    ranks[1].looks(FIFTH)
    assert ranks[0].looks(SIXTH) == f"rank 1 {FIFTH}"


def test_who_has_left_is_seen_at_the_second_look(ranks: list[Rank]) -> None:
    def broken() -> None:
        raise InterruptedError  # it would wait for the other one

    ranks[1].groups.check = broken
    with pytest.raises(InterruptedError):
        Party(ranks[1].groups).leave(4)
    assert ranks[0].looks(FIFTH) == ""
    assert ranks[0].looks(FIFTH) == "rank 1 has left its loop after step 4"


@pytest.mark.parametrize("is_whole", [True, False])
def test_parties_rightly_stand_apart_until_they_meet(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch, is_whole: bool
) -> None:
    """Who came in for the lost evaluates before its first step, others after their seventh: that
    was broken off and made again, until the job ended."""
    monkeypatch.setattr(parting, "waits", lambda stack: True)
    broken: list[str] = []
    looks = []
    for rank, errands in zip(ranks, (1, 2), strict=True):
        groups = SimpleNamespace(**vars(rank.groups), generation=1)
        loop = SimpleNamespace(groups=groups, party=SimpleNamespace(is_whole=is_whole), step=0)
        own = SimpleNamespace(at=Whereabouts(errands=errands, is_pending=True))
        part = Parting(threading.get_ident, lambda groups, why: broken.append(why))
        looks.append((part, own, loop))
    for _ in range(6):
        for part, own, loop in looks:
            part.look(own, loop)  # type: ignore[arg-type]
            if part._asking is not None:
                part._asking.join(10)
    assert bool(broken) == is_whole, broken


@pytest.mark.parametrize("goes_on", [True, False])
def test_who_was_waited_for_may_have_come_and_left_between_two_looks(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    """A rank that exports for long, makes the last steps in no time, and leaves its loop, was taken
    for one that had parted from who had waited for it."""
    monkeypatch.setattr(parting, "waits", lambda stack: True)
    broken: list[str] = []
    groups = SimpleNamespace(**vars(ranks[0].groups), generation=1)
    loop = SimpleNamespace(groups=groups, party=SimpleNamespace(is_whole=True), step=3)
    own = SimpleNamespace(at=Whereabouts(errands=1, is_pending=True))
    part = Parting(threading.get_ident, lambda groups, why: broken.append(why))

    def look() -> None:
        part.look(own, loop)  # type: ignore[arg-type]
        if part._asking is not None:
            part._asking.join(10)

    look()
    look()
    groups.store.set(LEFT, "rank 1 has left its loop after step 5")
    look()
    assert not broken
    if goes_on:
        loop.step = 5  # in the next errand, that has the same words
        look()
        assert not broken
    look()
    look()
    assert broken, "it waits for who never comes"


def test_who_has_just_come_says_the_same_of_an_evaluation_that_all_make() -> None:
    old, new = Whereabouts(), Whereabouts()
    for step in (1, 2):
        old.ask()
        old.begin_step(step)
        old.end_step()
    for one in (old, new):
        one.ask()
        one.begin_errand()
    assert old.in_words() == new.in_words() != ""
