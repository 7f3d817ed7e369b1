"""Models: sizes, causality, initial state, and the loss as a sum and a count."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic_ft.config import ModelConfig
from elastic_ft.errors import ModelError
from elastic_ft.models import (
    PRESETS,
    Decoder,
    DecoderConfig,
    block_modules,
    build_model,
    computed_buffers,
    initial_state,
    loss_sum,
)
from elastic_ft.models.decoder import rotate, rotations

TINY = DecoderConfig(
    vocab_size=50, n_layers=2, dim=32, n_heads=4, n_kv_heads=2, ffn_dim=48, max_sequence_length=16
)
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def tiny(seed: int = 0, **changes: Any) -> Decoder:
    model = Decoder(dataclasses.replace(TINY, **changes))
    model.initialise(seed)
    return model


def tokens(*shape: int) -> Tensor:
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(1))


def build(vocab_size: int | None = 50, sequence_length: int = 16, **config: Any) -> nn.Module:
    return build_model(
        ModelConfig(**config), vocab_size=vocab_size, sequence_length=sequence_length
    )


def build_on_meta(**arguments: Any) -> nn.Module:
    with torch.device("meta"):
        return build(**arguments)


# ------------------------------------------------------------------------------ the decoder


@pytest.mark.parametrize("preset", PRESETS)
def test_a_presets_name_is_its_size(preset: str) -> None:
    with torch.device("meta"):
        model = Decoder(PRESETS[preset])
    digits, unit = preset.removeprefix("decoder-")[:-1], preset[-1]
    expected = int(digits) * {"m": 1e6, "b": 1e9}[unit]
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == pytest.approx(expected, rel=0.1)
    assert len(block_modules(model)) == PRESETS[preset].n_layers


def test_every_parameter_gets_a_gradient() -> None:
    model = tiny()
    loss, count = loss_sum(model, {"tokens": tokens(2, 9)})
    loss.backward()
    assert count == 16
    assert loss.item() / count == pytest.approx(math.log(50), rel=0.05)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_a_position_sees_only_the_past() -> None:
    model, row = tiny(), tokens(1, 12)
    changed = row.clone()
    changed[0, 7] = (row[0, 7] + 1) % 50
    before, after = model(row), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=0)
    assert not torch.equal(before[:, 7:], after[:, 7:])


def test_attention_depends_on_distances() -> None:
    """The score of a query and a key is the same wherever the pair stands, and not at any gap."""
    query, key = torch.randn(2, 8, generator=torch.Generator().manual_seed(2))
    turns = rotations(12, 8, 10_000.0, torch.device("cpu"))
    queries, keys = (rotate(x.expand(1, 12, 1, 8), turns)[0, :, 0] for x in (query, key))
    scores = queries @ keys.T
    for gap in range(-11, 12):
        diagonal = scores.diagonal(gap)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert scores[0].unique().numel() == 12
    torch.testing.assert_close(scores[0, 0], query @ key)


def test_grouped_queries_equal_full_attention_with_repeated_heads() -> None:
    grouped, full = tiny(), tiny(n_kv_heads=4)
    state = grouped.state_dict()
    for name, tensor in state.items():
        if ".key." in name or ".value." in name:
            heads = tensor.unflatten(0, (2, 8))
            state[name] = heads.repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    torch.testing.assert_close(grouped(tokens(2, 8)), full(tokens(2, 8)))


def test_too_many_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="17 tokens exceed max_sequence_length 16"):
        tiny()(tokens(1, 17))


def test_tied_embeddings_are_one_parameter() -> None:
    model = tiny(tie_embeddings=True)
    assert model.output.weight is model.embedding.weight
    assert "output.weight" not in dict(model.named_parameters())


def test_a_meta_model_is_whole_once_its_parameters_are() -> None:
    with torch.device("meta"):
        model = Decoder(TINY)
    model.to_empty(device="cpu")
    model.initialise(5)
    torch.testing.assert_close(model(tokens(1, 8)), tiny(5)(tokens(1, 8)), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"n_kv_heads": 3}, "n_heads 4 is not a multiple of n_kv_heads 3"),
        ({"n_heads": 5}, "dim 32 must be n_heads 5 times an even head width"),
        ({"n_layers": 0}, "n_layers: expected a positive integer, found 0"),
        ({"dim": "big"}, "dim: expected a positive integer, found 'big'"),
        ({"tie_embeddings": 1}, "tie_embeddings: expected true or false, found 1"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        dataclasses.replace(TINY, **changes)


# ---------------------------------------------------------------------------- initial state


def test_an_initial_tensor_depends_on_seed_and_name_alone() -> None:
    model = tiny()
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    forwards = {name: model.initial_tensor(name, shape, 7) for name, shape in shapes.items()}
    torch.manual_seed(99)
    for name in reversed(shapes):
        assert torch.equal(model.initial_tensor(name, shapes[name], 7), forwards[name]), name
    first, second = (name for name in shapes if name.endswith("query.weight"))
    assert not torch.equal(forwards[first], forwards[second])
    assert not torch.equal(forwards[first], model.initial_tensor(first, shapes[first], 8))


def test_initial_scales_are_those_of_gpt2() -> None:
    model = tiny()
    plain = model.initial_tensor("layers.0.ffn.up.weight", (300, 300), 0)
    residual = model.initial_tensor("layers.0.ffn.down.weight", (300, 300), 0)
    assert plain.std().item() == pytest.approx(0.02, rel=0.02)
    assert residual.std().item() == pytest.approx(0.02 / 2, rel=0.02)  # sqrt(2 * 2 layers)
    assert torch.equal(model.initial_tensor("norm.weight", (4,), 0), torch.ones(4))


def test_initial_tensors_are_real_under_meta() -> None:
    with torch.device("meta"):
        tensor = tiny_on_meta().initial_tensor("output.weight", (50, 32), 0)
    assert torch.equal(tensor, tiny().output.weight)


def tiny_on_meta() -> Decoder:
    with torch.device("meta"):
        return Decoder(TINY)


class Plain(nn.Module):
    """A user's model: no ``initial_tensor``, one persistent and one computed buffer."""

    def __init__(self, width: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.head = nn.Linear(width, 1)
        self.body = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)), nn.Tanh())
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("ramp", torch.arange(float(width)), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
        error = self.head(self.body(x + self.ramp)).squeeze(-1) - y
        return error.square().sum(), y.numel()


def test_a_users_model_is_built_whole_from_the_seed() -> None:
    before = torch.random.get_rng_state()
    first = dict(initial_state(Plain, 3))
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(1)
    second = dict(initial_state(Plain, 3))
    assert list(first) == [*dict(Plain().named_parameters()), "seen"]
    for name in first:
        assert torch.equal(first[name], second[name]), name
    assert not torch.equal(first["head.weight"], dict(initial_state(Plain, 4))["head.weight"])


def test_initial_state_of_a_decoder_is_its_initial_tensors() -> None:
    state = dict(initial_state(lambda: Decoder(TINY), 3))
    for name, parameter in tiny(3).named_parameters():
        assert torch.equal(state[name], parameter), name


def test_initial_state_is_made_on_the_cpu_whatever_the_default_device() -> None:
    with torch.device("meta"):
        states = [*initial_state(Plain, 0), *initial_state(lambda: Decoder(TINY), 0)]
    assert {tensor.device.type for _, tensor in states} == {"cpu"}


def test_computed_buffers_are_the_non_persistent_ones() -> None:
    before = torch.random.get_rng_state()
    buffers = computed_buffers(Plain)
    assert list(buffers) == ["ramp"]
    assert torch.equal(buffers["ramp"], torch.arange(4.0))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert next(Plain().parameters()).device.type == "cpu"  # nothing is left behind
    assert computed_buffers(lambda: Decoder(TINY)) == {}


# ---------------------------------------------------------------------------------- building


def test_a_preset_takes_the_datas_sizes_unless_told_otherwise() -> None:
    model = build_on_meta(preset="decoder-1m")
    assert isinstance(model, Decoder)
    assert (model.config.vocab_size, model.config.max_sequence_length) == (50, 16)
    model = build_on_meta(preset="decoder-1m", kwargs={"vocab_size": 64, "n_layers": 1})
    assert isinstance(model, Decoder)
    assert (model.config.vocab_size, model.config.n_layers) == (64, 1)


def test_a_transformers_model_is_built_filled_and_trained() -> None:
    def factory() -> nn.Module:
        return build(transformers=LLAMA)

    model = build_on_meta(transformers=LLAMA)
    assert [type(block).__name__ for block in block_modules(model)] == ["LlamaDecoderLayer"] * 2
    model.to_empty(device="cpu")
    state = dict(initial_state(factory, 0)) | computed_buffers(factory)
    holders = dict(model.named_parameters()) | dict(model.named_buffers())
    assert holders.keys() == state.keys()
    with torch.no_grad():
        for name, holder in holders.items():
            holder.copy_(state[name])
    torch.manual_seed(0)
    torch.testing.assert_close(model(tokens(1, 8)).logits, factory()(tokens(1, 8)).logits)
    loss, count = loss_sum(model, {"tokens": tokens(2, 9)})
    loss.backward()
    assert loss.item() / count == pytest.approx(math.log(50), rel=0.1)


def make_plain(**kwargs: Any) -> nn.Module:
    return Plain(**kwargs)


def make_nothing() -> None:
    return None


def make_trouble() -> nn.Module:
    raise RuntimeError("first line\nsecond line")


HERE = __name__


def test_a_custom_model_gets_its_kwargs() -> None:
    model = build(path=f"{HERE}:make_plain", kwargs={"width": 6})
    assert isinstance(model, nn.Module)
    assert model.head.in_features == 6


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"preset": "decoder-2m"}, "model.preset: expected one of decoder-1m, .*'decoder-2m'"),
        (
            {"preset": "decoder-1m", "kwargs": {"heads": 1}},
            "model.kwargs.heads: unknown key; expected vocab_size, ",
        ),
        (
            {"preset": "decoder-1m", "kwargs": {"n_kv_heads": 3}},
            "model.kwargs: n_heads 4 is not a multiple of n_kv_heads 3",
        ),
        (
            {"preset": "decoder-1m", "kwargs": {"vocab_size": 10}},
            "model.kwargs.vocab_size: 10 is smaller than the data's 50",
        ),
        (
            {"preset": "decoder-1m", "kwargs": {"max_sequence_length": 4}},
            "model.kwargs.max_sequence_length: 4 is smaller than the data's 16",
        ),
        ({"path": "no_colon"}, "model.path: expected package.module:name, found 'no_colon'"),
        ({"path": "no_such_package.x:y"}, "model.path: cannot import .*No module named"),
        ({"path": f"{HERE}:missing"}, "model.path: .* no 'missing' in .*; found .*Decoder"),
        ({"path": f"{HERE}:HERE"}, "model.path: expected a callable, .* is str"),
        ({"path": f"{HERE}:make_nothing"}, "returned NoneType, expected a torch.nn.Module"),
        ({"path": f"{HERE}:make_trouble"}, r"failed: RuntimeError: first line second line"),
        ({"path": f"{HERE}:make_plain", "kwargs": {"size": 1}}, "unexpected keyword .*'size'"),
        ({"transformers": {}}, "model.transformers.model_type: required key is missing"),
        ({"transformers": {"model_type": "lama"}}, "transformers knows no 'lama'"),
        ({"transformers": LLAMA | {"n_layer": 2}}, "transformers.n_layer: unknown key for llama"),
        ({"transformers": LLAMA | {"hidden_size": "x"}}, "model.transformers: .*hidden_size"),
        ({"transformers": LLAMA | {"vocab_size": 10}}, "10 is smaller than the data's 50"),
        (
            {"transformers": {"model_type": "gpt2", "n_positions": 8}},
            "max_position_embeddings: 8 is smaller than the data's 16",
        ),
        ({"transformers": {"model_type": "vit"}}, "Unrecognized configuration class"),
    ],
)
def test_a_model_that_cannot_be_built_is_one_line(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(ModelError, match=expected) as caught:
        build_on_meta(**arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", ["sys.exit('no licence')", "def make(): sys.exit('no licence')"])
def test_a_model_that_ends_the_process_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    """`check` ended with its code and its words; a job's workers were started again and again."""
    monkeypatch.syspath_prepend(str(tmp_path))
    module = f"ends{len(line)}"
    (tmp_path / f"{module}.py").write_text(f"import sys\n{line}\n")
    with pytest.raises(ModelError, match=rf"^model.path: .*{module}.*: SystemExit: no licence$"):
        build_on_meta(path=f"{module}:make")


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ModelError, match=r"pip install 'elastic-ft\[transformers\]'"):
        build(transformers=LLAMA)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Plain(depth=3), 3),
        (lambda: nn.Linear(2, 2), 0),
        (lambda: nn.Sequential(nn.Linear(2, 9), nn.Sequential(*map(make_block, range(4)))), 4),
        (lambda: nn.ModuleList([nn.Linear(2, 2), nn.Bilinear(2, 2, 2)]), 0),
    ],
)
def test_blocks_are_what_repeats(make: Callable[[], nn.Module], expected: int) -> None:
    assert len(block_modules(make())) == expected


