"""Padding and packed documents: as each document alone, and as plain transformers has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from elastic_ft.config import ModelConfig, parse_job
from elastic_ft.data.dataset import open_dataset, positions_in_documents
from elastic_ft.engines.base import MicroBatch
from elastic_ft.engines.pipeline import cut, tokens_and_targets
from elastic_ft.errors import ConfigError
from elastic_ft.models import build_model, loss_sum
from elastic_ft.models.loss import IGNORED_LABEL
from tests.oneproc.alone import job_of

END, VOCABULARY, LENGTH = 0, 50, 12
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
DECODER = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48}
MODELS: dict[str, dict[str, Any]] = {
    "decoder": {"preset": "decoder-1m", "kwargs": DECODER},
    "llama": {"transformers": {"model_type": "llama", **SIZES}},
    "qwen3": {"transformers": {"model_type": "qwen3", "head_dim": 8, **SIZES}},
    "gpt2": {"transformers": GPT2 | NO_DROPOUT},
}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    config = ModelConfig(**MODELS[name])
    return build_model(config, vocab_size=VOCABULARY, sequence_length=LENGTH)


def tokens(*shape: int) -> Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def packed(tmp_path: Path) -> dict[str, Tensor]:
    """A window of three documents and a part of a fourth."""
    row = tokens(2 * (LENGTH + 1))
    row[[3, 4, 9]] = END
    row.numpy().astype("<u2").tofile(tmp_path / "tokens.bin")
    data = {"url": str(tmp_path / "tokens.bin"), "format": "tokens", "end_token": END}
    more = {"sequence_length": LENGTH, "separate_documents": True, "eval_fraction": 0}
    train = open_dataset(job_of(data=data | more | {"cache_dir": str(tmp_path)}).data, 0).train
    return train.collate([train[0]])


@pytest.mark.parametrize("name", MODELS)
def test_packed_documents_train_as_each_alone(packed: dict[str, Tensor], name: str) -> None:
    model, row = make(name), packed["tokens"]
    loss, count = loss_sum(model, packed)
    alone = [loss_sum(model, {"tokens": row[:, a:b]}) for a, b in ((0, 4), (5, 10), (10, 13))]
    assert count == sum(terms for _, terms in alone) == 9  # the second is but its end
    assert loss.item() == pytest.approx(sum(each.item() for each, _ in alone), rel=3e-6)
    joined, _ = loss_sum(model, {"tokens": row, "labels": packed["labels"]})
    assert abs(joined.item() - loss.item()) > 3e-4


def test_positions_begin_anew_after_each_end() -> None:
    row = torch.tensor([5, 6, END, END, 7, 8, 9, END])
    assert positions_in_documents(row, END).tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert positions_in_documents(row, 99).tolist() == list(range(8))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_padded_batches_have_the_loss_of_plain_transformers(name: str, side: str) -> None:
    model, ids = make(name), tokens(2, LENGTH)
    mask = torch.ones_like(ids)
    mask[0, slice(0, 5) if side == "left" else slice(7, None)] = 0
    labels = ids.masked_fill(mask == 0, IGNORED_LABEL)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    plain = model(**batch).loss
    loss, count = loss_sum(model, batch)
    assert (loss / count).item() == pytest.approx(plain.item(), rel=1e-5)
    without_labels, terms = loss_sum(model, {"tokens": ids, "attention_mask": mask})
    assert (without_labels.item(), terms) == (pytest.approx(loss.item()), count)


@pytest.mark.parametrize("name", ["decoder", "llama"])
def test_padding_on_the_left_is_as_if_it_were_not_there(name: str) -> None:
    model, ids = make(name), tokens(1, LENGTH)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    padded, terms = loss_sum(model, {"tokens": ids, "attention_mask": mask})
    assert terms == LENGTH - 5
    first = torch.nn.functional.cross_entropy(model_logits(model, ids, mask)[:, 4], ids[:, 5])
    alone, _ = loss_sum(model, {"tokens": ids[:, 5:]})
    assert (padded - first).item() == pytest.approx(alone.item(), rel=1e-4)


def model_logits(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    output = model(ids, attention_mask=mask)
    return getattr(output, "logits", output)


def test_a_model_of_ones_own_gets_its_keywords_as_before() -> None:
    class Own(nn.Module):
        def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, int]:
            return (input_ids * labels).sum().float(), 7

    ids = tokens(1, 3)
    loss, count = loss_sum(Own(), {"input_ids": ids, "labels": ids})
    assert (loss.item(), count) == ((ids * ids).sum().item(), 7)


@pytest.mark.parametrize("name", ["decoder", "llama", "qwen3"])
def test_stages_take_what_the_whole_model_takes(packed: dict[str, Tensor], name: str) -> None:
    model = make(name)
    stages = [stage for rank in range(2) for stage in cut(model, rank, 2, "1f1b").values()]
    x, targets, more = tokens_and_targets(MicroBatch(0, packed), torch.device("cpu"), stages[0])
    assert more.keys() == {"position_ids"}
    for stage in stages:
        stage.length = LENGTH
        x = stage(x, **more)
    assert torch.equal(stages[1].loss_sum(x, targets), loss_sum(model, packed)[0])


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"data": {"url": "a", "format": "tokens"}}, "data: separate_documents: format tokens nee"),
        ({"data": {"path": "a:b"}}, "data: separate_documents: is of url"),
    ],
)
def test_what_can_not_be_separated_is_one_line(sections: dict[str, Any], problem: str) -> None:
    values = {"name": "a", "steps": 1, "model": {"preset": "decoder-1m"}}
    sections["data"] = sections["data"] | {"separate_documents": True}
    with pytest.raises(ConfigError, match=problem):
        parse_job(values | sections)


def test_the_rows_of_a_window_are_of_one_length(packed: dict[str, Tensor]) -> None:
    assert packed.keys() == {"tokens", "labels", "position_ids"}
    assert {value.shape for value in packed.values()} == {(1, LENGTH + 1)}
    assert np.count_nonzero(packed["labels"] == IGNORED_LABEL) == 4
