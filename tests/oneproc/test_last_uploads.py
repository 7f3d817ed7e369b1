"""Who waits for the last uploads: all or nobody, as a collective follows."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ft.worker import last_uploads
from elastic_ft.worker.tools import Flags

DEADLINE_S, ROUNDS = 30.0, 4


class Sums:
    """A collective of two threads."""

    def __init__(self) -> None:
        self._met = threading.Barrier(2)
        self._given: list[list[float]] = []
        self.rounds = 0

    def __call__(self, values: Sequence[float], world_size: int) -> list[float]:
        first = self._met.wait(DEADLINE_S) == 0
        if first:
            self._given, self.rounds = [], self.rounds + 1
        self._met.wait(DEADLINE_S)
        self._given.append(list(values))
        self._met.wait(DEADLINE_S)
        return [sum(each) for each in zip(*self._given, strict=True)]


@pytest.mark.parametrize("pauses", [False, True])
def test_who_has_written_waits_for_who_has_not(
    monkeypatch: pytest.MonkeyPatch, pauses: bool
) -> None:
    """It went on into a collective that the other came to once its store was back."""
    sums, written = Sums(), threading.Event()
    flags = [Flags(), Flags()]
    monkeypatch.setattr(last_uploads, "sum_over_members", sums)
    monkeypatch.setattr(last_uploads, "UPLOAD_POLL_S", 0.01)
    ends: list[Any] = [lambda timeout_s: True, written.wait]
    found: dict[int, bool] = {}

    def run(rank: int) -> None:
        tools: Any = SimpleNamespace(
            checkpointer=SimpleNamespace(wait_all=ends[rank]), points=lambda place: None
        )
        groups: Any = SimpleNamespace(aborted="", world_size=2)
        found[rank] = last_uploads.await_uploads(tools, groups, flags[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    while sums.rounds < ROUNDS:
        assert all(thread.is_alive() for thread in threads), found
        threads[0].join(0.01)
    if pauses:
        flags[0].pause = True
    else:
        written.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert found == dict.fromkeys((0, 1), not pauses)
