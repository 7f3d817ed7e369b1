"""An engine in this process, as the only rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elastic_ft.config import Job, parse_job
from elastic_ft.core.assignment import Assignment, Member, Source, Tier
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.core.shares import shares
from elastic_ft.engines.base import MicroBatch, Update
from elastic_ft.engines.native import NativeEngine
from elastic_ft.groups.groups import Groups
from elastic_ft.groups.store_links import StoreLinks

CPU, TIMEOUT_S = torch.device("cpu"), 30.0


def job_of(**sections: Any) -> Job:
    values: dict[str, Any] = {"name": "alone", "steps": 100, "model": {"preset": "decoder-1m"}}
    values |= {"data": {"url": "stdlib:"}, "batch": {"global_batch_size": 4}}
    return parse_job(values | sections)


@contextmanager
def attached(
    job: Job,
    factory: Callable[[], nn.Module],
    tokens: int = 1,
    digest: str | None = None,
) -> Iterator[NativeEngine]:
    """The engine with the state of step 0. ``tokens``: of a sample, nominally. ``digest``: of the
    folder that the model begins with."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    member, source = Member("w0", "n0", "127.0.0.1", 0), Source(0, Tier.INITIAL)
    assignment = Assignment(1, (member,), (), Layout(), source, ((),), "a test")
    links = StoreLinks(("127.0.0.1", store.port), TIMEOUT_S)
    groups = Groups(dict(shares(assignment))["w0"], member, links)
    engine = NativeEngine(job, factory, CPU, tokens)
    engine.base_digest = digest
    engine.prepare()  # as a worker does: before there is a group
    groups.form(CPU, TIMEOUT_S)
    try:
        engine.attach(groups)
        engine.initialise()
        engine.restored()
        yield engine
    finally:
        groups.abort("the end")
        engine.detach()
        groups.teardown()


def run_step(engine: NativeEngine, step: int, batches: list[Any]) -> tuple[float, int, Update]:
    """One step of micro-batches. Returns the loss's sum, its terms, and what was applied."""
    numbered = [MicroBatch(number, batch) for number, batch in enumerate(batches)]
    sums = engine.run_batch(step, numbered, reach)
    return sums.loss, sums.tokens, engine.apply(step, sums.tokens, sums.squares, reach)


def reach(point: str, step: int | None = None) -> None:
    """Nobody listens."""
