"""What a node's keeper saves: workers that crash on living nodes, alone or all at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.s3_server import S3Server, s3_server
from elastic_ft.controller.controller import Controller
from elastic_ft.core.assignment import Keeper
from elastic_ft.faults import PointFault
from tests.multiproc.harness import PATIENT, Gate, Run, host_of, make_job, run_job
from tests.multiproc.test_state import KillNodes

# Step 5 is behind the gate: of two workers, each takes twice as many samples of a step.
FOUR: dict[str, Any] = {"workers": 4, "after_step": 4}
TWO: dict[str, Any] = {"workers": 2, "after_step": 8}


def alone(**sections: Any) -> dict[str, Any]:
    """Nobody else has a copy."""
    return {"snapshot": {"copies": 1}} | sections


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_job(make_job("fsdp"), tmp_path_factory.mktemp("undisturbed") / "run").check()


@pytest.mark.parametrize(
    ("point", "action"),
    [
        ("forward", "stop"),
        pytest.param("forward", "kill", marks=pytest.mark.soak),
        ("reduce", "kill"),
        pytest.param("reduce", "stop", marks=pytest.mark.soak),
        ("inside_optimizer", "kill"),
        pytest.param("inside_optimizer", "stop", marks=pytest.mark.soak),
        ("after_optimizer", "kill"),
        pytest.param("after_optimizer", "stop", marks=pytest.mark.soak),
    ],
)
def test_a_crashed_workers_shard_comes_from_its_nodes_keeper(
    tmp_path: Path, undisturbed: Run, point: str, action: Any
) -> None:
    gate = Gate(tmp_path / "gate")
    fault = PointFault(point, action, rank=1, step=6)
    run = run_job(gate.job("fsdp", **alone()), tmp_path / "run", faults=[fault], watch=gate).check()
    run.same_losses_as(undisturbed)
    first = run.recoveries[0]
    assert (first["source"], first["steps_lost"]) == ("keeper", 0), run.story()
    assert first["survivors_kept_pid"]
    assert run.worlds() == [4, 3, 4]


def test_a_world_that_may_not_shrink_waits_for_a_fresh_process(
    tmp_path: Path, undisturbed: Run
) -> None:
    job = make_job("fsdp", elastic={"min_workers": 4}, **alone())
    run = run_job(job, tmp_path / "run", faults=[PointFault("backward", rank=2, step=6)]).check()
    run.same_losses_as(undisturbed)
    assert run.worlds() == [4, 4]
    assert (run.recoveries[0]["source"], run.recoveries[0]["steps_lost"]) == ("keeper", 0)


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_the_only_worker_is_replaced_and_nothing_is_lost(tmp_path: Path, strategy: str) -> None:
    plain = run_job(make_job(strategy, workers=1), tmp_path / "plain").check()
    job = make_job(strategy, workers=1)
    run = run_job(job, tmp_path / "run", faults=[PointFault("backward", rank=0, step=7)]).check()
    assert (run.recoveries[0]["source"], run.recoveries[0]["steps_lost"]) == ("keeper", 0)
    assert run.result["state_digest"] == plain.result["state_digest"]


def test_all_workers_at_once(tmp_path: Path, undisturbed: Run) -> None:
    faults = [PointFault("forward", rank=rank, step=6) for rank in range(4)]
    run = run_job(make_job("fsdp", **alone()), tmp_path / "run", faults=faults).check()
    run.same_losses_as(undisturbed)
    assert sum(r["steps_lost"] for r in run.recoveries) == 0, run.story()
    assert run.recoveries[0]["source"] == "keeper"


def test_damage_in_the_keepers_memory_is_found_and_the_next_source_is_used(
    tmp_path: Path, undisturbed: Run
) -> None:
    faults = [
        PointFault("backward", "corrupt_own", rank=1, step=7),
        PointFault("reduce", rank=1, step=7),
    ]
    job = make_job("fsdp", checkpoint={"every_steps": 2}, **alone())
    run = run_job(job, tmp_path / "run", faults=faults).check()
    run.same_losses_as(undisturbed)
    refused = run.all("source_refused")
    assert refused
    assert all(e["holder"].startswith("keeper:") for e in refused)
    assert all("digest differs" in e["reason"] for e in refused)
    assert run.recoveries[0]["source"] == "checkpoint"  # of step 4 or 6, as uploads go


def test_a_lost_node_takes_its_keeper_and_the_buddy_serves(
    tmp_path: Path, undisturbed: Run
) -> None:
    fault = PointFault("forward", "stop", rank=2, step=6)
    job = make_job("fsdp", elastic=PATIENT)
    run = run_job(job, tmp_path / "run", faults=[fault], watch=KillNodes()).check()
    run.same_losses_as(undisturbed)
    assert run.recoveries[0]["source"] == "peer", run.story()
    assert run.recoveries[0]["steps_lost"] == 0


def test_a_killed_keeper_disturbs_nobody_and_is_replaced(tmp_path: Path, undisturbed: Run) -> None:
    keepers: list[Keeper] = []
    fault = PointFault("backward", worker="w0", step=9)
    gate = Gate(tmp_path / "gate")

    def watch(controller: Controller) -> None:
        """Step 5 waits until the new keeper is there."""
        state = controller.state
        if not keepers and state.committed == 4 and "n0" in state.keepers:
            keepers.append(state.keepers["n0"])
            os.kill(controller.host.keeper_of("n0"), signal.SIGKILL)  # type: ignore[attr-defined]
        if keepers and state.keepers.get("n0") not in (None, keepers[0]):
            gate(controller)

    job = gate.job("fsdp", after_step=4)
    run = run_job(job, tmp_path / "run", faults=[fault], watch=watch).check()
    run.same_losses_as(undisturbed)
    (lost,) = run.all("keeper_lost")
    assert [e["node"] for e in run.after(lost, "keeper_ready")] == ["n0"]
    assert [r["cause"] for r in run.recoveries] == ["worker_lost", "worker_joined"], run.story()


@pytest.mark.parametrize("is_in_s3", [False, True], ids=["on_a_disk", "in_s3"])
def test_a_keeper_that_comes_late_has_a_snapshot_at_once(
    tmp_path: Path, undisturbed: Run, request: pytest.FixtureRequest, is_in_s3: bool
) -> None:
    """None is due for long when it comes, and what the one before it had is gone."""
    url = request.getfixturevalue("s3").url("late") if is_in_s3 else None
    keepers: list[Keeper] = []
    fault = PointFault("backward", worker="w0", step=11)
    gate = Gate(tmp_path / "gate")

    def watch(controller: Controller) -> None:
        state = controller.state
        if not keepers and state.committed == 1 and 4 in state.pending and "n0" in state.keepers:
            keepers.append(state.keepers["n0"])
            os.kill(host_of(controller).keeper_of("n0"), signal.SIGKILL)
        if keepers and state.keepers.get("n0") not in (None, keepers[0]):
            gate(controller)

    snapshot, out = {"copies": 1, "every_steps": 50}, tmp_path / "run"
    job = gate.job("fsdp", **(TWO if is_in_s3 else FOUR), snapshot=snapshot)
    run = run_job(job, out, faults=[fault], watch=watch, folder_url=url).check()
    run.same_losses_as(undisturbed)
    first = run.recoveries[0]
    assert first["source"] == "keeper" and first["steps_redone"] <= 6, run.story()


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with s3_server(tmp_path / "s3") as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        yield server


def test_a_keeper_that_stood_still_for_a_while_has_the_next_snapshot(
    tmp_path: Path, undisturbed: Run, s3: S3Server
) -> None:
    """Not for long enough to be judged, and between two snapshots: training went on. (One that is
    due meanwhile is waited for, until it is judged.)"""
    sent: list[signal.Signals] = []
    fault = PointFault("backward", worker="w0", step=11)
    gate = Gate(tmp_path / "gate")

    def watch(controller: Controller) -> None:
        state = controller.state
        if not sent and 4 in state.pending and "n0" in state.keepers:
            send(controller, signal.SIGSTOP)
        if sent == [signal.SIGSTOP] and max(state.pending, default=0) >= 6:
            send(controller, signal.SIGCONT)
        if sent:
            gate(controller)

    def send(controller: Controller, signum: signal.Signals) -> None:
        sent.append(signum)
        os.kill(host_of(controller).keeper_of("n0"), signum)

    snapshot = {"copies": 1, "every_steps": 8}
    job = gate.job("fsdp", **TWO, snapshot=snapshot, elastic=PATIENT)
    out, url = tmp_path / "run", s3.url("stood-still")
    run = run_job(job, out, faults=[fault], watch=watch, folder_url=url).check()
    run.same_losses_as(undisturbed)
    assert sent == [signal.SIGSTOP, signal.SIGCONT]
    assert not run.all("keeper_lost") and len(run.all("keeper_ready")) == 2, run.story()
    first = run.recoveries[0]
    assert first["source"] == "keeper" and first["steps_redone"] <= 5, run.story()


@pytest.mark.parametrize("copies", [2, 1])
def test_a_stopped_keeper_costs_a_heartbeat_timeout_and_no_other_worker(
    tmp_path: Path, undisturbed: Run, copies: int
) -> None:
    """Its node's worker dies before anyone has noticed. What it had of it is in a copy, or lost:
    then a checkpoint has to do."""
    timeout_s = 3.0
    stopped: list[int] = []

    def watch(controller: Controller) -> None:
        if not stopped and controller.state.committed == 5 and "n1" in controller.state.keepers:
            stopped.append(controller.host.keeper_of("n1"))  # type: ignore[attr-defined]
            os.kill(stopped[0], signal.SIGSTOP)
        if stopped:
            gate(controller)

    gate = Gate(tmp_path / "gate")
    elastic = {"heartbeat_timeout_s": timeout_s}
    job = gate.job(
        "fsdp",
        after_step=5,
        snapshot={"copies": copies},
        checkpoint={"every_steps": 3},
        elastic=elastic,
    )
    fault = PointFault("backward", worker="w1", step=7)
    run = run_job(job, tmp_path / "run", faults=[fault], watch=watch).check()
    run.same_losses_as(undisturbed)
    (silent,) = run.all("keeper_lost")
    assert silent["node"] == "n1" and "nothing heard for" in silent["reason"]
    assert [e["node"] for e in run.after(silent, "keeper_ready")] == ["n1"]
    assert [e["worker"] for e in run.all("worker_lost")] == ["w1"], run.story()
    assert not run.all("worker_hung"), run.story()
    first = run.recoveries[0]
    assert first["survivors_kept_pid"] and first["steps_lost"] <= (0 if copies > 1 else 4)
    assert first["paused_s"] < 5 * timeout_s, "nobody waited to the end of form_timeout_s"
    with pytest.raises(ProcessLookupError):
        os.kill(stopped[0], 0)
