"""The seconds that a step takes in a layout, estimated from sizes and bandwidths. Pure.

After Narayanan et al., 2021 (pipeline bubbles, tensor parallelism), Qi et al., 2023 (zero-bubble)
and ring collectives over two kinds of links. Ranks are placed row-major over (pp, dp_replicate,
dp_shard, cp, tp), as in ``core.layouts.layout``.

What a micro-batch takes however small it is decides between sizes of it, and on CPUs between
layouts. The host launches each layer's kernels: a GPU computes meanwhile, so that this is the least
that a layer takes; a CPU launches and computes in turn, so that both count. Where ranks share
layers each operator is DTensor's, whose dispatch is Python: CUT_LAUNCHES times as much. And on CPUs
what is as large as the weights (gradients; FSDP's buffers) is in memory that malloc maps anew each
time, page by page.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, gcd
from typing import NamedTuple

from elastic_ft.core.layouts.expert_owners import expert_share
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.core.layouts.memory_costs import held_parameters
from elastic_ft.core.layouts.rank_memory import kept_activation_bytes, rank_layers
from elastic_ft.core.layouts.work import Choice, Devices, ModelShape, Recompute, Work

# Shares of a layer's forward, and of what it sends, that are done again. Selective: norms, rotary
# angles and activation functions, and inputs gathered, not what was reduced.
AGAIN: dict[Recompute, float] = {False: 0.0, "selective": 0.15, True: 1.0}
SENT_AGAIN: dict[Recompute, float] = {False: 0.0, "selective": 0.5, True: 1.0}
CONTENTION = 0.15  # of communication that computation hides: what it slows that computation by
# Measured, torch 2.13, of layers with next to nothing to compute: 16 ms of a processor's time with
# tensor and sequence parallelism, forward and backward and without collectives, 0.8 ms without.
CUT_LAUNCHES = 20.0
FRESH_BYTES_PER_S = 2.5e9  # that a core can use of memory that is mapped anew; measured


class StepTime(NamedTuple):
    """Seconds of one step on the slowest path. Communication: what computing does not hide."""

    compute: float
    recompute: float
    offload: float
    tp: float
    cp: float
    ep: float
    pp: float
    dp: float
    bubble: float

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def on_links(self) -> float:
        """Waited for what bandwidths decide, but for messages between stages: a rank waits for
        these as it waits for its turn."""
        return self.tp + self.cp + self.ep + self.dp

    @property
    def without_links(self) -> float:
        return self.total - self.on_links


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
        """Seconds of an all-gather of ``nbytes`` in total, over ``size`` ranks that are
        ``stride`` apart. Rings inside a node share the work of going between nodes."""
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

    def scatter(self, nbytes: float, size: int, stride: int) -> float:
        """Seconds of a reduce-scatter. Gloo has none: it sums a copy of all on each rank, which is
        a reduce-scatter and an all-gather (ProcessGroupGloo's reduce_scatter_tensor_coalesced)."""
        return self.ring(nbytes, size, stride) * (1 if self.devices.overlaps else 2)

    def swap(self, nbytes: float, size: int, stride: int) -> float:
        """Seconds of an all-to-all in which each of ``size`` ranks, ``stride`` apart, has
        ``nbytes`` for all of them, itself included."""
        if size == 1:
            return 0.0
        devices, latency_s = self.devices, (size - 1) * self.devices.latency_s
        inside_s = nbytes * (size - 1) / size / devices.intra_bytes_per_s
        if self.is_inside(size, stride):
            return inside_s + latency_s
        nodes = ceil(size / max(1, min(size, self.on_node // stride)))
        return max(inside_s, nbytes * (nodes - 1) / nodes / devices.inter_bytes_per_s) + latency_s

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
    layers, count = rank_layers(work, choice), choice.micro_batches(work)
    block_s, output_s = _forward_s(model, choice, devices)
    stage = max(
        (0, layers.index(max(layers)), len(layers) - 1),
        key=lambda s: layers[s] * block_s + (s == choice.output_rank) * output_s,
    )
    blocks_s = layers[stage] * block_s
    forward_s = blocks_s + (stage == choice.output_rank) * output_s
    again_s = blocks_s * AGAIN[choice.recompute]
    fresh_s = _fresh_s(work, choice, devices)
    tokens = choice.micro_batch * model.sequence_length
    hidden = tokens / layout.cp * model.dim * work.compute_bytes
    layer_tp_s, ends_tp_s = _tensor_s(work, choice, links, stage)
    tp_s = layers[stage] * layer_tp_s
    kv_s, cp_again_s = (layers[stage] * each for each in _attention_s(work, choice, links))
    # Tokens go to experts and back; gradients the same way.
    rows = hidden / layout.tp * model.experts_per_token
    ep_s = 2 * layers[stage] * links.swap(rows, layout.ep, layout.tp)
    ep_again_s = ep_s * (2 if choice.recompute is True else 1)
    pp_s = 2 * links.send(hidden / layout.tp) * choice.chunks
    pp_s *= layout.pp > 1
    tp_again = SENT_AGAIN[choice.recompute]
    backward_s = 2 * forward_s + fresh_s + again_s
    backward_s += (1 + tp_again) * tp_s + ends_tp_s + cp_again_s + ep_again_s
    offload_s = _offload_s(work, choice, layers[stage], devices)
    sent_s = tp_s + ends_tp_s + kv_s + ep_s
    slot_s = forward_s + sent_s + backward_s + pp_s + offload_s
    dp_s = _data_parallel_s(work, choice, links, forward_s + sent_s, backward_s, count)
    return StepTime(
        compute=(3 * forward_s + fresh_s) * count,
        recompute=again_s * count,
        offload=offload_s * count + _optimizer_s(work, choice, devices),
        tp=((2 + tp_again) * tp_s + 2 * ends_tp_s) * count,
        cp=(kv_s + cp_again_s) * count,
        ep=(ep_s + ep_again_s) * count,
        pp=pp_s * count,
        dp=dp_s,
        bubble=_bubble_s(choice, slot_s, forward_s),
    )


def _forward_s(model: ModelShape, choice: Choice, devices: Devices) -> tuple[float, float]:
    """Seconds of a layer, and of the projection to the vocabulary."""
    layout = choice.layout
    rate = devices.flops_per_s * layout.tp * layout.cp  # chunks are dealt so that all have as much
    block_s = _block_flops(model, layout) * choice.micro_batch / rate
    launch_s = devices.layer_s * (CUT_LAUNCHES if layout.tp > 1 else 1)
    block_s = max(block_s, launch_s) if devices.overlaps else block_s + launch_s
    return block_s, model.output_flops * choice.micro_batch / rate


def _fresh_s(work: Work, choice: Choice, devices: Devices) -> float:
    """Seconds of a micro-batch in which a CPU makes new memory usable: for gradients; with FSDP for
    weights, gathered twice, and for gradients as they are copied to be reduced, and Gloo's copy."""
    if devices.overlaps:
        return 0.0
    a, layout = work.compute_bytes, choice.layout
    by_fsdp = layout.state_shards > 1 and layout.pp == 1
    gathered = a * (0 if work.gathers_once else 2) * by_fsdp
    reduced = work.gradient_bytes * (0 if work.reduces_once else 2) * by_fsdp
    return sum(_widest_stage(work, choice)) * (a + gathered + reduced) / FRESH_BYTES_PER_S


def _tensor_s(work: Work, choice: Choice, links: Interconnect, stage: int) -> tuple[float, float]:
    """Seconds, each way, that a layer's ranks send (sequence parallelism: one all-gather and one
    reduce-scatter around each half), and that those of a stage send outside layers: as much for the
    embedding, and for the projection, by one each way; of the loss two sums of a number a token."""
    layout = choice.layout
    if layout.tp == 1:
        return 0.0, 0.0
    tokens = choice.micro_batch * work.model.sequence_length / layout.cp
    hidden = tokens * work.model.dim * work.compute_bytes
    both_s = links.ring(hidden, layout.tp, 1) + links.scatter(hidden, layout.tp, 1)
    sums_s = 2 * 2 * links.ring(4 * tokens, layout.tp, 1)
    is_last = stage == choice.output_rank
    return 2 * both_s, ((stage == 0) * both_s + is_last * (both_s + sums_s)) / 2


def _attention_s(work: Work, choice: Choice, links: Interconnect) -> tuple[float, float]:
    """Seconds of a layer's forward, and of its backward, in which ranks that share positions send:
    rows of heads, there and back; or keys and values, gathered again in backward, whose gradients
    are summed in float32."""
    model, layout, a = work.model, choice.layout, work.compute_bytes
    tp, cp = layout.tp, layout.cp
    tokens = choice.micro_batch * model.sequence_length
    if work.trades_heads(tp, cp):
        there = model.dim + 2 * work.traded_kv_dim(tp, cp)
        swaps = (links.swap(tokens / cp * width / tp * a, cp, tp) for width in (there, model.dim))
        swapped_s = sum(swaps)
        return swapped_s, swapped_s * (1 + (choice.recompute is True))
    kv = 2 * tokens * model.kv_dim / tp
    kv_s, dkv_s = links.ring(kv * a, cp, tp), links.scatter(kv * 4, cp, tp)
    return kv_s, kv_s * (1 + bool(choice.recompute)) + dkv_s


def _block_flops(model: ModelShape, layout: Layout) -> float:
    """Of the busiest of the ranks that share experts out: who has more is sent more tokens."""
    uneven = expert_share(layout, model.experts) * layout.ep - 1
    return model.block_flops + 2.0 * model.sequence_length * model.routed_parameters * uneven


def _offload_s(work: Work, choice: Choice, layers: int, devices: Devices) -> float:
    """Seconds of a micro-batch's way to host memory and back: computing waits for it."""
    if not work.offloads:
        return 0.0
    layout = choice.layout
    tokens = choice.micro_batch * work.model.sequence_length / layout.cp
    kept = kept_activation_bytes(
        work, layout.tp, choice.recompute, devices.fused, layout.shares_experts, layout.cp
    )
    return 2 * layers * tokens * kept / devices.host_bytes_per_s


def _optimizer_s(work: Work, choice: Choice, devices: Devices) -> float:
    """Seconds of an offloaded optimizer's step, which nothing hides: gradients come down, the
    processor reads them, reads and writes weights and what is kept for them, and weights go up."""
    if not work.offloads_optimizer:
        return 0.0
    sent = work.gradient_bytes + work.parameter_bytes
    stepped = work.gradient_bytes + 2 * (work.parameter_bytes + work.optimizer_bytes)
    return held_parameters(work, choice) * (sent + stepped) / devices.host_bytes_per_s


def _widest_stage(work: Work, choice: Choice) -> tuple[float, float]:
    """Parameters of the rank that has the most, as it gathers them: of experts that ranks share
    out, and all others."""
    model, layout, counts = work.model, choice.layout, rank_layers(work, choice)
    layers = [n * model.block_parameters for n in counts]
    layers[0] += model.embedding_parameters
    layers[choice.output_rank] += model.output_parameters
    most = max(range(len(layers)), key=layers.__getitem__)
    shared = counts[most] * model.expert_parameters if layout.shares_experts else 0
    share = expert_share(layout, model.experts)
    return shared * share / layout.tp, (layers[most] - shared) / layout.tp


def _bubble_s(choice: Choice, slot_s: float, forward_s: float) -> float:
    """Idle seconds of a rank: (pp - 1) slots, or chunks of one; zero_bubble fills two forwards'
    worth of each slot with weight gradients."""
    filled_s = 2 * forward_s if choice.schedule == "zero_bubble" else 0.0
    return (choice.layout.pp - 1) * (slot_s - filled_s) / choice.chunks


def _data_parallel_s(
    work: Work,
    choice: Choice,
    links: Interconnect,
    forward_s: float,
    backward_s: float,
    micro_batches: int,
) -> float:
    """Seconds of gathering weights and reducing gradients that no computation hides.

    DDP, and stages, reduce once a step, behind one micro-batch's backward. FSDP gathers for each
    forward and each backward, and reduces in each backward, unless the work says once; over
    replicas, in the last one.
    """
    layout, packed = choice.layout, work.compression
    shards, stride = layout.state_shards, layout.tp
    experts, own = _widest_stage(work, choice)
    held = own / shards + experts / layout.expert_shards
    each = packed.replica_bytes(work.model, shards) if packed.replicas else work.gradient_bytes
    replicas_s = 2 * links.ring(held * each, layout.dp_replicate, stride * shards)
    after_s, replicas_s = (replicas_s, 0.0) if packed.replicas else (0.0, replicas_s)
    if shards == 1:
        return _late(replicas_s, backward_s) + after_s
    gather_s, reduce_s = (
        collective(own * nbytes, shards, stride)
        + collective(experts * nbytes, layout.expert_shards, stride * layout.ep)
        for collective, nbytes in (
            (links.ring, work.gather_bytes),
            (links.scatter, work.scatter_bytes),
        )
    )
    late = _late if links.devices.overlaps else _all_of
    if layout.pp > 1:
        return late(gather_s, forward_s) + late(reduce_s + replicas_s, backward_s)
    again_s = 0.0 if work.gathers_once else gather_s  # in backward
    early_s = again_s + (0.0 if work.reduces_once else reduce_s)
    forwards = 1 if work.gathers_once else micro_batches
    return (
        late(gather_s, forward_s) * forwards
        + late(early_s, backward_s) * (micro_batches - 1)
        + late(again_s + reduce_s + replicas_s, backward_s)
        + after_s
    )


def _all_of(communication_s: float, _behind_s: float) -> float:
    return communication_s


def _late(communication_s: float, behind_s: float) -> float:
    """Seconds that communication adds to the computation it runs behind."""
    hidden_s = min(communication_s, behind_s)
    return communication_s - hidden_s + CONTENTION * hidden_s
