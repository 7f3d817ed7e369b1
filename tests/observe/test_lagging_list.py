"""A store whose list lags behind what was put: what is read by it has no holes."""

from __future__ import annotations

import json
from io import BytesIO
from typing import Any
from uuid import uuid4

import pytest

from elastic_ft.observe.segments import FIRST, NUMBERS, Mirror, listed, read_whole
from elastic_ft.storage.store import Store, open_store
from tests.observe.watched import Watched


class Lagging(Watched):
    """The newest keys are not listed yet."""

    def __init__(self, backend: Any, lacks: int) -> None:
        super().__init__(backend)
        self._lacks = lacks

    def list(self, prefix: str, timeout_s: float, after: str = "") -> list[str]:
        return sorted(self._backend.list(prefix, timeout_s, after))[: -self._lacks]


def lines_of(name: str, *numbers: int) -> bytes:
    return "".join(json.dumps({NUMBERS[name]: n}) + "\n" for n in numbers).encode()


def mirrored(name: str, content: bytes) -> Store:
    store = open_store(f"memory://t/{uuid4().hex}")
    Mirror(store, name, lambda: None, 400).upload(BytesIO(content), len(content), False)
    assert read_whole(store, name) == content
    return store


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("lacks", [1, 2, 99])
def test_segments_that_are_not_listed_yet_are_read_all_the_same(name: str, lacks: int) -> None:
    """A controller went on from a story with a hole, 180 steps behind its workers, for ever."""
    content = lines_of(name, *range(FIRST[name], 99))
    store = mirrored(name, content)
    assert len(listed(store, name)) >= 2
    store.backend = Lagging(store.backend, lacks)
    assert read_whole(store, name) == content


def test_what_is_missing_for_good_is_done_without() -> None:
    """A folder that was copied while its job ran: it goes on from its checkpoint, as ever."""
    store = mirrored("inbox.jsonl", lines_of("inbox.jsonl", *range(99)))
    first, second, *_ = listed(store, "inbox.jsonl")
    begin, end = (int(key.rpartition("/")[2]) for key in (first, second))
    store.delete(first)
    left = lines_of("inbox.jsonl", *range(begin), *range(end, 99))
    assert read_whole(store, "inbox.jsonl") == left


def test_numbers_that_were_never_there_are_no_gap() -> None:
    content = lines_of("steps.jsonl", *range(121, 150), *range(180, 240))
    assert read_whole(mirrored("steps.jsonl", content), "steps.jsonl") == content
