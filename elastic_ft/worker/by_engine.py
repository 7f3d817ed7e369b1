"""Steps that the job's own engine makes: see ``worker.loop.Maker``."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

from elastic_ft.config import Job
from elastic_ft.engines.base import Engine, Update
from elastic_ft.engines.learning_rates import learning_rate
from elastic_ft.worker.evaluating import evaluate
from elastic_ft.worker.loop import Loop, Made, Making
from elastic_ft.worker.step import Step


class ByEngine:
    """Nothing of the user's runs between two steps: they are told of and kept at once, and then
    seen by whoever looks."""

    is_over = False

    def __init__(self, job: Job, engine: Engine) -> None:
        self._job, self._engine = job, engine

    def enter(self, loop: Loop) -> None: ...

    def make(self, loop: Loop, attempt: Making) -> Generator[Any, None, Update | None]:
        engine, points, number = self._engine, loop.tools.points, attempt.number
        if along := attempt.along:
            along.ask(lambda loss, tokens: attempt.say(loss, tokens, engine.named.sums()))
        found = engine.run_batch(number, attempt.micro_batches, points)
        if along and along.is_told:
            agreed = attempt.agree_along(along, found.squares)
        else:
            agreed = attempt.agree(found.loss, found.tokens, found.squares, found.named)
        metrics = engine.named.means(agreed.more)
        update = engine.apply(number, agreed.tokens, agreed.squares, points)
        return replace(update, metrics=metrics)
        yield  # never: the user has no part in it

    def rate(self, step: int) -> float:
        return learning_rate(self._job.optimizer, self._job.steps, step)

    def settle(self, loop: Loop, made: Made) -> Generator[Any, None, Step | None]:
        loop.tell(made.metrics)
        checkpointed = loop.keep()
        eval_loss = self._evaluate_if_due(loop)
        return replace(made.step, eval_loss=eval_loss, checkpointed=checkpointed)
        yield

    def leave(self, loop: Loop) -> Iterator[Any]:
        return iter(())

    def _evaluate_if_due(self, loop: Loop) -> float | None:
        number, data = loop.step, self._job.data
        every, held_out = data.eval_every_steps, loop.tools.data.evaluation
        if not every or held_out is None or (number % every and number != self._job.steps):
            return None
        loop.tools.points("data")
        if self._job.optimizer.is_schedule_free:  # parameters will be others
            loop.tools.snapshots.wait(loop.groups.deadline())
        count = min(data.eval_samples, len(held_out))
        return float(evaluate(loop, self._engine.evaluate, held_out, count, "held-out loss"))
