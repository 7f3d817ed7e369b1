"""A survivor whose collective never ends, since half of a payload came, keeps its process."""

from __future__ import annotations

import ctypes
import datetime
import fcntl
import multiprocessing
import os
import signal
import struct
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic_ft import torch_private
from elastic_ft.errors import GroupBroken
from elastic_ft.groups.store_links import inet_sockets, shut_down
from elastic_ft.groups.waits import WAITS
from elastic_ft.worker.training_thread import TrainingThread
from tests.multiproc.harness import make_job, run_job
from tests.multiproc.pool import Pool
from tests.multiproc.tiny import Counted, Mixer

HALF = 64 << 20  # elements: their 256 MiB take long enough to be cut off in
PAYLOADS = 8  # one right after the other: who is too late for one is not for all
TIMEOUT_S = 10.0
QUEUED_BYTES = 1 << 20


def join(path: str, rank: int) -> None:
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=2, timeout=timeout
    )


def send(path: str, here: Any) -> None:
    here.set()
    join(path, 1)
    payload = torch.ones(HALF)
    for _ in range(PAYLOADS):
        dist.broadcast(payload, src=1)


def test_who_waits_for_half_a_payload_is_left_behind(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    here = spawn.Event()
    peer = spawn.Process(target=send, args=(f"{tmp_path}/store", here))
    peer.start()
    assert here.wait(120), "it imports torch"
    join(f"{tmp_path}/store", 0)
    received, broken, woken = torch.zeros(HALF), "", threading.Event()
    thread = TrainingThread()

    def steps() -> Iterator[int]:
        yield 1
        WAITS.begin()  # a wait that is timed has a frame of ours in between
        try:
            for _ in range(PAYLOADS):
                dist.broadcast(received, src=1)
        finally:
            woken.set()

    def cut() -> None:
        nonlocal broken
        while not received[0]:
            assert not woken.wait(0.001)
        for found in inet_sockets():
            if found.peer is not None:
                shut_down(found)
        broken = "cut off"

    try:
        threading.Thread(target=cut, daemon=True).start()
        running = thread.run(steps(), lambda: broken)
        assert next(running) == 1
        began = time.monotonic()
        with pytest.raises(GroupBroken, match="cut off"):
            next(running)
        took_s = time.monotonic() - began
        assert took_s < TIMEOUT_S and not woken.is_set(), "it had all come"
        assert thread.left_behind == []
        thread.left_behind += torch_private.process_groups()
        assert list(thread.run((n for n in (2, 3)), lambda: "")) == [2, 3]
        assert woken.wait(2 * TIMEOUT_S), "it ends when its timeout has passed"
    finally:
        thread.close()
        dist.destroy_process_group()
        peer.kill()
        peer.join()


def test_user_code_that_sleeps_is_waited_for() -> None:
    go = threading.Event()
    waited = 0

    def steps() -> Iterator[int]:
        assert go.wait(TIMEOUT_S)
        yield 1

    def broken() -> str:
        nonlocal waited
        waited += 1
        if waited == 20:  # polls: three times as long as a collective gets
            go.set()
        return "broken"

    thread = TrainingThread()
    assert list(thread.run(steps(), broken)) == [1]
    thread.close()


def test_what_is_raised_and_what_is_given_up_end_in_the_generator() -> None:
    closed = threading.Event()

    def steps(error: bool) -> Iterator[int]:
        try:
            yield threading.get_ident()
            if error:
                raise ValueError("its own")
        finally:
            closed.set()

    thread = TrainingThread()
    running = thread.run(steps(error=True), lambda: "")
    assert next(running) != threading.get_ident() == thread.current
    with pytest.raises(ValueError, match="its own"):
        next(running)
    closed.clear()
    given_up = thread.run(steps(error=False), lambda: "")
    next(given_up)
    given_up.close()  # type: ignore[attr-defined]
    assert closed.wait(TIMEOUT_S)
    thread.close()


def heaps(*_place: int) -> int:
    """How many glibc has in this process once other threads have allocated."""
    for _ in range(3):
        thread = threading.Thread(target=torch.zeros, args=(1 << 10,))
        thread.start()
        thread.join()
    libc, told = ctypes.CDLL(None), os.memfd_create("malloc_info")
    libc.fdopen.restype = ctypes.c_void_p
    file = ctypes.c_void_p(libc.fdopen(os.dup(told), b"w"))
    assert libc.malloc_info(0, file) == 0
    libc.fclose(file)
    return os.pread(told, 1 << 20, 0).count(b"<heap nr")


def test_all_threads_of_a_worker_share_its_heap() -> None:
    """Even if a thread of some library has allocated before the worker was forked."""
    with Pool(2) as pool:
        assert pool(heaps, world=2) == [1, 1]


# ---------------------------------------------------------------------------------- a whole job


class WithTable(Mixer):
    """DDP sends its buffers from rank 0 to the others, before a forward: 64 MiB in one payload."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(16 << 20))


class StopsHalfWay(Counted):
    """Once, the worker that sends stops when it has sent part of a payload."""

    def __init__(self, marker: str) -> None:
        super().__init__()
        self.marker, self.watched = Path(marker), False
        self.stopped = threading.Event()

    def __getitem__(self, index: int) -> Any:
        if not self.watched:
            self.watched = True
            threading.Thread(target=self._watch, daemon=True).start()
        return super().__getitem__(index)

    def _watch(self) -> None:
        while not self.stopped.wait(0.0005) and not self.marker.exists():
            for found in inet_sockets():
                if found.peer is not None and _queued(found.fd) > QUEUED_BYTES:
                    self.marker.touch()
                    self.stopped.set()
                    os.kill(os.getpid(), signal.SIGSTOP)


def _queued(fd: int) -> int:
    """Bytes that the kernel has yet to send, or to be told of that they came."""
    try:
        return int(struct.unpack("i", fcntl.ioctl(fd, termios.TIOCOUTQ, b"\0" * 4))[0])
    except OSError:
        return 0


def test_the_survivor_of_half_a_payload_keeps_its_process(tmp_path: Path) -> None:
    here, kwargs = "tests.multiproc.test_training_thread", {"marker": str(tmp_path / "stopped")}
    job = make_job(
        workers=2,
        steps=6,
        model={"path": f"{here}:WithTable"},
        data={"path": f"{here}:StopsHalfWay", "kwargs": kwargs},
        batch={"global_batch_size": 2, "micro_batch_size": 1},
        elastic={"min_workers": 1, "heartbeat_timeout_s": 2.0, "hang_timeout_s": 60},
    )
    run = run_job(job, tmp_path / "run").check()
    lost = run.recoveries[0]
    assert len(run.all("thread_left")) == 1, run.story()
    assert lost["survivors_kept_pid"] and lost["steps_lost"] == 0, run.story()
    assert len(run.all("worker_hung")) == 1, run.story()
