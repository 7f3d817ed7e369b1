"""What Prometheus is told of the service: queues, shares, waits, what was decided."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from elastic_ft.core.sharing import asks
from elastic_ft.core.sharing.ledger import slots_of
from elastic_ft.service.share_standing import ShareStanding

PREFIX = "elastic_ft_service_"
STATES = (*asks.LIVE, *asks.ENDED)


def exposition(
    standing: ShareStanding, terms: asks.SharingTerms, may_read: Callable[[str], bool]
) -> bytes:
    """Made anew at each scrape from how things stand: all of it is in the journal. ``may_read``: of
    which queues it tells; slots and counts without a queue's name are those of all."""
    registry = CollectorRegistry()
    jobs = Gauge(f"{PREFIX}jobs", "Jobs.", ["queue", "state"], registry=registry)
    used = Gauge(f"{PREFIX}slots_used", "Slots that jobs hold.", ["queue"], registry=registry)
    share = Gauge(f"{PREFIX}queue_weight", "Of what is left over.", ["queue"], registry=registry)
    quota = Gauge(f"{PREFIX}queue_quota_slots", "Slots of its own.", ["queue"], registry=registry)
    slots = Gauge(f"{PREFIX}slots", "Slots of all nodes.", registry=registry)
    longest = Gauge(
        f"{PREFIX}longest_wait_seconds", "Of those that wait now.", ["queue"], registry=registry
    )
    slots.set(sum(standing.sharing.nodes.values()))
    for queue, said in filter(lambda item: may_read(item[0]), terms.queues.items()):
        mine = [job for job in standing.sharing.jobs.values() if job.wish.queue == queue]
        found = Counter(job.phase for job in mine)
        ended = (job for job in standing.ended if standing.wishes[job].queue == queue)
        found += Counter(standing.ended[job].status for job in ended)
        for state in STATES:
            jobs.labels(queue, state).set(found[state])
        used.labels(queue).set(sum(slots_of(job) for job in mine))
        share.labels(queue).set(said.weight)
        quota.labels(queue).set(said.quota or 0)
        waits = [job for job in mine if job.phase in ("queued", "suspended")]
        now_s = time.time()
        since_s = min((job.waits_since_s for job in waits), default=now_s)
        longest.labels(queue).set(max(0.0, now_s - since_s))
    registry.register(_Counts(standing))
    return generate_latest(registry)


class _Counts(Collector):
    def __init__(self, standing: ShareStanding) -> None:
        self._standing = standing

    def collect(self) -> list[CounterMetricFamily]:
        name = f"{PREFIX}decisions"
        meaning = "What was decided; a shrink for another is a preemption avoided."
        counted = CounterMetricFamily(name, meaning, labels=["kind"])
        for kind in ("start", "shrink", "grow", "suspend", "stop", "requeue", "give_up"):
            counted.add_metric([kind], self._standing.counts.get(kind, 0))
        begun = CounterMetricFamily(f"{PREFIX}begun", "Jobs that have begun to train.")
        begun.add_metric([], len(self._standing.began_s))
        waited = CounterMetricFamily(f"{PREFIX}wait_seconds", "From submission until they did.")
        orders = self._standing.orders
        spent_s = (at_s - orders[job].at_s for job, at_s in self._standing.began_s.items())
        waited.add_metric([], sum(spent_s))
        return [counted, begun, waited]
