"""What follows from how things stand, for one job: until the world is as it should be.

Nothing is remembered that the next service could not find again: a step looks at what is there, and
does the next thing. So a service that is killed between any two lines does it once all the same.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from elastic_ft.config import parse_job
from elastic_ft.core.commits import UNSAVED
from elastic_ft.core.policy import Policy
from elastic_ft.core.sharing import asks
from elastic_ft.core.sharing.ledger import SharedJob, as_many, count, removed
from elastic_ft.core.typed import decoder
from elastic_ft.errors import ElasticError, StoreFailed, UsageError, one_line
from elastic_ft.hosts.ray.names import (
    Remains,
    RunNames,
    actor_named,
    clear_away,
    end_actor,
    groups_of,
)
from elastic_ft.observe import resize_request, stop_request
from elastic_ft.observe.lines import local_path
from elastic_ft.service.cluster_watch import Sight
from elastic_ft.service.job_orders import JobOrder
from elastic_ft.service.office import UNWRITTEN, Office
from elastic_ft.service.story import JobStory
from elastic_ft.storage.store import Store, if_there, open_store

log = logging.getLogger(__name__)
MARK = "service-start.json"
STOP_AGAIN_S = 2.0
GONE_S = 3.0  # without a controller, after one was asked for
START_WITHIN_S = 60.0  # of a run folder that can't be read or written; then the start has failed
FREED_TIMEOUT_S = 30.0  # from the job's end until its places are free by themselves
TELL_TIMEOUT_S = 600.0


class Submit(Protocol):
    """Starts a job on the cluster, and leaves it there. Raises UsageError, RayError."""

    def __call__(self, job: Any, run_url: str) -> None: ...


@dataclass(slots=True)
class StartMark:
    """In the run folder: which start it is in. ``seq``: the journal's last line before it."""

    start: int = 0
    seq: int = -1


_mark = decoder(StartMark)


