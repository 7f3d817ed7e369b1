"""The examples with Hugging Face's trainers, each through the loss of a worker."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.cli.app import COMPLETED
from elastic_ft.observe.run_reader import RunReader

pytest.importorskip("accelerate", reason="pip install 'elastic-ft[huggingface]'")

EXAMPLES = Path(__file__).parents[2] / "examples"
KILL = """description: A worker dies in the middle of a step.
faults:
  - {point: backward, rank: 1, step: 20, action: kill}
expect: {steps_lost_max: 0}
"""


def survived(start: Callable[..., Any], folder: Path, example: str) -> RunReader:
    (folder / "kill.yaml").write_text(KILL)
    arguments = ("--processes", "--workers", "2", "--chaos", "kill.yaml")
    code, out, err = start("launch", *arguments, str(EXAMPLES / f"{example}.py")).finish()
    assert code == COMPLETED, out + err
    run = RunReader(folder / "runs" / example)
    assert [line["step"] for line in run.steps()] == [*range(1, 61)]
    logged = [line["step"] for line in run.steps() if "loss" in line.get("logged", {})]
    assert logged == [*range(5, 61, 5)], "each once"
    assert "worker_lost" in [line["event"] for line in run.events()]
    return run


def test_the_trainer_example_survives_a_worker(start: Callable[..., Any], folder: Path) -> None:
    survived(start, folder, "hf_trainer")
    from transformers import AutoModelForCausalLM

    exported = folder / "runs/hf-trainer-exports"
    assert {path.name for path in exported.iterdir()} >= {"checkpoint-30", "checkpoint-60"}
    AutoModelForCausalLM.from_pretrained(exported / "checkpoint-60", local_files_only=True)


def test_the_lora_example_survives_a_worker(start: Callable[..., Any], folder: Path) -> None:
    pytest.importorskip("trl", reason="pip install 'elastic-ft[huggingface]'")
    run = survived(start, folder, "sft_lora")
    losses = [line["logged"]["loss"] for line in run.steps() if "loss" in line.get("logged", {})]
    assert losses[-1] < losses[0]
    adapter = folder / "runs/sft-lora-adapter"
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 8
    manifests = sorted((folder / "runs/sft_lora/checkpoints/manifests").glob("*.json"))
    tensors = json.loads(manifests[-1].read_text())["tensors"]
    assert any("lora_A" in name for name in tensors)
    assert not any("embed_tokens" in name for name in tensors), "the base is by reference"
