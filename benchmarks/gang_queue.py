"""Gangs of fixed width on equal nodes: the ways of sharing that ours is held against.

- ``fifo``: in the order of submission.
- ``strict``: by priority; who does not fit holds up those behind (Kueue's StrictFIFO). What a job
  needs is taken by killing those of a lower priority.
- ``evict``: the same, and who does not fit is skipped (Kueue's BestEffortFIFO, its default).

Who is killed are the lowest and newest, no more than are needed; they go back to the front of the
queue and to their last checkpoint, which had cost nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.shared_cluster import SubmittedWork

WAYS = ("fifo", "strict", "evict")


@dataclass(eq=False)
class Gang:
    work: SubmittedWork
    done_s: float = 0.0
    began_s: float | None = None  # trains since
    first_s: float | None = None
    ended_s: float | None = None
    version: int = 0
    front: bool = False


@dataclass
class NodeTime:
    """Node-seconds by what became of them."""

    useful: float = 0.0
    idle: float = 0.0
    starting: float = 0.0
    again: float = 0.0  # done, and lost when the job was killed


@dataclass
class GangQueue:
    """``way``: one of ``WAYS``."""

    nodes: int
    way: str
    start_s: float
    checkpoint_s: float
    now_s: float = 0.0
    free: int = 0
    waiting: list[Gang] = field(default_factory=list)
    running: list[Gang] = field(default_factory=list)
    gangs: list[Gang] = field(default_factory=list)
    evictions: int = 0
    spent: NodeTime = field(default_factory=NodeTime)
    queue: list[tuple[float, int, Gang, int]] = field(default_factory=list)
    count: int = 0

    def run(self, jobs: Sequence[SubmittedWork], until_s: float, account_s: float) -> NodeTime:
        """Returns what the nodes' time until ``account_s`` was."""
        self.free = self.nodes
        for work in jobs:
            self._at(work.at_s, Gang(work), -1)
        account: NodeTime | None = None
        while self.queue and self.queue[0][0] <= until_s:
            if account is None and self.queue[0][0] > account_s:
                account = self._account(account_s)
            at_s, _, gang, version = heapq.heappop(self.queue)
            self._pass(at_s)
            if version == -1:
                self.gangs.append(gang)
                self.waiting.append(gang)
            elif version != gang.version:
                continue
            else:
                gang.ended_s = self.now_s
                self._leave(gang, gang.work.work_s)
            self._schedule()
        return account or self._account(account_s)

    def _at(self, at_s: float, gang: Gang, version: int) -> None:
        self.count += 1
        heapq.heappush(self.queue, (at_s, self.count, gang, version))

    def _pass(self, at_s: float) -> None:
        self.spent.idle += self.free * (at_s - self.now_s)
        self.now_s = at_s

    def _account(self, at_s: float) -> NodeTime:
        self._pass(at_s)
        running = sum(self._started_s(gang) * gang.work.width for gang in self.running)
        useful = sum(gang.work.width * self._progress(gang) for gang in self.gangs)
        spent = self.spent
        return NodeTime(useful, spent.idle, spent.starting + running, spent.again)

    def _started_s(self, gang: Gang) -> float:
        """Seconds of its start so far."""
        assert gang.began_s is not None
        return min(self.start_s, self.now_s - gang.began_s + self.start_s)

    def _progress(self, gang: Gang) -> float:
        spent_s = 0.0 if gang.began_s is None else max(0.0, self.now_s - gang.began_s)
        return gang.done_s + spent_s

    def _schedule(self) -> None:
        while self._look_along() and self.way != "fifo":  # who was killed may fit into what is left
            pass

    def _look_along(self) -> bool:
        """Whether somebody was killed."""
        if self.way != "fifo":
            self.waiting.sort(key=lambda g: (-g.work.wish.priority, not g.front, g.work.at_s))
        left, killed = [], list[Gang]()
        for index, gang in enumerate(self.waiting):
            if gang.work.width > self.free and self.way != "fifo":
                killed += self._make_room(gang)
            if gang.work.width <= self.free:
                self._start(gang)
                continue
            left.append(gang)
            if self.way != "evict":
                left += self.waiting[index + 1 :]
                break
        self.waiting = left + killed
        return bool(killed)

    def _make_room(self, gang: Gang) -> list[Gang]:
        lower = [g for g in self.running if g.work.wish.priority < gang.work.wish.priority]
        lower.sort(key=lambda g: (g.work.wish.priority, -(g.began_s or 0.0)))
        chosen, free = list[Gang](), self.free
        for other in lower:
            if free >= gang.work.width:
                break
            chosen.append(other)
            free += other.work.width
        if free < gang.work.width:
            return []
        for other in chosen[::-1]:  # the highest first
            if free - other.work.width >= gang.work.width:
                chosen.remove(other)
                free -= other.work.width
        for other in chosen:
            self._kill(other)
        return chosen

    def _kill(self, gang: Gang) -> None:
        spent_s = self._progress(gang) - gang.done_s
        lost_s = spent_s % self.checkpoint_s
        self.spent.again += lost_s * gang.work.width
        self._leave(gang, gang.done_s + spent_s - lost_s)
        gang.front = True
        gang.version += 1
        self.evictions += 1

    def _leave(self, gang: Gang, done_s: float) -> None:
        self.spent.starting += self._started_s(gang) * gang.work.width
        gang.done_s, gang.began_s = done_s, None
        self.running.remove(gang)
        self.free += gang.work.width

    def _start(self, gang: Gang) -> None:
        self.free -= gang.work.width
        self.running.append(gang)
        gang.version += 1
        gang.began_s = self.now_s + self.start_s
        if gang.first_s is None:
            gang.first_s = gang.began_s
        self._at(gang.began_s + gang.work.work_s - gang.done_s, gang, gang.version)
