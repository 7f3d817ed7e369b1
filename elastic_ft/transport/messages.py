"""What processes tell each other: typed messages as msgpack, [kind, fields].

What arrives is data: a kind that this end expects, with fields of the types that its class
declares (``core.typed``), or it is refused (MessageRefused), which ends the connection.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, is_dataclass
from typing import Any

import msgpack  # type: ignore[import-untyped]
from pydantic import BaseModel

from elastic_ft.core.typed import Decode, Undecodable, decoder, fields_of

MESSAGE_BYTES_MAX = 64 << 20
UNPACKED_BYTES_MAX = 256 << 20  # of a compressed part
COMPRESSED = 1  # msgpack's number for our kind of part


class MessageRefused(EOFError):
    """A message that is not what this end may be sent. Its connection is of no use any more."""


@dataclass(frozen=True, slots=True)
class Numbered:
    """A message that its sender keeps until it is acknowledged; it counts those, from 1."""

    number: int
    message: Any


class Packed:
    """A field of what is sent to everyone: packed and compressed once, and itself on arrival."""

    def __init__(self, value: Any) -> None:
        self.part = msgpack.ExtType(COMPRESSED, zlib.compress(pack(value), level=1))


class Encoded:
    """A message for several connections, made once."""

    def __init__(self, message: Any) -> None:
        self.body = encode(message)


def encode(message: Any) -> bytes:
    """Raises TypeError where a field holds what is no plain value."""
    if isinstance(message, Numbered):
        return pack([type(message.message).__name__, message.message, message.number])
    return pack([type(message).__name__, message])


def pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, default=_plain)
    return packed


def _plain(value: Any) -> Any:
    if isinstance(value, Packed):
        return value.part
    if is_dataclass(value):
        return fields_of(value)
    if isinstance(value, (frozenset, set)):
        return list(value)
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if callable(item := getattr(value, "item", None)):  # a number of numpy's or torch's
        return item()
    raise TypeError(f"{type(value).__name__} {repr(value)[:60]} is no plain value")


def unpack(data: bytes | bytearray | memoryview) -> Any:
    """Raises MessageRefused."""
    try:
        return msgpack.unpackb(data, ext_hook=_unpacked)
    except (ValueError, RecursionError) as error:  # all that msgpack raises are ValueErrors
        raise MessageRefused(f"no msgpack: {type(error).__name__} {str(error)[:80]}") from None


def _unpacked(code: int, data: bytes) -> Any:
    if code != COMPRESSED:
        raise ValueError(f"part of kind {code}")
    stream = zlib.decompressobj()
    try:
        plain = stream.decompress(data, UNPACKED_BYTES_MAX)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not stream.eof:
        raise ValueError("a compressed part that is too large, or torn")
    return msgpack.unpackb(plain)  # one inside another is no part of ours


class Messages:
    """The kinds of messages that one end of a connection may be sent.

    Args:
        kinds: data classes.
        bytes_max: of one message.
        numbered: whether they may be, [kind, fields, number].
    """

    def __init__(
        self, *kinds: type, bytes_max: int = MESSAGE_BYTES_MAX, numbered: bool = False
    ) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}
        self._decoders: dict[str, Decode] = {}
        self.bytes_max, self._numbered = bytes_max, numbered

    def has(self, kind: type) -> bool:
        return self._kinds.get(kind.__name__) is kind

    def decode(self, body: bytes | bytearray | memoryview) -> Any:
        """Raises MessageRefused, and nothing else, whatever ``body`` is."""
        number: int | None = None
        match unpack(body):
            case [str(name), fields] if name in self._kinds:
                pass
            case [str(name), fields, int(found)] if self._numbered and name in self._kinds:
                if isinstance(found, bool) or found < 1:
                    raise MessageRefused(f"a {name} with the number {found}")
                number = found
            case [str(name), _, *_]:
                raise MessageRefused(f"{name[:40]!r} is no message for this process")
            case other:
                raise MessageRefused(f"no message: {type(other).__name__}")
        decode = self._decoders.get(name)
        if decode is None:
            decode = self._decoders[name] = decoder(self._kinds[name])
        try:
            message = decode(fields)
            return message if number is None else Numbered(number, message)
        except (Undecodable, RecursionError) as error:
            raise MessageRefused(" ".join(str(error).split())[:200]) from None
