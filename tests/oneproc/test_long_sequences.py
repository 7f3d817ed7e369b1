"""What makes long sequences fit: a loss in chunks, what layers keep, where it waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from elastic_ft.engines.activations import checkpoint_activations, keep_in_host_memory
from elastic_ft.models.chunked_loss import chunked_cross_entropy_sum
from elastic_ft.models.decoder import Decoder, DecoderConfig
from elastic_ft.models.loss import IGNORED_LABEL, cross_entropy_sum, loss_sum
from tests.oneproc.alone import attached, job_of, run_step

SIZES = DecoderConfig(
    vocab_size=97, n_layers=2, dim=24, n_heads=4, n_kv_heads=2, ffn_dim=36, max_sequence_length=40
)


def decoder(chunk: int | None = None) -> Decoder:
    model = Decoder(SIZES)
    model.initialise(3)
    model.loss_chunk_tokens = chunk
    return model


def batch(ignored: bool = True) -> dict[str, Tensor]:
    tokens = torch.randint(0, 97, (3, 41), generator=torch.Generator().manual_seed(5))
    labels = tokens.clone()
    labels[1, 4:9] = IGNORED_LABEL
    return {"tokens": tokens} | ({"labels": labels} if ignored else {})


def step_of(model: nn.Module, given: dict[str, Tensor]) -> tuple[float, int, dict[str, Tensor]]:
    loss, count = loss_sum(model, given)
    (loss * 0.37).backward()
    names = (
        name.replace("_checkpoint_wrapped_module.", "") for name, _ in model.named_parameters()
    )
    gradients = {n: p.grad for n, p in zip(names, model.parameters(), strict=True)}
    return float(loss.detach()), int(count), gradients  # type: ignore[return-value]


def assert_same(found: Any, expected: Any) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found[1] == expected[1]
    for name, gradient in expected[2].items():
        torch.testing.assert_close(found[2][name], gradient, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("chunk", [1, 16, 120, 1000])
@pytest.mark.parametrize("ignored", [False, True])
def test_a_loss_in_chunks_is_the_loss(chunk: int, ignored: bool) -> None:
    given = batch(ignored)
    assert_same(step_of(decoder(chunk), given), step_of(decoder(), given))


def test_a_chunk_of_ignored_targets_alone_counts_for_nothing() -> None:
    given = batch()
    given["labels"][:2] = IGNORED_LABEL
    assert_same(step_of(decoder(40), given), step_of(decoder(), given))


def test_in_bfloat16_the_weights_gradient_adds_up_in_float32() -> None:
    """4,096 equal gradients: in bfloat16 their sum stands still at 256 of the first."""
    x = torch.ones(1, 4096, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(4, 8, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(1, 4096, dtype=torch.int64)
    chunked_cross_entropy_sum(x, weight, targets, 4).backward()
    assert weight.grad is not None and weight.grad.dtype is torch.bfloat16
    assert weight.grad[:, 0].tolist() == [-3072.0, 1024.0, 1024.0, 1024.0]


def test_nothing_of_the_size_of_the_logits_is_ever_made() -> None:
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                largest = max(largest, result.numel())
            return result

    given, logits = batch(), 3 * 40 * 97
    for chunk, most in ((None, logits), (10, 3 * 41 * 36)):  # of the feed-forward layer
        model, largest = decoder(chunk), 0
        with Watch():
            loss_sum(model, given)[0].backward()
        assert (largest >= logits) == (chunk is None) and largest <= most + logits * (chunk is None)


def test_an_evaluation_makes_no_gradients() -> None:
    with torch.no_grad():
        found = loss_sum(decoder(16), batch())[0]
    assert not found.requires_grad
    assert float(found) == pytest.approx(float(loss_sum(decoder(), batch())[0].detach()), rel=1e-6)


def kept_bytes(run: Callable[[], Any]) -> int:
    """Of what autograd is given to keep, but parameters; each storage once."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and tensor._base is None:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        held = run()
    assert held is not None
    return sum(kept.values())


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kept", [True, "selective"])
def test_recomputation_changes_nothing_but_what_is_done_twice(
    kept: Literal[True, "selective"],
) -> None:
    counts = {}
    for recompute in (None, kept):
        model = decoder()
        if recompute is not None:
            checkpoint_activations(model, list(model.layers), recompute)
        with Operators() as operators:
            found = step_of(model, batch())
        counts[recompute] = operators.counts
        assert_same(found, step_of(decoder(), batch()))
    again = {name for name, n in counts[kept].items() if n > counts[None].get(name, 0)}
    assert "aten::silu" in again
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert ({"aten::mm", attention} <= again) == (kept is True)
    assert not {"aten::mm", attention} & again or kept is True


