"""Muon for a model's inner matrices, AdamW for the rest: the same step in every layout.

Muon (Jordan and others, 2024) steps along the momentum with its singular values made equal, by five
Newton-Schulz iterations. torch's does them in bfloat16, where the rounding of a sum over ranks
becomes 3e-4 of a loss within 20 steps; here they are in float32. An iteration needs its matrix as a
whole: of the ranks that have parts of matrices each gets some of them, and gives back what it made.
All that ranks say to each other is said by ``gather``, before anything is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from elastic_ft import torch_private
from elastic_ft.core.sharding import Box
from elastic_ft.engines.modules import local_part

MATRIX = "matrix"  # key of an optimizer's group: whether Muon steps it
MATRIX_DIMENSIONS = (2, 3)  # three: a matrix of each expert
EDGES = (r"\w*embed\w*", "wte", "wpe", "lm_head", "head", "score", "classifier")
_EDGE = re.compile(rf"(.*\.)?({'|'.join(EDGES)})\.[^.]*|output\.[^.]*")
COEFFICIENTS, ITERATIONS, EPSILON = (3.4445, -4.7750, 2.0315), 5, 1e-7
RMS = 0.2  # of an update's entries, about what AdamW's have: one rate and one decay for both


def is_inner_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Of a whole model's parameter: neither a vector nor what embeds or reads out tokens."""
    return parameter.dim() in MATRIX_DIMENSIONS and _EDGE.fullmatch(name) is None


class MuonWithAdamW(torch.optim.AdamW):
    """Groups with a true ``matrix`` are stepped by Muon, the others by AdamW.

    Args:
        momentum: of matrices. nesterov: looks one step of it ahead.
        lr, weight_decay: of both; others are AdamW's.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        **adamw: Any,
    ) -> None:
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum: expected 0 or more and less than 1, found {momentum}")
        super().__init__(groups, **adamw)
        self._momentum, self._nesterov = momentum, nesterov
        self._directions: list[Tensor] | None = None

    def gather(self) -> None:
        """Makes the next step's directions of its gradients. Has collectives, and writes nothing.

        Every rank has to call it, with gradients of the same parameters.
        """
        with torch.no_grad():
            stepped = [p for group in self._of_matrices() for p in _with_gradient(group)]
            self._directions = _orthogonal([self._wanted(p) for p in stepped])

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        if self._directions is None and any(group["lr"] for group in self._of_matrices()):
            self.gather()
        directions, self._directions = iter(self._directions or ()), None
        matrices = self._of_matrices()
        with torch.no_grad():
            for group in matrices:
                for parameter in _with_gradient(group):
                    self._move(parameter, next(directions, None), group)
        every = [*self.param_groups]
        self.param_groups[:] = [group for group in every if not group.get(MATRIX)]
        try:
            return super().step(closure)
        finally:
            self.param_groups[:] = every

    def _of_matrices(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group.get(MATRIX)]

    def _wanted(self, parameter: nn.Parameter) -> Tensor:
        """The momentum that the step will have, or that one step later; of the same layout."""
        assert parameter.grad is not None
        kept = self.state[parameter].get("momentum_buffer")
        gradient = local_part(parameter.grad)
        weight = self._momentum**2 if self._nesterov else self._momentum
        past = torch.zeros_like(gradient) if kept is None else local_part(kept)
        wanted = gradient.float().lerp(past.float(), weight)
        if not isinstance(parameter, DTensor):
            return wanted
        return DTensor.from_local(
            wanted,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def _move(
        self, parameter: nn.Parameter, direction: Tensor | None, group: dict[str, Any]
    ) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        local = local_part(parameter)
        local_part(state["momentum_buffer"]).lerp_(local_part(parameter.grad), 1.0 - self._momentum)
        if direction is None:  # of a rate of zero
            return
        rate = RMS * max(parameter.shape[-2:]) ** 0.5
        local.mul_(1.0 - group["lr"] * group["weight_decay"])
        local.add_(direction.to(local.dtype), alpha=-group["lr"] * rate)


def _with_gradient(group: dict[str, Any]) -> list[nn.Parameter]:
    return [parameter for parameter in group["params"] if parameter.grad is not None]


def newton_schulz(matrices: Tensor) -> Tensor:
    """``matrices`` [..., m, n] with singular values near 1 (0.7 to 1.2), in their dtype.

    Source: https://kellerjordan.github.io/posts/muon/
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + EPSILON)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


