"""What every participant of a generation makes of one thing that each tries for itself.

A source that one of them can't use is of no use to all: nobody waits for what will not come, and
who tells the controller knows whose trouble it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from elastic_ft.core.events import DAMAGED, UNREACHABLE
from elastic_ft.errors import StateDamaged, StateUnreadable, StoreFailed
from elastic_ft.groups.groups import OTHERS_TIMEOUT_S, Groups
from elastic_ft.storage.cancellable import find_object

T = TypeVar("T")
DONE = "done"
LOOK_S = 5.0  # for an object that somebody does not find: less than a pause may take
THERE, NOWHERE, UNKNOWN = "there", "nowhere", "unknown"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one participant.

    Attributes:
        kind: DONE, DAMAGED or UNREACHABLE.
        missing: the URL of an object that it does not find.
        others_could: what it could not have, others could.
        read: the holders that it read something of.
    """

    kind: str = DONE
    problem: str = ""
    holder: str = ""
    shard: str = ""
    missing: str = ""
    others_could: bool = False
    read: tuple[str, ...] = ()


def together(
    groups: Groups,
    name: str,
    work: Callable[[], tuple[T, tuple[str, ...]]],
    look: Callable[[str, float], bool] = find_object,
) -> T:
    """Returns what ``work`` returns here, if it went well on every participant; all call it.

    Who is done waits for as long as others read, or until these groups are aborted.

    ``work`` also says which holders it has read something of. If it raises StateDamaged or
    StateUnreadable anywhere, all raise: damage first, for it is certain, and each what it has found
    itself, so that all of it is told. An object that somebody does not find is looked for by all
    (``look``): its folder may not be mounted there. Damage it is only where nobody finds it.
    ``unread_by`` names workers only where others could.
    """
    result: list[T] = []
    try:
        done, read = work()
        result.append(done)
        own = Outcome(read=read)
    except StateDamaged as error:
        own = Outcome(DAMAGED, str(error), error.holder, error.shard, error.missing)
    except StateUnreadable as error:
        own = Outcome(UNREACHABLE, str(error), error.holder)
    outcomes = [Outcome(**told) for told in _exchange(groups, name, asdict(own), OTHERS_TIMEOUT_S)]
    if missing := sorted({outcome.missing for outcome in outcomes if outcome.missing}):
        within_s = min(LOOK_S, groups.operation_timeout_s / 2 / len(missing))
        seen = {url: _look(look, url, within_s) for url in missing}
        everyones = _exchange(groups, f"{name}/looked", seen, groups.operation_timeout_s)
        outcomes = [_judged(outcome, everyones) for outcome in outcomes]
    own = outcomes[groups.participant]
    for outcome in (own, *outcomes):
        if outcome.kind == DAMAGED:
            raise StateDamaged(outcome.problem, outcome.holder, outcome.shard)
    for outcome in outcomes:
        if outcome.kind == UNREACHABLE:
            alone = _unread_by(groups, outcomes, outcome.holder)
            raise StateUnreadable(outcome.problem, outcome.holder, alone)
    return result[0]


def _exchange(
    groups: Groups, name: str, value: dict[str, Any], timeout_s: float
) -> list[dict[str, Any]]:
    told = groups.exchange(name, json.dumps(value).encode(), timeout_s)
    return [json.loads(raw) for raw in told]


def _look(look: Callable[[str, float], bool], url: str, within_s: float) -> str:
    try:
        return THERE if look(url, within_s) else NOWHERE
    except StoreFailed:
        return UNKNOWN


def _judged(outcome: Outcome, everyones: list[dict[str, Any]]) -> Outcome:
    """What is missing for one, in the light of what all have seen."""
    if not outcome.missing:
        return outcome
    seen = {told[outcome.missing] for told in everyones}
    if THERE in seen:
        problem = f"{outcome.problem}, and others find it"
        return replace(outcome, kind=UNREACHABLE, problem=problem, others_could=True)
    return replace(outcome, kind=UNREACHABLE) if UNKNOWN in seen else outcome


def _unread_by(groups: Groups, outcomes: list[Outcome], holder: str) -> tuple[str, ...]:
    """Who can't read what ``holder`` has, if others can."""
    unread = {
        peer.worker: outcome
        for peer, outcome in zip(groups.peers, outcomes, strict=True)
        if outcome.kind == UNREACHABLE and outcome.holder == holder
    }
    could = any(outcome.others_could for outcome in unread.values())
    could |= any(holder in outcome.read for outcome in outcomes)
    return tuple(unread) if could else ()
