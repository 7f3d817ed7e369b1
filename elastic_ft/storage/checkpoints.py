"""Checkpoints in object storage: shards first, verified, then one manifest, then nothing else (I5).

Layout under the checkpoint URL::

    data/<run>/g<generation>-s<step>/r<rank>-<n>.bin   bytes of tensor pieces, one after the other
    manifests/<step>-<attempt>.json                    what makes it a checkpoint

``run`` is new with every start of a controller, so no attempt ever writes where another has
written. A manifest's ``attempt`` counts from 0 per step: a step whose manifest was refused as
damaged, or that is trained once more after falling back to an older one, is published again under
the next attempt, beside the old manifest and never over it; readers take the newest attempt
first. Two writers that publish the same attempt at once have one winner (a conditional write);
the other gets StoreFailed. A lost acknowledgement is told from a lost race by reading back: the
manifest carries its writer's nonce.

``core.manifest`` has the schema and the commit rule. An entry's ``file`` is relative to its
manifest's prefix, which follows from run, generation and step: ``prefix_of``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial

from elastic_ft.core.assignment import CheckpointRef
from elastic_ft.core.manifest import Manifest, incomplete
from elastic_ft.errors import StateDamaged, StoreFailed, Unpublishable
from elastic_ft.storage.shards import RateLimit as RateLimit
from elastic_ft.storage.shards import Reader, odd_sizes, parallel, prefix_of
from elastic_ft.storage.shards import attempt_prefix as attempt_prefix
from elastic_ft.storage.shards import first_flaw as first_flaw
from elastic_ft.storage.shards import writers as writers
from elastic_ft.storage.store import Store, if_there, open_store

LOOKUP_THREADS = 16
PUBLISH_ATTEMPTS = 3
Check = Callable[[], None]  # raises if this writer may write no more
ATTEMPT_PREFIX = re.compile(r"^data/([^/]+)/g(\d+)-s(\d+)$")
MANIFEST_KEY = re.compile(r"^manifests/(\d+)-(\d+)\.json$")


# ---------------------------------------------------------------------------- publishing


@dataclass(frozen=True, slots=True)
class Committed:
    """A published checkpoint."""

    ref: CheckpointRef
    nbytes: int


def publish(store: Store, manifest: Manifest, check: Check = lambda: None) -> Committed:
    """Verifies that the shards are there and whole, and publishes the manifest.

    Giving the same manifest again is harmless. Raises Unpublishable if the checkpoint is not whole
    or another writer published this attempt first; StoreFailed if the store failed: then the
    manifest may yet appear: leave its data alone.

    Args:
        check: raises if this writer may write no more; asked before each attempt to.
    """
    if problem := _incomplete_or_short(store, manifest):
        raise Unpublishable(f"checkpoint of step {manifest.step} refused: {problem}")
    published = _publish(store, manifest, check)
    nbytes = sum(entry.nbytes for entry in manifest.entries)
    return Committed(CheckpointRef(manifest.step, store.url_of(published.key)), nbytes)


def _incomplete_or_short(store: Store, manifest: Manifest) -> str:
    """The first thing wrong with the checkpoint, as far as it shows without reading it."""
    for flaw in (*incomplete(manifest), *odd_sizes(manifest)):
        return flaw

    def check(item: tuple[str, int]) -> str:
        file, expected = item
        key = f"{prefix_of(manifest)}/{file}"
        found = if_there(lambda: store.size(key))
        if found is None:
            return f"{key} is missing"
        return "" if found >= expected else f"{key} has {found} bytes, expected {expected}"

    return next(filter(None, parallel(check, file_ends(manifest).items(), LOOKUP_THREADS)), "")


def file_ends(manifest: Manifest) -> dict[str, int]:
    """Each file of a checkpoint and how many bytes of it count: it may have more at its end."""
    ends: dict[str, int] = {}
    for entry in manifest.entries:
        ends[entry.file] = max(ends.get(entry.file, 0), entry.offset + entry.nbytes)
    return ends


def _publish(store: Store, manifest: Manifest, check: Check) -> _Published:
    """What the manifest is now published as."""
    body = manifest.to_json()
    same_step = [item for item in _published(store) if item.step == manifest.step]
    for item in same_step:
        if if_there(partial(store.get, item.key)) == body:
            return item
    own = _Published(manifest.step, same_step[0].attempt + 1 if same_step else 0)
    trouble: StoreFailed | None = None
    for _ in range(PUBLISH_ATTEMPTS):
        check()
        try:
            if store.put_if_absent(own.key, body):
                return own
        except StoreFailed as error:
            trouble = error
        found = if_there(partial(store.get, own.key))
        if found == body:  # it has our nonce: only the acknowledgement was lost
            return own
        if found is not None:
            raise Unpublishable(
                f"{store.url_of(own.key)} was published by {_writer(found)}: this writer "
                f"(run {manifest.run}, nonce {manifest.nonce}) lost; is another controller alive?"
            )
    raise StoreFailed(f"{store.url_of(own.key)} could not be published: {trouble}") from trouble


def _writer(body: bytes) -> str:
    try:
        other = Manifest.from_json(body)
    except StateDamaged as error:
        return f"an unknown writer ({error})"
    return f"run {other.run}, generation {other.generation}, nonce {other.nonce}"


# ------------------------------------------------------------------------------- finding


@dataclass(frozen=True, slots=True, order=True)
class _Published:
    step: int
    attempt: int

    @property
    def key(self) -> str:
        return f"manifests/{self.step:010d}-{self.attempt}.json"


def _published(store: Store) -> list[_Published]:
    """Newest first: by step, then by attempt. Nothing is assumed of the listing's order."""
    matches = (MANIFEST_KEY.match(key) for key in store.list("manifests"))
    return sorted((_Published(int(m[1]), int(m[2])) for m in matches if m), reverse=True)


