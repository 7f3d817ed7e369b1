"""Each invariant's check passes a good run and finds the one thing that is wrong in a bad one."""

from copy import deepcopy
from typing import Any

import pytest

from elastic_ft.core.batches import DataOrder
from elastic_ft.core.invariants import Expected, check_run

ORDER = DataOrder(seed=5, dataset_size=10)
BATCH = 4
EXPECTED = Expected(seed=5, dataset_size=10, global_batch_size=BATCH, steps=6, status="completed")

Folder = dict[str, Any]


def formed(generation: int, step: int, workers: dict[str, int], **fields: Any) -> Folder:
    members = [{"worker": w, "rank": r, "pid": p} for r, (w, p) in enumerate(workers.items())]
    layout = f"ddp{len(workers)}"
    return (
        event("generation_formed", generation, step=step, layout=layout, members=members) | fields
    )


def event(name: str, generation: int, **fields: Any) -> Folder:
    line = {"at_s": 0.0, "seq": -1, "generation": generation, "event": name}
    return line | {"reason": f"why {name}"} | fields


RECOVERY = {"at_step": 3, "world_before": 3, "world_after": 2, "survivors_kept_pid": True}


def good_run() -> Folder:
    """Six steps: w1 of three is lost after step 3, and w3 joins after step 5."""
    events = [
        event("job_started", 0, step=0),
        formed(1, 0, {"w0": 10, "w1": 11, "w2": 12}, source="initial"),
        event("checkpoint_committed", 1, step=2),
        event("worker_lost", 1, worker="w1"),
        formed(2, 3, {"w0": 10, "w2": 12}, source="live"),
        event("recovered", 2, **RECOVERY),
        formed(3, 5, {"w0": 10, "w2": 12, "w3": 13}, source="live"),
        event("finished", 3, status="completed"),
    ]
    worlds = [(1, 3), (1, 3), (1, 3), (2, 2), (2, 2), (3, 3)]
    steps = [
        {"step": s, "generation": g, "world_size": n, "layout": f"ddp{n}", "samples": s * BATCH}
        for s, (g, n) in enumerate(worlds, 1)
    ]
    ledger = [
        {"step": s, "samples": list(ORDER.sample_ids((s - 1) * BATCH, s * BATCH))}
        for s in range(1, 7)
    ]
    result = {
        "status": "completed",
        "reason": "all 6 steps are committed",
        "steps": 6,
        "samples": 24,
        "recoveries": [dict(RECOVERY)],
    }
    return {"events": events, "steps": steps, "ledger": ledger, "result": result}


def findings(run: Folder, expected: Expected = EXPECTED, number: bool = True) -> list[str]:
    run = deepcopy(run)
    if number:
        for seq, line in enumerate(run["events"]):
            line["seq"] = seq
    return [str(violation) for violation in check_run(**run, expected=expected)]


def test_a_good_run_has_no_violations() -> None:
    assert findings(good_run()) == []
    assert findings(good_run(), Expected()) == []
    assert findings(good_run() | {"ledger": None}) == []


def test_a_run_that_went_on_from_a_checkpoint() -> None:
    run = good_run()
    for name in ("steps", "ledger"):
        run[name] = run[name][2:]
    run["events"][0]["step"] = 2
    run["events"][1] |= {"step": 2, "source": "checkpoint"}
    del run["events"][2]
    assert findings(run, Expected(global_batch_size=BATCH, first_step=3)) == []


def test_lines_that_were_lost_are_no_hole_where_the_journal_says_so() -> None:
    run = good_run()
    for name in ("steps", "ledger"):
        del run[name][2:4]
    assert findings(run)
    lost = dict(run["events"][1], event="record_incomplete", first_step=3, last_step=4)
    run["events"].insert(2, lost)
    assert findings(run) == []
    lost["last_step"] = 3
    assert findings(run)


def find(run: Folder, name: str, nth: int = 0) -> Folder:
    lines: list[Folder] = [line for line in run["events"] if line["event"] == name]
    return lines[nth]


