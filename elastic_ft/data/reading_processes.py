"""Processes that read samples for a training process, from before its first world to its end.

They know of no world: each is asked for micro-batches by their sample ids, so a new deal asks the
same processes for others. They are forked as the script prepares its loader, before there is a
process group, so that none has another's threads in the middle of anything; and they lay down what
they inherit of sockets and pipes, for a connection of a dead process must be seen to end.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import stat
import threading
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from typing import Any, NoReturn, cast

import torch
import torch.multiprocessing  # tensors are sent by shared memory from here on

from elastic_ft.core.batches import SampleIds
from elastic_ft.data.draws import Draws
from elastic_ft.data.reading import Loaded, read_micro_batch
from elastic_ft.errors import DataError
from elastic_ft.models.imports import one_line

log = logging.getLogger(__name__)
IDS_SHOWN = 4
WATCH_S = 0.5  # how often a process looks for its parent, where no pipe tells of its end
END_S = 1.0


class ReadingProcesses:
    """Args:
        dataset: with ``collate``.
        seed: of what samples draw from the global generators.
        context: "fork", if None. Another pickles the dataset, and imports the script anew.

    Attributes:
        readers: of each process.
    """

    def __init__(
        self, dataset: Any, count: int, seed: int, context: BaseContext | None = None
    ) -> None:
        made: Any = context or multiprocessing.get_context("fork")
        self.readers = [ReadingProcess(made, n, dataset, seed) for n in range(count)]

    @property
    def pids(self) -> list[int]:
        return [reader.pid for reader in self.readers]

    def close(self) -> None:
        """Ends the processes, whatever they read."""
        for reader in self.readers:
            reader.close()


class ReadingProcess:
    """Called with sample ids, by one thread at a time, it returns the micro-batch, or raises what
    the dataset raises. A process that dies is replaced by another, which is asked the same; where
    that dies, too, DataError.
    """

    def __init__(self, context: Any, number: int, dataset: Any, seed: int) -> None:
        self._context, self._of = context, (dataset, seed)
        self._name, self._lock, self._closed = f"data-{number}", threading.Lock(), False
        self._process, self._end = self._start()

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def _start(self) -> tuple[Any, Connection]:
        own, theirs = self._context.Pipe()
        forked = self._context.get_start_method() == "fork"
        process = self._context.Process(
            target=_serve,
            args=(theirs, *self._of, os.getpid() if forked else None),
            name=self._name,
            daemon=True,
        )
        process.start()
        theirs.close()
        return process, own

    def __call__(self, wanted: SampleIds) -> Loaded:
        try:
            return self._ask(wanted)
        except (EOFError, OSError):
            log.warning("%s; another one reads on", self._end_in_words())
        with self._lock:
            if self._closed:
                raise DataError("the processes that read samples have ended")
            self._end.close()
            self._process, self._end = self._start()
        try:
            return self._ask(wanted)
        except (EOFError, OSError) as error:
            raise DataError(
                f"{self._end_in_words()}, and so did the one before it, reading samples "
                f"{', '.join(map(str, wanted[:IDS_SHOWN]))}"
            ) from error

    def _ask(self, wanted: SampleIds) -> Loaded:
        self._end.send(wanted)
        answer = self._end.recv()
        if isinstance(answer, Loaded):
            return answer
        raise cast("Exception", answer)

    def _end_in_words(self) -> str:
        self._process.join(END_S)
        return f"the data's process {self.pid} has died {_by(self._process.exitcode)}"

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._process.kill()
        self._process.join(END_S)
        self._end.close()


def _by(code: int | None) -> str:
    if code is None or code >= 0:
        return f"with exit code {code}"
    return f"by signal {-code} ({signal.Signals(-code).name})"


def _serve(end: Connection, dataset: Any, seed: int, parent: int | None) -> NoReturn:
    """Until the parent has ended. ``parent``: its pid, if this was forked of it."""
    try:
        with contextlib.suppress(EOFError, OSError):
            _settle(end, parent)
            _answer(end, dataset, seed)
    finally:
        os._exit(0)  # nothing that the parent is to do at its end


def _settle(end: Connection, parent: int | None) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    above = multiprocessing.parent_process()
    assert above is not None
    if parent is not None:
        _lay_down({end.fileno(), int(above.sentinel)})
    watch = threading.Thread(target=_watch, args=(int(above.sentinel), parent), daemon=True)
    watch.start()
    torch.set_num_threads(1)


def _lay_down(kept: set[int]) -> None:
    """Has inherited sockets and pipes lead nowhere; their numbers stay taken, as objects that have
    them may close them yet."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
        if number <= 2 or number in kept:
            continue
        with contextlib.suppress(OSError):  # the listing's own
            mode = os.fstat(number).st_mode
            if stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode):
                os.dup2(nowhere, number, inheritable=False)


def _watch(sentinel: int, parent: int | None) -> None:
    """Ends this process with its parent, in the middle of a sample, too."""
    while not wait([sentinel], WATCH_S) and parent in (None, os.getppid()):
        pass
    os._exit(0)


def _answer(end: Connection, dataset: Any, seed: int) -> None:
    draws = Draws(lambda: seed)
    while True:
        wanted = end.recv()
        try:
            end.send(read_micro_batch(dataset, dataset.collate, draws, wanted))
        except (BrokenPipeError, ConnectionError):
            return
        except Exception as error:  # the user's dataset may raise anything; the parent raises it
            end.send(_carried(error))


def _carried(error: Exception) -> Exception:
    """The error, or what it says, where it can't be carried."""
    try:
        again = pickle.loads(pickle.dumps(error))  # our own process's: made here, of the user's
        if type(again) is type(error) and str(again) == str(error):
            return error
    except Exception:  # (a class that can't be made of its own arguments)
        pass
    return DataError(f"reading a sample raised {type(error).__name__}: {one_line(error)}")