def make_block(_: int) -> nn.Module:
    return nn.Sequential(nn.Linear(9, 9), nn.ReLU())


# ---------------------------------------------------------------------------------- the loss


class Echo(nn.Module):
    """Returns what it was made with, or what it was called with."""

    def __init__(self, output: Any = None) -> None:
        super().__init__()
        self.output = output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (args, kwargs) if self.output is None else self.output


def test_the_sum_over_parts_is_the_sum_over_the_whole() -> None:
    model, batch = tiny(), tokens(4, 9)
    whole, count = loss_sum(model, {"tokens": batch})
    parts = [loss_sum(model, {"tokens": part}) for part in (batch[:3], batch[3:])]
    assert count == sum(part_count for _, part_count in parts)
    torch.testing.assert_close(whole, sum(part for part, _ in parts))


def test_ignored_labels_count_for_nothing() -> None:
    model, batch = tiny(), tokens(2, 9)
    labels = batch.clone()
    labels[:, :5] = -100
    loss, count = loss_sum(model, {"tokens": batch, "labels": labels})
    assert count == 2 * 4
    logits = model(batch[:, :-1])[:, 4:]
    expected = F.cross_entropy(logits.flatten(0, 1), batch[:, 5:].flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected)


def test_nothing_but_ignored_labels_is_zero_of_zero() -> None:
    labels = torch.full((1, 9), -100)
    loss, count = loss_sum(tiny(), {"tokens": tokens(1, 9), "labels": labels})
    assert (loss.item(), count) == (0.0, 0)


