"""A module and an optimizer of one's own under their engine, in generations of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from elastic_ft.config import parse_job
from elastic_ft.core.assignment import Assignment, Member, Source, Tier
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.core.shares import shares
from elastic_ft.engines.base import MicroBatch
from elastic_ft.engines.own import OwnEngine
from elastic_ft.engines.own_attempt import Running
from elastic_ft.errors import ConfigError
from elastic_ft.groups.groups import Groups
from elastic_ft.groups.store_links import StoreLinks
from elastic_ft.state.tensors import LocalState
from tests.oneproc.alone import CPU, TIMEOUT_S, reach

VOCABULARY, DIM = 20, 8


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.GELU()) for _ in range(2))
        self.output = nn.Linear(DIM, VOCABULARY, bias=False)
        self.output.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.output(x)


class Own:
    """An engine of one's own, and generations of one rank."""

    def __init__(
        self,
        strategy: str,
        models: Sequence[nn.Module] = (),
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        values = {"name": "own", "loop": {}, "parallel": {"strategy": strategy}}
        values["batch"] = {"global_batch_size": 4, "micro_batch_size": 2}
        torch.manual_seed(0)
        self.model = Tied()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        models, optimizers = models or [self.model], optimizers or [self.optimizer]
        self.engine = OwnEngine(parse_job(values), models, optimizers, CPU)
        self.engine.prepare()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._links = StoreLinks(("127.0.0.1", self._store.port), TIMEOUT_S)
        self._generation = 0
        self._state: LocalState | None = None

    @contextmanager
    def generation(self) -> Iterator[None]:
        self._generation += 1
        member, source = Member("w0", "n0", "127.0.0.1", 0), Source(0, Tier.INITIAL)
        formed = Assignment(self._generation, (member,), (), Layout(), source, ((),), "a test")
        groups = Groups(dict(shares(formed))["w0"], member, self._links)
        if self._generation > 1:
            self._links.prepare()
        groups.form(CPU, TIMEOUT_S)
        try:
            kept = self.engine.attach(groups)
        except ConfigError:
            groups.teardown()
            raise
        if self._state is None:
            self.engine.initialise()
        elif not kept:
            with torch.no_grad():
                for name, tensor in self.engine.state().items():
                    tensor.local.copy_(self._state[name].local)
        self.engine.restored()
        try:
            yield
        finally:
            groups.abort("the end")
            self._state = self.engine.detach()
            groups.teardown()

    def running(self, number: int, tokens: Sequence[torch.Tensor]) -> Running:
        micro_batches = [MicroBatch(n, data) for n, data in enumerate(tokens)]
        running = Running(number, micro_batches, lambda loss, n, sq, sums: (n, sq), reach)
        self.engine.attempt(running)
        return running

    def step(self, number: int, scheduler: LRScheduler | None = None) -> float:
        running = self.running(number, [torch.arange(6), torch.arange(6) + 3])
        total = 0.0
        for micro_batch in self.engine.micro_batches(running):
            total += self.backward(micro_batch)
        self.engine.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        self.engine.end_attempt()
        self.engine.capture()
        return total / 12

    def backward(self, micro_batch: MicroBatch) -> float:
        tokens = micro_batch.data
        loss = F.cross_entropy(self.model(tokens), tokens.flip(0), reduction="sum")
        self.engine.backward(loss, len(tokens))
        return float(loss.detach())
