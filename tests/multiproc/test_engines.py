"""What engines can do besides laying out the built-in decoder in fp32: against one process.

One set of processes runs all cases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from elastic_ft.config import Job
from elastic_ft.core.batches import DataOrder, deal, step_batch
from elastic_ft.data.dataset import open_dataset
from elastic_ft.engines.along import NUMBERS_MAX
from elastic_ft.engines.learning_rates import learning_rate
from elastic_ft.models.build import build_model
from tests.multiproc.harness import make_job
from tests.multiproc.layouts import (
    COMMON,
    MIXTURE,
    MODEL,
    VARIANTS,
    collectives_of,
    held_out_loss,
    numbers_along,
    train_from_the_start,
    trained_and_held_out,
)
from tests.multiproc.pool import Pool

STEPS, LONGER = 4, 10
# Tensor parallelism costs most: CI has each value of what these tests vary, and each pair that
# meets in the engines' code, once; the soak has them all.
SOAK = pytest.mark.soak
EXACT = 1e-5  # relative, of fp32 losses and gradient norms
pytestmark = pytest.mark.timeout(300)

SHALLOW = VARIANTS["shallow"]
LLAMA = {
    "model_type": "llama",
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 36,
    "vocab_size": 102,
}
FOUR, EXPERTS = {"num_hidden_layers": 4}, {"num_local_experts": 4, "num_experts_per_tok": 2}
OF_EXPERTS = MIXTURE | {"kwargs": MIXTURE["kwargs"] | {"n_layers": 4}}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model": {"transformers": LLAMA}},
    "llama tied": {"model": {"transformers": LLAMA | {"tie_word_embeddings": True}}},
    "llama of 4": {"model": {"transformers": LLAMA | FOUR}},
    "llama of 4, tied": {"model": {"transformers": LLAMA | FOUR | {"tie_word_embeddings": True}}},
    "mixtral": {"model": {"transformers": LLAMA | {"model_type": "mixtral"} | EXPERTS}},
    "qwen3": {"model": {"transformers": LLAMA | {"model_type": "qwen3", "head_dim": 4}}},
    "own": {"model": {"path": "tests.multiproc.tiny:mixer", "kwargs": {}}},
    "recurring": {"model": {"path": "tests.multiproc.tiny:recurring", "kwargs": {}}},
    "routed": {"model": {"path": "tests.multiproc.tiny:routed", "kwargs": {}}},
    "mixture": {"model": OF_EXPERTS},
    "decoder": {},
    "decoder tied": {"model": MODEL | {"kwargs": MODEL["kwargs"] | {"tie_embeddings": True}}},
}
Train = Callable[..., list[dict[str, float]]]


def job_of(model: str, strategy: str = "ddp", **sections: Any) -> Job:
    return make_job(strategy, workers=1, **(COMMON | SHALLOW | MODELS[model] | sections))


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4) as pool:
        yield pool


@pytest.fixture(scope="module")
def train(pool: Pool) -> Train:
    """Losses and gradient norms of a job, equal on all ranks; each job is run once."""
    found: dict[str, list[dict[str, float]]] = {}

    def run(job: Job, world: int) -> list[dict[str, float]]:
        key = f"{world} {job.model_dump_json()}"
        if key not in found:
            (_, first), *others = pool(train_from_the_start, job, STEPS, world=world)
            assert all(str(steps) == str(first) for _, steps in others)  # nan is not nan
            found[key] = first
        return found[key]

    return run


def assert_close(
    found: list[dict[str, float]], expected: list[dict[str, float]], tolerance: float
) -> None:
    for key in ("loss", "grad_norm"):
        mine, others = ([step[key] for step in steps] for steps in (found, expected))
        assert mine == pytest.approx(others, rel=tolerance, abs=0), key


@pytest.mark.parametrize(
    ("model", "strategy", "world", "parallel"),
    [
        pytest.param("llama", "ddp", 2, {"tp": 2}, marks=SOAK),
        ("llama", "fsdp", 4, {"tp": 2}),
        ("llama tied", "ddp", 2, {"tp": 2}),
        pytest.param("qwen3", "ddp", 4, {"tp": 2}, marks=SOAK),
        ("own", "ddp", 2, {"tp": 2, "tp_plan": "tests.multiproc.tiny:MIXER_PLAN"}),
        ("own", "fsdp", 4, {"tp": 2, "tp_plan": "tests.multiproc.tiny:cut_mixer"}),
    ],
)
def test_plans_of_tensor_parallelism(
    train: Train, model: str, strategy: str, world: int, parallel: dict[str, Any]
) -> None:
    alone = train(job_of(model), 1)
    assert_close(train(job_of(model, strategy, parallel=parallel), world), alone, EXACT)


@pytest.mark.parametrize(
    ("model", "strategy", "world", "parallel"),
    [
        ("llama", "ddp", 2, {"pp": 2, "schedule": "gpipe"}),
        ("llama of 4", "ddp", 2, {"pp": 2, "schedule": "interleaved1f1b"}),
        ("llama of 4, tied", "fsdp", 4, {"pp": 2, "schedule": "zero_bubble"}),
        ("llama tied", "fsdp", 4, {"pp": 2, "activation_checkpointing": True}),
        ("llama tied", "ddp", 4, {"pp": 2, "tp": 2}),
        ("qwen3", "ddp", 4, {"pp": 2, "tp": 2}),
        ("mixtral", "fsdp", 4, {"pp": 2}),
        ("mixtral", "fsdp", 4, {"pp": 2, "cp": 2}),
    ],
)
def test_transformers_models_in_stages(
    train: Train, model: str, strategy: str, world: int, parallel: dict[str, Any]
) -> None:
    alone = train(job_of(model), 1)
    assert_close(train(job_of(model, strategy, parallel=parallel), world), alone, EXACT)


@pytest.mark.parametrize(
    ("strategy", "world", "parallel"),
    [
        ("fsdp", 4, {"pp": 2}),
        ("ddp", 2, {"pp": 2, "schedule": "interleaved1f1b"}),
        ("ddp", 2, {"pp": 2, "schedule": "zero_bubble"}),
    ],
)
def test_mixtures_of_experts_in_stages(
    train: Train, strategy: str, world: int, parallel: dict[str, Any]
) -> None:
    """Of seven micro-batches, beside one that is padding on a rank; documents, too."""
    given = {"data": {"path": "tests.multiproc.tiny:packed", "kwargs": {}}}
    given |= {"batch": {"global_batch_size": 14, "micro_batch_size": 2}}
    alone = train(job_of("mixture", **given), 1)
    found = train(job_of("mixture", strategy, parallel=parallel, **given), world)
    assert_close(found, alone, EXACT)


def plain_losses(job: Job, steps: int) -> list[float]:
    """Of a loop in plain PyTorch, with the model's own loss."""
    data = open_dataset(job.data, job.seed)
    torch.manual_seed(job.seed)
    model = build_model(job.model, vocab_size=data.vocab_size, sequence_length=None)
    config, batch, found = job.optimizer, job.batch, []
    matrices, vectors = (
        [p for p in model.parameters() if (p.dim() > 1) is m] for m in (True, False)
    )
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
    )
    order = DataOrder(job.seed, len(data.train))
    (mine,) = deal(batch.micro_batches, 1)
    for step in range(1, steps + 1):
        ids = step_batch(order, step, batch.global_batch_size, batch.micro_batch_size, mine)
        samples = [data.train[order.dataset_index(i)] for some in ids for i in some]
        tokens = data.train.collate(samples)["tokens"]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, job.steps, step)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(
    ("model", "strategy", "world", "parallel"),
    [
        pytest.param("llama", "ddp", 2, {"pp": 2}, marks=SOAK),
        ("llama tied", "ddp", 2, {"pp": 2}),
        pytest.param("llama", "ddp", 4, {"pp": 2, "tp": 2}, marks=SOAK),
        ("llama", "fsdp", 4, {"pp": 2}),
    ],
)
def test_stages_train_as_plain_transformers_does(
    pool: Pool, model: str, strategy: str, world: int, parallel: dict[str, Any]
) -> None:
    job = job_of(model, strategy, parallel=parallel)
    (_, steps), *_ = pool(train_from_the_start, job, LONGER, world=world)
    plain = plain_losses(job, LONGER)
    assert [step["loss"] for step in steps] == pytest.approx(plain, rel=EXACT, abs=0)


