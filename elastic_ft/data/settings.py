"""Plain attributes of a dataset, by which a script may say what its samples are: a level, a length.

A script sets them between two steps (a curriculum, an epoch's number). Samples are read ahead, and
by processes that were forked before: what was read with other settings is read again. Of what is
called (a transform) it is seen that it is another one, which no process forked before can have.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from elastic_ft.errors import DataError

Path = tuple[str | int, ...]  # attributes, and places in lists
Settings = dict[Path, Any]
SCALARS = (bool, int, float, str, type(None))
DEPTH_MAX, ITEMS_MAX, FOUND_MAX = 4, 16, 512
COPIED_MAX = 1024  # items of a list, an array or a tensor that are compared one by one
# Whose objects are left alone: they have much that is no setting, and change it while they read.
OTHERS = (
    "datasets",
    "numpy",
    "pandas",
    "PIL",
    "pyarrow",
    "threading",
    "tokenizers",
    "transformers",
)


@dataclass(frozen=True, slots=True)
class Large:
    """What has too many values to be compared: another one is seen, and what has another length;
    of a tensor that its values are others, too."""

    thing: Any
    version: int


class Called(NamedTuple):
    """Of what is called: its function with plain arguments, or its class."""

    name: str


def settings_of(dataset: Any) -> Settings:
    """Of it, and of what it has: datasets, transforms, a collate function."""
    found: Settings = {}
    for path, value in _walk(dataset, (), set()):
        if len(found) == FOUND_MAX:
            break
        found[path] = value
    return found


def changed_settings(before: Settings, now: Settings) -> frozenset[Path]:
    """Which are others, or are in one of both alone."""
    return frozenset(
        path
        for path in before.keys() | now.keys()
        if path not in before or path not in now or not _is_same(before[path], now[path])
    )


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Large) and isinstance(other, Large):
        return one.thing is other.thing and one.version == other.version
    if any(isinstance(value, (Large, torch.Tensor, np.ndarray)) for value in (one, other)):
        alike = type(one) is type(other) and (one.shape, one.dtype) == (other.shape, other.dtype)
        return alike and bool(((one == other) | ((one != one) & (other != other))).all())
    return bool(one == other) or repr(one) == repr(other)  # nan is never equal


def to_be_told(settings: Settings, paths: frozenset[Path]) -> Settings:
    """Those at ``paths``, for ``put_settings`` in another process."""
    return {path: _whole(settings[path]) for path in paths & settings.keys()}


def _whole(value: Any) -> Any:
    thing = value.thing if isinstance(value, Large) else value
    return thing.clone() if isinstance(thing, torch.Tensor) else thing  # sending it shares it


def put_settings(dataset: Any, settings: Mapping[Path, Any]) -> None:
    """Sets those that ``settings_of`` another process's copy has found. Raises DataError where this
    copy has no such place."""
    for path, value in settings.items():
        *above, last = path
        try:
            owner = dataset
            for part in above:
                owner = _part(owner, part)
            _put(owner, last, value)
        except (LookupError, TypeError, AttributeError):
            raise DataError(
                f"the dataset's {'.'.join(map(str, path))} was made after its reading processes "
                "were: make it before ctx.prepare and set its values, or read with num_workers=0"
            ) from None


def _put(owner: Any, last: str | int, value: Any) -> None:
    if isinstance(value, Called):
        if _kind_of(owner[last] if isinstance(last, int) else _attributes(owner)[last]) != value:
            raise LookupError(last)
    elif isinstance(last, int):
        owner[last] = value
    elif last in _slots(owner):
        object.__setattr__(owner, last, value)
    else:
        vars(owner)[last] = value


def _part(owner: Any, part: str | int) -> Any:
    if isinstance(part, int):
        return owner[part]
    found = _attributes(owner)[part]
    return found.__self__ if isinstance(found, types.MethodType) else found


def _attributes(owner: Any) -> dict[str, Any]:
    found = dict(vars(owner)) if hasattr(owner, "__dict__") else {}
    return found | {name: getattr(owner, name) for name in _slots(owner) if hasattr(owner, name)}


def _slots(owner: Any) -> tuple[str, ...]:
    """Names of its attributes that are in no dictionary."""
    return _slots_of(type(owner))


@functools.lru_cache(FOUND_MAX)
def _slots_of(kind: type) -> tuple[str, ...]:
    """It goes through all that the class has, and is asked for in each step."""
    return tuple(
        name
        for base in kind.__mro__
        for name, place in vars(base).items()
        if isinstance(place, types.MemberDescriptorType)
    )


def _walk(owner: Any, path: Path, seen: set[int]) -> Iterator[tuple[Path, Any]]:
    if len(seen) == FOUND_MAX or id(owner) in seen or len(path) >= DEPTH_MAX:
        return
    if not _may_have_settings(owner):
        return
    seen.add(id(owner))
    for name, value in _attributes(owner).items():
        yield from _kind_at((*path, name), value)
        yield from _visit(value, (*path, name), seen)


def _visit(value: Any, path: Path, seen: set[int]) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, SCALARS):
        yield path, value
    elif isinstance(value, types.MethodType):
        yield from _walk(value.__self__, path, seen)
    elif isinstance(value, torch.Tensor):
        is_small = value.device.type == "cpu" and value.numel() <= COPIED_MAX
        version = 0 if value.is_inference() else value._version
        yield path, value.detach().clone() if is_small else Large(value, version)
    elif isinstance(value, np.ndarray):
        is_small = value.size <= COPIED_MAX and not value.dtype.hasobject
        yield path, value.copy() if is_small else Large(value, value.size)
    elif isinstance(value, (list, tuple, dict)):
        yield from _visit_items(value, path, seen)
    else:
        yield from _walk(value, path, seen)


def _visit_items(
    value: list[Any] | tuple[Any, ...] | dict[Any, Any], path: Path, seen: set[int]
) -> Iterator[tuple[Path, Any]]:
    if len(value) > COPIED_MAX:
        yield path, Large(value, len(value))
        return
    plain = list(value.values()) if isinstance(value, dict) else list(value)
    if all(isinstance(item, SCALARS) for item in plain):
        yield path, copy.copy(value)
    elif len(value) > ITEMS_MAX:
        yield path, Large(value, len(value))
    elif not isinstance(value, dict):
        for place, item in enumerate(plain):
            if not isinstance(item, SCALARS):
                yield from _kind_at((*path, place), item)
                yield from _visit(item, (*path, place), seen)


def _kind_at(path: Path, value: Any) -> Iterator[tuple[Path, Called]]:
    if callable(value):
        yield path, _kind_of(value)


def _kind_of(value: Any) -> Called:
    if isinstance(value, functools.partial):
        given = _plain((*value.args, *value.keywords, *value.keywords.values()))
        return Called(f"{_kind_of(value.func).name}{given}")
    made = value.__func__ if isinstance(value, types.MethodType) else value
    if isinstance(made, types.FunctionType):
        kept = (_content(cell) for cell in made.__closure__ or ())
        given = _plain((made.__code__.co_firstlineno, *(made.__defaults__ or ()), *kept))
        return Called(f"{made.__module__}.{made.__qualname__}{given}")
    made = made if isinstance(made, (type, types.BuiltinFunctionType)) else type(made)
    return Called(f"{made.__module__}.{made.__qualname__}")


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _plain(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if isinstance(value, SCALARS)]


def _may_have_settings(owner: Any) -> bool:
    if isinstance(owner, (type, types.ModuleType, types.FunctionType)):
        return False
    if not hasattr(owner, "__dict__") and not _slots(owner):
        return False
    module = type(owner).__module__
    is_torchs = module.partition(".")[0] == "torch" and not module.startswith("torch.utils.data")
    return not is_torchs and module.partition(".")[0] not in OTHERS
