"""Traces of nodes that come and go, replayed in compressed time against a real run.

A trace becomes a curve of how many nodes there are; the runner kills and adds nodes to follow it.
What went at one moment goes at one moment: correlated losses stay correlated.
"""

from __future__ import annotations

import csv
import itertools
import random
from dataclasses import dataclass
from pathlib import Path

from chaos.fault_kinds import TestTier
from chaos.outcome import FAILED, PASSED
from chaos.scenario import Scenario
from elastic_ft.cli.progress import say
from elastic_ft.errors import ConfigError
from elastic_ft.observe.run_reader import RunReader

TRACES = Path(__file__).parent / "traces"
HOUR_S = 3600.0
NODES_MIN = 2
SETTLE_S = 180.0  # beside the trace's own time: to start, to train on, to stop
LLAMA3_INTERRUPTIONS, LLAMA3_DAYS = 419, 54  # unexpected ones of one job (Llama 3, section 3.3.4)


@dataclass(frozen=True, slots=True)
class TraceChange:
    """From ``at_s`` on there are ``nodes`` nodes."""

    at_s: float
    nodes: int


def load_trace(name: str, workers: int, seed: int) -> tuple[TraceChange, ...]:
    """Returns the trace of that name, or in that file, for a cluster of ``workers`` nodes.

    Raises ConfigError.
    """
    if name in GENERATED:
        return GENERATED[name](random.Random(f"{name} {seed}"), workers)
    path = Path(name) if Path(name).is_file() else TRACES / f"{name}.csv"
    if not path.is_file():
        known = ", ".join([*sorted(p.stem for p in TRACES.glob("*.csv")), *GENERATED])
        raise ConfigError(f"{name}: unknown trace: no such file, and none of {known}")
    return scaled(read_csv(path), workers)


def read_csv(path: Path) -> tuple[TraceChange, ...]:
    """Of lines ``milliseconds,add|remove,node``. Raises ConfigError."""
    nodes: set[str] = set()
    changes: dict[float, int] = {}
    with path.open(newline="") as file:
        for number, row in enumerate(csv.reader(file), 1):
            try:
                at_ms, what, node = row
                change = {"add": nodes.add, "remove": nodes.discard}[what]
                at_s = int(at_ms) / 1000
            except (ValueError, KeyError):
                expected = "expected milliseconds,add|remove,node"
                raise ConfigError(f"{path}:{number}: {expected}, found {','.join(row)}") from None
            change(node)
            changes[at_s] = len(nodes)
    return tuple(TraceChange(at_s, count) for at_s, count in sorted(changes.items()))


def scaled(changes: tuple[TraceChange, ...], workers: int) -> tuple[TraceChange, ...]:
    """The curve with ``workers`` at its highest, and as flat lines where that changes nothing."""
    most = max(change.nodes for change in changes)
    result: list[TraceChange] = []
    for change in changes:
        nodes = max(NODES_MIN, round(change.nodes * workers / most))
        if not result or result[-1].nodes != nodes:
            result.append(TraceChange(change.at_s, nodes))
    return tuple(result)


def compressed(changes: tuple[TraceChange, ...], seconds: float) -> tuple[TraceChange, ...]:
    """The trace in ``seconds``, from its highest point on: what comes before is the build-up."""
    most = max(change.nodes for change in changes)
    first = next(i for i, change in enumerate(changes) if change.nodes == most)
    rest = changes[first:]
    began_s, length_s = rest[0].at_s, max(1.0, rest[-1].at_s - rest[0].at_s)
    ratio = seconds / length_s
    return tuple(TraceChange(round((c.at_s - began_s) * ratio, 3), c.nodes) for c in rest)


# --------------------------------------------------------------------------- generated


def poisson(rng: random.Random, workers: int) -> tuple[TraceChange, ...]:
    """A day in which each node fails every 6 h on average, and is replaced after half an hour."""
    return _failures(rng, workers, workers / (6 * HOUR_S), 0.5 * HOUR_S, 24 * HOUR_S)


