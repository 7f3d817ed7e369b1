"""The controller's hand in the checkpoint store: what is published, deleted, and found again.

The controller is one thread that must never wait for a store: what takes time runs on threads here
and answers with an event. What is deleted has a thread of its own, and so has the look at who owns
the store: neither keeps a checkpoint waiting, nor its outcome.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

from elastic_ft.config import Job
from elastic_ft.controller import rescue
from elastic_ft.controller.errands import Errands
from elastic_ft.core import commands as cmd
from elastic_ft.core import events as ev
from elastic_ft.core.assignment import CheckpointRef, NodeId
from elastic_ft.core.manifest import Manifest, ShardEntry, TensorSpec
from elastic_ft.core.terms import Terms, terms_of_manifest
from elastic_ft.errors import OutOfTime, StateDamaged, StoreFailed, Superseded, Unpublishable
from elastic_ft.storage import checkpoints, owners
from elastic_ft.storage.cancellable import CancellableStore
from elastic_ft.transport.control import Note

log = logging.getLogger(__name__)
CHECKPOINTS_KNOWN = 64  # to fall back to, where age decides what is kept
CONFIRM_AGAIN_S = 1.0
AGAIN_S = 2.0  # before the last manifest is tried again
CLOSE_S = 60.0  # for what is being published or deleted at the end; for the last one to be read


class Publisher:
    """Args:
    run: this start of the controller; names all that it and its workers write.
    post: takes the events, and ``Superseded``, from any thread.
    in_use: the checkpoints that workers may be reading; they are not deleted.
    record: makes the steps recorded so far durable, from any thread; a manifest comes after.
    """

    def __init__(
        self,
        job: Job,
        run: str,
        url: str,
        post: Callable[[Any], None],
        in_use: Callable[[], tuple[str, ...]],
        record: Callable[[], None],
    ) -> None:
        self._job, self._post, self._in_use = job, post, in_use
        self._owner = self._run = run
        self._record = record
        self._store = CancellableStore(url)  # a mounted one may hang
        self._claim: owners.Claim | None = None
        self._reading = CancellableStore(url)
        self._newest: Manifest | None = None  # that was published
        self._damaged: set[str] = set()  # URLs of manifests
        self._commits = Errands("checkpoint", at_a_time=2)
        self._deletes, self._looks = Errands("checkpoint-deletes"), Errands("checkpoint-owner")
        self._looking = self._is_hurried = False
        self._impatient = threading.Event()  # nothing is tried again
        self._asked = (0, 0)  # step and generation of what was to be published last
        self._read_whole = ""  # the nonce of a manifest, before it was published
        self._not_deleted: list[cmd.AbandonCheckpoint] = []

    def close(self, at_once: bool = False) -> None:
        """Within CLOSE_S, of each of commits and deletes; a store that hangs is left then.
        ``at_once``: what is being read back is not waited for."""
        if at_once:
            self._is_hurried = True
            self._reading.close()
        self._impatient.set()
        self._commits.drop()
        if not self._commits.close(CLOSE_S):
            log.warning("a checkpoint is being published, and its store hangs: it is left alone")
        self._deletes.close(CLOSE_S)
        self._reading.close()
        self._looks.close(0.0)

    def hurry(self) -> None:
        """Someone asks to stop: nothing is tried again. From any thread."""
        self._impatient.set()

    # ------------------------------------------------------------------------ ownership

    def take_over(
        self,
        run_folder: str,
        behind: Collection[str],
        renamed: bool = False,
        address: str = "",
        adopts: str = "",
    ) -> None:
        """The checkpoint URL is this run's from now on.

        Args:
            behind: the runs that this one has superseded in its run folder.
            renamed: another job's URL is this one's, under its earlier name.
            address: where its workers can call this controller, should they have had another.
            adopts: the run whose workers these are: what they write goes on under its name.

        Raises UsageError where the URL is another job's; Superseded where this run is; StoreFailed.
        """
        self._claim = owners.take_over(
            self._store,
            job=self._job.name,
            run=self._owner,
            run_folder=run_folder,
            behind=behind,
            renamed=renamed,
            address=address,
            adopts=adopts,
        )
        self._run = adopts or self._owner
        if adopts:
            self._looks.submit(self._settle_in)

    def _settle_in(self) -> None:
        """After an adoption: what the one before may publish from now on does not count; and one
        that had adopted the run itself leaves nothing to rescue under its own name."""
        with self._told("the change of the controller"):  # the next start looks for what is missing
            self.claim.checkpoints()
            before = self.claim.before
            if before is not None and before.adopts == self._run:
                self.claim.ended(before.run)

    @property
    def has_claim(self) -> bool:
        return self._claim is not None

    @property
    def claim(self) -> owners.Claim:
        assert self._claim is not None, "the checkpoint URL was not taken over"
        return self._claim

    @property
    def unrescued(self) -> tuple[str, ...]:
        """Earlier runs here that did not end and were not rescued, the oldest first."""
        return self.claim.unended

    def ended(self) -> None:
        """This run ends in good order: there will be nothing to rescue."""
        if self._claim is None:  # the store was away from the start
            return
        last = Errands("checkpoint-end")
        last.submit(self._ended)
        if not last.close(CLOSE_S):  # the next start looks for what is not there
            log.warning("the end of this run is not recorded: the store hangs")

    def _ended(self) -> None:
        try:
            for run in {self._owner, self._run}:
                self.claim.ended(run)
        except StoreFailed as error:
            log.warning("the end of this run is not recorded: %s", error)

    def look(self) -> None:
        """Whether another controller has taken over: if so ``Superseded`` is posted."""
        if not self._looking:
            self._looking = True
            self._looks.submit(self._look)

    def _look(self) -> None:
        with self._told("who owns the checkpoint URL"):  # not known: nothing is published meanwhile
            self.claim.check()
        self._looking = False

    def confirm(self, then: Callable[[], None]) -> None:
        """``then`` is called, from a thread here, once the store says that nobody else has the job.
        If another has, ``Superseded`` is posted instead."""
        self._looks.submit(lambda: self._confirm(then))

    def _confirm(self, then: Callable[[], None]) -> None:
        try:
            self.claim.check()
        except Superseded as error:
            self._post(error)
        except Exception as error:  # not known: it is asked again
            self._warn(0, f"who owns the checkpoint URL: {type(error).__name__}: {error}")
            time.sleep(CONFIRM_AGAIN_S)
            self.confirm(then)
        else:
            then()

    # ---------------------------------------------------------------- before the start

    def resumable(self) -> tuple[CheckpointRef, ...]:
        """What is committed and counts, the newest first. Raises StoreFailed."""
        if self._claim is None:  # nothing is decided yet: a look
            return owners.counting(self._store, checkpoints.committed(self._store))
        return self._claim.checkpoints()

    def terms_of(self, found: tuple[CheckpointRef, ...]) -> tuple[Terms, CheckpointRef | None]:
        """The terms of the newest of these that can be read, and which it is. {}: it has none, as
        none had that this program once wrote. Raises StoreFailed.
        """
        for ref in found:
            with contextlib.suppress(StateDamaged):  # its workers will say so, and go on as here
                return terms_of_manifest(checkpoints.load_manifest(self._store, ref).extra), ref
        return {}, None

    def emergencies(self) -> tuple[str, ...]:
        """The runs of which keepers may have saved something, the newest first; those that no
        owner names come last. Raises StoreFailed.
        """
        known = (*self.unrescued, self._run)
        said = [run for run in rescue.runs(self._store) if run not in known]
        unnamed = [run for run in said if not owners.is_rescued(self._store, run)]
        return (*reversed(self.unrescued), *unnamed)

    def gather(
        self,
        run: str,
        expected: Mapping[NodeId, float],
        patience: rescue.RescueDeadlines,
        wait: Callable[[float], None] = time.sleep,
        whoever: bool = False,
    ) -> rescue.Gathered:
        """What the keepers of ``run`` saved. Raises StoreFailed."""
        return rescue.gather(self._store, run, expected, patience, wait, whoever)

    def publish_saved(self, manifest: Manifest) -> None:
        """Its record is durable. Raises StoreFailed, Superseded."""
        checkpoints.publish(self._store, self._signed(manifest), self.claim.check)

    def forget(self, run: str) -> None:
        """All that its keepers said, being published or older than what is.

        Raises StoreFailed, Superseded.
        """
        self.claim.check()
        self.claim.ended(run)  # what is left then is swept: nobody waits for keepers any more
        rescue.forget_saved(self._store, run)

    def _signed(self, manifest: Manifest) -> Manifest:
        """With the number of its publisher: it shows whose it is once another has taken over."""
        extra = {**manifest.extra, "owner": self.claim.number}
        return dataclasses.replace(manifest, extra=extra)

    def sweep(self) -> None:
        """Frees what earlier runs wrote and never published."""
        self._deletes.submit(self._sweep)

    def _sweep(self) -> None:
        keep = [self._run, *self.unrescued]
        with self._told("sweeping abandoned uploads"):  # harmless: the next start sweeps again
            self.claim.check()
            for run in set(rescue.runs(self._store)).difference(keep):
                if owners.is_rescued(self._store, run):  # of keepers that were cut off from it
                    rescue.forget_saved(self._store, run)
            keep += rescue.runs(self._store)
            for warning in checkpoints.sweep_abandoned(self._store, keep, self.claim.check):
                self._warn(0, warning)

    # ---------------------------------------------------------------------- commands

    def commit(self, command: cmd.CommitCheckpoint, layout: str, terms: Terms) -> None:
        """Verifies the shards and publishes the manifest."""
        self._asked = (command.step, command.generation)
        self._commits.submit(partial(self._commit, command, layout, terms))

    def abandon(self, command: cmd.AbandonCheckpoint) -> None:
        """Deletes what was written of it."""
        self._deletes.submit(partial(self._abandon, command))

    def _commit(self, command: cmd.CommitCheckpoint, layout: str, terms: Terms) -> None:
        began = time.monotonic()
        try:
            manifest = self._signed(self._manifest(command, layout, terms))
            done = self._published(manifest)
        except Superseded as error:
            self._post(error)
            return
        except Exception as error:  # whatever the store or the check says: the job goes on
            reason = f"{type(error).__name__}: {error}"
            self._post(ev.CheckpointFailed(time.time(), command.step, reason))
            return
        seconds = round(time.monotonic() - began, 4)
        self._post(
            ev.CheckpointCommitted(time.time(), command.step, done.ref.url, done.nbytes, seconds)
        )
        self._newest = manifest
        self._deletes.submit(partial(self._clean_up, manifest, done.ref))

    def _published(self, manifest: Manifest) -> checkpoints.Committed:
        """What no later one has is tried again where a store is away, also that of the record.
        Raises StoreFailed, Superseded."""
        until_s = time.monotonic() + self._job.elastic.suspend_timeout_s
        is_told = is_read = False
        while True:
            try:
                self._record()
                if not is_read:
                    self._read_first(manifest)
                    is_read = True
                return checkpoints.publish(self._store, manifest, self.claim.check)
            except StoreFailed as error:
                is_final = isinstance(error, Unpublishable) or time.monotonic() > until_s
                last = self._in_words(manifest)
                if is_final or not last or self._impatient.wait(AGAIN_S):
                    raise
                why = f"step {manifest.step} is {last}, and is published once it can be: {error}"
            if not is_told:
                self._warn(manifest.generation, why)
                is_told = True

    def _in_words(self, manifest: Manifest) -> str:
        """That no later one has what it has; "" if one may. A loop of the user's ends where it
        likes: its newest may be its last."""
        if manifest.step >= self._job.steps:
            return "the last"
        is_newest = (manifest.step, manifest.generation) == self._asked
        return "the last so far" if is_newest and self._job.loop is not None else ""

    def _read_first(self, manifest: Manifest) -> None:
        """With the last step's the job is complete, and nobody holds its state any more: so it is
        read before it is published. Raises Unpublishable where it is damaged, StoreFailed."""
        is_last = manifest.step >= self._job.steps
        if not is_last or not self._job.checkpoint.read_back:
            return
        try:
            within_s = min(CLOSE_S, self._job.elastic.suspend_timeout_s / 2)  # the core's patience
            flaw = self._flaw(manifest, time.monotonic() + within_s)
        except StoreFailed as error:
            if not isinstance(error, OutOfTime) and not self._impatient.is_set():
                raise
            why = f"step {manifest.step} is published before it was read back: {error}"
            return self._warn(manifest.generation, why)
        if flaw:
            raise Unpublishable(f"checkpoint of step {manifest.step} refused: {flaw}")
        self._read_whole = manifest.nonce

    def _flaw(self, manifest: Manifest, until_s: float = math.inf) -> str:
        """What is wrong with its shards, if anything. Raises StoreFailed; OutOfTime by then."""
        cap = self._job.checkpoint.max_upload_mb_per_s  # one worker's
        pace = checkpoints.RateLimit(cap * 1e6 * checkpoints.writers(manifest) if cap else math.inf)
        pace.until_s = until_s
        return checkpoints.first_flaw(self._reading, manifest, pace)

    def _manifest(self, command: cmd.CommitCheckpoint, layout: str, terms: Terms) -> Manifest:
        return Manifest(
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

    def _clean_up(self, newest: Manifest, ref: CheckpointRef) -> None:
        """Deletes what nobody needs now that ``newest`` is published, and reads back whole."""
        if newest is self._newest and self._reads_back(newest, ref):
            self._prune(newest)
        left, self._not_deleted = self._not_deleted, []
        for abandoned in left:  # the store works again
            self._abandon(abandoned)

    def _reads_back(self, newest: Manifest, ref: CheckpointRef) -> bool:
        """Whether it is all there, as it was written. Its shards were published by their lengths.

        Takes its time, at the rate at which its workers together may write: where others are
        published meanwhile, only the newest of them is read after it, and none is deleted before.
        """
        if not self._job.checkpoint.read_back or newest.nonce == self._read_whole:
            return True
        try:
            flaw = self._flaw(newest)
        except StoreFailed as error:
            why = f"step {newest.step} can't be read back, so no older one is deleted: {error}"
            if self._is_hurried:
                why = (
                    f"step {newest.step} was not read back, nor an older one deleted: asked to stop"
                )
            self._warn(newest.generation, why)
            return False
        if flaw:
            self._damaged.add(ref.url)
            self._post(ev.CheckpointDamaged(time.time(), ref.step, ref.url, flaw))
        return not flaw

    def _prune(self, newest: Manifest) -> None:
        keep = self._job.checkpoint
        keep_for_s = None if keep.keep_for_h is None else keep.keep_for_h * 3600
        with self._told("older checkpoints were not pruned", newest.generation):  # tried again
            counted = owners.counted_in(self._store)
            for warning in checkpoints.prune(
                self._store,
                newest,
                keep.keep_last,
                keep_for_s,
                self._in_use(),
                self.claim.check,
                lambda ref: ref.url not in self._damaged and counted(ref),
            ):
                self._warn(newest.generation, warning)

    def _abandon(self, command: cmd.AbandonCheckpoint) -> None:
        prefix = checkpoints.attempt_prefix(self._run, command.generation, command.step)
        try:
            self.claim.check()
            checkpoints.delete_attempt(self._store, prefix)
        except Superseded as error:
            self._post(error)
        except Exception as error:  # tried again after the next commit, or swept at the next start
            self._not_deleted.append(command)
            self._warn(command.generation, f"{prefix}: {type(error).__name__}: {error}")

    @contextlib.contextmanager
    def _told(self, what: str, generation: int = 0) -> Iterator[None]:
        """Whatever goes wrong is told, and no more: the job goes on."""
        try:
            yield
        except Superseded as error:
            self._post(error)
        except Exception as error:
            self._warn(generation, f"{what}: {type(error).__name__}: {error}")

    def _warn(self, generation: int, reason: str) -> None:
        self._post(Note("controller", generation, "checkpoint_warning", reason))
