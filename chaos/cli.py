"""``elastic-ft chaos``: scenarios against real runs, and checks of finished ones."""

from __future__ import annotations

import time
from collections.abc import Set
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from chaos.fault_kinds import TIERS, TestTier
from chaos.outcome import FAILED, PASSED, ScenarioOutcome
from chaos.scenario import SCENARIOS, Scenario, load_scenario
from elastic_ft.cli.options import RunFolderOf
from elastic_ft.cli.progress import console, say
from elastic_ft.core.terms import SAMPLES
from elastic_ft.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Break runs on purpose, and check what came of it.")

On = Annotated[
    str | None,
    typer.Option("--on", metavar="TIER", help=f"One of {', '.join(TIERS)} (default: the highest)."),
]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="TIER", help="Those alone whose tier this is; may be repeated."),
]
OutFolder = Annotated[Path, typer.Option("--out", metavar="DIR", help="Where run folders are put.")]
Patience = Annotated[
    float, typer.Option("--patience", min=1, help="Times each time limit: for a busy machine.")
]
OnProcesses = Annotated[
    bool,
    typer.Option("--processes", "--local", help="Plain processes of this machine, no Ray."),
]
OUT = Path("runs/chaos")


@app.command("list")
def list_scenarios() -> int:
    """Print the scenarios that there are, and where each can run."""
    from chaos.trial import highest_tier

    table = Table("scenario", "faults", "highest tier here", box=None, pad_edge=False)
    for path in sorted(SCENARIOS.glob("*.yaml")):
        scenario = load_scenario(path.stem)
        tier, why = highest_tier(scenario)
        table.add_row(path.stem, "\n".join(map(str, scenario.faults)), tier or f"none: {why}")
    console.print(table)
    return PASSED


@app.command("run")
def run(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCENARIO...", help="Files, or names; none: all that come with it."),
    ] = None,
    on: On = None,
    only: Only = None,
    patience: Patience = 1,
    out: OutFolder = OUT,
) -> int:
    """Run scenarios, each on its highest tier.

    One whose fault never fires fails. Exit code 0: all that can run here have passed; 1: one
    failed, or none can run here.
    """
    names = names or [path.stem for path in sorted(SCENARIOS.glob("*.yaml"))]
    scenarios = [(Path(name).stem, load_scenario(name)) for name in names]
    tiers = {tier_of(tier, "--only") for tier in only or ()}
    return run_all(scenarios, tier_of(on), out, patience, tiers)


def tier_of(name: str | None, option: str = "--on") -> TestTier | None:
    if name is None:
        return None
    for tier in TIERS:
        if tier == name:
            return tier
    raise ConfigError(f"{option}: expected one of {', '.join(TIERS)}, found {name!r}")


def run_all(
    scenarios: list[tuple[str, Scenario]],
    on: TestTier | None,
    out: Path,
    patience: float,
    only: Set[TestTier | None] = frozenset(),
) -> int:
    """``only``: the tiers of which scenarios are run; none: all. What can't run here is named
    whatever the tier."""
    from chaos.trial import Stage, highest_tier, lacks, run_trial

    outcomes: list[ScenarioOutcome] = []
    began_s = time.monotonic()
    with Stage(out, patience) as stage:
        for name, scenario in scenarios:
            tier, why = highest_tier(scenario) if on is None else (on, lacks(scenario, on))
            if only and tier is not None and tier not in only:
                continue
            if why or tier is None:
                outcomes.append(ScenarioOutcome(name, tier or "none", skipped=why))
            else:
                outcomes.append(run_trial(name, scenario, tier, stage))
            say(str(outcomes[-1]))
            for verdict in outcomes[-1].failures:
                say(f"      {verdict.claim}: {verdict.found}")
    passed = sum(outcome.passed for outcome in outcomes)
    failed = [outcome for outcome in outcomes if not outcome.passed and not outcome.skipped]
    skipped = len(outcomes) - passed - len(failed)
    took_s = time.monotonic() - began_s
    console.print(f"{passed} passed, {len(failed)} failed, {skipped} skipped in {took_s:.0f} s")
    if failed:
        say(f"run folders: {out}")
    return FAILED if failed or not passed else PASSED


@app.command("check")
def check(
    run_folder: RunFolderOf,
    beside: Annotated[
        str | None, typer.Option(metavar="RUN", help="The same job undisturbed: for I3.")
    ] = None,
) -> int:
    """Check the invariants I1-I8 in the folder of a finished run."""
    from chaos.check import expected_of, losses_of, same_losses
    from elastic_ft.core.invariants import CHECKS
    from elastic_ft.observe.run_reader import RunReader

    run = RunReader(run_folder)
    run.content("events.jsonl")
    steps, opened = run.steps(), [e for e in run.events() if e["event"] == "data_opened"]
    samples = opened[-1]["data"].get(SAMPLES) if opened else None
    first = steps[0]["step"] if steps else 1
    violations = run.violations(replace(expected_of(run.job(), samples), first_step=first))
    by_invariant: dict[str, list[str]] = {invariant: [] for invariant in CHECKS}
    for violation in violations:
        by_invariant.setdefault(violation.invariant, []).append(violation.message)
    for invariant, messages in sorted(by_invariant.items()):
        what = (CHECKS[invariant].__doc__ or "").split(": ", 1)[-1].splitlines()[0]
        say(f"{'FAIL' if messages else 'PASS'}  {invariant}  {what}")
        for message in messages:
            say(f"      {message}")
    if beside is None:
        return FAILED if violations else PASSED
    verdict = same_losses(run, losses_of(RunReader(beside)))
    console.print(f"{'PASS' if verdict.passed else 'FAIL'}  I3  {verdict.claim}: {verdict.found}")
    return PASSED if verdict.passed and not violations else FAILED


@app.command("soak")
def soak(
    minutes: Annotated[float, typer.Option(min=0, help="Begin no round after so long.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Of the first round's faults.")] = 0,
    rounds: Annotated[int | None, typer.Option(min=1, help="At most so many rounds.")] = None,
    processes: OnProcesses = False,
    patience: Patience = 1,
    out: OutFolder = Path("runs/soak"),
) -> int:
    """Inject random faults, heal all; the job must converge.

    Goes on round by round, with faults from all injectors.
    """
    from chaos.soak import soak as run_rounds

    return run_rounds(minutes, seed, rounds, processes, out, patience)


@app.command("trace")
def trace(
    name: Annotated[
        str, typer.Argument(metavar="TRACE", help="A CSV file, bamboo-aws-p3, or a generated one.")
    ] = "bamboo-aws-p3",
    minutes: Annotated[float, typer.Option(min=0.1, help="The whole trace takes so long.")] = 5,
    workers: Annotated[int, typer.Option(min=2, help="As many as the trace has at most.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Of a generated trace.")] = 0,
    processes: OnProcesses = False,
    patience: Patience = 1,
    out: OutFolder = Path("runs/trace"),
) -> int:
    """Run beside a trace of nodes that come and go.

    Its time is compressed. What is printed is the goodput.

    Generated: poisson, racks (correlated loss), llama3 (its published rates).
    """
    from chaos.trace import run_trace

    return run_trace(name, minutes, workers, seed, processes, out, patience)
