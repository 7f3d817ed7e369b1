"""A proxy in front of a real S3 server that does to requests what networks and stores do.

    with ObjectStoreProxy("http://127.0.0.1:8333") as proxy:
        os.environ["AWS_ENDPOINT_URL"] = proxy.endpoint
        proxy.set(StoreFault("busy", probability=0.5, seed=3))
        ...
        proxy.set()  # healed

Plain HTTP/1.1, and the Host header goes on as it came: signatures stay valid. Each request suffers
at most one fault, the first that matches; which of them do is drawn from the fault's seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal, get_args
from urllib.parse import urlsplit

FaultKind = Literal[
    "busy",  # 503 SlowDown
    "revoked",  # 403: the keys are not valid any more
    "no_bucket",  # 404 NoSuchBucket
    "stall",  # the request is taken, and nothing comes back until the fault is lifted
    "slow",  # both ways at bytes_per_s
    "reset",  # the connection is reset half-way through the request's body, or the answer's
    "truncate",  # the answer's body ends half-way, the connection with it
    "corrupt_up",  # one bit of the request's body is flipped
    "corrupt_down",  # one bit of the answer's body is flipped
    "lost_ack",  # the server does what it was asked, and its answer is lost
]

ANSWERS = {
    "busy": (503, "Service Unavailable", "SlowDown"),
    "revoked": (403, "Forbidden", "InvalidAccessKeyId"),
    "no_bucket": (404, "Not Found", "NoSuchBucket"),
}
NEED_A_BODY = {"corrupt_up": ("PUT", "POST"), "corrupt_down": ("GET",), "truncate": ("GET",)}
PIECE_BYTES = 1 << 16
HEAD_BYTES_MAX = 1 << 16
STALL_POLL_S = 0.02
START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class StoreFault:
    """What happens to which requests.

    probability: that a matching request suffers it. count: of requests that do, at most; None:
    all. methods: matching HTTP methods; empty: all that the fault can happen to. path: a regular
    expression that is found in the request's path and query. seed: of the draws.
    """

    kind: FaultKind
    probability: float = 1.0
    count: int | None = None
    methods: tuple[str, ...] = ()
    path: str = ""
    seed: int = 0
    bytes_per_s: float = 1e6  # "slow"

    def __post_init__(self) -> None:
        if self.kind not in get_args(FaultKind):
            raise ValueError(f"kind: expected one of {get_args(FaultKind)}, found {self.kind!r}")
        if not 0 <= self.probability <= 1:
            raise ValueError(f"probability: expected 0 to 1, found {self.probability}")


@dataclass(slots=True)
class _Armed:
    fault: StoreFault
    draws: random.Random
    fired: int = 0

    def hits(self, method: str, path: str) -> bool:
        fault = self.fault
        methods = fault.methods or NEED_A_BODY.get(fault.kind, ())
        if methods and method not in methods:
            return False
        if fault.count is not None and self.fired >= fault.count:
            return False
        if not re.search(fault.path, path) or self.draws.random() >= fault.probability:
            return False
        self.fired += 1
        return True


@dataclass(slots=True)
class _Head:
    """The first line and the headers of a request or an answer."""

    line: str
    headers: list[tuple[str, str]] = field(default_factory=list)

    def get(self, name: str) -> str:
        return next((v for k, v in self.headers if k.lower() == name), "")

    def without(self, name: str) -> bytes:
        kept = [f"{k}: {v}" for k, v in self.headers if k.lower() != name]
        return ("\r\n".join([self.line, *kept]) + "\r\n\r\n").encode("latin-1")

    @property
    def nbytes(self) -> int:
        """Of the body; 0 where it is chunked or absent."""
        return int(self.get("content-length") or 0)


class _Reset(Exception):
    """The client's connection is to be reset."""