def committed(store: Store) -> tuple[CheckpointRef, ...]:
    """All published checkpoints, newest first; whether they are whole shows on reading them.

    After a fallback a step may appear twice: the later attempt comes first.
    """
    return tuple(CheckpointRef(p.step, store.url_of(p.key)) for p in _published(store))


def load_manifest(store: Store, ref: CheckpointRef) -> Manifest:
    """The manifest of a published checkpoint.

    Raises StateDamaged if it is gone, torn, altered, of another step, or its entries do not make
    up its tensors; StoreFailed if it can't be read.
    """
    key = ref.url.removeprefix(f"{store.url}/")
    # Of a large world it may be large, too: read, not got.
    body = if_there(lambda: bytes(store.read(key, 0, store.size(key))))
    if body is None:
        missing = f"{ref.url}: the manifest is missing"
        raise StateDamaged(missing, ref.url, missing=ref.url)
    try:
        manifest = Manifest.from_json(body, ref.url)
    except StateDamaged:  # perhaps on the way
        manifest = Manifest.from_json(if_there(partial(store.get, key)) or b"", ref.url)
    if manifest.step != ref.step:
        message = f"{ref.url}: holds step {manifest.step}, expected {ref.step}"
        raise StateDamaged(message, ref.url)
    for flaw in (*incomplete(manifest), *odd_sizes(manifest)):
        raise StateDamaged(f"{ref.url}: {flaw}", ref.url)
    return manifest


def open_checkpoint(ref: CheckpointRef, store: Store | None = None) -> Reader:
    """A reader for a checkpoint known by its URL alone. Raises as ``load_manifest`` does.

    Args:
        store: one for ``root_of`` it, if there is one.
    """
    store = store or open_store(root_of(ref))
    return Reader(store, load_manifest(store, ref), ref.url)


def root_of(ref: CheckpointRef) -> str:
    """The checkpoint URL under which it is."""
    root, _, _ = ref.url.rpartition("/manifests/")
    if not root:
        raise ValueError(f"not the URL of a manifest: {ref.url}")
    return root


# ------------------------------------------------------------------------------ retention


def delete_attempt(store: Store, prefix: str) -> None:
    """Deletes what an attempt wrote. Only for one that was never given to ``publish``."""
    if not ATTEMPT_PREFIX.match(prefix):
        raise ValueError(f"not the prefix of an attempt: {prefix!r}")
    store.delete(prefix)


