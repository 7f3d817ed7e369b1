"""One worker under torchrun: ``torchrun ... train_torchrun.py FOLDER CHECKPOINT_EVERY_STEPS``."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch.distributed as dist

from benchmarks.peers.settings import FORM_S
from benchmarks.peers.training import Checkpoints, StepLog, Training, train_ddp


def main() -> None:
    folder, every_steps = sys.argv[1], int(sys.argv[2])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    training, log = Training(), StepLog(f"{folder}/log")
    dist.init_process_group("gloo", timeout=timedelta(seconds=FORM_S))
    checkpoints = Checkpoints(f"{folder}/checkpoints", every_steps)
    step = checkpoints.load(training)

    def after_step(step: int) -> None:
        if rank == 0 and checkpoints.due(step):
            checkpoints.save(training, step)

    train_ddp(training, log, rank, world, step, after_step)


if __name__ == "__main__":
    main()
