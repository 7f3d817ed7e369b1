"""Generations that end without a step: what counts, and which joiners are done without."""

from __future__ import annotations

import pytest

from elastic_ft.core.assignment import Tier
from elastic_ft.core.commands import AvoidNode, Command, ReleaseWorker
from elastic_ft.core.events import (
    CollectiveFailed,
    KeeperLost,
    NodeLost,
    ResizeRequested,
    SourceRefused,
    WorkerLost,
    WorkerRaised,
)
from elastic_ft.core.policy import Policy
from tests.core.script import Script, assignment_in

ERROR = "GroupBroken: forming: connect: timed out"
NAMES = "abcdefghijkl"


def world(count: int, least: int = 1, room: int = 0, **more: int | str) -> Script:
    """So many workers on as many nodes, that have made a step. At most ``room`` more."""
    script = Script(Policy(least, count + room, **more))  # type: ignore[arg-type]
    script.run(**{name: f"n-{name}" for name in NAMES[:count]})
    script.train(1)
    assert script.state.committed == 1
    return script


def lose(script: Script, worker: str, cause: str = "its connection ended") -> list[Command]:
    """The others come to their safe point."""
    commands = script.tell(WorkerLost, worker, cause)
    return commands + pause(script)


def pause(script: Script) -> list[Command]:
    """Who has made a step has it, and nobody else has anything."""
    commands: list[Command] = []
    for name in script.ranks:
        if script.state.phase == "pausing" and name in script.state.ready:
            trained = name in script.state.blame.proven
            held = (script.live(name, script.state.committed),) if trained else ()
            commands += script.paused(name, *held)
    return commands


def break_off(script: Script) -> list[Command]:
    """A group breaks, and everybody lives."""
    first = script.ranks[0]
    commands = script.tell(CollectiveFailed, first, script.assignment.generation, 1, ERROR)
    return commands + pause(script)


def ended(script: Script) -> str:
    """The last line."""
    assert script.state.phase == "ended"
    (reason,) = script.journalled("finished")
    return reason


# ----------------------------------------------------------------------------- losses


def test_losses_on_many_nodes_end_nothing() -> None:
    script = world(12, max_generations_without_progress=3)
    for name in reversed(NAMES[1:]):
        lose(script, name)
    assert script.state.phase == "forming" and script.ranks == ("a",)
    script.resume()
    script.train(2)
    assert script.state.committed == 2


def test_nor_where_each_group_breaks_before_its_loss_is_known() -> None:
    script = world(12, max_generations_without_progress=3)
    for name in reversed(NAMES[1:]):
        script.tell(CollectiveFailed, "a", script.assignment.generation, 1, ERROR)
        script.tell(WorkerLost, name, "its connection ended")
        pause(script)
    assert script.state.phase == "forming" and script.ranks == ("a",)


@pytest.mark.parametrize("first", ["loss", "group"])
def test_losses_on_one_node_end_the_job(first: str) -> None:
    script = world(2, least=2, max_generations_without_progress=3)
    lose(script, "b")
    for name in NAMES[2:6]:
        script.ready(name, "n-b")
        assert script.state.phase == "forming"
        if first == "group":
            script.tell(CollectiveFailed, "a", script.assignment.generation, 1, ERROR)
        lose(script, name, "killed by SIGSEGV")
        if script.state.phase == "ended":
            break
    assert name == "e"
    assert ended(script).startswith(
        "4 generations without a committed step have ended with a loss on n-b, "
        "the last one: e: killed by SIGSEGV; "
    )


def test_a_lost_node_does_not_come_back_and_counts_no_more() -> None:
    """Its eight workers may be noticed one after the other."""
    script = Script(Policy(1, 9, max_generations_without_progress=4))
    script.run(a="n1", **dict.fromkeys("bcdefghi", "n2"))
    script.train(1)
    for name in "bcde":
        lose(script, name)
    script.tell(NodeLost, "n2", "gone")
    assert script.state.phase == "pausing" and not script.state.blame.losses.get("n2", 0) > 1


def test_a_step_forgives_all_losses() -> None:
    script = world(2, least=2, max_generations_without_progress=2)
    for number, name in enumerate(NAMES[2:8], start=2):
        lose(script, script.ranks[1])
        script.ready(name, "n-b")
        script.resume()
        script.train(number)
    assert script.state.committed == 7 and not script.state.blame.losses


