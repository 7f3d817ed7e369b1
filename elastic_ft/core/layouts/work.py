"""What is planned for, in numbers: the model, a step's work, the devices, and a choice. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, lcm
from typing import Literal

from elastic_ft.core.layouts.layout import ContextMethod, Layout, trades_heads

Schedule = Literal["gpipe", "1f1b", "interleaved1f1b", "zero_bubble"]
# Of a layer in backward: nothing, what is cheap (neither products nor attention), or all.
Recompute = Literal[False, "selective", True]
RECOMPUTES: tuple[Recompute, ...] = (False, "selective", True)  # the fastest first
INT8_BYTES = 260 / 256  # of a number in blocks of 256 with a float32 scale each
RESIDUAL_BYTES = 4
RESERVED = 0.08  # of a device's memory: context, communication buffers, fragmentation


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
    experts: int = 0  # of one layer, if ranks can share them out
    expert_parameters: int = 0  # of one layer, all experts'
    head_dim: int = 0  # 0: heads make up dim

    @property
    def block_active_parameters(self) -> int:
        """Of one layer, what a token goes through."""
        return self.block_parameters - self.idle_parameters

    @property
    def routed_parameters(self) -> int:
        """Of one layer's experts, what a token goes through."""
        return self.expert_parameters - self.idle_parameters if self.experts else 0

    @property
    def experts_per_token(self) -> float:
        """Of those that ranks can share out."""
        return self.experts * self.routed_parameters / max(1, self.expert_parameters)

    @property
    def is_tied(self) -> bool:
        """Whether the projection to the vocabulary is the embedding's weight."""
        return self.output_parameters < self.vocabulary * self.dim

    @property
    def q_dim(self) -> int:
        """Width of queries, and of what attention returns."""
        return self.head_dim * self.heads or self.dim

    @property
    def kv_dim(self) -> int:
        """Width of keys, and of values."""
        return (self.head_dim or self.dim // self.heads) * self.kv_heads

    @property
    def parameters(self) -> int:
        return (
            self.layers * self.block_parameters + self.embedding_parameters + self.output_parameters
        )

    @property
    def block_flops(self) -> float:
        """Of one layer, forward, one sample; attention is causal."""
        tokens = self.sequence_length
        return 2.0 * tokens * self.block_active_parameters + 2.0 * tokens * tokens * self.q_dim

    @property
    def output_flops(self) -> float:
        """Of the projection to the vocabulary, forward, one sample."""
        return 2.0 * self.sequence_length * self.dim * self.vocabulary

    @property
    def sample_flops(self) -> float:
        """Forward and backward, one sample, nothing recomputed."""
        return 3 * (self.layers * self.block_flops + self.output_flops)


@dataclass(frozen=True, slots=True)
class Compression:
    """What ranks send in fewer bytes. Packing takes computing, too, which is not counted.

    Attributes:
        shards: FSDP's gathers and scatters, as int8.
        replicas: gradients summed over them, after the backward, with residuals that are state.
        rank: of powersgd.
    """

    shards: bool = False
    replicas: Literal["int8", "powersgd"] | None = None
    rank: int = 4

    def replica_bytes(self, model: ModelShape, shards: int) -> float:
        """Of one of a shard's numbers, each way. powersgd: as of the feed-forward's matrices."""
        if self.replicas == "int8":
            return INT8_BYTES
        rows, columns = model.dim / shards, model.ffn_dim
        return min(1.0, self.rank * (rows + columns) / (rows * columns)) * 4


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
    loss_chunk_tokens: int | None = None  # whose logits are there at a time; None: all
    offloads: bool = False  # what layers keep for backward waits in host memory
    offloads_optimizer: bool = False  # its state, and the weights that it steps, are there
    steps_in_place: bool = True  # as fused Adam does; others make temporaries
    compression: Compression = Compression()
    cp_method: ContextMethod = "all_gather"

    def trades_heads(self, parts: int, cp: int) -> bool:
        """Whether ranks that share positions have some heads each in attention, of layers in so
        many ``parts``."""
        return trades_heads(self.cp_method, self.model.heads, parts, cp)

    def traded_kv_dim(self, parts: int, cp: int) -> int:
        """Width of keys, and of values, repeated as far as so many ranks have some heads each."""
        kv_heads = self.model.kv_heads
        return self.model.kv_dim * (lcm(kv_heads, parts * cp) // kv_heads)

    def may_share_positions(self, parts: int, cp: int) -> bool:
        """Whether ``cp`` ranks can, of layers in so many ``parts``."""
        return cp == 1 or self.cp_method != "ulysses" or self.trades_heads(parts, cp)

    @property
    def gather_bytes(self) -> float:
        """Of one of a parameter's numbers, as FSDP sends it."""
        return INT8_BYTES if self.compression.shards else self.compute_bytes

    @property
    def scatter_bytes(self) -> float:
        """Of one of a gradient's."""
        return INT8_BYTES if self.compression.shards else self.gradient_bytes

    @property
    def state_bytes(self) -> int:
        """Of parameters and optimizer: what a checkpoint holds, and a change of layout moves."""
        residual = RESIDUAL_BYTES if self.compression.replicas else 0
        each = self.parameter_bytes + self.optimizer_bytes + residual
        return self.model.parameters * each


@dataclass(frozen=True, slots=True)
class Devices:
    """Equal devices on nodes. Bandwidths are each device's own, one way."""

    nodes: tuple[int, ...]  # devices on each
    memory_bytes: float
    flops_per_s: float = 400e12  # that large matrix products reach, not the datasheet's
    intra_bytes_per_s: float = 300e9  # to devices of the same node
    inter_bytes_per_s: float = 40e9  # to other nodes
    host_bytes_per_s: float = 20e9  # to and from host memory
    latency_s: float = 10e-6  # of one message
    layer_s: float = 100e-6  # the least time of one layer's forward: launching its kernels
    fused: bool = True  # fused norms and a multi-tensor optimizer, as on GPUs
    overlaps: bool = True  # computes while the host launches and FSDP sends: not CPUs, nor Gloo

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
    recompute: Recompute = False
    schedule: Schedule = "1f1b"  # matters where there are stages
    chunks: int = 1  # of layers per rank: two with the last two schedules

    @property
    def output_rank(self) -> int:
        """The pipeline rank of the output layer: zero_bubble's stages come back to the first."""
        return 0 if self.schedule == "zero_bubble" else self.layout.pipeline_size - 1

    def micro_batches(self, work: Work) -> int:
        """That the busiest rank runs in a step. Uneven dealing gives others one less; pipelines run
        as many as their schedule needs (``engines.pipeline.micro_batches_to_run``)."""
        count = ceil(work.global_batch / self.micro_batch / self.layout.data_parallel_size)
        ranks = self.layout.pipeline_size
        if ranks > 1 and self.schedule == "1f1b":
            return max(count, ranks)
        if ranks > 1 and self.schedule == "interleaved1f1b":
            return ceil(count / ranks) * ranks
        return count


@lru_cache(maxsize=4096)
def stage_layers(model: ModelShape, stages: int) -> tuple[int, ...]:
    """Layers of each pipeline stage, so that the slowest is as fast as can be: as the engine's
    ``layout.split_layers`` cuts them by ``Decoder.stage_costs``, whatever the attention costs.

    The last stage also has the projection to the vocabulary, and gets fewer layers for it; of the
    others, later ones take what does not divide, since earlier ones hold more micro-batches.
    """
    if not 1 <= stages <= model.layers:
        raise ValueError(f"{model.layers} layers cannot make {stages} stages")
    if stages == 1:
        return (model.layers,)
    extra = model.vocabulary * model.dim / model.block_active_parameters
    last = min(
        range(1, model.layers - stages + 2),
        key=lambda n: (max(ceil((model.layers - n) / (stages - 1)), n + extra), -n),
    )
    each, more = divmod(model.layers - last, stages - 1)
    return (*(each + (stage >= stages - 1 - more) for stage in range(stages - 1)), last)
