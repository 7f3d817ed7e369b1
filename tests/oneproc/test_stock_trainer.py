"""In a world of one, Hugging Face's trainer logs what the stock one does, to the last bit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.errors import ConfigError

for needed in ("accelerate", "peft", "trl"):
    pytest.importorskip(needed, reason="pip install 'elastic-ft[huggingface]'")

pytestmark = pytest.mark.timeout(900)  # the first waits for all that are trained
ROOT = Path(__file__).parents[2]
CASES = ("epochs", "smoothed", "bf16", "sequential", "evaluated", "saved")
CASES += ("one_micro_batch", "noisy", "sft_lora")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    command = [sys.executable, "-m", "tests.oneproc.stock_and_elastic", str(folder), *CASES]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    return folder


def logged(folder: Path, name: str) -> Any:
    out = folder / name
    assert (out / "logged.json").exists(), (out / "said").read_text()
    return json.loads((out / "logged.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_all_logs_are_equal(trained: Path, case: str) -> None:
    stock, elastic = logged(trained, f"{case}-stock"), logged(trained, f"{case}-elastic")
    assert elastic == stock
    assert sum("loss" in entry for entry in stock) >= 5


def test_what_is_exported_loads(trained: Path) -> None:
    from safetensors.torch import load_file

    folders = [trained / f"saved-{kind}/out/checkpoint-18" for kind in ("stock", "elastic")]
    stock, elastic = (load_file(folder / "model.safetensors") for folder in folders)
    assert stock.keys() == elastic.keys()
    assert all((stock[name] == elastic[name]).all() for name in stock)
    names = [{path.name for path in folder.iterdir()} for folder in folders]
    assert names[0] - names[1] == {"optimizer.pt", "rng_state.pth", "scheduler.pt"}
    state = [json.loads((f / "trainer_state.json").read_text()) for f in folders]
    assert state[0]["global_step"] == state[1]["global_step"] == 18


# ----------------------------------------------------------------------------- arguments


def arguments(**values: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments("out", use_cpu=True, report_to="none", **values)


def named(kind: str) -> set[str]:
    """In one of the documents' lists: of a table, its first column."""
    cells = (line.split("|")[1] if line.startswith("|") else line for line in kind.splitlines())
    return set(re.findall(r"`(\w+)`", "\n".join(cells)))


def test_the_documents_have_every_argument_as_honoured_refused_or_without_effect() -> None:
    from elastic_ft.transformers.arguments import REFUSED

    document = (ROOT / "docs/hugging-face.md").read_text().partition("## Arguments")[2]
    honoured, refused, without_effect = map(named, document.split("### ")[1:])
    for_some_values = {"train_sampling_strategy", "optim", "lr_scheduler_type"}
    assert refused == set(REFUSED) | for_some_values
    assert honoured & refused == for_some_values
    assert without_effect.isdisjoint(honoured | refused)
    assert honoured | refused | without_effect == {field.name for field in fields(arguments())}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fp16_full_eval", True),
        ("torch_compile", True),
        ("batch_eval_metrics", True),
        ("dataloader_drop_last", True),
        ("auto_find_batch_size", True),
        ("accelerator_config", {"split_batches": True}),
        ("train_sampling_strategy", "group_by_length"),
        ("lr_scheduler_type", "reduce_lr_on_plateau"),
        ("optim", "adalomo"),
        ("full_determinism", True),
        ("resume_from_checkpoint", "somewhere"),
    ],
)
def test_what_is_refused_is_named(name: str, value: Any) -> None:
    from elastic_ft.transformers.arguments import check_arguments

    more = {}
    if name == "lr_scheduler_type":
        more = {"eval_strategy": "steps", "save_strategy": "steps", "metric_for_best_model": "loss"}
    with pytest.raises(ConfigError, match=rf"^TrainingArguments\.{name}: .* is refused: ") as told:
        check_arguments(arguments(**{name: value}, **more))
    assert "\n" not in str(told.value)


def test_a_quantised_base_is_refused_by_name() -> None:
    from transformers import BitsAndBytesConfig, LlamaConfig

    from elastic_ft.transformers.arguments import check_model

    class Model:
        config = LlamaConfig()

    check_model(Model)
    Model.config.quantization_config = BitsAndBytesConfig(load_in_4bit=True)
    with pytest.raises(ConfigError, match="quantised by bitsandbytes, which is refused"):
        check_model(Model)


def test_the_global_batch_is_said_or_a_product() -> None:
    from elastic_ft.transformers.arguments import sizes

    given = arguments(per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert sizes(given, None) == sizes(given, 8) == (8, 2)
    assert sizes(arguments(per_device_train_batch_size=2), 64) == (64, 2)
    with pytest.raises(ConfigError, match="no multiple of per_device_train_batch_size, 2"):
        sizes(given, 9)
    with pytest.raises(ConfigError, match="gradient_accumulation_steps: 4 is refused beside"):
        sizes(given, 64)
