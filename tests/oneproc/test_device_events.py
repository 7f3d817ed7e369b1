"""What the driver says of a GPU: NVIDIA's own bindings, a library in the place of the driver's."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
UUID = "GPU-9f1c"
XID, DOUBLE_BIT = 8, 2  # nvmlEventTypeXidCriticalError, nvmlEventTypeDoubleBitEccError
# One process imports torch, and for each line that it reads a fork of it watches a GPU.
WATCH = """
import json, logging, os, sys
logging.basicConfig(format="%(message)s", stream=sys.stdout)
from elastic_ft.worker import device_events
device_events.WAIT_MS = 50
for line in iter(sys.stdin.readline, ""):
    if (pid := os.fork()) == 0:
        uuid, events = json.loads(line)
        os.environ["FAKE_NVML_EVENTS"] = events
        thread = device_events.DeviceEvents(uuid, print)
        thread.start()
        thread.join(20)
        print("watched" if thread.is_alive() else "over", flush=True)
        os._exit(0)
    if os.waitpid(pid, 0)[1] == 0:
        print("next", flush=True)
"""
Watcher = subprocess.Popen[str]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a library that is found as the driver's."""
    folder = tmp_path_factory.mktemp("driver")
    out = folder / "libnvidia-ml.so.1"
    source = str(HERE / "fake_nvml.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(out), source], check=True)
    return folder


@contextlib.contextmanager
def watcher(driver: Path | None) -> Iterator[Watcher]:
    """A process that watches, again and again, what it finds as the driver's library."""
    told = {"FAKE_NVML_UUID": UUID, "PYTHONPATH": str(Path.cwd()), "PYTHONUNBUFFERED": "1"}
    told |= {"LD_LIBRARY_PATH": str(driver)} if driver else {}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    pipes |= {"stderr": subprocess.STDOUT}  # a traceback is a line that nobody expects
    with subprocess.Popen([sys.executable, "-c", WATCH], env=os.environ | told, **pipes) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(20) == 0


@pytest.fixture(scope="module")
def driven(driver: Path) -> Iterator[Watcher]:
    with watcher(driver) as process:
        yield process


def watched(process: Watcher, events: Path, uuid: str, *lines: str) -> list[str]:
    """What is said, on stdout and in the log, while ``lines`` come from the driver of ``uuid``."""
    assert process.stdin is not None and process.stdout is not None
    os.mkfifo(events)
    reader = os.open(events, os.O_RDWR)
    try:
        os.write(reader, "".join(f"{line}\n" for line in lines).encode())
        process.stdin.write(json.dumps([uuid, str(events)]) + "\n")
        process.stdin.flush()
        until_next = itertools.takewhile(lambda line: line != "next\n", process.stdout)
        return [line.rstrip("\n") for line in until_next]
    finally:
        os.close(reader)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([f"{XID} 31", f"{XID} 79"], "Xid 79, the GPU has fallen off the bus"),
        ([f"{XID} 13", f"{XID} 94", f"{XID} 119"], "Xid 119, the GPU's system processor"),
        ([f"{DOUBLE_BIT} 0"], "Xid 48, double bit ECC error"),
        (["lost"], "Xid 79, the GPU has fallen off the bus"),
    ],
    ids=str,
)
def test_a_gpu_that_can_be_used_no_more_is_told_of(
    driven: Watcher, tmp_path: Path, lines: list[str], said: str
) -> None:
    """Of errors that a program makes, or that hit one process alone, only the log tells."""
    *noted, first, last = watched(driven, tmp_path / "events", UUID, *lines)
    assert first.startswith(f"{UUID}: {said}") and last == "over"
    assert noted == [f"{UUID}: Xid {line.split()[1]}" for line in lines[:-1]]


def test_a_gpu_that_can_not_be_watched_is_a_line_in_the_log(
    driven: Watcher, tmp_path: Path
) -> None:
    line, last = watched(driven, tmp_path / "other", "GPU-0000")
    assert "GPU-0000 is not watched for errors of its own: NVML: Not Found" in line
    with watcher(None) as without:
        line, also_last = watched(without, tmp_path / "none", UUID)
    assert "is not watched" in line and last == also_last == "over"
