"""What a scenario's run folder proves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from chaos.check import Verdict, expected_of, losses_of, same_losses
from chaos.disturbance import fired_inside
from chaos.fault_kinds import External, Network
from chaos.runner import LOG, fired_in
from chaos.scenario import Expect, Scenario
from elastic_ft.config import Job
from elastic_ft.observe.lines import Line
from elastic_ft.observe.run_reader import RunReader, read_lines

CLAIMS = {  # of a recovery, by its cause
    "node_lost": "a node was lost, the others went on",
    "worker_joined": "a node came back and joined at a step boundary",
}


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a finished run has left."""

    events: list[Line]
    steps: list[Line]
    result: dict[str, Any]

    def all(self, event: str) -> list[Line]:
        return [line for line in self.events if line["event"] == event]


def judge(
    scenario: Scenario,
    folder: Path,
    job: Job,
    samples: int | None,
    reference: dict[int, float],
    patience: float = 1.0,
) -> list[Verdict]:
    """Returns a verdict on each thing that is expected.

    Args:
        patience: times the longest gap that is allowed.
        samples: of the training data; None if that is not known.
        reference: step -> loss of the same job undisturbed.
    """
    reader, expect = RunReader(folder), scenario.expect
    run = Evidence(reader.events(), reader.steps(), reader.result())
    violations = reader.violations(expected_of(job, samples))
    shown = "; ".join(str(violation) for violation in violations[:3]) or "none broken"
    verdicts = [_all_fired(scenario, folder), _ended(run, expect)]
    verdicts += _recoveries(run, expect)
    verdicts += _survivors(run, expect)
    verdicts += _journal(run, expect)
    verdicts += _worlds(run, expect)
    verdicts += _cut_off(run, scenario, folder)
    verdicts += _gap(reader, expect, folder, patience)
    verdicts += _samples_once(reader, expect, job)
    verdicts.append(Verdict("invariants I1-I8 hold in the run folder", not violations, shown))
    if expect.same_losses:
        verdicts.append(same_losses(reader, reference))
    return verdicts


def judge_demo(
    scenario: Scenario, folder: str, undisturbed: str, job: Job, samples: int
) -> list[Verdict]:
    """Returns the verdicts on a run that went on to the job's end, all of it within an epoch."""
    whole = {"status": ("completed",), "samples_once": True}
    expect = scenario.expect.model_copy(update=whole)
    scenario = scenario.model_copy(update={"expect": expect})
    return judge(scenario, Path(folder), job, samples, losses_of(RunReader(undisturbed)))


def _all_fired(scenario: Scenario, folder: Path) -> Verdict:
    outside, inside = fired_in(folder / LOG), fired_inside(folder)
    missed = [str(f) for i, f in enumerate(scenario.external) if i not in outside]
    missed += [str(f) for i, f in enumerate(scenario.at_points) if i not in inside]
    found = f"never: {'; '.join(missed)}" if missed else f"{len(scenario.faults)} of them"
    return Verdict("every fault fired", not missed, found)


def _ended(run: Evidence, expect: Expect) -> Verdict:
    result = run.result or {"status": "there is no result.json", "reason": ""}
    passed = result["status"] in expect.status and bool(re.search(expect.reason, result["reason"]))
    wanted = " or ".join(expect.status) + (f" ({expect.reason})" if expect.reason else "")
    found = f"{result['status']}: {result['reason']}" if result["reason"] else result["status"]
    return Verdict(f"the run is {wanted}", passed, found)


def _recoveries(run: Evidence, expect: Expect) -> Iterator[Verdict]:
    found, restarts = run.all("recovered"), run.all("controller_restarted")
    if expect.steps_lost_max is not None:
        most = expect.steps_lost_max
        claim = f"at most {most} committed steps are lost" if most else "no committed step was lost"
        lost = sum(line["steps_lost"] for line in (*found, *restarts))
        redone, moved = (sum(line[k] for line in found) for k in ("steps_redone", "bytes_moved"))
        told = f"{lost} steps lost, {redone} uncommitted redone, {moved:,} bytes from "
        sources = " and ".join(dict.fromkeys(line["source"] for line in found))
        yield Verdict(claim, lost <= most, told + (sources or "nowhere"))
    # A node's loss is often known as such only when its workers have been done without.
    known = (*run.result.get("recoveries", ()), *found)
    for cause in expect.causes:
        first = next((line for line in known if line["cause"] == cause), None)
        others = ", ".join(sorted({line["cause"] for line in known})) or "nothing"
        told = f"recovered from {others}" if first is None else _recovery(first)
        yield Verdict(CLAIMS.get(cause, f"recovered from {cause}"), first is not None, told)
    if expect.sources:
        from_where = {line["source"] for line in found}
        passed = bool(from_where) and from_where <= set(expect.sources)
        claim = f"state comes from {' or '.join(expect.sources)} alone"
        yield Verdict(claim, passed, ", ".join(sorted(from_where)) or "no recovery")
    if expect.recoveries_max is not None:
        claim = f"at most {expect.recoveries_max} recoveries"
        yield Verdict(claim, len(found) <= expect.recoveries_max, f"{len(found)}")
    if expect.paused_max_s is not None:
        longest_s = max((line["paused_s"] for line in found), default=0.0)
        claim = f"no recovery pauses for more than {expect.paused_max_s:g} s"
        yield Verdict(claim, longest_s <= expect.paused_max_s, f"{longest_s:.1f} s")


