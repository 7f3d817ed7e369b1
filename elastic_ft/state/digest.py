"""The state digest: of the whole training state, whatever layout holds it (DESIGN section 7).

Each 32-bit word (or narrower element) v of a tensor adds ``v * row_key * column_key`` to a sum
modulo 2^64, in two lanes of independent keys. Sums don't mind how boxes cut a tensor or which rank
adds which part, so ranks digest what they own at the speed of their memory, and one all-reduce of
a few words makes it the whole. A key is a function of the tensor's name, dtype, shape and the
word's place in it: its axes are divided in two groups, the row is the index in the first, the
column that in the second, so that keys are made for rows + columns places and not for each.

This is multilinear hashing (Lemire and Kaser, "Strongly Universal String Hashing is Fast", 2013)
with keys of rank one. Odd keys make every change of one word show. Damage that was not made to
deceive, as lost, moved, repeated or flipped data, goes unseen about once in 2^62. It is no
protection from an adversary, who can make what he likes add up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from elastic_ft.groups.groups import Groups
from elastic_ft.state.tensors import LocalState, StateTensor, tensor_name

LANES = 2
SLAB_BYTES = 8 << 20  # from one mark of progress to the next; from the device at a time
CACHED = 1 << 15  # words multiplied at a time: they and their keys stay in the cache
WORD_BYTES = 4
FOLD = 4096  # elements
LIMBS = 4  # of 16 bits: their sums over ranks don't overflow
KEYED = {1: np.uint8, 2: np.uint16, 4: np.uint32}  # by bytes of a word

Sums = np.ndarray[Any, np.dtype[np.uint64]]  # [LANES]


def state_digest(groups: Groups, owned: LocalState, tick: Callable[[], None]) -> str:
    """Returns on rank 0 the digest of the whole state, 32 hex digits; "" elsewhere.

    Args:
        owned: this rank's part of the state; every element has one owner.
        tick: called every few milliseconds: this takes as long as the state is large.
    """
    total = np.zeros(LANES, np.uint64)
    for key, tensor in owned.items():
        total += digest_sums(tensor_name(key), tensor, tick)
    limbs = [int(lane) >> 16 * i & 0xFFFF for lane in total for i in range(LIMBS)]
    packed = torch.tensor(limbs, dtype=torch.int64)
    dist.all_reduce(packed)
    return in_hex(packed.tolist()) if groups.rank == 0 else ""


def in_hex(limbs: Sequence[int]) -> str:
    """Of the limbs of all lanes, summed over ranks."""
    lanes = (limbs[i : i + LIMBS] for i in range(0, len(limbs), LIMBS))
    values = (sum(limb << 16 * i for i, limb in enumerate(lane)) % (1 << 64) for lane in lanes)
    return "".join(f"{value:016x}" for value in values)


def digest_sums(name: str, tensor: StateTensor, tick: Callable[[], None] = lambda: None) -> Sums:
    """What one box of a tensor adds to the digest's lanes."""
    sums = np.zeros(LANES, np.uint64)
    if not tensor.local.numel():
        return sums
    *seeds, present = _seeds(f"{name} {tensor.dtype} {tuple(tensor.shape)}")
    if not any(tensor.box.offsets):  # zeros add nothing: so that they are there shows
        sums += present
    for words, shape, offsets in _folded(*_as_words(tensor)):
        sums += _box_sums(words, shape, offsets, seeds, tick)
    return sums


Words = tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]  # a box, the whole's shape, offsets


