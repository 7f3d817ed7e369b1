"""What the demo claims of its run, and that each claim fails where the run folder denies it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chaos.check import Verdict
from chaos.expect import judge_demo
from chaos.runner import LOG
from chaos.scenario import load_scenario
from elastic_ft.cli.demo import JOB_FILE
from elastic_ft.config import Job, load_job, parse_job
from elastic_ft.core.batches import DataOrder

SAMPLES, STEPS, BATCH = 200, 12, 4
Change = Callable[[dict[str, list[dict[str, Any]]]], object]
KEPT = "survivors kept their processes"


def job() -> Job:
    return parse_job(
        {
            "name": "demo",
            "seed": 7,
            "steps": STEPS,
            "model": {"preset": "decoder-1m"},
            "data": {"url": "stdlib:"},
            "batch": {"global_batch_size": BATCH, "micro_batch_size": 1},
            "elastic": {"min_workers": 2, "max_workers": 4},
            "audit": True,
        }
    )


def formed(generation: int, step: int, workers: str) -> dict[str, Any]:
    members = [{"worker": f"w{name}", "pid": 100 + int(name), "node": "n"} for name in workers]
    fields = {"step": step, "layout": f"fsdp{len(workers)}", "members": members, "source": "live"}
    return {"event": "generation_formed", "generation": generation, **fields}


def recovered(generation: int, step: int, cause: str, before: int, after: int) -> dict[str, Any]:
    return {
        **{"event": "recovered", "generation": generation, "cause": cause, "at_step": step},
        **{"world_before": before, "world_after": after, "layout_before": f"fsdp{before}"},
        **{"layout_after": f"fsdp{after}", "survivors_kept_pid": True, "paused_s": 0.2},
        **{"steps_lost": 0, "steps_redone": 1, "bytes_moved": 5_926_524, "source": "peer"},
    }


def run_files() -> dict[str, list[dict[str, Any]]]:
    """Four workers of which one is lost after step 4, and another joins after step 8."""
    order = DataOrder(7, SAMPLES)
    recoveries = [recovered(2, 4, "node_lost", 4, 3), recovered(3, 8, "worker_joined", 3, 4)]
    events = [
        {"event": "job_started", "generation": 0, "step": 0},
        *(formed(1, 0, "0123"), formed(2, 4, "012"), recoveries[0]),
        *(formed(3, 8, "0124"), recoveries[1]),
        {"event": "finished", "generation": 3, "status": "completed"},
    ]
    common = [{"at_s": float(n), "seq": n, "reason": "why"} | line for n, line in enumerate(events)]
    steps, ledger = [], []
    for step in range(1, STEPS + 1):
        worlds = ((4, 1, 4), (8, 2, 3), (STEPS, 3, 4))  # until a step: generation, size
        generation, world = next((g, size) for end, g, size in worlds if step <= end)
        world_of = {"generation": generation, "world_size": world, "layout": f"fsdp{world}"}
        steps.append({"step": step, "samples": step * BATCH, "loss": 5.0 / step, **world_of})
        first = (step - 1) * BATCH
        ids = list(order.sample_ids(first, first + BATCH))
        ledger.append({"step": step, "generation": generation, "samples": ids})
    result = {"status": "completed", "reason": "all steps", "steps": STEPS}
    result |= {"samples": STEPS * BATCH, "recoveries": recoveries}
    faults = load_scenario("node-loss-and-return").external
    return {
        "events.jsonl": common,
        "steps.jsonl": steps,
        "ledger.jsonl": ledger,
        "result.json": [result],
        LOG: [{"index": index, "at_s": 1.0} for index in range(len(faults))],
    }


def judged(tmp_path: Path, change: Change) -> list[Verdict]:
    for name, altered in (("run", True), ("calm", False)):
        files = run_files()
        if altered:
            change(files)
        (tmp_path / name).mkdir()
        for file, lines in files.items():
            (tmp_path / name / file).write_text("".join(json.dumps(line) + "\n" for line in lines))
    folders = (str(tmp_path / "run"), str(tmp_path / "calm"))
    return judge_demo(load_scenario("node-loss-and-return"), *folders, job(), SAMPLES)


def test_a_run_that_lost_a_node_and_got_one_back_passes(tmp_path: Path) -> None:
    verdicts = judged(tmp_path, lambda files: None)
    assert [f"{v.claim}: {v.found}" for v in verdicts if not v.passed] == []
    found = {verdict.claim: verdict.found for verdict in verdicts}
    assert found[KEPT] == "pids 100, 101, 102"
    assert found["no committed step was lost"].endswith("11,853,048 bytes from peer")
    lost = found["a node was lost, the others went on"]
    assert lost == "fsdp4 -> fsdp3 at step 4, paused 0.20 s"
    assert found["every sample is in exactly one committed step"].startswith("48 consumed, 48 dist")


@pytest.mark.parametrize(
    ("claim", "change"),
    [
        ("every fault fired", lambda files: files[LOG].pop()),
        (KEPT, lambda files: files["events.jsonl"][2]["members"][0].update(pid=1)),
        (KEPT, lambda files: files["events.jsonl"][3].update(survivors_kept_pid=False)),
        ("no committed step was lost", lambda files: files["events.jsonl"][3].update(steps_lost=1)),
        (
            "a node was lost, the others went on",
            lambda files: [
                line.update(cause="worker_lost")
                for line in (files["events.jsonl"][3], files["result.json"][0]["recoveries"][0])
            ],
        ),
        (
            "every sample is in exactly one committed step",
            lambda files: files["ledger.jsonl"][3].update(samples=[1, 1, 2, 3]),
        ),
        (
            "the run is completed",
            lambda files: [
                line.update(status="stopped")
                for line in (files["events.jsonl"][-1], files["result.json"][0])
            ],
        ),
        (
            "the last step is by 4 workers",
            lambda files: files["steps.jsonl"][-1].update(world_size=3),
        ),
        (
            "each loss is that of the undisturbed run, within 0.0001",
            lambda files: files["steps.jsonl"][5].update(loss=0.835),
        ),
    ],
)
def test_a_claim_fails_where_the_folder_denies_it(
    tmp_path: Path, claim: str, change: Change
) -> None:
    failed = [verdict.claim for verdict in judged(tmp_path, change) if not verdict.passed]
    assert claim in failed


def test_the_demo_finds_its_job_and_its_scenario() -> None:
    scenario = load_scenario(load_job(JOB_FILE).faults.scenario or "")
    assert scenario == load_scenario("node-loss-and-return")
