"""What a script gives to ``ctx.prepare``, sorted and checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, RandomSampler

from elastic_ft.errors import ConfigError
from elastic_ft.training.loader import Loader


@dataclass(frozen=True)
class Given:
    """Attributes:
    loader: None: the script draws its micro-batches itself.
    kept: schedulers and the like, by the names that their state has.
    """

    models: list[nn.Module]
    optimizers: list[Optimizer]
    loader: DataLoader[Any] | Loader | None
    kept: dict[str, Any]


ALL_AT_ONCE = (
    "ctx.prepare: was called before: give it everything at once; a job has one loader, of one "
    "batch size: what changes with epochs (a level, a length) is set on its dataset or collate_fn"
)
PACKED_BY = ("bitsandbytes", "torchao", "hqq", "gptqmodel", "auto_gptq", "awq")  # modules


def quantised_by(model: Any) -> str | None:
    """What has packed a model's weights: they can't be cut, compared or carried then."""
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    if config is not None or getattr(model, "is_quantized", False):
        method = getattr(config, "quant_method", None) or "some method"
        return str(getattr(method, "value", method))
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    kinds = {
        type(tensor).__module__.partition(".")[0] for p in parameters for tensor in (p, p.data)
    }
    return next((kind for kind in PACKED_BY if kind in kinds), None)


def sort_out(things: tuple[Any, ...]) -> Given:
    """Raises ConfigError."""
    models, optimizers, loaders, kept = [], [], [], {}
    for number, thing in enumerate(things):
        if isinstance(thing, nn.Module):
            if (method := quantised_by(thing)) is not None:
                raise ConfigError(
                    f"ctx.prepare: {type(thing).__name__}: quantised by {method}, which is "
                    "refused: its weights are packed: load the base in bfloat16"
                )
            models.append(thing)
        elif isinstance(thing, Optimizer):
            optimizers.append(thing)
        elif isinstance(thing, DataLoader | Loader):
            loaders.append(thing)
        elif isinstance(thing, LRScheduler) or hasattr(thing, "load_state_dict"):
            kept[f"prepared{number}"] = thing
        else:
            raise ConfigError(f"ctx.prepare: knows nothing of a {type(thing).__name__}")
    for kind, found in (("nn.Module", models), ("optimizer", optimizers)):
        if not found:
            raise ConfigError(f"ctx.prepare: expected at least one {kind}, found none")
    shuffled = [x for x in loaders if isinstance(getattr(x, "sampler", None), RandomSampler)]
    if len(loaders) > 1 and len(shuffled) == 1:  # the others are held-out ones
        loaders = shuffled
    if len(loaders) > 1:
        raise ConfigError(
            f"ctx.prepare: expected one DataLoader, found {len(loaders)}: of several that are "
            "trained on make one, of a dataset whose samples have a part of each; held-out ones "
            "may come, too, where only the one that is trained on says shuffle=True"
        )
    return Given(models, optimizers, *(loaders or [None]), kept)


def loggable(name: str, value: Any) -> int | float | str | bool:
    """The value, or a tensor's. Raises ConfigError for what no line of steps.jsonl can have."""
    found = value.item() if isinstance(value, torch.Tensor) else value
    if not isinstance(found, (int, float, str, bool)):
        kind = type(value).__name__
        instead = ": ctx.backward takes (sum, count), over all ranks" * (kind == "tuple")
        raise ConfigError(f"ctx.log: {name} is {kind}, expected a number or text{instead}")
    return found
