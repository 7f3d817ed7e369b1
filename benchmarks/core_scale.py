"""The controller's core at thousands of workers: events per second, bytes, seconds to decide.

    python benchmarks/core_scale.py --workers 1000 3000 10000

The real core handles what as many workers would send through one life: all come up, form, train
some steps; one is lost, the others reach their safe point, a smaller world forms and trains on.
Each event comes encoded, as on the wire, and each command is encoded as it would be sent. A phase
that takes longer than ``--phase-s`` is cut short, a single event after twice that: its rate is
that of what was handled. Seconds are of computing (CPU time), which a busy machine hardly
changes. Where the time goes is kept as a profile of each phase at the largest size.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import gc
import json
import os
import platform
import pstats
import signal
import sys
import time
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.document import put, table
from elastic_ft.core import commands as cmd
from elastic_ft.core import events as ev
from elastic_ft.core.assignment import Assignment, Holding, Member, Tier
from elastic_ft.core.layouts.layout import Strategy
from elastic_ft.core.membership import step as core_step
from elastic_ft.core.policy import Policy
from elastic_ft.core.state import State
from elastic_ft.transport.control import forms, to_each
from elastic_ft.transport.messages import Encoded, Messages, encode

STEPS = 2
TOLD = Messages(*typing.get_args(ev.Event))
PHASES = ("come up", "form", "train", "pause", "form again", "train on")


@dataclass(slots=True)
class Controller:
    """The core and its wire, with nobody at the other end."""

    policy: Policy
    state: State = field(default_factory=State)
    pauses: list[cmd.PauseWorkers] = field(default_factory=list)
    formed: list[cmd.FormGeneration] = field(default_factory=list)
    committed: int = 0
    sent_bytes: int = 0
    decide_s: float = 0.0  # of computing in the core itself, without the wire
    last_decide_s: float = 0.0  # of that, for the newest event

    def tell(self, message: bytes) -> None:
        event = TOLD.decode(message)
        began_s = time.process_time()
        self.state, commands = core_step(self.state, event, self.policy)
        self.last_decide_s = time.process_time() - began_s
        self.decide_s += self.last_decide_s
        for command in commands:
            if isinstance(command, cmd.PauseWorkers):
                self.pauses.append(command)
                self._send(to_each(command), len(command.workers))
            elif isinstance(command, cmd.FormGeneration):
                self.formed.append(command)
                for _, form in forms(command.assignment, {}):
                    self._send(form, 1)
            else:
                self._send(command, 1)
            if isinstance(command, cmd.RecordStep):
                self.committed = command.step

    def _send(self, message: Any, receivers: int) -> None:
        """As the controller does, up to the socket."""
        for _ in range(receivers):
            encoded = message if isinstance(message, Encoded) else Encoded(message)
            self.sent_bytes += len(encoded.body)


def member(index: int) -> Member:
    return Member(f"w{index}", f"n{index // 8}", f"host{index // 8}", index, index // 8)


def names(count: int) -> list[str]:
    return [f"w{index}" for index in range(count)]


def ready(count: int) -> Iterator[ev.Event]:
    return (ev.WorkerReady(0.0, member(index)) for index in range(count))


def resumed(controller: Controller) -> Iterator[ev.Event]:
    assignment = controller.formed[-1].assignment
    for one in assignment.members:
        yield ev.Resumed(0.0, one.worker, assignment.generation, assignment.source.step, 10**6, 0.1)


def steps(controller: Controller) -> Iterator[ev.Event]:
    """Applied and, where that is what commits them, held, by every member."""
    assignment = controller.formed[-1].assignment
    first = controller.state.committed + 1
    for number in range(first, first + STEPS):
        for rank, one in enumerate(assignment.members):
            metrics = {"loss": 2.0, "tokens": 1000, "lr": 1e-3, "grad_norm": 1.0}
            common = (0.0, one.worker, assignment.generation, number)
            yield ev.StepApplied(*common, metrics, pace_s=0.5, took_s=0.6, spent={"data_s": 0.01})
            if rank in assignment.holding:
                yield ev.StepHeld(*common)


def paused(controller: Controller) -> Iterator[ev.Event]:
    """Everyone alive holds its shard of the newest step, and a copy of its buddy's."""
    old = controller.formed[-1].assignment
    newest = controller.committed
    kept: dict[int, int] = {}
    for rank, buddies in enumerate(old.buddies):
        for buddy in buddies:
            kept[buddy] = rank
    for worker in controller.pauses[-1].workers:
        rank = old.rank_of(worker)
        assert rank is not None
        held = [_holding(old, rank, newest, Tier.LIVE)]
        if rank in kept:
            held.append(_holding(old, kept[rank], newest, Tier.PEER))
        yield ev.Paused(0.0, worker, controller.state.generation, tuple(held))


