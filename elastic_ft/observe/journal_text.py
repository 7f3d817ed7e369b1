"""The story of a run, for a person: one line for each happening, and what it all cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from elastic_ft.observe.accounts import CLASSES, PRODUCTIVE

Line = dict[str, Any]
INDENT = " " * 18
FRAMES_SHOWN = 4
# Of interest to who looks for it, and part of no story.
LEFT_OUT = (
    *("metrics_served", "keeper_ready", "worker_ready", "host_memory", "snapshot_interval"),
    "data_opened",
)


def _lost(line: Line) -> str:
    rank = "" if line.get("rank") is None else f" (rank {line['rank']})"
    return f"lost {line['worker']}{rank}: {line['reason']}"


def _formed(line: Line) -> str:
    pids = ", ".join(str(member["pid"]) for member in line["members"])
    return (
        f"generation {line['generation']}: {line['layout']} from step {line['step']}, "
        f"state from {line['source']}, pids {pids}"
    )


def _recovered(line: Line) -> str:
    return (
        f"recovered from {line['cause']} at step {line['at_step']}: "
        f"{line['world_before']} -> {line['world_after']} workers, "
        f"paused {line['paused_s']:.2f} s, {line['steps_lost']} steps lost"
    )


def _recovered_at_length(line: Line) -> str:
    kept = "every survivor kept its process" if line["survivors_kept_pid"] else "no one survived"
    noticed = f"noticed within {line['noticed_s']:.2f} s, " if line["noticed_s"] else ""
    return (
        f"{_recovered(line)}, {line['steps_redone']} redone; {noticed}"
        f"{size(line['bytes_moved'])} moved, {kept}"
    )


def _raised(line: Line) -> str:
    """With where, so that nobody has to look for it: the journal's lines of the user's frames."""
    frames = "".join(f"\n{INDENT}  {frame}" for frame in line.get("frames", ()))
    return f"{line['worker']} raised: {line['reason']}{frames}"


# What a person who waits wants to know; the story has more.
SPOKEN: dict[str, Callable[[Line], str]] = {
    "job_started": lambda line: line["reason"],
    "changes_accepted": lambda line: line["reason"],
    "job_changed": lambda line: line["reason"],
    "controller_restarted": lambda line: f"another controller follows: {line['reason']}",
    "startup": lambda line: f"startup: {line['reason']}",
    "loop_without_steps": lambda line: f"{line['worker']}: {line['reason']}",
    "generation_formed": _formed,
    "worker_lost": _lost,
    "worker_hung": _lost,
    "node_lost": lambda line: f"lost node {line['node'][:12]}: {line['reason']}",
    "node_draining": lambda line: f"node {line['node'][:12]} is draining: {line['reason']}",
    "drain_deferred": lambda line: line["reason"],
    "suspended": lambda line: f"suspended: {line['reason']}",
    "resize_requested": lambda line: f"resize: {line['reason']}",
    "resize_refused": lambda line: f"resize refused: {line['reason']}",
    "spare_used": lambda line: f"spare: {line['reason']}",
    "join_deferred": lambda line: line["reason"],
    "straggler_evicted": lambda line: f"straggler: {line['reason']}",
    "straggler_kept": lambda line: f"straggler: {line['reason']}",
    "recovered": _recovered,
    "rolled_back": lambda line: f"rolled back to step {line['step']}: {line['reason']}",
    "worker_raised": _raised,
    "source_refused": lambda line: f"refused: {line['reason']}",
    "source_unreadable": lambda line: f"unreadable: {line['reason']}",
    "worker_refused": lambda line: f"{line['worker']} can't take part: {line['reason']}",
    "device_lost": lambda line: f"{line['worker']} lost its GPU: {line['reason']}",
    "node_avoided": lambda line: f"node {line['node'][:12]} is avoided: {line['reason']}",
    "worker_left_out": lambda line: f"{line['worker']} is left out: {line['reason']}",
    "checkpoint_refused": lambda line: f"checkpoint refused: {line['reason']}",
    "checkpoint_failed": lambda line: f"checkpoint failed: {line['reason']}",
    "checkpoint_warning": lambda line: f"checkpoint: {line['reason']}",
    "checkpoint_abandoned": lambda line: (
        f"checkpoint of step {line['step']} abandoned: {line['reason']}"
    ),
    "checkpoint_committed": lambda line: f"checkpoint of step {line['step']}: {line['url']}",
    "step_skipped": lambda line: f"step {line['step']} was skipped: {line['reason']}",
    "evaluated": lambda line: f"step {line['step']}: held-out loss {line['loss']:.4f}",
    "fault_fired": lambda line: f"fault injected: {line['reason']}, {line['worker']}",
    "stop_requested": lambda line: "stopping after this step and a checkpoint; again: at once",
}
TOLD = SPOKEN | {
    "recovered": _recovered_at_length,
    "pausing": lambda line: f"{'breaking off' if line['abort'] else 'pausing'}: {line['reason']}",
    "worker_joined": lambda line: f"{line['worker']} is rank {line['rank']} on {line['node'][:12]}",
    "diagnosis": lambda line: f"who stood where: {line['reason']}",
    "finished": lambda line: f"finished: {line['reason']}",
}


def story(line: Line, elapsed_s: float) -> Iterator[str]:
    """The lines of one line of the journal; none if it is no part of the story."""
    if line["event"] in LEFT_OUT:
        return
    teller = TOLD.get(line["event"])
    text = teller(line) if teller is not None else f"{line['event']}: {line['reason']}"
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


def size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 1000 or unit == "TB":
            break
        nbytes /= 1000
    return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
