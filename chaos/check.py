"""Verdicts on any finished run: its invariants, and its losses beside the same job undisturbed."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_ft.config import Job
from elastic_ft.core.invariants import Expected
from elastic_ft.observe.run_reader import RunReader

LOSS_DIFFERENCE_MAX = 1e-4  # relative, at every step


@dataclass(frozen=True, slots=True)
class Verdict:
    claim: str
    passed: bool
    found: str


def expected_of(job: Job, samples: int | None) -> Expected:
    """``samples``: of the training data; None if that is not known."""
    return Expected(
        seed=job.seed,
        dataset_size=samples,
        global_batch_size=job.batch.global_batch_size,
        steps=job.steps,
    )


def losses_of(run: RunReader) -> dict[int, float]:
    """step -> loss."""
    return {line["step"]: line["loss"] for line in run.steps()}


def same_losses(run: RunReader, reference: dict[int, float]) -> Verdict:
    """``reference``: step -> loss of the same job undisturbed."""
    losses = losses_of(run)
    claim = f"each loss is that of the undisturbed run, within {LOSS_DIFFERENCE_MAX:g}"
    if not losses or not losses.keys() <= reference.keys():
        return Verdict(claim, False, f"{len(losses)} steps here, {len(reference)} there")
    differences = {step: abs(losses[step] / reference[step] - 1) for step in losses}
    worst = max(differences, key=differences.__getitem__)
    found = f"greatest relative difference {differences[worst]:.1e}, at step {worst}"
    return Verdict(claim, differences[worst] <= LOSS_DIFFERENCE_MAX, f"{found} of {len(losses)}")
