"""Chaos as data: what a simulated job is, and which faults befall it when."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from elastic_ft.core.policy import Policy

POLICY = Policy(  # of all scenarios, where they don't say otherwise: time is dear here
    1,
    1,
    straggler_window_steps=2,
    regrow_delay_max_s=20.0,
    from_scratch=True,  # where nothing is left to go on from; else the job ends
    gather_s=2.0,
    suspend_timeout_s=10_000.0,
    publish_timeout_s=40.0,
    avoid_node_s=15.0,
    pause_timeout_s=4.0,
    form_timeout_s=8.0,
    boundary_timeout_s=9.0,
    max_generations_without_progress=200,
    max_user_failures=50,
)


def sim_policy(min_workers: int, max_workers: int, **more: Any) -> Policy:
    """``POLICY`` for so many workers, and with ``more`` of its fields changed."""
    return replace(POLICY, min_workers=min_workers, max_workers=max_workers, **more)


@dataclass(frozen=True, slots=True)
class SimFault:
    """Fires once ``at_step`` is committed and the core is in ``phase``, ``after_s`` later."""

    kind: str
    at_step: int
    phase: str
    after_s: float
    target: int  # which worker or node, modulo how many there are
    lasts_s: float  # until the node is back, the network heals, the drained node goes ...


@dataclass(frozen=True, slots=True)
class SimKill:
    """A controller's end that the next one adopts after; workers train on.

    Attributes:
        at_line: once it was told so much in all; what it then decides, it does up to ``share``.
        how: killed; stopped, it goes on ``wakes_s`` after another has the job; lost, with its node
            and the end of its inbox.
        after_s: until the next one is there.
    """

    at_line: int = 0
    how: str = "killed"
    after_s: float = 0.5
    share: float = 1.0
    wakes_s: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimScenario:
    seed: int
    policy: Policy  # its limits need not be multiples
    nodes: int
    workers_per_node: int
    steps: int
    keepers: bool = True
    snapshot_every: int = 1
    copy_s: float = 0.3  # that copying a snapshot takes at most
    restore_s: float = 0.0  # that getting the state takes at least; its bytes come all the while
    checkpoint_every: int = 5
    faults: tuple[SimFault, ...] = ()
    latency_s: float = 0.02
    duplicates: float = 0.0  # share of messages that arrive twice
    patience_s: float = 0.0  # that a step's word waits for what its worker says next, at most
    spread_s: float = 0.3  # members apply one step at times this far apart
    heal_at_s: float = 150.0  # from then on nothing fails any more, and all nodes are back
    finish_within_s: float = 500.0  # after that
    events_max: int = 20_000
    adopts: bool = False  # inbox lines are replayed, and workers number what they tell
    kills: tuple[SimKill, ...] = ()
