"""What a checkpoint folder holds, whether it is sound, and how two checkpoints differ.

Changes nothing. ``storage.prune`` deletes, ``storage.safetensors`` and
``state.torch_checkpoints`` export.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from elastic_ft.core.assignment import CheckpointRef
from elastic_ft.core.manifest import Manifest, ShardEntry, TensorSpec
from elastic_ft.errors import StateDamaged, StorageError, StoreFailed
from elastic_ft.storage import owners
from elastic_ft.storage.checkpoints import (
    ATTEMPT_PREFIX,
    MANIFEST_KEY,
    committed,
    file_ends,
    load_manifest,
)
from elastic_ft.storage.shards import (
    OBJECT_BYTES,
    Reader,
    Want,
    batched_by_size,
    parallel,
    prefix_of,
    verify,
)
from elastic_ft.storage.store import Store, if_there, open_store

LOOKUP_THREADS = 16
LATE = "published by a controller that another had superseded: it does not count"
ELEMENTS_AT_ONCE = 2**20  # compared as 64-bit numbers


def find_checkpoints(url: str, step: int | None = None) -> tuple[Store, tuple[CheckpointRef, ...]]:
    """The store of a checkpoint folder and its checkpoints that count, newest first.

    ``url`` may also be that of one manifest: then that one. ``step``: only the newest attempt of
    that step. Raises StorageError, one line, if the folder can't be read or has no such one.
    """
    if not url:
        raise StorageError("URL: expected a path or a URL, found nothing")
    root, _, name = url.rpartition("/manifests/")
    match = MANIFEST_KEY.match(f"manifests/{name}") if root else None
    store = open_store(root if match else url)
    try:
        refs = committed(store)
        if match:
            refs = tuple(ref for ref in refs if ref.url == f"{store.url}/manifests/{name}")
        elif not refs and not store.list("data"):
            hint = f"; {url}/checkpoints has some" if _has_some(f"{url}/checkpoints") else ""
            raise StorageError(f"{url}: no checkpoints there{hint}")
        else:
            refs = owners.counting(store, refs)
    except StoreFailed as error:
        raise StorageError(str(error)) from None
    if match and not refs:
        raise StorageError(f"{url}: there is no such manifest")
    if step is not None:
        steps = sorted({ref.step for ref in refs}, reverse=True)
        refs = tuple(ref for ref in refs if ref.step == step)[:1]
        if not refs:
            known = ", ".join(map(str, steps[:10])) or "none"
            raise StorageError(f"{url}: no checkpoint of step {step}; there are {known}")
    return store, refs


def find_one(url: str, step: int | None = None) -> Reader:
    """A reader of the newest checkpoint, or that of ``step``, or that of the manifest's URL.

    Raises StorageError as ``find`` does, StateDamaged if its manifest is damaged.
    """
    store, refs = find_checkpoints(url, step)
    if not refs:
        raise StorageError(f"{url}: no complete checkpoint there")
    return Reader(store, load_manifest(store, refs[0]), refs[0].url)


def _has_some(url: str) -> bool:
    return bool(committed(open_store(url)))


# ------------------------------------------------------------------------------- listing


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One that a manifest makes. What its damaged manifest does not tell is None.

    Attributes:
        problem: why it is not complete, as far as it shows without reading its data; else "".
        prefix: where its data is.
    """

    ref: CheckpointRef
    problem: str = ""
    nbytes: int = 0
    created_at_s: float | None = None
    layout: str | None = None
    run: str | None = None
    generation: int | None = None
    prefix: str | None = None


@dataclass(frozen=True, slots=True)
class Attempt:
    """Data that no manifest references: being written, or abandoned."""

    prefix: str
    run: str
    generation: int
    step: int
    nbytes: int
    files: int


@dataclass(frozen=True, slots=True)
class CheckpointListing:
    checkpoints: tuple[Checkpoint, ...]  # newest first
    attempts: tuple[Attempt, ...]  # newest first


def list_checkpoints(store: Store) -> CheckpointListing:
    """All that is there. Raises StoreFailed."""
    keys = store.list("data")  # before the manifests: one published in between has its data here
    refs = committed(store)
    lengths = parallel(lambda key: if_there(lambda: store.size(key)), keys, LOOKUP_THREADS)
    # Not those deleted since they were listed.
    sizes = {key: -1 if n is None else n for key, n in zip(keys, lengths, strict=True)}
    found = tuple(parallel(lambda ref: _look_at(store, ref, sizes), refs, LOOKUP_THREADS))
    counted = frozenset(owners.counting(store, refs))
    found = tuple(c if c.ref in counted else replace(c, problem=LATE) for c in found)
    referenced = {checkpoint.prefix for checkpoint in found}
    return CheckpointListing(found, _attempts(sizes, referenced))


def _look_at(store: Store, ref: CheckpointRef, sizes: Mapping[str, int]) -> Checkpoint:
    try:
        manifest = load_manifest(store, ref)
    except StateDamaged as error:
        return Checkpoint(ref, str(error).removeprefix(f"{ref.url}: "))
    prefix = prefix_of(manifest)
    flaws = (
        f"{file} has {sizes[key]} bytes, expected {expected}" if key in sizes else f"no {file}"
        for file, expected in sorted(file_ends(manifest).items())
        if sizes.get(key := f"{prefix}/{file}", -1) < expected
    )
    return Checkpoint(
        ref=ref,
        problem=next(flaws, ""),
        nbytes=sum(entry.nbytes for entry in manifest.entries),
        created_at_s=manifest.created_at_s,
        layout=manifest.layout,
        run=manifest.run,
        generation=manifest.generation,
        prefix=prefix,
    )


