"""Scripts of one's own through the command line."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import elastic_ft
from elastic_ft.cli import launch
from elastic_ft.cli.app import BAD_USAGE, COMPLETED, FAILED, run_command
from elastic_ft.cli.launch import job_of_script
from elastic_ft.cli.own_script import calls_init
from elastic_ft.cli.run import How
from elastic_ft.config import Job
from elastic_ft.errors import ConfigError, UsageError
from elastic_ft.observe.run_reader import RunReader
from tests.cli.alone import Alone
from tests.waiting import until

EXAMPLES = Path(__file__).parents[2] / "examples"
KILL = """description: A worker dies in the middle of a step.
faults:
  - {point: backward, rank: 1, step: 20, action: kill}
expect: {steps_lost_max: 0}
"""


def script(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(text)
    return path


def test_the_own_loop_example_survives_a_worker(start: Callable[..., Any], folder: Path) -> None:
    (folder / "kill.yaml").write_text(KILL)
    arguments = ("--processes", "--workers", "2", "--chaos", "kill.yaml")
    code, out, err = start("launch", *arguments, str(EXAMPLES / "own_loop.py")).finish()
    assert (code, err) == (COMPLETED, ""), out
    run = RunReader(folder / "runs/own-loop")
    assert [line["step"] for line in run.steps()] == [*range(1, 61)]
    assert all("rate" in line["logged"] for line in run.steps())
    events = [line["event"] for line in run.events()]
    assert events.count("evaluated") >= 3 and "worker_lost" in events


def test_the_gan_example_comes_to_the_same_without_a_worker(
    start: Callable[..., Any], alone: Alone, folder: Path
) -> None:
    """Two optimizers, and uneven numbers of micro-batches, first two, one and one; the average of
    weights shows that every step was made once."""
    (folder / "kill.yaml").write_text(KILL)
    arguments = ("--processes", "--workers", "3", "--chaos", "kill.yaml")
    code, out, err = start("launch", *arguments, str(EXAMPLES / "own_gan.py")).finish()
    assert (code, err) == (COMPLETED, ""), out
    found = RunReader(folder / "runs/own-gan")
    assert "worker_lost" in [line["event"] for line in found.events()]
    (folder / "alone").mkdir()
    code, out, err = alone(folder / "alone", EXAMPLES / "own_gan.py")
    assert code == 0, (out, err)
    for name in ("loss", "average"):
        seen, wanted = (
            [line[name] if name in line else line["logged"][name] for line in run.steps()]
            for run in (found, RunReader(folder / "alone/runs/own-gan"))
        )
        assert len(seen) == 40
        assert seen == pytest.approx(wanted, rel=1e-5)


def test_a_job_is_what_init_says_then_the_job_file_then_the_options(folder: Path) -> None:
    path = script(
        folder,
        "from elastic_ft import init\n"
        "ctx = init('base.yaml', seed=5, batch={'global_batch_size': 16})\n",
    )
    (folder / "base.yaml").write_text("name: mine\nseed: 4\nbatch: {micro_batch_size: 2}\n")
    job = job_of_script(path, ("--lr", "1"), workers=3)
    assert (job.name, job.seed, job.elastic.max_workers) == ("mine", 5, 3)
    assert (job.batch.global_batch_size, job.batch.micro_batch_size) == (16, 2)
    assert job.loop is not None and job.loop.arguments == ("--lr", "1")


def test_what_a_refusal_advises_can_be_given(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start whose terms differ from the checkpoint's is referred to these two."""
    started: list[tuple[Job, How]] = []

    def note(job: Job, out: str, where: Any, how: How) -> int:
        started.append((job, how))
        return COMPLETED

    monkeypatch.setattr(launch, "train_job", note)
    path = script(folder, "from elastic_ft import init\nctx = init(seed=5)\n")
    asked = ["launch", "--processes", "--accept-changes", "--from-scratch", str(path)]
    assert run_command(asked) == COMPLETED
    ((job, how),) = started
    assert how.accept_changes and job.checkpoint.from_scratch


