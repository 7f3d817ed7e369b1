"""What a layout costs: memory of the fullest rank, and the time of one step. Pure.

Estimates, in bytes and seconds, from sizes alone. The memory model follows what the native engine
holds (``benchmarks/memory.py`` compares); the time model is Narayanan et al., 2021 (pipeline
bubbles, tensor parallelism), Qi et al., 2023 (zero-bubble) and ring collectives over two kinds of
links. Ranks are placed row-major over (pp, dp_replicate, dp_shard, tp), as in ``core.layout``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, gcd
from typing import Literal, NamedTuple

from elastic_ft.core.layouts.layout import Layout

Schedule = Literal["gpipe", "1f1b", "interleaved1f1b", "zero_bubble"]

LOSS_BYTES = 12  # per logit at the peak of the loss: float32 log-probabilities and two gradients
CONTENTION = 0.15  # of communication that computation hides: what it slows that computation by
RESERVED = 0.08  # of a device's memory: context, communication buffers, fragmentation


# --------------------------------------------------------------------------- descriptions


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder in numbers. Parameters are counted per kind of layer."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    ffn_dim: int
    vocabulary: int
    sequence_length: int
    block_parameters: int  # of one layer
    embedding_parameters: int
    output_parameters: int  # final norm, and the projection unless it is tied
    gated: bool = True  # three matrices in the feed-forward, not two
    idle_parameters: int = 0  # of one layer: experts that a token does not go through

    @property
    def block_active_parameters(self) -> int:
        """Of one layer, what a token goes through."""
        return self.block_parameters - self.idle_parameters

    @property
    def parameters(self) -> int:
        return (
            self.layers * self.block_parameters + self.embedding_parameters + self.output_parameters
        )

    @property
    def block_flops(self) -> float:
        """Of one layer, forward, one sample; attention is causal."""
        tokens = self.sequence_length
        return 2.0 * tokens * self.block_active_parameters + 2.0 * tokens * tokens * self.dim

    @property
    def output_flops(self) -> float:
        """Of the projection to the vocabulary, forward, one sample."""
        return 2.0 * self.sequence_length * self.dim * self.vocabulary

    @property
    def sample_flops(self) -> float:
        """Forward and backward, one sample, nothing recomputed."""
        return 3 * (self.layers * self.block_flops + self.output_flops)


@dataclass(frozen=True, slots=True)
class Work:
    """One step of a job: model, global batch in samples, bytes per number of each kind."""

    model: ModelShape
    global_batch: int
    compute_bytes: int = 2  # activations and the weights of a matrix product
    parameter_bytes: int = 4  # as the optimizer keeps them (the master weights)
    gradient_bytes: int = 4
    optimizer_bytes: int = 8  # Adam: two float32 moments
    gathers_once: bool = False  # FSDP: weights once a step, and kept; not with each micro-batch
    reduces_once: bool = False  # FSDP: gradients once a step, whole until then

    @property
    def state_bytes(self) -> int:
        """Of parameters and optimizer: what a checkpoint holds, and a change of layout moves."""
        return self.model.parameters * (self.parameter_bytes + self.optimizer_bytes)


@dataclass(frozen=True, slots=True)
class Devices:
    """Equal devices on nodes. Bandwidths are each device's own, one way."""

    nodes: tuple[int, ...]  # devices on each
    memory_bytes: float
    flops_per_s: float = 400e12  # that large matrix products reach, not the datasheet's
    intra_bytes_per_s: float = 300e9  # to devices of the same node
    inter_bytes_per_s: float = 40e9  # to other nodes
    latency_s: float = 10e-6  # of one message
    layer_s: float = 100e-6  # the least time of one layer's forward: launching its kernels
    fused: bool = True  # fused norms and a multi-tensor optimizer, as on GPUs

    def __post_init__(self) -> None:
        if not self.nodes or min(self.nodes) < 1:
            raise ValueError(f"every node has at least one device, got {self.nodes}")
        if min(self.memory_bytes, self.flops_per_s) <= 0:
            raise ValueError("memory and flops of a device are positive")
        if min(self.intra_bytes_per_s, self.inter_bytes_per_s) <= 0:
            raise ValueError("bandwidths are positive")

    @property
    def count(self) -> int:
        return sum(self.nodes)

    @property
    def usable_bytes(self) -> float:
        return self.memory_bytes * (1 - RESERVED)


