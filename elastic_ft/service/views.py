"""What the service tells of its jobs: plain values for JSON (docs/service.md)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from elastic_ft.config.section import COUNT_MAX
from elastic_ft.core.sharing import asks
from elastic_ft.core.sharing.ledger import SharedJob, slots_of, why_waits
from elastic_ft.service.cluster_watch import Sight
from elastic_ft.service.listing import state_of
from elastic_ft.service.office import entry_of
from elastic_ft.service.share_standing import ShareStanding
from elastic_ft.service.story import JobStory


def job_view(
    standing: ShareStanding, job: str, story: JobStory | None, trouble: str = ""
) -> dict[str, Any]:
    """``trouble``: why nothing can be done for it now. Raises NotKnown."""
    order, wish = entry_of(standing, job)
    live, ended = standing.job(job), standing.ended.get(job)
    now = int(story.formed.get("world_size", 0)) if story and live and live.has_room else 0
    step = story.committed if story else ended.step if ended else 0
    rate, tokens = story.rates() if story and live else (None, None)
    known = order.steps < COUNT_MAX
    return {
        "id": job,
        "name": order.name,
        "queue": wish.queue,
        "priority": wish.priority,
        "state": state_of(standing, job),
        "by": order.by,
        "submitted_at_s": order.at_s,
        "began_at_s": standing.began_s.get(job),
        "ended_at_s": ended.at_s if ended else None,
        "workers": {
            "now": now,
            "min": wish.least,
            "max": wish.most,
            "target": live.target if live else 0,
        },
        "step": step,
        "steps": order.steps if known else None,
        "rate": rate,
        "tokens_per_s": tokens,
        "loss": story.last.get("loss") if story else None,
        "eta_s": (order.steps - step) / rate if rate and known else None,
        "why": trouble or (why_waits(standing.sharing, live) if live else ""),
        "reason": ended.reason if ended else "",
    }


def whole_view(
    standing: ShareStanding, job: str, story: JobStory | None, trouble: str, run_url: str
) -> dict[str, Any]:
    """``story``: None: nothing of its run folder was read. Raises NotKnown."""
    formed, result = (story.formed, story.result) if story else ({}, {})
    keys = ("worker", "rank", "pid", "node", "host")
    live = standing.job(job)
    members = formed.get("members", ()) if live is not None and live.has_room else ()
    return job_view(standing, job, story, trouble) | {
        "run_folder": run_url,
        "generation": formed.get("generation", 0),
        "layout": formed.get("layout"),
        "goodput": result.get("goodput"),
        "members": [{key: member.get(key) for key in keys} for member in members],
        "checkpoint": story.checkpoint if story else None,
        "decisions": [asdict(decision) for decision in standing.decisions.get(job, ())],
        "world": story.world if story else [],
        "job": standing.orders[job].job,
    }


def service_view(
    standing: ShareStanding,
    terms: asks.SharingTerms,
    sight: Sight,
    about: dict[str, Any],
    may_read: Callable[[str], bool],
) -> dict[str, Any]:
    """``may_read``: of which queues it tells; the slots that are used are those of all."""
    jobs = list(standing.sharing.jobs.values())
    placed: dict[str, dict[str, int]] = {}  # by node: of thousands, each job is looked at once
    for job in jobs:
        if may_read(job.wish.queue):
            for node, workers in job.held:
                placed.setdefault(node, {})[job.job] = workers * job.slots
    nodes = [
        {
            "node": node,
            "host": sight.hosts.get(node, ""),
            "slots": slots,
            "jobs": placed.get(node, {}),
        }
        for node, slots in standing.sharing.nodes.items()
    ]
    return about | {
        "slots": {
            "all": sum(standing.sharing.nodes.values()),
            "used": sum(slots_of(job) for job in jobs),
        },
        "nodes": nodes,
        "queues": [
            _queue(name, terms.queues[name], jobs)
            for name in sorted(terms.queues)
            if may_read(name)
        ],
        "asked_of_autoscaler": [
            {"slots": slots, "workers": workers} for slots, workers in standing.sharing.asked
        ],
        "cluster_seen_s_ago": round(time.monotonic() - sight.asked_s, 3) if sight.asked_s else None,
    }


def _queue(name: str, queue: asks.QueueTerms, jobs: list[SharedJob]) -> dict[str, Any]:
    mine = [job for job in jobs if job.wish.queue == name]
    return {
        "queue": name,
        "weight": queue.weight,
        "quota": queue.quota,
        "ceiling": queue.ceiling,
        "used": sum(slots_of(job) for job in mine),
        "running": sum(job.has_room for job in mine),
        "waiting": sum(job.phase in ("queued", "suspended") for job in mine),
    }
