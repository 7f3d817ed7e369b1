"""A mount that hangs, really: calls end in time, their process can end, and nothing comes late."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from elastic_ft.storage import mounted, mounts
from elastic_ft.storage.cancellable import CancellableStore
from elastic_ft.storage.kinds import FailureKind
from elastic_ft.storage.store import Store, StoreError, open_store
from tests.hanging import DISK_BYTES, Disk, disk, needs_root, silent
from tests.waiting import until

pytestmark = [needs_root, pytest.mark.timeout(120)]
HELPER = mounted.mount_helper.__name__
AWAY_S = 0.5
WRITES = """
import sys
from elastic_ft.storage.store import StoreError, open_store
try:
    open_store(sys.argv[1], deadline_s=0.5).put("late", b"1")
except StoreError as error:
    print(error.kind)
"""

# The kernel refuses hard links to this process and its children, as some file systems do to all.
LINKLESS = """
import ctypes, struct, sys, threading
from elastic_ft.storage.store import open_store
def rule(code, true, false, value):
    return struct.pack("HBBI", code, true, false, value)
refused, allowed = 0x00050001, 0x7FFF0000
filters = rule(0x20, 0, 0, 0) + rule(0x15, 1, 0, 265) + rule(0x15, 0, 1, 86)
filters += rule(0x06, 0, 0, refused) + rule(0x06, 0, 0, allowed)
kept = ctypes.create_string_buffer(filters)
program = struct.pack("HxxxxxxP", len(filters) // 8, ctypes.addressof(kept))
prctl = ctypes.CDLL(None).prctl
assert prctl(38, 1, 0, 0, 0) == 0 and prctl(22, 2, program, 0, 0) == 0
won = []
def create(n):
    if open_store(sys.argv[1]).put_if_absent("owners/1", str(n).encode()):
        won.append(n)
threads = [threading.Thread(target=create, args=[n]) for n in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(*won, open_store(sys.argv[1]).get("owners/1").decode())
"""


@pytest.fixture
def frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    with disk(tmp_path) as mount:
        monkeypatch.setenv(mounts.NAMED, str(mount.point))
        open_store(str(mount.point)).put("before", b"1")
        mount.freeze()
        yield mount


def away(store: Store) -> StoreError:
    """What a put says."""
    with pytest.raises(StoreError) as raised:
        store.put("key", b"1")
    return raised.value


def stuck() -> list[int]:
    """Processes that a call of this one has left in the mount."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if one.status() == psutil.STATUS_DISK_SLEEP:
                found.append(one.pid)
    return found


def test_a_write_ends_by_its_deadline_and_reads_go_on(frozen: Disk) -> None:
    store = open_store(str(frozen.point), deadline_s=AWAY_S)
    assert away(store).kind is FailureKind.UNREACHABLE
    assert "has not answered for" in str(away(open_store(f"{frozen.point}/other", deadline_s=0.5)))
    assert "has not come back" in str(away(store))
    assert store.get("before") == b"1"


def test_what_was_given_up_does_not_come_late(frozen: Disk) -> None:
    """Had it come after the one that follows, this would be undone."""
    store = open_store(str(frozen.point), deadline_s=AWAY_S)
    away(store)
    frozen.thaw()
    store.deadline_s = 60.0
    store.put("key", b"2")
    until(lambda: not stuck())
    assert store.get("key") == b"2"
    assert store.list() == ["before", "key"]


def test_who_has_a_call_there_can_end(frozen: Disk) -> None:
    """A thread in such a call kept its process from ending, killed or not, until the disk came."""
    command = [sys.executable, "-c", WRITES, str(frozen.point)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert done.stdout.strip() == FailureKind.UNREACHABLE
    frozen.thaw()
    store = open_store(str(frozen.point))
    store.put("after", b"1")
    assert store.list() == ["after", "before"]


def test_calls_that_do_not_come_back_are_so_many_at_most(
    frozen: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounted, "LEFT_MAX", 2)
    for name in ("a", "b"):
        away(open_store(f"{frozen.point}/{name}", deadline_s=0.2))
    store = open_store(str(frozen.point), deadline_s=AWAY_S)
    assert "2 calls before this one have not come back" in str(away(store))
    frozen.thaw()
    store.deadline_s = 60.0
    until(lambda: not stuck())
    store.put("key", b"2")


def test_a_call_that_is_broken_off_comes_before_the_next_one(frozen: Disk) -> None:
    store = CancellableStore(str(frozen.point), 60)
    first = threading.Thread(target=away, args=[store])
    first.start()
    until(stuck)
    store.break_off()
    first.join(30)
    assert not first.is_alive()
    threading.Timer(0.2, frozen.thaw).start()
    store.put("key", b"2")
    assert store.get("key") == b"2"


def test_a_read_ends_by_its_deadline(tmp_path: Path) -> None:
    with silent(tmp_path) as point:
        store = open_store(str(point), deadline_s=AWAY_S)
        for call in (store.list, lambda: store.get("key"), lambda: store.delete("key")):
            with pytest.raises(StoreError) as raised:
                call()
            assert raised.value.kind is FailureKind.UNREACHABLE


def test_a_helper_that_is_killed_is_followed_by_another(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(mounts.NAMED, str(tmp_path))
    store = open_store(str(tmp_path))
    store.put("key", b"1")
    for one in psutil.Process().children():
        if any(HELPER in part for part in one.cmdline()):
            one.kill()
            until(lambda one=one: one.status() == psutil.STATUS_ZOMBIE)
    assert store.get("key") == b"1"


def test_a_forked_process_has_a_helper_of_its_own(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(mounts.NAMED, str(tmp_path))
    open_store(str(tmp_path)).put("key", b"1")
    pid = os.fork()
    if not pid:
        code = 1
        try:
            store = open_store(str(tmp_path), deadline_s=30)
            store.put("forked", store.get("key"))
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert open_store(str(tmp_path)).list() == ["forked", "key"]


def test_private_files_are_for_their_owner(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(mounts.NAMED, str(tmp_path))
    store = open_store(str(tmp_path))
    for key in ("job.yaml", "segments/inbox.jsonl/1", "submission-1.pickle", "steps.jsonl"):
        store.put(key, b"1")
    modes = {key: (tmp_path / key).stat().st_mode & 0o077 for key in store.list()}
    assert [key for key, mode in modes.items() if mode] == ["steps.jsonl"]


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="names system calls by number")
@pytest.mark.parametrize("hangs", [False, True])
def test_without_hard_links_one_of_many_creates_an_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    monkeypatch.setenv(mounts.NAMED, str(tmp_path) if hangs else "")
    command = [sys.executable, "-c", LINKLESS, str(tmp_path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=100, check=True)
    winner, written = done.stdout.split()
    assert winner == written


def test_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While bytes are on their way to it, too."""
    with disk(tmp_path) as mount:
        monkeypatch.setenv(mounts.NAMED, str(mount.point))
        store = open_store(str(mount.point))
        with pytest.raises(StoreError, match="No space left on device"):
            store.put("large", bytes(2 * DISK_BYTES))
        assert store.list() == []
