"""What a script's context makes of its arguments, in this process."""

from __future__ import annotations

import itertools
import pickle
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from elastic_ft.config import parse_job
from elastic_ft.data.prefetch import Prefetcher
from elastic_ft.errors import ConfigError, GroupBroken, UsageError
from elastic_ft.training.batch import Batch
from elastic_ft.training.context import Context
from elastic_ft.training.each import ZeroGrad, body_of
from elastic_ft.training.elsewhere import INSTEAD
from elastic_ft.training.loader import Loader, collated, drawn_bundle
from elastic_ft.worker.steering import Dealt, Ended, Steering
from elastic_ft.worker.step import Step
from tests.oneproc.own_loops import Own

PASS = 2  # steps


def context(first: int = 1, last: int = 12, workers: int = 1) -> tuple[Context, Any]:
    """One whose worker deals those steps, and the loader."""
    values = {"name": "own", "loop": {}, "parallel": {"device": "cpu"}}
    values["batch"] = {"global_batch_size": 4, "micro_batch_size": 2}
    values["elastic"] = {"max_workers": workers}
    numbers = iter(range(first, last + 1))

    def next_item() -> Any:
        number = next(numbers, None)
        if number is None:
            return Ended("")
        return Dealt(SimpleNamespace(number=number), 1, 0, 1)  # type: ignore[arg-type]

    ctx = Context(SimpleNamespace(job=parse_job(values), next_item=next_item))  # type: ignore[arg-type]
    model = nn.Linear(1, 1)
    loader = DataLoader([0.0] * PASS * 4, batch_size=2)
    return ctx, ctx.prepare(model, torch.optim.SGD(model.parameters()), loader)[-1]


def trained(ctx: Context, loader: Any, *span: int) -> list[tuple[int, int]]:
    """Each epoch with its steps' numbers."""
    found = []
    for epoch in ctx.epochs(*span):
        for batch in loader:
            found.append((epoch, batch.number))
            ctx._dealt = None  # it is made
    return found


