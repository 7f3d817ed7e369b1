"""One replica under torchft: ``torchrun --nproc-per-node 1 ... train_torchft.py FOLDER``.

As its train_ddp example, with three cares more. A replica's data position is the manager's step, so
that a failed commit or a restart skips nothing of its own share. Gradients go in one piece through
``Manager.allreduce``: the hook of torchft 0.2's ``DistributedDataParallel`` ends the process once a
collective has failed (it asserts ``fut._fut``, which its own ``_DummyWork`` has not). And it
downloads nothing.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torchft import Manager, Optimizer, ProcessGroupGloo

from benchmarks.peers.settings import WORKERS, WORKERS_MIN
from benchmarks.peers.training import StepLog, Training
from elastic_ft.core.batches import deal

START_S = 120.0


def await_others(folder: Path, replica: int) -> None:
    """At the first start all begin together, so that step 1 is of the whole world, as elsewhere."""
    (folder / f"ready-{replica}").touch()
    deadline_s = time.monotonic() + START_S
    while len(list(folder.glob("ready-*"))) < WORKERS:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not all replicas are up within {START_S:g} s")
        time.sleep(0.05)


def reduce_gradients(manager: Manager, model: torch.nn.Module) -> None:
    """Averages them over the replicas; what failed is the manager's to tell."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    whole = torch.cat([gradient.view(-1) for gradient in gradients])
    manager.allreduce(whole).wait()
    for gradient, part in zip(gradients, whole.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def main() -> None:
    folder, replica = sys.argv[1], int(os.environ["REPLICA_GROUP_ID"])
    training, log = Training(), StepLog(f"{folder}/log")

    def state_dict() -> dict[str, Any]:
        return {
            "model": training.model.state_dict(),
            "optimizer": training.optimizer.state_dict(),
        }

    def load_state_dict(state: dict[str, Any]) -> None:
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])

    await_others(Path(folder), replica)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=WORKERS_MIN,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"peers_{replica}",
        timeout=timedelta(seconds=10),
        quorum_timeout=timedelta(seconds=60),
        init_sync=False,
    )
    # A replica that heals in this very step has a wrong idea of its number until it commits.
    training.optimizer.register_step_pre_hook(lambda *_: training.set_rate(manager.current_step()))
    optimizer = Optimizer(manager, training.optimizer)
    dealt = deal(training.job.batch.micro_batches, WORKERS)[replica]
    participants = 0
    while True:
        optimizer.zero_grad()  # starts the quorum, which runs beside the forward
        step = manager.current_step() + 1
        loss, tokens, ids = training.backward(
            training.model, step, dealt, lambda tokens: 1 / tokens
        )
        reduce_gradients(manager, training.model)
        manager.wait_quorum()
        if manager.num_participants() < participants:
            log.noticed(f"a quorum of {manager.num_participants()}")
        participants = manager.num_participants()
        healing = not manager.is_participating()
        training.clip()
        optimizer.step()
        if manager.current_step() >= step and not healing:
            log.step(
                manager.current_step(),
                attempt=manager._quorum_id,
                rank=replica,
                world=manager.num_participants(),
                loss=loss,
                tokens=tokens,
                samples=ids,
            )
        elif (error := manager.errored()) is not None:
            log.noticed(str(error))


if __name__ == "__main__":
    main()
