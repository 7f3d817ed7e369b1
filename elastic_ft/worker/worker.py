"""A worker process: connects to the controller, and goes from generation to generation."""

from __future__ import annotations

import contextlib
import gc
import hmac
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any, cast

import psutil
import torch

from elastic_ft.config import Job
from elastic_ft.core import deadlines
from elastic_ft.core.assignment import Holding, Member, Tier
from elastic_ft.core.events import Paused, Resumed, Unkept, WorkerReady
from elastic_ft.core.follower import AnswerPause, BeginGeneration, DropAfter, Leave
from elastic_ft.core.hangs import LAST_RESORT_TIMEOUTS
from elastic_ft.core.shares import Share
from elastic_ft.core.terms import data_terms
from elastic_ft.engines.base import Engine
from elastic_ft.errors import UsageError
from elastic_ft.faults import Points
from elastic_ft.groups.groups import Groups
from elastic_ft.groups.store_links import StoreLinks, use_interface_of
from elastic_ft.keeper.keeper_client import KeeperClient
from elastic_ft.state.checkpointer import owned_by
from elastic_ft.state.tensors import LocalState
from elastic_ft.transport.control import FaultFired, Form, Welcome
from elastic_ft.transport.lifeline import Lifeline
from elastic_ft.transport.tls import JobKey
from elastic_ft.worker import birth, restore
from elastic_ft.worker.by_engine import ByEngine
from elastic_ft.worker.by_user import ByUser
from elastic_ft.worker.device_events import watch_device
from elastic_ft.worker.devices import device_memory_bytes, set_nccls_defaults
from elastic_ft.worker.line import ControllerLine, ControllerLost, Hooks
from elastic_ft.worker.loop import Loop, Maker
from elastic_ft.worker.own_keeper import OwnKeeper
from elastic_ft.worker.parting import Parting
from elastic_ft.worker.prepare import prepare
from elastic_ft.worker.same_data import check_same_data, data_in_words
from elastic_ft.worker.steering import Steering
from elastic_ft.worker.step import Step
from elastic_ft.worker.tools import Formed, Tools
from elastic_ft.worker.traces import forget_frames
from elastic_ft.worker.training_thread import TrainingThread
from elastic_ft.worker.trouble import Trouble

Steps = Generator[Step, None, None]
STUCK = 70  # exit code of a worker whose snapshots never end (EX_SOFTWARE)


