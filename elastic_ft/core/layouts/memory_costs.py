"""The memory that a layout takes on its fullest rank, in bytes, from sizes alone. Pure.

It follows what the native engine holds, tensor by tensor, at each moment of a step that may be its
fullest (``benchmarks/memory.py`` compares). ``fused``: with kernels as on GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from elastic_ft.core.layouts.rank_memory import (
    FLOAT32_BYTES,
    RankShape,
    kept_rows_bytes,
    norm_bytes,
    rank_layers,
    rows_bytes,
    shape_of_rank,
    unit_parameters,
)
from elastic_ft.core.layouts.work import RESIDUAL_BYTES, Choice, Work

LOSS_BYTES = 12  # per logit at the peak of the loss: log-probabilities and two gradients
# Of float32 numbers exchanged, what is there at the most, residuals that come of it included.
EXCHANGE = {"int8": 7.4, "powersgd": 3.1}  # measured; powersgd has one matrix besides
EXCHANGE_NUMBERS = 32 << 20


class Memory(NamedTuple):
    """Bytes at the peak of the fullest rank."""

    parameters: float = 0.0
    optimizer: float = 0.0
    gradients: float = 0.0
    gathered: float = 0.0  # whole or low-precision copies of weights, and buffers to reduce
    activations: float = 0.0
    loss: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)


class _Moment(NamedTuple):
    """Of a step: what is there beside parameters and the optimizer's state."""

    gradients: float
    gathered: float = 0.0
    activations: float = 0.0
    loss: float = 0.0


def memory(work: Work, choice: Choice, fused: bool = True) -> Memory:
    """Returns the peak of the fullest rank."""
    layers = rank_layers(work, choice)
    fullest = {0, layers.index(max(layers)), len(layers) - 1}
    found = (stage_memory(work, choice, stage, fused) for stage in sorted(fullest))
    return max(found, key=lambda m: m.total)


def stage_memory(
    work: Work, choice: Choice, stage: int, fused: bool = True, copies: bool | None = None
) -> Memory:
    """Returns the peak of a rank of a pipeline stage: the worst of the moments of a step.

    A change of layout has less on a device: the state alone, as the old shard leaves it first.

    Args:
        copies: whether collectives take as much again as they gather or scatter, as Gloo's do;
            None: on CPUs, which have those.
    """
    copies = not fused if copies is None else copies
    r = shape_of_rank(work, choice, stage, fused, copies)
    moments = [*_of_end(r)]
    flights = [(r.flying, r.count > r.flying)]
    if r.flying > 1:  # the first backward is done
        flights.append((r.flying - 1, True))
    for flight in flights:
        moments += (*_of_loss(r, *flight), *_of_layer(r, *flight))
    residuals = RESIDUAL_BYTES if work.compression.replicas else 0  # of each number that it owes
    optimizer = 0.0 if work.offloads_optimizer else work.optimizer_bytes + residuals
    state = r.local * work.parameter_bytes, r.local * optimizer
    return Memory(*state, *max(moments, key=sum))


def _held(r: RankShape, flying: float) -> float:
    """What layers keep of so many micro-batches. A stage also has what it receives, for each
    micro-batch of a step, and what it hands on until that is differentiated."""
    held = r.kept * (1.0 if r.work.offloads else r.layers * flying)
    if not r.choice.layout.has_stages:
        return held
    is_counted = r.keeps_hidden or bool(r.choice.recompute)
    received = 0.0 if r.first else r.count - flying * is_counted
    return held + r.hidden * (received + (0.0 if r.last else r.count + flying))


def _again(r: RankShape) -> float:
    """Of one layer, what recomputing it adds to what it has kept."""
    work, recompute = r.work, r.choice.recompute
    if not recompute:
        return 0.0
    if recompute is True:
        return r.full - r.hidden * r.keeps_hidden
    rows = r.tokens * kept_rows_bytes(work, recompute, r.choice.layout.shares_experts)
    return r.full - (r.kept - rows) + r.tokens * work.model.dim * work.compute_bytes


def _at_hand(r: RankShape, flying: float) -> float:
    """Bytes of logits that a last stage has until they are differentiated: pipelines keep what a
    stage returns, and gpipe log-probabilities of others."""
    if not (r.last and r.choice.layout.has_stages) or r.work.loss_chunk_tokens is not None:
        return 0.0
    logits = r.tokens * r.work.model.vocabulary / r.choice.layout.tp
    others = (flying - 1) * (r.choice.schedule == "gpipe")
    a = r.work.compute_bytes
    return logits * (a + others * (a + FLOAT32_BYTES))


