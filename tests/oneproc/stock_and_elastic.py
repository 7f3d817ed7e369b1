"""Trains with the stock trainer and with ours, by the same arguments, and prints what each logged.

    python stock_and_elastic.py FOLDER CASE...

Each of them is in a process of its own, forked once everything is imported.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    LlamaConfig,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from elastic_ft.transformers import ElasticMixin, Trainer

STEPS = 18
CASES: dict[str, dict[str, Any]] = {
    "epochs": {"max_steps": -1, "num_train_epochs": 2, "eval_strategy": "epoch"},
    "smoothed": {"label_smoothing_factor": 0.1, "logging_steps": 4, "logging_first_step": True},
    "bf16": {"bf16": True, "gradient_checkpointing": True},
    "sequential": {
        "train_sampling_strategy": "sequential",
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0,
    },
    "evaluated": {
        "eval_strategy": "steps",
        "eval_steps": 6,
        "eval_on_start": True,
        "per_device_eval_batch_size": 3,
        "weight_decay": 0.1,
        "metric_for_best_model": "right",
    },
    "one_micro_batch": {
        "lr_scheduler_type": "linear",
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "optim": "adafactor",
        "include_num_input_tokens_seen": "all",
    },
    "noisy": {"neftune_noise_alpha": 5.0, "adam_beta2": 0.95, "data_seed": 7},
    "sft_lora": {"eval_strategy": "steps", "eval_steps": 9},
    "saved": {"save_strategy": "steps", "save_steps": 6, "save_total_limit": 2},
}
COMMON: dict[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "seed": 1,
    "disable_tqdm": True,
}
TIMES = ("runtime", "per_second", "preparation_time")  # what no two runs have alike


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    made, generator = [], torch.Generator().manual_seed(3)
    for index in range(count):
        ids = torch.randint(0, 128, (24,), generator=generator) % (index % 9 + 3)
        labels = ids.clone()
        labels[: index % 12] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def right(predicted: Any) -> dict[str, float]:
    return {"right": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


def arguments(folder: str, case: str) -> TrainingArguments:
    return TrainingArguments(folder, **COMMON | CASES[case])


def fine_tuned(kind: type[transformers.Trainer], folder: str, case: str) -> Any:
    """TRL's trainer with LoRA, as the stock one or as ours."""
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models
    from trl import SFTConfig, SFTTrainer

    class Elastic(ElasticMixin, SFTTrainer):
        pass

    values = arguments(folder, case).to_dict()
    kept = {k: values[k] for k in (*COMMON, "eval_strategy", "eval_steps")}
    made = Tokenizer(models.WordLevel({f"t{i}": i for i in range(128)}, unk_token="t0"))
    return (SFTTrainer if kind is transformers.Trainer else Elastic)(
        model(),
        SFTConfig(folder, dataset_kwargs={"skip_prepare_dataset": True}, bf16=False, **kept),
        train_dataset=Dataset.from_list([{k: v.tolist() for k, v in r.items()} for r in rows(80)]),
        eval_dataset=Dataset.from_list([{k: v.tolist() for k, v in r.items()} for r in rows(13)]),
        processing_class=transformers.PreTrainedTokenizerFast(
            tokenizer_object=made, pad_token="t126", eos_token="t127"
        ),
        peft_config=LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]),
    )


def model() -> transformers.PreTrainedModel:
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=128,
        max_position_embeddings=64,
        attention_dropout=0.1,
    )
    return AutoModelForCausalLM.from_config(config)


def plain(kind: type[transformers.Trainer], folder: str, case: str) -> Any:
    evaluated = "eval_strategy" in CASES[case]
    return kind(
        model(),
        arguments(folder, case),
        train_dataset=rows(80),
        eval_dataset=rows(13) if evaluated else None,
        data_collator=default_data_collator,
        compute_metrics=right if evaluated else None,
        callbacks=[EarlyStoppingCallback(9)] if "metric_for_best_model" in CASES[case] else None,
    )


def trained(kind: type[transformers.Trainer], folder: str, case: str) -> list[dict[str, Any]]:
    set_seed(0)
    trainer = (fine_tuned if case == "sft_lora" else plain)(kind, folder, case)
    trainer.train()
    logged = trainer.state.log_history
    return [{k: v for k, v in e.items() if not any(t in k for t in TIMES)} for e in logged]


def in_child(kind: type[transformers.Trainer], folder: Path, case: str) -> None:
    name = "stock" if kind is transformers.Trainer else "elastic"
    out = folder / f"{case}-{name}"
    out.mkdir()
    child = os.fork()
    if child == 0:
        try:
            os.chdir(out)
            for stream in (1, 2):
                os.dup2(os.open("said", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
            logged = trained(kind, "out", case)
            (out / "logged.json").write_text(json.dumps(logged))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # or each collection in a child looks at all that is imported
    for wanted in sys.argv[2:]:
        for trainer_class in (transformers.Trainer, Trainer):
            in_child(trainer_class, Path(sys.argv[1]).resolve(), wanted)
