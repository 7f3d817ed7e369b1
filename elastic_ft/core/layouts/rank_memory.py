"""What a rank of a layout has of a model: parameters, and bytes of activations. Pure.

It follows what the native engine holds (``benchmarks/memory.py`` compares). ``parts`` are those
that tensor and sequence parallelism cut each layer into. ``fused``: with kernels as on GPUs; on
CPUs a norm keeps its normed input too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

from elastic_ft.core.layouts.expert_owners import expert_share
from elastic_ft.core.layouts.layout import stages_of
from elastic_ft.core.layouts.work import INT8_BYTES, Choice, Recompute, Work, stage_layers

FLOAT32_BYTES = 4


def block_activation_bytes(
    work: Work, parts: int, fused: bool, cp: int = 1, casts: bool = False
) -> float:
    """What one layer keeps for backward, per token. Tensor and sequence parallelism divide it.

    Two norms (their input; unfused, the normed value too, in float32), queries, keys and values
    (keys and values repeated to all heads), attention's output and log-sum-exp, and four
    feed-forward tensors (two without a gate). Inputs of column-wise products are gathered, so each
    rank keeps them whole. Where ranks share positions, keys and values are kept as they are, and
    attention's output twice. ``casts``: autocast makes a copy of those inputs for each product. Of
    each expert that a token goes to, its row there and the one back.
    """
    model, a = work.model, work.compute_bytes
    inner = (4 if model.gated else 2) * model.ffn_dim * a
    kv_dim = work.traded_kv_dim(parts, cp) if work.trades_heads(parts, cp) else model.kv_dim
    attended = 4 * model.q_dim if cp == 1 else 3 * model.q_dim + 2 * kv_dim
    whole = (5 if casts else 2) * model.dim * a + 2 * rows_bytes(work)
    cut = inner + 2 * norm_bytes(work, fused, casts) + attended * a + 4 * model.heads
    return cut / parts + whole


def norm_bytes(work: Work, fused: bool, casts: bool) -> float:
    """That a norm keeps of a token, beside what it returns."""
    return work.model.dim * (8 if not fused else 4 if casts else work.compute_bytes)


def kept_activation_bytes(
    work: Work,
    parts: int,
    recompute: Recompute,
    fused: bool,
    shares_experts: bool = False,
    cp: int = 1,
    casts: bool = False,
) -> float:
    """What one layer keeps from forward to backward, per token.

    Its input at least. Selective: what products return too (row-wise ones parts of a sum, whole on
    each rank, and what is left of it), attention with its log-sum-exp, and rows of experts' as they
    came from other ranks.
    """
    model, a = work.model, work.compute_bytes
    if not recompute:
        return block_activation_bytes(work, parts, fused, cp, casts)
    inputs = model.dim * (FLOAT32_BYTES if casts else a) / parts
    if recompute != "selective":
        return inputs
    inner = (2 if model.gated else 1) * model.ffn_dim
    kept = (inner + 2 * model.q_dim + 2 * model.kv_dim) * a + 4 * model.heads
    if work.trades_heads(parts, cp):  # what came from others
        kept += 2 * (model.q_dim + work.traded_kv_dim(parts, cp)) * a
    whole = 2 * model.dim * a * (1 if parts == 1 else 1 + 1 / parts)
    return inputs + kept / parts + whole + kept_rows_bytes(work, recompute, shares_experts)


def rows_bytes(work: Work) -> float:
    """Of a token, its rows to the experts that it goes to."""
    return work.model.experts_per_token * work.model.dim * work.compute_bytes


def kept_rows_bytes(work: Work, recompute: Recompute, shares_experts: bool) -> float:
    """Selective: what experts' products return, and what came from other ranks, there and back.
    None of it is what a layer keeps that recomputes nothing, which is in another order."""
    if recompute != "selective":
        return 0.0
    return rows_bytes(work) * (3 if shares_experts else 1)


def in_flight(choice: Choice, stage: int, micro_batches: int) -> float:
    """Micro-batches whose activations a stage holds at once, at most.

    interleaved1f1b: Narayanan et al., 2021, warm-up in chunks. zero_bubble: weight gradients wait,
    so every rank holds what the first one of 1F1B does.
    """
    ranks = choice.layout.pipeline_size
    if ranks == 1:
        return 1.0
    if choice.schedule == "gpipe":
        return float(micro_batches)
    if choice.schedule == "1f1b":
        return float(min(micro_batches, ranks - stage))
    if choice.schedule == "zero_bubble":
        return float(min(micro_batches, ranks))
    warm_up = 2 * (ranks - stage - 1) + (choice.chunks - 1) * ranks + 1
    return min(float(micro_batches), warm_up / choice.chunks)


@dataclass(slots=True, eq=False)
class RankShape:
    """What a rank of a pipeline stage has. Parameters are counted as it computes with them.

    Attributes:
        copies: Gloo copies what it gathers and scatters.
        first, last: whether it embeds, and whether it projects to the vocabulary.
        layers: how many.
        root: parameters that are in no layer, FSDP's root unit.
        local_block: of a layer's, those that it holds.
        tokens: of a micro-batch.
        count: micro-batches of a step.
        flying: of these, at most so many are between forward and backward.
        full, kept: bytes that a layer has for its backward, and that it keeps until then.
        own, local: all parameters that it computes with, and those that it holds.
        is_whole: DDP: every rank has all.
        casts: by autocast, which DDP alone leaves it to.
        by_fsdp: gradients are summed, or weights lowered, by FSDP2.
        gathers_late: FSDP's weights stay whole.
        reduces_late: its gradients are whole until a step's end.
        made_bytes: of a gradient as backward makes it.
        hidden: bytes of what layers hand on.
        keeps_hidden: as it is, not a copy in float32.
        output: parameters of the projection, which may be the embedding's.
        others_embedding: of an embedding cut by its rows, those that other ranks have.
        weights: bytes of copies of weights that are there throughout.
        unit: bytes of a layer's weights as FSDP gathers them for its time.
        arriving: bytes of the next layer's, as they come.
    """

    work: Work
    choice: Choice
    fused: bool
    copies: bool
    first: bool
    last: bool
    layers: int
    root: float
    block: float
    local_block: float
    tokens: int
    count: int
    flying: float
    full: float
    kept: float
    own: float = field(init=False)
    local: float = field(init=False)
    is_whole: bool = field(init=False)
    casts: bool = field(init=False)
    by_fsdp: bool = field(init=False)
    gathers_late: bool = field(init=False)
    reduces_late: bool = field(init=False)
    made_bytes: int = field(init=False)
    hidden: float = field(init=False)
    keeps_hidden: bool = field(init=False)
    output: float = field(init=False)
    others_embedding: float = field(init=False)
    weights: float = field(init=False)
    unit: float = field(init=False)
    arriving: float = field(init=False)

    def __post_init__(self) -> None:
        work, layout, a = self.work, self.choice.layout, self.work.compute_bytes
        model, parts, shards = work.model, layout.parts_per_layer, layout.state_shards
        lower = a < work.parameter_bytes
        self.own = self.root + self.layers * self.block
        self.local = self.root / shards + self.layers * self.local_block
        self.is_whole = not layout.is_cut
        self.casts = self.is_whole and lower
        self.by_fsdp = not self.is_whole and (layout.gradient_size > 1 or lower)
        self.gathers_late = layout.has_stages or work.gathers_once
        self.reduces_late = layout.has_stages or (work.reduces_once and self.count > 1)
        self.made_bytes = a if self.by_fsdp else work.gradient_bytes
        stream = FLOAT32_BYTES if self.casts else a
        self.hidden = self.tokens * model.dim * stream / parts
        self.keeps_hidden = self.fused or stream == FLOAT32_BYTES
        self.output = model.vocabulary * model.dim / parts * self.last
        self.others_embedding = model.embedding_parameters * (1 - 1 / parts) * self.first
        copied = self.own if self.gathers_late or self.is_whole else self.root
        self.weights = copied * a * (self.by_fsdp or self.casts)
        self.unit = self.block * a * (self.by_fsdp and not self.gathers_late)
        self.arriving = self.unit * (self.layers > 1 and shards > 1)

    def staged(self, nbytes: float, each: int) -> float:
        """Bytes of copies as FSDP gathers or scatters ``nbytes``, of ``each`` bytes a number."""
        if self.choice.layout.state_shards == 1:
            return 0.0
        if self.work.compression.shards:  # packed here and there, and unpacked in float32
            return nbytes / each * (2 * INT8_BYTES + FLOAT32_BYTES)
        return nbytes * self.copies

    def adds_up(self, done: bool) -> bool:
        """Whether a gradient that backward makes is added to one that is there (``done``: of an
        earlier micro-batch), so that it is there for a moment alone."""
        lower = self.made_bytes < self.work.gradient_bytes
        apart = self.by_fsdp and (lower or not self.reduces_late)
        return self.is_whole or (done and not apart)

    def gradients(self, done: bool) -> float:
        """Bytes of those of micro-batches before. DDP has them in buckets, and apart from these.
        Of an embedding cut by its rows, each rank has the gradient of all until they are summed."""
        each = self.work.gradient_bytes
        if self.is_whole:
            return self.own * each * (1 + done)
        if self.by_fsdp and not self.reduces_late:
            return self.local * each * done
        return (self.own + self.others_embedding) * each * done


def shape_of_rank(work: Work, choice: Choice, stage: int, fused: bool, copies: bool) -> RankShape:
    """Of a rank of pipeline rank ``stage``."""
    model, layout = work.model, choice.layout
    layers = rank_layers(work, choice)[stage]
    first, last = stage == 0, stage == choice.output_rank
    root, block, local_block = unit_parameters(work, choice, stage)
    count = choice.micro_batches(work)
    tokens = ceil(choice.micro_batch * model.sequence_length / layout.cp)
    casts = not layout.is_cut and work.compute_bytes < work.parameter_bytes
    parts, last_two = layout.parts_per_layer, (layout.cp, casts)
    full = tokens * block_activation_bytes(work, parts, fused, *last_two)
    kept = tokens * kept_activation_bytes(
        work, parts, choice.recompute, fused, layout.shares_experts, *last_two
    )
    flying = in_flight(choice, stage, count)
    sizes = (root, block, local_block, tokens, count, flying, full, kept)
    return RankShape(work, choice, fused, copies, first, last, layers, *sizes)


def rank_layers(work: Work, choice: Choice) -> tuple[int, ...]:
    """Layers of each pipeline rank: of its one stage, or of its two."""
    layout, schedule = choice.layout, choice.schedule
    each = len(stages_of(0, layout.pipeline_size, schedule)) if layout.has_stages else 1
    counts = stage_layers(work.model, layout.pipeline_size * each)
    if each == 1:
        return counts
    size = layout.pipeline_size
    of_ranks = (stages_of(rank, size, schedule) for rank in range(size))
    return tuple(sum(counts[stage] for stage in stages) for stages in of_ranks)


def unit_parameters(work: Work, choice: Choice, stage: int) -> tuple[float, float, float]:
    """What a rank of a stage gathers of FSDP's root unit (whatever is in no layer) and of a layer,
    and what it holds of a layer. A tied embedding is in the first stage and in the last one."""
    model, layout = work.model, choice.layout
    parts, first, last = layout.parts_per_layer, stage == 0, stage == choice.output_rank
    root = first * model.embedding_parameters + last * model.output_parameters
    root += (last and not first and model.is_tied) * model.embedding_parameters
    experts = model.expert_parameters * expert_share(layout, model.experts) / parts
    dense = (model.block_parameters - model.expert_parameters) / parts
    local = dense / layout.state_shards + experts / layout.expert_shards
    return root / parts, dense + experts, local
