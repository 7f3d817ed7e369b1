"""Scenarios: which faults a run meets, and what must come of it, as data.

description: A node of four dies without a word, and another one comes back later.
faults:
  - {at_step: 35, kill: node, of_rank: 3}          # SIGKILL: nobody there reports anything
  - {at_event: suspended, add: node}               # the first such line of the journal
  - {point: backward, rank: 1, step: 12, action: kill}       # inside a worker
expect: {steps_lost_max: 0, world_end: 4}

A fault is keyed by progress (a step, a line of the journal, a named point), never by time. How long
one lasts is its own property, ``lasts_s``. docs/chaos.md has the table of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
)
from pydantic import model_validator as check_model

from chaos.object_store_proxy import FaultKind
from elastic_ft.config import parse_yaml
from elastic_ft.errors import ConfigError
from elastic_ft.faults import ON_GPU, Action, PointFault
from elastic_ft.observe.journal import EVENTS

SCENARIOS = Path(__file__).parent / "scenarios"

TestTier = Literal["sim", "processes", "ray", "network"]
TIERS: tuple[TestTier, ...] = get_args(TestTier)  # the highest last
EVERYWHERE = frozenset(TIERS)
REAL = EVERYWHERE - {"sim"}
ON_RAY = frozenset[TestTier]({"ray", "network"})


def _in_catalogue(name: str) -> str:
    if name not in EVENTS:
        raise ValueError(f"the journal has no event {name!r}: docs/journal.md lists all of them")
    return name


JournalName = Annotated[str, AfterValidator(_in_catalogue)]


class FaultPart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class External(FaultPart):
    """A fault that the runner injects from outside, once the run has come so far."""

    at_step: int | None = Field(None, ge=0)
    at_event: JournalName | None = None  # counted after the faults before it
    at_s: float | None = Field(None, ge=0)  # since the first generation: of a recorded trace alone

    @check_model(mode="after")
    def one_moment(self) -> External:
        given = [at for at in (self.at_step, self.at_event, self.at_s) if at is not None]
        if len(given) != 1:
            raise ValueError("expected exactly one of at_step and at_event")
        return self

    @property
    def when(self) -> str:
        if self.at_event is not None:
            return f"at event {self.at_event}"
        return f"at step {self.at_step}" if self.at_s is None else f"at {self.at_s:.1f} s"

    @property
    def tiers(self) -> frozenset[TestTier]:
        """Where this can be done."""
        return REAL


class OfRank(External):
    of_rank: int = Field(ge=0)  # in the generation at that moment


class Kill(OfRank):
    kill: Literal["node", "raylet", "worker", "keeper"]
    signal: Literal["KILL", "ABRT"] = "KILL"  # to a worker

    @property
    def tiers(self) -> frozenset[TestTier]:
        return ON_RAY if self.kill == "raylet" else EVERYWHERE

    def __str__(self) -> str:
        how = "" if self.signal == "KILL" else f" by SIG{self.signal}"
        return f"kill {self.kill} of rank {self.of_rank}{how} {self.when}"


class KillHead(External):
    """What a run, or a cluster, has once."""

    kill: Literal["controller", "gcs"]
    lasts_s: float = Field(5, gt=0)  # gcs: until it is started again, and reads its own disk

    @property
    def tiers(self) -> frozenset[TestTier]:
        return ON_RAY if self.kill == "gcs" else EVERYWHERE

    def __str__(self) -> str:
        lasts = f" for {self.lasts_s:g} s" if self.kill == "gcs" else ""
        return f"kill {self.kill} {self.when}{lasts}"


class Stop(OfRank):
    stop: Literal["worker", "keeper"]
    lasts_s: float | None = Field(None, gt=0)  # then it goes on, as if nothing had been

    @property
    def tiers(self) -> frozenset[TestTier]:
        return EVERYWHERE

    def __str__(self) -> str:
        lasts = "" if self.lasts_s is None else f" for {self.lasts_s:g} s"
        return f"stop {self.stop} of rank {self.of_rank} {self.when}{lasts}"


class StopHead(External):
    """The controller stands still. Another one is started; then this one goes on, and must end."""

    stop: Literal["controller"]

    @property
    def tiers(self) -> frozenset[TestTier]:
        return frozenset(("processes",))

    def __str__(self) -> str:
        return f"stop {self.stop} {self.when}"


class Strangers(External):
    """So many connections to every port that the run listens on, from someone without its key.

    Half of them say nothing, the others write noise. All are held open for ``lasts_s``.
    """

    strangers: int = Field(ge=1, le=2000)
    lasts_s: float = Field(5, gt=0)

    @property
    def tiers(self) -> frozenset[TestTier]:
        return frozenset(("processes",))

    def __str__(self) -> str:
        return f"{self.strangers} strangers at every port {self.when}"


class Slow(OfRank):
    """The worker stands still for ``share`` of the time, in slices of a tenth of a second."""

    slow: Literal["worker"]
    share: float = Field(0.8, gt=0, lt=1)
    lasts_s: float = Field(gt=0)

    def __str__(self) -> str:
        return f"slow worker of rank {self.of_rank} by {self.share:.0%} {self.when}"


class Drain(OfRank):
    drain: Literal["node"]
    deadline_s: float = Field(gt=0)  # from the notice

    @property
    def tiers(self) -> frozenset[TestTier]:
        return EVERYWHERE

    def __str__(self) -> str:
        return f"drain {self.drain} of rank {self.of_rank} {self.when}, {self.deadline_s:g} s"


class Add(External):
    add: Literal["node"]

    @property
    def tiers(self) -> frozenset[TestTier]:
        return EVERYWHERE

    def __str__(self) -> str:
        return f"add {self.add} {self.when}"


class Capacity(External):
    """From now on there are so many nodes: others are killed, or added. Of traces."""

    capacity: int = Field(ge=1)

    @property
    def tiers(self) -> frozenset[TestTier]:
        return frozenset(("processes", "ray"))

    def __str__(self) -> str:
        return f"{self.capacity} nodes {self.when}"


class StoreNeeds(External):
    """What the object store does to requests, see chaos/object_store_proxy.py."""

    store: FaultKind
    probability: float = Field(1.0, gt=0, le=1)
    methods: tuple[str, ...] = ()
    path: str = ""
    lasts_s: float = Field(gt=0)

    @property
    def tiers(self) -> frozenset[TestTier]:
        return frozenset(("sim", "processes", "ray"))

    def __str__(self) -> str:
        return f"store {self.store} {self.when} for {self.lasts_s:g} s"


class FillDisk(External):
    """The disk is full (ENOSPC), until what filled it is removed."""

    fill: Literal["run_folder", "checkpoints"]
    lasts_s: float = Field(gt=0)
    until_event: JournalName | None = None  # or until the journal has such a line

    @property
    def tiers(self) -> frozenset[TestTier]:
        return frozenset(("processes", "ray"))

    def __str__(self) -> str:
        return f"fill the disk of {self.fill} {self.when} for {self.lasts_s:g} s"


class Network(OfRank):
    """Of the link of a rank's node, seen from the node: what it sends goes ``out``.

    cut: nothing passes, and nobody is told. flap: cut and healed, ``times``, ``lasts_s`` each.
    loss: of a ``share`` of the packets. reset: every packet of a connection is answered by one.
    """

    network: Literal["cut", "flap", "loss", "reset"]
    way: Literal["both", "in", "out"] = "both"
    lasts_s: float = Field(gt=0)
    share: float = Field(0.2, gt=0, le=1)
    times: int = Field(3, ge=1)

    @property
    def tiers(self) -> frozenset[TestTier]:
        two_way = self.network == "cut" and self.way == "both"
        return frozenset(("sim", "network")) if two_way else frozenset(("network",))

    def __str__(self) -> str:
        what = f"{self.network} ({self.way})" if self.network == "cut" else self.network
        return f"network {what} of rank {self.of_rank} {self.when} for {self.lasts_s:g} s"


class AtPoint(FaultPart):
    """A fault inside a worker, at a named point of a step: see faults.py."""

    point: str
    action: Action = "kill"
    rank: int | None = Field(None, ge=0)
    worker: str | None = None
    step: int | None = Field(None, ge=0)
    generation: int | None = Field(None, ge=0)
    world: int | None = Field(None, ge=1)
    after: int | None = Field(None, ge=0)  # index of an earlier one, among those at points
    lasts_s: float = Field(0.0, ge=0)  # slow

    IN_SIM: ClassVar = ("kill", "abort", "oom", "stop", "hang", "raise", "corrupt", "corrupt_own")

    @property
    def tiers(self) -> frozenset[TestTier]:
        return EVERYWHERE if self.action in self.IN_SIM else REAL

    def __str__(self) -> str:
        where = {k: v for k, v in self if k not in ("point", "action", "lasts_s") and v is not None}
        details = ", ".join(f"{key} {value}" for key, value in where.items())
        return f"{self.action} at {self.point}" + (f" of {details}" if details else "")


TAGS = (
    "kill",
    "stop",
    "slow",
    "strangers",
    "drain",
    "add",
    "capacity",
    "store",
    "fill",
    "network",
    "point",
)
HEADS = {"kill": ("controller", "gcs"), "stop": ("controller",)}  # what there is one of


def _kind(value: Any) -> str:
    keys = value if isinstance(value, dict) else getattr(type(value), "model_fields", {})
    kinds = [kind for kind in TAGS if kind in keys]
    if len(kinds) != 1:
        return "unknown"
    what = value.get(kinds[0]) if isinstance(value, dict) else getattr(value, kinds[0])
    return f"{kinds[0]}_head" if what in HEADS.get(kinds[0], ()) else kinds[0]


AnyFault = Annotated[
    Annotated[Kill, Tag("kill")]
    | Annotated[KillHead, Tag("kill_head")]
    | Annotated[Stop, Tag("stop")]
    | Annotated[StopHead, Tag("stop_head")]
    | Annotated[Slow, Tag("slow")]
    | Annotated[Strangers, Tag("strangers")]
    | Annotated[Drain, Tag("drain")]
    | Annotated[Add, Tag("add")]
    | Annotated[Capacity, Tag("capacity")]
    | Annotated[StoreNeeds, Tag("store")]
    | Annotated[FillDisk, Tag("fill")]
    | Annotated[Network, Tag("network")]
    | Annotated[AtPoint, Tag("point")],
    Discriminator(
        _kind,
        custom_error_type="unknown_fault",
        custom_error_message=f"expected exactly one of {', '.join(TAGS[:-1])} and {TAGS[-1]}",
    ),
]


class ClusterNeeds(FaultPart):
    nodes: int = Field(3, ge=1)
    workers_per_node: int = Field(1, ge=1)
    disk_mb: int = Field(24, ge=4)  # of the file system that a fault fills


class Expect(FaultPart):
    """What must come of the run, beside I1 to I8 and that every fault fired."""

    status: tuple[str, ...] = ("completed", "stopped")
    reason: str = ""  # a regular expression that is found in the result's
    steps_lost_max: int | None = Field(0, ge=0)  # committed ones, in all
    causes: tuple[str, ...] = ()  # recoveries with each of these
    sources: tuple[str, ...] = ()  # recoveries from nothing but these
    events: tuple[JournalName, ...] = ()  # the journal has each of these
    no_events: tuple[JournalName, ...] = ()  # and none of these
    recoveries_max: int | None = Field(None, ge=0)
    paused_max_s: float | None = Field(None, gt=0)  # by any of them: of what has a deadline
    world_min: int | None = Field(None, ge=1)  # no step by fewer
    world_end: int | None = Field(None, ge=1)  # the last steps are by so many
    cut_off_ends_s: float | None = Field(None, gt=0)  # workers behind a cut, each of them
    survivors: int | None = Field(None, ge=1)  # so many keep their processes all the time
    samples_once: bool = False  # of a job that completes, within an epoch, with audit
    same_losses: bool = True  # as the same job undisturbed


class Scenario(FaultPart):
    """``job``: sections of the job file to merge over chaos/jobs.py's; ``tiers``: a narrower choice
    than the faults allow; ``timeout_s``: for the run as a whole."""

    description: str = ""
    seed: int = Field(0, ge=0)
    tiers: tuple[TestTier, ...] = ()
    cluster: ClusterNeeds = ClusterNeeds()
    job: dict[str, Any] = Field(default_factory=dict)
    faults: tuple[AnyFault, ...] = Field(min_length=1)
    expect: Expect = Expect()
    settle_steps: int = Field(5, ge=1)  # trained on after the last fault and recovery
    timeout_s: float = Field(300, gt=0)

    @property
    def external(self) -> tuple[External, ...]:
        return tuple(fault for fault in self.faults if isinstance(fault, External))

    @property
    def at_points(self) -> tuple[AtPoint, ...]:
        return tuple(fault for fault in self.faults if isinstance(fault, AtPoint))

    @property
    def runs_on(self) -> tuple[TestTier, ...]:
        """The tiers on which every fault can happen, the highest last."""
        possible = frozenset.intersection(EVERYWHERE, *(fault.tiers for fault in self.faults))
        if not any(isinstance(fault, Network) for fault in self.faults):
            possible -= {"network"}  # nothing that a plain Ray cluster would not show
        return tuple(tier for tier in TIERS if tier in possible and tier in (self.tiers or TIERS))

    @property
    def needs_network(self) -> bool:
        return any(isinstance(fault, Network) for fault in self.faults)

    @property
    def needs_durable_head(self) -> bool:
        return any(isinstance(fault, KillHead) and fault.kill == "gcs" for fault in self.faults)

    @property
    def needs_store(self) -> bool:
        return any(isinstance(fault, StoreNeeds) for fault in self.faults)

    @property
    def needs_gpu(self) -> bool:
        return any(fault.action in ON_GPU for fault in self.at_points)

    @property
    def needs_disk(self) -> Literal["", "run_folder", "checkpoints"]:
        return next((fault.fill for fault in self.faults if isinstance(fault, FillDisk)), "")


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
        key = _key_of(first["loc"], (*TAGS, *(f"{tag}_head" for tag in HEADS)))
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
        if isinstance(fault, AtPoint):
            try:
                inside.append(PointFault(**fault.model_dump()))
            except ValueError as error:
                raise ConfigError(f"faults.{number}.point: {error}") from None
    return Armed(scenario, tuple(inside))
