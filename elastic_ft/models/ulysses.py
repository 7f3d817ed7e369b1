"""Context parallelism by heads (Ulysses): in attention ranks trade positions for heads.

Outside attention each rank of a group has some positions of every sample, in it all positions of
some heads: queries, keys and values go there in one all-to-all, what attention returns comes back
in another, and gradients go the same ways (Jacobs et al., 2023). Whoever has a head sees the whole
sequence of it: windows and documents are as on one rank, and all ranks have as much to do.

Where fewer key-value heads than ranks would have to be dealt, or a number that does not divide,
they are repeated first, no more than it takes.

Shape suffixes as in ``context_parallel``; R ranks, h = H / R of the query heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Any, ClassVar

import torch
from torch import Tensor

from elastic_ft.models.context_parallel import ContextShare, attend_here
from elastic_ft.torch_private import exchange_rows


@dataclass(frozen=True, slots=True)
class WholeSequence:
    """What attention of some heads is over: nothing is gathered, and it is one chunk."""

    ranks: ClassVar[int] = 1
    chunks: ClassVar[tuple[int]] = (0,)

    def gather(self, kv: Tensor) -> Tensor:
        return kv

    def scatter(self, sums: Tensor) -> Tensor:
        return sums


@dataclass(frozen=True, slots=True)
class HeadShare(ContextShare):
    """This rank's share of each sequence, and in attention of the heads."""

    def attend(
        self, q_BtHE: Tensor, k_BtKE: Tensor, v_BtKE: Tensor, *how: Any, **named: Any
    ) -> Tensor:
        """As ``ContextShare.attend``. H must be a multiple of the ranks."""
        again = lcm(k_BtKE.shape[2], self.ranks) // k_BtKE.shape[2]
        given = (q_BtHE, *(x.repeat_interleave(again, dim=2) for x in (k_BtKE, v_BtKE)))
        by_rank = [x.unflatten(2, (self.ranks, -1)) for x in given]
        sizes = [x.shape[3] for x in by_rank]
        all_BThE = self._to_heads(torch.cat(by_rank, dim=3))
        q, k, v = all_BThE.split(sizes, dim=2)
        mixed_BThE = attend_here(WholeSequence(), q, k, v, *how, **named)
        return self._to_positions(mixed_BThE)

    def swap(self, parts_R: Tensor) -> Tensor:
        """[R, ...]: of each rank what it has for this one."""
        each: Any = [1] * self.ranks
        return exchange_rows(parts_R.contiguous(), each, each, self.group)

    def _to_heads(self, x_BtRhE: Tensor) -> Tensor:
        """[B, T, h, E], in the sequence's order."""
        by_rank = self.swap(x_BtRhE.movedim(2, 0)).movedim(0, 1).unflatten(2, (2, -1))
        early, late = by_rank.unbind(2)
        return torch.cat([early, late.flip(1)], dim=1).flatten(1, 2)

    def _to_positions(self, x_BThE: Tensor) -> Tensor:
        """[B, t, H, E]."""
        early, late = x_BThE.unflatten(1, (2, self.ranks, -1)).unbind(1)
        by_rank = torch.stack([early, late.flip(1)], dim=2).flatten(2, 3)
        return self.swap(by_rank.movedim(1, 0)).movedim(0, 2).flatten(2, 3)
