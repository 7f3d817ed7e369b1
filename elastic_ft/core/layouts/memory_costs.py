"""The memory that a layout takes on its fullest rank, in bytes, from sizes alone. Pure.

It follows what the native engine holds (``benchmarks/memory.py`` compares).
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from elastic_ft.core.layouts.work import RESIDUAL_BYTES, Choice, Recompute, Work, stage_layers

LOSS_BYTES = 12  # per logit at the peak of the loss: float32 log-probabilities and two gradients
EXCHANGE = {"int8": 6.6, "powersgd": 3.1}  # times the float32 numbers exchanged: measured
EXCHANGE_NUMBERS = 32 << 20
CHUNK_LOSS_BYTES = 8  # in chunks, whose gradient takes the place of the float32 logits


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


def block_activation_bytes(work: Work, tp: int, fused: bool) -> float:
    """What one layer keeps for backward, per token. Tensor and sequence parallelism divide it.

    Two norms (input and output; unfused, the normed value too, in float32), queries, keys and
    values (keys and values repeated to all heads), attention's output and log-sum-exp, and four
    feed-forward tensors (two without a gate). Inputs of column-wise products are gathered, so each
    rank keeps them whole. Of each expert that a token goes to, its row there and the one back.
    """
    model, a = work.model, work.compute_bytes
    inner = (4 if model.gated else 2) * model.ffn_dim * a
    norms = 2 * model.dim * (a if fused else 8)
    whole = 2 * model.dim * a + 2 * _rows_bytes(work)
    return (inner + norms + 4 * model.dim * a + 4 * model.heads) / tp + whole


def kept_activation_bytes(
    work: Work, tp: int, recompute: Recompute, fused: bool, ep: int = 1
) -> float:
    """What one layer keeps from forward to backward, per token.

    Its input at least. Selective: what products return too (row-wise ones parts of a sum, whole on
    each rank), attention with its log-sum-exp, and rows of experts' as they came from other ranks.
    """
    model, a = work.model, work.compute_bytes
    if not recompute:
        return block_activation_bytes(work, tp, fused)
    inputs = model.dim * a / tp
    if recompute != "selective":
        return inputs
    inner = (2 if model.gated else 1) * model.ffn_dim
    kept = (inner + 2 * model.dim + 2 * model.kv_dim) * a + 4 * model.heads
    return inputs + kept / tp + 2 * model.dim * a + _kept_rows_bytes(work, recompute, ep)


def _rows_bytes(work: Work) -> float:
    """Of a token, its rows to the experts that it goes to."""
    return work.model.experts_per_token * work.model.dim * work.compute_bytes


def _kept_rows_bytes(work: Work, recompute: Recompute, ep: int) -> float:
    """Selective: what experts' products return, and what came from other ranks, there and back.
    None of it is what a layer keeps that recomputes nothing, which is in another order."""
    if recompute != "selective":
        return 0.0
    return _rows_bytes(work) * (1 if ep == 1 else 3)


def in_flight(choice: Choice, stage: int, micro_batches: int) -> float:
    """Micro-batches whose activations a stage holds at once, at most.

    interleaved1f1b: Narayanan et al., 2021, warm-up in chunks. zero_bubble: weight gradients wait,
    so every rank holds what the first one of 1F1B does.
    """
    pp = choice.layout.pp
    if pp == 1:
        return 1.0
    if choice.schedule == "gpipe":
        return float(micro_batches)
    if choice.schedule == "1f1b":
        return float(min(micro_batches, pp - stage))
    if choice.schedule == "zero_bubble":
        return float(min(micro_batches, pp))
    warm_up = 2 * (pp - stage - 1) + (choice.chunks - 1) * pp + 1
    return min(float(micro_batches), warm_up / choice.chunks)


def memory(work: Work, choice: Choice, fused: bool = True) -> Memory:
    """Returns the peak of the fullest rank."""
    layers = stage_layers(work.model, choice.layout.pp)
    fullest = {0, layers.index(max(layers)), len(layers) - 1}
    found = (stage_memory(work, choice, stage, fused) for stage in sorted(fullest))
    return max(found, key=lambda m: m.total)


def stage_memory(work: Work, choice: Choice, stage: int, fused: bool = True) -> Memory:
    """Returns the peak of a rank of a pipeline stage: the worst of the moments of a step.

    A change of layout has less on a device: the state alone, as the old shard leaves it first.
    """
    model, layout = work.model, choice.layout
    layers = stage_layers(model, layout.pp)[stage]
    last = stage == choice.output_rank
    root, block, local_block = _unit_parameters(work, choice, stage)
    own = root + layers * block
    local = root / layout.state_shards + layers * local_block
    count = choice.micro_batches(work)
    # Of each number one that it owes, and in a step one that it will.
    residuals = 2 * RESIDUAL_BYTES if work.compression.replicas else 0
    base = Memory(
        parameters=local * work.parameter_bytes,
        optimizer=0.0 if work.offloads_optimizer else local * (work.optimizer_bytes + residuals),
        gradients=_gradients(work, choice, own, local, count),
    )
    tokens = ceil(choice.micro_batch * model.sequence_length / layout.cp)
    full = tokens * block_activation_bytes(work, layout.tp, fused)
    kept = tokens * kept_activation_bytes(work, layout.tp, choice.recompute, fused, layout.ep)
    held = kept * (1 if work.offloads else layers * in_flight(choice, stage, count))
    head = tokens * model.dim * (2 * work.compute_bytes if fused else 12) / layout.tp * last
    loss = _loss_bytes(work, layout.tp, tokens) * last
    whole, unit = _gathered(work, choice, own, root, block)
    inputs = tokens * model.dim * work.compute_bytes / layout.tp
    beside = tokens * _kept_rows_bytes(work, choice.recompute, layout.ep)
    again = full - (kept - inputs - beside) if choice.recompute else 0.0
    again += tokens * 2 * model.ffn_dim * work.compute_bytes / layout.tp  # gradients inside a layer
    again += _gathered_kv_bytes(work, choice) + tokens * _sent_bytes(work, layout.ep)
    first = (model.output_parameters / layout.tp) * last * work.gradient_bytes
    rooted = root * (work.gradient_bytes * 2) + root / layout.state_shards * work.gradient_bytes
    biggest = max(local_block, root / 2 / layout.state_shards)
    scratch = (local if fused else 2 * biggest) * work.parameter_bytes
    scratch *= not work.offloads_optimizer
    sharded = layout.state_shards > 1
    return max(
        base._replace(gathered=whole, activations=held + head, loss=loss),
        base._replace(gathered=whole + unit + first * sharded, activations=held + again),
        base._replace(gathered=whole + rooted * sharded),
        base._replace(gathered=scratch),
        base._replace(gathered=whole + _exchanged(work, own, local)),
        key=lambda m: m.total,
    )


def _unit_parameters(work: Work, choice: Choice, stage: int) -> tuple[float, float, float]:
    """What a rank of a stage gathers of FSDP's root unit (whatever is in no layer) and of a layer,
    and what it holds of a layer."""
    model, layout = work.model, choice.layout
    last = stage == choice.output_rank
    root = ((stage == 0) * model.embedding_parameters + last * model.output_parameters) / layout.tp
    experts = model.expert_parameters * model.expert_share(layout.ep) / layout.tp
    dense = (model.block_parameters - model.expert_parameters) / layout.tp
    return root, dense + experts, dense / layout.state_shards + experts / layout.expert_shards


def held_parameters(work: Work, choice: Choice) -> float:
    """How many the fullest rank has of its own, whole ones being gathered from those of others."""
    layers = stage_layers(work.model, choice.layout.pp)
    held = []
    for stage, count in enumerate(layers):
        root, _, local_block = _unit_parameters(work, choice, stage)
        held.append(root / choice.layout.state_shards + count * local_block)
    return max(held)


def host_bytes(work: Work, choice: Choice) -> float:
    """That the fullest rank takes of its node's memory for an offloaded optimizer: the weights that
    it steps, what it keeps for them, and their gradients. Snapshots come on top."""
    if not work.offloads_optimizer:
        return 0.0
    each = work.parameter_bytes + work.optimizer_bytes + work.gradient_bytes
    return held_parameters(work, choice) * each


def _exchanged(work: Work, own: float, local: float) -> float:
    """Of compressed gradients, what their exchange takes for a moment: as many numbers at a time
    as ``engines.replica_comm`` takes, or one parameter."""
    method, model = work.compression.replicas, work.model
    if method is None:
        return 0.0
    largest = max(model.embedding_parameters, model.output_parameters) * local / own
    return EXCHANGE[method] * 4 * min(local, max(EXCHANGE_NUMBERS, largest))


def _gathered_kv_bytes(work: Work, choice: Choice) -> float:
    """Where ranks share positions, keys and values of all of them, their gradients in float32, and
    what each is gathered or summed from; of one layer at a time."""
    model, layout = work.model, choice.layout
    if layout.cp == 1:
        return 0.0
    kv = 2 * choice.micro_batch * model.sequence_length * model.kv_dim / layout.tp
    return kv * 2 * (work.compute_bytes + 4)


def _sent_bytes(work: Work, ep: int) -> float:
    """Where ranks share experts out, of a token: what is sent to them and comes from others, in
    either order. Others send as much as goes there, on the mean."""
    if ep == 1:
        return 0.0
    return 4 * _rows_bytes(work)


def _loss_bytes(work: Work, tp: int, tokens: int) -> float:
    """Of a loss in chunks, the gradients of input and weight that are made with it count as well:
    the weight's in float32, and the input's, which each rank has whole."""
    model, chunk = work.model, work.loss_chunk_tokens
    if chunk is None:
        return tokens * model.vocabulary * LOSS_BYTES / tp
    weight = model.vocabulary * model.dim * 4 / tp
    dx = tokens * model.dim * work.compute_bytes * (1 if tp == 1 else 2)
    return min(tokens, chunk) * model.vocabulary * CHUNK_LOSS_BYTES / tp + weight + dx


def _gradients(work: Work, choice: Choice, own: float, local: float, micro_batches: int) -> float:
    """Sharded where FSDP reduces each micro-batch; whole where it reduces once a step.

    DDP has them in its buckets, and apart from those while micro-batches add up.
    """
    layout, each = choice.layout, work.gradient_bytes
    if layout.state_shards == 1:
        return own * each * (2 if micro_batches > 1 else 1)
    if layout.pp == 1 and not (work.reduces_once and micro_batches > 1):
        return local * each
    return (own + local) * each


def _gathered(
    work: Work, choice: Choice, own: float, root: float, block: float
) -> tuple[float, float]:
    """Bytes of copies of weights that are there throughout, and of one layer's unit on the way.

    FSDP keeps the root unit from forward to backward, and everything with stages or where it
    gathers once; a layer's unit is its weights as they arrive and as they are used, its gradients,
    and those to be reduced.
    """
    layout = choice.layout
    if layout.state_shards == 1:
        return (own * work.compute_bytes if work.compute_bytes < work.parameter_bytes else 0.0), 0.0
    unit = block * (2 * work.compute_bytes + 2 * work.gradient_bytes)
    freed = layout.pp == 1 and not work.gathers_once
    return (root if freed else own) * work.compute_bytes, unit
