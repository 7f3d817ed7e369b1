"""FSDP2 on a user's own module, cut anew in place.

``fully_shard`` can't be asked to cut again. So it is undone, the module gets plain parameters on
meta, is cut over the new mesh, and what that makes of each parameter goes into the object that was
there before (``torch.utils.swap_tensors``): module, optimizer and parameters stay the objects that
the user knows. The first cut alone makes new ones: a plain tensor can't become a DTensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from elastic_ft import torch_private
from elastic_ft.config import Job
from elastic_ft.engines.laid_out import shard
from elastic_ft.engines.modules import to_empty
from elastic_ft.groups.groups import Groups
from elastic_ft.models.build import block_modules


def undo_cut(model: nn.Module) -> None:
    """Plain modules, whose parameters are this rank's parts of before; none of it is gathered."""
    for part in list(model.modules()):
        if isinstance(part, FSDPModule):
            torch_private.undo_fully_shard(part)


def gathering(models: Sequence[nn.Module]) -> list[FSDPModule]:
    """Those that gather their parameters, and keep them so after a forward without a backward."""
    return [part for model in models for part in model.modules() if isinstance(part, FSDPModule)]


def cut_in_place(
    job: Job, model: nn.Module, groups: Groups, device: torch.device
) -> Mapping[nn.Parameter, nn.Parameter]:
    """Cuts ``model``, which is plain or was undone, over ``groups``: allocated, not filled.

    Returns which parameter has taken the place of which, where that could not stay.
    """
    before = dict(model.named_parameters())
    wanted = {n: p.requires_grad for n, p in before.items()}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    _make_meta(model)
    shard(job, model, block_modules(model), groups)
    to_empty(model, device)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    moved: dict[nn.Parameter, nn.Parameter] = {}
    names = {id(p): name for name, p in model.named_parameters()}
    for cut in _cut_parameters(model):
        made = cut.sharded_param
        old = before[names[id(made)]]
        made.requires_grad_(wanted[names[id(made)]])
        if torch_private.is_cut_parameter(old):
            torch.utils.swap_tensors(old, made)
            torch_private.adopt(cut, old)
        else:
            moved[old] = made
    return moved


def _make_meta(model: nn.Module) -> None:
    """Tied parameters stay tied."""
    made: dict[int, nn.Parameter] = {}
    for part in model.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                made[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
            part._parameters[name] = made[id(parameter)]


def _cut_parameters(model: nn.Module) -> Iterator[torch_private.CutParameter]:
    for part in model.modules():
        yield from torch_private.cut_parameters(part)


def follow(
    optimizers: Sequence[torch.optim.Optimizer], moved: Mapping[nn.Parameter, nn.Parameter]
) -> None:
    """Optimizers have the parameters that took the places of theirs."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [moved.get(parameter, parameter) for parameter in group["params"]]


def whole_state(
    model: nn.Module, rank: int, known: Mapping[int, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """``model.state_dict()`` in whole tensors on the host of rank 0; {} elsewhere. A collective.

    ``known``: parameters, by their identity, of which every rank has the whole tensor: they are
    not gathered, and not copied.
    """
    whole: dict[str, torch.Tensor] = {}
    given: set[int] = set()  # of those known
    for name, value in model.state_dict(keep_vars=True).items():
        if (found := known.get(id(value))) is not None:
            if rank == 0:  # tied ones are to share nothing
                whole[name] = found.clone() if id(value) in given else found
            given.add(id(value))
            continue
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if rank == 0:
            whole[name] = full.detach().cpu().clone()
    return whole
