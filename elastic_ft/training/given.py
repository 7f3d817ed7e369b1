"""What a script gives to ``ctx.prepare``, sorted and checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, RandomSampler

from elastic_ft.errors import ConfigError
from elastic_ft.training.loader import Loader
from elastic_ft.training.torchrun import deals_nothing
from elastic_ft.worker.step import Step


@dataclass(frozen=True)
class Given:
    """What came with one call.

    Attributes:
        loader: is trained on from now on, if it is there.
        kept: schedulers and the like, by their places in that call.
    """

    models: list[nn.Module]
    optimizers: list[Optimizer]
    loader: DataLoader[Any] | Loader | None
    kept: dict[int, Any]

    def made_of(
        self, things: Sequence[Any], trained: Loader | None, held_out: Callable[[Any], Any]
    ) -> list[Any]:
        """What takes the place of each: of the loader ``trained``, of others what ``held_out``
        makes of them."""
        made = []
        for thing in things:
            if thing is self.loader and thing is not None:
                made.append(trained)
            else:
                made.append(held_out(thing) if isinstance(thing, DataLoader) else thing)
        return made


LATE = (
    "comes after the first batch: give everything before; a job has one loader, of one batch size: "
    "what changes with epochs (a level, a length) is set on its dataset or collate_fn"
)
ONE_LOADER = (
    "ctx.prepare: expected one DataLoader that is trained on, found {count}: of several make one, "
    "of a dataset whose samples have a part of each; held-out ones may come, too, where they do "
    "not say shuffle=True, after the one that is trained on, or with it"
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


def sort_out(things: tuple[Any, ...], trained: Loader | None = None) -> Given:
    """``trained``: the loader that was given before. Raises ConfigError."""
    models, optimizers, loaders, kept = [], [], [], {}
    for place, thing in enumerate(things):
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
            kept[place] = thing
        else:
            raise ConfigError(f"ctx.prepare: knows nothing of a {type(thing).__name__}")
    return Given(models, optimizers, _trained_of(loaders, trained), kept)


def _trained_of(loaders: list[Any], trained: Loader | None) -> DataLoader[Any] | Loader | None:
    """That of these which is trained on: the others are held-out ones. Raises ConfigError."""
    sure = [x for x in loaders if isinstance(x, Loader) or isinstance(x.sampler, RandomSampler)]
    if sure or trained is not None:  # else the first of those that a DistributedSampler shuffles
        sure += [x for x in loaders if deals_nothing(x.sampler) and x.sampler.shuffle]
    if len(sure) + (trained is not None) > 1:
        raise ConfigError(ONE_LOADER.format(count=len(sure) + (trained is not None)))
    if trained is not None:
        return None
    return next(iter([*sure, *loaders]), None)


def check_new(given: Given, known: Sequence[Any]) -> None:
    """Raises ConfigError where something was given before."""
    for thing in (*given.models, *given.optimizers, *given.kept.values()):
        if any(thing is one for one in known):
            raise ConfigError(f"ctx.prepare: this {type(thing).__name__} was given before")


def check_complete(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Raises ConfigError."""
    for kind, found in (("nn.Module", models), ("optimizer", optimizers)):
        if not found:
            raise ConfigError(f"ctx.prepare: expected at least one {kind}, found none")


def logged_of(results: tuple[Any, ...], values: dict[str, Any]) -> dict[str, Any]:
    """What ``ctx.log`` was given: dictionaries, or a name and its value. Raises ConfigError."""
    if len(results) == 2 and isinstance(results[0], str):
        results = ({results[0]: results[1]},)
    if results:  # what others plot it at: here it is the step made last
        values = {name: value for name, value in values.items() if name != "step"}
    given = dict[str, Any]()
    for result in results:
        if isinstance(result, Mapping):
            given |= result
        elif not (result is None or isinstance(result, Step)):
            kind = type(result).__name__
            raise ConfigError(f"ctx.log: expected name=value, or a dictionary, found {kind}")
    return {name: loggable(name, value) for name, value in (given | values).items()}


def loggable(name: str, value: Any) -> int | float | str | bool:
    """The value, or a tensor's. Raises ConfigError for what no line of steps.jsonl can have."""
    found = value.item() if isinstance(value, torch.Tensor | np.generic) else value
    if not isinstance(found, (int, float, str, bool)):
        kind = type(value).__name__
        instead = ": ctx.backward takes (sum, count), over all ranks" * (kind == "tuple")
        raise ConfigError(f"ctx.log: {name} is {kind}, expected a number or text{instead}")
    return found
