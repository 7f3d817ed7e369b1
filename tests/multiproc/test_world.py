"""What happens to a world: it shrinks too far, drains, dies whole, comes back, is stopped.

What is done once a step is committed is done when the controller hears of it: workers are ahead of
that, and a job has steps left for it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from elastic_ft.config import Job
from elastic_ft.controller.controller import Controller
from elastic_ft.errors import JobFailed
from elastic_ft.hosts.local import LocalHost
from elastic_ft.observe.run_folder import read_lines
from tests.multiproc.harness import (
    CORPUS,
    PACED,
    PATIENT,
    Once,
    Run,
    host_of,
    make_job,
    on_disk,
    run_job,
)
from tests.waiting import until

DEADLINE_S = 150.0  # a controller imports torch, and so does who forks workers
CONSTANT = {"schedule": "constant"}
FORSAKEN = {"controller_timeout_s": 2.0}  # how long it is waited for a controller's successor


class Enough:
    """Ends the job some steps after its workers began to train for this controller."""

    def __init__(self) -> None:
        self.left = 20

    def __call__(self, controller: Controller, line: dict[str, Any]) -> None:
        self.left -= controller.state.phase == "running"
        if self.left == 0:
            controller.stop("enough was seen")


def kill_nodes(*names: str) -> Any:
    return lambda controller, host: [host.kill_node(name) for name in names]


def members(run: Run, index: int) -> list[dict[str, Any]]:
    return list(run.all("generation_formed")[index]["members"])


def newest_checkpoint_before(run: Run, line: dict[str, Any]) -> int:
    committed = run.all("checkpoint_committed")
    return max((c["step"] for c in committed if c["seq"] < line["seq"]), default=0)


# ------------------------------------------------------------------- more than one node


def test_two_nodes_at_once(tmp_path: Path) -> None:
    job = make_job("fsdp", steps=40, checkpoint={"every_steps": 3})
    both = Once(8, kill_nodes("n1", "n2"), checkpointed=True)
    run = run_job(job, tmp_path, on_step=both).check()
    assert {"n1", "n2"} <= {line["node"] for line in run.all("worker_lost")}, run.story()
    for line in run.all("rolled_back"):
        assert line["step"] >= newest_checkpoint_before(run, line), run.story()
    assert run.recoveries[0]["survivors_kept_pid"], run.story()


def test_all_nodes_lost_go_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    job = make_job("fsdp", steps=80, checkpoint={"every_steps": 3})

    def kill_all(controller: Controller, host: LocalHost) -> None:
        for number in range(4):
            host.kill_node(f"n{number}")
            host.add_node(f"m{number}", 1)

    run = run_job(job, tmp_path, on_step=Once(8, kill_all, checkpointed=True)).check()
    (rolled,) = run.all("rolled_back")
    assert rolled["step"] >= 3, run.story()
    assert rolled["step"] >= newest_checkpoint_before(run, rolled), run.story()
    later = [g for g in run.all("generation_formed") if g["seq"] > rolled["seq"]]
    assert later[0]["source"] == "checkpoint", run.story()


@pytest.mark.parametrize(
    ("strategy", "how"),
    [
        pytest.param("fsdp", "", marks=pytest.mark.soak),
        ("fsdp", "beside a stopped worker"),
        ("ddp", "lagging"),
    ],
)
def test_the_controllers_process_is_killed(tmp_path: Path, strategy: str, how: str) -> None:
    """And nobody takes its place: its workers exit by themselves, keepers save what they had."""
    job = make_job(
        strategy,
        steps=4000,
        workers=2,
        data=PACED,
        checkpoint={"every_steps": 200},
        elastic=FORSAKEN,
    )
    out = tmp_path / "run"
    child = subprocess.Popen(in_foreground(job, out), stdout=subprocess.DEVNULL)
    try:
        until(lambda: len(read_lines(out / "steps.jsonl")) >= 20, "some steps")
        pids = [m["pid"] for m in events(out, "generation_formed")[-1]["members"]]
        if how == "beside a stopped worker":  # it can't see that its controller is gone
            os.kill(pids[1], signal.SIGSTOP)
        if how == "lagging":  # workers train on, and nobody records it
            child.send_signal(signal.SIGSTOP)
            trained = psutil.Process(pids[0]).cpu_times().user
            until(
                lambda: psutil.Process(pids[0]).cpu_times().user > trained + 0.5,
                "steps that nobody records",
            )
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(10)
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "its workers to exit")
    committed = read_lines(out / "steps.jsonl")[-1]["step"]
    run = run_job(job, out, on_step=Enough()).check("stopped")
    (saved,) = run.all("emergency_checkpoint")
    (restarted,) = run.all("controller_restarted")
    assert (saved["recorded"], restarted["steps_lost"]) == (committed, 0), run.story()
    assert saved["step"] > committed if how == "lagging" else saved["step"] >= committed
    assert run.all("job_started")[-1]["step"] == saved["step"], run.story()
    assert run.result["steps"] > saved["step"], run.story()
    assert [line["step"] for line in run.steps] == [*range(1, run.result["steps"] + 1)], run.story()
    assert not list((out / "checkpoints" / "emergency").glob("*/*"))
    generations = [line["generation"] for line in run.all("generation_formed")]
    assert generations == sorted(set(generations)), "generations go on across controllers (I1)"


def test_controllers_killed_one_after_the_other_cost_nothing(tmp_path: Path) -> None:
    """The second one while it starts, before it has put together what keepers saved of the first;
    what those saved is found by the third."""
    job = make_job("fsdp", steps=4000, workers=2, data=PACED, elastic=FORSAKEN)
    out = tmp_path / "run"
    command = in_foreground(job, out)

    def kill_when(what: str, condition: Callable[[], bool]) -> None:
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            until(condition, what)
        finally:
            child.kill()
            child.wait(10)

    kill_when("some steps", lambda: len(read_lines(out / "steps.jsonl")) >= 20)
    committed = read_lines(out / "steps.jsonl")[-1]["step"]
    kill_when("it to wait for keepers", lambda: bool(events(out, "emergency_awaited")))
    run = run_job(job, out, on_step=Enough()).check("stopped")
    assert run.all("controller_restarted")[-1]["steps_lost"] == 0, run.story()
    assert run.all("job_started")[-1]["step"] >= committed, run.story()
    assert [line["step"] for line in run.steps] == [*range(1, run.result["steps"] + 1)], run.story()


def test_a_stopped_controllers_keepers_save_for_the_next(tmp_path: Path) -> None:
    """Nobody tells its workers and keepers that it has a successor, but the store: they ask it.

    It can't hand the job over. Once it wakes up it ends, and writes nothing more there.
    """
    job = make_job(
        "fsdp", steps=4000, workers=2, data=PACED, checkpoint={"every_steps": 2000, "final": False}
    )
    out = tmp_path / "run"
    first = subprocess.Popen(
        in_foreground(job, out), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        until(lambda: len(read_lines(out / "steps.jsonl")) >= 20, "some steps")
        first.send_signal(signal.SIGSTOP)
        pids = [m["pid"] for m in events(out, "generation_formed")[-1]["members"]]
        committed = read_lines(out / "steps.jsonl")[-1]["step"]
        run = run_job(job, out, on_step=Once(committed + 40, stop))
        until(lambda: not any(map(is_alive, pids)), "its workers to end")
        first.send_signal(signal.SIGCONT)
        _, said = first.communicate(timeout=DEADLINE_S)
    finally:
        first.kill()
        first.wait(10)
    assert first.returncode == 1
    own_lines = [line for line in said.splitlines() if line.startswith("elastic-ft: ")]
    assert "superseded by run" in own_lines[-1], said  # its workers may speak later, and torch
    assert "Traceback" not in said, said
    assert on_disk(run.job, out).check("stopped").events == run.events, "and nothing was added"
    (restarted,) = run.all("controller_restarted")
    assert restarted["steps_lost"] == 0, run.story()


def in_foreground(job: Job, out: Path) -> list[str]:
    """A command whose process is the controller: who kills it has killed all that is in charge."""
    job_file = out.with_suffix(".yaml")
    job_file.write_text(yaml.safe_dump(job.model_dump(mode="json")))
    command = [sys.executable, "-m", "elastic_ft", "run", str(job_file), "--processes"]
    return [*command, "--foreground", "--out", str(out)]


def stop(controller: Controller, host: LocalHost) -> None:
    controller.stop("enough was seen")


def is_alive(pid: int) -> bool:
    """A process that has ended and is not reaped, its parent being stopped, is none."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    return [line for line in read_lines(folder / "events.jsonl") if line["event"] == name]


