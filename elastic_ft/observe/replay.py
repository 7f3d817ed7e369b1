"""Tells the core again what a run's controller told it, from inbox.jsonl, and compares.

The core is pure: told the same, it must decide the same. A difference means that the core has
changed since, or that the journal is not what happened.
"""

from __future__ import annotations

import itertools
import json
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_ft.core import commands as cmd
from elastic_ft.core import events as ev
from elastic_ft.core.membership import step as decide
from elastic_ft.core.policy import Policy
from elastic_ft.core.state import State
from elastic_ft.core.typed import decoder
from elastic_ft.errors import MALFORMED, ConfigError, one_line
from elastic_ft.observe import snapshots
from elastic_ft.observe.accounts import Accounts, Totals
from elastic_ft.observe.lines import Line
from elastic_ft.observe.run_reader import RunReader

EVENTS = {cls.__name__: cls for cls in typing.get_args(ev.Event)}
SHOWN = ("event", "generation", "reason")


@dataclass(frozen=True, slots=True)
class ToldLine:
    """One event, and when the controller told the core of it (its own clock).

    ``sender``: who has numbered it, and how (``transport.outbox``); "": nobody has.
    """

    at_s: float
    event: ev.Event
    sender: str = ""
    number: int = 0


@dataclass(frozen=True, slots=True)
class Begun:
    """A controller's start. ``at_s``: from here on its time is accounted for.

    ``beside``: as of ``Snapshot``; {} where one follows.
    """

    at_s: float
    policy: Policy
    beside: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The core's state: what came before may be there no longer, and need not be read.

    Attributes:
        seq: of the first journal line that came after.
        beside: what else the controller had, for the next one (``controller.standing``).
    """

    at_s: float
    seq: int
    state: State
    beside: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReplayEnd:
    """A controller's end, in good order."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Noted:
    """A journal line that the core did not ask for.

    Attributes:
        line: that one; {} where a version before this wrote it.
        sender, number: as of ``ToldLine``.
    """

    seq: int
    line: dict[str, Any] = field(default_factory=dict)
    sender: str = ""
    number: int = 0


InboxItem = Begun | ToldLine | Noted | Snapshot | ReplayEnd


def parse_inbox(lines: Iterable[Line]) -> Iterator[InboxItem]:
    """Raises ConfigError where a line is of no kind that this version knows, or lacks a part."""
    for number, line in enumerate(lines, 1):
        try:
            item = _item(line)
        except MALFORMED as error:
            what = one_line(error, 120)
            raise ConfigError(f"inbox.jsonl:{number} can't be understood: {what}") from None
        yield item


def _item(line: Line) -> InboxItem:
    kind = line["type"]
    if kind == "Policy":
        return Begun(float(line["at_s"]), decoder(Policy)(line), dict(line.get("beside", {})))
    if kind == "Ended":
        return ReplayEnd(float(line["at_s"]))
    if kind == "Noted":
        return Noted(int(line["seq"]), dict(line.get("noted", {})), *_sender(line))
    if kind == "Snapshot":
        state, beside = snapshots.decode(line["state"]), dict(line.get("beside", {}))
        return Snapshot(float(line["at_s"]), int(line["seq"]), state, beside)
    if kind in EVENTS:
        told_at_s = line["told_at_s"] if "told_at_s" in line else line["at_s"]
        return ToldLine(float(told_at_s), decoder(EVENTS[kind])(line), *_sender(line))
    raise ConfigError(f"inbox.jsonl: {kind} is no event of this version's core")


def _sender(line: Line) -> tuple[str, int]:
    return str(line.get("from", "")), int(line.get("n", 0))


# ------------------------------------------------------------------------------ replaying


@dataclass(slots=True)
class Start:
    """From where the job is started to where it is started again, whoever is in charge.

    Attributes:
        decisions: the journal lines that the core asks for, without at_s and seq.
        noted: sequence numbers of other journal lines, up to the next start's first decision.
        ended: in good order. One that was killed may have lines in one of both files alone.
    """

    decisions: list[Line] = field(default_factory=list)
    noted: set[int] = field(default_factory=set)
    ended: bool = False


@dataclass(slots=True)
class Replayed:
    """What the core decides, told so.

    Attributes:
        starts: the first one is what comes before any, or the rest of one.
        since: the sequence number of the first journal line that it can be compared with.
        state: at the end.
    """

    told: int = 0
    starts: list[Start] = field(default_factory=lambda: [Start()])
    since: int = 0
    state: State = field(default_factory=State)
    finish: cmd.FinishJob | None = None
    until_s: float = 0.0


