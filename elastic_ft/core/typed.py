"""Typed values from plain ones: what JSON and msgpack carry becomes data classes again. Pure.

A field that this version does not know is left out, one that is missing has its default: so a
message, or a journal line, of another version is read as long as what it must have is there.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import operator
import types
import typing
from collections.abc import Callable
from typing import Any

Decode = Callable[[Any], Any]


class Undecodable(ValueError):
    """A plain value that is not of the type expected. One line: where, what, and what was found."""


@functools.cache
def decoder(hint: Any) -> Decode:
    """What makes a value of type ``hint`` from a plain one, or raises Undecodable.

    Raises TypeError for a hint that no plain value can be of.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return _plain
    if origin in (typing.Union, types.UnionType):
        return _union(args)
    if origin is typing.Literal:
        return _one_of(args)
    if origin is tuple:
        return _tuple(args)
    if origin in (list, set, frozenset):
        return _collection(origin, decoder(args[0]))
    if origin is dict:
        return _dict(decoder(args[0]), decoder(args[1]))
    if dataclasses.is_dataclass(hint):
        return _dataclass(typing.cast(type, hint))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _enum(hint)
    if hint in SCALARS:
        return _scalar(hint)
    if callable(validate := getattr(hint, "model_validate", None)):
        return _validated(validate)
    raise TypeError(f"{hint} is no type of plain values")


def fields_of(value: Any) -> dict[str, Any]:
    """A data class's fields by name, as they are: what is inside is not converted."""
    return _reader(type(value))(value)  # type: ignore[arg-type]


@functools.cache
def _reader(kind: type) -> Callable[[Any], dict[str, Any]]:
    names = tuple(each.name for each in dataclasses.fields(kind))
    if len(names) < 2:
        return lambda value: {name: getattr(value, name) for name in names}
    values_of = operator.attrgetter(*names)
    return lambda value: dict(zip(names, values_of(value), strict=True))


def _plain(value: Any) -> Any:
    """Anything that JSON can say (NaN and infinities among it: Python's JSON has them)."""
    kind = type(value)
    if kind in JSON_SCALARS:
        return value
    if kind is dict:
        for name, item in value.items():
            if type(name) is not str:
                raise _refused("a name", name)
            _plain(item)
    elif kind is list or kind is tuple:
        for item in value:
            _plain(item)
    else:
        raise _refused("a plain value", value)
    return value


JSON_SCALARS = frozenset({str, int, float, bool, types.NoneType})
# Which classes a value of a scalar type may be of: True is no number here, 1 is a float as well.
SCALARS: dict[Any, frozenset[type]] = {
    int: frozenset({int}),
    float: frozenset({float, int}),
    str: frozenset({str}),
    bytes: frozenset({bytes}),
    bool: frozenset({bool}),
    types.NoneType: frozenset({types.NoneType}),
}


def _refused(expected: str, found: Any) -> Undecodable:
    return Undecodable(f"expected {expected}, found {type(found).__name__} {repr(found)[:60]}")


def _scalar(hint: type) -> Decode:
    classes, name = SCALARS[hint], hint.__name__
    if hint is float:
        return _float

    def decode(value: Any) -> Any:
        if type(value) in classes:
            return value
        raise _refused(name, value)

    return decode


def _float(value: Any) -> Any:
    if type(value) in SCALARS[float] and math.isfinite(value):
        return value
    raise _refused("a finite number", value)


def _one_of(values: tuple[Any, ...]) -> Decode:
    def decode(value: Any) -> Any:
        if any(type(value) is type(known) and value == known for known in values):
            return value
        raise _refused(f"one of {', '.join(map(repr, values))}", value)

    return decode


def _enum(hint: type[enum.Enum]) -> Decode:
    known = {member.value: member for member in hint}

    def decode(value: Any) -> Any:
        found = known.get(value) if isinstance(value, (str, int)) else None
        if found is None:
            raise _refused(f"one of {', '.join(map(str, known))}", value)
        return found

    return decode


def _validated(validate: Decode) -> Decode:
    """Of a class that checks its values itself (pydantic's do)."""

    def decode(value: Any) -> Any:
        try:
            return validate(value)
        except ValueError as error:
            raise Undecodable(" ".join(str(error).split())) from None

    return decode


def _union(args: tuple[Any, ...]) -> Decode:
    optional = types.NoneType in args
    options = [decoder(arg) for arg in args if arg is not types.NoneType]

    def decode(value: Any) -> Any:
        if value is None and optional:
            return None
        for option in options[:-1]:
            try:
                return option(value)
            except Undecodable:
                continue
        return options[-1](value)

    return decode


def _tuple(args: tuple[Any, ...]) -> Decode:
    if len(args) == 2 and args[1] is ...:
        return _collection(tuple, decoder(args[0]))
    parts = tuple(decoder(arg) for arg in args)

    def decode(value: Any) -> Any:
        if not isinstance(value, (list, tuple)) or len(value) != len(parts):
            raise _refused(f"a list of {len(parts)}", value)
        return tuple([part(item) for part, item in zip(parts, value, strict=True)])

    return decode


def _collection(kind: type, part: Decode) -> Decode:
    def decode(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            raise _refused("a list", value)
        try:
            return kind([part(item) for item in value])
        except TypeError as error:  # a set of what can't be in one
            raise Undecodable(str(error)) from None

    return decode


def _dict(key: Decode, part: Decode) -> Decode:
    if key is decoder(str) and part is _plain:
        return _named

    def decode(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _refused("a mapping", value)
        return {key(name): part(item) for name, item in value.items()}

    return decode


def _named(value: Any) -> Any:
    """A mapping from names to plain values, itself."""
    if type(value) is not dict:
        raise _refused("a mapping", value)
    return _plain(value)


def _dataclass(kind: type) -> Decode:
    hints, fields = typing.get_type_hints(kind), dataclasses.fields(kind)
    parts = [(each.name, decoder(hints[each.name])) for each in fields]
    is_positional = all(each.init and not each.kw_only for each in fields)

    def decode(value: Any) -> Any:
        if is_positional:
            try:  # of this version, and right: as good as all are
                return kind(*[part(value[name]) for name, part in parts])
            except (KeyError, TypeError, ValueError):
                pass  # something is missing, or wrong: which it is
        return explain(value)

    def explain(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _refused(f"the fields of {kind.__name__}", value)
        known: dict[str, Any] = {}
        try:
            for name, part in parts:
                if name in value:
                    known[name] = part(value[name])
        except Undecodable as error:
            raise Undecodable(f"{kind.__name__}.{name}: {error}") from None
        try:
            return kind(**known)
        except (TypeError, ValueError) as error:  # a field is missing, or they contradict
            raise Undecodable(f"{kind.__name__}: {error}") from None

    return decode