def test_a_keeper_that_is_lost_while_it_is_read_counts_for_its_node() -> None:
    script = Script(Policy(1, 2, strategy="fsdp", copies=1, max_generations_without_progress=1))
    script.keeper("n2")
    script.run(a="n1", b="n2")
    script.train(1)
    script.tell(WorkerLost, "b", "killed")
    script.tell(KeeperLost, "n2")
    assert script.state.blame.fruitless == 0


def test_a_joiner_that_reads_other_data_counts_for_its_node() -> None:
    script = world(1, room=8, max_generations_without_progress=2)
    for name in NAMES[1:6]:
        joined(script, name)
        generation = script.assignment.generation
        script.tell(CollectiveFailed, "a", generation, 1, f"GroupBroken: {name} read other data")
        script.tell(WorkerRaised, name, generation, 1, "DataDiffers", True, whose="its own")
        pause(script)
        assert script.state.phase == "forming" and script.ranks == ("a",)
        script.resume()


def test_what_is_meant_does_not_count() -> None:
    """Joiners that come one at a time, while the steps they find are not held yet."""
    script = Script(Policy(1, 9, strategy="fsdp", max_generations_without_progress=2))
    script.run(a="n-a")
    for name in NAMES[1:6]:
        script.ready(name, f"n-{name}")
        script.fire("join")
        pause(script)
        script.resume()
    assert script.state.phase == "running" and len(script.ranks) == 6
    script.tell(ResizeRequested, 2, "r")
    assert script.state.phase == "pausing"


# ---------------------------------------------------------------------------- joiners


def joined(script: Script, *names: str) -> None:
    """They are in the world that forms."""
    for name in names:
        script.ready(name, f"n-{name}")
    if script.state.phase == "running":
        script.fire("join")
    pause(script)
    assert set(names) <= set(script.ranks)


def avoided(commands: list[Command]) -> list[str]:
    return [c.node for c in commands if isinstance(c, AvoidNode)]


def test_a_joiner_with_which_no_generation_forms_is_done_without() -> None:
    script = world(2, room=1)
    joined(script, "c")
    for _ in range(2):
        break_off(script)
        assert script.ranks == ("a", "b", "c")
    commands = break_off(script)
    assert assignment_in(commands).members == script.assignment.members and script.ranks == (
        "a",
        "b",
    )
    (why,) = script.journalled("worker_left_out")
    assert why == (
        "3 generations in a row broke that it had joined, with all of their members alive, the "
        f"last one: a saw its group break: {ERROR}; no worker is started on its node for 600 s"
    )
    assert ReleaseWorker("c", why) in commands and avoided(commands) == ["n-c"]
    script.resume()
    script.train(2)
    assert script.state.committed == 2 and not script.state.blame.suspects


def test_nor_one_with_which_it_does_not_form_in_time() -> None:
    script = world(2, room=1)
    joined(script, "c")
    for _ in range(3):
        script.fire("form")
        pause(script)
    assert script.ranks == ("a", "b")


def test_nor_one_with_which_it_forms_and_makes_no_step() -> None:
    """Small messages pass, say, and large ones do not."""
    script = world(2, room=1)
    joined(script, "c")
    for _ in range(3):
        script.resume()
        assert script.state.phase == "running"
        break_off(script)
    assert script.ranks == ("a", "b")


@pytest.mark.parametrize("how", ["group", "boundary"])
def test_nor_one_whose_breaks_fall_into_planned_pauses(how: str) -> None:
    """Others join meanwhile, one at a time."""
    script = world(2, room=4)
    joined(script, "c")
    for name in "def":
        script.resume()
        script.ready(name, f"n-{name}")
        script.fire("join")
        assert not script.state.abort
        if how == "group":
            script.tell(CollectiveFailed, "a", script.assignment.generation, 1, ERROR)
        else:
            script.fire("boundary")
        assert script.state.abort
        pause(script)
    assert "c" not in script.ranks and {"a", "b", "f"} <= set(script.ranks)


def test_an_old_member_is_never_blamed() -> None:
    script = world(3, room=1, max_generations_without_progress=5)
    for _ in range(6):
        break_off(script)
    assert ended(script).startswith("5 generations without a committed step, the last one: a saw")
    assert not script.journalled("worker_left_out")


def test_nobody_is_blamed_before_the_first_step() -> None:
    script = Script(Policy(1, 2, max_generations_without_progress=5)).run(a="n1", b="n2")
    for _ in range(6):
        break_off(script)
    assert ended(script) and not script.journalled("worker_left_out")


