"""What a layout costs: memory by what takes it, time by what is computed and sent."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from elastic_ft.core.layouts.layout import Layout
from elastic_ft.core.layouts.memory_costs import memory
from elastic_ft.core.layouts.planner import CHUNKS
from elastic_ft.core.layouts.rank_memory import rank_layers
from elastic_ft.core.layouts.time_costs import FRESH_BYTES_PER_S, Interconnect, step_time
from elastic_ft.core.layouts.work import RECOMPUTES, Choice, Recompute, Work, stage_layers
from tests.core.shapes import SCHEDULES, SEVEN_B, SMALL, decoder, devices, with_experts


def test_memory_falls_with_every_way_of_sharing() -> None:
    work = Work(SEVEN_B, 256)
    for schedule, recompute in itertools.product(SCHEDULES, RECOMPUTES):
        base = Choice(Layout(dp_shard=2, pp=2, tp=2), 1, recompute, schedule, 2)
        need = memory(work, base).total
        for change in ({"dp_shard": 4}, {"tp": 4}, {"pp": 4}):
            if schedule == "gpipe" and "pp" in change:
                continue
            less = replace(base, layout=replace(base.layout, **change))
            assert memory(work, less).total < need, (schedule, change)


def test_memory_grows_with_the_micro_batch_and_falls_with_recomputation() -> None:
    work = Work(SEVEN_B, 512)
    for schedule, size in itertools.product(SCHEDULES[1:], (1, 2, 4)):
        choice = Choice(Layout(dp_shard=2, pp=4, tp=2), size, False, schedule, 2)
        need = memory(work, choice).total
        assert memory(work, replace(choice, micro_batch=2 * size)).total > need
        selective = memory(work, replace(choice, recompute="selective")).total
        assert memory(work, replace(choice, recompute=True)).total < selective < need


def test_sharing_positions_divides_activations_and_computing() -> None:
    """At 32k tokens; keys and values of all positions, of all heads, and their gradients are there
    for one layer at a time."""
    model = replace(SEVEN_B, sequence_length=32_768)
    work, there = Work(model, 8, loss_chunk_tokens=2048), devices(8)
    found = {}
    for cp in (1, 2, 4, 8):
        choice = Choice(Layout(cp=cp, dp_shard=8 // cp), 1, "selective")
        time = step_time(work, choice, Interconnect.of(there, (8,)))
        found[cp] = memory(work, choice).activations, time.compute, time.cp
    gathered = 32_768 * (4 * 4096 * 2 + 4096 * 4 + 2 * 1024 * (2 + 2 * 4))
    for cp in (2, 4, 8):
        assert 0.97 * found[1][0] / cp < found[cp][0] < found[1][0] / cp + gathered
        assert found[cp][1] == pytest.approx(found[1][1])  # as much in all, on as many devices
        assert found[cp][2] > 0 == found[1][2]


def test_heads_instead_of_keys_and_values_send_less_the_more_ranks_there_are() -> None:
    """Of 32 heads, 8 of keys and values, bf16. The latter gathered twice and summed in float32:
    16 bytes a head. Rows of heads, there and back, twice: 8 bytes, divided by the ranks; sixteen
    have keys and values twice."""
    model, there = replace(SEVEN_B, sequence_length=32_768), devices(16, latency_s=0)
    for cp, kv_heads in ((2, 8), (4, 8), (8, 8), (16, 16)):
        choice = Choice(Layout(cp=cp, dp_shard=16 // cp), 1)
        gathered = Work(model, 16, loss_chunk_tokens=2048)
        traded = replace(gathered, cp_method="auto")
        ratio = [step_time(w, choice, Interconnect.of(there, (16,))).cp for w in (traded, gathered)]
        expected = 8 * (32 + kv_heads) / cp / (16 * 8)
        assert ratio[0] / ratio[1] == pytest.approx(expected)
        choice = replace(choice, recompute=True)
        least, most = (memory(work, choice).activations for work in (traded, gathered))
        assert least <= most * (1 if cp == 2 else 0.85)  # at 2 something else is the most


def test_sharing_experts_out_gathers_fewer_and_sends_tokens() -> None:
    """Of eight experts, and on five ranks, of which the fullest has two: a quarter more to do."""
    few_words = decoder(8, 1024, 16, 8, 4096, 512, 2048)
    work, there = Work(with_experts(few_words, 8, 2), 40), devices(8)
    links = Interconnect.of(there, (8,))

    def costs(layout: Layout) -> tuple[float, float, float, float, float]:
        choice = Choice(layout, 1)
        need, time = memory(work, choice), step_time(work, choice, links)
        return need.parameters, need.total, time.compute, time.ep, time.dp

    plain, two, eight = (costs(Layout(dp_shard=8, ep=ep)) for ep in (1, 2, 8))
    assert plain[0] == pytest.approx(two[0]) == pytest.approx(eight[0])  # divided as evenly
    assert plain[1] > two[1] > eight[1]
    assert plain[2] == two[2] == eight[2]
    assert 0 == plain[3] < two[3] < eight[3]
    assert plain[4] > two[4] > eight[4]
    of_layer = work.model.expert_parameters * work.model.layers
    uneven = costs(Layout(dp_shard=5, ep=5))
    more = of_layer * (1 / 4 - 1 / 5) * work.parameter_bytes
    assert uneven[0] == pytest.approx(costs(Layout(dp_shard=5))[0] + more)
    routed = 2.0 * work.model.sequence_length * 2 * of_layer / 8
    more_s = 3 * 8 * routed * (2 / 8 * 5 - 1) / there.flops_per_s  # of eight micro-batches
    assert uneven[2] == pytest.approx(costs(Layout(dp_shard=5))[2] + more_s)


def test_rows_of_experts_are_kept_by_each_layer() -> None:
    """Those that go in and those that come out; selective those that products and ranks return."""
    work = Work(with_experts(SMALL, 8, 2), 8)
    row = 2 * SMALL.dim * work.compute_bytes * SMALL.sequence_length
    none = replace(work, model=replace(work.model, idle_parameters=work.model.expert_parameters))

    def rows(recompute: Recompute, ep: int) -> float:
        """That one more layer keeps."""
        choice, found = Choice(Layout(dp_shard=8, ep=ep), 1, recompute), []
        for of in (work, none):
            less = replace(of, model=replace(of.model, layers=7))
            each = [memory(w, choice).activations for w in (of, less)]
            found.append(each[0] - each[1])
        return (found[0] - found[1]) / row

    for ep in (1, 8):
        assert rows(False, ep) == pytest.approx(2)
        assert rows("selective", ep) == pytest.approx(1 if ep == 1 else 3)
        assert rows(True, ep) == pytest.approx(0)


def test_a_loss_in_chunks_saves_the_logits() -> None:
    """Of long sequences, so that layers are what is left."""
    for tp, length in itertools.product((1, 2), (32_768, 131_072)):
        model = replace(SEVEN_B, vocabulary=128_256, sequence_length=length)
        work, choice = Work(model, 8), Choice(Layout(dp_shard=4, tp=tp), 1, True)
        chunked = memory(replace(work, loss_chunk_tokens=2048), choice)
        saved = memory(work, choice).total - chunked.total
        assert 0.75 < saved / (length * 128_256 * 12 / tp) < 1
        assert chunked.activations > 10 * chunked.loss


def test_what_waits_in_host_memory_costs_the_way_there_and_back() -> None:
    work, there = Work(replace(SEVEN_B, sequence_length=32_768), 8), devices(8)
    links, choice = Interconnect.of(there, (8,)), Choice(Layout(dp_shard=8), 1, True)
    away = replace(work, offloads=True)
    inputs = 32_768 * 4096 * 2
    assert memory(work, choice).total - memory(away, choice).total == 31 * inputs
    slower_s = step_time(away, choice, links).total - step_time(work, choice, links).total
    assert slower_s == pytest.approx(2 * 32 * inputs / there.host_bytes_per_s)


def test_schedules_hold_what_they_are_known_to_hold() -> None:
    work, layout = Work(SEVEN_B, 64), Layout(pp=4)
    held = {s: memory(work, Choice(layout, 1, False, s, 2)).activations for s in SCHEDULES}
    assert held["gpipe"] > held["interleaved1f1b"] > held["1f1b"]
    # Either has what comes from the next stage for each of 64 micro-batches besides.
    received = 64 * 4096 * 4096 * 2
    held = {schedule: nbytes - received for schedule, nbytes in held.items()}
    assert held["gpipe"] == pytest.approx(16 * held["1f1b"], rel=0.05)


def test_bubbles_are_those_of_the_papers() -> None:
    """(pp - 1) / micro-batches of the ideal time; over chunks when interleaved."""
    work = Work(SEVEN_B, 64)
    there = devices(8, intra_bytes_per_s=1e18, latency_s=0.0)
    times = {
        s: step_time(
            work, Choice(Layout(pp=4), 1, False, s, CHUNKS.get(s, 1)), Interconnect.of(there, (4,))
        )
        for s in SCHEDULES
    }
    for schedule in ("gpipe", "1f1b"):
        assert times[schedule].bubble == pytest.approx(times[schedule].compute * 3 / 64)
    ratio = times["interleaved1f1b"].bubble / times["interleaved1f1b"].compute
    assert ratio == pytest.approx(3 / 64 / 2)
    assert times["zero_bubble"].bubble < times["interleaved1f1b"].bubble


def test_a_v_of_stages_is_as_slow_as_its_fullest_rank() -> None:
    """Whose two stages are the first and the last, which is short for the projection's sake."""
    model = decoder(8, 1024, 16, 8, 4096, 2 * 8 * 1024, 2048)
    work, there = Work(model, 64), devices(2, layer_s=0.0)
    links, choice = Interconnect.of(there, (2,)), Choice(Layout(pp=2), 1, False, "zero_bubble", 2)
    layers = rank_layers(work, choice)
    assert layers != stage_layers(model, 2)
    output = model.output_flops
    slowest = max(layers[0] * model.block_flops + output, layers[1] * model.block_flops)
    assert step_time(work, choice, links).compute == pytest.approx(
        3 * 64 * slowest / there.flops_per_s
    )


