"""``elastic-ft demo``: a scenario on a cluster of its own, judged beside an undisturbed run."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

from elastic_ft.cli import extensions
from elastic_ft.cli.progress import say
from elastic_ft.cli.run import COMPLETED, FAILED, How, check_start, conclude, run
from elastic_ft.cli.where import where_to_run
from elastic_ft.config import Job, parse_job

JOB_FILE = Path(__file__).with_name("demo.yaml")


def run_demo(job: Job, out: str) -> int:
    """The job with its scenario on a Ray cluster, then undisturbed, then the comparison."""
    began_s = time.monotonic()
    for folder in (out, f"{out}-undisturbed"):
        _start_afresh(folder)
    where = where_to_run(job, None, job.elastic.max_workers, False)
    unless_run = contextlib.ExitStack()  # nothing is started early for Ray
    checked = check_start(job, out, where, How(), unless_run)
    scenario = checked.faults.scenario
    say(f"the scenario: {'; '.join(map(str, scenario.faults))}")
    code = conclude(run(job, out, where, checked, How(), unless_run), out)
    if code != COMPLETED:
        return code
    say("")
    say("the same job undisturbed, on two plain processes")
    calm = _undisturbed(job)
    beside = f"{out}-undisturbed"
    where = where_to_run(calm, None, None, True)
    with contextlib.ExitStack() as unless_run:
        how = How(foreground=True)  # nobody is to leave it running
        checked = check_start(calm, beside, where, how, unless_run)
        code = conclude(run(calm, beside, where, checked, how, unless_run), beside)
    if code != COMPLETED:
        return code
    say("")
    verdicts = extensions.faults().judge_demo(scenario, out, beside, job, checked.samples)
    for verdict in verdicts:
        say(f"{'PASS' if verdict.passed else 'FAIL'}  {verdict.claim}: {verdict.found}")
    failures = sum(not verdict.passed for verdict in verdicts)
    say(f"{'FAIL' if failures else 'PASS'}  demo in {time.monotonic() - began_s:.0f} s")
    return FAILED if failures else COMPLETED


def _undisturbed(job: Job) -> Job:
    """The same training, without faults and checkpoints, at another number of workers."""
    values = job.model_dump()
    values["elastic"] |= {"min_workers": 2, "max_workers": 2}
    values["checkpoint"] |= {"every_steps": 0, "final": False}
    values["faults"] = {}
    return parse_job(values)


def _start_afresh(folder: str) -> None:
    """Removes an earlier demo's run folder, and nothing that is not one."""
    path = Path(folder)
    if (path / "job.yaml").is_file() and (path / "events.jsonl").is_file():
        shutil.rmtree(path)