def test_a_job_whose_run_folder_is_removed_ends(tmp_path: Path) -> None:
    """Nobody could ask it to stop any more."""

    def remove(controller: Controller, host: LocalHost) -> None:
        shutil.rmtree(tmp_path / "run")

    job = make_job("ddp", steps=100_000, workers=2)
    with pytest.raises(
        JobFailed, match=r"can't be written: (it was removed|No such file or directory): .*/run"
    ):
        run_job(job, tmp_path / "run", on_step=Once(5, remove))


# -------------------------------------------------------------------- too few workers


def test_below_the_minimum_it_waits_and_goes_on(tmp_path: Path) -> None:
    job = make_job("fsdp", steps=40, workers=2, checkpoint={"every_steps": 4})

    def heal(controller: Controller) -> None:
        host = host_of(controller)
        if controller.state.phase == "suspended" and "n9" not in host._nodes:
            host.add_node("n9", 1)

    run = run_job(job, tmp_path, on_step=Once(6, kill_nodes("n1")), watch=heal).check()
    (suspended,) = run.all("suspended")
    assert "too few workers are usable, 1: min_workers is 2" in suspended["reason"], run.story()
    assert run.recoveries[-1]["survivors_kept_pid"], run.story()
    assert run.recoveries[-1]["steps_lost"] == 0, run.story()
    assert run.result["badput"]["suspended"] > 0


