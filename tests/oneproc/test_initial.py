"""Initial values part by part: the same in every layout, and nobody makes more than it holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_ft.config import ModelConfig, parse_job
from elastic_ft.controller.job_policy import policy_of
from elastic_ft.core.sharding import Box
from elastic_ft.models import Decoder, DecoderConfig, build, build_model, initial, initial_state
from tests.core.script import Script
from tests.oneproc.alone import job_of

SMALL_BLOCK = 96
DECODER = DecoderConfig(
    vocab_size=50, n_layers=2, dim=24, n_heads=4, n_kv_heads=2, ffn_dim=48, max_sequence_length=16
)
HF = {
    "llama": {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "tie_word_embeddings": True,
        "pad_token_id": 3,
    },
    "mixtral": {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "num_local_experts": 4,
    },
    "gpt2": {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 32},
}


class Own(nn.Module):
    """With torch's defaults, constants, a truncated normal and a persistent buffer."""

    def __init__(self, last: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 50)
        self.embedding = nn.Embedding(40, 24, padding_idx=2)
        self.scale = nn.Parameter(torch.full((24,), 0.5))
        self.noise = nn.Parameter(torch.randn(30, 7))
        self.cut = nn.Parameter(torch.empty(30, 9))
        nn.init.trunc_normal_(self.cut, std=0.1, a=-0.2, b=0.2)
        self.register_buffer("seen", torch.ones(5))
        self.last = last


class Orthogonal(nn.Module):
    """Begins with what no part of it can be made by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(30, 30)
        nn.init.orthogonal_(self.first.weight)


class Copied(nn.Module):
    """Begins with what another tensor has."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(30, 30)
        self.second = nn.Parameter(self.first.weight.detach() * 2)


def factory_of(name: str) -> Any:
    if name in HF:
        config = ModelConfig(transformers={"model_type": name, "vocab_size": 50, **HF[name]})
        return lambda: build_model(config, vocab_size=50, sequence_length=16)
    return {"decoder": lambda: Decoder(DECODER), "own": Own}[name]


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is small here counts as large."""
    monkeypatch.setattr(initial, "BLOCK_ELEMENTS", SMALL_BLOCK)
    monkeypatch.setattr(initial, "SINGLE_ELEMENTS", SMALL_BLOCK)
    monkeypatch.setattr(build, "WHOLE_ELEMENTS", 100)


def halves(shape: tuple[int, ...], dim: int) -> list[Box]:
    cut = shape[dim] // 3
    boxes = []
    for offset, size in ((0, cut), (cut, shape[dim] - cut)):
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[dim], sizes[dim] = offset, size
        boxes.append(Box(tuple(offsets), tuple(sizes)))
    return boxes


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("name", ["decoder", "own", *HF])
def test_parts_are_of_one_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    factory = factory_of(name)
    monkeypatch.setattr(build, "_seeded", None)  # nobody builds all of it
    whole = dict(initial_state(factory, 7))
    for dim in (0, 1):
        wanted = {n: halves(tuple(t.shape), dim) for n, t in whole.items() if t.dim() > dim}
        parts = list(build.initial_parts(factory, 7, wanted))
        assert len(parts) == 2 * len(wanted)
        for key, box, part in parts:
            expected = whole[key][box.slices_within(Box.whole(tuple(whole[key].shape)))]
            assert torch.equal(part, expected), (key, box)
    other = dict(initial_state(factory, 8))
    assert any(not torch.equal(tensor, other[key]) for key, tensor in whole.items())


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("name", ["own", *HF])
def test_large_models_begin_as_small_ones_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same constants; of what is random, the same distribution."""
    factory = factory_of(name)
    found = dict(initial_state(factory, 7))
    monkeypatch.setattr(build, "WHOLE_ELEMENTS", 10**9)
    expected = dict(initial_state(factory, 7))
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        if tensor.unique().numel() <= 2:
            assert torch.equal(found[key], tensor), key
        else:
            assert found[key].std().item() == pytest.approx(tensor.std().item(), rel=0.25), key
            assert found[key].abs().max() <= 1.6 * tensor.abs().max(), key


@pytest.mark.usefixtures("large")
def test_large_models_may_have_tensors_without_dimensions() -> None:
    class Scaled(Own):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.full((), 0.25))

    assert torch.equal(dict(initial_state(Scaled, 7))["factor"], torch.tensor(0.25))


@pytest.mark.usefixtures("large")
def test_rows_of_padding_are_zero() -> None:
    found = dict(initial_state(Own, 7))["embedding.weight"]
    assert not found[2].any()
    assert found[3].all()


@pytest.mark.usefixtures("large")
def test_a_rank_makes_its_own_rows_and_at_most_two_blocks_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = 0
    plain = torch.empty

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal made
        tensor = plain(*args, **kwargs)
        made += tensor.numel()
        return tensor

    monkeypatch.setattr(initial.torch, "empty", counted)
    box = Box((20, 0), (13, 24))
    Decoder(DECODER).initial_part("embedding.weight", (50, 24), 7, box)
    made = 0
    Decoder.initial_part(factory_of("decoder")(), "embedding.weight", (50, 24), 7, box)
    made -= sum(p.numel() for p in Decoder(DECODER).parameters())  # of its own module
    assert made <= 2 * box.numel + 2 * SMALL_BLOCK


def test_small_tensors_begin_as_they_always_did() -> None:
    shape = (50, 24)
    found = Decoder(DECODER).initial_tensor("layers.0.ffn.up.weight", shape, 7)
    generator = initial.generator_of(7, "layers.0.ffn.up.weight")
    assert torch.equal(found, torch.randn(*shape, generator=generator) * 0.02)


def test_small_models_begin_as_in_plain_pytorch() -> None:
    for name in ("own", *HF):
        found = dict(initial_state(factory_of(name), 7))
        torch.manual_seed(7)
        for key, parameter in factory_of(name)().named_parameters():
            assert torch.equal(found[key], parameter), (name, key)


@pytest.mark.usefixtures("large")
def test_what_cannot_be_told_is_built_whole(caplog: pytest.LogCaptureFixture) -> None:
    found = dict(initial_state(Copied, 7))
    assert torch.equal(found["second"], found["first.weight"] * 2)
    assert "second begins with what another tensor has" in caplog.text
    found = dict(initial_state(Orthogonal, 7))
    product = found["first.weight"] @ found["first.weight"].T
    torch.testing.assert_close(product, torch.eye(30))
    assert "first.weight begins with what another tensor has" in caplog.text


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"preset": "decoder-1m"}, "the seed"),
        ({"pretrained": "s3://models/llama"}, "the weights at s3://models/llama"),
        ({"preset": "decoder-1m", "weights": "/weights"}, "the weights at /weights"),
        ({"own": True}, "the script's own model"),
    ],
)
def test_the_journal_says_what_a_job_begins_with(model: dict[str, Any], told: str) -> None:
    """It said "the seed" of weights that were read, too."""
    tokenizer = {"data": {"url": "stdlib:", "tokenizer": "tokenizer.json"}}
    own = {"name": "alone", "loop": {}, "model": model}
    job = parse_job(own) if "own" in model else job_of(model=model, **tokenizer)
    assert Script(policy_of(job)).journalled("job_started") == [f"starting from {told}"]
