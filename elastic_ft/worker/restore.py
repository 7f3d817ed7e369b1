"""Fills a generation's state from the source the core chose: peers' memory, checkpoint or seed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Set
from dataclasses import dataclass

import torch

from elastic_ft import torch_private
from elastic_ft.core.assignment import CheckpointRef, Holding, Source, Tier
from elastic_ft.core.box_owners import find_owners
from elastic_ft.engines.base import StateEngine
from elastic_ft.errors import CheckpointMismatch, GroupBroken, StateDamaged
from elastic_ft.faults import Reach
from elastic_ft.groups.groups import OTHERS_TIMEOUT_S, Groups
from elastic_ft.keeper.buffer import Schema
from elastic_ft.keeper.keeper_client import LeftShard
from elastic_ft.state.checkpoint_source import StoredState, reading_checkpoint, store_of
from elastic_ft.state.outcomes import together
from elastic_ft.state.placed import Placed, exchange_placed
from elastic_ft.state.residuals import is_optional, settle_residuals, summed_residuals
from elastic_ft.state.snapshot import Snapshots
from elastic_ft.state.tensors import LocalState, tensor_name
from elastic_ft.state.transfer import hand_on, move
from elastic_ft.storage import checkpoints, shards
from elastic_ft.transport.tls import JobKey
from elastic_ft.worker.frozen_weights import FrozenBytes, place_frozen


@dataclass(frozen=True, slots=True)
class Restored:
    placed: Placed  # what everyone holds now
    peer_schemas: dict[int, Schema]  # of the ranks whose copies this one keeps
    bytes_received: int
    residual_lost: str = ""  # of what gradients owed, in words
    frozen: FrozenBytes | None = None


def make_room(
    engine: StateEngine,
    groups: Groups,
    snapshots: Snapshots,
    live: Callable[[], tuple[Holding, LocalState] | None],
    forget_live: Callable[[], None],
) -> None:
    """The old shard leaves its GPU before a new one is laid out there: both may be too much.

    It is in host memory then, so that nothing is lost where forming breaks again, if it was not
    there anyway (``optimizer.offload``). Where every rank has all, it stays in place. Frozen
    weights leave it, too, also where a restore that broke off has left no live state.
    """
    if groups.rank is None or engine.keeps(groups.assignment.layout):
        return
    found = live()
    if found is not None and is_on_gpu(found[1]):
        if found[0].step >= groups.assignment.source.step:  # else nobody can go on from it
            snapshots.move_out(*found)
        forget_live()
    elif engine.device.type != "cuda":
        return
    if engine.reference is not None:
        engine.reference.leave_device()
    del found
    gc.collect()  # modules of before are in cycles
    torch.cuda.empty_cache()
    torch_private.empty_host_cache()


def is_on_gpu(state: LocalState) -> bool:
    """Of an offloaded optimizer's state just buffers are, which are small."""
    return any(tensor.local.is_cuda and not tensor.volatile for tensor in state.values())


def restore(
    engine: StateEngine,
    groups: Groups,
    snapshots: Snapshots,
    live: LocalState,
    reach: Reach,
    forget_live: Callable[[], None],
    key: JobKey,
    silent_s: float = 60.0,
    residuals: bool = False,
) -> Restored:
    """Lays the engine out over ``groups`` and fills its state; every participant calls it.

    ``live``: this worker's state of the generation before, if it has one. ``forget_live`` is
    called before it is overwritten in place. ``key``: the job's, for what keepers have.
    ``silent_s``: after so long without a byte from the store, retries included, it can't be read.
    ``residuals``: replicas have each a part of what gradients owe (``state.residuals``).
    Raises GroupBroken, or StateDamaged or StateUnreadable naming the holder: all the same one.
    """
    source = groups.assignment.source
    needs, filled = _attached(engine, groups)
    reach("resharding")
    frozen = place_frozen(engine.reference, groups, silent_s)
    offers = _offers(groups, source, snapshots, live, needs if filled else None)
    offers, lost = summed_residuals(groups, offers) if residuals else (offers, "")
    in_place = filled and Tier.LIVE in groups.assignment.has.values()
    if groups.rank is not None and not in_place:
        engine.intact = False
        if filled:
            forget_live()
    placed = exchange_placed(groups, offers, needs)
    received = 0
    if source.tier is Tier.INITIAL:
        together(groups, "initial", lambda: _initialise(engine, groups))
    elif source.tier is Tier.CHECKPOINT and not source.holders:
        received = _read_checkpoint(groups, source, placed, needs, silent_s)
    else:
        left = left_shards(groups, key, silent_s)
        received = move(groups, placed, offers, needs, left)
    if groups.rank is not None:
        lost = settle_residuals(needs, lost)
        engine.restored()
    groups.barrier("restored", OTHERS_TIMEOUT_S)
    if groups.rank is not None:
        engine.intact = True
        if not groups.assignment.holds:  # a donor's may be the only one
            snapshots.drop_moved_out()
    received += frozen.from_peers
    return Restored(placed, _peer_schemas(groups, placed), received, lost, frozen)


def _attached(engine: StateEngine, groups: Groups) -> tuple[LocalState, bool]:
    """What this rank is to hold, and whether it does already: not where that was laid out by an
    attempt that broke off before it was filled."""
    if groups.rank is None:
        return {}, False
    if not engine.keeps(groups.assignment.layout):
        engine.intact = False
    kept = engine.attach(groups)
    return engine.state(), kept and engine.intact


def _initialise(engine: StateEngine, groups: Groups) -> tuple[None, tuple[str, ...]]:
    if groups.rank is not None:
        engine.initialise()
    return None, (groups.assignment.source.url,) * (groups.rank is not None)


