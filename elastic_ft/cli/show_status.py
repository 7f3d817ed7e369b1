"""``elastic-ft status``: how a run stands, by its folder; or a job of the service, by its id."""

from __future__ import annotations

import json
from typing import Any

from elastic_ft.cli import status_words
from elastic_ft.cli.options import Json, RunOrJob
from elastic_ft.cli.run import COMPLETED
from elastic_ft.cli.service_commands import ServiceUrl, is_job, status_of_job

SHOWN = ("name", "state", "reason", "step", "steps", "loss", "rate", "unit", "eta_s", "goodput")


def status(run_folder: RunOrJob, service: ServiceUrl = None, as_json: Json = False) -> int:
    """Tell how a run or a job stands. Of a job of the service: and what was decided about it."""
    if is_job(run_folder, service):
        return status_of_job(run_folder, service, as_json)
    found = _standing(run_folder)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(_in_words(found)))
    return COMPLETED


def _standing(run_folder: str) -> dict[str, Any]:
    """Of what a page shows, what fits a terminal. Raises ConfigError."""
    from elastic_ft.observe.run_reader import RunReader
    from elastic_ft.observe.run_watch import RunWatch

    RunReader(run_folder).content("events.jsonl")  # one that is no run's is refused by name
    seen = RunWatch(run_folder).look()
    keys = ("rank", "worker", "host", "pid", "node", "state")
    members = [{key: one[key] for key in keys} for one in seen["workers"]]
    workers = {"now": seen["world"], "min": seen["min_workers"], "max": seen["max_workers"]}
    newest = seen["checkpoints"]["list"][-1:]
    return {key: seen[key] for key in SHOWN} | {
        "workers": workers,
        "layout": seen["layout"],
        "members": [] if seen["ended_at_s"] is not None else members,
        "checkpoint": {"step": newest[0][2], "url": newest[0][3]} if newest else None,
        "run_folder": run_folder,
    }


def _in_words(found: dict[str, Any]) -> list[str]:
    rate = f"{found['rate']:,.0f} {found['unit']}/s" if found["rate"] else ""
    lines = [f"{found['name']}: {found['state']}"]
    lines += [found["reason"]] if found["reason"] and found["state"] != "running" else []
    lines.append(f"{status_words.progress(found, rate)}; goodput {found['goodput']:.0%}")
    lines += status_words.world(found) if found["members"] else []
    if newest := found["checkpoint"]:
        lines.append(f"newest checkpoint: step {newest['step']}, {newest['url']}")
    return [*lines, f"run folder: {found['run_folder']}"]
