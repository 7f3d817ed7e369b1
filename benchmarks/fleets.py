"""``elastic-ft simulate`` with its defaults, as raw data and as the table in docs/benchmarks.md.

python benchmarks/fleets.py
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.document import put, table

DEADLINE_S = 600.0
SHARES = ("goodput", "away", "paused", "redone", "checkpoints")


def markdown(found: dict[str, Any], raw: str) -> str:
    rows = [
        [
            f"{row['rate']['name']}, {row['days']:g} days",
            *(f"{row['gpus']:,}", str(row["units"]), str(outcome["interruptions"])),
            outcome["system"],
            *(f"{outcome[share]:.2%}" for share in SHARES),
        ]
        for row in found["rows"]
        for outcome in row["outcomes"]
    ]
    titles = ["failures", "GPUs", "units", "losses", "system", *SHARES]
    sources = {row["rate"]["name"]: row["rate"]["source"] for row in found["rows"]}
    lines = [f"- {name}: {source}" for name, source in sources.items()]
    costs = ", ".join(f"{name} {value:g}" for name, value in found["costs"].items())
    parts = [
        table(titles, rows),
        "\n".join(lines),
        f"Costs: {costs}. Seed {found['seed']}; `{raw}`.",
    ]
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="benchmarks/results/fleets.json")
    parser.add_argument("--document", default="docs/benchmarks.md", help="'' leaves it alone")
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "elastic_ft", "simulate", "--json"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=True
    )
    Path(arguments.out).parent.mkdir(parents=True, exist_ok=True)
    Path(arguments.out).write_text(done.stdout)
    text = markdown(json.loads(done.stdout), arguments.out)
    print(text)
    if arguments.document:
        put(Path(arguments.document), "simulate", text)


if __name__ == "__main__":
    main()
