"""Hugging Face's trainer, as a user would write it, that tells what it saw.

Arguments: a folder for what it tells, where a file "gate" holds it back; which trainer; where
rank 1 kills itself, once: "evaluation" or "callback".
"""

import json
import os
import signal
import sys
from collections import defaultdict
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, TrainerCallback, TrainingArguments

from elastic_ft.transformers import ElasticMixin
from tests.multiproc import tiny

OUT, KIND, DIES = Path(sys.argv[1]), sys.argv[2], [*sys.argv[3:], ""][0]
STEPS, BATCH = 12, 16


class Rows(torch.utils.data.Dataset):
    """Rows of one length, of which not all tokens are targets."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, 64, (12,), generator=generator) % (index % 9 + 3)
        labels = ids.clone()
        labels[: index % 7] = -100
        return {"input_ids": ids, "labels": labels}


class HeldOut(Rows):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index > 6:
            die("evaluation", 4)
        return super().__getitem__(index)


def die(where: str, step: int) -> None:
    if where == DIES and trainer.context.rank == 1 and trainer.state.global_step == step:
        try:
            (OUT / "died").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


class Telling(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        tell(step=state.global_step)
        die("callback", 5)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs or "eval_loss" in logs:
            kept = {k: v for k, v in logs.items() if "runtime" not in k and "second" not in k}
            tell(logged=kept, at=state.global_step, first=state.is_world_process_zero)


def tell(**line):
    with (OUT / f"{os.getpid()}.jsonl").open("a") as told:
        told.write(json.dumps(line) + "\n")


def right(predicted):
    return {"right": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


arguments = TrainingArguments(
    str(OUT / "exported"),
    max_steps=STEPS,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=BATCH // 2,
    learning_rate=3e-3,
    lr_scheduler_type="cosine",
    logging_steps=1,
    eval_strategy="steps",
    eval_steps=4,
    save_strategy="steps",
    save_steps=6,
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
)
torch.manual_seed(5)
model = AutoModelForCausalLM.from_config(
    LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=64,
    )
)


class Keeping:
    """Keeps values of micro-batches as TRL's trainers do, some of them not of each."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._total_train_tokens = 0

    def compute_loss(self, model, inputs, **kwargs):
        mode, tokens = "train" if model.training else "eval", inputs["input_ids"]
        first = self.accelerator.gather_for_metrics(tokens[:, :1].float())
        kept = self._metrics[mode]
        if mode == "eval":
            kept["rows"].append(len(first))
            return super().compute_loss(model, inputs, **kwargs)
        kept["first"].append(first.mean().item())
        if first.mean() > 3:
            kept["rare"] += [first.mean().item(), 1.0]
        self._total_train_tokens += tokens.numel()
        kept["num_tokens"] = [self._total_train_tokens]
        return super().compute_loss(model, inputs, **kwargs)

    def log(self, logs, *args, **kwargs):
        if self.model.training:
            kept = self._metrics["train"]
            logs.update({name: sum(values) / len(values) for name, values in kept.items()})
        else:
            kept = self._metrics["eval"]
            logs.update({f"eval_{name}": sum(values) for name, values in kept.items()})
        super().log(logs, *args, **kwargs)
        kept.clear()


class Stock(Keeping, transformers.Trainer):
    pass


class Elastic(ElasticMixin, Keeping, transformers.Trainer):
    pass


kind = Stock if KIND == "stock" else Elastic
trainer = kind(
    model,
    arguments,
    train_dataset=tiny.Gated(Rows(96), OUT / "gate"),
    eval_dataset=HeldOut(21),
    compute_metrics=right,
    callbacks=[Telling()],
)
trainer.train()
total = float(sum(p.double().abs().sum() for p in model.parameters()))
history = [entry for entry in trainer.state.log_history if "loss" in entry]
tell(after=total, losses=[entry["loss"] for entry in history])
