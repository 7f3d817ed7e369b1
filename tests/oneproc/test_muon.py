"""Muon in float32: its directions, which parameters it has, what of it is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elastic_ft.config import ModelConfig, OptimizerConfig
from elastic_ft.engines.muon import MATRIX, RMS, MuonWithAdamW, is_inner_matrix, newton_schulz
from elastic_ft.engines.optimizers import make_optimizer
from elastic_ft.errors import ConfigError
from elastic_ft.models import build_model
from tests.multiproc.harness import make_job

LR, DECAY = 0.02, 0.1


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (3, 8, 5)])
def test_singular_values_become_one(shape: tuple[int, ...]) -> None:
    matrices = drawn(*shape)
    values = torch.linalg.svdvals(newton_schulz(matrices))
    assert values.min() > 0.6
    assert values.max() < 1.25
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    assert (newton_schulz(matrices) * (left @ right)).sum() > 0.8 * values.numel()


@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_as_torchs_but_for_its_rounding(nesterov: bool) -> None:
    ours, theirs = (nn.Parameter(drawn(8, 6)) for _ in range(2))
    kwargs = {"lr": LR, "weight_decay": DECAY, "momentum": 0.9, "nesterov": nesterov}
    mine = MuonWithAdamW([{"params": [ours], MATRIX: True}], **kwargs)
    torchs = torch.optim.Muon([theirs], adjust_lr_fn="match_rms_adamw", **kwargs)
    for step in range(5):
        for parameter, optimizer in ((ours, mine), (theirs, torchs)):
            parameter.grad = drawn(8, 6, seed=step)
            optimizer.step()
    moved = (drawn(8, 6) - theirs.detach()).norm()
    assert (ours - theirs).norm() < 0.03 * moved  # torch's iterations are in bfloat16
    kept = mine.state[ours]["momentum_buffer"]
    torch.testing.assert_close(kept, torchs.state[theirs]["momentum_buffer"])
    rms = (newton_schulz(kept) * RMS * 8**0.5).pow(2).mean().sqrt()
    assert 0.1 < rms < 0.3


def test_vectors_and_what_embeds_are_adamws() -> None:
    names = {
        "embedding.weight": (9, 4),
        "layers.0.attention.output.weight": (4, 4),
        "layers.0.norm.weight": (4,),
        "output.weight": (9, 4),
    }
    mine, theirs = ({n: nn.Parameter(drawn(*s)) for n, s in names.items()} for _ in range(2))
    muon = make_optimizer(OptimizerConfig(name="muon", lr=LR), mine)
    adamw = make_optimizer(OptimizerConfig(name="adamw", lr=LR), theirs)
    for step in range(3):
        for parameters, optimizer in ((mine, muon), (theirs, adamw)):
            for parameter in parameters.values():
                parameter.grad = drawn(*parameter.shape, seed=step)
            optimizer.step()
    differs = {name for name in names if not torch.equal(mine[name], theirs[name])}
    assert differs == {"layers.0.attention.output.weight"}


@pytest.mark.parametrize(
    ("name", "inner"),
    [
        ("model.layers.3.self_attn.o_proj.weight", True),
        ("transformer.h.0.mlp.c_proj.weight", True),
        ("layers.0.experts.gate_up_proj", True),
        ("layers.1.attention.output.weight", True),
        ("model.embed_tokens.weight", False),
        ("transformer.wte.weight", False),
        ("lm_head.weight", False),
        ("bert.embeddings.word_embeddings.weight", False),
        ("output.weight", False),
        ("model.score.weight", False),
    ],
)
def test_names_in_the_field(name: str, inner: bool) -> None:
    assert is_inner_matrix(name, nn.Parameter(torch.zeros(2, 2))) is inner


def test_a_group_of_the_jobs_decides() -> None:
    parameters = {n: nn.Parameter(torch.zeros(4, 4)) for n in ("embedding.weight", "mixer.weight")}
    groups = [{"match": "embedding.*", "muon": True}, {"match": "mixer.*", "muon": False}]
    config = OptimizerConfig.model_validate({"name": "muon", "groups": groups})
    found = {
        id(group["params"][0]): MATRIX in group
        for group in make_optimizer(config, parameters).param_groups
    }
    assert [found[id(each)] for each in parameters.values()] == [True, False]


def test_a_rate_of_zero_keeps_the_weights() -> None:
    parameter = nn.Parameter(drawn(4, 4))
    optimizer = MuonWithAdamW([{"params": [parameter], MATRIX: True}], lr=0.0)
    parameter.grad = drawn(4, 4, seed=1)
    optimizer.step()
    assert torch.equal(parameter, drawn(4, 4)) and bool(optimizer.state[parameter])


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.name: muon: DeepSpeed"):
        deepspeed = {"engine": "deepspeed", "zero_stage": 1}
        make_job("ddp", parallel=deepspeed, optimizer={"name": "muon"})
    with pytest.raises(ConfigError, match=r"groups\.muon: of name muon, found adamw"):
        make_job("ddp", optimizer={"groups": [{"match": "*", "muon": True}]})
    with pytest.raises(ValueError, match="momentum: expected 0 or more"):
        make_optimizer(
            OptimizerConfig(name="muon", kwargs={"momentum": 1.0}),
            {"a": nn.Parameter(torch.zeros(2, 2))},
        )


def test_each_parameter_of_a_decoder_steps_as_torchs_optimizers_do() -> None:
    """Muon's, of the same matrices, and AdamW, of embedding, projection and vectors: to the
    rounding of torch's iterations, which are in bfloat16, and the others exactly."""
    sizes = {"n_layers": 2, "dim": 24, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 64}
    config = ModelConfig(preset="decoder-1m", kwargs=sizes)
    model = build_model(config, vocab_size=64, sequence_length=8)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    theirs = {name: nn.Parameter(p.clone()) for name, p in start.items()}
    inner = {name for name in theirs if name.startswith("layers.") and theirs[name].dim() == 2}
    said = {"lr": LR, "weight_decay": DECAY}
    ours = make_optimizer(OptimizerConfig(name="muon", **said), dict(model.named_parameters()))
    matrices = [theirs[name] for name in inner]
    muon = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **said)
    others = {name: p for name, p in theirs.items() if name not in inner}
    adamw = make_optimizer(OptimizerConfig(**said), others)
    for step in range(5):
        for number, (name, parameter) in enumerate(model.named_parameters()):
            for each in (parameter, theirs[name]):
                each.grad = drawn(*parameter.shape, seed=100 * step + number)
        for optimizer in (ours, muon, adamw):
            optimizer.step()
    assert {p.shape[0] > p.shape[1] for n, p in start.items() if n in inner} == {True, False}
    for name, parameter in model.named_parameters():
        moved = (start[name] - theirs[name].detach()).norm()
        differs = (parameter - theirs[name]).norm() / moved
        assert differs < (0.03 if name in inner else 1e-7), name
