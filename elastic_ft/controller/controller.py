"""The controller: inbox -> journal -> ``core.membership.step`` -> executor. It decides nothing.

    event = inbox.get()
    journal(event)                                # written before it is acted on
    state, commands = step(state, event, policy)
    for command in commands: execute(command)     # its outcome comes back as an event

One thread. Slow work (``controller.publisher``) runs on others and answers with an event.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import logging
import os
import queue
import socket
import time
import typing
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar

from elastic_ft.config import Job
from elastic_ft.controller.continuity import Continuity, most_common, recorded_terms
from elastic_ft.controller.diagnosis import Inquiries
from elastic_ft.controller.host import Host
from elastic_ft.controller.inbox import Inbox
from elastic_ft.controller.planning import planning_of
from elastic_ft.controller.publisher import CHECKPOINTS_KNOWN, Publisher
from elastic_ft.controller.rescue import (
    INCOMPLETE,
    Gathered,
    RescueDeadlines,
    compose,
    is_known,
    keepers_named,
)
from elastic_ft.core import deadlines
from elastic_ft.core import events as ev
from elastic_ft.core.hangs import LAST_RESORT_TIMEOUTS, Progress
from elastic_ft.core.membership import step as decide
from elastic_ft.core.outages import REREAD_MAX_S, REREAD_MIN_S
from elastic_ft.core.policy import Policy, same_names
from elastic_ft.core.state import Recovery, State, Turn
from elastic_ft.core.typed import fields_of
from elastic_ft.errors import JobFailed, StoreFailed, Superseded
from elastic_ft.faults import PointFault
from elastic_ft.groups.store_links import serve_store
from elastic_ft.observe import snapshots
from elastic_ft.observe.accounts import Accounts
from elastic_ft.observe.alive import Alive, Sign, find
from elastic_ft.observe.handover import await_handover
from elastic_ft.observe.metrics import Metrics, write_targets
from elastic_ft.observe.outcome import check_resume_point, complete, read_result
from elastic_ft.observe.run_folder import RunFolder, last_generation
from elastic_ft.observe.startup import Startup
from elastic_ft.transport.control import (
    PULSES_PER_TIMEOUT,
    ControlServer,
    FaultFired,
    Heartbeat,
    NodeHealth,
    Note,
    Pulse,
    Stood,
    Welcome,
    forms,
    to_each,
)
from elastic_ft.transport.messages import MessageRefused

log = logging.getLogger(__name__)
T = TypeVar("T")
WATCH_EVERY_S = 0.25
STEPS_EVERY_S = 0.1  # while nothing else happens, what workers tell of their steps is looked at
FOR_ONE_START = {"checkpoint": {"from_scratch"}}  # of the job: not in job.yaml
ACCOUNT_EVERY_S = 1.0
KEEPERS_SAVE_S = 60.0  # what they have, where no checkpoint has it
KEEPERS_BEGIN_S = 5.0  # to say so to a slow store, once they know that their controller is gone
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)  # of the run folder


# What handling a message may raise for what is in it.
UNREADABLE = (MessageRefused, LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
EVENTS = frozenset(typing.get_args(ev.Event))
OF_STEPS = frozenset({ev.StepApplied, ev.StepHeld, Heartbeat, NodeHealth})  # flat, and frequent
LINES = frozenset({ev.RecordStep, ev.Journal})  # commands that are done by writing one
JOURNALS_OWN = frozenset({"at_s", "seq", "event", "generation", "reason"})


@dataclass(frozen=True, slots=True)
class Said:
    """What came over a worker's, or a keeper's, connection."""

    member: ev.Member
    message: Any


@dataclass(frozen=True, slots=True)
class RefusedMessage:
    """Over such a connection came what could not be read."""

    member: ev.Member
    reason: str


def policy_of(job: Job) -> Policy:
    """Raises UsageError where the planner is to lay out what it can't."""
    elastic, checkpoint = job.elastic, job.checkpoint
    pause_s = deadlines.pause_s(elastic.pause_timeout_s, elastic.max_workers)
    given = same_names(Policy, job.parallel, elastic, job.snapshot, checkpoint)
    given |= {
        "strategy": job.parallel.data_strategy,
        "planning": planning_of(job) if job.parallel.strategy == "auto" else None,
        "multiple_of": job.multiple_of,
        "pause_timeout_s": pause_s,
        "form_timeout_s": deadlines.form_s(elastic.form_timeout_s, elastic.max_workers),
        "boundary_timeout_s": LAST_RESORT_TIMEOUTS * elastic.hang_timeout_s + pause_s,
        "publish_timeout_s": elastic.suspend_timeout_s,
        "checkpoint_every_s": None if checkpoint.every_s == "auto" else checkpoint.every_s,
        "checkpoint_auto": checkpoint.every_s == "auto",
    }
    if checkpoint.keep_for_h is not None:
        given["keep_last"] = max(CHECKPOINTS_KNOWN, checkpoint.keep_last)
    return Policy(**given).in_multiples()


