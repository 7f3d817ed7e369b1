"""Ranks that share positions: what they find together is what one finds, or refused by name.

Ranks are threads here: what goes between them is added up and joined as process groups would.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_ft.config import ModelConfig, ParallelConfig
from elastic_ft.controller.planning import planning_of
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.core.sharding import Box
from elastic_ft.engines.base import MicroBatch
from elastic_ft.engines.pipeline import cut, joined, own_positions, tokens_and_targets
from elastic_ft.engines.shared_positions import (
    check_context_parallel,
    share_of_positions,
    share_positions,
)
from elastic_ft.errors import ConfigError, ModelError
from elastic_ft.models import build_model, context_parallel, loss_sum
from elastic_ft.models.context_parallel import ContextShare, documents_of
from elastic_ft.models.decoder import Decoder, DecoderConfig
from elastic_ft.models.experts import MixtureConfig, MixtureDecoder
from elastic_ft.models.loss import IGNORED_LABEL
from elastic_ft.models.ulysses import HeadShare, WholeSequence
from tests.oneproc.alone import job_of
from tests.oneproc.rank_threads import Meeting, Seat, Threads, on_ranks

pytest.importorskip("transformers")

VOCABULARY = 31
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
}
ABSENT = object()  # of SIZES, what a type of model has not
WIDTH = {"head_dim": 4}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MANY = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "llama yarn": {"model_type": "llama", "rope_parameters": YARN, "max_position_embeddings": 64},
    "mistral": {"model_type": "mistral", "sliding_window": 5},
    "mistral that sees itself alone": {"model_type": "mistral", "sliding_window": 1},
    "mixtral": {"model_type": "mixtral", "sliding_window": None, **EXPERTS},
    "qwen2": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", **WIDTH},
    "qwen3_moe": {"model_type": "qwen3_moe", **MANY},
    "gemma": {"model_type": "gemma", **WIDTH},
    "gemma2": {
        "model_type": "gemma2",
        "sliding_window": 4,
        "attn_logit_softcapping": None,
        "query_pre_attn_scalar": 7,
        **WIDTH,
    },
    "gemma3_text": {
        "model_type": "gemma3_text",
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        **WIDTH,
    },
    "gpt_neox": {"model_type": "gpt_neox", "num_key_value_heads": ABSENT},
    "granite": {"model_type": "granite", "attention_multiplier": 0.3, "embedding_multiplier": 2.0},
    "olmo2": {"model_type": "olmo2"},
    "phi3": {"model_type": "phi3", "sliding_window": 8},
    "smollm3": {"model_type": "smollm3"},
}


def make(config: dict[str, Any]) -> nn.Module:
    given = {key: value for key, value in (SIZES | config).items() if value is not ABSENT}
    torch.manual_seed(0)
    config = ModelConfig(transformers=given)
    return enlarged(build_model(config, vocab_size=None, sequence_length=32))


def enlarged(model: nn.Module) -> nn.Module:
    """With weights so large that whom a position sees matters."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10)
    return model


def batch(length: int = 24, packed: bool = False, padded: bool = False) -> dict[str, Tensor]:
    """``packed``: of documents that begin elsewhere in each row. ``padded``: then equal places."""
    shape, generator = (2, length), torch.Generator().manual_seed(1)
    tokens = torch.randint(1, VOCABULARY, shape, generator=generator)
    given = {"tokens": tokens, "labels": tokens.masked_fill(tokens % 5 == 0, IGNORED_LABEL)}
    if packed:
        rows = ([1, 11, length - 12], [7, length - 7])
        places = [torch.cat([torch.arange(n) for n in row]) for row in rows]
        given["position_ids"] = torch.stack(places)
    if padded:
        ends = torch.tensor([[13], [20]])
        given["position_ids"] = torch.arange(length).repeat(2, 1)
        given["position_ids"] *= torch.arange(length) < ends
    return given