def test_stages_hand_on_the_positions_that_a_rank_has() -> None:
    work, there = Work(SMALL, 64), devices(8, 8, latency_s=0.0)
    links = Interconnect.of(there, (8, 8))
    alone, shared = (step_time(work, Choice(Layout(pp=2, tp=tp), 1), links).pp for tp in (1, 8))
    assert shared == pytest.approx(alone / 8)


def test_what_is_sent_once_a_step_costs_no_more_for_more_micro_batches() -> None:
    """Over slow links, and of so little computing that nothing hides there."""
    there = devices(16, intra_bytes_per_s=1e8, flops_per_s=1e18, latency_s=0.0, layer_s=0.0)

    def dp_s(layout: Layout, micro_batches: int, **once: bool) -> float:
        work = Work(SMALL, 16 * micro_batches, **once)
        return step_time(work, Choice(layout, 1), Interconnect.of(there, (16,))).dp

    hybrid, sharded = Layout(dp_replicate=8, dp_shard=2), Layout(dp_shard=16)
    once = {"gathers_once": True, "reduces_once": True}
    assert dp_s(sharded, 4) == pytest.approx(4 * dp_s(sharded, 1), rel=1e-3)
    assert dp_s(sharded, 4, **once) == pytest.approx(dp_s(sharded, 1, **once), rel=1e-3)
    inside_s = dp_s(Layout(dp_shard=2), 8)  # as many micro-batches of one replica alone
    assert dp_s(hybrid, 4) - dp_s(hybrid, 1) == pytest.approx(3 / 64 * inside_s, rel=1e-3)


