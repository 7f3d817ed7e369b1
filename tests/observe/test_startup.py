"""Where the time before the first step went."""

from __future__ import annotations

from elastic_ft.core.events import WorkerReady
from elastic_ft.core.policy import Policy
from elastic_ft.observe.startup import PARTS, Startup
from elastic_ft.sim.script import Script, member


def test_the_parts_are_of_the_last_one_ready_and_make_up_the_whole() -> None:
    script, told = Script(Policy(1, 2)), Startup(100.0)
    script.tell(WorkerReady, member("a", "n1"), started_at_s=104.0)
    early = WorkerReady(112.0, member("a", "n1"), 104.0, spent={"data_s": 0.5, "model_s": 0.1})
    late = WorkerReady(121.0, member("b", "n2"), 109.0, spent={"data_s": 4.0, "model_s": 2.0})
    assert not told.on(112.0, early, script.state)
    script.tell(WorkerReady, member("b", "n2"))
    assert not told.on(121.0, late, script.state)
    script.resume()
    assert told.on(127.0, late, script.state), "all train"
    expected = {"process_s": 9.0, "imports_s": 6.0, "data_s": 4.0, "model_s": 2.0, "forming_s": 6.0}
    assert told.parts == {"worker": "b", **expected}
    assert sum(expected.values()) == 127.0 - 100.0
    assert told.reason.startswith("the last one ready, b: 9.0 s until its process was there, 6.0 s")
    assert expected.keys() == PARTS.keys()
    assert not told.on(130.0, late, script.state), "once"


def test_a_journal_of_a_version_without_the_parts_still_tells_the_whole() -> None:
    script, told = Script(Policy(1, 1)), Startup(100.0)
    old = WorkerReady(110.0, member("a", "n1"))
    script.tell(WorkerReady, member("a", "n1"))
    told.on(110.0, old, script.state)
    script.resume()
    assert told.on(111.0, old, script.state)
    assert told.parts["process_s"] == 10.0
