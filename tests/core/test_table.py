"""A table is a dict whose changed copies are cheap, and that is never changed itself."""

from __future__ import annotations

import copy
import pickle
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from elastic_ft.core.table import LATE_MIN, Table

KEYS = st.integers(0, 3 * LATE_MIN)  # more than are kept apart


@given(st.lists(st.tuples(KEYS, st.booleans(), st.booleans()), max_size=6 * LATE_MIN))
def test_every_version_maps_what_a_dict_would(changes: list[tuple[int, bool, bool]]) -> None:
    table: Table[int, int] = Table()
    plain: dict[int, int] = {}
    versions = [(table, dict(plain))]
    for number, (key, goes, looked_at) in enumerate(changes):
        if goes:
            table = table.without([key, key, -1])
            plain.pop(key, None)
        else:
            table = table.put(key, number)
            plain[key] = number
        assert (len(table), key in table, table.get(key)) == (len(plain), not goes, plain.get(key))
        if looked_at:
            assert list(table.items()) == list(plain.items()), "order and all"
        versions.append((table, dict(plain)))
    for version, then in reversed(versions):
        assert list(version) == list(then)
        assert version == then
        assert all(version[key] == value for key, value in then.items())


def test_it_survives_copying_and_the_wire() -> None:
    table = Table({"a": 1, "b": 2}).without(["a"]).put("c", 3)
    assert pickle.loads(pickle.dumps(table)) == copy.deepcopy(table) == {"b": 2, "c": 3}
    assert repr(table) == "Table({'b': 2, 'c': 3})"


def test_what_is_not_there_is_missed() -> None:
    table = Table({"a": 1}).without(["a"])
    for key in ("a", "z"):
        try:
            table[key]
        except KeyError:
            continue
        raise AssertionError(f"{key} is there")


def test_a_change_copies_far_less_than_all() -> None:
    """Steps of the interpreter are not counted; what is apart is: at most the square root."""
    table = Table(dict.fromkeys(range(10_000)))
    for key in range(10_000, 10_500):
        table = table.put(key, None)
        assert len(table._late) <= 101


def test_what_another_thread_settles_meanwhile_is_not_lost() -> None:
    """It read what is large before the changes, which lay there by then: a job's was gone."""
    base, turns = Table._base, [0]  # type: ignore[attr-defined]

    class Met(Table[str, int]):
        """Whoever reads what is large is overtaken, once."""

        __slots__ = ()

        @property
        def _base(self) -> Any:
            found = base.__get__(self)
            if turns[0]:
                turns[0] -= 1
                self._settle()
            return found

        @_base.setter
        def _base(self, value: Any) -> None:
            base.__set__(self, value)

    table = Met({"a": 1, "b": 2})
    table._late = {"b": 3}
    turns[0] = 1
    assert dict(table) == {"a": 1, "b": 3}
