"""How things stand with the jobs that share a cluster. Data that is replaced, never changed."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic_ft.core.sharing.asks import Wish
from elastic_ft.core.sharing.ledger import SharedJob, Sharing
from elastic_ft.core.table import Table
from elastic_ft.service.job_orders import JobOrder

ASKS = "ask"  # a kind of decision: what the autoscaler is asked for


@dataclass(frozen=True, slots=True)
class JobEnd:
    status: str
    reason: str
    at_s: float
    step: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    at_s: float
    what: str
    why: str


@dataclass(frozen=True, slots=True)
class ShareStanding:
    """How things stand. ``began_s``: when a job's workers first trained. ``hurried``: jobs that are
    to stop without a checkpoint."""

    sharing: Sharing = field(default_factory=Sharing)
    orders: Table[str, JobOrder] = field(default_factory=Table)
    ended: Table[str, JobEnd] = field(default_factory=Table)
    began_s: Table[str, float] = field(default_factory=Table)
    decisions: Table[str, tuple[Decision, ...]] = field(default_factory=Table)
    requests: Table[str, str] = field(default_factory=Table)
    hurried: frozenset[str] = frozenset()
    wishes: Table[str, Wish] = field(default_factory=Table)
    counts: Table[str, int] = field(default_factory=Table)  # of decisions, by kind

    def job(self, job: str) -> SharedJob | None:
        found: SharedJob | None = self.sharing.jobs.get(job)
        return found
