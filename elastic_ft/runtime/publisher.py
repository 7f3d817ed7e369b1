"""The controller's hand in the checkpoint store: what is published, deleted, and found again.

The controller is one thread that must never wait for a store: what takes time runs on a pool here
and answers with an event.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from elastic_ft.config import Job
from elastic_ft.core import events as ev
from elastic_ft.core.manifest import Manifest, ShardEntry, TensorSpec
from elastic_ft.core.terms import Terms, terms_in
from elastic_ft.errors import StateDamaged
from elastic_ft.runtime import emergency
from elastic_ft.runtime.control import Note
from elastic_ft.storage import checkpoints
from elastic_ft.storage.store import Store, open_store

CHECKPOINTS_KNOWN = 64  # to fall back to, where age decides what is kept


class Publisher:
    """Args:
    run: this start of the controller; names all that it writes.
    post: takes the events, from any thread.
    in_use: the checkpoints that workers may be reading; they are not deleted.
    """

    def __init__(
        self,
        job: Job,
        run: str,
        url: str,
        post: Callable[[Any], None],
        in_use: Callable[[], tuple[str, ...]],
    ) -> None:
        self._job, self._run, self._post, self._in_use = job, run, post, in_use
        self._store: Store = open_store(url)
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="checkpoint")
        self._not_deleted: list[ev.AbandonCheckpoint] = []

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    # ---------------------------------------------------------------- before the start

    def resumable(self, recorded: int) -> tuple[ev.CheckpointRef, ...]:
        """What is committed, the newest first, but for what is ahead of the ``recorded`` steps of
        the run folder, unless that has none at all.

        They are left of a run that fell back to an older one: taking them would leave a hole in
        the ledger (I2). Raises StoreFailed.
        """
        found = checkpoints.committed(self._store)
        within = tuple(ref for ref in found if ref.step <= recorded)
        return within or (found if not recorded else ())

    def terms_of(
        self, found: tuple[ev.CheckpointRef, ...]
    ) -> tuple[Terms, ev.CheckpointRef | None]:
        """The terms of the newest of these that can be read, and which it is. {}: it has none, as
        none had that this program once wrote. Raises StoreFailed.
        """
        for ref in found:
            with contextlib.suppress(StateDamaged):  # its workers will say so, and go on as here
                return terms_in(checkpoints.load_manifest(self._store, ref).extra), ref
        return {}, None

    def rescue(self, killed: str, recorded: int, terms: Terms) -> emergency.Saved | None:
        """What the keepers of controller ``killed`` saved becomes a checkpoint, if it is newer
        than those there are. ``terms``: what that controller trained under. Raises StoreFailed.
        """
        shards = emergency.gather(self._store, killed)
        saved = emergency.compose(shards, self._job.name, killed, recorded, terms)
        if saved is not None:
            if any(ref.step >= saved.manifest.step for ref in self.resumable(recorded)):
                saved = None
            else:
                checkpoints.commit(self._store, saved.manifest, CHECKPOINTS_KNOWN)
        emergency.forget(self._store)
        return saved

    def sweep(self) -> None:
        """Frees what earlier runs wrote and never published."""
        self._pool.submit(self._sweep)

    def _sweep(self) -> None:
        try:
            checkpoints.sweep_abandoned(self._store, keep_runs=[self._run])
        except Exception as error:  # harmless: the next start sweeps again
            self._warn(0, f"sweeping abandoned uploads: {type(error).__name__}: {error}")

    # ---------------------------------------------------------------------- commands

    def commit(self, command: ev.CommitCheckpoint, layout: str, terms: Terms) -> None:
        """Verifies the shards and publishes the manifest."""
        self._pool.submit(self._commit, command, layout, terms)

    def abandon(self, command: ev.AbandonCheckpoint) -> None:
        """Deletes what was written of it."""
        self._pool.submit(self._abandon, command)

    def _commit(self, command: ev.CommitCheckpoint, layout: str, terms: Terms) -> None:
        began = time.monotonic()
        try:
            done = self._publish(command, layout, terms)
        except Exception as error:  # whatever the store or the check says: the job goes on
            reason = f"{type(error).__name__}: {error}"
            self._post(ev.CheckpointFailed(time.time(), command.step, reason))
            return
        for warning in done.warnings:
            self._warn(command.generation, warning)
        seconds = round(time.monotonic() - began, 4)
        self._post(
            ev.CheckpointCommitted(time.time(), command.step, done.ref.url, done.nbytes, seconds)
        )
        left, self._not_deleted = self._not_deleted, []
        for abandoned in left:  # the store works again
            self._abandon(abandoned)

    def _publish(
        self, command: ev.CommitCheckpoint, layout: str, terms: Terms
    ) -> checkpoints.Committed:
        manifest = Manifest(
            job=self._job.name,
            run=self._run,
            step=command.step,
            generation=command.generation,
            nonce=uuid.uuid4().hex,
            layout=layout,
            created_at_s=time.time(),
            tensors={n: TensorSpec(dtype, tuple(s)) for n, (dtype, s) in command.tensors.items()},
            entries=tuple(ShardEntry.from_dict(item) for item in command.shards),
            extra={"terms": dict(terms)},
        )
        keep = self._job.checkpoint
        keep_for_s = None if keep.keep_for_h is None else keep.keep_for_h * 3600
        return checkpoints.commit(self._store, manifest, keep.keep_last, keep_for_s, self._in_use())

    def _abandon(self, command: ev.AbandonCheckpoint) -> None:
        prefix = checkpoints.attempt_prefix(self._run, command.generation, command.step)
        try:
            checkpoints.abandon(self._store, prefix)
        except Exception as error:  # tried again after the next commit, or swept at the next start
            self._not_deleted.append(command)
            self._warn(command.generation, f"{prefix}: {type(error).__name__}: {error}")

    def _warn(self, generation: int, reason: str) -> None:
        self._post(Note("controller", generation, "checkpoint_warning", reason))
