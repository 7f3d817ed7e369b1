"""The sharing of a cluster under seeded disorder: safe after every event, and all jobs end.

ELASTIC_FT_SIM_SEED and ELASTIC_FT_SIM_COUNT choose other schedules; a failure names its seed.
"""

from __future__ import annotations

import json
import os
import random

import pytest

from benchmarks.shared_cluster import JobRun, SharedCluster, SubmittedWork, Times
from elastic_ft.core.sharing import asks
from elastic_ft.core.sharing.asks import QueueTerms, SharingTerms, Wish
from elastic_ft.core.sharing.ledger import Bundles
from elastic_ft.observe.snapshots import as_plain_values
from tests.sim.sharing_checks import check_all

FIRST = int(os.environ.get("ELASTIC_FT_SIM_SEED", "1"))
COUNT = int(os.environ.get("ELASTIC_FT_SIM_COUNT", "60"))
HEALED_S = 4_000.0
END_S = 200_000.0


class Disorder:
    """A world of one seed: nodes go and come, starts fail, people change their minds, and
    the clock is set back."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(f"sharing {seed}")
        self.slots = rng.choice((1, 1, 2, 4, 8))
        count = rng.randint(2, 12)
        self.nodes = {f"n{i}": self.slots for i in range(count)}
        total = self.slots * count
        self.queues = _queues(rng, total)
        terms = SharingTerms(
            self.queues,
            cooldown_s=rng.choice((1.0, 5.0, 30.0)),
            ageing_s=rng.choice((600.0, 3600.0)),
            starts_max=100,
            autoscaler=rng.random() < 0.3,
            surplus=asks.EVENLY if seed % 2 else asks.BY_MINIMUM,
        )
        jobs = [self._job(i, total) for i in range(rng.randint(2, 25))]
        times = Times(
            start_s=rng.choice((1.0, 20.0)),
            release_s=rng.choice((0.1, 3.0)),
            suspend_s=rng.choice((0.1, 10.0)),
        )
        self.world = SharedCluster(terms, self.nodes.items(), jobs, times, check_all)
        self.stopped: set[str] = set()
        for _ in range(rng.randint(0, 12)):
            self.world.at(rng.uniform(1, HEALED_S), self._disturb)
        if seed % 4 == 0:
            self.world.at(rng.uniform(1, HEALED_S), self._set_back)
        self.world.at(HEALED_S, self._heal)

    def _job(self, index: int, total: int) -> SubmittedWork:
        rng = self.rng
        size = rng.choice([s for s in (1, 2, self.slots) if s <= self.slots])
        unit = rng.choice((1, 1, 2, 4))
        fit = max(1, total // size)
        least = rng.randint(1, max(1, min(fit, rng.choice((1, 4, fit)))))
        most = least + rng.randint(0, fit)
        queue = rng.choice(sorted(self.queues))
        wish = Wish(least, most, unit, size, queue, rng.choice((0, 0, 0, 5, 10)))
        at_s = rng.uniform(0, HEALED_S) if rng.random() < 0.7 else 0.0
        work_s = min(3000.0, rng.lognormvariate(5, 1.5))
        return SubmittedWork(at_s, f"j{index}", wish, least, work_s)

    def _disturb(self) -> None:
        rng, world = self.rng, self.world
        alive = sorted(world.state.jobs)
        what = rng.choice(
            ("lose", "lose", "return", "priority", "resize", "stop", "fail", "fail", "tick")
        )
        if what == "lose" and world.nodes:
            world.lose_nodes(rng.sample(sorted(world.nodes), rng.randint(1, len(world.nodes))))
        elif what == "return":
            world.nodes = {**world.nodes, rng.choice(sorted(self.nodes)): self.slots}
            world.tell_nodes()
        elif what == "tick" or not alive:
            world.tell(asks.Ticked(world.clock_s))
        elif what == "priority":
            world.tell(asks.PriorityChanged(world.clock_s, rng.choice(alive), rng.choice((0, 7))))
        elif what == "resize":
            world.tell(asks.ResizeAsked(world.clock_s, rng.choice(alive), rng.randint(1, 20)))
        elif what == "stop":
            job = rng.choice(alive)
            self.stopped.add(job)
            world.tell(asks.StopAsked(world.clock_s, job))
        else:
            self._fail(world.jobs[rng.choice(alive)])

    def _fail(self, run: JobRun) -> None:
        """Its start, if it is in that, or its controller."""
        now_s, job = self.world.clock_s, self.world.state.jobs[run.work.job]
        if not (job.has_room or job.releasing):
            return
        run.places, start = {}, run.start
        run.start = -1  # nothing more comes of that start
        if job.phase == "starting":
            self.world.tell(asks.StartFailed(now_s, job.job, start, "no room"))
        else:
            step = self.rng.randint(0, 3)
            self.world.tell(asks.JobControllerLost(now_s, job.job, start, step, "it went"))

    def _set_back(self) -> None:
        self.world.set_back(self.rng.uniform(0, self.world.clock_s))

    def _heal(self) -> None:
        self.world.nodes = dict(self.nodes)
        self.world.tell_nodes()


def _queues(rng: random.Random, total: int) -> dict[str, QueueTerms]:
    if rng.random() < 0.4:
        return {"default": QueueTerms()}
    found = {}
    for name in ("vision", "speech", "text")[: rng.randint(2, 3)]:
        quota = rng.choice((None, total // 3, total // 2))
        ceiling = rng.choice((None, None, max(1, total * 2 // 3)))
        found[name] = QueueTerms(quota, ceiling, rng.choice((1.0, 1.0, 3.0)))
    return found


def _holds(disorder: Disorder, run: JobRun) -> bool:
    """All nodes together hold its minimum."""
    size = run.work.wish.slots_per_worker
    return sum(slots // size for slots in disorder.nodes.values()) >= run.work.wish.least


def live_through(seed: int) -> Disorder:
    disorder = Disorder(seed)
    for until_s in range(int(HEALED_S), int(END_S), 2000):
        disorder.world.run(until_s)
        if not any(_holds(disorder, disorder.world.jobs[j]) for j in disorder.world.state.jobs):
            break
    for name, run in disorder.world.jobs.items():
        if name in disorder.world.state.jobs and _holds(disorder, run):
            job = disorder.world.state.jobs[name]
            raise AssertionError(f"{name} has not ended: {job.phase}, {job.why or job}")
        if run.ended_s is not None:
            left = run.work.work_s - disorder.world.progress_s(run)
            assert run.status != "completed" or left < 1e-6 * run.work.work_s + 1e-6
    return disorder


def test_seeds() -> None:
    resizes = suspensions = 0
    for seed in range(FIRST, FIRST + COUNT):
        try:
            world = live_through(seed).world
        except AssertionError as error:
            again = f"ELASTIC_FT_SIM_SEED={seed} ELASTIC_FT_SIM_COUNT=1"
            raise AssertionError(f"seed {seed} ({again}): {error}") from error
        resizes += sum(run.resizes for run in world.jobs.values())
        suspensions += sum(run.suspensions for run in world.jobs.values())
    if COUNT >= 60:
        assert resizes > COUNT and suspensions > COUNT / 4, "what is tested did not happen"


def test_who_gave_way_before_its_start_is_told_why_it_waits() -> None:
    """It went on saying what it had waited for before."""
    live_through(3817)
    live_through(10244)


def test_a_state_is_data_and_events_replay() -> None:
    """As JSON, and back by the same events: the service journals those."""
    first, again = live_through(FIRST).world, live_through(FIRST).world
    assert first.state == again.state and first.events == again.events
    halfway = Disorder(FIRST + 1)
    halfway.world.run(HEALED_S / 2)
    text = json.dumps(as_plain_values(halfway.world.state))  # type: ignore[arg-type]
    assert '"sharing.ledger.SharedJob"' in text or not halfway.world.state.jobs


class Scaled:
    """A cluster of one node at first, and an autoscaler with ``most`` of them to give. Nodes come
    after a minute; what is idle goes once nothing is asked for."""

    def __init__(self, seed: int, most: int = 12, slots: int = 4) -> None:
        rng = random.Random(f"scaled {seed}")
        jobs = []
        for number in range(20):
            least = rng.randint(1, most * slots // 2)
            wish = Wish(least, least + rng.randint(0, 8), priority=rng.choice((0, 0, 5)))
            jobs.append(
                SubmittedWork(rng.uniform(0, 2000), f"j{number}", wish, least, rng.uniform(9, 900))
            )
        self.most, self.slots, self.made = most, slots, 1
        self.asked: Bundles = ()
        terms = SharingTerms(autoscaler=True, cooldown_s=5.0)
        self.world = SharedCluster(terms, [("n0", slots)], jobs, Times(start_s=5.0), check_all)
        self.world.on_asked = self._on_asked

    def _on_asked(self, bundles: Bundles) -> None:
        self.asked = bundles
        self.world.at(self.world.now_s + 60.0, self._resize)

    def _resize(self) -> None:
        world = self.world
        wanted = -(-sum(size * count for size, count in self.asked) // self.slots)
        before = dict(world.nodes)
        while len(world.nodes) < min(wanted, self.most):
            world.nodes[f"n{self.made}"] = self.slots
            self.made += 1
        used = {node for job in world.state.jobs.values() for node, _ in job.held}
        if not self.asked:
            world.nodes = {n: s for n, s in world.nodes.items() if n in used or n == "n0"}
        if world.nodes != before:
            world.tell_nodes()


def test_an_autoscaler_is_asked_for_what_is_missing_and_for_nothing_in_the_end() -> None:
    for seed in range(FIRST, FIRST + COUNT // 3):
        scaled = Scaled(seed)
        scaled.world.run(END_S)
        assert not scaled.world.state.jobs, f"seed {seed}: {scaled.world.state.jobs}"
        assert scaled.made > 1 and scaled.asked == (), f"seed {seed}: {scaled.asked}"
        assert {run.status for run in scaled.world.jobs.values()} == {"completed"}


@pytest.mark.soak
def test_a_thousand_seeds() -> None:
    for seed in range(1000, 2000):
        live_through(seed)
