"""Transformers models in pipeline stages: in a row they are the whole model, or refused by name."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from elastic_ft.config import ModelConfig
from elastic_ft.engines.initial_weights import load
from elastic_ft.engines.native import state_tensor
from elastic_ft.engines.pipeline import check_pipeline, cut
from elastic_ft.engines.tensor_parallel import check_stages_cut_alike
from elastic_ft.errors import ConfigError
from elastic_ft.models.build import build_model
from elastic_ft.storage.safetensors import open_folder

pytest.importorskip("transformers")

VOCABULARY = 31
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": VOCABULARY,
}
TIED = {"tie_word_embeddings": True}
GEMMA = {"model_type": "gemma2", "head_dim": 4, "query_pre_attn_scalar": 4, "sliding_window": 3}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama tied": {"model_type": "llama", **TIED},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 3},
    "qwen3": {"model_type": "qwen3", "head_dim": 4},
    "gemma2, tied, with capped logits": GEMMA | {"final_logit_softcapping": 0.01},
    "gpt_neox": {"model_type": "gpt_neox", "num_key_value_heads": None},
    "mixtral": {"model_type": "mixtral", **EXPERTS},
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 4, "moe_intermediate_size": 8}
    | {"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [1]},
    "deepseek_v3": {"model_type": "deepseek_v3", "num_key_value_heads": 4, "n_shared_experts": 1}
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "v_head_dim": 4}
    | {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4},
}


def make(config: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    given = {key: value for key, value in (SIZES | config).items() if value is not None}
    return build_model(ModelConfig(transformers=given), vocab_size=None, sequence_length=8)


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def in_a_row(stages: dict[int, Any], x: Tensor, **more: Tensor) -> Tensor:
    for _, stage in sorted(stages.items()):
        x = stage(x, **more)
    return x


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("name", MODELS)
def test_stages_in_a_row_are_the_model(name: str, schedule: str) -> None:
    whole, x = make(MODELS[name]), tokens(2, 8)
    check_pipeline(whole, 2, schedule)
    stages = {n: stage for rank in range(2) for n, stage in cut(whole, rank, 2, schedule).items()}
    mask, places = torch.ones_like(x), torch.arange(8).expand(2, 8)
    mask[0, :3] = 0
    for more in ({}, {"attention_mask": mask}, {"position_ids": (places - 5) % 8}):
        assert torch.equal(in_a_row(stages, x, **more), whole(x, **more).logits), more.keys()
    found = [
        stage.known_as.get(name, name)
        for stage in stages.values()
        for name, _ in stage.named_parameters()
    ]
    known = dict(whole.named_parameters())
    assert set(found) == known.keys()
    assert len(found) == len(dict(whole.named_parameters(remove_duplicate=False)))


def test_stages_are_copies_with_buffers_of_their_own() -> None:
    """A rank may have two of them, and allocates both."""
    with torch.device("meta"):
        whole = make(MODELS["llama tied"])
    stages = cut(whole, 0, 2, "zero_bubble")
    for stage in stages.values():
        stage.to_empty(device="cpu")
    first, last = (dict(stage.named_buffers()) for stage in stages.values())
    (name,) = {n for n in first if n.endswith("rotary_emb.inv_freq")}
    assert first[name] is not last[name] and whole.get_buffer(name).is_meta
    assert not stages[3].eval()._pruned[0].training
    assert all(stage.known_as == stages[0].known_as != {} for stage in stages.values())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_reads_its_own_bytes_alone(tmp_path: Path, rank: int) -> None:
    whole: Any = make(MODELS["llama tied"])
    whole.save_pretrained(tmp_path, max_shard_size="10KB")
    with torch.device("meta"):
        skeleton = make(MODELS["llama tied"])
    (stage,) = cut(skeleton, rank, 2, "1f1b").values()
    stage.to_empty(device="cpu")
    own = {stage.known_as.get(name, name): p for name, p in stage.named_parameters()}
    state = {f"model.{name}": state_tensor(parameter) for name, parameter in own.items()}
    nbytes, _ = load(open_folder(str(tmp_path)), skeleton, state)
    assert (
        nbytes
        == sum(p.nbytes for p in own.values())
        < 0.7 * sum(p.nbytes for p in whole.parameters())
    )
    assert all(torch.equal(p, whole.get_parameter(name)) for name, p in own.items())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "without a plan": (
        {"model_type": "gpt2", "num_key_value_heads": None, "intermediate_size": None},
        "with a plan for pipelines (pp_plan), which GPT2LMHeadModel has not",
    ),
    "that scales what it is given": (
        {"model_type": "granite", "embedding_multiplier": 2.0},
        "GraniteForCausalLM can't be cut between its layers: without them it does not pass on",
    ),
    "whose routers share a loss": (
        MODELS["mixtral"] | {"output_router_logits": True},
        "model.transformers.output_router_logits: the routers' loss is of all layers",
    ),
    "that drops": (
        {"model_type": "llama", "attention_dropout": 0.1},
        "model.layers.0.self_attn.attention_dropout is 0.1, and ranks of a pipeline",
    ),
    "whose routers draw noise": (
        MODELS["mixtral"] | {"router_jitter_noise": 0.1},
        "model.layers.0.mlp.jitter_noise is 0.1, and ranks of a pipeline",
    ),
    "that is too shallow": ({"model_type": "llama"}, "need 6 stages, the model has 5 layers"),
}


@pytest.mark.parametrize(("config", "problem"), REFUSED.values(), ids=REFUSED)
def test_models_are_refused_before_anything_starts(config: dict[str, Any], problem: str) -> None:
    with torch.device("meta"):
        model = make(config)
        with pytest.raises(ConfigError) as caught:
            check_pipeline(model, 3, "zero_bubble")
    assert str(caught.value).startswith("parallel.pp: ")
    assert problem in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("shared", "problem"),
    [
        (
            True,
            r"model\.layers\.0\.mlp\.\w+\.weight and model\.layers\.3\.mlp\.\w+\.weight are one",
        ),
        (False, r"no stage would have model\.scale, which pp_plan leaves out"),
    ],
)
def test_what_is_in_no_stage_or_in_two_is_refused(shared: bool, problem: str) -> None:
    whole: Any = make(MODELS["llama"])
    if shared:
        whole.model.layers[3].mlp = whole.model.layers[0].mlp
    else:
        whole.model.register_parameter("scale", nn.Parameter(torch.ones(16)))
    with pytest.raises(ConfigError, match=problem):
        check_pipeline(whole, 2, "1f1b")


GIVEN: Any = {}


def test_plans_cut_both_ends_of_a_tied_model_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = f"{__name__}:GIVEN"
    with torch.device("meta"):
        tied, untied = make(MODELS["llama tied"]), make(MODELS["llama"])
    check_stages_cut_alike(tied, None)
    monkeypatch.setattr(f"{__name__}.GIVEN", {"lm_head": "colwise_gather_output"})
    check_stages_cut_alike(untied, plan)
    with pytest.raises(ConfigError, match=r"cuts the tied model\.embed_tokens and lm_head diff"):
        check_stages_cut_alike(tied, plan)
    monkeypatch.setattr(f"{__name__}.GIVEN", lambda model, mesh: None)
    with pytest.raises(ConfigError, match=r"parallel.tp_plan: .* cuts whole models; with pp give"):
        check_stages_cut_alike(untied, plan)


class Broken(nn.Module):
    def forward(self, tensor: Tensor) -> Tensor:
        raise ConnectionError("a peer is gone")


def test_a_loss_does_not_print_the_whole_schedule(caplog: pytest.LogCaptureFixture) -> None:
    """torch would, on each rank: a line for every message and micro-batch."""
    with torch.device("meta"):
        check_pipeline(make(MODELS["llama"]), 2, "1f1b")  # as a worker does before it is ready
    logging.getLogger(pipelining.schedules.__name__).addHandler(caplog.handler)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        like = {"input_args": (torch.zeros(1, 2),), "output_args": (torch.zeros(1, 2),)}
        stages = [
            pipelining.PipelineStage(part, number, 2, torch.device("cpu"), **like)
            for number, part in enumerate((nn.Linear(2, 2), Broken()))
        ]
        schedule = pipelining.ScheduleInterleaved1F1B(stages, 2, loss_fn=lambda out, _: out.sum())
        with pytest.raises(RuntimeError) as caught:
            schedule.step(torch.zeros(2, 2), target=torch.zeros(2, 2))
    finally:
        dist.destroy_process_group()
        logging.getLogger(pipelining.schedules.__name__).removeHandler(caplog.handler)
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert not caplog.records
