"""What pydantic finds wrong with a job, in one line of the job file's words."""

from __future__ import annotations

import datetime
import difflib
import reprlib
from collections.abc import Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from elastic_ft.config.section import COUNT_MAX, PATTERNS, members
from elastic_ft.errors import printable

SHOWN = 80  # characters of a value, in a message
EXPECTED = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "keys and values",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a smaller number",
    "int_type": "a whole number",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "string_pattern_mismatch": "{pattern}",
    "string_too_long": "at most {max_length} characters",
    "string_too_short": "at least {min_length} characters",
    "string_type": "text",
    "tuple_type": "a list",
    "too_long": "at most {max_length} values",
}


def first_mistake(error: ValidationError, model: type[BaseModel]) -> tuple[str, str]:
    """The first key of ``model`` with a mistake, "" for all of it; and what is wrong, with the
    number of further ones."""
    found: dict[tuple[int | str, ...], list[Any]] = {}
    for one in error.errors(include_url=False):  # one for each type that a value may have
        found.setdefault(_keys(one["loc"], model), []).append(one)
    keys = next(iter(found))
    deeper = (other for other in found if len(other) > len(keys) and other[: len(keys)] == keys)
    if (inside := next(deeper, None)) is not None:  # the value was a list, say, as it may be
        del found[keys]
        keys = inside
    elif (written := _written_for(keys, found, model)) is not None:  # one mistake, not two
        del found[keys]
        keys = written
    message = _message(keys, found[keys], model)
    n = len(found) - 1
    more = f" (and {n} more mistake{'s' * (n > 1)})" if n else ""
    return ".".join(printable(key, SHOWN) for key in keys), message + more


def _message(keys: tuple[int | str, ...], mistakes: list[Any], model: type[BaseModel]) -> str:
    first = mistakes[0]
    if first["type"] == "extra_forbidden":
        return f"unknown key{_did_you_mean(keys, model)}"
    if first["type"] == "missing":
        return "required key is missing"
    if first["type"] == "value_error":
        return printable(first["msg"].removeprefix("Value error, "), 300)
    section = section_of(_annotation(keys, model))
    if section is not None:
        words = f"expected keys of its own such as {next(iter(section.model_fields))}"
    elif all(one["type"] in EXPECTED for one in mistakes):
        words = f"expected {' or '.join(dict.fromkeys(map(_expected, mistakes)))}"
    else:
        words = printable(first["msg"], 300)
    return f"{words}, found {printable(_shown(first['input']), SHOWN)}"


def _written_for(
    keys: tuple[int | str, ...],
    found: dict[tuple[int | str, ...], list[Any]],
    model: type[BaseModel],
) -> tuple[int | str, ...] | None:
    """The unknown key that was meant to be the missing one at ``keys``; None if there is none."""
    if found[keys][0]["type"] != "missing":
        return None
    unknown = (other for other in found if found[other][0]["type"] == "extra_forbidden")
    there = (other for other in unknown if other[:-1] == keys[:-1])
    return next((other for other in there if _nearest(other, model) == keys[-1]), None)


def _expected(one: Any) -> str:
    context = dict(one.get("ctx", {}))
    if "pattern" in context:
        context["pattern"] = PATTERNS[context["pattern"]]
    return EXPECTED[one["type"]].format(**context)


def _shown(value: Any) -> str:
    if isinstance(value, int) and abs(value) > COUNT_MAX**2:
        return "a number of very many digits"
    if value is None:
        return "nothing"
    if isinstance(value, datetime.date):  # YAML makes one of 2026-01-31
        return f"the date {value}"
    return reprlib.repr(value)


# --------------------------------------------------------------------------------- places


def _keys(location: Sequence[int | str], model: type[BaseModel]) -> tuple[int | str, ...]:
    """Without pydantic's names of the types that a value may have."""
    keys: list[int | str] = []
    there: Any = model
    for number, part in enumerate(location, 1):
        inner = _inside(there, part)
        if inner is None and (number < len(location) or section_of(there) is None):
            continue
        keys.append(part)
        there = inner
    return tuple(keys)


def _annotation(keys: tuple[int | str, ...], model: type[BaseModel]) -> Any:
    there: Any = model
    for part in keys:
        there = _inside(there, part)
    return there


def _inside(annotation: Any, part: int | str) -> Any:
    """The type of what is at ``part`` of a value; None if it has no such part."""
    for kind in members(annotation):
        fields = getattr(kind, "model_fields", {})
        if part in fields:
            return fields[part].annotation
        if get_origin(kind) is tuple and isinstance(part, int):
            elements = get_args(kind)
            return elements[min(part, len(elements) - 1 - (elements[-1] is ...))]
        if get_origin(kind) is dict:
            return get_args(kind)[1]
    return None


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section among the types that a value may have."""
    return next((kind for kind in members(annotation) if hasattr(kind, "model_fields")), None)


def _did_you_mean(keys: tuple[int | str, ...], model: type[BaseModel]) -> str:
    name = _nearest(keys, model)
    return f", did you mean {name}?" if name is not None else ""


def _nearest(keys: tuple[int | str, ...], model: type[BaseModel]) -> str | None:
    """The known key nearest to the last of ``keys``, if one is near where that stands."""
    section, given = section_of(_annotation(keys[:-1], model)), str(keys[-1])[:SHOWN]
    known = section.model_fields if section is not None else {}
    near = difflib.get_close_matches(given, known, 1)
    near = near or [name for name in known if name.startswith(given)]
    return near[0] if len(near) == 1 else None