class Controller:
    """Runs one job on a host, from its newest good checkpoint to its end.

    Args:
        job: the job.
        host: starts and kills workers.
        run: the run folder; an earlier run in it is continued.
        checkpoint_url: where checkpoints are.
        address: this machine's, as workers reach it.
        faults: to inject at named points.
        accept_changes: go on from a checkpoint that was trained under other terms, or another name.
    """

    def __init__(
        self,
        job: Job,
        host: Host,
        run: RunFolder,
        checkpoint_url: str,
        *,
        address: str = "127.0.0.1",
        faults: Sequence[PointFault] = (),
        accept_changes: bool = False,
    ) -> None:
        self.job, self.host, self.run_folder = job, host, run
        self.policy = policy_of(job)
        self.state = State()
        self.run_id = uuid.uuid4().hex[:12]
        self.checkpoint_url = checkpoint_url
        self._publisher = Publisher(
            job, self.run_id, checkpoint_url, self.post, self._restoring_from, run.make_durable
        )
        self._address = address
        self._faults = tuple(faults)
        self._fired: set[int] = set()
        self._data_read: dict[ev.WorkerId, dict[str, Any]] = {}  # by workers that are ready
        self._continuity = Continuity(job, accept_changes, self._journal)
        self._inbox = Inbox()
        self._events = 0  # that the metrics have not been told of
        self.is_steady = False  # steps go by: what workers tell of them can wait a little
        self._timers: list[tuple[float, int, ev.TimerFired]] = []
        self._timer_count = 0
        elastic = job.elastic
        self._progress = Progress(elastic.hang_timeout_s, elastic.heartbeat_timeout_s)
        self._next_watch_s = self._next_account_s = self._next_pulse_s = 0.0
        self._tcp_store: Any = None
        self._server: ControlServer | None = None
        self._started_at_s = self._ended_at_s = time.time()
        self._accounts = Accounts(self._started_at_s, elastic.workers_per_node, elastic.max_workers)
        self.metrics = Metrics(job.name, self.policy)
        self._last_metrics: dict[str, Any] = {}
        self._alive = Alive(run.path)
        self._startup = Startup(self._started_at_s)
        self._inquiries = Inquiries(self._send, host.kill_worker, self._journal)
        self._recoveries: dict[int, Recovery] = {}  # by generation; the core keeps the last ones
        self._finish: ev.FinishJob | None = None
        self._recorded = 0  # steps in the run folder, when it was opened
        self._closed = False
        self._awaited: set[str] = set()  # runs whose keepers were waited for
        self._last_sign: Sign | None = None  # of life, of the controller before this one
        self.on_step: Callable[[dict[str, Any]], None] | None = None

    # ------------------------------------------------------------------- outside

    def post(self, event: Any) -> None:
        """Puts an event into the inbox; from any thread."""
        self._inbox.put(event)

    def stop(self, reason: str) -> None:
        """Asks for a clean stop: the running step, a checkpoint, the end. Twice: at once."""
        self.post(ev.StopRequested(time.time(), reason))

    def run(self) -> dict[str, Any]:
        """Runs the job to its end. Returns what is in result.json.

        A job that is complete is not run again, and its result stays. Raises ConfigError if it
        would go on from a later step than its last.
        """
        try:
            return self._run_unless_complete()
        finally:
            self._alive.stop()
            self._publisher.close()  # again, where the run has come to its end

    def _run_unless_complete(self) -> dict[str, Any]:
        if ended := self._complete():
            return ended
        with contextlib.suppress(StoreFailed):  # else it is waited for, once the folder is ours
            self._resumable()  # before anything is touched
            # A controller that lives ends with a checkpoint: not a step of it is lost.
            await_handover(self.run_folder.url, log.info)
        if ended := self._complete():  # by the one that was asked
            return ended
        try:
            return self._run()
        except Exception as error:
            self._failed(error)
            raise

    def _complete(self) -> dict[str, Any]:
        """The result of the job that is complete; {} if it is not."""
        ended = read_result(self.run_folder.url)
        if self.policy.from_scratch or not complete(ended, self.job.steps):
            return {}
        self.run_folder.close()
        return ended

    def _failed(self, error: Exception) -> None:
        """The journal's last line says why, and a remote folder has it. Another job's does not."""
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        with contextlib.suppress(OSError, StoreFailed, JobFailed):  # it may be what has failed
            if self.run_folder.is_ours:
                self._journal("controller_failed", self.state.generation, reason, {})
        with contextlib.suppress(OSError):  # of a full disk: what it does not take is lost now
            self.run_folder.close()

    def _run(self) -> dict[str, Any]:
        try:
            found = self._open()
        except BaseException:
            self._close()  # whatever it had opened
            raise
        if found is None:
            return self._give_up()
        try:
            before = last_generation(self.run_folder.path / "events.jsonl")
            policy = {"type": "Policy", "at_s": self._started_at_s, **asdict(self.policy)}
            self.run_folder.record_inbox(policy)
            self._handle(ev.JobStarted(time.time(), found, before, self._recorded))
            while self._finish is None:
                self._turn()
            self._drain_releases()
            self._ended_at_s = time.time()
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise
            what = f"the run folder can't be written: {error.strerror}: {self.run_folder.path}"
            last = Turn(self.state, self.policy, time.time()).last_good()
            self._close()
            raise JobFailed(f"{what}; {last}{self._saved_in_words()}") from error
        finally:
            self._close()
        return self._result(self._finish)

    # --------------------------------------------------------------------- set-up

    def _open(self) -> tuple[ev.CheckpointRef, ...] | None:
        """Returns the checkpoints to go on from; None if it is known by now how the job ends."""
        self._last_sign = find(self.run_folder.url)  # it may have lived while we waited for it
        # First: nobody else writes in either place from now on.
        killed = self._take_over_folder()
        self._alive.start()
        self.run_folder.forget_result()
        if not self._when_readable(partial(self._take_over_checkpoints, killed)):
            return None
        self.run_folder.repair()
        self._recorded = self.run_folder.last_step()
        if not self._when_readable(self._rescue_all):
            return None
        recorded = self._recorded = self.run_folder.last_step()
        found = self._when_readable(self._resumable)
        if found is None:
            return None
        self.run_folder.write_job(self.job.model_dump(mode="json", exclude=FOR_ONE_START))
        before = last_generation(self.run_folder.path / "events.jsonl")
        self._continuity.begin(before, self._publisher.claim.renamed_from)
        computed_by = self.run_folder.computed_by()
        found = tuple(replace(ref, generation=computed_by.get(ref.step, 0)) for ref in found)
        step = found[0].step if found else 0
        if found or self.policy.from_scratch:  # else the core says that there is no way on
            self.run_folder.truncate(step)
        self._last_metrics = self.run_folder.last_line()
        if killed:
            reason = f"the one before it did not end, at step {recorded}: from step {step}"
            fields = {"step": step, "steps_lost": max(0, recorded - step)}
            self._journal("controller_restarted", 0, reason, fields)
            self.run_folder.forget_ended()
        if step > recorded > 0:
            self._tell_unrecorded(recorded, step)
        network = self.job.network
        self._tcp_store = serve_store(self._address, network.port_range)
        self._server = ControlServer(
            self._address,
            self._welcome,
            self._on_message,
            self._on_connection_end,
            self._on_refused,
            network.port_range,
        )
        self._server.start()
        port = self.metrics.serve(network.metrics_address, network.port_range)
        served = network.metrics_address
        served = self._address if served in ("0.0.0.0", "::") else served
        write_targets(self.run_folder.path, f"{served}:{port}")
        fields = {"port": port, "run": self.run_id}
        self._journal("metrics_served", 0, "Prometheus metrics of this job", fields)
        self._publisher.sweep()
        self.host.start(self.post, (self._address, self._server.port), self._server.key)
        return found

    def _take_over_folder(self) -> tuple[str, ...]:
        """As ``RunFolder.take_over``, which is tried again while the store is away.

        Until it is ours there is no journal to say so in. Raises StoreFailed in the end; JobFailed
        if someone asks to stop.
        """
        until_s, pause_s = time.monotonic() + self.policy.suspend_timeout_s, REREAD_MIN_S
        while True:
            try:
                return self.run_folder.take_over(
                    self.run_id, self.job.name, self._continuity.accepts
                )
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

    def _take_over_checkpoints(self, killed: tuple[str, ...]) -> bool:
        renamed = self._continuity.accepts
        self._publisher.take_over(self.run_folder.url, behind=killed, renamed=renamed)
        return True

    def _resumable(self) -> tuple[ev.CheckpointRef, ...]:
        """Raises StoreFailed; ConfigError where the job would go on under other terms, or is beyond
        its last step."""
        found = self._publisher.resumable()
        for newest in found[:1]:
            check_resume_point(self.job.steps, newest.step, newest.url)
        self._continuity.check(*self._publisher.terms_of(found))
        return found

    def _when_readable(self, read: Callable[[], T]) -> T | None:
        """What ``read`` returns, once the store can be read; None if the job ends before.

        A store that is away for a while loses nothing: the job waits, as it would while it runs.
        """
        began_s, timeout_s = time.monotonic(), self.policy.suspend_timeout_s
        pause_s = REREAD_MIN_S
        while True:
            try:
                return read()
            except StoreFailed as error:
                past_s = time.monotonic() - began_s
                why = f"the store can't be read: {error}"
                self._last_sign = None  # nor could keepers say a word there, for however long
            if past_s >= timeout_s:
                self._finish = ev.FinishJob("suspended", f"{why}; for {past_s:.0f} s now")
                return None
            if pause_s == REREAD_MIN_S:
                tried = f"tried again for up to {timeout_s:g} s"
                self._journal("suspended", 0, f"{why}: {tried}", {"workers": 0})
            try:
                told = self._inbox.get(min(pause_s, timeout_s - past_s))
            except queue.Empty:
                pause_s = min(2 * pause_s, REREAD_MAX_S)
                continue
            if isinstance(told, ev.StopRequested):  # nobody else can say anything yet
                self._finish = ev.FinishJob("stopped", f"{told.reason}; {why}")
                return None

    def _give_up(self) -> dict[str, Any]:
        """The job has ended before it could begin: what is in the run folder stays as it is."""
        assert self._finish is not None
        self._journal("finished", 0, self._finish.reason, {"status": self._finish.status})
        self._publisher.close()
        self._ended_at_s = time.time()
        self.state = replace(self.state, committed=self._recorded)
        return self._result(self._finish)

    def _rescue_all(self) -> bool:
        """Returns False where someone asked to stop meanwhile."""
        for run in self._publisher.emergencies():
            try:
                self._rescue(run)
            except InterruptedError as error:
                self._finish = ev.FinishJob("stopped", str(error))
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
        folder, publisher = self.run_folder, self._publisher
        expected = keepers_named(folder.path / "events.jsonl", run)
        patience = RescueDeadlines(begin_s=self._keepers_begin_s())
        if expected and run not in self._awaited:
            self._awaited.add(run)
            who = ", ".join(sorted(expected))
            reason = f"waiting up to {patience.whole_s:g} s for what keepers of {who} save"
            self._journal("emergency_awaited", 0, reason, {"run": run, "nodes": sorted(expected)})
        known = run in folder.unended or is_known(folder.path / "events.jsonl", run)
        gathered = publisher.gather(run, expected, patience, self._wait, whoever=not known)
        for refused in gathered.refused:
            self._journal("checkpoint_warning", 0, refused, {})
        recorded, computed_by = folder.last_step(), folder.computed_by()
        found = publisher.resumable()
        newest = max((ref.step for ref in found), default=0)
        is_recorded = bool(folder.recorded_job()) or not found
        terms = recorded_terms(folder) if is_recorded else publisher.terms_of(found)[0]
        saved = compose(gathered.shards, self.job.name, run, recorded, terms, computed_by, newest)
        if saved is not None and saved.manifest.step > newest:
            folder.truncate(recorded)  # no torn line: others come after it
            if newest > recorded > 0:
                self._tell_unrecorded(recorded, newest)
            for unrecorded in saved.record:
                self._record_step(unrecorded)
            folder.make_durable()  # first the record, then what refers to it
            publisher.publish_saved(saved.manifest)
            newest = saved.manifest.step
            reason = f"put together from what the keepers of run {run} saved"
            fields = {"step": newest, "recorded": recorded}
            self._journal("emergency_checkpoint", 0, reason, fields)
        unheard = not known and not gathered.heard
        if unheard or gathered.missing or any(shard.step > newest for shard in gathered.shards):
            self._tell_incomplete(run, gathered, newest)
        else:
            publisher.forget(run)

    def _tell_unrecorded(self, recorded: int, step: int) -> None:
        reason = f"steps {recorded + 1} to {step} are in the checkpoint, their lines were lost"
        fields = {"first_step": recorded + 1, "last_step": step}
        self._journal("record_incomplete", 0, reason, fields)

    def _keepers_begin_s(self) -> float:
        """For how long keepers may not know yet that the controller before this one is gone."""
        begin_s = 1.25 * self.job.elastic.heartbeat_timeout_s + KEEPERS_BEGIN_S
        sign = self._last_sign
        if sign is None or not (sign.gone or sign.pid == os.getpid()):
            return begin_s  # it may be stopped: its keepers learn only now that it has a successor
        return min(begin_s, max(0.0, begin_s - (time.time() - sign.at_s)))

    def _tell_incomplete(self, run: str, gathered: Gathered, newest: int) -> None:
        """It stays in the store until a checkpoint is newer."""
        steps = sorted({shard.step for shard in gathered.shards if shard.step > newest})
        parts = [f"of steps {', '.join(map(str, steps))} some shards are saved"] if steps else []
        if gathered.missing:
            parts.append(f"keepers of {', '.join(gathered.missing)} saved nothing in time")
        if not parts:
            parts.append(
                f"nothing was heard of the keepers of run {run}, which was not in this folder"
            )
        fields = {"run": run, "step": newest, "nodes": gathered.missing}
        self._journal(INCOMPLETE, 0, "; ".join(parts), fields)

    def _welcome(self, member: ev.Member) -> Welcome:
        return Welcome(
            self.job,
            self.run_id,
            self.checkpoint_url,
            (self._address, self._tcp_store.port),
            self._faults,
            dict(self._continuity.data),
            self._publisher.claim.number,
        )

    def _close(self) -> None:
        """What no checkpoint has, keepers save first. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._server is not None and self._left_unsaved():
            self._server.close()
            self.host.close(KEEPERS_SAVE_S)
        else:
            self._release_keepers()
            self.host.close()
        if self._server is not None:
            self._server.close()
        self.metrics.close()
        if self._server is not None and self.run_folder.is_ours:
            with contextlib.suppress(OSError):  # a disk that is full has said so before
                write_targets(self.run_folder.path, "")
        # Who asks to stop gives it some seconds, and kills it then.
        self._publisher.close(at_once=self._finish is not None and self._finish.status == "stopped")
        self._tcp_store = None

    def _left_unsaved(self) -> bool:
        """Whether keepers may have steps that the next start would train again."""
        if self._server is None:
            return False  # there were none
        if self._finish is None:
            return True
        return self._finish.status != "completed" and self.state.committed > self._newest()

    def _newest(self) -> int:
        """The step of the newest checkpoint, 0 if there is none."""
        return max((ref.step for ref in self.state.checkpoints), default=0)

    def _release_keepers(self) -> None:
        """The job has ended in good order: what they have is of no use any more."""
        names = self._server.connected() if self._server is not None else ()
        for name in names:
            if name.startswith(ev.KEEPER):
                self._send(name, ev.ReleaseWorker(name, "the job has ended"))

    def _saved_in_words(self) -> str:
        """What keepers have saved of this run, for the next one."""
        at_once = RescueDeadlines(begin_s=0.0, quiet_s=0.0, whole_s=0.0)
        try:
            shards = self._publisher.gather(self.run_id, {}, at_once).shards
        except StoreFailed as error:
            return f"; what keepers saved is not known: {error}"
        recorded, computed_by = self.run_folder.last_step(), self.run_folder.computed_by()
        saved = compose(
            shards, self.job.name, self.run_id, recorded, None, computed_by, self._newest()
        )
        if saved is None or saved.manifest.step <= self._newest():
            return "; keepers have saved no newer step"
        return f"; keepers have saved step {saved.manifest.step}, where the next start begins"

    def _drain_releases(self) -> None:
        """Gives released workers a moment to end by themselves before the host kills them."""
        assert self._server is not None
        deadline = time.monotonic() + 5.0
        while self._workers_connected() and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                self._hear_late(self._inbox.get(0.02))

    def _hear_late(self, told: Any) -> None:
        """The end is decided; what is found out of checkpoints is said all the same."""
        if isinstance(told, ev.CheckpointDamaged):
            fields = {"step": told.step, "url": told.url}
            self._journal("checkpoint_refused", self.state.generation, told.reason, fields)
        elif isinstance(told, Note):
            self._journal(told.event, told.generation, told.reason, told.fields)

    def _workers_connected(self) -> bool:
        assert self._server is not None
        return any(not name.startswith(ev.KEEPER) for name in self._server.connected())

    # ------------------------------------------------------------------- the inbox

    def _on_message(self, member: ev.Member, message: Any) -> None:
        if self.is_steady and type(message) in OF_STEPS:
            self._inbox.put_aside(Said(member, message))
        else:
            self._inbox.put(Said(member, message))

    def _on_refused(self, member: ev.Member, reason: str) -> None:
        self._inbox.put(RefusedMessage(member, reason))

    def _on_connection_end(self, member: ev.Member, silent_s: float) -> None:
        now, why = time.time(), "its connection ended"
        if member.worker.startswith(ev.KEEPER):
            self._inbox.put(ev.KeeperLost(now, member.node))
        else:
            self._inbox.put(ev.WorkerLost(now, member.worker, why, round(silent_s, 4)))

    def _turn(self) -> None:
        """All that was told since the last one; timers that are due; a look at who hangs."""
        now = time.monotonic()
        due = self._timers[0][0] if self._timers else now + WATCH_EVERY_S
        patience = max(0.0, min(due, max(self._next_watch_s, now), now + STEPS_EVERY_S) - now)
        if (inquiry_due_s := self._inquiries.due_s) is not None:
            patience = max(0.0, min(patience, inquiry_due_s - now))
        self._listen(patience)
        if self._timers and self._timers[0][0] <= time.monotonic():
            self._listen(0.0)  # what came before the deadline counts, also while others were heard
        if self._events:
            self.metrics.show(self.state, self._events)
            self._events = 0
        if self._finish is not None:
            return
        self._inquiries.look()
        self._fire_timers()
        self._watch()
        self.is_steady = is_steady(self.state)

    def _listen(self, patience: float) -> None:
        """Does what all that came asks for; waits up to ``patience`` seconds where nothing has."""
        with self.run_folder.together():
            for message in self._inbox.take(patience):
                if self._finish is None:
                    self._handle(message)
                else:
                    self._hear_late(message)

    def _fire_timers(self) -> None:
        while self._timers and self._timers[0][0] <= time.monotonic():
            _, _, fired = heapq.heappop(self._timers)
            self._handle(replace(fired, at_s=time.time()))

    def _handle(self, message: Any) -> None:
        if isinstance(message, RefusedMessage):
            self._refuse(message.member, message.reason)
        elif isinstance(message, Said):
            self._hear(message.member, message.message)
        else:
            self._handle_known(message)

    def _hear(self, member: ev.Member, message: Any) -> None:
        """What is said may be wrong in ways that no type can tell."""
        if type(message) in EVENTS:
            self._step(message, member)
            return
        try:
            self._handle_known(message)
        except UNREADABLE as error:
            self._refuse(member, f"{type(message).__name__}: {type(error).__name__}: {error}")

    def _refuse(self, member: ev.Member, reason: str) -> None:
        """Nothing that a worker says may end the job: it is its last word."""
        assert self._server is not None
        self._journal("message_refused", self.state.generation, reason, {"worker": member.worker})
        self._server.hang_up(member.worker)

    def _handle_known(self, message: Any) -> None:
        if isinstance(message, Heartbeat):
            self._inquiries.reached(message.worker, message.point)
            self._progress.beat(
                message.worker, message.step, message.place, message.points, time.monotonic()
            )
        elif isinstance(message, Note):
            if clash := JOURNALS_OWN & message.fields.keys():
                raise MessageRefused(f"a note with the journal's own fields: {sorted(clash)}")
            self._journal(message.event, message.generation, message.reason, message.fields)
        elif isinstance(message, FaultFired):
            self._fault_fired(message)
        elif isinstance(message, Stood):
            self._inquiries.answer(message)
        elif isinstance(message, Superseded):
            raise message
        elif isinstance(message, NodeHealth):
            self._progress.keeper_beat(message.node, time.monotonic())
            self.metrics.node(message.node, asdict(message))
        else:
            self._step(message)

    def _step(self, event: ev.Event, sender: ev.Member | None = None) -> None:
        """``sender``: who told it, if it came over the wire."""
        if self._finish is not None:
            return
        now_s = time.time()
        self._events += 1
        self._record(event, now_s)
        if isinstance(event, ev.WorkerLost) and event.worker in self.state.ready:
            self.host.kill_worker(event.worker)  # cut off, perhaps alive: it must not return (I1)
        if isinstance(event, ev.WorkerReady):
            self._data_read[event.member.worker] = event.data
        if isinstance(event, ev.StepApplied):
            self._progress.applied(event.worker, event.step, time.monotonic())
            if self.state.ranks.get(event.worker) == 0:
                self._progress.measured(event.took_s, len(self.state.ranks))
        before = self.state
        try:
            self.state, commands = decide(before, event, self.policy)
        except UNREADABLE as error:
            if sender is None:
                raise
            self._refuse(sender, f"{type(event).__name__}: {type(error).__name__}: {error}")
            return
        if self.state.recoveries is not before.recoveries:
            self._recoveries |= {found.generation: found for found in self.state.recoveries}
        if isinstance(event, ev.TimerFired):  # who reached no safe point in time
            late = [c.worker for c in commands if isinstance(c, ev.KillWorker)]
            self._inquiries.ask(before.ready[worker] for worker in late if worker in before.ready)
        if any(type(command) not in LINES for command in commands):
            self.run_folder.flush()  # first the record, then what follows from it
        for command in commands:
            self._execute(command)
        is_broken = self.state.abort and self.state.generation > before.generation
        if is_broken and before.ranks and before.phase in ("running", "forming"):
            self._inquiries.broke(before, self.state, event, self._progress.marks)
        elif isinstance(event, ev.WorkerLost):
            self._inquiries.lost(event.worker)
        self._accounts.on(now_s, event, commands, self.state)
        if self._startup.on(now_s, event, self.state):
            fields = self._startup.parts
            self._journal("startup", self.state.generation, self._startup.reason, fields)
        self._after(before.phase)
        self._show(event)

    def _record(self, event: ev.Event, now_s: float) -> None:
        """Journals what the core is told, so that it can be told again (``observe.replay``).

        Steps come by the thousand: without their metrics, which decide nothing.
        """
        if self.run_folder.inbox_is_full:
            policy = {"type": "Policy", "at_s": self._started_at_s, **asdict(self.policy)}
            self.run_folder.begin_inbox(now_s, policy, snapshots.encode(self.state))
        fields = fields_of(event) if type(event) in OF_STEPS else asdict(event)
        line = {"type": type(event).__name__, "told_at_s": now_s, **fields}
        line.pop("metrics", None)
        self.run_folder.record_inbox(line)

    def _after(self, phase_before: str) -> None:
        state = self.state
        if state.phase != phase_before and state.phase == "running" and state.assignment:
            self._progress.forget()
            self.host.formed(state.assignment)
            self.metrics.formed(state.assignment)

    def _show(self, event: ev.Event) -> None:
        """In the metrics, whatever an event tells beside what becomes of it."""
        if isinstance(event, ev.StepApplied):
            self.metrics.rank(event, self.state.ranks.get(event.worker))
        elif not isinstance(event, ev.StepHeld):
            self.metrics.nodes(self._accounts.nodes)
        if isinstance(event, ev.KeeperLost):
            self.metrics.forget_node(event.node)

    # ---------------------------------------------------------------- the executor

    def _execute(self, command: ev.Command) -> None:
        executors[type(command)](self, command)

    def _want_workers(self, command: ev.WantWorkers) -> None:
        self.host.want_workers(command.total)

    def _avoid_node(self, command: ev.AvoidNode) -> None:
        self.host.avoid_node(command.node, command.for_s)

    def _kill_worker(self, command: ev.KillWorker) -> None:
        self._inquiries.kill(command.worker)

    def _to_worker(
        self, command: ev.ReleaseWorker | ev.Bench | ev.UseKeeper | ev.TakeCheckpoint
    ) -> None:
        self._send(command.worker, command)

    def _drop_kept(self, command: ev.DropKept) -> None:
        self._send(ev.KEEPER + command.node, command)

    def _to_workers(self, command: ev.PauseWorkers | ev.StopAtBoundary) -> None:
        if isinstance(command, ev.PauseWorkers):
            fields = {"abort": command.abort}
            self._write("pausing", command.generation, command.reason, fields)
        message = to_each(command)
        for worker in command.workers:
            self._send(worker, message)

    def _form(self, command: ev.FormGeneration) -> None:
        assignment = command.assignment
        read = [self._data_read.get(member.worker, {}) for member in assignment.members]
        self._continuity.opened(most_common(read), assignment.generation - 1)
        extras = self.host.prepare(assignment)
        refs = self.state.checkpoints
        checkpointed = refs[0].step if refs else 0
        for worker, form in forms(assignment, extras, frozenset(self._fired), checkpointed):
            self._send(worker, form)

    def _send(self, worker: ev.WorkerId, message: Any) -> bool:
        """A worker that can't be reached is lost; the connection's end says so."""
        assert self._server is not None
        return self._server.send(worker, message)

    def _record_step(self, command: ev.RecordStep) -> None:
        metrics = dict(command.metrics)
        sample_ids = metrics.pop("sample_ids", None)
        line = metrics | {
            "step": command.step,
            "generation": command.generation,
            "world_size": command.world_size,
            "layout": command.layout,
            "samples": command.step * self.job.batch.global_batch_size,
            "committed_at_s": round(time.time(), 6),
        }
        self.run_folder.record_step(line, sample_ids)
        self._last_metrics = line
        self.metrics.step(line, self.job.batch.global_batch_size)
        if self.on_step is not None:
            self.on_step(line)

    def _roll_back(self, command: ev.RollBack) -> None:
        self.run_folder.truncate(command.step)

    def _start_timer(self, command: ev.StartTimer) -> None:
        self._timer_count += 1
        due = time.monotonic() + command.after_s
        fired = ev.TimerFired(0.0, command.timer, command.generation)
        heapq.heappush(self._timers, (due, self._timer_count, fired))

    def _journal_line(self, command: ev.Journal) -> None:
        self._write(command.event, command.generation, command.reason, command.fields)

    def _journal(self, event: str, generation: int, reason: str, fields: dict[str, Any]) -> None:
        """A line that the core did not ask for: a replay leaves it out."""
        line = self._write(event, generation, reason, fields)
        noted = {"type": "Noted", "at_s": line["at_s"], "seq": line["seq"]}
        self.run_folder.record_inbox(noted)

    def _write(
        self, event: str, generation: int, reason: str, fields: dict[str, Any]
    ) -> dict[str, Any]:
        line = self.run_folder.journal(time.time(), event, generation, reason, fields)
        self.metrics.event(event, line)
        log.info("g%d %s: %s", generation, event, reason)
        return line

    def _commit_checkpoint(self, command: ev.CommitCheckpoint) -> None:
        layout = str(self.state.assignment.layout) if self.state.assignment else ""
        self._publisher.commit(command, layout, self._continuity.terms)

    def _restoring_from(self) -> tuple[str, ...]:
        """The checkpoint that workers may be reading."""
        state = self.state
        if state.phase == "running" or state.assignment is None:
            return ()
        return (state.assignment.source.url,)

    def _abandon_checkpoint(self, command: ev.AbandonCheckpoint) -> None:
        self._publisher.abandon(command)

    def _finish_job(self, command: ev.FinishJob) -> None:
        self._finish = command

    # ------------------------------------------------------------------- the watch

    def _watch(self) -> None:
        now = time.monotonic()
        if now < self._next_watch_s:
            return
        if (absent_s := now - self._next_watch_s) > WATCH_EVERY_S:
            self._progress.overlook(absent_s)
        self._next_watch_s = now + WATCH_EVERY_S
        self.run_folder.check_owner()
        self._look_for_request()
        if now >= self._next_account_s:
            self._next_account_s = now + ACCOUNT_EVERY_S
            self._publisher.look()
            self.metrics.goodput(self._accounts.totals(time.time()))
        if now >= self._next_pulse_s:
            timeout_s = self.job.elastic.heartbeat_timeout_s
            self._next_pulse_s = now + timeout_s / PULSES_PER_TIMEOUT
            assert self._server is not None
            self._server.send_all(Pulse())
        self._lose_silent_keepers(now)
        state = self.state
        if state.phase not in ("running", "pausing", "forming"):
            return
        self.metrics.silent(self._progress.still_s(state, now))
        judgement = self._progress.judge(state, now)
        self._inquiries.ask(state.ready[worker] for worker in judgement.hung)
        for worker, hung in judgement.hung.items():
            silent_s = round(now - hung.since_s, 4)
            self._step(ev.WorkerHung(time.time(), worker, hung.reason, silent_s))
        if judgement.stuck and state.assignment is not None:
            self._progress.forget()
            first, generation = min(state.ranks), state.assignment.generation
            self._step(
                ev.CollectiveFailed(
                    time.time(), first, generation, state.committed, judgement.stuck
                )
            )

    def _lose_silent_keepers(self, now: float) -> None:
        """Stopped, swapped out, cut off: it may come back, but as nobody's keeper."""
        assert self._server is not None
        for node, silent in self._progress.silent_keepers(self.state, now).items():
            name = ev.KEEPER + node
            self._server.dismiss(name, ev.ReleaseWorker(name, f"{silent.reason}: it was replaced"))
            self.host.kill_keeper(node)
            self._step(ev.KeeperLost(time.time(), node, silent.reason))

    def _look_for_request(self) -> None:
        """Someone outside may ask for another number of workers, or to hand the job over."""
        if self.state.phase == "ended":
            return
        try:
            asked = self.run_folder.new_request()
            hand_over = self.run_folder.is_asked_to_hand_over() and not self.state.stopping
        except (OSError, ValueError) as error:
            fields = {"workers": 0, "request": ""}
            self._journal("resize_refused", self.state.generation, str(error), fields)
            return
        if asked is not None:
            self._step(ev.ResizeRequested(time.time(), asked.workers, asked.request))
        if hand_over:
            self._step(ev.StopRequested(time.time(), "another start of the job takes over"))

    def _fault_fired(self, message: FaultFired) -> None:
        self._fired.add(message.index)
        fault = self._faults[message.index]
        self._journal(
            "fault_fired",
            self.state.generation,
            f"{fault.action} at {fault.point}",
            {
                "worker": message.worker,
                "index": message.index,
                "at_step": message.step,
                "fired_at_s": message.at_s,
                **{k: v for k, v in asdict(fault).items() if v is not None},
            },
        )

    # --------------------------------------------------------------------- the end

    def _result(self, finish: ev.FinishJob) -> dict[str, Any]:
        for told in self._inbox.take(0.0):
            self._hear_late(told)
        self.run_folder.record_inbox({"type": "Ended", "at_s": self._ended_at_s})
        accounts = self._accounts.totals(self._ended_at_s)
        unsaved = self._left_unsaved()
        result = {
            "status": finish.status,
            "reason": finish.reason + (self._saved_in_words() if unsaved else ""),
            "steps": self.state.committed,
            "samples": self.state.committed * self.job.batch.global_batch_size,
            "final_loss": self._last_metrics.get("loss"),
            "state_digest": finish.state_digest,
            "goodput": accounts.goodput,
            "badput": accounts.badput,
            "startup": self._startup.parts,
            "wall_s": accounts.wall_s,
            "worker_seconds": accounts.as_dict(),
            "generations": self.state.generation,
            "recoveries": [asdict(recovery) for recovery in self._recoveries.values()],
            "checkpoints": [asdict(ref) for ref in self.state.checkpoints],
            "faults_fired": sorted(self._fired),
            "ended_at_s": round(self._ended_at_s, 3),
        }
        self.run_folder.drop_request()
        self.run_folder.write_result(result)
        if not unsaved:  # first: who is killed now leaves no keepers to be waited for
            self._publisher.ended()
        self.run_folder.close()
        return result


