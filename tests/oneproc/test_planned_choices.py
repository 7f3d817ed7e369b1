"""What ``strategy: auto`` may choose, a job file may ask for: the same checks let it pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from elastic_ft.cli.check_model import check_model_and_data
from elastic_ft.config import Job, parse_job
from elastic_ft.controller.planning import engine_of, may_offload, planning_of, recomputes_of
from elastic_ft.core.layouts.layout import WISHES, Layout, LayoutWish, plan_layout
from elastic_ft.core.layouts.layout_plan import NoLayout
from elastic_ft.core.layouts.planner import plans
from elastic_ft.engines.laid_out import check_parallel
from elastic_ft.engines.shared_positions import check_kernels
from elastic_ft.errors import ConfigError
from elastic_ft.models import build_model
from elastic_ft.models.describe import describe_job
from tests.oneproc.alone import job_of

pytest.importorskip("transformers")

VOCABULARY, LENGTH_MAX = 261, 16_384
CPU = torch.device("cpu")
LLAMA: dict[str, Any] = {"model_type": "llama", "vocab_size": VOCABULARY}
MODELS = {  # and what ranks can share of them
    "decoder-1m": {"tp", "pp", "cp"},
    "decoder-moe-4m": {"pp", "cp", "ep"},
    "llama": {"tp", "pp", "cp"},
    "mixtral": {"pp", "cp", "ep"},
    "gpt2": set(),
}
EXPERTS: dict[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 2}


def random_job(kind: str, random: Random) -> dict[str, Any]:
    """Of a small model, with what else a job file says of how it is computed."""
    heads = random.choice([2, 3, 4, 6])
    layers, kv_heads = random.randint(1, 6), random.choice([n for n in (1, 2, 3) if heads % n == 0])
    width, inner = 4 * heads, random.choice([24, 25, 36])
    own = {"n_layers": layers, "dim": width, "n_heads": heads, "n_kv_heads": kv_heads}
    hub = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    hub |= {
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "max_position_embeddings": LENGTH_MAX,
    }
    model: dict[str, Any]
    if kind.startswith("decoder"):
        model = {"preset": kind, "kwargs": own | {"ffn_dim": inner}}
    elif kind == "gpt2":
        gpt2 = {"n_layer": layers, "n_embd": width, "n_head": heads, "n_inner": inner}
        gpt2 |= {"n_positions": LENGTH_MAX, "bos_token_id": 0, "eos_token_id": 1}
        model = {"transformers": {"model_type": kind, "vocab_size": VOCABULARY} | gpt2}
    else:
        more = EXPERTS if kind == "mixtral" else {"tie_word_embeddings": random.random() < 0.5}
        model = {"transformers": LLAMA | {"model_type": kind} | hub | more}
        model["transformers"] |= {"attention_dropout": random.choice([0.0, 0.0, 0.1])}
    schedules = ["gpipe", "1f1b", "interleaved1f1b", "zero_bubble"]
    parallel = {"strategy": "auto", "schedule": random.choice(schedules)}
    parallel["activation_checkpointing"] = random.choice([False, "selective", True])
    parallel |= {"loss_chunk_tokens": 64} if random.random() < 0.2 else {}
    parallel |= {"reduce_gradients": "step"} if random.random() < 0.2 else {}
    optimizers = [{}, {"name": "muon"}, {"name": "schedule_free_adamw", "schedule": "constant"}]
    return {
        "name": "planned",
        "steps": 1,
        "model": model,
        "parallel": parallel,
        "optimizer": random.choice(optimizers),
        "precision": {"dtype": random.choice(["fp32", "bf16"])},
        "batch": {"global_batch_size": 24, "micro_batch_size": random.choice([1, 2])},
        "data": {
            "url": "stdlib:",
            "vocab_size": VOCABULARY,
            "sequence_length": random.choice([96, 97, LENGTH_MAX, LENGTH_MAX]),
        },
        "elastic": {"max_workers": random.choice([4, 8, 12])},
    }


def chosen(job: Job, random: Random) -> Iterator[Layout]:
    """All that the planner finds worth a row, on some devices or others."""
    planning = planning_of(job)
    for _ in range(3):
        nodes = tuple(random.choices([1, 2, 4], k=random.randint(1, 3)))
        if sum(nodes) > job.elastic.max_workers:
            continue
        there = replace(
            planning.devices,
            nodes=nodes,
            memory_bytes=planning.work.state_bytes * random.choice([1.0, 8.0, 1000.0]),
            flops_per_s=random.choice([1e9, 1e14]),
        )
        try:
            found = plans(planning.work, there, planning.limits, top=1000)
        except NoLayout:
            continue
        yield from (plan.layout for plan in found)


def by_hand(values: dict[str, Any], layout: Layout) -> Job:
    """The job of a file that asks for it. Raises ConfigError."""
    shares = {name: getattr(layout, name) for name in ("tp", "pp", "cp", "ep")}
    given = values["parallel"] | shares | {"strategy": "fsdp"}
    if layout.dp_replicate > 1 and layout.dp_shard == 1:
        given |= {"strategy": "ddp"}
    elif layout.dp_replicate > 1:
        given |= {"strategy": "hsdp", "shard_size": layout.dp_shard}
    if layout.has_stages or given["strategy"] == "ddp":  # where there is nothing else
        given.pop("reduce_gradients", None)
    return parse_job(values | {"parallel": given})


@pytest.mark.parametrize("kind", MODELS)
def test_a_job_file_may_ask_for_what_auto_chooses(kind: str) -> None:
    """And is given it by rule."""
    random, shared = Random(kind), set()
    for _ in range(12):
        values = random_job(kind, random)
        job = parse_job(values)
        with torch.device("meta"):
            length = job.data.sequence_length
            model = build_model(job.model, vocab_size=VOCABULARY, sequence_length=length)
        try:
            layouts = {*chosen(job, random)}
        except ConfigError:  # of no file: nothing shared, it is refused, too
            with pytest.raises(ConfigError):
                check_parallel(by_hand(values, Layout()), model, length)
            continue
        for layout in layouts:
            asked = by_hand(values, layout)
            check_parallel(asked, model, length)
            check_kernels(asked, CPU)
            assert plan_layout(asked.parallel.wish, layout.world_size)[0] == layout
            shared |= {name for name in WISHES if getattr(layout, name) > 1}
    assert shared == MODELS[kind]


LONG: dict[str, Any] = {
    "data": {"url": "stdlib:", "vocab_size": VOCABULARY, "sequence_length": LENGTH_MAX},
    "batch": {"global_batch_size": 8, "micro_batch_size": 1},
    "elastic": {"max_workers": 8},
}


def sizes(preset: str) -> dict[str, Any]:
    return {"preset": preset, "kwargs": {"n_layers": 4}}


def test_what_ranks_share_together_is_the_engines_to_say() -> None:
    """Stages of built-in mixtures have whole sequences, those of transformers' need not."""
    hub = {"num_hidden_layers": 4, "hidden_size": 16, "num_attention_heads": 4}
    hub |= {"num_key_value_heads": 2, "intermediate_size": 24}
    mixtral = LLAMA | {"model_type": "mixtral", "max_position_embeddings": LENGTH_MAX}
    own, foreign = (
        planning_of(job_of(**LONG, model=model, parallel={"strategy": "auto"})).limits
        for model in (sizes("decoder-moe-4m"), {"transformers": mixtral | hub | EXPERTS})
    )
    assert own.cp_sizes[-1] > 1 < own.pp_max and foreign.cp_sizes[-1] > 1 < foreign.pp_max  # type: ignore[operator]
    assert set(own.apart) == {("pp", "cp"), ("pp", "ep")}
    assert set(foreign.apart) == {("pp", "ep")}