def _recovery(line: Line) -> str:
    return (
        f"{line['layout_before']} -> {line['layout_after']} at step {line['at_step']}, "
        f"paused {line['paused_s']:.2f} s"
    )


def _survivors(run: Evidence, expect: Expect) -> Iterator[Verdict]:
    if not expect.survivors:
        return
    worlds = [
        {member["worker"]: member["pid"] for member in line["members"]}
        for line in run.all("generation_formed")
    ]
    same = all(a[worker] == b[worker] for a, b in pairwise(worlds) for worker in a.keys() & b)
    throughout = set.intersection(*(set(world.values()) for world in worlds)) if worlds else set()
    kept = same and all(line["survivors_kept_pid"] for line in run.all("recovered"))
    passed = kept and len(throughout) >= expect.survivors
    found = f"pids {', '.join(map(str, sorted(throughout))) or 'none'}"
    yield Verdict("survivors kept their processes", passed, found)


def _gap(reader: RunReader, expect: Expect, folder: Path, patience: float) -> Iterator[Verdict]:
    """Between steps as workers train them: when they are committed says who is in charge."""
    if expect.gap_max_s is None:
        return
    struck_s = min((line["at_s"] for line in read_lines(folder / LOG)), default=0.0)
    trained: dict[int, float] = {}
    for line in reader.inbox():
        if line["type"] == "StepApplied":
            trained.setdefault(line["step"], line["at_s"])
    times = sorted(trained.values())
    gaps = [after - before for before, after in pairwise(times) if after > struck_s]
    most_s = expect.gap_max_s * patience
    claim = f"no more than {most_s:g} s between two trained steps"
    longest_s = max(gaps, default=float("inf"))
    yield Verdict(claim, longest_s <= most_s, f"{longest_s:.2f} s")


def _samples_once(reader: RunReader, expect: Expect, job: Job) -> Iterator[Verdict]:
    """Which samples they must be, and in which order, is I2's matter."""
    if not expect.samples_once:
        return
    consumed = [sample for line in reader.ledger() or () for sample in line["samples"]]
    distinct, wanted = len(set(consumed)), job.steps * job.batch.global_batch_size
    found = f"{len(consumed)} consumed, {distinct} distinct, {wanted} expected"
    passed = len(consumed) == distinct == wanted
    yield Verdict("every sample is in exactly one committed step", passed, found)


def _journal(run: Evidence, expect: Expect) -> Iterator[Verdict]:
    names = {line["event"] for line in run.events}
    for name in expect.events:
        yield Verdict(f"the journal has {name}", name in names, _count(run, name))
    for name in expect.no_events:
        yield Verdict(f"the journal has no {name}", name not in names, _count(run, name))


def _count(run: Evidence, name: str) -> str:
    return f"{len(run.all(name))}"


def _worlds(run: Evidence, expect: Expect) -> Iterator[Verdict]:
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


def _cut_off(run: Evidence, scenario: Scenario, folder: Path) -> Iterator[Verdict]:
    """I1: who can't be reached stops by itself, before the link heals."""
    if scenario.expect.cut_off_ends_s is None:
        return
    limit_s = scenario.expect.cut_off_ends_s
    claim = f"who is cut off ends within {limit_s:g} s"
    lines = read_lines(folder / LOG)
    ended = [line["after_s"] for line in lines if "after_s" in line]
    external = scenario.external
    cuts = [line for line in lines if "index" in line and cuts_network(external[line["index"]])]
    formed = run.all("generation_formed")
    behind = 0
    for cut in cuts:
        last = [line for line in formed if line["at_s"] <= cut["at_s"]][-1]
        behind += sum(member["node"] == cut["node"] for member in last["members"])
    passed = 0 < behind == len(ended) and all(after_s <= limit_s for after_s in ended)
    found = ", ".join(f"{after_s:.1f} s" for after_s in ended) or "nobody ended"
    found = f"{behind} workers: {found}"
    yield Verdict(claim, passed, found)


def cuts_network(fault: External) -> bool:
    return isinstance(fault, Network) and fault.network == "cut"
