"""What a script's Accelerator, or Fabric, had: there by that name, or told what to say instead.

So such a script's own lines stay as they are wherever there is one right thing that they can mean.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from elastic_ft.config import Job
from elastic_ft.errors import NotOfContext, UsageError
from elastic_ft.worker.steering import Steering

FIRST_S = 3600.0  # for those of this machine that are in `main_process_first` before
LOOK_S = 0.05
MEAN = (
    "in a step's function each rank has other micro-batches: give a named metric to ctx.backward, "
    "or take ctx.latest.loss after the step, or ctx.sum"
)
KEPT = "leave it out: the job keeps its own checkpoints; ctx.export(model, folder) writes weights"
CUT = "its weights are cut: ctx.export(model, folder), or ctx.gathered(model)"
INSTEAD = {
    **dict.fromkeys(("save_state", "load_state", "load"), KEPT),
    "get_tracker": "leave it out: elastic-ft tensorboard, wandb or mlflow",
    "process_index": "ctx.rank, inside the loop",
    "global_rank": "ctx.rank, inside the loop",
    "num_processes": "a schedule or rate is of the global batch, in every world: leave it out; "
    "inside the loop ctx.world_size",
    "local_rank": "ctx.device",
    "local_process_index": "ctx.device",
    "get_state_dict": "ctx.gathered(model)",
    "register_for_checkpointing": "ctx.register(name=thing)",
    "skip_first_batches": "leave it out: the loader goes on where the job is",
    "autocast": "torch.autocast",
    "seed_everything": "seed of init",
}


class Elsewhere:
    """What is there by the names that others have for it; what is not is told by its name."""

    job: Job
    rank: int
    has_begun: bool
    running_step: bool
    _place: tuple[int, int] | None
    _is_first = False  # in ``main_process_first``

    @abstractmethod
    def _steering(self, what: str) -> Steering: ...

    # ------------------------------------------------------------ accumulating, clipping

    def accumulate(self, *models: Any) -> AbstractContextManager[None]:
        """Has no effect: a step's micro-batches are those that are accumulated."""
        return nullcontext()

    def no_sync(self, model: Any) -> AbstractContextManager[None]:
        """Has no effect, as ``accumulate``."""
        return nullcontext()

    def no_backward_sync(self, module: Any, enabled: bool = True) -> AbstractContextManager[None]:
        """Has no effect, as ``accumulate``."""
        return nullcontext()

    sync_gradients = True  # behind ``backward`` a step has all of its micro-batches

    def clip_gradients(
        self,
        module: nn.Module,
        optimizer: Any,
        clip_val: float | None = None,
        max_norm: float | None = None,
        **how: Any,
    ) -> Any:
        """By the norm of the module's gradients, or by value, once they are means."""
        engine = self._steering("clip_gradients").engine
        if max_norm is not None:
            return engine.clip_these(module.parameters(), max_norm, **how)
        engine.clip_grad_norm_(torch.inf)
        return nn.utils.clip_grad_value_(module.parameters(), clip_val or torch.inf)

    # ------------------------------------------------------------------ who is first, waits

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0. Raises UsageError before there is a world."""
        return self._is_first or self.rank == 0

    is_local_main_process = is_global_zero = is_main_process

    def print(self, *things: Any, **how: Any) -> None:
        """On rank 0, and everywhere before there is a world."""
        if self._place is None or self.rank == 0:
            print(*things, **how)

    @contextlib.contextmanager
    def main_process_first(self, *args: Any, **how: Any) -> Iterator[None]:
        """The job's processes of this machine run the block one after the other: what the first
        has downloaded or cached, the others find. Each is the main process meanwhile.

        Raises UsageError where another is in it for an hour.
        """
        name = hashlib.sha256(f"{os.getuid()} {self.job.name}".encode()).hexdigest()[:16]
        path = Path(tempfile.gettempdir()) / f"elastic_ft_{name}.first"
        with open(path, "w", opener=_own) as lock:
            _take(lock)
            self._is_first = True
            try:
                yield
            finally:
                self._is_first = False

    local_main_process_first = rank_zero_first = main_process_first

    @abstractmethod
    def together(self, function: Any) -> Any: ...
    @abstractmethod
    def sum(self, *values: float) -> list[float]: ...

    def wait_for_everyone(self, *args: Any) -> None:
        """Between two steps. Has no effect before the first batch: nobody can wait there, as who
        joins later comes alone."""
        if self.has_begun:
            self.together(lambda progress: self.sum(0.0))

    barrier = wait_for_everyone

    def launch(self, *args: Any, **how: Any) -> None:
        """Has no effect: ``elastic-ft launch`` has started the script."""

    # ------------------------------------------------------------------------ all ranks' values

    def gather(self, value: Any, *args: Any, **how: Any) -> Any:
        """``value``, between two steps: a loader that is not trained on is gone through whole by
        each rank, so that all have the same. Where they do not, the journal tells (`ranks_differ`).

        Raises UsageError in a step's function.
        """
        if self.running_step:
            raise UsageError(f"ctx.gather, all_gather, reduce: {MEAN}")
        own = self._steering("gather")
        own.gathered = (own.gathered or 0.0) + _sum_of(value)
        return value

    gather_for_metrics = reduce = all_reduce = gather

    # ------------------------------------------------------------------------ logs and files

    @abstractmethod
    def log(self, *results: Any, **values: Any) -> None: ...

    def log_dict(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """As ``log``."""
        self.log(values)

    def init_trackers(self, *args: Any, **how: Any) -> None:
        """Has no effect: `elastic-ft tensorboard`, `wandb` and `mlflow` read what `log` writes."""

    end_training = init_trackers

    def unwrap_model(self, model: nn.Module, *args: Any, **how: Any) -> nn.Module:
        """The model, which is not wrapped. Raises UsageError where its weights are cut."""
        if self.job.parallel.strategy != "ddp":
            raise UsageError(f"ctx.unwrap_model: {CUT}")
        return model

    def __getattr__(self, name: str) -> Any:
        """Raises NotOfContext, an AttributeError, too."""
        instead = INSTEAD.get(name, "docs/bring-your-own.md says what there is")
        raise NotOfContext(f"ctx.{name}: is not there: {instead}")


def _own(path: str, flags: int) -> int:
    """Of a folder in which others may have laid a link by that name."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _take(lock: Any) -> None:
    """To the end of its file. Raises UsageError."""
    until = time.monotonic() + FIRST_S
    while True:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if time.monotonic() > until:
            raise UsageError(
                f"ctx.main_process_first: another process of this machine is in it for {FIRST_S:g} "
                "s: do what takes longer before the job is started"
            )
        time.sleep(LOOK_S)


def _sum_of(value: Any) -> float:
    """Of the numbers in it, by which ranks' values can be told apart."""
    if isinstance(value, torch.Tensor):
        return float(value.detach().abs().sum(dtype=torch.float64))
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return sum(map(_sum_of, value))
    return abs(float(value)) if isinstance(value, (bool, int, float)) else 0.0


def write_state(path: str | Path, state: Any) -> None:
    """By ``torch.save``; of modules and optimizers in it their state. Raises UsageError."""

    def plain(value: Any) -> Any:
        if hasattr(value, "state_dict"):
            value = value.state_dict()
        if isinstance(value, DTensor):
            raise UsageError(f"ctx.save: {CUT}")
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items()}
        return value

    unfinished = Path(path).with_name(f".{Path(path).name}")
    torch.save(plain(state), unfinished)
    unfinished.replace(path)
