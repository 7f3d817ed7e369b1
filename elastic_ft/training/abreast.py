"""The body of a plain loop that has several losses, as a step of the job.

A GAN's, say: two losses of its critic, the critic's optimizer, the generator's loss, its optimizer.
Each optimizer wants the losses of all micro-batches. So these go through the body side by side,
from loss to loss: the first one's call is the one that goes on, in the thread that makes the step;
each other's is in a thread of its own, which runs only while the first one's waits in ``backward``.
What comes between two losses is there for each: its optimizers, schedulers, ``zero_grad`` and
clipping are the first one's alone, and nothing else may change what the job keeps.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import threading
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from elastic_ft.engines.own import OwnEngine
from elastic_ft.errors import ConfigError
from elastic_ft.training.batch import Batch, weighed
from elastic_ft.training.each import NO_LOSS, NextMicroBatch
from elastic_ft.training.here import as_here

BETWEEN = (
    "ctx.each: lines between two losses changed {what}: they run for each micro-batch: put them "
    "behind the last loss, or take @ctx.step"
)
DEPTH_MAX = 3  # calls from the body to where losses are
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class Other:
    """A micro-batch's call of the body, in a thread that runs while ``go_on`` waits for it."""

    def __init__(self, call: Callable[[], None], device: torch.device) -> None:
        self._call, self._device = call, device
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._is_left, self._error = False, None
        self.has_ended = False
        self._thread = threading.Thread(target=self._run, name="micro-batch", daemon=True)
        self._thread.start()

    @property
    def is_here(self) -> bool:
        return not self.has_ended and threading.get_ident() == self._thread.ident

    def _run(self) -> None:
        try:
            self.wait(is_new=True)
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            self._call()
        except NextMicroBatch:
            pass
        except BaseException as error:  # is raised where it is waited for
            self._error = error
        finally:
            self.has_ended = True
            self._stopped.release()

    def go_on(self) -> None:
        """Until its next loss, or its end. Raises what it does."""
        self._go.release()
        self._stopped.acquire()
        if self._error is not None:
            raise self._error

    def wait(self, is_new: bool = False) -> None:
        """In its thread. Raises NextMicroBatch where the step is over."""
        if not is_new:
            self._stopped.release()
        self._go.acquire()
        if self._is_left:
            raise NextMicroBatch

    def leave(self) -> None:
        """The step is over."""
        if not self.has_ended:
            self._is_left = True
            self._go.release()
            self._stopped.acquire()


class Abreast:
    """One attempt at a step of several losses, micro-batch beside micro-batch; see ``MicroTurns``.

    Args:
        is_checked: what lines between two losses change is looked at.
    """

    def __init__(self, batch: Batch, engine: OwnEngine, is_checked: bool) -> None:
        self._engine, self._running, self._is_checked = engine, batch.dealt.running, is_checked
        self._others: list[Other] = []
        self._main, self._losses, self._is_telling = threading.get_ident(), 0, False

    def run(self, body: Callable[[Any], None]) -> None:
        """Calls it with each micro-batch. Raises ConfigError where a call has told no loss."""
        for owner in (*self._engine.optimizers, *self._engine.schedulers()):
            _step_once(owner).attempt = self
        self._body = as_here(body)
        try:
            body(self._begin(0))
        finally:
            for other in self._others:
                other.leave()
        if not self._losses:
            raise ConfigError(NO_LOSS)

    def _begin(self, index: int) -> Any:
        return weighed(self._engine.turn(self._running, index, 0), self._engine)

    @property
    def is_another(self) -> bool:
        """Whether this is no call that goes on: a step, say, was made by the one that does."""
        return any(other.is_here for other in self._others)

    keeps_gradients = is_another

    @property
    def takes_losses(self) -> bool:
        """Whether ``loss.backward()`` here and now tells a micro-batch's loss."""
        is_ours = threading.get_ident() == self._main or self.is_another
        return is_ours and not self._is_telling

    def before_backward(self, scaler: Any = None) -> None:
        """Raises ConfigError."""
        if scaler is not None and scaler.is_enabled():
            raise ConfigError(
                "ctx.each: a gradient scaler has one loss in a step: take bfloat16, or @ctx.step"
            )
        self._is_telling = True

    def after_backward(self) -> None:
        """Of the first micro-batch: not before all others have told theirs. Raises ConfigError."""
        self._is_telling = False
        self._engine.settle(self._running)
        here = next((other for other in self._others if other.is_here), None)
        if here is not None:
            here.wait()
            return
        for index in range(1, len(self._running.micro_batches)):
            self._advance(index)
        self._losses += 1
        self._engine.sum_gradients(self._running)
        self._engine.turn(self._running, 0, self._losses)

    def _advance(self, index: int) -> None:
        if not self._losses:
            call = functools.partial(self._body, self._begin(index))
            self._others.append(Other(call, self._engine.device))
        else:
            self._engine.turn(self._running, index, self._losses)
        other = self._others[index - 1]
        is_checked = bool(self._losses and self._is_checked)
        before = self._engine.values() if is_checked else {}
        other.go_on()
        if other.has_ended:
            raise ConfigError(NO_LOSS)
        if is_checked:
            _check_same(before, self._engine.values())


