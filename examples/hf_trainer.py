"""Hugging Face's Trainer, of which a job survives the loss of workers.

    elastic-ft launch --processes --workers 3 examples/hf_trainer.py
    python examples/hf_trainer.py          # alone: the same training, a world of one

It differs from a script of the stock trainer in one import, and in ``global_batch_size``, which is
what a step takes whatever the world. Nothing is downloaded: a small model learns to add.
"""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, TrainingArguments

from elastic_ft.transformers import Trainer

DIGITS, PLUS, EQUALS = 10, 10, 11  # tokens: 0..9, and these two


class Sums(torch.utils.data.Dataset):
    """``a + b = c`` with numbers of two digits; the answer alone is a target."""

    def __init__(self, first: int, last: int) -> None:
        self.range = range(first, last)

    def __len__(self) -> int:
        return len(self.range)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        a, b = divmod(self.range[index] * 37 % 10_000, 100)
        digits = [*divmod(a, 10), PLUS, *divmod(b, 10), EQUALS]
        answer = [(a + b) // 100, (a + b) // 10 % 10, (a + b) % 10]
        ids = torch.tensor(digits + answer)
        labels = torch.tensor([-100] * len(digits) + answer)
        return {"input_ids": ids, "labels": labels}


def right(predicted) -> dict[str, float]:
    """How many digits of the answers are right."""
    found, wanted = predicted.predictions.argmax(-1)[:, :-1], predicted.label_ids[:, 1:]
    return {"right": float((found == wanted)[wanted != -100].mean())}


config = LlamaConfig(
    vocab_size=12,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=16,
)
torch.manual_seed(0)
trainer = Trainer(
    AutoModelForCausalLM.from_config(config),
    TrainingArguments(
        "runs/hf-trainer-exports",
        max_steps=60,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=5,
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=20,
        save_strategy="steps",
        save_steps=30,
        report_to="none",
        disable_tqdm=True,
    ),
    global_batch_size=48,
    train_dataset=Sums(0, 9_600),
    eval_dataset=Sums(9_600, 10_000),
    compute_metrics=right,
)
trainer.train()
