"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Nothing in it depends on a layout. It has no buffers, so a model built on the meta device is
complete once its parameters are; rotary angles are computed in ``forward`` and handed to the
blocks as complex numbers, which mixed-precision policies leave alone (a bfloat16 angle would blur
positions past 256). Every initial weight is a function of (seed, name), so a rank can make any
parameter alone.

Shape suffixes: B batch, T positions, D model width, H query heads, K key-value heads, E head
width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic_ft.core.sharding import Box
from elastic_ft.models.chunked_loss import chunked_cross_entropy_sum
from elastic_ft.models.context_parallel import ContextShare, documents_of
from elastic_ft.models.initial import draw
from elastic_ft.models.loss import cross_entropy_sum

INITIAL_STD = 0.02
TO_RESIDUAL = (".attention.output.weight", ".down.weight", ".experts.down")


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a decoder. Raises ValueError, naming the field, for sizes that can't be built."""

    vocab_size: int
    n_layers: int
    dim: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    max_sequence_length: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_type(field.name, getattr(self, field.name), field.type)
        if self.dim % self.n_heads or self.head_dim % 2:
            raise ValueError(
                f"dim {self.dim} must be n_heads {self.n_heads} times an even head width"
            )
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads


def _check_type(name: str, value: object, annotation: object) -> None:
    if annotation == "bool":
        good, expected = isinstance(value, bool), "true or false"
    elif annotation == "int":
        good, expected = type(value) is int and value > 0, "a positive integer"
    else:
        good = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        expected = "a positive number"
    if not good:
        raise ValueError(f"{name}: expected {expected}, found {value!r}")


# A name tells the number of parameters at the preset's own vocabulary, within 10 %.
PRESETS: dict[str, DecoderConfig] = {
    # vocab_size, n_layers, dim, n_heads, n_kv_heads, ffn_dim, max_sequence_length, rope_theta
    "decoder-1m": DecoderConfig(4096, 4, 80, 4, 2, 256, 1024),
    "decoder-4m": DecoderConfig(4096, 6, 192, 6, 3, 512, 1024),
    "decoder-15m": DecoderConfig(4096, 8, 384, 8, 4, 896, 1024),
    "decoder-60m": DecoderConfig(32_000, 8, 512, 8, 4, 1536, 2048),
    "decoder-160m": DecoderConfig(32_000, 12, 768, 12, 6, 3072, 2048),
    "decoder-410m": DecoderConfig(32_000, 24, 1024, 16, 8, 3584, 2048),
    "decoder-1b": DecoderConfig(32_000, 20, 2048, 32, 8, 5632, 4096, 500_000.0),
    "decoder-3b": DecoderConfig(32_000, 28, 3072, 24, 8, 8192, 4096, 500_000.0),
    "decoder-7b": DecoderConfig(32_000, 32, 4096, 32, 8, 14_336, 4096, 500_000.0),
}


def rotations(
    length: int,
    head_dim: int,
    theta: float,
    device: torch.device,
    position_ids_BT: Tensor | None = None,
) -> Tensor:
    """Returns complex64 [T, E/2]: entry (t, i) turns pair i of a head by t * theta^(-2i/E).

    With positions of their own, [B, T, E/2]. RoFormer (Su et al., 2021), equation 15.
    """
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device)
    positions = torch.arange(length, device=device) if position_ids_BT is None else position_ids_BT
    angles = positions.float()[..., None] * theta ** (-pairs / head_dim)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x_BTHE: Tensor, turns: Tensor) -> Tensor:
    """Returns ``x`` with each neighbouring pair of its last dimension turned; same dtype."""
    pairs = torch.view_as_complex(x_BTHE.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns[..., None, :]).flatten(-2).type_as(x_BTHE)


def who_attends(attention_mask_BT: Tensor | None, position_ids_BT: Tensor | None) -> Tensor | None:
    """Returns bool [B, 1, T, T], from query to key; None for what is causal and no more.

    Documents: as ``documents_of`` has them. Who attends to nobody (padding) attends to itself.
    """
    given = [x for x in (attention_mask_BT, position_ids_BT) if x is not None]
    if not given:
        return None
    length, device = given[0].shape[1], given[0].device
    allowed_BTT = torch.ones(length, length, dtype=torch.bool, device=device).tril()[None]
    if position_ids_BT is not None:
        document_BT = documents_of(position_ids_BT)
        allowed_BTT = allowed_BTT & (document_BT[:, :, None] == document_BT[:, None, :])
    if attention_mask_BT is not None:
        itself = torch.eye(length, dtype=torch.bool, device=device)
        allowed_BTT = allowed_BTT & attention_mask_BT[:, None, :].bool() | itself
    return allowed_BTT[:, None]


