"""What a scenario's run folder proves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from chaos.check import LOSS_DIFFERENCE_MAX, FinishedRun, Verdict
from chaos.disturbance import fired_inside
from chaos.runner import LOG, fired_in
from chaos.scenario import Expect, External, Network, Scenario
from elastic_ft.config import Job
from elastic_ft.core.invariants import Expected, check_run
from elastic_ft.observe.run_folder import read_lines


def judge(
    scenario: Scenario, folder: Path, job: Job, samples: int | None, reference: dict[int, float]
) -> list[Verdict]:
    """Returns a verdict on each thing that is expected.

    Args:
        samples: of the training data; None if that is not known.
        reference: step -> loss of the same job undisturbed.
    """
    run, expect = FinishedRun.of(folder), scenario.expect
    verdicts = [_all_fired(scenario, folder), _ended(run, expect), _invariants(run, job, samples)]
    verdicts += _recoveries(run, expect)
    verdicts += _journal(run, expect)
    verdicts += _worlds(run, expect)
    verdicts += _cut_off(run, scenario, folder)
    if expect.same_losses:
        verdicts.append(same_losses(run, reference))
    return verdicts


def _all_fired(scenario: Scenario, folder: Path) -> Verdict:
    outside, inside = fired_in(folder / LOG), fired_inside(folder)
    missed = [str(f) for i, f in enumerate(scenario.external) if i not in outside]
    missed += [str(f) for i, f in enumerate(scenario.at_points) if i not in inside]
    found = f"never: {'; '.join(missed)}" if missed else f"{len(scenario.faults)} of them"
    return Verdict("every fault fired", not missed, found)


def _ended(run: FinishedRun, expect: Expect) -> Verdict:
    result = run.result or {"status": "there is no result.json", "reason": ""}
    passed = result["status"] in expect.status and bool(re.search(expect.reason, result["reason"]))
    wanted = " or ".join(expect.status) + (f" ({expect.reason})" if expect.reason else "")
    found = f"{result['status']}: {result['reason']}" if result["reason"] else result["status"]
    return Verdict(f"the run is {wanted}", passed, found)


def _invariants(run: FinishedRun, job: Job, samples: int | None) -> Verdict:
    expected = Expected(
        seed=job.seed, dataset_size=samples, global_batch_size=job.batch.global_batch_size
    )
    violations = check_run(run.events, run.steps, run.ledger, run.result, expected)
    shown = "; ".join(str(violation) for violation in violations[:3]) or "none broken"
    return Verdict("invariants I1-I8 hold in the run folder", not violations, shown)


def _recoveries(run: FinishedRun, expect: Expect) -> Iterator[Verdict]:
    found = [line for line in run.events if line["event"] == "recovered"]
    restarts = [line for line in run.events if line["event"] == "controller_restarted"]
    lost = sum(line["steps_lost"] for line in (*found, *restarts))
    if expect.steps_lost_max is not None:
        claim = f"at most {expect.steps_lost_max} committed steps are lost"
        passed = lost <= expect.steps_lost_max
        yield Verdict(claim, passed, f"{lost} in {len(found) + len(restarts)} recoveries")
    # A node's loss is often known as such only when its workers have been done without.
    later = (run.result or {}).get("recoveries", ())
    causes = {line["cause"] for line in (*found, *later)}
    if expect.causes:
        passed = set(expect.causes) <= causes
        wanted = " and ".join(expect.causes)
        yield Verdict(f"recovered from {wanted}", passed, ", ".join(sorted(causes)) or "none")
    if expect.sources:
        sources = {line["source"] for line in found}
        passed = bool(sources) and sources <= set(expect.sources)
        claim = f"state comes from {' or '.join(expect.sources)} alone"
        yield Verdict(claim, passed, ", ".join(sorted(sources)) or "no recovery")
    if expect.recoveries_max is not None:
        claim = f"at most {expect.recoveries_max} recoveries"
        yield Verdict(claim, len(found) <= expect.recoveries_max, f"{len(found)}")
    if expect.paused_max_s is not None:
        longest_s = max((line["paused_s"] for line in found), default=0.0)
        claim = f"no recovery pauses for more than {expect.paused_max_s:g} s"
        yield Verdict(claim, longest_s <= expect.paused_max_s, f"{longest_s:.1f} s")


def _journal(run: FinishedRun, expect: Expect) -> Iterator[Verdict]:
    names = {line["event"] for line in run.events}
    for name in expect.events:
        yield Verdict(f"the journal has {name}", name in names, _count(run, name))
    for name in expect.no_events:
        yield Verdict(f"the journal has no {name}", name not in names, _count(run, name))


def _count(run: FinishedRun, name: str) -> str:
    return f"{sum(line['event'] == name for line in run.events)}"


def _worlds(run: FinishedRun, expect: Expect) -> Iterator[Verdict]:
    worlds = [line["world_size"] for line in run.steps]
    if expect.world_min is not None:
        least = min(worlds, default=0)
        claim = f"no step by fewer than {expect.world_min} workers"
        yield Verdict(claim, least >= expect.world_min, f"the fewest are {least}")
    if expect.world_end is not None:
        last = worlds[-1] if worlds else 0
        yield Verdict(
            f"the last step is by {expect.world_end} workers", last == expect.world_end, f"{last}"
        )


def _cut_off(run: FinishedRun, scenario: Scenario, folder: Path) -> Iterator[Verdict]:
    """I1: who can't be reached stops by itself, before the link heals."""
    if scenario.expect.cut_off_ends_s is None:
        return
    limit_s = scenario.expect.cut_off_ends_s
    claim = f"who is cut off ends within {limit_s:g} s"
    lines = read_lines(folder / LOG) if (folder / LOG).exists() else []
    ended = [line["after_s"] for line in lines if "after_s" in line]
    external = scenario.external
    cuts = [line for line in lines if "index" in line and is_cut(external[line["index"]])]
    formed = [line for line in run.events if line["event"] == "generation_formed"]
    behind = 0
    for cut in cuts:
        last = [line for line in formed if line["at_s"] <= cut["at_s"]][-1]
        behind += sum(member["node"] == cut["node"] for member in last["members"])
    passed = 0 < behind == len(ended) and all(after_s <= limit_s for after_s in ended)
    found = ", ".join(f"{after_s:.1f} s" for after_s in ended) or "nobody ended"
    found = f"{behind} workers: {found}"
    yield Verdict(claim, passed, found)


def is_cut(fault: External) -> bool:
    return isinstance(fault, Network) and fault.network == "cut"


def same_losses(run: FinishedRun, reference: dict[int, float]) -> Verdict:
    losses = {line["step"]: line["loss"] for line in run.steps}
    claim = f"each loss is that of the undisturbed run, within {LOSS_DIFFERENCE_MAX:g}"
    if not losses or not losses.keys() <= reference.keys():
        return Verdict(claim, False, f"{len(losses)} steps here, {len(reference)} there")
    differences = {step: abs(losses[step] / reference[step] - 1) for step in losses}
    worst = max(differences, key=differences.__getitem__)
    found = f"greatest relative difference {differences[worst]:.1e} in {len(losses)} steps"
    return Verdict(claim, differences[worst] <= LOSS_DIFFERENCE_MAX, found)
