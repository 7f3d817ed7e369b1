"""Every optimizer trains as it does in plain PyTorch, through a loss of a rank and a new layout.

Five steps on three ranks; one is lost; what the others list is put together and put back into two
ranks, for five more. One set of processes runs all cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elastic_ft.config import Job
from elastic_ft.core.batches import DataOrder
from elastic_ft.core.layouts.layout import plan_layout
from elastic_ft.core.schedule import scheduled_rate
from elastic_ft.core.sharding import Box
from elastic_ft.engines.optimizers import make_optimizer
from elastic_ft.models.build import build_model
from elastic_ft.state.tensors import tensor_name
from tests.multiproc import pool
from tests.multiproc.harness import make_job
from tests.multiproc.layouts import COMMON
from tests.multiproc.moves import assemble
from tests.multiproc.pool import Pool
from tests.multiproc.tiny import Counted

BEFORE, STEPS, TOLERANCE = 5, 10, 1e-5
ADAFACTOR = {"relative_step": False, "scale_parameter": False}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adam": {},
    "sgd": {"momentum": 0.9, "dampening": 0.3},
    "muon": {},
    "schedule_free_adamw": {},
    "schedule_free_sgd": {"momentum": 0.8},
    "torch.optim:NAdam": {},
    "torch.optim:Adagrad": {"initial_accumulator_value": 0.1},
    "torch.optim:RMSprop": {"momentum": 0.5},
    "torch.optim:Adafactor": {},
    "transformers:Adafactor": ADAFACTOR,
    "tests.oneproc.own_optimizers:Counting": {},
    "torch.optim:Muon": {},
}
NEEDS_WHOLE = ("torch.optim:Adafactor", "transformers:Adafactor", "torch.optim:Muon")
pytestmark = pytest.mark.timeout(120)


MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 36,
    "vocab_size": 102,
    "num_local_experts": 4,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
}


QWEN3_MOE = {key: value for key, value in MIXTRAL.items() if key != "num_local_experts"} | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 20,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
SHARED = {"strategy": "fsdp", "ep": 2}
OWNERS = {"fsdp3-ep3": (0, 2, 1, 0), "fsdp2-ep2": (1, 0, 0, 1)}


def job_of(
    name: str,
    strategy: str,
    model: dict[str, Any] | None = None,
    offload: bool = False,
    **parallel: Any,
) -> Job:
    path = "matrices" if name.endswith("Muon") else "mixer"
    optimizer = COMMON["optimizer"] | {"name": name, "kwargs": OPTIMIZERS[name], "eps": 1e-6}
    if name.startswith("schedule_free"):
        optimizer |= {"schedule": "constant", "warmup_steps": 3}
    if offload:
        optimizer["offload"] = "cpu"
    model = model or {"path": f"tests.multiproc.tiny:{path}"}
    sections = {"optimizer": optimizer, "model": model, "parallel": parallel}
    return make_job(strategy, workers=1, **COMMON | sections)


# ------------------------------------------------------------------------------------- on ranks


def train_on(
    port: int,
    generation: int,
    rank: int,
    world: int,
    job: Job,
    state: dict[str, np.ndarray] | None,
    steps: range,
) -> list[Any]:
    """For ``pool.Pool``. Goes on from the whole tensors of ``state``; returns this rank's part."""
    layout, _ = plan_layout(job.parallel.wish, world)
    layout = replace(layout, owners=OWNERS.get(str(layout), ()))
    engine, data = pool.make_engine(job)
    groups = pool.form(port, generation, rank, layout)
    try:
        engine.attach(groups)
        if state is None:
            engine.initialise()
        else:
            listed = engine.state()
            assert {tensor_name(key) for key in listed} == state.keys()
            for key, tensor in listed.items():
                whole = torch.from_numpy(state[tensor_name(key)])
                with torch.no_grad():
                    tensor.local.copy_(whole[tensor.box.slices_within(Box.whole(tensor.shape))])
        engine.restored()
        pool.train(job, engine, data, groups, steps)
        return [
            (tensor_name(key), t.shape, t.box, t.local.detach().clone().numpy())
            for key, t in engine.state().items()
        ]
    finally:
        groups.abort("the end")
        engine.detach()
        groups.teardown()


# ------------------------------------------------------------------------------ in plain PyTorch


def alone(job: Job) -> dict[str, np.ndarray]:
    """The parameters after all steps, with nothing but torch and the order of the samples."""
    torch.manual_seed(job.seed)
    model = build_model(job.model, vocab_size=Counted.vocab_size, sequence_length=None)
    optimizer = make_optimizer(job.optimizer, dict(model.named_parameters()))
    data, size = Counted(), job.batch.global_batch_size
    order = DataOrder(job.seed, len(data))
    for step in range(1, STEPS + 1):
        ids = order.sample_ids((step - 1) * size, step * size)
        tokens = torch.stack([data[order.dataset_index(i)]["tokens"] for i in ids])
        for part in tokens.split(job.batch.micro_batch_size):
            output = model(part[:, :-1])
            logits = output if isinstance(output, torch.Tensor) else output.logits
            loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
            if not isinstance(output, torch.Tensor):
                loss = loss + MIXTRAL["router_aux_loss_coef"] * output.aux_loss
            (loss * len(part) / size).backward()
        assert job.optimizer.grad_clip is not None
        nn.utils.clip_grad_norm_(model.parameters(), job.optimizer.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = scheduled_rate(job.optimizer, job.steps, step)
        optimizer.step()
        optimizer.zero_grad()
    return {f"model.{n}": p.detach().numpy() for n, p in model.named_parameters()}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    with Pool(3) as ranks:
        yield ranks


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_as_plain_pytorch_through_a_loss(ranks: Pool, name: str, strategy: str) -> None:
    if strategy == "fsdp" and name in NEEDS_WHOLE:
        pytest.skip("refused by name: tests/oneproc/test_optimizer_state.py")
    check(ranks, job_of(name, strategy))


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        (MIXTRAL, {"strategy": "ddp"}),
        (MIXTRAL, {"strategy": "fsdp"}),
        (MIXTRAL, SHARED),
        (QWEN3_MOE, SHARED),
    ],
    ids=lambda given: str(given.get("model_type", given)),
)
def test_a_mixture_of_experts_through_a_loss(
    ranks: Pool, model: dict[str, Any], parallel: dict[str, Any]
) -> None:
    """Its routers' loss included, of each micro-batch. Four experts on three ranks: 2, 1 and 1, and
    then on two."""
    check(ranks, job_of("adamw", model={"transformers": model}, **parallel))


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        ("adamw", {"strategy": "ddp"}),
        ("schedule_free_adamw", {"strategy": "fsdp"}),
        pytest.param("adamw", SHARED, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_in_host_memory_through_a_loss(ranks: Pool, name: str, parallel: dict[str, Any]) -> None:
    model = {"transformers": MIXTRAL} if "ep" in parallel else None
    check(ranks, job_of(name, model=model, offload=True, **parallel))


def check(ranks: Pool, job: Job) -> None:
    parts = ranks(train_on, job, None, range(1, BEFORE + 1), world=3)
    state = assemble(dict(enumerate(parts)))
    parts = ranks(train_on, job, state, range(BEFORE + 1, STEPS + 1), world=2)
    found = assemble(dict(enumerate(parts)))
    expected = alone(job)
    assert {key for key in found if key.startswith("model.")} == expected.keys()
    for key, values in expected.items():
        np.testing.assert_allclose(found[key], values, rtol=0, atol=TOLERANCE, err_msg=key)
