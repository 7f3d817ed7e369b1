"""I1 to I8 (DESIGN section 2), as far as a finished run's folder can show them. Pure.

The folder is evidence, not proof. What it can't show is tested where it happens: that two runs
compute the same loss and state (I3: compare their ``state_digest`` and losses), that refused
messages changed nothing (I1), that bytes were verified (I5), that waits were bounded (I7).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from elastic_ft.core.batches import Ledger, job_order, step_sequence_violations
from elastic_ft.core.terms import BATCH, SAMPLES, SEED

JsonLine = Mapping[str, Any]  # one object of a .jsonl file

STATUSES = ("completed", "failed", "stopped", "suspended")

_EVENT_KEYS = ("at_s", "seq", "generation", "event", "reason")
_STEP_KEYS = ("step", "generation", "world_size", "layout", "samples")
_LEDGER_KEYS = ("step", "samples")
_RESULT_KEYS = ("status", "reason", "steps", "samples", "recoveries")
_KEYS_OF_EVENT = {
    "generation_formed": ("step", "layout", "members"),
    "recovered": ("at_step", "world_before", "world_after", "survivors_kept_pid"),
    "changes_accepted": ("changes",),
    "checkpoint_committed": ("step",),
    "worker_lost": ("worker",),
    "worker_hung": ("worker",),
    "record_incomplete": ("first_step", "last_step"),
}
_RECOVERY_KEYS = _KEYS_OF_EVENT["recovered"]


@dataclass(frozen=True, slots=True, order=True)
class Violation:
    """One thing in the folder that contradicts an invariant."""

    invariant: str
    message: str

    def __str__(self) -> str:
        return f"{self.invariant}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What is known of the job from elsewhere. What is None is not checked."""

    seed: int | None = None
    dataset_size: int | None = None
    global_batch_size: int | None = None
    steps: int | None = None  # of a completed run
    status: str | None = None
    first_step: int = 1  # later where the folder is of a run that went on from a checkpoint


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The parsed files of a run folder; ``ledger`` and ``result`` may be absent."""

    events: Sequence[JsonLine]
    steps: Sequence[JsonLine]
    ledger: Sequence[JsonLine] | None
    result: JsonLine | None
    expected: Expected

    def all(self, event: str) -> list[JsonLine]:
        return [line for line in self.events if line["event"] == event]


def check_run(
    events: Sequence[JsonLine],
    steps: Sequence[JsonLine],
    ledger: Sequence[JsonLine] | None,
    result: JsonLine | None,
    expected: Expected | None = None,
) -> list[Violation]:
    """Returns every contradiction found in the files of a finished run, by invariant.

    The arguments are the parsed events.jsonl, steps.jsonl, ledger.jsonl (None without audit) and
    result.json (None: there is none, which is a violation of I7). Lines that lack the keys of
    DESIGN section 7 are reported under I8, and nothing else is then checked.
    """
    run = RunRecord(events, steps, ledger, result, expected or Expected())
    malformed = list(_malformed(run))
    if malformed:
        return [Violation("I8", message) for message in malformed]
    return [
        Violation(invariant, message)
        for invariant, check in CHECKS.items()
        for message in check(run)
    ]


def _malformed(run: RunRecord) -> Iterable[str]:
    for number, line in enumerate(run.events, 1):
        keys = (*_EVENT_KEYS, *_KEYS_OF_EVENT.get(line.get("event", ""), ()))
        yield from _lacking(f"events.jsonl:{number}", line, keys)
        for member in line.get("members", ()):
            yield from _lacking(f"events.jsonl:{number}, a member", member, ("worker", "pid"))
    for number, line in enumerate(run.steps, 1):
        yield from _lacking(f"steps.jsonl:{number}", line, _STEP_KEYS)
    for number, line in enumerate(run.ledger or (), 1):
        yield from _lacking(f"ledger.jsonl:{number}", line, _LEDGER_KEYS)
    if run.result is not None:
        yield from _lacking("result.json", run.result, _RESULT_KEYS)


def _lacking(where: str, line: JsonLine, keys: Iterable[str]) -> Iterable[str]:
    missing = [key for key in keys if key not in line]
    if missing:
        yield f"{where} lacks {', '.join(missing)}"


# ------------------------------------------------------------------------- per invariant


def one_generation(run: RunRecord) -> Iterable[str]:
    """I1: generations only rise, every step is of one that formed, and the lost stay out."""
    formed = [line["generation"] for line in run.all("generation_formed")]
    for before, after in pairwise(formed):
        if after <= before:
            yield f"generation {after} formed after generation {before}"
    for before_step, step in pairwise(run.steps):
        if step["generation"] < before_step["generation"]:
            yield (
                f"step {step['step']} is of generation {step['generation']}, "
                f"the step before it of {before_step['generation']}"
            )
    for step in run.steps:
        if step["generation"] not in formed:
            yield f"step {step['step']} is of generation {step['generation']}, which never formed"
    yield from _revenants(run)


def _revenants(run: RunRecord) -> Iterable[str]:
    gone: dict[str, int] = {}
    for line in run.events:
        if line["event"] == "job_started":
            gone = {}  # another controller names its workers anew
        elif line["event"] in ("worker_lost", "worker_hung"):
            gone.setdefault(line["worker"], line["seq"])
        elif line["event"] == "generation_formed":
            for worker in sorted(gone.keys() & _pids(line).keys()):
                yield (
                    f"{worker}, gone since event {gone[worker]}, "
                    f"is a member of generation {line['generation']}"
                )


def exactly_once(run: RunRecord) -> Iterable[str]:
    """I2: the samples of each step are those of the data order, and their count adds up."""
    if run.steps:
        batch = run.expected.global_batch_size
        if batch is None:
            batch = run.steps[-1]["samples"] // max(1, run.steps[-1]["step"])
        for line in run.steps:
            size = _term(run, BATCH, line["generation"], batch)
            if line["samples"] != line["step"] * size:
                yield (
                    f"step {line['step']} counts {line['samples']} samples, "
                    f"not {line['step']} x {size}"
                )
    if run.ledger is not None:
        yield from _ledger_violations(run, run.ledger)


def _ledger_violations(run: RunRecord, lines: Sequence[JsonLine]) -> Iterable[str]:
    expected = run.expected
    yield from _step_violations(run, [line["step"] for line in lines])
    for generation, some in _same_terms(run, lines):
        part = Ledger.of((line["step"], line["samples"]) for line in some)
        yield from part.repeated_samples()
        seed = _term(run, SEED, generation, expected.seed)
        size = _term(run, SAMPLES, generation, expected.dataset_size)
        batch = _term(run, BATCH, generation, expected.global_batch_size)
        if seed is not None and size and batch:
            yield from part.order_violations(job_order(seed, size), batch)
    committed, audited = ({line["step"] for line in some} for some in (run.steps, lines))
    for step in sorted(committed ^ audited):
        where = "steps.jsonl" if step in committed else "ledger.jsonl"
        yield f"step {step} is in {where} only"


def _term(run: RunRecord, key: str, generation: int, last: Any) -> Any:
    """What ``key`` was in ``generation``, ``last`` being what it is at the end of the run: changes
    that were asked for are journalled with the last generation before them."""
    for line in run.all("changes_accepted"):
        if key in line["changes"] and generation <= line["generation"]:
            return line["changes"][key][0]
    return last


def _same_terms(run: RunRecord, lines: Sequence[JsonLine]) -> Iterable[tuple[int, list[JsonLine]]]:
    """(a generation, its ledger lines and those of others under the same terms): each sample is
    used once within them. What an accepted change repeats or skips, its journal line says."""
    ends = [line["generation"] for line in run.all("changes_accepted")]
    parts: dict[int, list[JsonLine]] = {}
    for line in lines:
        generation = line.get("generation", 0)
        parts.setdefault(sum(generation > end for end in ends), []).append(line)
    return [(part[0].get("generation", 0), part) for _, part in sorted(parts.items())]


def all_or_nothing(run: RunRecord) -> Iterable[str]:
    """I4: steps are committed once each, in order, by the whole world of their generation."""
    yield from _step_violations(run, [line["step"] for line in run.steps])
    worlds = {
        line["generation"]: (len(line["members"]), line["layout"])
        for line in run.all("generation_formed")
    }
    for line in run.steps:
        found = (line["world_size"], line["layout"])
        formed = worlds.get(line["generation"], found)
        if found != formed:
            yield (
                f"step {line['step']} was committed by {found[0]} workers as {found[1]}, "
                f"generation {line['generation']} has {formed[0]} as {formed[1]}"
            )


def _step_violations(run: RunRecord, steps: Sequence[int]) -> Iterable[str]:
    """What is wrong with the order of ``steps``; lines whose loss is journalled are not missed."""
    lost = {
        step
        for line in run.all("record_incomplete")
        for step in range(line["first_step"], line["last_step"] + 1)
    }
    whole: list[int] = []
    for before, step in pairwise([run.expected.first_step - 1, *steps]):
        whole += [one for one in range(before + 1, step) if one in lost]
        whole.append(step)
    return step_sequence_violations(whole, run.expected.first_step)


def no_marker_no_checkpoint(run: RunRecord) -> Iterable[str]:
    """I5: only what was committed is read back."""
    committed = {0}
    for line in run.events:
        if line["event"] in ("checkpoint_committed", "job_started"):
            committed.add(line.get("step", 0))
        elif line.get("source") == "checkpoint" and line.get("step", 0) not in committed:
            yield (
                f"generation {line['generation']} starts from a checkpoint of step "
                f"{line['step']}, which was not committed before"
            )


def survivors_keep_their_process(run: RunRecord) -> Iterable[str]:
    """I6: a worker has one pid for life, and each recovery's survivors kept theirs."""
    pid_of: dict[str, int] = {}
    before: dict[str, int] = {}
    survived: dict[int, bool] = {}  # generation -> whether anyone was in the one before
    for line in run.events:
        if line["event"] == "job_started":
            pid_of, before = {}, {}  # another controller names its workers anew
        if line["event"] != "generation_formed":
            continue
        members = _pids(line)
        for worker, pid in members.items():
            if pid_of.setdefault(worker, pid) != pid:
                yield f"{worker} changed from pid {pid_of[worker]} to {pid}"
        if before:
            survived[line["generation"]] = not before.keys().isdisjoint(members)
        before = members
    for line in run.all("recovered"):
        kept, anyone = line["survivors_kept_pid"], survived.get(line["generation"])
        if anyone is not None and kept != anyone:
            fact = "has members" if anyone else "has no member"
            yield (
                f"generation {line['generation']} {fact} of the one before, "
                f"but survivors_kept_pid is {kept}"
            )


