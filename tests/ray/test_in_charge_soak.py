"""Whoever is in charge on Ray is killed or stopped, each of the ways below many times, in random
order: ``make soak-in-charge``. What is checked after each, and at the end, is what a short test
checks (``test_in_charge``); what is new are the figures, printed as they come and as a table.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# As docs/operations.md says. This process is a driver: Ray ends one that has been without a GCS for
# a minute, which a machine with much else to do may need.
os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "600")

import pytest
import ray
from in_charge import AFTER_STEPS, TWO, DrivenJob, alive, check_nothing_lost, two_and_two
from trial import job

from elastic_ft.hosts.ray.cluster import LocalCluster
from elastic_ft.hosts.ray.controller_place import LABEL

pytestmark = [pytest.mark.soak, pytest.mark.timeout(12 * 3600)]
AWAY_S = 6.0  # of the GCS, and how long a controller is stopped that goes on
JOINED_S = 300.0
PATIENCE = 4.0
FOUR = {"elastic": {"min_workers": 2, "max_workers": 4, "gather_s": 60, "workers_per_node": 2}}
MEASURED = TWO | {"model": {"preset": "decoder-1m"}}  # as all figures that are kept
JOBS: dict[str, dict[str, Any]] = {
    "ddp": MEASURED | {"parallel": {"strategy": "ddp"}},
    "fsdp": MEASURED,
    "fsdp-tp": MEASURED | FOUR | {"parallel": {"strategy": "fsdp", "tp": 2}},
}


@dataclass(frozen=True, slots=True)
class Found:
    """Of one fault. Seconds.

    Attributes:
        gap_s: the longest time between two trained steps, until some are committed after it.
        before_s: the same, of the steps before the fault: what the machine does by itself.
        in_charge_s: until the next controller is; None: there is none, or need not be.
    """

    gap_s: float
    before_s: float
    in_charge_s: float | None
    pids_kept: int
    pids_ended: int


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with two_and_two(cpus=2) as cluster:
        yield cluster


def controller(run: DrivenJob) -> None:
    run.kill_controller()


def controller_and_worker(run: DrivenJob) -> None:
    run.kill_controller()
    run.kill_worker(1)


def controller_while_mending(run: DrivenJob) -> None:
    """A worker first: the controller has told the others to break off, or to form."""
    before = len(run.events("pausing"))
    run.kill_worker(1)
    run.wait("a worker's loss", lambda: len(run.events("pausing")) > before)
    run.kill_controller()


def controllers_node(run: DrivenJob, worker: int | None = None) -> None:
    """Another comes once the next controller is in charge: one that came while Ray has not noticed
    the loss might be where that starts, and no standby is there yet."""
    before = len(run.events("in_charge"))
    run.kill_controllers_node()
    if worker is not None:
        run.kill_worker(worker)
    run.wait_for_adoption(before)
    run.cluster.add_node(cpus=0, labels={LABEL: "true"})


def controllers_node_and_worker(run: DrivenJob) -> None:
    controllers_node(run, worker=1)


def away(run: DrivenJob) -> None:
    until_s = time.monotonic() + AWAY_S
    run.wait("the outage's end", lambda: time.monotonic() > until_s)


def gcs(run: DrivenJob) -> None:
    run.cluster.kill_gcs()
    run.wait_for_steps(AFTER_STEPS)  # committed without it
    away(run)
    run.cluster.restart_gcs()


def gcs_and_worker(run: DrivenJob) -> None:
    run.cluster.kill_gcs()
    run.kill_worker(1)
    run.wait_for_steps(AFTER_STEPS)
    away(run)
    run.cluster.restart_gcs()


def gcs_and_controller(run: DrivenJob) -> None:
    run.cluster.kill_gcs()
    run.kill_controller()
    away(run)
    run.cluster.restart_gcs()


def controller_stopped(run: DrivenJob) -> None:
    """For less than a heartbeat may take: it goes on."""
    pid = run.cluster.controller_pid()
    os.kill(pid, signal.SIGSTOP)
    away(run)
    os.kill(pid, signal.SIGCONT)


def controller_stopped_for_good(run: DrivenJob) -> None:
    """Keepers end it after ``elastic.heartbeat_timeout_s``."""
    os.kill(run.cluster.controller_pid(), signal.SIGSTOP)


FAULTS: dict[str, Callable[[DrivenJob], None]] = {
    fault.__name__: fault
    for fault in (
        controller,
        controller_and_worker,
        controller_while_mending,
        controller_stopped,
        controller_stopped_for_good,
        controllers_node,
        controllers_node_and_worker,
        gcs,
        gcs_and_worker,
        gcs_and_controller,
    )
}
SAME = {"controller_stopped", "gcs", "gcs_and_worker"}  # goes on being in charge
WORKER_ENDS = {name for name in FAULTS if "worker" in name or "mending" in name}


def break_it(run: DrivenJob, name: str, world: int) -> Found:
    """Until the job is whole again. Raises AssertionError where another process has ended than the
    one that was to."""
    begun_s = time.time()
    run.wait_for_steps(AFTER_STEPS)
    in_charge, pids, now_s = len(run.events("in_charge")), run.pids(), time.time()
    before_s = run.gap_s(begun_s, now_s)
    FAULTS[name](run)
    if name not in SAME:
        run.wait_for_adoption(in_charge)
    run.wait_for_steps(AFTER_STEPS)
    gap_s = run.gap_s(now_s)
    run.wait("all workers", lambda: run.world == world, JOINED_S)
    again = run.events("in_charge")[in_charge:]
    assert bool(again) != (name in SAME), f"{name}: {len(again)} controllers after"
    ended = [pid for pid in pids if not alive(pid)]
    assert len(ended) == (name in WORKER_ENDS), f"{name}: of {pids} ended {ended}"
    in_charge_s = again[0]["at_s"] - now_s if again else None
    return Found(gap_s, before_s, in_charge_s, len(pids) - len(ended), len(ended))


@pytest.mark.parametrize("kind", JOBS)
def test_each_in_random_order(cluster: LocalCluster, tmp_path: Path, kind: str) -> None:
    """ELASTIC_FT_IN_CHARGE_TIMES: how often each (20). ELASTIC_FT_IN_CHARGE_FAULTS: which ones, by
    name (all). ELASTIC_FT_IN_CHARGE_COLD: without ``elastic.standby``. ELASTIC_FT_IN_CHARGE_OUT: a
    JSON file, for the figures. ELASTIC_FT_SEED: of the order."""
    seed = int(os.environ.get("ELASTIC_FT_SEED", "0")) or random.randrange(1, 10**6)
    times = int(os.environ.get("ELASTIC_FT_IN_CHARGE_TIMES", "20"))
    names = os.environ.get("ELASTIC_FT_IN_CHARGE_FAULTS", " ".join(FAULTS)).split()
    order = [name for name in names for _ in range(times)]
    random.Random(seed).shuffle(order)
    is_warm = "ELASTIC_FT_IN_CHARGE_COLD" not in os.environ
    title = f"{kind}, {'warm' if is_warm else 'cold'}"
    print(f"\n{title}, seed {seed}: {len(order)} faults")
    values = JOBS[kind] | {"elastic": JOBS[kind]["elastic"] | {"standby": is_warm}}
    found: dict[str, list[Found]] = {name: [] for name in names}
    with DrivenJob(cluster, job(f"soak-{kind}", **values), tmp_path / kind, PATIENCE) as run:
        world = int(values["elastic"]["max_workers"])
        run.wait_for_start(world)
        run.kill_driver()
        for number, name in enumerate(order, 1):
            if is_warm:  # one that went with its node is replaced, and then imports
                run.wait("standbys", lambda: controllers_nodes() <= {*run.ready_standbys()})
            found[name].append(break_it(run, name, world))
            print(f"{number:4}/{len(order)} {name}: {found[name][-1]}", flush=True)
        check_nothing_lost(run, [], tmp_path)
        lost = sum(line["steps_lost"] for line in run.events("recovered"))
        assert lost == 0
        print(f"{title}: {len(run.losses())} steps, {lost} lost, losses as undisturbed")
    for line in table(found):
        print(line)
    if out := os.environ.get("ELASTIC_FT_IN_CHARGE_OUT"):
        note(Path(out), title, {"seed": seed, "order": order, "found": found})


def controllers_nodes() -> set[str]:
    """Where one may be next; two, as soon as the one that was added is known."""
    nodes = {n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Labels"].get(LABEL) == "true"}
    return nodes if len(nodes) == 2 else {"not known yet"}


def table(found: dict[str, list[Found]]) -> Iterator[str]:
    """Of seconds: median and greatest."""
    yield f"{'':28}    n   gap            before         in charge after  pids kept (ended)"
    for name, all_found in found.items():
        if all_found:
            gaps = spread([one.gap_s for one in all_found])
            before = spread([one.before_s for one in all_found])
            after = spread([s for one in all_found if (s := one.in_charge_s) is not None])
            kept = sum(one.pids_kept for one in all_found)
            ended = sum(one.pids_ended for one in all_found)
            yield f"{name:28} {len(all_found):4}   {gaps} {before} {after}   {kept} ({ended})"


def spread(values: list[float]) -> str:
    text = f"{statistics.median(values):.2f} ({max(values):.2f})" if values else "-"
    return f"{text:14}"


def note(path: Path, title: str, found: dict[str, Any]) -> None:
    """Once all was checked: nobody ended who was not to, no step was lost, losses are equal."""
    known = json.loads(path.read_text()) if path.exists() else {}
    seen = {name: [asdict(one) for one in each] for name, each in found["found"].items()}
    path.write_text(json.dumps(known | {title: found | {"found": seen}}, indent=1) + "\n")
