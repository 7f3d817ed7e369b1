"""What a process of its own does for test_interchange: loads a checkpoint into FSDP2."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import elastic_ft
from elastic_ft.config import load_job
from elastic_ft.models import block_modules, build_model


def tiny_model(job_file: str) -> torch.nn.Module:
    return build_model(load_job(job_file).model, vocab_size=300, sequence_length=16)


def load_sharded(rank: int, world: int, store: str, job_file: str, url: str, expected: str) -> None:
    """Loads model and optimizer, plainly, and compares every tensor's whole with the export."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        model = tiny_model(job_file)
        for block in [*block_modules(model), model]:
            fully_shard(block)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
        plain = {"model": model.state_dict()}
        dcp.load(plain, storage_reader=elastic_ft.CheckpointReader(url))
        compare(plain["model"], torch.load(expected)["model"])
        weights, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optim": moments}
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)  # param_groups stay as they are
        dcp.load(state, storage_reader=elastic_ft.CheckpointReader(url), planner=planner)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
        weights, moments = get_state_dict(model, optimizer)
        compare(weights, torch.load(expected)["model"])
        for name, found in moments["state"].items():
            compare(found, torch.load(expected)["optim"]["state"][name])
        assert optimizer.param_groups[0]["lr"] == 0.25
    finally:
        dist.destroy_process_group()
    sys.stdout.flush()


def compare(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        assert torch.equal(whole, expected[name]), name
