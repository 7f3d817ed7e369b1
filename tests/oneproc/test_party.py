"""What the members of a party say to each other over the store."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch.distributed import HashStore

from elastic_ft.errors import GroupBroken, UsageError
from elastic_ft.worker.by_user import ByUser
from elastic_ft.worker.party import Party

DTYPES = [torch.float64, torch.bfloat16, torch.int64, torch.bool]


def broken() -> None:
    raise GroupBroken("a member was lost")


class SteppedAside(Exception):
    pass


def aside() -> NoReturn:
    raise SteppedAside


def groups(rank: int, places: list[float], store: HashStore, **given: Any) -> SimpleNamespace:
    return SimpleNamespace(
        rank=rank,
        world_size=len(places),
        store=store,
        operation_timeout_s=5.0,
        check=given.get("check", lambda: None),
    )


def parties(places: list[float], store: HashStore, **given: Any) -> list[Party]:
    """One member's each, of a world with another that is elsewhere."""
    return [
        Party(groups(rank, places, store, **given), places)  # type: ignore[arg-type]
        for rank, place in enumerate(places)
        if place == places[0]
    ]


def together(members: list[Party], say: Any) -> list[Any]:
    found: list[Any] = [None] * len(members)

    def run(member: int) -> None:
        found[member] = say(members[member], member)

    threads = [threading.Thread(target=run, args=(each,)) for each in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 2)])
def test_each_gets_what_each_said(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    members = parties([2.0, 3.0, 2.0], HashStore())
    said = [torch.ones(shape).to(dtype), torch.zeros(shape).to(dtype)]
    for found in together(members, lambda party, member: party.all_gather(said[member])):
        assert [each.dtype for each in found] == [dtype, dtype]
        assert all(torch.equal(one, other) for one, other in zip(found, said, strict=True))


def test_a_long_evaluation_leaves_one_word_of_each_in_the_store() -> None:
    store = HashStore()
    members = parties([2.0, 3.0, 2.0], store)

    def say(party: Party, member: int) -> list[float]:
        return [party.sum([member + round_])[0] for round_ in range(50)]

    expected = [float(2 * round_ + 1) for round_ in range(50)]
    assert together(members, say) == [expected, expected]
    assert store.num_keys() == 2


def test_one_who_is_lost_breaks_it() -> None:
    members = parties([2.0, 3.0, 2.0], HashStore(), check=broken)
    members[0]._groups.operation_timeout_s = 0.1  # type: ignore[misc]
    with pytest.raises(GroupBroken, match="a member was lost"):
        members[0].sum([1.0])


def test_all_meet_at_their_step_however_long_one_takes() -> None:
    """Also longer than a collective may."""
    store, met = HashStore(), threading.Event()
    at = [3.0, 2.0]
    slow, quick = (Party(groups(rank, at, store), at) for rank in range(2))  # type: ignore[arg-type]
    quick._groups.operation_timeout_s = 0.01  # type: ignore[misc]

    def wait() -> None:
        quick.meet(aside)
        met.set()

    threading.Thread(target=wait, daemon=True).start()
    assert not met.wait(0.3)
    slow.meet(aside)
    assert met.wait(10)


def test_of_a_cut_model_who_is_behind_steps_aside_if_enough_are_left() -> None:
    store, at = HashStore(), [3.0, 3.0, 2.0]
    first, _, behind = (Party(groups(rank, at, store), at) for rank in range(3))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="min_workers"):
        first.need_whole(3, aside)
    with pytest.raises(SteppedAside):
        behind.need_whole(2, aside)
    first._groups.check = broken  # type: ignore[method-assign]
    with pytest.raises(GroupBroken):  # once the other has
        first.need_whole(2, aside)
    with pytest.raises(SteppedAside):  # who is at its step already hears of it
        behind.meet(aside)


def test_what_an_aborted_gather_brings_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL returns from it, and raises nothing."""
    monkeypatch.setattr("torch.distributed.all_gather", lambda found, own: None)
    (whole, _) = (Party(groups(rank, [2.0, 2.0], HashStore())) for rank in range(2))  # type: ignore[arg-type]
    assert len(whole.all_gather(torch.ones(2))) == 2
    whole._groups.check = broken  # type: ignore[method-assign]
    with pytest.raises(GroupBroken):
        whole.all_gather(torch.ones(2))


class Ended(Exception):
    pass


def test_what_is_captured_anew_is_not_what_a_snapshot_still_copies() -> None:
    """After an errand between two steps: the snapshot of the step before may be under way."""
    log: list[str] = []

    def note(what: str) -> Any:
        return lambda *_: log.append(what)

    def body() -> None:
        raise Ended

    engine = SimpleNamespace(
        capture=note("capture"),
        own=SimpleNamespace(look_ahead=note("step")),
        attempt=lambda running: None,
        named=SimpleNamespace(),
    )
    at = SimpleNamespace(begin_step=lambda number: None, step=0)
    own = SimpleNamespace(engine=engine, at=at, body=body, attempting=False, ending=False)
    own.checkpoint, own.take_errand, own.take_logged = False, lambda: None, dict
    own.passed, own.goes_on = 0, None
    of_world = groups(0, [2.0], HashStore())
    of_world.generation, of_world.deadline = 1, lambda: 0.0
    tools = SimpleNamespace(
        snapshots=SimpleNamespace(wait=note("wait")),
        points=SimpleNamespace(outside=contextlib.nullcontext),
        data=SimpleNamespace(stream=None),
        prefetcher=SimpleNamespace(renew=lambda: False),
    )
    loop: Any = SimpleNamespace(tools=tools, groups=of_world, party=Party(of_world), step=3)  # type: ignore[arg-type]
    for moved, expected in ((True, ["wait", "capture", "step"]), (False, ["step"])):
        own.body = body
        log.clear()
        maker = ByUser(own)  # type: ignore[arg-type]
        maker._moved = moved
        with pytest.raises(Ended):
            list(maker.make(loop, SimpleNamespace(number=4, micro_batches=[], is_compared=False)))  # type: ignore[arg-type]
        assert log == expected
