"""Deletes checkpoints and abandoned data on request; never the newest complete checkpoint.

``plan`` decides and is a value that can be shown first; ``carry_out`` deletes.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_ft.errors import StoreFailed
from elastic_ft.storage.checkpoints import delete_attempt, delete_checkpoint
from elastic_ft.storage.inspect import Attempt, Checkpoint, CheckpointListing
from elastic_ft.storage.store import Store


@dataclass(frozen=True, slots=True)
class Pruning:
    """``notes``: what one might have expected to go, and why it stays."""

    kept: tuple[Checkpoint, ...]
    doomed: tuple[Checkpoint, ...]
    abandoned: tuple[Attempt, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(c.nbytes for c in self.doomed) + sum(a.nbytes for a in self.abandoned)


def plan_pruning(
    listing: CheckpointListing,
    now_s: float,
    *,
    keep_last: int | None = None,
    older_than_s: float | None = None,
    abandoned: bool = False,
) -> Pruning:
    """What is to be deleted.

    Args:
        keep_last: keep the checkpoints of that many steps, the newest complete ones.
        older_than_s: keep what is younger. Given both, a checkpoint goes only if neither keeps it.
        abandoned: also data without a manifest, except what may be being written right now.
    """
    kept, doomed, notes = _checkpoints(listing, now_s, keep_last, older_than_s)
    attempts: list[Attempt] = []
    if abandoned:
        attempts, more = _abandoned(listing)
        notes += more
    return Pruning(tuple(kept), tuple(doomed), tuple(attempts), tuple(notes))


def _checkpoints(
    listing: CheckpointListing, now_s: float, keep_last: int | None, older_than_s: float | None
) -> tuple[list[Checkpoint], list[Checkpoint], list[str]]:
    everything = list(listing.checkpoints)
    if keep_last is None and older_than_s is None:
        return everything, [], []
    good = sorted({c.ref.step for c in everything if not c.problem}, reverse=True)
    if not good:
        none = ["no checkpoint is complete: none is deleted"] if everything else []
        return everything, [], none
    kept: list[Checkpoint] = []
    doomed: list[Checkpoint] = []
    for checkpoint in everything:
        step = checkpoint.ref.step
        counted = sum(newer > step for newer in good)
        age_s = None if checkpoint.created_at_s is None else now_s - checkpoint.created_at_s
        stays = (
            counted == 0  # the newest complete one, its other attempts, and what is ahead of it
            or (keep_last is not None and counted < keep_last)
            or (older_than_s is not None and (age_s is None or age_s < older_than_s))
        )
        (kept if stays else doomed).append(checkpoint)
    return kept, doomed, []


def _abandoned(listing: CheckpointListing) -> tuple[list[Attempt], list[str]]:
    """Data without a manifest, and what of it stays, in words.

    A running job writes ahead of its run's newest checkpoint. What a run left that never
    published one can't be told from a job's first checkpoint: the caller must know.
    """
    if any(checkpoint.prefix is None for checkpoint in listing.checkpoints):
        return [], ["some manifest can't be read, its data may be good: no data is deleted"]
    written = [c for c in listing.checkpoints if c.created_at_s is not None]
    last = max(written, key=lambda c: c.created_at_s or 0.0, default=None)
    doomed: list[Attempt] = []
    notes: list[str] = []
    for attempt in listing.attempts:
        newest = max((c.ref.step for c in written if c.run == attempt.run), default=0)
        if last is not None and attempt.run == last.run and attempt.step > newest:
            notes.append(f"{attempt.prefix} stays: it may be being written")
        else:
            doomed.append(attempt)
    return doomed, notes


def carry_out(store: Store, pruning: Pruning) -> tuple[str, ...]:
    """Deletes what is planned, manifest before data. Returns what went wrong, in words."""
    in_use = {checkpoint.prefix for checkpoint in pruning.kept}
    warnings: list[str] = []
    for checkpoint in pruning.doomed:
        key = checkpoint.ref.url.removeprefix(f"{store.url}/")
        if warning := delete_checkpoint(store, key, in_use):
            warnings.append(warning)
    for attempt in pruning.abandoned:
        try:
            delete_attempt(store, attempt.prefix)
        except StoreFailed as error:
            warnings.append(f"{attempt.prefix} was not deleted entirely: {error}")
    return tuple(warnings)