class ObjectStoreProxy:
    """Listens on a free local port, in a thread of its own.

    Attributes:
        endpoint: its URL, for AWS_ENDPOINT_URL.
        fired: how many requests suffered each kind of fault.
        requests: how many came.
        downloaded: bytes of bodies answered to GETs, by path.
    """

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"target: expected http://host:port, found {target!r}")
        self._target = (parts.hostname, parts.port or 80)
        self._armed: list[_Armed] = []
        self._lock = threading.Lock()
        self.fired: Counter[str] = Counter()
        self.requests = 0
        self.downloaded: Counter[str] = Counter()
        self.endpoint = ""
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="object-store-proxy", daemon=True)

    def __enter__(self) -> ObjectStoreProxy:
        self._thread.start()
        if not self._ready.wait(START_TIMEOUT_S):
            raise RuntimeError("the object store proxy did not start")
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def set(self, *faults: StoreFault) -> None:
        """From now on these faults, and no others. From any thread."""
        with self._lock:
            self._armed = [_Armed(fault, random.Random(fault.seed)) for fault in faults]

    # ------------------------------------------------------------------- the server

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        tasks: set[asyncio.Task[None]] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self._connection(reader, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=HEAD_BYTES_MAX)
        self.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        try:
            while (request := await _read_head(reader)) is not None:
                up = up or await asyncio.open_connection(*self._target, limit=HEAD_BYTES_MAX)
                if not await self._exchange(request, reader, writer, *up):
                    break
        except _Reset:
            _reset(writer)
        except (OSError, EOFError, asyncio.LimitOverrunError, ValueError):
            pass  # either side hung up, or spoke no HTTP: both connections end
        finally:
            for each in [writer, up[1]] if up else [writer]:
                each.close()

    async def _exchange(
        self,
        request: _Head,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        up_reader: asyncio.StreamReader,
        up_writer: asyncio.StreamWriter,
    ) -> bool:
        """One request and its answer. Returns whether the connections may be used again."""
        method, path, _ = request.line.split(" ", 2)
        armed = self._draw(method, path)
        fault = armed.fault if armed else None
        kind = fault.kind if fault else None
        pace = fault.bytes_per_s if fault and kind == "slow" else None
        if request.get("expect").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if kind in ANSWERS:
            async for _ in _body(reader, request):
                pass
            writer.write(_answer(*ANSWERS[kind], with_body=method != "HEAD"))
            await writer.drain()
            return True
        if armed and kind == "stall":
            while armed in self._armed and not reader.at_eof():
                await asyncio.sleep(STALL_POLL_S)
            return False
        up_writer.write(request.without("expect"))
        cut = request.nbytes // 2 if kind == "reset" and request.nbytes else None
        flip = request.nbytes // 2 if kind == "corrupt_up" and request.nbytes else None
        await _send(_body(reader, request), up_writer, cut, flip, pace)
        answer = await _read_head(up_reader)
        while answer is not None and answer.line.split(" ")[1].startswith("1"):
            answer = await _read_head(up_reader)
        if answer is None:
            return False
        empty = method == "HEAD" or answer.line.split(" ")[1] in ("204", "304")
        body = _body(up_reader, _Head(answer.line) if empty else answer)
        if kind == "lost_ack":
            async for _ in body:
                pass
            raise _Reset
        half = None if empty else answer.nbytes // 2
        if method == "GET":
            self.downloaded[path.partition("?")[0]] += answer.nbytes
        writer.write(answer.without(""))
        if kind == "reset" or (kind == "truncate" and half):
            await _send(body, writer, half or 0, None, pace, quietly=kind == "truncate")
            return False
        await _send(body, writer, None, half if kind == "corrupt_down" and half else None, pace)
        return answer.get("connection").lower() != "close"

    def _draw(self, method: str, path: str) -> _Armed | None:
        with self._lock:
            self.requests += 1
            for armed in self._armed:
                if armed.hits(method, path):
                    self.fired[armed.fault.kind] += 1
                    return armed
        return None


# --------------------------------------------------------------------------------- HTTP


async def _read_head(reader: asyncio.StreamReader) -> _Head | None:
    """None where the connection ended between messages."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    line, *rest = raw.decode("latin-1").rstrip("\r\n").split("\r\n")
    headers = [(k, v.strip()) for k, _, v in (each.partition(":") for each in rest)]
    return _Head(line, headers)


async def _body(reader: asyncio.StreamReader, head: _Head) -> AsyncIterator[bytes]:
    """The bytes of a body as they are on the wire, chunk sizes included."""
    if head.get("transfer-encoding").lower() == "chunked":
        while True:
            line = await reader.readuntil(b"\r\n")
            size = int(line.split(b";")[0], 16)
            yield line + await reader.readexactly(size + 2)
            if size == 0:
                return
    left = head.nbytes
    while left:
        piece = await reader.read(min(left, PIECE_BYTES))
        if not piece:
            raise EOFError
        left -= len(piece)
        yield piece


async def _send(
    body: AsyncIterator[bytes],
    writer: asyncio.StreamWriter,
    cut: int | None,
    flip: int | None,
    bytes_per_s: float | None,
    quietly: bool = False,
) -> None:
    """Passes a body on; ends it before byte ``cut``, flips a bit of byte ``flip``."""
    at = 0
    async for piece in body:
        if flip is not None and at <= flip < at + len(piece):
            damaged = bytearray(piece)
            damaged[flip - at] ^= 0x10
            piece = bytes(damaged)
        if cut is not None and at + len(piece) > cut:
            writer.write(piece[: cut - at])
            await writer.drain()
            break
        writer.write(piece)
        await writer.drain()
        if bytes_per_s is not None:
            await asyncio.sleep(len(piece) / bytes_per_s)
        at += len(piece)
    else:
        await writer.drain()
        if cut is None:
            return
    if not quietly:
        raise _Reset
    with contextlib.suppress(OSError):
        writer.write_eof()
        await writer.drain()


def _answer(status: int, reason: str, code: str, with_body: bool) -> bytes:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>Injected.</Message></Error>"
    lines = [
        f"HTTP/1.1 {status} {reason}",
        "Content-Type: application/xml",
        f"Content-Length: {len(body)}",
    ]
    return ("\r\n".join(lines) + "\r\n\r\n" + (body if with_body else "")).encode()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Ends the connection with RST, not FIN."""
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
