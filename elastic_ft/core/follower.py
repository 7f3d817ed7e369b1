"""What a worker does about what its controller says, and when. Pure, as the rest of the core.

A worker takes part in one generation, or it is at its safe point: no group of it is left, and its
state is plain tensors. It can be told anything at any time (``hear``); what has to wait for the
safe point waits there (``rest``). The real worker and the simulated one both follow this.

While its line is lost it hears nothing, and goes on: trains, rests, or waits in forming. Another
controller's line changes nothing by itself: that one says again what may not have been heard
(``adoption``), and said twice it is done once. It asks ``fence`` of who returns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from elastic_ft.core.commands import Bench, PauseWorkers, ReleaseWorker

CONTROLLER_GONE = "the controller is gone"

# ------------------------------------------------------------- heard, beside commands of the core


@dataclass(frozen=True, slots=True)
class BeginGeneration:
    """Heard: this worker has a part in it. As an action: it takes part from now on.

    ``form``: all else that the worker was told of it, for the worker alone.
    """

    generation: int
    form: Any = None


@dataclass(frozen=True, slots=True)
class LineEnded:
    """There is no controller any more, and for so long that none is to be expected: nobody can
    commit a step."""


Heard = PauseWorkers | BeginGeneration | Bench | ReleaseWorker | LineEnded

# --------------------------------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class BreakOff:
    """Nothing collective of the generation that this worker takes part in is to go on."""

    reason: str


@dataclass(frozen=True, slots=True)
class PauseAtBoundary:
    """All members are to stop after the same step."""


@dataclass(frozen=True, slots=True)
class DropAfter:
    """What is held of later steps is no state of this history any more: others train them again."""

    step: int


@dataclass(frozen=True, slots=True)
class AnswerPause:
    """Tell what is held, as ``Paused`` of this generation."""

    generation: int


@dataclass(frozen=True, slots=True)
class Leave:
    """Nothing comes after this. ``lost``: the controller is gone, nobody has sent it away."""

    lost: bool = False


Reaction = BreakOff | PauseAtBoundary | DropAfter | AnswerPause | BeginGeneration | Leave


@dataclass(frozen=True, slots=True)
class Follower:
    """What a worker knows of its controller's will.

    Attributes:
        fence: the newest generation heard of; whatever is older is over (I1).
        asked: generation of the newest PauseWorkers.
        answered: the same, of those that were answered.
        current: the generation that the worker takes part in, 0 at its safe point.
        begin: heard, and not begun.
        bench: heard, and not sat out.
        released: why, if the worker is to leave.
        line_ended: the controller is gone.
    """

    fence: int = 0
    asked: int = 0
    answered: int = 0
    current: int = 0
    begin: BeginGeneration | None = None
    bench: Bench | None = None
    released: str | None = None
    line_ended: bool = False

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to come of the current generation."""
        return bool(self.why_broken_off) or self.bench is not None

    @property
    def why_broken_off(self) -> str:
        """Why no group of the current generation is to be formed any more; "" if it is."""
        if self.line_ended:
            return CONTROLLER_GONE
        if self.released is not None:
            return self.released or "released"
        if self.fence > self.current:
            return f"generation {self.fence} has been opened"
        return ""


def hear(follower: Follower, message: Heard) -> tuple[Follower, tuple[Reaction, ...]]:
    """Returns what the worker knows now, and what it does at once. At its safe point that is
    nothing: ``rest`` says what comes next."""
    match message:
        case LineEnded():
            follower = replace(follower, line_ended=True)
            return follower, _break_off(follower, CONTROLLER_GONE)
        case ReleaseWorker():
            follower = replace(follower, released=message.reason)
            return follower, _break_off(follower, message.reason)
        case _ if message.generation < follower.fence:
            return follower, ()  # it was on its way for long (I1)
        case PauseWorkers(generation=generation):
            follower = replace(follower, fence=generation, asked=generation)
            if follower.current >= generation:
                return follower, ()
            if message.abort:
                return follower, _break_off(follower, message.reason)
            return follower, (PauseAtBoundary(),) if follower.current else ()
        case BeginGeneration(generation=generation):
            return replace(follower, fence=generation, begin=message), ()
        case Bench():
            return replace(follower, bench=message), ()


def rest(follower: Follower) -> tuple[Follower, tuple[Reaction, ...]]:
    """At the safe point: returns what the worker knows now, and what it does, in this order.

    Unless it begins a generation or leaves, it stays here until it hears more, and asks again.
    """
    follower = replace(follower, current=0)
    if follower.line_ended or follower.released is not None:
        return follower, (Leave(lost=follower.line_ended),)
    actions: tuple[Reaction, ...] = ()
    if follower.bench is not None:
        actions = (DropAfter(follower.bench.step),)
    begin = follower.begin
    follower = replace(follower, begin=None, bench=None)
    if begin is not None and begin.generation >= follower.fence:
        return replace(follower, current=begin.generation), (*actions, begin)
    if follower.asked > follower.answered:
        answer = AnswerPause(follower.asked)
        return replace(follower, answered=follower.asked), (*actions, answer)
    return follower, actions


def _break_off(follower: Follower, reason: str) -> tuple[Reaction, ...]:
    return (BreakOff(reason),) if follower.current else ()
