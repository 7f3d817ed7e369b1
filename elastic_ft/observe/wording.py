"""Lines of the journal, and amounts, in words."""

from __future__ import annotations

import string
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from elastic_ft.observe.lines import Line

Text = str | Callable[[Line], str]  # a format of the line's fields, or what makes the text
INDENT = " " * 18
HEAD_AWAY_S = 10.0  # since its last answer was asked for: one look may take seconds
HANGS = ("WorkerHung", "NobodyMoves", "TimerFired")  # events by which a generation breaks
RECOVERED = (
    "recovered from {cause} at step {at_step}: {world_before} -> {world_after} workers, "
    "paused {paused_s:.2f} s, {steps_lost} steps lost"
)


class _Formatter(string.Formatter):
    """What JSON has no number for is null in a line: a loss that is none."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return "nan" if value is None and format_spec else str(format(value, format_spec))


def utc(at_s: float) -> str:
    """Returns a unix time as a date and a time of day, such as "2026-11-24 19:00:27 UTC"."""
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M:%S} UTC"


def text_of(text: Text, line: Line) -> str:
    return _Formatter().vformat(text, (), line) if isinstance(text, str) else text(line)


def counted(count: int, what: str) -> str:
    """Returns "1 step", "2 steps"."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def human_size(nbytes: float) -> str:
    """Returns bytes with a decimal prefix, such as "1.5 MB"."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 1000 or unit == "TB":
            break
        nbytes /= 1000
    return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"


def lost(line: Line) -> str:
    rank = "" if line.get("rank") is None else f" (rank {line['rank']})"
    return f"lost {line['worker']}{rank}: {line['reason']}"


def world_formed(line: Line) -> str:
    pids = ", ".join(str(member["pid"]) for member in line["members"])
    source = line["source"]
    state = "initial state" if source == "initial" else f"state from {source}"
    return (
        f"generation {line['generation']}: {line['layout']} from step {line['step']}, "
        f"{state}, pid{'s' * (len(line['members']) != 1)} {pids}"
    )


def recovered(line: Line) -> str:
    kept = "every survivor kept its process" if line["survivors_kept_pid"] else "no one survived"
    noticed = f"noticed within {line['noticed_s']:.2f} s, " if line["noticed_s"] else ""
    return (
        f"{RECOVERED.format_map(line)}, {line['steps_redone']} redone; {noticed}"
        f"{human_size(line['bytes_moved'])} moved, {kept}"
    )


def raised(line: Line) -> str:
    """With the user's frames, so that nobody has to look for them in the journal."""
    frames = "".join(f"\n{INDENT}  {frame}" for frame in line.get("frames", ()))
    return f"{line['worker']} raised: {line['reason']}{frames}"


def asked_to_stop(line: Line) -> str:
    """Who waits is told who asked: of a handover, or of ``elastic-ft stop``, there is no second."""
    stops = "the job stops after this step, with a checkpoint"
    if line["reason"] == "interrupted":
        return f"interrupted: {stops}; a second interrupt stops it at once"
    return f"{stops}: {line['reason']}"


def resized(line: Line) -> str:
    """Who leaves other places than were asked for is asked for the same number again: no news."""
    return "" if line.get("before") == line["workers"] else f"resize: {line['reason']}"


def hung_in_own_code(line: Line) -> str:
    """Of what hung, and stood in code of the job's own: nobody else knows what that waits for."""
    if line["cause"] not in HANGS:
        return ""
    told = [one for one in line["workers"] if one.get("own_code") and not one.get("collective")]
    suspects = [one for one in told if one["suspect"]]
    places: dict[str, list[str]] = {}
    for one in suspects or told:
        places.setdefault(one["own_code"], []).append(str(one["rank"]))
    return "; ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} stood still in {place}"
        for place, ranks in places.items()
    )


def pausing(line: Line) -> str:
    return f"{'breaking off' if line['abort'] else 'pausing'}: {line['reason']}"


def head_away(seen_s_ago: float | None) -> str:
    """In words; "" where it answers, or was not asked yet."""
    if seen_s_ago is None or seen_s_ago < HEAD_AWAY_S:
        return ""
    return f"the cluster's head has not answered for {seen_s_ago:.0f} s"
