"""Processes that read samples: the same through new deals, and gone with their parent."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ft.data.draws import Draws
from elastic_ft.data.prefetch import Prefetcher
from elastic_ft.data.reading_processes import ReadingProcesses
from elastic_ft.errors import DataError, GroupBroken
from elastic_ft.training.loader import collated

GONE_S = 10.0


class Told:
    """Each sample tells who has read it; some have their own way."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 66:
            raise ValueError("sample 66 is bad")
        if index == 67:
            raise FileNotFoundError(2, "No such file or directory", "/data/67.jpg")
        if index == 77:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor([float(index), float(os.getpid())])


class Draws100(Told):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(2) + random.random()


@pytest.fixture
def processes(request: Any) -> Iterator[ReadingProcesses]:
    made = ReadingProcesses(collated(getattr(request, "param", Told)(), None), 2, seed=7)
    yield made
    made.close()


def prefetcher(processes: ReadingProcesses) -> Prefetcher:
    return Prefetcher(collated(Told(), None), others=processes)


def test_a_new_deal_is_read_by_the_same_processes(processes: ReadingProcesses) -> None:
    """At once: what was read for the deal before is there, and the rest takes no new process."""
    readers, took_ms = set(), []
    with prefetcher(processes) as reading:
        for step in range(1, 12):
            reading.request(step, [(step, 1), (step, 2), (step, 3)])
            first = reading.get(step)
            reading.request(step + 1, [(step + 1, 1)])
            reading.cancel()
            began_s = time.perf_counter()
            reading.request(step, [(step, 3), (step, 4)])  # another world's
            again = reading.get(step)
            took_ms.append(1e3 * (time.perf_counter() - began_s))
            assert again[0] is first[2], "not read twice"
            for loaded in (*first, *again):
                assert [int(x) for x in loaded.data[:, 0]] == list(loaded.ids)
                readers |= {int(pid) for pid in loaded.data[:, 1]}
            reading.cancel()
    print(f"first batch after a re-deal: {sorted(took_ms)[5]:.1f} ms, {max(took_ms):.1f} at most")
    assert sorted(took_ms)[5] < 20
    assert readers <= set(processes.pids) and os.getpid() not in readers


def test_what_a_sample_raises_is_raised_here(processes: ReadingProcesses) -> None:
    with prefetcher(processes) as reading:
        reading.request(1, [(65, 66)])
        with pytest.raises(ValueError, match="sample 66 is bad"):
            reading.get(1)
        reading.cancel()
        reading.request(1, [(65,)])
        assert reading.get(1)[0].ids == (65,), "the process goes on"


def test_a_file_that_is_missing_is_no_death(processes: ReadingProcesses) -> None:
    """The commonest error of all is an OSError, as is the end of a process's pipe."""
    before = processes.pids
    with prefetcher(processes) as reading:
        reading.request(1, [(67,)])
        with pytest.raises(FileNotFoundError, match=r"No such file or directory: '/data/67.jpg'"):
            reading.get(1)
    assert processes.pids == before


def test_one_that_is_stopped_is_replaced(processes: ReadingProcesses) -> None:
    """It is no end that anybody sees: the step waited for it until the job failed."""
    before = processes.pids
    os.kill(before[0], signal.SIGSTOP)
    with prefetcher(processes) as reading:
        reading.request(1, [(n,) for n in range(8)])
        assert [loaded.ids for loaded in reading.get(1, 20)] == [(n,) for n in range(8)]
    assert processes.pids[1] == before[1] and processes.pids[0] != before[0]