def test_gloo_sums_where_others_scatter() -> None:
    """And hides nothing: a micro-batch's two gathers are half of what it waits for."""
    slow = {"intra_bytes_per_s": 1e8, "flops_per_s": 1e18, "latency_s": 0.0, "layer_s": 0.0}
    work, choice = Work(SMALL, 4, compute_bytes=4), Choice(Layout(dp_shard=2), 1)
    there = [devices(2, overlaps=overlaps, **slow) for overlaps in (True, False)]
    gpu, gloo = (step_time(work, choice, Interconnect.of(each, (2,))).dp for each in there)
    assert gloo == pytest.approx(gpu * 4 / 3, rel=1e-3)


def test_tensor_parallel_ranks_send_at_the_ends_of_a_model_too() -> None:
    """Eight messages a layer, four of embedding and projection, two sums of the loss."""
    there = devices(2, intra_bytes_per_s=1e18, latency_s=1.0)
    work, links = Work(SMALL, 4), Interconnect.of(there, (2,))
    times = step_time(work, Choice(Layout(tp=2), 1), links)
    assert times.tp == pytest.approx(4 * (8 * SMALL.layers + 4 + 2 * 2))


def test_launching_takes_its_time_beside_computing_on_cpus() -> None:
    """On GPUs it is the least that a layer takes. Of cut layers it is many times as much."""
    work = Work(SMALL, 8)

    def compute_s(layout: Layout, micro_batch: int, layer_s: float, overlaps: bool) -> float:
        there = devices(2, flops_per_s=1e12, layer_s=layer_s, overlaps=overlaps)
        choice = Choice(layout, micro_batch)
        return step_time(work, choice, Interconnect.of(there, (layout.world_size,))).compute

    one, cut = Layout(), Layout(tp=2)
    assert compute_s(one, 1, 1e-6, True) == compute_s(one, 1, 0.0, True)
    for micro_batch in (1, 4):
        more_s = compute_s(one, micro_batch, 1e-3, False) - compute_s(one, micro_batch, 0.0, False)
        assert more_s == pytest.approx(3 * SMALL.layers * 1e-3 * 8 / micro_batch)
        cut_s = compute_s(cut, micro_batch, 1e-3, False) - compute_s(cut, micro_batch, 0.0, False)
        assert cut_s > 10 * more_s


