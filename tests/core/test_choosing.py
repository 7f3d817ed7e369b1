"""Which layout the planner chooses, beside what others published of theirs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from elastic_ft.core.layouts.layout import Layout, divisors
from elastic_ft.core.layouts.layout_plan import LayoutPlan, NoLayout, fill, seats_on_nodes
from elastic_ft.core.layouts.memory_costs import memory
from elastic_ft.core.layouts.moved import Previous, bytes_moved
from elastic_ft.core.layouts.plan_words import gb
from elastic_ft.core.layouts.planner import CHUNKS, Limits, best, plans
from elastic_ft.core.layouts.time_costs import Interconnect, step_time
from elastic_ft.core.layouts.work import (
    RECOMPUTES,
    Choice,
    Compression,
    Devices,
    ModelShape,
    Work,
)
from tests.core.shapes import SEVEN_B, SMALL, decoder, devices, with_experts

# -------------------------------------------------------------------------------- choosing


def test_a_model_that_fits_everywhere_is_replicated() -> None:
    plan = best(Work(SMALL, 64), devices(4))
    assert str(plan.layout) == "ddp4"
    assert not plan.choice.recompute
    assert plan.why[0].startswith("fits: ")


def test_a_world_that_does_not_divide_says_who_is_idle_and_why() -> None:
    slow = devices(8, 8, 7, memory_gb=40, inter_bytes_per_s=2e9)
    plan = best(Work(SEVEN_B, 64), slow)
    assert plan.layout.world_size <= 23
    assert plan.layout.world_size + sum(plan.idle) == 23
    text = "; ".join(plan.why)
    if sum(plan.idle):
        assert f"{sum(plan.idle)} of 23 devices idle" in text
    tight = best(Work(SEVEN_B, 64), slow, Limits(recompute=(False,), micro_batches=(4,)))
    assert tight.layout.tp > 1
    assert tight.peers_inside


def test_tensor_parallel_peers_stay_on_a_node() -> None:
    assert seats_on_nodes((8, 8, 7), 4) == (8, 8, 4)
    assert seats_on_nodes((2, 2, 2), 4) == (2, 2, 0)
    assert fill((8, 8, 4), 12) == (8, 4, 0)


def test_among_equals_the_one_that_moves_least_is_taken() -> None:
    work, there = Work(SMALL, 64), devices(4, 4)
    old = Layout(dp_replicate=2, dp_shard=4)
    plan = best(work, there, previous=Previous(old, tuple(range(8))))
    free = best(work, there)
    assert plan.bytes_moved is not None
    assert plan.time.total <= 1.03 * free.time.total
    moved = bytes_moved(work, free.layout, free.devices, Previous(old, tuple(range(8))))
    assert plan.bytes_moved <= moved


def test_bytes_moved_of_known_moves() -> None:
    work, there = Work(SMALL, 64), devices(4)
    whole = work.state_bytes

    def moved(old: Layout, new: Layout, ranks: tuple[int | None, ...]) -> float:
        choice = Choice(new, 1)
        used = (new.world_size,)
        time = step_time(work, choice, Interconnect.of(there, used))
        plan = LayoutPlan(choice, memory(work, choice), time, used, there.nodes)
        return bytes_moved(work, plan.layout, plan.devices, Previous(old, ranks)) / whole

    assert moved(Layout(dp_shard=4), Layout(dp_shard=4), (0, 1, 2, 3)) == 0
    assert moved(Layout(dp_replicate=4), Layout(dp_replicate=4), (0, 1, 2, None)) == 1
    assert moved(Layout(dp_replicate=4), Layout(dp_shard=4), (0, 1, 2, 3)) == 0
    assert moved(Layout(dp_shard=4), Layout(dp_replicate=4), (0, 1, 2, 3)) == pytest.approx(3)
    # 4 -> 3: each survivor's third, less what its quarter has of it
    gone = moved(Layout(dp_shard=4), Layout(dp_shard=3), (0, 1, 2, None))
    assert gone == pytest.approx(1 - (3 + 2 + 1) / 12)


def test_bytes_moved_where_experts_are_shared_out() -> None:
    model = with_experts(SMALL, 8, 2)
    work, ranks = Work(model, 64), (0, 1, 2, 3)
    experts = model.layers * model.expert_parameters / model.parameters

    def moved(old: Layout, new: Layout) -> float:
        return bytes_moved(work, new, ranks, Previous(old, ranks)) / work.state_bytes

    plain, two, four = (Layout(dp_shard=4, ep=ep) for ep in (1, 2, 4))
    assert moved(two, two) == 0
    assert moved(plain, four) == pytest.approx(0)  # a quarter of the experts, as before
    # Ranks 0 and 2 share what they had, 1 and 3 too: each has half of what it needs.
    assert moved(four, two) == pytest.approx(experts / 2)
    dealt = replace(four, owners=(0, 0, 1, 1, 3, 3, 2, 2))
    assert moved(dealt, four) == 0, "who has which is decided anew"


def test_nothing_fits_says_what_is_needed() -> None:
    with pytest.raises(NoLayout, match=r"nothing fits on 2 devices: the least need is .* GB"):
        best(Work(SEVEN_B, 64), devices(2, memory_gb=8))
    with pytest.raises(NoLayout, match="makes no micro-batch of"):
        best(Work(SMALL, 4), devices(2), Limits(micro_batches=(8,)))


def test_what_would_fit_with_the_optimizer_in_host_memory_is_said_where_a_job_may_ask() -> None:
    """Said and not chosen: where it is, a job's file says."""
    work, there = Work(SEVEN_B, 64), devices(2, memory_gb=48)
    with pytest.raises(NoLayout, match=r"beside what is reserved$"):
        best(work, there)
    may = Limits(may_offload=True)
    with pytest.raises(
        NoLayout, match=r"reserved; with optimizer\.offload: cpu ddp1-tp2, "
    ) as refused:
        best(work, there, may)
    plan = best(replace(work, offloads_optimizer=True), there, may)
    assert f"takes {gb(plan.host_bytes)} of host memory a device" in str(refused.value)
    with pytest.raises(NoLayout, match=r"beside what is reserved$"):
        best(work, devices(2, memory_gb=8), may)  # nor with it
    with pytest.raises(NoLayout, match=r"beside what is reserved$"):
        best(replace(work, offloads_optimizer=True), devices(2, memory_gb=8), may)


