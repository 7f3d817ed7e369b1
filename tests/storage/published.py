"""A checkpoint is published, and older ones pruned, as a job's publisher does."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from elastic_ft.core.assignment import CheckpointRef
from elastic_ft.core.manifest import Manifest
from elastic_ft.storage.checkpoints import prune, publish
from elastic_ft.storage.store import Store


class Done(NamedTuple):
    """``warnings``: older ones that could not be pruned, and why."""

    ref: CheckpointRef
    nbytes: int
    warnings: tuple[str, ...]


def commit(
    store: Store,
    manifest: Manifest,
    keep_last: int,
    keep_for_s: float | None = None,
    in_use: Collection[str] = (),
) -> Done:
    done = publish(store, manifest)
    return Done(done.ref, done.nbytes, prune(store, manifest, keep_last, keep_for_s, in_use))
