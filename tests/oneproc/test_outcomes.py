"""What all make of a source that some can't use: who is at fault, and whether it is struck."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

from elastic_ft.core.assignment import Assignment, CheckpointRef, Source, Tier
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.core.manifest import Manifest
from elastic_ft.core.shares import shares
from elastic_ft.errors import StateDamaged, StateUnreadable, StoreFailed
from elastic_ft.groups.groups import Groups, Peer
from elastic_ft.state.outcomes import together
from elastic_ft.storage import checkpoints
from elastic_ft.storage.cancellable import find_object
from elastic_ft.storage.store import open_store
from tests.core.script import member

KEY = "manifests/0000000010-1.json"
Work = Callable[[], tuple[Any, tuple[str, ...]]]


def read_well(*holders: str) -> Work:
    return lambda: ("done", holders)


def raises(error: Exception) -> Work:
    def work() -> Any:
        raise error

    return work


def outcomes(*works: Work, looks: Any = None) -> list[Any]:
    """What each participant gets: a result, or an error."""
    members = tuple(member(f"w{rank}", f"n{rank}") for rank in range(len(works)))
    source, buddies = Source(0, Tier.INITIAL), ((),) * len(works)
    layout = Layout(dp_replicate=len(works))
    assignment = Assignment(1, members, (), layout, source, buddies, "a test")
    store = dist.HashStore()

    def one(rank: int) -> Any:
        share = dict(shares(assignment))[members[rank].worker]
        groups = Groups(share, members[rank], ("127.0.0.1", 1))
        groups.peers = tuple(Peer(m.worker, m.node) for m in members)
        groups.store = store
        more = {} if looks is None else {"look": looks[rank]}
        try:
            return together(groups, "tried", works[rank], **more)
        except (StateDamaged, StateUnreadable) as error:
            return error

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(one, range(len(works))))


# ------------------------------------------------------------------ a folder that is not mounted


class Mounts:
    """A checkpoint's folder as nodes see it: each under a path of its own, or nowhere."""

    def __init__(self, tmp_path: Path, *mounted: bool) -> None:
        self.paths = [
            tmp_path / ("there" if there else f"nowhere{n}") for n, there in enumerate(mounted)
        ]
        store = open_store(str(tmp_path / "there"))
        manifest = Manifest(
            job="j",
            run="r",
            step=10,
            generation=1,
            nonce="n",
            layout="fsdp1",
            created_at_s=1.0,
            tensors={},
            entries=(),
        )
        store.put(KEY, manifest.to_json())

    def works(self) -> list[Work]:
        return [self._open(path) for path in self.paths]

    def _open(self, path: Path) -> Work:
        def work() -> Any:
            checkpoints.open_checkpoint(CheckpointRef(10, f"{path}/{KEY}"))
            return "done", ("url",)

        return work

    def looks(self) -> list[Callable[[str, float], bool]]:
        """Of the same object under one's own path."""
        return [
            lambda url, deadline_s, path=path: find_object(f"{path}/{KEY}", deadline_s)
            for path in self.paths
        ]


def test_a_folder_that_one_node_does_not_have_mounted_is_that_nodes_trouble(
    tmp_path: Path,
) -> None:
    mounts = Mounts(tmp_path, True, False, True)
    for error in outcomes(*mounts.works(), looks=mounts.looks()):
        assert isinstance(error, StateUnreadable), error
        assert error.unread_by == ("w1",)
        assert "the manifest is missing, and others find it" in str(error)


def test_what_nobody_finds_is_gone(tmp_path: Path) -> None:
    mounts = Mounts(tmp_path, False, False)
    for error in outcomes(*mounts.works(), looks=mounts.looks()):
        assert isinstance(error, StateDamaged), error
        assert str(error).endswith("the manifest is missing")


def test_what_one_misses_and_others_can_not_look_for_is_not_struck(tmp_path: Path) -> None:
    def unreachable(url: str, deadline_s: float) -> bool:
        raise StoreFailed("busy")

    mounts = Mounts(tmp_path, False, True)
    looks = [mounts.looks()[0], unreachable]
    for error in outcomes(*mounts.works(), looks=looks):
        assert isinstance(error, StateUnreadable) and error.unread_by == (), error


def test_an_object_that_is_gone_is_gone_although_others_read_theirs(tmp_path: Path) -> None:
    """Else each that is to read it would be left out for it, one after another."""
    mounts = Mounts(tmp_path, True, True)
    url = str(tmp_path / "there/data/r0-0.bin")
    lost = raises(StateDamaged("r0-0.bin is missing", "url", missing=url))
    for error in outcomes(mounts.works()[0], lost):
        assert isinstance(error, StateDamaged) and error.holder == "url"


# ------------------------------------------------------------------------------- whose trouble


def test_each_tells_of_the_damage_that_it_found() -> None:
    one, other = StateDamaged("a", "keeper:n0/w8", "s0"), StateDamaged("b", "keeper:n1/w9", "s1")
    found = outcomes(raises(one), read_well(), raises(other))
    assert [error.holder for error in found] == ["keeper:n0/w8", "keeper:n0/w8", "keeper:n1/w9"]
    assert [error.shard for error in found] == ["s0", "s0", "s1"]


def test_damage_is_told_before_what_can_not_be_read() -> None:
    damage, unread = StateDamaged("a", "url"), StateUnreadable("busy", "url")
    assert all(isinstance(e, StateDamaged) for e in outcomes(raises(unread), raises(damage)))


def test_only_who_can_not_read_what_others_read_is_named() -> None:
    unread = StateUnreadable("busy", "url")
    for error in outcomes(raises(unread), read_well("url"), read_well()):
        assert error.unread_by == ("w0",)
    for error in outcomes(raises(unread), read_well("keeper:n0/w8"), raises(unread)):
        assert error.unread_by == ()


def test_two_sources_that_can_not_be_read_are_not_taken_for_one() -> None:
    unread, other = StateUnreadable("busy", "url"), StateUnreadable("gone", "keeper:n0/w8")
    for error in outcomes(raises(unread), raises(other), read_well("url", "keeper:n0/w8")):
        assert (error.holder, error.unread_by) == ("url", ("w0",))


def test_what_went_well_everywhere_is_returned() -> None:
    assert outcomes(read_well("url"), read_well()) == ["done", "done"]
