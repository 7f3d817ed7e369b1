"""Mounts of this machine that hang, really: a frozen disk, and a program that never answers.

Needs root. No such mount outlives its test: who made it ends it; if the test's process is killed,
or hangs there itself, a watchdog does.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

DISK_BYTES = 64 << 20
COMMAND_S = 60
FORCE, DETACH = 1, 2  # of umount2
LIBC = ctypes.CDLL(None, use_errno=True)
HANGS_MAX_S = 170  # less than a test has
WATCHDOG = """
import ctypes, os, subprocess, sys, time
parent, point, until_s = int(sys.argv[1]), sys.argv[2], time.monotonic() + float(sys.argv[3])
print(flush=True)
while os.getppid() == parent and time.monotonic() < until_s:
    time.sleep(0.2)
subprocess.run(["fsfreeze", "-u", point], stderr=subprocess.DEVNULL)
ctypes.CDLL(None).umount2(point.encode(), 3)
"""


def _unmount(point: Path) -> None:
    assert LIBC.umount2(str(point).encode(), FORCE | DETACH) == 0, os.strerror(ctypes.get_errno())


def _may_mount() -> bool:
    """Tried: a container's root may see all that and be refused."""
    tools = ("mkfs.ext4", "losetup", "mount", "fsfreeze")
    if os.geteuid() != 0 or not Path("/dev/fuse").exists() or not all(map(shutil.which, tools)):
        return False
    if subprocess.run(["losetup", "-f"], capture_output=True, timeout=COMMAND_S).returncode:
        return False
    with tempfile.TemporaryDirectory() as folder:
        if LIBC.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, None) != 0:
            return False
        _unmount(Path(folder))
    return True


needs_root = pytest.mark.skipif(
    not _may_mount(),
    reason="mounts file systems: needs root that may, loop devices and /dev/fuse",
)


class Disk:
    """An ext4 in a file. Frozen, what writes to it hangs, and can't be killed; reads go on."""

    def __init__(self, point: Path) -> None:
        self.point = point

    def freeze(self) -> None:
        run("fsfreeze", "-f", self.point)

    def thaw(self) -> bool:
        """Whether it was frozen."""
        command = ["fsfreeze", "-u", self.point]
        done = subprocess.run(command, stderr=subprocess.DEVNULL, timeout=COMMAND_S)
        return done.returncode == 0


@contextmanager
def disk(folder: Path) -> Iterator[Disk]:
    image, point = folder / "image", folder / "disk"
    point.mkdir()
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    run("mkfs.ext4", "-q", image)
    with _watched(point):
        run("mount", "-o", "loop", image, point)
        mounted = Disk(point)
        try:
            yield mounted
        finally:
            mounted.thaw()
            _unmount(point)


@contextmanager
def silent(folder: Path) -> Iterator[Path]:
    """A file system of a program that never answers: whatever looks there hangs."""
    point = folder / "silent"
    point.mkdir()
    device = os.open("/dev/fuse", os.O_RDWR)
    with _watched(point):
        options = f"fd={device},rootmode=40000,user_id=0,group_id=0"
        done = LIBC.mount(b"silent", str(point).encode(), b"fuse", 0, options.encode())
        assert done == 0, os.strerror(ctypes.get_errno())
        try:
            yield point
        finally:
            _unmount(point)
            os.close(device)


def run(*command: object) -> None:
    subprocess.run([*map(str, command)], check=True, timeout=COMMAND_S)


@contextmanager
def _watched(point: Path) -> Iterator[None]:
    command = [sys.executable, "-I", "-S", "-c", WATCHDOG, str(os.getpid()), str(point)]
    command.append(str(HANGS_MAX_S))
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as watchdog:
        assert watchdog.stdout is not None
        watchdog.stdout.readline()  # it watches
        try:
            yield
        finally:
            watchdog.kill()
