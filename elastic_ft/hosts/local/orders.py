"""What a launcher is told and tells, and the sockets for it: one machine's, in a private folder.

Messages are those of ``transport.messages``, one a packet. Who may enter the folder (mode 0700) may
ask: the kernel checks that, nobody else does.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from elastic_ft.config import Job
from elastic_ft.faults import PointFault
from elastic_ft.transport.messages import Messages, encode
from elastic_ft.transport.tls import JobKey

SOCKET = "socket"
PACKET_BYTES = 1 << 20
SEND_S = 3.0  # for a launcher that forks to take what it is sent
BACKLOG = 64
PF_EXITING = 0x4  # of the kernel, among a task's flags
ENDED_KEPT = 100  # processes of a kind, whose end somebody may not have heard of

Role = Literal["controller", "watcher"]
Kind = Literal["worker", "keeper", "controller"]


@dataclass(frozen=True, slots=True)
class Forked:
    """A process that a launcher has forked, or taken over from another one.

    Attributes:
        name: used once in a run.
        ticks: when it began, as the kernel counts: with the pid that names it for good.
        gpu: the only one that it sees; None: whatever there is.
        code: as ``Popen.returncode``, of one that has ended; None where that is not known.
    """

    name: str
    kind: Kind
    node: str
    pid: int
    ticks: int
    gpu: str | None = None
    ended: bool = False
    code: int | None = None


@dataclass(frozen=True, slots=True)
class LocalRun:
    """A job on plain processes that nobody else owns: all that its controllers need to know.

    Attributes:
        nodes: name -> slots.
        log: where they write what nobody reads at a terminal.
    """

    job: Job
    out: str
    checkpoint_url: str
    nodes: dict[str, int]
    key: JobKey
    log: str
    faults: tuple[PointFault, ...] = ()
    accept_changes: bool = False


@dataclass(frozen=True, slots=True)
class Order:
    """For a launcher; the socket on which it is to listen comes with it.

    Attributes:
        folder: of its socket. It removes the folder when it ends.
        owner: a process with which all ends; None: the launcher is the run's.
        environment: of controllers; ``path``: of their and the workers' imports.
        run: with controllers that the launcher starts; None: the owner has one.
        forked: who is there already; ``nodes``: as the controller left them.
        in_charge: the controller among them.
    """

    folder: str
    owner: int | None = None
    environment: dict[str, str] = field(default_factory=dict)
    path: tuple[str, ...] = ()
    run: LocalRun | None = None
    forked: tuple[Forked, ...] = ()
    nodes: dict[str, Any] = field(default_factory=dict)
    in_charge: str = ""


@dataclass(frozen=True, slots=True)
class ForkedCall:
    """For a process that is forked for it; the file into which it pickles its answer comes along.

    Attributes:
        function: "module:name", to be called with ``job``.
        folder, path, environment: as they are where the answer is wanted.
    """

    function: str
    job: Job
    folder: str
    path: tuple[str, ...]
    environment: dict[str, str]


# ------------------------------------------------------------------------ to the launcher


@dataclass(frozen=True, slots=True)
class Attend:
    """The first message. ``environment``: of those that this one starts."""

    role: Role
    pid: int
    environment: dict[str, str] = field(default_factory=dict)
    path: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StartProcess:
    """``environment``: beside that of ``Attend``."""

    name: str
    kind: Kind
    node: str
    address: tuple[str, int]
    key: JobKey
    gpu: str | None = None
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KillProcess:
    name: str


@dataclass(frozen=True, slots=True)
class KeepNodes:
    """What the next controller is to know of the nodes."""

    nodes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ControllerLives:
    """Answered by ``LauncherLives``. ``trained``: a step was committed since it said so last."""

    trained: bool = False


@dataclass(frozen=True, slots=True)
class RunEnded:
    """How a controller ends that needs no successor: an exit code of ``elastic-ft``, and why."""

    code: int
    line: str = ""


@dataclass(frozen=True, slots=True)
class LeaveAlone:
    """The controller goes, and what runs is another's: the launcher stays until that has ended."""


@dataclass(frozen=True, slots=True)
class Interrupt:
    """From a watcher: the controller is to end the job in good order. Twice: at once."""


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """From a watcher, for the controller's host: what would happen to a node of a cluster."""

    what: Literal["kill", "add", "drain"]
    node: str
    deadline_s: float = 0.0  # unix, of a drain


# ---------------------------------------------------------------------- from the launcher


@dataclass(frozen=True, slots=True)
class ProcessTable:
    """The answer to an ``Attend``."""

    forked: tuple[Forked, ...]
    nodes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ProcessStarted:
    forked: Forked


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    forked: Forked


@dataclass(frozen=True, slots=True)
class LauncherLives:
    """To any controller, also one that has a successor: it must not take this launcher for hung."""


