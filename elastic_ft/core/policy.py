"""What the user decided, as the core needs it."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_ft.core.layouts.layout import Strategy
from elastic_ft.core.layouts.planner import Planning


@dataclass(frozen=True, slots=True)
class Policy:
    """What the user decided; see ``config.ElasticConfig`` for the meaning of each."""

    min_workers: int
    max_workers: int
    strategy: Strategy = "ddp"
    shard_size: int | None = None
    tp: int = 1
    pp: int = 1
    planning: Planning | None = None  # the planner lays out, not the four above
    multiple_of: int = 1  # worlds are multiples of this
    spares: int = 0  # warm workers beside the world's
    regrow_repaid_s: float = 300  # within which a joiner's gain must be worth its pause
    regrow_delay_max_s: float = 120
    evict_stragglers: bool = False
    straggler_factor: float = 1.5
    straggler_window_steps: int = 20
    copies: int = 2
    start_timeout_s: float = 300
    gather_s: float = 10
    join_batch_s: float = 0.5
    suspend_timeout_s: float = 1800
    pause_timeout_s: float = 10
    release_timeout_s: float = 30
    form_timeout_s: float = 60
    boundary_timeout_s: float = 70  # a running step to end: hangs are noticed sooner
    stop_timeout_s: float = 120
    publish_timeout_s: float = 1800  # a checkpoint whose shards are written
    max_generations_without_progress: int = 10
    max_user_failures: int = 2
    max_node_failures: int = 2  # workers that could not take part, before their node is avoided
    avoid_node_s: float = 600
    keep_last: int = 2  # checkpoints
    from_scratch: bool = False  # the seed may be a source although steps are recorded
    checkpoint_every_s: float | None = None
    checkpoint_auto: bool = False  # as cost and failures advise
