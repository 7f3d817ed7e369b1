"""Expert parallelism: each rank keeps some experts of every mixture, and is sent what they compute.

Of the ranks that share the state out, neighbours share the experts (``Layout.ep``); what one of
them has is cut once more over the ranks that have the same experts, by FSDP2. Gradients are
complete where the experts are: tokens of the neighbours have come there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from elastic_ft import torch_private
from elastic_ft.config import Job
from elastic_ft.core.layouts.expert_owners import experts_at, owners_of, part_of, runs_of
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.core.sharding import Box
from elastic_ft.engines.modules import local_part
from elastic_ft.errors import ConfigError
from elastic_ft.models.expert_exchange import ExpertShare
from elastic_ft.models.experts import MixtureOfExperts
from elastic_ft.models.foreign_experts import is_of_experts, share_out
from elastic_ft.state.tensors import StateTensor


def check_expert_parallel(job: Job, model: nn.Module) -> None:
    """Raises ConfigError for a model whose experts can't be shared out as asked."""
    ep = job.parallel.ep
    if ep == 1:
        return
    if job.optimizer.name == "muon":
        raise ConfigError("parallel.ep: not with optimizer.name muon, which needs whole matrices")
    counts = experts_of(model)
    if not counts:
        raise ConfigError(
            "parallel.ep: ranks share experts of built-in mixtures (model.preset decoder-moe-*) "
            "and of transformers' that have them side by side (as mixtral and qwen3_moe), found "
            f"{type(model).__name__}"
        )
    if ep > min(counts):
        raise ConfigError(f"parallel.ep: {ep} ranks can't share {min(counts)} experts of a layer")


def experts_of(model: nn.Module) -> list[int]:
    """Of each mixture in it that ranks can share out, how many experts it has."""
    return [len(next(experts.parameters())) for _, experts in _mixtures(model)]


def experts_of_each(model: nn.Module) -> int:
    """How many experts each of its mixtures has that ranks can share out; 0 where none has, or not
    all have as many: they are shared out in runs then."""
    counts = {*experts_of(model)}
    return counts.pop() if len(counts) == 1 else 0


def _mixtures(part: nn.Module) -> Iterator[tuple[MixtureOfExperts | None, nn.Module]]:
    """Modules of experts, and the mixture that calls each if it is a built-in one."""
    for module in part.modules():
        if isinstance(module, MixtureOfExperts):
            yield module, module.experts
        elif is_of_experts(module):
            yield None, module


def shard_experts(
    part: nn.Module, mesh: DeviceMesh, layout: Layout, options: Mapping[str, Any]
) -> None:
    """Shares the experts in ``part`` out, and cuts each rank's by FSDP2, which has ``options``.

    ``mesh``: with dimensions "efsdp" and "ep".
    """
    ep, rank = mesh["ep"], mesh.get_local_rank("ep")
    names = ("dp_replicate", "efsdp") if layout.dp_replicate > 1 else ("efsdp",)
    axis = partial(_axis_to_cut, layout.expert_shards)
    # Weights by which a mixture weighs are of its own precision.
    options = {**options, "mp_policy": replace(options["mp_policy"], cast_forward_inputs=False)}
    for mixture, experts in [*_mixtures(part)]:
        count = len(next(experts.parameters()))
        share = ExpertShare(mesh.get_group("ep"), owners_of(layout, count))
        if mixture is None:
            share_out(experts, share)
        else:
            mixture.share = share
        for name, weight in [*experts.named_parameters()]:
            local = weight.new_empty(share.owners.count(rank), *weight.shape[1:])
            given = {"run_check": False, "shape": weight.shape, "stride": weight.stride()}
            shared = DTensor.from_local(local, ep, [Shard(0)], **given)
            setattr(experts, name, nn.Parameter(shared))
        fully_shard(experts, mesh=mesh[names], shard_placement_fn=axis, **options)
        assert isinstance(experts, FSDPModule)
        experts.set_gradient_divide_factor(float(layout.gradient_size))
        if layout.expert_shards > 1:  # alone, FSDP2 would divide twice
            experts.set_force_sum_reduction_for_comms(True)  # Gloo can't multiply as it sums
        if rank not in share.owners:
            torch_private.gather_nothing(experts)


def is_shared_out(tensor: Tensor) -> bool:
    """Whether it is of experts that ranks share out, as weights and what is kept for them are."""
    if not isinstance(tensor, DTensor) or "ep" not in (tensor.device_mesh.mesh_dim_names or ()):
        return False
    return not _placed(tensor, "ep").is_replicate()


def has_no_expert(weight: nn.Parameter) -> bool:
    """Whether it is of experts that ranks share out, of which this one has none."""
    return is_shared_out(weight) and weight.requires_grad and not local_part(weight).numel()


def runs_of_experts(tensor: Tensor, whole: StateTensor, layout: Layout) -> Iterator[StateTensor]:
    """What this rank has of what ``is_shared_out``, as state: a box for each run of experts.

    A DTensor has them side by side, whichever they are. ``whole``: as if it had one run.
    """
    assert isinstance(tensor, DTensor)
    mesh = tensor.device_mesh
    experts: Sequence[int] = experts_at(layout, tensor.shape[0], mesh.get_local_rank("ep"))
    by_shards = _placed(tensor, "efsdp")
    if not by_shards.is_replicate() and by_shards.dim == 0:
        experts = part_of(experts, mesh.get_local_rank("efsdp"), layout.expert_shards)
    local, at = whole.local, 0
    assert len(local) == len(experts), f"{len(local)} experts, expected {experts}"
    for first, count in runs_of(experts) or [(tensor.shape[0], 0)]:
        box = Box((first, *whole.box.offsets[1:]), (count, *local.shape[1:]))
        yield replace(whole, box=box, local=local[at : at + count])
        at += count


def _placed(tensor: DTensor, dimension: str) -> Any:
    return tensor.placements[(tensor.device_mesh.mesh_dim_names or ()).index(dimension)]


def _axis_to_cut(shards: int, weight: nn.Parameter) -> Shard:
    """Of [X, in, out], one within each expert that divides; else experts, some ranks having one
    more than others: FSDP2 cuts no other axis unevenly, nor where this rank has no expert."""
    divided = (axis for axis in (1, 2) if weight.shape[axis] % shards == 0)
    return Shard(next(divided, 0) if local_part(weight).numel() else 0)
