"""All ranks make the same loss of the same micro-batch, in a loop of the user's.

Else that depends on something that they do not share: what the micro-batch before has left, what
was collected between two steps, a generator of the script's own. In another world, and with who
comes in, it would be another loss, of which nothing else would tell.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from elastic_ft.errors import ConfigError, GroupBroken, ScriptDiffers
from elastic_ft.worker.agreement import sum_over_members

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


def told(loss: float | None) -> list[float]:
    """What a rank says of its own, to be summed."""
    if loss is None or not math.isfinite(loss):
        return [0.0, 0.0, 0.0]
    return [1.0, loss, loss * loss]


def check_same_losses(
    loss: float | None,
    summed: Sequence[float],
    rank: int,
    world_size: int,
    has_trained: bool,
    step: int,
    device: torch.device,
    check: Callable[[], None],
) -> None:
    """Raises where ranks make different losses of one micro-batch; a collective, but only then.

    Who has come in without what the others have: ScriptDiffers there, GroupBroken elsewhere.
    ConfigError where those differ who have made the steps before.

    Args:
        loss: this rank's. None: it has told none.
        summed: what all have ``told``.
        has_trained: this process has made the steps before.
        check: raises if a collective was aborted, whose result may be anything.
    """
    tolerance = TOLERANCE.get(device.type, TOLERANCE_ELSEWHERE)
    count, total, squares = summed
    if not count or _spread(count, total, squares) <= tolerance * max(abs(total / count), FLOOR):
        return
    everyones = [0.0] * (3 * world_size)
    _, found, _ = told(loss)
    everyones[3 * rank : 3 * rank + 3] = [float(bool(told(loss)[0])), found, float(has_trained)]
    shown = sum_over_members(everyones, world_size)
    check()
    losses = {r: shown[3 * r + 1] for r in range(world_size) if shown[3 * r]}
    known = {r for r in losses if shown[3 * r + 2]}
    odd = odd_ranks(losses, known, tolerance)
    if not odd:
        return
    least, most = min(losses.values()), max(losses.values())
    why = WHY.format(found=f"{least:.6g} on one rank and {most:.6g} on another", step=step)
    if not known or odd & known:
        raise ConfigError(why)
    if rank in odd:
        raise ScriptDiffers(why)
    raise GroupBroken(why)


def odd_ranks(losses: Mapping[int, float], known: Collection[int], tolerance: float) -> set[int]:
    """Whose loss is not the usual one, which is that of ``known``, or of all where none is."""
    usual = statistics.median(losses[r] for r in known or losses)
    most = tolerance * max(abs(usual), FLOOR)
    return {r for r, loss in losses.items() if abs(loss - usual) > most}


def _spread(count: float, total: float, squares: float) -> float:
    """How far one of them may be from their mean, at most."""
    return math.sqrt(max(0.0, squares / count - (total / count) ** 2) * count)
