"""A job that begins with a folder's model, and goes on only with that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ft.cli.preflight import Place, check
from elastic_ft.errors import ConfigError
from elastic_ft.storage.inspect import find_one
from tests.multiproc.harness import make_job, run_job
from tests.multiproc.tiny import Counted

transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()  # it has a thread
COUNTED = {"path": "tests.multiproc.tiny:counted"}


def save_llama(folder: Path, seed: int = 7) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=Counted.vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="10KB")
    return model


def test_it_goes_on_with_the_same_weights_alone(tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "run"
    save_llama(base)

    def job(steps: int) -> Any:
        model = {"pretrained": str(base)}
        return make_job("fsdp", steps=steps, workers=2, model=model, data=COUNTED)

    (opened,) = run_job(job(2), out).check().all("data_opened")
    terms = find_one(str(out / "checkpoints")).manifest.extra["terms"]
    assert terms["model.pretrained"] == str(base)
    digest = terms["model.pretrained.digest"]
    assert opened["data"]["model.pretrained.digest"] == digest

    run_job(job(3), out)  # the same: goes on
    save_llama(base, seed=8)
    with pytest.raises(ConfigError, match=f"^model.pretrained.digest was {digest[:20]}") as caught:
        check(job(4), str(out), Place("here", slots=2))
    assert "the weights at model.pretrained are others than it began with" in str(caught.value)
    refused = run_job(job(4), out)
    assert refused.result["status"] != "completed"
    assert "model.pretrained.digest was" in refused.result["reason"]
