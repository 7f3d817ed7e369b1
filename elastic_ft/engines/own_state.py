"""State of a user's own objects (schedulers, averages, metrics) as tensors that can be carried.

Whatever has ``state_dict`` and ``load_state_dict`` may be registered. Of its state, each large
tensor is one of the job's, by its path; all that is left (numbers, text, small tensors) is packed
as msgpack into one more tensor, of a fixed size so that snapshots and buddies can count on it. No
code is ever unpacked: what comes back is plain values and tensors.

Captured is what the objects were when their loop asked for its next batch. That copy is the state;
the objects themselves are put back to it wherever a step was begun in vain, with what their loop
has changed between its batch and the step: it will not do that again.
"""

from __future__ import annotations

import types
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack  # type: ignore[import-untyped]
import numpy as np
import torch
import torch.distributed as dist

from elastic_ft.errors import ConfigError

LARGE_BYTES = 1024  # a tensor of more is carried by itself
HEADER_BYTES = 8
TENSOR, NUMPY, TUPLE, LARGE, PAIRS = 1, 2, 3, 4, 5  # msgpack's numbers for our kinds
CHECKED_BITS = 20  # of the checksum that ranks compare: its squares add up exactly in float64
PIECE = 1 << 24  # words of a tensor that are summed at a time
WHOLE_EVERY_STEPS = 64  # and at powers of 2: large tensors are compared, too
Named = Mapping[str, Any]
T = TypeVar("T")
CODE = (
    type,
    types.BuiltinFunctionType,
    types.FunctionType,
    types.MethodType,
    types.ModuleType,
)


@dataclass(frozen=True, slots=True)
class Ahead:
    """What the user's code had made of the objects, after ``step``, before the next."""

    step: int
    kept: dict[str, bytes]
    changed: dict[str, torch.Tensor]  # of the large tensors