@dataclass(frozen=True, slots=True)
class Choice:
    """Everything that a plan decides."""

    layout: Layout
    micro_batch: int  # samples
    recompute: bool = False  # each layer's activations again in backward
    schedule: Schedule = "1f1b"  # matters with pp > 1
    chunks: int = 1  # of layers per rank: two with the last two schedules

    @property
    def output_rank(self) -> int:
        """The pipeline rank of the output layer: zero_bubble's stages come back to the first."""
        return 0 if self.schedule == "zero_bubble" else self.layout.pp - 1

    def micro_batches(self, work: Work) -> int:
        """That the busiest rank runs in a step. Uneven dealing gives others one less."""
        count = ceil(work.global_batch / self.micro_batch / self.layout.data_parallel_size)
        if self.schedule != "interleaved1f1b" or self.layout.pp == 1:
            return count
        rounds = max(1, count // self.layout.pp)  # torch: the count must be a multiple of these
        return ceil(count / rounds) * rounds


@lru_cache(maxsize=4096)
def stage_layers(model: ModelShape, pp: int) -> tuple[int, ...]:
    """Layers of each pipeline stage, so that the slowest is as fast as can be.

    The last stage also has the projection to the vocabulary, and gets fewer layers for it; of the
    others, later ones take what does not divide, since earlier ones hold more micro-batches.
    """
    if not 1 <= pp <= model.layers:
        raise ValueError(f"{model.layers} layers cannot make {pp} stages")
    if pp == 1:
        return (model.layers,)
    extra = model.output_flops / model.block_flops
    last = min(
        range(1, model.layers - pp + 2),
        key=lambda n: (max(ceil((model.layers - n) / (pp - 1)), n + extra), -n),
    )
    each, more = divmod(model.layers - last, pp - 1)
    return (*(each + (stage >= pp - 1 - more) for stage in range(pp - 1)), last)


# --------------------------------------------------------------------------------- memory


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
    rank keeps them whole.
    """
    model, a = work.model, work.compute_bytes
    inner = (4 if model.gated else 2) * model.ffn_dim * a
    norms = 2 * model.dim * (a if fused else 8)
    whole = 2 * model.dim * a
    return (inner + norms + 4 * model.dim * a + 4 * model.heads) / tp + whole


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
    """Returns the peak of a rank of a pipeline stage: the worst of four moments of a step.

    A change of layout has less on a device: the state alone, as the old shard leaves it first.
    """
    model, layout = work.model, choice.layout
    layers = stage_layers(model, layout.pp)[stage]
    last = stage == choice.output_rank
    root = (
        (stage == 0) * model.embedding_parameters + last * model.output_parameters
    ) / layout.tp  # FSDP's root unit: whatever is in no layer
    block = model.block_parameters / layout.tp
    own = root + layers * block
    local = own / layout.dp_shard
    count = choice.micro_batches(work)
    base = Memory(
        parameters=local * work.parameter_bytes,
        optimizer=local * work.optimizer_bytes,
        gradients=_gradients(work, choice, own, count),
    )
    tokens = choice.micro_batch * model.sequence_length
    full = tokens * block_activation_bytes(work, layout.tp, fused)
    inputs = tokens * model.dim * work.compute_bytes / layout.tp
    held = (inputs if choice.recompute else full) * layers * in_flight(choice, stage, count)
    head = tokens * model.dim * (2 * work.compute_bytes if fused else 12) / layout.tp * last
    loss = tokens * model.vocabulary * LOSS_BYTES / layout.tp * last
    whole, unit = _gathered(work, choice, own, root, block)
    again = full if choice.recompute else 0.0
    first = (model.output_parameters / layout.tp) * last * work.gradient_bytes
    rooted = root * (work.gradient_bytes * 2) + root / layout.dp_shard * work.gradient_bytes
    biggest = max(block, root / 2) / layout.dp_shard
    scratch = (local if fused else 2 * biggest) * work.parameter_bytes
    sharded = layout.dp_shard > 1
    return max(
        base._replace(gathered=whole, activations=held + head, loss=loss),
        base._replace(gathered=whole + unit + first * sharded, activations=held + again),
        base._replace(gathered=whole + rooted * sharded),
        base._replace(gathered=scratch),
        key=lambda m: m.total,
    )


def _gradients(work: Work, choice: Choice, own: float, micro_batches: int) -> float:
    """Sharded where FSDP reduces each micro-batch; whole where it reduces once a step.

    DDP has them in its buckets, and apart from those while micro-batches add up.
    """
    layout, each = choice.layout, work.gradient_bytes
    if layout.dp_shard == 1:
        return own * each * (2 if micro_batches > 1 else 1)
    if layout.pp == 1 and not (work.reduces_once and micro_batches > 1):
        return own / layout.dp_shard * each
    return own * each * (1 + 1 / layout.dp_shard)


def _gathered(
    work: Work, choice: Choice, own: float, root: float, block: float
) -> tuple[float, float]:
    """Bytes of copies of weights that are there throughout, and of one layer's unit on the way.

    FSDP keeps the root unit from forward to backward, and everything with stages or where it
    gathers once; a layer's unit is its weights as they arrive and as they are used, its gradients,
    and those to be reduced.
    """
    layout = choice.layout
    if layout.dp_shard == 1:
        return (own * work.compute_bytes if work.compute_bytes < work.parameter_bytes else 0.0), 0.0
    unit = block * (2 * work.compute_bytes + 2 * work.gradient_bytes)
    freed = layout.pp == 1 and not work.gathers_once
    return (root if freed else own) * work.compute_bytes, unit


# ----------------------------------------------------------------------------------- time


class StepTime(NamedTuple):
    """Seconds of one step on the slowest path. Communication: what computing does not hide."""

    compute: float
    recompute: float
    tp: float
    pp: float
    dp: float
    bubble: float

    @property
    def total(self) -> float:
        return sum(self)


@dataclass(frozen=True, slots=True)
class Interconnect:
    """How far apart ranks are: nodes in use, devices used on one of them, what divides them all."""

    devices: Devices
    nodes: int
    on_node: int  # mean
    common: int  # greatest common divisor

    @staticmethod
    def of(devices: Devices, used: Iterable[int]) -> Interconnect:
        """``used``: devices of each node that have a rank."""
        filled = [count for count in used if count]
        return Interconnect(devices, len(filled), sum(filled) // len(filled), gcd(*filled))

    def ring(self, nbytes: float, size: int, stride: int) -> float:
        """Seconds of an all-gather (or reduce-scatter) of ``nbytes`` in total, over ``size`` ranks
        that are ``stride`` apart. Rings inside a node share the work of going between nodes."""
        if size == 1:
            return 0.0
        devices = self.devices
        latency_s = (size - 1) * devices.latency_s
        inside_s = nbytes * (size - 1) / size / devices.intra_bytes_per_s
        if self.is_inside(size, stride):
            return inside_s + latency_s
        on_node = max(1, min(size, self.on_node // stride))
        nodes = ceil(size / on_node)
        between_s = nbytes * (nodes - 1) / nodes / (on_node * devices.inter_bytes_per_s)
        return max(inside_s, between_s) + latency_s

    def send(self, nbytes: float) -> float:
        """Seconds of one message to the next pipeline stage, on another node if there is one."""
        devices = self.devices
        rate = devices.intra_bytes_per_s if self.nodes == 1 else devices.inter_bytes_per_s
        return nbytes / rate + devices.latency_s

    def is_inside(self, size: int, stride: int) -> bool:
        """Whether every such group lies within one node."""
        return self.nodes == 1 or self.common % (size * stride) == 0


def step_time(work: Work, choice: Choice, links: Interconnect) -> StepTime:
    """Returns the time of one step, by its slowest pipeline stage."""
    model, layout, devices = work.model, choice.layout, links.devices
    layers, count = stage_layers(model, layout.pp), choice.micro_batches(work)
    rate = devices.flops_per_s * layout.tp
    block_s = max(model.block_flops * choice.micro_batch / rate, devices.layer_s)
    output_s = model.output_flops * choice.micro_batch / rate
    stage = max(
        (0, layers.index(max(layers)), len(layers) - 1),
        key=lambda s: layers[s] * block_s + (s == choice.output_rank) * output_s,
    )
    blocks_s = layers[stage] * block_s
    forward_s = blocks_s + (stage == choice.output_rank) * output_s
    again_s = blocks_s * choice.recompute
    # One all-gather and one reduce-scatter around each half of a layer (sequence parallelism).
    hidden = choice.micro_batch * model.sequence_length * model.dim * work.compute_bytes
    tp_s = 4 * layers[stage] * links.ring(hidden, layout.tp, 1)
    pp_s = 2 * links.send(hidden) * choice.chunks
    pp_s *= layout.pp > 1
    backward_s = 2 * forward_s + again_s + (1 + choice.recompute) * tp_s
    slot_s = forward_s + tp_s + backward_s + pp_s
    own = _widest_stage(model, layout.pp) / layout.tp
    dp_s = _data_parallel_s(work, choice, links, own, forward_s + tp_s, backward_s, count)
    return StepTime(
        compute=3 * forward_s * count,
        recompute=again_s * count,
        tp=(2 + choice.recompute) * tp_s * count,
        pp=pp_s * count,
        dp=dp_s,
        bubble=_bubble_s(choice, slot_s, forward_s),
    )


def _widest_stage(model: ModelShape, pp: int) -> int:
    """Parameters of the stage that has the most."""
    layers = [n * model.block_parameters for n in stage_layers(model, pp)]
    layers[0] += model.embedding_parameters
    layers[-1] += model.output_parameters
    return max(layers)


def _bubble_s(choice: Choice, slot_s: float, forward_s: float) -> float:
    """Idle seconds of a rank: (pp - 1) slots, or chunks of one; zero_bubble fills two forwards'
    worth of each slot with weight gradients."""
    filled_s = 2 * forward_s if choice.schedule == "zero_bubble" else 0.0
    return (choice.layout.pp - 1) * (slot_s - filled_s) / choice.chunks


def _data_parallel_s(
    work: Work,
    choice: Choice,
    links: Interconnect,
    own: float,
    forward_s: float,
    backward_s: float,
    micro_batches: int,
) -> float:
    """Seconds of gathering weights and reducing gradients that no computation hides.

    DDP, and stages, reduce once a step, behind one micro-batch's backward. FSDP gathers for each
    forward and each backward, and reduces in each backward, unless the work says once; over
    replicas, in the last one.
    """
    layout = choice.layout
    shards, stride = layout.dp_shard, layout.tp
    gradients = own * work.gradient_bytes
    replicas_s = 2 * links.ring(gradients / shards, layout.dp_replicate, stride * shards)
    if shards == 1:
        return _late(replicas_s, backward_s)
    gather_s = links.ring(own * work.compute_bytes, shards, stride)
    reduce_s = links.ring(gradients, shards, stride)
    if layout.pp > 1:
        return _late(gather_s, forward_s) + _late(reduce_s + replicas_s, backward_s)
    again_s = 0.0 if work.gathers_once else gather_s  # in backward
    early_s = again_s + (0.0 if work.reduces_once else reduce_s)
    forwards = 1 if work.gathers_once else micro_batches
    return (
        _late(gather_s, forward_s) * forwards
        + _late(early_s, backward_s) * (micro_batches - 1)
        + _late(again_s + reduce_s + replicas_s, backward_s)
    )


def _late(communication_s: float, behind_s: float) -> float:
    """Seconds that communication adds to the computation it runs behind."""
    hidden_s = min(communication_s, behind_s)
    return communication_s - hidden_s + CONTENTION * hidden_s