def replay(inbox: Iterable[InboxItem], accounts: Accounts | None = None) -> Replayed:
    """Raises ConfigError where there is no policy: a run of a version before this."""
    done, policy = Replayed(), None
    for item in inbox:
        if isinstance(item, Begun):
            policy = item.policy
            continue
        if isinstance(item, ReplayEnd):
            done.until_s, done.starts[-1].ended = item.at_s, True
            continue
        if isinstance(item, Noted):
            done.starts[-1].noted.add(item.seq)
            continue
        if isinstance(item, Snapshot):
            if not done.told:  # else it is of what we know
                done.state, done.since = item.state, item.seq
            continue
        if policy is None:
            raise ConfigError("inbox.jsonl does not begin with the policy: it can't be replayed")
        if isinstance(item.event, ev.JobStarted):
            done.state = State()
            done.starts.append(Start())
        done.told, done.until_s = done.told + 1, item.at_s
        try:
            done.state, commands = decide(done.state, item.event, policy)
            lines = [line for command in commands for line in journal_line_of(command)]
            done.starts[-1].decisions.extend(lines)
        except Exception as error:  # told nonsense, the core may raise anything
            what = one_line(error, 120)
            told = f"event {done.told}, {type(item.event).__name__}"
            raise ConfigError(f"inbox.jsonl: the core can't be told {told}: {what}") from error
        for command in commands:
            if isinstance(command, cmd.FinishJob):
                done.finish = command
        if accounts is not None:
            accounts.on(item.at_s, item.event, commands, done.state)
    return done


def journal_line_of(command: cmd.Command) -> Iterator[Line]:
    if isinstance(command, cmd.PauseWorkers):
        line = {"generation": command.generation, "event": "pausing", "reason": command.reason}
        yield line | {"abort": command.abort}
    elif isinstance(command, cmd.Journal):
        line = {"generation": command.generation, "event": command.event}
        line |= {"reason": command.reason, **command.fields}
        yield json.loads(json.dumps(line))


@dataclass(frozen=True, slots=True)
class ReplayVerdict:
    """Attributes:
    difference: in words; empty if every decision is the recorded one.
    torn: lines that one of both alone has, at the ends of starts that were killed.
    """

    told: int
    decisions: int
    difference: str = ""
    torn: int = 0


def check_replay(url: str | Path, *, exact: bool = True) -> ReplayVerdict:
    """Replays a run and compares what is decided with its events.jsonl.

    Not ``exact``: another wording of a reason, and fields that are new, are no difference.
    """
    run = RunReader(url)
    done = replay(parse_inbox(run.inbox()))
    lines = run.events()
    if odd := [line for line in lines if not isinstance(line.get("seq"), int)]:
        raise ConfigError(f"events.jsonl: a line has no seq: {str(odd[0])[:120]}")
    parts = _by_start([line for line in lines if line["seq"] >= done.since])
    same = torn = 0
    for start, part in itertools.zip_longest(done.starts, parts):
        start, part = start or Start(), part or []
        recorded = [line for line in part if line["seq"] not in start.noted]
        decided = _to_be_written(start.decisions, recorded)
        for then, now in zip(recorded, decided, strict=False):
            if found := _difference(then, now, exact):
                return ReplayVerdict(done.told, same, f"journal line {then['seq']}: {found}")
            same += 1
        alone, more = recorded[len(decided) :], decided[len(recorded) :]
        if start.ended or start is done.starts[-1] or part is parts[-1]:
            if alone:
                return ReplayVerdict(done.told, same, f"the journal alone has {_shown(alone[0])}")
            if more:
                return ReplayVerdict(done.told, same, f"the core alone has {_shown(more[0])}")
        torn += len(alone) + len(more)
    return ReplayVerdict(done.told, same, torn=torn)


def _by_start(recorded: list[Line]) -> list[list[Line]]:
    """As ``Replayed.starts``."""
    parts: list[list[Line]] = [[]]
    for line in recorded:
        if line["event"] == "job_started":
            parts.append([])
        parts[-1].append(line)
    return parts


def _to_be_written(decisions: list[Line], recorded: list[Line]) -> list[Line]:
    """All but an end that is not recorded there: that line comes last of all, is no decision where
    more was found out meanwhile, and is missing where its controller was killed before."""
    kept: list[Line] = []
    for line in decisions:
        here = recorded[len(kept) : len(kept) + 1]
        if line["event"] != cmd.FINISHED or (here and here[0]["event"] == cmd.FINISHED):
            kept.append(line)
    return kept


def _difference(then: Line, now: Line, exact: bool) -> str:
    then = {name: value for name, value in then.items() if name not in ("at_s", "seq")}
    if not exact:
        now = {name: value for name, value in now.items() if name in then}
        then["reason"] = now["reason"]
    if any(then.get(name) != now[name] for name in SHOWN):
        return f"recorded {_shown(then)!r}, decided {_shown(now)!r}"
    for name in sorted(then.keys() | now.keys()):
        if then.get(name) != now.get(name):
            what = f"{then['event']}.{name}"
            return f"{what}: recorded {then.get(name)!r}, decided {now.get(name)!r}"
    return ""


def _shown(line: Line) -> str:
    return f"g{line['generation']} {line['event']}: {line.get('reason')}"


def account(url: str | Path, workers_per_node: int, max_workers: int) -> Totals:
    """The goodput of a run, from its inbox.jsonl, as of the last thing the core was told."""
    inbox = list(parse_inbox(RunReader(url).inbox()))
    started_s = next((item.at_s for item in inbox if not isinstance(item, Noted)), 0.0)
    accounts = Accounts(started_s, workers_per_node, max_workers)
    return accounts.totals(replay(inbox, accounts).until_s)
