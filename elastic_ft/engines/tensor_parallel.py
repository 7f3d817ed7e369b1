"""Tensor parallelism: with sequence parallelism for the built-in decoder, by plans for others.

Within a block of the decoder each rank has some heads and some columns of the feed-forward layer;
between blocks it has some positions, so norms and residuals are shared out as well (Korthikanti et
al., 2022). What blocks hand on is each rank's own positions, a plain tensor.

A plan says which layers are cut how, by the patterns of their names: that of a transformers model
(its ``tp_plan``), or the job's ``parallel.tp_plan``. What it does not name is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from elastic_ft.errors import ConfigError
from elastic_ft.models.decoder import Block, Decoder, DecoderStage
from elastic_ft.models.imports import import_object

POSITIONS, VOCABULARY, WHOLE = Shard(1), Shard(-1), Replicate()


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
Plan = Mapping[str, str | ParallelStyle]  # by patterns of module names, ``*`` for any part
CutFunction = Callable[[nn.Module, DeviceMesh], object]  # or a function that does it all, in place

# By the names that transformers has for them.
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=WHOLE),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=WHOLE),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=WHOLE),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=WHOLE),
    # Norms of heads, [batch, positions, heads, width]: each rank has some of the heads.
    "replicated_with_grad_allreduce": lambda: SequenceParallel(
        sequence_dim=2, use_local_output=True
    ),
}
_CUT_BY = {"colwise": 0, "rowwise": -1}  # dimensions that must divide


def plan_for(model: nn.Module, tp_plan: str | None) -> Plan | CutFunction | None:
    """The plan that ``model`` is cut by, None for the built-in decoder's. Raises ConfigError."""
    if tp_plan is not None:
        found = import_object(tp_plan, "parallel.tp_plan", ConfigError)
        if not isinstance(found, Mapping) and not callable(found):
            raise ConfigError(
                f"parallel.tp_plan: {tp_plan} is {type(found).__name__}; expected a mapping from "
                "patterns of module names to styles, or a function (model, mesh)"
            )
        return found
    if isinstance(model, Decoder | DecoderStage):
        return None
    plan = getattr(model, "tp_plan", None)
    if not plan:
        raise ConfigError(
            f"parallel.tp: {type(model).__name__} has no plan of its own for tensor parallelism; "
            "give one as parallel.tp_plan"
        )
    return plan


def check_tensor_parallel(
    model: nn.Module, tp: int, sequence_length: int | None, tp_plan: str | None = None
) -> None:
    """Raises ConfigError, one line, for a model that ``tp`` ranks can't share."""
    if tp == 1:
        return
    plan = plan_for(model, tp_plan)
    _check_no_dropout(model)
    if plan is None:
        _check_decoder(model, tp, sequence_length)
    elif isinstance(plan, Mapping):
        _check_plan(plan, model, tp)


def _check_no_dropout(model: nn.Module) -> None:
    """All ranks draw the same numbers: right where they have the same activations, but where each
    has heads or columns of its own it would drop the same of all (I3)."""
    for name, module in model.named_modules():
        rates = {f"{name}.p": module.p} if isinstance(module, DROPOUTS) else {}
        for key in ("attention_dropout", "dropout", "dropout_p"):
            rates[f"{name}.{key}"] = getattr(module, key, 0.0)
        for key, rate in rates.items():
            if isinstance(rate, float) and rate > 0:
                raise ConfigError(
                    f"parallel.tp: {key.lstrip('.')} is {rate:g}, and tensor-parallel ranks would "
                    "drop the same of different heads and columns; train without dropout, or tp: 1"
                )


def _check_decoder(model: nn.Module, tp: int, sequence_length: int | None) -> None:
    assert isinstance(model, Decoder)
    config = model.config
    sizes = {
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_kv_heads,
        "ffn_dim": config.ffn_dim,
        "sequence length": sequence_length or config.max_sequence_length,
    }
    _check_divides(tp, sizes)


