"""``elastic-ft attach`` and ``elastic-ft stop``: a running job, known by its run folder alone.

Exit codes: as ``elastic-ft run``; 0 too for who leaves the job running.
"""

from __future__ import annotations

from typing import Annotated

import typer

from elastic_ft.cli.options import RunFolderOf, RunOrJob
from elastic_ft.cli.progress import ProgressDisplay, say
from elastic_ft.cli.run import EndOfRun, conclude
from elastic_ft.cli.service_commands import ServiceUrl, is_job, stop_job
from elastic_ft.cli.terminal import interrupts, result_of, stay
from elastic_ft.observe.journal_text import brief
from elastic_ft.observe.run_reader import RunReader, Watch

TOLD_MAX = 20  # lines of what has happened before


def attach(run_folder: RunFolderOf) -> int:
    """Show a running job again, to its end."""
    from elastic_ft.cli.followed import Followed

    reader = RunReader(run_folder)
    job = reader.job()
    watch = reader.join()
    followed = Followed(run_folder)
    if (ended := followed.look()) is None:
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
    from elastic_ft.observe import stop_request

    say(stop_request.stop(run_folder, now, say, timeout_s))
    return 0


def _tell_so_far(watch: Watch) -> None:
    told = [text for line in watch.earlier if (text := brief(line))]
    if len(told) > TOLD_MAX:
        say(f"... {len(told) - TOLD_MAX} earlier")
    for text in told[-TOLD_MAX:]:
        say(f"{'before':>9}  {text}")