def test_the_loss_is_float32_whatever_the_logits() -> None:
    logits = torch.zeros(1, 8, 50, dtype=torch.bfloat16)
    loss, _ = loss_sum(Echo(logits), {"tokens": tokens(1, 9)})
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(8 * math.log(50), rel=1e-5)


@pytest.mark.parametrize("kind", [dict, tuple, list])
def test_a_users_batch_reaches_forward_and_its_pair_comes_back(kind: type) -> None:
    batch: Any = {"x": torch.ones(3, 4), "y": torch.zeros(3)}
    batch = batch if kind is dict else kind(batch.values())
    loss, count = loss_sum(Plain(), batch)
    assert loss.ndim == 0
    assert count == 3


@pytest.mark.parametrize(
    ("output", "batch", "expected"),
    [
        ("words", {"tokens": tokens(1, 9)}, "returned str for a token batch; expected logits"),
        (torch.zeros(3), {"x": 1}, "returned a tensor of shape .3,.; expected .sum of losses"),
        ((torch.zeros(3), 3), {"x": 1}, "sum of losses, expected a scalar tensor"),
        ((1.0, 3), torch.zeros(2), "sum of losses, expected a scalar tensor"),
    ],
)
def test_a_model_that_breaks_the_contract_is_told(output: Any, batch: Any, expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        loss_sum(Echo(output), batch)
