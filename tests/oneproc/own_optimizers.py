"""Optimizers of a user's, with all the kinds of state that are met in the field."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Counting(torch.optim.Optimizer):
    """In the manner of Lion, with numbers of Python in its state, and of Prodigy, in its groups.

    The sign is a soft one: rounding can't turn it over.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "k": 0, "d": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            group["d"] += 1.0 / group["k"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"], state["seen"] = 0, False
                    state["average"], state["start"] = parameter.grad.clone(), parameter.clone()
                state["step"] += 1
                state["seen"] = True
                state["average"].lerp_(parameter.grad, 0.1)
                corrected = state["average"] / (1 - 0.5 ** state["step"])
                away = (parameter - state["start"]) * group["weight_decay"]
                update = corrected / (corrected.abs() + 1e-3) + away
                parameter.add_(update, alpha=-group["lr"] * group["d"])


class Listing(torch.optim.SGD):
    """Keeps a list, which nothing can carry."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("past", []).append(0.0)


class Inward(torch.optim.SGD):
    """Keeps its count to itself."""

    count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.count += 1


class Late(torch.optim.SGD):
    """Keeps more from its second step on."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "first" in state:
                    state["second"] = torch.zeros(())
                state["first"] = torch.zeros(())


class Blocks(torch.optim.SGD):
    """Keeps plain tensors of whatever a rank has, as 8-bit optimizers do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                local = getattr(parameter, "_local_tensor", parameter)
                self.state[parameter]["blocks"] = torch.zeros(local.shape, dtype=torch.uint8)


class Quantised(Tensor):
    """A subclass, as torchao's states are."""


class Packed(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                packed = torch.zeros(4).as_subclass(Quantised)
                self.state[parameter]["packed"] = packed


class OfGpus(torch.optim.SGD):
    """Has kernels for GPUs alone."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not all(p.is_cuda for group in self.param_groups for p in group["params"]):
            raise RuntimeError("no kernel for the CPU")
        super().step(closure)


class Trusting(torch.optim.Optimizer):
    """In the manner of LAMB: norms of whole parameters, which are collectives if they are cut."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    trust = parameter.norm() / (parameter.grad.norm() + 1e-6)
                    parameter.sub_(parameter.grad * trust * group["lr"])


class Slowing(torch.optim.Optimizer):
    """Counts its steps, and keeps nothing for parameters."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] / group["k"])
