"""What the planner needs to know of a job: its model in numbers, its precision, its limits."""

from __future__ import annotations

import dataclasses
from typing import Any

from elastic_ft.config import Job
from elastic_ft.core.costs import ModelShape, Work
from elastic_ft.errors import ConfigError, ModelError
from elastic_ft.models.decoder import PRESETS, DecoderConfig


def describe_decoder(config: DecoderConfig, sequence_length: int) -> ModelShape:
    """Returns the sizes of a built-in decoder, trained on ``sequence_length`` tokens."""
    kv_dim = config.n_kv_heads * config.head_dim
    block = 2 * config.dim * (config.dim + kv_dim) + 3 * config.dim * config.ffn_dim
    whole = config.vocab_size * config.dim
    return ModelShape(
        layers=config.n_layers,
        dim=config.dim,
        heads=config.n_heads,
        kv_heads=config.n_kv_heads,
        ffn_dim=config.ffn_dim,
        vocabulary=config.vocab_size,
        sequence_length=sequence_length,
        block_parameters=block + 2 * config.dim,
        embedding_parameters=whole,
        output_parameters=config.dim + (0 if config.tie_embeddings else whole),
    )


def describe_job(job: Job) -> Work:
    """Returns the work of one step. Opens no data: the vocabulary is the job file's.

    Knows presets, and transformers models with Llama's names of sizes. Raises UsageError.
    """
    adam = job.optimizer.name in ("adamw", "adam")
    if not adam and job.optimizer.name != "sgd":
        raise ConfigError(
            f"optimizer.name: the planner knows adamw, adam and sgd, found {job.optimizer.name!r}"
        )
    momentum = 4 if job.optimizer.kwargs.get("momentum") else 0
    return Work(
        model=describe_decoder(_decoder(job), job.data.sequence_length),
        global_batch=job.batch.global_batch_size,
        compute_bytes=4 if job.precision.dtype == "fp32" else 2,
        optimizer_bytes=8 if adam else momentum,
        gathers_once=not job.parallel.reshard_after_backward,
        reduces_once=job.parallel.reduce_gradients == "step",
    )


def _decoder(job: Job) -> DecoderConfig:
    model, data = job.model, job.data
    trained = data.vocab_size if data.tokenizer is None and data.format != "tokens" else None
    if model.preset is not None:
        if model.preset not in PRESETS:
            known = ", ".join(PRESETS)
            raise ModelError(f"model.preset: expected one of {known}; found {model.preset!r}")
        given: dict[str, Any] = {} if trained is None else {"vocab_size": trained}
        return _checked(
            "model.kwargs", {**dataclasses.asdict(PRESETS[model.preset]), **given, **model.kwargs}
        )
    if model.transformers is not None:
        return _of_transformers(model.transformers, trained, data.sequence_length)
    raise ModelError(
        "model.path: the planner knows presets and transformers models, not a callable"
    )


def _of_transformers(values: dict[str, Any], trained: int | None, length: int) -> DecoderConfig:
    """By Llama's names, which most decoders share."""
    names = {
        "n_layers": "num_hidden_layers",
        "dim": "hidden_size",
        "n_heads": "num_attention_heads",
        "ffn_dim": "intermediate_size",
    }
    for name in names.values():
        if name not in values:
            raise ModelError(
                f"model.transformers.{name}: the planner needs it, and it is not given"
            )
    sizes = {ours: values[theirs] for ours, theirs in names.items()}
    sizes["n_kv_heads"] = values.get("num_key_value_heads", sizes["n_heads"])
    sizes["vocab_size"] = values.get("vocab_size", trained)
    if sizes["vocab_size"] is None:
        raise ModelError("model.transformers.vocab_size: the planner needs it, and it is not given")
    sizes["tie_embeddings"] = bool(values.get("tie_word_embeddings", False))
    return _checked("model.transformers", sizes | {"max_sequence_length": length})


def _checked(key: str, sizes: dict[str, Any]) -> DecoderConfig:
    try:
        return DecoderConfig(**sizes)
    except (TypeError, ValueError) as error:
        raise ModelError(f"{key}: {error}") from None
