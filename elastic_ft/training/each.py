"""The body of a plain loop, that has one micro-batch, as a step of the job, that has several.

It is called for each of this rank's micro-batches. All but the last call end in ``ctx.backward``:
what comes after it (clipping, the optimizer, the scheduler) is there once for each attempt.
"""

from __future__ import annotations

import inspect
import itertools
import threading
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from elastic_ft.engines.own import OwnEngine
from elastic_ft.errors import ConfigError, UsageError
from elastic_ft.training.batch import Batch
from elastic_ft.training.held_out import HeldOut
from elastic_ft.training.loader import Loader


class NextMicroBatch(BaseException):  # no Exception: a script's own ``except`` lets it through
    """Leaves the body: its gradients are there, and the next micro-batch comes."""


class MicroTurns:
    """One attempt at a step, micro-batch by micro-batch.

    Args:
        engine: the batch's.
    """

    def __init__(self, batch: Batch, engine: OwnEngine) -> None:
        self._micros, self._left = iter(batch), len(batch)
        self._engine, self._made = engine, None
        self._is_first, self._is_told = True, True
        self._is_telling, self._thread = False, threading.get_ident()
        self.was_left = False  # the body, by NextMicroBatch

    def run(self, body: Callable[[Any], None]) -> None:
        """Calls it with each micro-batch. Raises ConfigError where a call has told no loss."""
        for micro in self._given():
            try:
                body(micro)
            except NextMicroBatch:
                self.was_left = True

    def _given(self) -> Iterator[Any]:
        while self._left:
            micro = next(self._micros)
            self._is_told, left = False, self._left
            yield micro
            if self._left == left or (left > 1 and not self.was_left):
                raise ConfigError(
                    "ctx.each: the function returned without ctx.backward(loss), or caught what "
                    "that raises: it stands where loss.backward() stood, in no bare `except:`"
                )

    @property
    def keeps_gradients(self) -> bool:
        """Whether they are of earlier micro-batches: ``zero_grad`` at a body's top leaves them."""
        return not self._is_first and not self._is_told

    @property
    def takes_losses(self) -> bool:
        """Whether ``loss.backward()`` here and now tells a micro-batch's loss."""
        return not self._is_telling and threading.get_ident() == self._thread

    def before_backward(self) -> None:
        """Raises ConfigError."""
        self._is_telling = True
        if self._is_told:
            raise ConfigError(
                "ctx.backward, or loss.backward(), came twice for a micro-batch: add the losses "
                "up; set a number of accumulations of the script's own to 1; take @ctx.step where "
                "each optimizer has a loss"
            )
        if not self._is_first:
            self._engine.check_gradients(self._made)

    def after_backward(self) -> None:
        """Raises NextMicroBatch, but for the last one."""
        self._is_told, self._is_first, self.was_left = True, False, False
        self._is_telling = False
        self._left -= 1
        if self._left:
            self._made = self._engine.gradients_seen()
            raise NextMicroBatch
        next(self._micros, None)  # padding leaves no trace in buffers that the body looks at next


def as_batch(given: Any) -> Batch:
    """Raises ConfigError for what the prepared loader has not given."""
    if isinstance(given, Batch):
        return given
    raise ConfigError(
        f"ctx.each: expected the loader that ctx.prepare has returned, or what goes over it and "
        f"gives its batches (a progress bar), found a {type(given).__name__}; for "
        "enumerate(loader) say enumerated=True: who joins in the middle of an epoch counts on there"
    )


def is_another(over: Any, trained_on: Loader) -> bool:
    """Whether it is a loader of data that is not trained on: held-out data. Beside a stream, or
    data that the script draws, that can't be told, but of what ``prepare`` was given with it."""
    if isinstance(over, HeldOut):
        return True
    if not isinstance(over, DataLoader) or trained_on.is_stream or trained_on.is_drawn:
        return False
    return over.dataset is not trained_on.dataset


def go_over(over: Iterable[Any], enumerated: bool, function: Callable[..., Any]) -> None:
    """A plain loop, in every process: no step is made of it. Raises ConfigError."""
    body = body_of(function, enumerated, may_take_none=False)
    for place, batch in enumerate(over):
        body(place, batch)


def not_counted(over: Iterable[Any]) -> Iterable[Any]:
    """``over``. Raises ConfigError for what ends by a count of its own."""
    if isinstance(over, itertools.islice):
        raise ConfigError(
            "ctx.each: islice counts from where it begins, which is elsewhere for who joins in the "
            "middle: give the loader, and say ctx.epochs(n, steps=...) for epochs of so many "
            "steps, or `steps` to init for the whole training"
        )
    return over


def body_of(
    function: Callable[..., Any], enumerated: bool, may_take_none: bool
) -> Callable[[int, Any], None]:
    """Calls it with a micro-batch, and the place of its batch before it: in one argument, or in as
    many as the micro-batch has parts. Raises ConfigError."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    taken = len([p for p in parameters if p.kind in kinds and p.default is p.empty]) - enumerated
    if taken < 0 or not (taken or may_take_none):
        raise ConfigError(
            "ctx.each: the function takes the micro-batch: def step(x, y) or (batch); with "
            "enumerated=True the batch's number before it: def step(i, batch)"
        )

    def arguments(place: int, micro: Any) -> tuple[Any, ...]:
        first = (place,) * enumerated
        if taken < 2:
            return (*first, micro)[: len(first) + taken]
        if not isinstance(micro, (tuple, list)) or len(micro) != taken:
            kind = type(micro).__name__.removeprefix("Weighed").lower()
            parts = f" of {len(micro)}" if isinstance(micro, (tuple, list)) else ""
            raise ConfigError(
                f"ctx.each: the function takes {taken} arguments, a micro-batch is a "
                f"{kind}{parts}: one argument takes it whole"
            )
        return (*first, *micro)

    return lambda place, micro: _call(function, arguments(place, micro))


def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Raises UsageError where the loop's body sets a name that is not the function's own."""
    try:
        function(*arguments)
    except UnboundLocalError as error:
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        if frame.f_code is not getattr(inspect.unwrap(function), "__code__", None):
            raise
        raise UsageError(
            f"{function.__name__}, line {line}: {error}: where the lines outside have it, too, say "
            "`nonlocal` (in a function) or `global` at the top of the loop's body"
        ) from error


class ZeroGrad:
    """In the place of ``owner.zero_grad``, of a module or an optimizer: while ``keep()`` it has no
    effect. A copy of the owner, or what is pickled of it, has its plain method."""

    def __init__(self, owner: Any, keep: Callable[[], bool]) -> None:
        self._owner, self._plain, self._keep = owner, owner.zero_grad, keep

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if not self._keep():
            self._plain(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return types.MethodType(type(self._owner).zero_grad, memo[id(self._owner)])

    def __reduce__(self) -> Any:
        return getattr, (self._owner, "zero_grad")