def llama3(rng: random.Random, workers: int) -> tuple[TraceChange, ...]:
    """Five days at the rate of Llama 3's job (one interruption in 3.1 h), each of one node."""
    rate = LLAMA3_INTERRUPTIONS / (LLAMA3_DAYS * 24 * HOUR_S)
    return _failures(rng, workers, rate, 0.5 * HOUR_S, 120 * HOUR_S)


def racks(rng: random.Random, workers: int) -> tuple[TraceChange, ...]:
    """A day in which a rack, a quarter of all, fails every 2 h, and is back after an hour."""
    return _failures(rng, workers, 1 / (2 * HOUR_S), HOUR_S, 24 * HOUR_S, max(1, workers // 4))


def _failures(
    rng: random.Random,
    workers: int,
    rate: float,
    repair_s: float,
    length_s: float,
    together: int = 1,
) -> tuple[TraceChange, ...]:
    """Failures at ``rate`` (per second, of the whole cluster), ``together`` nodes each."""
    at_s, moments = 0.0, []
    while (at_s := at_s + rng.expovariate(rate)) < length_s:
        moments += [(at_s, -together), (at_s + repair_s, together)]
    missing, changes = 0, [TraceChange(0.0, workers)]
    for moment_s, change in sorted(moments):
        missing -= change
        changes.append(TraceChange(moment_s, max(NODES_MIN, workers - missing)))
    return tuple(changes)


GENERATED = {"poisson": poisson, "racks": racks, "llama3": llama3}


# ------------------------------------------------------------------------------ the replay


def scenario_of(
    changes: tuple[TraceChange, ...], workers: int, seconds: float, seed: int
) -> Scenario:
    faults = [{"at_s": change.at_s, "capacity": change.nodes} for change in changes[1:]]
    return Scenario.model_validate(
        {
            "description": f"A trace in {seconds:g} s.",
            "seed": seed,
            "cluster": {"nodes": workers},
            "job": {
                "steps": 100_000,
                "batch": {"global_batch_size": 2 * workers, "micro_batch_size": 2},
                "data": {"kwargs": {"pause_s": 0.1}},  # a step that costs something to repeat
                "checkpoint": {"every_steps": 10},
            },
            "faults": faults,
            "expect": {"steps_lost_max": None, "same_losses": False},
            "timeout_s": seconds + SETTLE_S,
        }
    )


def run_trace(
    name: str,
    minutes: float,
    workers: int,
    seed: int,
    local: bool,
    out: Path,
    patience: float,
) -> int:
    """Returns 0 if the run came through and I1 to I8 hold. Prints what it cost."""
    from chaos.trial import Stage, run_trial

    changes = compressed(load_trace(name, workers, seed), 60 * minutes)
    scenario = scenario_of(changes, workers, 60 * minutes, seed)
    losses = sum(max(0, a.nodes - b.nodes) for a, b in itertools.pairwise(changes))
    gains = sum(max(0, b.nodes - a.nodes) for a, b in itertools.pairwise(changes))
    say(
        f"{name}: {len(changes) - 1} changes in {minutes:g} min, {losses} nodes lost and {gains} "
        f"gained, between {min(c.nodes for c in changes)} and {workers}"
    )
    tier: TestTier = "processes" if local else "ray"
    with Stage(out, patience) as stage:
        outcome = run_trial(Path(name).stem, scenario, tier, stage)
    say(str(outcome))
    for verdict in outcome.verdicts:
        word = "PASS" if verdict.passed else "FAIL"
        say(f"      {word}  {verdict.claim}: {verdict.found}")
    if result := RunReader(out / f"{Path(name).stem}-{tier}" / "run").result():
        print_costs(result)
    return PASSED if outcome.passed else FAILED


def print_costs(result: dict[str, object]) -> None:
    say(f"goodput {result['goodput']:.1%} of {result['wall_s']:.0f} s; {result['steps']} steps")
    badput = result["badput"]
    assert isinstance(badput, dict)
    for cause, seconds in sorted(badput.items(), key=lambda item: -float(item[1])):
        say(f"      {cause:32} {float(seconds):7.1f} s")