COMPUTED = """import argparse, os, sys
import elastic_ft
from beside import MICRO
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
{before}
elastic_ft.init(**{given}, batch=dict(micro_batch_size=MICRO, global_batch_size=4 * MICRO))
os.abort()
"""


def test_what_init_is_given_may_be_computed(folder: Path) -> None:
    """From the command line, say: the script is begun, and ends there."""
    (folder / "beside.py").write_text("MICRO = 3\n")
    path = script(folder, COMPUTED.format(before="", given="{'steps': parser.parse_args().steps}"))
    job = job_of_script(path, ("--steps", "17"))
    assert (job.steps, job.batch.global_batch_size) == (17, 12)


@pytest.mark.parametrize(
    ("before", "given", "said"),
    [
        ("sys.exit(3)", "{}", "ended before it called elastic_ft.init(), with code 3"),
        ("", "{'seed': parser}", "can't say: ArgumentParser("),
    ],
)
def test_a_computed_init_that_can_not_be_known(
    folder: Path, before: str, given: str, said: str
) -> None:
    (folder / "beside.py").write_text("MICRO = 3\n")
    with pytest.raises(ConfigError) as raised:
        job_of_script(script(folder, COMPUTED.format(before=before, given=given)))
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import elastic_ft\nelastic_ft.init(model={'preset': 'decoder-1m'})\n", "model: is the"),
        ("import elastic_ft\nelastic_ft.init(batches=1)\n", "batches: unknown key"),
        ("def :\n", "train.py: is no Python"),
    ],
)
def test_what_can_not_be_launched_is_said_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    path = script(folder, text)
    assert run_command(["launch", "--processes", str(path)]) == BAD_USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not (folder / "runs").exists()


def test_a_script_of_torchrun_runs_as_it_is(folder: Path) -> None:
    path = script(
        folder,
        "import os, pathlib, sys, time\n"
        "rank, count = int(os.environ['RANK']), int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "pathlib.Path(f'{rank}-{count}').write_text(' '.join(sys.argv[1:]))\n"
        "other, until_s = pathlib.Path(f'{1 - rank}-{count}'), time.monotonic() + 150\n"
        "while not (other.exists() and other.read_text()):  # torchrun ends it with this one\n"
        "    assert time.monotonic() < until_s\n"
        "    time.sleep(0.01)\n"
        "sys.exit(0 if count else 3)\n",
    )
    arguments = ["--processes", "--workers", "2", str(path), "--lr", "1"]
    assert run_command(["launch", *arguments]) == COMPLETED
    wrote = {path.name: path.read_text() for path in folder.glob("[01]-*")}
    assert wrote == dict.fromkeys(("0-0", "1-0", "0-1", "1-1"), "--lr 1")


@pytest.mark.parametrize("asked", [1, 2])
def test_a_script_of_torchrun_ends_with_the_command(folder: Path, asked: int) -> None:
    """At once by the second signal, also one that does not heed the first: torchrun left that."""
    path = script(
        folder,
        "import os, pathlib, signal, time\n"
        "def note(number, frame):\n"
        "    pathlib.Path('heard').touch()\n"
        f"signal.signal(signal.SIGTERM, note if {asked} == 2 else signal.SIG_DFL)\n"
        "pathlib.Path('new').write_text(str(os.getpid()))\n"
        "pathlib.Path('new').rename('pid')\n"
        "until = time.monotonic() + 300\n"
        "while time.monotonic() < until:\n"
        "    time.sleep(1)\n",
    )
    command = [sys.executable, "-m", "elastic_ft", "launch", "--processes", str(path)]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
    with subprocess.Popen(command, cwd=folder, env=environment) as launched:
        try:
            until(lambda: (folder / "pid").exists(), "its process", 150)
            worker = psutil.Process(int((folder / "pid").read_text()))
            launched.terminate()
            if asked == 2:
                until(lambda: (folder / "heard").exists(), "it hears of the first")
                launched.terminate()
            assert launched.wait(25 if asked == 2 else 100) == FAILED
            until(lambda: has_ended(worker), "its process to end", 5)
        finally:
            launched.kill()
            with contextlib.suppress(psutil.NoSuchProcess, UnboundLocalError):
                worker.kill()