def test_below_the_minimum_it_gives_up_at_its_deadline(tmp_path: Path) -> None:
    elastic = {"suspend_timeout_s": 1.0, **PATIENT}
    job = make_job("ddp", steps=5000, workers=2, elastic=elastic, checkpoint={"every_steps": 4})
    run = run_job(job, tmp_path, on_step=Once(6, kill_nodes("n1"), checkpointed=True))
    assert run.result["status"] == "suspended", run.story()
    assert "1 workers after 1 s suspended, min_workers is 2" in run.result["reason"]
    assert run.result["checkpoints"][0]["url"] in run.result["reason"], "names the checkpoint"


# ------------------------------------------------------------------- planned changes


@pytest.mark.parametrize("copies", [1, 2])
def test_a_draining_node_is_left_before_its_deadline(tmp_path: Path, copies: int) -> None:
    deadline_s = time.time() + 300

    def drain(controller: Controller, host: LocalHost) -> None:
        host.drain_node("n2", deadline_s)

    job = make_job("fsdp", steps=40, snapshot={"copies": copies})
    run = run_job(job, tmp_path, on_step=Once(5, drain)).check()
    (recovery,) = run.recoveries
    assert recovery["cause"] == "node_draining", run.story()
    assert (recovery["steps_lost"], recovery["steps_redone"]) == (0, 0), run.story()
    assert recovery["source"] == "live", "its shard was handed over, not fetched from a copy"
    assert recovery["world_after"] == 3
    (recovered,) = run.all("recovered")
    assert recovered["at_s"] < deadline_s


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_node_joins_at_a_boundary(tmp_path: Path, strategy: str) -> None:
    def join(controller: Controller, host: LocalHost) -> None:
        host.add_node("n3", 1)

    def hold(controller: Controller) -> None:
        if len(controller.state.ready) == 4:
            gate.unlink(missing_ok=True)

    gate = tmp_path / "gate"
    data = {"path": "tests.multiproc.tiny:gated", "kwargs": {"gate": str(gate), **CORPUS}}
    job = make_job(strategy, steps=40, data=data, elastic={"min_workers": 3, "gather_s": 0.2})
    once = Once(4, lambda controller, host: (gate.touch(), join(controller, host)))
    nodes = {"n0": 1, "n1": 1, "n2": 1}
    run = run_job(job, tmp_path / "run", nodes=nodes, on_step=once, watch=hold).check()
    (recovery,) = run.recoveries
    assert recovery["cause"] == "worker_joined", run.story()
    assert (recovery["world_before"], recovery["world_after"]) == (3, 4)
    assert (recovery["steps_lost"], recovery["steps_redone"]) == (0, 0), run.story()
    before, after = ({m["worker"]: m["pid"] for m in members(run, i)} for i in (0, 1))
    assert before.items() <= after.items(), "survivors keep their processes (I6)"