def _check_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ConfigError."""
    for name, value in now.items():
        was = before.get(name)
        is_same = torch.equal(value, was) if isinstance(value, torch.Tensor) else value == was
        if not is_same:
            raise ConfigError(BETWEEN.format(what=name))


class Stepping:
    """Who asks for an optimizer's or a scheduler's step: those of no ``attempt`` are its own."""

    def __init__(self) -> None:
        self.attempt: Abreast | None = None


def _step_once(owner: Any) -> Stepping:
    """From now on ``owner.step`` has no effect but in the call that goes on."""
    plain = owner.step
    if (known := getattr(plain, "stepping", None)) is not None:
        return known
    stepping = Stepping()

    @functools.wraps(plain)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if stepping.attempt is None or not stepping.attempt.is_another:
            return plain(*args, **kwargs)
        return None

    step.stepping = stepping  # type: ignore[attr-defined]
    if isinstance(owner, torch.optim.Optimizer):
        owner.step = types.MethodType(step, owner)  # type: ignore[method-assign]
    else:  # what it has itself is in its state
        kind = type(owner)
        owner.__class__ = type(kind.__name__, (kind,), {"step": step})
    return stepping


def has_several_losses(function: Callable[..., Any]) -> bool:
    """Whether a call of it comes to more than one ``backward``, as it is written."""
    return _losses_in(function, 0) > 1


def _losses_in(function: Any, depth: int) -> int:
    owner = getattr(function, "__self__", None)
    while isinstance(function, functools.partial | types.MethodType):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    written = inspect.unwrap(function)
    if depth == DEPTH_MAX or not isinstance(written, types.FunctionType):
        return 0
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(written)))
    except (OSError, SyntaxError, TypeError):
        return 0
    found = {**written.__globals__, **inspect.getclosurevars(written).nonlocals}
    owner = found.get("self") if owner is None else owner

    def called(call: ast.Call) -> int:
        if isinstance(call.func, ast.Attribute):
            if call.func.attr == "backward":
                return 1
            of_self = isinstance(call.func.value, ast.Name) and call.func.value.id == "self"
            inner = getattr(type(owner), call.func.attr, None) if of_self else None
            return _losses_in(types.MethodType(inner, owner), depth + 1) if inner else 0
        inner = found.get(call.func.id) if isinstance(call.func, ast.Name) else None
        is_near = getattr(inner, "__module__", None) == written.__module__
        return _losses_in(inner, depth + 1) if is_near and inner is not written else 0

    definition = tree.body[0]
    return _count(definition.body, called) if isinstance(definition, FUNCTIONS[:2]) else 0


def _count(nodes: Iterable[ast.AST], called: Callable[[ast.Call], int]) -> int:
    """The most that one way through the statements comes to. A loop that makes steps, too, counts
    for two passes: without them it accumulates gradients, which the job does itself."""
    total = 0
    for node in nodes:
        if isinstance(node, FUNCTIONS):
            continue
        if isinstance(node, ast.If):
            either = max(_count(node.body, called), _count(node.orelse, called))
            total += _count([node.test], called) + either
        elif isinstance(node, (ast.For, ast.While)):
            passes = 1 + any(map(_is_step, ast.walk(node)))
            total += passes * _count(node.body, called) + _count(node.orelse, called)
        else:
            total += called(node) if isinstance(node, ast.Call) else 0
            total += _count(ast.iter_child_nodes(node), called)
    return total


def _is_step(node: ast.AST) -> bool:
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr == "step"
