"""Hugging Face's trainer, stopped early, with the best model in the end.

Arguments: a folder for what it tells, where a file "gate" holds it back; "stock", "elastic", or
"apart": each process sees exports of its own alone.
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
import transformers
from transformers import BertConfig, BertForTokenClassification, EarlyStoppingCallback

from tests.multiproc import tiny

OUT, KIND = Path(sys.argv[1]), sys.argv[2]
BATCH = 16


class Noise(torch.utils.data.Dataset):
    """Labels that have nothing to do with what is labelled: learning them makes it worse."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed + index)
        ids, labels = torch.randint(0, 32, (2, 12), generator=generator)
        return {"input_ids": ids, "labels": labels % 3}


def right(predicted):
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


exported = OUT / "exported"
if KIND == "apart":
    exported = OUT / f"{os.getpid()}" / "exported"
    exported.mkdir(parents=True)
    os.chdir(exported.parent)
    exported = Path("exported")
arguments = transformers.TrainingArguments(
    str(exported),
    max_steps=40,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=BATCH // 2,
    learning_rate=2e-2,
    eval_strategy="steps",
    eval_steps=2,
    save_strategy="steps",
    save_steps=2,
    load_best_model_at_end=True,
    metric_for_best_model="loss",
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
)
torch.manual_seed(5)
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
config = BertConfig(vocab_size=32, num_hidden_layers=1, num_labels=3, **sizes, **dropout)
model = BertForTokenClassification(config)
kind = transformers.Trainer
if KIND != "stock":
    from elastic_ft.transformers import Trainer as kind
trainer = kind(
    model,
    arguments,
    train_dataset=tiny.Gated(Noise(96, 0), OUT / "gate"),
    eval_dataset=Noise(32, 10_000),
    compute_metrics=right,
    callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
)
trainer.train()
with torch.no_grad():
    total = float(sum(p.double().abs().sum() for p in model.parameters()))
best = Path(trainer.state.best_model_checkpoint).name
line = {"last": trainer.state.global_step, "best": best, "total": total}
line["loss"] = trainer.evaluate()["eval_loss"]
with (OUT / f"{os.getpid()}.jsonl").open("a") as told:
    told.write(json.dumps(line) + "\n")
