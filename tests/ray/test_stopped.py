"""A controller that stands still is ended by a keeper; no other process ever is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from elastic_ft.hosts.ray.stopped import StoppedControllers, end_controller, end_here
from elastic_ft.observe import alive


class Silence:
    """How long a keeper has heard nothing, and which controllers it has ended."""

    def __init__(self, run: Path) -> None:
        self.s, self.ended = 0.0, list[alive.Sign]()
        self.watch = StoppedControllers(str(run), 10.0, lambda: self.s, self.ended.append)

    def look(self, now_s: float, silent_s: float) -> int:
        """Returns how many were ended by now."""
        self.s = silent_s
        self.watch.look(now_s)
        return len(self.ended)


def test_who_is_silent_and_gives_no_sign_is_ended_and_tried_again(tmp_path: Path) -> None:
    keeper = Silence(tmp_path)
    assert keeper.look(5.0, 6.0) == 0, "there is no sign at all"
    alive.leave_sign(tmp_path, in_charge=True)
    assert [keeper.look(5.0 + t, 6.0 + t) for t in (0, 2, 4, 5)] == [0, 0, 0, 0]
    assert keeper.look(10.5, 11.5) == 1
    assert keeper.ended == [alive.last_sign(str(tmp_path))]
    assert [keeper.look(t, t) for t in (12.0, 15.0, 16.0)] == [1, 1, 2]


def test_who_gives_signs_or_is_heard_lives(tmp_path: Path) -> None:
    keeper = Silence(tmp_path)
    for now_s in range(5, 40, 3):
        alive.leave_sign(tmp_path, in_charge=True)
        assert keeper.look(now_s, now_s) == 0, "the keeper may be cut off"
    for now_s in range(40, 80, 3):
        assert keeper.look(now_s, 2.0) == 0, "its disk may be full"


@contextmanager
def process(title: str) -> Iterator[subprocess.Popen[bytes]]:
    program = "import sys; print(flush=True); sys.stdin.read()"
    command, pipe = [sys.executable, "-c", program, title], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as one:
        try:
            assert one.stdout is not None and one.stdout.readline()  # it has its own title by now
            yield one
        finally:
            one.kill()  # stopped or not


def sign_of(pid: int, at_s: float) -> alive.Sign:
    return alive.Sign(at_s, os.uname().nodename, pid, True)


def leave(run: Path, sign: alive.Sign) -> alive.Sign:
    (run / alive.NAME).write_text(json.dumps(asdict(sign)))
    return sign


@pytest.mark.parametrize("title", ["ray::ElasticController", "another"])
def test_the_process_of_the_sign_alone_is_killed(title: str, tmp_path: Path) -> None:
    run, is_controller = str(tmp_path), title.startswith("ray::")
    with process(title) as one:
        before = sign_of(one.pid, psutil.Process(one.pid).create_time() - 5)
        assert not end_here(run, before), "its number was another's at that time"
        psutil.Process(one.pid).suspend()
        sign = leave(tmp_path, sign_of(one.pid, time.time()))
        assert end_here(run, sign) == is_controller
        assert is_controller or one.poll() is None
    assert not end_here(run, sign)


def test_who_lives_again_by_the_time_that_it_is_to_be_ended_lives_on(tmp_path: Path) -> None:
    with process("ray::ElasticController") as one:
        sign = sign_of(one.pid, time.time())
        leave(tmp_path, sign_of(one.pid, sign.at_s + 1))
        assert not end_here(str(tmp_path), sign)
        assert one.poll() is None


def test_the_log_says_only_what_was_done(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with process("ray::ElasticController") as one:
        sign = leave(tmp_path, sign_of(one.pid, time.time()))
        end_controller(str(tmp_path), sign)
        assert one.wait(20) != 0
        assert "stood still: ended" in caplog.text
    caplog.clear()
    end_controller(str(tmp_path), sign)
    assert caplog.text == "", "it ended long ago"