def test_a_clean_stop_checkpoints_and_a_rerun_completes(tmp_path: Path) -> None:
    def stop(controller: Controller, host: LocalHost) -> None:
        controller.stop("the test asks for it")

    job = make_job("fsdp", steps=100, workers=2)
    stopped = run_job(job, tmp_path, on_step=Once(6, stop))
    assert stopped.result["status"] == "stopped", stopped.story()
    last = stopped.result["steps"]
    assert 6 <= last < 100
    assert stopped.result["checkpoints"][0]["step"] == last, stopped.story()
    again = run_job(job, tmp_path)
    assert again.result["status"] == "completed", again.story()
    assert [line["step"] for line in again.steps] == list(range(1, 101)), again.story()


def test_a_job_that_is_started_twice_is_handed_over(tmp_path: Path) -> None:
    """D5: the second start killed the first, and the steps since the newest checkpoint."""

    def stop(controller: Controller, host: LocalHost) -> None:
        controller.stop("the test has seen enough")

    hourly = {"every_s": 3600.0}
    job = make_job("fsdp", steps=100_000, workers=2, data=PACED, checkpoint=hourly)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_job, job, tmp_path)
        until(lambda: len(read_lines(tmp_path / "steps.jsonl")) >= 10, "some steps")
        second = run_job(job, tmp_path, on_step=Once(3, stop))
        first = running.result(60)
    assert first.result["status"] == "stopped"
    assert first.result["reason"].startswith("another start of the job takes over")
    handed_over = first.result["steps"]
    assert handed_over >= 10
    (_, started) = second.all("job_started")
    assert started["step"] == handed_over, second.story()
    assert not second.all("controller_restarted"), "none was killed"
    steps = [line["step"] for line in second.steps]
    assert steps == list(range(1, second.result["steps"] + 1)), "each once, none of them lost"
    assert second.result["steps"] > handed_over
    assert not (tmp_path / "handover.json").exists()


def test_a_second_stop_ends_the_job_at_once(tmp_path: Path) -> None:
    def stop(controller: Controller, host: LocalHost) -> None:
        controller.stop("the first")
        controller.stop("the second")

    job = make_job("ddp", steps=5000, workers=2)
    run = run_job(job, tmp_path, on_step=Once(3, stop)).check("stopped")
    assert run.result["reason"].startswith("the second; ")


# ------------------------------------------------------------------------ checkpoints


def test_resumes_at_another_world_size_and_layout_bit_by_bit(tmp_path: Path) -> None:
    first = run_job(make_job("fsdp", steps=6, optimizer=CONSTANT), tmp_path).check()
    same = make_job("ddp", steps=6, workers=2, optimizer=CONSTANT)
    (tmp_path / "result.json").unlink()  # else it is complete, and nothing is started
    assert run_job(same, tmp_path).result["state_digest"] == first.result["state_digest"]
    longer = make_job("hsdp", steps=12, workers=3, optimizer=CONSTANT)
    run = run_job(longer, tmp_path)
    assert run.result["status"] == "completed", run.story()
    assert [line["step"] for line in run.steps] == list(range(1, 13)), run.story()
    whole = run_job(make_job("ddp", steps=12, workers=1, optimizer=CONSTANT), tmp_path / "one")
    run.same_losses_as(whole)
