"""What a new controller does first: the job becomes its own, and it finds where to go on from.

Run folder, then checkpoints: from then on nobody else writes in either (``storage.owners``). Then
what the keepers of a killed controller saved becomes a checkpoint (``controller.rescue``), and the
record is cut where the newest checkpoint is. Nothing is started before all of this is done; a store
that is away is waited for, as long as a job may be suspended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from elastic_ft.config import Job
from elastic_ft.controller.continuity import Continuity, recorded_terms
from elastic_ft.controller.inbox import Inbox
from elastic_ft.controller.observer import Observer
from elastic_ft.controller.publisher import Publisher
from elastic_ft.controller.rescue import (
    INCOMPLETE,
    Gathered,
    RescueDeadlines,
    compose,
    is_known,
    keepers_named,
)
from elastic_ft.core import commands as cmd
from elastic_ft.core import events as ev
from elastic_ft.core.assignment import CheckpointRef
from elastic_ft.core.outages import REREAD_MAX_S, REREAD_MIN_S
from elastic_ft.errors import JobFailed, StoreFailed
from elastic_ft.observe.alive import Alive, Sign, last_sign
from elastic_ft.observe.outcome import check_resume_point
from elastic_ft.observe.run_folder import RunFolder, last_generation

log = logging.getLogger(__name__)
T = TypeVar("T")
FOR_ONE_START = {"checkpoint": {"from_scratch"}}  # of the job: not in job.yaml
ADOPT_SHARE = 0.8  # of the time for which survivors look for a controller; clocks may differ
KEEPERS_BEGIN_S = 5.0  # to say so to a slow store, once they know that their controller is gone


class TooLate(Exception):
    """Nobody was in charge for so long that survivors save and leave by now."""


class Takeover:
    """Of one start of a controller, in its thread.

    Attributes:
        run_id: under which keepers save, if they must.
        recorded: steps in the run folder.
        finish: how the job ends, if that is known before anything is started.
    """

    def __init__(
        self,
        job: Job,
        run_id: str,
        folder: RunFolder,
        publisher: Publisher,
        continuity: Continuity,
        inbox: Inbox,
        observer: Observer,
    ) -> None:
        self._job, self.run_id = job, run_id
        self._folder, self._publisher = folder, publisher
        self._continuity, self._inbox, self._observer = continuity, inbox, observer
        self._suspend_timeout_s = job.elastic.suspend_timeout_s
        self._awaited: set[str] = set()  # runs whose keepers were waited for
        # Of life, of the controller before this one; None once it says nothing of its keepers.
        self._last_sign: Sign | None = None
        self._sign_at_start: Sign | None = None
        self.recorded = 0
        self.finish: cmd.FinishJob | None = None

    def claim_folder(self, alive: Alive) -> tuple[str, ...]:
        """First: nobody else writes in the run folder from now on. Returns the runs there that did
        not end. Raises JobFailed, StoreFailed, UsageError."""
        self._last_sign = self._sign_at_start = last_sign(
            self._folder.url
        )  # it may have lived while we waited for it
        killed = self._take_over_folder()
        alive.start()
        self._folder.forget_result()
        self._folder.repair()
        return killed

    def claim(
        self,
        killed: tuple[str, ...],
        address: str = "",
        adopts: str = "",
        before: Callable[[], object] = lambda: None,
    ) -> bool:
        """Nobody else publishes a checkpoint from now on. ``address``, ``adopts``: as of
        ``owners.Owner``. ``before``: called before each attempt, may raise. False: the job ends
        before. Raises UsageError, Superseded."""

        def take() -> bool:
            before()
            return self._take_over_checkpoints(killed, address, adopts)

        return bool(self._when_readable(take))

    def adoptable_until_s(self, last_s: float) -> float:
        """Until when survivors can be counted on to be adopted (unix time). ``last_s``: when the
        controller before this one was last told anything."""
        share_s = ADOPT_SHARE * self._job.elastic.controller_timeout_s
        return self.in_charge_until_s(last_s) + share_s

    def in_charge_until_s(self, last_s: float) -> float:
        """When the controller before this one gave its last sign (unix time)."""
        sign = self._sign_at_start
        return max(last_s, sign.at_s) if sign is not None and sign.in_charge else last_s

    def complete(self, killed: tuple[str, ...]) -> tuple[CheckpointRef, ...] | None:
        """Returns the checkpoints to go on from; None if it is known by now how the job ends.

        Raises JobFailed, StoreFailed, ConfigError, UsageError.
        """
        if not self.claim(killed):
            return None
        self.recorded = self._folder.last_step()
        if not self._when_readable(self._rescue_all):
            return None
        self.recorded = self._folder.last_step()
        found = self._when_readable(self.resumable)
        return None if found is None else self._begin(found, killed)

    def _begin(
        self, found: tuple[CheckpointRef, ...], killed: tuple[str, ...]
    ) -> tuple[CheckpointRef, ...]:
        """Makes the record what the newest of ``found`` is of, and says so."""
        folder, recorded = self._folder, self.recorded
        folder.write_job(self._job.model_dump(mode="json", exclude=FOR_ONE_START))
        before = last_generation(folder.path / "events.jsonl")
        self._continuity.begin(before, self._publisher.claim.renamed_from)
        computed_by = folder.computed_by()
        found = tuple(replace(ref, generation=computed_by.get(ref.step, 0)) for ref in found)
        step = found[0].step if found else 0
        if found or self._job.checkpoint.from_scratch:  # else the core says: there is no way on
            folder.truncate(step)
        self._observer.last_step = folder.last_line()
        if killed:
            reason = f"the one before was cut off at step {recorded}, it goes on from step {step}"
            fields = {"step": step, "steps_lost": max(0, recorded - step)}
            self._observer.journal("controller_restarted", 0, reason, fields)
            if trouble := folder.forget_ended():
                self._observer.journal("checkpoint_warning", 0, trouble, {})
        if step > recorded > 0:
            self._tell_unrecorded(recorded, step)
        return found

    def _take_over_folder(self) -> tuple[str, ...]:
        """As ``RunFolder.take_over``, which is tried again while the store is away.

        Until it is ours there is no journal to say so in. Raises StoreFailed in the end; JobFailed
        if someone asks to stop.
        """
        until_s, pause_s = time.monotonic() + self._suspend_timeout_s, REREAD_MIN_S
        while True:
            try:
                return self._folder.take_over(self.run_id, self._job.name, self._continuity.accepts)
            except StoreFailed as error:
                if time.monotonic() + pause_s > until_s:
                    raise
                log.warning("the run folder can't be taken over, tried again: %s", error)
                why = error
            try:
                self._wait(pause_s)
            except InterruptedError as asked:
                raise JobFailed(f"{asked}; {why}") from asked
            pause_s = min(2 * pause_s, REREAD_MAX_S)

    def _take_over_checkpoints(self, killed: tuple[str, ...], address: str, adopts: str) -> bool:
        renamed = self._continuity.accepts
        self._publisher.take_over(self._folder.url, killed, renamed, address, adopts)
        return True

    def resumable(self) -> tuple[CheckpointRef, ...]:
        """Raises StoreFailed; ConfigError where the job would go on under other terms, or is beyond
        its last step."""
        found = self._publisher.resumable()
        for newest in found[:1]:
            check_resume_point(self._job.steps, newest.step, newest.url)
        self._continuity.check(*self._publisher.terms_of(found))
        return found

    def _when_readable(self, read: Callable[[], T]) -> T | None:
        """What ``read`` returns, once the store can be read; None if the job ends before.

        A store that is away for a while loses nothing: the job waits, as it would while it runs.
        """
        began_s, timeout_s = time.monotonic(), self._suspend_timeout_s
        pause_s = REREAD_MIN_S
        while True:
            try:
                return read()
            except StoreFailed as error:
                past_s = time.monotonic() - began_s
                why = f"the store can't be read: {error}"
                self._last_sign = None  # nor could keepers say a word there, for however long
            if past_s >= timeout_s:
                self.finish = cmd.FinishJob("suspended", f"{why}; for {past_s:.0f} s now")
                return None
            if pause_s == REREAD_MIN_S:
                tried = f"tried again for up to {timeout_s:g} s"
                self._observer.journal("suspended", 0, f"{why}: {tried}", {"workers": 0})
            try:
                told = self._inbox.get(min(pause_s, timeout_s - past_s))
            except queue.Empty:
                pause_s = min(2 * pause_s, REREAD_MAX_S)
                continue
            if isinstance(told, ev.StopRequested):  # nobody else can say anything yet
                self.finish = cmd.FinishJob("stopped", f"{told.reason}; {why}")
                return None

    def _rescue_all(self) -> bool:
        """Returns False where someone asked to stop meanwhile."""
        for run in self._publisher.emergencies():
            try:
                self._rescue(run)
            except InterruptedError as error:
                self.finish = cmd.FinishJob("stopped", str(error))
                return False
        return True

    def _wait(self, pause_s: float) -> None:
        """Before there is anybody to hear of. Raises InterruptedError if someone asks to stop."""
        with contextlib.suppress(queue.Empty):
            told = self._inbox.get(pause_s)
            if isinstance(told, ev.StopRequested):
                raise InterruptedError(f"{told.reason}, while waiting for keepers to save")

    def _rescue(self, run: str) -> None:
        """What the keepers of controller ``run`` saved, being killed, becomes a checkpoint.

        Raises StoreFailed: then it is all there for the next start, and nothing is lost by ours.
        """
        folder, publisher = self._folder, self._publisher
        expected = keepers_named(folder.path / "events.jsonl", run)
        patience = RescueDeadlines(begin_s=self._keepers_begin_s())
        if expected and run not in self._awaited:
            self._awaited.add(run)
            who = ", ".join(sorted(expected))
            reason = (
                f"the keepers of {who} may save what they hold: they have {patience.begin_s:.0f} s "
                f"to begin, {patience.whole_s:g} s in all"
            )
            self._observer.journal(
                "emergency_awaited", 0, reason, {"run": run, "nodes": sorted(expected)}
            )
        known = run in folder.unended or is_known(folder.path / "events.jsonl", run)
        gathered = publisher.gather(run, expected, patience, self._wait, whoever=not known)
        for refused in gathered.refused:
            self._observer.journal("checkpoint_warning", 0, refused, {})
        recorded, computed_by = folder.last_step(), folder.computed_by()
        found = publisher.resumable()
        newest = max((ref.step for ref in found), default=0)
        is_recorded = bool(folder.recorded_job()) or not found
        terms = recorded_terms(folder) if is_recorded else publisher.terms_of(found)[0]
        saved = compose(gathered.shards, self._job.name, run, recorded, terms, computed_by, newest)
        if saved is not None and saved.manifest.step > newest:
            folder.truncate(recorded)  # no torn line: others come after it
            if newest > recorded > 0:
                self._tell_unrecorded(recorded, newest)
            for unrecorded in saved.record:
                self._observer.step(unrecorded)
            folder.make_durable()  # first the record, then what refers to it
            publisher.publish_saved(saved.manifest)
            newest = saved.manifest.step
            reason = f"what the keepers of run {run} saved is the checkpoint of step {newest} now"
            fields = {"step": newest, "recorded": recorded}
            self._observer.journal("emergency_checkpoint", 0, reason, fields)
        unheard = not known and not gathered.heard
        if unheard or gathered.missing or any(shard.step > newest for shard in gathered.shards):
            self._tell_incomplete(run, gathered, newest)
        else:
            publisher.forget(run)

    def _tell_unrecorded(self, recorded: int, step: int) -> None:
        reason = f"steps {recorded + 1} to {step} are in the checkpoint, their lines were lost"
        fields = {"first_step": recorded + 1, "last_step": step}
        self._observer.journal("record_incomplete", 0, reason, fields)

    def _keepers_begin_s(self) -> float:
        """For how long keepers may not know yet that the controller before this one is gone."""
        begin_s = 1.25 * self._job.elastic.heartbeat_timeout_s + KEEPERS_BEGIN_S
        sign = self._last_sign
        if sign is None or not (sign.gone or sign.pid == os.getpid()):
            return begin_s  # it may be stopped: its keepers learn only now that it has a successor
        return min(begin_s, max(0.0, begin_s - (time.time() - sign.at_s)))

    def _tell_incomplete(self, run: str, gathered: Gathered, newest: int) -> None:
        """It stays in the store until a checkpoint is newer."""
        steps = sorted({shard.step for shard in gathered.shards if shard.step > newest})
        parts = [f"not all shards of steps {', '.join(map(str, steps))} are saved"] if steps else []
        if gathered.missing:
            parts.append(f"the keepers of {', '.join(gathered.missing)} have said nothing")
        if not parts:
            parts.append(
                f"nothing was heard of the keepers of run {run}, which was not in this folder"
            )
        fields = {"run": run, "step": newest, "nodes": gathered.missing}
        self._observer.journal(INCOMPLETE, 0, "; ".join(parts), fields)

    def saved_in_words(self, newest: int) -> str:
        """What keepers have saved of this run, for the next one. ``newest``: checkpoint's step."""
        at_once = RescueDeadlines(begin_s=0.0, quiet_s=0.0, whole_s=0.0)
        try:
            shards = self._publisher.gather(self.run_id, {}, at_once).shards
        except StoreFailed as error:
            return f"; what keepers saved is not known: {error}"
        recorded, computed_by = self._folder.last_step(), self._folder.computed_by()
        saved = compose(shards, self._job.name, self.run_id, recorded, None, computed_by, newest)
        if saved is None or saved.manifest.step <= newest:
            return "; keepers have saved no newer step"
        return f"; keepers have saved step {saved.manifest.step}, where the next start begins"
