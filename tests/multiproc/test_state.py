"""State that nothing can lose: whole nodes are killed (workers and keepers), copies are damaged.

A fault stops a worker at a named point; then its node is killed there and then.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.controller.controller import Controller
from elastic_ft.faults import PointFault
from elastic_ft.hosts.local import LocalHost
from tests.multiproc.harness import CORPUS, PATIENT, Gate, Run, make_job, run_job

WORLD, STEPS = 4, 14
CHAIN_DEADLINE_S = 160.0  # of a node lost at every point, one after the other
POINTS = (  # at the others a worker is lost in test_faults, and copies are where they are at these
    "forward",
    "inside_optimizer",
    "after_optimizer",
    "snapshot_copy",
    "buddy_send",
    "checkpoint_shard",
    "before_manifest",
    "forming",  # a survivor, while a replacement joins
    "resharding",
)
Watch = Callable[[Controller], None]


class KillNodes:
    """For a ``watch``: each fault that fires takes the node of its rank, and of the next ones.

    Args:
        count: of nodes, in rank order from the stopped one on by ``stride``.
        replaced: as many new nodes come.
    """

    def __init__(self, count: int = 1, stride: int = 1, *, replaced: bool = False) -> None:
        self._count, self._stride, self._replaced = count, stride, replaced
        self._done: set[int] = set()
        self._names = (f"m{number}" for number in itertools.count())

    def __call__(self, controller: Controller) -> None:
        host, assignment = controller.host, controller.state.assignment
        assert isinstance(host, LocalHost)
        for index in sorted(controller._fired - self._done):
            self._done.add(index)
            rank = controller._faults[index].rank
            assert rank is not None and assignment is not None
            ranks = [(rank + i * self._stride) % WORLD for i in range(self._count)]
            for node in [assignment.members[r].node for r in ranks]:
                host.kill_node(node)
                if self._replaced:
                    host.add_node(next(self._names), 1)


def both(*watches: Watch) -> Watch:
    def watch(controller: Controller) -> None:
        for each in watches:
            each(controller)

    return watch


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    job = make_job("fsdp", steps=STEPS, elastic=PATIENT)
    return run_job(job, tmp_path_factory.mktemp("plain") / "run").check()


# ------------------------------------------------------------------ shards that leave their GPU


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp"])
def test_a_loss_while_shards_have_left_their_devices_costs_no_committed_step(
    tmp_path: Path, undisturbed: Run, strategy: str
) -> None:
    """A first loss changes the layout; the next comes when the old shards are in host memory."""
    data = {"path": "tests.multiproc.tiny:as_on_a_gpu", "kwargs": CORPUS}
    job = make_job(strategy, steps=STEPS, elastic=PATIENT, data=data)
    faults = [
        PointFault("backward", "kill", rank=1, step=6),
        PointFault("resharding", "kill", rank=2, world=3, after=0),
    ]
    run = run_job(job, tmp_path, faults=faults).check()
    run.same_losses_as(undisturbed)
    assert not run.all("rolled_back"), run.story()
    assert run.recoveries[0]["steps_lost"] == 0, run.story()


# -------------------------------------------------------------------------- r copies, r-1 nodes


@pytest.mark.parametrize(
    ("point", "rank", "stride"),
    [
        pytest.param("forward", 0, 1, marks=pytest.mark.soak),
        ("reduce", 1, 2),
        pytest.param("inside_optimizer", 2, 1, marks=pytest.mark.soak),
        ("after_optimizer", 3, 1),
        ("snapshot_copy", 1, 1),
        pytest.param("buddy_send", 0, 2, marks=pytest.mark.soak),
    ],
)
def test_with_three_copies_any_two_nodes_cost_no_committed_step(
    tmp_path: Path, undisturbed: Run, point: str, rank: int, stride: int
) -> None:
    job = make_job("fsdp", steps=STEPS, snapshot={"copies": 3}, elastic=PATIENT)
    fault = PointFault(point, "stop", rank=rank, step=6)
    run = run_job(job, tmp_path, faults=[fault], watch=KillNodes(2, stride)).check()
    run.same_losses_as(undisturbed)
    assert not run.all("rolled_back"), run.story()
    first = run.recoveries[0]
    assert (first["source"], first["steps_lost"]) == ("peer", 0), run.story()
    assert (first["world_before"], run.worlds()[-1]) == (WORLD, WORLD - 2), run.story()
    assert all(r["survivors_kept_pid"] for r in run.recoveries)
    assert len({line["node"] for line in run.all("worker_lost")}) == 2, run.story()


@pytest.fixture(scope="module")
def node_after_node(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One job of two copies that loses a node at every point, one after the other."""
    out = tmp_path_factory.mktemp("node-after-node")
    gate = Gate(out / "gate")
    faults = [
        PointFault(
            point,
            "stop",
            rank=index % WORLD,
            step=None if index else 3,
            world=WORLD,
            after=index - 1 if index else None,
        )
        for index, point in enumerate(POINTS)
    ]
    job = gate.job(
        "fsdp",
        steps=50,
        batch={"global_batch_size": 4},
        checkpoint={"every_steps": 3},
        elastic=PATIENT,
    )
    watch = both(gate, KillNodes(replaced=True))
    return run_job(job, out / "run", faults=faults, watch=watch, deadline_s=CHAIN_DEADLINE_S)


