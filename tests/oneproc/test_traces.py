"""What of a traceback reaches the journal: the user's own frames, and not many."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from elastic_ft.data.prefetch import Prefetcher
from elastic_ft.models.imports import import_object
from elastic_ft.worker.traces import FRAMES_MAX, LINE_MAX, user_frames

SOURCE = """
class Data:
    def __len__(self): return 9
    def __getitem__(self, index):
        return deeper(9 - index)

def deeper(left):
    if left == 0:
        raise ValueError("corrupt record")  # {padding}
    return deeper(left - 1)
"""


def caught(tmp_path: Path, index: int) -> tuple[str, ...]:
    """Raised in the thread that loads ahead, as in a real worker; caught where ``get`` raises."""
    sys.path.insert(0, str(tmp_path))
    sys.modules.pop("users_data", None)
    (tmp_path / "users_data.py").write_text(SOURCE.format(padding="x" * LINE_MAX))
    try:
        data = import_object("users_data:Data", "data.path", ValueError)()
        data.collate = list
        with Prefetcher(data) as prefetcher:
            prefetcher.request(1, [(index,)])
            try:
                prefetcher.get(1, 10.0)
            except ValueError as error:
                return user_frames(error)
    finally:
        sys.path.remove(str(tmp_path))
    raise AssertionError("nothing was raised")


def test_the_frames_are_the_users_and_end_where_it_raised(tmp_path: Path) -> None:
    frames = caught(tmp_path, 8)
    assert [frame.split("/")[-1].split(": ")[0] for frame in frames[1:]] == [
        "users_data.py:5 in __getitem__",
        "users_data.py:10 in deeper",
        "users_data.py:9 in deeper",
    ]
    assert all(len(frame) <= LINE_MAX for frame in frames)


def test_a_deep_recursion_is_told_by_its_innermost_frames(tmp_path: Path) -> None:
    frames = caught(tmp_path, 0)
    assert len(frames) == FRAMES_MAX
    assert "users_data.py:9 in deeper" in frames[-1]


def test_what_a_library_alone_has_raised_is_told_by_its_own() -> None:
    try:
        json.loads("{")
    except ValueError as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        assert "decoder.py" in user_frames(error)[-1]