def _attempts(sizes: Mapping[str, int], referenced: set[str | None]) -> tuple[Attempt, ...]:
    found: dict[str, list[int]] = defaultdict(list)
    for key, nbytes in sizes.items():
        prefix = "/".join(key.split("/")[:3])
        if prefix not in referenced and nbytes >= 0:
            found[prefix].append(nbytes)
    attempts = []
    for prefix, lengths in found.items():
        if match := ATTEMPT_PREFIX.match(prefix):
            run, generation, step = match[1], int(match[2]), int(match[3])
            attempts.append(Attempt(prefix, run, generation, step, sum(lengths), len(lengths)))
    return tuple(sorted(attempts, key=lambda a: (a.step, a.generation, a.run), reverse=True))


# ----------------------------------------------------------------------------- verifying


@dataclass(frozen=True, slots=True)
class Verified:
    """``problems``: what is damaged or missing, by tensor and file; none if nothing is."""

    ref: CheckpointRef
    nbytes: int
    problems: tuple[str, ...]


def verify_checkpoint(store: Store, ref: CheckpointRef) -> Verified:
    """Reads every byte of a checkpoint and checks every digest. Never raises StoreFailed."""
    try:
        manifest = load_manifest(store, ref)
    except (StateDamaged, StoreFailed) as error:
        return Verified(ref, 0, (str(error),))
    nbytes = sum(entry.nbytes for entry in manifest.entries)
    return Verified(ref, nbytes, tuple(dict.fromkeys(verify(store, manifest))))


# ----------------------------------------------------------------------------- comparing


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """``equal``: bit by bit. ``max_abs``: the greatest difference; NaN where one side has a NaN."""

    name: str
    spec: TensorSpec
    equal: bool
    max_abs: float


@dataclass(frozen=True, slots=True)
class Difference:
    """Of two checkpoints a and b. ``specs``: dtype or shape differ; not compared further."""

    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    specs: tuple[tuple[str, TensorSpec, TensorSpec], ...]
    tensors: tuple[TensorDifference, ...]

    @property
    def equal(self) -> bool:
        apart = self.only_in_a or self.only_in_b or self.specs
        return not apart and all(tensor.equal for tensor in self.tensors)


def compare_checkpoints(a: Reader, b: Reader) -> Difference:
    """Compares all tensors; in memory are a few times OBJECT_BYTES, however large they are.

    Raises StateDamaged, StoreFailed.
    """
    mine, others = a.manifest.tensors, b.manifest.tensors
    common = sorted(mine.keys() & others.keys())
    specs = tuple((n, mine[n], others[n]) for n in common if mine[n] != others[n])
    alike = [name for name in common if mine[name] == others[name]]
    differing: dict[str, float] = {}
    for batch in batches(a.manifest, alike):
        held, held_by_b = _read(a, batch), _read(b, batch)
        for entry, x, y in zip(batch, held, held_by_b, strict=True):
            if x != y:
                found = _max_abs(x, y, entry.dtype)
                differing[entry.tensor] = _greater(differing.get(entry.tensor, 0.0), found)
    return Difference(
        only_in_a=tuple(sorted(mine.keys() - others.keys())),
        only_in_b=tuple(sorted(others.keys() - mine.keys())),
        specs=specs,
        tensors=tuple(
            TensorDifference(n, mine[n], n not in differing, differing.get(n, 0.0)) for n in alike
        ),
    )


def batches(manifest: Manifest, tensors: Iterable[str]) -> Iterator[list[ShardEntry]]:
    """The entries of some tensors as they lie in their objects, OBJECT_BYTES at a time."""
    wanted = set(tensors)
    entries = sorted(manifest.entries, key=lambda e: (e.file, e.offset))
    ours = (entry for entry in entries if entry.tensor in wanted)
    return batched_by_size(ours, lambda entry: entry.nbytes, OBJECT_BYTES)


def _read(reader: Reader, batch: list[ShardEntry]) -> list[bytearray]:
    held = [bytearray(entry.nbytes) for entry in batch]
    reader.read(Want(e.tensor, e.box, memoryview(b)) for e, b in zip(batch, held, strict=True))
    return held


def _greater(a: float, b: float) -> float:
    """The greater one; NaN if one is."""
    return a if a > b or a != a else b


def _max_abs(x: bytearray, y: bytearray, dtype: str) -> float:
    import torch  # knows bfloat16 and the float8 types

    kind = getattr(torch, dtype)
    wide = torch.complex128 if kind.is_complex else torch.float64
    parts = (torch.frombuffer(held, dtype=kind).split(ELEMENTS_AT_ONCE) for held in (x, y))
    greatest = 0.0
    for narrow_a, narrow_b in zip(*parts, strict=True):
        a, b = narrow_a.to(wide), narrow_b.to(wide)
        apart = (a - b).abs()
        apart[(a == b) | (a.isnan() & b.isnan())] = 0.0  # infinities of one sign are equal too
        greatest = _greater(greatest, float(apart.max()))
    return greatest
