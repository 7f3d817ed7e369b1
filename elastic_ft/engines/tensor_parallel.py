"""Tensor parallelism: with sequence parallelism for the built-in decoder, by plans for others.

Within a block of the decoder each rank has some heads and some columns of the feed-forward layer;
between blocks it has some positions, so norms and residuals are shared out as well (Korthikanti et
al., 2022). What blocks hand on is each rank's own positions, a plain tensor.

A plan says which layers are cut how, by the patterns of their names: that of a transformers model
(its ``tp_plan``), or the job's ``parallel.tp_plan``. What it does not name is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from elastic_ft.models.experts import MixtureDecoder
from elastic_ft.models.imports import import_object
from elastic_ft.models.stages import PassThrough, is_tied, parts_of

POSITIONS, VOCABULARY, WHOLE = Shard(1), Shard(-1), Replicate()


KEY = "parallel.tp"  # of the job file, for messages
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
    if isinstance(model, MixtureDecoder):
        raise ConfigError(f"{KEY}: not of mixtures of experts (model.preset)")
    plan = plan_for(model, tp_plan)
    # All ranks draw the same numbers: right where they have the same activations (I3).
    why = "tensor-parallel ranks would drop the same of different heads and columns"
    check_no_dropout(model, KEY, why)
    if plan is None:
        _check_decoder(model, tp, sequence_length)
    elif isinstance(plan, Mapping):
        _check_plan(plan, model, tp)


def check_no_dropout(model: nn.Module, key: str, why: str, noises: Sequence[str] = ()) -> None:
    """Raises ConfigError, of ``key`` of the job file, for a model that drops anything.

    ``noises``: other attributes of modules by which they draw.
    """
    for name, module in model.named_modules():
        rates = {f"{name}.p": module.p} if isinstance(module, DROPOUTS) else {}
        for of in ("attention_dropout", "dropout", "dropout_p", *noises):
            rates[f"{name}.{of}"] = getattr(module, of, 0.0)
        for of, rate in rates.items():
            if isinstance(rate, float) and rate > 0:
                raise ConfigError(
                    f"{key}: {of.lstrip('.')} is {rate:g}, and {why}; train without it, or "
                    f"{key.rpartition('.')[2]}: 1"
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
    here = (name for name, module in model.named_modules() if not isinstance(module, PassThrough))
    for name in here:
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


def check_stages_cut_alike(model: nn.Module, tp_plan: str | None) -> None:
    """Raises ConfigError for a plan by which pipeline stages can't be cut each by itself."""
    plan = plan_for(model, tp_plan)
    if plan is None:
        return
    if not isinstance(plan, Mapping):
        raise ConfigError(f"parallel.tp_plan: {tp_plan} cuts whole models; with pp give a mapping")
    parts = parts_of(model)
    if parts is None or not is_tied(model):
        return
    styles = _matching(plan, model)
    ends = (parts.embedding, parts.head)
    first, last = (_cut_along(model.get_submodule(n), styles.get(n)) for n in ends)
    if first != last:
        raise ConfigError(f"parallel.tp: the plan cuts the tied {' and '.join(ends)} differently")


def _cut_along(module: nn.Module, style: str | ParallelStyle | None) -> int | None:
    """The dimension of its weight that ranks share out, if any."""
    style = STYLES[style]() if isinstance(style, str) else style
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return None
    return int(isinstance(style, ColwiseParallel) == isinstance(module, nn.Embedding))


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
    model.length_multiple = mesh.size()
    for block in model.modules():
        if isinstance(block, Block):
            parallelize_block(block, mesh)
    ends: dict[str, ParallelStyle] = {}
    if model.embedding is not None:
        ends["embedding"] = _Arrived(input_layouts=WHOLE, output_layouts=POSITIONS)
    if model.output is not None:
        ends["norm"] = SequenceParallel()
        ends["output"] = ColwiseParallel(  # the loss is computed of logits as they lie
            input_layouts=POSITIONS, output_layouts=VOCABULARY, use_local_output=False
        )
    parallelize_module(model, mesh, ends)
    if tied:  # both are cut by rows, the vocabulary
        model.output.weight = model.embedding.weight


def parallelize_block(block: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(block, mesh, _block_plan())


class _Arrived(RowwiseParallel):
    """What it returns is no tensor that is still on its way: compiled layers lose the gradient of
    one (torch 2.13)."""

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: Any, outputs: Any, device_mesh: Any
    ) -> Any:
        return outputs.redistribute(placements=output_layouts).to_local()


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
