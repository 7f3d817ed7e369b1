"""What a script's Accelerator, or Fabric, had and a context has not: what to say instead."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from elastic_ft.errors import NotOfContext

MEAN = (
    "leave it out of an evaluation whose loader each rank goes through whole; else a named metric "
    "of ctx.backward, ctx.evaluate, or ctx.sum in the step's function"
)
NOBODY = "leave it out: nobody is first before the loop, and no rank waits outside a step"
KEPT = "leave it out: the job keeps its own checkpoints; ctx.export(model, folder) writes weights"
ALL = "ctx.prepare(model, optimizer, scheduler, loader), all at once"
LOGGED = "leave it out: ctx.log(name=value), and elastic-ft tensorboard, wandb or mlflow"
INSTEAD = {
    **dict.fromkeys(("gather", "gather_for_metrics", "reduce", "all_reduce"), MEAN),
    **dict.fromkeys(("wait_for_everyone", "barrier", "launch"), NOBODY),
    **dict.fromkeys(("main_process_first", "local_main_process_first"), NOBODY),
    **dict.fromkeys(("save_state", "load_state", "load"), KEPT),
    **dict.fromkeys(("setup", "setup_module", "setup_optimizers", "setup_dataloaders"), ALL),
    **dict.fromkeys(("prepare_data_loader", "prepare_model", "prepare_optimizer"), ALL),
    **dict.fromkeys(("init_trackers", "get_tracker", "log_dict", "end_training"), LOGGED),
    "process_index": "ctx.rank, inside the loop",
    "global_rank": "ctx.rank, inside the loop",
    "num_processes": "ctx.world_size, inside the loop",
    "local_rank": "ctx.device",
    "local_process_index": "ctx.device",
    "unwrap_model": "the model itself: it is not wrapped",
    "clip_gradients": "ctx.clip_grad_norm_(max_norm)",
    "register_for_checkpointing": "ctx.register(name=thing)",
    "skip_first_batches": "leave it out: the loader goes on where the job is",
    "autocast": "torch.autocast",
    "seed_everything": "seed of init",
}


class Elsewhere:
    """What is there by the names that others have for it; what is not is told by its name."""

    rank: int
    _place: tuple[int, int] | None

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

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0. Raises UsageError before there is a world."""
        return self.rank == 0

    is_local_main_process = is_global_zero = is_main_process

    def print(self, *things: Any, **how: Any) -> None:
        """On rank 0, and everywhere before there is a world."""
        if self._place is None or self.rank == 0:
            print(*things, **how)

    def __getattr__(self, name: str) -> Any:
        """Raises NotOfContext, an AttributeError, too."""
        instead = INSTEAD.get(name, "docs/bring-your-own.md says what there is")
        raise NotOfContext(f"ctx.{name}: is not there: {instead}")
