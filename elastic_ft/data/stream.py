"""Streams: samples that come one after the other, and nobody knows how many there are.

A stream is cut into V virtual shards, as many as divide its files and the step's micro-batches.
Micro-batch g of a run, counted through all steps, is the next one of shard g % V; a shard that ends
begins anew, by itself. So which samples a micro-batch has is a function of its place in the run, as
for any dataset (I2), and a position of the run tells each shard's position.

What a position does not tell is how to get there without reading all that comes before. That is
what marks are for: the dataset's state, or the beginning of a pass, each with its position. They
are told to all ranks with a step's agreement and kept with the job's state, and are nothing but a
shortcut: without them the samples are the same, and reading them takes longer.

A shuffle buffer is a block of so many samples of a shard, in an order that is a function of the
seed, the shard and the block: nothing of it needs to be kept.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from elastic_ft.core.batches import ENDLESS, sample_at
from elastic_ft.data.stream_source import StreamSource
from elastic_ft.errors import ConfigError, DataError

PARTS_MAX = 32
MARKS_KEPT = 8
TELL_EVERY_STEPS = 16
STEPS_KEPT = 4  # the one that is made, those read ahead, and what was begun in vain
BYTES_IN_FLOAT = 6  # exactly, of 64 bits
FLOATS_IN_MARK = 256


@dataclass(frozen=True, slots=True)
class StreamMark:
    """A place in a virtual shard from which it can be read.

    Attributes:
        before: samples in the passes before this one.
        number: of the pass, from 0.
        within: samples of this pass before the place; the dataset's ``state`` is that after them.
    """

    before: int = 0
    number: int = 0
    within: int = 0
    state: Any = None

    @property
    def position(self) -> int:
        return self.before + self.within

    def packed(self) -> bytes | None:
        """As text; without the state where that is not plain values, or too large."""
        for mark in (self, StreamMark(self.before, self.number)):
            values = [mark.before, mark.number, mark.within, mark.state]
            try:
                text = json.dumps(values, separators=(",", ":"))
                if json.loads(text) == values and len(text) <= BYTES_IN_FLOAT * FLOATS_IN_MARK:
                    return text.encode("ascii")
            except (TypeError, ValueError):  # what json does not know
                pass
        return None


class SampleStream:
    """The samples of a run by their position in it: ``stream[position]``.

    Use from one thread, but for ``tell``, ``take`` and the state. Positions that follow one another
    are read once; those of the last steps are still there.

    Args:
        dataset: to be iterated over, again and again: in each pass and process the same samples in
            the same order, shuffled or not; ``set_epoch(n)`` is called before the n-th, from 0.
            With ``num_shards`` and ``shard(num_shards, index)``, as Hugging Face's, it is cut, and
            a rank reads its shards alone; else each rank reads all, and uses its own. With
            ``state_dict`` and ``load_state_dict`` it goes on where it was; else it is read from the
            beginning of its pass.
        batch_size, micro_batch_size: in samples: of all workers in a step, and of what is dealt.
        shuffle_buffer: samples of a virtual shard that are shuffled together; 0: none are.

    Attributes:
        parts: virtual shards; 1: it is not cut.

    Raises ConfigError for what can't be exact.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        micro_batch_size: int,
        seed: int = 0,
        shuffle_buffer: int = 0,
    ) -> None:
        if micro_batch_size < 1 or batch_size < 1 or batch_size % micro_batch_size:
            raise ConfigError(
                f"global_batch_size: {batch_size} is no multiple of micro_batch_size, "
                f"{micro_batch_size}"
            )
        if shuffle_buffer < 0:
            raise ConfigError(f"shuffle_buffer: expected 0 or more, found {shuffle_buffer}")
        self._source = StreamSource(dataset)
        self._micro, self._micro_batches = micro_batch_size, batch_size // micro_batch_size
        fitting = gcd(self._source.shards_max, self._micro_batches)
        self.parts = next(n for n in range(min(fitting, PARTS_MAX), 0, -1) if fitting % n == 0)
        self._block, self._seed = max(1, shuffle_buffer), seed
        self._noted = _Reads()
        self._cursors: dict[int, _VirtualShard] = {}
        self._told: tuple[StreamMark, ...] = (StreamMark(),) * self.parts

    @property
    def reads(self) -> int:
        """Grows with each sample that is read, used or not."""
        return self._noted.count

    @property
    def described(self) -> str:
        """What its order is made of, beside the seed: to be the same in all of a run."""
        return (
            f"stream of {self.parts} virtual shards for {self._micro_batches} micro-batches of "
            f"{self._micro}, shuffled in {self._block}"
        )

    def __len__(self) -> int:
        return ENDLESS

    def seeded_by(self, begin: Callable[[int], None]) -> None:
        """``begin(number)`` is called before each sample that is read, and before it is known which
        one that is, if any: the same number for the same one, whoever reads."""
        self._noted.begin = begin

    def __getitem__(self, position: int) -> Any:
        """Raises DataError for a shard without samples, and whatever the dataset does."""
        group, offset = divmod(position, self._micro)
        visit, number = divmod(group, self.parts)
        return self._shard(number).sample(visit * self._micro + offset, self._told[number])

    def _shard(self, number: int) -> _VirtualShard:
        """It knows nothing of the stream: who drops that ends what it reads, at once. A garbage
        collector would do so in any thread, anywhere, and Hugging Face's streams end threads."""
        if number not in self._cursors:
            parts, size, seed = self.parts, self._block, self._seed
            source, noted = self._source, self._noted
            a_step = self._micro * self._micro_batches // parts
            self._cursors[number] = _VirtualShard(
                begin=lambda passes, state: source.begin(parts, number, passes, state),
                read=lambda at: noted.note(at * parts + number),
                name=f"virtual shard {number} of {parts}",
                order=lambda block, place: sample_at(seed, block * parts + number, place, size),
                block=size,
                mark_every=max(a_step, size),
                keep=STEPS_KEPT * a_step + 2 * size,
            )
        return self._cursors[number]

    # --------------------------------------------------------------------------- the marks

    def tell(self, step: int, numbers: Iterable[int]) -> list[float]:
        """Numbers of which all ranks' sum tells ``take`` the marks; none at most steps.

        ``numbers``: of the step's micro-batches that are this rank's, and nobody else's.
        """
        if step % TELL_EVERY_STEPS:
            return []
        told = [0.0] * (self.parts * FLOATS_IN_MARK)
        for number in numbers:
            if number < self.parts:
                mark = self._mark_at(step - 1, number)
                text = ((mark and mark.packed()) or b"").ljust(BYTES_IN_FLOAT * FLOATS_IN_MARK)
                first = number * FLOATS_IN_MARK
                told[first : first + FLOATS_IN_MARK] = _floats(text)
        return told

    def _mark_at(self, step: int, number: int) -> StreamMark | None:
        """Of a shard: the newest known here from which what follows ``step`` can be read."""
        place = step * self._micro_batches // self.parts * self._micro
        first = place // self._block * self._block
        own = self._cursors[number].marks if number in self._cursors else ()
        marks = [mark for mark in (*own, self._told[number]) if mark.position <= first]
        return max(marks, key=_position) if marks else None

    def marks_at(self, step: int) -> list[str]:
        """Of each shard, the nearest known here, for ``load_state_dict``."""
        found = (self._mark_at(step, number) or StreamMark() for number in range(self.parts))
        return [(mark.packed() or b"").decode() for mark in found]

    def take(self, told: Sequence[float]) -> None:
        """The sum of what ``tell`` has told on all ranks."""
        if told:
            texts = (
                _text(told[n * FLOATS_IN_MARK : (n + 1) * FLOATS_IN_MARK])
                for n in range(self.parts)
            )
            self._told = tuple(
                _unpacked(text) or known for text, known in zip(texts, self._told, strict=True)
            )

    def state_dict(self) -> dict[str, Any]:
        """The marks that were told."""
        return {"marks": [(mark.packed() or b"").decode() for mark in self._told]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ConfigError if the state is of another number of virtual shards."""
        marks = [_unpacked(text.encode()) or StreamMark() for text in state["marks"]]
        if len(marks) != self.parts:
            raise ConfigError(
                f"stream: the state has {len(marks)} virtual shards, this one {self.parts}: its "
                "samples would be others than those that are left"
            )
        self._told = tuple(marks)


class _Reads:
    """What is told before each sample that is read: see ``SampleStream.seeded_by``."""

    def __init__(self) -> None:
        self.count = 0
        self.begin: Callable[[int], None] = lambda number: None

    def note(self, number: int) -> None:
        self.count += 1
        self.begin(number)


class _VirtualShard:
    """The endless sequence of its passes, read forward; the last ``keep`` samples stay.

    Attributes:
        marks: the newest, by position.
    """

    def __init__(
        self,
        *,
        begin: Callable[[int, Any], tuple[Iterator[Any], Callable[[], Any]]],
        read: Callable[[int], None],
        name: str,
        order: Callable[[int, int], int],
        block: int,
        mark_every: int,
        keep: int,
    ) -> None:
        self._begin, self._reads, self._name = begin, read, name
        self._order, self._block = order, block
        self._mark_every, self._keep = mark_every, keep
        self._samples: Iterator[Any] | None = None  # of the running pass
        self._state: Callable[[], Any] = lambda: None
        self._at = StreamMark()  # its state apart: how far the pass was read
        self._kept: dict[int, Any] = {}
        self._low = 0  # the first that is kept
        self.marks: tuple[
            StreamMark, ...
        ] = ()  # replaced, never changed: another thread looks at it

    def sample(self, place: int, told: StreamMark) -> Any:
        block, inside = divmod(place, self._block)
        first = block * self._block
        self._reach(first, first + self._block, told)
        found = self._kept[first + (self._order(block, inside) if self._block > 1 else 0)]
        # It may be asked for again, by another deal, and collators change what they are given.
        return copy.copy(found) if isinstance(found, (dict, list)) else found

    def _reach(self, first: int, stop: int, told: StreamMark) -> None:
        """Reads until all from ``first`` up to ``stop`` are kept."""
        marks = [m for m in (*self.marks, told, StreamMark()) if m.position <= first]
        nearest = max(marks, key=_position)
        at = self._at.position
        if self._samples is None or first < self._low or at < nearest.position:
            self._open(nearest)
        while self._at.position < stop:
            try:
                self._read()
            except BaseException:
                self._samples = None  # a generator that has raised is at its end
                raise

    def _open(self, mark: StreamMark) -> None:
        self._kept.clear()
        self._samples = None  # ended first: what it does at its end must not move the next one
        self._samples, self._state = self._begin(mark.number, mark.state)
        self._at, self._low = mark, mark.position
        # With itself: a dataset may not know its state before it has given a sample.
        before = (m for m in self.marks if m.position < mark.position)
        self.marks = (*before, mark)[-MARKS_KEPT:]

    def _read(self) -> None:
        assert self._samples is not None
        at = self._at
        if not self.marks or at.position >= self.marks[-1].position + self._mark_every:
            self._mark()
        missing = object()
        self._reads(at.position)
        while (sample := next(self._samples, missing)) is missing:
            if not at.within:
                raise DataError(f"stream: {self._name} has no samples in pass {at.number}")
            at = self._at = StreamMark(at.position, at.number + 1)
            self._reads(at.position)  # whoever begins with this pass draws the same
            self._samples, self._state = self._begin(at.number, None)
        self._kept[at.position] = sample
        self._at = StreamMark(at.before, at.number, at.within + 1)
        while self._at.position - self._low > self._keep:
            del self._kept[self._low]
            self._low += 1

    def _mark(self) -> None:
        at = self._at
        state = self._state() if at.within else None
        mark = StreamMark(at.before, at.number, at.within if state is not None else 0, state)
        if mark not in self.marks:
            self.marks = (*self.marks[1 - MARKS_KEPT :], mark)


def _position(mark: StreamMark) -> int:
    return mark.position


def _floats(text: bytes) -> list[float]:
    parts = range(0, len(text), BYTES_IN_FLOAT)
    return [float(int.from_bytes(text[i : i + BYTES_IN_FLOAT], "little")) for i in parts]


def _text(floats: Sequence[float]) -> bytes:
    return b"".join(int(f).to_bytes(BYTES_IN_FLOAT, "little") for f in floats)


def _unpacked(text: bytes) -> StreamMark | None:
    text = text.strip(b" \0")
    return StreamMark(*json.loads(text)) if text else None