def broken(name: str) -> Folder:
    """The good run with one thing wrong."""
    run = good_run()
    events, steps, ledger, result = (run[k] for k in ("events", "steps", "ledger", "result"))
    match name:
        case "generation repeats":
            events.insert(2, deepcopy(events[1]))
        case "fenced generation commits":
            steps[4] |= {"generation": 1, "world_size": 3, "layout": "ddp3"}
        case "unknown generation":
            for step in steps[5:]:
                step["generation"] = 7
        case "the dead come back":
            members = find(run, "generation_formed", 2)["members"]
            members[2] |= {"worker": "w1", "pid": 11}
        case "samples skipped":
            steps[5]["samples"] += 1
            result["samples"] += 1
        case "sample read twice":
            ledger[3]["samples"][0] = ledger[0]["samples"][0]
        case "ledger line lost":
            del ledger[5]
        case "step lost":
            del steps[3], ledger[3]
        case "step twice":
            steps.insert(3, dict(steps[2]))
        case "some commit":
            steps[3]["world_size"] = 1
        case "uncommitted checkpoint":
            find(run, "generation_formed", 1)["source"] = "checkpoint"
        case "restarted process":
            find(run, "generation_formed", 1)["members"][1]["pid"] = 99
        case "pid not kept":
            find(run, "recovered")["survivors_kept_pid"] = False
            result["recoveries"][0]["survivors_kept_pid"] = False
        case "no end":
            run["result"] = None
        case "odd status":
            result["status"] = "fine"
        case "no reason to end":
            result["reason"] = ""
        case "not finished":
            del events[-1]
        case "two ends":
            events[-1]["status"] = "suspended"
        case "result miscounts":
            result["steps"] = 5
        case "ends early":
            del steps[-1], ledger[-1]
            result |= {"steps": 5, "samples": 20}
        case "unexplained":
            find(run, "worker_lost")["reason"] = " "
        case "unjournalled recovery":
            result["recoveries"].append(RECOVERY | {"at_step": 5})
        case "line without a key":
            del steps[2]["layout"]
        case "member without a pid":
            del events[1]["members"][0]["pid"]
        case _:
            raise AssertionError(name)
    return run


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("generation repeats", ["I1: generation 1 formed after generation 1"]),
        ("fenced generation commits", ["I1: step 5 is of generation 1, the step before it of 2"]),
        ("unknown generation", ["I1: step 6 is of generation 7, which never formed"]),
        ("the dead come back", ["I1: w1, gone since event 3, is a member of generation 3"]),
        ("samples skipped", ["I2: step 6 counts 25 samples, not 6 x 4"]),
        (
            "sample read twice",
            [
                f"I2: step 4 repeats sample {ORDER.sample_ids(0, 1)[0]}, consumed by step 1",
                f"I2: step 4 lacks {ORDER.sample_ids(12, 13)[0]}, "
                f"has {ORDER.sample_ids(0, 1)[0]}, not its own under seed 5",
            ],
        ),
        ("ledger line lost", ["I2: step 6 is in steps.jsonl only"]),
        (
            "step lost",
            ["I2: step 4 is missing before step 5", "I4: step 4 is missing before step 5"],
        ),
        ("step twice", ["I4: step 3 is repeated"]),
        (
            "some commit",
            ["I4: step 4 was committed by 1 workers as ddp2, generation 2 has 2 as ddp2"],
        ),
        (
            "uncommitted checkpoint",
            ["I5: generation 2 starts from a checkpoint of step 3, which was not committed before"],
        ),
        (
            "restarted process",
            ["I6: w2 changed from pid 12 to 99"],
        ),
        (
            "pid not kept",
            ["I6: generation 2 has members of the one before, but survivors_kept_pid is False"],
        ),
        ("no end", ["I7: there is no result.json: the run did not end"]),
        ("no reason to end", ["I7: the run is completed for no reason"]),
        ("not finished", ["I7: the journal has no finished event"]),
        ("two ends", ["I7: the journal says suspended, result.json says completed"]),
        ("result miscounts", ["I7: result.json has 5 steps, steps.jsonl ends with 6"]),
        ("ends early", ["I7: completed at step 5 of 6"]),
        ("unexplained", ["I8: event 3, worker_lost, has no reason"]),
        ("line without a key", ["I8: steps.jsonl:3 lacks layout"]),
        ("member without a pid", ["I8: events.jsonl:2, a member lacks pid"]),
    ],
)
def test_each_fault_is_found_and_nothing_else(name: str, expected: list[str]) -> None:
    assert findings(broken(name)) == expected


