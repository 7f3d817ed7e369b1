"""The peers' benchmark: from step logs to figures, from figures to the table, and one real run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.document import put
from benchmarks.peers import analysis, replay, report, turns
from benchmarks.peers.analysis import Line
from benchmarks.peers.run import Results

ROOT = Path(__file__).parents[2]
BATCH = 8


def line(at_s: float, step: int, attempt: int = 1, rank: int = 0, world: int = 2) -> Line:
    """Half of the step's samples, in a world of two."""
    share = BATCH // world
    first = (step - 1) * BATCH + rank * share
    samples = tuple(range(first, first + share))
    return Line(at_s, step, attempt, world, rank, 100 * attempt + rank, step * 10.0, 10, samples)


def world(first: int, last: int, from_s: float, attempt: int, step_s: float = 1.0) -> list[Line]:
    return [
        line(from_s + (step - first) * step_s + rank / 100, step, attempt, rank)
        for step in range(first, last + 1)
        for rank in (0, 1)
    ]


def expected(step: int) -> list[int]:
    return list(range((step - 1) * BATCH, step * BATCH))


def test_a_restart_from_a_checkpoint() -> None:
    """Steps 1 to 10, a fault at 10.5 s; from a checkpoint of step 7 at 20 s: 8, 9, 10, 11..."""
    lines = world(1, 10, 1.0, attempt=1) + world(8, 15, 20.0, attempt=2)
    outage = analysis.outage(lines, 10.5, announced=False)
    assert outage is not None
    assert outage.ended_at_s == 23.0  # step 11
    assert outage.paused_s == pytest.approx(23.0 - 10.5 - 1.0)
    assert outage.steps_redone == 3
    history = analysis.history(lines, restarts=True)
    assert [history[step].attempt for step in (7, 8, 11)] == [1, 2, 2]
    assert analysis.sample_faults(history, 1, 15, expected) == (0, 0)
    assert analysis.goodput(lines, 10.5, 23.5, 1.0) == pytest.approx(1 / 13)


def test_a_step_that_was_under_way_ends_in_the_old_world() -> None:
    """It was committed after the kill: the pause lasts until the first step of the new world."""
    lines = world(1, 10, 1.0, attempt=1) + world(11, 15, 13.0, attempt=2)
    outage = analysis.outage(lines, 9.5, announced=False)
    assert outage is not None and outage.paused_s == pytest.approx(13.0 - 9.5 - 1.0)
    planned = analysis.outage(lines, 7.5, announced=True)
    assert planned is not None and planned.paused_s == pytest.approx(13.0 - 10.0 - 1.0)
    faster = world(1, 10, 1.0, attempt=1) + world(11, 15, 13.0, attempt=2, step_s=0.5)
    joined = analysis.outage(faster, 7.5, announced=True)
    assert joined is not None and joined.paused_s == pytest.approx(13.0 - 10.0 - 0.5)
    assert analysis.outage(lines[:20], 7.5, announced=True) is None  # it has not ended


