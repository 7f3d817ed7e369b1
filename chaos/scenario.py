"""Scenarios: which faults a run meets, as data. Keyed by progress, never by time.

faults:
  - {at_step: 35, kill: node, of_rank: 3}          # SIGKILL: nobody there reports anything
  - {at_step: 40, kill: raylet, of_rank: 0}        # Ray only: its workers end by themselves
  - {at_step: 45, stop: worker, of_rank: 1}        # SIGSTOP: it hangs
  - {at_step: 50, drain: node, of_rank: 2, deadline_s: 20}   # notice of preemption
  - {at_step: 60, add: node}
  - {at_event: suspended, add: node}               # the first such line of the journal
  - {point: backward, rank: 1, step: 12, action: kill}       # inside a worker
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError
from pydantic import model_validator as check_model

from elastic_ft.errors import ConfigError

if TYPE_CHECKING:
    from elastic_ft.runtime.faults import Fault

SCENARIOS = Path(__file__).parent / "scenarios"


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class External(Part):
    """A fault that the runner injects from outside, once the run has come so far."""

    at_step: int | None = Field(None, ge=0)
    at_event: str | None = None  # a name in the journal; counted after the faults before it

    @check_model(mode="after")
    def one_moment(self) -> External:
        if (self.at_step is None) == (self.at_event is None):
            raise ValueError("expected exactly one of at_step and at_event")
        return self

    @property
    def when(self) -> str:
        if self.at_event is not None:
            return f"at event {self.at_event}"
        return f"at step {self.at_step}"


class Kill(External):
    kill: Literal["node", "raylet", "worker"]
    of_rank: int = Field(ge=0)  # in the generation at that moment

    def __str__(self) -> str:
        return f"kill {self.kill} of rank {self.of_rank} {self.when}"


class Stop(External):
    stop: Literal["worker"]
    of_rank: int = Field(ge=0)

    def __str__(self) -> str:
        return f"stop {self.stop} of rank {self.of_rank} {self.when}"


class Drain(External):
    drain: Literal["node"]
    of_rank: int = Field(ge=0)
    deadline_s: float = Field(gt=0)  # from the notice

    def __str__(self) -> str:
        return f"drain {self.drain} of rank {self.of_rank} {self.when}, {self.deadline_s:g} s"


class Add(External):
    add: Literal["node"]

    def __str__(self) -> str:
        return f"add {self.add} {self.when}"


class AtPoint(Part):
    """A fault inside a worker, at a named point of a step: see runtime/faults.py."""

    point: str
    action: Literal["kill", "stop", "raise", "hang", "corrupt"] = "kill"
    rank: int | None = Field(None, ge=0)
    worker: str | None = None
    step: int | None = Field(None, ge=0)
    generation: int | None = Field(None, ge=0)
    world: int | None = Field(None, ge=1)
    after: int | None = Field(None, ge=0)  # index of an earlier one, among those at points

    def __str__(self) -> str:
        where = {k: v for k, v in self if k not in ("point", "action") and v is not None}
        details = ", ".join(f"{key} {value}" for key, value in where.items())
        return f"{self.action} at {self.point}" + (f" of {details}" if details else "")


def _kind(value: Any) -> str:
    keys = value if isinstance(value, dict) else {}
    kinds = [kind for kind in ("kill", "stop", "drain", "add", "point") if kind in keys]
    return kinds[0] if len(kinds) == 1 else "unknown"


AnyFault = Annotated[
    Annotated[Kill, Tag("kill")]
    | Annotated[Stop, Tag("stop")]
    | Annotated[Drain, Tag("drain")]
    | Annotated[Add, Tag("add")]
    | Annotated[AtPoint, Tag("point")],
    Discriminator(
        _kind,
        custom_error_type="unknown_fault",
        custom_error_message="expected exactly one of kill, stop, drain, add and point",
    ),
]


class Scenario(Part):
    description: str = ""
    faults: tuple[AnyFault, ...] = Field(min_length=1)

    @property
    def external(self) -> tuple[External, ...]:
        return tuple(fault for fault in self.faults if isinstance(fault, External))

    @property
    def at_points(self) -> tuple[AtPoint, ...]:
        return tuple(fault for fault in self.faults if isinstance(fault, AtPoint))


@dataclass(frozen=True, slots=True)
class Armed:
    """A scenario made ready: ``inside[i]`` is what ``scenario.at_points[i]`` tells a worker."""

    scenario: Scenario
    inside: tuple[Fault, ...]


def load_scenario(name: str) -> Scenario:
    """Returns the scenario in a file, or the one of that name in chaos/scenarios.

    Raises ConfigError, one line that begins with ``name``.
    """
    path = Path(name)
    if not path.is_file() and name == path.stem:
        path = SCENARIOS / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in SCENARIOS.glob("*.yaml")))
        raise ConfigError(f"{name}: unknown fault scenario: no such file, and none of {known}")
    try:
        return Scenario.model_validate(yaml.safe_load(path.read_text()))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{name}: not YAML: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        first, *others = error.errors()
        tags = ("kill", "stop", "drain", "add", "point")
        key = _key_of(first["loc"], tags)
        message = {"extra_forbidden": "unknown key", "missing": "required key is missing"}.get(
            first["type"], first["msg"].removeprefix("Value error, ")
        )
        more = f" (and {len(others)} more)" if others else ""
        raise ConfigError(f"{name}: {key}: {message}{more}") from None


def _key_of(location: Sequence[int | str], tags: Sequence[str]) -> str:
    """faults.0.kill.of_rank -> faults.0.of_rank: the tag is no key of the file."""
    parts = list(location)
    if len(parts) > 2 and parts[2] in tags:
        del parts[2]
    return ".".join(str(part) for part in parts) or "scenario"


def arm(scenario: Scenario) -> Armed:
    """Imports torch. Raises ConfigError for a point that does not exist."""
    from elastic_ft.runtime.faults import Fault

    inside = []
    for number, fault in enumerate(scenario.faults):
        if isinstance(fault, AtPoint):
            try:
                inside.append(Fault(**fault.model_dump()))
            except ValueError as error:
                raise ConfigError(f"faults.{number}.point: {error}") from None
    return Armed(scenario, tuple(inside))
