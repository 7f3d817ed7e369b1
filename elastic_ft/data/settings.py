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
from typing import Any, NamedTuple

from elastic_ft.errors import DataError

Path = tuple[str | int, ...]  # attributes, and places in lists
Settings = dict[Path, Any]
SCALARS = (bool, int, float, str, type(None))
DEPTH_MAX, ITEMS_MAX, FOUND_MAX = 4, 16, 512
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
    return bool(one == other) or repr(one) == repr(other)  # nan is never equal


def put_settings(dataset: Any, settings: Mapping[Path, Any]) -> None:
    """Sets those that ``settings_of`` another process's copy has found. Raises DataError where this
    copy has no such place."""
    for path, value in settings.items():
        *above, last = path
        try:
            owner = dataset
            for part in above:
                owner = _part(owner, part)
            if not isinstance(value, Called):
                vars(owner)[last] = value
            elif _kind_of(owner[last] if isinstance(last, int) else vars(owner)[last]) != value:
                raise LookupError
        except (LookupError, TypeError):
            raise DataError(
                f"the dataset's {'.'.join(map(str, path))} was made after its reading processes "
                "were: make it before ctx.prepare and set its values, or read with num_workers=0"
            ) from None


def _part(owner: Any, part: str | int) -> Any:
    if isinstance(part, int):
        return owner[part]
    found = vars(owner)[part]
    return found.__self__ if isinstance(found, types.MethodType) else found


def _walk(owner: Any, path: Path, seen: set[int]) -> Iterator[tuple[Path, Any]]:
    if len(seen) == FOUND_MAX or id(owner) in seen or len(path) >= DEPTH_MAX:
        return
    if not _may_have_settings(owner):
        return
    seen.add(id(owner))
    for name, value in list(vars(owner).items()):  # another thread may read, and set some
        here = (*path, name)
        yield from _kind_at(here, value)
        if isinstance(value, SCALARS):
            yield here, value
        elif isinstance(value, types.MethodType):
            yield from _walk(value.__self__, here, seen)
        elif isinstance(value, (list, tuple, dict)):
            if len(value) <= ITEMS_MAX:
                yield from _walk_items(value, here, seen)
        else:
            yield from _walk(value, here, seen)


def _walk_items(
    value: list[Any] | tuple[Any, ...] | dict[Any, Any], path: Path, seen: set[int]
) -> Iterator[tuple[Path, Any]]:
    plain = list(value.values()) if isinstance(value, dict) else list(value)
    if all(isinstance(item, SCALARS) for item in plain):
        yield path, copy.copy(value)
    elif not isinstance(value, dict):
        for place, item in enumerate(plain):
            yield from _kind_at((*path, place), item)
            yield from _walk(item, (*path, place), seen)


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
    if isinstance(owner, (type, types.ModuleType, types.FunctionType)) or not hasattr(
        owner, "__dict__"
    ):
        return False
    module = type(owner).__module__
    is_torchs = module.partition(".")[0] == "torch" and not module.startswith("torch.utils.data")
    return not is_torchs and module.partition(".")[0] not in OTHERS