@pytest.mark.parametrize(
    ("strategy", "world", "parallel"),
    [
        ("fsdp", 2, {}),
        ("ddp", 2, {"pp": 2}),
        ("ddp", 2, {"tp": 2}),
        pytest.param("fsdp", 4, {"tp": 2}, marks=SOAK),
    ],
)
def test_groups_of_parameters(
    train: Train, strategy: str, world: int, parallel: dict[str, Any]
) -> None:
    groups = [{"match": "*norm*", "lr": 0.01}, {"match": "output.*", "weight_decay": 0.5}]
    optimizer = {"lr": 3e-3, "groups": groups}
    alone = train(job_of("decoder", optimizer=optimizer), 1)
    assert str(alone) != str(train(job_of("decoder"), 1))
    found = train(job_of("decoder", strategy, parallel=parallel, optimizer=optimizer), world)
    assert_close(found, alone, EXACT)


@pytest.mark.parametrize(
    ("strategy", "world", "parallel"),
    [("hsdp", 4, {"shard_size": 2}), ("fsdp", 4, {"tp": 2}), ("ddp", 4, {"pp": 2, "tp": 2})],
)
def test_matrices_that_muon_takes_whole(
    train: Train, strategy: str, world: int, parallel: dict[str, Any]
) -> None:
    muon = {"optimizer": COMMON["optimizer"] | {"name": "muon"}, "batch": COMMON["batch"]}
    alone = train(job_of("decoder", **muon), 1)
    found = train(job_of("decoder", strategy, parallel=parallel, **muon), world)
    assert_close(found, alone, EXACT)


