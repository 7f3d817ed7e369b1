"""The mean over samples that are held out, dealt to all members of a party."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from elastic_ft.core.batches import deal
from elastic_ft.engines.base import MicroBatch
from elastic_ft.models.named import NamedSums
from elastic_ft.worker.loop import Loop

Run = Callable[[Iterator[MicroBatch]], tuple[float, float, NamedSums]]


class Mean(float):
    """Of a loss over an evaluation.

    Attributes:
        metrics: other means, by name.
    """

    metrics: Mapping[str, float]

    def __new__(cls, value: float, metrics: Mapping[str, float]) -> Mean:
        made = super().__new__(cls, value)
        made.metrics = metrics
        return made


def evaluate(loop: Loop, run: Run, held_out: Any, count: int, name: str) -> Mean:
    """Over the first ``count`` samples.

    ``run``: returns (loss sum, terms, named sums) of the micro-batches that it is given.
    """
    total, terms, named = run(_micro_batches(loop, held_out, count))
    party = loop.party
    total, terms, *others = party.sum([float(total), float(terms), *named.sums()])
    mean = Mean(total / max(terms, 1.0), named.means(others))
    if party.rank == 0:
        fields: dict[str, Any] = {"step": loop.step, "loss": float(mean), "tokens": int(terms)}
        if mean.metrics:
            fields["metrics"] = dict(mean.metrics)
        loop.note("evaluated", f"{name} after step {loop.step}", fields)
    return mean


def _micro_batches(loop: Loop, held_out: Any, count: int) -> Iterator[MicroBatch]:
    """Each is loaded, and a mark of progress, when the engine comes to it."""
    size, party = loop.job.batch.micro_batch_size, loop.party
    starts = range(0, count, size)
    whole = party.is_whole
    dealt = deal(len(starts), len(loop.plan.dealt) if whole else party.world_size)
    mine = [starts[i] for i in dealt[loop.data_rank if whole else party.rank]]
    padding = max(len(d) for d in dealt) - len(mine)
    for weight, first in [*((1.0, s) for s in mine), *((0.0, 0) for _ in range(padding))]:
        loop.progress()  # and who computes alone hears of a loss
        samples = [held_out[i] for i in range(first, min(first + size, count))]
        yield MicroBatch(first, loop.tools.prefetcher.finished(held_out.collate(samples)), weight)
