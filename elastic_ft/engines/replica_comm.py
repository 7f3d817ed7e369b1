"""Gradients summed over replicas in fewer bytes, with error feedback (Karimireddy et al., 2019).

What a rank can't say of its gradient in a step, its *residual*, is added to the next step's. All of
it is in units of the mean gradient: the sum over replicas is what training still owes to itself. It
is state, and changes with the optimizer's step or not at all (I4), as that step may be skipped, or
never be agreed on.

``comm.parts`` says what a residual is: one of so many parts, a replica's own, or, where it is 1,
the sum, which all replicas have: after ``share``, and as a generation begins.

Nothing overlaps with the backward: parameters are exchanged after it, as many at a time as their
memory allows.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

from elastic_ft.config import CommConfig
from elastic_ft.engines.int8 import BLOCK, all_gather, pack_blocks, unpack_blocks
from elastic_ft.engines.modules import local_part
from elastic_ft.engines.unused import check_all_used
from elastic_ft.groups.groups import Groups
from elastic_ft.state.residuals import PARTS, residual_of

Tensors = dict[str, Tensor]  # by parameter
TOGETHER = 32 << 20  # numbers that are exchanged at a time, or one parameter: it takes memory
PIECE = 16 << 20  # numbers that are shared at a time: 64 MB in float32


@dataclass(slots=True)
class Summed:
    """Of one reduction: what all replicas now have, and what this one could not say."""

    totals: Tensors
    residuals: Tensors


class ReplicaComm:
    """Of one rank's ``parameters``, by name in the whole model. Without a method, nothing."""

    def __init__(self, comm: CommConfig, parameters: Mapping[str, nn.Parameter]) -> None:
        self._method, self._rank = comm.compress_replicas, comm.powersgd_rank
        self._parameters = {n: p for n, p in parameters.items() if p.requires_grad}
        if self._method is None:
            self._parameters = {}
        kept = (n for n, p in self._parameters.items() if self._method == "int8" or p.dim() > 1)
        self._residuals = {n: torch.zeros_like(self._parameters[n].detach()) for n in kept}
        self._parts = torch.ones((), dtype=torch.int64)
        self._pending: Tensors = {}
        self._factors: Tensors = {}  # of PowerSGD: equal on all replicas
        self._pending_factors: Tensors = {}
        self._group: dist.ProcessGroup | None = None
        self._replicas = 1

    def attach(self, groups: Groups) -> None:
        layout = groups.assignment.layout
        self._replicas = layout.dp_replicate
        self._group, self._factors = None, {}  # a joiner has none
        if groups.mesh is not None and 1 < self._replicas < layout.world_size:
            self._group = groups.mesh.get_group("dp_replicate")

    @property
    def sums_by_itself(self) -> bool:
        """In place of DDP."""
        return self._method is not None

    def keep_ddp_from_summing(self, wrapped: DistributedDataParallel) -> None:
        if self.sums_by_itself:
            wrapped.register_comm_hook(None, _left_alone)

    # ------------------------------------------------------------------------------ state

    def sources(self) -> Iterator[tuple[str, Tensor]]:
        """What is part of the state."""
        for name, residual in self._residuals.items():
            yield residual_of(name), residual
        if self._method is not None:
            yield PARTS, self._parts

    def clear(self) -> None:
        for residual in self._residuals.values():
            local_part(residual).zero_()
        self._parts.fill_(1)

    def share(self, check: Callable[[], None], progress: Callable[[], None]) -> None:
        """Between two steps: from now on all replicas have the sum. ``check`` raises if the
        collective was aborted: then nothing has changed here. ``progress``: told of each piece."""
        if self._replicas == 1 or int(self._parts) == 1:
            return
        kept = [local_part(residual) for residual in self._residuals.values()]
        flat = torch.cat([residual.flatten() for residual in kept])
        for piece in flat.split(PIECE):
            dist.all_reduce(piece, group=self._group)
            check()
            progress()
        for residual, total in zip(kept, flat.split([r.numel() for r in kept]), strict=True):
            residual.copy_(total.view(residual.shape))
        self._parts.fill_(1)

    # --------------------------------------------------------------------------- each step

    @torch.no_grad()
    def reduce(self) -> None:
        """Once the gradients of this replica are complete: makes them the mean over all. Raises
        ConfigError if there is none for a parameter."""
        if self._method is None:
            return
        check_all_used(self._parameters)
        gradients = {
            n: local_part(p.grad) for n, p in self._parameters.items() if p.grad is not None
        }
        share = 1.0 / self._replicas if int(self._parts) == 1 else 1.0
        self._pending, self._pending_factors = {}, {}
        for some in _together(gradients):
            self._reduce(some, share)

    def _reduce(self, gradients: Tensors, share: float) -> None:
        """``share``: of a residual, this replica's."""
        owed = {}
        for name, gradient in gradients.items():
            owed[name] = gradient / self._replicas
            if name in self._residuals:
                owed[name].add_(local_part(self._residuals[name]), alpha=share)
        if self._replicas == 1:  # all of it is said
            zeros = {n: torch.zeros_like(owed[n]) for n in owed if n in self._residuals}
            summed = Summed(owed, zeros)
        else:
            summed = self._int8(owed) if self._method == "int8" else self._powersgd(owed)
        self._pending |= summed.residuals
        for name, gradient in gradients.items():
            gradient.copy_(summed.totals[name])

    def commit(self) -> None:
        """With the optimizer's step."""
        for name, residual in self._pending.items():
            local_part(self._residuals[name]).copy_(residual)
        if self._method is not None:
            self._parts.fill_(self._replicas)
        self._factors, self._pending, self._pending_factors = self._pending_factors, {}, {}

    def _int8(self, owed: Tensors) -> Summed:
        """Each replica sums one part of all gradients and says the sum to all. What that rounds
        off goes into its own residual too."""
        flat, own = _flat(owed), dist.get_rank(self._group)
        each = -(-flat.numel() // self._replicas)
        each += -each % BLOCK
        rows = pad(flat, (0, each * self._replicas - flat.numel())).view(self._replicas, each)
        codes = pack_blocks(rows)
        received = torch.empty_like(codes)
        dist.all_to_all_single(received, codes, group=self._group)
        part = unpack_blocks(received, each).sum(dim=0, keepdim=True)
        said = pack_blocks(part)
        everyones = torch.empty_like(codes)
        all_gather(everyones, said, group=self._group)
        left = rows - unpack_blocks(codes, each)
        left[own] += (part - unpack_blocks(said, each))[0]
        totals = unpack_blocks(everyones, each).flatten()[: flat.numel()]
        return Summed(_by_name(totals, owed), _by_name(left.flatten()[: flat.numel()], owed))

    def _powersgd(self, owed: Tensors) -> Summed:
        """Vogels et al., 2019: each matrix M by P Q^T of a low rank, with Q = M^T P, and P an
        orthogonal basis of what M makes of the last step's Q. What is small is sent as it is."""
        matrices = {name: owed[name].flatten(1) for name in owed if self._is_worth_it(owed[name])}
        rest = {name: owed[name] for name in owed if name not in matrices}
        before = {n: self._factor(n, m) for n, m in matrices.items()}
        bases = {name: matrix @ before[name] for name, matrix in matrices.items()}
        first = _flat(rest | bases)
        dist.all_reduce(first, group=self._group)
        found = _by_name(first, rest | bases)
        finite = torch.isfinite(first).all()  # the same on all replicas; asked of no device
        left = {name: torch.zeros_like(rest[name]) for name in rest if name in self._residuals}
        if not matrices:
            return Summed(found, left)
        bases = {n: torch.where(finite, _orthogonal(found[n]), found[n]) for n in bases}
        own = {name: matrix.T @ bases[name] for name, matrix in matrices.items()}
        second = _flat(own)
        dist.all_reduce(second, group=self._group)
        factors = _by_name(second, own)
        totals = {name: found[name] for name in rest}
        for name, matrix in matrices.items():
            totals[name] = (bases[name] @ factors[name].T).view(owed[name].shape)
            left[name] = (matrix - bases[name] @ own[name].T).view(owed[name].shape)
        self._pending_factors |= factors
        return Summed(totals, left)

    def _is_worth_it(self, part: Tensor) -> bool:
        rows = part.shape[0] if part.dim() > 1 else 0
        return bool(rows) and self._rank * (rows + part.numel() // rows) < part.numel()

    def _factor(self, name: str, matrix: Tensor) -> Tensor:
        if name in self._factors:
            return self._factors[name]
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        first = torch.randn(matrix.shape[1], self._rank, generator=generator, device="cpu")
        return first.to(matrix.device, matrix.dtype)


# ------------------------------------------------------------------------------- helpers


def _left_alone(_, bucket):  # type: ignore[no-untyped-def]  # torch checks annotations, unless strings
    """DDP has this rank's own gradients put into place, and sends nothing."""
    future: Future[Tensor] = Future()
    future.set_result(bucket.buffer())
    return future


def _together(tensors: Tensors) -> Iterator[Tensors]:
    """What is exchanged at a time, equal on all replicas."""
    some: Tensors = {}
    numbers = 0
    for name, tensor in tensors.items():
        if some and numbers + tensor.numel() > TOGETHER:
            yield some
            some, numbers = {}, 0
        some[name] = tensor
        numbers += tensor.numel()
    if some:
        yield some


def _flat(tensors: Tensors) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


def _by_name(flat: Tensor, like: Tensors) -> Tensors:
    parts = flat.split([tensor.numel() for tensor in like.values()])
    return {n: part.view(like[n].shape) for n, part in zip(like, parts, strict=True)}


def _orthogonal(matrix: Tensor) -> Tensor:
    return torch.linalg.qr(matrix)[0]
