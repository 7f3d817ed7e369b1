"""The core's state as JSON and back, type by type: a run's inbox may begin with one, and the
service's journal need not be read from its first line.

Each value that JSON does not know by itself comes as ``{"is": its type, "has": its parts}``. Types
are those of ``elastic_ft.core``: data alone, and nothing else is ever made from what is read.
A snapshot is of one version's state, part by part: another version refuses it. A job's state and
the service's have numbers of their own.
"""

from __future__ import annotations

import dataclasses
import importlib
from enum import Enum
from typing import Any, TypeVar

from elastic_ft.core.sharing.ledger import Sharing
from elastic_ft.core.state import State
from elastic_ft.core.table import Table
from elastic_ft.errors import ConfigError

T = TypeVar("T")
CORE = "elastic_ft.core."
VERSION = 4  # of a job's state; to be raised where a part of it gets another meaning
SHARING_VERSION = 4  # likewise, of the service's: an upgrade that raises it needs the whole journal


def as_plain_values(state: State | Sharing) -> Any:
    """Raises TypeError where a value is of no type that a state may have."""
    return {"version": _version_of(type(state)), "state": _encode(state)}


def _version_of(kind: type) -> int:
    return SHARING_VERSION if kind is Sharing else VERSION


def _encode(value: Any) -> Any:
    if isinstance(value, Enum):
        return {"is": _name(type(value)), "has": value.value}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_encode(item) for item in value]
    if isinstance(value, (dict, Table)):
        kind = "table" if isinstance(value, Table) else "dict"
        return {"is": kind, "has": [[_encode(k), _encode(v)] for k, v in value.items()]}
    if type(value) in (tuple, frozenset):
        return {"is": type(value).__name__, "has": [_encode(item) for item in value]}
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        parts = {name: _encode(getattr(value, name)) for name in names}
        return {"is": _name(type(value)), "has": parts}
    raise TypeError(f"a state has a {type(value).__name__}, which has no form in JSON")


def decode(value: Any) -> State:
    """As ``decode_as``, of a job's state."""
    return decode_as(State, value)


def decode_as(kind: type[T], value: Any) -> T:
    """The state, of that kind, that ``as_plain_values`` was given.

    Raises ConfigError where it was not written by that, or by that of a version whose state has
    other parts: none is half read.
    """
    try:
        found, reads = value.get("version", 1), _version_of(kind)
        if found != reads:
            what = f"of form {found!r:.20}, and this version of elastic-ft reads form {reads}"
            raise ConfigError(
                f"a snapshot of the core's state is {what}: use the one that wrote it"
            )
        state = _decode(value["state"])
    except (ValueError, TypeError, KeyError, AttributeError, ImportError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"a snapshot of the core's state can't be understood: {why}") from None
    if not isinstance(state, kind):
        raise ConfigError(f"a snapshot is of {type(state).__name__:.40}, not of the core's state")
    return state


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind, parts = value["is"], value["has"]
    match kind:
        case "dict" | "table":
            found = {_decode(k): _decode(v) for k, v in parts}
            return Table(found) if kind == "table" else found
        case "tuple":
            return tuple(_decode(item) for item in parts)
        case "frozenset":
            return frozenset(_decode(item) for item in parts)
    cls = _class(kind)
    if issubclass(cls, Enum):
        return cls(parts)
    known = {field.name for field in dataclasses.fields(cls)}
    if odd := sorted(known ^ parts.keys()):
        where = "lacks" if odd[0] in known else "has an unknown part,"
        raise ValueError(f"{kind} {where} {odd[0]!r:.80}")
    return cls(**{name: _decode(item) for name, item in parts.items()})


def _name(cls: type) -> str:
    if not cls.__module__.startswith(CORE):
        raise TypeError(f"a state has a {cls.__module__}.{cls.__name__}, which is not the core's")
    return f"{cls.__module__.removeprefix(CORE)}.{cls.__name__}"


def _class(name: str) -> Any:
    module, _, found = name.rpartition(".")
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"{name!r:.80} is no type of the core")
    cls = getattr(importlib.import_module(CORE + module), found)
    own = isinstance(cls, type) and cls.__module__ == CORE + module
    if not own or not (dataclasses.is_dataclass(cls) or issubclass(cls, Enum)):
        raise ValueError(f"{name} is no data of the core")
    return cls
