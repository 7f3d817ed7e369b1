"""One system, watched: what is done to it by the progress it makes, and what that costs."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.peers import analysis, replay
from benchmarks.peers.settings import (
    CHECKPOINT_EVERY_STEPS,
    DRAIN_NOTICE_S,
    FAULT_PHASE,
    MICRO_BATCHES,
    WORKERS,
    make_job,
)
from benchmarks.peers.systems import System
from chaos.trace import TraceChange

POLL_S = 0.01
STEADY_STEPS, WARM_STEPS = 300, 50
STEADY_POLL_S = 1.0  # reading what is written takes processor time from who writes it
SETTLE_STEPS = 8  # of a whole world, before anything is done to it
AFTER_STEPS = 6  # of a smaller world, before a node comes back


class Late(Exception):
    """A system did not come so far within the case's deadline."""


class Bench:
    """One system, watched."""

    def __init__(self, system: System, deadline_s: float) -> None:
        self.system, self.log, self._deadline_s = system, system.log, deadline_s

    def until(self, what: str, condition: Callable[[], Any], poll_s: float = POLL_S) -> Any:
        deadline_s = time.monotonic() + self._deadline_s
        while time.monotonic() < deadline_s:
            self.log.read()
            if found := condition():
                return found
            self.system.tend()
            time.sleep(poll_s)
        raise Late(f"{what}: not within {self._deadline_s:g} s")

    def newest(self) -> analysis.Line | None:
        steps = analysis.new_steps(self.log.lines[-400:])
        return steps[-1] if steps else None

    def _step(self) -> int:
        newest = self.newest()
        return newest.step if newest else 0

    def settled(self) -> bool:
        """The last new steps are all of one whole world, with every rank taking part."""
        recent = analysis.new_steps(self.log.lines[-400:])[-SETTLE_STEPS:]
        whole = len(recent) == SETTLE_STEPS and all(line.world == WORKERS for line in recent)
        return (
            whole
            and len({line.attempt for line in recent}) == 1
            and len(self.log.members()) == WORKERS
        )

    def whole(self) -> None:
        self.until("a whole world", self.settled)

    def phase(self) -> None:
        """Between two checkpoints, by the longer of their intervals."""

        def there() -> bool:
            newest = self.newest()
            late = (newest.step - FAULT_PHASE) % CHECKPOINT_EVERY_STEPS if newest else 99
            return late < 8 and self.settled()

        self.until("the place of the fault", there)

    def victim(self) -> int:
        """The pid of the last rank's worker."""
        members = self.log.members()
        return members[max(members)]

    # ------------------------------------------------------------------------- the cases

    def steady(self) -> dict[str, Any]:
        self.whole()
        first = self._step() + WARM_STEPS
        wanted = range(first, first + STEADY_STEPS)
        self.until("steps enough", lambda: self._step() >= wanted.stop, STEADY_POLL_S)
        steps = [line for line in analysis.new_steps(self.log.lines) if line.step in wanted]
        step_s = analysis.step_time_s(steps)
        mean_s = (steps[-1].at_s - steps[0].at_s) / (len(steps) - 1)
        tokens = MICRO_BATCHES * make_job()["data"]["sequence_length"]
        found = {"step_s": step_s, "mean_step_s": mean_s, "tokens_per_s": tokens / mean_s}
        self.whole()  # the newest lines are of every rank again, as ``members`` takes them to be
        return found | self._memory()

    def _memory(self) -> dict[str, Any]:
        """PSS, MB: of the workers, and of all that the system has started."""
        workers = [_pss_mb(pid) for pid in self.log.members().values()]
        children = [p.pid for p in psutil.Process().children(recursive=True)]
        everything = [_pss_mb(pid) for pid in children]
        return {"pss_workers_mb": sum(workers), "pss_all_mb": sum(everything)}

    def worker(self) -> dict[str, Any]:
        self.phase()
        pid = self.victim()
        at_s = time.time()
        os.kill(pid, signal.SIGKILL)
        found = self._outage(at_s)
        self.whole()
        return self._ended(found)

    def hang(self) -> dict[str, Any]:
        self.phase()
        pid = self.victim()
        at_s = time.time()
        os.kill(pid, signal.SIGSTOP)
        try:
            found = self._outage(at_s)
            self.whole()
        finally:
            with contextlib.suppress(ProcessLookupError):  # given up and killed, as it should be
                os.kill(pid, signal.SIGCONT)
        return self._ended(found)

    def node(self) -> dict[str, Any]:
        self.phase()
        node = self.system.node_of(self.victim())
        at_s = time.time()
        self.system.kill_node(node)
        found = self._outage(at_s)
        return self._ended_smaller(found) | {"join": self._join()}

    def drain(self) -> dict[str, Any]:
        if not self.system.drains:
            return {"unsupported": "it has no use for a notice: as a node kill at its end"}
        self.phase()
        node = self.system.node_of(self.victim())
        at_s = time.time()
        self.system.drain_node(node, DRAIN_NOTICE_S)
        found = self._outage(at_s, announced=True)
        time.sleep(max(0.0, at_s + DRAIN_NOTICE_S - time.time()))  # the cloud takes it
        if node in self.system.nodes():
            self.system.kill_node(node)
        found = self._ended_smaller(found) | self._outage(at_s, announced=True)
        return found | {"join": self._join()}

    def _ended_smaller(self, found: dict[str, Any]) -> dict[str, Any]:
        self.until("steps of a smaller world", lambda: self._after(AFTER_STEPS))
        return self._ended(found)

    def _join(self) -> dict[str, Any]:
        """A node takes the place of the lost one."""
        at_s = time.time()
        self.system.add_node()
        self.whole()
        outage = analysis.outage(self.log.lines, at_s, announced=True)
        assert outage is not None
        return self._ended(self._record(at_s, outage))

    def _after(self, steps: int) -> bool:
        recent = analysis.new_steps(self.log.lines[-400:])[-steps:]
        return len(recent) == steps and all(line.world == WORKERS - 1 for line in recent)

    def replay(self) -> dict[str, Any]:
        """A slice of a trace."""
        return self._follow(replay.CHANGES, replay.LENGTH_S)

    def trace(self) -> dict[str, Any]:
        """All of it."""
        return self._follow(replay.whole_trace(), replay.WHOLE_S)

    def _follow(self, changes: tuple[TraceChange, ...], length_s: float) -> dict[str, Any]:
        """Nodes come and go as a trace says."""
        self.whole()
        step_s = analysis.step_time_s(analysis.new_steps(self.log.lines))
        begin_s = time.time()
        for change in changes:
            while (left_s := begin_s + change.at_s - time.time()) > 0:
                self.log.read()
                time.sleep(min(left_s, 0.05))
            nodes = self.system.nodes()
            if change.nodes < len(nodes):
                for node in nodes[change.nodes :]:
                    self.system.kill_node(node)
            for _ in range(change.nodes - len(nodes)):
                self.system.add_node()
        time.sleep(max(0.0, begin_s + length_s - time.time()))
        end_s = time.time()
        self.log.read()
        new = [s for s in analysis.new_steps(self.log.lines) if begin_s < s.at_s <= end_s]
        samples = self._samples(begin_s)
        lost = (samples["samples_lost"] or 0) / max(1, MICRO_BATCHES * len(new))
        return {
            # Steps of a part of the batch count for that part.
            "goodput": analysis.goodput(self.log.lines, begin_s, end_s, step_s) * (1 - lost),
            "steps": len(new),
            "steps_redone": analysis.redone(self.log.lines, begin_s, end_s)
            + self._unlogged(begin_s, end_s),
            "step_s": step_s,
            "seconds": end_s - begin_s,
        } | samples

    # ----------------------------------------------------------------------- the figures

    def _outage(self, at_s: float, *, announced: bool = False) -> dict[str, Any]:
        outage = self.until(
            "the next new step of another world",
            lambda: analysis.outage(self.log.lines, at_s, announced=announced),
        )
        return self._record(at_s, outage)

    def _record(self, at_s: float, outage: analysis.Outage) -> dict[str, Any]:
        noticed = [(s, what) for s, what in self.log.noticed if s >= at_s]
        first_s, what = min(noticed, default=(None, ""))
        return {
            "at_s": at_s,
            "noticed_s": None if first_s is None else first_s - at_s,
            "noticed_as": what,
            "paused_s": outage.paused_s,
            "step_s": outage.step_s,
            "steps_redone": outage.steps_redone + self._unlogged(at_s, outage.ended_at_s),
        }

    def _unlogged(self, since_s: float, until_s: float) -> int:
        return sum(count for at_s, count in self.log.unlogged if since_s < at_s <= until_s)

    def _ended(self, found: dict[str, Any]) -> dict[str, Any]:
        """With what it took until now: until the world was whole, or has gone on smaller."""
        at_s = found["at_s"]
        until_s = self.log.lines[-1].at_s
        new = [s for s in analysis.new_steps(self.log.lines) if at_s < s.at_s <= until_s]
        # Time that brought no new step, over everything up to here: re-joining included.
        cost_s = until_s - at_s - len(new) * found["step_s"]
        redone = analysis.redone(self.log.lines, at_s, until_s) + self._unlogged(at_s, until_s)
        return (
            found
            | {"cost_s": cost_s, "until_s": until_s - at_s, "steps_redone": redone}
            | (self._samples(at_s))
        )

    def _samples(self, since_s: float) -> dict[str, Any]:
        """Of the steps since, without the very last, which may be under way on some ranks."""
        history = analysis.history(self.log.lines, restarts=self.system.restarts)
        new = [s.step for s in analysis.new_steps(self.log.lines) if s.at_s > since_s]
        if len(new) < 2:
            return {"samples_lost": None, "samples_repeated": None}
        lost, repeated = analysis.sample_faults(history, new[0] - 1, new[-2], sample_ids())
        return {"samples_lost": lost, "samples_repeated": repeated}

    def losses(self) -> list[float | None]:
        """By step, from 1: of those in the final state."""
        history = analysis.history(self.log.lines, restarts=self.system.restarts)
        last = max(history, default=1) - 1
        found = [history.get(step) for step in range(1, last + 1)]
        return [None if line is None else round(line.mean_loss, 7) for line in found]


_order: list[Any] = []


def sample_ids() -> Callable[[int], list[int]]:
    """The sample ids of a step."""
    from elastic_ft.config import parse_job
    from elastic_ft.core.batches import DataOrder
    from elastic_ft.data.dataset import open_dataset

    if not _order:
        job = parse_job(make_job())
        _order.append(DataOrder(job.seed, len(open_dataset(job.data, job.seed).train)))
    return lambda step: list(_order[0].sample_ids((step - 1) * MICRO_BATCHES, step * MICRO_BATCHES))


def _pss_mb(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0.0
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) / 1e3
