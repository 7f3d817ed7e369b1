"""Models of transformers: their own losses, and their configurations as they are on the Hub."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from elastic_ft.config import ModelConfig, parse_job
from elastic_ft.core.layouts.work import ModelShape
from elastic_ft.errors import ModelError
from elastic_ft.models import build_model, loss_sum
from elastic_ft.models.build import known_settings
from elastic_ft.models.describe import describe_job

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_local_experts": 4, "output_router_logits": True}
SOME = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen3": SIZES | {"head_dim": 16},
    "mixtral": SIZES | EXPERTS,
    "mixtral, no aux loss": SIZES | EXPERTS | {"output_router_logits": False},
    "qwen3_moe": SIZES | SOME | {"output_router_logits": True, "router_aux_loss_coef": 0.5},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64},
}
STEPS = 5

# As they are on the Hub, but for the numbers of layers.
ON_THE_HUB: dict[str, dict[str, Any]] = {
    "llama 3": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 2,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0.dev0",
        "use_cache": True,
        "vocab_size": 128256,
    },
    "qwen 3": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "max_window_layers": 36,
        "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_hidden_layers": 2,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen 3 with experts": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "head_dim": 128,  # which transformers' own configuration has not
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "torch_dtype": "bfloat16",
        "vocab_size": 151936,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mixtral",
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.36.0.dev0",
        "use_cache": True,
        "vocab_size": 32000,
    },
    "gpt 2": {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 2,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    },
}


def build(values: dict[str, Any], vocab_size: int = 64) -> nn.Module:
    config = ModelConfig(transformers=values)
    return build_model(config, vocab_size=vocab_size, sequence_length=16)


def build_on_meta(values: dict[str, Any]) -> Any:
    with torch.device("meta"):
        return build(values)


def micro_batches() -> list[torch.Tensor]:
    """Of one step, uneven."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 64, (rows, 17), generator=generator) for rows in (2, 1)]


def with_its_own_loss(model: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, int]:
    labels = tokens[:, 1:].contiguous()
    inputs = tokens[:, :-1]
    loss = model(input_ids=inputs, labels=inputs, shift_labels=labels).loss
    return loss * labels.numel(), labels.numel()


def with_ours(model: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, int]:
    total, count = loss_sum(model, {"tokens": tokens})
    return total, int(count)


@pytest.mark.parametrize("name", MODELS)
def test_trains_by_its_own_loss(name: str) -> None:
    """Some steps of AdamW, losses and parameters: nothing of the loss is left out."""
    values = MODELS[name] | {"model_type": name.partition(",")[0]}
    ends = []
    for loss_of in (with_its_own_loss, with_ours):
        torch.manual_seed(0)
        model = build(values)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(STEPS):
            torch.manual_seed(step)  # of dropout
            parts = [loss_of(model, tokens) for tokens in micro_batches()]
            loss = sum(total for total, _ in parts) / sum(count for _, count in parts)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        ends.append((losses, [p.detach() for p in model.parameters()]))
    (expected, theirs), (found, ours) = ends
    assert found == pytest.approx(expected, rel=1e-6)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)


def test_a_held_out_loss_is_of_the_tokens_alone() -> None:
    model = build(MODELS["mixtral"] | {"model_type": "mixtral"}).eval()
    plain = build(MODELS["mixtral, no aux loss"] | {"model_type": "mixtral"}).eval()
    plain.load_state_dict(model.state_dict())
    tokens, _ = micro_batches()
    assert with_ours(model, tokens)[0].item() == with_ours(plain, tokens)[0].item()


class Routed(nn.Module):
    """Returns a router's loss, and nowhere says how much it counts."""

    def forward(self, tokens: torch.Tensor) -> Any:
        class Output:
            logits = torch.zeros(*tokens.shape, 64)
            aux_loss = torch.ones(())

        return Output()


def test_a_router_loss_without_a_coefficient_is_refused() -> None:
    with pytest.raises(ModelError, match=r"Routed returned an aux_loss, .*router_aux_loss_coef"):
        loss_sum(Routed(), {"tokens": micro_batches()[0]})


