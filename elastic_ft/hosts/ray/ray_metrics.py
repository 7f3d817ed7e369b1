"""A job's metrics in Ray's own, as ``ray_elastic_ft_*``: whatever scrapes the cluster has them.

Each sample goes over as a gauge of its very name (a counter's is its total, a histogram's are its
buckets, sum and count), so that a Prometheus that takes the ``ray_`` off sees what the controller
itself serves. A series that is gone becomes NaN: Ray forgets none while the process lives.
"""

from __future__ import annotations

import math
import threading

from prometheus_client import CollectorRegistry
from ray.util.metrics import Gauge

EVERY_S = 2.0
Labels = tuple[tuple[str, str], ...]


class RayMetrics(threading.Thread):
    """Mirrors ``registry`` while the block goes on."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(name="ray-metrics", daemon=True)
        self._registry = registry
        self._gauges: dict[str, Gauge] = {}
        self._shown: set[tuple[str, Labels]] = set()
        self._closed = threading.Event()

    def run(self) -> None:
        while not self._closed.wait(EVERY_S):
            self.mirror()

    def __enter__(self) -> RayMetrics:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self.join()
        self.mirror()  # the last values

    def mirror(self) -> None:
        shown: set[tuple[str, Labels]] = set()
        for family in self._registry.collect():
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                labels: Labels = tuple(sorted(sample.labels.items()))
                self._set(sample.name, family.documentation, labels, sample.value)
                shown.add((sample.name, labels))
        for name, labels in self._shown - shown:
            self._gauges[name].set(math.nan, dict(labels))
        self._shown = shown

    def _set(self, name: str, meaning: str, labels: Labels, value: float) -> None:
        gauge = self._gauges.get(name)
        if gauge is None:
            keys = tuple(key for key, _ in labels)
            gauge = self._gauges[name] = Gauge(name, meaning, tag_keys=keys)
        gauge.set(value, dict(labels))
