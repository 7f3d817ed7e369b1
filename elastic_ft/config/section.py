"""What every section of a job file is, and what its numbers may be."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

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
