"""The systems side by side: how each is started, what can happen to it, where its log is."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.peers.analysis import Line
from benchmarks.peers.settings import CHECKPOINT_EVERY_STEPS, TUNED, WORKERS, WORKERS_MIN, make_job
from elastic_ft.observe.run_reader import Tail

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NOTICES = (
    "WorkerLost",
    "WorkerHung",
    "NodeLost",
    "NodeDraining",
    "CollectiveFailed",
    "NobodyMoves",
)


class StepLogs:
    """What the peers' workers write: see ``training.StepLog``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tails: dict[str, Tail] = {}
        self.lines: list[Line] = []
        self.noticed: list[tuple[float, str]] = []
        self.unlogged: list[tuple[float, int]] = []  # steps redone without a line: none here

    def read(self) -> None:
        for path in sorted(self._folder.glob("*.jsonl")):
            tail = self._tails.setdefault(path.name, Tail(str(self._folder), path.name))
            for line in tail.read():
                if "noticed" in line:
                    self.noticed.append((line["at_s"], line["noticed"]))
                else:
                    self.lines.append(Line(**line | {"samples": tuple(line["samples"])}))

    def members(self) -> dict[int, int]:
        """rank -> pid of the newest world."""
        if not self.lines:
            return {}
        newest = max(self.lines, key=lambda line: line.at_s)
        recent = [
            line
            for line in self.lines[-4 * WORKERS :]
            if line.attempt == newest.attempt and line.step >= newest.step - 1
        ]
        return {line.rank: line.pid for line in recent}


class RunFolderLogs:
    """The same from the run folder of elastic_ft, read from outside."""

    def __init__(self, folder: Path) -> None:
        names = ("events.jsonl", "inbox.jsonl", "ledger.jsonl", "steps.jsonl")
        self._tails = {name: Tail(str(folder), name) for name in names}
        self._samples: dict[tuple[int, int], tuple[int, ...]] = {}
        self._seen: set[tuple[int, int]] = set()
        self._members: dict[int, int] = {}
        self._unrecorded: list[dict[str, Any]] = []
        self.lines: list[Line] = []
        self.noticed: list[tuple[float, str]] = []
        self.unlogged: list[tuple[float, int]] = []  # (when, steps) redone that were not recorded

    def read(self) -> None:
        for line in self._tails["events.jsonl"].read():
            if line["event"] == "generation_formed":
                self._members = {m["rank"]: m["pid"] for m in line["members"]}
            elif line["event"] == "recovered" and line["steps_redone"]:
                self.unlogged.append((line["at_s"], line["steps_redone"]))
        for line in self._tails["inbox.jsonl"].read():
            if line["type"] in NOTICES:
                self.noticed.append((line["at_s"], line["type"]))
        self._unrecorded += self._tails["steps.jsonl"].read()
        for line in self._tails["ledger.jsonl"].read():
            self._samples[line["generation"], line["step"]] = tuple(line["samples"])
        waiting, self._unrecorded = self._unrecorded, []
        for line in waiting:
            key = (line["generation"], line["step"])
            if key in self._seen:  # the file was written anew
                continue
            if key not in self._samples:
                self._unrecorded.append(line)
                continue
            self._seen.add(key)
            self.lines.append(
                Line(
                    at_s=line["applied_at_s"],
                    step=line["step"],
                    attempt=line["generation"],
                    world=line["world_size"],
                    rank=0,
                    pid=self._members.get(0, 0),
                    loss=line["loss"] * line["tokens"],
                    tokens=line["tokens"],
                    samples=self._samples[key],
                )
            )

    def members(self) -> dict[int, int]:
        return dict(self._members)


class System:
    """One of them, running. A node has one worker."""

    tuned = ""  # key of settings.TUNED
    drains = True  # it has a use for a notice
    restarts = True  # steps may be done again from a checkpoint

    def __init__(self, name: str, folder: Path, every_steps: int = CHECKPOINT_EVERY_STEPS) -> None:
        self.name, self.folder, self.every_steps = name, folder, every_steps
        self.log: StepLogs | RunFolderLogs = StepLogs(folder / "log")
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> System:
        try:
            self.start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self) -> None:
        raise NotImplementedError

    def node_of(self, pid: int) -> str:
        raise NotImplementedError

    def kill_node(self, node: str) -> None:
        raise NotImplementedError

    def drain_node(self, node: str, seconds: float) -> None:
        raise NotImplementedError

    def add_node(self) -> None:
        raise NotImplementedError

    def nodes(self) -> list[str]:
        """Alive, oldest first."""
        raise NotImplementedError

    def tend(self) -> None:
        """What a cluster manager does all the time. Raises RuntimeError if the job has ended."""

    def _spawn(
        self, command: list[str], name: str, environment: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        self.folder.mkdir(parents=True, exist_ok=True)
        output = self._stack.enter_context((self.folder / f"{name}.out").open("a"))
        quiet = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=os.environ | quiet | (environment or {}),
            start_new_session=True,
        )
        self._stack.callback(_end, process)
        return process


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(processes, timeout=10)


