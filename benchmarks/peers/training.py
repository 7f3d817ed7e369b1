"""The training that every system runs: model, data order, loss, optimizer, rate, and the step log.

The peers' scripts call this; elastic_ft runs the same job file. Each worker process appends one
line per applied step to a file of its own, so that a killed one tears no other's.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.peers.settings import HANG_S, make_job
from elastic_ft.config import parse_job
from elastic_ft.core.batches import DataOrder, step_batch
from elastic_ft.core.schedule import scheduled_rate
from elastic_ft.data.dataset import open_dataset
from elastic_ft.engines.optimizers import make_optimizer
from elastic_ft.models.build import build_model, initial_state
from elastic_ft.models.loss import loss_sum


class Training:
    """Attributes: model, optimizer: as elastic_ft makes them, from the same seed."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.job = job = parse_job(make_job())
        data = open_dataset(job.data, job.seed)
        self._train = data.train

        def factory() -> nn.Module:
            return build_model(
                job.model, vocab_size=data.vocab_size, sequence_length=data.sequence_length
            )

        self.model = factory()
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, value in initial_state(factory, job.seed):
                parameters[name].copy_(value)
        self.optimizer = make_optimizer(job.optimizer, parameters, fused=True)  # as ours
        self._order = DataOrder(job.seed, len(data.train))
        self.nominal_tokens = (data.sequence_length or 1) * job.batch.global_batch_size

    def backward(
        self,
        runner: nn.Module,
        step: int,
        dealt: range,
        factor: Callable[[int], float],
        accumulating: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
    ) -> tuple[float, int, list[int]]:
        """Forward and backward of one rank's share. Returns (loss sum, tokens, sample ids).

        Args:
            factor: of the summed loss, given this rank's number of tokens.
            accumulating: around all micro-batches but the last.
        """
        batch = self.job.batch
        shares = step_batch(
            self._order, step, batch.global_batch_size, batch.micro_batch_size, dealt
        )
        tokens_each = self.nominal_tokens // batch.global_batch_size * batch.micro_batch_size
        total, tokens = 0.0, 0
        for number, ids in enumerate(shares):
            samples = [self._train[self._order.dataset_index(i)] for i in ids]
            last = number == len(shares) - 1
            with contextlib.nullcontext() if last or accumulating is None else accumulating():
                loss, count = loss_sum(runner, self._train.collate(samples))
                (loss * factor(tokens_each * len(shares))).backward()
            total += float(loss.detach())
            tokens += int(count)
        return total, tokens, [i for ids in shares for i in ids]

    def clip(self) -> None:
        clip = self.job.optimizer.grad_clip
        assert clip is not None
        nn.utils.clip_grad_norm_(self.model.parameters(), clip)

    def set_rate(self, step: int) -> None:
        rate = scheduled_rate(self.job.optimizer, self.job.steps, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate


class StepLog:
    """One worker process's lines: applied steps, and faults as it notices them."""

    def __init__(self, folder: str) -> None:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self._file = (path / f"{os.getpid()}-{time.time_ns()}.jsonl").open("a")

    def step(
        self,
        step: int,
        *,
        attempt: int,
        rank: int,
        world: int,
        loss: float,
        tokens: int,
        samples: list[int],
    ) -> None:
        """``loss``: sum over this rank's ``tokens``. ``attempt``: equal on all ranks of a world."""
        line = {"step": step, "attempt": attempt, "rank": rank, "world": world}
        self._write(line | {"loss": loss, "tokens": tokens, "samples": samples})

    def noticed(self, what: str) -> None:
        self._write({"noticed": " ".join(what.split())[:200]})

    def _write(self, line: dict[str, Any]) -> None:
        line = {"at_s": time.time(), "pid": os.getpid(), **line}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


class Checkpoints:
    """Whole checkpoints in a folder on local disk, published by a rename."""

    def __init__(self, folder: str, every_steps: int) -> None:
        self._folder, self._every_steps = Path(folder), every_steps
        self._folder.mkdir(parents=True, exist_ok=True)

    def due(self, step: int) -> bool:
        return step % self._every_steps == 0

    def save(self, training: Training, step: int) -> None:
        path = self._folder / "newest.pt"
        partial = path.with_suffix(f".{os.getpid()}")
        torch.save(state_of(training, step), partial)
        partial.replace(path)

    def load(self, training: Training) -> int:
        """Returns the step of the newest one, 0 if there is none."""
        path = self._folder / "newest.pt"
        return restore(training, torch.load(path)) if path.exists() else 0


def state_of(training: Training, step: int) -> dict[str, Any]:
    model, optimizer = training.model.state_dict(), training.optimizer.state_dict()
    return {"step": step, "model": model, "optimizer": optimizer}


def restore(training: Training, state: dict[str, Any]) -> int:
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def train_ddp(
    training: Training,
    log: StepLog,
    rank: int,
    world: int,
    step: int,
    after_step: Callable[[int], None],
) -> None:
    """DistributedDataParallel from ``step`` on: what a careful user of a restarting system writes.

    The global batch is dealt out as it is, unevenly where it must be, and each loss weighed so
    that the gradient is the mean over all tokens, whatever the world.
    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from elastic_ft import torch_private
    from elastic_ft.core.batches import deal

    # Forming takes as long as starting processes does; a hang in training is to be noticed earlier.
    torch_private.set_group_timeout(dist.group.WORLD, HANG_S)
    runner = DistributedDataParallel(training.model, gradient_as_bucket_view=True)
    started = torch.tensor([time.time_ns()])
    dist.broadcast(started, 0)
    dealt = deal(training.job.batch.micro_batches, world)[rank]
    scale = world / training.nominal_tokens
    try:
        while step < training.job.steps:
            step += 1
            loss, tokens, ids = training.backward(
                runner, step, dealt, lambda _: scale, runner.no_sync
            )
            training.clip()
            training.set_rate(step)
            training.optimizer.step()
            training.optimizer.zero_grad(set_to_none=True)
            log.step(
                step,
                attempt=int(started),
                rank=rank,
                world=world,
                loss=loss,
                tokens=tokens,
                samples=ids,
            )
            after_step(step)
    except RuntimeError as error:  # torch's DistError is one
        log.noticed(str(error))
        raise
