"""What an optimizer keeps from step to step, as tensors that can be listed, moved and put back.

An optimizer makes its state itself, of real weights, in the first step in which a parameter has a
gradient: as in plain PyTorch, so it begins wherever that optimizer begins (zeros, ones, the rate, a
copy of the weights). Until then a parameter is *fresh*: what is listed for it is all zero, so that
being fresh goes wherever the state goes.

Numbers of Python, those that an optimizer keeps in its groups too, are listed as tensors without
dimensions that follow them. What can't be carried to other workers is refused by name.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from elastic_ft.engines.modules import local_part
from elastic_ft.errors import ConfigError

Make = Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]
MATERIALISED_BYTES = 64 << 20  # of parameters whose state is made at a time
NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
# They take matrices as a whole, in bfloat16: sums over the shards of one are rounded otherwise.
WHOLE_MATRICES = ("Muon",)


class OptimizerState:
    """An optimizer of ``parameters``, by name in the whole model, and what it keeps.

    Makes the optimizer, and placeholders of its state that can be listed and filled in.
    Raises ConfigError, one line, for what can't be carried.

    Args:
        staged: other ranks have other parameters of the model.
    """

    def __init__(
        self, make: Make, parameters: Mapping[str, nn.Parameter], *, staged: bool = False
    ) -> None:
        self.optimizer, stepped = make(parameters), make(parameters)
        trained = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        self._parameters = {n: p for n, p in parameters.items() if id(p) in trained}
        self._check_whole()
        self._materialise(stepped)
        self._own_keys = [*map(self._own, self.optimizer.param_groups, stepped.param_groups)]
        if staged and any(self._own_keys):
            keys = ", ".join(sorted({key for keys in self._own_keys for key in keys}))
            raise self._refused(f"keeps {keys} for all parameters; pipeline stages have some each")
        self._starts = [
            {key: group[key] for key in keys if key in group}
            for group, keys in zip(self.optimizer.param_groups, self._own_keys, strict=True)
        ]
        self._reset_groups()
        known = set(map(id, self._parameters.values()))
        if any(id(key) not in known for key in stepped.state):
            raise self._refused("keeps state of its own beside that of parameters and groups")
        self.optimizer.state.update(stepped.state)
        self._kinds = {
            name: {key: self._kind(name, key, value) for key, value in self._values(name).items()}
            for name in self._parameters
        }
        self._numbers = {
            (name, key): torch.zeros((), dtype=kind)
            for name, kinds in self._kinds.items()
            for key, kind in kinds.items()
            if isinstance(kind, torch.dtype)
        }
        for number, keys in enumerate(self._own_keys):
            for key in keys:
                kind = NUMBERS[type(stepped.param_groups[number][key])]
                self._numbers[f"group{number}", key] = torch.zeros((), dtype=kind)
        self._fresh: set[str] | None = None  # names; None: to be found out
        self.whole = True  # False from a step's beginning on, until it has ended well

    # -------------------------------------------------------------------------- listed, filled in

    def of(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """By key, what is kept for the parameter ``name``. Raises ConfigError if that is new."""
        if name not in self._parameters:
            return
        values, kinds = self._values(name), self._kinds[name]
        if values.keys() != kinds.keys():
            self._check_kinds(name)
        for key in sorted(kinds):
            if kinds[key] is not None:
                yield key, self._numbers.get((name, key), values[key])

    def of_groups(self) -> Iterator[tuple[str, torch.Tensor]]:
        """By "group<i>.<key>", what is kept for groups of parameters."""
        for number, keys in enumerate(self._own_keys):
            for key in keys:
                yield f"group{number}.{key}", self._numbers[f"group{number}", key]

    def clear(self) -> None:
        """All parameters are fresh, as in step 0."""
        for name in self._parameters:
            for _, tensor in self.of(name):
                local_part(tensor).zero_()
        for tensor in self._numbers.values():
            tensor.zero_()

    def restored(self) -> None:
        """The tensors listed were filled in: numbers follow them."""
        self._fresh = None
        counted = any(bool(tensor) for _, tensor in self.of_groups())
        if len(self.fresh) == len(self._parameters) and not counted:
            self._reset_groups()
            return
        for (name, key), tensor in self._numbers.items():
            self._values(name)[key] = tensor.item()

    # ------------------------------------------------------------------------------------ stepped

    @property
    def fresh(self) -> set[str]:
        """Parameters that the optimizer has not begun with."""
        if self._fresh is None:
            self._fresh = {name for name in self._parameters if self._is_zero(name)}
        return self._fresh

    def _is_zero(self, name: str) -> bool:
        kept = sorted((local_part(tensor) for _, tensor in self.of(name)), key=torch.Tensor.dim)
        return not any(bool(tensor.any()) for tensor in kept)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Around a step of the optimizer. Raises ConfigError if what it keeps has changed."""
        beginning = [n for n in self.fresh if self._parameters[n].grad is not None]
        self.whole = False
        for name in beginning:
            self.optimizer.state.pop(self._parameters[name], None)
        yield
        for name in beginning:
            self._check_kinds(name)
        self.fresh.difference_update(beginning)
        self._follow()
        self.whole = True

    def _follow(self) -> None:
        """Writes numbers of Python into the tensors that are listed for them."""
        for (name, key), tensor in self._numbers.items():
            if name in self.fresh:
                continue
            value = self._values(name)[key]
            if NUMBERS.get(type(value)) is not tensor.dtype:
                raise self._refused(f"keeps {key} as {tensor.dtype}, then as {value!r}")
            tensor.fill_(value)

    # ------------------------------------------------------------------------------- what it keeps

    def _values(self, name: str) -> dict[str, Any]:
        if name in self._parameters:
            return self.optimizer.state[self._parameters[name]]
        return self.optimizer.param_groups[int(name.removeprefix("group"))]

    def _own(self, group: Mapping[str, Any], stepped: Mapping[str, Any]) -> list[str]:
        """The keys of a group under which the optimizer keeps state.

        All that it has put there itself, not its constructor's arguments, and all that its step
        has changed.
        """
        given = _arguments(type(self.optimizer)) | {"params", "lr"}
        internal = self.optimizer.defaults.keys() - given
        found = []
        for key in sorted(stepped.keys() - {"params", "lr"}):
            changed = key not in group or not _same(group[key], stepped[key])
            number = type(stepped[key]) in NUMBERS
            if changed and not number:
                kind = type(stepped[key]).__name__
                raise self._refused(f"keeps {key} of a group as {kind}: only numbers are carried")
            if changed or (number and key in internal):
                found.append(key)
        return found

    def _reset_groups(self) -> None:
        for group, keys, start in zip(
            self.optimizer.param_groups, self._own_keys, self._starts, strict=True
        ):
            for key in keys:
                group.pop(key, None)
            group.update(copy.deepcopy(start))

    def _kind(self, name: str, key: str, value: Any) -> object:
        """What a kept ``value`` is: the same from the first step to the last."""
        if value is None:
            return None
        if not isinstance(value, torch.Tensor):
            if type(value) not in NUMBERS:
                kind = type(value).__name__
                raise self._refused(f"keeps {key} as {kind}: only tensors and numbers are carried")
            return NUMBERS[type(value)]
        local = local_part(value)
        if type(local) not in (torch.Tensor, nn.Parameter):
            kind = type(local).__name__
            raise self._refused(f"keeps {key} as {kind}: only plain tensors are carried")
        placements = None
        if isinstance(value, DTensor):
            placements = tuple(value.placements)
            if any(placement.is_partial() for placement in placements):
                raise self._refused(f"keeps {key} as parts of a sum, under sharded parameters")
        elif value.dim() and is_cut(self._parameters[name]):
            raise self._refused(
                f"keeps {key} as a plain tensor where parameters are sharded, so nobody could tell "
                "which part of the whole it is; parallel.strategy ddp has whole ones"
            )
        return local.dtype, tuple(value.shape), placements

    def _check_kinds(self, name: str) -> None:
        expected = self._kinds[name]
        found = {key: self._kind(name, key, v) for key, v in self._values(name).items()}
        for key in sorted(found.keys() | expected.keys()):
            if (is_now := found.get(key)) != (was := expected.get(key)):
                raise self._refused(
                    f"keeps {key} of {name} as {is_now}, in its first step as {was}"
                )

    def _check_whole(self) -> None:
        if type(self.optimizer).__name__ in WHOLE_MATRICES and any(
            map(is_cut, self._parameters.values())
        ):
            raise self._refused("takes matrices as a whole, and they are sharded: use strategy ddp")

    def _materialise(self, stepped: torch.optim.Optimizer) -> None:
        try:
            materialise(stepped)
        except (TypeError, AssertionError) as error:
            raise self._refused(
                f"does not step by step() alone ({error}): one that asks for a closure (LBFGS, "
                "SAM) is refused: take its base, and write the passes over the batch in @ctx.step"
            ) from error

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(f"optimizer.name: {type(self.optimizer).__name__} {why}")


