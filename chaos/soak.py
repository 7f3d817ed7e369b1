"""Soak: rounds of random faults from all injectors; each must end as if nothing had been.

A round is a scenario that is made of its seed alone, so a failing one can be run again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaos.fault_kinds import TestTier
from chaos.outcome import FAILED, PASSED
from chaos.scenario import Scenario
from elastic_ft.cli.progress import say
from elastic_ft.faults import POINTS

NODES = 4
FAULTS_MAX = 5
FIRST_STEP, STEPS_BETWEEN = 5, 12
STEPS_OF_GCS = 60  # while it is away no node can come or be drained
STRATEGIES: list[dict[str, Any]] = [
    {"strategy": "ddp"},
    {"strategy": "fsdp"},
    {"strategy": "hsdp", "shard_size": 2},
]
RAY_ONLY = ("raylet", "gcs")
ONCE = ("gcs", "controller", "store")  # in a round
TRAINING = ("data", "forward", "backward", "reduce", "before_optimizer", "after_optimizer")
MENDING = ("forming", "resharding")  # reached once more only in a recovery

Draw = Callable[[random.Random, int], dict[str, Any]]


def _of_rank(rng: random.Random) -> int:
    return rng.randrange(2)  # where the second is gone, its successor is waited for


def _kill(what: str) -> Draw:
    return lambda rng, step: {"at_step": step, "kill": what, "of_rank": _of_rank(rng)}


def _head(what: str) -> Draw:
    return lambda rng, step: {"at_step": step, "kill": what}


def _point(action: str) -> Draw:
    def draw(rng: random.Random, step: int) -> dict[str, Any]:
        point = "forward" if action == "nan" else rng.choice(TRAINING)
        return {"point": point, "action": action, "rank": 0, "step": step}  # it is always there

    return draw


def _abort(rng: random.Random, step: int) -> dict[str, Any]:
    return {"at_step": step, "kill": "worker", "of_rank": _of_rank(rng), "signal": "ABRT"}


def _stop(rng: random.Random, step: int) -> dict[str, Any]:
    lasts = rng.choice((None, 1.0, 3.0))
    return {"at_step": step, "stop": "worker", "of_rank": _of_rank(rng), "lasts_s": lasts}


def _slow(rng: random.Random, step: int) -> dict[str, Any]:
    return {"at_step": step, "slow": "worker", "of_rank": _of_rank(rng), "lasts_s": 3.0}


def _drain(rng: random.Random, step: int) -> dict[str, Any]:
    deadline_s = rng.choice((3.0, 15.0))
    return {"at_step": step, "drain": "node", "of_rank": _of_rank(rng), "deadline_s": deadline_s}


def _store(rng: random.Random, step: int) -> dict[str, Any]:
    kind = rng.choice(("busy", "reset", "lost_ack", "corrupt_up", "stall", "truncate"))
    return {"at_step": step, "store": kind, "probability": 0.5, "lasts_s": 4.0}


INJECTORS: dict[str, tuple[int, Draw]] = {  # name -> how often it is drawn, and how
    "kill worker": (4, _kill("worker")),
    "kill node": (4, _kill("node")),
    "raylet": (2, _kill("raylet")),
    "keeper": (1, _kill("keeper")),
    "controller": (1, _head("controller")),
    "gcs": (1, _head("gcs")),
    "abort": (1, _abort),
    "stop": (2, _stop),
    "slow": (1, _slow),
    "drain": (2, _drain),
    "store": (2, _store),
    "point kill": (3, _point("kill")),
    "point oom": (1, _point("oom")),
    "point raise": (1, _point("raise")),
    "point hang": (1, _point("hang")),
    "point nan": (1, _point("nan")),
}


def make_round(seed: int, tier: TestTier) -> Scenario:
    """Returns the scenario of ``seed``: 1 to 5 faults, then as many nodes as were lost."""
    rng = random.Random(f"soak {seed}")
    names = [name for name in INJECTORS if tier == "ray" or name not in RAY_ONLY]
    faults: list[dict[str, Any]] = []
    step, lost, used = FIRST_STEP, 0, set[str]()
    for _ in range(rng.randint(1, FAULTS_MAX)):
        left = [name for name in names if not (name in ONCE and name in used)]
        name = rng.choices(left, [INJECTORS[name][0] for name in left])[0]
        used.add(name)
        faults.append(INJECTORS[name][1](rng, step))
        gone = name in ("kill node", "raylet", "drain")
        if gone and lost + 1 >= NODES - 1:  # two stay
            faults.append({"at_step": step, "add": "node"})
        else:
            lost += gone
        step += STEPS_OF_GCS if name == "gcs" else rng.choice((0, 1, STEPS_BETWEEN))
    if rng.random() < 0.3:  # one more, in the middle of a recovery
        faults.append({"point": rng.choice(TRAINING), "rank": 0, "step": step})
        after = sum("point" in fault for fault in faults) - 1
        faults.append({"point": rng.choice(MENDING), "rank": 0, "after": after})
    faults += [{"at_step": step + STEPS_BETWEEN, "add": "node"}] * lost
    controller = any(fault.get("kill") == "controller" for fault in faults)
    assert all(fault.get("point", "data") in POINTS for fault in faults)
    return Scenario.model_validate(
        {
            "description": f"Round {seed} of the soak.",
            "seed": seed,
            "cluster": {"nodes": NODES},
            "job": {"parallel": rng.choice(STRATEGIES), "elastic": {"max_user_failures": 5}},
            "faults": faults,
            # Several faults at a time may take every copy of a shard: then a checkpoint is read.
            "expect": {"steps_lost_max": None, "world_end": NODES},
            "timeout_s": 600 if controller else 420,
        }
    )


def soak(
    minutes: float,
    seed: int,
    rounds: int | None,
    local: bool,
    out: Path,
    patience: float,
) -> int:
    """Returns 0 if every round passed. The first that fails ends it, and can be run again."""
    from chaos.trial import Stage, run_trial

    tier: TestTier = "processes" if local else "ray"
    until_s, number = time.monotonic() + 60 * minutes, 0
    with Stage(out, patience) as stage:
        while (number < rounds) if rounds is not None else (time.monotonic() < until_s):
            scenario = make_round(seed + number, tier)
            outcome = run_trial(f"round-{seed + number}", scenario, tier, stage)
            say(str(outcome))
            if not outcome.passed:
                for fault in scenario.faults:
                    say(f"      {fault}")
                for verdict in outcome.failures:
                    say(f"      {verdict.claim}: {verdict.found}")
                again = f"elastic-ft chaos soak --seed {seed + number} --rounds 1"
                say(f"again: {again}{' --processes' * local}")
                return FAILED
            number += 1
    say(f"{number} rounds passed, seeds {seed} to {seed + number - 1}")
    return PASSED
