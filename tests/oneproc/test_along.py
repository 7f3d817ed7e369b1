"""Numbers that travel along with gradients: exact, in whatever dtype, and the same on all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.distributed as dist

from elastic_ft.engines.along import NUMBERS_MAX, Along
from elastic_ft.engines.modules import in_ddp
from elastic_ft.errors import ModelError


@pytest.fixture
def as_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def heard(said: Sequence[list[float]]) -> list[Along]:
    """Members that have said that, and have the mean of what all of them have."""
    members = [Along(rank, len(said)) for rank in range(len(said))]
    for member, numbers in zip(members, said, strict=True):
        member._carrier.register_hook(lambda gradient: gradient / len(said))
        member.ask(lambda loss, tokens, numbers=numbers: [loss, float(tokens), *numbers])
        member._hear = lambda mean: None  # type: ignore[method-assign]  # not before all have said
        member.backward(torch.zeros((), requires_grad=True), 1234.567, 4096)
        del member._hear
    mean = torch.stack([m._carrier.grad for m in members if m._carrier.grad is not None]).sum(0)
    for member in members:
        member._hear(mean)
    return members


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("members", [2, 3, 64])
@pytest.mark.usefixtures("as_default")
def test_what_is_said_arrives_to_the_last_bit(dtype: torch.dtype, members: int) -> None:
    torch.set_default_dtype(dtype)
    numbers = [[math.pi * rank, -1e-300, 1e17 + rank] for rank in range(members)]
    told = [member.told() for member in heard(numbers)]
    expected = [1234.567 * members, 4096.0 * members]
    assert all(one == told[0] for one in told)
    assert told[0][:2] == pytest.approx(expected, rel=1e-15)
    sums = [0.0, 0.0, 0.0]
    for row in numbers:
        sums = [total + number for total, number in zip(sums, row, strict=True)]
    assert told[0][2:] == sums


def test_what_is_no_number_arrives_as_that() -> None:
    told = heard([[math.nan, math.inf], [1.0, 2.0]])[0].told()
    assert math.isnan(told[2]) and told[3] == math.inf


def test_members_that_say_other_numbers_end_alike() -> None:
    with pytest.raises(ModelError, match=r"\(3, 4\): the named metrics of a model are the same"):
        heard([[0.5], [0.5, math.nan]])


def test_more_than_fit_are_told_of_by_nobody() -> None:
    assert not any(member.is_told for member in heard([[0.5] * NUMBERS_MAX] * 2))
    assert all(member.is_told for member in heard([[0.5] * (NUMBERS_MAX - 3)] * 2))


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_on_a_cpu_gradients_of_some_megabytes_are_one_sum() -> None:
    """Torch's first bucket has 1 MB: each step of the peers' model was two sums, and two dozen
    messages a rank."""
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(12)))  # 3 MB
    along = Along(0, 1)
    runner = along.wrap(model, lambda: in_ddp(model, torch.device("cpu")))
    sums: list[int] = []
    runner.register_comm_hook(
        None, lambda _, bucket: sums.append(bucket.buffer().numel()) or _done(bucket)
    )
    for _ in range(3):  # buckets are made anew after the first
        along.backward(runner(torch.ones(1, 256)).sum(), 0.0, 1)
        assert sums == [12 * (256 * 256 + 256) + NUMBERS_MAX * 4]
        sums.clear()


def _done(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future = torch.futures.Future[torch.Tensor]()
    future.set_result(bucket.buffer())
    return future
