"""In the style of Hugging Face's examples of causal language models: arguments, Trainer, save."""

from pathlib import Path

import torch
import transformers
from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from elastic_ft.transformers import Trainer


class Counting(torch.utils.data.Dataset):
    """Numbers that go up by one, from anywhere."""

    def __len__(self):
        return 2000

    def __getitem__(self, index):
        ids = (torch.arange(16) + index) % 24
        return {"input_ids": ids, "labels": ids}


def main():
    (training_args,) = transformers.HfArgumentParser(
        TrainingArguments
    ).parse_args_into_dataclasses()
    last_checkpoint = None
    if Path(training_args.output_dir).is_dir():
        last_checkpoint = get_last_checkpoint(training_args.output_dir)
    torch.manual_seed(training_args.seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=24, num_hidden_layers=2, **sizes)
    trainer = Trainer(
        model=transformers.AutoModelForCausalLM.from_config(config),
        args=training_args,
        global_batch_size=24,
        train_dataset=Counting(),
    )
    result = trainer.train(resume_from_checkpoint=last_checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)


if __name__ == "__main__":
    main()
