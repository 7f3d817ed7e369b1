"""Which samples each step trains on: the data order, its dealing to ranks, and the ledger's check.

The order is a pure function of (seed, epoch, position), never of the world size, so any number of
workers, joining and leaving as they like, walk one and the same sequence (I2, I3):

    position    0, 1, 2, ... over the whole run; position p is index p % N of epoch p // N
    sample id   epoch * N + dataset index: unique in the run, and it says what it is
    step s      the positions [(s - 1) * B, s * B), B the global batch size; steps count from 1
    micro-batch a run of M consecutive positions of a step; the unit that is dealt to ranks

A batch may straddle two epochs: no sample is dropped, and none is repeated to fill up.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import isqrt
from typing import Protocol

SampleIds = tuple[int, ...]
LedgerLine = tuple[int, SampleIds]  # step, the ids it consumed in data order

ENDLESS = 1 << 52  # the size of a stream: more than any run reads, and an integer for any reader
_ROUNDS = 8
_MASK = (1 << 64) - 1


# ---------------------------------------------------------------------------- data order


@dataclass(frozen=True, slots=True)
class DataOrder:
    """The endless sequence of samples of a run, each epoch in an order of its own."""

    seed: int
    dataset_size: int

    def __post_init__(self) -> None:
        if self.dataset_size < 1:
            raise ValueError(f"a data order needs at least one sample, got {self.dataset_size}")

    def __str__(self) -> str:
        return f"under seed {self.seed}"

    def sample_ids(self, position_start: int, position_stop: int) -> SampleIds:
        """The ids at the global positions [start, stop), in order."""
        if not 0 <= position_start <= position_stop:
            raise ValueError(f"not a range of positions: {position_start}..{position_stop}")
        return tuple(self._sample_id(p) for p in range(position_start, position_stop))

    def _sample_id(self, position: int) -> int:
        epoch, index = divmod(position, self.dataset_size)
        shuffled = sample_at(self.seed, epoch, index, self.dataset_size)
        return epoch * self.dataset_size + shuffled

    def dataset_index(self, sample_id: int) -> int:
        return sample_id % self.dataset_size

    def epoch(self, sample_id: int) -> int:
        """In which pass over the dataset the sample is read, from 0."""
        return sample_id // self.dataset_size


def sample_at(seed: int, epoch: int, index: int, dataset_size: int) -> int:
    """Returns the dataset index at place ``index`` of the shuffled ``epoch``.

    For each (seed, epoch) a bijection of range(dataset_size), in constant memory: a Feistel
    network over the cells of a nearly square grid that is barely larger than the dataset; what
    falls outside the dataset walks on along its cycle until it is inside.
    (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002.)
    """
    if not 0 <= index < dataset_size:
        raise ValueError(f"index {index} is outside a dataset of {dataset_size} samples")
    keys = _round_keys(seed, epoch)
    rows, columns = _grid(dataset_size)
    while True:  # ends: the cycle of an inside point leads back inside, mostly at once
        index = _encipher(index, rows, columns, keys)
        if index < dataset_size:
            return index


def _encipher(value: int, rows: int, columns: int, keys: tuple[int, ...]) -> int:
    left, right = divmod(value, columns)
    for key_left, key_right in zip(keys[::2], keys[1::2], strict=True):
        left = (left + _mix(right ^ key_left)) % rows
        right = (right + _mix(left ^ key_right)) % columns
    return left * columns + right


def _mix(x: int) -> int:
    """A 64-bit finaliser in the manner of MurmurHash3: every input bit moves every output bit."""
    x = (x ^ x >> 32) * 0xD6E8FEB86659FD93 & _MASK
    x = (x ^ x >> 32) * 0xD6E8FEB86659FD93 & _MASK
    return x ^ x >> 32


@lru_cache(maxsize=64)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    digest = hashlib.blake2b(f"elastic_ft order {seed} {epoch}".encode(), digest_size=8 * _ROUNDS)
    return struct.unpack(f"<{_ROUNDS}Q", digest.digest())


def _grid(size: int) -> tuple[int, int]:
    """(rows, columns), nearly square, whose product is at least ``size`` and barely more."""
    columns = isqrt(size - 1) + 1
    return -(-size // columns), columns


@dataclass(frozen=True, slots=True)
class InOrder:
    """Of a stream, whose order is its own: sample p is at position p, for as long as a run goes on.

    Attributes: dataset_size: ``ENDLESS``.
    """

    dataset_size: int

    def __str__(self) -> str:
        return "in the stream's order"

    def sample_ids(self, position_start: int, position_stop: int) -> SampleIds:
        """As ``DataOrder.sample_ids``."""
        return tuple(range(position_start, position_stop))


def job_order(seed: int, dataset_size: int) -> DataOrder | InOrder:
    """Of a dataset without an order of its own, and of a stream."""
    return InOrder(ENDLESS) if dataset_size == ENDLESS else DataOrder(seed, dataset_size)


def samples_in_words(dataset_size: int, kind: str = "") -> str:
    what = f"{kind} samples".lstrip()
    return f"a stream of {what}" if dataset_size == ENDLESS else f"{dataset_size} {what}"


# ------------------------------------------------------------------------------- dealing


def deal(micro_batches: int, ranks: int) -> tuple[range, ...]:
    """Returns, per rank, the indices of its micro-batches: contiguous, as even as can be.

    The first ranks get one more where it does not divide: 8 over 3 ranks is 3, 3, 2.
    """
    if micro_batches < 0 or ranks < 1:
        raise ValueError(f"cannot deal {micro_batches} micro-batches to {ranks} ranks")
    share, longer = divmod(micro_batches, ranks)
    counts = [share + (rank < longer) for rank in range(ranks)]
    return tuple(range(a, b) for a, b in pairwise(accumulate(counts, initial=0)))


class SampleOrder(Protocol):
    """Which samples lie where in a run; ``DataOrder``, or another pure function of a position."""

    def sample_ids(self, position_start: int, position_stop: int, /) -> SampleIds:
        """The ids at the global positions [start, stop), in order: epoch * N + dataset index."""


def step_batch(
    order: SampleOrder,
    step: int,
    global_batch_size: int,
    micro_batch_size: int,
    dealt: range | None = None,
) -> tuple[SampleIds, ...]:
    """Returns the sample ids of each micro-batch of ``step``, in data order; steps count from 1.

    With ``dealt``, one rank's share from ``deal``, only those micro-batches.
    """
    if step < 1:
        raise ValueError(f"steps count from 1, got {step}")
    if micro_batch_size < 1 or global_batch_size % micro_batch_size:
        raise ValueError(
            f"global batch size {global_batch_size} is not a multiple of "
            f"micro-batch size {micro_batch_size}"
        )
    first = (step - 1) * global_batch_size
    starts = range(first, first + global_batch_size, micro_batch_size)
    if dealt is not None:
        starts = starts[dealt.start : dealt.stop]
    return tuple(order.sample_ids(start, start + micro_batch_size) for start in starts)


# -------------------------------------------------------------------------------- ledger


@dataclass(frozen=True, slots=True)
class Ledger:
    """The committed lines of a run's ledger, and what they should say (I2).

    Every check returns its findings as sentences; an empty list is a clean ledger.
    """

    lines: tuple[LedgerLine, ...]
    first_step: int = 1

    @staticmethod
    def of(lines: Iterable[tuple[int, Iterable[int]]], first_step: int = 1) -> Ledger:
        return Ledger(tuple((step, tuple(ids)) for step, ids in lines), first_step)

    def violations(self, order: DataOrder, global_batch_size: int) -> list[str]:
        """Everything that differs from the data order; needs nothing but the seed to judge."""
        return [
            *self.step_violations(),
            *self.repeated_samples(),
            *self.order_violations(order, global_batch_size),
        ]

    def step_violations(self) -> list[str]:
        """Steps that are missing, repeated or out of order."""
        return step_sequence_violations([step for step, _ in self.lines], self.first_step)

    def repeated_samples(self) -> list[str]:
        """Samples that more than one place of the ledger consumed. Needs no seed."""
        found: list[str] = []
        seen: dict[int, int] = {}
        for step, ids in self.lines:
            for sample in ids:
                if sample in seen:
                    found.append(
                        f"step {step} repeats sample {sample}, consumed by step {seen[sample]}"
                    )
                seen[sample] = step
        return found

    def order_violations(self, order: DataOrder | InOrder, global_batch_size: int) -> list[str]:
        """Lines whose samples are not those of their step under this seed, in this order."""
        found: list[str] = []
        for step, ids in self.lines:
            stop = step * global_batch_size
            if stop < global_batch_size:
                found.append(f"step {step} does not exist: steps count from 1")
                continue
            expected = order.sample_ids(stop - global_batch_size, stop)
            if ids != expected:
                found.append(f"step {step} {_difference(ids, expected, str(order))}")
        return found


def step_sequence_violations(steps: Iterable[int], first_step: int = 1) -> list[str]:
    """Says in words how ``steps`` differs from first_step, first_step + 1, ... once each."""
    found: list[str] = []
    seen: set[int] = set()
    due = first_step
    for step in steps:
        if step in seen:
            found.append(f"step {step} is repeated")
        elif step < due:
            found.append(f"step {step} is out of order: step {due - 1} came before it")
        elif step > due:
            missing = f"step {due} is" if step == due + 1 else f"steps {due} to {step - 1} are"
            found.append(f"{missing} missing before step {step}")
        seen.add(step)
        due = max(due, step + 1)
    return found


def _difference(ids: SampleIds, expected: SampleIds, order: str) -> str:
    """How one line's ids differ from those of ``order``, naming the first few."""
    if sorted(ids) == sorted(expected):
        place = next(i for i, (a, b) in enumerate(zip(ids, expected, strict=True)) if a != b)
        return f"has its samples out of order from place {place} on"
    missing = sorted(set(expected) - set(ids))
    foreign = sorted(set(ids) - set(expected))
    if missing and len(missing) == len(expected):
        wanted = f"{_some(expected)} {order}"
        return f"has none of its samples: {_some(ids)} instead of {wanted}"
    parts = [f"lacks {_some(missing)}"] * bool(missing)
    parts += [f"has {_some(foreign)}, not its own {order}"] * bool(foreign)
    if len(ids) != len(expected):
        parts.append(f"has {len(ids)} samples instead of {len(expected)}")
    return ", ".join(parts) or "has some samples more than once"


def _some(ids: Iterable[int], limit: int = 4) -> str:
    numbers = list(ids)
    more = f" and {len(numbers) - limit} more" if len(numbers) > limit else ""
    return ", ".join(map(str, numbers[:limit])) + more if numbers else "no samples"