@pytest.fixture(autouse=True)
def threads_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_gather(everyones: Tensor, own: Tensor, group: Seat) -> None:
        everyones.copy_(torch.cat(group.meeting.all_of(group.rank, own)))

    def reduce_scatter(own: Tensor, by_rank: Tensor, group: Seat) -> None:
        total = torch.stack(group.meeting.all_of(group.rank, by_rank)).sum(dim=0)
        own.copy_(total.chunk(group.meeting.size)[group.rank])

    monkeypatch.setattr(context_parallel, "_all_gather", all_gather)
    monkeypatch.setattr(context_parallel, "_reduce_scatter", reduce_scatter)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_sums(found: Sequence[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for name, gradient in expected.items():
        total = torch.stack([of_rank[name] for of_rank in found]).sum(dim=0)
        noise = 1e-4 * float(gradient.abs().max()) + 1e-5
        torch.testing.assert_close(
            total, gradient, rtol=0, atol=noise, msg=lambda m, n=name: f"{n}: {m}"
        )


def decoder() -> nn.Module:
    model = Decoder(DecoderConfig(VOCABULARY, 2, 16, 4, 2, 24, 32))
    model.initialise(3)
    return enlarged(model)


def mixture() -> nn.Module:
    model = MixtureDecoder(MixtureConfig(VOCABULARY, 2, 16, 4, 2, 24, 32, router_loss=0.01))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            box = Box.whole(tuple(parameter.shape))
            parameter.copy_(model.initial_part(name, box.sizes, 3, box))
    return enlarged(model)


OURS: dict[str, Callable[[], nn.Module]] = {"decoder": decoder, "mixture": mixture}


# ------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("packed", [False, True, "padded"])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 8, 23, 100])
@pytest.mark.parametrize(
    ("ranks", "method", "kv_heads"),
    [
        *((ranks, "all_gather", 4) for ranks in (1, 2, 3)),
        # Key-value heads as they are, and repeated: twice, and twelve times.
        *((ranks, "ulysses", n) for ranks, n in ((2, 4), (4, 6), (12, 1))),
    ],
)
def test_attention_is_that_of_whole_sequences(
    ranks: int, method: str, kv_heads: int, window: int | None, packed: bool | str
) -> None:
    length, generator = 24, torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, length, n, 6, generator=generator) for n in (12, kv_heads, kv_heads))
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    seen &= ~torch.ones_like(seen).tril(-(window or length))
    given = batch(packed=packed is True, padded=packed == "padded")
    documents = documents_of(given.get("position_ids", torch.arange(24)[None]))
    seen = seen & (documents[:, :, None] == documents[:, None, :])[:, None]
    expected = nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in whole), attn_mask=seen, scale=0.7, enable_gqa=True
    ).transpose(1, 2)
    weights = torch.randn(expected.shape, generator=generator)
    (expected * weights).sum().backward()

    def attend(context: ContextShare) -> tuple[Tensor, ...]:
        mine = context.positions(length // ranks, q.device)
        own = [x[:, mine].clone().requires_grad_() for x in (q, k, v)]
        out = context.attend(*own, scale=0.7, window=window, documents_BT=documents.expand(2, -1))
        (out * weights[:, mine]).sum().backward()
        return mine, out.detach(), *(x.grad for x in own)

    for mine, *found in on_ranks(ranks, attend, method):
        of_whole = (expected.detach(), *(x.grad for x in whole))
        for mine_found, all_of_it in zip(found, of_whole, strict=True):
            torch.testing.assert_close(mine_found, all_of_it[:, mine], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 1])
