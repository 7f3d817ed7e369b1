"""All workers of a run read the same data and weights: no ledger would show it otherwise (I2)."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from elastic_ft.core.batches import samples_in_words
from elastic_ft.core.terms import PRETRAINED, changes, data_terms
from elastic_ft.data.dataset import DataBundle
from elastic_ft.errors import DataDiffers, DataError, GroupBroken
from elastic_ft.groups.groups import Groups


def check_data_of_run(run: dict[str, Any], data: DataBundle, pretrained: str | None = None) -> None:
    """Raises DataError if this worker reads other data than the run has so far (I2), or other
    weights at model.pretrained, whose digest is ``pretrained``."""
    if other := changes(run, data_terms(len(data.train), data.fingerprint, pretrained)):
        found = "; ".join(map(str, other))
        what = "train other weights"
        if any(change.key != PRETRAINED for change in other):
            what = "repeat samples and skip others"
        raise DataError(f"{found}: going on would {what}")


def data_in_words(data: DataBundle, pretrained: str | None = None) -> str:
    """What tells it from other data. A user's own dataset has no fingerprint: then its size does,
    on which the whole order depends."""
    fingerprint = f", fingerprint {data.fingerprint}" if data.fingerprint else ""
    weights = f", pretrained weights {pretrained}" if pretrained else ""
    return f"{samples_in_words(len(data.train))}{fingerprint}{weights}"


def check_same_data(groups: Groups, read: str, has_trained: bool) -> None:
    """Raises where workers read different data, which no ledger would show (I2).

    What those read who have trained counts, else what most do: DataDiffers where this worker is
    at fault, GroupBroken where others are; DataError where nobody can say who is.
    """
    own = {"read": read, "has_trained": has_trained}
    told = [json.loads(raw) for raw in groups.exchange("data", json.dumps(own).encode())]
    prints = [one["read"] for one in told]
    if len(set(prints)) == 1:
        return
    votes = [one["read"] for one in told if one["has_trained"]] or prints
    ((usual, count),) = Counter(votes).most_common(1)
    if 2 * count <= len(votes):
        raise DataError(f"workers read different data: {'; '.join(sorted(set(prints)))}")
    if own["read"] != usual:
        raise DataDiffers(f"this worker reads other data than the others: {read}; theirs: {usual}")
    odd = [p.worker for p, other in zip(groups.peers, prints, strict=True) if other != usual]
    raise GroupBroken(f"{', '.join(odd)} read other data than the others")
