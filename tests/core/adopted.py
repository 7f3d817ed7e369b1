"""A trained world, of which another controller has come into charge."""

from __future__ import annotations

from elastic_ft.core.events import ControllerChanged, WorkerReturned
from elastic_ft.core.policy import Policy
from tests.core.script import Script

POLICY = Policy(min_workers=1, max_workers=3, strategy="fsdp")


def trained(*, keepers: bool = False, policy: Policy = POLICY) -> Script:
    """Three workers, one of them on a node of its own, that have committed two steps."""
    script = Script(policy)
    if keepers:
        script.keeper("n1")
        script.keeper("n2")
    script.run(a="n1", b="n1", c="n2")
    script.train(1, 2)
    return script


def changed(script: Script) -> list[object]:
    return list(script.tell(ControllerChanged, 2, "on n9"))


def returned(script: Script, *workers: str, newest: int | None = None) -> list[object]:
    newest = script.state.generation if newest is None else newest
    return [c for w in workers for c in script.tell(WorkerReturned, w, newest)]