def test_limits_are_kept() -> None:
    limits = Limits(tp_max=1, pp_max=1, micro_batches=(2,), recompute=(True,))
    for plan in plans(Work(SEVEN_B, 64), devices(8, 8), limits):
        assert (plan.layout.tp, plan.layout.pp) == (1, 1)
        assert (plan.choice.micro_batch, plan.choice.recompute) == (2, True)


def test_the_ranking_is_of_different_layouts_best_first() -> None:
    ranked = plans(Work(SEVEN_B, 64), devices(8, 8), top=8)
    assert len({plan.layout for plan in ranked}) == len(ranked) == 8
    fastest_s = min(plan.time.total for plan in ranked)
    assert ranked[0].time.total <= 1.03 * fastest_s
    assert all(plan.why for plan in ranked)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one device"):
        Devices((8, 0), 1e9)
    with pytest.raises(ValueError, match="positive"):
        Devices((8,), 0)
    with pytest.raises(ValueError, match="3 previous ranks for 2 devices"):
        best(Work(SMALL, 8), devices(2), previous=Previous(Layout(), (0, 1, None)))


# ------------------------------------------------------------------------ published trainings

A100 = {"flops_per_s": 187e12, "intra_bytes_per_s": 235e9, "inter_bytes_per_s": 22e9}
H100 = {"flops_per_s": 544e12, "intra_bytes_per_s": 370e9, "inter_bytes_per_s": 45e9}
GPT3 = decoder(96, 12_288, 96, 96, 49_152, 51_200, 2048, gated=False, tied=True)
LLAMA3 = decoder(126, 16_384, 128, 8, 53_248, 128_256, 8192)
LLAMA2 = decoder(80, 8192, 64, 8, 28_672, 32_000, 4096)


