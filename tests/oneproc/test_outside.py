"""The script's own code between two steps, as heartbeats tell of it."""

from __future__ import annotations

import threading
import time

from elastic_ft.faults import Points
from elastic_ft.worker.outside import OUTSIDE_TIMEOUTS, Outside, waits


def test_what_runs_is_progress_up_to_a_limit_and_told_of_once() -> None:
    points, told = Points("w0", (), lambda index: None), list[str]()
    outside = Outside(points, threading.get_ident, 60.0, told.append)
    outside.look()
    assert points.count == 0, "inside a step nothing is said"
    with points.outside():
        began_s = time.monotonic()
        for after_s, marks in ((1.0, 1), (61.5, 2), (100.0, 3), (60.0 * OUTSIDE_TIMEOUTS + 1, 3)):
            outside.look(began_s + after_s)
            assert points.count == marks, after_s
    assert len(told) == 1 and "has run for 6" in told[0] and "after 480 s" in told[0]
    outside.look()
    assert points.count == 3


def test_who_waits_for_others_makes_no_progress() -> None:
    export = ("safetensors/torch.py:300 save_file", "train.py:12 <module>")
    assert not waits(export)
    assert waits(("torch/distributed/distributed_c10d.py:3 all_gather", *export))
    assert waits(("elastic_ft/groups/groups.py:5 _await", "elastic_ft/groups/groups.py:9 barrier"))