class JobHand:
    """Of one job. ``step`` is called again and again, by one thread at a time."""

    def __init__(self, order: JobOrder, run_url: str, office: Office, submit: Submit) -> None:
        self.order, self.run_url = order, run_url
        self.names = RunNames(order.name, run_url)
        self.story = JobStory(run_url)
        self.trouble = ""
        self._troubled_s = 0.0  # monotonic, since when
        self._unread_s = 0.0  # monotonic, when its run folder could not be read last
        self._office, self._submit = office, submit
        self._store: Store = open_store(run_url)
        self._start_timeout_s = _start_timeout_s(order)
        self._mark: StartMark | None = None
        self._submitted_s = 0.0  # monotonic, when its controller was known to be asked for
        self._asked: tuple[int, dict[str, int]] | None = None
        self._stop_asked_s = -STOP_AGAIN_S
        self._ended_s: float | None = None
        self._untold: Future[str] | None = None  # what it has told, and is not journalled yet

    def step(self, sight: Sight) -> None:
        job = None
        try:
            self._await_told()
            job = self._office.standing.job(self.order.id)
            if job is not None:
                self._step(job, sight)
            self.trouble, self._troubled_s = "", 0.0
        except (ElasticError, OSError) as error:  # a store that is away: the next step tries again
            self.trouble = " ".join(str(error).split())
            self._troubled_s = self._troubled_s or time.monotonic()
            log.warning("%s: %s", self.order.id, self.trouble)
            if job is not None and self._untold is None and self._starts_in_vain(job, sight):
                self._tell(asks.StartFailed(time.time(), job.job, job.start, self.trouble))
                self._troubled_s = 0.0

    def _starts_in_vain(self, job: SharedJob, sight: Sight) -> bool:
        """It has room that it can make no use of."""
        lives = self._submitted_s or self.names.prefix in sight.led
        troubled_s = sight.asked_s - self._troubled_s
        return not lives and job.phase in ("starting", "stopping") and troubled_s > START_WITHIN_S

    def _step(self, job: SharedJob, sight: Sight) -> None:
        if is_at_work(job):
            self.story.look()
            if self.story.trouble:
                self._unread_s = time.monotonic()
            if self._has_begun(job):
                self._follow(job, sight)
            elif job.has_room:
                self._begin(job)
            elif job.phase == "stopping":
                self._tell(asks.JobEnded(time.time(), job.job, "stopped"), "it had not begun")
            else:
                self._tell(asks.JobSuspended(time.time(), job.job, job.start))

    # ------------------------------------------------------------------------------- its start

    def _has_begun(self, job: SharedJob) -> bool:
        if self._mark is None:
            self._mark, self._submitted_s = self._read_mark(), 0.0
        return self._mark is not None and self._mark.start == job.start and self._is_submitted(job)

    def _read_mark(self) -> StartMark | None:
        """None if it was never started. Raises StoreFailed: a job that runs must not be taken for
        one that does not."""
        content = if_there(lambda: self._store.get(MARK))
        return None if content is None else _mark(json.loads(content))

    def _is_submitted(self, job: SharedJob) -> bool:
        """A service may have been killed between the mark and the submission."""
        if self._submitted_s:
            return True
        if self.story.result or actor_named(self.names.controller) is not None:
            self._submitted_s = time.monotonic()
            return True
        self._check_story()
        return not job.has_room

    def _check_story(self) -> None:
        """Raises StoreFailed: what can't be read is not taken for what is not there."""
        if self.story.trouble:
            raise StoreFailed(self.story.trouble)

    def _begin(self, job: SharedJob) -> None:
        """First what an earlier start has left is out of the way; last it is submitted."""
        end_actor(self.names.controller)
        clear_away(self.names.prefix, Remains(groups=groups_of(self.names.prefix)))
        if (folder := local_path(self.run_url)) is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._store.delete("result.json")
        self.story.look()
        self._check_story()
        self._ended_s, self._asked, self._stop_asked_s = None, None, -STOP_AGAIN_S
        self._ask_for(job)
        mark = StartMark(job.start, self.story.seq)
        self._store.put(MARK, json.dumps(asdict(mark)).encode())
        self._mark, self._submitted_s = mark, 0.0
        try:
            self._submit(parse_job(self.order.job), self.run_url)
        except UsageError as error:
            self._end(job, "failed", str(error))
        except Exception as error:  # Ray's, a store's: it may go better the next time
            log.exception("%s could not be started", self.order.id)
            self._tell(asks.StartFailed(time.time(), job.job, job.start, one_line(error)))
        else:
            self._submitted_s = time.monotonic()

    def _ask_for(self, job: SharedJob) -> None:
        """As many workers as it is to have, where it is to have them."""
        stay = removed(job.held, job.leaving)
        wanted = job.target, dict(stay) if count(stay) >= job.target else dict(job.held)
        if wanted != self._asked and wanted != self._standing_request():
            resize_request.ask_to_resize(self.run_url, *wanted)
        self._asked = wanted

    def _standing_request(self) -> tuple[int, dict[str, int]] | None:
        with contextlib.suppress(StoreFailed, ValueError):
            found = resize_request.parse(self._store.get(resize_request.NAME))
            return found.workers, found.places
        return None

    # ------------------------------------------------------------------------------ as it runs

    def _follow(self, job: SharedJob, sight: Sight) -> None:
        if self.story.result:
            self._after_end(job, sight)
            return
        if self._controller_is_gone(sight):
            self.story.look()
            self._check_story()
            if not self.story.result:
                self._lost(job)
            return
        if self._has_not_begun_for(sight) > self._start_timeout_s:
            self._give_up_start(job)
            return
        if not job.has_room:
            self._ask_to_stop(job)
            return
        if job.phase == "starting" and self._trains():
            self._tell(asks.JobBegan(time.time(), job.job, job.start))
        self._ask_for(job)
        if job.leaving and (places := released(job, sight.held.get(self.names.prefix, Counter()))):
            self._tell(asks.WorkersReleased(time.time(), job.job, job.start, places))

    def _trains(self) -> bool:
        formed = self.story.formed
        return bool(formed) and int(formed.get("seq", -1)) > (self._mark or StartMark()).seq

    def _controller_is_gone(self, sight: Sight) -> bool:
        since_s = sight.asked_s - self._submitted_s
        return since_s > GONE_S and self.names.prefix not in sight.led

    def _has_not_begun_for(self, sight: Sight) -> float:
        """Seconds for which its controller, which Ray knows of, has journalled nothing, of those in
        which its run folder could be read. 0: it has. One that stands still later on is its
        keepers' concern."""
        seq = self._mark.seq if self._mark is not None else -1
        since_s = max(self._submitted_s, self._unread_s)
        return sight.asked_s - since_s if self.story.seq <= seq else 0.0

    def _give_up_start(self, job: SharedJob) -> None:
        end_actor(self.names.controller)
        clear_away(self.names.prefix, Remains(groups=groups_of(self.names.prefix)))
        why = f"its controller has done nothing for {self._start_timeout_s:g} s"
        self._tell(asks.StartFailed(time.time(), job.job, job.start, why))

    def _ask_to_stop(self, job: SharedJob) -> None:
        if time.monotonic() - self._stop_asked_s >= STOP_AGAIN_S:
            self._stop_asked_s = time.monotonic()
            now = job.job in self._office.standing.hurried
            stop_request.ask_to_stop(self.run_url, now, self._why_it_stops(job))

    def _why_it_stops(self, job: SharedJob) -> str:
        """As it was decided; "" where somebody asked for it."""
        decisions = self._office.standing.decisions.get(job.job, ())
        if job.phase != "suspended" or not decisions:
            return ""
        return f"the service: {decisions[-1].why}"

    # --------------------------------------------------------------------------------- its end

    def _after_end(self, job: SharedJob, sight: Sight) -> None:
        """Notice once its places are free."""
        now_s = time.monotonic()
        self._ended_s = self._ended_s or now_s
        if sight.asked_s <= self._ended_s:
            return
        if self.names.prefix in sight.held:
            if now_s - self._ended_s < FREED_TIMEOUT_S:
                return
            log.warning("%s has ended, and its places are not free: they are freed", job.job)
            end_actor(self.names.controller)
            clear_away(self.names.prefix, Remains(groups=groups_of(self.names.prefix)))
        end_actor(self.names.controller)  # it lingers, for drivers that there are none of here
        status, reason = self.story.result.get("status"), str(self.story.result.get("reason", ""))
        if status == "completed":
            self._end(job, "completed", "all steps are done")
        elif status == "stopped":
            self._stopped(job, reason)
        elif status == "suspended" and job.phase != "stopping":
            self._gave_way(job, reason)
        else:
            self._end(job, "stopped" if status == "suspended" else "failed", reason)

    def _stopped(self, job: SharedJob, reason: str) -> None:
        if job.phase == "suspended":
            self._tell(asks.JobSuspended(time.time(), job.job, job.start))
        else:
            self._end(job, "stopped", reason)

    def _gave_way(self, job: SharedJob, reason: str) -> None:
        """It had too few workers for too long; or what it has learnt last is in no checkpoint, and
        another start of it may well end alike."""
        at_s = time.time()
        if job.phase == "starting":
            self._tell(asks.StartFailed(at_s, job.job, job.start, reason))
        elif UNSAVED in reason:
            step = self.story.committed
            self._tell(asks.JobControllerLost(at_s, job.job, job.start, step, reason))
        else:
            self._tell(asks.JobSuspended(at_s, job.job, job.start))

    def _lost(self, job: SharedJob) -> None:
        """Its controller has ended for good without a result: another is started, so long as that
        leads anywhere (``JobControllerLost``)."""
        clear_away(self.names.prefix, Remains(groups=groups_of(self.names.prefix)))
        reason, at_s = self._last_words(), time.time()
        if job.phase == "stopping":
            self._end(job, "stopped", reason)
        elif job.phase == "starting" and not self._trains():
            self._tell(asks.StartFailed(at_s, job.job, job.start, reason))
        else:
            step = self.story.committed
            self._tell(asks.JobControllerLost(at_s, job.job, job.start, step, reason))

    def _last_words(self) -> str:
        """Of this start."""
        before = (self._mark or StartMark()).seq
        found, _ = self.story.events.since(0)
        for item in reversed(found):
            if item.data["event"] == "controller_failed" and item.id > before:
                return str(item.data["reason"])
        return "its controller is gone, and has left no result"

    def _end(self, job: SharedJob, status: str, reason: str) -> None:
        self._tell(asks.JobEnded(time.time(), job.job, status), reason)

    def _tell(self, event: asks.SharingEvent, note: str = "") -> None:
        """Returns once it is journalled. Raises StoreFailed where it can't be now: it is on its
        way, and nothing is told twice."""
        self._untold = self._office.tell(event, note, self.story.committed)
        self._await_told()

    def _await_told(self) -> None:
        """Raises StoreFailed."""
        if self._untold is None:
            return
        try:
            self._untold.result(TELL_TIMEOUT_S)
        except TimeoutError:
            raise StoreFailed(UNWRITTEN) from None
        finally:
            if self._untold.done():
                self._untold = None


def is_at_work(job: SharedJob) -> bool:
    """Something is to be done for it, or seen of it."""
    return job.has_room or job.releasing or job.phase == "stopping"


def _start_timeout_s(order: JobOrder) -> float:
    """As the job says; where this version can't read what another took in, as by default."""
    try:
        return parse_job(order.job).elastic.start_timeout_s
    except UsageError:
        return Policy.start_timeout_s


def released(job: SharedJob, held: Counter[str]) -> asks.Places:
    """Of the places that the job is to leave, those that it has left. It may have left others than
    it was told: it is the number that counts."""
    gone = count(job.held) - max(held.total(), job.target)
    missing = removed(job.held, tuple(held.items()))
    return as_many((*missing, *job.leaving), gone)
