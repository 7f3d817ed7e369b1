"""Runs a function on processes that form one generation: for benchmarks below the controller."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import traceback
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

from elastic_ft.core.assignment import Assignment, Member, Source, Tier
from elastic_ft.core.layouts.layout import LayoutWish, Strategy, plan_layout
from elastic_ft.core.shares import shares
from elastic_ft.groups.groups import Groups

DEADLINE_S = 600.0
OPERATION_S = 120.0


def on_ranks(
    world: int, work: Callable[..., Any], *arguments: Any, strategy: Strategy = "fsdp"
) -> list[Any]:
    """``work(groups, *arguments)`` on ``world`` ranks. Returns their results in rank order."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(
            target=_rank, args=(rank, world, store.port, strategy, results, work, arguments)
        )
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    found: dict[int, Any] = {}
    try:
        while len(found) < world:
            rank, result, good = results.get(timeout=DEADLINE_S)
            if not good:
                raise RuntimeError(result)
            found[rank] = result
        for process in ranks:
            process.join(10)
    finally:
        for process in ranks:
            process.kill()
    return [found[rank] for rank in range(world)]


def form(
    rank: int, world: int, port: int, device: torch.device, strategy: Strategy = "fsdp"
) -> Groups:
    """One generation of ``world`` ranks on this machine; each keeps a copy of the next."""
    layout, _ = plan_layout(LayoutWish(strategy=strategy), world)
    members = tuple(Member(f"w{r}", f"n{r}", "localhost", 0) for r in range(world))
    source = Source(0, Tier.INITIAL)
    buddies = tuple(((r + 1) % world,) if world > 1 else () for r in range(world))
    assignment = Assignment(1, members, (), layout, source, buddies, "benchmark")
    groups = Groups(dict(shares(assignment))[f"w{rank}"], members[rank], ("127.0.0.1", port))
    groups.form(device, OPERATION_S)
    return groups


def _rank(
    rank: int,
    world: int,
    port: int,
    strategy: Strategy,
    results: Any,
    work: Callable[..., Any],
    arguments: Any,
) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(DEADLINE_S / 2)
    try:
        groups = form(rank, world, port, torch.device("cpu"), strategy)
        results.put((rank, work(groups, *arguments), True))
        groups.barrier("end")
    except BaseException:
        results.put((rank, traceback.format_exc(), False))
        raise