def test_what_sees_itself_alone_is_one_block(window: int | None) -> None:
    """Padding by equal places is a document for each, and a window of one is that for all."""
    length = 4096
    places = torch.arange(length).clamp_max(99).repeat(2, 1) % 99
    cp: Any = context_parallel
    seen = cp._Seen(cp._spans(documents_of(places), length), window)
    share: Any = Threads(Seat(Meeting(2), 1))  # type: ignore[arg-type]
    first = "causal" if window is None else "itself"
    for keys, kinds in ((WholeSequence(), [first, "itself"]), (share, ["itself"] * 2)):
        blocks = cp._blocks(keys, length // keys.ranks, seen)
        assert [block.kind for block in blocks] == kinds


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize(
    ("name", "method"),
    [
        *((name, "all_gather") for name in (*MODELS, *OURS)),
        *((name, "ulysses") for name in ("mistral", "gemma3_text", *OURS)),
    ],
)
def test_models_train_as_one_process_does(name: str, method: str, packed: bool) -> None:
    """Of 23 positions, padded, of which each rank has some."""
    whole, given = OURS[name]() if name in OURS else make(MODELS[name]), batch(packed=packed)
    check_context_parallel(whole, ParallelConfig(cp=2, cp_method=method))  # type: ignore[arg-type]
    loss, count = loss_sum(whole, given)
    loss.backward()

    def work(context: ContextShare) -> tuple[float, int, dict[str, Tensor]]:
        model = copy.deepcopy(whole)
        model.zero_grad()
        share_positions(model, context)
        own, terms = loss_sum(model, given)
        own.backward()
        return float(own.detach()), int(terms), gradients(model)

    ranks = {"mistral": 3 if method == "all_gather" else 4}.get(name, 2)
    losses, counts, found = zip(*on_ranks(ranks, work, method), strict=True)
    assert sum(losses) == pytest.approx(float(loss.detach()), rel=1e-6)
    assert sum(counts) == int(count) < 46
    assert_sums(found, gradients(whole))


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "decoder"])
def test_stages_that_share_positions_are_the_model(name: str, packed: bool) -> None:
    """Of micro-batches that are not equally long."""
    whole = OURS[name]() if name in OURS else make(MODELS[name])
    batches = [batch(24, packed), batch(16, packed)]
    expected = sum(float(loss_sum(whole, given)[0].detach()) for given in batches)
    stages = [cut(whole, rank, 2, "1f1b")[rank] for rank in range(2)]

    def work(context: ContextShare) -> float:
        mine: list[Any] = copy.deepcopy(stages)
        for stage in mine:
            share_positions(stage, context)
        read = [tokens_and_targets(MicroBatch(0, b), torch.device("cpu"), mine[0]) for b in batches]
        x, targets, more = own_positions(mine[0], *joined(read))
        for stage in mine:
            stage.length = targets.shape[1]
            x = stage(x, **more)
        return float(mine[1].loss_sum(x, targets).detach())

    assert sum(on_ranks(2, work)) == pytest.approx(expected, rel=1e-6)


def test_other_models_of_one_configuration_stay_as_they_are() -> None:
    whole: Any = make(MODELS["mistral"])
    before, given = whole.config._attn_implementation, batch()
    other = type(whole)(whole.config)
    other.load_state_dict(whole.state_dict())
    expected, _ = loss_sum(other, given)
    on_ranks(1, lambda context: share_positions(whole, context))
    assert whole.config._attn_implementation == "elastic_ft_positions" != before
    assert other.config._attn_implementation == before
    assert torch.equal(loss_sum(other, given)[0], expected)


def test_a_mask_is_refused() -> None:
    whole = make(MODELS["llama"])

    def work(context: ContextShare) -> None:
        share_positions(whole, context)
        with pytest.raises(ModelError, match=r"^parallel\.cp: .*found attention_mask in a batch"):
            loss_sum(whole, batch() | {"attention_mask": torch.ones(2, 24)})
        with pytest.raises(ModelError, match=r"^parallel\.cp: LlamaAttention asks for a mask"):
            whole(batch()["tokens"], attention_mask=torch.ones(2, 1, 24, 24))

    on_ranks(1, work)


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 2}
LONG |= {"long_factor": [2.0] * 2, "original_max_position_embeddings": 16}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "of another kind": (
        {"model_type": "gpt2", "num_key_value_heads": ABSENT, "intermediate_size": ABSENT},
        "ranks share positions of the built-in decoders .* llama, mistral, .*; found GPT2LMHeadMod",
    ),
    "whose routers share a loss": (
        MODELS["mixtral"] | {"output_router_logits": True},
        "model.transformers.output_router_logits: the routers' loss is of whole sequences",
    ),
    "whose routers draw noise": (
        MODELS["mixtral"] | {"router_jitter_noise": 0.1},
        "model.layers.0.mlp.jitter_noise is 0.1, and ranks would draw the same of other positions",
    ),
    "that drops": (
        MODELS["qwen3"] | {"attention_dropout": 0.1},
        "model.layers.0.self_attn.attention_dropout is 0.1, and ranks would draw the same",
    ),
    "that caps scores": (
        {"model_type": "gemma2"},
        "model.layers.0.self_attn: attn_logit_softcapping is 50.0, which no fast kernel has",
    ),
    "that looks ahead": (
        {"model_type": "gemma3_text", "use_bidirectional_attention": True},
        "model.layers.0.self_attn is not causal: padding at a sequence's end would be seen",
    ),
    "that turns by the length": (
        {"model_type": "llama", "rope_parameters": DYNAMIC},
        "model.rotary_emb: rope_type dynamic turns by the length that a rank sees",
    ),
    "that turns by another length": (
        {"model_type": "phi3", "rope_parameters": LONG},
        "model.rotary_emb: rope_type longrope turns by the length",
    ),
}


