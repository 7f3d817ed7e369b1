"""The story of a run, for a person: one line for each happening, and what it all cost."""

from __future__ import annotations

from collections.abc import Iterator

from elastic_ft.observe.accounts import CLASSES, PRODUCTIVE
from elastic_ft.observe.journal import EVENTS
from elastic_ft.observe.wording import INDENT, Line, text_of

FRAMES_SHOWN = 4
UNKNOWN = "{event}: {reason}"  # of an event that the catalogue does not have


def brief(line: Line) -> str:
    """What a person who waits is told of a line of the journal; "" if nothing."""
    event = EVENTS.get(line["event"])
    return text_of(event.brief, line) if event is not None and event.brief is not None else ""


def story(line: Line, elapsed_s: float) -> Iterator[str]:
    """The lines of one line of the journal; none if it is no part of the story."""
    event = EVENTS.get(line["event"])
    teller = UNKNOWN if event is None else event.full
    if teller is None:
        return
    text = text_of(teller, line)
    yield f"{elapsed_s:9.2f} s  g{line['generation']:<3}  {text}"
    if line["event"] == "diagnosis":
        yield from (f"{INDENT}{row}" for row in _stacks(line))


def raw(line: Line, elapsed_s: float) -> str:
    """One line of the journal, with its reason."""
    return f"{elapsed_s:8.1f} s  g{line['generation']}  {line['event']}: {line['reason']}"


def _stacks(line: Line) -> Iterator[str]:
    """Each stack once, innermost frame first, with the ranks that were in it."""
    for name, frames in line.get("stacks", {}).items():
        ranks = [str(e["rank"]) for e in line["workers"] if e.get("stack") == name]
        shown = " < ".join(frame.replace("elastic_ft/", "") for frame in frames[:FRAMES_SHOWN])
        more = " < ..." if len(frames) > FRAMES_SHOWN else ""
        yield f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {shown}{more}"


def summary(result: Line) -> Iterator[str]:
    """How a finished run ended and what it cost, from its result.json."""
    recoveries = result.get("recoveries", [])
    yield (
        f"{result['status']}: {result['steps']} steps in {result['wall_s']:.1f} s, "
        f"{result['generations']} generations, {len(recoveries)} recoveries"
    )
    if recoveries:
        paused_s = sum(r["paused_s"] for r in recoveries)
        lost, redone = (sum(r[f"steps_{what}"] for r in recoveries) for what in ("lost", "redone"))
        yield f"paused {paused_s:.2f} s in all, {lost} steps lost, {redone} redone"
    if "worker_seconds" in result:
        seconds = result["worker_seconds"]
        yield (
            f"goodput {seconds['goodput_per_allocated']:.1%} of allocated worker time, "
            f"{seconds['goodput_per_available']:.1%} of available"
        )


def goodput(worker_seconds: Line) -> Iterator[str]:
    """Where every second of every worker went: ``Totals.as_dict``."""
    allocated_s = worker_seconds["allocated_s"]
    yield f"{allocated_s:12.2f} s  of allocated workers"
    for name in (PRODUCTIVE, *(name for name in CLASSES if name != PRODUCTIVE)):
        seconds = worker_seconds["classes"][name]
        yield f"{seconds:12.2f} s  {seconds / max(allocated_s, 1e-9):6.1%}  {name}"
    yield f"{worker_seconds['available_s']:12.2f} s  of available workers"
