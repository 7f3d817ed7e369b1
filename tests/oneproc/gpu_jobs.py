"""A job for GPUs, and the groups of one of its workers, made without a GPU."""

from __future__ import annotations

from typing import Any

from elastic_ft.config import Job, parse_job
from elastic_ft.core.assignment import Assignment, Member, Source, Tier
from elastic_ft.core.layouts.layout import LayoutWish, plan_layout
from elastic_ft.core.shares import shares
from elastic_ft.groups.groups import Groups


def make_job(**sections: Any) -> Job:
    values: dict[str, Any] = {
        "name": "gpu",
        "steps": 4,
        "model": {"preset": "decoder-1m", "kwargs": {"vocab_size": 512}},
        "data": {"url": "stdlib:", "vocab_size": 512, "sequence_length": 8},
        "batch": {"global_batch_size": 2, "micro_batch_size": 1},
        "elastic": {"max_workers": 2},
    }
    return parse_job(values | sections)


def make_groups(
    strategy: str,
    world: int,
    shard_size: int | None = None,
    backend: str = "auto",
    **sizes: int,
) -> Groups:
    layout, _ = plan_layout(LayoutWish(strategy=strategy, shard_size=shard_size, **sizes), world)
    members = tuple(Member(f"w{rank}", f"n{rank}", "localhost", 0) for rank in range(world))
    source = Source(0, Tier.INITIAL)
    assignment = Assignment(1, members, (), layout, source, ((),) * world, "test")
    return Groups(dict(shares(assignment))["w0"], members[0], ("127.0.0.1", 1), backend)