@pytest.mark.parametrize("name", ON_THE_HUB)
def test_a_configuration_is_pasted_whole(name: str) -> None:
    values = ON_THE_HUB[name]
    model = build_on_meta(values | {"auto_map": {"AutoConfig": "configuration_its_own.Its"}})
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config.use_cache is False
    if "head_dim" in values:
        attention = model.model.layers[0].self_attn
        assert len(attention.q_proj.weight) == values["head_dim"] * values["num_attention_heads"]
        assert known_settings(values, "model.pretrained")["head_dim"] == values["head_dim"]
    if "rope_theta" in values:
        assert model.config.rope_parameters["rope_theta"] == values["rope_theta"]
    if scaling := values.get("rope_scaling"):
        assert model.config.rope_parameters.items() >= scaling.items()


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_parameters_are_float32_whatever_is_pasted(key: str) -> None:
    values = MODELS["llama"] | {"model_type": "llama", key: "bfloat16"}
    assert {p.dtype for p in build(values).parameters()} == {torch.float32}


def test_unknown_keys_are_still_refused() -> None:
    for key in ("n_layer", "rope_thta", "quantization_config"):
        with pytest.raises(ModelError, match=f"model.transformers.{key}: unknown key for llama"):
            build_on_meta(MODELS["llama"] | {"model_type": "llama", key: 1})
    with pytest.raises(ModelError, match=r"model\.transformers\.head_dim: unknown key for gpt2"):
        build_on_meta(ON_THE_HUB["gpt 2"] | {"head_dim": 32})


def half() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16))


def half_frozen() -> nn.Module:
    model = half()
    model[1].requires_grad_(False)
    return model


def test_trained_parameters_in_half_precision_are_refused() -> None:
    def build_own(name: str) -> nn.Module:
        config = ModelConfig(path=f"{__name__}:{name}")
        return build_model(config, vocab_size=None, sequence_length=None)

    expected = r"model.path: 1.weight is torch.bfloat16: .* precision.dtype"
    with pytest.raises(ModelError, match=expected):
        build_own("half")
    build_own("half_frozen")


# -------------------------------------------------------------------------------- the planner's


def shape_of(values: dict[str, Any]) -> ModelShape:
    job = {
        "name": "planned",
        "steps": 1,
        "model": {"transformers": values},
        "data": {"url": "stdlib:", "sequence_length": 128, "vocab_size": 300},
    }
    return describe_job(parse_job(job)).model


@pytest.mark.parametrize("name", ON_THE_HUB)
def test_the_planner_counts_every_parameter(name: str) -> None:
    values = ON_THE_HUB[name]
    shape, model = shape_of(values), build_on_meta(values)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.layers == 2


def test_heads_may_be_wider_than_the_model() -> None:
    """Qwen3's are: 16 of 128 for a width of 1024."""
    wide = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    values = ON_THE_HUB["qwen 3"] | {"hidden_size": 1024} | wide
    shape, model = shape_of(values), build_on_meta(values)
    attention = model.get_submodule("model.layers.0.self_attn")
    assert shape.q_dim == attention.get_submodule("q_proj").out_features == 2048
    assert shape.kv_dim == attention.get_submodule("k_proj").out_features == 1024
    narrow = replace(shape, head_dim=0)
    assert (narrow.q_dim, narrow.kv_dim) == (1024, 512)
    assert shape.block_flops - narrow.block_flops == 2 * 128 * 128 * 1024


def test_a_token_goes_through_some_of_the_experts() -> None:
    shape = shape_of(ON_THE_HUB["mixtral"] | {"num_hidden_layers": 32})
    assert shape.parameters == pytest.approx(46.7e9, rel=0.01)
    ends = shape.embedding_parameters + shape.output_parameters
    active = shape.layers * shape.block_active_parameters + ends
    assert active == pytest.approx(12.9e9, rel=0.01)  # as its authors say
    assert shape.ffn_dim == 2 * 14336
    assert (shape.experts, shape.expert_parameters) == (8, 8 * 3 * 4096 * 14336)
    assert shape.experts_per_token == pytest.approx(2)
    dense = shape_of(ON_THE_HUB["llama 3"])
    assert dense.block_active_parameters == dense.block_parameters
    assert dense.experts == dense.expert_parameters == 0
    assert dense.block_flops < shape.block_flops < 2.1 * dense.block_flops