@pytest.mark.parametrize("first", [1, 4, 7, 10])
def test_a_second_call_of_epochs_goes_on_where_the_first_ended(first: int) -> None:
    """Also for who joins, or restarts, in the first's, between them, or in the second's."""
    ctx, loader = context(first)
    found = trained(ctx, loader, 3) + trained(ctx, loader, 3, 6)
    assert found == [(number // PASS, number + 1) for number in range(first - 1, 6 * PASS)]


def test_clipping_takes_arguments_by_name() -> None:
    own, (ctx, _) = Own("ddp"), context()
    ctx._own = Steering(own.engine, ctx._own.data)  # type: ignore[union-attr]
    parameters = [own.model.embedding.weight]
    with own.generation():
        norms = []
        for number, (norm, named) in enumerate(
            [
                ((1e-3,), {}),
                ((), {"max_norm": 1e-3}),
                ((parameters,), {"max_norm": 1e-3}),
                ((), {"parameters": parameters, "max_norm": 1e-3, "norm_type": 2.0}),
            ]
        ):
            running = own.running(number + 1, [torch.arange(6), torch.arange(6) + 3])
            for micro_batch in own.engine.micro_batches(running):
                own.backward(micro_batch)
            norms.append(ctx.clip_grad_norm_(*norm, **named))
            gradient = own.model.embedding.weight.grad
            assert gradient is not None and float(gradient.norm()) <= 1.001e-3
            own.optimizer.zero_grad()
        assert norms[0] == norms[1] > norms[2] == norms[3] > 0


def test_a_norm_of_groups_that_were_aborted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL returns from what was aborted: the world breaks while torch computes it, here."""
    own, (ctx, _) = Own("ddp"), context()
    ctx._own = Steering(own.engine, ctx._own.data)  # type: ignore[union-attr]
    plain = nn.utils.clip_grad_norm_

    def broken(*args: Any, **named: Any) -> torch.Tensor:
        assert own.engine._groups is not None
        own.engine._groups.abort("a worker was lost")
        return plain(*args, **named)

    monkeypatch.setattr("torch.nn.utils.clip_grad_norm_", broken)
    with own.generation():
        running = own.running(1, [torch.arange(6), torch.arange(6) + 3])
        for micro_batch in own.engine.micro_batches(running):
            own.backward(micro_batch)
        with pytest.raises(GroupBroken, match="a worker was lost"):
            ctx.clip_grad_norm_(own.model.parameters(), 1.0)


def test_whole_weights_of_groups_that_were_aborted_are_not_written() -> None:
    """NCCL returns from what was aborted: they may be any numbers."""
    own = Own("fsdp")
    with own.generation():
        assert own.engine.whole_state(own.model, 0)
        assert own.engine._groups is not None
        own.engine._groups.abort("a worker was lost")
        with pytest.raises(GroupBroken):
            own.engine.whole_state(own.model, 0)


def test_a_prepared_model_is_pickled_as_itself() -> None:
    """As by torch.save(model), in the step's function and outside it."""
    own = Own("ddp")
    own.model.zero_grad = ZeroGrad(own.model, lambda: True)  # type: ignore[method-assign]
    with own.generation():
        own.step(1)
        again = pickle.loads(pickle.dumps(own.model))
        assert torch.equal(again(torch.arange(6)), own.model(torch.arange(6)))
        again(torch.arange(6)).sum().backward()
        again.zero_grad()
        assert all(parameter.grad is None for parameter in again.parameters())


def made_steps(ctx: Context) -> Any:
    """A worker that makes each step that it has dealt, as soon as it is given a body."""
    own, deal = ctx._steering("a test"), ctx.worker.next_item

    def next_item() -> Any:
        if own.body is None:
            return deal()
        body, own.body = own.body, None
        body()
        return Step(ctx._awaited().running.number, 0.0, 0.1, 0.0, 0, 0.0, 1, 1, 0)

    ctx.worker.next_item = next_item  # type: ignore[method-assign]


def test_each_goes_over_what_goes_over_the_loader() -> None:
    """A progress bar, say; the batch's number is of the epoch, also for who joins in it."""
    ctx, loader = context(first=4)
    made_steps(ctx)
    shown, seen = list[int](), list[tuple[int, int]]()

    def bar(batches: Any) -> Any:
        assert len(batches) == PASS
        for batch in batches:
            yield batch
            shown.append(batch.number)

    for _ in ctx.epochs(3):

        @ctx.each(bar(loader), whole=True, enumerated=True)
        def train_step(place: int, batch: Any) -> None:
            seen.append((place, batch.number))

    assert seen == [(1, 4), (0, 5), (1, 6)] and shown == [4, 5, 6]


def test_epochs_of_so_many_steps() -> None:
    """Whatever a pass over the data is; a second call's may be of others."""
    ctx, loader = context(first=4)
    made_steps(ctx)
    seen = list[tuple[int, int, int]]()
    for epochs, steps in ((range(2), 3), (range(2, 4), 1)):
        for epoch in ctx.epochs(epochs.start, epochs.stop, steps=steps):

            @ctx.each(loader, whole=True, enumerated=True)
            def train_step(place: int, batch: Any, epoch: int = epoch) -> None:
                seen.append((epoch, place, batch.number))

    assert seen == [(1, 0, 4), (1, 1, 5), (1, 2, 6), (2, 0, 7), (3, 0, 8)]


@pytest.mark.parametrize("epochs", [True, False])
def test_each_refuses_what_ends_by_a_count_of_its_own(epochs: bool) -> None:
    """Who joins in the middle would begin to count there: also where nobody has joined."""
    ctx, loader = context()
    made_steps(ctx)

    def first(batches: Any, count: int) -> Any:
        for number, batch in enumerate(batches, 1):
            yield batch
            if number == count:
                break

    with pytest.raises(ConfigError, match=r"islice counts from where .* ctx.epochs\(n, steps="):
        ctx.each(itertools.islice(loader, 1))
    span = ctx.epochs(3, steps=4) if epochs else iter([0])
    next(span)
    said = "after step 3, 3 of 4 in its epoch" if epochs else "after step 3, before the loader"
    with pytest.raises(ConfigError, match=said):
        ctx.each(first(loader, 3), whole=True)(lambda batch: None)


def test_an_epoch_that_is_left_in_its_middle_is_refused() -> None:
    """It went on as the same epoch, and an epoch less was trained; at its end it may be left."""
    ctx, loader = context()
    made_steps(ctx)
    make, epochs = ctx.step(lambda batch: None), ctx.epochs(4, steps=3)
    for count in (3, 2):
        next(epochs)
        for batch in loader:
            if make(batch).number % 3 == count % 3:
                break
    with pytest.raises(ConfigError, match=r"after step 5, 2 of 3 in its epoch: .* steps="):
        next(epochs)


def test_a_loader_that_is_gone_over_twice_in_an_epoch_is_refused() -> None:
    """The second loop trained the next epoch; who joined in that was in the first loop."""
    ctx, loader = context()
    made_steps(ctx)
    make, epochs = ctx.step(lambda batch: None), ctx.epochs(4, steps=3)
    next(epochs)
    assert [make(batch).number for batch in loader] == [1, 2, 3]
    with pytest.raises(ConfigError, match=r"twice in an epoch, .* ended with step 3"):
        next(iter(loader))


def test_who_makes_a_step_that_others_have_made_begins_the_next_epoch_in_time() -> None:
    """It broke off in one that the others had: its function is given the next one."""
    ctx, loader = context()
    made_steps(ctx)
    make, found = ctx.step(lambda batch: None), list[tuple[int, int]]()
    for epoch in ctx.epochs(3, steps=3):
        for batch in loader:
            if batch.number == 2:  # the world breaks in it, and has it
                ctx._own.body = None  # type: ignore[union-attr]
                ctx._dealt = None
                assert ctx._is_dealt()
                batch = Batch(ctx._own.engine, ctx._awaited())  # type: ignore[union-attr]
            found.append((epoch, make(batch).number))
    assert found == [(0, 1), (0, 3), *((1, n) for n in (4, 5, 6)), *((2, n) for n in (7, 8, 9))]


def test_who_was_on_the_bench_as_an_epoch_ended_goes_on_in_the_epoch_of_the_others() -> None:
    """It was told that its loader was gone over twice, and the job ended."""
    ctx, loader = context()
    made_steps(ctx)
    make, found = ctx.step(lambda batch: None), list[tuple[int, int]]()
    for epoch in ctx.epochs(3, steps=3):
        for batch in loader:
            found.append((epoch, make(batch).number))
            if found[-1][1] == 1:  # it waits for its next step while others make 2 to 4
                for _ in (2, 3, 4):
                    ctx._dealt = None
                    assert ctx._is_dealt()
    assert found == [(0, 1), (1, 4), (1, 5), (1, 6), *((2, n) for n in (7, 8, 9))]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_second_loop_over_the_loader_is_warned_of(workers: int) -> None:
    """Who joins is in the first. One batch at a time is no loop; nobody joins a world of one."""
    ctx, loader = context(workers=workers)
    made_steps(ctx)
    make = ctx.step(lambda batch: None)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            make(next(iter(loader)))
        for batch in loader:
            if make(batch).number == 5:
                break
        assert not told
        make(next(iter(loader)))
        assert ["left after 2 batches" in str(line.message) for line in told] == [True] * (
            workers - 1
        )


def test_an_epoch_of_a_stream_needs_its_steps() -> None:
    ctx, _ = context()
    ctx._loader = Loader(ctx, drawn_bundle())
    with pytest.raises(ConfigError, match=r"ctx.epochs\(n, steps=...\)"):
        next(ctx.epochs(3))
    with pytest.raises(ConfigError, match="at least 1, found 0"):
        next(ctx.epochs(3, steps=0))
    assert next(ctx.epochs(3, steps=2)) == 0


@pytest.mark.parametrize("over", [[(0, 1)], enumerate("ab")])
def test_each_refuses_what_gives_no_batches(over: Any) -> None:
    ctx, _ = context()
    with pytest.raises(ConfigError, match=r"found a tuple; for enumerate\(loader\) say enumerated"):
        ctx.each(over)(lambda batch: None)


def test_each_goes_over_held_out_data_as_a_plain_loop() -> None:
    """A trainer's one method for both, its ``train`` False: no step is made of it."""
    ctx, _ = context()
    seen: list[tuple[int, list[float]]] = []
    held_out = DataLoader([1.0, 2.0, 3.0], batch_size=2)

    @ctx.each(held_out, enumerated=True)
    def look(place: int, batch: torch.Tensor) -> None:
        seen.append((place, batch.tolist()))
        assert not ctx.running_step

    assert seen == [(0, [1.0, 2.0]), (1, [3.0])]


def test_beside_a_stream_each_can_not_tell_what_is_held_out() -> None:
    ctx, _ = context()
    ctx._loader = Loader(ctx, drawn_bundle())
    with pytest.raises(ConfigError, match=r"expected the loader that ctx\.prepare has returned"):
        ctx.each(DataLoader([1.0], batch_size=2))(lambda batch: None)


def test_each_refuses_the_loader_of_before_prepare() -> None:
    ctx, loader = context()
    with pytest.raises(ConfigError, match=r"expected the loader that ctx\.prepare has returned"):
        ctx.each(DataLoader(loader.dataset, batch_size=2))(lambda batch: None)


def test_a_body_that_sets_a_name_of_the_lines_outside_is_told() -> None:
    count = 0

    def counts(x: Any) -> None:
        count += 1  # type: ignore[misc]  # noqa: F823, F841

    def calls(x: Any) -> None:
        counts(x)

    with pytest.raises(UsageError, match=r"counts, line \d+: .*'count'.* say `nonlocal`"):
        body_of(counts, False, False)(0, "a micro-batch")
    with pytest.raises(UnboundLocalError):
        body_of(calls, False, False)(0, "a micro-batch")
    assert count == 0


def test_what_another_library_has_is_told_by_name() -> None:
    ctx, _ = context()
    with pytest.raises(UsageError, match=r"ctx\.save_state: .* the job keeps its own checkpoints"):
        ctx.save_state(None)
    with pytest.raises(UsageError, match=r"ctx\.nonsense: is not there: docs/bring-your-own"):
        _ = ctx.nonsense
    assert not hasattr(ctx, "nonsense") and not hasattr(ctx, "save_state")
    assert not [name for name in INSTEAD if hasattr(Context, name)]


class Growing:
    def __init__(self) -> None:
        self.values = [torch.tensor(1.0)] * 8

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.values[index]


class Collating(Growing):
    def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples)


@pytest.mark.parametrize("kind", [Growing, Collating])
def test_a_dataset_that_grows_is_refused(kind: type[Growing]) -> None:
    """The order of samples is of so many, and each's index was of another number of them."""
    dataset = kind()
    samples = collated(dataset, None)
    assert len(samples) == 8
    dataset.values.append(torch.tensor(2.0))
    with pytest.raises(ConfigError, match="had 8 samples when it was prepared, and has 9 now"):
        len(samples)
    with Prefetcher(samples) as prefetcher, pytest.raises(ConfigError, match="has 9 now"):
        prefetcher.request(1, [(8,)])
        prefetcher.get(1)


def test_a_step_in_a_step_and_a_batch_for_another_thread_are_refused() -> None:
    """It was told that a generator executes already, and tried three times."""
    ctx, loader = context()
    made_steps(ctx)
    inner = ctx.step(lambda batch: None)

    @ctx.step
    def train_step(batch: Any, what: str) -> None:
        if what == "a step":
            inner(batch)
        elif what == "a batch":
            next(iter(loader))
        else:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(lambda: next(iter(loader))).result()

    for batch in loader:
        for what in ("a step", "a batch", "a thread's batch"):
            with pytest.raises(UsageError, match="while the function of a step runs"):
                train_step(batch, what)
        break


def test_who_was_left_behind_in_a_step_is_not_in_it() -> None:
    """Its thread sleeps there for good: the world goes on in another."""
    ctx, loader = context()
    made_steps(ctx)
    next_item, broken = ctx.worker.next_item, iter([True])

    def breaks_once() -> Any:
        if ctx._own.body is not None and next(broken, False):  # type: ignore[union-attr]
            ctx._inside = True
            return ctx._awaited()
        return next_item()

    ctx.worker.next_item = breaks_once  # type: ignore[method-assign]
    made = ctx.step(lambda batch: None)
    assert [made(batch).number for batch in loader] == [*range(1, 13)]


def test_a_step_that_exits_is_told_to_leave_the_loop() -> None:
    """Its worker ended without a word, and another came in its place to do the same."""
    ctx, loader = context()
    made_steps(ctx)
    leave = ctx.step(lambda batch: sys.exit(0))
    with pytest.raises(UsageError, match=r"exits \(0\): .* `break` from the loop"):
        leave(next(iter(loader)))
