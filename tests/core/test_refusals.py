"""Workers that can't take part: the world does without them, where it can."""

from __future__ import annotations

from elastic_ft.core.commands import (
    AvoidNode,
    Command,
    FinishJob,
    KillWorker,
    PauseWorkers,
    ReleaseWorker,
)
from elastic_ft.core.events import (
    EVERYONES,
    ITS_DEVICE,
    ITS_OWN,
    CollectiveFailed,
    ResizeRequested,
    WorkerLost,
    WorkerRaised,
)
from elastic_ft.core.policy import Policy
from tests.core.script import Script, assignment_in

ERROR = "DataError: data.url: /mnt/corpus: no such file or folder"
UNFIT = f"it can't take part: {ERROR}"


def raised(script: Script, worker: str, node: str, *, usage: bool = True) -> list[Command]:
    """Before it was ready: it is in no generation yet."""
    return script.tell(WorkerRaised, worker, 0, 0, ERROR, usage=usage, node=node)


def avoided(commands: list[Command]) -> list[str]:
    return [c.node for c in commands if isinstance(c, AvoidNode)]


def test_a_joiner_that_raises_does_not_end_the_job() -> None:
    script = Script(Policy(1, 3)).run(a="n1", b="n2")
    script.train(1, 2, 3)
    commands = raised(script, "c", "n3")
    assert commands[0] == ReleaseWorker("c", UNFIT) and not avoided(commands)
    assert script.journalled("worker_refused") == [ERROR]
    script.tell(WorkerLost, "c", "exited with code 1")
    assert avoided(raised(script, "d", "n3", usage=False)) == ["n3"]
    (why,) = script.journalled("node_avoided")
    assert why.startswith(f"2 workers could not take part there, the last one: {ERROR}")
    assert script.state.phase == "running" and script.state.generation == 1
    script.train(4)
    assert script.state.committed == 4


def test_a_node_is_avoided_for_longer_with_each_that_it_refuses() -> None:
    """Each try costs all others a pause, and what a script lacks it will lack the next time."""
    script = Script(Policy(1, 3, avoid_node_s=600)).run(a="n1", b="n2")
    script.train(1, 2, 3)
    found = []
    for number in range(12):
        commands = raised(script, f"w{number}", "n3")
        found += [c.for_s for c in commands if isinstance(c, AvoidNode)]
        script.tell(WorkerLost, f"w{number}", "exited with code 1")
    assert found == [600, 1200, 2400, 4800, 9600, 19200, 38400, 76800, *[86400] * 3]
    assert script.journalled("node_avoided")[-1].endswith("no worker is started there for 86400 s")


def test_it_is_refused_once_and_stays_out() -> None:
    script = Script(Policy(1, 3)).run(a="n1", b="n2")
    raised(script, "c", "n3")
    assert raised(script, "c", "n3") == [] and script.ready("c", "n3") == []
    assert [c for c in script.fire("release c", 0) if isinstance(c, KillWorker)], "it never ended"


def test_a_spare_that_raises_is_let_go() -> None:
    script = Script(Policy(1, 2, spares=1)).run(a="n1", b="n2")
    script.ready("c", "n3")
    assert raised(script, "c", "n3")[0] == ReleaseWorker("c", UNFIT)
    assert script.state.phase == "running"


def test_a_member_that_the_others_outvote_is_left_out() -> None:
    script = Script(Policy(2, 3))
    for worker, node in (("a", "n1"), ("b", "n2"), ("c", "n3")):
        script.ready(worker, node)
    error = "DataDiffers: this worker reads other data"
    script.tell(CollectiveFailed, "a", 1, 0, "GroupBroken: b read other data than the others")
    script.tell(WorkerRaised, "b", 1, 0, error, usage=True, node="n2", whose=ITS_OWN)
    script.paused("a")
    assignment = assignment_in(script.paused("c"))
    assert [m.worker for m in assignment.members] == ["a", "c"]


def test_the_one_that_says_so_first_is_paused_for() -> None:
    script = Script(Policy(2, 3)).run(a="n1", b="n2", c="n3")
    commands = script.tell(WorkerRaised, "b", 1, 0, ERROR, usage=True, node="n2", whose=ITS_OWN)
    assert PauseWorkers(2, ("a", "c"), True, f"b: {ERROR}") in commands


def test_what_is_late_from_a_former_member_is_no_news() -> None:
    script = Script(Policy(1, 3)).run(a="n1", b="n2")
    script.tell(WorkerLost, "b", "killed")
    script.paused("a", script.live("a", 0))
    script.resume()
    before = script.state
    assert script.tell(WorkerRaised, "b", 1, 3, ERROR, usage=True, node="n2") == []
    assert script.tell(WorkerRaised, "a", 1, 3, ERROR, usage=True, node="n1") == []
    assert script.state == before


# ------------------------------------------------------------------------- its device is sick

SICK = "AcceleratorError: CUDA error: uncorrectable ECC error encountered"