def left_shards(groups: Groups, key: JobKey, silent_s: float) -> list[LeftShard | StoredState]:
    """Where the shards of the source are that no living worker has: at keepers, in a checkpoint."""
    source = groups.assignment.source
    keepers = {keeper.name: keeper for keeper in groups.assignment.keepers}
    kept = {
        shard: holders[0][0]
        for shard, holders in sorted(source.holders.items())
        if holders[0][1] is Tier.KEEPER
    }
    if not kept and not source.url:
        return []

    def open_all() -> tuple[list[LeftShard | StoredState], tuple[str, ...]]:
        left: list[LeftShard | StoredState] = []
        if source.url:
            left.append(StoredState(groups, source, silent_s))
        for shard, holder in kept.items():
            name, _, worker = holder.rpartition("/")
            of = (worker, source, shard)
            left.append(LeftShard(keepers[name], key, *of, guard=groups.guard))
        return left, tuple(shard.holder for shard in left)

    return together(groups, "opened", open_all)


def _offers(
    groups: Groups, source: Source, snapshots: Snapshots, live: LocalState, kept: LocalState | None
) -> list[LocalState]:
    """The shards of the chosen step that this worker holds, each from its nearest tier."""
    offers: list[LocalState] = []
    for shard, tier in sorted(groups.assignment.has.items()):
        if tier is Tier.LIVE and (live or kept is not None):
            offers.append(live if kept is None else kept)
            continue
        held = snapshots.find(source, shard)
        if held is None:
            raise GroupBroken(f"shard {shard} of step {source.step} is not held here any more")
        try:
            held.verify(groups.worker)  # a live shard's, too, that has left its device
        except StateDamaged:
            snapshots.discard(held)
            raise
        offers.append(held.state())
    return offers


def _peer_schemas(groups: Groups, placed: Placed) -> dict[int, Schema]:
    """Of the snapshots to expect from the ranks whose buddy this one is."""
    return {rank: placed.schema_of(rank) for rank in groups.assignment.keeps}


def _read_checkpoint(
    groups: Groups, source: Source, placed: Placed, needs: LocalState, silent_s: float
) -> int:
    """Reads each box once for all ranks that need it, and hands it on. Returns bytes received.

    Every participant calls it. All raise the same for the manifest's URL, if anybody finds it
    damaged or can't read it (I5): nobody waits for what will not come.
    """
    me = str(groups.participant)
    owned = find_owners(me, placed.needed, placed.itemsizes)
    own = {(one.tensor, one.box) for one in owned if one.owner == me}
    mine = {key: tensor for key, tensor in needs.items() if (tensor_name(key), tensor.box) in own}

    def read() -> tuple[None, tuple[str, ...]]:
        if groups.rank is None:
            return None, ()
        elsewhere = placed.itemsizes.keys() - {tensor_name(key) for key in needs}
        ref = CheckpointRef(source.step, source.url)
        store = store_of(groups, ref, silent_s)
        with reading_checkpoint(groups, store, source.url):
            read_boxes(checkpoints.open_checkpoint(ref, store), needs, mine, elsewhere)
        return None, (source.url,) * any(tensor.local.numel() for tensor in mine.values())

    together(groups, "read", read)
    return hand_on(groups, placed, owned, needs)


def read_boxes(
    reader: shards.Reader, state: LocalState, mine: LocalState, elsewhere: Set[str]
) -> None:
    """Reads ``mine``, a part of this rank's ``state``. Raises StateDamaged, StoreFailed.

    ``elsewhere``: names of what other pipeline stages have of the state.
    """
    staged: list[tuple[torch.Tensor, torch.Tensor]] = []
    expected = {tensor_name(key): (t.dtype, t.shape) for key, t in state.items()}
    found = {
        name: (spec.dtype, tuple(spec.shape))
        for name, spec in reader.manifest.tensors.items()
        if name not in elsewhere
    }
    differing = {n for n in expected.keys() | found.keys() if expected.get(n) != found.get(n)}
    if not all(map(is_optional, differing)):
        raise CheckpointMismatch(mismatch_message(reader.url, found, expected))
    wanted = []
    for key, tensor in sorted(mine.items()):
        buffer = tensor.local
        if tensor_name(key) in differing:  # of a job that did not compress
            buffer.zero_()
            continue
        if not buffer.is_contiguous() or buffer.is_cuda:
            buffer = torch.empty(buffer.shape, dtype=buffer.dtype)
            staged.append((tensor.local, buffer))
        raw = buffer.reshape(-1).view(torch.uint8).numpy()
        wanted.append(shards.Want(tensor_name(key), tensor.box, memoryview(raw)))
    reader.read(wanted)
    with torch.no_grad():
        for target, buffer in staged:
            target.copy_(buffer)


def mismatch_message(
    url: str,
    found: dict[str, tuple[str, tuple[int, ...]]],
    expected: dict[str, tuple[str, tuple[int, ...]]],
) -> str:
    """One line naming the first tensors that differ."""
    differing = sorted(n for n in found.keys() | expected.keys() if found.get(n) != expected.get(n))
    shown = [
        f"{name} is {_spec(found.get(name))}, the model has {_spec(expected.get(name))}"
        for name in differing[:3]
    ]
    more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
    return f"{url} is a checkpoint of another model: {'; '.join(shown)}{more}"


def _spec(spec: tuple[str, tuple[int, ...]] | None) -> str:
    return "absent" if spec is None else f"{spec[0]} {list(spec[1])}"