def _end(process: subprocess.Popen[str]) -> None:
    _kill(_family(process.pid))
    process.wait(10)
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


@contextlib.contextmanager
def _ray_cluster() -> Iterator[Any]:
    from elastic_ft.hosts.ray.cluster import LocalCluster

    with LocalCluster(WORKERS, 1) as cluster:
        yield cluster


class OnRay(System):
    """Nodes are raylets of a real cluster on this machine, with the tuned health checks."""

    _cluster: Any

    def start(self) -> None:
        self._cluster = self._stack.enter_context(_ray_cluster())
        self._gone: set[str] = set()  # drained nodes that have ended by themselves

    def node_of(self, pid: int) -> str:
        return str(self._cluster.node_of_pid(pid))

    def nodes(self) -> list[str]:
        return [node for node in self._cluster.node_ids if node not in self._gone]

    def kill_node(self, node: str) -> None:
        try:
            self._cluster.kill_node(node)
        except psutil.NoSuchProcess:
            self._gone.add(node)

    def drain_node(self, node: str, seconds: float) -> None:
        self._cluster.drain_node(node, time.time() + seconds)

    def add_node(self) -> None:
        self._cluster.add_node()


class ElasticOnRay(OnRay):
    tuned = "elastic_ft"

    def start(self) -> None:
        super().start()
        self.log = RunFolderLogs(self.folder / "run")
        job = _write_job(self.folder)
        command = [sys.executable, "-m", "elastic_ft", "run", str(job)]
        where = ["--address", self._cluster.address, "--out", str(self.folder / "run")]
        self._driver = self._spawn([*command, *where], "driver")

    def tend(self) -> None:
        _check_alive(self._driver)


class ElasticOnProcesses(System):
    tuned = "elastic_ft"

    def start(self) -> None:
        self.log = RunFolderLogs(self.folder / "run")
        job = _write_job(self.folder)
        command = [sys.executable, str(HERE / "run_processes.py"), str(job)]
        self._child = self._spawn([*command, str(self.folder / "run")], "driver")
        self._nodes = [f"n{i}" for i in range(WORKERS)]
        self._added = 0

    def node_of(self, pid: int) -> str:
        events = Tail(str(self.folder / "run"), "events.jsonl").read()
        formed = [line for line in events if line["event"] == "generation_formed"]
        return next(str(m["node"]) for m in formed[-1]["members"] if m["pid"] == pid)

    def nodes(self) -> list[str]:
        return list(self._nodes)

    def kill_node(self, node: str) -> None:
        if node in self._nodes:  # a drained one ends by itself
            self._nodes.remove(node)
            self._tell(f"kill {node}")

    def drain_node(self, node: str, seconds: float) -> None:
        self._nodes.remove(node)
        self._tell(f"drain {node} {seconds}")

    def add_node(self) -> None:
        self._nodes.append(f"added{self._added}")
        self._added += 1
        self._tell("add")

    def tend(self) -> None:
        _check_alive(self._child)

    def _tell(self, line: str) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(f"{line}\n")
        self._child.stdin.flush()


def _write_job(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(make_job()))
    return path


class RayTrain(OnRay):
    tuned = "ray_train"

    def start(self) -> None:
        super().start()
        script = [sys.executable, str(HERE / "train_ray.py"), self._cluster.address]
        tuned = {k: v for k, v in TUNED["ray_train"].items() if k.startswith("RAY_TRAIN_")}
        arguments = [*script, str(self.folder), str(self.every_steps)]
        self._driver = self._spawn(arguments, "driver", tuned)

    def tend(self) -> None:
        _check_alive(self._driver)


