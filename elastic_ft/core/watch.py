"""Who hangs: a pure judgement over progress marks. The controller asks a few times a second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastic_ft.core.events import WorkerId


@dataclass(frozen=True, slots=True)
class Mark:
    """What is known of one member's progress. Seconds are of one clock."""

    step: int
    place: int  # named points that its training thread has reached in that step
    points: int  # named points reached in all
    moved_at_s: float  # when any of these last changed
    heard_at_s: float  # when anything at all was heard


def find_hung(
    marks: Mapping[WorkerId, Mark],
    now_s: float,
    hang_timeout_s: float,
    heartbeat_timeout_s: float,
) -> dict[WorkerId, str]:
    """Returns the workers to give up, with the reason.

    Silence is proof enough: a stopped process sends nothing. A worker that beats but stands still
    drags all others with it into their collectives, so when nobody moves, the ones that are
    furthest behind are to blame. If all are at the same place, nobody can be told from outside:
    ``all_stand_still`` says so, and whoever then fails to reach its safe point is the one.
    """
    silent = {
        worker: f"nothing heard for {now_s - mark.heard_at_s:.1f} s"
        for worker, mark in marks.items()
        if now_s - mark.heard_at_s > heartbeat_timeout_s
    }
    if silent:
        return silent
    if not all_stand_still(marks, now_s, hang_timeout_s):
        return {}
    places = {worker: (mark.step, mark.place) for worker, mark in marks.items()}
    behind = min(places.values())
    if behind == max(places.values()):
        return {}
    return {
        worker: f"no progress for {now_s - marks[worker].moved_at_s:.1f} s, furthest behind"
        for worker, place in sorted(places.items())
        if place == behind
    }


def all_stand_still(marks: Mapping[WorkerId, Mark], now_s: float, hang_timeout_s: float) -> bool:
    """Whether there are members and none has moved for ``hang_timeout_s``."""
    return bool(marks) and all(now_s - m.moved_at_s > hang_timeout_s for m in marks.values())
