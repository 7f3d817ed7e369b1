"""The data order, its dealing, and what the ledger's check finds (I2, I3)."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ft.core.batches import DataOrder, Ledger, deal, sample_at, step_batch

# ---------------------------------------------------------------------------- data order


@given(seed=st.integers(0), epoch=st.integers(0, 10**6), size=st.integers(1, 400))
def test_each_epoch_is_a_permutation(seed: int, epoch: int, size: int) -> None:
    order = [sample_at(seed, epoch, index, size) for index in range(size)]
    assert sorted(order) == list(range(size))


def test_the_order_is_pinned() -> None:
    """A changed order would make a resumed run repeat and skip samples: never change it."""
    assert [sample_at(7, 0, i, 10) for i in range(10)] == [3, 5, 2, 6, 1, 8, 0, 7, 4, 9]
    assert [sample_at(7, 3, i, 10**12) for i in range(3)] == [
        59107613323,
        297239119869,
        851771591316,
    ]


def test_every_permutation_of_a_small_dataset_is_about_as_likely() -> None:
    runs = 4800
    seen = Counter(tuple(sample_at(seed, 0, i, 4) for i in range(4)) for seed in range(runs))
    assert len(seen) == 24
    chi_squared = sum((count - runs / 24) ** 2 / (runs / 24) for count in seen.values())
    assert chi_squared < 49.7  # 23 degrees of freedom, p = 0.001; the seeds are fixed


@pytest.mark.parametrize("size", [97, 1000, 65_537])
def test_neighbours_are_shuffled_apart(size: int) -> None:
    """The serial correlation of an epoch's order is that of chance."""
    count = min(size, 4000)
    order = [sample_at(1, 1, index, size) for index in range(count)]
    mean = (size - 1) / 2
    variance = (size**2 - 1) / 12
    correlation = sum((a - mean) * (b - mean) for a, b in pairwise(order)) / (
        variance * (count - 1)
    )
    assert abs(correlation) < 4 / count**0.5


def test_epochs_and_seeds_have_unrelated_orders() -> None:
    size = 2000
    base = [sample_at(0, 0, i, size) for i in range(size)]
    for seed, epoch in [(0, 1), (1, 0), (-1, 0)]:
        other = [sample_at(seed, epoch, i, size) for i in range(size)]
        assert sum(a == b for a, b in zip(base, other, strict=True)) < 10  # by chance about 1


@given(
    seed=st.integers(0, 99),
    size=st.integers(1, 30),
    start=st.integers(0, 100),
    length=st.integers(0, 90),
)
def test_ids_are_unique_in_the_run_and_decodable(
    seed: int, size: int, start: int, length: int
) -> None:
    order = DataOrder(seed, size)
    ids = order.sample_ids(start, start + length)
    assert len(set(ids)) == length
    for position, sample in enumerate(ids, start):
        assert order.epoch(sample) == position // size
        assert order.dataset_index(sample) == sample_at(
            seed, position // size, position % size, size
        )


def test_a_batch_may_straddle_epochs() -> None:
    order = DataOrder(seed=3, dataset_size=5)
    assert sorted(order.sample_ids(0, 10)) == list(range(10))
    assert [order.epoch(s) for s in order.sample_ids(3, 7)] == [0, 0, 1, 1]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        DataOrder(0, 0)
    with pytest.raises(ValueError, match="outside a dataset of 5"):
        sample_at(0, 0, 5, 5)
    with pytest.raises(ValueError, match="not a range"):
        DataOrder(0, 5).sample_ids(3, 2)


# ------------------------------------------------------------------------------- dealing


def test_eight_over_three_is_three_three_two() -> None:
    assert deal(8, 3) == (range(0, 3), range(3, 6), range(6, 8))