def _check_plan(plan: Plan, model: nn.Module, tp: int) -> None:
    names = [name for name, _ in model.named_modules()]
    for pattern, style in plan.items():
        if isinstance(style, str) and style not in STYLES:
            raise ConfigError(
                f"parallel.tp: the plan has {pattern} {style}; expected one of {', '.join(STYLES)}"
            )
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"parallel.tp: the plan names {pattern}, which matches no module")
    sizes = {}
    for name, style in _matching(plan, model).items():
        weight = getattr(model.get_submodule(name), "weight", None)
        if style in _CUT_BY and isinstance(weight, nn.Parameter):
            sizes[name] = weight.shape[_CUT_BY[style]]
    config = getattr(model, "config", None)
    for name in ("num_attention_heads", "num_key_value_heads"):
        if isinstance(size := getattr(config, name, None), int):
            sizes[name] = size
    _check_divides(tp, sizes)


def _check_divides(tp: int, sizes: Mapping[str, int]) -> None:
    for name, size in sizes.items():
        if size % tp:
            raise ConfigError(f"parallel.tp: {tp} does not divide the model's {name} {size}")


def _matching(plan: Plan, model: nn.Module) -> dict[str, Any]:
    """Style by module name; of several patterns the first that matches counts."""
    found: dict[str, Any] = {}
    for name, _ in model.named_modules():
        for pattern, style in plan.items():
            if fnmatchcase(name, pattern):
                found[name] = style
                break
    return found


def parallelize(model: nn.Module, mesh: DeviceMesh, tp_plan: str | None = None) -> None:
    """Shares the parameters of ``model`` out over ``mesh``, in place."""
    plan = plan_for(model, tp_plan)
    if plan is None:
        assert isinstance(model, Decoder | DecoderStage)
        _parallelize_decoder(model, mesh)
        return
    ties = _ties(model)
    if isinstance(plan, Mapping):
        styles = {
            name: STYLES[style]() if isinstance(style, str) else style
            for name, style in _matching(plan, model).items()
        }
        parallelize_module(model, mesh, styles)
    else:
        plan(model, mesh)
    for (first, first_name), *others in ties:  # cutting a tied tensor makes several of it
        tensor = getattr(first, first_name)
        for module, name in others:
            _refuse_unlike(tensor, getattr(module, name), name)
            setattr(module, name, tensor)


def _ties(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    return [where for where in places.values() if len(where) > 1]


def _refuse_unlike(tensor: object, other: object, name: str) -> None:
    cuts = [t.placements if isinstance(t, DTensor) else None for t in (tensor, other)]
    if cuts[0] != cuts[1]:
        raise ConfigError(f"parallel.tp: the plan cuts the places of a tied {name} differently")


def _parallelize_decoder(model: Decoder | DecoderStage, mesh: DeviceMesh) -> None:
    tied = model.output is not None and model.embedding is not None
    tied = tied and model.output.weight is model.embedding.weight
    for block in model.modules():
        if isinstance(block, Block):
            parallelize_module(block, mesh, _block_plan())
    ends: dict[str, ParallelStyle] = {}
    if model.embedding is not None:
        ends["embedding"] = RowwiseParallel(input_layouts=WHOLE, output_layouts=POSITIONS)
    if model.output is not None:
        ends["norm"] = SequenceParallel()
        ends["output"] = ColwiseParallel(  # the loss is computed of logits as they lie
            input_layouts=POSITIONS, output_layouts=VOCABULARY, use_local_output=False
        )
    parallelize_module(model, mesh, ends)
    if tied:  # both are cut by rows, the vocabulary
        model.output.weight = model.embedding.weight


def _block_plan() -> dict[str, ParallelStyle]:
    return {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(POSITIONS, None), desired_input_layouts=(WHOLE, None)
        ),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.output": RowwiseParallel(output_layouts=POSITIONS),
        "ffn_norm": SequenceParallel(),
        "ffn": PrepareModuleInput(input_layouts=(POSITIONS,), desired_input_layouts=(WHOLE,)),
        "ffn.gate": ColwiseParallel(),
        "ffn.up": ColwiseParallel(),
        "ffn.down": RowwiseParallel(output_layouts=POSITIONS),
    }