class Worker:
    """One rank's process, from its start to its release: ``steps`` (or ``run``) is its life.

    Five threads and who writes what:
        the caller's, which iterates over ``steps``: answers pauses, tells what broke. It writes
            ``_tools``; at the safe point ``_live``.
        training (``worker.training_thread``), which runs only while the caller's waits for it:
            groups, model, optimizer, ``_loop``, ``_live``. It tears down what it formed only at
            the safe point, between two generations. It may be left behind, and another made.
        read, beat (``worker.line``): what the controller wants, and the news that this lives.
            ``read`` breaks off collectives: it shares ``_groups`` with training, under a lock.
        use-keeper: dials a node's keeper, and gives it to the snapshots.
    Snapshots, uploads and prefetching have threads of their own.

    Attributes:
        member: who this is, and where.
        job: as the controller sent it.
        cut_off: the controller is there, perhaps, and can't be reached.
    """

    def __init__(
        self,
        address: tuple[str, int],
        key: JobKey,
        member: Member,
        on_generation: Callable[[Any], None] | None,
    ) -> None:
        self.member, self._key, self._on_generation = member, key, on_generation
        birth.passed("imports_s")
        lifeline = Lifeline(address, key, member)
        self._welcome = lifeline.welcome
        birth.passed("connect_s")
        self.job: Job = self._welcome.job
        elastic = self.job.elastic
        self._pause_timeout_s = deadlines.pause_s(elastic.pause_timeout_s, elastic.max_workers)
        lifeline.cut_off_s = self._pause_timeout_s
        use_interface_of(lifeline.own_address)  # before any thread: it sets what they read
        set_nccls_defaults()
        self._follow(self._welcome)
        self._training = TrainingThread()
        self._points = Points(member.worker, self._welcome.faults, self._fault_fired)
        hooks = Hooks(
            lambda: self._training.current,
            lambda message: self._keeper.use(message),
            self._follow,
            lambda: self._parting.look(self.own, self._loop),
        )
        self._line = ControllerLine(lifeline, member, self._points, hooks, self._pause_timeout_s)
        self._trouble = Trouble(member, self._points, self._line.send, self._line.await_over)
        self._groups: Groups | None = None
        self._live: tuple[Holding, LocalState] | None = None
        self._tools: Tools | None = None
        self._loop: Loop | None = None  # once a generation is restored
        self.own: Steering | None = None  # of a loop of the user's; set before ``next_item``
        self._items: Iterator[Any] | None = None
        self._parting = Parting(lambda: self._training.current, self._line.break_off)
        self._keeper = OwnKeeper(key, member.worker, self._use_keeper, self._unkept)
        self._line.start()

    def _follow(self, welcome: Welcome) -> None:
        """A controller has the job, with a store of its own through which groups form."""
        elastic = self.job.elastic
        meet_timeout_s = deadlines.meet_s(elastic.form_timeout_s, elastic.max_workers)
        store_key = hmac.digest(self._key.secret, welcome.run.encode(), "sha256")
        self._links = StoreLinks(welcome.store, meet_timeout_s, store_key)
        self._links.prepare()

    # --------------------------------------------------------------------- its life

    def steps(self, is_seen: Callable[[Step], bool] | None = None) -> Iterator[Step]:
        """Yields every step this worker takes part in, until it is released; of those, all or
        those that are to be seen: for the others no thread is woken.

        Raises ControllerLost, and UsageError of what can't be prepared.
        """
        if is_seen is None:
            yield from self._live_through(lambda steps: steps)
        else:
            yield from self._live_through(lambda steps: (s for s in steps if is_seen(s)))

    def run(self) -> None:
        """The same, where nobody looks at the steps: no thread is woken for each of them."""
        for _ in self._live_through(_unseen):
            pass

    def next_item(self) -> Any:
        """Of ``worker.steering``, for a loop of the user's; None once this worker is released.

        Raises ControllerLost, and UsageError of what can't be prepared.
        """
        if self._items is None:
            self._items = self.steps()
        return next(self._items, None)

    def finish(self) -> None:
        """The user's loop is over: what is left to do, up to the release."""
        if self.own is not None and self._items is not None:
            self.own.ending = True
            for _ in self._items:
                pass

    def _live_through(self, shown: Callable[[Steps], Steps]) -> Iterator[Step]:
        self._line.iterated = True
        tools = self._prepare()
        while (form := self._next_form()) is not None:
            error: BaseException | None = None
            try:
                generation = shown(self._generation(tools, form))
                yield from self._training.run(generation, self._broken_for_good)
                self._line.await_over()
            except GeneratorExit:
                raise
            except Exception as caught:
                error = caught
            try:
                if isinstance(error, ControllerLost):
                    raise error
                if error is not None:
                    number, restored = form.assignment.generation, self._loop is not None
                    self._trouble.explain(number, error, restored=restored)
            finally:
                forget_frames(error)  # what forms next may need the memory
                self._training.call(partial(self._retreat, tools))
            del error

    def _prepare(self) -> Tools:
        """Everything that can be done before there is a group. Then it can join."""
        name, send = self.member.worker, self._line.send
        tools, spent = prepare(name, self._welcome, self._points, send, self._unkept, self.own)
        device = self._trouble.device = tools.engine.device
        if device.type == "cuda":
            watch_device(device, self._trouble.device_failed)
        self._tools = tools
        self._links.wait()  # no survivor is to wait for our DNS
        memory_bytes = device_memory_bytes(device, self.job.elastic.workers_per_node)
        member = replace(self.member, memory_bytes=memory_bytes)
        samples, fingerprint = len(tools.data.train), tools.data.fingerprint
        data = data_terms(samples, fingerprint, tools.pretrained, tools.pretrained_config)
        started_at_s = round(psutil.Process().create_time(), 3)
        spent = birth.spent() | spent
        experts = tools.engine.experts
        send(WorkerReady(time.time(), member, started_at_s, data, spent, experts))
        return tools

    def _next_form(self) -> Form | None:
        """At the safe point: answers pauses until an assignment comes. None: leave.

        Raises ControllerLost.
        """
        while True:
            for action in self._line.rest():
                match action:
                    case DropAfter(step=step):
                        self._drop_after(step)
                    case AnswerPause(generation=generation):
                        self._answer_pause(generation)
                    case BeginGeneration(form=form):
                        return cast(Form, form)
                    case Leave():
                        return None

    def _generation(self, tools: Tools, form: Form) -> Steps:
        """Forms, restores and trains. Raises whatever breaks it."""
        began, assignment, points = time.perf_counter(), form.assignment, self._points
        tools.checkpointed_step = form.checkpointed_step
        if self._on_generation is not None and form.extra is not None:
            self._on_generation(form.extra)
        self._keeper.wait()
        groups = self._enter(assignment)
        step = assignment.source.step
        points.enter(groups.generation, groups.rank, groups.world_size, step, form.fired)
        points("forming")
        groups.form(
            tools.engine.device, LAST_RESORT_TIMEOUTS * self.job.elastic.hang_timeout_s, points
        )
        self._links.prepare()  # for the generation after this one
        has_trained = self._live is not None or bool(tools.snapshots.holdings())
        check_same_data(groups, data_in_words(tools.data, tools.pretrained), has_trained)
        began_restoring = time.perf_counter()
        restored = self._restore(tools, groups)
        resumed = Resumed(time.time(), self.member.worker, groups.generation, step)
        if groups.rank is None:
            self._line.send(resumed)
            return  # a donor: its state is handed over, it waits for its release
        if restored.residual_lost and groups.rank == 0:
            reason = f"what gradients owed is lost with replicas: {restored.residual_lost}"
            self._line.note("residual_lost", reason, step=step)
        if (
            restored.frozen is not None
            and restored.frozen.any
            and (groups.rank == 0 or not has_trained)
        ):
            fields = asdict(restored.frozen) | {"worker": self.member.worker, "step": step}
            self._line.note("frozen_placed", restored.frozen.in_words(), **fields)
        tools.snapshots.drop_after(step)
        self._keep_old_cut(tools, assignment)
        formed = Formed(
            groups=groups,
            owned=owned_by(groups, restored.placed),
            peer_schemas=restored.peer_schemas,
            step=step,
        )
        self._loop = Loop(tools, formed, self._line.flags, self._maker(tools))
        self._line.restoring = False
        forming_s = round(began_restoring - began, 6)
        received = restored.bytes_received
        self._line.send(
            replace(resumed, at_s=time.time(), bytes_received=received, forming_s=forming_s)
        )
        threading.Thread(target=gc.collect, daemon=True).start()  # the last generation's modules
        yield from self._loop.steps()

    def _maker(self, tools: Tools) -> Maker:
        """Of this job's steps."""
        if self.own is not None:
            return ByUser(self.own)
        return ByEngine(self.job, cast(Engine, tools.engine))

    def _retreat(self, tools: Tools) -> None:
        """To the safe point: no group of this generation is left, the state is plain tensors."""
        groups = self._groups
        if groups is None:
            return
        groups.abort(groups.aborted or "retreat")
        tools.prefetcher.cancel()
        if not tools.snapshots.quiesce(time.monotonic() + self._pause_timeout_s / 2):
            why = "a snapshot has not ended since a generation: this ends"
            self._line.note("snapshot_stuck", why, worker=self.member.worker)
            os._exit(STUCK)
        engine, loop = tools.engine, self._loop
        intact, in_use = engine.intact, self._training.left_behind
        if in_use is not None:
            why = f"a collective of it never ends: {groups.aborted}"
            self._line.note("thread_left", why, worker=self.member.worker)
        state = engine.detach(in_use) if groups.rank is not None else {}
        if loop is not None and groups.rank is not None:
            if intact:
                holding = groups.assignment.holding_of(groups.rank, loop.step, Tier.LIVE)
                self._live = (holding, state)
            else:
                self._live = None
        self._loop = None
        del loop
        self._line.leave()
        self._groups = None
        groups.teardown(in_use)
        if engine.device.type == "cuda":  # NCCL's buffers come from what is left
            torch.cuda.empty_cache()

    def close(self) -> None:
        self._line.stop()
        self._training.close()
        self._keeper.close()
        if self._tools is not None:
            self._tools.prefetcher.close()
            self._tools.snapshots.close()
            self._tools.checkpointer.close()
        self._line.close()

    # ----------------------------------------------------------------- a generation

    def _enter(self, assignment: Share) -> Groups:
        form_timeout_s = self.job.elastic.form_timeout_s
        meet_timeout_s = deadlines.meet_s(form_timeout_s, assignment.participants)
        backend = self.job.parallel.backend
        self._groups = Groups(assignment, self.member, self._links, backend, meet_timeout_s)
        self._line.enter(self._groups)
        return self._groups

    def _restore(self, tools: Tools, groups: Groups) -> restore.Restored:
        engine, snapshots = tools.engine, tools.snapshots
        restore.make_room(engine, groups, snapshots, lambda: self._live, self._forget_live)
        return restore.restore(
            tools.engine,
            groups,
            tools.snapshots,
            self._live[1] if self._live else {},
            self._points,
            self._forget_live,
            self._key,
            self.job.elastic.form_timeout_s / deadlines.READS_PER_FORMING,
            self.job.comm.compress_replicas is not None,
        )

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

    def _broken_for_good(self) -> str:
        """Why no collective of the generation that trains can end any more, or ""."""
        groups = self._groups
        if groups is None or self._loop is None or groups.uses_nccl:
            return ""
        return groups.aborted if self._tools and self._tools.engine.can_be_left else ""

    # ------------------------------------------------------------- at the safe point

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
        self._line.send(Paused(time.time(), self.member.worker, generation, holdings))

    # ------------------------------------------------------------ its host and its keeper

    @property
    def cut_off(self) -> bool:
        return self._line.cut_off

    @property
    def step(self) -> int:
        return self._points.step

    def check_iterated(self) -> None:
        """Raises UsageError if the train loop has ended and never asked for a step."""
        if not self._line.iterated and not self._line.is_over:
            if self.job.loop is not None:
                raise UsageError(
                    "the script ended and never asked a loader of ctx.prepare for a batch: "
                    "nothing is trained without it"
                )
            raise UsageError(
                "the train loop ended and never iterated over elastic_ft.train(): expected "
                "`for step in elastic_ft.train()`, nothing is trained without it"
            )

    def raised(self, error: BaseException) -> None:
        """Tells the controller of an exception that user code let through."""
        self._trouble.user_raised(error, self.own is not None)

    def _use_keeper(self, keeper: KeeperClient) -> None:
        assert self._tools is not None, "a keeper is for workers that are ready"
        self._tools.snapshots.use(keeper)
        self._line.flags.snapshot = True  # until it has one, it keeps nothing of this worker's

    def _unkept(self, why: str) -> None:
        reason = f"no keeper has its snapshots, which would be lost with it: {why}"
        self._line.send(Unkept(time.time(), self.member.worker, reason))

    def _fault_fired(self, index: int) -> None:
        self._line.send(FaultFired(self.member.worker, index, self._points.step, time.time()))


def _unseen(steps: Steps) -> Steps:
    for _ in steps:
        pass
    yield from ()


with contextlib.suppress(RuntimeError):
    torch.set_num_interop_threads(1)
