"""What the core needs to plan a job's layouts: its model in numbers, and what the engine can do.

It imports torch, for seconds: whoever plans nothing leaves it out.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from pydantic import ValidationError

from elastic_ft.config import Job
from elastic_ft.core.layouts.layout import LayoutWish
from elastic_ft.core.layouts.planner import Planning, allowed
from elastic_ft.core.layouts.work import RECOMPUTES, Devices, Recompute
from elastic_ft.core.typed import fields_of
from elastic_ft.engines.pretrained import with_model_read
from elastic_ft.errors import ConfigError
from elastic_ft.models.build import build_model
from elastic_ft.models.describe import describe_job, known_sizes

OF_SHARDS = {"reshard_after_backward": True, "reduce_gradients": "micro_batch"}  # as by default
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
        may_offload=may_offload(job),
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
    """Whether a job file could ask for layouts as wished, beside all else that the job has: what is
    refused there is not planned. ``pretrained`` has been read.

    Raises ConfigError for a job that can't be laid out at all.
    """
    from elastic_ft.engines.laid_out import check_parallel  # imports for seconds
    from elastic_ft.engines.shared_positions import check_kernels

    vocabulary, longest = known_sizes(job.data)
    with torch.device("meta"):
        model = build_model(job.model, vocab_size=vocabulary, sequence_length=longest)
    device = torch.device("cuda" if _on_gpus(job) else "cpu")

    def check(asked: Job) -> None:
        check_parallel(asked, model, longest)
        check_kernels(asked, device)

    def can(wish: LayoutWish) -> bool:
        if job.parallel.engine != "native":
            return not wish.shared
        for strategy in dict.fromkeys((job.parallel.data_strategy, "fsdp")):
            with suppress(ConfigError):
                asked = fields_of(replace(wish, strategy=strategy))
                # Of auto these go with stages, which do so anyway.
                is_idle = job.parallel.strategy == "auto" and wish.has_stages
                check(_asking(job, **asked | (OF_SHARDS if is_idle else {})))
                return True
        return False

    own = LayoutWish(strategy=job.parallel.data_strategy)
    check(_asking(job, **fields_of(own)))
    return can


def recomputes_of(job: Job) -> tuple[Recompute, ...]:
    """In which ways layers may be computed again, beside all else that the job has."""
    found: list[Recompute] = []
    for recompute in RECOMPUTES:
        with suppress(ConfigError):
            asked = _asking(job, activation_checkpointing=recompute)
            if job.parallel.compile:  # the model decides
                engine_of(asked)
            found.append(recompute)
    return tuple(found)


def may_offload(job: Job) -> bool:
    """Whether a job file could put the optimizer in host memory, beside all else that it has."""
    with suppress(ConfigError):
        engine_of(_with(job, "optimizer", {"offload": "cpu"}))
        return True
    return False


def _asking(job: Job, **parallel: Any) -> Job:
    return _with(job, "parallel", parallel)


def _with(job: Job, name: str, more: dict[str, Any]) -> Job:
    """The job of a file that says so in a section. Raises ConfigError."""
    section = getattr(job, name)
    given = {key: getattr(section, key) for key in section.model_fields_set} | more
    sections = {key: getattr(job, key) for key in job.model_fields_set}
    try:
        return Job.model_validate(sections | {name: type(section).model_validate(given)})
    except ValidationError as error:
        raise ConfigError(f"{name}: {error}") from None


def _on_gpus(job: Job) -> bool:
    """Where the job does not say so, this machine is taken to be like the workers'. On Ray it says
    so: a controller is shown no GPU."""
    parallel = job.parallel
    return parallel.wants_gpu or (parallel.may_use_gpu and torch.cuda.is_available())