@pytest.mark.parametrize(
    ("model", "parameters", "batch", "nodes", "rates", "published"),
    [
        pytest.param(GPT3, 175e9, 1536, 128, A100, Layout(16, 1, 8, 8), id="gpt3-175b-on-1024"),
        pytest.param(
            LLAMA3, 405e9, 2048, 2048, H100, Layout(1, 128, 16, 8), id="llama3-405b-on-16384"
        ),
        pytest.param(LLAMA2, 70e9, 128, 8, H100, Layout(1, 4, 4, 4), id="llama2-70b-on-64"),
    ],
)
def test_published_trainings_have_a_layout_near_what_was_used(
    model: ModelShape,
    parameters: float,
    batch: int,
    nodes: int,
    rates: dict[str, float],
    published: Layout,
) -> None:
    """All devices in use, tensor parallelism inside nodes; and what was used fits, sharded and
    recomputing as it must, and takes at most 30 % more time."""
    assert model.parameters == pytest.approx(parameters, rel=0.02)
    work, there = Work(model, batch), devices(*(8,) * nodes, **rates)
    plan = best(work, there, Limits(schedules=("1f1b", "interleaved1f1b")))
    assert plan.memory.total <= there.usable_bytes
    assert plan.layout.world_size == there.count
    assert plan.peers_inside
    links = Interconnect.of(there, there.nodes)
    dp = published.data_parallel_size
    layouts = [replace(published, dp_replicate=dp // n, dp_shard=n) for n in divisors(dp)]
    used_s = min(
        step_time(work, choice, links).total
        for layout, again, schedule in itertools.product(
            layouts, RECOMPUTES, ("1f1b", "interleaved1f1b")
        )
        if memory(work, choice := Choice(layout, 1, again, schedule, CHUNKS.get(schedule, 1))).total
        <= there.usable_bytes
    )
    assert plan.time.total <= used_s * 1.03
    assert used_s <= 1.3 * plan.time.total


def test_mixtral_with_its_experts_shared_out_inside_nodes_is_near_the_best() -> None:
    """Its published recipe has one of eight experts on each rank, too, and stages besides. Here
    FSDP over all nodes gathers them behind what it computes, and just fits."""
    expert = 3 * 4096 * 14_336
    mixtral = ModelShape(
        layers=32,
        dim=4096,
        heads=32,
        kv_heads=8,
        ffn_dim=2 * 14_336,
        vocabulary=32_000,
        sequence_length=8192,
        block_parameters=2 * 4096 * (4096 + 1024) + 8 * (expert + 4096) + 2 * 4096,
        embedding_parameters=32_000 * 4096,
        output_parameters=32_000 * 4096 + 4096,
        idle_parameters=6 * expert,
        experts=8,
        expert_parameters=8 * expert,
    )
    assert mixtral.parameters == pytest.approx(46.7e9, rel=0.01)
    first, *others = plans(Work(mixtral, 512), devices(*(8,) * 8, **H100), Limits(ep_max=8))
    shared = next(plan for plan in others if plan.layout == Layout(dp_shard=64, ep=8))
    assert first.layout == Layout(dp_shard=64)
    assert shared.peers_inside
    assert shared.memory.total < first.memory.total
    assert shared.time.total < 1.03 * first.time.total


def test_compression_is_counted_where_a_job_asks_for_it() -> None:
    """A quarter of the bytes of shards; of replicas, too, but after the backward, and with as many
    residuals as there are numbers."""
    there = devices(2, 2, intra_bytes_per_s=1e8, inter_bytes_per_s=1e8, latency_s=0.0)
    links = Interconnect.of(there, there.nodes)
    work = Work(SMALL, 8, compute_bytes=4)
    packed = replace(work, compression=Compression(shards=True))
    choice = Choice(Layout(dp_shard=4), 2)
    before, after = (step_time(w, choice, links).dp for w in (work, packed))
    assert after < 0.3 * before
    assert memory(packed, choice).total >= memory(work, choice).total  # packed and unpacked
    choice = Choice(Layout(dp_replicate=4), 2)
    for method in ("int8", "powersgd"):
        packed = replace(work, compression=Compression(replicas=method))
        assert step_time(packed, choice, links).dp < 0.3 * step_time(work, choice, links).dp
        more = memory(packed, choice).optimizer - memory(work, choice).optimizer
        assert more == 4 * SMALL.parameters
        assert packed.state_bytes - work.state_bytes == 4 * SMALL.parameters