@pytest.mark.parametrize(("config", "problem"), REFUSED.values(), ids=REFUSED)
def test_models_are_refused_before_anything_starts(config: dict[str, Any], problem: str) -> None:
    with torch.device("meta"):
        model = make(config)
        check_context_parallel(model, ParallelConfig(cp=1))
        with pytest.raises(ConfigError, match=f"^parallel.cp: {problem}") as caught:
            check_context_parallel(model, ParallelConfig(cp=2))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("tp", "cp", "fits"), [(1, 4, True), (2, 2, True), (1, 3, False)])
def test_heads_that_ranks_cant_share_are_refused_or_not_traded(
    tp: int, cp: int, fits: bool
) -> None:
    for model in (decoder(), mixture(), make(MODELS["llama"])):  # of four heads
        asked = ParallelConfig(cp=cp, tp=tp, cp_method="ulysses")
        why = f"parallel.cp_method: ulysses .* cp {cp} x tp {tp} do not divide 4; auto gathers"
        with contextlib.nullcontext() if fits else pytest.raises(ConfigError, match=why):
            check_context_parallel(model, asked, tp)
        layout, group = Layout(cp=cp, tp=tp), Seat(Meeting(cp), 0)
        kinds = {"auto": HeadShare if fits else ContextShare, "all_gather": ContextShare}
        for method, kind in kinds.items():
            parallel = ParallelConfig(cp=cp, tp=tp, cp_method=method)  # type: ignore[arg-type]
            check_context_parallel(model, parallel, tp)
            share = share_of_positions(model, parallel, layout, group)  # type: ignore[arg-type]
            assert type(share) is kind and share.multiple == tp


def test_a_model_of_ones_own_is_refused_though_it_is_made_of_anothers() -> None:
    class Mine(type(make(MODELS["llama"]))):  # type: ignore[misc]
        pass

    with torch.device("meta"), pytest.raises(ConfigError, match="found Mine"):
        mine = Mine(make(MODELS["llama"]).config)  # type: ignore[attr-defined]
        check_context_parallel(mine, ParallelConfig(cp=2))


@pytest.mark.parametrize(("name", "shares"), [("mistral", True), ("gemma2", True), (None, False)])
def test_the_planner_shares_positions_of_models_that_can(name: str | None, shares: bool) -> None:
    """And of no other, however long its sequences."""
    capped = {"model_type": "gemma2", **WIDTH}
    config = {**SIZES, **(MODELS[name] if name else capped)}
    config |= {"max_position_embeddings": 32768, "vocab_size": 4096}
    job = job_of(
        parallel={"strategy": "auto", "devices": {"memory_gb": 1}},
        model={"transformers": config},
        data={"url": "stdlib:", "sequence_length": 32768},
        batch={"global_batch_size": 8, "micro_batch_size": 1},
        elastic={"max_workers": 8},
    )
    assert (max(planning_of(job).limits.cp_sizes) == 8) is shares
