"""Three workers, each with a keeper on its node, and what they leave."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from elastic_ft.core.assignment import CheckpointRef, Holding, Tier
from elastic_ft.core.commands import Command
from elastic_ft.core.events import (
    KeeperHolds,
    WorkerLost,
)
from elastic_ft.core.policy import Policy
from tests.core.script import Script, assignment_in

S0, S1, S2 = "pp0.s0.tp0", "pp0.s1.tp0", "pp0.s2.tp0"
SHARD_OF = {"a": S0, "b": S1, "c": S2}
THREE, TWO = "pp1.s3.tp1", "pp1.s2.tp1"
REF = CheckpointRef(10, "s3://b/10")


def kept_here(copies: int = 1, *refs: CheckpointRef, min_workers: int = 1) -> Script:
    """a, b and c train in three shards, one to a node, each node with its keeper."""
    script = Script(Policy(min_workers, 3, strategy="fsdp", copies=copies), *refs)
    for node in ("n1", "n2", "n3"):
        script.keeper(node)
    return script.run(a="n1", b="n2", c="n3")


def tells(
    script: Script, worker: str, node: str, *steps: int, generation: int = 1
) -> list[Command]:
    """The node's keeper has the worker's own shard of these steps, computed by ``generation``."""
    held = (kept(step, SHARD_OF[worker], generation) for step in steps)
    return script.tell(KeeperHolds, node, worker, tuple(held))


def kept(step: int, shard: str, generation: int = 1, space: str = THREE) -> Holding:
    return Holding(step, space, shard, Tier.KEEPER, generation)


def survivors_pause(script: Script, number: int, *workers: str) -> list[Command]:
    """They report their live state and their copies of ``number``."""
    commands: list[Command] = []
    for worker in workers:
        held = (script.live(worker, number), *script.copies(worker, number))
        commands += script.paused(worker, *held)
    return commands


def words_of_all(count: int) -> Iterator[None]:
    """All workers are killed, others take their places; each keeper tells what it has."""
    script = Script(Policy(count, count, strategy="fsdp", copies=2))
    for number in range(count):
        script.keeper(f"n{number}")
    script.run(**{f"w{number}": f"n{number}" for number in range(count)})
    script.train(1)
    left = {w: (script.live(w, 1), *script.copies(w, 1)) for w in script.ranks}
    for worker in left:
        script.tell(WorkerLost, worker, "killed")
    for number in range(count):
        script.ready(f"x{number}", f"n{number}")
    yield
    for worker, some in left.items():
        held = tuple(replace(one, tier=Tier.KEEPER) for one in some)
        script.tell(KeeperHolds, f"n{worker[1:]}", worker, held)
    assert script.assignment.source.step == 1


def reading_from_n2() -> Script:
    """Generation 2 forms, and gets b's shard of step 11 from its keeper."""
    script = kept_here(1, REF)
    script.train(11)
    script.tell(WorkerLost, "b", "killed")
    tells(script, "b", "n2", 11)
    assert assignment_in(survivors_pause(script, 11, "a", "c")).source.tier is Tier.KEEPER
    return script
