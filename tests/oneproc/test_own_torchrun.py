"""Lines of a torchrun script's that stay as they are: its DDP, its DistributedSampler."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from elastic_ft.errors import ConfigError
from elastic_ft.training.context import Context
from elastic_ft.training.each import is_another
from elastic_ft.training.found import watch
from tests.oneproc.own_loops import Own
from tests.oneproc.test_own_arguments import context, prepared, samples

PLACES = [*inspect.signature(DDP.__init__).parameters][2:]  # behind self and module


@pytest.fixture
def ctx() -> Iterator[Context]:
    made = context()
    watch(lambda: made)
    yield made
    watch(lambda: None)


def sharded(**how: Any) -> DataLoader[Any]:
    data = list(torch.arange(16.0))
    return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, **how))


def test_a_wrapped_model_is_the_model(ctx: Context) -> None:
    """``.module`` is there as well, in no state; a copy has its own."""
    model = nn.Linear(1, 1)
    assert DDP(model, device_ids=None, broadcast_buffers=False) is model is model.module
    assert [*model.state_dict()] == ["weight", "bias"] and len([*model.modules()]) == 1
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.module is other is not model


def test_a_model_with_a_module_of_its_own_keeps_it(ctx: Context) -> None:
    model = torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1))
    assert DDP(module=model) is model is not model.module


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"find_unused_parameters": True}, r'parallel={"unused_parameters": True} of init'),
        ({"process_group": object()}, "process_group: refused"),
        ({"mixed_precision": object()}, "mixed_precision: refused: torch.autocast"),
        ({"device_mesh": object()}, "device_mesh: refused"),
    ],
)
def test_what_a_wrapper_can_not_mean_is_told(
    ctx: Context, option: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=rf"DistributedDataParallel.*{said}"):
        DDP(nn.Linear(1, 1), **option)


def test_options_by_their_places_are_looked_at_too(ctx: Context) -> None:
    with pytest.raises(ConfigError, match="process_group: refused"):
        DDP(nn.Linear(1, 1), *map(str, range(PLACES.index("process_group") + 1)))


def test_the_engine_s_own_is_a_wrapper(ctx: Context) -> None:
    """And is made with the words that this torch has for its options."""
    own = Own("ddp")
    warnings.simplefilter("error")
    with own.generation():
        assert [type(runner) for runner in own.engine._runners.values()] == [DDP]


def test_a_distributed_sampler_stays(ctx: Context) -> None:
    """What is trained on is in the job's order; held-out data each rank goes through whole."""
    trained, held_out = prepared(ctx, sharded(seed=3, drop_last=True), sharded(shuffle=False))
    trained.sampler.set_epoch(1)
    held_out.sampler.set_epoch(1)
    assert len(trained) == 4 and torch.cat(list(held_out)).tolist() == list(range(16))
    with pytest.raises(ConfigError, match="has a DistributedSampler of its own"):
        prepared(context(), sharded(num_replicas=2, rank=0))
    assert not DistributedSampler(range(4), 2, 0, False).shuffle  # by its place, as torch's


def test_a_shuffled_test_set_is_not_trained_on_for_that(ctx: Context) -> None:
    """shuffle=True says what is trained on; beside a DistributedSampler, which shuffles by itself,
    it said that of a test set."""
    test = DataLoader(list(torch.arange(16.0)), batch_size=2, shuffle=True)
    with pytest.raises(ConfigError, match="expected one DataLoader that is trained on, found 2"):
        prepared(ctx, sharded(), test)


def test_a_held_out_loader_without_one_has_its_epoch_set_too(ctx: Context) -> None:
    """minGPT's Trainer sets it of both loaders, after ``sampler=`` was left out of them; then it
    goes over either by one line, which refused a held-out one that was prepared."""
    trained, held_out = prepared(ctx, samples(), samples())
    held_out.sampler.set_epoch(1)
    assert len(held_out.sampler) == len(held_out.dataset)
    seen = list[Any]()
    ctx.each(held_out, enumerated=True)(lambda i, batch: seen.append((i, len(batch))))
    assert seen == [(i, 2) for i in range(8)] and not is_another(trained, trained)


def test_drop_last_is_what_is_done_anyway() -> None:
    """It was refused; all of a job's batches are whole."""
    loader = DataLoader(list(torch.zeros(16)), batch_size=2, drop_last=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = prepared(context(), loader)
    assert len(found) == 4


def test_without_a_context_both_are_torch_s() -> None:
    watch(lambda: None)
    for make in (lambda: DDP(nn.Linear(1, 1)), sharded):
        with pytest.raises(ValueError, match="process group has not been initialized"):
            make()
