"""Breaks the code on purpose, one fault at a time, and demands that tests/core or tests/sim notice.

    python tests/mutants [--jobs 2] [--only NAME ...] [--core-alone] [--check]

Each mutant of core.toml and blinded.toml is applied to a copy of the tree, and the tests run there
until the first fails, those that know most of the mutated file first. Survivors, mutants whose line
is no longer there, and those whose tests did not end in time, which says nothing of them, end in
exit code 1. ``--check`` only looks whether each still applies;
``--core-alone`` leaves the simulator's tests out: it takes seconds a mutant, and more survive.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "elastic_ft"
COPIED = (PACKAGE, "benchmarks", "docs", "tests/core", "tests/sim")
TIMEOUT_S = 900  # for all tests of one mutant; one that loops is ended, and fails, before
# Nothing mutated is used there, or they measure time.
LEFT_OUT = (
    "test_sharding.py",
    "test_planner.py",
    "test_layout_costs.py",
    "test_choosing.py",
    "test_scale.py",
    "test_reshard_costs.py",
)
MOST = ("core/test_membership.py", "core/test_sources.py", "core/test_comings.py")
FIRST = {  # what knows most of a file
    "commits.py": ("core/test_commits.py", "core/test_intervals.py"),
    "recovery.py": ("core/test_recovery.py",),
    "buddies.py": ("core/test_buddies.py",),
    "blame.py": ("core/test_blame.py",),
    "restoring.py": ("core/test_keepers.py", "core/test_forgetting.py", "core/test_recovery.py"),
    "elasticity.py": ("core/test_elasticity.py", "core/test_evictions.py"),
    "departures.py": ("core/test_elasticity.py", "core/test_evictions.py"),
    "table.py": ("core/test_table.py",),
    "checks.py": ("sim/test_checks.py",),
    "follower.py": ("core/test_follower.py",),
    "adoption.py": ("core/test_adoption.py",),
    "keepers.py": ("core/test_keepers.py", "core/test_many_keepers.py", "core/test_forgetting.py"),
    "rescuing.py": ("core/test_rescuing.py",),
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """``old``, which is in ``file`` exactly once, becomes ``new``; ``breaks``: what that does."""

    name: str
    file: str
    old: str
    new: str
    breaks: str

    @property
    def path(self) -> str:
        return f"{PACKAGE}/{self.file}"

    def apply(self, root: Path) -> None:
        """Raises ValueError where it no longer applies, or would change nothing."""
        path = root / self.path
        text = path.read_text()
        if (count := text.count(self.old)) != 1 or self.old == self.new:
            raise ValueError(f"{self.name}: what it replaces is {count} times in {self.path}")
        text = text.replace(self.old, self.new)
        compile(text, str(path), "exec")
        path.write_text(text)


@dataclass(frozen=True, slots=True)
class Verdict:
    mutant: Mutant
    killer: str  # the test that noticed; empty: nobody did
    seconds: float
    ended: bool = True  # all tests were run, or one noticed


def mutants() -> list[Mutant]:
    found = []
    for path in sorted(Path(__file__).parent.glob("*.toml")):
        found += [Mutant(**entry) for entry in tomllib.loads(path.read_text())["mutant"]]
    names = [mutant.name for mutant in found]
    assert len(set(names)) == len(names), "two mutants have one name"
    return found


def tests_for(mutant: Mutant, root: Path, core_alone: bool) -> list[str]:
    """Files, the most telling first: the simulator takes longest, and comes last."""
    first = FIRST.get(Path(mutant.file).name, MOST)
    core = sorted(path.name for path in (root / "tests/core").glob("test_*.py"))
    sim = sorted(path.name for path in (root / "tests/sim").glob("test_*.py"))
    rest = [f"core/{name}" for name in core if name not in LEFT_OUT]
    rest += [] if core_alone else [f"sim/{name}" for name in sim]
    return [f"tests/{name}" for name in dict.fromkeys((*first, *rest))]


def copy_of(root: Path, into: Path) -> None:
    """With what is compiled, and the times of files: compiling outlasts most mutants."""
    for name in COPIED:
        shutil.copytree(root / name, into / name)
    shutil.copy2(root / "pyproject.toml", into)
    for path in root.glob("tests/*.py"):
        shutil.copy2(path, into / "tests")


def run_tests(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Raises TimeoutExpired. Hypothesis draws the same examples for each mutant."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-x"]
    command += ["--no-header", "--tb=no", "--timeout=300", "--hypothesis-seed=1"]
    return subprocess.run(
        [*command, *arguments],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def try_one(mutant: Mutant, base: Path, core_alone: bool) -> Verdict:
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        root = Path(folder)
        copy_of(base, root)
        mutant.apply(root)
        try:
            done = run_tests(root, *tests_for(mutant, root, core_alone))
        except subprocess.TimeoutExpired:
            return Verdict(mutant, "", time.monotonic() - began_s, ended=False)
    if done.returncode not in (0, 1, 2):
        raise RuntimeError(f"{mutant.name}: pytest ended {done.returncode}:\n{done.stdout}")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode and not failed:
        raise RuntimeError(f"{mutant.name}: pytest says nothing of what failed:\n{done.stdout}")
    killer = failed[0].split(maxsplit=1)[1].partition(" - ")[0] if done.returncode else ""
    if killer and run_tests(base, killer).returncode == 1:
        raise RuntimeError(f"{mutant.name}: {killer} fails without it, too")
    return Verdict(mutant, killer, time.monotonic() - began_s)


def show(verdict: Verdict) -> None:
    how = f"killed by {verdict.killer}" if verdict.killer else f"SURVIVED: {verdict.mutant.breaks}"
    how = how if verdict.ended else f"UNDECIDED: its tests were not through after {TIMEOUT_S} s"
    print(f"{verdict.mutant.name}: {how} ({verdict.seconds:.0f} s)", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these alone")
    parser.add_argument("--core-alone", action="store_true", help="without the simulator's tests")
    parser.add_argument("--check", action="store_true", help="only whether each still applies")
    arguments = parser.parse_args()
    chosen = [m for m in mutants() if not arguments.only or m.name in arguments.only]
    problems = []
    for mutant in chosen:
        with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
            path = Path(folder) / mutant.path
            path.parent.mkdir(parents=True)
            shutil.copy(ROOT / mutant.path, path)
            try:
                mutant.apply(Path(folder))
            except (ValueError, SyntaxError) as error:
                problems.append(str(error))
    if problems or arguments.check:
        print("\n".join([*problems, f"{len(chosen) - len(problems)} of {len(chosen)} apply"]))
        return 1 if problems else 0
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        base = Path(folder)
        copy_of(ROOT, base)
        run_tests(base, "--collect-only", "tests").check_returncode()  # compiles
        with ThreadPoolExecutor(arguments.jobs) as pool:
            tries = [pool.submit(try_one, m, base, arguments.core_alone) for m in chosen]
            for done in as_completed(tries):
                verdicts.append(done.result())
                show(verdicts[-1])
    alive = [verdict.mutant.name for verdict in verdicts if not verdict.killer]
    undecided = sum(not verdict.ended for verdict in verdicts)
    print(
        f"{len(verdicts) - len(alive)} of {len(verdicts)} killed, {undecided} undecided; "
        f"not killed: {alive or 'none'}"
    )
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
