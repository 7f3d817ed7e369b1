"""A process of its own that goes through many generations of a DeepSpeed engine, alone in each.

Prints, for each, what is alive after it: one JSON list.
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from elastic_ft.config import Job
from elastic_ft.core.events import Assignment, Member, Source, Tier
from elastic_ft.core.layout import plan_layout
from elastic_ft.models.decoder import Decoder, DecoderConfig
from elastic_ft.runtime.engines.base import MicroBatch
from elastic_ft.runtime.engines.deepspeed import DeepSpeedEngine
from elastic_ft.runtime.groups import Groups
from tests.multiproc.harness import make_job

OPERATION_TIMEOUT_S = 20.0


def reach(point: str, step: int | None = None) -> None:
    """Nobody listens."""


def job_of(stage: int) -> Job:
    return make_job(workers=1, parallel={"engine": "deepspeed", "zero_stage": stage})


def main(generations: int) -> None:
    def model() -> torch.nn.Module:
        return Decoder(DecoderConfig(300, 2, 16, 2, 1, 32, 16))

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    member = Member("w0", "n0", "127.0.0.1", 1)
    engines = [DeepSpeedEngine(job_of(s), model, torch.device("cpu"), 16) for s in range(4)]
    for engine in engines:
        engine.prepare()
    linear, found = torch.nn.functional.linear, []
    for number in range(generations):
        engine = engines[number % len(engines)]
        layout, why = plan_layout(engine.job.parallel.data_strategy, 1, None)
        source = Source(0, Tier.INITIAL)
        assignment = Assignment(number + 1, (member,), (), layout, source, ((),), why)
        groups = Groups(assignment, "w0", ("127.0.0.1", store.port))
        groups.form(torch.device("cpu"), OPERATION_TIMEOUT_S)
        engine.attach(groups)
        engine.initialise()
        engine.restored()
        batch = [MicroBatch(0, {"tokens": torch.zeros(1, 16, dtype=torch.long)})]
        _, tokens = engine.run_batch(1, batch, reach)
        engine.apply(1, tokens, reach)
        engine.detach()
        groups.teardown()
        del groups
        gc.collect()
        found.append(alive(linear))
    print(json.dumps(found))


def alive(linear: Any) -> dict[str, int]:
    import deepspeed

    objects = gc.get_objects()
    return {
        "threads": psutil.Process().num_threads(),
        "groups": len(distributed_c10d._world.pg_map),
        "engines": sum(issubclass(type(o), deepspeed.DeepSpeedEngine) for o in objects),
        "patched": int(torch.nn.functional.linear is not linear),
    }


if __name__ == "__main__":
    main(int(sys.argv[1]))