def _holding(of: Assignment, rank: int, step: int, tier: Tier) -> Holding:
    layout = of.layout
    return Holding(step, layout.shard_space, layout.shard_of(rank), tier, of.computed_by(step))


def handle(
    controller: Controller, events: Iterable[ev.Event], phase_s: float, profile: bool
) -> dict[str, Any]:
    """Tells them one by one; the time that encoding takes at the workers' end is not counted."""
    messages = [encode(event) for event in events]
    profiler = cProfile.Profile() if profile else None
    before, slowest_s, done = controller.sent_bytes, 0.0, 0
    decided_s = controller.decide_s
    began_s = last_s = time.process_time()
    if profiler is not None:
        profiler.enable()
    with _at_most(2 * phase_s):  # of one event
        for message in messages:
            controller.tell(message)
            now_s = time.process_time()
            slowest_s, last_s, done = max(slowest_s, now_s - last_s), now_s, done + 1
            if now_s - began_s > phase_s:
                break
    slowest_s = max(slowest_s, time.process_time() - last_s)
    if profiler is not None:
        profiler.disable()
    seconds = time.process_time() - began_s
    found: dict[str, Any] = {
        "events": done,
        "of": len(messages),
        "seconds": seconds,
        "events_per_s": done / max(seconds, 1e-6),
        "slowest_ms": slowest_s * 1e3,
        "decide_s": controller.decide_s - decided_s,
        "last_decide_s": controller.last_decide_s,
        "received_bytes_per_event": sum(map(len, messages)) / max(1, len(messages)),
        "sent_bytes": controller.sent_bytes - before,
    }
    return found | ({"profile": _top(profiler)} if profiler is not None else {})


