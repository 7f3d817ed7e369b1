"""What it takes to learn who has what, and to plan who sends what, at a thousand ranks.

    python benchmarks/forming.py --ranks 1024 --plans 4

Threads stand for ranks, a store in this process for the controller's; the tensors are Llama-70B's
with Adam's moments, without memory. ``store_mb``: all that goes into the store and out of it, from
the listeners' addresses to the last exchange before training, without what Gloo and NCCL put there
themselves. ``cpu_s``: of one rank, to tell, to learn and to plan (the most of those that plan; the
others only tell and fetch, as this is one machine).
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import random
import sys
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from elastic_ft.core.assignment import Assignment, Member, Source, Tier
from elastic_ft.core.box_owners import find_owners
from elastic_ft.core.layouts.layout import Layout, ShardPlace
from elastic_ft.core.placement import Cut
from elastic_ft.core.sharding import Box, ReshardPlan, plan_moves
from elastic_ft.core.shares import Share, shares
from elastic_ft.groups.groups import Groups, Peer
from elastic_ft.groups.store_links import SealedStore
from elastic_ft.models.decoder import Decoder, DecoderConfig
from elastic_ft.state.outcomes import together
from elastic_ft.state.placed import Placed, tell
from elastic_ft.state.tensors import LocalState, StateTensor
from elastic_ft.state.transfer import move_costs

PER_NODE = 8
DEADLINE_S = 900.0
LLAMA_70B = DecoderConfig(128_256, 80, 8192, 64, 8, 28_672, 8192, 500_000.0)
Shapes = dict[str, tuple[int, ...]]


class CountedStore:
    """Of this process; counts the bytes of keys and values."""

    def __init__(self) -> None:
        self._lock, self.bytes = threading.Lock(), 0
        self._values: dict[str, bytes] = {}
        self._counts: Counter[str] = Counter()
        self._there: defaultdict[str, threading.Event] = defaultdict(threading.Event)

    def _event(self, name: str, nbytes: int) -> threading.Event:
        with self._lock:
            self.bytes += len(name) + nbytes
            return self._there[name]

    def set(self, name: str, value: str | bytes) -> None:
        there = self._event(name, len(value))
        self._values[name] = value.encode() if isinstance(value, str) else bytes(value)
        there.set()

    def get(self, name: str) -> bytes:
        self._event(name, len(self._values[name]))
        return self._values[name]

    def add(self, name: str, amount: int) -> int:
        self._event(name, 8)
        with self._lock:
            self._counts[name] += amount
            return self._counts[name]

    def wait(self, names: list[str], timeout: datetime.timedelta) -> None:
        """As long as it takes: a thousand ranks share a processor here."""
        for name in names:
            if not self._event(name, 0).wait(DEADLINE_S):
                raise TimeoutError(name)


def shapes_of(config: DecoderConfig) -> Shapes:
    """Of a model's parameters and their optimizer's state."""
    with torch.device("meta"):
        parameters = {name: tuple(p.shape) for name, p in Decoder(config).named_parameters()}
    shapes = {f"model.{name}": shape for name, shape in parameters.items()}
    for name, shape in parameters.items():
        shapes |= {f"optim.{name}.{key}": shape for key in ("exp_avg", "exp_avg_sq")}
        shapes[f"optim.{name}.step"] = ()
    return shapes


def state_of(shapes: Shapes, layout: Layout, place: ShardPlace) -> LocalState:
    """FSDP2's: rows in equal chunks, of what tensor parallelism (of matrices) leaves."""
    local = torch.empty(0, device="meta")
    alike: dict[tuple[int, ...], StateTensor] = {}
    for shape in set(shapes.values()):
        cut = Cut(0 if len(shape) > 1 and layout.tp > 1 else None, 0 if shape else None)
        (box,) = cut.boxes(shape, layout, place)
        alike[shape] = StateTensor(shape, box, local)
    return {name: alike[shape] for name, shape in shapes.items()}


def assignment_of(before: Layout, after: Layout) -> Assignment:
    """The world of before, which has its state in live memory, makes that of after, with or
    without the last ones."""
    ranks = max(before.world_size, after.world_size)
    members = tuple(
        Member(f"worker-{r:05}", f"node-{r // PER_NODE:04}", f"10.0.{r // 2048}.{r // 8 % 256}", r)
        for r in range(ranks)
    )
    holders: dict[str, list[tuple[str, Tier]]] = defaultdict(list)
    for rank in range(before.world_size):
        holders[before.shard_of(rank)].append((members[rank].worker, Tier.LIVE))
    held = {shard: tuple(who) for shard, who in holders.items()}
    source = Source(100, Tier.LIVE, before.shard_space, held, generation=1)
    world = after.world_size
    buddies = tuple(((rank + PER_NODE) % world,) for rank in range(world))
    return Assignment(2, members[:world], members[world:], after, source, buddies, "benchmark")


