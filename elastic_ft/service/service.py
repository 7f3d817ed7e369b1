"""The service as a whole: office, hands, the watch on the cluster. Without HTTP, and without Ray's
actor around it."""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

from elastic_ft.core.sharing import asks
from elastic_ft.core.sharing.ledger import Bundles, SharedJob
from elastic_ft.errors import ConfigError, Superseded
from elastic_ft.hosts.ray.names import abandoned, clear_away
from elastic_ft.observe.wording import head_away
from elastic_ft.service import views
from elastic_ft.service.chronicle import Chronicle
from elastic_ft.service.cluster_size import Ask, AskNote, ClusterSize, ask_rays_autoscaler
from elastic_ft.service.cluster_watch import ClusterWatch, Sight
from elastic_ft.service.handed_in import check_request, handed_in_job
from elastic_ft.service.hands import JobHand, Submit, is_at_work
from elastic_ft.service.job_logs import JobLogs
from elastic_ft.service.job_orders import JobOrder, Notice, wish_of, with_shared_parts
from elastic_ft.service.listing import JobListing, listed_jobs
from elastic_ft.service.office import NotKnown, Office, Refused, entry_of
from elastic_ft.service.service_sign import SignsOfLife, refuse_living
from elastic_ft.service.share_standing import ShareStanding
from elastic_ft.service.story import JobStory
from elastic_ft.storage import owners
from elastic_ft.storage.mounts import plain_path
from elastic_ft.storage.store import open_store

log = logging.getLogger(__name__)
OWNER = "elastic-ft-service"  # as a folder's owner is called, where a run's is its job
ROUND_S = 0.2
FENCE_EVERY_S = 2.0
REAP_EVERY_S = 60.0
SEEN_WITHIN_S = 5.0  # the nodes, by a service that knows of none; then jobs are taken in
HANDS = 8
IDLE_HANDS = 2  # that look once at each job that waits: thousands may, and none holds up who runs
STORIES_KEPT, LINES_KEPT = 32, 200_000  # of jobs that have ended; of all of them, some 30 B each
PRIORITY_MAX = 10**6
VERSION = version("elastic-ft")