def is_steady(state: State) -> bool:
    """A generation trains, and its first step is committed: who waits for that waits no longer."""
    if state.phase != "running" or state.assignment is None:
        return False
    return state.committed > state.assignment.source.step


executors: dict[type, Callable[[Controller, Any], None]] = {
    ev.WantWorkers: Controller._want_workers,
    ev.AvoidNode: Controller._avoid_node,
    ev.KillWorker: Controller._kill_worker,
    ev.ReleaseWorker: Controller._to_worker,
    ev.Bench: Controller._to_worker,
    ev.UseKeeper: Controller._to_worker,
    ev.TakeCheckpoint: Controller._to_worker,
    ev.DropKept: Controller._drop_kept,
    ev.PauseWorkers: Controller._to_workers,
    ev.StopAtBoundary: Controller._to_workers,
    ev.FormGeneration: Controller._form,
    ev.RecordStep: Controller._record_step,
    ev.RollBack: Controller._roll_back,
    ev.CommitCheckpoint: Controller._commit_checkpoint,
    ev.AbandonCheckpoint: Controller._abandon_checkpoint,
    ev.StartTimer: Controller._start_timer,
    ev.Journal: Controller._journal_line,
    ev.FinishJob: Controller._finish_job,
}


def own_address() -> str:
    """This machine's address on its default route, or loopback if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1: nothing is sent
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
