"""``elastic-ft simulate``: what failures cost fleets that nobody has to hand.

Exit codes: 0; 2 bad usage.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, fields
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from elastic_ft.errors import ConfigError
from elastic_ft.sim import fleet

GPUS = (512, 4096, 16_384)
DAYS = {"llama3": 14.0, "spot": 0.5}
console = Console(highlight=False, soft_wrap=True)

SecondsOption = Annotated[float | None, typer.Option(metavar="S", min=0)]


def simulate(
    gpus: Annotated[
        list[int] | None, typer.Option(metavar="N", min=16, help="May be repeated.")
    ] = None,
    rate: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="llama3 or spot; may be repeated.")
    ] = None,
    days: Annotated[
        float | None, typer.Option(min=0.01, help="By default 14 for llama3, 0.5 for spot.")
    ] = None,
    unit_gpus: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="GPUs that fail together and train on together."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    away_s: SecondsOption = None,
    step_s: SecondsOption = None,
    notice_s: SecondsOption = None,
    form_s: SecondsOption = None,
    collective_timeout_s: SecondsOption = None,
    restart_s: SecondsOption = None,
    checkpoint_stall_s: SecondsOption = None,
    start_s: SecondsOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
) -> int:
    """Simulate the goodput of three ways to recover."""
    given = {
        "step_s": step_s,
        "notice_s": notice_s,
        "form_s": form_s,
        "collective_timeout_s": collective_timeout_s,
        "restart_s": restart_s,
        "checkpoint_stall_s": checkpoint_stall_s,
        "start_s": start_s,
    }
    costs = fleet.Costs(**{name: value for name, value in given.items() if value is not None})
    rates = rate or list(DAYS)
    if unknown := [name for name in rates if name not in DAYS]:
        raise ConfigError(f"--rate: {unknown[0]!r}: expected one of {', '.join(DAYS)}")
    if costs.step_s <= 0:
        raise ConfigError("--step-s: expected more than 0")
    rows = []
    for name in rates:
        for count in gpus or GPUS:
            rows.append(_row(name, count, days or DAYS[name], unit_gpus, away_s, costs, seed))
    if as_json:
        print(json.dumps({"seed": seed, "costs": asdict(costs), "rows": rows}, indent=2))
    else:
        _print(rows, costs, {name for name, value in given.items() if value is not None})
    return 0


def _row(
    name: str,
    gpus: int,
    days: float,
    unit_gpus: int | None,
    away_s: float | None,
    costs: fleet.Costs,
    seed: int,
) -> dict[str, Any]:
    units = gpus // unit_gpus if unit_gpus else fleet.units_of(gpus)
    if units < 2:
        raise ConfigError(f"--unit-gpus: {unit_gpus}: {gpus} GPUs make fewer than two such units")
    away = {} if away_s is None else {"away_s": away_s}
    rate = fleet.llama3_failures(gpus, **away) if name == "llama3" else fleet.spot(**away)
    began_s = time.monotonic()
    outcomes = fleet.compare_ways(rate, units, days, costs, seed)
    return {
        "rate": asdict(rate),
        "gpus": gpus,
        "units": units,
        "days": days,
        "outcomes": [asdict(outcome) for outcome in outcomes],
        "took_s": round(time.monotonic() - began_s, 2),
    }


def _print(rows: list[dict[str, Any]], costs: fleet.Costs, given: set[str]) -> None:
    for rate, days in {row["rate"]["name"]: (row["rate"], row["days"]) for row in rows}.values():
        away = f"away for {rate['away_s']:g} s on average"
        console.print(f"{rate['name']}, {days:g} days: {rate['source']}; {away}", markup=False)
        console.print(_table([row for row in rows if row["rate"]["name"] == rate["name"]]))
    for field in fields(costs):
        source = "as given" if field.name in given else fleet.SOURCES[field.name]
        console.print(f"{field.name} {getattr(costs, field.name):g}: {source}", markup=False)
    events = sum(outcome["core_events"] for row in rows for outcome in row["outcomes"])
    took_s = sum(row["took_s"] for row in rows)
    console.print(f"elastic_ft is the real core: {events:,} events; {took_s:.1f} s in all")


def _table(rows: list[dict[str, Any]]) -> Table:
    shares = ("goodput", "away", "paused", "redone", "checkpoints")
    table = Table(box=None, pad_edge=False)
    for title in ("GPUs", "units", "losses"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("system", no_wrap=True)
    for title in shares:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        for outcome in row["outcomes"]:
            table.add_row(
                *(f"{row['gpus']:,}", str(row["units"]), str(outcome["interruptions"])),
                outcome["system"],
                *(f"{outcome[share]:.2%}" for share in shares),
            )
    return table
