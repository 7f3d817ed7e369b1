"""The barrier in which workers meet to report, without a cluster."""

from __future__ import annotations

import asyncio

import pytest

from elastic_ft.hosts.ray.ray_private import SynchronizationBarrierResetError
from elastic_ft.hosts.ray.train_calls import SEQUENCES
from tests.ray.round_worlds import Fenced


def test_all_leave_the_barrier_together_with_the_data_of_rank_0() -> None:
    async def scenario() -> None:
        world = Fenced()
        names = await asyncio.gather(*(world.join(rank, 3, 1, f"of {rank}") for rank in range(3)))
        assert names == ["of 0"] * 3
        assert world.opened == [1]

    asyncio.run(scenario())


def test_a_fenced_generation_is_refused_whole() -> None:
    async def scenario() -> None:
        world = Fenced()
        waiting = [asyncio.ensure_future(world.join(rank, 3, 1)) for rank in range(2)]
        await asyncio.sleep(0.01)
        world.fenced.add(1)
        for outcome in await asyncio.gather(*waiting, world.join(2, 3, 1), return_exceptions=True):
            assert isinstance(outcome, SynchronizationBarrierResetError)
        assert world.opened == []

    asyncio.run(scenario())


def test_a_round_that_has_opened_is_not_torn_by_the_fence() -> None:
    async def scenario() -> None:
        world = Fenced()
        first = asyncio.ensure_future(world.join(0, 2, 1, "name"))
        await asyncio.sleep(0.01)
        second = asyncio.ensure_future(world.join(1, 2, 1))
        await asyncio.sleep(0)
        world.fenced.add(1)
        assert await asyncio.gather(first, second) == ["name", "name"]

    asyncio.run(scenario())


def test_generations_do_not_meet() -> None:
    async def scenario() -> None:
        world = Fenced()
        old = asyncio.ensure_future(world.join(0, 2, 1, "old"))
        await asyncio.sleep(0.01)
        world.fenced.add(1)
        assert await asyncio.gather(world.join(0, 2, 2, "new"), world.join(1, 2, 2)) == ["new"] * 2
        with pytest.raises(SynchronizationBarrierResetError):
            await old
        assert world.opened == [2]

    asyncio.run(scenario())


def test_who_asks_again_is_told_though_the_generation_is_over() -> None:
    """Else it would refuse a round that others have joined in: two halves of a report."""

    async def scenario() -> None:
        world = Fenced()
        world.barrier.resume([(SEQUENCES + 1, "of rank 0"), (SEQUENCES, None)])
        world.fenced.add(1)
        assert await world.join(1, 2, 1) == "of rank 0"

    asyncio.run(scenario())


def test_who_did_not_get_the_answer_is_told_again() -> None:
    async def scenario() -> None:
        world = Fenced()
        await asyncio.gather(world.join(0, 2, 1, "name"), world.join(1, 2, 1))
        assert await world.join(1, 2, 1) == "name"
        assert world.opened == [1]

    asyncio.run(scenario())