class Service:
    """Attributes:
    folder: where its journal is, and ``jobs/<id>`` with each job's run folder.
    since_s: when it began (unix time).
    lines: of the journal, when it began.
    url: where it serves; "" while it does not.

    ``look``: at the cluster; by default at Ray's. ``ask``: its autoscaler, if the terms have one.
    ``actor``: whose next life this is, the one before is over; "": nobody's. ``take_over``: from a
    service that lives, too.
    """

    def __init__(
        self,
        folder: str,
        terms: asks.SharingTerms,
        submit: Submit,
        on_superseded: Callable[[Superseded], object],
        look: Callable[[], Sight] | None = None,
        ask: Ask = ask_rays_autoscaler,
        actor: str = "",
        take_over: bool = False,
    ) -> None:
        local = plain_path(folder)
        self.folder = folder.rstrip("/") if local is None else str(local)
        self.terms, self._submit = terms, submit
        self._store = open_store(self.folder)
        self.office = Office(Chronicle(self._store), terms, self._check_claim, on_superseded)
        self._on_superseded = on_superseded
        self._watch = ClusterWatch(self._saw, look)
        self._note, self._takes_back = AskNote(self._store), False
        self._size = ClusterSize(self._wanted, lambda: self._watch.sight.kind, ask, self._note.keep)
        self._hands: dict[str, JobHand] = {}
        self._ended: OrderedDict[str, JobStory] = OrderedDict()
        self._ended_turn = threading.Lock()
        self._pool = ThreadPoolExecutor(HANDS, thread_name_prefix="hand")
        self._idle = ThreadPoolExecutor(IDLE_HANDS, thread_name_prefix="idle-hand")
        self._busy: dict[str, Future[None]] = {}
        self._idling: set[str] = set()  # of those, who stand in the line of jobs that wait
        self._over, self._seen = threading.Event(), threading.Event()
        self._told = Future[str]()  # of the nodes
        self._told.set_result("")
        self._claim: owners.Claim | None = None
        self._signs: SignsOfLife | None = None
        self._actor, self._takes_over = actor or uuid.uuid4().hex[:12], take_over
        self.since_s = time.time()
        self.lines, self.url = 0, ""

    def start(self) -> None:
        """Raises UsageError, also where the folder's service lives elsewhere; StoreFailed: then it
        may be called again."""
        run = f"{self._actor}-{uuid.uuid4().hex[:6]}"
        self._claim = owners.take_over(
            self._store, job=OWNER, run=run, run_folder=self.folder, admit=self._admit
        )
        self._signs = SignsOfLife(self._store, run, lambda: self.url)
        self._signs.start()
        self.lines = self.office.open(self._note_of_earlier)
        self._watch.start()
        if not self.office.standing.sharing.nodes:  # what a worker takes is a part of a node
            self._seen.wait(SEEN_WITHIN_S)
        if self.terms.autoscaler or self._takes_back:
            self._size.start()
        for work in (self._round_always, self._fence_always, self._reap_always):
            threading.Thread(target=work, name=work.__name__.strip("_"), daemon=True).start()

    def _note_of_earlier(self, left_asking: bool) -> None:
        """``left_asking``: as the journal says, which counts where a version that made no notes has
        written it. Raises StoreFailed."""
        noted = self._note.asks()
        self._takes_back = left_asking if noted is None else noted
        if noted is None and left_asking:
            self._note.keep(True)

    def _admit(self, before: owners.Owner) -> None:
        """Raises UsageError, StoreFailed."""
        if not self._takes_over and before.run.partition("-")[0] != self._actor:
            refuse_living(self._store, before, self.folder)

    def close(self, in_good_order: bool = False) -> None:
        self._over.set()
        self._size.close()
        self._watch.close()
        self.office.close(in_good_order)
        if self._signs is not None and self._claim is not None:
            self._signs.close(self._claim)

    def let_go(self) -> None:
        """Of what outlives this service, and no next one would end. Before ``close``."""
        self._size.let_go()

    # --------------------------------------------------------------------------------- its work

    def _wanted(self) -> Bundles:
        """Without an autoscaler nothing: what an earlier service had asked for goes."""
        return self.office.standing.sharing.asked if self.terms.autoscaler else ()

    def _saw(self, sight: Sight) -> None:
        nodes = tuple(sorted(sight.nodes.items()))
        if not self._told.done():  # the journal can't be written: the newest is told then
            return
        if nodes != tuple(sorted(self.office.standing.sharing.nodes.items())):
            self._told = self.office.tell(asks.CapacityChanged(time.time(), nodes))
        self._seen.set()

    def _round_always(self) -> None:
        while not self._over.wait(ROUND_S):
            try:
                self._round()
            except Exception:  # a bug: seen, and the next round is another
                log.exception("a round")

    def _round(self) -> None:
        self.office.tick()
        live = self.office.standing.sharing.jobs
        for job, shared in live.items():
            if self._rests(job, shared):
                continue
            busy, pool = self._busy.get(job), self._pool if is_at_work(shared) else self._idle
            waits = busy is not None and not busy.done()
            moves = pool is self._pool and job in self._idling  # to the line of jobs at work
            if waits and not (moves and busy.cancel()):
                continue
            (self._idling.add if pool is self._idle else self._idling.discard)(job)
            self._busy[job] = pool.submit(self._step, job)
        over = {job for job in (*self._busy, *list(self._hands)) if job not in live}
        for job in over:
            if (busy := self._busy.get(job)) is not None and not busy.done():
                continue
            if (hand := self._hands.get(job)) is not None:
                self._keep(job, hand.story)
            self._hands.pop(job, None)
            self._idling.discard(job)
            self._busy.pop(job, None)

    def _rests(self, job: str, shared: SharedJob) -> bool:
        """It waits, and is known: thousands may, and are not looked at in every round."""
        hand = self._hands.get(job)
        return hand is not None and not hand.trouble and not is_at_work(shared)

    def _step(self, job: str) -> None:
        try:
            self.hand(job).step(self._watch.sight)
        except Exception:  # a bug, or Ray's trouble: seen, and tried again with the next round
            log.exception("%s", job)

    def _keep(self, job: str, story: JobStory) -> None:
        """Of a job that has ended, if it was read to its end."""
        if story.trouble:
            return
        with self._ended_turn:
            self._ended[job] = story
            self._ended.move_to_end(job)
            lines = sum(each.lines for each in self._ended.values())
            while len(self._ended) > STORIES_KEPT or (len(self._ended) > 1 and lines > LINES_KEPT):
                lines -= self._ended.popitem(last=False)[1].lines

    def _check_claim(self) -> None:
        """Raises Superseded, StoreFailed."""
        assert self._claim is not None
        self._claim.check()

    def _fence_always(self) -> None:
        while not self._over.wait(FENCE_EVERY_S):
            try:
                self._check_claim()
            except Superseded as error:
                self._on_superseded(error)
                return
            except Exception as error:  # the store is away, or what it has is not understood
                log.warning("whether another has the folder is not known: %s", error)

    def _reap_always(self) -> None:
        """What runs without a controller have left is freed, once it was seen twice."""
        before: set[str] = set()
        while not self._over.wait(REAP_EVERY_S):
            if not self._watch.sight.nodes:
                continue
            try:
                left = abandoned()
                for run in before & left.keys():
                    if clear_away(run, left[run]):
                        log.warning("%s had no controller: what it had left is freed", run)
                before = set(left)
            except Exception as error:  # the head is away, and comes back
                log.warning("nothing is reaped: %s: %s", type(error).__name__, error)

    def hand(self, job: str) -> JobHand:
        """Of one that has not ended. Any thread: it is one hand all the same."""
        if (hand := self._hands.get(job)) is None:
            order = self.office.standing.orders[job]
            hand = JobHand(order, self.run_url(job), self.office, self._submit)
            hand.story.look()  # of one that was suspended before this service began, too
            hand = self._hands.setdefault(job, hand)
        return hand

    @property
    def hosts(self) -> dict[str, str]:
        """Machine by node, of those that are alive."""
        return self._watch.sight.hosts

    def run_url(self, job: str) -> str:
        return f"{self.folder}/jobs/{job}"

    # ---------------------------------------------------------------------------- what is asked

    def submit(self, asked: dict[str, Any], by: str) -> Future[str]:
        """Its answer is the job's id. Raises UsageError, one line; StoreFailed where the journal is
        known to be away: then nothing is done."""
        job = handed_in_job(asked)
        queue, priority = asked.get("queue", "default"), asked.get("priority", 0)
        if not isinstance(queue, str):
            raise ConfigError(f"queue: expected a name, found {queue!r:.80}")
        check_priority(priority)
        request = check_request(asked.get("request", uuid.uuid4().hex))

        values = with_shared_parts(job.model_dump(mode="json"))
        if request not in self.office.standing.requests:
            self.office.check_journal()

        def question(standing: ShareStanding) -> Notice | str:
            known = standing.requests.get(request)
            if known is not None:  # the client's answer was lost
                return str(known)
            at_s = time.time()
            name = f"{job.name}-{standing.sharing.submitted + 1}"
            node_slots = min(standing.sharing.nodes.values(), default=1)
            wish = wish_of(job, queue, priority, node_slots)
            order = JobOrder(name, job.name, by, at_s, request, values)
            return Notice(asks.JobSubmitted(at_s, name, wish), by, order=order)

        return self.office.ask(question)

    def stop(self, job: str, now: bool, by: str) -> Future[str]:
        """Of one that is stopped: done. Whoever has lost the answer asks again."""
        hand = self._hands.get(job)  # of one that waits this is its end
        step = hand.story.committed if hand is not None else 0
        told = Notice(asks.StopAsked(time.time(), job), by, now=now, step=step)
        return self._change(job, told, done="stopped")

    def resize(self, job: str, workers: int, by: str) -> Future[str]:
        return self._change(job, Notice(asks.ResizeAsked(time.time(), job, workers), by))

    def set_priority(self, job: str, priority: int, by: str) -> Future[str]:
        return self._change(job, Notice(asks.PriorityChanged(time.time(), job, priority), by))

    def _change(self, job: str, told: Notice, done: str = "") -> Future[str]:
        """``done``: of a job that has ended so nothing is left to do."""

        def question(standing: ShareStanding) -> Notice | str:
            if job not in standing.orders:
                raise NotKnown(f"there is no job {job}")
            if (ended := standing.ended.get(job)) is not None:  # the core forgets those of long ago
                if ended.status == done:
                    return job
                raise Refused(f"{job}: it has {ended.status}")
            return told

        self.office.check_journal()
        return self.office.ask(question)

    def stop_all(self, by: str) -> list[Future[str]]:
        """Of those that were not asked to yet."""
        live = self.office.standing.sharing.jobs.values()
        return [self.stop(job.job, False, by) for job in live if job.phase != "stopping"]

    # -------------------------------------------------------------------------------- what is told

    def queue_of(self, job: str) -> str:
        """Raises NotKnown."""
        return entry_of(self.office.standing, job)[1].queue

    def knows(self, job: str) -> bool:
        """All that ``job`` tells of it: no store is asked."""
        return job in self._hands or job in self._ended

    def story(self, job: str) -> JobStory:
        """Of one that is not known it is read now, which may take long; of one that has not ended
        it goes on. Raises NotKnown."""
        if job not in self.office.standing.orders:
            raise NotKnown(f"there is no job {job}")
        if job in self._hands or job in self.office.standing.sharing.jobs:
            return self.hand(job).story
        if (story := self._ended.get(job)) is None:
            story = JobStory(self.run_url(job))
            story.look()
        self._keep(job, story)
        return story

    def logs(self, job: str) -> Callable[[], list[dict[str, Any]]]:
        """What gives the new lines at each call, which may take long. Raises NotKnown."""
        logs = JobLogs(self.story(job))
        return lambda: logs.read(self._watch.sight)

    def jobs(
        self, listing: JobListing, may_read: Callable[[str], bool]
    ) -> tuple[list[dict[str, Any]], bool]:
        """In the order of their submission, and whether there are more. ``may_read``: of which
        queues it tells. Raises NotKnown."""
        standing = self.office.standing
        names, more = listed_jobs(standing, listing, may_read)
        found = []
        for job in names:
            found.append(views.job_view(standing, job, *self._read(job)))
        return found, more

    def job(self, job: str) -> dict[str, Any]:
        """May take long, of one that has ended. Raises NotKnown."""
        story, (_, trouble) = self.story(job), self._read(job)
        return views.whole_view(self.office.standing, job, story, trouble, self.run_url(job))

    def known(self, job: str) -> dict[str, Any]:
        """As ``job``, of what was read by now: at once. Raises NotKnown."""
        return views.whole_view(self.office.standing, job, *self._read(job), self.run_url(job))

    def _read(self, job: str) -> tuple[JobStory | None, str]:
        """What was read of it, and its trouble."""
        if (hand := self._hands.get(job)) is None:
            return self._ended.get(job), self._head_away(job)
        return hand.story, hand.trouble or self._head_away(job)

    def _head_away(self, job: str) -> str:
        """Why one that starts gets no further; "" where that is not the reason."""
        live, asked_s = self.office.standing.job(job), self._watch.sight.asked_s
        if live is None or live.phase != "starting" or not asked_s:
            return ""
        return head_away(time.monotonic() - asked_s)

    def about(self, may_read: Callable[[str], bool]) -> dict[str, Any]:
        """``may_read``: of which queues it tells."""
        number = self._claim.number if self._claim is not None else 0
        about = {
            "version": VERSION,
            "folder": self.folder,
            "pid": os.getpid(),
            "since_s": self.since_s,
            "starts": number,
            "trouble": self.office.trouble,
        }
        standing, sight = self.office.standing, self._watch.sight
        return views.service_view(standing, self.terms, sight, about, may_read)


def check_priority(priority: Any) -> int:
    """Raises ConfigError."""
    if type(priority) is not int or abs(priority) > PRIORITY_MAX:
        raise ConfigError(
            f"priority: expected a whole number up to {PRIORITY_MAX}, found {priority!r:.80}"
        )
    return priority
