"""Who is at fault where ranks have made, or keep, what is not the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from elastic_ft.errors import ConfigError, GroupBroken, ScriptDiffers
from elastic_ft.worker.agreement import sum_over_members


def raise_for(odd: Collection[int], known: Collection[int], rank: int, why: str) -> None:
    """Nothing where none is ``odd``. Who has come in without what the others have: ScriptDiffers
    there, GroupBroken elsewhere. ConfigError where those differ who made the steps before, which
    are ``known``; or where none did."""
    if not odd:
        return
    if not known or set(odd) & set(known):
        raise ConfigError(why)
    if rank in odd:
        raise ScriptDiffers(why)
    raise GroupBroken(why)


def odd_sum(summed: Sequence[float], squared: Sequence[float], world_size: int) -> int | None:
    """The first checksum that ranks have differently, of what was summed over them, and of the
    squares."""
    pairs = enumerate(zip(summed, squared, strict=True))
    return next((n for n, (s, q) in pairs if world_size * q != s * s), None)


def check_checksum(
    value: float,
    rank: int,
    world_size: int,
    has_trained: bool,
    why: str,
    check: Callable[[], None],
) -> None:
    """Ranks have different checksums: raises on each, see ``raise_for``. A collective.

    Args:
        has_trained: this process has made the steps before.
        check: raises if a collective was aborted, whose result may be anything.
    """
    values = [0.0] * (2 * world_size)
    values[2 * rank : 2 * rank + 2] = [value, float(has_trained)]
    everyones = sum_over_members(values, world_size)
    check()
    known = {r for r in range(world_size) if everyones[2 * r + 1]}
    found = dict(enumerate(everyones[::2]))
    usual, _ = Counter(found[r] for r in known or found).most_common(1)[0]
    raise_for({r for r in found if found[r] != usual}, known, rank, why)
