"""Ranks that stay: processes that go from generation to generation, with no controller.

A test that looks at engines alone starts them once, and has them run one layout after the other.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import multiprocessing
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from elastic_ft.config import Job
from elastic_ft.core.assignment import Assignment, Member, Source, Tier
from elastic_ft.core.batches import DataOrder, deal, step_batch
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.core.shares import shares
from elastic_ft.data.dataset import open_dataset
from elastic_ft.engines.base import Engine, MicroBatch
from elastic_ft.groups.groups import Groups
from elastic_ft.groups.store_links import StoreLinks
from elastic_ft.hosts.local.warm import ENVIRONMENT
from elastic_ft.models.build import build_model
from elastic_ft.worker.prepare import engine_class

OPERATION_S = 60.0
CALL_S = 240.0
CPU = torch.device("cpu")
# Once for all ranks of all pools: transformers' part takes longer than what most of them do.
PRELOADED = ["elastic_ft.worker.preload", "transformers.models.llama.modeling_llama"]
KEPT: set[int] = set()  # processes of pools that are open: several tests may use one
_LINKS: dict[int, StoreLinks] = {}


@contextlib.contextmanager
def as_workers_begin() -> Iterator[None]:
    """For a process that is started inside: torch reads some of its environment when it is
    imported, and this one's main script is none of its business."""
    main, before = sys.modules["__main__"], dict(os.environ)
    sys.modules["__main__"] = types.ModuleType("__main__")
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        os.environ.clear()
        os.environ.update(before)


class Pool:
    """``size`` processes. Each call runs a function on some of them, as the ranks of one world."""

    def __init__(self, size: int) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.generation = 0
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._ranks: list[tuple[Any, Connection]] = []
        with as_workers_begin():
            for rank in range(size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs,), name=f"rank{rank}")
                process.daemon = True
                process.start()
                KEPT.add(process.pid or 0)
                theirs.close()
                self._ranks.append((process, ours))

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        for process, connection in self._ranks:
            connection.close()
            process.kill()
        for process, _ in self._ranks:
            process.join(10)
            KEPT.discard(process.pid)

    def __call__(
        self, work: Callable[..., Any], *arguments: Any, world: int, deadline_s: float = CALL_S
    ) -> list[Any]:
        """``work(port, generation, rank, world, *arguments)`` on ``world`` ranks; their results.

        Raises RuntimeError with the tracebacks if one fails.
        """
        self.generation += 100  # as many generations as one call may go through
        assert world <= len(self._ranks)
        for rank, (_, connection) in enumerate(self._ranks[:world]):
            place = (self.store.port, self.generation, rank, world)
            connection.send((work, place, arguments))
        found = []
        for rank, (_, connection) in enumerate(self._ranks[:world]):
            if not connection.poll(deadline_s):
                self.__exit__()  # a late answer would be taken for the next call's
                raise TimeoutError(f"rank {rank} has no result after {deadline_s:g} s")
            found.append(connection.recv())
        failed = [f"rank {rank}:\n{text}" for rank, (good, text) in enumerate(found) if not good]
        if failed:
            raise RuntimeError("\n".join(failed))
        return [result for _, result in found]


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # as a worker's template does: no collection looks at what is imported
    while True:
        try:
            work, place, arguments = connection.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(CALL_S - 10)  # to see where it hangs
        try:
            result = (True, work(*place, *arguments))
        except Exception:
            result = (False, traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        connection.send(result)


# ------------------------------------------------------------------------ for what runs on ranks


def form(port: int, generation: int, rank: int, layout: Layout) -> Groups:
    """This rank's groups of a generation, one rank on each node."""
    members = tuple(Member(f"w{r}", f"n{r}", "127.0.0.1", 1) for r in range(layout.world_size))
    source, buddies = Source(0, Tier.INITIAL), ((),) * layout.world_size
    assignment = Assignment(generation, members, (), layout, source, buddies, "a test")
    _meet(port, generation, layout.world_size)
    links = _LINKS.setdefault(
        port, StoreLinks(("127.0.0.1", port), OPERATION_S)
    )  # a process has one
    groups = Groups(dict(shares(assignment))[f"w{rank}"], members[rank], links)
    groups.form(CPU, OPERATION_S)
    links.prepare()
    return groups


def _meet(port: int, generation: int, world: int) -> None:
    """Waits until all ranks are here: some import for longer than forming may take."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    if store.add(f"meet{generation}", 1) == world:
        store.set(f"met{generation}", b"1")
    store.wait([f"met{generation}"], datetime.timedelta(seconds=CALL_S))


def make_engine(job: Job) -> tuple[Engine, Any]:
    """The job's engine, prepared, and its data."""
    data = open_dataset(job.data, job.seed)
    vocabulary, length = data.vocab_size, data.sequence_length

    def factory() -> torch.nn.Module:
        return build_model(job.model, vocab_size=vocabulary, sequence_length=length)

    engine = engine_class(job)(job, factory, CPU, length or 1)
    engine.prepare()
    return engine, data


def train(
    job: Job, engine: Engine, data: Any, groups: Groups, steps: Sequence[int]
) -> list[dict[str, float]]:
    """Runs ``steps`` as the loop does. Returns each one's loss and gradient norm."""
    layout, batch = groups.assignment.layout, job.batch
    assert groups.rank is not None
    dealt = deal(batch.micro_batches, layout.data_parallel_size)
    mine = dealt[layout.data_rank(groups.rank)]
    wanted = engine.micro_batches_per_rank([len(d) for d in dealt])
    order, found = DataOrder(job.seed, len(data.train)), []
    for step in steps:
        ids = step_batch(order, step, batch.global_batch_size, batch.micro_batch_size, mine)
        micro_batches = [
            MicroBatch(
                mine.start + number,
                data.train.collate([data.train[order.dataset_index(i)] for i in micro_batch]),
            )
            for number, micro_batch in enumerate(ids)
        ]
        first = micro_batches[0]
        padding = [MicroBatch(first.number, first.data, 0.0)] * (wanted - len(micro_batches))
        if along := engine.along if step % 2 == 0 else None:  # as no snapshot is under way
            along.ask(lambda loss, tokens: [loss, float(tokens), *engine.named.sums()])
        sums = engine.run_batch(step, micro_batches + padding, reach)
        squares = sums.squares
        if along:
            total, count, *named = along.told()
        else:
            values = [squares, sums.loss, float(sums.tokens), *sums.named]
            packed = torch.tensor(values, dtype=torch.float64)
            dist.all_reduce(packed)
            squares, total, count, *named = packed.tolist()
        engine.named.means(named)
        update = engine.apply(step, int(count), squares, reach)
        found.append({"loss": total / count, "grad_norm": update.grad_norm})
    return found


def reach(point: str, step: int | None = None) -> None:
    """Nobody listens."""
