"""A process that is on no cluster is told so: Ray would start one for it, unasked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import ray
from ray.exceptions import RaySystemError

from elastic_ft.hosts.ray.names import Remains, abandoned, actor_named, clear_away, end_actor
from elastic_ft.service.cluster_watch import look_at_ray


@pytest.mark.parametrize(
    "ask",
    [
        lambda: actor_named("elastic_ft/j/r/controller"),
        lambda: end_actor("elastic_ft/j/r/controller"),
        lambda: clear_away("elastic_ft/j/r/", Remains()),
        abandoned,
        lambda: look_at_ray("CPU"),
    ],
)
def test_who_is_on_no_cluster_starts_none(
    monkeypatch: pytest.MonkeyPatch, ask: Callable[[], object]
) -> None:
    """It joined one that was about to go, or started one in a thread, with which it went; a minute
    later Ray ended the process, whatever else it did."""
    started: list[str] = []
    monkeypatch.setattr(ray, "init", lambda *_, **__: started.append("a cluster"))
    with pytest.raises(RaySystemError):
        ask()
    assert not started
