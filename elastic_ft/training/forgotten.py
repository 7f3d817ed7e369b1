"""What a loop of the user's changes from step to step, and nobody has registered: it is told of.

An average of the weights, a target network, a scheduler that was not prepared: as long as nobody
is lost all goes well, and then who comes in begins with another one, without a word.
"""

from __future__ import annotations

import functools
import inspect
import logging
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader

from elastic_ft.training.carried import carried_here
from elastic_ft.training.variables import Variable, running_frames
from elastic_ft.worker.steering import Steering

log = logging.getLogger(__name__)
T = TypeVar("T")
DEPTH_MAX, LEAVES_MAX, SAMPLED = 4, 4096, 4096
WHY = (
    "{name} ({kind}) changes from step to step, and is not registered: a worker that comes in, and "
    "the job when it is started again, has another one: ctx.register({short}={name})"
)
CARRIED = (
    "{name} ({value}) is carried from step to step, and is not registered: a worker that comes in, "
    "and the job when it is started again, begins it anew: {instead}"
)
REGISTER = 'ctx.prepare("{name}"), if all ranks have the same; or count by batch.number, the epoch'
OF_OBJECT = "keep it in an object of its own, for ctx.register, if all ranks have the same"


class Forgotten:
    """Objects with a ``state_dict`` that a step's function can see, by their names there."""

    def __init__(self) -> None:
        self._functions: dict[Any, Callable[..., Any]] = {}  # by their code
        self._seen: dict[int, tuple[Any, list[Any]]] = {}  # held, so that no other has its id
        self._told: set[int] = set()
        self._values: dict[str, Any] = {}  # of plain variables, as they were seen first
        self._told_names: set[str] = set()
        self._is_blind = False

    def begin(self, function: Callable[..., Any], known: Iterable[Any]) -> None:
        """``function`` is about to make a step. ``known``: what is kept already."""
        self._if_it_can(lambda: self._begin(function, known))

    @staticmethod
    def looks_after(step: int) -> bool:
        """With few steps."""
        return not step & (step - 1)

    def look(self, step: int, own: Steering) -> None:
        """After ``step``, in the thread whose variables they are: what has changed is told."""
        if self.looks_after(step):
            own.told += self._if_it_can(lambda: self.changed(own.kept)) or []
            frames, names = running_frames(), own.engine.own.names
            own.told += self._if_it_can(lambda: self.carried(frames, own.kept, names)) or []

    def _if_it_can(self, look: Callable[[], T]) -> T | None:
        """Objects of the script's may raise anything; then nobody looks any more."""
        if self._is_blind:
            return None
        try:
            return look()
        except Exception as error:
            self._is_blind = True
            what = f"{type(error).__name__}: {error}"
            log.info("what is not registered can't be looked for: %s", what)
            return None

    def _begin(self, function: Callable[..., Any], known: Iterable[Any]) -> None:
        code = getattr(_plain(function), "__code__", None)
        if code is None or _module_of(function).partition(".")[0] == "elastic_ft":
            return
        is_new = code not in self._functions
        self._functions[code] = function  # made anew in each epoch, maybe
        if is_new:
            kept, owned = _kept(known)
            for _, thing in self._candidates():
                if id(thing) not in kept and id(thing) not in self._seen:
                    self._seen[id(thing)] = thing, _print_of(thing, owned)

    def changed(self, known: Iterable[Any]) -> list[str]:
        """A sentence on each that is another since it was looked at last; once on each."""
        if not self._functions:
            return []
        kept, owned = _kept(known)
        found = list[str]()
        for name, thing in self._candidates():
            if id(thing) in kept or id(thing) in self._told:
                continue
            before, now = self._seen.get(id(thing)), _print_of(thing, owned)
            self._seen.setdefault(id(thing), (thing, now))
            if before is not None and before[1] != now:
                self._told.add(id(thing))
                short, kind = name.rpartition(".")[2], type(thing).__name__
                found.append(WHY.format(name=name, kind=kind, short=short))
        return found

    def carried(
        self, frames: Iterable[types.FrameType], known: Iterable[Any], names: Iterable[str]
    ) -> list[str]:
        """A sentence on each plain variable that the loop carries on, and has changed; once on
        each. ``names``: of those that are registered."""
        functions = [(code, dict(_names_of(f))) for code, f in self._functions.items()]
        kept, found = reachable(known), list[str]()
        for name, value, owner in carried_here(frames, functions):
            if name in names or (owner is not None and id(owner) in kept):
                continue
            if self._values.setdefault(name, value) != value and name not in self._told_names:
                self._told_names.add(name)
                instead = REGISTER.format(name=name) if owner is None else OF_OBJECT
                found.append(CARRIED.format(name=name, value=value, instead=instead))
        return found

    def _candidates(self) -> Iterator[tuple[str, Any]]:
        seen = set[int]()
        for function in self._functions.values():
            for name, thing in _names_of(function):
                inside = [(name, thing)]
                if not _is_stateful(thing) and type(thing).__module__ == _module_of(function):
                    inside = [(f"{name}.{n}", v) for n, v in list(_vars(thing).items())]
                for called, value in inside:
                    if id(value) not in seen and _is_stateful(value):
                        seen.add(id(value))
                        yield called, value


