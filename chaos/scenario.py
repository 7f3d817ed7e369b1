"""Scenarios: which faults a run meets, and what must come of it, as data.

description: A node of four dies without a word, and another one comes back later.
faults:
  - {at_step: 35, kill: node, of_rank: 3}          # SIGKILL: nobody there reports anything
  - {at_event: suspended, add: node}               # the first such line of the journal
  - {point: backward, rank: 1, step: 12, action: kill}       # inside a worker
expect: {steps_lost_max: 0, world_end: 4}

``chaos.fault_kinds`` has the faults, docs/chaos.md a table of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from chaos import fault_kinds as kinds
from elastic_ft.config import parse_yaml
from elastic_ft.errors import ConfigError
from elastic_ft.faults import ON_GPU, PointFault

SCENARIOS = Path(__file__).parent / "scenarios"


class ClusterNeeds(kinds.FaultPart):
    nodes: int = Field(3, ge=1)
    workers_per_node: int = Field(1, ge=1)
    disk_mb: int = Field(24, ge=4)  # of the file system that a fault fills


class Expect(kinds.FaultPart):
    """What must come of the run, beside I1 to I8 and that every fault fired."""

    status: tuple[str, ...] = ("completed", "stopped")
    reason: str = ""  # a regular expression that is found in the result's
    steps_lost_max: int | None = Field(0, ge=0)  # committed ones, in all
    causes: tuple[str, ...] = ()  # recoveries with each of these
    sources: tuple[str, ...] = ()  # recoveries from nothing but these
    events: tuple[kinds.JournalName, ...] = ()  # the journal has each of these
    no_events: tuple[kinds.JournalName, ...] = ()  # and none of these
    recoveries_max: int | None = Field(None, ge=0)
    paused_max_s: float | None = Field(None, gt=0)  # by any of them: of what has a deadline
    world_min: int | None = Field(None, ge=1)  # no step by fewer
    world_end: int | None = Field(None, ge=1)  # the last steps are by so many
    cut_off_ends_s: float | None = Field(None, gt=0)  # workers behind a cut, each of them
    gap_max_s: float | None = Field(None, gt=0)  # between two trained steps, from the first fault
    survivors: int | None = Field(None, ge=1)  # so many keep their processes all the time
    samples_once: bool = False  # of a job that completes, within an epoch, with audit
    same_losses: bool = True  # as the same job undisturbed


class Scenario(kinds.FaultPart):
    """``job``: sections of the job file to merge over chaos/jobs.py's; ``tiers``: a narrower choice
    than the faults allow; ``timeout_s``: for the run as a whole."""

    description: str = ""
    seed: int = Field(0, ge=0)
    tiers: tuple[kinds.TestTier, ...] = ()
    cluster: ClusterNeeds = ClusterNeeds()
    job: dict[str, Any] = Field(default_factory=dict)
    faults: tuple[kinds.AnyFault, ...] = Field(min_length=1)
    expect: Expect = Expect()
    settle_steps: int = Field(5, ge=1)  # trained on after the last fault and recovery
    timeout_s: float = Field(300, gt=0)

    @property
    def external(self) -> tuple[kinds.External, ...]:
        return tuple(fault for fault in self.faults if isinstance(fault, kinds.External))

    @property
    def at_points(self) -> tuple[kinds.AtPoint, ...]:
        return tuple(fault for fault in self.faults if isinstance(fault, kinds.AtPoint))

    @property
    def runs_on(self) -> tuple[kinds.TestTier, ...]:
        """The tiers on which every fault can happen, the highest last."""
        possible = frozenset.intersection(kinds.EVERYWHERE, *(fault.tiers for fault in self.faults))
        if not any(isinstance(fault, kinds.Network) for fault in self.faults):
            possible -= {"network"}  # nothing that a plain Ray cluster would not show
        return tuple(
            tier for tier in kinds.TIERS if tier in possible and tier in (self.tiers or kinds.TIERS)
        )

    @property
    def kills_terminal(self) -> bool:
        return any(
            isinstance(fault, kinds.KillHead) and fault.kill == "terminal" for fault in self.faults
        )

    @property
    def needs_network(self) -> bool:
        return any(isinstance(fault, kinds.Network) for fault in self.faults)

    @property
    def needs_durable_head(self) -> bool:
        return any(
            isinstance(fault, kinds.KillHead) and fault.kill == "gcs" for fault in self.faults
        )

    @property
    def needs_store(self) -> bool:
        return any(isinstance(fault, kinds.StoreNeeds) for fault in self.faults)

    @property
    def needs_gpu(self) -> bool:
        return any(fault.action in ON_GPU for fault in self.at_points)

    @property
    def needs_disk(self) -> Literal["", "run_folder", "checkpoints"]:
        return next((fault.fill for fault in self.faults if isinstance(fault, kinds.FillDisk)), "")


@dataclass(frozen=True, slots=True)
class Armed:
    """A scenario made ready: ``inside[i]`` is what ``scenario.at_points[i]`` tells a worker."""

    scenario: Scenario
    inside: tuple[PointFault, ...]


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
        return Scenario.model_validate(parse_yaml(path.read_bytes(), name))
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first, *others = error.errors()
        key = _key_of(first["loc"], (*kinds.TAGS, *(f"{tag}_head" for tag in kinds.HEADS)))
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
    """Raises ConfigError for a point that does not exist."""

    inside = []
    for number, fault in enumerate(scenario.faults):
        if isinstance(fault, kinds.AtPoint):
            try:
                inside.append(PointFault(**fault.model_dump()))
            except ValueError as error:
                raise ConfigError(f"faults.{number}.point: {error}") from None
    return Armed(scenario, tuple(inside))
