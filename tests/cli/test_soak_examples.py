"""Random kills over the examples: whoever dies where, each step is there once, with its loss.

    ELASTIC_FT_SOAK_SEEDS=1,2,3 pytest -m soak tests/cli/test_soak_examples.py

A run has KILLS kills: most at a named point of a step, some while the script's own code runs
after one (a callback, a log, an evaluation, an export). Whoever is lost is replaced. Another run
has kills at moments: anybody, whatever he does then.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Command, read_lines

from elastic_ft.cli.app import COMPLETED
from elastic_ft.observe.run_reader import RunReader

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = {"own_loop": 60, "own_gan": 40, "hf_trainer": 60, "sft_lora": 60}
REPLACED_S = {"own_loop": 8.0, "own_gan": 8.0, "hf_trainer": 20.0, "sft_lora": 20.0}
POINTS = ("data", "forward", "backward", "reduce", "before_optimizer", "inside_optimizer")
POINTS += ("after_optimizer", "snapshot_copy", "forming")
SEEDS = tuple(map(int, os.environ.get("ELASTIC_FT_SOAK_SEEDS", "1,2").split(",")))
WORKERS, KILLS, FIRST, APART = 3, 5, 3, 4
MOMENTS_S, STEP_S = (0.5, 6.0), 0.4  # from one kill to the next; how long most steps take
WITHIN_S = 1800.0  # of one run, on a machine that has much else to do
NEVER_FIRED = "faults that never fired"
LAUNCH = ("launch", "--processes", "--workers", str(WORKERS))


class Drawn:
    """What is to be killed, by the seed. After each kill a step takes REPLACED_S, so that most who
    come in for the lost are there before the next. Attributes: between: after these steps, too."""

    def __init__(self, example: str, seed: int) -> None:
        draws, steps = random.Random(f"{example} {seed}"), STEPS[example]
        places = sorted(draws.sample(range(FIRST, steps - 1 - APART * KILLS), KILLS))
        self.faults, self.between = list[dict[str, Any]](), set[int]()
        for number, place in enumerate(places):
            step, rank = place + APART * number, draws.choice((0, 1, 1))
            if draws.random() < 0.35:
                # 20 and 40: there the examples evaluate, and two of them export at 30
                self.between.add(draws.choice((step, step, 20, 30, 40)))
            else:
                point = draws.choice(POINTS)
                self.faults.append({"point": point, "rank": rank, "step": step, "action": "kill"})
            slow = {"action": "slow", "lasts_s": REPLACED_S[example]}
            self.faults.append({"point": "data", "rank": 0, "step": step + 2} | slow)

    def write(self, path: Path) -> None:
        path.write_text(yaml.safe_dump({"description": "drawn", "faults": self.faults}))


def kill_between(command: Command, run: Path, steps: set[int]) -> int:
    """Until the command ends. Returns how many it killed, each once its step's line is there."""
    left, killed, pause = sorted(steps), 0, threading.Event()
    deadline_s = time.monotonic() + WITHIN_S
    while command.process.poll() is None and time.monotonic() < deadline_s:
        pause.wait(0.002)
        lines = read_lines(run / "steps.jsonl") if left and run.exists() else []
        if not lines or lines[-1]["step"] < left[0]:
            continue
        del left[0]
        formed = [e for e in read_lines(run / "events.jsonl") if e["event"] == "generation_formed"]
        members = formed[-1]["members"]
        if len(members) > 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(members[1]["pid"], signal.SIGKILL)
                killed += 1
    return killed


def slowed(example: str, draws: random.Random) -> list[dict[str, Any]]:
    """Each step takes a while, anywhere, on anybody: a moment is in any part of a step."""
    slow = {"action": "slow", "lasts_s": STEP_S}
    return [
        {"point": draws.choice(POINTS[:-1]), "rank": draws.randrange(WORKERS), "step": step} | slow
        for step in range(1, STEPS[example] + 1)
    ]


def kill_at_moments(command: Command, run: Path, draws: random.Random) -> set[int]:
    """Until the command ends: kills one of at least two members. Returns the processes."""
    killed, pause = set[int](), threading.Event()
    deadline_s = time.monotonic() + WITHIN_S
    while command.process.poll() is None and time.monotonic() < deadline_s:
        pause.wait(draws.uniform(*MOMENTS_S))
        events = read_lines(run / "events.jsonl") if (run / "events.jsonl").exists() else []
        formed = [line for line in events if line["event"] == "generation_formed"]
        alive = [m["pid"] for m in formed[-1]["members"]] if formed else []
        alive = [pid for pid in alive if pid not in killed]
        if len(alive) > 1 and command.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim := draws.choice(alive), signal.SIGKILL)
                killed.add(victim)
    return killed


