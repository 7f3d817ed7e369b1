"""Where the time before the first step went."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_ft.core.events import Event, JobStarted, WorkerReady
from elastic_ft.core.policy import Policy
from elastic_ft.core.state import State
from elastic_ft.observe.startup import PARTS, Startup
from tests.core.script import Script, member

BEGUN = JobStarted(101.0, (), 0, 0)
SPENT = {"imports_s": 5.0, "connect_s": 1.0, "data_s": 4.0, "model_s": 2.0}


def told_of(*ready: tuple[float, WorkerReady]) -> tuple[Startup, State, Event]:
    """Up to the moment at which all train."""
    script, told = Script(Policy(1, len(ready))), Startup(100.0)
    assert not told.on(101.0, BEGUN, script.state)
    for now_s, event in ready:
        script.tell(WorkerReady, event.member, started_at_s=event.started_at_s)
        assert not told.on(now_s, event, script.state)
    script.resume()
    return told, script.state, ready[-1][1]


def test_the_parts_are_of_the_last_one_ready_and_make_up_the_whole() -> None:
    early = WorkerReady(112.0, member("a", "n1"), 104.0, spent={"data_s": 0.5, "model_s": 0.1})
    late = WorkerReady(121.0, member("b", "n2"), 90.0, spent=SPENT)
    told, state, event = told_of((112.0, early), (121.0, late))
    assert not told.on(127.0, event, state), "all train, and no step is done"
    assert told.on(130.0, event, replace(state, committed=1))
    expected = {
        "asked_s": 1.0,
        "process_s": 8.0,  # though the process was there before the job was: Ray had one in store
        "imports_s": 5.0,
        "connect_s": 1.0,
        "data_s": 4.0,
        "model_s": 2.0,
        "forming_s": 6.0,
        "first_step_s": 3.0,
    }
    assert told.parts == {"worker": "b", **expected}
    assert sum(expected.values()) == 130.0 - 100.0
    assert told.reason.startswith("the last one ready, b: 1.0 s until workers were asked for, 8.0")
    assert expected.keys() == PARTS.keys()
    assert not told.on(131.0, event, state), "once"


def test_what_a_fork_server_imported_before_it_was_asked_took_no_time() -> None:
    told, state, event = told_of((110.0, WorkerReady(0.0, member("a", "n1"), spent=SPENT)))
    assert not told.on(111.0, event, state)
    assert told.on(112.0, event, replace(state, committed=1))
    assert (told.parts["process_s"], told.parts["imports_s"]) == (0.0, 2.0)
    assert sum(told.parts[name] for name in PARTS) == pytest.approx(112.0 - 100.0)


def test_a_generation_that_breaks_before_its_first_step_is_part_of_forming() -> None:
    told, state, event = told_of((110.0, WorkerReady(0.0, member("a", "n1"), spent=SPENT)))
    assert not told.on(111.0, event, state)
    assert not told.on(112.0, event, replace(state, phase="pausing", abort=True))
    assert not told.on(115.0, event, replace(state, abort=True))
    assert told.on(116.0, event, replace(state, committed=1))
    assert (told.parts["forming_s"], told.parts["first_step_s"]) == (5.0, 1.0)


def test_a_planned_pause_in_the_first_step_takes_nothing_from_it() -> None:
    """The worker for which the job pauses was ready last, and had no part in that step."""
    early, late = (WorkerReady(0.0, member(name, "n1"), spent=SPENT) for name in "ab")
    told, state, _ = told_of((105.0, early), (106.0, late))
    assert not told.on(110.0, late, state)
    joining = WorkerReady(0.0, member("c", "n2"), spent=SPENT)
    pausing = replace(state, phase="pausing")
    assert not told.on(140.0, joining, pausing)
    assert told.on(170.0, joining, replace(pausing, committed=1))
    assert told.parts["worker"] == "b"
    assert (told.parts["forming_s"], told.parts["first_step_s"]) == (4.0, 60.0)


def test_a_step_that_a_broken_generation_leaves_behind_is_its_own() -> None:
    told, state, event = told_of((110.0, WorkerReady(0.0, member("a", "n1"), spent=SPENT)))
    assert not told.on(111.0, event, state)
    broken = replace(state, phase="pausing", abort=True)
    assert not told.on(112.0, event, broken)
    assert told.on(113.0, event, replace(broken, committed=1))
    assert (told.parts["forming_s"], told.parts["first_step_s"]) == (1.0, 2.0)


def test_a_start_that_commits_no_step_tells_what_is_known_as_the_job_ends() -> None:
    told, state, event = told_of((110.0, WorkerReady(0.0, member("a", "n1"), spent=SPENT)))
    assert not told.on(111.0, event, state)
    assert told.on(115.0, event, replace(state, phase="ended"))
    assert told.parts.keys() == {"worker", *PARTS} - {"first_step_s"}
    assert (told.parts["worker"], told.parts["forming_s"]) == ("a", 1.0)
    assert told.reason.endswith("1.0 s until all trained; no step is committed")
    assert not told.on(116.0, event, replace(state, phase="ended")), "once"


@pytest.mark.parametrize("trained", [False, True])
def test_a_job_that_ends_before_all_train_has_not_formed(trained: bool) -> None:
    told, state, event = told_of((110.0, WorkerReady(0.0, member("a", "n1"), spent=SPENT)))
    if trained:
        told.on(111.0, event, state)
        told.on(112.0, event, replace(state, phase="pausing", abort=True))
    assert told.on(115.0, event, replace(state, phase="ended"))
    assert told.parts.keys() == {"worker", *PARTS} - {"forming_s", "first_step_s"}


def test_a_job_that_ends_before_a_worker_is_ready_knows_only_when_it_asked() -> None:
    told = Startup(100.0)
    assert not told.on(101.0, BEGUN, State())
    assert not told.on(105.0, BEGUN, State(phase="ended")), "a line names a worker"
    assert told.parts == {"asked_s": 1.0}


def test_a_job_that_ends_with_its_first_step_has_all_parts() -> None:
    told, state, event = told_of((110.0, WorkerReady(0.0, member("a", "n1"), spent=SPENT)))
    assert not told.on(111.0, event, state)
    assert told.on(115.0, event, replace(state, phase="ended", committed=1))
    assert told.parts.keys() == {"worker", *PARTS}
    assert "no step" not in told.reason


def test_a_journal_of_a_version_without_the_parts_still_tells_the_whole() -> None:
    told, state, event = told_of((110.0, WorkerReady(110.0, member("a", "n1"))))
    assert not told.on(111.0, event, state)
    assert told.on(111.0, event, replace(state, committed=1))
    assert told.parts["process_s"] == 9.0
