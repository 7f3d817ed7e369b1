"""Lines of Accelerate's and Fabric's that stay as they are."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

from elastic_ft.config import parse_job
from elastic_ft.errors import ConfigError, UsageError
from elastic_ft.training import elsewhere
from elastic_ft.training.context import Context
from elastic_ft.worker.by_user import GATHERED_DIFFERS, ByUser
from elastic_ft.worker.steering import Steering
from tests.oneproc.own_loops import Own
from tests.oneproc.test_own_arguments import context, prepared, samples


@pytest.fixture
def ctx() -> Context:
    made = context(workers=2)
    prepared(made, samples())
    return made


def test_what_all_ranks_have_is_gathered_as_it_is(ctx: Context) -> None:
    """Each goes through a held-out set whole. In a step's function they have other samples."""
    losses = torch.tensor([1.0, -2.0])
    assert ctx.gather(losses) is ctx.gather_for_metrics(losses) is losses
    assert ctx.gather_for_metrics((losses, [3])) == (losses, [3])
    assert ctx.reduce(losses, "mean") is ctx.all_reduce(losses, reduce_op="mean") is losses
    assert torch.equal(ctx.all_gather(2.0), torch.tensor([2.0]))  # type: ignore[arg-type]
    own = ctx._steering("a test")
    assert own.take_gathered() == (1.0, 20.0, 400.0) and own.take_gathered() == (0.0, 0.0, 0.0)
    ctx._inside = True
    with pytest.raises(UsageError, match=r"ctx.gather, .* a named metric to ctx.backward"):
        ctx.gather(losses)


@pytest.mark.parametrize(
    ("ranks", "is_told"),
    [((2.0, 2.0001, None), False), ((2.0, 2.1), True), ((None, None), False), ((0.0, 1.0), True)],
)
def test_what_ranks_gather_and_do_not_share_is_told_once(ranks: Any, is_told: bool) -> None:
    own, told = Own("ddp"), list[Any]()
    makers = [ByUser(Steering(own.engine, None)) for _ in ranks]  # type: ignore[arg-type]
    for maker, value in zip(makers, ranks, strict=True):
        maker._own.gathered = value
    sums = [sum(parts) for parts in zip(*(m._own.take_gathered() for m in makers), strict=True)]
    loop: Any = SimpleNamespace(party=SimpleNamespace(rank=0), step=7)
    loop.note = lambda *line: told.append(line)
    for _ in range(2):
        makers[0]._note_gathered(loop, sums)
    assert told == [("ranks_differ", GATHERED_DIFFERS, {"step": 7})] * is_told


def test_values_are_logged_in_any_form(ctx: Context) -> None:
    ctx.log({"a": torch.tensor(1.0)}, step=3)
    ctx.log("b", np.float32(2.0), step=3)
    ctx.log_dict({"c": 3}, step=3)
    ctx.log(step=4)
    ctx.log(None)
    assert ctx._steering("a test").logged == {"a": 1.0, "b": 2.0, "c": 3, "step": 4}
    with pytest.raises(ConfigError, match=r"expected name=value, or a dictionary, found float"):
        ctx.log(3.0)


def test_a_file_is_written_by_rank_0(ctx: Context, tmp_path: Path) -> None:
    """In Fabric's order and Accelerate's; of modules their state."""
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    ctx._place = (1, 2)
    ctx.save(tmp_path / "state.pt", {"model": model})
    assert not list(tmp_path.iterdir())
    ctx._place = (0, 2)
    ctx.save(tmp_path / "state.pt", {"model": model, "optimizer": optimizer, "epoch": 3})
    found = torch.load(tmp_path / "state.pt")
    assert torch.equal(found["model"]["weight"], model.weight) and found["epoch"] == 3
    ctx.save(model.state_dict(), str(tmp_path / "state.pt"))
    assert torch.load(tmp_path / "state.pt").keys() == {"weight", "bias"}
    assert len(list(tmp_path.iterdir())) == 1 and not ctx._steering("a test").checkpoint
    ctx.save()
    assert ctx._steering("a test").checkpoint
    with pytest.raises(UsageError, match=r"ctx.save: takes nothing, or a path and what"):
        ctx.save(model.state_dict())


def test_a_model_is_unwrapped_where_it_is_whole(ctx: Context) -> None:
    model = nn.Linear(1, 1)
    assert ctx.unwrap_model(model, keep_fp32_wrapper=True) is model
    values = {"name": "own", "loop": {}, "parallel": {"strategy": "fsdp"}}
    cut = Context(SimpleNamespace(job=parse_job(values)))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"weights are cut: ctx.export\(model, folder\)"):
        cut.unwrap_model(model)


@pytest.mark.parametrize(
    ("how", "norm"), [({"max_norm": 1e-3}, 1e-3), ({"clip_val": 1e-3}, 1e-3), ({}, 10.0)]
)
def test_gradients_are_clipped_as_fabric_does(how: dict[str, float], norm: float) -> None:
    own, ctx = Own("ddp"), context()
    ctx._own = Steering(own.engine, None)  # type: ignore[arg-type]
    with own.generation():
        running = own.running(1, [torch.arange(6), torch.arange(6) + 3])
        for micro_batch in own.engine.micro_batches(running):
            own.backward(micro_batch)
        ctx.clip_gradients(own.model, own.optimizer, **how)
        gradient = own.model.embedding.weight.grad
        assert gradient is not None and float(gradient.abs().max()) <= 1.001 * norm


def test_nothing_has_to_be_launched_or_synchronised(ctx: Context) -> None:
    ctx.launch()
    ctx.init_trackers("project", {"rate": 0.1})
    ctx.end_training()
    ctx.wait_for_everyone()
    ctx.barrier("here")
    model = nn.Linear(1, 1)
    ctx.prepare(model)
    with model.no_sync():  # type: ignore[operator]
        assert ctx._own is not None and model in ctx._own.engine.models


def test_one_is_in_the_block_of_the_first_at_a_time(
    ctx: Context, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What it has downloaded the next one finds; each is the main process meanwhile."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    inside, most, is_in = list[int](), list[int](), threading.Event()

    def enter() -> None:
        other = context(workers=2)
        with other.rank_zero_first(local=False):
            inside.append(1)
            most.append(len(inside))
            is_in.set()
            assert other.is_global_zero
            inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(4)]
    with ctx.main_process_first():
        assert ctx.is_main_process
        with monkeypatch.context() as soon:
            soon.setattr(elsewhere, "FIRST_S", 0.0)
            with pytest.raises(UsageError, match="another process of this machine is in it"):
                enter()
        for thread in threads:
            thread.start()
        assert not is_in.wait(4 * elsewhere.LOOK_S)
    for thread in threads:
        thread.join(60)
    assert most == [1, 1, 1, 1]
    with pytest.raises(UsageError, match="there is none before the first batch"):
        ctx.is_main_process  # noqa: B018