def _orthogonal(wanted: Sequence[Tensor]) -> list[Tensor]:
    """The directions along ``wanted``: of each, this rank's part."""
    found: dict[int, Tensor] = {}
    by_mesh: dict[Any, list[int]] = {}
    for number, each in enumerate(wanted):
        rows = _dimension_of_rows(each)
        if rows is not None:
            by_mesh.setdefault((each.device_mesh, rows), []).append(number)  # type: ignore[attr-defined]
        elif isinstance(each, DTensor) and not _has_whole_matrices(each):
            found[number] = _mine(newton_schulz(each.full_tensor()), each)
        else:
            found[number] = newton_schulz(local_part(each))
    for (mesh, dimension), numbers in by_mesh.items():
        group = mesh.get_group(dimension)
        numbers.sort(key=lambda number: -wanted[number].numel())  # of a size, so none waits long
        ranks = dist.get_world_size(group)
        for first in range(0, len(numbers), ranks):
            some = numbers[first : first + ranks]
            parts = _each_by_one_rank([wanted[number] for number in some], group)
            found |= dict(zip(some, parts, strict=True))
    return [found[number] for number in range(len(wanted))]


def _dimension_of_rows(wanted: Tensor) -> int | None:
    """The dimension of the mesh over which a matrix is cut by rows, if by that alone."""
    if not isinstance(wanted, DTensor) or wanted.dim() != 2:
        return None
    cuts = [n for n, each in enumerate(wanted.placements) if not each.is_replicate()]
    is_so = len(cuts) == 1 and type(wanted.placements[cuts[0]]) is Shard
    return cuts[0] if is_so and wanted.placements[cuts[0]].is_shard(0) else None


def _has_whole_matrices(wanted: DTensor) -> bool:
    """Nothing is cut but experts from each other."""
    cut = wanted.dim() - 2
    return all(each.is_replicate() or (cut and each.is_shard(0)) for each in wanted.placements)


def _each_by_one_rank(matrices: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Of at most as many ``matrices`` as ranks the n-th rank makes the n-th's direction."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    parts = [local_part(each) for each in matrices]
    sent = [part.numel() for part in parts] + [0] * (ranks - len(parts))
    mine = matrices[rank].shape if rank < len(matrices) else (0, 0)
    rows = _rows(mine[0], ranks)
    received = [count * mine[1] for count in rows]
    whole = parts[0].new_empty(sum(received))
    dist.all_to_all_single(whole, _flat(parts), received, sent, group)
    if whole.numel():
        whole = newton_schulz(whole.view(mine)).reshape(-1)
    made = whole.new_empty(sum(sent))
    dist.all_to_all_single(made, whole, sent, received, group)
    split = made.split(sent)[: len(parts)]
    return [each.view(part.shape) for each, part in zip(split, parts, strict=True)]


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def _rows(count: int, ranks: int) -> list[int]:
    """How many rows of a matrix each rank has, as DTensor cuts them."""
    each = -(-count // ranks)
    return [max(0, min(each, count - each * rank)) for rank in range(ranks)]


def _mine(whole: Tensor, like: DTensor) -> Tensor:
    """This rank's part of ``whole``."""
    sizes, offsets = torch_private.local_shape_and_offset(
        like.shape, like.device_mesh, like.placements
    )
    return whole[Box(offsets, sizes).slices_within(Box.whole(like.shape))]
