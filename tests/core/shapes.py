"""Models and devices that the planner is asked about."""

from __future__ import annotations

from dataclasses import replace

from elastic_ft.core.layouts.work import (
    Devices,
    ModelShape,
    Schedule,
)

SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved1f1b", "zero_bubble")


def decoder(
    layers: int,
    dim: int,
    heads: int,
    kv_heads: int,
    ffn_dim: int,
    vocabulary: int,
    sequence_length: int,
    gated: bool = True,
    tied: bool = False,
) -> ModelShape:
    block = 2 * dim * dim * (1 + kv_heads / heads) + (3 if gated else 2) * dim * ffn_dim + 2 * dim
    return ModelShape(
        *(layers, dim, heads, kv_heads, ffn_dim, vocabulary, sequence_length),
        block_parameters=int(block),
        embedding_parameters=vocabulary * dim,
        output_parameters=dim + (0 if tied else vocabulary * dim),
        gated=gated,
    )


SMALL = decoder(8, 1024, 16, 8, 4096, 32_000, 2048)
SEVEN_B = decoder(32, 4096, 32, 8, 14_336, 32_000, 4096)


def with_experts(model: ModelShape, experts: int, per_token: int) -> ModelShape:
    """With as many in each layer, each as large as its feed-forward."""
    each = 3 * model.dim * model.ffn_dim
    return replace(
        model,
        block_parameters=model.block_parameters + experts * each,
        idle_parameters=(experts - per_token) * each,
        experts=experts,
        expert_parameters=experts * each,
    )


def devices(*nodes: int, memory_gb: float = 80, **others: float) -> Devices:
    return replace(Devices(nodes, memory_gb * 1e9), **others)  # type: ignore[arg-type]
