"""``elastic-ft events``: the story of a run. ``elastic-ft replay``: its decisions, made again."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from elastic_ft.cli.options import RunOrJob, given
from elastic_ft.cli.service_commands import ServiceUrl, client, is_job
from elastic_ft.errors import ConfigError, UsageError
from elastic_ft.observe.alive import Vigil, seems_dead
from elastic_ft.observe.run_reader import NewEvents, RunReader

FOLLOW_EVERY_S = 0.2


def events(
    run_folder: RunOrJob,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the run ends.")
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Every line of the journal.")] = False,
    goodput: Annotated[
        bool, typer.Option("--goodput", help="Where every second of every worker went.")
    ] = False,
    clock: Annotated[
        bool, typer.Option("--clock", help="Dates and times of day (UTC), not seconds.")
    ] = False,
    service: ServiceUrl = None,
) -> int:
    """Tell what happened in a run, and what it cost."""
    if is_job(run_folder, service):
        if goodput:
            raise UsageError("--goodput: is of a run folder, which `elastic-ft status` names")
        return _events_of(run_folder, service, follow, raw, clock)
    from elastic_ft.observe import journal_text

    run = RunReader(run_folder)
    run.content("events.jsonl")
    tail, first_s, starts, ended, dead = NewEvents(run.url), 0.0, 0, False, ""
    vigil = Vigil(run_folder)
    while True:
        for line in tail.read(whole=not follow):
            first_s, told = _told(line, first_s, raw, clock, run_folder)
            for text in told:
                print(text, flush=True)
            ended, dead = line["event"] == "finished", ""
            starts += line["event"] == "job_started"
        if not follow or ended:
            break
        if not dead and (dead := vigil.look()):  # another may come: it is followed, too
            print(dead, flush=True)
        time.sleep(FOLLOW_EVERY_S)
    if not ended and not dead and (dead := seems_dead(run_folder)):
        print(dead)
    result = run.result()
    if result and not raw:
        print()
        print("\n".join(journal_text.summary(result, starts)))
    if goodput:
        print()
        print("\n".join(journal_text.goodput(_worker_seconds(run, result))))
    return 0


def _events_of(job: str, service: str | None, follow: bool, raw: bool, clock: bool) -> int:
    first_s = 0.0
    for line in client(service).events(job, follow):
        try:
            first_s, told = _told(line, first_s, raw, clock, job)
        except ConfigError:  # of a service of another version, which can tell it
            told = [line["text"]]
        for text in told:
            print(text, flush=True)
    return 0


def _told(
    line: dict[str, Any], first_s: float, raw: bool, clock: bool, run_folder: str
) -> tuple[float, list[str]]:
    """When the first line was written, 0 before it; and this one in words. Raises ConfigError."""
    from elastic_ft.observe import journal_text
    from elastic_ft.observe.wording import utc

    try:
        told = [] if first_s or clock else [f"seconds since {utc(line['at_s'])}:"]
        first_s = first_s or line["at_s"]
        elapsed_s = None if clock else line["at_s"] - first_s
        if raw:
            return first_s, [*told, journal_text.raw(line, elapsed_s)]
        return first_s, [*told, *journal_text.story(line, elapsed_s)]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, OSError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{run_folder}: events.jsonl has a line that can't be told: {why}"
        ) from None


def replay(
    journal: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="The folder of a run, or its events.jsonl.", callback=given
        ),
    ],
) -> int:
    """Decide a run's events again: each decision must be the same."""
    from elastic_ft.observe.replay import check_replay
    from elastic_ft.observe.wording import counted

    run = RunReader(journal.removesuffix("events.jsonl") or ".")
    for name in ("events.jsonl", "inbox.jsonl"):
        run.content(name)
    verdict = check_replay(run.url)
    if verdict.difference:
        print(
            f"elastic-ft: after {verdict.decisions} equal decisions: {verdict.difference}",
            file=sys.stderr,
        )
        return 1
    print(f"{verdict.told} events, {verdict.decisions} decisions: each as recorded")
    if verdict.torn:
        lines = counted(verdict.torn, "line")
        print(f"but for {lines} at the end of a start that was killed, in one of both files alone")
    return 0


def _worker_seconds(run: RunReader, result: dict[str, Any]) -> dict[str, Any]:
    """As the run itself has found; of one that goes on, or broke off, from its inbox.jsonl."""
    if "worker_seconds" in result:
        found: dict[str, Any] = result["worker_seconds"]
        return found
    from elastic_ft.observe.replay import account

    elastic = run.job().elastic
    return account(run.url, elastic.workers_per_node, elastic.max_workers).as_dict()
