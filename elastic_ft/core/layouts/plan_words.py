"""Why a plan of a layout is what it is, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil, inf
from typing import NamedTuple

from elastic_ft.core.layouts.expert_owners import experts_at_most
from elastic_ft.core.layouts.layout_plan import LayoutPlan, seats_on_nodes
from elastic_ft.core.layouts.work import Choice, Work


class Without(NamedTuple):
    """Of all choices that have not a feature: the least bytes, the best seconds of those that fit;
    and what those take at least that were not tried, as others were faster."""

    nbytes: float = inf
    time_s: float = inf
    untried_s: float = inf


def gb(nbytes: float) -> str:
    """In 10^9 bytes; small amounts in 10^6."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def describe(choice: Choice) -> str:
    schedule = f", {choice.schedule}" if choice.layout.has_stages else ""
    chunks = f" of {choice.chunks} chunks" if choice.chunks > 1 else ""
    again = ", recomputing" if choice.recompute else ""
    again += " selectively" if choice.recompute == "selective" else ""
    return f"{choice.layout}, micro-batch {choice.micro_batch}{schedule}{chunks}{again}"


def features(choice: Choice) -> dict[str, bool]:
    return choice.layout.features | {"recomputation": bool(choice.recompute)}


def why(
    plan: LayoutPlan,
    fastest: LayoutPlan,
    work: Work,
    usable_bytes: float,
    without: Mapping[str, Without],
    multiple_of: int = 1,
) -> Iterator[str]:
    """Sentences: fit, each feature against doing without it, tie-break, who is idle.

    ``multiple_of``: worlds are multiples of it.
    """
    yield f"fits: {gb(plan.memory.total)} of {gb(usable_bytes)} on the fullest device"
    if plan.host_bytes:
        step_s = f"{plan.time.offload / plan.time.total:.0%} of a step"
        yield f"the optimizer takes {gb(plan.host_bytes)} of host memory a device, and {step_s}"
    for feature, has in features(plan.choice).items():
        if has:
            yield f"{feature}: {_loss_without(plan, without.get(feature, Without()))}"
    if plan.layout.cuts_layers:
        apart = "across nodes: no node has room for a group"
        where = "inside a node" if plan.peers_inside else apart
        yield f"tensor-parallel peers are {where}"
    if plan.layout.shares_experts:
        yield _experts(plan, work)
    if plan.choice != fastest.choice:
        slower = plan.time.total / fastest.time.total - 1
        yield (
            f"{slower:.1%} slower than {describe(fastest.choice)}, which is as good, "
            + _preferred(plan, fastest)
        )
    dp = plan.layout.data_parallel_size
    count = work.global_batch // plan.choice.micro_batch
    if count % dp:
        yield (
            f"{count} micro-batches over {dp} replicas are uneven: the busiest has "
            f"{plan.choice.micro_batches(work)}"
        )
    yield from _idle(plan, count, multiple_of)


def _experts(plan: LayoutPlan, work: Work) -> str:
    layout, experts = plan.layout, work.model.experts
    most = experts_at_most(layout, experts)
    of_each = f"{most} of {experts}" if experts % layout.ep == 0 else f"up to {most} of {experts}"
    where = "inside a node" if plan.peers_inside else "across nodes"
    return f"each of {layout.ep} ranks computes {of_each} experts, and tokens travel {where}"


def _loss_without(plan: LayoutPlan, without: Without) -> str:
    need, time_s, untried_s = without
    if untried_s < time_s:
        fits = "" if time_s < inf else ", if it fits"
        return f"without it at least {untried_s / plan.time.total - 1:.0%} slower{fits}"
    if time_s < inf:
        ratio = time_s / plan.time.total - 1
        return f"without it {abs(ratio):.0%} {'slower' if ratio >= 0 else 'faster'}"
    if need < inf:
        return f"without it nothing fits, the least need is {gb(need)}"
    return "nothing else was allowed"


def _preferred(plan: LayoutPlan, fastest: LayoutPlan) -> str:
    if plan.peers_inside and not fastest.peers_inside:
        shares_experts = fastest.layout.shares_experts
        what = "what experts are sent" if shares_experts else "tensor parallelism"
        return f"and keeps {what} inside a node"
    if plan.bytes_moved != fastest.bytes_moved:
        return f"and moves {gb(plan.bytes_moved or 0)} instead of {gb(fastest.bytes_moved or 0)}"
    layout, other = plan.layout, fastest.layout
    if layout.dp_replicate != other.dp_replicate:
        return f"and has {layout.dp_replicate} replicas of the state, not {other.dp_replicate}"
    return "and shares each copy of the model among fewer ranks"


def _idle(plan: LayoutPlan, count: int, multiple_of: int) -> Iterator[str]:
    """Which devices have no rank, and why. ``count``: micro-batches of a step."""
    if not any(plan.idle):
        return
    total, group = sum(plan.nodes), plan.layout.ranks_per_layer
    where = ", ".join(f"{n} on node {i}" for i, n in enumerate(plan.idle) if n)
    yield f"{sum(plan.idle)} of {total} devices idle: {where}"
    seats = seats_on_nodes(plan.nodes, group)
    if seats != plan.nodes:
        yield f"a node's devices beyond a multiple of {group} have no group that shares layers"
    spare, copy = sum(seats) - plan.layout.world_size, plan.layout.pipeline_size * group
    dp = plan.layout.data_parallel_size
    more = min(dp + spare // copy, count)
    if 0 < spare < multiple_of:
        yield f"worlds are multiples of {multiple_of}"
    elif 0 < spare < copy:
        yield f"{spare} are too few for another replica, which takes {copy}"
    elif spare and ceil(count / more) == ceil(count / dp):
        yield f"{spare} would not make a step faster: it would have as many micro-batches in a row"
    elif spare:
        yield "no layout of more devices that fits is over 3% faster"


def compared(plan: LayoutPlan, first: LayoutPlan) -> str:
    ratio = plan.time.total / first.time.total - 1
    return f"{abs(ratio):.1%} {'slower' if ratio >= 0 else 'faster'} than {first.layout}"