def bounded(run: RunRecord) -> Iterable[str]:
    """I7: the run ended, in a named state that the journal and the steps bear out."""
    if run.result is None:
        yield "there is no result.json: the run did not end"
        return
    status, expected = run.result["status"], run.expected
    if status not in STATUSES:
        yield f"status {status!r} is none of {', '.join(STATUSES)}"
    if not run.result["reason"]:
        yield f"the run is {status} for no reason"
    if expected.status is not None and status != expected.status:
        yield f"the run is {status}, not {expected.status}: {run.result['reason']}"
    if not (ends := run.all("finished")):
        yield "the journal has no finished event"
    elif (told := ends[-1].get("status")) != status:
        yield f"the journal says {told}, result.json says {status}"
    last = run.steps[-1] if run.steps else {"step": expected.first_step - 1, "samples": None}
    if run.result["steps"] != last["step"]:
        yield f"result.json has {run.result['steps']} steps, steps.jsonl ends with {last['step']}"
    if last["samples"] not in (None, run.result["samples"]):
        yield f"result.json has {run.result['samples']} samples, steps.jsonl {last['samples']}"
    if status == "completed" and expected.steps not in (None, last["step"]):
        yield f"completed at step {last['step']} of {expected.steps}"


def explained(run: RunRecord) -> Iterable[str]:
    """I8: every event has its reason, none is missing, and recoveries are those journalled."""
    for line in run.events:
        if not str(line["reason"] or "").strip():
            yield f"event {line['seq']}, {line['event']}, has no reason"
    for before, after in pairwise(run.events):
        if after["seq"] != before["seq"] + 1:
            yield f"event {after['seq']} follows event {before['seq']}"
    journalled = [_recovery(line) for line in run.all("recovered")]
    for recovery in (run.result or {}).get("recoveries", ()):
        if _recovery(recovery) not in journalled:
            said = ", ".join(f"{k} {v}" for k, v in _recovery(recovery).items())
            yield f"result.json has a recovery that the journal does not: {said}"


def _recovery(line: JsonLine) -> dict[str, Any]:
    return {key: line.get(key) for key in _RECOVERY_KEYS}


def _pids(formed: JsonLine) -> dict[str, int]:
    return {member["worker"]: member["pid"] for member in formed["members"]}


CHECKS: Mapping[str, Callable[[RunRecord], Iterable[str]]] = {
    "I1": one_generation,
    "I2": exactly_once,
    "I4": all_or_nothing,
    "I5": no_marker_no_checkpoint,
    "I6": survivors_keep_their_process,
    "I7": bounded,
    "I8": explained,
}
