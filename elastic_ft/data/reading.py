"""How the samples of a micro-batch are read, in whatever thread or process does it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elastic_ft.core.batches import SampleIds
from elastic_ft.data.draws import Draws


@dataclass(frozen=True, slots=True)
class Loaded:
    """A micro-batch, and the ids of the samples that were read for it."""

    ids: SampleIds
    data: Any


def read_micro_batch(
    dataset: Any,
    collate: Callable[[list[Any]], Any],
    draws: Draws | None,
    wanted: SampleIds,
) -> Loaded:
    """A sample's id tells its index: the rest of its division by ``len(dataset)``."""
    ids, samples, count = [], [], len(dataset)
    together = getattr(dataset, "__getitems__", None)
    if together is not None and (draws is None or draws.known is False):
        return Loaded(wanted, collate(together([i % count for i in wanted])))
    with draws.apart() if draws is not None else contextlib.nullcontext():
        for sample_id in wanted:
            if draws is not None:
                draws.begin(sample_id)
            samples.append(dataset[sample_id % count])
            ids.append(sample_id)
        if draws is not None:
            draws.begin(wanted[0], collating=True)
        return Loaded(tuple(ids), collate(samples))
