"""What every participant of a generation makes of one thing that each tries for itself.

A source that one of them can't use is of no use to all: nobody waits for what will not come, and
who tells the controller knows whose trouble it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

from elastic_ft.core.events import DAMAGED, UNREACHABLE
from elastic_ft.errors import StateDamaged, StateUnreadable
from elastic_ft.runtime.groups import Groups

T = TypeVar("T")
OTHERS_READ_S = 24 * 3600.0  # the controller's deadline is what ends it: it follows their bytes
IDLE = "idle"  # had nothing to read: says nothing of whether it could
READ = "read"


def together(groups: Groups, name: str, work: Callable[[], tuple[T, bool]]) -> T:
    """Returns what ``work`` returns here, if it went well on every participant; all call it.

    Who is done waits for as long as others read, or until these groups are aborted.

    ``work`` also says whether it has read anything of the source. If it raises StateDamaged or
    StateUnreadable anywhere, all raise that: damage first, for it is certain. ``unread_by`` names
    workers only where others could read.
    """
    own = {"kind": IDLE, "problem": "", "holder": "", "shard": ""}
    result: list[T] = []
    try:
        done, has_read = work()
        result.append(done)
        own["kind"] = READ if has_read else IDLE
    except StateDamaged as error:
        own = {"kind": DAMAGED, "problem": str(error), "holder": error.holder, "shard": error.shard}
    except StateUnreadable as error:
        own = {"kind": UNREACHABLE, "problem": str(error), "holder": error.holder, "shard": ""}
    told = groups.exchange(name, json.dumps(own).encode(), OTHERS_READ_S)
    outcomes = [json.loads(raw) for raw in told]
    for outcome in outcomes:
        if outcome["kind"] == DAMAGED:
            raise StateDamaged(outcome["problem"], outcome["holder"], outcome["shard"])
    unread = {
        peer.worker: outcome
        for peer, outcome in zip(groups.peers, outcomes, strict=True)
        if outcome["kind"] == UNREACHABLE
    }
    if unread:
        first = next(iter(unread.values()))
        others_could = any(outcome["kind"] == READ for outcome in outcomes)
        alone = tuple(unread) if others_could else ()
        raise StateUnreadable(first["problem"], first["holder"], alone)
    return result[0]