TO_WARM = Messages(Order, ForkedCall)
TO_LAUNCHER = Messages(
    Attend,
    StartProcess,
    KillProcess,
    KeepNodes,
    ControllerLives,
    RunEnded,
    LeaveAlone,
    Interrupt,
    NodeRequest,
)
FROM_LAUNCHER = Messages(
    ProcessTable, ProcessStarted, ProcessEnded, LauncherLives, RunEnded, NodeRequest
)


class Packets:
    """One end of a connection. Any thread may send, one receives."""

    def __init__(self, sock: socket.socket, kinds: Messages) -> None:
        self._socket, self._kinds = sock, kinds
        sock.settimeout(SEND_S)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any, *handles: int) -> bool:
        """False: the other end is gone, or takes nothing. ``handles``: open files, given away."""
        try:
            socket.send_fds(self._socket, [encode(message)], list(handles))
        except OSError:
            return False
        return True

    def receive(self, timeout_s: float) -> Any:
        """None: nothing came for so long. Raises EOFError."""
        return self._receive(timeout_s, 0)[0]

    def receive_with_handle(self) -> tuple[Any, int]:
        """Blocks for what comes with one open file. Raises EOFError."""
        message, handles = self._receive(None, 1)
        if not handles:
            raise EOFError("an order without its socket")
        return message, handles[0]

    def _receive(self, timeout_s: float | None, handles: int) -> tuple[Any, list[int]]:
        waiting = select.poll()
        try:
            waiting.register(self._socket, select.POLLIN)
            if not waiting.poll(None if timeout_s is None else timeout_s * 1000):
                return None, []
            content, found, _, _ = socket.recv_fds(self._socket, PACKET_BYTES, handles)
        except (OSError, ValueError) as error:
            raise EOFError(str(error)) from error
        if not content:
            raise EOFError("the other end is gone")
        return self._kinds.decode(content), list(found)

    def hang_up(self) -> None:
        """From any thread: who receives sees the end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


@contextlib.contextmanager
def _short(folder: Path) -> Iterator[str]:
    """A path to the folder's socket that is short enough, however deep the folder lies."""
    handle = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}/{SOCKET}"
    finally:
        os.close(handle)


def listen_in(folder: Path) -> socket.socket:
    """The folder is made, for its owner alone, if it is gone; an older socket is forgotten."""
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / SOCKET).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with _short(folder) as path:
        listener.bind(path)
    listener.listen(BACKLOG)
    return listener


def call_in(folder: Path) -> Packets:
    """Connects to the launcher whose folder it is, also while it still imports. Raises OSError."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        line.settimeout(SEND_S)
        with _short(folder) as path:
            line.connect(path)
    except BaseException:
        line.close()
        raise
    return Packets(line, FROM_LAUNCHER)


def is_readable(fd: int) -> bool:
    """To be read, or accepted."""
    now = select.poll()
    now.register(fd, select.POLLIN)
    return bool(now.poll(0))


# ---------------------------------------------------------------------------- processes


def _stat(pid: int) -> list[bytes]:
    """What the kernel tells of a process, its state first; nothing where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return []


def _has_ended(stat: list[bytes]) -> bool:
    return not stat or stat[0] in (b"Z", b"X")


def ticks_of(pid: int) -> int:
    """When a process began, as the kernel counts; 0 if there is none, or it has ended."""
    stat = _stat(pid)
    return 0 if _has_ended(stat) else int(stat[19])


def stands_still(pid: int) -> bool:
    """It stands still, SIGSTOPped."""
    return _stat(pid)[:1] == [b"T"]


def lives(process: Forked) -> bool:
    return not process.ended and process.pid > 0 and ticks_of(process.pid) == process.ticks


def is_ending(process: Forked) -> bool:
    """Its threads have begun to exit: what is sent to it from now on is not what ends it."""
    stat = _stat(process.pid)
    return _has_ended(stat) or bool(int(stat[6]) & PF_EXITING)


def number_of(name: str) -> int:
    """In the name of a process; -1 if there is none."""
    digits = name[len(name.rstrip("0123456789")) :]
    return int(digits) if digits else -1


def worth_telling(processes: Iterable[Forked]) -> tuple[Forked, ...]:
    """Of ``processes``, those that have ended in the order of their ends: who lives, and of each
    kind the last to end, of whose end somebody may not have heard, and the last by name: no name is
    used again."""
    everybody = list(processes)
    newest = {one.kind: one.name for one in sorted(everybody, key=lambda one: number_of(one.name))}
    told, ended = [], Counter[str]()
    for process in reversed(everybody):
        ended[process.kind] += process.ended
        is_late = ended[process.kind] <= ENDED_KEPT
        if not process.ended or is_late or newest[process.kind] == process.name:
            told.append(process)
    return tuple(reversed(told))


def has_ended_child(pid: int) -> bool:
    """One that ended at once is a zombie until it is waited for."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def kill_directly(process: Forked) -> None:
    """SIGKILLs it if it is still there, without its launcher."""
    if lives(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def end_in_words(process: Forked) -> str:
    if process.code is None:
        return "its process has ended"
    if process.code < 0:
        return f"killed by {signal.Signals(-process.code).name}"
    return f"exited with code {process.code}"