def materialise(optimizer: torch.optim.Optimizer) -> None:
    """Makes the optimizer create its state now, so that it can be listed and filled in.

    Steps with zero gradients and a rate of zero leave the parameters as they are. On a GPU some
    parameters at a time: where the state fills it, there is no room for all their gradients too.
    """
    groups = optimizer.param_groups  # changed in place: the optimizer may have other names for it
    all_groups = [*groups]
    before = [(group["lr"], group["params"]) for group in all_groups]
    numbered = [(n, p) for n, (_, members) in enumerate(before) for p in members]
    try:
        for some in _by_bytes(numbered) if on_gpu(numbered) else [numbered]:
            for number, group in enumerate(all_groups):
                group["lr"], group["params"] = 0.0, [p for n, p in some if n == number]
            groups[:] = [group for group in all_groups if group["params"]]
            for _, parameter in some:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            for _, parameter in some:  # their memory is the next ones'
                parameter.grad = None
    finally:
        groups[:] = all_groups
        for group, (rate, members) in zip(all_groups, before, strict=True):
            group["lr"], group["params"] = rate, members
        for _, parameter in numbered:
            parameter.grad = None


def on_gpu(numbered: Sequence[tuple[int, torch.Tensor]]) -> bool:
    return any(parameter.is_cuda for _, parameter in numbered)


def _by_bytes(
    numbered: Sequence[tuple[int, torch.Tensor]],
) -> Iterator[list[tuple[int, torch.Tensor]]]:
    """In order, together as long as they are MATERIALISED_BYTES at most; at least one list."""
    some: list[tuple[int, torch.Tensor]] = []
    nbytes = 0
    for number, parameter in numbered:
        local = local_part(parameter)
        more = local.numel() * local.element_size()
        if some and nbytes + more > MATERIALISED_BYTES:
            yield some
            some, nbytes = [], 0
        some.append((number, parameter))
        nbytes += more
    yield some


def is_cut(tensor: torch.Tensor) -> bool:
    """Whether ranks have different parts of it."""
    return isinstance(tensor, DTensor) and not all(p.is_replicate() for p in tensor.placements)


def _arguments(kind: type) -> set[str]:
    """Of the constructors of a class and those that it is derived from."""
    return {name for base in kind.__mro__ for name in inspect.signature(base.__init__).parameters}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return bool(torch.equal(a, b))
    return type(a) is type(b) and bool(a == b)
