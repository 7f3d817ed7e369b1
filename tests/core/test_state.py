"""The core's state: each write of it can be checked."""

from __future__ import annotations

from typing import get_type_hints

from elastic_ft.core.state import Changes, State


def test_every_field_can_be_set_with_its_own_type_and_no_other() -> None:
    assert get_type_hints(Changes) == get_type_hints(State)
