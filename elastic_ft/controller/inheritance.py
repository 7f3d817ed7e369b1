"""A controller goes on where another was: its workers live, and its journal says all it knew.

First it is looked whether that can be (``find``), and nothing is changed by that but that nobody
else writes in the run folder any more. Then the record is made what was decided, to the line
(``repair``): what was decided and not written is appended, never twice, and what a lost end of the
journal does not decide any more goes. Each file is a new one from then on: should the one before
wake up between its look at who owns the folder and its write, it writes to a file that is nobody's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_ft.config import Job
from elastic_ft.controller.observer import Observer
from elastic_ft.controller.standing import Heritage, Standing
from elastic_ft.core import events as ev
from elastic_ft.core.assignment import KEEPER
from elastic_ft.core.state import State
from elastic_ft.errors import ConfigError, one_line
from elastic_ft.observe.accounts import Accounts
from elastic_ft.observe.inbox_file import snapshot_lines
from elastic_ft.observe.lines import Line, count_lines, parse_lines
from elastic_ft.observe.replay import Snapshot, parse_inbox
from elastic_ft.observe.run_folder import RECORD, RunFolder


class NotAdoptable(Exception):
    """Why nobody can go on from what is in the run folder, in words."""


@dataclass(slots=True)
class Inheritance:
    """Of one start of a controller, in its thread."""

    job: Job
    folder: RunFolder
    observer: Observer
    _content: bytes = b""  # of the inbox, as it was replayed

    def find(self, job: dict[str, Any]) -> Heritage:
        """Where the controller before this one was. ``job``: this one's, as job.yaml has it.

        Raises NotAdoptable.
        """
        if self.job.checkpoint.from_scratch:
            raise NotAdoptable("the job is to begin from scratch")
        if self.folder.recorded_job() != job:
            raise NotAdoptable("its job is another one")
        try:
            heritage = self._replay()
        except (ConfigError, ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise NotAdoptable(one_line(error)) from error
        if heritage.policy is None or not heritage.standing.run or not heritage.begun:
            raise NotAdoptable("its journal has no beginning")
        return heritage

    def _replay(self) -> Heritage:
        elastic = self.job.elastic
        self._content = (self.folder.path / "inbox.jsonl").read_bytes()
        for lines in beginnings(self._content):
            accounts = Accounts(0.0, elastic.workers_per_node, elastic.max_workers)
            heritage = Heritage(None, State(), Standing(), accounts)
            items = list(parse_inbox(parse_lines(lines, "inbox.jsonl", "inbox.jsonl")))
            at = next((item for item in items[:2] if isinstance(item, Snapshot)), None)
            if at is None or self._has(at):
                heritage.tell(items)
                return heritage
        raise NotAdoptable("the record is older than its journal")

    def _has(self, at: Snapshot) -> bool:
        """Whether the record has all that was written before ``at``: a remote one is behind."""
        if count_lines(self.folder.path / "events.jsonl") < at.seq:
            return False
        line = last_up_to(self.folder.path / "steps.jsonl", at.state.committed)
        step, generation = (line["step"], line["generation"]) if line else (0, 0)
        return step == at.state.committed and at.state.lineage.has(step, generation)

    # ------------------------------------------------------------------- the record

    def repair(self, heritage: Heritage) -> dict[str, int]:
        """Returns how many lines of each file were made up. Raises NotAdoptable: nothing of the
        record was changed."""
        steps, ledger = (self._kept(name, heritage) for name in reversed(RECORD))
        kept = min(steps[1], ledger[1]) if ledger[0] else steps[1]
        if missing := set(range(kept + 1, heritage.state.committed + 1)) - heritage.records.keys():
            raise NotAdoptable(f"step {min(missing)} is not recorded, and its journal lacks it")
        events = (self.folder.path / "events.jsonl").read_bytes()
        count = events.count(b"\n")
        if lacks := set(range(count, heritage.seq)) - heritage.lines.keys():
            raise NotAdoptable(f"line {min(lacks)} of events.jsonl is not there")
        if count > heritage.seq:
            events = b"".join(events.splitlines(keepends=True)[: heritage.seq])
        for name, (content, _) in zip(reversed(RECORD), (steps, ledger), strict=True):
            if content:
                self.folder.rewrite(name, up_to(content, kept))
        self.folder.rewrite("events.jsonl", events)
        self.folder.rewrite("inbox.jsonl", self._content)
        self.folder.repair()  # counts
        return self._make_up(heritage, kept, count)

    def _make_up(self, heritage: Heritage, kept: int, count: int) -> dict[str, int]:
        for seq in range(count, heritage.seq):
            self.folder.make_up(heritage.lines[seq])
        for step in range(kept + 1, heritage.state.committed + 1):
            self.observer.step(heritage.records[step])
        if heritage.state.committed <= kept:
            self.observer.last_step = last_up_to(self.folder.path / "steps.jsonl", kept) or {}
        self.folder.flush()
        made_up = heritage.state.committed - kept
        return {"steps": made_up, "events": max(0, heritage.seq - count)}

    def _kept(self, name: str, heritage: Heritage) -> tuple[bytes, int]:
        """The file, and the last step up to which it is what was decided."""
        path = self.folder.path / name
        content = path.read_bytes() if path.exists() else b""
        after: list[Line] = []
        for line in backwards(content):
            if line["step"] <= heritage.floor:
                break
            after.append(line)
        kept = heritage.floor
        for line in reversed(after):
            known = heritage.records.get(kept + 1)
            same = known is not None and known.generation == line["generation"]
            if not same or line["step"] != kept + 1:
                break
            kept += 1
        return content, kept


def beginnings(content: bytes) -> Iterator[bytes]:
    """The lines from the newest snapshot on, and the policy before it; from older ones on; all."""
    end = content.rfind(b"\n") + 1
    for line in snapshot_lines(content):
        policy = content.rfind(b"\n", 0, line - 1) + 1
        yield content[policy:end]
    yield content[:end]


def backwards(content: bytes) -> Iterator[Line]:
    """The whole lines, the last first."""
    end = content.rfind(b"\n")
    while end > 0:
        begin = content.rfind(b"\n", 0, end) + 1
        yield json.loads(content[begin:end])
        end = begin - 1


def last_up_to(path: Path, step: int) -> Line | None:
    """The line of the newest step that is not after ``step``."""
    content = path.read_bytes() if path.exists() else b""
    return next((line for line in backwards(content) if line["step"] <= step), None)


def up_to(content: bytes, step: int) -> bytes:
    """The lines up to that of ``step``."""
    end = content.rfind(b"\n") + 1
    for line in backwards(content):
        if line["step"] <= step:
            break
        end = content.rfind(b"\n", 0, end - 1) + 1
    return content[:end]


def missing(state: State, survivors: frozenset[str]) -> Iterator[ev.WorkerLost | ev.KeeperLost]:
    """Who has ended while nobody was in charge. Without times."""
    why = "its process ended while no controller was there"
    for node in state.keepers:
        if KEEPER + node not in survivors:
            yield ev.KeeperLost(0.0, node, why)
    for worker in state.ready:
        if worker not in survivors:
            yield ev.WorkerLost(0.0, worker, why)
