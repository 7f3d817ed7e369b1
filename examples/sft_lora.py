"""Supervised fine-tuning with TRL and LoRA, of which a job survives the loss of workers.

    elastic-ft launch --processes --workers 3 examples/sft_lora.py
    python examples/sft_lora.py          # alone: the same training, a world of one

It differs from a script of TRL's in the class that it trains with. The base's weights are frozen:
they are laid out, and given to who joins, but are in no snapshot and no checkpoint. Nothing is
downloaded: the model and its tokenizer are made here, small.
"""

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from elastic_ft.transformers import ElasticMixin

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> "
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }} <end>{% endgeneration %}"
    "{% else %}{{ m.content }} <end>{% endif %} {% endfor %}"
)


class ElasticSFTTrainer(ElasticMixin, SFTTrainer):
    """TRL's, in a world that changes."""


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<unk>", "<pad>", "<end>", "<user>", "<assistant>", "what", "follows", "then"]
    words += [f"w{number}" for number in range(56)]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="<end>",
        chat_template=TEMPLATE,
    )


def talk(number: int) -> dict:
    word = number * 31 % 56
    answer = " ".join(f"w{(word + step) % 56}" for step in range(1, 3 + number % 4))
    return {
        "messages": [
            {"role": "user", "content": f"what follows w{word}"},
            {"role": "assistant", "content": f"then {answer}"},
        ]
    }


torch.manual_seed(0)
words = tokenizer()
base = AutoModelForCausalLM.from_config(
    LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=words.pad_token_id,
        eos_token_id=words.eos_token_id,
    )
)
trainer = ElasticSFTTrainer(
    base,
    SFTConfig(
        "runs/sft-lora-exports",
        max_steps=60,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=20,
        save_strategy="steps",
        save_steps=30,
        assistant_only_loss=True,
        gradient_checkpointing=False,
        bf16=False,
        max_length=32,
        report_to="none",
        disable_tqdm=True,
    ),
    global_batch_size=24,
    train_dataset=Dataset.from_list([talk(number) for number in range(960)]),
    eval_dataset=Dataset.from_list([talk(number) for number in range(960, 1000)]),
    processing_class=words,
    peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]),
)
trainer.train()
trainer.save_model("runs/sft-lora-adapter")
