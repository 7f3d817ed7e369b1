"""All collectives of a step lie before the all-reduce that settles it, or in it (I4): an aborted
NCCL collective does not raise, it returns, and what it left would be taken for gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from elastic_ft import torch_private
from elastic_ft.engines import native
from elastic_ft.engines.base import MicroBatch
from elastic_ft.errors import ConfigError, GroupBroken
from elastic_ft.groups import groups as groups_module
from elastic_ft.models.build import build_model
from tests.oneproc.gpu_jobs import make_groups, make_job

LAYOUTS: list[tuple[str, dict[str, int]]] = [
    ("ddp", {}),
    ("fsdp", {}),
    ("hsdp", {"shard_size": 2}),
    ("fsdp", {"tp": 2}),
    ("fsdp", {"tp": 2, "pp": 2}),
]


class Collectives(TorchDispatchMode):
    """Those that run meanwhile, on whatever device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # let it become operations of its parts first
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional"):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def make_engine(strategy: str, optimizer: str = "adamw", **sizes: int) -> native.NativeEngine:
    """Rank 0's of four, with gradients of ones, on a backend that returns without doing a thing:
    what an aborted NCCL does."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    parallel: dict[str, Any] = {"strategy": strategy, **sizes}
    job = make_job(
        model={"preset": "decoder-1m", "kwargs": {"vocab_size": 512, "tie_embeddings": True}},
        parallel=parallel,
        optimizer={"name": optimizer},
        batch={"global_batch_size": 4, "micro_batch_size": 1},
        elastic={"max_workers": 4},
    )
    engine = native.NativeEngine(
        job,
        lambda: build_model(job.model, vocab_size=512, sequence_length=8),
        torch.device("cpu"),
        tokens_per_sample=8,
    )
    groups = make_groups(strategy, 4, **sizes)
    groups.mesh = groups_module.make_mesh(groups.assignment.layout, torch.device("cpu"))
    engine.prepare()
    engine.attach(groups)
    with torch.no_grad():
        for tensor in engine.state().values():
            tensor.local.fill_(0.01)
    for parameter in engine._model.parameters.values():
        parameter.grad = torch.zeros_like(parameter) + 1.0
    return engine


@pytest.fixture(autouse=True)
def no_world_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    torch_private.forget_meshes()


def state_of(engine: native.NativeEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.local.clone() for name, tensor in engine.state().items()}


def nobody(*_: Any) -> None: ...


@pytest.mark.parametrize(("strategy", "sizes"), LAYOUTS)
def test_applying_a_step_has_no_collective(strategy: str, sizes: dict[str, int]) -> None:
    engine = make_engine(strategy, **sizes)
    before = state_of(engine)
    engine._sums(0.0, 0)
    with Collectives() as collectives:
        update = engine.apply(1, 32, 4.0, nobody)
    assert collectives.found == []
    assert update.grad_norm == math.sqrt(4.0)  # of as many tokens as were counted on
    assert any(not torch.equal(before[n], t.local) for n, t in engine.state().items())


@pytest.mark.parametrize(("strategy", "sizes"), LAYOUTS)
def test_what_an_abort_left_of_the_gradients_is_not_used(
    strategy: str, sizes: dict[str, int]
) -> None:
    engine = make_engine(strategy, **sizes)
    assert engine._groups is not None
    before = state_of(engine)
    engine._groups._aborted = "a peer died"  # what comes before ncclCommAbort
    with pytest.raises(GroupBroken, match="a peer died"):
        engine._sums(0.0, 0)
    assert engine.intact
    assert all(torch.equal(before[name], t.local) for name, t in engine.state().items())


def test_an_abort_within_an_optimizers_own_collectives_is_not_taken_for_a_step() -> None:
    engine = make_engine("fsdp", optimizer="tests.oneproc.own_optimizers:Trusting")
    engine._sums(0.0, 0)
    with Collectives() as collectives:
        engine.apply(1, 32, 4.0, nobody)
    assert collectives.found and engine.intact
    for parameter in engine._model.parameters.values():
        parameter.grad = torch.zeros_like(parameter) + 1.0
    assert engine._groups is not None and engine._model.optimizer is not None
    groups = engine._groups

    def aborted(*_: Any) -> None:
        groups._aborted = "a peer died"

    engine._model.optimizer.register_step_post_hook(aborted)
    with pytest.raises(GroupBroken, match="a peer died"):
        engine.apply(2, 32, 4.0, nobody)
    assert not engine.intact


def test_gradients_that_hsdp_still_keeps_are_told_of() -> None:
    engine = make_engine("hsdp", shard_size=2)
    engine._sums(0.0, 0)
    (part,) = engine._model.parts
    assert isinstance(part, FSDPModule)
    first = next(iter(engine._model.parameters.values()))
    first.grad = None
    engine._sums(0.0, 0)  # in no micro-batch is no error
    (group,) = torch_private._fsdp_groups(part)
    group._partial_reduce_output = torch.ones(2)
    with pytest.raises(ConfigError, match=r"^parallel.unused_parameters: a step's last micro-"):
        engine._sums(0.0, 0)


# ------------------------------------------------------------------------- a world of one


@pytest.mark.parametrize(
    ("strategy", "dtype", "is_sharded"),
    [("fsdp", "bf16", True), ("fsdp", "fp32", False), ("ddp", "bf16", False)],
)
def test_a_world_of_one_computes_as_larger_ones_do(
    strategy: str, dtype: str, is_sharded: bool
) -> None:
    """FSDP2 computes in bf16, autocast keeps residuals in fp32: a world that shrinks to one rank
    would train with other numbers. On a GPU it is FSDP2 in fp32, too."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    job = make_job(
        parallel={"strategy": strategy},
        precision={"dtype": dtype},
        elastic={"max_workers": 1},
    )
    engine = native.NativeEngine(
        job,
        lambda: build_model(job.model, vocab_size=512, sequence_length=8),
        torch.device("cpu"),
        tokens_per_sample=8,
    )
    groups = make_groups(strategy, 1)
    groups.mesh = groups_module.make_mesh(groups.assignment.layout, torch.device("cpu"))
    engine.prepare()
    engine.attach(groups)
    engine.initialise()
    assert isinstance(engine._model.parts[0], FSDPModule) == is_sharded
    before = state_of(engine)
    batch = {"tokens": torch.arange(18).view(2, 9)}
    sums = engine.run_batch(1, [MicroBatch(0, batch)], nobody)
    update = engine.apply(1, sums.tokens, sums.squares, nobody)
    assert sums.tokens == 16 and 0 < sums.loss / sums.tokens < 10 and 0 < update.grad_norm < 100
    assert any(not torch.equal(before[n], t.local) for n, t in engine.state().items())
    assert engine.detach()
