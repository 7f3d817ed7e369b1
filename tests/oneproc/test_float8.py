"""Linear layers by float8: which, what is kept, and one line where nothing can be done."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

from elastic_ft.config import ModelConfig
from elastic_ft.engines.float8 import converting
from elastic_ft.errors import ConfigError
from elastic_ft.models.build import build_model
from elastic_ft.models.decoder import Decoder, DecoderConfig
from tests.oneproc.alone import attached, job_of, run_step

TOKENS = torch.arange(4 * 17).view(4, 17) % 50
TENSORWISE = {"dtype": "bf16", "fp8": "tensorwise"}


def decoder(width: int = 32) -> nn.Module:
    return Decoder(DecoderConfig(50, 2, width, 2, 1, 48, 16))


def trained(precision: dict[str, Any]) -> tuple[list[float], set[str], set[str]]:
    """Losses of four steps, the state's names, and the names of converted layers."""
    job = job_of(precision=precision, optimizer={"lr": 3e-3})
    with attached(job, decoder, tokens=16) as engine:
        parts = dict(engine._model.parts[0].named_modules())
        found = {n for n, part in parts.items() if type(part).__name__ == "Float8Linear"}
        losses = []
        for step in range(1, 5):
            loss, terms, _ = run_step(engine, step, [{"tokens": TOKENS}])
            losses.append(loss / terms)
        assert engine.state()["model.layers.0.ffn.up.weight"].local.dtype is torch.float32
        return losses, set(engine.state()), found


@pytest.mark.parametrize("kind", ["tensorwise", "rowwise"])
def test_layers_are_converted_and_the_state_is_as_without(kind: str) -> None:
    plain, names, none = trained({"dtype": "bf16"})
    losses, names_too, converted = trained({"dtype": "bf16", "fp8": kind})
    assert names_too == names
    assert not none
    parts = {f"attention.{name}" for name in ("query", "key", "value", "output")}
    parts |= {f"ffn.{name}" for name in ("gate", "up", "down")}
    assert converted == {f"layers.{i}.{part}" for i in range(2) for part in parts}, "no head"
    assert losses != plain
    assert losses == pytest.approx(plain, rel=0.01)


def test_a_model_without_such_layers_is_refused() -> None:
    with (
        pytest.raises(
            ConfigError,
            match=r"precision\.fp8: no linear layer of Decoder has torch.s own forward and",
        ),
        attached(job_of(precision=TENSORWISE), lambda: decoder(20)),
    ):
        pass


def test_ranks_that_share_a_layer_have_sizes_that_kernels_take() -> None:
    """The same layers in each world, whatever of tp is left of it."""
    job = job_of(precision=TENSORWISE, parallel={"tp": 2})
    model = converting(job, torch.device("cpu"), lambda: decoder(32), 16)()
    found = {n for n, part in model.named_modules() if type(part).__name__ == "Float8Linear"}
    assert found == {f"layers.{i}.attention.{n}" for i in range(2) for n in ("query", "output")}
    with pytest.raises(ConfigError, match=r"multiples of 64 \(16 for each of parallel\.tp\)"):
        converting(
            job_of(precision=TENSORWISE, parallel={"tp": 4}), torch.device("cpu"), decoder, 16
        )()


@pytest.mark.parametrize(
    "mixture",
    [
        {"model_type": "phimoe", "num_local_experts": 16},
        {"model_type": "hunyuan_v1_moe", "num_experts": 16, "moe_topk": 2, "head_dim": 16},
    ],
    ids=lambda mixture: str(mixture["model_type"]),
)
def test_routers_choose_as_without_it(mixture: dict[str, Any]) -> None:
    """Phi-MoE's are linear layers that do more, which was lost: the first step failed."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50}
    sizes |= {"intermediate_size": 24, "num_key_value_heads": 2}
    config = ModelConfig(transformers=sizes | mixture)

    def made() -> nn.Module:
        return build_model(config, vocab_size=None, sequence_length=None)

    model = converting(job_of(precision=TENSORWISE), torch.device("cpu"), made, 16)()
    found = {n for n, part in model.named_modules() if type(part).__name__ == "Float8Linear"}
    assert found == {f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"}
    assert model(TOKENS[:, :16]).logits.isfinite().all()


def test_without_torchao_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torchao" else find(name)
    )
    with (
        pytest.raises(ConfigError, match=r"needs torchao: pip install 'elastic-ft\[fp8\]'"),
        attached(job_of(precision=TENSORWISE), decoder),
    ):
        pass


@pytest.mark.parametrize(("kind", "found"), [("tensorwise", (8, 0)), ("rowwise", (8, 9))])
def test_an_older_gpu_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, kind: str, found: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
    job = job_of(precision={"dtype": "bf16", "fp8": kind})
    with pytest.raises(ConfigError, match=rf"fp8: {kind} needs a GPU of sm_\d+ .*found sm_8\d"):
        converting(job, torch.device("cuda"), decoder)


def as_gpus_do(a: torch.Tensor, b: torch.Tensor, **given: Any) -> torch.Tensor:
    """In the place of ``torch._scaled_mm``, with what it asks of sizes on a GPU."""
    assert a.shape[1] % 16 == b.shape[0] % 16 == b.shape[1] % 16 == 0, (a.shape, b.shape)
    found = (a.float() * given["scale_a"]) @ (b.float() * given["scale_b"])
    return found.to(given["out_dtype"])


@pytest.mark.parametrize("kind", ["tensorwise", "rowwise"])
@pytest.mark.parametrize(
    ("data", "tokens", "found", "padded"),
    [
        ({"url": "stdlib:"}, 24, 24, True),
        ({"url": "stdlib:"}, 32, 32, False),
        ({"path": "a_users:dataset"}, 32, 24, True),
        ({"path": "a_users:dataset"}, 1, 1, True),
    ],
)
def test_a_micro_batch_has_any_number_of_tokens(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    data: dict[str, str],
    tokens: int,
    found: int,
    padded: bool,
) -> None:
    """A weight's gradient is a product over them, and kernels take multiples of 16 alone. A user's
    batches may be shorter than its samples are said to be."""
    monkeypatch.setattr(torch, "_scaled_mm", as_gpus_do)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    batch = {"global_batch_size": 4, "micro_batch_size": 1}
    job, made = job_of(precision={"dtype": "bf16", "fp8": kind}, batch=batch, data=data), []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        make = converting(
            job, torch.device(device), lambda: nn.Sequential(nn.Linear(32, 48)), tokens
        )
        model = make().to(torch.bfloat16)
        assert model[0].config.pad_inner_dim is padded
        assert model[0].config.emulate is (device == "cpu")
        x = torch.randn(1, found, 32, dtype=torch.bfloat16).requires_grad_()
        model(x).square().sum().backward()
        made.append([x.grad, model[0].weight.grad])
    for emulated, by_kernel in zip(*made, strict=True):
        torch.testing.assert_close(by_kernel, emulated, rtol=2e-2, atol=2e-2)
