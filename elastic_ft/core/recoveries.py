"""A change of membership, from its first cause until every member trains on. Pure."""

from __future__ import annotations

from dataclasses import asdict, replace

from elastic_ft.core.assignment import Assignment, WorkerId
from elastic_ft.core.commits import PLANNED
from elastic_ft.core.events import NodeLost
from elastic_ft.core.records import Recovery
from elastic_ft.core.state import RECOVERIES_KEPT, Turn

NODE_LOSS_LAG_S = 90.0  # Ray's health checks need up to 63 s by default


def note_lost(turn: Turn, workers: list[WorkerId], cause: str, noticed_s: float) -> None:
    episode = turn.state.episode
    assert episode is not None
    if workers and episode.cause in ("collective_failed", *PLANNED):
        episode = replace(episode, cause=cause, noticed_s=noticed_s)
    turn.set(episode=replace(episode, lost=(*episode.lost, *workers)))


def blame_node(recovery: Recovery, lost: NodeLost) -> Recovery:
    """A node's loss is noticed after that of its workers, whose connections end at once."""
    if (
        recovery.cause == "worker_lost"
        and lost.node in recovery.lost_nodes
        and lost.at_s - recovery.noticed_at_s < NODE_LOSS_LAG_S
    ):
        return replace(recovery, cause="node_lost")
    return recovery


def close_episode(turn: Turn, after: Assignment) -> None:
    episode = turn.state.episode
    if episode is None:
        return
    before, source = episode.before, after.source
    old = {member.worker: member for member in before.members}
    for rank, member in enumerate(after.members):
        if member.worker not in old:
            turn.journal(
                "worker_joined",
                "a new worker is part of the world",
                worker=member.worker,
                rank=rank,
                pid=member.pid,
                node=member.node,
            )
    _journal_spares(turn, after)
    survivors = [m for m in after.members if m.worker in old]
    lost = [m for m in before.members if m.worker in episode.lost]
    recovery = Recovery(
        cause=episode.cause,
        noticed_at_s=episode.at_s,
        at_step=source.step,
        noticed_s=round(episode.noticed_s, 4),
        paused_s=round(turn.at_s - episode.at_s, 4),
        steps_lost=episode.steps_lost,
        steps_redone=episode.steps_redone,
        source=str(source.tier),
        bytes_moved=turn.state.bytes_moved,
        world_before=len(before.members),
        world_after=len(after.members),
        layout_before=str(before.layout),
        layout_after=str(after.layout),
        survivors_kept_pid=bool(survivors) and all(m == old[m.worker] for m in survivors),
        generation=after.generation,
        lost_nodes=tuple(sorted({m.node for m in lost})),
    )
    known = (*turn.state.recoveries, recovery)[-RECOVERIES_KEPT:]
    failures = turn.state.failures + (recovery.cause not in PLANNED)
    turn.set(episode=None, recoveries=known, failures=failures)
    turn.journal("recovered", f"{recovery.cause}: {after.reason}", **asdict(recovery))


def _journal_spares(turn: Turn, after: Assignment) -> None:
    """Who was warm when a member went takes its place: the world is not smaller for it."""
    episode = turn.state.episode
    assert episode is not None
    old, new = ({m.worker for m in some.members} for some in (episode.before, after))
    left = [m.worker for m in episode.before.members if m.worker not in new]
    came = [m for m in after.members if m.worker not in old]
    for member, gone in zip(came, left, strict=False):
        turn.journal(
            "spare_used",
            f"{member.worker} was warm and takes the place of {gone}",
            worker=member.worker,
            node=member.node,
            replaces=gone,
        )
