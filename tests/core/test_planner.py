"""The planner against brute force, its memory model's monotony, and published trainings."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from math import gcd

import pytest

from elastic_ft.core.layouts.layout import ContextMethod, Layout, LayoutWish, divisors
from elastic_ft.core.layouts.layout_plan import NoLayout, fill, seats_on_nodes
from elastic_ft.core.layouts.memory_costs import host_bytes, memory
from elastic_ft.core.layouts.planner import CHUNKS, Limits, allowed, best, plans
from elastic_ft.core.layouts.time_costs import Interconnect, step_time
from elastic_ft.core.layouts.work import RECOMPUTES, Choice, Devices, Work
from tests.core.shapes import SCHEDULES, SEVEN_B, SMALL, decoder, devices, with_experts

# ---------------------------------------------------------------------- against brute force


def everything(work: Work, there: Devices, limits: Limits) -> Iterator[tuple[Choice, float]]:
    """Every choice that fits, with its time: no pruning, no order, nothing clever."""
    model = work.model
    for pp, tp, replicate, shard in itertools.product(range(1, there.count + 1), repeat=4):
        world = pp * tp * replicate * shard
        if world > there.count or pp > model.layers:
            continue
        if gcd(model.heads, model.kv_heads, model.ffn_dim) % tp:
            continue
        seats = seats_on_nodes(there.nodes, tp)
        if world > sum(seats):
            continue
        links = Interconnect.of(there, fill(seats, world))
        layout = Layout(dp_replicate=replicate, dp_shard=shard, pp=pp, tp=tp)
        shared = [ep for ep in divisors(shard) if ep == 1 or (ep <= limits.ep_max and pp * tp == 1)]
        for ep, size, schedule, recompute in itertools.product(
            shared, divisors(work.global_batch), limits.schedules, RECOMPUTES
        ):
            chunks = CHUNKS.get(schedule, 1) if pp > 1 else 1
            if size > 32 or work.global_batch // size < replicate * shard:
                continue
            if pp * chunks > model.layers:
                continue
            choice = Choice(replace(layout, ep=ep), size, recompute, schedule, chunks)
            if memory(work, choice, there.fused).total <= there.usable_bytes:
                yield choice, step_time(work, choice, links).total


def random_case(seed: int, most: int) -> tuple[Work, Devices, Limits]:
    rng = random.Random(seed)
    heads = rng.choice([2, 4, 8, 12, 16])
    dim = heads * rng.choice([32, 64, 128])
    model = decoder(
        layers=rng.randint(1, 24),
        dim=dim,
        heads=heads,
        kv_heads=rng.choice(divisors(heads)),
        ffn_dim=dim * rng.choice([2, 3, 4]),
        vocabulary=rng.choice([1000, 32_000, 100_000]),
        sequence_length=rng.choice([128, 512, 2048]),
        gated=rng.random() < 0.7,
        tied=rng.random() < 0.3,
    )
    work = Work(model, rng.choice([4, 6, 8, 16, 24, 32, 60]), rng.choice([2, 4]))
    width = rng.choice([1, 2, 4, 8])
    nodes = [width] * max(1, rng.randint(1, most) // width)
    if rng.random() < 0.4:
        nodes[-1] = rng.randint(1, width)
    need = work.state_bytes * rng.choice([0.05, 0.3, 1.0, 3.0, 10.0])
    there = Devices(
        tuple(nodes),
        memory_bytes=need,
        flops_per_s=rng.choice([1e11, 1e13, 4e14]),
        intra_bytes_per_s=rng.choice([1e9, 3e11]),
        inter_bytes_per_s=rng.choice([1e8, 1e10, 5e10]),
        layer_s=rng.choice([0.0, 1e-4]),
        fused=rng.random() < 0.5,
    )
    limits = Limits(schedules=(rng.choice(SCHEDULES),))
    if rng.random() < 0.3:
        experts = rng.choice([3, 8, 16])
        work = replace(work, model=with_experts(model, experts, rng.randint(1, 2)))
        limits = replace(limits, ep_max=experts)
    return work, there, limits


def check_against_brute_force(work: Work, there: Devices, limits: Limits) -> bool:
    """Whether anything fits."""
    fastest_s = min((time for _, time in everything(work, there, limits)), default=None)
    if fastest_s is None:
        with pytest.raises(NoLayout, match="the least need is"):
            best(work, there, limits)
        return False
    plan = best(work, there, limits)
    assert plan.memory == memory(work, plan.choice, there.fused)
    assert plan.memory.total <= there.usable_bytes
    assert plan.time.total <= 1.05 * fastest_s, (plan.choice, fastest_s)
    assert plan.time.total >= fastest_s * (1 - 1e-9)
    return True


@pytest.mark.parametrize("tens", range(20))
def test_never_infeasible_and_never_worse_than_brute_force(tens: int) -> None:
    for seed in range(10 * tens, 10 * tens + 10):
        check_against_brute_force(*random_case(seed, most=12))


def test_the_random_cases_are_of_both_kinds() -> None:
    fitting = sum(check_against_brute_force(*random_case(seed, most=4)) for seed in range(40))
    assert 5 <= fitting <= 35


def test_the_pruned_search_of_large_worlds_is_as_good() -> None:
    for nodes, batch in (((8,) * 9, 128), ((8,) * 8 + (5,), 96)):
        work = Work(replace(SEVEN_B, layers=6), batch)
        there = devices(*nodes, memory_gb=24)
        sizes = (1, 2, 4)
        fastest_s = min(t for c, t in _large(work, there) if c.micro_batch in sizes)
        plan = best(work, there, Limits(micro_batches=sizes))
        assert plan.time.total <= 1.05 * fastest_s


def _large(work: Work, there: Devices) -> Iterator[tuple[Choice, float]]:
    """As ``everything``, of 1F1B alone."""
    for tp in (1, 2, 4, 8):
        seats = seats_on_nodes(there.nodes, tp)
        for pp in range(1, work.model.layers + 1):
            for dp in range(1, sum(seats) // tp // pp + 1):
                links = Interconnect.of(there, fill(seats, pp * tp * dp))
                for shard, size, again in itertools.product(divisors(dp), (1, 2, 4), (False, True)):
                    choice = Choice(Layout(dp // shard, shard, pp, tp), size, again)
                    if work.global_batch // size < dp:
                        continue
                    if memory(work, choice, there.fused).total <= there.usable_bytes:
                        yield choice, step_time(work, choice, links).total


# ------------------------------------------------------------------------ what it chooses


@pytest.mark.parametrize(("method", "most"), [("ulysses", 32), ("auto", 128), ("all_gather", 128)])
def test_the_planner_deals_whole_heads(method: ContextMethod, most: int) -> None:
    """Of 32."""
    model = replace(SEVEN_B, sequence_length=131_072)
    work = Work(model, 8, loss_chunk_tokens=2048, cp_method=method)
    limits = Limits((1,), (True,), tp_sizes=(1, 2), cp_sizes=(1, 16, 32, 64), pp_max=1)
    found = plans(work, devices(*[8] * 16), limits, top=1000)
    assert max(plan.layout.ranks_per_layer for plan in found if plan.layout.cp > 1) == most


def test_the_planner_shares_positions_where_one_sample_does_not_fit() -> None:
    model = replace(SEVEN_B, sequence_length=131_072)
    work, there = Work(model, 8, loss_chunk_tokens=2048), devices(8)
    limits = allowed(model, 8, lambda wish: wish.tp == wish.pp == 1)
    assert limits.cp_sizes == tuple(range(1, 9))
    assert best(work, devices(7), limits).layout.cp == 7, "who is left, not 4 of them"
    plan = best(work, there, limits)
    assert plan.layout.cp > 1
    assert any(reason.startswith("context parallelism: without it ") for reason in plan.why)
    assert allowed(SEVEN_B, 8, lambda wish: True).cp_sizes == (1,)


def test_the_planner_shares_experts_out_where_gathering_them_is_dear() -> None:
    model = with_experts(SMALL, 64, 2)
    work, there = Work(model, 64), devices(8, 8, inter_bytes_per_s=10e9)
    limits = allowed(model, 16, lambda wish: wish.tp == wish.pp == 1)
    assert limits.ep_max == 16
    limits = replace(limits, micro_batches=(2,))
    plan = best(work, there, limits)
    assert str(plan.layout) == "fsdp8-ep8"
    assert any(reason.startswith("expert parallelism: without it ") for reason in plan.why)
    assert "each of 8 ranks computes 8 of 64 experts, and tokens travel inside a node" in plan.why
    assert allowed(SMALL, 8, lambda wish: True).ep_max == 1
    assert best(work, there, replace(limits, ep_max=1)).layout.ep == 1


@pytest.mark.parametrize("whole", [True, False])
def test_ranks_that_share_positions_share_experts_too(whole: bool) -> None:
    """But no stages where these have whole sequences, as those of built-in mixtures."""

    def can(wish: LayoutWish) -> bool:
        in_stages = wish.pp > 1 and (wish.ep > 1 or (whole and wish.cp > 1))
        return wish.tp == 1 and not in_stages

    long = with_experts(decoder(8, 1024, 16, 8, 4096, 512, 32_768), 64, 2)
    limits = allowed(long, 8, can)
    assert limits.apart == ((("pp", "cp"), ("pp", "ep")) if whole else (("pp", "ep"),))
    limits = replace(limits, recompute=(True,))
    found = plans(Work(long, 2), devices(8), limits, top=1000)
    shared = {plan.layout for plan in found if plan.layout.cp > 1}
    assert any(layout.pp > 1 for layout in shared) is not whole
    assert all(layout.pp == 1 for layout in shared if layout.ep > 1)
    assert {layout.ep for layout in shared} >= {1, 2, 4, 8}
    assert any(plan.layout.pp > 1 for plan in found)


@pytest.mark.parametrize(("ffn_dim", "frugal"), [(64, 1), (4096, 8)])
def test_a_large_world_finds_what_alone_fits(ffn_dim: int, frugal: int) -> None:
    """Small experts are smaller than what is sent to them, large ones are not."""
    model = with_experts(decoder(8, 1024, 16, 8, ffn_dim, 512, 2048), 8, 6)
    work, limits = Work(model, 72), Limits((1,), (True,), tp_sizes=(1,), pp_max=1, ep_max=8)
    needs = {ep: memory(work, Choice(Layout(dp_shard=72, ep=ep), 1, True)).total for ep in (1, 8)}
    assert needs[frugal] == min(needs.values()) < max(needs.values())
    there = devices(*(8,) * 9)
    between = sum(needs.values()) / 2 / there.usable_bytes * there.memory_bytes
    plan = best(work, replace(there, memory_bytes=between), replace(limits, world_min=72))
    assert (plan.layout.ep > 1) == (frugal > 1)


def test_an_optimizer_in_host_memory_is_none_on_the_device() -> None:
    work, there = Work(SEVEN_B, 64), devices(8)
    links, choice = Interconnect.of(there, (8,)), Choice(Layout(dp_shard=8), 1, True)
    away = replace(work, offloads_optimizer=True)
    held = SEVEN_B.parameters / 8
    assert memory(work, choice).optimizer == pytest.approx(8 * held)
    assert memory(away, choice) == memory(work, choice)._replace(optimizer=0.0)
    assert host_bytes(away, choice) == pytest.approx((4 + 8 + 4) * held)
    assert host_bytes(work, choice) == 0.0
    slower_s = step_time(away, choice, links).total - step_time(work, choice, links).total
    assert slower_s == pytest.approx((8 + 28) * held / there.host_bytes_per_s)
    small = devices(8, memory_gb=12)
    with pytest.raises(NoLayout):
        best(replace(work, global_batch=8), small)
    found = best(replace(away, global_batch=8), small)
    assert any("of host memory a device" in reason for reason in found.why)
