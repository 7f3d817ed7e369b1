"""All workers of a run read the same data: no ledger would show if they did not (I2)."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from elastic_ft.core.batches import samples_in_words
from elastic_ft.core.terms import changes, data_terms
from elastic_ft.data.dataset import DataBundle
from elastic_ft.errors import DataDiffers, DataError, GroupBroken
from elastic_ft.groups.groups import Groups


def check_data_of_run(run: dict[str, Any], data: DataBundle) -> None:
    """Raises DataError if this worker reads other data than the run has so far (I2)."""
    if other := changes(run, data_terms(len(data.train), data.fingerprint)):
        found = "; ".join(map(str, other))
        raise DataError(f"{found}: going on would repeat samples and skip others")


def data_in_words(data: DataBundle) -> str:
    """What tells it from other data. A user's own dataset has no fingerprint: then its size does,
    on which the whole order depends."""
    fingerprint = f", fingerprint {data.fingerprint}" if data.fingerprint else ""
    return f"{samples_in_words(len(data.train))}{fingerprint}"


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
