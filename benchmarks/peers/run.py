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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import psutil

from benchmarks.peers import analysis, replay, report
from benchmarks.peers.settings import (
    CHECKPOINT_EVERY_STEPS,
    DRAIN_NOTICE_S,
    FAULT_PHASE,
    MICRO_BATCHES,
    TUNED,
    WORKERS,
    make_job,
)
from benchmarks.peers.systems import CASES, SYSTEMS, System, make
from chaos.trace import TraceChange

FAULTS = ("steady", "worker", "node", "hang", "drain", "replay", "trace")
SLOW = ("hang", "drain", "replay", "trace")  # mostly waiting for deadlines that all have in common
PACKAGES = ("torch", "ray", "torchft", "elastic-ft")
POLL_S = 0.01
STEADY_STEPS, WARM_STEPS = 300, 50
STEADY_POLL_S = 1.0  # reading what is written takes processor time from who writes it
SETTLE_STEPS = 8  # of a whole world, before anything is done to it
AFTER_STEPS = 6  # of a smaller world, before a node comes back


class Late(Exception):
    """A system did not come so far within the case's deadline."""


class Bench:
    """One system, watched."""

    def __init__(self, system: System, deadline_s: float) -> None:
        self.system, self.log, self._deadline_s = system, system.log, deadline_s
        self._respawned = 0

    def until(self, what: str, condition: Callable[[], Any], poll_s: float = POLL_S) -> Any:
        deadline_s = time.monotonic() + self._deadline_s
        while time.monotonic() < deadline_s:
            self.log.read()
            if found := condition():
                return found
            self.system.tend()
            time.sleep(poll_s)
        raise Late(f"{what}: not within {self._deadline_s:g} s")

    def newest(self) -> analysis.Line | None:
        steps = analysis.new_steps(self.log.lines[-400:])
        return steps[-1] if steps else None

    def _step(self) -> int:
        newest = self.newest()
        return newest.step if newest else 0

    def settled(self) -> bool:
        """The last new steps are all of one whole world, with every rank taking part."""
        recent = analysis.new_steps(self.log.lines[-400:])[-SETTLE_STEPS:]
        whole = len(recent) == SETTLE_STEPS and all(line.world == WORKERS for line in recent)
        return (
            whole
            and len({line.attempt for line in recent}) == 1
            and len(self.log.members()) == WORKERS
        )

    def whole(self) -> None:
        self.until("a whole world", self.settled)

    def phase(self) -> None:
        """Between two checkpoints, by the longer of their intervals."""

        def there() -> bool:
            newest = self.newest()
            late = (newest.step - FAULT_PHASE) % CHECKPOINT_EVERY_STEPS if newest else 99
            return late < 8 and self.settled()

        self.until("the place of the fault", there)

    def victim(self) -> int:
        """The pid of the last rank's worker."""
        members = self.log.members()
        return members[max(members)]

    # ------------------------------------------------------------------------- the cases

    def steady(self) -> dict[str, Any]:
        self.whole()
        first = self._step() + WARM_STEPS
        wanted = range(first, first + STEADY_STEPS)
        self.until("steps enough", lambda: self._step() >= wanted.stop, STEADY_POLL_S)
        steps = [line for line in analysis.new_steps(self.log.lines) if line.step in wanted]
        step_s = analysis.step_time_s(steps)
        mean_s = (steps[-1].at_s - steps[0].at_s) / (len(steps) - 1)
        tokens = MICRO_BATCHES * make_job()["data"]["sequence_length"]
        found = {"step_s": step_s, "mean_step_s": mean_s, "tokens_per_s": tokens / mean_s}
        self.whole()  # the newest lines are of every rank again, as ``members`` takes them to be
        return found | self._memory()

    def _memory(self) -> dict[str, Any]:
        """PSS, MB: of the workers, and of all that the system has started."""
        workers = [_pss_mb(pid) for pid in self.log.members().values()]
        children = [p.pid for p in psutil.Process().children(recursive=True)]
        everything = [_pss_mb(pid) for pid in children]
        return {"pss_workers_mb": sum(workers), "pss_all_mb": sum(everything)}

    def worker(self) -> dict[str, Any]:
        self.phase()
        pid = self.victim()
        at_s = time.time()
        os.kill(pid, signal.SIGKILL)
        found = self._outage(at_s)
        self.whole()
        return self._ended(found)

    def hang(self) -> dict[str, Any]:
        self.phase()
        pid = self.victim()
        at_s = time.time()
        os.kill(pid, signal.SIGSTOP)
        try:
            found = self._outage(at_s)
            self.whole()
        finally:
            with contextlib.suppress(ProcessLookupError):  # given up and killed, as it should be
                os.kill(pid, signal.SIGCONT)
        return self._ended(found)

    def node(self) -> dict[str, Any]:
        self.phase()
        node = self.system.node_of(self.victim())
        at_s = time.time()
        self.system.kill_node(node)
        found = self._outage(at_s)
        return self._ended_smaller(found) | {"join": self._join()}

    def drain(self) -> dict[str, Any]:
        if not self.system.drains:
            return {"unsupported": "it has no use for a notice: as a node kill at its end"}
        self.phase()
        node = self.system.node_of(self.victim())
        at_s = time.time()
        self.system.drain_node(node, DRAIN_NOTICE_S)
        found = self._outage(at_s, announced=True)
        time.sleep(max(0.0, at_s + DRAIN_NOTICE_S - time.time()))  # the cloud takes it
        if node in self.system.nodes():
            self.system.kill_node(node)
        found = self._ended_smaller(found) | self._outage(at_s, announced=True)
        return found | {"join": self._join()}

    def _ended_smaller(self, found: dict[str, Any]) -> dict[str, Any]:
        self.until("steps of a smaller world", lambda: self._after(AFTER_STEPS))
        return self._ended(found)

    def _join(self) -> dict[str, Any]:
        """A node takes the place of the lost one."""
        at_s = time.time()
        self.system.add_node()
        self.whole()
        outage = analysis.outage(self.log.lines, at_s, announced=True)
        assert outage is not None
        return self._ended(self._record(at_s, outage))

    def _after(self, steps: int) -> bool:
        recent = analysis.new_steps(self.log.lines[-400:])[-steps:]
        return len(recent) == steps and all(line.world == WORKERS - 1 for line in recent)

    def replay(self) -> dict[str, Any]:
        """A slice of a trace."""
        return self._follow(replay.CHANGES, replay.LENGTH_S)

    def trace(self) -> dict[str, Any]:
        """All of it."""
        return self._follow(replay.whole_trace(), replay.WHOLE_S)

    def _follow(self, changes: tuple[TraceChange, ...], length_s: float) -> dict[str, Any]:
        """Nodes come and go as a trace says."""
        self.whole()
        step_s = analysis.step_time_s(analysis.new_steps(self.log.lines))
        begin_s = time.time()
        for change in changes:
            while (left_s := begin_s + change.at_s - time.time()) > 0:
                self.log.read()
                time.sleep(min(left_s, 0.05))
            nodes = self.system.nodes()
            if change.nodes < len(nodes):
                for node in nodes[change.nodes :]:
                    self.system.kill_node(node)
            for _ in range(change.nodes - len(nodes)):
                self.system.add_node()
        time.sleep(max(0.0, begin_s + length_s - time.time()))
        end_s = time.time()
        self.log.read()
        new = [s for s in analysis.new_steps(self.log.lines) if begin_s < s.at_s <= end_s]
        samples = self._samples(begin_s)
        lost = (samples["samples_lost"] or 0) / max(1, MICRO_BATCHES * len(new))
        return {
            # Steps of a part of the batch count for that part.
            "goodput": analysis.goodput(self.log.lines, begin_s, end_s, step_s) * (1 - lost),
            "steps": len(new),
            "steps_redone": analysis.redone(self.log.lines, begin_s, end_s)
            + self._unlogged(begin_s, end_s),
            "step_s": step_s,
            "seconds": end_s - begin_s,
        } | samples

    # ----------------------------------------------------------------------- the figures

    def _outage(self, at_s: float, *, announced: bool = False) -> dict[str, Any]:
        outage = self.until(
            "the next new step of another world",
            lambda: analysis.outage(self.log.lines, at_s, announced=announced),
        )
        return self._record(at_s, outage)

    def _record(self, at_s: float, outage: analysis.Outage) -> dict[str, Any]:
        noticed = [(s, what) for s, what in self.log.noticed if s >= at_s]
        first_s, what = min(noticed, default=(None, ""))
        return {
            "at_s": at_s,
            "noticed_s": None if first_s is None else first_s - at_s,
            "noticed_as": what,
            "paused_s": outage.paused_s,
            "step_s": outage.step_s,
            "steps_redone": outage.steps_redone + self._unlogged(at_s, outage.ended_at_s),
        }

    def _unlogged(self, since_s: float, until_s: float) -> int:
        return sum(count for at_s, count in self.log.unlogged if since_s < at_s <= until_s)

    def _ended(self, found: dict[str, Any]) -> dict[str, Any]:
        """With what it took until now: until the world was whole, or has gone on smaller."""
        at_s = found["at_s"]
        until_s = self.log.lines[-1].at_s
        new = [s for s in analysis.new_steps(self.log.lines) if at_s < s.at_s <= until_s]
        # Time that brought no new step, over everything up to here: re-joining included.
        cost_s = until_s - at_s - len(new) * found["step_s"]
        redone = analysis.redone(self.log.lines, at_s, until_s) + self._unlogged(at_s, until_s)
        return (
            found
            | {"cost_s": cost_s, "until_s": until_s - at_s, "steps_redone": redone}
            | (self._samples(at_s))
        )

    def _samples(self, since_s: float) -> dict[str, Any]:
        """Of the steps since, without the very last, which may be under way on some ranks."""
        history = analysis.history(self.log.lines, restarts=self.system.restarts)
        new = [s.step for s in analysis.new_steps(self.log.lines) if s.at_s > since_s]
        if len(new) < 2:
            return {"samples_lost": None, "samples_repeated": None}
        lost, repeated = analysis.sample_faults(history, new[0] - 1, new[-2], _expected())
        return {"samples_lost": lost, "samples_repeated": repeated}

    def losses(self) -> list[float | None]:
        """By step, from 1: of those in the final state."""
        history = analysis.history(self.log.lines, restarts=self.system.restarts)
        last = max(history, default=1) - 1
        found = [history.get(step) for step in range(1, last + 1)]
        return [None if line is None else round(line.mean_loss, 7) for line in found]


_order: list[Any] = []


def _version(package: str) -> str:
    """Of what is installed: peers that are not measured need not be."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _expected() -> Callable[[int], list[int]]:
    """The sample ids of a step."""
    from elastic_ft.config import parse_job
    from elastic_ft.core.batches import DataOrder
    from elastic_ft.data.dataset import open_dataset

    if not _order:
        job = parse_job(make_job())
        _order.append(DataOrder(job.seed, len(open_dataset(job.data, job.seed).train)))
    return lambda step: list(_order[0].sample_ids((step - 1) * MICRO_BATCHES, step * MICRO_BATCHES))


def _pss_mb(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0.0
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) / 1e3


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
            _expected()(1)  # the tokens are made before anything is timed
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