def turns_and_attends(
    config: DecoderConfig,
    x: Tensor,
    length: int,
    context: ContextShare | None,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Of a sequence of ``length``: ``rotations`` of this rank's positions, on the device of ``x``,
    and what ``Attention`` is told of who attends. Arguments as of ``Decoder.forward``."""
    if position_ids is None and context is not None:
        position_ids = context.positions(length, x.device)[None]
    turns = rotations(length, config.head_dim, config.rope_theta, x.device, position_ids)
    if context is not None:
        return turns, documents
    return turns, who_attends(attention_mask, position_ids)


class Attention(nn.Module):
    """Causal grouped-query self-attention.

    Attributes:
        context: where ranks share positions.
    """

    context: ContextShare | None = None

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.queries_per_kv = config.n_heads // config.n_kv_heads
        kv_dim = config.n_kv_heads * config.head_dim
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, kv_dim, bias=False)
        self.value = nn.Linear(config.dim, kv_dim, bias=False)
        self.output = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x_BTD: Tensor, turns: Tensor, attends: Tensor | None = None) -> Tensor:
        """``attends``: as ``who_attends``; with ``context``, numbers of documents [B, T]."""
        # Head counts come from the weights (-1): under tensor parallelism a rank has fewer.
        q_BTHE = rotate(self.query(x_BTD).unflatten(-1, (-1, self.head_dim)), turns)
        k_BTKE = rotate(self.key(x_BTD).unflatten(-1, (-1, self.head_dim)), turns)
        v_BTKE = self.value(x_BTD).unflatten(-1, (-1, self.head_dim))
        if self.context is not None:
            mixed_BTHE = self.context.attend(q_BTHE, k_BTKE, v_BTKE, documents_BT=attends)
            return self.output(mixed_BTHE.flatten(-2))
        # Expanded by hand: with enable_gqa, float32 on CUDA falls back to the quadratic kernel.
        k_BTHE = k_BTKE.repeat_interleave(self.queries_per_kv, dim=2)
        v_BTHE = v_BTKE.repeat_interleave(self.queries_per_kv, dim=2)
        mixed = F.scaled_dot_product_attention(
            q_BTHE.transpose(1, 2),
            k_BTHE.transpose(1, 2),
            v_BTHE.transpose(1, 2),
            attn_mask=attends,
            is_causal=attends is None,
        )
        return self.output(mixed.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)). Shazeer, 2020, equation 6."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nn.Module):
    """One pre-norm layer. It is what FSDP shards and activation checkpointing recomputes."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(self, x_BTD: Tensor, turns: Tensor, attends: Tensor | None = None) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), turns, attends=attends)
        return x_BTD + self.ffn(self.ffn_norm(x_BTD))


class AnyDecoder(nn.Module):
    """Embedding, layers, norm, output projection.

    Attributes:
        layer: makes one of its layers.
        context: where ranks share positions: inputs are then this rank's (``ContextShare.cut``).
    """

    layer: type[nn.Module]
    context: ContextShare | None = None

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(self.layer(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.output.weight = self.embedding.weight

    def check_length(self, tokens_BT: Tensor) -> int:
        """Returns T. Raises ValueError if it exceeds ``config.max_sequence_length``."""
        length, longest = tokens_BT.shape[1], self.config.max_sequence_length
        if length > longest:
            raise ValueError(f"{length} tokens exceed max_sequence_length {longest}")
        return length

    def initial_part(self, name: str, shape: Sequence[int], seed: int, box: Box) -> Tensor:
        """Returns what is in ``box`` of the initial float32 CPU value of parameter ``name``.

        A function of (seed, name, shape) and the number of layers alone. Norms start at 1, biases
        at 0, weights at N(0, 0.02), and the projections of a layer that write to the residual
        stream at N(0, 0.02 / sqrt(2 * n_layers)), as in GPT-2 (Radford et al., 2019, 2.3).
        """
        if name.endswith(".bias"):
            return torch.zeros(*box.sizes, device="cpu")
        if name.endswith("norm.weight"):
            return torch.ones(*box.sizes, device="cpu")
        std = INITIAL_STD
        if name.endswith(TO_RESIDUAL):
            std /= math.sqrt(2 * self.config.n_layers)

        def fill(values: Tensor, generator: torch.Generator) -> None:
            values.normal_(generator=generator).mul_(std)

        return draw(seed, name, shape, box, fill, torch.float32)


class Decoder(AnyDecoder):
    """Parameters hold torch's defaults until they are filled from ``initial_tensor``;
    ``initialise`` does that for a whole model.

    Attributes:
        loss_chunk_tokens: of so many tokens at a time are the logits of a loss made, if it is set.
        length_multiple: of which a sequence's length is one, for those who share its positions.
    """

    layer = Block
    loss_chunk_tokens: int | None = None
    length_multiple = 1

    def forward(
        self,
        tokens_BT: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Returns logits [B, T, V] for int64 ``tokens`` [B, T]; of ``targets`` (int64 [B, T]; with
        ``loss_chunk_tokens`` alone) the sum of the cross-entropy.

        ``attention_mask`` [B, T]: 0 for tokens that none attends to. ``position_ids`` int64 [B, T]:
        documents, which do not attend to each other, begin where they fall; with ``context``
        ``documents`` number them (``ContextShare.inputs``). Raises ValueError.
        """
        length, given = self.check_length(tokens_BT), (position_ids, attention_mask, documents)
        turns, attends = turns_and_attends(self.config, tokens_BT, length, self.context, *given)
        x_BTD = self.embedding(tokens_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD, turns, attends=attends)
        x_BTD = self.norm(x_BTD)
        if targets is None:
            return self.output(x_BTD)
        assert self.loss_chunk_tokens is not None
        weight = self.output.weight  # here alone it is whole, under FSDP
        return chunked_cross_entropy_sum(x_BTD, weight, targets, self.loss_chunk_tokens)

    def stage(self, layers: range) -> DecoderStage:
        """Returns the part of this model that has ``layers`` and, at either end, what is beyond."""
        return DecoderStage(self, layers)

    def stage_costs(self) -> list[int]:
        """By layer, what computing it and what lies beyond it costs, in multiply-adds a token.

        Scores of attention left out: they are the same in every layer.
        """
        costs = [sum(p.numel() for p in layer.parameters()) for layer in self.layers]
        costs[-1] += self.config.vocab_size * self.config.dim
        return costs

    def initial_tensor(self, name: str, shape: Sequence[int], seed: int) -> Tensor:
        return self.initial_part(name, shape, seed, Box.whole(tuple(shape)))

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fills every parameter of a whole (unsharded) model from ``initial_tensor``."""
        for name, parameter in self.named_parameters():
            parameter.copy_(self.initial_tensor(name, parameter.shape, seed))


class DecoderStage(nn.Module):
    """Consecutive layers of a decoder; the first stage embeds, the last one projects.

    Parameters have the names that they have in the whole model. ``length`` is that of the whole
    sequence: under sequence parallelism a stage sees a part of it. With ``loss_chunk_tokens`` the
    last one leaves the projection to the loss. With ``context`` a sequence is this rank's part.

    Attributes:
        known_as: of parameters, those that the whole model has by another name: a tied output.
    """

    loss_chunk_tokens: int | None = None
    context: ContextShare | None = None
    length_multiple = 1  # as of the whole model
    shares_positions = True  # among tensor-parallel ranks

    def __init__(self, whole: Decoder, layers: range) -> None:
        super().__init__()
        self.config, self.length = whole.config, whole.config.max_sequence_length
        is_last = layers.stop == whole.config.n_layers
        self.embedding = whole.embedding if layers.start == 0 else None
        self.layers = nn.ModuleDict({str(i): whole.layers[i] for i in layers})
        self.norm = whole.norm if is_last else None
        self.output = whole.output if is_last else None
        self.dim, self.vocabulary = self.config.dim, self.config.vocab_size
        tied = {"output.weight": "embedding.weight"}
        self.known_as = tied if self.config.tie_embeddings else {}

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return [*self.layers.values()]

    def through_layers(
        self, x: Tensor, turns: Tensor, attends: Tensor | None, **more: Any
    ) -> Tensor:
        """``more``: what ``forward`` was given beside positions."""
        for layer in self.layers.values():
            x = layer(x, turns, attends=attends)
        return x

    def forward(self, x: Tensor, position_ids: Tensor | None = None, **more: Tensor) -> Tensor:
        """Of tokens int64 [B, T] or what the stage before returned [B, T, D]; positions,
        ``attention_mask``, of all T, and ``documents`` as for the whole model."""
        given = (position_ids, more.get("attention_mask"), more.get("documents"))
        turns, attends = turns_and_attends(self.config, x, self.length, self.context, *given)
        if self.embedding is not None:
            x = self.embedding(x)
        x = self.through_layers(x, turns, attends, **more)
        if self.output is None:
            return x
        x = self.norm(x)
        return x if self.loss_chunk_tokens else self.output(x)

    def loss_sum(self, output: Tensor, targets_BT: Tensor) -> Tensor:
        """Of what the last stage has returned, the sum of the cross-entropy."""
        if not self.loss_chunk_tokens:
            return cross_entropy_sum(output, targets_BT)
        assert self.output is not None
        weight, chunk = self.output.weight, self.loss_chunk_tokens
        return chunked_cross_entropy_sum(output, weight, targets_BT, chunk)
