"""What a script gives to ``ctx.prepare``, sorted and checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

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


def sort_out(things: tuple[Any, ...]) -> Given:
    """Raises ConfigError."""
    models, optimizers, loaders, kept = [], [], [], {}
    for number, thing in enumerate(things):
        if isinstance(thing, nn.Module):
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
    if len(loaders) > 1:
        raise ConfigError(
            f"ctx.prepare: expected one DataLoader, found {len(loaders)}: give the one that is "
            "trained on, and leave others as they are, for ctx.evaluate(function, loader)"
        )
    return Given(models, optimizers, *(loaders or [None]), kept)
