"""Ray Train, elastic: ``train_ray.py ADDRESS FOLDER CHECKPOINT_EVERY_STEPS`` is the driver."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import ray
import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer

from benchmarks.peers.settings import FORM_S, WORKERS, WORKERS_MIN


def worker(config: dict[str, Any]) -> None:
    from benchmarks.peers.training import (
        Checkpoints,
        StepLog,
        Training,
        restore,
        state_of,
        train_ddp,
    )

    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    training, log = Training(), StepLog(f"{config['folder']}/log")
    due = Checkpoints(f"{config['folder']}/unused", config["every_steps"]).due
    step = 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            step = restore(training, torch.load(f"{folder}/state.pt"))

    def after_step(step: int) -> None:
        if not due(step):
            return
        with tempfile.TemporaryDirectory() as folder:
            saved = None
            if rank == 0:
                torch.save(state_of(training, step), f"{folder}/state.pt")
                saved = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"step": step}, checkpoint=saved)

    train_ddp(training, log, rank, world, step, after_step)


class Notice(ray.train.UserCallback):
    def __init__(self, folder: str) -> None:
        self._folder = folder

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        from benchmarks.peers.training import StepLog

        StepLog(f"{self._folder}/log").noticed(f"controller: {worker_exceptions}")


def main() -> None:
    address, folder, every_steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    ray.init(address=address, log_to_driver=False, logging_level="WARNING")
    trainer = TorchTrainer(
        worker,
        train_loop_config={"folder": folder, "every_steps": every_steps},
        scaling_config=ray.train.ScalingConfig(
            num_workers=(WORKERS_MIN, WORKERS), elastic_resize_monitor_interval_s=1
        ),
        torch_config=TorchConfig(backend="gloo", timeout_s=int(FORM_S)),
        run_config=ray.train.RunConfig(
            name=f"peers-{time.time_ns()}",
            storage_path=f"{folder}/storage",
            failure_config=ray.train.FailureConfig(max_failures=-1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
            callbacks=[Notice(folder)],
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
