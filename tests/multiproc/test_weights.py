"""A job begins with the weights of a Hugging Face folder, whatever its layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ft.storage import safetensors
from elastic_ft.storage.inspect import find_one
from elastic_ft.storage.store import open_store
from tests.multiproc.harness import make_job, run_job

transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()  # it has a thread

LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}
# A step so small that no element moves: what is saved after it is what training began with.
STILL = {"name": "sgd", "lr": 1e-30, "schedule": "constant"}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_job_begins_with_imported_weights(tmp_path: Path, strategy: str) -> None:
    torch.manual_seed(7)
    values = {key: value for key, value in LLAMA.items() if key != "model_type"}
    original = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values))
    original.save_pretrained(tmp_path / "llama", max_shard_size="10KB")
    assert (tmp_path / "llama" / safetensors.INDEX).is_file()
    model = {"transformers": LLAMA, "weights": str(tmp_path / "llama")}
    job = make_job(strategy, steps=1, workers=2, model=model, optimizer=STILL)
    run_job(job, tmp_path / "run").check()

    reader = find_one(str(tmp_path / "run" / "checkpoints"))
    safetensors.export_folder(reader, open_store(str(tmp_path / "out")))
    original.config.save_pretrained(tmp_path / "out")
    again: Any = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    expected = original.state_dict()
    assert again.state_dict().keys() == expected.keys()
    assert "model.lm_head.weight" not in reader.manifest.tensors  # tied: it is there once
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_tied_embeddings_stay_tied_in_every_layout(tmp_path: Path) -> None:
    kwargs = make_job().model.kwargs | {"tie_embeddings": True}
    model = {"preset": "decoder-1m", "kwargs": kwargs}
    runs = {}
    for strategy in ("ddp", "fsdp"):
        job = make_job(strategy, steps=4, workers=2, model=model, optimizer={"lr": 0.01})
        runs[strategy] = run_job(job, tmp_path / strategy).check()
        found = find_one(str(tmp_path / strategy / "checkpoints")).manifest.tensors
        assert "model.embedding.weight" in found
        assert "model.output.weight" not in found
    runs["ddp"].same_losses_as(runs["fsdp"])
