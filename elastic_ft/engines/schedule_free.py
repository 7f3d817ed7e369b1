"""Schedule-free optimizers (Defazio and others, 2024), by the package of their authors.

A step's gradients are taken at y, between z, which is stepped, and x, the average of all z, which
is what was learned: y = (1 - beta) z + beta x. A parameter is y, and z is kept for it, so that x is
made of both: for an evaluation, while y is set aside, and where a checkpoint is exported
(``state.averaged_weights``). What is counted for a group (steps, the weights' sum, the greatest
rate) is state, too: see ``engines.optimizer_state``.
"""

from __future__ import annotations

import importlib
from typing import Any

from elastic_ft.config import OptimizerConfig
from elastic_ft.errors import ConfigError

CLASSES = {"schedule_free_adamw": "AdamWScheduleFree", "schedule_free_sgd": "SGDScheduleFree"}


def make_schedule_free(config: OptimizerConfig, groups: Any, *, together: bool) -> Any:
    """Returns the optimizer, in the mode in which it steps. Raises ConfigError without its package.

    ``together``: many tensors in one call. DTensor has that for those of one mesh.
    """
    try:
        package = importlib.import_module("schedulefree")
    except ImportError:
        raise ConfigError(
            f"optimizer.name: {config.name} needs schedulefree: "
            "pip install 'elastic-ft[schedule-free]'"
        ) from None
    kwargs = {"lr": config.lr, **config.kwargs} | ({} if together else {"foreach": False})
    if config.name == "schedule_free_adamw":
        kwargs = {"betas": config.betas, "eps": config.eps, **kwargs}
    name = CLASSES.get(config.name) or config.name.partition(":")[2]
    made = getattr(package, name, None)
    if made is None:
        raise ConfigError(f"optimizer.name: schedulefree has no {name}")
    optimizer = made(groups, **kwargs)
    optimizer.train()
    return optimizer