@pytest.mark.parametrize(
    ("strategy", "world", "parallel"),
    [
        ("ddp", 2, {"pp": 2}),
        pytest.param("ddp", 2, {"pp": 2, "schedule": "zero_bubble"}, marks=SOAK),
        ("fsdp", 4, {"pp": 2}),
        ("fsdp", 4, {"pp": 2, "schedule": "zero_bubble"}),
        ("ddp", 4, {"pp": 2, "tp": 2}),
    ],
)
def test_tied_embeddings_in_two_stages(
    train: Train, strategy: str, world: int, parallel: dict[str, Any]
) -> None:
    alone = train(job_of("decoder tied"), 1)
    assert_close(train(job_of("decoder tied", strategy, parallel=parallel), world), alone, EXACT)


@pytest.mark.parametrize(("strategy", "world"), [("ddp", 2), ("fsdp", 3), ("hsdp", 4)])
def test_layers_that_share_a_weight(train: Train, strategy: str, world: int) -> None:
    parallel = {"shard_size": 2} if strategy == "hsdp" else {}
    batch = COMMON["batch"]
    found = train(job_of("recurring", strategy, parallel=parallel, batch=batch), world)
    assert_close(found, train(job_of("recurring", batch=batch), 1), EXACT)


@pytest.mark.parametrize(
    ("model", "strategy", "world", "parallel"),
    [
        ("decoder", "ddp", 2, {"activation_checkpointing": True}),
        ("decoder", "fsdp", 3, {"activation_checkpointing": True}),
        ("decoder", "fsdp", 4, {"tp": 2, "activation_checkpointing": True}),
        ("decoder", "ddp", 4, {"pp": 2, "tp": 2}),
        pytest.param("llama", "fsdp", 4, {"tp": 2}, marks=SOAK),
        ("llama", "fsdp", 4, {"pp": 2}),
    ],
)
def test_packed_documents(
    train: Train, model: str, strategy: str, world: int, parallel: dict[str, Any]
) -> None:
    data = {"path": "tests.multiproc.tiny:packed", "kwargs": {}}
    alone = train(job_of(model, data=data), 1)
    found = train(job_of(model, strategy, parallel=parallel, data=data), world)
    assert_close(found, alone, EXACT)


