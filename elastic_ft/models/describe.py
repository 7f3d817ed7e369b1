"""What the planner needs to know of a job: its model in numbers, its precision, its limits."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from elastic_ft.config import DataConfig, Job, ModelConfig
from elastic_ft.core.layouts.work import Compression, ModelShape, Work
from elastic_ft.core.policy import same_names
from elastic_ft.errors import ConfigError, ModelError
from elastic_ft.models.build import block_modules, build_model, preset_of
from elastic_ft.models.decoder import DecoderConfig
from elastic_ft.models.experts import MixtureConfig
from elastic_ft.models.foreign_experts import is_of_experts

# That must be given: transformers has defaults for each, which nobody means.
SIZES = (
    ("num_hidden_layers", "n_layer"),
    ("hidden_size", "n_embd"),
    ("num_attention_heads", "n_head"),
    ("intermediate_size", "moe_intermediate_size", "n_embd"),
    ("vocab_size",),
)


def describe_decoder(config: DecoderConfig, sequence_length: int) -> ModelShape:
    """Returns the sizes of a built-in decoder, trained on ``sequence_length`` tokens."""
    kv_dim, inner = config.n_kv_heads * config.head_dim, config.ffn_dim
    experts, expert, idle = 0, 0, 0
    block = 2 * config.dim * (config.dim + kv_dim) + 3 * config.dim * config.ffn_dim
    if isinstance(config, MixtureConfig):
        expert = 3 * config.dim * config.expert_ffn_dim
        experts = config.n_experts
        block += experts * (expert + config.dim)
        inner += config.experts_per_token * config.expert_ffn_dim
        idle = (config.n_experts - config.experts_per_token) * expert
    whole = config.vocab_size * config.dim
    return ModelShape(
        layers=config.n_layers,
        dim=config.dim,
        heads=config.n_heads,
        kv_heads=config.n_kv_heads,
        ffn_dim=inner,
        vocabulary=config.vocab_size,
        sequence_length=sequence_length,
        idle_parameters=idle,
        experts=experts,
        expert_parameters=experts * expert,
        block_parameters=block + 2 * config.dim,
        embedding_parameters=whole,
        output_parameters=config.dim + (0 if config.tie_embeddings else whole),
    )


def describe_job(job: Job) -> Work:
    """Returns the work of one step. Opens no data: the vocabulary is the job file's.

    Knows presets and transformers models. Raises UsageError.
    """
    # Muon: a momentum, and in its step a direction beside it.
    two_moments = job.optimizer.name in ("adamw", "adam", "muon", "schedule_free_adamw")
    one = job.optimizer.name == "schedule_free_sgd"
    if not two_moments and not one and job.optimizer.name != "sgd":
        raise ConfigError(
            "optimizer.name: the planner knows adamw, adam, sgd, muon, schedule_free_adamw and "
            f"schedule_free_sgd, found {job.optimizer.name!r}"
        )
    kept = 4 if one or job.optimizer.kwargs.get("momentum") else 0
    if two_moments:
        kept = 12 if job.optimizer.kwargs.get("amsgrad") else 8
    return Work(
        model=_shape(job),
        global_batch=job.batch.global_batch_size,
        compute_bytes=4 if job.precision.dtype == "fp32" else 2,
        optimizer_bytes=kept,
        gathers_once=not job.parallel.reshard_after_backward,
        reduces_once=job.parallel.reduce_gradients == "step",
        offloads=job.parallel.offload_activations,
        offloads_optimizer=job.optimizer.offload is not None,
        steps_in_place=not job.optimizer.is_schedule_free,
        compression=Compression(
            job.comm.compress_shards is not None,
            job.comm.compress_replicas,
            job.comm.powersgd_rank,
        ),
        **same_names(Work, job.parallel),
    )


def known_sizes(data: DataConfig) -> tuple[int | None, int | None]:
    """Vocabulary and longest sample, as far as they are known before data is read. Of a dataset by
    its path neither is: the configuration has defaults for what is tokenised here."""
    if data.url is None:
        return None, None
    told = data.tokenizer is None and data.format != "tokens"
    return data.vocab_size if told else None, data.sequence_length


def _shape(job: Job) -> ModelShape:
    model, data = job.model, job.data
    trained, longest = known_sizes(data)
    if model.preset is not None:
        given: dict[str, Any] = {} if trained is None else {"vocab_size": trained}
        sizes = _checked("model.kwargs", preset_of(model.preset), given | model.kwargs)
        return describe_decoder(sizes, data.sequence_length)
    if model.transformers is not None:
        values = model.transformers
        if data.url is None:
            values = {"vocab_size": data.vocab_size} | values
        return _of_transformers(values, trained, data.sequence_length, longest)
    raise ModelError(
        "model.path: the planner knows presets and transformers models, not a callable"
    )


def _of_transformers(
    values: dict[str, Any], trained: int | None, length: int, longest: int | None
) -> ModelShape:
    """Counted on the meta device; of experts, which a token goes through some of, too."""
    given = {"vocab_size": trained, **values}
    for names in SIZES:
        if not any(given.get(name) for name in names):
            raise ModelError(
                f"model.transformers.{names[0]}: the planner needs it, and it is not given"
            )
    with torch.device("meta"):
        model = build_model(
            ModelConfig(transformers=values), vocab_size=trained, sequence_length=longest
        )
    config: Any = model.config
    blocks = block_modules(model)
    in_blocks = sum(map(_numel, blocks))
    embedding = model.get_input_embeddings().weight.numel()  # type: ignore[operator, union-attr]
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    per_token = getattr(config, "num_experts_per_tok", None)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    idle = 0
    if per_token and experts:
        inner = per_token * (getattr(config, "moe_intermediate_size", None) or inner)
        idle = round(sum(map(_of_experts, blocks)) * (1 - per_token / experts))
    can_share = bool(per_token and experts)
    shared = [m for m in model.modules() if is_of_experts(m)] if can_share else []
    return ModelShape(
        layers=len(blocks),
        dim=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        ffn_dim=inner,
        vocabulary=config.vocab_size,
        sequence_length=length,
        block_parameters=in_blocks // len(blocks),
        embedding_parameters=embedding,
        output_parameters=_numel(model) - in_blocks - embedding,
        gated=any("gate" in name for name, _ in blocks[0].named_parameters()),
        idle_parameters=idle // len(blocks),
        experts=experts if shared else 0,
        expert_parameters=sum(map(_numel, shared)) // len(blocks),
        head_dim=getattr(config, "head_dim", None) or 0,
    )


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _of_experts(block: nn.Module) -> int:
    named = block.named_parameters()
    return sum(parameter.numel() for name, parameter in named if ".experts." in name)


def _checked(key: str, preset: DecoderConfig, sizes: dict[str, Any]) -> DecoderConfig:
    try:
        return dataclasses.replace(preset, **sizes)
    except (TypeError, ValueError) as error:
        raise ModelError(f"{key}: {error}") from None