def test_many_micro_batches_cost_no_descriptors(processes: ReadingProcesses) -> None:
    """One survivor of many has all of a step's micro-batches, with a few tensors in each."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    with prefetcher(processes) as reading:
        reading.request(1, [(n % 50,) for n in range(200)])
        reading.request(2, [(n % 50,) for n in range(200)])
        found = reading.get(1), reading.get(2)
        now = len(list(Path("/proc/self/fd").iterdir()))
    assert all(len(each) == 200 for each in found)
    assert now - before < 50


@pytest.mark.parametrize("count", [0, 3, 1 << 19])
def test_tensors_come_as_they_were(count: int) -> None:
    """Small ones by value, large ones shared."""
    torch.manual_seed(1)
    samples = [torch.randn(2, count).to(kind) for kind in (torch.bfloat16, torch.bool, torch.int64)]
    samples += [torch.tensor(1.5), torch.randn(4, count).T, torch.randn(count, dtype=torch.cfloat)]
    made = ReadingProcesses(collated(samples, lambda found: {"all": found}), 1, seed=7)
    try:
        (found,) = made.readers[0](tuple(range(len(samples)))).data.values()
    finally:
        made.close()
    for tensor, came in zip(samples, found, strict=True):
        assert torch.equal(tensor, came) and tensor.dtype == came.dtype


def test_a_process_that_dies_is_one_line(processes: ReadingProcesses) -> None:
    with prefetcher(processes) as reading:
        reading.request(1, [(77,)])
        died = r"^the data's process \d+ has died by signal 9 \(SIGKILL\), and so did the one"
        with pytest.raises(DataError, match=died + " before it, reading samples 77$"):
            reading.get(1)
        reading.cancel()
        reading.request(1, [(65,)])
        assert reading.get(1)[0].ids == (65,), "another one reads what can be read"


def test_one_that_was_killed_is_replaced(processes: ReadingProcesses) -> None:
    before = processes.pids
    os.kill(before[0], signal.SIGKILL)
    with prefetcher(processes) as reading:
        reading.request(1, [(n,) for n in range(8)])
        assert [loaded.ids for loaded in reading.get(1)] == [(n,) for n in range(8)]
    assert processes.pids[1] == before[1]


def test_a_cancelled_wait_ends(processes: ReadingProcesses) -> None:
    with prefetcher(processes) as reading:
        reading.request(1, [(1,)])
        reading.get(1)
        reading.request(2, [(2,)])
        reading.cancel()
        with pytest.raises((GroupBroken, ValueError)):
            reading.get(2)


@pytest.mark.parametrize("processes", [Draws100], indirect=True)
def test_draws_are_those_of_a_thread(processes: ReadingProcesses) -> None:
    samples = collated(Draws100(), None)
    wanted = [(3, 4), (5, 6), (103, 4)]
    with Prefetcher(samples, draws=Draws(lambda: 7)) as reading:
        reading.request(1, wanted)
        alone = [loaded.data for loaded in reading.get(1)]
    with Prefetcher(samples, others=processes) as reading:
        reading.request(1, wanted[::-1])
        others = [loaded.data for loaded in reading.get(1)][::-1]
    assert all(map(torch.equal, alone, others))
    assert not torch.equal(alone[0][0], alone[2][0]), "another epoch's differ"


def test_connections_of_the_parent_are_not_kept_open() -> None:
    """Who waits for this process's end hears of it, though processes of its go on for a moment."""
    mine, theirs = socket.socketpair()
    processes = ReadingProcesses(collated(Told(), None), 1, seed=7)
    try:
        assert processes.readers[0]((1,)).ids == (1,), "it has settled"
        mine.close()
        theirs.settimeout(5)
        assert theirs.recv(1) == b""
    finally:
        processes.close()
        theirs.close()


PARENT = """
import sys, time
sys.path.insert(0, {root!r})
from elastic_ft.data.reading_processes import ReadingProcesses
from elastic_ft.training.loader import collated

class Slow:
    def __len__(self): return 10
    def __getitem__(self, index):
        while index: sum(range(1000))  # in the middle of a sample
        return index

processes = ReadingProcesses(collated(Slow(), None), 3, seed=0)
processes.readers[0]((0,)), processes.readers[1]((0,))
print(*processes.pids, flush=True)
processes.readers[2]((1,))
"""


def test_none_outlives_its_parent() -> None:
    """Killed, it can end nobody: neither who waits nor who is in the middle of a sample."""
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", PARENT.format(root=root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 3
        parent.kill()
        parent.wait()
        began_s = time.monotonic()
        while any(is_there(pid) for pid in pids):
            assert time.monotonic() < began_s + GONE_S, pids
        print(f"gone after {time.monotonic() - began_s:.2f} s")


def is_there(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
