"""For what of a GPU's a step waits: counted on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elastic_ft.engines.balancing import Balancing
from elastic_ft.models.experts import MIXTURES, MixtureOfExperts
from elastic_ft.models.named import NamedSums


def count(monkeypatch: pytest.MonkeyPatch, calls: list[str], *spied: tuple[Any, str]) -> None:
    for owner, name in spied:
        real = getattr(owner, name)

        def counted(*args: Any, real: Any = real, name: str = name, **kwargs: Any) -> Any:
            calls.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)


def test_experts_are_balanced_with_one_copy_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mixture had a copy out and one in of its own, and the step waited for each."""
    config, mixtures = MIXTURES["decoder-moe-4m"], 3
    model = torch.nn.ModuleList(MixtureOfExperts(config) for _ in range(mixtures))
    balancing, copies = Balancing([model]), list[str]()
    balancing.begin()
    for mixture in list(model)[:2]:
        mixture.load = torch.arange(config.n_experts)
    count(monkeypatch, copies, (torch.Tensor, "tolist"), (torch, "tensor"))
    sums = balancing.sums()
    assert sums == [*range(config.n_experts)] * 2 + [0.0] * config.n_experts
    balancing.agreed(sums)
    balancing.apply()
    assert copies == ["tolist", "tensor"]
    monkeypatch.undo()
    least_first = torch.linspace(1, -1, config.n_experts).sign() * config.bias_rate
    for mixture, expected in zip(model, (least_first, least_first, 0 * least_first), strict=True):
        torch.testing.assert_close(mixture.bias, expected)


def test_named_metrics_are_fetched_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sum and each count was fetched by a copy of its own, for which the step waited."""
    named, waits = NamedSums(), list[str]()
    named.begin()
    for number in (1.0, 2.0):
        pair = (torch.tensor(number), torch.tensor([2]))
        named.add({"a": pair, "b": (torch.tensor(0.5), 4), "c": (3.0, 1)})
    count(monkeypatch, waits, (torch.Tensor, "tolist"), (torch.Tensor, "__float__"))
    assert named.sums() == [3.0, 4.0, 1.0, 8.0, 6.0, 2.0]
    assert waits == ["tolist"]