def test_what_gpus_have_no_kernel_for_is_not_planned() -> None:
    def contexts(dtype: str, device: str) -> tuple[int, ...]:
        parallel = {"strategy": "auto", "device": device}
        model, precision = sizes("decoder-1m"), {"dtype": dtype}
        job = job_of(**LONG, model=model, parallel=parallel, precision=precision)
        return planning_of(job).limits.cp_sizes

    assert contexts("fp32", "cuda") == (1,)
    assert max(contexts("bf16", "cuda")) == max(contexts("fp32", "cpu")) == 4


def test_a_plan_is_of_what_goes_with_the_rest_of_the_job() -> None:
    """Compiled layers share experts out, and nothing else; what is offloaded is not selective."""

    def asked(preset: str, **parallel: Any) -> Job:
        return job_of(**LONG, model=sizes(preset), parallel={"strategy": "fsdp"} | parallel)

    compiled = asked("decoder-moe-4m", compile=True)
    can = engine_of(compiled)
    assert can(LayoutWish(ep=2)) and not can(LayoutWish(cp=2)) and not can(LayoutWish(pp=2))
    assert recomputes_of(compiled) == (False, True)
    assert recomputes_of(asked("decoder-1m", offload_activations=True)) == (False, True)
    assert recomputes_of(asked("decoder-1m")) == (False, "selective", True)


