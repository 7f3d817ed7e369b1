"""Who stood where is in the journal before anything is killed, and nobody waits long for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from elastic_ft.controller import diagnosis
from elastic_ft.controller.diagnosis import KILL_WAIT_S, Inquiries
from elastic_ft.core import events as ev
from elastic_ft.core.assignment import Member
from elastic_ft.core.state import State
from elastic_ft.faults import POINTS, PointFault
from elastic_ft.keeper.processes import process_facts, spy
from elastic_ft.observe import replay
from elastic_ft.observe.journal_text import brief
from elastic_ft.transport.control import Inspect, Stood
from elastic_ft.transport.stacks import collective_in, frame_line, own_code_in, stack_of
from tests.multiproc.harness import Gate, Run, run_job


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One after the other: a worker is stopped, one is killed, one's training thread sleeps."""
    faults = (
        PointFault("backward", "stop", rank=1, step=8, world=3),
        PointFault("forward", "kill", rank=2, world=3, after=0),
        PointFault("before_optimizer", "hang", rank=0, world=3, after=1),
    )
    out = tmp_path_factory.mktemp("diagnosis")
    gate = Gate(out / "gate")
    elastic = {"hang_timeout_s": 3, "join_batch_s": 0.1}
    job = gate.job("ddp", steps=24, workers=3, elastic=elastic)
    with pytest.MonkeyPatch.context() as patch:  # a keeper may take its time, here
        patch.setattr(diagnosis, "KILL_WAIT_S", 10.0)
        patch.setattr(diagnosis, "LINE_WAIT_S", 10.0)
        return run_job(job, out / "run", faults=faults, watch=gate).check()


