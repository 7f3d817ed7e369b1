"""Weights of a schedule-free optimizer within an evaluation, and what is listed meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elastic_ft.config.trained import OFFLOADED, SCHEDULE_FREE
from elastic_ft.engines.averaged import averaged
from elastic_ft.engines.base import MicroBatch
from elastic_ft.engines.native import NativeEngine
from elastic_ft.models.decoder import Decoder, DecoderConfig
from elastic_ft.torch_private import after_operations
from tests.oneproc.alone import attached, job_of, run_step

schedulefree = pytest.importorskip("schedulefree")
SIZES = DecoderConfig(
    vocab_size=97, n_layers=2, dim=16, n_heads=2, n_kv_heads=1, ffn_dim=24, max_sequence_length=12
)
WAYS = {
    "ddp": {"parallel": {"strategy": "ddp"}},
    "fsdp": {"parallel": {"strategy": "fsdp"}, "precision": {"dtype": "bf16"}},
}
FP16 = {"dtype": "fp16", "initial_loss_scale": 2.0**21}
HALF = {"parallel": {"strategy": "ddp"}, "precision": FP16}
BY_PATH = "schedulefree:RAdamScheduleFree"
KINDS = {
    "schedule_free_adamw": {"betas": [0.8, 0.9]},
    "schedule_free_sgd": {"kwargs": {"r": 0.1}},
    BY_PATH: {"kwargs": {"betas": [0.8, 0.9], "silent_sgd_phase": False}},
}


def batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"tokens": torch.randint(0, 97, (4, 13), generator=generator)}


def job(way: str, name: str, offload: str | None) -> Any:
    optimizer = {"name": name, "lr": 0.05, "schedule": "constant", "offload": offload}
    return job_of(optimizer=optimizer | KINDS[name], **WAYS[way])


def listed(engine: NativeEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.local.clone() for name, tensor in engine.state().items()}


def live(engine: NativeEngine) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in engine._model.parameters.items():
        value: Any = parameter.detach()
        found[f"model.{name}"] = getattr(value, "_local_tensor", value).clone()
    return found


def by_the_package(state: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """What its optimizer makes of such a state in ``eval``."""
    weights = {k: v.clone() for k, v in state.items() if k.startswith("model.")}
    if name == "schedule_free_adamw":
        optimizer = schedulefree.AdamWScheduleFree(weights.values(), betas=(0.8, 0.9))
    elif name == BY_PATH:
        optimizer = schedulefree.RAdamScheduleFree(weights.values(), betas=(0.8, 0.9))
    else:
        optimizer = schedulefree.SGDScheduleFree(weights.values())
    optimizer.train()
    for key, weight in weights.items():
        optimizer.state[weight]["z"] = state[f"optim.{key.removeprefix('model.')}.z"]
    optimizer.eval()
    return weights


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize(
    ("name", "offload"), [*((name, None) for name in KINDS), *((n, "cpu") for n in SCHEDULE_FREE)]
)
@pytest.mark.parametrize("way", WAYS)
def test_an_evaluation_is_of_the_averages(way: str, name: str, offload: str | None) -> None:
    with attached(job(way, name, offload), lambda: Decoder(SIZES), tokens=12) as engine:
        held_out = [MicroBatch(0, batch(9))]
        before = live(engine)
        with averaged(engine._model):  # nothing is averaged yet
            assert same(live(engine), before)
        for step in range(1, 4):
            run_step(engine, step, [batch(step)])
        state, y = listed(engine), live(engine)
        assert same(y, {key: state[key] for key in y})
        with averaged(engine._model):
            x = live(engine)
            assert same(x, by_the_package(state, name))
            assert not any(torch.equal(x[key], y[key]) for key in x)
            assert same(listed(engine), state)
        loss = engine.evaluate(held_out)[0]
        assert same(live(engine), y) and same(listed(engine), state)

        def breaks() -> Any:
            yield held_out[0]
            assert same(listed(engine), state)  # of a thread that is left behind here
            raise RuntimeError("as it were")

        with pytest.raises(RuntimeError, match="as it were"):
            engine.evaluate(breaks())
        assert same(live(engine), y) and same(listed(engine), state)
        engine.job = engine.job.model_copy(update={"optimizer": job_of().optimizer})
        assert engine.evaluate(held_out)[0] != loss


@pytest.mark.parametrize("offload", [None, "cpu"])
def test_an_evaluation_that_breaks_as_it_begins_leaves_all_as_it_was(offload: str | None) -> None:
    """Wherever memory is short: what is listed afterwards is what steps go on from."""
    made = job("ddp", "schedule_free_sgd", offload)
    with attached(made, lambda: Decoder(SIZES), tokens=12) as engine:
        run_step(engine, 1, [batch(1)])
        state, masters = listed(engine), dict(engine._model.masters)
        entered, operations = False, 0

        def short() -> None:
            if not entered:
                raise torch.OutOfMemoryError("as it were")

        while not entered:
            operations += 1
            try:
                with after_operations(operations, short), averaged(engine._model):
                    entered = True
            except torch.OutOfMemoryError:
                assert all(engine._model.masters[n] is master for n, master in masters.items())
                assert same(listed(engine), state)
                assert same(live(engine), {key: state[key] for key in live(engine)})
        assert operations > 2 * len(masters)


# Each optimizer, each way, and a schedule-free one and another each way.
SHORT = {*(("ddp", name) for name in OFFLOADED), ("fsdp", "adamw"), ("fp16", "sgd")}
SHORT |= {("fsdp", "schedule_free_sgd"), ("fp16", "schedule_free_adamw")}


@pytest.mark.parametrize(
    ("way", "name"),
    [
        pytest.param(way, name, marks=[] if (way, name) in SHORT else [pytest.mark.soak])
        for way in (*WAYS, "fp16")
        for name in OFFLOADED
    ],
)
def test_in_host_memory_steps_are_the_same_to_the_last_bit(way: str, name: str) -> None:
    """fp32, bf16, and fp16 with steps that are skipped; what is listed is what was stepped, and not
    the device's copy. As all of it is equal, either goes on from the other's checkpoints."""
    found = []
    for offload in (None, "cpu"):
        schedule = "constant" if name in SCHEDULE_FREE else "cosine"
        optimizer = {"name": name, "lr": 1e-2, "schedule": schedule, "offload": offload}
        sections = WAYS.get(way, HALF) | {"optimizer": optimizer}
        with attached(job_of(**sections), lambda: Decoder(SIZES), tokens=12) as engine:
            steps = [run_step(engine, step, [batch(step)] * 2) for step in range(1, 5)]
            skipped = {update.skipped for *_, update in steps}
            assert skipped == ({False, True} if way == "fp16" else {False})
            found.append(([loss for loss, *_ in steps], listed(engine)))
            model = engine._model
            apart = [n for n, p in model.parameters.items() if model.masters[n] is not p]
            assert len(apart) == (0 if offload is None else len(model.parameters))
    (losses, state), (others, other_state) = found
    assert losses == others and same(state, other_state)
