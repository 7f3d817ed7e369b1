"""The checkpoint's schema, and the rule by which one comes into being (I5). Pure.

The commit rule, for whoever writes and reads:

1. Every attempt has a prefix of its own, never used before: a retry, or the same step in another
   generation, starts a new one. So nothing left over from a failed attempt can be mistaken for
   part of this one, and no file is ever written twice.
2. Each worker writes its shards below that prefix and reports, per box, the file, offset, length
   and digest: a ``ShardEntry``. These entries as dicts are what ``ShardsWritten.shards`` carries.
3. When every worker has reported, the manifest is built and ``incomplete`` must be empty; what was
   stored is verified against the digests as far as the store allows.
4. The manifest is published by one conditional PUT (``If-None-Match: *``): it is there whole, or
   not at all, and it is the last thing written. No manifest, no checkpoint.
5. An acknowledgement can be lost after the write took place; the client then retries and is told
   412 for its own write. So on 412, or any doubt, the manifest is read back: an equal ``nonce``
   means that this attempt won, another one that somebody else did. It is drawn once an attempt.

A reader takes the newest manifest whose own digest is right, checks ``incomplete`` and
``mismatch``, verifies each shard that it reads, and falls back to the next older checkpoint,
loudly, at the first thing that is wrong (``StateDamaged``).
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_ft.core.sharding import Box, overlapping, uncovered
from elastic_ft.core.typed import fields_of
from elastic_ft.errors import StateDamaged, printable

FORMAT_VERSION = 1
NAME_CHARACTERS_MAX = 200
COUNT_MAX = (1 << 63) - 1  # of bytes, places, steps

_HEAD = b'{"digest":"sha256:'
_DIGEST_LENGTH = hashlib.sha256().digest_size * 2


# -------------------------------------------------------------------------------- schema


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor is as a whole. dtype as torch spells it, without the "torch."."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One box of one tensor: ``nbytes`` bytes at ``offset`` of ``file``, row-major.

    file: relative to the attempt's prefix. digest: "algorithm:hex" of exactly those bytes.
    """

    tensor: str
    box: Box
    dtype: str
    file: str
    offset: int
    nbytes: int
    digest: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, in the order of the fields."""
        return {
            "tensor": self.tensor,
            "offsets": list(self.box.offsets),
            "sizes": list(self.box.sizes),
            "dtype": self.dtype,
            "file": self.file,
            "offset": self.offset,
            "nbytes": self.nbytes,
            "digest": self.digest,
        }

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> ShardEntry:
        """The inverse of ``to_dict``. ValueError says which key is wrong."""
        fields = _checked(values, _ENTRY, "shard entry")
        box = Box(tuple(fields.pop("offsets")), tuple(fields.pop("sizes")))
        return ShardEntry(box=box, **fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A committed checkpoint: what the state is, where each box of it lies, and who wrote it.

    nonce: drawn once by the writing attempt (rule 5). extra: what else a restart needs, JSON types.
    """

    job: str
    run: str
    step: int
    generation: int
    nonce: str
    layout: str
    created_at_s: float
    tensors: Mapping[str, TensorSpec]
    entries: tuple[ShardEntry, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def to_json(self) -> bytes:
        """Returns the one canonical form: ``{"digest":"sha256:...",`` and the sorted rest.

        The digest is that of the document without its "digest" member. ValueError if ``extra``
        holds what JSON cannot say, NaN included.
        """
        body = _canonical(self._to_dict())
        return _HEAD + hashlib.sha256(body).hexdigest().encode() + b'",' + body[1:]

    def _to_dict(self) -> dict[str, Any]:
        return fields_of(self) | {
            "tensors": {name: fields_of(spec) for name, spec in self.tensors.items()},
            "entries": [entry.to_dict() for entry in self.entries],
            "extra": dict(self.extra),
        }

    @staticmethod
    def from_json(data: bytes, url: str = "manifest") -> Manifest:
        """Returns the manifest in ``data``, every byte of which the digest covers.

        Raises StateDamaged, with ``url`` as its holder, if the digest differs or the schema is
        not this one.
        """
        body = _verified_body(data, url)
        try:
            return _manifest_of(json.loads(body))
        except (ValueError, RecursionError, OverflowError) as error:
            why = printable(error)
            raise StateDamaged(f"{url}: not a manifest of this version: {why}", url) from None


# --------------------------------------------------------------------------- what it says


def incomplete(manifest: Manifest) -> list[str]:
    """Says of every tensor that the entries do not cover exactly once what is wrong with it.

    An empty list means that the checkpoint is all there; the bytes are verified on reading.
    """
    entries_of: dict[str, list[ShardEntry]] = defaultdict(list)
    for entry in manifest.entries:
        entries_of[entry.tensor].append(entry)
    names = sorted({*manifest.tensors, *entries_of})
    flaws = ((name, _flaw(manifest.tensors.get(name), entries_of[name])) for name in names)
    return [printable(f"{name}: {flaw}") for name, flaw in flaws if flaw]


def _flaw(spec: TensorSpec | None, entries: list[ShardEntry]) -> str:
    """What is wrong with one tensor's entries, or nothing."""
    if spec is None:
        return "has entries, but is not among the tensors"
    whole = Box.whole(spec.shape)
    for entry in entries:
        if entry.dtype != spec.dtype:
            return f"{entry.box} is {entry.dtype}, the tensor is {spec.dtype}"
        stops = entry.box.stops
        if len(stops) != len(spec.shape) or any(
            stop > size for stop, size in zip(stops, spec.shape, strict=True)
        ):
            return f"{entry.box} is not inside {whole}"
    boxes = [entry.box for entry in entries]
    if pair := overlapping(boxes):
        return f"{pair[0]} and {pair[1]} overlap"
    if sum(box.numel for box in boxes) == whole.numel:
        return ""
    return f"no entry holds {uncovered(whole, boxes)[0]}"


# ------------------------------------------------------------------------ reading, strictly


def _canonical(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _verified_body(data: bytes, url: str) -> bytes:
    """The document without its digest, which is right; or StateDamaged."""
    start = len(_HEAD)
    digest, rest = data[start : start + _DIGEST_LENGTH], data[start + _DIGEST_LENGTH :]
    if not data.startswith(_HEAD) or not rest.startswith(b'",'):
        raise StateDamaged(f"{url}: {len(data)} bytes that do not start like a manifest", url)
    body = b"{" + rest[2:]
    found = hashlib.sha256(body).hexdigest()
    if found.encode() != digest:
        said = digest.decode(errors="replace")
        raise StateDamaged(f"{url}: digest is {found[:12]}, the manifest says {said[:12]}", url)
    return body


def _manifest_of(values: dict[str, Any]) -> Manifest:
    """Raises ValueError naming the first thing that is not as it should be."""
    version = values.get("format_version")
    if version != FORMAT_VERSION:
        raise ValueError(f"format_version {version}, this program reads {FORMAT_VERSION}")
    fields = _checked(values, _MANIFEST, "manifest")
    tensors = {name: _spec_of(name, spec) for name, spec in fields["tensors"].items()}
    entries = tuple(map(ShardEntry.from_dict, fields["entries"]))
    return Manifest(**fields | {"tensors": tensors, "entries": entries})


def _spec_of(name: str, values: Any) -> TensorSpec:
    fields = _checked(values, _SPEC, f"tensor {name}")
    return TensorSpec(fields["dtype"], tuple(fields["shape"]))


def _checked(values: Any, kinds: Mapping[str, KeyKind], where: str) -> dict[str, Any]:
    """A copy of ``values``: the keys of ``kinds``, and of those what each is. Raises ValueError."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{where}: expected an object, found {type(values).__name__}")
    if odd := sorted(values.keys() ^ kinds.keys()):
        state = "unknown" if odd[0] in values else "missing"
        raise ValueError(f"{where}: {state} key {odd[0]!r}")
    for key, (what, is_right) in kinds.items():
        if not is_right(values[key]):
            raise ValueError(f"{key}: expected {what}, found {values[key]!r:.80}")
    return dict(values)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= COUNT_MAX


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < COUNT_MAX  # no NaN, no infinity


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and all(map(_is_plain, value.split("/")))


def _is_plain(name: Any) -> bool:
    return (
        isinstance(name, str)
        and 0 < len(name) <= NAME_CHARACTERS_MAX
        and name.isprintable()
        and name not in (".", "..")
        and not {*name} & {"/", "\\"}
    )


def _of_type(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


KeyKind = tuple[str, Callable[[Any], bool]]  # in words, and whether a value is one
_TEXT: KeyKind = ("text", _of_type(str))
_COUNT: KeyKind = ("a whole number from 0", _is_count)
_COUNTS: KeyKind = ("whole numbers from 0", _are_counts)
_OBJECT: KeyKind = ("an object", _of_type(dict))
_SPEC = {"dtype": _TEXT, "shape": _COUNTS}
_ENTRY = {
    "tensor": _TEXT,
    "offsets": _COUNTS,
    "sizes": _COUNTS,
    "dtype": _TEXT,
    "file": ("a plain relative path", _is_path),  # below the attempt's prefix
    "offset": _COUNT,
    "nbytes": _COUNT,
    "digest": _TEXT,
}
_MANIFEST = {
    "format_version": _COUNT,
    "job": _TEXT,
    "run": ("a plain name", _is_plain),  # part of every path, and never a way out of the URL
    "step": _COUNT,
    "generation": _COUNT,
    "nonce": _TEXT,
    "layout": _TEXT,
    "created_at_s": ("a number", _is_number),
    "tensors": _OBJECT,
    "entries": ("a list", _of_type(list)),
    "extra": _OBJECT,
}