def test_an_odd_status_is_found() -> None:
    assert "I7: status 'fine' is none of" in findings(broken("odd status"))[0]


def test_a_recovery_must_be_journalled() -> None:
    (found,) = findings(broken("unjournalled recovery"))
    assert found.startswith("I8: result.json has a recovery that the journal does not: at_step 5")


def test_a_gap_in_the_journal_is_found() -> None:
    run = good_run()
    for seq, line in enumerate(run["events"]):
        line["seq"] = seq + (seq > 4)
    assert findings(run, number=False) == ["I8: event 6 follows event 4"]


def test_a_recovery_without_survivors_may_not_claim_any() -> None:
    run = good_run()
    find(run, "generation_formed", 1)["members"] = [
        {"worker": "w8", "rank": 0, "pid": 18},
        {"worker": "w9", "rank": 1, "pid": 19},
    ]
    found = [f for f in findings(run) if "recover" not in f]
    assert found == [
        "I6: generation 2 has no member of the one before, but survivors_kept_pid is True"
    ]


def test_the_run_must_end_as_expected() -> None:
    (found,) = findings(good_run(), Expected(status="failed"))
    assert found == "I7: the run is completed, not failed: all 6 steps are committed"


def changed_run() -> Folder:
    """Two steps of four samples under seed 5; then, as was asked for, of two under seed 6."""
    events = [
        event("job_started", 0, step=0),
        formed(1, 0, {"w0": 10}, source="initial"),
        event("checkpoint_committed", 1, step=2),
        event("finished", 1, status="stopped"),
        event("changes_accepted", 1, step=2, changes={BATCH_KEY: [4, 2], "seed": [5, 6]}),
        event("job_started", 1, step=2),
        formed(2, 2, {"w0": 20}, source="checkpoint"),
        event("finished", 2, status="completed"),
    ]
    steps, ledger = [], []
    for step, (generation, seed, batch) in enumerate([(1, 5, 4), (1, 5, 4), (2, 6, 2), (2, 6, 2)]):
        ids = list(DataOrder(seed, 10).sample_ids(step * batch, (step + 1) * batch))
        line = {"step": step + 1, "generation": generation}
        ledger.append(line | {"samples": ids})
        world = {"world_size": 1, "layout": "ddp1", "samples": (step + 1) * batch}
        steps.append(line | world)
    result = {"status": "completed", "reason": "all", "steps": 4, "samples": 8, "recoveries": []}
    return {"events": events, "steps": steps, "ledger": ledger, "result": result}


BATCH_KEY = "batch.global_batch_size"
CHANGED = Expected(seed=6, dataset_size=10, global_batch_size=2, steps=4, status="completed")


def test_accepted_changes_are_judged_by_what_held_at_each_step() -> None:
    assert findings(changed_run(), CHANGED) == []
    assert findings(changed_run() | {"ledger": None}, Expected()) == []


def test_changes_that_nobody_accepted_are_found() -> None:
    run = changed_run()
    del run["events"][4]
    found = findings(run, CHANGED)
    assert "I2: step 1 counts 4 samples, not 1 x 2" in found
    assert any("step 3 repeats sample" in line for line in found)


def test_within_accepted_changes_samples_are_still_used_once() -> None:
    run = changed_run()
    run["ledger"][3]["samples"][0] = run["ledger"][2]["samples"][0]
    found = findings(run, CHANGED)
    assert any("step 4 repeats sample" in line for line in found)
