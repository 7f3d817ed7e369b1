"""What a worker does before it is ready: data, device, model. No survivor waits for any of it."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from elastic_ft.config import Job
from elastic_ft.data.dataset import DataBundle, open_dataset
from elastic_ft.data.draws import Draws
from elastic_ft.data.prefetch import Prefetcher
from elastic_ft.engines.base import Engine, StateEngine
from elastic_ft.engines.native import NativeEngine
from elastic_ft.engines.pretrained import with_model_read
from elastic_ft.faults import Points
from elastic_ft.models.build import build_model
from elastic_ft.state.checkpointer import Checkpointer
from elastic_ft.state.snapshot import Snapshots
from elastic_ft.transport.control import Welcome
from elastic_ft.worker.burn_in import burn_in
from elastic_ft.worker.devices import device_of, set_up
from elastic_ft.worker.same_data import check_data_of_run
from elastic_ft.worker.steering import Steering
from elastic_ft.worker.tools import Tools


def prepare(
    worker: str,
    welcome: Welcome,
    points: Points,
    send: Callable[[Any], object],
    unkept: Callable[[str], None],
    own: Steering | None = None,
) -> tuple[Tools, dict[str, float]]:
    """Returns what outlives every generation, and the seconds that data and model took.

    ``unkept``: told why, when snapshots are in memory of this process. ``own``: of a loop of the
    user's, which has opened the data and built the model. Raises UsageError.
    """
    job = welcome.job
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
    began_s = time.monotonic()
    data = open_dataset(job.data, job.seed) if own is None else own.data
    opened_s = time.monotonic()
    read, digest = with_model_read(job)
    check_data_of_run(welcome.data, data, digest)

    engine: StateEngine = _engine(read, data) if own is None else own.engine
    engine.prepare()
    model_s = time.monotonic() - opened_s
    on_gpu = engine.device.type == "cuda"
    snapshots = Snapshots(worker, on_gpu, unkept, welcome.run)
    points.corrupt = snapshots.corrupt
    upload_mb_per_s = job.checkpoint.max_upload_mb_per_s
    checkpointer = Checkpointer(
        worker, welcome.run, welcome.checkpoint_url, snapshots, send, points, upload_mb_per_s
    )
    gc.collect()
    gc.freeze()  # imports and caches: no later collection needs to look at them
    tools = Tools(
        job=job,
        worker=worker,
        engine=engine,
        data=data,
        prefetcher=_prefetcher(data, own),
        snapshots=snapshots,
        checkpointer=checkpointer,
        points=points,
        send=send,
        pretrained=digest,
    )
    return tools, {"data_s": round(opened_s - began_s, 3), "model_s": round(model_s, 3)}


def _prefetcher(data: DataBundle, own: Steering | None) -> Prefetcher:
    stream = data.stream
    return Prefetcher(
        data.train,
        draws=None if own is None else Draws(lambda: own.engine.seed),
        reads=lambda: 0 if stream is None else stream.reads,
        others=data.processes,
    )


def _engine(job: Job, data: DataBundle) -> Engine:
    def factory() -> torch.nn.Module:
        return build_model(
            job.model, vocab_size=data.vocab_size, sequence_length=data.sequence_length
        )

    return engine_class(job)(job, factory, ready_device(job), data.sequence_length or 1)


def ready_device(job: Job) -> torch.device:
    """The device to train on, set up and burnt in. Raises DeviceSick."""
    device = device_of(job.parallel)
    if device.type == "cuda":
        set_up(job)
        burn_in(device)
    return device


def engine_class(job: Job) -> Callable[..., Engine]:
    if job.parallel.engine == "native":
        return NativeEngine
    from elastic_ft.engines.deepspeed import DeepSpeedEngine  # imports for seconds

    return DeepSpeedEngine
