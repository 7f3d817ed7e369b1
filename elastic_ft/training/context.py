"""``elastic_ft.init()``: a training loop of one's own that survives what a job survives."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from elastic_ft.engines.modules import seed_all_for
from elastic_ft.errors import ConfigError, UsageError
from elastic_ft.training.agrees import check_agrees
from elastic_ft.training.batch import Batch, StepAttempt
from elastic_ft.training.before import BeforeSteps
from elastic_ft.training.each import MicroTurns, as_batch, body_of, go_over, is_another, not_counted
from elastic_ft.training.epochs import EpochSpan, begin_loop, check_through, last_step, span_of
from elastic_ft.training.forgotten import Forgotten
from elastic_ft.training.found import watch
from elastic_ft.training.given import logged_of
from elastic_ft.training.here import as_here, plainly
from elastic_ft.training.loader import Loader, drawn_bundle
from elastic_ft.training.within import Interrupts, broken_off, check_outside, without_exit
from elastic_ft.worker.party import Party
from elastic_ft.worker.prepare import ready_device
from elastic_ft.worker.steering import Dealt, Ended, MakeHere, Steering
from elastic_ft.worker.step import Step
from elastic_ft.worker.this_process import current_worker
from elastic_ft.worker.user_script import Released
from elastic_ft.worker.worker import Worker

LAUNCHED = ("name", "elastic")  # whoever launches the script may say otherwise
_context: Context | None = None


def init(job: Any = None, **sections: Any) -> Context:
    """Returns this process's part in the job.

    Started as any script, it is a world of one, with its run folder in runs/.
    Under ``elastic-ft launch``, ``elastic-ft run`` with ``loop.script``, and ElasticTrainer the job
    is theirs, and what is given here must agree with it. The generators of torch, numpy and
    ``random`` are seeded by the job's ``seed``: what a script draws next is the same everywhere.

    Args:
        job: a job file, or a mapping like one.
        sections: of a job file, by their names.
    """
    global _context
    worker = current_worker()
    if _context is not None and worker in (None, _context.worker):
        raise ConfigError("elastic_ft.init: was called before in this process; pass its context on")
    if worker is None:
        from elastic_ft.training.alone import Alone, job_alone

        alone = Alone(job_alone(job, sections))
        _context = Context(alone.worker, alone.failed)
    elif worker.job.loop is None:
        why = "this job has a model and data of its own; say `loop` instead of them"
        raise ConfigError(f"elastic_ft.init: {why}")
    else:
        check_agrees(worker.job, {k: v for k, v in sections.items() if k not in LAUNCHED})
        _context = Context(worker)
    seed_all_for(_context.job.seed, 0, 0)
    watch(current)
    return _context


def current() -> Context | None:
    """What ``init`` has returned in this process."""
    return _context


class Context(BeforeSteps):
    """What a loop of one's own needs of the job.

    Attributes:
        job: as it was resolved.
        device: that models and micro-batches are on.
        rank, world_size, generation: of the world that makes the next step.
        latest: the step made last: its number, loss, gradient norm and so on.
    """

    def __init__(
        self, worker: Worker, released: Callable[[], BaseException] = lambda: Released(0)
    ) -> None:
        self.worker, self.job, self._released = worker, worker.job, released
        self.device = ready_device(self.job)
        self._own: Steering | None = None
        self._dealt: Dealt | None = None  # and not made yet
        self._callbacks: list[Callable[[Context], None]] = []
        self._party: Party | None = None  # that runs an errand
        self._place, self.generation = (0, 1) if worker.job.elastic.max_workers == 1 else None, 0
        self.latest: Step | None = None
        self.has_begun = self._ended = False
        self._inside = False  # whether the step's function runs
        self._is_ahead = False  # the training thread, of the script's: see ``_goes_on``
        self._turn: MicroTurns | None = None  # where a function of ``each`` runs
        self._loader: Loader | None = None
        self._span: EpochSpan | None = None  # where the loader is to end, if not with the job
        # The running epoch's last step; batches outside epochs; generation that callbacks heard of.
        self._until, self._given, self._told = 0, 0, 0
        self._interrupts, self._forgotten = Interrupts(), Forgotten()

    # ------------------------------------------------------------------------------ before

    def epochs(self, *span: int, steps: int | None = None) -> Iterator[int]:
        """In the place of ``range``, with its arguments, around a loop over the loader: that gives
        an epoch's batches then, ``steps`` of them, or else ``len(loader)``.

        What is yielded first is the epoch in which the job is, and the loader gives its rest: for
        who joins, and after a restart. A second call gives the epochs behind those of the first.
        """
        own = self._steering("epochs")
        self._span = span_of(self._trained_on, own.passed, range(*span), steps)
        own.span, own.span_last, own.left = str(self._span), self._span.last, ""
        try:
            while self._is_dealt():
                dealt = self._awaited()
                if dealt.running.number > self._span.last:
                    own.passed, own.left = self._span.last, own.span
                    return
                epoch = self._span.epoch_of(dealt.running.number)
                self._until = self._span.last_of(dealt.running.number)
                yield epoch
                if self._dealt is dealt:
                    raise ConfigError(f"ctx.epochs: nothing asked the loader for epoch {epoch}")
                self._check_through()
        finally:
            self._span, own.span, own.span_last = None, "", 0

    def _check_through(self) -> None:
        is_behind = self._span is not None and (self.awaited_step or 0) > self._until
        if self._ended or is_behind:  # others may have made the last of its steps
            return
        if self.latest is not None and not self.latest.last:
            check_through(self._span, self.latest.number, self._until)

    # ------------------------------------------------------------------------------ a step

    def step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorates the function that makes a step of a batch, its first argument.

        It is called again, with the batch dealt anew, where the world breaks under it. What the
        call returns, and all that comes after it, is there once for each step. A function that
        returns nothing has the call return the ``Step``, which is also ``ctx.latest``.
        """

        @functools.wraps(function)
        def made(*args: Any, **kwargs: Any) -> Any:
            own = self._steering("step")
            self._forgotten.begin(function, own.kept)
            at = next((i for i, arg in enumerate(args[:2]) if isinstance(arg, Batch)), None)
            if at is None or args[at].number != self.awaited_step:
                raise ConfigError(
                    "@ctx.step: expected the batch that the loader has just given, as the first "
                    "argument (after self), once"
                )
            before, after = args[:at], args[at + 1 :]
            while True:
                again = Batch(own.engine, self._awaited())
                call = functools.partial(as_here(function), *before, again, *after, **kwargs)
                own.body = functools.partial(self._within, call)
                item = self._next()
                if isinstance(item, Step):
                    return item if own.result is None else own.result
                if self._is_ahead:  # of a later step, or the end: this one is made
                    self._is_ahead = False
                    return self._check_ended(item)

        return made

    def each(
        self, over: Iterable[Any] | None = None, *, whole: bool = False, enumerated: bool = False
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """In the place of ``for x, y in loader:``, whose body becomes a function of ``x, y``:

            @ctx.each(loader)
            def train_step(x, y): ...  # ctx.backward(loss) for loss.backward()

        Runs the loop where it stands, to the end of the epoch or of the training. For each step the
        function is called with each micro-batch of this rank: all calls but the last end in
        ``ctx.backward``, so that what comes after it is there once for each attempt at the step.
        ``zero_grad`` may stand anywhere. Raises ConfigError.

        over: the loader, or what goes over it batch by batch (a progress bar). A loader of other
            data is gone over as by ``for``, in every process: no step is made of it.
        whole: the function gets the batch, as with ``step``.
        enumerated: as ``enumerate(loader)``: the batch's number comes first, from 0 in each epoch.
        """
        own, prepared = self._steering("each"), self._trained_on
        given = prepared if over is None else not_counted(over)

        def run(function: Callable[..., Any]) -> Callable[..., Any]:
            if is_another(over, prepared):
                go_over(over, enumerated, function)
                return function
            make = self._maker(
                body_of(function, enumerated, prepared.is_drawn and not whole), whole
            )
            self._forgotten.begin(function, own.kept)
            made, self._is_ahead = self.step(make), False
            if given is prepared:  # no line of the script's lies between two steps
                own.goes_on = functools.partial(self._goes_on, as_here(make))
            try:
                for batch in given:
                    made(as_batch(batch))
            finally:
                own.goes_on, self._is_ahead = None, False
            if given is not prepared:
                self._check_through()
            return function

        return run

    def _maker(self, body: Callable[[int, Any], None], whole: bool) -> Callable[[Batch], None]:
        """What makes a step of ``each``. ``body`` takes the batch's number and, but for ``whole``,
        each of its micro-batches."""
        own = self._steering("each")

        def make(batch: Batch) -> None:
            place = self._span.place(batch.number) if self._span else batch.number - 1
            if whole:
                body(place, batch)
                return
            self._turn = MicroTurns(batch, own.engine)
            self._turn.run(functools.partial(body, place))

        return make

    def _goes_on(self, make: Callable[[Batch], None], item: Dealt | Step) -> bool:
        """In the training thread: whether the script's, to which ``item`` would go, needs not wake,
        as all that it would do is to ask for the next batch, and to have ``make`` make its step."""
        if self._interrupts.has_come:
            return False
        own = self._steering("each")
        if isinstance(item, Step):
            ends = item.last or (self._span is not None and item.number >= self._until)
            self._is_ahead = not ends and not self._forgotten.looks_after(item.number)
            if self._is_ahead:
                self._dealt, self.latest = None, item
                own.at.ask()
            return self._is_ahead
        if not self._is_ahead or item.generation != self._told:
            return False
        self._dealt = item
        self._given += self._span is None
        own.body = functools.partial(self._within, functools.partial(make, Batch(own.engine, item)))
        return True

    @property
    def running_step(self) -> bool:
        """Whether the step's function runs."""
        return self._inside

    @property
    def takes_losses(self) -> bool:
        """Whether ``loss.backward()`` is ``ctx.backward(loss)``: in the function of ``each``."""
        return self._inside and self._turn is not None and self._turn.takes_losses

    def _within(self, call: Callable[[], Any]) -> Any:
        self._inside, self._turn = True, None
        try:
            return without_exit(call)
        finally:
            self._inside = False

    @contextlib.contextmanager
    def attempt(self) -> Iterator[StepAttempt]:
        """One attempt at the step that the loader has given, for notebooks and adapters:

            for batch in loader:
                with ctx.attempt() as attempt:
                    for micro in attempt.batch: ...
                if attempt.step is None:
                    continue  # the world broke: the loader gives the same step again

        What is in the block is left where the world breaks, without an exception.
        """
        own = self._steering("attempt")
        if self._dealt is None or self._inside:
            raise ConfigError("ctx.attempt: comes inside `for batch in loader`, once for each")
        begun = None
        while not isinstance(begun, MakeHere):  # the world may break on the way there
            own.attempting = True
            begun = self._next()
        attempt = StepAttempt(Batch(own.engine, self._awaited()))
        self._inside, self._turn = True, None
        try:
            self._interrupts.deliver()
            yield attempt
        except BaseException as error:
            own.raised = broken_off(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._inside = False
        item = self._next()
        if isinstance(item, Step):
            attempt.step = item
        else:
            own.at.step = 0  # the block is left: it asks for the step again

    def backward(
        self,
        loss: torch.Tensor,
        count: torch.Tensor | int | None = None,
        metrics: Mapping[str, Any] | None = None,
        *,
        scaler: torch.amp.GradScaler | None = None,
        of: int | None = None,
    ) -> None:
        """``loss`` is the sum over ``count`` terms; gradients are means over all terms of the
        global batch. Without ``count`` it is a mean, and each micro-batch's weighs the same.

        Args:
            metrics: others, by name, as (sum, count): of all micro-batches of all ranks they make
                means in ``Step.metrics`` and in the step's line. The same names in each.
            scaler: scales it for half precision; register it. ``scaler.unscale_`` comes before
                ``clip_grad_norm_``, ``scaler.step(optimizer)`` and ``scaler.update()`` after.
            of: the terms of the global batch, if ``loss`` was divided by them already: the step's
            losses add up to the mean. In all of a step's calls, or in none.
        """
        engine, turn = self._steering("backward").engine, self._turn
        if turn is not None:
            turn.before_backward()
        engine.backward(loss, count, metrics, scaler, of)
        if turn is not None:
            turn.after_backward()

    def clip_grad_norm_(self, *norm: Any, **named: Any) -> float:
        """``(max_norm)`` clips the gradient of the global batch by its norm, which is returned;
        ``(parameters, max_norm)`` that of these alone, as torch's function and Accelerate's."""
        engine = self._steering("clip_grad_norm_").engine
        if len(norm) + len(named) == 1:
            return engine.clip_grad_norm_(*norm, **named)
        return engine.clip_these(*norm, **named)

    def log(self, *results: Any, **values: Any) -> None:
        """Values for the line of the step made last, which is written when it is committed."""
        self._steering("log").logged |= logged_of(results, values)

    def on_generation(self, callback: Callable[[Context], None]) -> None:
        """``callback(ctx)`` is called in the loop's thread before a new world's first batch."""
        self._callbacks.append(callback)

    # ------------------------------------------------------------------------------ inside

    def _steering(self, what: str) -> Steering:
        if self._own is None:
            raise ConfigError(f"ctx.{what}: comes after ctx.prepare")
        return self._own

    @property
    def _trained_on(self) -> Loader:
        return Loader(self, drawn_bundle()) if self._loader is None else self._loader

    @property
    def awaited_step(self) -> int | None:
        """The number of the step that was dealt and is not made yet."""
        return None if self._dealt is None else self._dealt.running.number

    def _awaited(self) -> Dealt:
        assert self._dealt is not None
        return self._dealt

    def _next(self) -> Any:
        """Lets the job go on until it wants something of this loop. Raises Released."""
        check_outside(self._inside)
        if not self.has_begun:
            self._begin()
        with self._interrupts, plainly():
            item = self.worker.next_item()
        self._inside = False  # who was left behind in a step's function does not say so
        if item is None:
            raise self._released()
        if isinstance(item, Step):
            self._dealt, self.latest, self._is_ahead = None, item, False
            self._forgotten.look(item.number, self._steering("step"))
        elif isinstance(item, Ended):
            self._ended = True
        elif isinstance(item, Dealt):
            self._dealt = item
            self._place, self.generation = (item.rank, item.world_size), item.generation
            if item.generation != self._told:
                self._told = item.generation
                for callback in self._callbacks:
                    callback(self)
        if not isinstance(item, MakeHere):  # the attempt does then
            self._interrupts.deliver()
        return item

    def _is_dealt(self) -> bool:
        """Waits for the next batch; whether there is one."""
        check_outside(self._inside)
        self._steering("prepare").at.ask()
        while self._dealt is None and not self._ended:
            self._check_ended(self._next())
        return self._dealt is not None

    def _check_ended(self, item: Any) -> None:
        """Raises Released where that says that the training was ended before its last step."""
        if isinstance(item, Ended) and item.why:
            raise self._released()

    def batches(self) -> Iterator[Batch]:
        """What a prepared loader gives."""
        if self._ended:
            raise UsageError(
                "the loader has ended: it is the whole training, not one epoch; write "
                "`for epoch in ctx.epochs(n)` where that is wanted, for `range(n)`"
            )
        self._given = begin_loop(self._given, self._span, self.job.elastic.max_workers)
        while self._is_dealt():
            given = Batch(self._steering("prepare").engine, self._awaited())
            self._until = last_step(self._span, self._until, given.number, self.latest)
            if self._span is not None and given.number > self._until:
                return  # the epoch has ended without this process
            if self._span is None:
                self._given, self._steering("prepare").left = self._given + 1, ""
            yield given
            if self._dealt is given.dealt:
                raise ConfigError(
                    f"the batch of step {given.number} was not used: give it to the function "
                    "that @ctx.step decorates, or leave the loop"
                )
            made = max(given.number, self.latest.number if self.latest else 0)
            is_last = self._span is not None and made >= self._until
            if is_last and (self._dealt is None or self._dealt.running.number > self._until):
                return  # else the epoch's last step is made again