def test_lost_and_repeated_samples() -> None:
    alone = [line(11.0 + step, step, attempt=2) for step in range(11, 14)]  # rank 1 is away
    history = analysis.history(world(1, 10, 1.0, 1) + alone, restarts=False)
    assert analysis.sample_faults(history, 9, 13, expected) == (3 * BATCH // 2, 0)
    twice = [*world(1, 3, 1.0, 1), line(9.0, 3, attempt=2)]
    history = analysis.history(twice, restarts=False)
    assert analysis.sample_faults(history, 1, 3, expected) == (0, BATCH // 2)


def test_losses_are_means_over_all_ranks_tokens() -> None:
    history = analysis.history(world(1, 3, 1.0, 1), restarts=True)
    assert [history[step].mean_loss for step in (1, 2, 3)] == [1.0, 2.0, 3.0]
    assert analysis.loss_difference(history, [1.0, 2.5]) == 0.5
    assert analysis.loss_difference(history, []) is None


def test_the_replay_is_a_slice_of_a_trace() -> None:
    rows = [(0.0, 1)] * 4 + [(1.0, -1), (1.5, -1), (2.0, 1), (9.0, -1)]
    found = replay.changes_of(rows, 0.5, 2.0, nodes=4, at_least=1)
    scale = replay.LENGTH_S / 2.0
    # The slice has 3 nodes at most, which stand for all four.
    assert [c.nodes for c in found] == [3, 4]
    assert [c.at_s for c in found] == pytest.approx([1.0 * scale, 1.5 * scale], abs=0.1)
    assert all(1 <= change.nodes <= 4 for change in replay.CHANGES)
    times = [change.at_s for change in replay.CHANGES]
    assert times == sorted(times) and times[-1] < replay.LENGTH_S


def record(system: str, case: str, **found: Any) -> dict[str, Any]:
    return {"system": system, "round": 0, "case": case, "load": 1.0, **found}


def test_the_table_says_where_a_peer_wins(tmp_path: Path) -> None:
    cases = [
        record("elastic_ft (Ray)", "worker", paused_s=0.5, steps_redone=0),
        record("elastic_ft (Ray)", "worker", paused_s=0.7, steps_redone=0),
        record("peer", "worker", paused_s=0.3, steps_redone=20),
        record("peer", "node", paused_s=4.0, join={"paused_s": 9.0}),
        record("peer", "drain", failed="Late: too late"),
        record("elastic_ft (Ray)", "replay", goodput=0.9),
        record("peer", "replay", goodput=0.4),
    ]
    values = {
        "cases": cases,
        "runs": [{"system": "peer", "round": 0, "losses": [1.0, None, 3.5]}],
        "reference": [1.0, 2.0, 3.0],
        "tuned": {"peer": {"patience": "1 s"}},
        "versions": {"torch": "2"},
        "machine": {"cores": 2},
        "command": "run",
    }
    text = report.markdown(values, "raw.json")
    assert "| worker killed: paused, s | 0.60 (0.50 to 0.70) | 0.30 (once) |" in text
    assert "| node joins: paused, s | - | 9.00 (once) |" in text
    assert "- worker killed: paused, s: peer 0.30, elastic_ft (Ray) 0.60" in text
    assert "| worker killed: steps redone | 0 | 20 (once) |" in text
    assert "replay" not in text.split("**Where a peer is ahead:**")[1].split("**Cases")[0]
    assert "- peer, round 0, drain: Late: too late" in text
    assert "| - | 5.0e-01 in 2 steps |" in text and "raw.json" in text
    runs = [*values["runs"], {"system": "elastic_ft (Ray)", "round": 0, "losses": [1.0, 2.0, 4.0]}]
    assert (
        f"- {report.LOSS}: peer 5.0e-01 in 2 steps, elastic_ft (Ray) 1.0e+00 in 3 steps"
        in report.markdown(values | {"runs": runs}, "raw.json")
    )
    document = tmp_path / "d.md"
    document.write_text("a\n<!-- peers:begin -->\nold\n<!-- peers:end -->\nb\n")
    put(document, "peers", text)
    put(document, "peers", "new")
    assert document.read_text() == "a\n<!-- peers:begin -->\nnew\n<!-- peers:end -->\nb\n"
    with pytest.raises(ValueError, match="once each"):
        put(document, "others", "new")


def test_the_better_of_our_two_hides_no_peer() -> None:
    """Ray Train beside ours on Ray, too, where plain processes are as fast."""
    speeds = {"elastic_ft (processes)": 100.0, "elastic_ft (Ray)": 80.0, "peer": 101.0}
    cases = [record(system, "steady", tokens_per_s=v) for system, v in speeds.items()]
    (line,) = report.wins_of_peers({"cases": cases, "runs": []})
    assert line == "steady: tokens/s: peer 101, elastic_ft (Ray) 80"


def test_a_report_relabels_nothing(tmp_path: Path) -> None:
    raw = tmp_path / "peers.json"
    raw.write_text(json.dumps({"cases": [], "runs": [], "versions": {"torch": "1"}}))
    assert Results(raw, fresh=False, report_only=True).values["versions"] == {"torch": "1"}
    assert Results(raw, fresh=False).values["versions"]["torch"] != "1"


def test_the_harness_on_elastic_ft(tmp_path: Path) -> None:
    """A real job, a real kill, figures from its run folder; begun again, nothing is left to do."""
    out = tmp_path / "peers.json"
    script = [sys.executable, str(ROOT / "benchmarks/peers/run.py"), "--repeats", "1"]
    options = ["--systems", "elastic_ft (processes)", "--cases", "worker", "--out", str(out)]
    options += ["--document", "", "--reference-steps", "30", "--no-plots", "--deadline-s", "240"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for _ in range(2):
        done = subprocess.run(
            [*script, *options],
            capture_output=True,
            text=True,
            timeout=280,
            cwd=ROOT,
            env=environment,
        )
        assert done.returncode == 0, done.stderr + done.stdout
    values = json.loads(out.read_text())
    (case,) = values["cases"]
    assert "failed" not in case, case
    assert 0 <= case["noticed_s"] < case["paused_s"] + case["step_s"]
    assert case["steps_redone"] == case["samples_lost"] == case["samples_repeated"] == 0
    assert len(values["runs"]) == 1
    (difference,) = report.loss_differences(values, "elastic_ft (processes)")
    assert difference < 1e-4


def test_a_turn_is_of_the_steps_that_end_in_it_and_pairs_leave_out_what_is_none() -> None:
    applied = [step * 0.5 for step in range(100)]
    first = turns.turn_of(applied, 10.1, 14.9, cpu_s=9.6)
    assert first == turns.Turn(step_s=0.5, cpu_s=pytest.approx(1.0))
    assert turns.turn_of(applied, 10.1, 11.9, cpu_s=1.0) is None, "three steps say nothing"
    slower, much_slower = turns.Turn(0.625, 1.1), turns.Turn(1.0, 1.2)
    found = turns.compared([first] * 4, [slower, None, much_slower, slower])
    assert (found["pairs"], found["rate"], found["cpu"]) == (3, 0.8, 1.1)
    assert found["rate_of_all"] == round(1.5 / 2.25, 3)
