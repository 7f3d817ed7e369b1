"""What the service is asked for, as its journal has it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, get_args

from elastic_ft.config import Job
from elastic_ft.core.sharing import asks
from elastic_ft.core.typed import decoder

PART_MAX, PARTS_KEPT = 4096, 512  # characters of a section that many jobs may have alike; sections
KINDS = {kind.__name__: kind for kind in get_args(asks.SharingEvent)}


@dataclass(frozen=True, slots=True)
class JobOrder:
    """A job as it was submitted.

    Attributes:
        by: who submitted it; "" where nobody has to say.
        request: drawn by the client: the same again is no second job.
        job: its file's values, resolved.
    """

    id: str
    name: str
    by: str
    at_s: float
    request: str
    job: dict[str, Any]

    @property
    def steps(self) -> int:
        return int(self.job["steps"])


@dataclass(frozen=True, slots=True)
class Notice:
    """An event, and what the core does not need to know of it.

    Attributes:
        by: who asked for it; "": nobody did, it happened.
        note: why, in words.
        now: of a stop: without a checkpoint.
        step: of an end: the last that is committed.
    order: of a submission.
    """

    event: asks.SharingEvent
    by: str = ""
    note: str = ""
    now: bool = False
    step: int = 0
    order: JobOrder | None = None

    def to_json(self) -> dict[str, Any]:
        line: dict[str, Any] = {
            "event": type(self.event).__name__,
            **dataclasses.asdict(self.event),
        }
        more = {"by": self.by, "note": self.note, "now": self.now, "step": self.step}
        line |= {key: value for key, value in more.items() if value}
        if self.order is not None:
            line["order"] = dataclasses.asdict(self.order)
        return line


def told_of(line: dict[str, Any]) -> Notice:
    """Raises KeyError, ValueError where it is not a line that ``to_json`` has made."""
    values = dict(line)
    event = decoder(KINDS[values.pop("event")])(values)
    order = decoder(JobOrder)(line["order"]) if "order" in line else None
    if order is not None:
        order = dataclasses.replace(order, job=with_shared_parts(order.job))
    said = {key: line[key] for key in ("by", "note", "now", "step") if key in line}
    return Notice(event, order=order, **said)


_parts: dict[str, Any] = {}


def with_shared_parts(job: dict[str, Any]) -> dict[str, Any]:
    """``job``, which is kept for ever, as all others are: sections that one before it has alike are
    that one's own, as most are what the defaults say."""
    return {key: _shared(value) if isinstance(value, dict) else value for key, value in job.items()}


def _shared(part: dict[str, Any]) -> dict[str, Any]:
    text = repr(part)
    if len(text) > PART_MAX:
        return part
    if len(_parts) >= PARTS_KEPT:
        _parts.clear()
    found: dict[str, Any] = _parts.setdefault(text, part)
    return found


def wish_of(job: Job, queue: str, priority: int, node_slots: int) -> asks.Wish:
    """``node_slots``: of a node of the cluster. One worker takes its part of it."""
    elastic = job.elastic
    return asks.Wish(
        elastic.min_workers,
        elastic.max_workers,
        job.multiple_of,
        max(1, node_slots // elastic.workers_per_node),
        queue,
        priority,
    )