class OwnState:
    """The registered objects, and their state as it was captured last.

    Attributes:
        tensors: by name: what is carried; of one size from the first capture on.
    """

    def __init__(self, room_bytes: int) -> None:
        self._objects: dict[str, Any] = {}
        self._room_bytes = room_bytes
        self.tensors: dict[str, torch.Tensor] = {}
        self._sums: list[int] = []
        self._kept: dict[str, bytes] = {}  # as captured
        self._parts: dict[str, list[str]] = {}  # the large tensors of each object
        # Of those, what was captured and which version: held, so that none has another's address.
        self._seen: dict[str, tuple[torch.Tensor, int]] = {}
        self._ahead: Ahead | None = None

    def register(self, name: str, thing: Any) -> None:
        """Raises ConfigError, one line, for what can't be captured."""
        if not hasattr(thing, "state_dict") and hasattr(thing, "__dict__"):
            thing = Attributes(thing)
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(thing, method, None)):
                kind = type(thing).__name__
                raise ConfigError(
                    f"register: {name} is {kind}, which has no {method}: give it one, or keep it "
                    "out of what must survive"
                )
        if name in self._objects:
            raise ConfigError(f"register: {name} is registered already")
        if self.tensors:
            raise ConfigError(f"register: {name} comes after the first batch was asked for")
        self._objects[name] = thing

    @property
    def names(self) -> list[str]:
        return list(self._objects)

    @property
    def things(self) -> list[Any]:
        return list(self._objects.values())

    def of_kind(self, kind: type[T]) -> list[T]:
        return [thing for thing in self._objects.values() if isinstance(thing, kind)]

    def capture(self) -> None:
        """Raises ConfigError if an object keeps what can't be carried, or more than there is
        room for."""
        is_first = not self.tensors
        kept, large = self._read()
        if not is_first and kept == self._kept and not (large or self._ahead):
            return  # nothing has changed
        self._kept, self._ahead = kept, None
        self._sums = [_checksum(packed) for packed in kept.values()]
        self._seen = {name: (tensor, _version(tensor)) for name, tensor in large.items()}
        body = msgpack.packb(kept)
        if len(body) + HEADER_BYTES > self._room_bytes:
            names = ", ".join(f"{name} {len(packed):,}" for name, packed in kept.items())
            raise ConfigError(
                f"loop.state_kb: registered objects keep {len(body):,} bytes beside their large "
                f"tensors ({names}), there is room for {self._room_bytes - HEADER_BYTES:,}"
            )
        if is_first:
            self.tensors["user"] = torch.zeros(self._room_bytes, dtype=torch.uint8)
            for name, tensor in large.items():
                self.tensors[name] = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        elif missing := sorted(self.tensors.keys() - large.keys() - {"user"}):
            raise ConfigError(f"register: {missing[0]} was a tensor, and is none any more")
        for name, tensor in large.items():
            _check_alike(name, self.tensors[name], tensor)
            self.tensors[name].copy_(tensor)
        self._write(body)

    def _write(self, body: bytes) -> None:
        room = self.tensors["user"]
        room[:HEADER_BYTES].copy_(_bytes(len(body).to_bytes(HEADER_BYTES, "little")))
        room[HEADER_BYTES : HEADER_BYTES + len(body)].copy_(_bytes(body))
        room[HEADER_BYTES + len(body) :].zero_()

    def _read(self) -> tuple[dict[str, bytes], dict[str, torch.Tensor]]:
        """What the objects keep now, packed, and their large tensors."""
        kept, large = dict[str, bytes](), dict[str, torch.Tensor]()
        for name, thing in self._objects.items():
            found: dict[str, torch.Tensor] = {}
            kept[name] = _pack(name, thing.state_dict(), found, self.tensors or None)
            self._parts[name] = list(found)
            large |= found
        return kept, large

    def look_ahead(self, step: int) -> None:
        """Keeps what the user's code has changed since ``capture``, which was after ``step``."""
        kept, large = self._read()
        changed = {n: t.clone() for n, t in large.items() if not self._is_as_captured(n, t)}
        is_other = changed or kept != self._kept
        self._ahead = Ahead(step, kept, changed) if is_other else None

    def _is_as_captured(self, name: str, tensor: torch.Tensor) -> bool:
        seen, version = self._seen.get(name, (None, 0))
        if seen is None or seen.data_ptr() != tensor.data_ptr():
            return False
        return _version(seen) == _version(tensor) == version >= 0

    def put_back(self, step: int = 0) -> None:
        """The objects become what was captured, or came from elsewhere into ``tensors``.

        ``step``: whose state that is. What their loop has changed after it stays.
        """
        room = self.tensors["user"].numpy()
        length = int.from_bytes(room[:HEADER_BYTES].tobytes(), "little")
        kept = msgpack.unpackb(room[HEADER_BYTES : HEADER_BYTES + length].tobytes())
        if self._ahead is not None and self._ahead.step != step:
            self._ahead = None
        ahead = self._ahead or Ahead(step, kept, {})
        for name, thing in self._objects.items():
            if name not in kept:
                known = ", ".join(kept) or "nothing"
                raise ConfigError(f"register: the state has {known}, and not {name}")
            thing.load_state_dict(_unpack(ahead.kept[name], self.tensors | ahead.changed))
        self._kept, self._seen = kept, {}
        self._sums = [_checksum(kept[name]) for name in self._objects]

    def take_from(self, source: int, step: int, check: Callable[[], None]) -> None:
        """What rank ``source`` has captured is everybody's. A collective.

        ``check``: raises if it was aborted, after which it may have brought anything: then the
        state is as it was.
        """
        taken = {name: tensor.clone() for name, tensor in sorted(self.tensors.items())}
        for tensor in taken.values():
            dist.broadcast(tensor, src=source)
        check()
        for name, tensor in taken.items():
            self.tensors[name].copy_(tensor)
        self._ahead = None
        self.put_back(step)

    def sums(self, step: int) -> list[int]:
        """Of each object, a checksum of what it keeps; at few steps also of its large tensors."""
        if step & (step - 1) and step % WHOLE_EVERY_STEPS:
            return self._sums
        return [
            _checksum(repr([own, *map(_summed, map(self.tensors.get, self._parts[name]))]).encode())
            if not getattr(self._objects[name], "may_differ", False)
            else own
            for name, own in zip(self._objects, self._sums, strict=True)
        ]

    def sum_of_groups(self) -> int:
        """A checksum of what optimizers' groups say now, whatever was captured."""
        groups = [hyper.state_dict() for hyper in self.of_kind(Hyper)]
        return _checksum(_pack("groups", groups, {}, {}))


def _check_alike(name: str, before: torch.Tensor, now: torch.Tensor) -> None:
    """Raises ConfigError where ``now`` would not fit, or be spread over the room of ``before``."""
    if before.shape != now.shape or before.dtype != now.dtype:
        was, found = (
            f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in (before, now)
        )
        raise ConfigError(
            f"register: {name.removeprefix('user.')} was {was} with the first batch, and is "
            f"{found} now: keep one size, or keep what grows as a list of numbers (loop.state_kb)"
        )


