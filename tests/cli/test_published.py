"""Scripts in the style of published ones: the docs' diffs are theirs, and a lost worker changes
nothing."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.cli.app import COMPLETED
from elastic_ft.config import LoopConfig
from elastic_ft.errors import UsageError
from elastic_ft.observe.run_reader import RunReader
from elastic_ft.worker.user_script import run_script

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "examples/published"
KILL = """description: A worker dies in the middle of a step.
faults:
  - {point: backward, rank: 1, step: 15, action: kill}
expect: {steps_lost_max: 0}
"""


def diff_of(name: str) -> list[str]:
    texts = [
        (PUBLISHED / f"{stem}.py").read_text().splitlines() for stem in (name, f"{name}_elastic")
    ]
    lines = list(difflib.unified_diff(*texts, lineterm="", n=0))[2:]
    return ["@@" if line.startswith("@@") else line.rstrip() for line in lines]


NAMES = (
    "ddp_tutorial",
    "fabric_images",
    "accelerate_text",
    "early_stopping",
    "run_clm",
    "nanogpt",
)


@pytest.mark.parametrize("name", NAMES)
def test_the_docs_show_the_diff(name: str) -> None:
    text = (ROOT / "docs/bring-your-own.md").read_text()
    shown = re.search(rf"`{name}\.py`[^\n]*\n\n```diff\n(.*?)```", text, re.DOTALL)
    assert shown is not None
    assert [line.rstrip() for line in shown[1].splitlines()] == diff_of(name)


@pytest.mark.parametrize("name", NAMES)
def test_the_docs_count_the_lines(name: str) -> None:
    text = (ROOT / "docs/bring-your-own.md").read_text()
    told = re.search(rf"`{name}\.py`: (\d+) lines written, (\d+) gone", text)
    assert told is not None
    written = [line for line in diff_of(name) if line[:1] == "+" and line[1:].strip()]
    gone = [line for line in diff_of(name) if line[:1] == "-" and line[1:].strip()]
    assert (int(told[1]), int(told[2])) == (len(written), len(gone))
    assert len(written) <= WRITTEN_MAX


WRITTEN_MAX = 6  # lines, in each
CLM = ("--output_dir=clm", "--max_steps=40", "--per_device_train_batch_size=4", "--report_to=none")
CLM += ("--save_steps=10",)  # whoever joins finds the export of one, and does not begin with it


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("fabric_images", ()),
        pytest.param("ddp_tutorial", ("4",), marks=pytest.mark.soak),
        pytest.param("accelerate_text", (), marks=pytest.mark.soak),
        pytest.param("early_stopping", (), marks=pytest.mark.soak),
        pytest.param("run_clm", CLM, marks=pytest.mark.soak),
        pytest.param("nanogpt", ("--accumulation_steps=1",), marks=pytest.mark.soak),
        pytest.param("own_fit", ("--epochs", "4"), marks=pytest.mark.soak),
    ],
)
def test_a_changed_script_comes_to_the_same_without_a_worker(
    start: Callable[..., Any], folder: Path, name: str, arguments: tuple[str, ...]
) -> None:
    """Dropout included, in a world of three where the batch is dealt unevenly."""
    (folder / "kill.yaml").write_text(KILL)
    here = Path(__file__).with_name(f"{name}.py")
    script = str(here if here.is_file() else PUBLISHED / f"{name}_elastic.py")
    options = ("--processes", "--workers", "3", "--chaos", "kill.yaml")
    launched = start("launch", *options, script, *arguments)
    alone = folder / "alone"
    alone.mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, script, *arguments]
    by_itself = subprocess.run(
        command, cwd=alone, env=environment, check=True, timeout=240, stdout=subprocess.PIPE
    )
    code, out, err = launched.finish()
    assert code == COMPLETED, out + err
    run = next((folder / "runs").iterdir())
    found = RunReader(run)
    assert "worker_lost" in [line["event"] for line in found.events()]
    seen, wanted = (
        [line["loss"] for line in reader.steps()]
        for reader in (found, RunReader(next((alone / "runs").iterdir())))
    )
    assert len(seen) == len(wanted) == (130 if name == "early_stopping" else 40)
    assert seen == pytest.approx(wanted, rel=1e-5)
    said = (run / "processes.log").read_text()
    assert held_out(said) == pytest.approx(held_out(by_itself.stdout.decode()), rel=1e-3)


def held_out(said: str) -> dict[str, float]:
    """What a script prints of held-out data, by epoch: BatchNorm's statistics are in it. All ranks
    print the same."""
    lines = re.findall(r"epoch (\d+): held-out loss ([\d.]+)", said)
    found = {epoch: float(loss) for epoch, loss in lines}
    assert all(float(loss) == pytest.approx(found[epoch], rel=1e-3) for epoch, loss in lines)
    return found


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("dist.init_process_group('gloo')", "leave out init_process_group"),
        ("DistributedSampler(range(9))", "leave out init_process_group"),
        ("int(os.environ['LOCAL_RANK'])", "take ctx.rank, ctx.world_size and ctx.device"),
        ("print(loss)", "behind the loop take ctx.latest.loss"),
        ("nn.Linear(1, 1).module", "the model is not wrapped: write model for model.module"),
    ],
)
def test_what_torchrun_needs_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, said: str
) -> None:
    path = tmp_path / "left_in.py"
    imports = "import os\nimport torch.distributed as dist\nfrom torch import nn\n"
    sampler = "from torch.utils.data import DistributedSampler\n"
    path.write_text(f"{imports}{sampler}{line}\n")
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match=f"left_in.py, line 5: .*{said}"):
        run_script(LoopConfig(script=str(path)))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_gradients_that_a_body_clears_too_early_are_refused(folder: Path, strategy: str) -> None:
    script = str(Path(__file__).with_name("own_cleared.py"))
    command = [sys.executable, script, strategy]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=folder, env=environment, timeout=240, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "earlier micro-batches were changed: clear them by optimizer.zero_grad()" in done.stderr
