"""A worker process: connects to the controller, and goes from generation to generation.

Three threads beside the training thread: one reads the controller's commands, and breaks off
collectives when told to (it is the watchdog); one beats; one copies snapshots. Generations run in
the training thread (``worker.training_thread``), which hands each step to the user's. It alone
touches groups and model, and tears them down only at its safe point, between two generations.
"""

from __future__ import annotations

import contextlib
import gc
import hmac
import json
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, cast

import psutil
import torch
import torch.distributed as dist

from elastic_ft.config import Job
from elastic_ft.core import deadlines, follower
from elastic_ft.core.events import (
    ITS_DEVICE,
    ITS_OWN,
    UNREACHABLE,
    Bench,
    CollectiveFailed,
    Holding,
    Keeper,
    Member,
    Paused,
    PauseWorkers,
    ReleaseWorker,
    Restoring,
    Resumed,
    SourceRefused,
    StopAtBoundary,
    TakeCheckpoint,
    Tier,
    Unkept,
    UseKeeper,
    WorkerRaised,
    WorkerReady,
)
from elastic_ft.core.hangs import LAST_RESORT_TIMEOUTS
from elastic_ft.core.shares import Share
from elastic_ft.core.terms import changes, data_terms
from elastic_ft.data.dataset import DataBundle, open_dataset
from elastic_ft.data.prefetch import Prefetcher
from elastic_ft.engines.base import Engine
from elastic_ft.engines.native import NativeEngine
from elastic_ft.errors import (
    DataDiffers,
    DataError,
    GroupBroken,
    StateDamaged,
    StateUnreadable,
    UsageError,
    redacted,
)
from elastic_ft.faults import Points
from elastic_ft.groups.groups import Groups
from elastic_ft.groups.store_links import StoreLinks, use_interface_of
from elastic_ft.keeper.client import DIAL_TIMEOUT_S, KeeperClient, KeeperGone
from elastic_ft.models.build import build_model
from elastic_ft.state.checkpointer import Checkpointer, owned_by
from elastic_ft.state.snapshot import Snapshots
from elastic_ft.state.tensors import LocalState
from elastic_ft.storage.store import open_store
from elastic_ft.transport.control import (
    FaultFired,
    Form,
    Heartbeat,
    Inspect,
    Note,
    Stood,
    Welcome,
    connect,
)
from elastic_ft.transport.messages import MessageRefused
from elastic_ft.transport.stacks import stack_of
from elastic_ft.transport.succession import Succession
from elastic_ft.transport.tls import JobKey
from elastic_ft.transport.wire import Channel, CutOff
from elastic_ft.worker import restore
from elastic_ft.worker.devices import (
    device_memory_bytes,
    device_of,
    is_lost,
    is_out_of_memory,
    set_up,
)
from elastic_ft.worker.loop import Flags, Formed, Loop, Step, Tools
from elastic_ft.worker.traces import user_frames
from elastic_ft.worker.training_thread import TrainingThread

log = logging.getLogger(__name__)
HEARTBEATS_PER_TIMEOUT = 8
CUT_OFF = 75  # exit code of a worker that can't reach its controller (EX_TEMPFAIL)
DEVICE_LOST = 76  # of one whose GPU is of no use to it any more
STUCK = 70  # of one whose snapshots never end (EX_SOFTWARE)
GRACE_S = 1.0  # for the news of a lost peer, when a collective's error could also be the user's
READS_PER_FORMING = 3  # a silent store is found out before forming is given up
BYTES_TOLD_PER_FORMING = 4
LOOP_SILENT_S = 30.0  # a train loop that takes longer to iterate over train() is named
RELEASE_TIMEOUT_S = 3600.0  # with nothing heard: the connection's end is the usual way out


class ControllerLost(GroupBroken):
    """The controller is gone: nobody can commit a step or form a generation any more."""


def run_worker(
    address: tuple[str, int],
    key: JobKey,
    member: Member,
    *,
    train_loop: Callable[[], Any] | None = None,
    on_generation: Callable[[Any], None] | None = None,
    on_pause: Callable[[], None] | None = None,
) -> None:
    """Takes part in a job until released or until the controller is gone. Blocks.

    Args:
        address, key: of the controller.
        member: who this is and where.
        train_loop: user code; it iterates over ``elastic_ft.train()``. None: nothing but that.
        on_generation: called in the training thread with the host's extra, before forming.
        on_pause: called from the control thread when collectives are broken off.
    """
    global _current
    worker = Worker(address, key, member, on_generation, on_pause)
    _current = worker
    try:
        if train_loop is None:
            for _ in worker.steps():
                pass
        else:
            train_loop()
            worker.check_iterated()
    except ControllerLost:
        if worker.cut_off:  # a host would keep the process, which nobody can reach to end it (I1)
            os._exit(CUT_OFF)
        return
    except GeneratorExit:
        raise
    except Exception as error:
        worker.raised(error)
        raise
    finally:
        _current = None
        worker.close()


