"""The story of a run, for a person: one line for each happening, and what it all cost."""

from __future__ import annotations

from collections.abc import Iterator

from elastic_ft.observe.accounts import CLASSES, PRODUCTIVE
from elastic_ft.observe.journal import EVENTS
from elastic_ft.observe.wording import INDENT, Line, counted, text_of, utc

FRAMES_SHOWN = 4
UNKNOWN = "{event}: {reason}"  # of an event that the catalogue does not have


def brief(line: Line) -> str:
    """What a person who waits is told of a line of the journal; "" if nothing."""
    event = EVENTS.get(line["event"])
    return text_of(event.brief, line) if event is not None and event.brief is not None else ""


def story(line: Line, elapsed_s: float | None) -> Iterator[str]:
    """The lines of one line of the journal; none if it is no part of the story.

    Args:
        elapsed_s: since the journal's first line. None: dates and times of day are told.
    """
    event = EVENTS.get(line["event"])
    teller = UNKNOWN if event is None else event.full
    if teller is None:
        return
    if not (text := text_of(teller, line)):
        return
    when = f"{elapsed_s:9.2f} s" if elapsed_s is not None else utc(line["at_s"])
    yield f"{when}  g{line['generation']:<3}  {text}"
    if line["event"] == "diagnosis":
        yield from (f"{INDENT}{row}" for row in _stacks(line))


def raw(line: Line, elapsed_s: float | None) -> str:
    """One line of the journal, with its reason, and whom it is of."""
    when = f"{elapsed_s:8.1f} s" if elapsed_s is not None else utc(line["at_s"])
    names = (line.get("worker"), line.get("node"))
    whose = "".join(f" {name[:12]}" for name in names if isinstance(name, str))
    return f"{when}  g{line['generation']}  {line['event']}{whose}: {line['reason']}"


def _stacks(line: Line) -> Iterator[str]:
    """Each stack once, as far as it is shown: innermost frame first, with the ranks in it."""
    standing: dict[str, list[str]] = {}
    for name, frames in line.get("stacks", {}).items():
        ranks = [str(e["rank"]) for e in line["workers"] if e.get("stack") == name]
        shown = " < ".join(frame.replace("elastic_ft/", "") for frame in frames[:FRAMES_SHOWN])
        more = " < ..." if len(frames) > FRAMES_SHOWN else ""
        standing.setdefault(shown + more, []).extend(ranks)
    for shown, ranks in standing.items():
        yield f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {shown}"


def summary(result: Line, starts: int = 1) -> Iterator[str]:
    """How a finished run ended and what it cost, from its result.json.

    Args:
        starts: of the job so far; result.json is of the last one.
    """
    recoveries = result.get("recoveries", [])
    begun = f"; the last of {starts} starts took" if starts > 1 else " in"
    generations = f"{counted(result['generations'], 'generation')}, " if starts == 1 else ""
    yield (
        f"{result['status']}: {counted(result['steps'], 'step')}{begun} {result['wall_s']:.1f} s, "
        f"{generations}{len(recoveries)} recover{'y' if len(recoveries) == 1 else 'ies'}"
    )
    if recoveries:
        paused_s = sum(r["paused_s"] for r in recoveries)
        lost, redone = (sum(r[f"steps_{what}"] for r in recoveries) for what in ("lost", "redone"))
        yield f"paused {paused_s:.2f} s in all, {counted(lost, 'step')} lost, {redone} redone"
    if "worker_seconds" in result:
        seconds = result["worker_seconds"]
        yield (
            f"goodput {result['goodput']:.1%} of the wall clock, "
            f"{seconds['goodput_per_allocated']:.1%} of allocated worker time, "
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