class Agents(System):
    """A torchrun agent per node."""

    drains = False
    respawned = 0

    def start(self) -> None:
        self._agents: dict[str, subprocess.Popen[str]] = {}
        self._slots: dict[str, int] = {}
        self._count = 0
        for _ in range(WORKERS):
            self.add_node()

    def add_node(self) -> None:
        slot = min(set(range(WORKERS)) - set(self._slots.values()))
        name = f"agent{self._count}"
        self._count += 1
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
        command += ["--max-restarts", "1000", "--monitor-interval", "0.1"]
        more, environment = self.arguments(slot)
        self._agents[name] = self._spawn([*command, *more], name, environment)
        self._slots[name] = slot

    def arguments(self, slot: int) -> tuple[list[str], dict[str, str]]:
        raise NotImplementedError

    def nodes(self) -> list[str]:
        return list(self._agents)

    def tend(self) -> None:
        """An agent that gave up is started again, as Slurm or Kubernetes would."""
        for name, agent in list(self._agents.items()):
            if agent.poll() is not None:
                self.kill_node(name)
                self.add_node()
                self.respawned += 1

    def node_of(self, pid: int) -> str:
        ancestors = {parent.pid for parent in psutil.Process(pid).parents()}
        return next(name for name, agent in self._agents.items() if agent.pid in ancestors)

    def kill_node(self, node: str) -> None:
        agent = self._agents.pop(node)
        del self._slots[node]
        _kill(_family(agent.pid))
        agent.wait(10)


class Torchrun(Agents):
    tuned = "torchrun"

    def start(self) -> None:
        # c10d's store lives on one node, and the job with it: here it is on none of them.
        from torch.distributed import TCPStore

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        super().start()

    def arguments(self, slot: int) -> tuple[list[str], dict[str, str]]:
        rendezvous = f"127.0.0.1:{self._store.port}"
        options = "is_host=0,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=5"
        return [
            *("--nnodes", f"{WORKERS_MIN}:{WORKERS}", "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", rendezvous, "--rdzv-id", "peers", "--rdzv-conf", options),
            *("--local-addr", "127.0.0.1", "--shutdown-timeout", "2"),
            *(str(HERE / "train_torchrun.py"), str(self.folder), str(self.every_steps)),
        ], {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else workers find the last round's keys


class Torchft(Agents):
    tuned = "torchft"
    restarts = False

    def start(self) -> None:
        port = _free_port()
        lighthouse = Path(sys.executable).with_name("torchft_lighthouse")
        options = ["--min_replicas", str(WORKERS_MIN), "--quorum_tick_ms", "50"]
        options += ["--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "1000"]
        self._spawn([str(lighthouse), *options, "--bind", f"127.0.0.1:{port}"], "lighthouse")
        self._lighthouse = f"http://127.0.0.1:{port}"
        super().start()

    def arguments(self, slot: int) -> tuple[list[str], dict[str, str]]:
        environment = {"REPLICA_GROUP_ID": str(slot), "TORCHFT_LIGHTHOUSE": self._lighthouse}
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
        script = [str(HERE / "train_torchft.py"), str(self.folder)]
        return [*rendezvous, "--local-addr", "127.0.0.1", *script], environment


def _check_alive(driver: subprocess.Popen[str]) -> None:
    if driver.poll() is not None:
        raise RuntimeError(f"the job has ended, its driver with code {driver.returncode}")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


SYSTEMS: dict[str, tuple[type[System], int]] = {
    "elastic_ft (processes)": (ElasticOnProcesses, CHECKPOINT_EVERY_STEPS),
    "elastic_ft (Ray)": (ElasticOnRay, CHECKPOINT_EVERY_STEPS),
    "Ray Train": (RayTrain, CHECKPOINT_EVERY_STEPS),
    "Ray Train, every 5": (RayTrain, 5),
    "torchft": (Torchft, CHECKPOINT_EVERY_STEPS),
    "torchrun": (Torchrun, CHECKPOINT_EVERY_STEPS),
    "torchrun, every 5": (Torchrun, 5),
}


EACH = ("steady", "worker", "node", "hang", "drain", "replay")
OFTEN = ("steady", "worker", "replay")  # a checkpoint's interval changes what is redone, no more
CASES: dict[str, tuple[str, ...]] = {
    "elastic_ft (processes)": EACH,
    "elastic_ft (Ray)": (*EACH, "trace"),
    "Ray Train": (*EACH, "trace"),
    "Ray Train, every 5": OFTEN,
    "torchft": EACH,
    "torchrun": EACH,
    "torchrun, every 5": OFTEN,
}


def make(name: str, folder: Path) -> System:
    kind, every_steps = SYSTEMS[name]
    return kind(name, folder, every_steps)