_current: Worker | None = None


def train() -> Iterator[Step]:
    """Yields each step of the job that this worker takes part in; elasticity happens inside.

    For use in a train loop given to ``ElasticTrainer``. Raises RuntimeError elsewhere.
    """
    if _current is None:
        raise RuntimeError("elastic_ft.train() works inside a train loop run by ElasticTrainer")
    return _current.steps()


class Worker:
    def __init__(
        self,
        address: tuple[str, int],
        key: JobKey,
        member: Member,
        on_generation: Callable[[Any], None] | None,
        on_pause: Callable[[], None] | None,
    ) -> None:
        self.member, self._key = member, key
        self._on_generation, self._on_pause = on_generation, on_pause
        self._channel: Channel
        self._welcome: Welcome
        self._channel, self._welcome = connect(address, key, member)
        self.job: Job = self._welcome.job
        store_key = hmac.digest(key.secret, self._welcome.run.encode(), "sha256")
        elastic = self.job.elastic
        meet_timeout_s = deadlines.meet_s(elastic.form_timeout_s, elastic.max_workers)
        self._pause_timeout_s = deadlines.pause_s(elastic.pause_timeout_s, elastic.max_workers)
        self._links = StoreLinks(self._welcome.store, meet_timeout_s, store_key)
        self._links.prepare()
        use_interface_of(self._channel.own_address)
        self._training = TrainingThread()
        self._points = Points(member.worker, self._welcome.faults, self._fault_fired)
        self._news = threading.Condition()
        self._follower = follower.Follower()  # guarded by ``_news``
        self.cut_off = False  # it is there, perhaps, and can't be reached
        self._prepared: dict[str, float] = {}  # seconds that it took
        self._bytes_told = (0, 0)  # of which generation, how many had come
        self._tell_bytes_at_s = 0.0
        self._iterated = False  # someone has begun to iterate over ``steps``
        self._groups: Groups | None = None
        self._flags = Flags()
        self._live: tuple[Holding, LocalState] | None = None
        self._out_of_memory_at: int | None = None  # the step at which the device's last was
        self._tools: Tools | None = None
        self._loop: Loop | None = None  # once a generation is restored
        self._dialling = ThreadPoolExecutor(1, thread_name_prefix="use-keeper")
        self._dialled: Future[None] | None = None  # the newest keeper, to be used or not
        self._closed = threading.Event()
        self._succession = Succession(self._channel, self._welcome, open_store)
        self._succession.start()
        for target in (self._read, self._beat):
            threading.Thread(target=target, name=target.__name__, daemon=True).start()

    # ------------------------------------------------------------------ the controller

    def _send(self, message: Any) -> bool:
        return self._channel.send(message)

    def _read(self) -> None:
        while True:
            try:
                message = self._channel.receive()
                self._succession.heard()
            except EOFError as error:
                self.cut_off = isinstance(error, CutOff)
                if isinstance(error, MessageRefused):
                    log.error("what the controller says can't be read: %s", error)
                self._on_controller_lost()
                if self.cut_off and not self._closed.wait(self._pause_timeout_s):
                    os._exit(CUT_OFF)  # the training thread waits for what can't be reached either
                return
            if isinstance(message, PauseWorkers):
                self._on_pause_workers(message)
            elif isinstance(message, Form):
                generation = message.assignment.generation
                self._hear(follower.BeginGeneration(generation, message))
            elif isinstance(message, (Bench, ReleaseWorker)):
                self._hear(message)
            elif isinstance(message, UseKeeper):  # elsewhere: what it waits for may be stopped
                self._dialled = self._dialling.submit(self._use_keeper, message.keeper)
            elif isinstance(message, TakeCheckpoint):
                self._flags.checkpoint = True
            elif isinstance(message, StopAtBoundary):
                self._flags.stop = True
            elif isinstance(message, Inspect):
                self._tell_where(stack_of(self._training.current))

    def _hear(self, message: follower.Heard) -> None:
        with self._news:
            self._follower, actions = follower.hear(self._follower, message)
            for action in actions:
                if isinstance(action, follower.PauseAtBoundary):
                    self._flags.pause = True
                elif isinstance(action, follower.BreakOff) and self._groups is not None:
                    self._groups.abort(action.reason)
            self._news.notify_all()

    def _on_pause_workers(self, message: PauseWorkers) -> None:
        frames = stack_of(self._training.current) if message.abort else ()
        self._hear(message)
        if message.abort:
            if self._on_pause is not None:
                self._on_pause()
            self._tell_where(frames)

    def _tell_where(self, frames: tuple[str, ...]) -> None:
        step, point = self._points.step, self._points.last
        self._send(Stood(self.member.worker, "worker", step, point, frames))

    def _use_keeper(self, keeper: Keeper) -> None:
        assert self._tools is not None, "a keeper is for workers that are ready"
        try:
            self._tools.snapshots.use(KeeperClient(keeper, self._key, self.member.worker))
        except KeeperGone as error:
            self._unkept(str(error))

    def _unkept(self, why: str) -> None:
        reason = f"this worker's snapshots are its own: {why}"
        self._send(Unkept(time.time(), self.member.worker, reason))

    def _note(self, event: str, reason: str, **fields: Any) -> None:
        self._send(Note(self.member.worker, self._points.generation, event, reason, fields))

    def _on_controller_lost(self) -> None:
        self._hear(follower.LineEnded())
        if self._on_pause is not None:
            self._on_pause()

    def _beat(self) -> None:
        every_s = self.job.elastic.heartbeat_timeout_s / HEARTBEATS_PER_TIMEOUT
        told_at_s = time.monotonic() + LOOP_SILENT_S
        while not self._closed.wait(every_s):
            points = self._points
            self._send(
                Heartbeat(self.member.worker, points.step, points.place, points.count, points.last)
            )
            self._tell_bytes()
            if not self._iterated and time.monotonic() > told_at_s:
                told_at_s = math.inf
                reason = f"{LOOP_SILENT_S:g} s on, the train loop has not begun to iterate over "
                reason += "elastic_ft.train(): nothing is trained"
                self._note("loop_without_steps", reason, worker=self.member.worker)

    def _tell_bytes(self) -> None:
        """While the state comes, forming is not given up."""
        groups = self._groups
        if groups is None or self._loop is not None or time.monotonic() < self._tell_bytes_at_s:
            return
        known = (groups.generation, groups.bytes_received)
        if groups.bytes_received and known != self._bytes_told:
            self._bytes_told = known
            self._tell_bytes_at_s = (
                time.monotonic() + self.job.elastic.form_timeout_s / BYTES_TOLD_PER_FORMING
            )
            self._send(Restoring(time.time(), self.member.worker, *known))

    def check_iterated(self) -> None:
        """Raises UsageError if the train loop has ended and never asked for a step."""
        if not self._iterated and not self._is_over():
            raise UsageError(
                "the train loop ended and never iterated over elastic_ft.train(): expected "
                "`for step in elastic_ft.train()`, nothing is trained without it"
            )

    def _fault_fired(self, index: int) -> None:
        self._send(FaultFired(self.member.worker, index, self._points.step, time.time()))

    def raised(self, error: BaseException) -> None:
        """Tells the controller of an exception that user code let through."""
        if self._tools is not None and is_lost(self._tools.engine.device, error):
            self._leave_device(error)
        step, generation = self._points.step, self._points.generation
        self._send(_raised_event(self.member, generation, step, error))

    def close(self) -> None:
        self._closed.set()
        self._succession.close()
        self._training.close()
        self._dialling.shutdown(wait=False, cancel_futures=True)
        if self._tools is not None:
            self._tools.prefetcher.close()
            self._tools.snapshots.close()
            self._tools.checkpointer.close()
        self._channel.close()

    # ------------------------------------------------------------------ the job

    def steps(self) -> Iterator[Step]:
        """Yields every step this worker takes part in, until it is released."""
        self._iterated = True
        tools = self._tools = self._prepare()
        self._links.wait()  # no survivor is to wait for our DNS
        memory_bytes = device_memory_bytes(tools.engine.device, self.job.elastic.workers_per_node)
        member = replace(self.member, memory_bytes=memory_bytes)
        data = data_terms(len(tools.data.train), tools.data.fingerprint)
        started_at_s = _process_started_at_s()
        self._send(WorkerReady(time.time(), member, started_at_s, data, self._prepared))
        while (form := self._next_form()) is not None:
            error: BaseException | None = None
            try:
                yield from self._training.run(self._generation(tools, form), self._broken_for_good)
                self._await_news()
            except GeneratorExit:
                raise
            except Exception as caught:
                error = caught
            try:
                if error is not None:
                    self._explain(form.assignment.generation, error)
            finally:
                self._training.call(partial(self._retreat, tools))
            del error

    def _prepare(self) -> Tools:
        """Everything that can be done before there is a group: no survivor waits for it."""
        job = self.job
        torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
        began_s = time.monotonic()
        data = open_dataset(job.data, job.seed)
        check_data_of_run(self._welcome.data, data)
        opened_s = time.monotonic()

        def factory() -> torch.nn.Module:
            return build_model(
                job.model, vocab_size=data.vocab_size, sequence_length=data.sequence_length
            )

        device = device_of(job.parallel)
        if device.type == "cuda":
            set_up(job)
        engine = engine_class(job)(job, factory, device, data.sequence_length or 1)
        engine.prepare()
        prepared_s = time.monotonic()
        self._prepared = {
            "data_s": round(opened_s - began_s, 3),
            "model_s": round(prepared_s - opened_s, 3),
        }
        snapshots = Snapshots(
            self.member.worker, device.type == "cuda", self._unkept, self._welcome.run
        )
        self._points.corrupt = snapshots.corrupt
        checkpointer = Checkpointer(
            self.member.worker,
            self._welcome.run,
            self._welcome.checkpoint_url,
            snapshots,
            self._send,
            self._points,
            job.checkpoint.max_upload_mb_per_s,
        )
        gc.collect()
        gc.freeze()  # imports and caches: no later collection needs to look at them
        return Tools(
            job=job,
            worker=self.member.worker,
            engine=engine,
            data=data,
            prefetcher=Prefetcher(data.train),
            snapshots=snapshots,
            checkpointer=checkpointer,
            points=self._points,
            send=self._send,
        )

    def _next_form(self) -> Form | None:
        """At the safe point: answers pauses until an assignment comes. None: leave.

        Raises ControllerLost.
        """
        with self._news:
            while True:
                self._follower, actions = follower.rest(self._follower)
                for action in actions:
                    match action:
                        case follower.Leave(lost=True):
                            raise ControllerLost(follower.CONTROLLER_GONE)
                        case follower.Leave():
                            return None
                        case follower.DropAfter(step=step):
                            self._drop_after(step)
                        case follower.AnswerPause(generation=generation):
                            self._answer_pause(generation)
                        case follower.BeginGeneration(form=form):
                            self._flags = Flags(stop=self._flags.stop)
                            return cast(Form, form)
                if not self._news.wait(RELEASE_TIMEOUT_S):
                    raise ControllerLost(f"nothing heard for {RELEASE_TIMEOUT_S:g} s")

    def _drop_after(self, step: int) -> None:
        if self._tools is None:
            return
        self._tools.snapshots.drop_after(step)
        if self._live is not None and self._live[0].step > step:
            self._live = None

    def _answer_pause(self, generation: int) -> None:
        holdings = self._tools.snapshots.holdings() if self._tools else ()
        if self._live is not None:
            holdings = (self._live[0], *holdings)
        self._send(Paused(time.time(), self.member.worker, generation, holdings))

    def _await_news(self) -> None:
        """After a boundary or the last step: the controller says what comes next."""
        with self._news:
            self._news.wait_for(self._is_over, RELEASE_TIMEOUT_S)

    def _broken_for_good(self) -> str:
        """Why no collective of the generation that trains can end any more, or ""."""
        groups = self._groups
        if groups is None or self._loop is None or groups.uses_nccl:
            return ""
        return groups.aborted if self._tools and self._tools.engine.can_be_left else ""

    def _is_over(self) -> bool:
        return self._follower.is_over

    # ------------------------------------------------------------------ a generation

    def _generation(self, tools: Tools, form: Form) -> Iterator[Step]:
        """Forms, restores and trains. Raises whatever breaks it."""
        began, assignment = time.perf_counter(), form.assignment
        tools.checkpointed_step = form.checkpointed_step
        if self._on_generation is not None and form.extra is not None:
            self._on_generation(form.extra)
        if self._dialled is not None and wait([self._dialled], DIAL_TIMEOUT_S).done:
            self._dialled.result()  # the first snapshot is to outlive this process
        elastic = self.job.elastic
        meet_timeout_s = deadlines.meet_s(elastic.form_timeout_s, assignment.participants)
        backend = self.job.parallel.backend
        groups = Groups(assignment, self.member, self._links, backend, meet_timeout_s)
        with self._news:
            self._groups = groups
            if why := self._follower.why_broken_off:
                groups.abort(why)
        step = assignment.source.step
        self._points.enter(groups.generation, groups.rank, groups.world_size, step, form.fired)
        self._points("forming")
        operation_timeout_s = LAST_RESORT_TIMEOUTS * elastic.hang_timeout_s
        groups.form(tools.engine.device, operation_timeout_s, self._points)
        self._links.prepare()  # for the generation after this one
        check_same_data(groups, data_in_words(tools.data), self._live is not None)
        live = self._live[1] if self._live else {}
        began_restoring = time.perf_counter()
        restored = restore.restore(
            tools.engine,
            groups,
            tools.snapshots,
            live,
            self._points,
            self._forget_live,
            self._key,
            elastic.form_timeout_s / READS_PER_FORMING,
        )
        if groups.rank is None:
            self._send(Resumed(time.time(), self.member.worker, groups.generation, step))
            return  # a donor: its state is handed over, it waits for its release
        tools.snapshots.drop_after(step)
        self._keep_old_cut(tools, assignment)
        formed = Formed(
            groups=groups,
            owned=owned_by(groups, restored.placed),
            peer_schemas=restored.peer_schemas,
            step=step,
        )
        self._loop = Loop(tools, formed, self._flags)
        self._send(
            Resumed(
                time.time(),
                self.member.worker,
                groups.generation,
                step,
                restored.bytes_received,
                round(began_restoring - began, 6),
            )
        )
        threading.Thread(target=gc.collect, daemon=True).start()  # the last generation's modules
        yield from self._loop.steps()

    def _keep_old_cut(self, tools: Tools, assignment: Share) -> None:
        """The live shard of the last generation stays a source until the new cut is held."""
        if self._live is not None and assignment.holds:
            holding, state = self._live
            recut = holding.space != assignment.layout.shard_space
            if holding.step == assignment.source.step and recut:
                tools.snapshots.keep(holding, state)
        self._live = None

    def _forget_live(self) -> None:
        """The live state is about to be overwritten in place: it is no source any more."""
        self._live = None

    def _explain(self, generation: int, error: BaseException) -> None:
        """Tells the controller what broke this generation."""
        worker, step = self.member.worker, self._points.step
        if isinstance(error, ControllerLost):
            raise error
        if self._tools is not None and self._is_devices(generation, error):
            return
        if self._loop is None and isinstance(error, (StateDamaged, StateUnreadable)):
            self._send(_refusal(worker, generation, error))
        elif isinstance(error, StateDamaged) or self._is_collective(error):
            text = _one_line(error)
            self._send(CollectiveFailed(time.time(), worker, generation, step, text))
        else:
            self._send(_raised_event(self.member, generation, step, error))

    def _is_devices(self, generation: int, error: BaseException) -> bool:
        """Whether ``error`` is that the device's memory was out, for the first time at this step.

        Ends this process if its device is of no use any more: a GPU needs another process then.
        """
        assert self._tools is not None
        worker, step, device = self.member.worker, self._points.step, self._tools.engine.device
        if device.type != "cuda":
            return False
        if is_out_of_memory(error) and self._out_of_memory_at != step:
            self._out_of_memory_at = step
            text = f"out of device memory, once more with an empty cache: {_one_line(error)}"
            self._send(CollectiveFailed(time.time(), worker, generation, step, text))
            return True
        if is_out_of_memory(error) or is_lost(device, error):
            self._leave_device(error)
        return False

    def _leave_device(self, error: BaseException) -> NoReturn:
        """Nothing of this process's state can be read: who has copies goes on, the last word is
        that it was the device."""
        event = _raised_event(self.member, self._points.generation, self._points.step, error)
        self._send(replace(event, usage=False, whose=ITS_DEVICE))
        os._exit(DEVICE_LOST)

    def _is_collective(self, error: BaseException) -> bool:
        """Whether ``error`` comes from a broken group rather than from user code."""
        if isinstance(error, (GroupBroken, dist.DistError)):
            return True
        if not isinstance(error, RuntimeError):
            return False
        if any(mark in str(error) for mark in ("gloo", "Connection closed by peer", "NCCL")):
            return True
        with self._news:  # a plain RuntimeError: a peer's loss may explain it
            return self._news.wait_for(self._is_over, GRACE_S)

    def _retreat(self, tools: Tools) -> None:
        """To the safe point: no group of this generation is left, the state is plain tensors."""
        groups = self._groups
        if groups is None:
            return
        groups.abort(groups.aborted or "retreat")
        tools.prefetcher.cancel()
        if not tools.snapshots.quiesce(time.monotonic() + self._pause_timeout_s / 2):
            self._note("snapshot_stuck", "a snapshot has not ended since a generation: this ends")
            os._exit(STUCK)
        engine, loop = tools.engine, self._loop
        intact, in_use = engine.intact, self._training.left_behind
        if in_use is not None:
            self._note("thread_left", f"a collective of it never ends: {groups.aborted}")
        state = engine.detach(in_use) if groups.rank is not None else {}
        if loop is not None and groups.rank is not None:
            if intact:
                holding = groups.assignment.holding_of(groups.rank, loop.step, Tier.LIVE)
                self._live = (holding, state)
            else:
                self._live = None
        self._loop = None
        del loop
        with self._news:
            self._groups = None
        groups.teardown(in_use)
        if engine.device.type == "cuda":  # NCCL's buffers come from what is left
            torch.cuda.empty_cache()


