"""A store whose list lags behind what was put: what is read by it has no holes."""

from __future__ import annotations

import json
from io import BytesIO
from uuid import uuid4

import pytest

from elastic_ft.errors import StoreFailed
from elastic_ft.observe.segments import Mirror, read_whole
from elastic_ft.storage.store import open_store
from tests.observe.watched import Watched


class Lagging(Watched):
    """The newest key is not listed yet."""

    def list(self, prefix: str, timeout_s: float, after: str = "") -> list[str]:
        return sorted(self._backend.list(prefix, timeout_s, after))[:-1]


def test_an_inbox_of_which_a_segment_is_not_listed_yet_is_read_later() -> None:
    """A controller went on from a story with a hole, 180 steps behind its workers, for ever."""
    store = open_store(f"memory://t/{uuid4().hex}")
    content = "".join(json.dumps({"line": n}) + "\n" for n in range(99)).encode()
    Mirror(store, "inbox.jsonl", lambda: None, 400).upload(BytesIO(content), len(content), False)
    assert read_whole(store, "inbox.jsonl") == content
    store.backend = Lagging(store.backend)
    with pytest.raises(StoreFailed, match="the store's list lacks a segment"):
        read_whole(store, "inbox.jsonl")