def prune(
    store: Store,
    newest: Manifest,
    keep_last: int,
    keep_for_s: float | None = None,
    in_use: Collection[str] = (),
    check: Check = lambda: None,
    counts: Callable[[CheckpointRef], bool] = lambda _: True,
) -> tuple[str, ...]:
    """Deletes what is to be kept no longer, manifest before data; returns what went wrong.

    What neither ``keep_last`` (steps) nor ``keep_for_s`` (age) keeps goes, but for the URLs
    ``in_use``. Counted are steps, newest attempt each, from ``newest`` downwards: it was just
    published, so it always stays. So do older attempts of its own step: a freed key
    would have a second winner. What is ahead of it, left from before a fallback, is
    kept until training has passed it: this writer can't know that it is bad.

    Args:
        check: raises if this writer may delete no more; asked before each checkpoint.
        counts: whether anybody would read it (``owners.counted_in``): ``keep_last`` keeps those.
    """
    kept_step, kept = newest.step, 1
    doomed: list[_Published] = []
    try:
        for item in _published(store):
            if item.step >= newest.step:
                continue
            ref = CheckpointRef(item.step, store.url_of(item.key))
            if item.step != kept_step and kept < keep_last and counts(ref):
                kept_step, kept = item.step, kept + 1
            else:
                doomed.append(item)
    except StoreFailed as error:
        return (f"older checkpoints were not pruned: {error}",)
    warnings = []
    for item in reversed(doomed):
        url = store.url_of(item.key)
        if url in in_use:
            continue
        if keep_for_s is not None and _age_s(store, item, newest.created_at_s) < keep_for_s:
            break  # what comes after it is younger still
        check()
        if warning := delete_checkpoint(store, item.key, {prefix_of(newest)}):
            warnings.append(warning)
    return tuple(warnings)


def _age_s(store: Store, item: _Published, now_s: float) -> float:
    """Infinite if the manifest can't be understood; 0, so that it stays, if it can't be read."""
    try:
        body = if_there(partial(store.get, item.key))
        return now_s - Manifest.from_json(body or b"").created_at_s
    except StateDamaged:
        return math.inf
    except StoreFailed:
        return 0.0


def delete_checkpoint(store: Store, key: str, in_use: Collection[str | None]) -> str | None:
    """Deletes manifest, then data unless its prefix is ``in_use``. Returns a warning, or None."""
    url = store.url_of(key)
    try:
        body = if_there(partial(store.get, key))
        if body is None:
            return None
        store.delete(key)
        prefix = prefix_of(Manifest.from_json(body, url))
        if prefix not in in_use:
            store.delete(prefix)
    except StateDamaged as error:
        return f"{url} was pruned without its data, being damaged: {error}"
    except StoreFailed as error:
        return f"{url} was not pruned entirely: {error}"
    return None


def sweep_abandoned(
    store: Store, keep_runs: Iterable[str] = (), check: Check = lambda: None
) -> tuple[str, ...]:
    """Deletes data that no manifest references, except that of ``keep_runs``. Returns warnings.

    For the start of a job, when one controller alone is at work. If some manifest can't be
    understood nothing is deleted, for its data may be good. Never raises StoreFailed: what was
    not done is a warning.

    Args:
        check: raises if this writer may delete no more; asked once the data is listed (what is
            listed, then, is no younger controller's) and before each attempt.
    """
    keep = set(keep_runs)
    try:
        # Data is listed before manifests: one published in between counts as referenced.
        found = {"/".join(key.split("/")[:3]) for key in store.list("data")}
        referenced = {prefix_of(load_manifest(store, ref)) for ref in committed(store)}
    except (StoreFailed, StateDamaged) as error:
        return (f"abandoned data was not swept: {error}",)
    doomed = sorted(p for p in found - referenced if p.split("/")[1] not in keep)
    warnings = []
    for prefix in doomed:
        check()
        try:
            store.delete(prefix)
        except StoreFailed as error:
            warnings.append(f"{prefix} was not swept: {error}")
    return tuple(warnings)