def test_stages_go_with_what_is_said_of_shards() -> None:
    """They gather and reduce once a step anyway."""
    parallel = {"strategy": "auto", "reduce_gradients": "step", "reshard_after_backward": False}
    job = job_of(**LONG, model=sizes("decoder-1m"), parallel=parallel)
    assert planning_of(job).limits.pp_max == 4


class Weighed:
    """Samples with something that stages know nothing of."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.full((16,), index % VOCABULARY)
        return {"tokens": tokens, "weights": torch.ones(16)}


def test_samples_are_of_all_that_may_be_planned() -> None:
    """Not after a loss, when the planner first takes stages."""
    given = {"model": sizes("decoder-1m"), "data": {"path": f"{__name__}:Weighed"}}
    expected = r"^parallel\.strategy: auto may choose pp: .*, found weights in a batch$"
    with pytest.raises(ConfigError, match=expected):
        check_model_and_data(job_of(**LONG | given, parallel={"strategy": "auto"}))


@pytest.mark.parametrize(
    "model",
    [
        {"preset": "decoder-1m", "kwargs": {"vocab_size": 101, "max_sequence_length": 64}},
        {
            "transformers": LLAMA
            | {"vocab_size": 101, "max_position_embeddings": 64, "hidden_size": 24}
            | {"num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 36}
        },
    ],
    ids=["preset", "transformers"],
)
def test_a_dataset_says_itself_how_large_its_samples_are(model: dict[str, Any]) -> None:
    """The model is smaller than `data`'s defaults, which are of what is tokenised here."""
    job = {"name": "t", "steps": 1, "data": {"path": "tests.multiproc.tiny:counted"}}
    planning = planning_of(parse_job(job | {"model": model, "parallel": {"strategy": "auto"}}))
    assert planning.work.model.vocabulary == 101


@pytest.mark.parametrize(("device", "on_gpus"), [("cuda", True), ("auto", False), ("cpu", False)])
def test_a_job_for_gpus_is_planned_for_gpus_where_none_is_seen(device: str, on_gpus: bool) -> None:
    """A controller on Ray sees none: nothing overlapped, in its plans, as on CPUs."""
    parallel = {"strategy": "auto", "device": device}
    devices = planning_of(job_of(model=sizes("decoder-1m"), parallel=parallel)).devices
    assert (devices.fused, devices.overlaps) == (on_gpus, on_gpus)


def test_amsgrad_keeps_a_third_moment() -> None:
    job = job_of(optimizer={"name": "adamw", "kwargs": {"amsgrad": True}})
    assert describe_job(job).optimizer_bytes == 12
    assert describe_job(job_of()).optimizer_bytes == 8


@pytest.mark.parametrize(
    ("more", "may"),
    [
        ({}, True),
        ({"optimizer": {"name": "muon"}}, False),
        ({"parallel": {"engine": "deepspeed", "zero_stage": 1}}, False),
        ({"comm": {"compress_replicas": "int8"}, "parallel": {"strategy": "ddp"}}, False),
    ],
)
def test_an_optimizer_in_host_memory_is_offered_to_jobs_that_may_have_it(
    more: dict[str, Any], may: bool
) -> None:
    assert may_offload(job_of(**more)) is may