def diagnosis_of(run: Run, fault: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The line about a fault, and what it says of the worker that the fault befell."""
    fired = next(line for line in run.all("fault_fired") if line["index"] == fault)
    for line in run.after(fired, "diagnosis"):
        for entry in line["workers"]:
            if entry["worker"] == fired["worker"]:
                return line, entry
    raise AssertionError(f"no diagnosis of {fired['worker']}\n{run.story()}")


def frames_of(line: dict[str, Any], entry: dict[str, Any]) -> list[str]:
    return list(line["stacks"][entry["stack"]])


def test_a_stopped_worker_is_looked_at_by_its_keeper(run: Run) -> None:
    line, entry = diagnosis_of(run, 0)
    assert entry["suspect"], run.story()
    assert entry["process"]["State"].startswith("T"), entry  # stopped, not yet killed
    assert entry["process"]["wchan"]
    assert "process T" in line["reason"]


def test_a_hung_training_thread_is_shown_by_its_control_thread(run: Run) -> None:
    line, entry = diagnosis_of(run, 2)
    assert entry["suspect"], run.story()
    assert entry["point"] == "before_optimizer"
    frames = frames_of(line, entry)
    assert any("faults.py" in frame for frame in frames), frames
    assert any(frame.endswith("_one_step") for frame in frames), frames
    hung = next(r for r in run.recoveries if r["cause"] == "worker_hung" and r["noticed_s"] > 2.5)
    assert hung["noticed_s"] < 30


def test_the_others_stood_in_their_collectives(run: Run) -> None:
    """Whoever the fault spared waited for the one it befell."""
    for fault in (0, 1, 2):
        line, entry = diagnosis_of(run, fault)
        others = [e for e in line["workers"] if e["worker"] != entry["worker"]]
        assert len(others) == 2
        waiting = [e for e in others if e.get("stack")]
        assert waiting, line
        assert all(frames_of(line, e) for e in waiting)
    line, _ = diagnosis_of(run, 2)
    assert any(e.get("collective") for e in line["workers"]), line


def test_a_killed_worker_is_placed_by_its_last_word(run: Run) -> None:
    _, entry = diagnosis_of(run, 1)
    assert entry["step"] >= 7
    assert entry["suspect"]
    assert entry["point"] in ("", "starting", *POINTS)  # of its last heartbeat


def test_a_diagnosis_decides_nothing(run: Run) -> None:
    assert replay.check_replay(run.path).difference == ""


# ------------------------------------------------------------------------- each by itself


class Wires:
    """What inquiries send, kill and write."""

    def __init__(self, reachable: bool = True) -> None:
        self.sent: list[Any] = []
        self.killed: list[str] = []
        self.lines: list[tuple[Any, ...]] = []
        self.reachable = reachable
        self.inquiries = Inquiries(self._send, self.killed.append, self._write)

    def _send(self, to: str, message: Any) -> bool:
        self.sent.append((to, message))
        return self.reachable

    def _write(self, *line: Any) -> None:
        self.lines.append(line)


MEMBER = Member("w1", "n1", "host", 77)
REFUSED = ev.SourceRefused(1.0, "w1", 2, "s3://b/c", "can't be read", kind=ev.UNREACHABLE)


@pytest.mark.parametrize("event", [REFUSED, ev.CollectiveFailed(1.0, "w1", 2, 3, "reset")])
def test_a_source_that_is_refused_is_worth_no_diagnosis(event: ev.Event) -> None:
    """A store that is away is tried again and again: nobody stands anywhere because of it."""
    wires = Wires()
    before = State("forming", 2, ranks={"w1": 0}, ready={"w1": MEMBER})
    wires.inquiries.broke(before, replace(before, generation=3), event, {})
    wires.inquiries.answer(Stood("w1", "worker", 3, "resharding", ("read (store.py:1)",)))
    assert wires.inquiries.due_s is None
    assert len(wires.lines) == (0 if event is REFUSED else 1)


def test_killing_waits_for_an_answer() -> None:
    wires = Wires()
    wires.inquiries.ask([MEMBER])
    assert wires.sent == [("w1", Inspect("w1", 77)), ("keeper:n1", Inspect("w1", 77))]
    wires.inquiries.kill("w1")
    assert wires.killed == []
    due_s = wires.inquiries.due_s
    assert due_s is not None and 0 < due_s - time.monotonic() <= KILL_WAIT_S


def test_killing_does_not_wait_past_its_deadline() -> None:
    wires = Wires()
    wires.inquiries.ask([MEMBER])
    wires.inquiries.kill("w1")
    pause = threading.Event()
    began_s = time.monotonic()
    while not wires.killed:
        assert time.monotonic() < began_s + 10
        wires.inquiries.look()
        pause.wait(0.005)
    assert time.monotonic() - began_s >= KILL_WAIT_S * 0.9
    assert wires.inquiries.due_s is None


def test_whom_nobody_can_ask_is_killed_at_once() -> None:
    wires = Wires(reachable=False)
    wires.inquiries.ask([MEMBER])
    wires.inquiries.kill("w1")
    wires.inquiries.kill("w2")  # never asked
    assert wires.killed == ["w1", "w2"]


def test_a_stopped_process_tells_its_state_and_its_python_stack() -> None:
    program = (
        "import sys, time\ndef stuck():\n    print('here', flush=True)\n    time.sleep(60)\nstuck()"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert process_facts(process.pid)["State"].startswith("T")
        frames = spy(process.pid)
        assert not frames or "stuck" in frames[0]  # py-spy may not be allowed to look
    finally:
        process.kill()
        process.wait()
    assert process_facts(process.pid) == {}
    assert spy(process.pid) == ()


def test_a_stack_is_innermost_first_and_without_where_things_are_installed() -> None:
    frames = stack_of(threading.get_ident())
    assert frames[0].startswith("elastic_ft/transport/stacks.py:")
    assert frames[1].endswith(
        " test_a_stack_is_innermost_first_and_without_where_things_are_installed"
    )
    assert stack_of(-1) == ()
    line = frame_line("/some/venv/site-packages/torch/nn/functional.py", 3, "relu")
    assert line == "torch/nn/functional.py:3 relu"


def test_the_collective_is_the_one_that_was_called() -> None:
    frames = (
        "torch/distributed/distributed_c10d.py:3009 all_reduce",
        "torch/distributed/c10d_logger.py:83 wrapper",
        "elastic_ft/worker/loop.py:300 _agree",
        "torch/distributed/other.py:1 outer",
    )
    assert collective_in(frames) == "all_reduce"
    backward = ("torch/autograd/graph.py:5 _engine_run_backward", "elastic_ft/engines/x.py:1 f")
    assert collective_in(backward) == "backward"
    assert collective_in(("elastic_ft/worker/loop.py:1 _one_step",)) == ""


PEER = Member("w2", "n2", "host", 78)
TWO = State("running", 3, ranks={"w1": 0, "w2": 1}, ready={"w1": MEMBER, "w2": PEER}, committed=4)


def broken(wires: Wires, event: ev.Event, alive: set[str]) -> None:
    after = replace(TWO, ready={w: m for w, m in TWO.ready.items() if w in alive})
    wires.inquiries.broke(TWO, after, event, {})


def test_an_answer_before_the_inquiry_is_kept() -> None:
    wires = Wires()
    wires.inquiries.answer(Stood("w1", "worker", 5, "reduce", ("a.py:1 f",)))
    assert wires.lines == []
    broken(wires, ev.WorkerLost(1.0, "w2", "killed"), {"w1"})
    ((event, generation, reason, fields),) = wires.lines
    assert (event, generation) == ("diagnosis", 3)
    assert reason == "w2 (rank 1, n2) at the beginning of step 4; rank 0 at reduce of step 5"
    assert fields["stacks"] == {"s0": ["a.py:1 f"]}


def test_peers_that_tell_of_a_broken_group_before_the_loss_is_known() -> None:
    wires = Wires()
    broken(wires, ev.CollectiveFailed(1.0, "w1", 3, 5, "closed"), {"w1", "w2"})
    wires.inquiries.answer(Stood("w1", "worker", 5, "reduce", ("a.py:1 f",)))
    assert wires.lines == []  # w2 has not told
    wires.inquiries.lost("w2")
    ((_, _, reason, fields),) = wires.lines
    assert reason.startswith("w2 (rank 1, n2)")
    assert [entry["suspect"] for entry in fields["workers"]] == [False, True]


def test_a_lost_node_accuses_its_workers() -> None:
    wires = Wires()
    broken(wires, ev.NodeLost(1.0, "n2", "gone"), {"w1"})
    wires.inquiries.answer(Stood("w1", "worker", 5, "reduce", ("a.py:1 f",)))
    assert [entry["suspect"] for entry in wires.lines[0][3]["workers"]] == [False, True]


OWN = ("threading.py:5 wait", "/home/me/model.py:9 make", "/home/me/train.py:3 main")


def test_who_waits_is_told_where_the_jobs_own_code_hangs() -> None:
    wires = Wires()
    broken(wires, ev.TimerFired(1.0, "form", 3), {"w1", "w2"})
    for worker in ("w1", "w2"):
        wires.inquiries.answer(Stood(worker, "worker", 5, "resharding", OWN))
    ((event, _, reason, fields),) = wires.lines
    assert reason == "ranks 0, 1 at resharding of step 5, in /home/me/model.py:9 make"
    line = {"event": event, "reason": reason, **fields}
    assert brief(line) == "ranks 0, 1 stood still in /home/me/model.py:9 make"


def test_a_librarys_code_is_not_the_jobs_own_wherever_it_lies() -> None:
    debian = "/usr/local/lib/python3.12/dist-packages/torch/nn/modules/module.py"
    frames = (
        frame_line(debian, 1, "_call_impl"),
        "/tmp/torchinductor_me/ab/cab.py:7 call",
        "/home/me/train.py:3 main",
    )
    assert frames[0] == "torch/nn/modules/module.py:1 _call_impl"
    assert own_code_in(frames) == "/home/me/train.py:3 main"


def test_nobody_is_told_of_code_that_only_waits_for_who_hangs() -> None:
    wires = Wires()
    broken(wires, ev.WorkerHung(1.0, "w2", "behind", 3.0), {"w1"})
    in_collective = ("torch/distributed/c10d.py:1 all_reduce", *OWN)
    wires.inquiries.answer(Stood("w1", "worker", 5, "backward", in_collective))
    ((event, _, reason, fields),) = wires.lines
    assert brief({"event": event, "reason": reason, **fields}) == ""


def test_code_that_a_lost_worker_interrupted_is_not_told_as_what_hangs() -> None:
    wires = Wires()
    broken(wires, ev.WorkerLost(1.0, "w2", "killed"), {"w1"})
    wires.inquiries.answer(Stood("w1", "worker", 5, "forward", OWN))
    ((event, _, reason, fields),) = wires.lines
    assert brief({"event": event, "reason": reason, **fields}) == ""
