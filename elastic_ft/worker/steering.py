"""Between a training loop of the user's, in its own thread, and the loop of a generation.

The user's thread resumes the training thread, and waits until that yields: the micro-batches of a
step (``Dealt``), that it is handed over (``MakeHere``) to be made there, that it is
made (``step.Step``), an errand's result (``Done``), or that there are no more (``Ended``). Never do
both run. Where nothing of the script's lies between two steps (``Steering.goes_on``), the training
thread goes on by itself. When a generation breaks, what comes next is ``Dealt`` again: the same
step, of the next generation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from elastic_ft.data.dataset import DataBundle
from elastic_ft.engines.own import OwnEngine
from elastic_ft.engines.own_attempt import Running
from elastic_ft.worker.step import Step
from elastic_ft.worker.whereabouts import Whereabouts


@dataclass(frozen=True, slots=True)
class Dealt:
    """This rank's micro-batches of the step to be made next."""

    running: Running
    world_size: int
    rank: int
    generation: int


@dataclass(frozen=True, slots=True)
class MakeHere:
    """The step that was dealt is to be made by the user's thread itself, now."""


@dataclass(frozen=True, slots=True)
class Done:
    """An errand's result."""

    result: Any


@dataclass(frozen=True, slots=True)
class Ended:
    """There is no more to train; ``why`` if that is before the last step."""

    why: str


@dataclass(slots=True)
class Steering:
    """What the user's thread wants next. Written by it, read once it waits.

    Attributes:
        body: makes the step that was dealt.
        goes_on: in the training thread, in the place of the user's: whether that need not see what
            would be yielded to it; if that is ``Dealt``, there is a ``body`` for it then.
        attempting, raised: the user's thread makes it itself, and what came of that.
        errand: is run between two steps, given the generation's loop.
        ending: the user's loop is over.
        checkpoint: one of the next step is wanted.
        logged: values for the line of the step just made.
        told: sentences for the journal.
        gathered: a sum of what the script takes for the same on all ranks, since the step before.
        result: of the last ``body``.
        made: the last step that its script has made, in this process.
        wanted: the last step that its script has wanted to make, in this process.
        span, span_last: the loop over epochs that its script is in, in words, and its last step.
        passed, left: the last step of loops over epochs that its script has left; the last of them,
            where nothing else came after it.
        at: where its code is; it outlives a generation.
    """

    engine: OwnEngine
    data: DataBundle
    body: Callable[[], Any] | None = None
    goes_on: Callable[[Dealt | Step], bool] | None = None
    attempting: bool = False
    raised: Exception | None = None
    errand: Callable[[Any], Any] | None = None
    ending: bool = False
    checkpoint: bool = False
    logged: dict[str, Any] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
    gathered: float | None = None
    result: Any = None
    made: int = 0
    wanted: int = 0
    span: str = ""
    span_last: int = 0
    passed: int = 0
    left: str = ""
    at: Whereabouts = field(default_factory=Whereabouts)

    @property
    def kept(self) -> list[Any]:
        """What the script has prepared or registered."""
        return [*self.engine.models, *self.engine.optimizers, *self.engine.own.things]

    def ends_early(self, made: int) -> bool:
        """Whether its script is over, and has made no step, as its loops over epochs end with step
        ``made`` of the job, or before it."""
        return self.ending and self.at.is_new and bool(self.left) and self.passed <= made

    def take_errand(self) -> Callable[[Any], Any] | None:
        errand, self.errand = self.errand, None
        return errand

    def take_gathered(self) -> tuple[float, float, float]:
        """Whether there is any; it; its square."""
        found, self.gathered = self.gathered, None
        return (0.0, 0.0, 0.0) if found is None else (1.0, found, found * found)

    def take_logged(self) -> dict[str, Any]:
        logged, self.logged = self.logged, {}
        return logged
