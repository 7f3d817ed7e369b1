"""What a disturbed run's folder proves, beside the same job undisturbed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_ft.config import Job
from elastic_ft.core.invariants import Expected, check_run
from elastic_ft.observe.follow import Line
from elastic_ft.observe.lines import read_lines

LOSS_DIFFERENCE_MAX = 1e-4  # relative, at every step


@dataclass(frozen=True, slots=True)
class Verdict:
    claim: str
    passed: bool
    found: str


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """The parsed files of a run folder."""

    events: list[Line]
    steps: list[Line]
    ledger: list[Line] | None
    result: dict[str, Any] | None

    @staticmethod
    def of(path: Path) -> FinishedRun:
        ledger, result = path / "ledger.jsonl", path / "result.json"
        return FinishedRun(
            events=read_lines(path / "events.jsonl"),
            steps=read_lines(path / "steps.jsonl"),
            ledger=read_lines(ledger) if ledger.exists() else None,
            result=json.loads(result.read_text()) if result.exists() else None,
        )

    def recovery(self, cause: str) -> Line:
        """The first recovery with this cause, {} if there is none."""
        recoveries = (self.result or {}).get("recoveries", ())
        return next((r for r in recoveries if r["cause"] == cause), {})

    def members(self, generation: int) -> dict[str, int]:
        """worker -> pid of a generation."""
        for line in self.events:
            if line["event"] == "generation_formed" and line["generation"] == generation:
                return {member["worker"]: member["pid"] for member in line["members"]}
        return {}

    def members_before(self, generation: int) -> dict[str, int]:
        """worker -> pid of the last generation that formed before this one."""
        formed = [e["generation"] for e in self.events if e["event"] == "generation_formed"]
        return self.members(max((g for g in formed if g < generation), default=0))


def compare_runs(disturbed: Path, calm: Path, job: Job, samples: int) -> list[Verdict]:
    """Returns the verdicts on a run that lost a node and got one back.

    Args:
        calm: the folder of the same job undisturbed.
        samples: of the training data.
    """
    run, reference = FinishedRun.of(disturbed), FinishedRun.of(calm)
    return [
        _completed(run, job),
        *_loss_of_a_node(run),
        _return_of_a_node(run),
        _exactly_once(run, job),
        _invariants(run, job, samples),
        _same_losses(run, reference),
    ]


def _completed(run: FinishedRun, job: Job) -> Verdict:
    result = run.result or {"status": "no result.json", "steps": 0}
    passed = result["status"] == "completed" and result["steps"] == job.steps
    return Verdict("the job completed", passed, f"{result['status']}, {result['steps']} steps")


def _loss_of_a_node(run: FinishedRun) -> list[Verdict]:
    found = run.recovery("node_lost")
    if not found:
        return [Verdict("a node was lost", False, "no recovery with cause node_lost")]
    before, after = run.members_before(found["generation"]), run.members(found["generation"])
    survivors = {worker: pid for worker, pid in before.items() if after.get(worker) == pid}
    kept = len(survivors) == len(after) == found["world_after"] and found["survivors_kept_pid"]
    return [
        Verdict(
            "a node was lost, the others went on",
            found["world_after"] == found["world_before"] - 1,
            f"{found['layout_before']} -> {found['layout_after']} at step {found['at_step']}, "
            f"paused {found['paused_s']:.2f} s",
        ),
        Verdict("survivors kept their processes", kept, _pids(survivors)),
        Verdict(
            "no committed step was lost",
            found["steps_lost"] == 0 and found["source"] != "checkpoint",
            f"{found['steps_lost']} steps lost, {found['steps_redone']} uncommitted redone, "
            f"{found['bytes_moved']:,} bytes from {found['source']}",
        ),
    ]


def _return_of_a_node(run: FinishedRun) -> Verdict:
    found = run.recovery("worker_joined")
    claim = "a node came back and joined at a step boundary"
    if not found:
        return Verdict(claim, False, "no recovery with cause worker_joined")
    before, after = run.members_before(found["generation"]), run.members(found["generation"])
    passed = found["world_after"] == found["world_before"] + 1 and before.items() <= after.items()
    return Verdict(
        claim,
        passed and found["steps_lost"] == 0,
        f"{found['layout_before']} -> {found['layout_after']} at step {found['at_step']}, "
        f"paused {found['paused_s']:.2f} s, {_pids(after)}",
    )


def _pids(members: dict[str, int]) -> str:
    return "pids " + (", ".join(str(pid) for pid in sorted(members.values())) or "none")


def _exactly_once(run: FinishedRun, job: Job) -> Verdict:
    """Which samples they must be, and in which order, is I2's matter."""
    consumed = [sample for line in run.ledger or () for sample in line["samples"]]
    distinct, wanted = len(set(consumed)), job.steps * job.batch.global_batch_size
    found = f"{len(consumed)} consumed, {distinct} distinct, {wanted} expected"
    passed = len(consumed) == distinct == wanted
    return Verdict("every sample is in exactly one committed step", passed, found)


def _invariants(run: FinishedRun, job: Job, samples: int) -> Verdict:
    expected = Expected(
        seed=job.seed,
        dataset_size=samples,
        global_batch_size=job.batch.global_batch_size,
        steps=job.steps,
        status="completed",
    )
    violations = check_run(run.events, run.steps, run.ledger, run.result, expected)
    shown = "; ".join(str(violation) for violation in violations[:3]) or "none broken"
    return Verdict("invariants I1-I8 hold in the run folder", not violations, shown)


def _same_losses(run: FinishedRun, reference: FinishedRun) -> Verdict:
    expected = {line["step"]: line["loss"] for line in reference.steps}
    losses = {line["step"]: line["loss"] for line in run.steps}
    claim = f"each loss is that of the undisturbed run, within {LOSS_DIFFERENCE_MAX:g}"
    if losses.keys() != expected.keys() or not losses:
        return Verdict(claim, False, f"{len(losses)} steps here, {len(expected)} there")
    differences = {step: abs(losses[step] / expected[step] - 1) for step in losses}
    worst = max(differences, key=differences.__getitem__)
    return Verdict(
        claim,
        differences[worst] <= LOSS_DIFFERENCE_MAX,
        f"greatest relative difference {differences[worst]:.1e}, at step {worst} of {len(losses)}",
    )