@contextlib.contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Breaks off what is inside after so long, in CPU time."""

    def late(signum: int, frame: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        with contextlib.suppress(TimeoutError):
            yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _top(profiler: cProfile.Profile, count: int = 8) -> list[dict[str, Any]]:
    """Where the time itself went, not what was called from there."""
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    rows = [
        {"where": f"{Path(file).name}:{line} {name}", "calls": calls, "own_s": round(own_s, 3)}
        for (file, line, name), (_, calls, own_s, _, _) in stats.items()
    ]
    return sorted(rows, key=lambda row: -row["own_s"])[:count]


def size_of(thing: object) -> int:
    """Bytes of all that can be reached from ``thing``, classes and modules aside."""
    seen, todo, total = {id(thing)}, [thing], 0
    while todo:
        one = todo.pop()
        total += sys.getsizeof(one)
        for other in gc.get_referents(one):
            if id(other) not in seen and not isinstance(other, type):
                seen.add(id(other))
                todo.append(other)
    return total


def life(count: int, strategy: Strategy, phase_s: float, profile: bool) -> dict[str, Any]:
    policy = Policy(min_workers=1, max_workers=count, strategy=strategy)
    controller = Controller(policy)
    phases: dict[str, Any] = {}

    def phase(name: str, events: Callable[[], Iterable[ev.Event]]) -> bool:
        phases[name] = handle(controller, events(), phase_s, profile)
        return bool(phases[name]["events"] == phases[name]["of"])

    controller.tell(encode(ev.JobStarted(0.0)))
    whole = phase("come up", lambda: ready(count))
    whole = whole and phase("form", lambda: resumed(controller))
    whole = whole and phase("train", lambda: steps(controller))
    memory_bytes = size_of(controller.state)
    found: dict[str, Any] = {"workers": count, "strategy": strategy, "phases": phases}
    if whole:
        lost = lambda: [ev.WorkerLost(0.0, f"w{count // 2}", "killed", 0.01)]  # noqa: E731
        whole = (
            phase("lose one", lost)
            and phase("pause", lambda: paused(controller))
            and phase("form again", lambda: resumed(controller))
            and phase("train on", lambda: steps(controller))
        )
        found |= {"bytes_per_worker": memory_bytes / count}
    if whole:
        # Everything between the loss and the new assignment: in the core, and with the wire.
        for key, part in (("shrink_decided_s", "decide_s"), ("shrink_handled_s", "seconds")):
            found[key] = sum(phases[name][part] for name in ("lose one", "pause"))
        found["last_answer_s"] = phases["pause"]["last_decide_s"]
        for key, name in (("pause_bytes", "lose one"), ("assignment_bytes", "pause")):
            found[key] = phases[name]["sent_bytes"] / (count - 1)  # to each
        found |= {"committed": controller.committed}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1000, 3000, 10_000])
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp"])
    parser.add_argument("--phase-s", type=float, default=120)
    parser.add_argument("--out", default="benchmarks/results/core-scale.json")
    parser.add_argument("--document", default="docs/benchmarks.md", help="'' leaves it alone")
    arguments = parser.parse_args()
    lives = []
    for strategy in arguments.strategies:
        for count in arguments.workers:
            lives.append(found := life(count, strategy, arguments.phase_s, profile=False))
            _show(found)
    largest = max(arguments.workers)
    profiles = {s: life(largest, s, arguments.phase_s, profile=True) for s in arguments.strategies}
    record = {
        "arguments": vars(arguments),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "lives": lives,
        "profiles": {
            strategy: {name: phase["profile"] for name, phase in found["phases"].items()}
            for strategy, found in profiles.items()
        },
    }
    Path(arguments.out).parent.mkdir(parents=True, exist_ok=True)
    Path(arguments.out).write_text(json.dumps(record, indent=1) + "\n")
    if arguments.document:
        put(Path(arguments.document), "core-scale", markdown(record, arguments.out))


def markdown(record: dict[str, Any], raw: str) -> str:
    """Per life: seconds and events/s of each phase; then where the time goes."""
    rows = []
    for found in record["lives"]:
        phases = found["phases"]
        rows.append(
            [
                f"{found['workers']:,}, {found['strategy']}",
                *(_cell(phases.get(name)) for name in PHASES),
                _number(found, "shrink_decided_s", "{:.3f}"),
                _number(found, "last_answer_s", "{:.3f}"),
                _number(found, "shrink_handled_s", "{:.2f}"),
                _number(found, "bytes_per_worker", "{:,.0f}"),
                _number(found, "pause_bytes", "{:,.0f}"),
                _number(found, "assignment_bytes", "{:,.0f}"),
            ]
        )
    titles = ["workers", *(f"{name}, s (events/s)" for name in PHASES)]
    titles += [
        "a shrink is decided, s",
        "of that, after the last answer, s",
        "with the wire, s",
        "state, bytes per worker",
        "a pause as sent to each, bytes",
        "an assignment as sent to each, bytes",
    ]
    lines = []
    for strategy, phases in record["profiles"].items():
        for name, top in ((name, phases[name]) for name in PHASES if name in phases):
            worst = ", ".join(f"`{row['where']}` {row['own_s']:g} s" for row in top[:3])
            lines.append(f"- {strategy}, {name}: {worst}")
    return "\n\n".join(
        [
            f"Load average {record['load']}, Python {record['python']}; from `{raw}`. A > marks "
            "a phase that was cut short.",
            table(titles, rows),
            f"Where the time goes at {max(record['arguments']['workers']):,} workers (profiled, "
            "which takes longer):",
            "\n".join(lines),
        ]
    )


def _cell(phase: dict[str, Any] | None) -> str:
    if phase is None:
        return "-"
    cut = "> " * (phase["events"] < phase["of"])
    return f"{cut}{phase['seconds']:.2f} ({phase['events_per_s']:,.0f})"


def _number(found: dict[str, Any], key: str, pattern: str) -> str:
    return pattern.format(found[key]) if key in found else "-"


def _show(found: dict[str, Any]) -> None:
    print(f"{found['workers']} workers, {found['strategy']}:", flush=True)
    for name, phase in found["phases"].items():
        cut = "" if phase["events"] == phase["of"] else f" (cut short, of {phase['of']})"
        print(
            f"  {name}: {phase['events']} events{cut} in {phase['seconds']:.2f} s, "
            f"{phase['events_per_s']:,.0f}/s, slowest {phase['slowest_ms']:.1f} ms",
            flush=True,
        )
    if "shrink_decided_s" in found:
        print(
            f"  a shrink is decided in {found['shrink_decided_s']:.3f} s of computing, "
            f"{found['last_answer_s']:.3f} of it after the last answer, "
            f"{found['shrink_handled_s']:.2f} s with the wire; "
            f"{found['bytes_per_worker']:,.0f} bytes per worker, "
            f"{found['assignment_bytes']:,.0f} bytes of an assignment to each",
            flush=True,
        )


if __name__ == "__main__":
    main()
