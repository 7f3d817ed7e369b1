"""Small jobs of one kind each, for tests of the failure state machine."""

from __future__ import annotations

from elastic_ft.core.commands import RecordStep
from elastic_ft.core.policy import Policy
from tests.core.script import Script

WHOLE = "pp1.s1.tp1"  # the shard space of DDP, and its only shard
SHARD = "pp0.s0.tp0"


NO_WAY = "{}, and {} steps are recorded; --from-scratch begins anew"


def ddp(min_workers: int = 1, max_workers: int = 3, **more: float) -> Script:
    return Script(Policy(min_workers, max_workers, **more))  # type: ignore[arg-type]


def fsdp(min_workers: int = 1, max_workers: int = 3, **more: float) -> Script:
    return Script(Policy(min_workers, max_workers, strategy="fsdp", **more))  # type: ignore[arg-type]


def recorded(commands: list[object]) -> list[int]:
    return [c.step for c in commands if isinstance(c, RecordStep)]
