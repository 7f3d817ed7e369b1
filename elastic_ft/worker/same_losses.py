"""All ranks make the same loss of the same micro-batch, in a loop of the user's.

Else that depends on something that they do not share: what the micro-batch before has left, what
was collected between two steps, a generator of the script's own. In another world, and with who
comes in, it would be another loss, of which nothing else would tell.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from elastic_ft.errors import ConfigError
from elastic_ft.worker.agreement import sum_over_members
from elastic_ft.worker.odd_ranks import raise_for

FLOOR = 0.1  # of a loss: less is compared with this
TOLERANCE = {"cpu": 1e-4}  # relative; by type of device
TOLERANCE_ELSEWHERE = 1e-2  # GPUs of several kinds round differently, more so in bfloat16
WHY = (
    "@ctx.step: the loss of one micro-batch is {found} at step {step}, so it depends on what ranks "
    "do not share: what the micro-batch before has left (a hidden state), what was collected "
    "between two steps (a replay buffer), a generator or a second loader of the script's own: "
    "make it of the micro-batch, or keep it alike on all ranks and give it to ctx.register; or say "
    "loop.compare_losses: false"
)


AGAIN = (
    "@ctx.step: the loss of one micro-batch is {first:.6g}, and {again:.6g} when it is made a "
    "second time in step {step}, beside others of the other ranks: it depends on what ranks are "
    "dealt (features gathered over ranks), or on what the micro-batch before has left (a hidden "
    "state, a buffer that a forward changes, a generator of the script's own): make it of the "
    "micro-batch and the weights alone; or say loop.compare_losses: false"
)


@dataclass(frozen=True, slots=True)
class Compared:
    """The losses that a rank has made of the global batch's first micro-batch.

    Attributes:
        loss: None: it has told none.
        again: rank 0's, of the same once more, while the others are at micro-batches of their own.
    """

    loss: float | None
    again: float | None = None


def told(made: Compared) -> list[float]:
    """What a rank says of its own, to be summed: how many there are, their sum, that of their
    squares, and how many more are no number."""
    losses = [loss for loss in (made.loss, made.again) if loss is not None]
    finite = [loss for loss in losses if math.isfinite(loss)]
    count, squares = float(len(finite)), math.fsum(loss * loss for loss in finite)
    return [count, math.fsum(finite), squares, float(len(losses) - len(finite))]


def check_same_losses(
    made: Compared,
    summed: Sequence[float],
    rank: int,
    world_size: int,
    has_trained: bool,
    step: int,
    device: torch.device,
    check: Callable[[], None],
) -> None:
    """Raises where ranks make different losses of one micro-batch; a collective, but only then.

    Who is at fault: see ``odd_ranks.raise_for``. ConfigError where rank 0 differs from itself.

    Args:
        summed: what all have ``told``.
        has_trained: this process has made the steps before.
        check: raises if a collective was aborted, whose result may be anything.
    """
    tolerance = TOLERANCE.get(device.type, TOLERANCE_ELSEWHERE)
    if _are_alike(*summed, tolerance):
        return
    everyones = sum_over_members(shown(made, rank, world_size, has_trained), world_size)
    check()
    *ranks, (has_again, again, _) = zip(*[iter(everyones)] * 3, strict=True)
    losses = {r: loss for r, (is_there, loss, _) in enumerate(ranks) if is_there}
    known = {r for r in losses if ranks[r][2]}
    if has_again and _differ(losses[0], again, tolerance):
        raise ConfigError(AGAIN.format(first=losses[0], again=again, step=step))
    odd = odd_ranks(losses, known, tolerance)
    least, most = (most_of(losses.values(), key=_order) for most_of in (min, max))
    found = f"{least:.6g} on one rank and {most:.6g} on another"
    raise_for(odd, known, rank, WHY.format(found=found, step=step))


def shown(made: Compared, rank: int, world_size: int, has_trained: bool) -> list[float]:
    """A rank's own, to be summed with those of all: of each rank three numbers, and rank 0's
    second loss behind them."""
    values = [0.0] * (3 * world_size + 3)
    if made.loss is not None:
        values[3 * rank : 3 * rank + 3] = [1.0, made.loss, float(has_trained)]
    if made.again is not None:
        values[-3:] = [1.0, made.again, 0.0]
    return values


def odd_ranks(losses: Mapping[int, float], known: Collection[int], tolerance: float) -> set[int]:
    """Whose loss is not the usual one, which is that of ``known``, or of all where none is."""
    usual = statistics.median_low(sorted((losses[r] for r in known or losses), key=_order))
    return {r for r, loss in losses.items() if _differ(usual, loss, tolerance)}


def _order(loss: float) -> tuple[bool, float]:
    """What is no number is the greatest."""
    is_number = math.isfinite(loss)
    return not is_number, loss if is_number else 0.0


def _differ(usual: float, loss: float, tolerance: float) -> bool:
    if not (math.isfinite(usual) and math.isfinite(loss)):
        return math.isfinite(usual) != math.isfinite(loss)
    return abs(loss - usual) > tolerance * max(abs(usual), FLOOR)


def _are_alike(count: float, total: float, squares: float, others: float, tolerance: float) -> bool:
    """As far as sums can tell: how far one of them may be from their mean, at most."""
    if not count or others:
        return not count
    mean = total / count
    spread = math.sqrt(max(0.0, squares / count - mean**2) * count)
    return spread <= tolerance * max(abs(mean), FLOOR)