def _of_loss(r: RankShape, flying: float, done: bool) -> Iterator[_Moment]:
    """At the peak of the loss, and of the projection's backward."""
    if not r.last:
        return
    work, tp, a = r.work, r.choice.layout.tp, r.work.compute_bytes
    at_once = flying if r.choice.schedule == "gpipe" and r.choice.layout.has_stages else 1.0
    head = r.tokens * (norm_bytes(work, r.fused, False) / tp + work.model.dim * a) * at_once
    held, before = _held(r, flying) + head, r.gradients(done)
    if work.loss_chunk_tokens is not None:
        loss = _chunked_loss(r, work.loss_chunk_tokens, at_once)
        there = r.unit * (r.choice.layout.state_shards > 1)
        yield _Moment(before, r.weights + there, held, loss)
        return
    logits, others = r.tokens * work.model.vocabulary / tp, _at_hand(r, flying)
    lower = a if a < FLOAT32_BYTES else 0
    cast = lower * (tp > 1)
    yield _Moment(before, r.weights, held, logits * (LOSS_BYTES + cast) + others)
    product = r.output * r.made_bytes
    yield _Moment(before + product, r.weights, held, logits * (FLOAT32_BYTES + lower) + others)


def _chunked_loss(r: RankShape, chunk: int, at_once: float) -> float:
    """The gradients of input and weight that are made with it, the weight's in float32 and the
    input's whole on each rank; and a chunk's logits, beside those of the chunk before."""
    work, tp, a = r.work, r.choice.layout.tp, r.work.compute_bytes
    weight, dx = r.output * FLOAT32_BYTES, r.tokens * work.model.dim * a * (1 if tp == 1 else 2)
    logits = min(r.tokens, chunk) * work.model.vocabulary / tp
    again = r.tokens > chunk
    if a == FLOAT32_BYTES:
        return (weight + dx) * at_once + logits * a * (1 + again)
    both = FLOAT32_BYTES + a
    product = r.output * (a if r.fused else a + FLOAT32_BYTES)  # CPUs cast it, to add it up
    most = max(logits * both * (1 + again), logits * both + product)
    return (weight + dx) * at_once + most


def _of_layer(r: RankShape, flying: float, done: bool) -> Iterator[_Moment]:
    """In the backward of the last layer, and of the one before it."""
    work, layout, a = r.work, r.choice.layout, r.work.compute_bytes
    model, tp, made = work.model, layout.tp, r.made_bytes
    at_hand, kept_whole = _at_hand(r, flying), r.adds_up(done)
    before = r.gradients(done) + (0.0 if kept_whole else r.output * made)
    held = _held(r, flying) + _again(r)
    handed = r.hidden if tp == 1 else r.hidden * (1 + tp)  # gathered, too
    weights = r.weights + r.unit + r.arriving
    yield _Moment(before, weights + r.staged(r.unit, a), held + handed, at_hand)

    attention = 2 * model.dim * (model.q_dim + model.kv_dim) / tp
    fed = max(0.0, r.block - attention) * made  # of the feed-forward's matrices: three, or two
    down = fed / (3 if model.gated else 2)
    inner = r.tokens * model.ffn_dim * a / tp
    feed = held + handed + inner * (2 if model.gated else 1)
    if layout.shares_experts:  # sent to them, and come from others, in either order
        feed += r.tokens * 4 * rows_bytes(work)  # on the mean, as much as goes there
    yield _Moment(before + down, weights, feed, at_hand)
    in_layers = r.by_fsdp and not layout.has_stages
    reduced, sent = r.local_block * work.gradient_bytes * (not done), r.block * work.gradient_bytes
    if r.layers > 1 and in_layers:
        yield _Moment(before + down + reduced, weights + sent, feed - r.kept, at_hand)

    projected = model.dim * model.q_dim / tp * made + (0.0 if kept_whole else fed)
    gone = inner * (4 if model.gated else 2) + r.tokens * (
        norm_bytes(work, r.fused, r.casts) / tp + model.dim * a
    )
    attended = held - gone + r.hidden * (1 + tp) + _attention_backward_bytes(r)
    yield _Moment(before + projected, weights, attended, at_hand)
    if r.layers > 1 and in_layers:
        yield _Moment(before + projected + reduced, weights + sent, attended - r.kept, at_hand)
    if in_layers:
        left = _held(r, flying) - r.kept + r.hidden
        whole = r.block * (work.gradient_bytes if kept_whole else made)
        others = before - (whole if kept_whole else 0.0)
        for there, buffers in _reduced(r, r.block, r.local_block, whole):
            yield _Moment(others + there, r.weights + r.arriving + buffers, left, at_hand)


def _reduced(r: RankShape, unit: float, local: float, made: float) -> Iterator[tuple[float, float]]:
    """Bytes of gradients and of buffers as FSDP copies the gradients of a unit (``made`` bytes)
    together, and lets go of them; and as it scatters their sums."""
    each = r.work.gradient_bytes
    yield made, unit * each
    yield 0.0, (unit + local) * each + r.staged(unit * each, each)


