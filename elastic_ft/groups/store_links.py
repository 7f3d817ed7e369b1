"""TCP connections that another thread can cut: this process's sockets, and links to the store."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import hmac
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch.distributed as dist

from elastic_ft.transport.wire import Address

SPARE_TIMEOUT_S = 1.0  # one under way is worth waiting for so long
SEAL_BYTES = 32
SO_ATTACH_FILTER = 26  # of Linux; Python has no name for it
DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # one instruction for packets: return 0
TRIES = 2  # of a spare link: the first one may have to wait for the DNS, the second does not


@dataclass(frozen=True)
class Socket:
    fd: int
    inode: int
    local: Address
    peer: Address | None  # None: listening


def use_interface_of(address: str) -> None:
    """Gloo listens on the interface that has ``address``, unless the user has named another.

    By itself it takes the address that the machine's name resolves to: of a machine with several,
    or with none of its own in /etc/hosts, peers can't reach it there.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def inet_sockets() -> Iterator[Socket]:
    """This process's TCP sockets."""
    for entry in os.scandir("/proc/self/fd"):
        fd = int(entry.name)
        try:
            if not os.readlink(entry.path).startswith("socket:"):  # noqa: PTH115
                continue
            copy = socket.socket(fileno=os.dup(fd))
        except OSError:
            continue  # closed meanwhile
        with copy:
            if copy.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            try:
                listening = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                peer = None if listening else _address(copy.getpeername())
                local = _address(copy.getsockname())
                yield Socket(fd, os.fstat(copy.fileno()).st_ino, local, peer)
            except OSError:
                continue  # not connected


def _address(name: Any) -> Address:
    """IPv4 within IPv6 (torch connects so) as IPv4."""
    return name[0].removeprefix("::ffff:"), name[1]


def shut_down(found: Socket) -> None:
    """Ends the connection; whoever blocks on it is woken. The descriptor stays its owner's."""
    _do(found, lambda copy: copy.shutdown(socket.SHUT_RDWR))


def take_no_more(found: Socket) -> None:
    """Nobody can connect to the listener any more; what is connected stays so.

    It is not closed, as it is its owner's: the kernel drops what comes for it. Where the kernel has
    no such filters, all stays as it is.
    """
    program = ctypes.create_string_buffer(DROP_ALL, len(DROP_ALL))
    filters = struct.pack("HP", 1, ctypes.addressof(program))
    _do(found, lambda copy: copy.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, filters))


def _do(found: Socket, act: Callable[[socket.socket], None]) -> None:
    """Unless it was closed, or is not connected any more."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(found.fd)) as copy:
        if os.fstat(copy.fileno()).st_ino == found.inode:
            act(copy)


def serve_store(address: str, listener: socket.socket) -> dist.TCPStore:
    """A store that listens with ``listener``, its own from now on, which is at ``address``.

    By itself torch's listens everywhere, whatever it is told.
    """
    with listener:
        port = listener.getsockname()[1]
        return dist.TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            use_libuv=True,
            master_listen_fd=listener.detach(),
        )


class SealedStore(dist.Store):
    """A store whose values are this job's: each is sealed with its key and its place.

    torch's takes values from anyone. What it counts (``add``) is not sealed: a stranger can disturb
    who waits for that, as by deleting a value, and can't have anything read as ours. Gloo's threads
    and ours call this from C++ as well.
    """

    def __init__(self, store: dist.Store, key: bytes) -> None:
        super().__init__()
        self._store, self._key = store, key

    def set(self, name: str, value: str | bytes) -> None:
        plain = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(name, self._seal(name, plain) + plain)

    def get(self, name: str) -> bytes:
        """Raises ValueError where the value is of someone else."""
        sealed = self._store.get(name)
        seal, value = sealed[:SEAL_BYTES], sealed[SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._seal(name, value)):
            raise ValueError(f"what the store has as {name} was not put there by this job")
        return value

    def _seal(self, name: str, value: bytes) -> bytes:
        return hmac.digest(self._key, name.encode() + b"\0" + value, "sha256")

    def add(self, name: str, amount: int) -> int:
        return self._store.add(name, amount)

    def check(self, names: list[str]) -> bool:
        return self._store.check(names)

    def delete_key(self, name: str) -> bool:
        return self._store.delete_key(name)

    def num_keys(self) -> int:
        return self._store.num_keys()

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._store.set_timeout(timeout)

    def wait(self, names: list[str], timeout: datetime.timedelta | None = None) -> None:
        self._store.wait(names, *([] if timeout is None else [timeout]))


@dataclass(frozen=True)
class Link:
    """A client of the store, and the sockets to shut down when it must not block any longer."""

    store: dist.TCPStore
    sockets: tuple[Socket, ...]


class StoreLinks:
    """Links to one store: a fresh one for each generation, the next made beforehand.

    torch asks the DNS for the peer's name when it connects for the first time, sometimes again.
    Where the resolver is slow, or has gone with the network that just failed, that takes 10 s, and
    the connect fails for it: nobody may wait for that.

    Attributes:
        key: of this job and of this store, which seals what is put into it.
    """

    def __init__(self, address: tuple[str, int], timeout_s: float, key: bytes = b"") -> None:
        self.key = key
        self._address, self._timeout_s = address, timeout_s
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)  # an IP, as a rule: no DNS
        self._peers = {_address(name) for *_, name in found}
        self._changed = threading.Condition()
        self._spare: Link | None = None
        self._preparing = 0  # number of the connect under way in the background
        self._count = 0

    def take(self) -> Link:
        """The spare link, or else a new one. Blocks for at most the timeout; raises as torch."""
        with self._changed:
            self._changed.wait_for(lambda: not self._preparing, SPARE_TIMEOUT_S)
            spare, self._spare = self._spare, None
            self._preparing = 0  # of two connects at once, whose socket is whose can't be told
        return spare or self._connect()

    def prepare(self) -> None:
        """Makes the next link, in the background."""
        with self._changed:
            if self._spare is not None or self._preparing:
                return
            self._count += 1
            self._preparing = number = self._count
        threading.Thread(
            target=self._prepare, args=(number,), name="store-link", daemon=True
        ).start()

    def wait(self) -> None:
        """Until the link that is being made is there, or can't be: before anyone waits for us."""
        with self._changed:
            self._changed.wait_for(lambda: not self._preparing, TRIES * self._timeout_s)

    def _prepare(self, number: int) -> None:
        link = None
        for _ in range(TRIES):
            try:
                link = self._connect()
                break
            except RuntimeError:
                continue  # no spare, in the end: ``take`` tries itself, and says so if it fails
        with self._changed:
            if self._preparing == number:
                self._preparing = 0
                self._spare = link if link is not None and len(link.sockets) == 1 else None
                self._changed.notify_all()

    def _connect(self) -> Link:
        known = {s.inode for s in inet_sockets()}
        host, port = self._address
        timeout = datetime.timedelta(seconds=self._timeout_s)
        store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
        fresh = (s for s in inet_sockets() if s.inode not in known and s.peer in self._peers)
        return Link(store, tuple(fresh))
