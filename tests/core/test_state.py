"""The core's state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_ft.core.generations import has_news
from elastic_ft.core.records import CheckpointAttempt, Uploads
from elastic_ft.core.state import State


@pytest.mark.parametrize(("committing", "is_news"), [(True, True), (False, False)])
def test_only_what_was_being_published_is_waited_for(committing: bool, is_news: bool) -> None:
    """Another attempt's end had everything looked at again, and a second ``awaiting_keeper``."""
    attempt = CheckpointAttempt(4, 1, frozenset({"w0"}), committing=committing)
    before = State(phase="pausing", uploads=Uploads(attempts=(attempt,)))
    now = replace(before, uploads=Uploads(closed_attempts=((4, 1),)))
    assert has_news(before, now) is is_news