@given(micro_batches=st.integers(0, 200), ranks=st.integers(1, 40))
def test_dealing_is_contiguous_complete_and_even(micro_batches: int, ranks: int) -> None:
    dealt = deal(micro_batches, ranks)
    assert [i for share in dealt for i in share] == list(range(micro_batches))
    sizes = [len(share) for share in dealt]
    assert len(sizes) == ranks
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(ranks=st.integers(1, 8), step=st.integers(1, 50))
def test_a_step_is_the_same_for_every_world_size(ranks: int, step: int) -> None:
    order = DataOrder(seed=5, dataset_size=37)
    whole = step_batch(order, step, global_batch_size=16, micro_batch_size=2)
    dealt = [step_batch(order, step, 16, 2, share) for share in deal(8, ranks)]
    assert tuple(micro for share in dealt for micro in share) == whole
    assert sum(whole, ()) == order.sample_ids((step - 1) * 16, step * 16)


def test_step_batch_refuses_what_does_not_divide() -> None:
    with pytest.raises(ValueError, match="8 is not a multiple of micro-batch size 3"):
        step_batch(DataOrder(0, 10), 1, 8, 3)
    with pytest.raises(ValueError, match="steps count from 1"):
        step_batch(DataOrder(0, 10), 0, 8, 2)


# -------------------------------------------------------------------------------- ledger

ORDER = DataOrder(seed=11, dataset_size=6)
BATCH = 4
LINES = [(step, ORDER.sample_ids((step - 1) * BATCH, step * BATCH)) for step in range(1, 6)]


def violations(lines: list[tuple[int, tuple[int, ...]]], order: DataOrder = ORDER) -> list[str]:
    return Ledger.of(lines).violations(order, BATCH)


def test_a_clean_ledger_has_no_violations() -> None:
    assert violations(LINES) == []
    assert Ledger.of(LINES[2:], first_step=3).violations(ORDER, BATCH) == []


def test_missing_steps_are_found() -> None:
    assert violations([LINES[0], *LINES[2:]]) == ["step 2 is missing before step 3"]
    assert violations(LINES[3:]) == ["steps 1 to 3 are missing before step 4"]


def test_a_repeated_step_is_found_with_its_samples() -> None:
    found = violations([*LINES[:2], LINES[1], *LINES[2:]])
    assert found[0] == "step 2 is repeated"
    assert found[1:] == [f"step 2 repeats sample {s}, consumed by step 2" for s in LINES[1][1]]


def test_swapped_steps_are_out_of_order() -> None:
    found = violations([LINES[0], LINES[2], LINES[1], *LINES[3:]])
    assert found == [
        "step 2 is missing before step 3",
        "step 2 is out of order: step 3 came before it",
    ]


def test_swapped_samples_are_out_of_order() -> None:
    step, (a, b, *rest) = LINES[1]
    found = violations([LINES[0], (step, (b, a, *rest)), *LINES[2:]])
    assert found == ["step 2 has its samples out of order from place 0 on"]


def test_a_lost_and_a_foreign_sample_are_named() -> None:
    step, (first, *rest) = LINES[1]
    foreign = 999
    found = violations([LINES[0], (step, (foreign, *rest)), *LINES[2:]])
    assert found == [f"step 2 lacks {first}, has 999, not its own under seed 11"]
    found = violations([LINES[0], (step, tuple(rest)), *LINES[2:]])
    assert found == [f"step 2 lacks {first}, has 3 samples instead of 4"]


def test_another_seed_is_found() -> None:
    found = violations(LINES, DataOrder(seed=12, dataset_size=6))
    assert found
    assert all("seed 12" in f or "out of order" in f for f in found)


@given(
    step=st.integers(0, len(LINES) - 1),
    place=st.integers(0, BATCH - 1),
    sample=st.integers(0, 40),
)
def test_any_single_wrong_sample_is_found(step: int, place: int, sample: int) -> None:
    number, ids = LINES[step]
    changed = (*ids[:place], sample, *ids[place + 1 :])
    lines = [*LINES[:step], (number, changed), *LINES[step + 1 :]]
    assert bool(violations(lines)) == (changed != ids)
