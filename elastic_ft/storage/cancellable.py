"""A store whose calls another thread can break off, whatever filesystem is under it.

No client can be told to stop waiting, and a mounted folder even less. So each call runs in a thread
of its own; once the store is closed, who waits for it goes on at once and that thread is left
behind: what it still receives is dropped, and it ends with the next piece, or its own deadline.
In a mount that hangs it does not end: of one URL LEFT_MAX are left, then calls fail at once until
some come back.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from elastic_ft.storage.backends import backend_of
from elastic_ft.storage.kinds import Backend, Bytes
from elastic_ft.storage.store import Store

LEFT_MAX = 256  # more than a generation breaks off at once
GRACE_S = 1.0  # beyond its deadline, for a filesystem to say itself what is wrong


class Closed(Exception):
    """The store was closed from another thread."""


class CancellableStore(Store):
    """As Store. ``close``, from any thread, ends its calls, running and later: StoreFailed; and
    whoever rests before one.

    Args:
        moved: told of bytes read, as they come, from any thread.
    """

    def __init__(
        self, url: str, deadline_s: float = 60, moved: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        backend, clean_url = backend_of(url)
        self._calls = Calls(backend, moved, clean_url)
        super().__init__(clean_url, self._calls, deadline_s)

    def close(self) -> None:
        self._calls.close()

    def break_off(self) -> None:
        """As ``close``, of the calls that run now alone. From any thread."""
        self._calls.break_off()

    def rest(self, pause_s: float) -> None:
        self._calls.closed.wait(pause_s)


class Calls:
    """A backend each of whose calls ends by its deadline, or as soon as it is closed."""

    def __init__(self, backend: Backend, moved: Callable[[int], None], url: str) -> None:
        self._backend, self._moved, self._url = backend, moved, url
        self._lock = threading.Lock()
        self._waiting: set[_Answers] = set()
        self.closed = threading.Event()

    def close(self) -> None:
        with self._lock:
            self.closed.set()
        self.break_off()

    def break_off(self) -> None:
        with self._lock:
            waiting = tuple(self._waiting)
        for answers in waiting:
            answers.put(Closed("by another thread"))

    def put(self, key: str, parts: Sequence[Bytes], timeout_s: float) -> None:
        self._call(lambda: self._backend.put(key, parts, timeout_s), timeout_s)

    def create(self, key: str, data: bytes, timeout_s: float) -> bool:
        return bool(self._call(lambda: self._backend.create(key, data, timeout_s), timeout_s))

    def get(self, key: str, start: int | None, end: int | None, timeout_s: float) -> Bytes:
        found: Bytes = self._call(lambda: self._backend.get(key, start, end, timeout_s), timeout_s)
        self._moved(len(found))
        return found

    def stream(self, key: str, start: int, end: int, silent_s: float) -> Iterator[Bytes]:
        for piece in self._each(lambda: self._backend.stream(key, start, end, silent_s), silent_s):
            self._moved(len(piece))
            yield piece

    def size(self, key: str, timeout_s: float) -> int:
        return int(self._call(lambda: self._backend.size(key, timeout_s), timeout_s))

    def list(self, prefix: str, timeout_s: float, after: str = "") -> list[str]:
        return list(self._call(lambda: self._backend.list(prefix, timeout_s, after), timeout_s))

    def delete(self, key: str, timeout_s: float) -> None:
        self._call(lambda: self._backend.delete(key, timeout_s), timeout_s)

    def _call(self, work: Callable[[], Any], timeout_s: float) -> Any:
        (result,) = self._each(lambda: iter([work()]), timeout_s)
        return result

    def _each(self, work: Callable[[], Iterator[Any]], silent_s: float) -> Iterator[Any]:
        """What ``work`` yields, in a thread of its own. Raises what it raises; Closed; TimeoutError
        where nothing has come for ``silent_s`` and a moment."""
        answers: _Answers = queue.SimpleQueue()

        def run() -> None:
            try:
                for item in work():
                    answers.put((item,))
                    if answers not in self._waiting:
                        return
                answers.put(None)
            except BaseException as error:
                answers.put(error)

        with self._registered(answers), _left_behind.counted(self._url, run):
            while (answer := _next(answers, silent_s)) is not None:
                if isinstance(answer, BaseException):
                    raise answer
                yield answer[0]

    @contextlib.contextmanager
    def _registered(self, answers: _Answers) -> Iterator[None]:
        with self._lock:
            if self.closed.is_set():
                raise Closed("by another thread")
            self._waiting.add(answers)
        try:
            yield
        finally:
            with self._lock:
                self._waiting.discard(answers)


class LeftBehind:
    """The threads that nobody waits for any more, by their store's URL."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count: Counter[str] = Counter()

    @contextlib.contextmanager
    def counted(self, url: str, run: Callable[[], None]) -> Iterator[None]:
        """``run`` goes on in a thread of its own meanwhile, and may go on after that. Raises
        TimeoutError where too many do."""
        is_over = is_left = False

        def run_counted() -> None:
            nonlocal is_over
            run()
            with self._lock:
                is_over = True
                self._count[url] -= is_left

        if self._count[url] >= LEFT_MAX:
            raise TimeoutError(f"{LEFT_MAX} calls before this one have not come back")
        threading.Thread(target=run_counted, name="store-call", daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                is_left = not is_over
                self._count[url] += is_left


_left_behind = LeftBehind()


def find_object(url: str, deadline_s: float) -> bool:
    """Whether the object is there, as this process sees the store. Raises StoreFailed."""
    root, _, key = url.rpartition("/")
    return CancellableStore(root, deadline_s).exists(key)


# An item in a tuple of its own, an exception instead, or None at the end.
_Answers = queue.SimpleQueue[tuple[Any] | BaseException | None]


def _next(answers: _Answers, silent_s: float) -> tuple[Any] | BaseException | None:
    try:
        return answers.get(timeout=silent_s + GRACE_S)
    except queue.Empty:
        raise TimeoutError(f"nothing came for {silent_s:.1f} s") from None
