"""For what of a GPU's a step waits: counted on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elastic_ft.engines.balancing import Balancing
from elastic_ft.models.experts import MIXTURES, MixtureOfExperts


def test_experts_are_balanced_with_one_copy_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mixture had a copy out and one in of its own, and the step waited for each."""
    config, mixtures = MIXTURES["decoder-moe-4m"], 3
    model = torch.nn.ModuleList(MixtureOfExperts(config) for _ in range(mixtures))
    balancing, copies = Balancing([model]), list[str]()
    balancing.begin()
    for mixture in list(model)[:2]:
        mixture.load = torch.arange(config.n_experts)
    for owner, name in ((torch.Tensor, "tolist"), (torch, "tensor")):
        real = getattr(owner, name)

        def counted(*args: Any, real: Any = real, name: str = name, **kwargs: Any) -> Any:
            copies.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)
    sums = balancing.sums()
    assert sums == [*range(config.n_experts)] * 2 + [0.0] * config.n_experts
    balancing.agreed(sums)
    balancing.apply()
    assert copies == ["tolist", "tensor"]
    monkeypatch.undo()
    least_first = torch.linspace(1, -1, config.n_experts).sign() * config.bias_rate
    for mixture, expected in zip(model, (least_first, least_first, 0 * least_first), strict=True):
        torch.testing.assert_close(mixture.bias, expected)