def has_ended(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def test_what_torchrun_would_ignore_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(folder, "print('no')\n")
    code = run_command(["launch", "--processes", "--min-workers", "2", str(path)])
    assert code == BAD_USAGE
    assert "--min-workers: train.py never calls" in capsys.readouterr().err


def test_a_job_needs_a_script_that_calls_init(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.py: never calls elastic_ft.init\(\)"):
        job_of_script(script(folder, "print('no')\n"))


@pytest.mark.parametrize(
    "text",
    [
        "import elastic_ft as ef\nctx = ef.init(seed=3)\n",
        "from elastic_ft import init as start\nctx = start(seed=3)\n",
        "def main():\n    import elastic_ft\n    elastic_ft.init(seed=3)\n",
        "import elastic_ft.data\nctx = elastic_ft.init(seed=3)\n",
    ],
)
def test_init_is_found_by_any_name(folder: Path, text: str) -> None:
    assert job_of_script(script(folder, text)).seed == 3


@pytest.mark.parametrize(
    ("text", "is_elastic"),
    [
        ("import elastic_ft.transformers\n", True),
        ("import elastic_ft.transformers as t\n", True),
        ("from elastic_ft import transformers\n", True),
        ("from elastic_ft import transformers as t\n", True),
        ("from elastic_ft.transformers import Trainer\n", True),
        ("from elastic_ft.transformers.mixin import Trainer\n", True),
        ("import transformers\nfrom transformers import Trainer\n", False),
        ("import elastic_ft.data\n", False),
        ("from .elastic_ft import transformers\n", False),
    ],
)
def test_a_trainer_is_found_however_it_is_imported(
    folder: Path, text: str, is_elastic: bool
) -> None:
    assert calls_init(script(folder, text)) is is_elastic


def test_processes_of_torchrun_do_not_train_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="started by torchrun: use elastic-ft launch"):
        elastic_ft.init(steps=1)


def test_mistakes_are_a_line_each(alone: Alone, folder: Path) -> None:
    code, said, err = alone(folder, Path(__file__).with_name("own_mistakes.py"))
    assert code == 0, err
    assert [line.partition(":")[0] for line in said] == [
        "ctx.prepare",
        "batch.micro_batch_size",
        "DataLoader.timeout",
        "DataLoader.worker_init_fn",
        "DataLoader.generator",
        "ctx.prepare",
        "ctx.log",
        "elastic_ft.init",
        "DataLoader.pin_memory",
        "steps of a pass",
        "optimizer.step",
        "a batch",
        "a batch",
        "@ctx.step",
        "the batch of step 2 was not used",
        "ctx.evaluate, gathered, export",
        "ctx.evaluate, gathered, export",
        "ctx.evaluate, gathered, export",
        "ctx.attempt",
        "attempted",
        "ctx.attempt",
        "the loader has ended",
    ]
    assert "steps of a pass: 8" in said
    run = RunReader(folder / "runs/own_mistakes")
    assert not any("logged" in line for line in run.steps()), "they were told of without it"
    (noted,) = [line for line in run.events() if line["event"] == "logged"]
    assert (noted["step"], noted["values"]) == (2, {"held_out": 1.5, "after": True})


def test_a_script_alone_is_a_world_of_one(folder: Path) -> None:
    path = os.pathsep.join((str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")))
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, str(EXAMPLES / "own_loop.py")]
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=240)
    run = RunReader(folder / "runs/own-loop")
    assert run.result()["status"] == "completed"
    assert [line["step"] for line in run.steps()] == [*range(1, 61)]
    assert "checkpoint_committed" in [line["event"] for line in run.events()]
    assert (folder / "runs/own-loop-weights/model.safetensors").is_file()