def _process_started_at_s() -> float:
    """Unix time."""
    return round(psutil.Process().create_time(), 3)


def engine_class(job: Job) -> Callable[..., Engine]:
    if job.parallel.engine == "native":
        return NativeEngine
    from elastic_ft.engines.deepspeed import DeepSpeedEngine  # imports for seconds

    return DeepSpeedEngine


def check_data_of_run(run: dict[str, Any], data: DataBundle) -> None:
    """Raises DataError if this worker reads other data than the run has so far (I2)."""
    if other := changes(run, data_terms(len(data.train), data.fingerprint)):
        found = "; ".join(map(str, other))
        raise DataError(f"{found}: going on would repeat samples and skip others")


def data_in_words(data: DataBundle) -> str:
    """What tells it from other data. A user's own dataset has no fingerprint: then its size does,
    on which the whole order depends."""
    fingerprint = f", fingerprint {data.fingerprint}" if data.fingerprint else ""
    return f"{len(data.train)} samples{fingerprint}"


def check_same_data(groups: Groups, read: str, has_trained: bool) -> None:
    """Raises where workers read different data, which no ledger would show (I2).

    What those read who have trained counts, else what most do: DataDiffers where this worker is
    at fault, GroupBroken where others are; DataError where nobody can say who is.
    """
    own = {"read": read, "has_trained": has_trained}
    told = [json.loads(raw) for raw in groups.exchange("data", json.dumps(own).encode())]
    prints = [one["read"] for one in told]
    if len(set(prints)) == 1:
        return
    votes = [one["read"] for one in told if one["has_trained"]] or prints
    ((usual, count),) = Counter(votes).most_common(1)
    if 2 * count <= len(votes):
        raise DataError(f"workers read different data: {'; '.join(sorted(set(prints)))}")
    if own["read"] != usual:
        raise DataDiffers(f"this worker reads other data than the others: {read}; theirs: {usual}")
    odd = [p.worker for p, other in zip(groups.peers, prints, strict=True) if other != usual]
    raise GroupBroken(f"{', '.join(odd)} read other data than the others")