@pytest.mark.parametrize("index", range(len(POINTS)), ids=POINTS)
def test_with_two_copies_one_node_costs_no_committed_step(node_after_node: Run, index: int) -> None:
    run = node_after_node
    (fired,) = [line for line in run.all("fault_fired") if line["index"] == index]
    (lost,) = [line for line in run.all("worker_lost") if line["worker"] == fired["worker"]]
    recovered = run.after(lost, "recovered")
    assert recovered, run.story()
    assert recovered[0]["steps_lost"] == 0, run.story()


def test_nothing_is_lost_with_one_node_after_the_other(node_after_node: Run) -> None:
    run = node_after_node.check()
    assert not run.all("rolled_back"), run.story()
    assert {r["source"] for r in run.recoveries} <= {"peer", "host", "live"}, run.story()
    assert "peer" in {r["source"] for r in run.recoveries}
    assert len(run.all("node_lost")) == len(POINTS)
    assert run.worlds()[-1] == WORLD
    for line in run.all("host_memory"):  # two of its own, two of its buddy's, one in an upload
        assert line["snapshot_bytes"] < 7 * line["state_bytes"], run.story()


# ---------------------------------------------------------------- checkpoints, and what is damaged


class Planted:
    """Waits with training until the checkpoint of ``step`` is there, and flips a byte of it."""

    def __init__(self, gate: Gate, checkpoints: Path, step: int) -> None:
        self._gate, self._checkpoints, self._step = gate, checkpoints, step
        self._done = False

    def __call__(self, controller: Controller) -> None:
        if self._done or not any(r.step == self._step for r in controller.state.checkpoints):
            return
        self._done = True
        (path, *_) = sorted(self._checkpoints.glob(f"data/*/g*-s{self._step}/*.bin"))
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        self._gate.path.unlink(missing_ok=True)


def planted_run(
    out: Path, faults: Sequence[PointFault], watch: Watch | None = None, min_workers: int = 2
) -> Run:
    """Checkpoints of 4 and 8, that of 8 damaged; the faults come after."""
    gate = Gate(out / "gate")
    planted = Planted(gate, out / "run" / "checkpoints", 8)
    checkpoint = {"every_steps": 4, "final": False, "read_back": False}  # a restore finds it
    elastic = PATIENT | {"min_workers": min_workers}
    tiny = gate.job("fsdp", after_step=8, steps=STEPS, checkpoint=checkpoint, elastic=elastic)
    watches = both(planted, watch) if watch else planted
    return run_job(tiny, out / "run", faults=faults, watch=watches).check()


def test_all_nodes_at_once_cost_no_more_than_the_interval(tmp_path: Path, undisturbed: Run) -> None:
    kill = KillNodes(WORLD, replaced=True)
    fault = PointFault("forward", "stop", rank=0, step=12)
    elastic = PATIENT | {"min_workers": WORLD}
    job = make_job("fsdp", steps=STEPS, checkpoint={"every_steps": 4}, elastic=elastic)

    def kill_all(controller: Controller) -> None:
        if any(checkpoint.step == 8 for checkpoint in controller.state.checkpoints):
            kill(controller)

    run = run_job(job, tmp_path / "run", faults=[fault], watch=kill_all).check()
    first = run.recoveries[0]
    assert first["source"] == "checkpoint", run.story()
    assert 0 < first["steps_lost"] <= 4, run.story()
    assert len(run.all("rolled_back")) == 1
    assert run.result["state_digest"] == undisturbed.result["state_digest"]