def _checksum(packed: bytes) -> int:
    return zlib.crc32(packed) >> (32 - CHECKED_BITS)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _summed(tensor: torch.Tensor | None) -> int:
    assert tensor is not None
    return int(sum_of_bits(tensor))


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """One int64 on its device, of all its bits."""
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    words = raw if raw.numel() % 4 or raw.storage_offset() % 4 else raw.view(torch.int32)
    # Piece by piece: torch widens what it sums, and a base's largest tensor leaves no room for it.
    sums = [piece.sum(dtype=torch.int64) for piece in words.split(PIECE)]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def _bytes(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


# ------------------------------------------------------------------------------- packing


def _pack(
    name: str, value: Any, large: dict[str, torch.Tensor], known: Mapping[str, Any] | None
) -> bytes:
    """``large``: takes the tensors that are carried by themselves. ``known``: those of before;
    a tensor that was not there then is packed."""

    def plain(path: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            nbytes = value.numel() * value.element_size()
            if (known is None and nbytes > LARGE_BYTES) or (known is not None and path in known):
                large[path] = value.detach()
                return msgpack.ExtType(LARGE, path.encode())
            return _packed_tensor(value)
        if isinstance(value, np.generic):
            return plain(path, value.item())
        if isinstance(value, np.ndarray):
            return msgpack.ExtType(NUMPY, _packed_tensor(torch.from_numpy(value.copy())).data)
        if isinstance(value, Mapping):
            if all(type(key) is str for key in value):
                return {
                    key: item if type(item) in SCALARS else plain(f"{path}.{key}", item)
                    for key, item in value.items()
                }
            pairs = [[_plain_key(k), plain(f"{path}.{k}", item)] for k, item in value.items()]
            return msgpack.ExtType(PAIRS, msgpack.packb(pairs, strict_types=True))
        if type(value) is tuple:
            items = [plain(f"{path}.{i}", item) for i, item in enumerate(value)]
            return msgpack.ExtType(TUPLE, msgpack.packb(items, strict_types=True))
        if isinstance(value, (list, tuple, set, frozenset)):
            return [plain(f"{path}.{i}", item) for i, item in enumerate(value)]
        if value is None or isinstance(value, (bool, int, float, str, bytes)):
            return _scalar(value)
        raise ConfigError(
            f"register: {path} is {type(value).__name__}, which can't be carried: numbers, text, "
            "tensors, and lists, tuples and dicts of them can"
        )

    return bytes(msgpack.packb(plain(f"user.{name}", value), strict_types=True))


SCALARS = frozenset({bool, int, float, str, bytes, type(None)})


def _scalar(value: Any) -> Any:
    """Without a class of its own: an enumeration's str, numpy's float64."""
    kinds: tuple[Any, ...] = (bool, int, float, str, bytes)
    for kind in kinds:
        if isinstance(value, kind):
            return kind(value)
    return value


def _packed_tensor(tensor: torch.Tensor) -> msgpack.ExtType:
    local = tensor.detach().cpu().contiguous()
    raw = local.reshape(-1).view(torch.uint8).numpy().tobytes() if local.numel() else b""
    dtype = str(local.dtype).removeprefix("torch.")
    where = [] if tensor.device.type == "cpu" else [tensor.device.type]
    return msgpack.ExtType(TENSOR, msgpack.packb([dtype, list(local.shape), raw, *where]))


def _unpack(packed: bytes, large: Mapping[str, torch.Tensor]) -> Any:
    def read(code: int, data: bytes) -> Any:
        if code == LARGE:
            return large[data.decode()].clone()
        if code in (TENSOR, NUMPY):
            dtype, shape, raw, *where = msgpack.unpackb(data)
            made = torch.empty(shape, dtype=getattr(torch, dtype))
            if raw:
                made.view(-1).view(torch.uint8).copy_(_bytes(raw))
            if where == ["cuda"] and torch.cuda.is_available():  # else a job that has moved
                made = made.to(torch.device("cuda", torch.cuda.current_device()))
            return made if code == TENSOR else made.numpy()
        inner = msgpack.unpackb(data, ext_hook=read, strict_map_key=False)
        return tuple(inner) if code == TUPLE else {_key(key): value for key, value in inner}

    return msgpack.unpackb(packed, ext_hook=read, strict_map_key=False)


def _plain_key(key: Any) -> Any:
    return list(map(_scalar, key)) if isinstance(key, tuple) else _scalar(key)


def _key(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key


class Attributes:
    """Those of a thing without a ``state_dict``, but for functions and classes among them."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def state_dict(self) -> dict[str, Any]:
        found = vars(self._thing).items()
        return {name: value for name, value in found if not isinstance(value, CODE)}

    def load_state_dict(self, state: Named) -> None:
        vars(self._thing).update(state)


class Hyper:
    """What an optimizer's groups say beside their parameters: rates, decays.

    A scheduler's ``load_state_dict`` does not bring them back, nor may others rely on it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        groups = self._optimizer.param_groups
        return {"groups": [{k: v for k, v in g.items() if k != "params"} for g in groups]}

    def load_state_dict(self, state: Named) -> None:
        for group, values in zip(self._optimizer.param_groups, state["groups"], strict=True):
            for key, value in values.items():
                if isinstance(own := group.get(key), torch.Tensor):  # a captured graph knows it
                    own.copy_(value)
                else:
                    group[key] = value
