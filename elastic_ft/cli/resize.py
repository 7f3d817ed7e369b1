"""``elastic-ft resize``: another number of workers for a running job.

Exit codes: 0 the world is formed; 1 it is not, in time; 2 bad usage, one line.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from elastic_ft.cli.options import RunOrJob
from elastic_ft.cli.service_commands import ServiceUrl, is_job, resize_job
from elastic_ft.config import Job
from elastic_ft.core.layouts.layout import MODEL_DIMENSIONS
from elastic_ft.errors import ConfigError, JobFailed
from elastic_ft.observe.alive import Vigil
from elastic_ft.observe.resize_request import Resize, ask_to_resize
from elastic_ft.observe.run_reader import RunReader

POLL_S = 0.2


def resize(
    run_folder: RunOrJob,
    workers: Annotated[
        int, typer.Option(metavar="N", help="So many, from min_workers to max_workers.")
    ],
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout", metavar="S", min=0, help="Wait so long until it trains with them."
        ),
    ] = 300.0,
    service: ServiceUrl = None,
) -> int:
    """Ask a running job for another number of workers.

    Returns once it trains with them. The service is asked for that many at most, as its other jobs
    let it have them.
    """
    if is_job(run_folder, service):
        return resize_job(run_folder, service, workers)
    _check(RunReader(run_folder).job(), workers)
    journal = ResizeJournal(run_folder)
    journal.look()
    if journal.ended:
        raise ConfigError(f"{run_folder}: the job has ended: {journal.ended}")
    asked, vigil = ask_to_resize(run_folder, workers), Vigil(run_folder)
    deadline_s = time.monotonic() + timeout_s
    while not journal.is_done(asked):
        if journal.ended:
            raise JobFailed(f"{run_folder}: the job has ended: {journal.ended}")
        if dead := vigil.look():
            raise JobFailed(f"{run_folder}: {dead}, and obeys the request")
        if time.monotonic() > deadline_s:
            raise JobFailed(
                f"{run_folder}: {journal.world} workers after {timeout_s:g} s, not {workers}; "
                "the request stands"
            )
        time.sleep(POLL_S)
        journal.look()
    print(f"{workers} workers, generation {journal.generation}")
    return 0


def _check(job: Job, workers: int) -> None:
    elastic = job.elastic
    if not elastic.min_workers <= workers <= elastic.max_workers:
        raise ConfigError(
            f"--workers: expected min_workers {elastic.min_workers} to max_workers "
            f"{elastic.max_workers}, found {workers}"
        )
    if workers % job.multiple_of:
        key = "elastic.multiple_of"
        if elastic.multiple_of is None:
            key = f"parallel.{' x '.join(MODEL_DIMENSIONS)}"
        raise ConfigError(
            f"--workers: expected a multiple of {job.multiple_of} ({key}), found {workers}"
        )


class ResizeJournal:
    """What a run's journal says of its world.

    Attributes:
        ended: how, in words; empty while the job runs.
    """

    def __init__(self, run_folder: str) -> None:
        self._tail = RunReader(run_folder).tail("events.jsonl")
        self.ended = ""
        self.world = self.generation = 0
        self._formed: dict[str, Any] = {}
        self._heard: dict[str, str] = {}  # request -> why it was refused, or nothing

    def look(self) -> None:
        for line in self._tail.read():
            event = line["event"]
            if event == "job_started":
                self.ended, self._formed = "", {}
            elif event == "finished":
                self.ended = line["reason"]
            elif event == "generation_formed":
                self._formed = line
                self.world, self.generation = line["world_size"], line["generation"]
            elif event in ("resize_requested", "resize_refused"):
                self._heard[line["request"]] = line["reason"] * (event == "resize_refused")

    def is_done(self, asked: Resize) -> bool:
        """Whether that many train, or idle since the layout has no rank for them. Raises
        ConfigError if the job refuses."""
        refused = self._heard.get(asked.request)
        if refused:
            raise ConfigError(f"--workers: refused: {refused}")
        if refused is None or not self._formed:
            return False
        unfit = [idle for idle in self._formed["idle"] if idle["reason"] != "a spare"]
        fits = self.world + len(unfit) * (self._formed["wanted"] == asked.workers)
        return fits == asked.workers
