"""What a client needs to find in an answer: who answers without it is no service of ours. More is
let pass, as a later service may tell it."""

from __future__ import annotations

from types import NoneType
from typing import Any

from elastic_ft.core.sharing.asks import ENDED, LIVE

OR_NOT = (int, float, NoneType)
JOB = {
    "id": str,
    "name": str,
    "queue": str,
    "priority": int,
    "state": frozenset((*LIVE, *ENDED)),
    "workers": {"now": int, "min": int, "max": int},
    "step": int,
    "steps": (int, NoneType),
    "rate": OR_NOT,
    "eta_s": OR_NOT,
    "why": str,
    "reason": str,
}
WHOLE_JOB = JOB | {
    "run_folder": str,
    "layout": (str, NoneType),
    "members": [dict.fromkeys(("rank", "worker", "host", "pid"), object)],
    "decisions": [{"what": str, "why": str}],
}
JOBS = {"jobs": [JOB]}
SUBMITTED = {"id": str, "page": str}
SERVICE = {
    "version": str,
    "folder": str,
    "starts": int,
    "slots": {"used": int, "all": int},
    "nodes": [{"node": str, "slots": int, "jobs": dict}],
    "queues": [{"queue": str, "running": int, "used": int, "waiting": int}],
}
STOPPED = {"stopped": bool}
LINE = {"events": {"text": str}, "steps": dict, "logs": {"text": str}}


def fits(value: Any, kind: Any) -> bool:
    """``kind``: a type or several; a set of texts; a dictionary of what has to be there; a list of
    one kind."""
    if isinstance(kind, dict):
        return isinstance(value, dict) and all(
            key in value and fits(value[key], inner) for key, inner in kind.items()
        )
    if isinstance(kind, list):
        return isinstance(value, list) and all(fits(each, kind[0]) for each in value)
    if isinstance(kind, frozenset):
        return isinstance(value, str) and value in kind
    return isinstance(value, kind)