def test_cpus_make_gradients_in_new_memory_with_each_micro_batch() -> None:
    work, there = Work(SMALL, 8, compute_bytes=4), devices(2, layer_s=0.0, overlaps=False)
    links = Interconnect.of(there, (1,))
    eight, two = (step_time(work, Choice(Layout(), n), links).compute for n in (1, 4))
    assert eight - two == pytest.approx(6 * 4 * SMALL.parameters / FRESH_BYTES_PER_S)


def test_what_is_kept_whole_takes_its_memory() -> None:
    choice, small = Choice(Layout(dp_shard=8), 1), Work(SEVEN_B, 64)
    whole = SEVEN_B.parameters
    for once, each in (("gathers_once", 2), ("reduces_once", 4)):
        grown = memory(replace(small, **{once: True}), choice).total - memory(small, choice).total
        assert 0.8 * each * whole < grown < 1.01 * each * whole
        alone = replace(small, global_batch=8)  # one micro-batch: nothing adds up
        same = memory(replace(alone, **{once: True}), choice).total == memory(alone, choice).total
        assert same == (once == "reduces_once")


def test_uneven_dealing_is_paid_for_by_the_busiest() -> None:
    work, there = Work(SMALL, 32), devices(8)
    nine = step_time(work, Choice(Layout(dp_shard=7), 1), Interconnect.of(there, (7,)))
    eight = step_time(work, Choice(Layout(dp_shard=8), 1), Interconnect.of(there, (8,)))
    assert nine.compute == pytest.approx(eight.compute * 5 / 4)


@pytest.mark.parametrize("pp", [1, 2, 3, 5, 8])
def test_stages_have_all_layers_and_the_last_one_no_more_than_others(pp: int) -> None:
    layers = stage_layers(SMALL, pp)
    assert (sum(layers), len(layers)) == (8, pp)
    assert min(layers) >= 1
    assert layers[-1] == min(layers)
    with pytest.raises(ValueError, match="8 layers cannot make 9 stages"):
        stage_layers(SMALL, 9)
