"""The state digest: the same however the state is cut, and another one if anything is changed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from elastic_ft.core.sharding import Box
from elastic_ft.state import digest
from elastic_ft.state.digest import LANES, digest_sums, in_hex
from elastic_ft.state.tensors import StateTensor

SHAPES = [(), (1,), (7,), (20_000,), (33, 5), (6, 130), (4, 3, 5), (2, 3, 4, 5)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]


def made(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 100).to(dtype)


def cut(shape: tuple[int, ...], chance: random.Random) -> list[Box]:
    """Boxes that cover the shape once, by cuts along chosen axes at chosen places."""
    boxes = [Box.whole(shape)]
    for _ in range(5):
        box = boxes.pop(chance.randrange(len(boxes)))
        axes = [axis for axis, size in enumerate(box.sizes) if size > 1]
        if not axes:
            boxes.append(box)
            continue
        axis = chance.choice(axes)
        at = chance.randrange(1, box.sizes[axis])
        for first, size in ((0, at), (at, box.sizes[axis] - at)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[axis] += first
            sizes[axis] = size
            boxes.append(Box(tuple(offsets), tuple(sizes)))
    return boxes


def sums_of(tensor: torch.Tensor, boxes: list[Box], name: str = "model.w") -> list[int]:
    total = np.zeros(LANES, np.uint64)
    for box in boxes:
        index = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        total += digest_sums(name, StateTensor(tuple(tensor.shape), box, tensor[index]))
    return [int(lane) for lane in total]


def whole(tensor: torch.Tensor, name: str = "model.w") -> list[int]:
    return sums_of(tensor, [Box.whole(tuple(tensor.shape))], name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_cut_changes_it(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor, chance = made(shape, dtype), random.Random(str(shape))
    expected = whole(tensor)
    monkeypatch.setattr(digest, "SLAB_BYTES", 64)
    monkeypatch.setattr(digest, "CACHED", 16)
    assert whole(tensor) == expected
    for _ in range(8):
        assert sums_of(tensor, cut(shape, chance)) == expected


@pytest.mark.parametrize("dtype", DTYPES[:5], ids=str)
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_every_bit_counts(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor, chance = made(shape, dtype), random.Random(1)
    seen = {tuple(whole(tensor))}
    width = tensor.element_size()
    for bit in range(8 * width):
        changed = tensor.clone().reshape(-1).view(torch.uint8)
        place = chance.randrange(len(changed) // width) * width + bit // 8
        changed[place] ^= 1 << bit % 8
        seen.add(tuple(whole(changed.view(dtype).reshape(shape))))
    assert len(seen) == 1 + 8 * width


def test_what_hides_in_a_plain_sum_does_not_here() -> None:
    """Words exchanged, signs flipped in pairs, a rectangle of changes that adds up to nothing."""
    tensor = made((64, 48), torch.float32)
    rows, columns, signs, rectangle, zeros = (tensor.clone() for _ in range(5))
    rows[[3, 40]] = tensor[[40, 3]]
    columns[:, [1, 2]] = tensor[:, [2, 1]]
    signs[5, 6] *= -1
    signs[50, 7] *= -1
    words = rectangle.view(torch.int32)
    words[2, 3] += 9
    words[2, 8] -= 9
    words[7, 3] -= 9
    words[7, 8] += 9
    zeros[9] = 0
    variants = [tensor, rows, columns, signs, rectangle, zeros, tensor.T.contiguous()]
    assert len({tuple(whole(variant)) for variant in variants}) == len(variants)
    doubles = made((64, 48), torch.float64)
    flipped = doubles.clone()
    flipped[[1, 2], [3, 4]] *= -1
    assert whole(doubles) != whole(flipped)


def test_names_shapes_and_zeros_count() -> None:
    zeros = torch.zeros(4, 6)
    found = [whole(zeros), whole(zeros, "model.v"), whole(zeros.reshape(6, 4)), whole(zeros.half())]
    assert len({tuple(sums) for sums in found}) == len(found)
    assert whole(torch.zeros(0, 6)) == [0, 0]


def test_limbs_of_many_ranks_add_up() -> None:
    lanes = [(1 << 64) - 1, 5]
    limbs = [lane >> 16 * i & 0xFFFF for lane in lanes for i in range(4)]
    assert in_hex(limbs) == f"{lanes[0]:016x}{5:016x}"
    thousand = [1000 * limb for limb in limbs]
    assert in_hex(thousand) == f"{1000 * lanes[0] % (1 << 64):016x}{5000:016x}"


def test_a_mark_of_progress_comes_with_every_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "SLAB_BYTES", 1 << 10)
    marks: list[int] = []
    tensor = made((64, 64), torch.float32)
    box = Box.whole((64, 64))
    digest_sums("w", StateTensor((64, 64), box, tensor), lambda: marks.append(1))
    assert len(marks) == 16
