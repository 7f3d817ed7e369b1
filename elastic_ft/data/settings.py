"""Plain attributes of a dataset, by which a script may say what its samples are: a level, a length.

A script sets them between two steps (a curriculum, an epoch's number). Samples are read ahead, and
by processes that were forked before: what was read with other settings is read again.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator, Mapping
from typing import Any

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
            vars(owner)[last] = value
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
            yield from _walk(item, (*path, place), seen)


def _may_have_settings(owner: Any) -> bool:
    if isinstance(owner, (type, types.ModuleType, types.FunctionType)) or not hasattr(
        owner, "__dict__"
    ):
        return False
    module = type(owner).__module__
    is_torchs = module.partition(".")[0] == "torch" and not module.startswith("torch.utils.data")
    return not is_torchs and module.partition(".")[0] not in OTHERS