def _folded(
    words: torch.Tensor, shape: tuple[int, ...], offsets: tuple[int, ...]
) -> Iterator[Words]:
    """A long row becomes rows of FOLD, else it would take as many keys as it has words; what the
    box has of the first and of the last of these comes by itself."""
    if len(shape) > 2 or shape[0] <= FOLD:
        yield words, shape, offsets
        return
    first, count, width = offsets[0], words.shape[0], shape[1]
    whole = (-(-shape[0] // FOLD), FOLD, width)
    stop = first + count
    inner, outer = min(stop, -(-first // FOLD) * FOLD), max(first, stop // FOLD * FOLD)
    for start, end in ((first, inner), (inner, max(inner, outer)), (max(inner, outer), stop)):
        if start < end:
            some = words[start - first : end - first]
            rows = (end - start) // FOLD or 1
            yield some.reshape(rows, -1, width), whole, (start // FOLD, start % FOLD, 0)


def _box_sums(
    words: torch.Tensor,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    seeds: Sequence[Sums],
    tick: Callable[[], None],
) -> Sums:
    sums = np.zeros(LANES, np.uint64)
    split = _split(shape)
    rows = _places(shape[:split], offsets[:split], words.shape[:split])
    columns = _places(shape[split:], offsets[split:], words.shape[split:])
    grid = words.reshape(len(rows), len(columns))
    row_keys, column_keys = _keys(seeds[0], rows), _keys(seeds[1], columns)
    for first, some in _slabs(grid):
        for row in range(0, len(some), max(1, CACHED // len(columns))):
            part = some[row : row + max(1, CACHED // len(columns))]
            start = first + row
            sums += _add(part, row_keys[:, start : start + len(part)], column_keys)
        tick()
    return sums


def _add(part: np.ndarray[Any, Any], row_keys: Any, column_keys: Any) -> Sums:
    """Of whole rows."""
    sums = np.zeros(LANES, np.uint64)
    for first in range(0, part.shape[1], CACHED):
        words = part[:, first : first + CACHED].astype(np.uint64)
        for lane in range(LANES):
            keys = column_keys[lane, first : first + CACHED]
            sums[lane : lane + 1] += np.sum(np.einsum("rc,c->r", words, keys) * row_keys[lane])
    return sums


def _slabs(grid: torch.Tensor) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    """(number of the first row, rows) in host memory, as unsigned words."""
    row_bytes = grid.shape[1] * grid.element_size()
    count = max(1, SLAB_BYTES // row_bytes)
    for first in range(0, grid.shape[0], count):
        rows = grid[first : first + count].cpu().numpy()
        yield first, rows.view(KEYED[grid.element_size()])


def _as_words(tensor: StateTensor) -> Words:
    """(the box as words, shape of the whole, the box's offsets), all with an axis at the end for
    the words of an element."""
    local = tensor.local.detach()
    width = local.element_size()
    words = max(1, width // WORD_BYTES)
    kind = {1: torch.uint8, 2: torch.int16}.get(width, torch.int32)
    split = local.contiguous().reshape(-1).view(kind).reshape(*local.shape, words)
    return split, (*tensor.shape, words), (*tensor.box.offsets, 0)


def _split(shape: Sequence[int]) -> int:
    """Where the axes are divided so that keys are fewest. The same for every box of a tensor."""
    sums = [prod(shape[:i]) + prod(shape[i:]) for i in range(len(shape) + 1)]
    return sums.index(min(sums))


def _places(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Any:
    """uint64: the index in row-major order of each place in the box, within ``shape``."""
    places = np.zeros((), np.uint64)
    for axis, offset, size in zip(shape, offsets, sizes, strict=True):
        index = np.arange(offset, offset + size, dtype=np.uint64)
        places = places[..., None] * np.uint64(axis) + index
    return places.reshape(-1)


def _seeds(text: str) -> tuple[Sums, Sums, Sums]:
    """For rows, columns and presence, by lane."""
    raw = hashlib.blake2b(text.encode(), digest_size=3 * LANES * 8).digest()
    rows, columns, present = np.frombuffer(raw, "<u8").reshape(3, LANES).astype(np.uint64)
    return rows, columns, present


def _keys(seeds: Sums, places: Any) -> Any:
    """uint64 [LANES, places], odd: SplitMix64's output function (Steele, Lea and Flood, 2014)."""
    x = seeds[:, None] + (places + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return (x ^ x >> np.uint64(31)) | np.uint64(1)
