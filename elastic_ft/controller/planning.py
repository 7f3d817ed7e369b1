"""What the core needs to plan a job's layouts: its model in numbers, and what the engine can do.

It imports torch, for seconds: whoever plans nothing leaves it out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from elastic_ft.config import Job
from elastic_ft.core.layouts.layout import LayoutWish
from elastic_ft.core.layouts.planner import Planning, allowed
from elastic_ft.core.layouts.work import Devices
from elastic_ft.core.typed import fields_of
from elastic_ft.engines.pretrained import with_model_read
from elastic_ft.errors import ConfigError
from elastic_ft.models.build import build_model
from elastic_ft.models.describe import describe_job

MEMORY_UNKNOWN_BYTES = 80e9  # of a device, where neither the job file nor a worker says


def planning_of(job: Job) -> Planning:
    """For ``parallel.strategy: auto``. Raises UsageError for what the planner can't lay out.

    Micro-batch, recomputation and schedule are the job's: they are not the layout's to change.
    """
    if job.parallel.engine != "native":
        raise ConfigError("parallel.strategy: auto is for engine native only")
    job, _ = with_model_read(job)
    work, device = describe_job(job), job.parallel.devices
    limits = replace(
        allowed(work.model, job.elastic.max_workers, engine_of(job)),
        micro_batches=(job.batch.micro_batch_size,),
        recompute=(job.parallel.activation_checkpointing,),
        schedules=(job.parallel.schedule,),
    )
    memory_bytes = None if device.memory_gb is None else device.memory_gb * 1e9
    devices = Devices(
        nodes=(1,),
        memory_bytes=memory_bytes or MEMORY_UNKNOWN_BYTES,
        flops_per_s=device.tflops * 1e12,
        intra_bytes_per_s=device.intra_gb_per_s * 1e9,
        inter_bytes_per_s=device.inter_gb_per_s * 1e9,
        fused=_on_gpus(job),
        overlaps=_on_gpus(job),
    )
    return Planning(work, devices, limits, memory_bytes)


def engine_of(job: Job) -> Callable[[LayoutWish], bool]:
    """Whether the engine lays the job's model out as wished. ``pretrained`` has been read.

    Raises ConfigError for a job that it can't lay out at all.
    """
    from elastic_ft.engines.laid_out import check_parallel  # imports for seconds

    with torch.device("meta"):
        model = build_model(
            job.model, vocab_size=job.data.vocab_size, sequence_length=job.data.sequence_length
        )
    given = job.parallel
    whole = given.engine != "native" or given.compile or given.unused_parameters
    whole = whole or job.model.lora is not None or job.precision.fp8 is not None
    whole = whole or job.comm.compresses is not None

    def check(wish: LayoutWish) -> None:
        parallel = given.model_copy(update=fields_of(replace(wish, strategy="fsdp")))
        asked = job.model_copy(update={"parallel": parallel})
        check_parallel(asked, model, job.data.sequence_length)

    def can(wish: LayoutWish) -> bool:
        try:
            check(wish)
        except ConfigError:
            return False
        return wish.ranks_per_sample * wish.ep == 1 or not whole

    check(LayoutWish())
    return can


def _on_gpus(job: Job) -> bool:
    """Of this machine, which is taken to be like the workers'."""
    return job.parallel.may_use_gpu and torch.cuda.is_available()
