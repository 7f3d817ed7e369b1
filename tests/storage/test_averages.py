"""What a schedule-free optimizer's checkpoint is to others: the package goes on from an export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from elastic_ft.core.manifest import Manifest, ShardEntry, TensorSpec
from elastic_ft.core.sharding import Box
from elastic_ft.state.averaged_reader import averaging_reader
from elastic_ft.state.torch_checkpoints import export_dcp, export_torch
from elastic_ft.storage.checkpoints import open_checkpoint
from elastic_ft.storage.shards import attempt_prefix, write_shards
from elastic_ft.storage.store import open_store
from tests.storage.published import commit

schedulefree = pytest.importorskip("schedulefree")

Tensors = dict[str, torch.Tensor]
STEPS, BETA = 3, 0.8
BETAS = [BETA, 0.99]
TERMS = {
    "by momentum": ("schedule_free_sgd", {"momentum": BETA}, [0.5, 0.5]),
    "by betas": ("schedule_free_adamw", {}, BETAS),
    "by path": ("schedulefree:RAdamScheduleFree", {"betas": BETAS}, [0.5, 0.5]),
}


def trained() -> tuple[dict[str, torch.nn.Parameter], Any]:
    """The package's, in the mode in which it steps. One parameter never had a gradient."""
    generator = torch.Generator().manual_seed(3)
    weights = {
        "single": torch.randn(4, 3, generator=generator),
        "double": torch.randn(5, generator=generator, dtype=torch.float64),
        "unused": torch.randn(2, 3, generator=generator),
    }
    parameters = {name: torch.nn.Parameter(weight) for name, weight in weights.items()}
    optimizer = schedulefree.SGDScheduleFree(parameters.values(), lr=0.1, momentum=BETA)
    optimizer.train()
    for _ in range(STEPS):
        for name in ("single", "double"):
            of = parameters[name]
            of.grad = torch.randn(of.shape, generator=generator, dtype=of.dtype)
        optimizer.step()
    return parameters, optimizer


def listed(parameters: dict[str, torch.nn.Parameter], optimizer: Any) -> Tensors:
    """As an engine lists it: what is kept for a parameter that was never stepped is 0."""
    state: Tensors = {}
    for name, parameter in parameters.items():
        state[f"model.{name}"] = parameter.detach().clone()
        kept = optimizer.state[parameter].get("z")
        state[f"optim.{name}.z"] = torch.zeros_like(parameter) if kept is None else kept.clone()
    state["engine.group0.k"] = torch.tensor(STEPS)
    state["engine.group0.train_mode"] = torch.tensor(True)
    return state


def written(state: Tensors, folder: Path, by: str) -> Any:
    """A reader of a checkpoint of it."""
    terms = dict(
        zip(("optimizer.name", "optimizer.kwargs", "optimizer.betas"), TERMS[by], strict=True)
    )
    store = open_store(str(folder))
    specs = {
        name: TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in state.items()
    }
    pieces = [
        (name, Box.whole(tensor.shape), specs[name].dtype, bytes_of(tensor))
        for name, tensor in state.items()
    ]
    entries = write_shards(store, attempt_prefix("run", 1, STEPS), 0, pieces)
    manifest = Manifest(
        job="job",
        run="run",
        step=STEPS,
        generation=1,
        nonce="drawn",
        layout="ddp1",
        created_at_s=1.5,
        tensors=specs,
        entries=tuple(map(ShardEntry.from_dict, entries)),
        extra={"terms": terms},
    )
    return open_checkpoint(commit(store, manifest, 1).ref, store)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def exported(reader: Any, path: Path, format_: str) -> Any:
    if format_ == "torch":
        export_torch(reader, path)
        return torch.load(path, weights_only=True)
    export_dcp(reader, path)
    tensors = reader.manifest.tensors
    found: dict[str, Any] = {"model": {}, "optim": {"state": {}}, "engine": {}}
    for own, spec in tensors.items():
        kind, _, name = own.partition(".")
        empty = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        if kind == "optim":
            found["optim"]["state"][name.removesuffix(".z")] = {"z": empty}
        else:
            found[kind][name] = empty
    dcp.load(found, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize(
    ("format_", "by"), [("dcp", "by momentum"), *(("torch", by) for by in TERMS)]
)
def test_the_package_goes_on_from_an_export_at_the_same_weights(
    tmp_path: Path, format_: str, by: str
) -> None:
    parameters, optimizer = trained()
    state = listed(parameters, optimizer)
    reader = averaging_reader(written(state, tmp_path / "checkpoints", by))
    found = exported(reader, tmp_path / "exported", format_)
    optimizer.eval()
    for name, parameter in parameters.items():
        assert torch.equal(found["model"][name], parameter), name

    others = {name: torch.nn.Parameter(found["model"][name].clone()) for name in parameters}
    other = schedulefree.SGDScheduleFree(others.values(), lr=0.1, momentum=BETA)
    for name, parameter in others.items():
        other.state[parameter]["z"] = found["optim"]["state"][name]["z"]
    other.param_groups[0]["train_mode"] = bool(found["engine"]["group0.train_mode"])
    other.train()
    for name, parameter in others.items():
        torch.testing.assert_close(parameter.detach(), state[f"model.{name}"], msg=name)
    assert int(found["engine"]["group0.k"]) == STEPS
