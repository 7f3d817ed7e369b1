"""What a CPU can hold an optimizer in host memory to, of a mesh of GPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from elastic_ft import torch_private
from elastic_ft.config import OptimizerConfig
from elastic_ft.config.trained import OFFLOADED
from elastic_ft.core.sharding import Box
from elastic_ft.engines.modules import local_part
from elastic_ft.engines.native import state_tensor
from elastic_ft.engines.optimizer_state import OptimizerState
from elastic_ft.engines.optimizers import make_optimizer
from elastic_ft.worker.restore import make_room


def optimizer_of(name: str, parameter: nn.Parameter) -> OptimizerState:
    kwargs = {"momentum": 0.9} if name == "sgd" else {}
    schedule = "constant" if name.startswith("schedule_free") else "cosine"
    config = OptimizerConfig(name=name, lr=0.1, kwargs=kwargs, schedule=schedule)
    state = OptimizerState(
        lambda given: make_optimizer(config, given, fused=True), {"w": parameter}
    )
    state.clear()
    state.restored()
    return state


@pytest.mark.parametrize("name", OFFLOADED)
def test_a_master_on_the_host_is_stepped_though_its_mesh_is_of_gpus(name: str) -> None:
    with torch_private.pretended_world(2):
        mesh = DeviceMesh("cuda", [0, 1], _init_backend=False)
        meta = TensorMeta(torch.Size((6, 4)), (4, 1), torch.float32)
        make: Any = DTensor
        spec = DTensorSpec(mesh, (Shard(0),), meta)
        live = make(torch.empty(3, 4, device="meta"), spec, requires_grad=False)
        master = nn.Parameter(torch_private.as_part_of(live, torch.ones(3, 4)))
        whole = nn.Parameter(torch.ones(3, 4))
        assert state_tensor(master).box == Box((0, 0), (3, 4))
        mine, plain = optimizer_of(name, master), optimizer_of(name, whole)
        for step in range(3):
            gradient = torch.full((3, 4), 0.5 + step)
            master.grad, whole.grad = torch_private.as_part_of(live, gradient.clone()), gradient
            for state in (mine, plain):
                with state.stepping():
                    state.optimizer.step()
        kept = dict(mine.of("w"))
        assert all(tensor.device.type == "cpu" for tensor in kept.values())
        assert torch.equal(local_part(master), whole)
        for key, expected in plain.of("w"):
            assert torch.equal(local_part(kept[key]), expected)


def test_a_state_on_the_host_has_nothing_to_leave_its_gpu() -> None:
    """What a snapshot would be made of stays, and is what the next layout is filled from."""
    state = {"model.w": state_tensor(torch.ones(2))}
    engine: Any = SimpleNamespace(
        device=torch.device("cuda"), keeps=lambda layout: False, reference=None
    )
    groups: Any = SimpleNamespace(rank=0, assignment=SimpleNamespace(layout=None))

    def fails(*_: Any) -> None:
        raise AssertionError("it is where it is to be")

    snapshots: Any = SimpleNamespace(move_out=fails)
    make_room(engine, groups, snapshots, lambda: (SimpleNamespace(step=3), state), fails)  # type: ignore[arg-type, return-value]
