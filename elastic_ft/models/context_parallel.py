"""Context parallelism: the ranks of a group have some positions of each sample.

A sequence is cut into 2 x ranks chunks, of which rank r has chunks r and 2 x ranks - 1 - r: with
causal attention all have as much to do. Everything but attention is of one position. There each
rank gathers keys and values of all positions, and merges what it finds in earlier chunks and in
the chunk itself by their log-sum-exp: the two are plain attention, whole and causal, so there is no
mask, and kernels are the fastest. In backward they are gathered again, and not kept (Llama Team,
2024, 3.3.2). Where each position sees a window of those before it, queries are taken some at a
time, and the window's far edge is causal attention backwards. Documents that do not see each other
are computed one after the other.

Shape suffixes as in ``decoder``; t is T / ranks, C = t / 2 a chunk's positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from elastic_ft.errors import ModelError

_ops: Any = torch.ops.aten
# torch 2.11 knows the second names alone, and 2.13 warns of them.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class ContextShare:
    """This rank's share of each sequence.

    Attributes:
        group: the ranks that share the positions.
        multiple: of which each rank's number of positions is one, beside 2.
    """

    group: dist.ProcessGroup
    multiple: int = 1

    @property
    def ranks(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def cut(self, whole_BT: Tensor, filler: int = 0) -> Tensor:
        """[B, t]. ``filler`` pads a sequence: it comes last, where no position sees it."""
        padded_BT = F.pad(whole_BT, (0, self._missing(whole_BT)), value=filler)
        mine_t = self.positions(padded_BT.shape[1] // self.ranks, padded_BT.device)
        return padded_BT[:, mine_t]

    def _missing(self, whole_BT: Tensor) -> int:
        return -whole_BT.shape[1] % (2 * self.ranks * self.multiple)

    def inputs(
        self, more: Mapping[str, Tensor], tokens_BT: Tensor, foreign: bool
    ) -> dict[str, Tensor]:
        """What a model takes beside tokens, of ``more`` that came with whole ``tokens``.

        "position_ids" [B, t] are this rank's: if there are some, or to a model of transformers
        (``foreign``). "documents" [B, T] number those that they tell. Raises ModelError.
        """
        if odd := more.keys() - {"position_ids"}:
            raise ModelError(
                "parallel.cp: ranks that share positions take tokens, labels and position_ids, "
                f"found {min(odd)} in a batch"
            )
        places_BT = more.get("position_ids")
        if places_BT is not None:
            documents_BT = documents_of(places_BT, foreign)
            last = documents_BT[:, -1:].expand(-1, self._missing(documents_BT))
            documents_BT = torch.cat([documents_BT, last], dim=1)
            return {"position_ids": self.cut(places_BT), "documents": documents_BT}
        if not foreign:
            return {}
        places_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        return {"position_ids": self.cut(places_T.expand_as(tokens_BT))}

    def whole(self, counts: Tensor) -> Tensor:
        """Summed over the ranks: what is counted of each sequence. It has no gradient."""
        whole = counts.detach().clone()
        dist.all_reduce(whole, group=self.group)
        return whole

    def positions(self, own: int, device: torch.device) -> Tensor:
        """Of this rank's ``own`` positions, their places in the sequence."""
        chunk = own // 2
        at = torch.arange(chunk, device=device)
        return torch.cat([number * chunk + at for number in self.chunks])

    @property
    def chunks(self) -> tuple[int, ...]:
        """Those that it has of the sequence, by number."""
        return self.rank, 2 * self.ranks - 1 - self.rank

    def attend(
        self, q_BtHE: Tensor, k_BtKE: Tensor, v_BtKE: Tensor, *how: Any, **named: Any
    ) -> Tensor:
        """``attend_here``, of this rank's positions to all before them."""
        return attend_here(self, q_BtHE, k_BtKE, v_BtKE, *how, **named)

    def gather(self, kv_2BKtE: Tensor) -> Tensor:
        """[2, B, K, T, E], in the sequence's order."""
        own = kv_2BKtE.movedim(3, 0).contiguous()
        everyones = own.new_empty(self.ranks * own.shape[0], *own.shape[1:])
        _all_gather(everyones, own, group=self.group)
        # Without an index: one that is not on the device makes this thread wait for it.
        early, late = everyones.unflatten(0, (self.ranks, 2, -1)).unbind(1)
        return torch.cat([early, late.flip(0)]).flatten(0, 1).movedim(0, 3)

    def scatter(self, sums_2BKTE: Tensor) -> Tensor:
        """[2, B, K, t, E]: this rank's positions, summed over ranks."""
        early, late = sums_2BKTE.movedim(3, 0).unflatten(0, (2, self.ranks, -1)).unbind(0)
        by_rank = torch.stack([early, late.flip(0)], dim=1).flatten(0, 2)
        own = by_rank.new_empty(by_rank.shape[0] // self.ranks, *by_rank.shape[1:])
        _reduce_scatter(own, by_rank, group=self.group)
        return own.movedim(0, 3)


class Keys(Protocol):
    """Where attention's keys and values come from: other ranks, or these have them all."""

    @property
    def ranks(self) -> int: ...

    @property
    def chunks(self) -> tuple[int, ...]: ...

    def gather(self, kv_2BKtE: Tensor) -> Tensor: ...

    def scatter(self, sums_2BKTE: Tensor) -> Tensor: ...


def attend_here(
    keys: Keys,
    q_BtHE: Tensor,
    k_BtKE: Tensor,
    v_BtKE: Tensor,
    scale: float | None = None,
    window: int | None = None,
    documents_BT: Tensor | None = None,
) -> Tensor:
    """Causal attention of the positions here to all before them, as ``keys`` gathers these:
    [B, t, H, E].

    ``scale``: of scores; None: E^-0.5. ``window``: each position sees so many, itself the last of
    them; None: all. ``documents``: which numbers follow one another, equal ones see each other;
    None: all.
    """
    kv = torch.stack([k_BtKE, v_BtKE]).transpose(2, 3)
    q_BHtE = q_BtHE.transpose(1, 2).contiguous()
    spans = _spans(documents_BT, q_BHtE.shape[2] * keys.ranks)
    out_BHtE: Tensor = _Attend.apply(q_BHtE, kv, keys, scale, _Seen(spans, window))
    return out_BHtE.transpose(1, 2)


def documents_of(position_ids_BT: Tensor, jumps: bool = False) -> Tensor:
    """int64 [B, T]: numbers of the documents that sequences are made of, from 0.

    One begins where a position is not greater than the one before; with ``jumps``, as transformers
    has it, also where it is greater by more than one.
    """
    steps = position_ids_BT[:, 1:] - position_ids_BT[:, :-1]
    begins = steps != 1 if jumps else steps <= 0
    return F.pad(begins.cumsum(dim=1), (1, 0))


_Kind = Literal["causal", "all", "backwards", "itself"]


class _Span(NamedTuple):
    """A document in some rows of a batch; or, ``alone``, several of one position each: padding
    whose places are equal."""

    rows: slice
    first: int
    end: int
    alone: bool = False


class _Seen(NamedTuple):
    """What positions see: of their document, a window if there is one."""

    documents: list[_Span]
    window: int | None


class _Block(NamedTuple):
    """One kernel's part of attention: queries here, and keys in the sequence, that they see.

    Of as many keys as queries, query n sees those up to n ("causal"), from n on ("backwards"), or
    n alone ("itself").
    """

    rows: slice
    queries: slice
    keys: slice
    kind: _Kind


_known: Any = WeakIdKeyDictionary()  # spans: each layer asks, and to find them is to wait


def _spans(documents_BT: Tensor | None, length: int) -> list[_Span]:
    """Where they are; in all rows at once if they are at the same places."""
    if documents_BT is None:
        return [_Span(slice(None), 0, length)]
    found: list[_Span] | None = _known.get(documents_BT)
    if found is None:
        found = _known[documents_BT] = _found_spans(documents_BT, length)
    return found


def _found_spans(documents_BT: Tensor, length: int) -> list[_Span]:
    borders: list[list[int]] = [[0] for _ in documents_BT]
    for row, before in (documents_BT[:, 1:] != documents_BT[:, :-1]).nonzero().tolist():
        borders[row].append(before + 1)
    alike = all(row == borders[0] for row in borders)
    return [
        _Span(slice(None) if alike else slice(number, number + 1), *place)
        for number, row in enumerate(borders[:1] if alike else borders)
        for place in _with_those_alone([*row, length])
    ]


def _with_those_alone(borders: list[int]) -> Iterator[tuple[int, int, bool]]:
    """(first, end, whether each is alone), of what is between two borders each."""
    for alone, some in groupby(pairwise(borders), lambda place: place[1] - place[0] == 1):
        places = [*some]
        if alone:
            places = [(places[0][0], places[-1][1])]
        yield from ((*place, alone) for place in places)


def _blocks(context: Keys, own: int, seen: _Seen) -> Iterator[_Block]:
    """What attention is made of. Of some queries, the causal block with themselves comes first."""
    chunk, window = own // len(context.chunks), seen.window or own * context.ranks
    for half, number in enumerate(context.chunks):
        here = (half - number) * chunk
        for rows, first, end, alone in seen.documents:
            begin, end = max(first, number * chunk), min(end, (number + 1) * chunk)
            if (alone or window == 1) and begin < end:
                yield _Block(rows, slice(begin + here, end + here), slice(begin, end), "itself")
                continue
            for start, stop in _tiles(first, begin, end, window):
                queries = slice(start + here, stop + here)
                yield _Block(rows, queries, slice(start, stop), "causal")
                if (since := max(first, stop - window)) < start:
                    yield _Block(rows, queries, slice(since, start), "all")
                if start - first >= window and stop - start > 1:
                    but_the_last = slice(start + here, stop - 1 + here)  # which sees none of them
                    far_edge = slice(start - window + 1, stop - window)
                    yield _Block(rows, but_the_last, far_edge, "backwards")


def _tiles(first: int, begin: int, end: int, window: int) -> Iterator[tuple[int, int]]:
    """What is from ``begin`` to ``end``, cut wherever a whole window after ``first`` ends."""
    while begin < end:
        stop = min(end, begin + window - (begin - first) % window)
        yield begin, stop
        begin = stop


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BHtE: Tensor,
        kv_2BKtE: Tensor,
        context: Keys,
        scale: float | None,
        seen: _Seen,
    ) -> Tensor:
        k_BHTE, v_BHTE = _expanded(context.gather(kv_2BKtE), q_BHtE.shape[1])
        out = torch.empty_like(q_BHtE, dtype=torch.float32)
        lse = torch.empty(q_BHtE.shape[:3], dtype=torch.float32, device=q_BHtE.device)
        for rows, mine, keys, kind in _blocks(context, q_BHtE.shape[2], seen):
            of_block = q_BHtE[rows, :, mine], k_BHTE[rows, :, keys], v_BHTE[rows, :, keys]
            found = _attention(*of_block, kind, scale)
            if kind in ("all", "backwards"):
                found = _merged((out[rows, :, mine], lse[rows, :, mine]), found)
            out[rows, :, mine], lse[rows, :, mine] = found
        out = out.to(q_BHtE.dtype)
        ctx.save_for_backward(q_BHtE, kv_2BKtE, out, lse)
        ctx.of = context, scale, seen
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        q, kv, out, lse = ctx.saved_tensors
        (context, scale, seen), dout = ctx.of, gradients[0].contiguous()
        heads, kv_heads = q.shape[1], kv.shape[2]
        whole = context.gather(kv)
        k, v = _expanded(whole, heads)
        dq = torch.zeros_like(q, dtype=torch.float32)
        dwhole = torch.zeros_like(whole, dtype=torch.float32)
        for rows, mine, keys, kind in _blocks(context, q.shape[2], seen):
            of_block = [x[rows, :, mine] for x in (dout, q, out, lse)]
            of_block += [k[rows, :, keys], v[rows, :, keys]]
            dq_, *dkv = _attention_backward(*of_block, kind, scale)
            dq[rows, :, mine] += dq_
            for number, gradient in enumerate(dkv):
                by_kv_head = gradient.float().unflatten(1, (kv_heads, heads // kv_heads)).sum(2)
                dwhole[number][rows, :, keys] += by_kv_head
        return dq.to(q.dtype), context.scatter(dwhole).to(kv.dtype), None, None, None


def _expanded(kv_2BKTE: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Keys and values of each query head."""
    k, v = kv_2BKTE.repeat_interleave(heads // kv_2BKTE.shape[2], dim=2)
    return k, v


def _merged(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both: (output, log-sum-exp), in float32."""
    lse = torch.logaddexp(a[1], b[1])
    parts = (out.float() * (part - lse).exp()[..., None] for out, part in (a, b))
    return sum(parts), lse  # type: ignore[return-value]


def _turned(kind: _Kind, *tensors: Tensor) -> tuple[Tensor, ...]:
    """What is seen from a position on is what is seen up to it, of all in reverse order."""
    return tuple(x.flip(2) for x in tensors) if kind == "backwards" else tensors


WIDTH_MULTIPLE = 8  # of a head, for flash attention; of numbers that add nothing


def _widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    missing = -tensors[0].shape[-1] % WIDTH_MULTIPLE
    return tuple(F.pad(x, (0, missing)) for x in tensors) if missing else tensors


def _scale_of(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _is_on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _attention(
    q: Tensor, k: Tensor, v: Tensor, kind: _Kind, scale: float | None
) -> tuple[Tensor, Tensor]:
    """(output, float32 log-sum-exp) of one kernel."""
    if kind == "itself":
        return v, (q.float() * k.float()).sum(dim=-1) * _scale_of(q, scale)
    q, k, v = _turned(kind, q, k, v)
    if _is_on_cpu(q):
        name = _ops._scaled_dot_product_flash_attention_for_cpu
        out, lse = name(q, k, v, 0.0, kind != "all", scale=scale)
    else:
        name, wide = _ops._scaled_dot_product_flash_attention, _widened(q, k, v)
        out, lse, *_ = name(*wide, 0.0, kind != "all", scale=_scale_of(q, scale))
        out = out.narrow(-1, 0, q.shape[-1])
    out, lse = _turned(kind, out, lse)
    return out, lse.float()


def _attention_backward(
    dout: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    k: Tensor,
    v: Tensor,
    kind: _Kind,
    scale: float | None,
) -> tuple[Tensor, ...]:
    """Of queries, keys and values; ``lse`` and ``out``: over all keys, not these alone."""
    if kind == "itself":  # whatever its score is, it is all that counts
        return torch.zeros_like(q), torch.zeros_like(k), dout
    dout, q, out, lse, k, v = _turned(kind, dout, q, out, lse, k, v)
    lse, causal, width = lse.contiguous(), kind != "all", q.shape[-1]
    if _is_on_cpu(q):
        name = _ops._scaled_dot_product_flash_attention_for_cpu_backward
        found = name(dout, q, k, v, out, lse, 0.0, causal, scale=scale)
        return _turned(kind, *found)
    lengths, none = (q.shape[2], k.shape[2]), torch.empty(0, dtype=torch.uint64, device=q.device)
    name, scale = _ops._scaled_dot_product_flash_attention_backward, _scale_of(q, scale)
    dout, q, k, v, out = _widened(dout, q, k, v, out)
    given = (dout, q, k, v, out, lse, None, None, *lengths, 0.0, causal, none, none)
    return _turned(kind, *(x.narrow(-1, 0, width) for x in name(*given, scale=scale)))