def _attention_backward_bytes(r: RankShape) -> float:
    """Gradients of queries, keys and values. Where ranks share positions, keys and values of all of
    them (of the heads that this rank has), repeated to all heads, their gradients, and those summed
    over heads and over ranks."""
    work, layout, a = r.work, r.choice.layout, r.work.compute_bytes
    model, tp = work.model, layout.tp
    heads = r.tokens * model.q_dim / tp
    if layout.cp == 1:
        return 3 * heads * a
    if work.trades_heads(tp, layout.cp):
        kv = 2 * r.tokens * work.traded_kv_dim(tp, layout.cp) / tp
        lower = FLOAT32_BYTES if a < FLOAT32_BYTES else 0
        return kv * FLOAT32_BYTES + heads * (FLOAT32_BYTES + 6 * a + lower)
    of_all, seen = layout.cp * r.tokens / tp, 1 - 1 / (2 * layout.cp)
    kv = 2 * of_all * model.kv_dim
    there = 2 * of_all * model.q_dim * a * (1 + seen) + kv * (a + FLOAT32_BYTES)
    summed = kv / 2 * seen * FLOAT32_BYTES  # over heads: of keys, or of values
    lowered = of_all * seen * model.q_dim * FLOAT32_BYTES * (a < FLOAT32_BYTES)
    own = kv / layout.cp if r.copies else 0.0
    sent = kv * FLOAT32_BYTES + max(kv / 2, own + kv * r.copies) * FLOAT32_BYTES
    return there + summed + max(summed + lowered, sent) + heads * (FLOAT32_BYTES + 2 * a)


def _of_end(r: RankShape) -> Iterator[_Moment]:
    """As the last gradients are made and reduced, and in the optimizer's step."""
    work, layout, each = r.work, r.choice.layout, r.work.gradient_bytes
    several, shards = r.count > 1, layout.state_shards
    embedding = work.model.embedding_parameters * r.first
    done = r.local if r.by_fsdp else r.own
    if r.by_fsdp and layout.has_stages:
        unit = max(r.root, r.block)
        weights, others = r.weights - unit * work.compute_bytes, r.gradients(True) - unit * each
        for there, buffers in _reduced(r, unit, unit / shards, unit * each):
            yield _Moment(others + there, weights + buffers)
    elif r.by_fsdp:
        twice = r.output * (r.first and work.model.is_tied)  # of two products
        made = (r.root + r.others_embedding + twice) * r.made_bytes
        before = (r.local - (0.0 if several else r.root / shards)) * each
        yield _Moment(before + made, r.weights + r.block * each, r.hidden)
        for there, buffers in _reduced(r, r.root, r.root / shards, made):
            yield _Moment(before + there, buffers)
    else:
        yield _Moment(r.gradients(several or not r.is_whole) + embedding * each * several)
        if layout.cuts_layers:
            more = embedding * (1 / layout.tp + r.copies)
            yield _Moment(r.gradients(True) + more * each)
    will_owe = r.local * RESIDUAL_BYTES * (work.compression.replicas is not None)
    yield _Moment(done * each, _scratch(r) + will_owe)
    yield _Moment(done * each, _exchanged(r))


def _scratch(r: RankShape) -> float:
    """Of the optimizer's step, as it goes: of all parameters together, or of one by one."""
    work = r.work
    if work.steps_in_place or work.offloads_optimizer:
        return 0.0
    biggest = max(r.local_block, r.root / 2 / r.choice.layout.state_shards)
    return (r.local if r.fused else 2 * biggest) * work.parameter_bytes


def held_parameters(work: Work, choice: Choice) -> float:
    """How many the fullest rank has of its own, whole ones being gathered from those of others."""
    held = []
    for stage, count in enumerate(rank_layers(work, choice)):
        root, _, local_block = unit_parameters(work, choice, stage)
        held.append(root / choice.layout.state_shards + count * local_block)
    return max(held)


def host_bytes(work: Work, choice: Choice) -> float:
    """That the fullest rank takes of its node's memory for an offloaded optimizer: the weights that
    it steps, what it keeps for them, and their gradients. Snapshots come on top."""
    if not work.offloads_optimizer:
        return 0.0
    each = work.parameter_bytes + work.optimizer_bytes + work.gradient_bytes
    return held_parameters(work, choice) * each


def _exchanged(r: RankShape) -> float:
    """Of compressed gradients, what their exchange takes for a moment: as many numbers at a time
    as ``engines.replica_comm`` takes, or one parameter; of the others, what they will owe."""
    method, model = r.work.compression.replicas, r.work.model
    if method is None:
        return 0.0
    largest = max(model.embedding_parameters, model.output_parameters) * r.local / r.own
    some = min(r.local, max(EXCHANGE_NUMBERS, largest))
    matrix = largest * (method == "powersgd")
    return FLOAT32_BYTES * (EXCHANGE[method] * some + matrix) + RESIDUAL_BYTES * (r.local - some)