def sick(script: Script, worker: str, node: str, step: int) -> list[Command]:
    generation = script.state.generation
    return script.tell(WorkerRaised, worker, generation, step, SICK, node=node, whose=ITS_DEVICE)


def test_a_sick_gpu_costs_its_worker_and_not_the_job() -> None:
    script = Script(Policy(2, 4)).run(a="n1", b="n2", c="n3")
    script.train(1, 2)
    commands = sick(script, "b", "n2", 2)
    assert KillWorker("b", SICK) in commands
    assert [c.abort for c in commands if isinstance(c, PauseWorkers)] == [True]
    assert script.journalled("device_lost") == [SICK] == script.journalled("worker_lost")
    assert script.journalled("worker_raised") == script.journalled("worker_refused") == []
    assert script.tell(WorkerLost, "b", "exited with code 76") == []
    script.paused("a", script.live("a", 2))
    assignment = assignment_in(script.paused("c", script.live("c", 2)))
    assert [m.worker for m in assignment.members] == ["a", "c"]


def test_a_node_whose_gpus_are_sick_again_and_again_is_avoided() -> None:
    script = Script(Policy(1, 4)).run(a="n1", b="n2", c="n2", d="n2")
    script.train(1)
    assert avoided(sick(script, "b", "n2", 1)) == []
    script.paused("a", script.live("a", 1))
    script.paused("c", script.live("c", 1))
    script.paused("d", script.live("d", 1))
    script.resume()
    script.train(2, 3, 4)
    assert avoided(sick(script, "c", "n2", 4)) == ["n2"]


def test_what_every_gpu_makes_of_a_step_is_the_users() -> None:
    """An index out of range is a device-side assert, on whichever GPU."""
    script = Script(Policy(1, 8, max_user_failures=2)).run(a="n1", b="n2", c="n3", d="n4")
    script.train(1, 2)
    left = ["a", "b", "c", "d"]
    for _ in range(2):
        worker = left.pop()
        assert not [c for c in sick(script, worker, f"n{ord(worker) - 96}", 3) if is_end(c)]
        for other in left:
            script.paused(other, script.live(other, 2))
        script.resume()
    (end,) = [c for c in sick(script, left.pop(), "n2", 3) if is_end(c)]
    assert end.status == "failed" and "b raised at step 3, 3 times in a row" in end.reason


def is_end(command: Command) -> bool:
    return isinstance(command, FinishJob)


# ---------------------------------------------------------------- before the first generation


def test_a_donors_error_is_everybodys_to_retry() -> None:
    """It is in no rank of the world that forms, and alone has a shard of its state."""
    script = Script(Policy(2, 4, strategy="fsdp", copies=1)).run(a="n1", b="n2", c="n3", d="n4")
    script.train(1, 2, 3)
    script.tell(ResizeRequested, 2, "r")
    for worker in "abcd":
        script.paused(worker, script.live(worker, 3))
    assert {"c", "d"} <= {m.worker for m in script.assignment.donors}
    generation = script.state.generation
    commands = script.tell(WorkerRaised, "d", generation, 3, "RuntimeError: for a moment")
    assert not [c for c in commands if isinstance(c, ReleaseWorker)], "its shard would go with it"
    assert [c for c in commands if isinstance(c, PauseWorkers)]


def test_one_bad_node_of_many_is_left_out() -> None:
    script = Script(Policy(3, 4))
    raised(script, "a", "n1")
    for worker, node in (("b", "n2"), ("c", "n3"), ("d", "n4")):
        script.ready(worker, node)
    assert avoided(raised(script, "e", "n1", usage=False)) == ["n1"]
    script.fire("gather")
    assert script.ranks == ("b", "c", "d")


def test_an_error_that_all_have_ends_the_job_at_once() -> None:
    script = Script(Policy(1, 3))
    for worker, node in (("a", "n1"), ("b", "n2")):
        assert script.state.phase == "starting"
        raised(script, worker, node)
    finish = raised(script, "c", "n3")[-1]
    assert finish == FinishJob("failed", f"c: {ERROR}; there is no checkpoint")


def test_a_job_of_one_worker_ends_with_its_error() -> None:
    finish = raised(Script(Policy(1, 1)), "a", "n1")[-1]
    assert finish == FinishJob("failed", f"a: {ERROR}; there is no checkpoint")


def test_too_few_in_the_end_are_explained_by_those_that_could_not() -> None:
    script = Script(Policy(2, 4))
    script.ready("b", "n2")
    raised(script, "a", "n1")
    finish = script.fire("start")[-1]
    assert isinstance(finish, FinishJob) and finish.reason.endswith(f"min_workers is 2; a: {ERROR}")


def test_a_host_that_gives_up_ends_the_job() -> None:
    script = Script(Policy(1, 8))
    finish = script.tell(WorkerRaised, "w4", 0, 0, "5 workers ended", whose=EVERYONES)[-1]
    assert finish == FinishJob("failed", "w4: 5 workers ended; there is no checkpoint")