def test_a_shard_that_no_memory_has_is_read_from_the_checkpoint_of_its_step(
    tmp_path: Path,
) -> None:
    """A node is lost right after a restart: what the others restored needs not be read again."""
    same = {"optimizer": {"schedule": "constant"}, "elastic": PATIENT}
    run_job(make_job("fsdp", steps=8, **same), tmp_path).check()
    job = make_job("fsdp", steps=12, snapshot={"copies": 1}, **same)
    fault = PointFault("data", "stop", rank=1, step=9)
    run = run_job(job, tmp_path, faults=[fault], watch=KillNodes())
    assert run.result["status"] == "completed", run.story()
    (recovery,) = run.recoveries
    assert (recovery["source"], recovery["steps_lost"]) == ("checkpoint", 0), run.story()
    reason = "step 8 is in memory but for pp0.s1.tp0: from its checkpoint"
    assert reason in run.all("recovered")[-1]["reason"], run.story()
    run.same_losses_as(run_job(make_job("ddp", steps=12, workers=1, **same), tmp_path / "one"))


def refusals(run: Run) -> list[str]:
    """Who was refused, in order."""
    lines = sorted([*run.all("source_refused"), *run.all("checkpoint_refused")], key=seq)
    assert all("digest" in line["reason"] or "differs" in line["reason"] for line in lines)
    return [line.get("holder") or f"checkpoint {line['step']}" for line in lines]


def seq(line: dict[str, Any]) -> int:
    return int(line["seq"])


def test_a_damaged_snapshot_is_refused_and_its_peers_copy_used(
    tmp_path: Path, undisturbed: Run
) -> None:
    """Half an optimizer step spoils the live state: back to the snapshots of the step before."""
    faults = [
        PointFault("before_optimizer", "corrupt_own", rank=1, step=7),
        PointFault("inside_optimizer", "raise", rank=1, step=7),
    ]
    run = run_job(make_job("fsdp", steps=STEPS, elastic=PATIENT), tmp_path, faults=faults).check()
    first = run.all("generation_formed")[0]
    assert refusals(run) == [first["members"][1]["worker"]], run.story()
    assert (run.recoveries[0]["source"], run.recoveries[0]["steps_lost"]) == ("peer", 0)
    assert run.worlds() == [WORLD, WORLD]
    assert run.result["state_digest"] == undisturbed.result["state_digest"]


def test_a_damaged_snapshot_never_becomes_a_checkpoint(tmp_path: Path, undisturbed: Run) -> None:
    """Its bytes would be given a new digest, and pass for good.

    Its copy may be on its way to the buddy, who then refuses it, and the step is done again.
    """
    fault = PointFault("checkpoint_shard", "corrupt_own", rank=1, step=4)
    job = make_job("fsdp", steps=STEPS, checkpoint={"every_steps": 4}, elastic=PATIENT)
    run = run_job(job, tmp_path, faults=[fault]).check()
    run.same_losses_as(undisturbed)
    abandoned = run.all("checkpoint_abandoned")[0]
    assert abandoned["step"] == 4 and "digest differs" in abandoned["reason"], run.story()


def test_every_damaged_tier_is_refused_until_a_good_one_is_found(
    tmp_path: Path, undisturbed: Run
) -> None:
    """A worker crashes; its peer's copy, its keeper's and the newest checkpoint are damaged."""
    faults = [
        PointFault("before_optimizer", "corrupt", rank=2, step=12),
        PointFault("before_optimizer", "corrupt_own", rank=1, step=12),
        PointFault("after_optimizer", rank=1, step=12),
    ]
    run = planted_run(tmp_path, faults, min_workers=WORLD)
    workers = [m["worker"] for m in run.all("generation_formed")[0]["members"]]
    (lost,) = run.all("worker_lost")
    keeper = f"keeper:{lost['node']}/{workers[1]}"
    assert refusals(run) == [workers[2], keeper, "checkpoint 8"], run.story()
    assert run.recoveries[0]["source"] == "checkpoint"
    assert [line["step"] for line in run.all("rolled_back")] == [8, 4], run.story()
    assert run.worlds() == [WORLD, WORLD]
    assert run.result["state_digest"] == undisturbed.result["state_digest"]


def test_a_lost_node_whose_copy_and_checkpoint_are_damaged(
    tmp_path: Path, undisturbed: Run
) -> None:
    faults = [
        PointFault("before_optimizer", "corrupt", rank=2, step=12),
        PointFault("after_optimizer", "stop", rank=1, step=12),
    ]
    kill = KillNodes()
    kill._done.add(0)  # that one goes on
    run = planted_run(tmp_path, faults, kill)
    run.same_losses_as(undisturbed)
    workers = [m["worker"] for m in run.all("generation_formed")[0]["members"]]
    assert refusals(run) == [workers[2], "checkpoint 8"], run.story()
    assert [line["step"] for line in run.all("rolled_back")] == [8, 4], run.story()
    assert run.worlds() == [WORLD, WORLD - 1]
