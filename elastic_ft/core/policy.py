"""What the user decided, as the core needs it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from elastic_ft.core.layouts.layout import LayoutWish
from elastic_ft.core.layouts.planner import Planning


@dataclass(frozen=True)  # no slots: the job file has its defaults from these
class Policy(LayoutWish):
    """What the user decided: layouts by rule, who takes part, and how long to wait for what.

    What the job file has too means there what it means here, see ``config.ElasticConfig``.
    """

    min_workers: int
    max_workers: int
    planning: Planning | None = None  # the planner lays out, not by rule
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
    return_timeout_s: float = 2  # for workers and keepers to call the next controller
    controller_timeout_s: float = 60  # so long they look for it
    form_timeout_s: float = 60
    boundary_timeout_s: float = 70  # a running step to end: hangs are noticed sooner
    stop_timeout_s: float = 120
    publish_timeout_s: float = 1800  # a checkpoint whose shards are written
    max_generations_without_progress: int = 10
    max_user_failures: int = 2
    max_node_failures: int = 2  # workers that could not take part, before their node is avoided
    avoid_node_s: float = 600
    keep_last: int = 2  # checkpoints
    final_checkpoint: bool = False  # the job is complete with that of its last step
    from_scratch: bool = False  # the seed may be a source although steps are recorded
    beginning: str = "the seed"  # what step 0 is made of, in words
    checkpoint_every_s: float | None = None
    checkpoint_auto: bool = False  # as cost and failures advise

    def in_multiples(self) -> Policy:
        """The same policy with limits that are worlds: multiples of ``multiple_of``."""
        each = self.multiple_of
        return replace(
            self,
            min_workers=-(-self.min_workers // each) * each,
            max_workers=self.max_workers // each * each,
        )


def same_names(kind: type[Any], *sections: object) -> dict[str, Any]:
    """The values of ``sections`` that data class ``kind`` has a field of the same name for.

    Raises ValueError where two sections have the same one.
    """
    found: dict[str, Any] = {}
    for section in sections:
        own = {f.name: getattr(section, f.name) for f in fields(kind) if hasattr(section, f.name)}
        if twice := found.keys() & own:
            raise ValueError(f"{', '.join(sorted(twice))}: given by two sections")
        found |= own
    return found