def test_stages_take_a_tokenizers_batches(train: Train) -> None:
    """Of lengths that differ from one micro-batch to the next, padded within each."""
    data = {"path": "tests.multiproc.tiny:ragged", "kwargs": {}}
    alone = train(job_of("llama", data=data), 1)
    found = train(job_of("llama", "fsdp", parallel={"pp": 2}, data=data), 4)
    assert_close(found, alone, EXACT)


@pytest.mark.parametrize(
    ("model", "strategy", "world", "parallel"),
    [
        pytest.param("decoder", "fsdp", 4, {"tp": 2}, marks=SOAK),
        ("decoder tied", "ddp", 3, {"tp": 3, "loss_chunk_tokens": 5}),
        ("decoder", "ddp", 4, {"pp": 2, "tp": 2}),
        ("decoder", "ddp", 4, {"cp": 2, "tp": 2}),
        ("llama", "fsdp", 4, {"tp": 2}),
    ],
)
def test_batches_of_any_length(
    pool: Pool, model: str, strategy: str, world: int, parallel: dict[str, Any]
) -> None:
    """Tensor-parallel ranks share positions between layers, whose number they need not divide."""
    data = {"path": "tests.multiproc.tiny:of_any_length", "kwargs": {}}
    one, many = job_of(model, data=data), job_of(model, strategy, parallel=parallel, data=data)
    ((alone, held_out),) = pool(trained_and_held_out, one, STEPS, world=1)
    for steps, loss in pool(trained_and_held_out, many, STEPS, world=world):
        assert_close(steps, alone, EXACT)
        assert loss == pytest.approx(held_out, rel=EXACT)


@pytest.mark.parametrize(
    ("model", "data", "strategy", "world"),
    [("decoder", "packed", "ddp", 2), ("llama tied", "ragged", "fsdp", 4)],
)
def test_held_out_losses_of_stages(
    pool: Pool, model: str, data: str, strategy: str, world: int
) -> None:
    given = {"data": {"path": f"tests.multiproc.tiny:{data}", "kwargs": {}}}
    (alone,) = pool(held_out_loss, job_of(model, **given), world=1)
    found = pool(held_out_loss, job_of(model, strategy, parallel={"pp": 2}, **given), world=world)
    assert found == pytest.approx([alone] * world, rel=EXACT)


LONG = {"loss_chunk_tokens": 5, "activation_checkpointing": "selective"}


@pytest.mark.parametrize(
    ("model", "strategy", "world", "parallel"),
    [
        ("decoder", "ddp", 2, {}),
        pytest.param("decoder", "fsdp", 4, {"tp": 2}, marks=SOAK),
        ("decoder tied", "ddp", 2, {"tp": 2}),
        ("decoder", "fsdp", 4, {"pp": 2}),
        ("decoder tied", "ddp", 4, {"pp": 2, "tp": 2}),
    ],
)
def test_long_sequences(
    train: Train, model: str, strategy: str, world: int, parallel: dict[str, Any]
) -> None:
    """A loss in chunks, of a vocabulary that ranks may share, and selective recomputation."""
    found = train(job_of(model, strategy, parallel=parallel | LONG), world)
    assert_close(found, train(job_of(model), 1), EXACT)


@pytest.mark.parametrize(("strategy", "world"), [("ddp", 2), ("fsdp", 3)])
def test_parameters_that_a_rank_does_not_use(train: Train, strategy: str, world: int) -> None:
    parallel = {"unused_parameters": True}
    alone = train(job_of("routed", parallel=parallel), 1)
    assert_close(train(job_of("routed", strategy, parallel=parallel), world), alone, EXACT)


def test_numbers_come_along_with_gradients_to_the_last_bit(pool: Pool) -> None:
    """What a step is agreed on needs no collective of its own where DDP sums gradients."""
    numbers = [math.pi, -1 / 3, 1e308, 5e-324, math.inf, 2.0**53 - 1, 65535.0, -32768.0]
    for world in (2, 3):
        assert pool(numbers_along, job_of("decoder"), numbers, world=world) == [numbers] * world
    for count, found in ((NUMBERS_MAX - 1, [1.0] * (NUMBERS_MAX - 1)), (NUMBERS_MAX, None)):
        assert pool(numbers_along, job_of("decoder"), [1.0] * count, world=2) == [found] * 2


