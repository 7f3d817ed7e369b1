"""Why a process is gone, in words."""

from __future__ import annotations

from ray.exceptions import RayActorError

from elastic_ft.errors import one_line

KILLED = "killed by the controller"


def why_gone(error: BaseException) -> str:
    """One line on why a worker is gone, without Ray's ids and advice."""
    if isinstance(error, RayActorError):
        text = str(error)
        for mark, short in DEATHS:
            if mark in text:
                return short
    return one_line(error)


DEATHS = (
    ("node has died", "its node died"),
    ("node was drained", "its node was drained"),
    ("ray.kill", KILLED),
    ("creation task failed", "its actor could not be created"),
    ("worker process has died", "its process died"),
    ("owner", "its owner died"),
)
