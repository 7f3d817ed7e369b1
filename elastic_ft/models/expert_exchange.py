"""Which expert computes what: rows in the order of experts, also where these are on several ranks.

Expert parallelism: of each mixture's experts every rank of a group has some, and tokens travel.

A rank sends each token to those that have its experts, and gets back what they made of it
(Lepikhin et al., 2021, section 3.2). None is left out: what ranks send each other is as uneven as
the routers are. Who has no expert, or is sent no token, takes part all the same.

Shape suffixes: D width, N tokens, X experts, S of them a token; R ranks of the group, Y experts of
this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from elastic_ft.torch_private import exchange_rows

Compute = Callable[
    [Tensor, Tensor], Tensor
]  # of rows in the order of experts, and of each how many


def by_experts(
    compute: Compute, x_ND: Tensor, chosen_NS: Tensor, weights_NS: Tensor, experts: int
) -> Tensor:
    """Of each token the weighed sum of what the experts that were chosen for it make of it."""
    per_token = chosen_NS.shape[1]
    order = chosen_NS.flatten().argsort(stable=True)
    counts_X = how_many(chosen_NS, experts)
    made_ND = compute(x_ND[order // per_token], counts_X)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    out_NSD = made_ND[places].unflatten(0, (-1, per_token))
    return (out_NSD * weights_NS[..., None].to(out_NSD.dtype)).sum(dim=1)


def how_many(chosen: Tensor, experts: int) -> Tensor:
    """int64 [X]: how often each is in ``chosen``. Waits for no device, as ``bincount`` does."""
    flat = chosen.flatten()
    return flat.new_zeros(experts).scatter_add_(0, flat, torch.ones_like(flat))


def local(weight: Tensor) -> Tensor:
    """This rank's part."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def of_nothing(rows_ND: Tensor, weights: Sequence[Tensor]) -> Tensor | None:
    """What experts with such weights make of no rows at all; None if there are some.

    With gradients of zero: ranks that have the same experts may have some others. But FSDP2 can't
    reduce gradients that are all empty: who has no expert has none.
    """
    if not len(weights[0]):
        return rows_ND.clone()
    return None if len(rows_ND) else rows_ND * sum(weight.sum() for weight in weights)


@lru_cache(maxsize=8)  # each layer asks, and to bring it to the device is to wait
def _slots_of(owners: tuple[int, ...], device: torch.device) -> Tensor:
    order = sorted(range(len(owners)), key=lambda expert: (owners[expert], expert))
    return torch.tensor(order).argsort().to(device)


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """Attributes:
    group: the ranks that share experts out.
    owners: of each expert, which of them has it.
    """

    group: dist.ProcessGroup
    owners: tuple[int, ...]

    def slots(self, chosen: Tensor) -> Tensor:
        """Experts by where they are: those of the first rank come first, each rank's in order."""
        if self.owners == tuple(sorted(self.owners)):
            return chosen
        return _slots_of(self.owners, chosen.device)[chosen]

    def compute(self, experts: Compute, x_ND: Tensor, counts_X: Tensor) -> Tensor:
        """What all ranks' experts make of ``x``: rows in ``slots``' order, ``counts`` of each.

        ``experts``: this rank's, called with rows of everyone's and how many each of them gets.
        """
        ranks = dist.get_world_size(self.group)
        shares_R = [self.owners.count(rank) for rank in range(ranks)]
        own = shares_R[dist.get_rank(self.group)]
        arriving = exchange_rows(counts_X, [own] * ranks, shares_R, self.group)
        arriving_RY = arriving.view(ranks, own)
        leaving_R = torch.stack([part.sum() for part in counts_X.split(shares_R)])
        sent, received = torch.stack([leaving_R, arriving_RY.sum(dim=1)]).tolist()
        got_ND = exchange_rows(x_ND, received, sent, self.group)
        # Rows come rank by rank; experts want them expert by expert.
        expert = torch.arange(own, device=x_ND.device).repeat(ranks)
        expert_N = expert.repeat_interleave(arriving_RY.flatten(), output_size=sum(received))
        order = expert_N.argsort(stable=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        made_ND = experts(got_ND[order], arriving_RY.sum(dim=0))
        return exchange_rows(made_ND[places], sent, received, self.group)
