"""Which fields of ``TrainingArguments`` are refused, by name.

docs/hugging-face.md has every field of the tested version: honoured, refused, or without effect.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

from elastic_ft.errors import ConfigError
from elastic_ft.training.given import quantised_by

_JOB = "say it in the job: "
# By name: why, and what else; refused where the value is not the default.
REFUSED = {
    "fp16": "a step that overflows is not told apart here: use bf16",
    "fp16_full_eval": "evaluation would change the weights that are trained: use bf16",
    "bf16_full_eval": "evaluation would change the weights that are trained: use bf16",
    "torch_compile": "it has not been tested with forwards that are routed: compile the model's "
    "blocks yourself",
    "torch_compile_backend": "see torch_compile",
    "torch_compile_mode": "see torch_compile",
    "auto_find_batch_size": "the global batch is constant",
    "enable_jit_checkpoint": "a preempted worker costs no step",
    "eval_use_gather_object": "predictions are gathered as tensors",
    "batch_eval_metrics": "compute_metrics would see batches again where the world breaks",
    "push_to_hub": "upload what was exported, once it is complete",
    "full_determinism": "set it for torch in the script, before training",
    "accelerator_config": "Accelerate is told of one process, and nothing else",
    "parallelism_config": _JOB + "parallel",
    "dataloader_drop_last": "a batch goes on into the next epoch: nothing is dropped",
    "fsdp": _JOB + "parallel: {strategy: fsdp}",
    "fsdp_config": _JOB + "parallel: {strategy: fsdp}",
    "deepspeed": _JOB + "parallel",
    "resume_from_checkpoint": "the job goes on from its own checkpoints",
}
SAMPLING = ("random", "sequential")
LAYERWISE = ("lomo", "adalomo")  # these update weights in the backward


def check_arguments(arguments: TrainingArguments) -> None:
    """Raises ConfigError, one line, for the first field that can't be honoured."""
    for field in fields(arguments):
        if field.name in REFUSED and not _is_default(arguments, field):
            value = getattr(arguments, field.name)
            raise ConfigError(
                f"TrainingArguments.{field.name}: {_said(value)} is refused: {REFUSED[field.name]}"
            )
    if arguments.train_sampling_strategy not in SAMPLING:
        raise ConfigError(
            f"TrainingArguments.train_sampling_strategy: {arguments.train_sampling_strategy} is "
            f"refused: expected one of {', '.join(SAMPLING)}"
        )
    optimizer = str(getattr(arguments.optim, "value", arguments.optim))
    if "layerwise" in optimizer or optimizer in LAYERWISE:
        raise ConfigError(
            f"TrainingArguments.optim: {optimizer} is refused: it updates weights before all ranks "
            "have agreed on the step"
        )
    scheduler = str(getattr(arguments.lr_scheduler_type, "value", arguments.lr_scheduler_type))
    if scheduler in ("reduce_lr_on_plateau", "greedy"):
        raise ConfigError(
            f"TrainingArguments.lr_scheduler_type: {scheduler} is refused: the rate is to be a "
            "function of the step"
        )


def check_best(arguments: TrainingArguments, strategy: str) -> None:
    """Raises ConfigError where the best weights can't be loaded."""
    if arguments.load_best_model_at_end and strategy != "ddp":
        raise ConfigError(
            f"TrainingArguments.load_best_model_at_end: True is refused with {strategy}: the model "
            "is cut: load what trainer.state.best_model_checkpoint has into another one"
        )


def check_model(model: Any) -> None:
    """Raises ConfigError for weights that are no plain tensors: they can't be cut or compared."""
    method = quantised_by(model)
    if method is not None:
        raise ConfigError(
            f"Trainer: model: quantised by {method}, which is refused: its weights are packed: "
            "load the base in bfloat16 and train a LoRA on it"
        )


def _said(value: Any) -> str:
    return str(value) if isinstance(value, (bool, int, float, str)) else type(value).__name__


def _is_default(arguments: TrainingArguments, field: Any) -> bool:
    value = getattr(arguments, field.name)
    if field.name == "accelerator_config":
        return value is None or bool(value == AcceleratorConfig())
    if field.name in ("fsdp_config", "fsdp", "deepspeed", "torch_compile_backend"):
        return not value or not any(_plain(value).values() if _plain(value) else [value])
    if field.default_factory is not MISSING:
        return bool(value == field.default_factory())
    return bool(value == field.default)


def _plain(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    return dict(value.to_dict()) if hasattr(value, "to_dict") else {}


def sizes(arguments: TrainingArguments, global_batch_size: int | None) -> tuple[int, int]:
    """(global batch, micro-batch) in samples. Raises ConfigError."""
    micro, steps = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
    total = micro * steps if global_batch_size is None else global_batch_size
    if total < 1 or total % micro:
        raise ConfigError(
            f"global_batch_size: {total} is no multiple of per_device_train_batch_size, {micro}"
        )
    if steps not in (1, total // micro):
        raise ConfigError(
            f"TrainingArguments.gradient_accumulation_steps: {steps} is refused beside "
            f"global_batch_size {total}: how often gradients add up is a matter of the world; "
            "leave it out"
        )
    return total, micro


def on_device(arguments: TrainingArguments, device: torch.device) -> None:
    """``arguments.device`` is ``device``, one of possibly many. Raises ConfigError."""
    if arguments.world_size != 1:
        raise ConfigError(
            f"Trainer: Accelerate found a world of {arguments.world_size} in the environment: "
            "leave RANK, WORLD_SIZE and its own launcher to elastic-ft launch"
        )
    arguments.__dict__["_setup_devices"] = device  # a cached property, set up for one process
    arguments.distributed_state.device = device
    arguments._n_gpu = 1 if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.set_device(device)


def ranked(arguments: TrainingArguments, rank: int) -> None:
    """Who writes, prints and logs, for all that asks Accelerate's state."""
    state = arguments.distributed_state
    state.process_index = state.local_process_index = rank
