"""What the driver says of a GPU: NVIDIA's own bindings, a library in the place of the driver's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
UUID = "GPU-9f1c"
XID, DOUBLE_BIT = 8, 2  # nvmlEventTypeXidCriticalError, nvmlEventTypeDoubleBitEccError
WATCH = """
import logging, sys
logging.basicConfig(format="%(message)s")
from elastic_ft.worker import device_events
device_events.WAIT_MS = 50
thread = device_events.DeviceEvents(sys.argv[1], print)
thread.start()
thread.join(20)
print("watched" if thread.is_alive() else "over")
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a library that is found as the driver's."""
    folder = tmp_path_factory.mktemp("driver")
    out = folder / "libnvidia-ml.so.1"
    source = str(HERE / "fake_nvml.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(out), source], check=True)
    return folder


def watched(driver: Path | None, events: Path, uuid: str, *lines: str) -> Any:
    """A process that watches ``uuid`` while ``lines`` come from the driver."""
    told = {"FAKE_NVML_EVENTS": str(events), "FAKE_NVML_UUID": UUID}
    told |= {"LD_LIBRARY_PATH": str(driver)} if driver else {}
    os.mkfifo(events)
    reader = os.open(events, os.O_RDWR)
    try:
        os.write(reader, "".join(f"{line}\n" for line in lines).encode())
        return subprocess.run(
            [sys.executable, "-c", WATCH, uuid],
            env=os.environ | told | {"PYTHONPATH": str(Path.cwd())},
            capture_output=True,
            text=True,
            timeout=280,  # it imports torch
            check=True,
        )
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
    driver: Path, tmp_path: Path, lines: list[str], said: str
) -> None:
    """Of errors that a program makes, or that hit one process alone, only the log tells."""
    found = watched(driver, tmp_path / "events", UUID, *lines)
    first, last = found.stdout.splitlines()
    assert first.startswith(f"{UUID}: {said}") and last == "over"
    noted = [f"{UUID}: Xid {line.split()[1]}" for line in lines[:-1]]
    assert found.stderr.splitlines() == noted


def test_a_gpu_that_can_not_be_watched_is_a_line_in_the_log(driver: Path, tmp_path: Path) -> None:
    other = watched(driver, tmp_path / "other", "GPU-0000")
    assert other.stdout.splitlines() == ["over"]
    assert "GPU-0000 is not watched for errors of its own: NVML: Not Found" in other.stderr
    none = watched(None, tmp_path / "none", UUID)
    assert none.stdout.splitlines() == ["over"] and "is not watched" in none.stderr
