"""What every section of a job file is, and what its numbers may be."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

YEAR_S = 366 * 86400.0
COUNT_MAX = 10**15  # of steps, samples, tokens: beyond all use, and far from overflows
WORKERS_MAX = 10**6
BATCH_MAX = 10**9
SEQUENCE_MAX = 1 << 30
SEED_MAX = (1 << 64) - 1
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
PORTS = r"^[0-9]{1,5}-[0-9]{1,5}$"
PATTERNS = {  # in words
    NAME: "letters, digits, '.', '_' and '-', of which a letter or digit is first",
    PORTS: "the first and the last port, such as 20000-20099",
}

Seconds = Annotated[float, Field(ge=1e-3, le=YEAR_S)]  # to wait for something
Delay = Annotated[float, Field(ge=0, le=YEAR_S)]
Count = Annotated[int, Field(ge=1, le=COUNT_MAX)]
CountFrom0 = Annotated[int, Field(ge=0, le=COUNT_MAX)]
Workers = Annotated[int, Field(ge=1, le=WORKERS_MAX)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Else ``steps: yes`` would be one step: Python's True is 1."""
        if isinstance(value, bool) and info.field_name is not None:
            kinds = set(members(cls.model_fields[info.field_name].annotation))
            if kinds & {int, float} and bool not in kinds:
                raise ValueError(f"expected a number, found {str(value).lower()}")
        return value


S = TypeVar("S", bound=Section)


def refused_for(reasons: Callable[[S], Iterator[str]]) -> Any:
    """Of a section's method that yields why its keys can't be together: the first is told."""

    def check(section: S) -> S:
        for why in reasons(section):
            raise ValueError(why)
        return section

    return model_validator(mode="after")(check)


def members(annotation: Any) -> Iterator[Any]:
    """The types that a value of ``annotation`` may have."""
    if get_origin(annotation) is Annotated:
        yield from members(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for one in get_args(annotation):
            yield from members(one)
    else:
        yield annotation
