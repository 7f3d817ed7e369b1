"""Peer re-shard, fsdp4 -> fsdp3 after a loss, against the same bytes sent and received by Gloo.

Three survivors have their own quarter in live memory, and the first one the lost rank's quarter
in a buddy's buffer. ``move`` is what a generation does between forming and training: verify that
copy, publish boxes, plan, fill each rank's third. ``raw`` is one Gloo message for each pair of
ranks with as many bytes as the plan moves between them, from and into memory that was written
before. Both are timed from a barrier to the last rank's end.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from ranks import on_ranks

from elastic_ft.core.assignment import Holding, Source, Tier
from elastic_ft.core.sharding import Box, plan_moves
from elastic_ft.groups.groups import Groups
from elastic_ft.keeper.buffer import DIGEST_BYTES, schema_bytes
from elastic_ft.models.decoder import PRESETS, Decoder
from elastic_ft.state.host_shards import Buffer, HostShard, make_schema
from elastic_ft.state.placed import Placed, exchange_placed
from elastic_ft.state.tensors import LocalState, StateTensor
from elastic_ft.state.transfer import move

SURVIVORS, BEFORE = 3, 4
Shapes = dict[str, tuple[int, ...]]


def make_shapes(nbytes: int) -> Shapes:
    """Parameters and Adam moments of a decoder-60m, with layers for about ``nbytes`` in all."""
    for layers in itertools.count(1):
        with torch.device("meta"):
            model = Decoder(replace(PRESETS["decoder-60m"], n_layers=layers))
        sizes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        if 3 * 4 * sum(map(prod, sizes.values())) >= nbytes:
            kinds = ("model", "exp_avg", "exp_avg_sq")
            return {f"{kind}.{name}": shape for name, shape in sizes.items() for kind in kinds}
    raise AssertionError("unreachable")


def cut(shape: tuple[int, ...], rank: int, world: int) -> Box:
    """FSDP2's: rows in equal chunks, the last ones shorter."""
    rows = -(-shape[0] // world)
    first = min(rank * rows, shape[0])
    return Box((first, *(0,) * (len(shape) - 1)), (min(rows, shape[0] - first), *shape[1:]))


def values(shape: tuple[int, ...], box: Box) -> torch.Tensor:
    """What the tensor holds there: each element its own place, so that a wrong one shows."""
    flat = torch.arange(prod(shape), dtype=torch.float32).view(shape)
    return flat[box.slices_within(Box.whole(shape))].clone()


def make_shard(shapes: Shapes, rank: int, world: int) -> LocalState:
    boxes = {name: cut(shape, rank, world) for name, shape in shapes.items()}
    return {
        name: StateTensor(shapes[name], b, values(shapes[name], b)) for name, b in boxes.items()
    }


def as_snapshot(state: LocalState) -> HostShard:
    schema = make_schema(state)
    memory = torch.zeros(schema_bytes(schema) + DIGEST_BYTES, dtype=torch.uint8)
    of = Holding(1, "pp1.s4.tp1", "pp0.s3.tp0", Tier.PEER, 1)
    shard = HostShard(of, "run").fill(schema, Buffer(memory))
    for name, tensor in shard.state().items():
        tensor.local.copy_(state[name].local)
    shard.seal()
    return shard


def bytes_by_peer(groups: Groups, placed: Placed, sent: bool) -> dict[int, int]:
    """By participant, what this one's plan sends it, or receives from it."""
    me = str(groups.participant)
    plan = plan_moves(me, placed.offered, placed.needed, placed.itemsizes)
    moved: dict[int, int] = defaultdict(int)
    for copy in plan.sends if sent else plan.receives:
        moved[int(copy.target if sent else copy.source)] += copy.box.numel * 4
    return moved


def one_rank(groups: Groups, nbytes: int, rounds: int) -> dict[str, Any]:
    shapes, rank = make_shapes(nbytes), groups.participant
    offers = [make_shard(shapes, rank, BEFORE)]
    buddys = as_snapshot(make_shard(shapes, SURVIVORS, BEFORE)) if rank == 0 else None
    needs = make_shard(shapes, rank, SURVIVORS)
    expected = {name: tensor.local.clone() for name, tensor in needs.items()}
    held = [*offers, *([buddys.state()] if buddys else [])]
    shards = ["pp0.s0.tp0", "pp0.s3.tp0"] if rank == 0 else [f"pp0.s{rank}.tp0"]
    source = Source(1, Tier.PEER, "pp1.s4.tp1", generation=1)
    has = dict.fromkeys(shards, Tier.PEER)
    groups.assignment = replace(groups.assignment, source=source, has=has)
    placed = exchange_placed(groups, held, needs)
    out, into = (
        {who: torch.ones(n, dtype=torch.uint8) for who, n in moved.items()}
        for moved in (bytes_by_peer(groups, placed, sent) for sent in (True, False))
    )
    count = itertools.count()
    gc.freeze()  # as a worker does

    def reshard() -> None:
        if buddys is not None:
            buddys.verify("benchmark")
        fresh: Any = _Fresh(groups, next(count))
        move(groups, exchange_placed(fresh, held, needs), held, needs)

    def raw() -> None:
        works = [groups.host.recv([t], peer, 0) for peer, t in sorted(into.items())]
        works += [groups.host.send([t], peer, 0) for peer, t in sorted(out.items())]
        for work in works:
            work.wait()

    def timed(work: Callable[[], None]) -> tuple[float, float]:
        groups.barrier(f"begin{next(count)}")
        began_s, cpu_s = time.perf_counter(), time.process_time()
        work()
        return time.perf_counter() - began_s, time.process_time() - cpu_s

    times = []
    for number in range(rounds + 1):  # the first warms up both
        for tensor in needs.values():
            tensor.local.zero_()
        order = [("raw", raw), ("move", reshard)]
        times.append({name: timed(w) for name, w in (order if number % 2 else order[::-1])})
        assert all((needs[n].local == e).all() for n, e in expected.items())
    return {"times": times[1:], "received": sum(t.numel() for t in into.values())}


class _Fresh:
    """The groups, for an exchange under names that were not used before."""

    def __init__(self, groups: Groups, number: int) -> None:
        self._groups, self._number = groups, number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._groups, name)

    def exchange_values(self, name: str, value: Any, timeout_s: float) -> list[Any]:
        return self._groups.exchange_values(f"{name}{self._number}", value, timeout_s)

    def publish(self, name: str, make: Callable[[], bytes]) -> None:
        self._groups.publish(f"{name}{self._number}", make)

    def published(self, name: str) -> bytes:
        return self._groups.published(f"{name}{self._number}")


def measure(mib: int, rounds: int) -> list[dict[str, float]]:
    """Per round: seconds of both, bytes moved, and the ratio of their rates."""
    found = on_ranks(SURVIVORS, one_rank, mib * 2**20, rounds)
    moved = sum(each["received"] for each in found)
    result = []
    for number in range(rounds):
        line: dict[str, float] = {"bytes": moved}
        for name in ("raw", "move"):
            took = [each["times"][number][name] for each in found]
            line[f"{name}_s"] = max(wall_s for wall_s, _ in took)
            line[f"{name}_cpu_s"] = sum(cpu_s for _, cpu_s in took)
        result.append(line | {"ratio": line["raw_s"] / line["move_s"]})
    return result