@pytest.mark.parametrize("recompute", [False, True])
def test_what_waits_in_host_memory_comes_back_as_it_was(recompute: bool) -> None:
    model = decoder()
    blocks = list(model.layers)
    if recompute:
        blocks = checkpoint_activations(model, blocks)  # type: ignore[assignment]
    keep_in_host_memory(blocks, bytes_min=1)
    assert_same(step_of(model, batch()), step_of(decoder(), batch()))
    # Copies have storages of their own: to autograd there is nothing left on the device.
    plain = decoder()
    inside = kept_bytes(lambda: plain.layers[0](torch.ones(2, 40, 24), torch.ones(40, 3) + 0j))
    assert inside > 0
    on_device = kept_bytes(lambda: model.layers[0](torch.ones(2, 40, 24), torch.ones(40, 3) + 0j))
    assert on_device == 0


def test_weights_that_are_gathered_inside_a_layer_stay() -> None:
    """As FSDP2 gathers experts. Whoever gathers them again does so for backward, too."""
    block = nn.Sequential(nn.Linear(3, 3, bias=False))

    def gather(line: nn.Module, given: object) -> None:
        line.weight = nn.Parameter(torch.ones(3, 3))

    block[0].register_forward_pre_hook(gather)
    keep_in_host_memory([block], bytes_min=1)
    x = torch.zeros(2, 3, requires_grad=True)
    found = block(x).sum()
    block[0].weight.data.fill_(5.0)
    found.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((2, 3), 15.0))


@pytest.mark.parametrize(
    "parallel",
    [
        {"loss_chunk_tokens": 100},
        {"activation_checkpointing": "selective"},
        {"loss_chunk_tokens": 100, "activation_checkpointing": "selective"},
    ],
)
@pytest.mark.parametrize("precision", [{}, {"dtype": "bf16"}])
def test_steps_are_those_without(parallel: dict[str, Any], precision: dict[str, Any]) -> None:
    found = {}
    for key, section in (("with", parallel), ("without", {})):
        job = job_of(parallel=section, precision=precision, optimizer={"lr": 1e-3})
        with attached(job, decoder, tokens=40) as engine:
            steps = [run_step(engine, step, [batch()] * 2) for step in range(1, 4)]
        found[key] = [(loss, update.grad_norm) for loss, _, update in steps]
    close = {"rel": 1e-5 if not precision else 0.02}
    for mine, expected in zip(found["with"], found["without"], strict=True):
        assert mine == pytest.approx(expected, **close)


def test_the_vocabulary_may_be_larger_than_a_chunk_of_it_is_long() -> None:
    """And the loss is float32 whatever it is computed in."""
    x, weight = torch.randn(1, 7, 8), torch.randn(1000, 8)
    targets = torch.randint(0, 1000, (1, 7))
    found = chunked_cross_entropy_sum(x.bfloat16(), weight.bfloat16(), targets, 3)
    assert found.dtype is torch.float32
    logits = x.bfloat16() @ weight.bfloat16().t()
    assert float(found) == pytest.approx(float(cross_entropy_sum(logits, targets)), rel=1e-5)