def _plain(function: Any) -> Any:
    """The function that was written."""
    while isinstance(function, functools.partial | types.MethodType):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    return inspect.unwrap(function)


def _module_of(function: Any) -> str:
    return str(getattr(_plain(function), "__module__", ""))


def _names_of(function: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(function, types.MethodType):
        yield "self", function.__self__
    written = _plain(function)
    names = getattr(getattr(written, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(written, "__closure__", None) or (), strict=False):
        if not _is_empty(cell):
            yield name, cell.cell_contents
    for name, thing in list(getattr(written, "__globals__", {}).items()):
        if not name.startswith("__"):
            yield name, thing


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _is_stateful(thing: Any) -> bool:
    if isinstance(thing, (type, types.ModuleType, DataLoader)):  # where a loader is, the job knows
        return False
    kind = type(thing)
    return callable(getattr(kind, "state_dict", None)) and callable(
        getattr(kind, "load_state_dict", None)
    )


def _vars(thing: Any) -> dict[str, Any]:
    return vars(thing) if hasattr(thing, "__dict__") else {}


def _kept(known: Iterable[Any]) -> tuple[dict[int, Any], set[int]]:
    """What is kept, by id; and the addresses of its tensors."""
    kept = reachable(known)
    return kept, {t.data_ptr() for thing in kept.values() for t in _tensors_of(thing)}


def reachable(known: Iterable[Any]) -> dict[int, Any]:
    """What is kept, and what that has: the schedulers of one that is made of several, say."""
    found: dict[int, Any] = {}
    edge = list(known)
    for _ in range(DEPTH_MAX):
        edge = [thing for thing in edge if id(thing) not in found]
        found |= {id(thing): thing for thing in edge}
        edge = [part for thing in edge for part in _parts_of(thing)]
    return found


def _parts_of(thing: Any) -> list[Any]:
    if isinstance(thing, nn.Module):
        return list(thing.modules())
    if isinstance(thing, Mapping):
        return list(thing.values())[:LEAVES_MAX]
    if isinstance(thing, (list, tuple)):
        return list(thing[:LEAVES_MAX])
    if isinstance(thing, (str, int, float, torch.Tensor, type, types.ModuleType, Variable)):
        return []
    return list(_vars(thing).values())


def _tensors_of(thing: Any) -> Iterator[torch.Tensor]:
    if isinstance(thing, nn.Module):
        yield from thing.parameters()
        yield from thing.buffers()
    elif isinstance(thing, torch.Tensor):
        yield thing


def _print_of(thing: Any, owned: set[int]) -> list[Any]:
    """Equal to what it was as long as nothing that it keeps has changed, as far as can be seen at
    little cost. ``owned``: the addresses of tensors that others keep. It is looked at, and nothing
    is asked of it: a loader's ``state_dict`` may start processes, another's be a collective."""
    found = list[Any]()
    is_optimizer = isinstance(thing, torch.optim.Optimizer)
    _add_print(list(thing.state.values()) if is_optimizer else thing, owned, found, 0)
    return found


def _add_print(value: Any, owned: set[int], found: list[Any], depth: int) -> None:
    if depth > DEPTH_MAX or len(found) >= LEAVES_MAX:
        return
    if isinstance(value, torch.Tensor):
        local = getattr(value, "_local_tensor", value).detach()
        if local.device.type != "meta" and local.data_ptr() not in owned:
            some = local.reshape(-1)[:SAMPLED]
            found.append((tuple(local.shape), float(some.abs().sum(dtype=torch.float64))))
    elif isinstance(value, nn.Module):
        _add_print(list(_tensors_of(value)), owned, found, depth + 1)
    elif _is_stateful(value) and not isinstance(value, torch.optim.Optimizer):
        _add_print(_vars(value), owned, found, depth + 1)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key != "param_groups":  # of an optimizer's wrapper: they are the optimizer's
                _add_print(item, owned, found, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _add_print(item, owned, found, depth + 1)
    elif isinstance(value, (bool, int, float, str)):
        found.append(value)