def check_survivors(found: RunReader, killed: set[int]) -> None:
    """Who was not killed is in the next generation, in the same process."""
    worlds = [
        {member["pid"] for member in line["members"]}
        for line in found.events()
        if line["event"] == "generation_formed"
    ]
    for before, after in itertools.pairwise(worlds):
        assert before - killed <= after


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[float]]]:
    """What steps tell, by example: of as many workers, as a trainer draws otherwise alone."""
    return {}


def told_of(run: RunReader) -> list[list[float]]:
    """Of each step its loss, and what the script logs (a rate, the size of its average)."""
    return [
        [line["loss"], *(v for v in line.get("logged", {}).values() if isinstance(v, (int, float)))]
        for line in run.steps()
    ]


def quietly(
    start: Callable[..., Any], folder: Path, example: str, known: dict[str, list[list[float]]]
) -> list[list[float]]:
    if example not in known:
        script = str(EXAMPLES / f"{example}.py")
        code, out, err = start(*LAUNCH, "--out", "quiet", script).finish(WITHIN_S)
        assert code == COMPLETED, out + err
        known[example] = told_of(RunReader(folder / "quiet"))
    return known[example]


def check_steps(found: RunReader, wanted: list[list[float]]) -> None:
    assert [line["step"] for line in found.steps()] == [*range(1, len(wanted) + 1)]
    for told, expected in zip(told_of(found), wanted, strict=True):
        assert told == pytest.approx(expected, rel=1e-5)


@pytest.mark.soak
@pytest.mark.timeout(2 * WITHIN_S)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("example", list(STEPS))
def test_whoever_dies_where(
    start: Callable[..., Any],
    folder: Path,
    undisturbed: dict[str, list[list[float]]],
    example: str,
    seed: int,
) -> None:
    script = str(EXAMPLES / f"{example}.py")
    wanted = quietly(start, folder, example, undisturbed)
    drawn, run = Drawn(example, seed), folder / "disturbed"
    drawn.write(folder / "kills.yaml")
    command = start(*LAUNCH, "--out", str(run), "--chaos", "kills.yaml", script)
    killed = kill_between(command, run, drawn.between)
    code, out, err = command.finish(WITHIN_S)
    found = RunReader(run)
    told = (
        f"{example}, seed {seed}: {drawn.faults}, after steps {sorted(drawn.between)}\n{out}{err}"
    )
    assert code == COMPLETED or NEVER_FIRED in err, told
    result = found.result()
    assert result is not None and result["status"] == "completed", told
    lost = len([line for line in found.events() if line["event"] == "worker_lost"])
    print(f"\n{example}, seed {seed}: {lost} lost, {killed} of them between two steps")
    assert len(found.steps()) == STEPS[example], told
    check_steps(found, wanted)


@pytest.mark.soak
@pytest.mark.timeout(2 * WITHIN_S)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("example", list(STEPS))
def test_whoever_dies_when(
    start: Callable[..., Any],
    folder: Path,
    undisturbed: dict[str, list[list[float]]],
    example: str,
    seed: int,
) -> None:
    wanted, run = quietly(start, folder, example, undisturbed), folder / "disturbed"
    draws = random.Random(f"{example} {seed} moments")
    faults = {"description": "slowed", "faults": slowed(example, draws)}
    (folder / "slowed.yaml").write_text(yaml.safe_dump(faults))
    script = str(EXAMPLES / f"{example}.py")
    command = start(*LAUNCH, "--out", str(run), "--chaos", "slowed.yaml", script)
    killed = kill_at_moments(command, run, draws)
    code, out, err = command.finish(WITHIN_S)
    found = RunReader(run)
    told = f"{example}, seed {seed}, killed {killed}\n{out}{err}"
    assert code == COMPLETED or NEVER_FIRED in err, told
    result = found.result()
    assert result is not None and result["status"] == "completed", told
    assert sum(recovery["steps_lost"] for recovery in result["recoveries"]) == 0, told
    check_survivors(found, killed)
    check_steps(found, wanted)
    print(f"\n{example}, seed {seed}: {len(killed)} killed at moments")
