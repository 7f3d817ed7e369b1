"""Objects that are files in a mount that may hang: each call by a process of its own, with a limit.

What can't be left behind as a thread can as a process (``mount_helper``). Changes of one file come
in their order: while one that was given up may yet take place, the next is not begun.
"""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from elastic_ft.storage import mount_helper
from elastic_ft.storage.kinds import PIECE_BYTES, Bytes

LEFT_MAX = 64  # calls of a process that have not come back: then others fail at once
LOOK_AGAIN_S = 0.05  # whether a call that was given up has ended
DRAIN_BYTES = 1 << 16
ROOT = str(Path(__file__).parents[2])
BEGIN = f"import sys; sys.path.insert(0, {ROOT!r}); from {mount_helper.__name__} import main; main"


class Mounted:
    """As ``local_files.Local``. Raises TimeoutError where the file system is silent for so long:
    a large object may take longer, as long as its bytes move."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)

    def put(self, key: str, parts: Sequence[Bytes], timeout_s: float) -> None:
        views = [memoryview(part).cast("B") for part in parts]
        nbytes = sum(view.nbytes for view in views)
        with self._call("put", key, timeout_s, changes=True, bytes=nbytes) as call:
            for view in views:
                call.send(view)
            call.answer()

    def create(self, key: str, data: bytes, timeout_s: float) -> bool:
        with self._call("create", key, timeout_s, changes=True, bytes=len(data)) as call:
            call.send(memoryview(data))
            return bool(call.answer()["found"])

    def get(self, key: str, start: int | None, end: int | None, timeout_s: float) -> Bytes:
        with self._call("read", key, timeout_s, start=start, end=end) as call:
            return call.receive(call.answer()["bytes"])

    def stream(self, key: str, start: int, end: int, silent_s: float) -> Iterator[bytes]:
        with self._call("read", key, silent_s, start=start, end=end) as call:
            left = call.answer()["bytes"]
            while left:
                piece = call.receive_some(min(left, PIECE_BYTES))
                left -= len(piece)
                yield piece

    def size(self, key: str, timeout_s: float) -> int:
        with self._call("size", key, timeout_s) as call:
            return int(call.answer()["found"])

    def list(self, prefix: str, timeout_s: float, after: str = "") -> list[str]:
        with self._call("list", prefix, timeout_s) as call:
            return [str(key) for key in call.answer()["found"]]

    def delete(self, key: str, timeout_s: float) -> None:
        with self._call("delete", key, timeout_s, changes=True) as call:
            call.answer()

    @contextmanager
    def _call(
        self, do: str, key: str, timeout_s: float, changes: bool = False, **more: Any
    ) -> Iterator[_Call]:
        name = f"{self._root}/{key}" if changes else ""
        call = _calls.begin(name, timeout_s)
        try:
            call.ask({"do": do, "root": self._root, "key": key, **more})
            yield call
        except BaseException:
            call.give_up()
            raise
        finally:
            _calls.end(call)


class _Call:
    """Attributes:
    changes: the file that it does; "" if it changes none.
    """

    def __init__(self, number: int, line: socket.socket, helper: _Helper, changes: str) -> None:
        self.changes, self.is_left, self._answered = changes, False, False
        self._number, self._line, self._helper = number, line, helper

    def ask(self, what: dict[str, Any]) -> None:
        with self._waiting():
            mount_helper.send_message(self._line, what)

    def send(self, content: memoryview) -> None:
        try:
            with self._waiting():
                while content.nbytes:
                    content = content[self._line.send(content[:PIECE_BYTES]) :]
        except ConnectionError:  # it has ended before it has read all: it says why
            self.answer()
            raise

    def answer(self) -> dict[str, Any]:
        """Raises what the other process met."""
        with self._waiting():
            found = mount_helper.receive_message(self._line)
        self._answered = True
        if "error" in found:
            raise OSError(*found["error"])
        return found

    def receive_some(self, most: int) -> bytes:
        """What there is, as soon as there is something."""
        with self._waiting():
            if not (piece := self._line.recv(most)):
                raise ConnectionResetError(mount_helper.ENDED)
            return piece

    def receive(self, nbytes: int) -> bytearray:
        with self._waiting():
            return mount_helper.receive_bytes(self._line, nbytes)

    def give_up(self) -> None:
        """Whatever it has not done it does not do, unless that is done by the kernel already."""
        if not (self._answered and self.changes):  # with its answer all is done
            self._helper.end(self._number)
            self.is_left = True

    def is_over(self) -> bool:
        """Of one that was given up: its process has ended, and changes nothing any more."""
        self._line.setblocking(False)
        try:
            while self._line.recv(DRAIN_BYTES):
                pass
        except BlockingIOError:
            return False
        except OSError:
            pass
        self._line.close()
        return True

    def close(self) -> None:
        self._line.close()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            waited_s = self._line.gettimeout()
            raise TimeoutError(f"the file system has not answered for {waited_s:.1f} s") from None


class _Calls:
    """Of this process."""

    def __init__(self) -> None:
        self._news = threading.Condition()  # guards all
        self._numbers = itertools.count()
        self._changing: dict[str, _Call] = {}  # by file
        self._left: list[_Call] = []
        self._helper: _Helper | None = None

    def begin(self, changes: str, timeout_s: float) -> _Call:
        """Once those before it that change the same file are over. Raises TimeoutError."""
        until_s = time.monotonic() + timeout_s
        with self._news:
            self._forget_those_over()
            if len(self._left) >= LEFT_MAX:
                raise TimeoutError(f"{LEFT_MAX} calls before this one have not come back")
            while changes and changes in self._changing:
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError("the change before this one has not come back")
                self._news.wait(min(left_s, LOOK_AGAIN_S))
                self._forget_those_over()
            call = self._started(changes, max(0.1, until_s - time.monotonic()))
            if changes:
                self._changing[changes] = call
            return call

    def _started(self, changes: str, timeout_s: float) -> _Call:
        ours, theirs = socket.socketpair()
        ours.settimeout(timeout_s)
        number = next(self._numbers)
        with theirs:
            if self._helper is not None and not self._helper.start(number, theirs):
                self._helper.bury()
                self._helper = None
            if self._helper is None:
                self._helper = _Helper()
                self._helper.start(number, theirs)
        return _Call(number, ours, self._helper, changes)

    def end(self, call: _Call) -> None:
        with self._news:
            if call.is_left:
                self._left.append(call)
                return
            call.close()
            self._changing.pop(call.changes, None)
            self._news.notify_all()

    def _forget_those_over(self) -> None:
        still = []
        for call in self._left:
            if call.is_over():
                self._changing.pop(call.changes, None)
            else:
                still.append(call)
        self._left = still


class _Helper:
    """The process that forks one for each call."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            code = f"{BEGIN}({theirs.fileno()}, {os.getpid()})"
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for who waits
            )
        self._control = ours

    def start(self, number: int, line: socket.socket) -> bool:
        """False where it has ended."""
        try:
            socket.send_fds(self._control, [f"call {number}".encode()], [line.fileno()])
        except OSError:
            return False
        return True

    def end(self, number: int) -> None:
        with suppress(OSError):
            self._control.send(f"kill {number}".encode())

    def bury(self) -> None:
        """It has ended, or does so now."""
        self._control.close()
        self._process.kill()
        self._process.wait()


def _begin_anew() -> None:
    """In a forked process: helper and calls are its parent's."""
    global _calls
    _calls = _Calls()


_calls = _Calls()
os.register_at_fork(after_in_child=_begin_anew)
