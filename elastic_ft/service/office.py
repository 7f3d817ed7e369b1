"""Who knows how things stand: the one thread that is told, journals, and decides.

What it publishes (``ShareStanding``) is replaced whole, and only once the journal has what led to
it: so whoever acts on it may be killed at any time, and the next service does the same.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import Any

from elastic_ft.core.scheduling import decide, refuses
from elastic_ft.core.sharing import asks
from elastic_ft.core.typed import decoder
from elastic_ft.errors import ConfigError, StoreFailed, Superseded, UsageError
from elastic_ft.service.chronicle import Chronicle, Entry, NumberTaken
from elastic_ft.service.job_orders import JobOrder, Notice, told_of
from elastic_ft.service.share_standing import ASKS, Decision, JobEnd, ShareStanding
from elastic_ft.service.standing_snapshots import ShareSnapshot, StandingSnapshots

log = logging.getLogger(__name__)
TOGETHER_MAX = 256  # events in one object of the journal
DECISIONS_KEPT = 100  # of a job
TAIL_LINES = 1500  # of the journal; then comes a snapshot: told again within seconds
SET_BACK_S = 1.0  # a clock; less is a correction of it
CLOSES_WITHIN_S = 10.0  # in good order: whoever has asked for it waits
TERMS = "TermsChanged"  # of the journal: what was decided after it was decided by these
UNWRITTEN = "the service's journal can't be written now"
QUIET = (asks.Ticked, asks.CapacityChanged)


class Refused(UsageError):
    """What was asked for is not done; one line."""


class NotKnown(UsageError):
    """There is no such job."""


Question = Callable[[ShareStanding], "Notice | str"]  # a string: an answer that needs no event


class Office:
    """Attributes:
    standing: to be read by any thread.

    ``check``: raises Superseded where a later service has the folder, StoreFailed where that can't
    be told.
    """

    def __init__(
        self,
        chronicle: Chronicle,
        terms: asks.SharingTerms,
        check: Callable[[], object],
        on_superseded: Callable[[Superseded], object],
    ) -> None:
        self.terms, self.standing = terms, ShareStanding()
        self._chronicle, self._check, self._on_superseded = chronicle, check, on_superseded
        self._snapshots = StandingSnapshots(chronicle.store)
        self._lines = self._tail = 0  # of the journal; of them, those after the newest snapshot
        self._read_terms = asks.SharingTerms()  # as the journal has them
        self._terms_are_news = False  # nothing was decided by them yet
        self._ticked: Future[str] | None = None
        self._looked_s = math.inf  # the latest that the clock has shown since it was told
        self._asked: queue.Queue[tuple[Question, Future[str]] | None] = queue.Queue()
        self._is_over = False
        self._thread = threading.Thread(target=self._work, name="office", daemon=True)

    def open(self, read: Callable[[bool], object] = bool) -> int:
        """Goes on where the journal ends, from its newest snapshot. Returns how many lines it has.
        Raises StoreFailed, StorageError, Superseded, what ``read`` raises; ConfigError where a
        queue that has jobs is not there any more.

        ``read``: told, before anything is written, whether who wrote the journal up to here wanted
        something of an autoscaler.
        """
        if (kept := self._snapshots.newest(self._chronicle.is_at)) is not None:
            self._chronicle.go_on_after(kept.number, kept.nonce)
            self.standing, self._read_terms, self._lines = kept.standing, kept.terms, kept.lines
        self._hear(self._chronicle.read())
        read(self._read_terms.autoscaler and bool(self.standing.sharing.asked))
        while self._read_terms != self.terms:
            self._check_queues()
            try:
                said = {"event": TERMS, "at_s": time.time(), "terms": asdict(self.terms)}
                self._chronicle.append([said])
                self._read_terms, self._terms_are_news = self.terms, True
                self._count(1)
            except NumberTaken:
                self._catch_up()
        self._keep()
        self._thread.start()
        if self._terms_are_news:
            self._tell_time()
        return self._lines

    def _count(self, lines: int) -> None:
        self._lines, self._tail = self._lines + lines, self._tail + lines

    def _keep(self) -> None:
        """A snapshot, if one is due: in another thread, for it is replaced, never changed. It has
        all jobs ever: the more they are the rarer it is, so that a line costs no more."""
        if self._tail < max(TAIL_LINES, len(self.standing.orders) // 4):
            return
        if self._snapshots.begin_to_write(self._as_it_stands()):
            self._tail = 0

    def _as_it_stands(self) -> ShareSnapshot:
        number, nonce = self._chronicle.newest
        return ShareSnapshot(number, nonce, self._lines, self._read_terms, self.standing)

    def _check_queues(self) -> None:
        """Raises ConfigError."""
        for job in self.standing.sharing.jobs.values():
            if (queue := job.wish.queue) not in self.terms.queues:
                jobs = self.standing.sharing.jobs.values()
                mine = ", ".join(job.job for job in jobs if job.wish.queue == queue)
                raise ConfigError(f"queues: {queue} is not there any more, and has jobs: {mine}")

    def _hear(self, lines: list[Entry]) -> None:
        """All of them, or none."""
        standing, terms, are_news = self.standing, self._read_terms, self._terms_are_news
        for line in lines:
            if are_news := line["event"] == TERMS:
                terms = decoder(asks.SharingTerms)(line["terms"])
            else:
                standing, _ = _told(standing, told_of(line), terms)
        self.standing, self._read_terms, self._terms_are_news = standing, terms, are_news
        self._count(len(lines))

    def _catch_up(self) -> None:
        """With what the service before this one wrote before it saw that it was superseded. Raises
        Superseded where it is this one that was: looked at after the reading, so that no line of a
        later one is taken for an earlier one's."""
        number, nonce = self._chronicle.newest
        try:
            lines = self._chronicle.insist(self._chronicle.read)
            self._chronicle.insist(self._check)
            self._hear(lines)
        except BaseException:
            self._chronicle.go_on_after(number, nonce)  # a snapshot says what was heard
            raise

    def close(self, in_good_order: bool = False) -> None:
        """``in_good_order``: it leaves a snapshot. The next service may be an upgraded one, and
        whatever it reads of the journal it decides by its own rules."""
        self._asked.put(None)
        self._chronicle.close()
        if not in_good_order:
            return
        last = threading.Thread(target=self._leave_snapshot, name="last-snapshot", daemon=True)
        last.start()
        last.join(CLOSES_WITHIN_S)
        if last.is_alive():
            log.warning("no snapshot at the end: its store has not answered yet")

    def _leave_snapshot(self) -> None:
        try:
            self._thread.join(CLOSES_WITHIN_S)
            if self._thread.is_alive():
                raise StoreFailed("the journal is still being written")
            self._check()
            self._snapshots.finish(self._as_it_stands())
        except (StoreFailed, Superseded) as error:
            log.warning("no snapshot at the end: %s", error)
        except Exception:  # a bug, or what the folder has is not understood: the journal has it all
            log.exception("no snapshot at the end")

    def ask(self, question: Question) -> Future[str]:
        """``question`` is answered in this office's thread, by how things stand then: with what is
        to be told, or with an answer alone. Raises what it raises, and Refused; Superseded where
        the service ends."""
        answer: Future[str] = Future()
        self._asked.put((question, answer))
        if self._is_over:  # who looks after the queue may have looked for the last time
            self._refuse_rest()
        return answer

    @property
    def trouble(self) -> str:
        """Why the journal can't be written now; "" where it can."""
        return self._chronicle.trouble

    def check_journal(self) -> None:
        """Raises StoreFailed while it can't be written: who can do without does not wait for it."""
        if self.trouble:
            raise StoreFailed(f"{UNWRITTEN}: nothing was done: {self.trouble}")

    def tell(self, event: asks.SharingEvent, note: str = "", step: int = 0) -> Future[str]:
        """What has happened."""
        return self.ask(lambda standing: Notice(event, note=note, step=step))

    def tick(self) -> None:
        """If a timer of the core's is due, or it may be: see ``_is_due``."""
        now_s = time.time()
        is_told = self._is_due() and self._tell_time()
        self._looked_s = now_s if is_told else max(now_s, self._looked_s)

    def _is_due(self) -> bool:
        """Also where the clock was set back since a tick was told, or where none was yet: what it
        waits for may not need to be waited for."""
        now_s, wake_s = time.time(), self.standing.sharing.wake_at_s
        return wake_s is not None and (wake_s <= now_s or now_s < self._looked_s - SET_BACK_S)

    def _tell_time(self) -> bool:
        """Once: while the journal can't be written they would be thousands. False: not now."""
        if self._ticked is not None and not self._ticked.done():
            return False
        self._ticked = self.tell(asks.Ticked(time.time()))
        return True

    def _work(self) -> None:
        try:
            while not self._is_over and (asked := self._gathered()):
                try:
                    self._answer(asked)
                except Exception as error:
                    for _, answer in asked:
                        if not answer.done():
                            answer.set_exception(error)
                    if isinstance(error, Superseded):
                        self._on_superseded(error)
                        return
                    log.exception("the office")  # a bug: the next one finds what was journalled
        finally:
            self._is_over = True
            self._refuse_rest()

    def _gathered(self) -> list[tuple[Question, Future[str]]]:
        """What was asked before the office closed, so much at a time; waits for it. From now on
        nobody takes it back."""
        asked = list[tuple[Question, Future[str]]]()
        while not asked or (len(asked) < TOGETHER_MAX and not self._asked.empty()):
            more = self._asked.get()
            if more is None:
                self._is_over = True  # these are answered yet
                break
            if more[1].set_running_or_notify_cancel():
                asked.append(more)
        return asked

    def _refuse_rest(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                late = self._asked.get_nowait()
                if late is not None and late[1].set_running_or_notify_cancel():
                    late[1].set_exception(Superseded("the service ends"))

    def _answer(self, asked: list[tuple[Question, Future[str]]]) -> None:
        while True:
            standing, lines, answers = self._answers([question for question, _ in asked])
            try:
                if lines:
                    self._chronicle.append(lines)
                    self._count(len(lines))
                break
            except NumberTaken:
                self._catch_up()
        self.standing = standing
        self._keep()
        for (_, future), answer in zip(asked, answers, strict=True):
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    def _answers(
        self, questions: list[Question]
    ) -> tuple[ShareStanding, list[Entry], list[str | Exception]]:
        """By how things stand now: how they stand after it, and what is to be journalled first."""
        standing, lines = self.standing, list[Entry]()
        answers = list[str | Exception]()
        for question in questions:
            try:
                told = question(standing)
                if isinstance(told, str):
                    answers.append(told)
                    continue
                standing, line = _asked(standing, told, self.terms)
            except UsageError as error:
                answers.append(error)
                continue
            except Exception as error:  # a bug: whoever asked is told, nobody else is concerned
                log.exception("a question could not be answered")
                answers.append(error)
                continue
            if line is not None:
                lines.append(line)
            answers.append(told.order.id if told.order else "")
        return standing, lines, answers


def _asked(
    standing: ShareStanding, told: Notice, terms: asks.SharingTerms
) -> tuple[ShareStanding, Entry | None]:
    """Raises Refused, NotKnown: then nothing is journalled."""
    event = told.event
    if isinstance(event, asks.JobSubmitted) and (why := refuses(standing.sharing, event, terms)):
        raise Refused(why)
    after, commands = _told(standing, told, terms)
    for command in commands:
        if isinstance(command, asks.Refuse):
            known = command.job in standing.orders
            raise (Refused if known else NotKnown)(f"{command.job}: {command.reason}")
    if isinstance(event, QUIET) and after.sharing == standing.sharing:
        return standing, None
    decided = [_in_words(command) for command in commands]
    line = told.to_json()
    if decided := [each for each in decided if each is not None]:
        line["decided"] = [{"job": job, "what": d.what, "why": d.why} for job, d in decided]
    for command in commands:
        if isinstance(command, asks.AskAutoscaler):
            line["asked"] = {"bundles": command.bundles, "why": command.reason}
    return after, line


def _told(
    standing: ShareStanding, told: Notice, terms: asks.SharingTerms
) -> tuple[ShareStanding, tuple[asks.SharingCommand, ...]]:
    """Pure: a journal that is read again gives the same."""
    event, before = told.event, standing
    sharing, commands = decide(standing.sharing, event, terms)
    counts = standing.counts
    for kind in filter(None, map(_kind, commands)):
        counts = counts.put(kind, counts.get(kind, 0) + 1)
    standing = replace(standing, sharing=sharing, counts=counts)
    if isinstance(event, asks.JobSubmitted) and told.order is not None:
        standing = replace(
            standing,
            orders=standing.orders.put(event.job, told.order),
            requests=standing.requests.put(told.order.request, event.job),
            wishes=standing.wishes.put(event.job, event.wish),
        )
    elif isinstance(event, asks.PriorityChanged) and event.job in standing.wishes:
        wish = replace(standing.wishes[event.job], priority=event.priority)
        standing = replace(standing, wishes=standing.wishes.put(event.job, wish))
    elif isinstance(event, asks.JobBegan) and event.job not in standing.began_s:
        standing = replace(standing, began_s=standing.began_s.put(event.job, event.at_s))
    elif isinstance(event, asks.StopAsked) and told.now:
        standing = replace(standing, hurried=standing.hurried | {event.job})
    why = {c.job: c.reason for c in commands if isinstance(c, asks.GiveUpJob)}
    job = getattr(event, "job", "")  # an event ends no other
    if job in before.sharing.jobs and job not in sharing.jobs:
        how = JobEnd(sharing.ended[job], why.get(job, told.note), event.at_s, told.step)
        standing = replace(standing, ended=standing.ended.put(job, how))
    return _with_decisions(standing, event.at_s, commands), commands


def _with_decisions(
    standing: ShareStanding, at_s: float, commands: tuple[asks.SharingCommand, ...]
) -> ShareStanding:
    table = standing.decisions
    for command in commands:
        if (found := _in_words(command)) is not None:
            job, decision = found
            kept = (*table.get(job, ()), replace(decision, at_s=at_s))[-DECISIONS_KEPT:]
            table = table.put(job, kept)
    return standing if table is standing.decisions else replace(standing, decisions=table)


def _kind(command: asks.SharingCommand) -> str:
    """As it is counted; "" if it isn't."""
    match command:
        case asks.StartJob():
            return "start"
        case asks.ResizeJob():
            return "shrink" if command.less else "grow"
        case asks.SuspendJob():
            return "suspend"
        case asks.StopJob():
            return "stop"
        case asks.Requeue():
            return "requeue"
        case asks.GiveUpJob():
            return "give_up"
        case asks.AskAutoscaler():
            return ASKS
    return ""


def _in_words(command: asks.SharingCommand) -> tuple[str, Decision] | None:
    """The job, and what was decided on it; None if it is of no job."""
    match command:
        case asks.StartJob():
            what = f"start with {sum(n for _, n in command.places)}"
        case asks.ResizeJob():
            what = f"resize to {command.workers}"
        case asks.SuspendJob():
            what = "suspend"
        case asks.StopJob():
            what = "stop"
        case asks.Requeue():
            what = "start again"
        case asks.GiveUpJob():
            what = "give up"
        case _:
            return None
    return command.job, Decision(0.0, what, command.reason)


def entry_of(standing: ShareStanding, job: str) -> tuple[JobOrder, asks.Wish]:
    """Raises NotKnown."""
    order: Any = standing.orders.get(job)
    if order is None:
        raise NotKnown(f"there is no job {job:.100}")
    return order, standing.wishes[job]
