"""BatchNorm's running statistics over ranks: as one process's that has all micro-batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from elastic_ft.config import parse_job
from elastic_ft.engines.own import OwnEngine
from elastic_ft.engines.own_buffers import Buffers
from elastic_ft.errors import ConfigError, GroupBroken
from tests.oneproc.alone import CPU


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("dealt", [(3, 3, 2), (1, 7), (0, 8)])
def test_the_statistics_are_those_of_all_micro_batches_in_order(
    monkeypatch: pytest.MonkeyPatch, momentum: float | None, dealt: tuple[int, ...]
) -> None:
    """Two steps. Ranks are made one after the other: what they tell each other is added up."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.BatchNorm1d(3, momentum=momentum))
    ranks = [copy.deepcopy(whole) for _ in dealt]
    buffers = [Buffers([model], model.named_buffers) for model in ranks]
    for _ in range(2):
        batch = [torch.randn(4, 3) * (1 + n) + n for n in range(sum(dealt))]
        for micro in batch:
            whole(micro)
        first = 0
        for model, own, count in zip(ranks, buffers, dealt, strict=True):
            own.begin()
            for micro in batch[first : first + count]:
                model(micro)
            first += count
        share(monkeypatch, buffers)
    for model in ranks:
        for found, wanted in zip(model.buffers(), whole.buffers(), strict=True):
            assert torch.allclose(found.double(), wanted.double(), rtol=1e-5)


def share(monkeypatch: pytest.MonkeyPatch, buffers: list[Buffers]) -> None:
    """A sum over ranks needs what all of them give: each is asked anew, round by round."""
    before = [own._averages for own in buffers]
    told: list[list[torch.Tensor]] = []  # of each collective, every rank's
    of_source: list[torch.Tensor] = []

    for _ in range(3):
        given: list[list[torch.Tensor]] = []
        for rank, own in enumerate(buffers):
            own._averages, mine = before[rank], []

            def add_up(tensor: torch.Tensor, mine: list[torch.Tensor] = mine) -> None:
                mine.append(tensor.clone())
                if len(mine) <= len(told):
                    tensor.copy_(torch.stack(told[len(mine) - 1]).sum(0))
                else:
                    raise InterruptedError

            taken = iter(of_source) if rank else None

            def take(tensor: torch.Tensor, src: int, taken: Any = taken) -> None:
                tensor.copy_(next(taken)) if taken else of_source.append(tensor.clone())

            monkeypatch.setattr("torch.distributed.all_reduce", add_up)
            monkeypatch.setattr("torch.distributed.broadcast", take)
            try:
                own.share(rank, len(buffers), CPU, lambda: None)
            except InterruptedError:
                given.append(mine)
        if not given:
            return
        told.append([mine[-1] for mine in given])


class Counting(nn.Module):
    """Two ways of changing a buffer that no version of a tensor tells, and one that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("written", torch.zeros(3))
        self.register_buffer("replaced", torch.zeros(3, dtype=torch.int16))
        self.register_buffer("stays", torch.zeros(()))

    def see(self, rank: int) -> None:
        self.written.data.lerp_(torch.full((3,), 1.0 + rank), 0.1)
        self.replaced = self.replaced + (1 + rank)
        self.stays.copy_(self.stays.clone())


def test_any_other_buffer_is_rank_0s_however_it_was_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = [Counting() for _ in range(3)]
    buffers = [Buffers([model], model.named_buffers) for model in ranks]
    for step in (1, 2):
        for rank, (model, own) in enumerate(zip(ranks, buffers, strict=True)):
            own.capture()
            own.begin()
            model.see(rank)
        share(monkeypatch, buffers)
        for model in ranks:
            assert torch.equal(model.replaced, torch.full((3,), step, dtype=torch.int16))
            assert torch.equal(model.written, ranks[0].written)
    assert ranks[0].written[0] == pytest.approx(0.19)


def test_a_buffer_that_was_written_and_is_the_same_is_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after padding: Gloo knows neither 16 bits nor eight of a float."""
    model = Counting()
    buffers = Buffers([model], model.named_buffers)
    buffers.capture()
    buffers.begin()
    for buffer in model.buffers():
        buffer.copy_(buffer.clone())
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor: None)
    monkeypatch.setattr("torch.distributed.broadcast", lambda *_, **__: pytest.fail("sent"))
    buffers.share(0, 2, CPU, lambda: None)


def test_what_an_aborted_collective_brings_is_not_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL returns from it, and its result is any numbers."""

    def broken() -> None:
        raise GroupBroken("a worker was lost")

    model = nn.Sequential(nn.BatchNorm1d(2), Counting())
    buffers = Buffers([model], model.named_buffers)
    buffers.capture()
    buffers.begin()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor: tensor.fill_(1 << 62))
    monkeypatch.setattr("torch.distributed.broadcast", lambda *_, **__: pytest.fail("sent"))
    with pytest.raises(GroupBroken):
        buffers.share(0, 2, CPU, broken)
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_forward_behind_the_agreement_or_between_steps_leaves_ranks_together(
    monkeypatch: pytest.MonkeyPatch, momentum: float | None
) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.BatchNorm1d(3, momentum=momentum))
    ranks = [copy.deepcopy(whole) for _ in range(2)]
    buffers = [Buffers([model], model.named_buffers) for model in ranks]
    for _ in range(2):
        for rank, (model, own) in enumerate(zip(ranks, buffers, strict=True)):
            own.begin()
            x = torch.randn(4, 3) + rank
            model(x)
            whole(x)
        share(monkeypatch, buffers)
        for model, own in zip(ranks, buffers, strict=True):
            model(torch.randn(4, 3))  # behind it
            own.end()
        for model in ranks:
            for found, wanted in zip(model.buffers(), whole.buffers(), strict=True):
                assert torch.allclose(found.double(), wanted.double(), rtol=1e-5)
    for number, (model, own) in enumerate(zip(ranks, buffers, strict=True)):
        for _ in range(1 + number):
            model(torch.randn(4, 3))  # between steps, and each rank another
        own.begin()
        model(torch.randn(4, 3))
    share(monkeypatch, buffers)
    for found, wanted in zip(ranks[1].buffers(), ranks[0].buffers(), strict=True):
        assert torch.equal(found, wanted)


def test_batch_norms_that_wait_for_each_other_are_refused() -> None:
    job = parse_job({"name": "own", "loop": {}})
    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    with pytest.raises(ConfigError, match="SyncBatchNorm is refused: ranks have different numbers"):
        OwnEngine(job, [model], [torch.optim.SGD(model.parameters())], CPU).prepare()