def _refusal(worker: str, generation: int, error: StateDamaged | StateUnreadable) -> SourceRefused:
    """Of the source that this generation was to be restored from."""
    now_s, reason = time.time(), str(error)
    if isinstance(error, StateDamaged):
        return SourceRefused(now_s, worker, generation, error.holder, reason, error.shard)
    return SourceRefused(
        now_s,
        worker,
        generation,
        error.holder,
        reason,
        kind=UNREACHABLE,
        unread_by=error.unread_by,
    )


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {redacted(' '.join(str(error).split()))[:200]}"


def _raised_event(member: Member, generation: int, step: int, error: BaseException) -> WorkerRaised:
    usage = isinstance(error, UsageError)
    said = redacted(" ".join(str(error).split()))[:500]
    said = said.encode(errors="backslashreplace").decode()  # a file's name may be no text
    return WorkerRaised(
        time.time(),
        member.worker,
        generation,
        step,
        f"{type(error).__name__}: {said}",
        usage,
        frames=() if usage else user_frames(error),
        node=member.node,
        whose=ITS_OWN if isinstance(error, DataDiffers) else "",
    )


def member_here(worker: str, node: str, host: str, raylet_pid: int | None = None) -> Member:
    return Member(worker, node, host, os.getpid(), raylet_pid)


with contextlib.suppress(RuntimeError):
    torch.set_num_interop_threads(1)
