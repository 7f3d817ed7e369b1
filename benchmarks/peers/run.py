"""Every fault, on every system, in turns: ``python benchmarks/peers/run.py --repeats 3``.

A round takes the systems one after the other, so that the machine's drift meets all of them. Each
trains for a while undisturbed, then faults happen to it by the progress it makes, and the world
becomes whole again in between. What was found is written after every fault; a run that was
interrupted goes on where it stopped. The table and the plots are made from that file alone.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from benchmarks.peers import replay, report
from benchmarks.peers.bench import Bench, Late, sample_ids
from benchmarks.peers.settings import TUNED, make_job
from benchmarks.peers.systems import CASES, SYSTEMS, make

FAULTS = ("steady", "worker", "node", "hang", "drain", "replay", "trace")
SLOW = ("hang", "drain", "replay", "trace")  # mostly waiting for deadlines that all have in common
PACKAGES = ("torch", "ray", "torchft", "elastic-ft")


def _version(package: str) -> str:
    """Of what is installed: peers that are not measured need not be."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


# -------------------------------------------------------------------------------- running


class Results:
    """The raw file: one record per (system, round, case), rewritten after each."""

    def __init__(self, path: Path, fresh: bool, report_only: bool = False) -> None:
        self._path = path
        self.values: dict[str, Any] = {"cases": [], "runs": []}
        if path.exists() and not fresh:
            self.values = json.loads(path.read_text())
        if report_only:  # as it was when they were measured
            return
        self.values |= {
            "command": "python benchmarks/peers/run.py",
            "job": make_job(),
            "tuned": TUNED,
            "versions": {name: _version(name) for name in PACKAGES}
            | {"python": platform.python_version()},
            "machine": {"cores": os.cpu_count(), "system": platform.platform()},
            "replay": replay.described(),
        }

    def missing(self, system: str, number: int, cases: list[str]) -> list[str]:
        done = {
            case["case"]
            for case in self.values["cases"]
            if (case["system"], case["round"]) == (system, number) and "failed" not in case
        }
        return [case for case in cases if case not in done]

    def add(self, system: str, number: int, case: str, found: dict[str, Any]) -> None:
        key = {"system": system, "round": number, "case": case}
        self.forget(system, number, case)
        load = os.getloadavg()[0]
        self.values["cases"].append(key | {"load": round(load, 2)} | found)
        self.save()

    def forget(self, system: str, number: int, case: str) -> None:
        self._drop("cases", {"system": system, "round": number, "case": case})

    def add_run(self, system: str, number: int, losses: list[float | None]) -> None:
        self.values["runs"].append({"system": system, "round": number, "losses": losses})
        self.save()

    def _drop(self, where: str, key: dict[str, Any]) -> None:
        kept = [v for v in self.values[where] if any(v[k] != key[k] for k in key)]
        self.values[where] = kept

    def save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        swap = self._path.with_suffix(".tmp")
        swap.write_text(_one_record_a_line(self.values))
        swap.replace(self._path)


def _one_record_a_line(values: dict[str, Any]) -> str:
    """JSON that can be read, and compared, line by line."""
    parts = []
    for key, value in values.items():
        text = json.dumps(value)
        if key in ("cases", "runs"):
            text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def one_run(
    name: str, number: int, cases: list[str], results: Results, deadline_s: float
) -> str | None:
    """The cases on one start of the system. Returns the one that failed, if one did."""
    case = "start"
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        try:
            with make(name, Path(folder)) as system:
                bench = Bench(system, deadline_s)
                try:
                    bench.whole()
                    results.forget(name, number, "start")  # that it once failed to
                    for case in cases:
                        began_s = time.monotonic()
                        found = getattr(bench, case)()
                        found["case_s"] = round(time.monotonic() - began_s, 2)
                        results.add(name, number, case, found)
                        _say(name, number, case, found)
                finally:
                    results.add_run(name, number, bench.losses())
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            results.add(name, number, case, {"failed": reason})
            print(f"{name}, round {number}, {case}: FAILED {reason}", flush=True)
            if not isinstance(error, Late):
                traceback.print_exc()
            for path in sorted(Path(folder).glob("*.out")):
                print(f"--- {path.name}\n{path.read_text()[-1500:]}", file=sys.stderr)
            return case
    return None


def _say(name: str, number: int, case: str, found: dict[str, Any]) -> None:
    keys = ("paused_s", "noticed_s", "steps_redone", "samples_lost", "goodput", "tokens_per_s")
    told = {k: round(found[k], 3) for k in keys if found.get(k) is not None}
    print(f"{name}, round {number}, {case}: {told or found}", flush=True)


def reference(steps: int, results: Results) -> None:
    """Losses of the same training undisturbed, in one process."""
    if len(results.values.get("reference", ())) >= steps:
        return
    script = [sys.executable, str(Path(__file__).with_name("reference.py")), str(steps)]
    done = subprocess.run(script, capture_output=True, text=True, check=True, timeout=900)
    results.values["reference"] = json.loads(done.stdout)
    results.save()


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """So that no system outlives the harness."""

    def end(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    parser.add_argument("--slow-repeats", type=int, default=1, help=f"of {', '.join(SLOW)}")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--cases", nargs="+", default=list(FAULTS), choices=list(FAULTS))
    parser.add_argument("--deadline-s", type=float, default=90, help="of each wait of a case")
    parser.add_argument("--reference-steps", type=int, default=2000, help="compare at most these")
    parser.add_argument("--out", default="benchmarks/results/peers.json")
    parser.add_argument("--document", default="docs/benchmarks.md", help="'' leaves it alone")
    parser.add_argument("--no-plots", action="store_true")
    parser.add_argument("--fresh", action="store_true", help="forget an earlier run's results")
    parser.add_argument("--report-only", action="store_true", help="from the results as they are")
    arguments = parser.parse_args()
    only = arguments.report_only
    results = Results(Path(arguments.out), arguments.fresh and not only, only)
    if not only:
        with _ended_by_sigterm():
            sample_ids()(1)  # the tokens are made before anything is timed
            for number in range(arguments.repeats):
                for name in arguments.systems:
                    _one_round(name, number, arguments, results)
            longest = max((len(run["losses"]) for run in results.values["runs"]), default=0)
            reference(min(longest, arguments.reference_steps), results)
    report.write(
        results.values, Path(arguments.out), arguments.document, plots=not arguments.no_plots
    )


def _one_round(name: str, number: int, arguments: argparse.Namespace, results: Results) -> None:
    """A case that fails is given up for this time; those after it get a start of their own."""
    cases = [case for case in arguments.cases if case in CASES[name]]
    if number >= arguments.slow_repeats:
        cases = [case for case in cases if case not in SLOW]
    missing = results.missing(name, number, cases)
    while missing:
        failed = one_run(name, number, missing, results, arguments.deadline_s)
        if failed is None or failed == "start":
            return
        missing = missing[missing.index(failed) + 1 :]


if __name__ == "__main__":
    main()
