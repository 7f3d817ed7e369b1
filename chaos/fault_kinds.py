"""The faults that a scenario may have, one class each, told apart by the key that names them.

A fault is keyed by progress (a step, a line of the journal, a named point), never by time. How long
one lasts is its own property, ``lasts_s``. docs/chaos.md has the table of all of them.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag
from pydantic import model_validator as check_model

from chaos.object_store_proxy import FaultKind
from elastic_ft.faults import Action
from elastic_ft.observe.journal import EVENTS

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

    ON: ClassVar = REAL

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
        return self.ON


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
    """What a run, or a cluster, has once.

    launcher: the parent of a run's plain processes. terminal: ``elastic-ft run`` itself, and with
    it whoever injects faults: it is the last one.
    """

    kill: Literal["controller", "gcs", "launcher", "terminal"]
    lasts_s: float = Field(5, gt=0)  # gcs: until it is started again, and reads its own disk

    @property
    def tiers(self) -> frozenset[TestTier]:
        if self.kill in ("launcher", "terminal"):
            return frozenset(("processes",))
        return ON_RAY if self.kill == "gcs" else EVERYWHERE

    def __str__(self) -> str:
        lasts = f" for {self.lasts_s:g} s" if self.kill == "gcs" else ""
        return f"kill {self.kill} {self.when}{lasts}"


class Stop(OfRank):
    stop: Literal["worker", "keeper"]
    lasts_s: float | None = Field(None, gt=0)  # then it goes on, as if nothing had been

    ON: ClassVar = EVERYWHERE

    def __str__(self) -> str:
        lasts = "" if self.lasts_s is None else f" for {self.lasts_s:g} s"
        return f"stop {self.stop} of rank {self.of_rank} {self.when}{lasts}"


class StopHead(External):
    """The controller stands still, and another one follows; then this one goes on, and must end."""

    stop: Literal["controller"]
    lasts_s: float = Field(5, gt=0)

    ON: ClassVar = frozenset(("sim", "processes"))

    def __str__(self) -> str:
        return f"stop {self.stop} {self.when} for {self.lasts_s:g} s"


class Strangers(External):
    """So many connections to every port that the run listens on, from someone without its key.

    Half of them say nothing, the others write noise. All are held open for ``lasts_s``.
    """

    strangers: int = Field(ge=1, le=2000)
    lasts_s: float = Field(5, gt=0)

    ON: ClassVar = frozenset(("processes",))

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

    ON: ClassVar = EVERYWHERE

    def __str__(self) -> str:
        return f"drain {self.drain} of rank {self.of_rank} {self.when}, {self.deadline_s:g} s"


class Add(External):
    add: Literal["node"]

    ON: ClassVar = EVERYWHERE

    def __str__(self) -> str:
        return f"add {self.add} {self.when}"


class Capacity(External):
    """From now on there are so many nodes: others are killed, or added. Of traces."""

    capacity: int = Field(ge=1)

    ON: ClassVar = frozenset(("processes", "ray"))

    def __str__(self) -> str:
        return f"{self.capacity} nodes {self.when}"


class StoreNeeds(External):
    """What the object store does to requests, see chaos/object_store_proxy.py."""

    store: FaultKind
    probability: float = Field(1.0, gt=0, le=1)
    methods: tuple[str, ...] = ()
    path: str = ""
    lasts_s: float = Field(gt=0)

    ON: ClassVar = frozenset(("sim", "processes", "ray"))

    def __str__(self) -> str:
        return f"store {self.store} {self.when} for {self.lasts_s:g} s"


class FillDisk(External):
    """The disk is full (ENOSPC), until what filled it is removed."""

    fill: Literal["run_folder", "checkpoints"]
    lasts_s: float = Field(gt=0)
    until_event: JournalName | None = None  # or until the journal has such a line

    ON: ClassVar = frozenset(("processes", "ray"))

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
HEADS = {
    "kill": ("controller", "gcs", "launcher", "terminal"),
    "stop": ("controller",),
}  # what there is one of


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
