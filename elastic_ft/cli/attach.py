"""``elastic-ft attach`` and ``elastic-ft stop``: a running job, known by its run folder alone.

Exit codes: as ``elastic-ft run``; 0 too for who leaves the job running.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer

from elastic_ft.cli.options import RunOrJob
from elastic_ft.cli.progress import ProgressDisplay, say
from elastic_ft.cli.run import EndOfRun, conclude
from elastic_ft.cli.service_commands import ServiceUrl, is_job, stop_job
from elastic_ft.cli.terminal import Ending, interrupts, result_of, stay
from elastic_ft.errors import ConfigError
from elastic_ft.observe import stop_request
from elastic_ft.observe.alive import Vigil
from elastic_ft.observe.journal_text import brief
from elastic_ft.observe.run_reader import RunReader, Watch
from elastic_ft.storage import owners
from elastic_ft.storage.store import open_store

TOLD_MAX = 20  # lines of what has happened before
LOOK_S = 0.5  # at a run folder, whether its job has ended

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The folder of a running job.")]


def attach(run_folder: RunArgument) -> int:
    """Show a running job again, to its end."""
    reader = RunReader(run_folder)
    job = reader.job()
    watch = reader.join()
    followed = Followed(run_folder)
    if (ended := followed.poll(0.0)) is None:
        _tell_so_far(watch)
        with interrupts() as came, ProgressDisplay(job, run_folder, watch):
            ended = stay(followed, run_folder, came, stops=False)
        if ended is None:
            return 0
    return conclude(EndOfRun(result_of(ended, run_folder)), run_folder)


def stop(
    run_folder: RunOrJob,
    now: Annotated[bool, typer.Option("--now", help="At once, without a last checkpoint.")] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="S", min=0, help="Wait so long for its end.")
    ] = 150.0,
    service: ServiceUrl = None,
) -> int:
    """End a running job at its next step, with a checkpoint."""
    if is_job(run_folder, service):
        return stop_job(run_folder, service, now, timeout_s)
    say(stop_request.stop(run_folder, now, say, timeout_s))
    return 0


class Followed:
    """A job of which there is the run folder alone."""

    def __init__(self, url: str) -> None:
        self._url, self._store = url, open_store(url)
        self._vigil, self._asked = Vigil(url), 0

    def poll(self, timeout_s: float) -> Ending | None:
        time.sleep(max(timeout_s, LOOK_S))
        owner, ended = owners.newest(self._store)
        if owner is None:
            raise ConfigError(f"{self._url}: not a run folder: no controller was ever here")
        if ended:
            return Ending(0)
        dead = self._vigil.look()
        if not dead:
            return None
        last = next(reversed(RunReader(self._url).events()), {})
        failed = last.get("event") == "controller_failed"
        return Ending(1, f"{self._url}: {last['reason'] if failed else dead}")

    def stop(self) -> None:
        self._asked += 1
        stop_request.ask_to_stop(self._url, now=self._asked > 1)


def _tell_so_far(watch: Watch) -> None:
    told = [text for line in watch.earlier if (text := brief(line))]
    if len(told) > TOLD_MAX:
        say(f"... {len(told) - TOLD_MAX} earlier")
    for text in told[-TOLD_MAX:]:
        say(f"{'before':>9}  {text}")
