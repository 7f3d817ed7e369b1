"""A job that begins with a folder's model, and goes on only with that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ft.cli.app import COMPLETED, run_command
from elastic_ft.cli.preflight import check_job
from elastic_ft.cli.where import Where
from elastic_ft.errors import ConfigError
from elastic_ft.storage.inspect import find_one
from tests.multiproc.harness import make_job, run_job
from tests.multiproc.tiny import Counted, counted

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

    def job(steps: int, **parallel: Any) -> Any:
        model = {"pretrained": str(base)}
        parallel = {"strategy": "ddp", **parallel}
        return make_job(steps=steps, workers=2, model=model, data=COUNTED, parallel=parallel)

    (opened,) = run_job(job(2, pp=2), out).check().all("data_opened")
    terms = find_one(str(out / "checkpoints")).manifest.extra["terms"]
    assert terms["model.pretrained"] == str(base)
    digest = terms["model.pretrained.digest"]
    assert opened["data"]["model.pretrained.digest"] == digest

    resumed = run_job(job(3), out).check()  # the same: goes on, in another layout
    assert [line["layout"] for line in resumed.all("generation_formed")] == ["pp2-ddp1", "ddp2"]
    assert_exported(out, tmp_path / "exported", base)
    save_llama(base, seed=8)
    with pytest.raises(ConfigError, match=f"^model.pretrained.digest was {digest[:20]}") as caught:
        check_job(job(4), str(out), Where(nodes=2, processes=True))
    assert "the weights at model.pretrained are others than it began with" in str(caught.value)
    refused = run_job(job(4), out)
    assert refused.result["status"] != "completed"
    assert "model.pretrained.digest was" in refused.result["reason"]


def assert_exported(run: Path, folder: Path, base: Path) -> None:
    """What stages began and replicas went on with, as ``from_pretrained`` takes it."""
    job = make_job(model={"pretrained": str(base)}, data=COUNTED)
    (run / "job.yaml").write_text(job.model_dump_json())
    command = ("checkpoint", "export", str(run / "checkpoints"), str(folder))
    assert run_command((*command, "--format", "huggingface")) == COMPLETED
    load = transformers.AutoModelForCausalLM.from_pretrained
    before, after = (load(at, local_files_only=True) for at in (base, folder))
    assert after.lm_head.weight is after.model.embed_tokens.weight
    moved = [n for n, p in after.named_parameters() if not torch.equal(p, before.get_parameter(n))]
    assert moved == list(dict(before.named_parameters()))
    tokens = counted()[3]["tokens"][None]
    assert after(tokens, labels=tokens).loss < before(tokens, labels=tokens).loss
