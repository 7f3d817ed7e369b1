"""Processes that read samples for a training process, from before its first world to its end.

They know of no world: each is asked for micro-batches by their sample ids, so a new deal asks the
same processes for others. They are forked as the script prepares its loader, before there is a
process group, so that none has another's threads in the middle of anything; and they lay down what
they inherit of sockets and pipes, for a connection of a dead process must be seen to end.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import multiprocessing
import os
import pickle
import signal
import stat
import threading
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import psutil
import torch
import torch.multiprocessing  # tensors are sent by shared memory from here on

from elastic_ft.core.batches import SampleIds
from elastic_ft.data.draws import Draws
from elastic_ft.data.reading import Loaded, read_micro_batch
from elastic_ft.data.settings import Path, Settings, changed_settings, put_settings, settings_of
from elastic_ft.errors import DataError, one_line

log = logging.getLogger(__name__)
IDS_SHOWN = 4
WATCH_S = 0.5  # how often a process looks for its parent, where no pipe tells of its end
END_S = 1.0
SHARED_BYTES_MIN = 1 << 20  # of a tensor: a smaller one is copied, which costs no descriptor


class ReadingProcesses:
    """Args:
        dataset: with ``collate``.
        seed: of what samples draw from the global generators.
        context: "fork", if None. Another pickles the dataset, and imports the script anew.

    Attributes:
        readers: of each process.
        made_with: the dataset's settings as the processes were made.
    """

    def __init__(
        self, dataset: Any, count: int, seed: int, context: BaseContext | None = None
    ) -> None:
        made: Any = context or multiprocessing.get_context("fork")
        self.made_with = settings_of(dataset)
        self.readers = [ReadingProcess(made, n, dataset, seed) for n in range(count)]

    @property
    def pids(self) -> list[int]:
        return [reader.pid for reader in self.readers]

    @property
    def own_settings(self) -> frozenset[Path]:
        """That reading itself has changed, in any of them."""
        return frozenset[Path]().union(*(reader.own_settings for reader in self.readers))

    def end_stopped(self) -> None:
        """Whoever was stopped (SIGSTOP) answers nobody: it dies, and is replaced as such."""
        for reader in self.readers:
            reader.end_stopped()

    def set(self, settings: Settings) -> None:
        """Of the dataset, those that were changed: for what is read from now on."""
        for reader in self.readers:
            reader.settings = settings

    def close(self) -> None:
        """Ends the processes, whatever they read."""
        for reader in self.readers:
            reader.close()


class ReadingProcess:
    """Called with sample ids, by one thread at a time, it returns the micro-batch, or raises what
    the dataset raises. A process that dies is replaced by another, which is asked the same; where
    that dies, too, DataError.

    Attributes:
        settings: of the dataset, since they were changed.
        own_settings: that reading itself has changed.
    """

    def __init__(self, context: Any, number: int, dataset: Any, seed: int) -> None:
        self._context, self._of = context, (dataset, seed)
        self._name, self._lock, self._closed = f"data-{number}", threading.Lock(), False
        self.settings: Settings = {}
        self._told: Settings = {}  # to the process that runs
        self.own_settings: frozenset[Path] = frozenset()
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
        answer = self._answer(wanted)
        if isinstance(answer, Exception):  # of any kind: outside of what takes one for its death
            raise answer
        return answer

    def _answer(self, wanted: SampleIds) -> Loaded | Exception:
        try:
            return self._ask(wanted)
        except (EOFError, OSError) as error:
            check_descriptors(error)
            log.warning("%s; another one reads on", self._end_in_words())
        with self._lock:
            if self._closed:
                raise DataError("the processes that read samples have ended")
            self._end.close()
            self._process, self._end = self._start()
            self._told = {}
        try:
            return self._ask(wanted)
        except (EOFError, OSError) as error:
            raise DataError(
                f"{self._end_in_words()}, and so did the one before it, reading samples "
                f"{', '.join(map(str, wanted[:IDS_SHOWN]))}"
            ) from error

    def _ask(self, wanted: SampleIds) -> Loaded | Exception:
        settings = self.settings
        self._end.send((wanted, settings if settings is not self._told else {}))
        answer: tuple[Loaded, frozenset[Path]] | Exception = self._end.recv()
        if isinstance(answer, Exception):  # one of these settings may be why
            return answer
        self._told = settings
        self.own_settings |= answer[1]
        return answer[0]

    def _end_in_words(self) -> str:
        self._process.join(END_S)
        return f"the data's process {self.pid} has died {_by(self._process.exitcode)}"

    def end_stopped(self) -> None:
        with self._lock, contextlib.suppress(psutil.NoSuchProcess):
            if not self._closed and psutil.Process(self.pid).status() == psutil.STATUS_STOPPED:
                self._process.kill()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._process.kill()
        self._process.join(END_S)
        self._end.close()


def check_descriptors(error: BaseException) -> None:
    """Raises DataError where it is this process that could not take what it was sent."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        raise DataError(
            f"what the data's processes send can't be taken: {error.strerror}"
        ) from error


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
    reads = _Reads(dataset, seed)
    while True:
        wanted, settings = end.recv()
        try:
            end.send_bytes(_packed((reads.read(wanted, settings), reads.own)))
        except (BrokenPipeError, ConnectionError):
            return
        except Exception as error:  # the user's dataset may raise anything; the parent raises it
            end.send(_carried(error))


class _Reads:
    """What reading itself sets stays as it is here: it belongs to what the dataset has open.

    Attributes:
        own: that.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._draws = dataset, Draws(lambda: seed)
        self.own: frozenset[Path] = frozenset()

    def read(self, wanted: SampleIds, settings: Settings) -> Loaded:
        """Raises whatever the dataset does; DataError for settings of what it has not."""
        dataset = self._dataset
        put_settings(dataset, {p: value for p, value in settings.items() if p not in self.own})
        before = settings_of(dataset)
        try:
            return read_micro_batch(dataset, dataset.collate, self._draws, wanted)
        finally:
            self.own |= changed_settings(before, settings_of(dataset))


class _Packing(ForkingPickler):
    """Shares large tensors with the parent, a descriptor for each, and copies all others."""

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is not torch.Tensor or not _is_small(thing):
            return NotImplemented
        raw = thing.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (raw, thing.dtype, tuple(thing.shape))


def _is_small(tensor: torch.Tensor) -> bool:
    is_plain = tensor.layout is torch.strided and tensor.device.type == "cpu"
    is_plain = is_plain and not (tensor.is_complex() or tensor.is_quantized or tensor.requires_grad)
    return is_plain and tensor.numel() * tensor.element_size() < SHARED_BYTES_MIN


def _tensor(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    made = torch.empty(shape, dtype=dtype)
    if raw:
        made.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    return made


def _packed(answer: tuple[Loaded, frozenset[Path]]) -> memoryview:
    file = io.BytesIO()
    _Packing(file, pickle.HIGHEST_PROTOCOL).dump(answer)
    return file.getbuffer()


def _carried(error: Exception) -> Exception:
    """The error, or what it says, where it can't be carried."""
    try:
        again = pickle.loads(pickle.dumps(error))  # our own process's: made here, of the user's
        if type(again) is type(error) and str(again) == str(error):
            return error
    except Exception:  # (a class that can't be made of its own arguments)
        pass
    return DataError(f"reading a sample raised {one_line(error)}")