ACCUMULATING: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "hsdp": ("hsdp", {"shard_size": 2}, {"allreduce"}),
    "fsdp, reduced once": ("fsdp", {"reduce_gradients": "step"}, {"reduce_scatter_base"}),
    "fsdp, gathered once": ("fsdp", {"reshard_after_backward": False}, {"allgather_base"}),
    "hsdp, all once": (
        "hsdp",
        {"shard_size": 2, "reduce_gradients": "step", "reshard_after_backward": False},
        {"allreduce", "reduce_scatter_base", "allgather_base"},
    ),
}


@pytest.mark.parametrize(("strategy", "parallel", "once"), ACCUMULATING.values(), ids=ACCUMULATING)
def test_what_can_wait_for_the_last_micro_batch_is_sent_once_a_step(
    pool: Pool, train: Train, strategy: str, parallel: dict[str, Any], once: set[str]
) -> None:
    found = {}
    for micro_batches in (1, 3):
        batch = {"global_batch_size": 8 * micro_batches, "micro_batch_size": 2}
        job = job_of("decoder", strategy, parallel=parallel, batch=batch)
        (found[micro_batches], steps), *_ = pool(collectives_of, job, world=4)
        assert_close(steps, train(job_of("decoder", batch=batch), 1)[:2], EXACT)
    kinds = found[1].keys() - {"barrier"}
    assert once <= kinds
    same = {kind for kind in kinds if found[3][kind] == found[1][kind]}
    assert same == once | ({"allreduce"} if "allreduce" in kinds else set()), found


IN_BF16 = [  # fp16 casts alike, and scales losses: of bf16, CI trains autocast's and FSDP2's
    pytest.param("bf16", "ddp", 2, {}),
    pytest.param("bf16", "fsdp", 2, {}),
    pytest.param("bf16", "ddp", 2, {"tp": 2}, marks=SOAK),
    pytest.param("bf16", "fsdp", 4, {"tp": 2}, marks=SOAK),
    pytest.param("bf16", "ddp", 2, {"pp": 2}, marks=SOAK),
    pytest.param("bf16", "fsdp", 4, {"pp": 2}),
    pytest.param("bf16", "ddp", 4, {"pp": 2, "tp": 2}, marks=SOAK),
]


@pytest.mark.parametrize(
    ("dtype", "strategy", "world", "parallel"),
    [*IN_BF16, *(pytest.param("fp16", *param.values[1:]) for param in IN_BF16)],
)
def test_low_precision(
    train: Train, dtype: str, strategy: str, world: int, parallel: dict[str, Any]
) -> None:
    """As one process in fp32, within what its rounding explains."""
    check_low_precision(train, "decoder", dtype, strategy, world, parallel)


@pytest.mark.parametrize("dtype", [pytest.param("bf16", marks=SOAK), "fp16"])
def test_stages_in_low_precision(train: Train, dtype: str) -> None:
    check_low_precision(train, "llama tied", dtype, "fsdp", 4, {"pp": 2})


def check_low_precision(
    train: Train, model: str, dtype: str, strategy: str, world: int, parallel: dict[str, Any]
) -> None:
    alone = train(job_of(model), 1)
    precision = {"dtype": dtype, "initial_loss_scale": 2.0**10}
    found = train(job_of(model, strategy, parallel=parallel, precision=precision), world)
    assert_close(found, alone, 0.03 if dtype == "bf16" else 0.005)


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"pp": 2}])
def test_all_ranks_skip_what_overflows(train: Train, parallel: dict[str, Any]) -> None:
    precision = {"dtype": "fp16", "initial_loss_scale": 2.0**40}
    found = train(job_of("decoder", parallel=parallel, precision=precision), 2)
    assert not any(math.isfinite(step["grad_norm"]) for step in found)
    alone = train(job_of("decoder"), 1)
    assert found[0]["loss"] == pytest.approx(alone[0]["loss"], rel=1e-3)
