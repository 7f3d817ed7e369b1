"""Who is told to be at fault when the workers of a generation read different data."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from elastic_ft.core.assignment import Assignment, Source, Tier
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.core.shares import shares
from elastic_ft.errors import DataDiffers, DataError, GroupBroken
from elastic_ft.groups.groups import Groups, Peer
from elastic_ft.worker.same_data import check_same_data
from tests.core.script import member


def judged(*workers: tuple[str, bool]) -> list[Any]:
    """What each gets, that reads so and has trained or not: an exception's class, or None."""
    members = tuple(member(f"w{rank}", f"n{rank}") for rank in range(len(workers)))
    layout = Layout(dp_replicate=len(workers))
    source, buddies = Source(0, Tier.INITIAL), ((),) * len(workers)
    assignment = Assignment(1, members, (), layout, source, buddies, "a test")
    store = dist.HashStore()

    def check(rank: int) -> Any:
        share = dict(shares(assignment))[members[rank].worker]
        groups = Groups(share, members[rank], ("127.0.0.1", 1))
        groups.peers = tuple(Peer(m.worker, m.node) for m in members)
        groups.store = store
        try:
            check_same_data(groups, *workers[rank])
        except (DataError, GroupBroken) as error:
            return type(error)
        return None

    with ThreadPoolExecutor(len(workers)) as pool:
        return list(pool.map(check, range(len(workers))))


@pytest.mark.parametrize(
    ("workers", "found"),
    [
        ([("a", False), ("a", True)], [None, None]),
        ([("a", True), ("b", False)], [GroupBroken, DataDiffers]),  # a joiner's stale copy
        ([("b", False), ("b", False), ("a", True)], [DataDiffers, DataDiffers, GroupBroken]),
        ([("a", False), ("b", False), ("a", False)], [GroupBroken, DataDiffers, GroupBroken]),
        ([("a", False), ("b", False)], [DataError, DataError]),  # nobody can say
    ],
)
def test_whose_data_is_wrong(workers: list[tuple[str, bool]], found: list[Any]) -> None:
    assert judged(*workers) == found
