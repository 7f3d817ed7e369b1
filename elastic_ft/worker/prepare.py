"""What a worker does before it is ready: data, device, model. No survivor waits for any of it."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from elastic_ft import torch_private
from elastic_ft.config import Job
from elastic_ft.core.terms import PRETRAINED, PRETRAINED_CONFIG
from elastic_ft.data.dataset import DataBundle, open_dataset
from elastic_ft.data.draws import Draws
from elastic_ft.data.prefetch import Prefetcher
from elastic_ft.engines.base import Engine, StateEngine
from elastic_ft.engines.by_reference import Reference
from elastic_ft.engines.native import NativeEngine
from elastic_ft.engines.pretrained import as_told, config_text, with_model_read
from elastic_ft.errors import BaseAway, ModelError, one_line
from elastic_ft.faults import Points
from elastic_ft.models.build import build_model
from elastic_ft.state.checkpointer import Checkpointer
from elastic_ft.state.snapshot import Snapshots
from elastic_ft.transport.control import Note, Welcome
from elastic_ft.worker.burn_in import burn_in
from elastic_ft.worker.devices import device_of, set_up
from elastic_ft.worker.same_data import check_data_of_run
from elastic_ft.worker.steering import Steering
from elastic_ft.worker.tools import Tools

log = logging.getLogger(__name__)
AWAY_MIN_S, AWAY_MAX_S = 1.0, 20.0  # between two tries
T = TypeVar("T")


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

    def away(why: str) -> None:
        send(Note(worker, 0, "base_away", why, {"worker": worker}))

    read, digest, *how = _model_read(welcome, away)
    check_data_of_run(welcome.data, data, digest)

    engine: StateEngine = _engine(read, data, digest) if own is None else own.engine
    engine.prepare()
    _open(engine.reference, digest, *how, job, away)
    model_s = time.monotonic() - opened_s
    on_gpu = engine.device.type == "cuda"
    snapshots = Snapshots(worker, on_gpu, unkept, welcome.run)
    points.corrupt = snapshots.corrupt
    url, most = welcome.checkpoint_url, job.checkpoint.max_upload_mb_per_s
    checkpointer = Checkpointer(worker, welcome.run, url, snapshots, send, points, most)
    gc.collect()
    gc.freeze()  # imports and caches: no later collection needs to look at them
    tools = Tools(
        job=job,
        worker=worker,
        engine=engine,
        data=data,
        prefetcher=prefetcher(data, own, engine.device),
        snapshots=snapshots,
        checkpointer=checkpointer,
        points=points,
        send=send,
        pretrained=digest,
        pretrained_config=config_text(read),
    )
    return tools, {"data_s": round(opened_s - began_s, 3), "model_s": round(model_s, 3)}


def _open(
    reference: Reference | None,
    digest: str | None,
    by_peers: bool,
    known: bool,
    job: Job,
    tell: Callable[[str], None],
) -> None:
    """``known``: the run's other workers have the weights, should the folder have gone by now."""
    if reference is None:
        return
    reference.digest = digest or ""
    if by_peers:
        return
    try:
        if known:
            reference.open()
        else:
            _awaited(reference.open, job, tell)
    except ModelError as error:
        if not known:
            raise
        tell(f"{error}; the run's other workers have it")


def _model_read(
    welcome: Welcome, tell: Callable[[str], None]
) -> tuple[Job, str | None, bool, bool]:
    """The job with what ``model.pretrained`` says, that folder's digest, whether both are the
    run's by its terms as the folder can't be read, and whether they could be."""
    job, known = welcome.job, welcome.data
    has_to = job.model.lora is None and not welcome.begun  # read it: step 0 may be made of it here
    if has_to or PRETRAINED not in known or PRETRAINED_CONFIG not in known:
        return *_awaited(lambda: with_model_read(job), job, tell), False, False
    try:
        return *with_model_read(job), False, True
    except ModelError as error:
        tell(f"{error}; the run's other workers have it")
        return as_told(job, known[PRETRAINED_CONFIG]), known[PRETRAINED], True, True


def _awaited(read: Callable[[], T], job: Job, tell: Callable[[str], None]) -> T:
    """What ``read`` returns, called again while the store of a model's weights is away.

    No survivor waits for a worker that begins. Raises BaseAway after elastic.suspend_timeout_s.
    """
    until_s, pause_s = time.monotonic() + job.elastic.suspend_timeout_s, AWAY_MIN_S
    while True:
        try:
            return read()
        except BaseAway as error:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise
            tell(f"{error}; it is tried again for {left_s:.0f} s")
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, AWAY_MAX_S)


class PageLocked:
    """Of micro-batches that are read ahead: copies to the GPU overlap with what it computes."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._has_told = device, False

    def __call__(self, batch: Any) -> Any:
        try:
            return torch_private.page_locked(batch, self._device)
        except Exception as error:  # no room, on a device already, a type that is not made so
            if not self._has_told:
                log.warning("batches are not page-locked: %s", one_line(error))
            self._has_told = True
            return batch


def prefetcher(data: DataBundle, own: Steering | None, device: torch.device) -> Prefetcher:
    stream = data.stream
    return Prefetcher(
        data.train,
        draws=None if own is None else Draws(lambda: own.engine.seed),
        reads=lambda: 0 if stream is None else stream.reads,
        others=data.processes,
        finish=PageLocked(device) if device.type == "cuda" else None,
    )


def _engine(job: Job, data: DataBundle, digest: str | None) -> Engine:
    def factory() -> torch.nn.Module:
        return build_model(
            job.model, vocab_size=data.vocab_size, sequence_length=data.sequence_length
        )

    engine = engine_class(job)(job, factory, ready_device(job), data.sequence_length or 1)
    engine.base_digest = digest
    return engine


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
