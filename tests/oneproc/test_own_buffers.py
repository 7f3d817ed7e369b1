"""BatchNorm's running statistics over ranks: as one process's that has all micro-batches."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from elastic_ft.config import parse_job
from elastic_ft.engines.own import OwnEngine
from elastic_ft.engines.own_buffers import Buffers
from elastic_ft.errors import ConfigError
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

            monkeypatch.setattr("torch.distributed.all_reduce", add_up)
            try:
                own.share(rank, len(buffers), CPU)
            except InterruptedError:
                given.append(mine)
        if not given:
            return
        told.append([mine[-1] for mine in given])


def test_batch_norms_that_wait_for_each_other_are_refused() -> None:
    job = parse_job({"name": "own", "loop": {}})
    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    with pytest.raises(ConfigError, match="SyncBatchNorm is refused: ranks have different numbers"):
        OwnEngine(job, [model], [torch.optim.SGD(model.parameters())], CPU).prepare()
