"""One job that goes from layout to layout: workers are killed, and replaced, as a script says.

Each generation has the layout that the script gives it. Workers write down their state when it was
restored and after each step, so that a test can compare both sides of a move element by element.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain as chained
from pathlib import Path
from typing import Any

import numpy as np

from elastic_ft.config import Job
from elastic_ft.controller.controller import Controller
from elastic_ft.core.commands import Command, Journal
from elastic_ft.core.policy import Policy
from elastic_ft.core.sharding import Box, uncovered
from elastic_ft.faults import PointFault
from elastic_ft.hosts.local import LocalHost
from elastic_ft.state.tensors import tensor_name
from elastic_ft.worker import worker
from elastic_ft.worker.loop import Loop
from elastic_ft.worker.step import Step
from tests.multiproc.harness import Gate, Run, make_job, run_job
from tests.multiproc.layouts import COMMON
from tests.multiproc.tiny import counted

STEPS = 80
DEADLINE_S = 400.0
BYTES_TOLERANCE = 1.1  # of what has to be moved
DATA = 1  # the place in a step where its data is waited for


# ------------------------------------------------------------------------------ in the workers


def watched(folder: str, gate: str) -> Any:
    """The samples, behind a gate; and from here on this worker writes down its state."""

    class Watched(Loop):
        def steps(self) -> Iterator[Step]:
            self._write("restored")
            yield from super().steps()

        def _one_step(self) -> Iterator[Step]:
            yield from super()._one_step()
            self._write("trained")

        def _share_residuals(self) -> None:
            self._write("trained")  # with parts, whose sum is what it becomes
            super()._share_residuals()

        def _write(self, kind: str) -> None:
            name = f"g{self.groups.generation}.s{self.step}.{kind}.{self.tools.worker}"
            if (Path(folder) / name).exists():
                return
            pieces = [
                (tensor_name(key), t.shape, t.box, t.local.detach().cpu().clone().numpy())
                for key, t in self.engine.state().items()
            ]
            partial_path = Path(folder) / f"{name}.partial"
            partial_path.write_bytes(pickle.dumps(pieces))
            partial_path.replace(Path(folder) / name)

    worker.Loop = Watched  # type: ignore[misc]
    return counted(gate)


# --------------------------------------------------------------------------- the script of a job


@dataclass(frozen=True)
class Move:
    """From one layout to the next: a rank is killed at a point or a node is, or workers join."""

    before: str
    after: str
    point: str = ""  # where a rank is killed; "node": with its node, between two steps
    rank: int = 1

    def __str__(self) -> str:
        return f"{self.before} {self.point or 'joined'} {self.after}"


def moves_through(*layouts: str, faults: Sequence[tuple[str, int]]) -> list[Move]:
    """Through ``layouts``, of the whole world and of what a fault leaves of it in turn."""
    assert len(layouts) == 2 * len(faults) + 1
    moves = []
    for number, (point, rank) in enumerate(faults):
        whole, shrunk, following = layouts[2 * number : 2 * number + 3]
        moves += [Move(whole, shrunk, point, rank), Move(shrunk, following)]
    return moves


def sizes(layout: str) -> dict[str, int]:
    """ "pp2-fsdp2-tp2" -> {"pp": 2, "fsdp": 2, "tp": 2}; of hsdp, the ranks that share a copy."""
    found = re.findall(r"([a-z]+)(\d+)(?:x(\d+))?", layout)
    return {name: int(shards or first) for name, first, shards in found}


class Scripted(Controller):
    """Lays each generation out as the script has it, whatever the job file says."""

    def __init__(self, script: Sequence[str], *args: Any, **kwargs: Any) -> None:
        self._script, self.formed = script, 0  # generations
        super().__init__(*args, **kwargs)

    def _execute(self, command: Command) -> None:
        self.formed += isinstance(command, Journal) and command.event == "generation_formed"
        super()._execute(command)

    @property
    def policy(self) -> Policy:
        has = sizes(self._script[min(self.formed, len(self._script) - 1)])
        (strategy,) = has.keys() & {"ddp", "fsdp", "hsdp"}
        return replace(
            self._policy,
            strategy=strategy,
            shard_size=has.get("hsdp"),
            tp=has.get("tp", 1),
            pp=has.get("pp", 1),
            cp=has.get("cp", 1),
            ep=has.get("ep", 1),
        )

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy = policy


class NodeGate(Gate):
    """A gate that also holds training back for a moment in which a node is killed.

    All members then wait for their data and none is inside a collective: those would break at
    whatever byte they had come to.
    """

    def __init__(self, path: Path, moves: Sequence[Move]) -> None:
        super().__init__(path)
        self._moves, self._killed = moves, set[int]()
        self._first: dict[int, int] = {}  # generation -> steps committed when it was first seen

    def __call__(self, controller: Controller) -> None:
        assert isinstance(controller, Scripted)
        number, state = controller.formed - 1, controller.state
        due = 0 <= number < len(self._moves) and self._moves[number].point == "node"
        first = self._first.setdefault(state.generation, state.committed)
        due = due and number not in self._killed and state.committed > first
        if not due or state.phase != "running":
            super().__call__(controller)
        elif not self.path.exists():
            self.path.touch()
        elif state.assignment is None or not (places := self._places(controller)):
            return
        elif places != {DATA}:  # some had their data already, and wait for the others in a step
            self._open()
            self._first[state.generation] = state.committed
        else:
            self._killed.add(number)
            host, members = controller.host, state.assignment.members
            assert isinstance(host, LocalHost)
            host.kill_node(members[self._moves[number].rank].node)
            host.add_node(f"later{number}", controller.job.elastic.workers_per_node)

    def _places(self, controller: Scripted) -> set[int]:
        """Where members have stood from one heartbeat to the next; empty while one still moves."""
        marks = [controller._progress.marks.get(worker) for worker in controller.state.ranks]
        still = [mark for mark in marks if mark and mark.heard_at_s > mark.moved_at_s]
        return {mark.place for mark in still} if len(still) == len(marks) else set()


@dataclass(frozen=True)
class Chain:
    """A finished run of moves."""

    run: Run
    folder: Path

    def formed(self) -> list[dict[str, Any]]:
        return self.run.all("generation_formed")

    def states(self, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """What workers had before and after move ``number``, of the step that was restored."""
        after = self.formed()[number + 1]
        generation = self.formed()[self.source_of(number)]["generation"]
        return (
            self._written(generation, after["step"], ("restored", "trained")),
            self._written(after["generation"], after["step"], ("restored",)),
        )

    def source_of(self, number: int) -> int:
        """Which generation had the state that move ``number`` restored: not the last one where a
        rank was lost before what it had was copied."""
        formed, step = self.formed(), self.formed()[number + 1]["step"]
        for index in reversed(range(number + 1)):
            if self._written(formed[index]["generation"], step, ("restored", "trained")):
                return index
        raise AssertionError(f"nobody wrote down step {step}\n{self.run.story()}")

    def kept(self, number: int) -> dict[str, list[str]]:
        """Whose state each worker of generation ``number`` has: its own, and copies for peers."""
        line = self.formed()[number]
        ranks = [member["worker"] for member in line["members"]]
        kept = {who: [who] for who in ranks}
        for rank, buddies in enumerate(line["buddies"]):
            for buddy in buddies:
                kept[ranks[buddy]].append(ranks[rank])
        return kept

    def _written(self, generation: int, step: int, kinds: Sequence[str]) -> dict[str, Any]:
        found = {}
        for kind in kinds:
            prefix = f"g{generation}.s{step}.{kind}."
            for path in self.folder.glob(f"{prefix}w*"):
                if path.suffix != ".partial":
                    found[path.name.removeprefix(prefix)] = pickle.loads(path.read_bytes())
        return found


def run_moves(
    moves: Sequence[Move],
    out: Path,
    *,
    workers: int = 4,
    nodes: dict[str, int] | None = None,
    keepers: bool = True,
    **sections: Any,
) -> Chain:
    """Runs one job of ``workers`` through all ``moves``, then stops it."""
    folder, gate = out / "states", NodeGate(out / "gate", moves)
    folder.mkdir(parents=True)
    kwargs = {"folder": str(folder), "gate": str(gate.path)}
    data = {"path": "tests.multiproc.moves:watched", "kwargs": kwargs}
    kills = [move for move in moves if move.point not in ("", "node")]
    faults = [
        PointFault(move.point, rank=move.rank, world=workers, after=index - 1)
        if index
        else PointFault(move.point, rank=move.rank, world=workers, step=3)
        for index, move in enumerate(kills)
    ]
    script = [moves[0].before, *(move.after for move in moves)]

    def on_step(controller: Controller, line: dict[str, Any]) -> None:
        if isinstance(controller, Scripted) and controller.formed == len(script):
            controller.stop("the script is over")

    run = run_job(
        job_of_moves(workers=workers, data=data, **sections),
        out / "run",
        nodes=nodes,
        faults=faults,
        on_step=on_step,
        watch=gate,
        deadline_s=DEADLINE_S,
        controller=partial(Scripted, script),
        keepers=keepers,
    )
    return Chain(run.check("stopped"), folder)


def job_of_moves(**sections: Any) -> Job:
    """Under load a worker is silent for seconds, and forming takes some. Those who replace a node's
    workers join together."""
    elastic = {"heartbeat_timeout_s": 20, "hang_timeout_s": 60, "pause_timeout_s": 20}
    workers = sections.get("workers", 1)
    elastic |= {"join_batch_s": 30}  # the last of them ends it
    elastic |= {"min_workers": min(2, workers), "max_workers": workers, "gather_s": 120}
    elastic |= sections.pop("elastic", {})
    batch = {"global_batch_size": 8, "micro_batch_size": 2}
    return make_job(
        "ddp", **(COMMON | {"steps": STEPS, "batch": batch} | sections), elastic=elastic
    )


# --------------------------------------------------------------------------------- comparing


def assemble(pieces: dict[str, Any]) -> dict[str, np.ndarray]:
    """The whole tensors. Asserts that copies of an element are equal, and that none is missing."""
    whole: dict[str, np.ndarray] = {}
    boxes: dict[str, set[Box]] = {}
    for listed in pieces.values():
        for name, shape, box, values in listed:
            place = box.slices_within(Box.whole(shape))
            target = whole.setdefault(name, np.zeros(shape, values.dtype))
            if box in boxes.setdefault(name, set()):
                assert target[place].tobytes() == values.tobytes(), f"{name} {box}: replicas differ"
            target[place] = values
            boxes[name].add(box)
    for name, tensor in whole.items():
        gap = uncovered(Box.whole(tensor.shape), sorted(boxes[name]))
        assert not gap, f"{name}: nobody has {gap}"
    return whole


def minimal_bytes(chain: Chain, number: int, copied: bool) -> int:
    """What workers need after a move, and had neither themselves nor, if they had got that far
    (``copied``), as a copy for a peer."""
    before, after = chain.states(number)
    kept, total = chain.kept(number), 0
    for who, listed in after.items():
        own: dict[str, list[Box]] = {}
        peers = kept.get(who, []) if copied else [who]
        for name, _, box, _ in chained.from_iterable(before.get(p, ()) for p in peers):
            own.setdefault(name, []).append(box)
        for name, _, box, values in listed:
            lacking = uncovered(box, own.get(name, ()))
            total += sum(part.numel for part in lacking) * values.itemsize
    return total


def bytes_allowed(chain: Chain, number: int) -> float | None:
    """That move ``number`` may have moved. None: not known, as a rank was lost before what it had
    was copied, and what it had before that moved."""
    after = chain.formed()[number + 1]
    if chain.source_of(number) < number or f"step {after['step']} lacks" in after["reason"]:
        return None
    copied = "farthest tier keeper" not in after["reason"]
    return BYTES_TOLERANCE * minimal_bytes(chain, number, copied)
