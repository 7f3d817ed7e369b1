"""What a torchrun script wraps its model in, and deals its samples by: the lines stay as they are.

Of a script that has called ``init`` a ``DistributedDataParallel`` is the model itself, which is cut
and wrapped for each world by its engine, and a ``DistributedSampler`` deals nothing out: the order
of what is trained on is the job's, and held-out data each rank goes through whole.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from elastic_ft.errors import ConfigError

REFUSED = {  # options of the wrapper that would change what is computed
    "process_group": "the world's groups are the job's: leave it out",
    "device_mesh": "the world's groups are the job's: leave it out",
    "mixed_precision": "torch.autocast in the step's function instead",
}


def watch_wrappers(current: Callable[[], Any]) -> None:
    """From now on, in this process, for the context that ``current`` returns. Once."""
    wrapper: Any = DistributedDataParallel
    options = inspect.signature(wrapper.__init__)
    wrapper.__new__ = _wrapped(current, options)
    plain = DistributedSampler.__init__

    @functools.wraps(plain)
    def dealt(
        sampler: Any,
        dataset: Any,
        num_replicas: Any = None,
        rank: Any = None,
        *more: Any,
        **how: Any,
    ) -> None:
        if current() is not None and num_replicas is None and rank is None:
            num_replicas, rank = 1, 0
        plain(sampler, dataset, num_replicas, rank, *more, **how)

    DistributedSampler.__init__ = dealt  # type: ignore[method-assign]


def _wrapped(current: Callable[[], Any], options: inspect.Signature) -> Callable[..., Any]:
    def wrapped(kind: type, module: nn.Module | None = None, *args: Any, **how: Any) -> Any:
        context, caller = current(), str(sys._getframe(1).f_globals.get("__name__", ""))
        if context is None or module is None or caller.partition(".")[0] == "elastic_ft":
            return object.__new__(kind)
        given = options.bind(None, module, *args, **how).arguments
        _check(given, context.job.parallel.unused_parameters)
        if not hasattr(module, "module"):
            vars(module)["module"] = module  # as an attribute it would be a part of itself
        return module

    wrapped.__signature__ = options  # type: ignore[attr-defined]  # who asks the class is told it
    return wrapped


def _check(how: dict[str, Any], may_be_unused: bool) -> None:
    """Raises ConfigError."""
    for name, instead in REFUSED.items():
        if how.get(name) is not None:
            raise ConfigError(f"DistributedDataParallel.{name}: refused: {instead}")
    if how.get("find_unused_parameters") and not may_be_unused:
        raise ConfigError(
            "DistributedDataParallel.find_unused_parameters: say "
            'parallel={"unused_parameters": True} of init, or leave it out'
        )


def deals_nothing(sampler: Any) -> bool:
    """Whether it is a script's ``DistributedSampler(dataset)``."""
    return type(sampler) is DistributedSampler and sampler.num_replicas == 1
