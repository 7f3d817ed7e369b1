"""Weights that nothing trains, by reference: laid out, and no state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from elastic_ft.config import parse_job
from elastic_ft.engines import own_state
from elastic_ft.engines.own import OwnEngine
from elastic_ft.engines.own_frozen import Frozen, digest_of
from elastic_ft.errors import ConfigError
from elastic_ft.groups.store_links import StoreLinks
from tests.oneproc.alone import CPU, TIMEOUT_S
from tests.oneproc.own_loops import Own, Tied


class Half(Own):
    """A model of which the first block alone is trained."""

    def __init__(self, strategy: str, by_reference: bool = True) -> None:
        values: dict[str, Any] = {"name": "own", "loop": {}, "parallel": {"strategy": strategy}}
        values["batch"] = {"global_batch_size": 4, "micro_batch_size": 2}
        torch.manual_seed(0)
        self.model = Tied()
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name.startswith("blocks.0"))
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.1)
        self.engine = OwnEngine(parse_job(values), [self.model], [self.optimizer], CPU)
        self.engine.by_reference = by_reference
        self.engine.prepare()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._links = StoreLinks(("127.0.0.1", self._store.port), TIMEOUT_S)
        self._generation = 0
        self._state = None

    def frozen(self) -> dict[str, torch.Tensor]:
        named = self.model.named_parameters()
        found = {n: p for n, p in named if not p.requires_grad}
        return {n: getattr(p, "full_tensor", lambda p=p: p)().detach() for n, p in found.items()}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_they_are_laid_out_anew_and_are_no_state(strategy: str) -> None:
    whole = Half(strategy, by_reference=False)
    half = Half(strategy)
    before = digest_of(half.frozen())
    losses: list[list[float]] = [[], []]
    for own, told in zip((whole, half), losses, strict=True):
        for generation in range(2):
            with own.generation():
                told += [own.step(2 * generation + 1), own.step(2 * generation + 2)]
                assert digest_of(own.frozen()) == before
                names = set(own.engine.state())
                assert ("model.embedding.weight" in names) is (own is whole)
                assert "model.blocks.0.0.weight" in names
                assert "optim.blocks.0.0.weight.exp_avg" in names
    assert losses[0] == losses[1]


def counted(half: Half) -> None:
    with torch.no_grad():
        half.model.embedding.weight.add_(1.0)


def by_data(half: Half) -> None:
    half.model.embedding.weight.data.mul_(2.0)


def one_element(half: Half) -> None:
    half.model.blocks[1][0].weight.detach().numpy()[0, 0] += 1.0


def other_data(half: Half) -> None:
    half.model.blocks[1][0].weight.data = torch.ones(8, 8)


@pytest.mark.parametrize("change", [counted, by_data, one_element, other_data])
def test_what_changes_them_is_refused(change: Callable[[Half], None]) -> None:
    half = Half("ddp")
    with half.generation():
        for step in range(1, 5):
            half.step(step)
        change(half)
        with pytest.raises(ConfigError, match="frozen weights were changed"):
            half.step(5)


def test_a_base_that_is_cut_is_watched_too() -> None:
    half = Half("fsdp")
    with half.generation():
        half.step(1)
        half.model.embedding.weight.to_local().data.mul_(2.0)
        with pytest.raises(ConfigError, match="frozen weights were changed"):
            half.step(2)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_base_that_was_loaded_after_prepare_is_refused(strategy: str) -> None:
    half = Half(strategy)
    half.model.embedding.weight.data.mul_(2.0)
    with pytest.raises(ConfigError, match="frozen weights were changed"), half.generation():
        pass


def test_an_export_gathers_what_is_trained_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The base is there by reference; tied weights share no memory."""
    half, gathered = Half("fsdp"), list[int]()
    before = {name: tensor.clone() for name, tensor in half.model.state_dict().items()}
    full_tensor = DTensor.full_tensor

    def noted(tensor: DTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        gathered.append(tensor.numel())
        return full_tensor(tensor, *args, **kwargs)

    monkeypatch.setattr(DTensor, "full_tensor", noted)
    with half.generation():
        half.step(1)
        whole = half.engine.whole_state(half.model, 0)
        assert half.engine.whole_state(half.model, 1) == {}
    assert sorted(gathered) == [8, 8, 64, 64], "weight and bias of the first block, twice"
    assert whole.keys() == before.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, before[name]) is not name.startswith("blocks.0."), name
    assert len({tensor.data_ptr() for tensor in whole.values()}) == len(whole)


def test_a_state_of_another_base_is_refused() -> None:
    half = Half("ddp")
    with half.generation():
        half.step(1)
    other = Half("ddp")
    with torch.no_grad():
        other.model.embedding.weight.add_(1.0)
    trained = {id(p) for group in other.optimizer.param_groups for p in group["params"]}
    frozen = Frozen(other.model.named_parameters, trained, keeps=False)
    frozen.load_state_dict(half.engine._frozen.state_dict())
    with half.generation(), pytest.raises(ConfigError, match="load the same base"):
        frozen.settle(0, 1)


def test_the_bits_of_a_large_weight_are_summed_with_little_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch widens all that it sums: a base's largest tensor was there three times."""
    monkeypatch.setattr(own_state, "PIECE", 1 << 10)
    weight = torch.randn(1 << 16)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        found = own_state.sum_of_bits(weight)
    assert int(found) == int(weight.view(torch.int32).sum(dtype=torch.int64))
    allocated = [event.cpu_memory_usage for event in seen.events()]
    assert max(allocated) < weight.numel() * 8 // 2
    assert int(own_state.sum_of_bits(weight[:0])) == 0
