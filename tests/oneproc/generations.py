"""One worker's life, alone: from a generation to the next, as ``Worker`` goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from elastic_ft.config import Job
from elastic_ft.core.assignment import Assignment, Holding, Member, Source, Tier
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.core.shares import shares
from elastic_ft.engines.native import NativeEngine
from elastic_ft.groups.groups import Groups
from elastic_ft.groups.store_links import StoreLinks
from elastic_ft.models.build import build_model
from elastic_ft.state.snapshot import Snapshots
from elastic_ft.state.tensors import LocalState
from elastic_ft.worker import restore
from tests.oneproc.alone import CPU, TIMEOUT_S, job_of, reach, run_step

MEMBER, LAYOUT = Member("w0", "n0", "127.0.0.1", 0), Layout()


def small_job(**sections: object) -> Job:
    return job_of(model={"preset": "decoder-1m", "kwargs": {"vocab_size": 512}}, **sections)


class Generations:
    """One worker's, alone, from one to the next as ``Worker`` goes."""

    def __init__(self, job: Job) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.job = job
        self.engine = self.made()
        self.snapshots = Snapshots("w0", False, lambda why: None, "run")
        self.live: tuple[Holding, LocalState] | None = None
        self.number = 0

    def made(self) -> NativeEngine:
        """One that has laid nothing out."""
        engine = NativeEngine(self.job, self._model, CPU, 8)
        engine.prepare()
        return engine

    def _model(self) -> torch.nn.Module:
        return build_model(self.job.model, vocab_size=512, sequence_length=8)

    @contextmanager
    def next(self, source: Source) -> Iterator[Groups]:
        self.number += 1
        assignment = Assignment(self.number, (MEMBER,), (), LAYOUT, source, ((),), "a test")
        links = StoreLinks(("127.0.0.1", self.store.port), TIMEOUT_S)
        groups = Groups(dict(shares(assignment))["w0"], MEMBER, links)
        groups.form(CPU, TIMEOUT_S)
        try:
            yield groups
        finally:
            groups.abort("the end")
            self.engine.detach()
            groups.teardown()

    def train_two_steps(self) -> None:
        with self.next(Source(0, Tier.INITIAL)) as groups:
            self.restored(groups)
            for step in (1, 2):
                run_step(self.engine, step, [{"tokens": torch.arange(9)[None] + step}] * 4)
            holding = groups.assignment.holding_of(0, 2, Tier.LIVE)
            self.live = holding, self.engine.detach()

    def forget(self) -> None:
        self.live = None

    def restored(self, groups: Groups, reach: Callable[..., None] = reach) -> None:
        restore.make_room(self.engine, groups, self.snapshots, lambda: self.live, self.forget)
        live = self.live[1] if self.live else {}
        restore.restore(self.engine, groups, self.snapshots, live, reach, self.forget, b"key")


def copied(state: LocalState) -> dict[str, torch.Tensor]:
    return {name: tensor.local.clone() for name, tensor in state.items()}


def source_of(holding: Holding, tier: Tier) -> Source:
    holders = {holding.shard: (("w0", tier),)}
    return Source(holding.step, tier, holding.space, holders, generation=holding.generation)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())