class World:
    """A thread for each participant of one generation, in this process."""

    def __init__(self, shapes: Shapes, before: Layout, after: Layout) -> None:
        self.shapes, self.before, self.after = shapes, before, after
        assignment = assignment_of(before, after)
        self.members = (*assignment.members, *assignment.donors)
        self.store = CountedStore()
        told = zip(self.members, shares(assignment), strict=True)
        self.ranks = [self._groups(member, share) for member, (_, share) in told]
        self.placed: dict[int, Placed] = {}
        self.plans: dict[int, ReshardPlan] = {}
        self.cpu_s: dict[int, float] = {}

    def _groups(self, member: Member, share: Share) -> Groups:
        groups = Groups(share, member, ("127.0.0.1", 1))
        groups.store = SealedStore(self.store, b"k" * 32)  # type: ignore[arg-type]
        return groups

    def form(self, planning: set[int]) -> None:
        """Everybody tells; ``planning`` plan, too."""
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            for done in [pool.submit(self._one, g, g.participant in planning) for g in self.ranks]:
                done.result()

    def _states(self, number: int) -> tuple[list[LocalState], LocalState]:
        offers, needs = [], {}
        if number < self.before.world_size:
            offers = [state_of(self.shapes, self.before, self.before.place_of(number))]
        if number < self.after.world_size:
            needs = dict(state_of(self.shapes, self.after, self.after.place_of(number)))
        return offers, needs

    def _one(self, groups: Groups, plans: bool) -> None:
        number = groups.participant
        offers, needs = self._states(number)
        ports = random.Random(number).sample(range(32_768, 60_999), 3)
        member = self.members[number]
        me = Peer(member.worker, member.node, tuple((member.host, port) for port in ports))
        groups.peers = tuple(groups.exchange_values("peers", me))
        groups.exchange("data", b"123456789 samples, fingerprint " + b"f" * 64)
        began_s = time.thread_time()
        told = tell(groups, offers, needs)
        if not plans:
            told.listings()
        else:
            placed = self.placed[number] = told.placed()
            self.plans[number] = plan_moves(
                str(number), placed.offered, placed.needed, placed.itemsizes, move_costs(groups, {})
            )
            find_owners(str(number), placed.needed, placed.itemsizes)
            for rank in groups.assignment.keeps:
                placed.schema_of(rank)
            self.cpu_s[number] = time.thread_time() - began_s
        together(groups, "opened", lambda: (None, ()))
        groups.barrier("restored")


def received_bytes(world: World, number: int) -> int:
    """That the rank's plan brings to it."""
    sizes = world.placed[number].itemsizes
    return sum(copy.box.numel * sizes[copy.tensor] for copy in world.plans[number].receives)


def lacking_bytes(world: World, number: int) -> int:
    """Of what the rank needs, the part that it has not, from the two layouts alone."""
    offers, needs = world._states(number)
    total = 0
    for name, tensor in needs.items():
        had: list[Box] = [offer[name].box for offer in offers]
        kept = sum(cut.numel for box in had if (cut := box.intersect(tensor.box)) is not None)
        total += (tensor.box.numel - kept) * tensor.local.element_size()
    return total


def measure(config: DecoderConfig, before: Layout, after: Layout, plans: int) -> dict[str, Any]:
    world = World(shapes_of(config), before, after)
    count = len(world.ranks)
    planning = {round(i * (count - 1) / max(1, plans - 1)) for i in range(plans)}
    world.form(planning)
    for number in planning:
        assert received_bytes(world, number) == lacking_bytes(world, number), number
    return {
        "from": str(before),
        "to": str(after),
        "tensors": len(world.shapes),
        "store_mb": round(world.store.bytes / 1e6, 1),
        "cpu_s": round(max(world.cpu_s.values()), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1024, help="a multiple of 64")
    parser.add_argument("--plans", type=int, default=4, help="ranks that plan")
    parser.add_argument("--moves", nargs="*", help="loss, join, hsdp, tp, ddp; none: all")
    parser.add_argument("--out", type=Path, help="folder for forming.json")
    arguments = parser.parse_args()
    n = arguments.ranks
    moves = {
        "loss": (Layout(dp_shard=n), Layout(dp_shard=n - 8)),  # of a node
        "join": (Layout(dp_shard=n - 8), Layout(dp_shard=n)),
        "hsdp": (Layout(n // 8, 8), Layout(n // 8 - 1, 8)),
        "tp": (Layout(dp_shard=n // 8 - 1, tp=8), Layout(dp_shard=n // 8, tp=8)),
        "ddp": (Layout(dp_replicate=n - 8), Layout(dp_replicate=n)),
    }
    gc.disable()  # one rank's thread would collect what a thousand have
    found = []
    for name in arguments.moves or moves:
        found.append(measure(LLAMA_70B, *moves[name], arguments.plans))
        print(json.dumps(found[-1]), flush=True)
    if arguments.out:
        (arguments.out / "forming.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