def test_who_trained_a_step_that_was_committed_later_is_no_joiner() -> None:
    script = Script(Policy(1, 3, strategy="fsdp", max_generations_without_progress=9))
    script.run(a="n-a", b="n-b").train(1)
    joined(script, "c")
    script.resume()
    script.train(2, held=False)
    assert script.state.committed == 1
    script.tell(CollectiveFailed, "a", script.assignment.generation, 2, ERROR)
    for name in "abc":
        script.paused(name, script.live(name, 2))
    script.resume()
    script.train(2)
    assert script.state.committed == 2 and script.state.blame.proven == {"a", "b", "c"}


def test_a_loss_explains_what_broke() -> None:
    script = world(4, room=1)
    joined(script, "e")
    for name in "dcb":
        script.tell(CollectiveFailed, "a", script.assignment.generation, 1, ERROR)
        lose(script, name)
    assert script.ranks == ("a", "e") and not script.state.blame.suspects


def test_so_does_damage_that_is_told_late() -> None:
    script = world(2, room=1)
    joined(script, "c")
    generation, source = script.assignment.generation, script.assignment.source
    script.tell(CollectiveFailed, "b", generation, 1, ERROR)
    script.tell(SourceRefused, "a", generation, "b", "digest differs", next(iter(source.holders)))
    pause(script)
    assert not script.state.blame.suspects


def test_so_does_what_a_users_code_raises() -> None:
    script = world(2, room=1)
    joined(script, "c")
    generation = script.assignment.generation
    script.tell(CollectiveFailed, "b", generation, 1, ERROR)
    script.tell(WorkerRaised, "a", generation, 1, "ValueError")
    pause(script)
    assert not script.state.blame.suspects


def test_the_latest_joiner_is_not_blamed_for_the_one_before() -> None:
    script = world(2, room=2)
    joined(script, "c")
    break_off(script)
    script.ready("d", "n-d")
    break_off(script)
    assert script.ranks == ("a", "b", "c", "d")
    break_off(script)
    assert script.ranks == ("a", "b", "d")
    script.resume()
    script.train(2)
    assert script.state.blame.proven == {"a", "b", "d"}


def test_one_after_another_is_done_without_and_none_ends_the_job() -> None:
    """They are there before the world that goes on without the one before makes a step."""
    script = world(2, room=1, max_generations_without_progress=4)
    for name in NAMES[2:7]:
        joined(script, name)
        for _ in range(3):
            break_off(script)
        assert script.state.phase == "forming" and script.ranks == ("a", "b")
        script.resume()
    assert script.state.blame.fruitless == 0


def test_one_that_can_not_be_spared_is_replaced() -> None:
    script = world(2, least=2)
    lose(script, "b")
    joined(script, "c")
    for _ in range(3):
        break_off(script)
    assert script.state.phase == "suspended" and "c" not in script.state.ready
    script.ready("d", "n-d")
    assert script.ranks == ("a", "d")


def test_a_node_whose_workers_nobody_can_reach_ends_a_job_that_needs_them() -> None:
    script = world(2, least=2, max_generations_without_progress=5)
    lose(script, "b")
    for name in "cde":
        script.ready(name, "n-c")
        for _ in range(3):
            if script.state.phase == "forming":
                break_off(script)
    assert ended(script).startswith(
        "6 generations without a committed step have ended with workers left out on n-c"
    )


def test_one_that_has_some_of_the_state_gives_it_before_it_goes() -> None:
    script = Script(Policy(1, 3, strategy="fsdp", copies=1)).run(a="n-a", b="n-b")
    script.train(1)
    joined(script, "c")
    for _ in range(3):
        script.resume()
        script.tell(CollectiveFailed, "a", script.assignment.generation, 1, ERROR)
        for name in "abc":
            script.paused(name, script.live(name, 1))
    assert script.ranks == ("a", "b")
    assert [m.worker for m in script.assignment.donors] == ["c"]
    released = [c for c in script.resume() if isinstance(c, ReleaseWorker)]
    assert [c.worker for c in released] == ["c"]
    assert script.state.phase == "running" and script.assignment.source.tier is Tier.LIVE


def test_a_limit_below_three_leaves_out_sooner() -> None:
    script = world(2, room=1, max_generations_without_progress=1)
    joined(script, "c")
    break_off(script)
    assert script.ranks == ("a", "b")
