"""The job file: every mistake is one line that names the key and says what was expected."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from docs import tables
from elastic_ft.config import Job, parse_job
from elastic_ft.errors import ConfigError

GOOD: dict[str, Any] = {
    "name": "demo",
    "steps": 10,
    "model": {"preset": "decoder-1m"},
    "data": {"url": "stdlib:"},
    "batch": {"global_batch_size": 8, "micro_batch_size": 2},
    "elastic": {"min_workers": 2, "max_workers": 4},
}


SECTIONS = {key for key, field in Job.model_fields.items() if "Config" in str(field.annotation)}
SCHEDULE_FREE = {"name": "schedule_free_sgd", "schedule": "constant"}


def changed(path: str, value: Any) -> dict[str, Any]:
    """GOOD with the value at a dotted path replaced."""
    values = copy.deepcopy(GOOD)
    *sections, key = path.split(".")
    section = values
    for name in sections:
        section = section.setdefault(name, {})
    section[key] = value
    return values


def own_loop(**parallel: Any) -> dict[str, Any]:
    """A job with a training loop of one's own."""
    return {"name": "demo", "loop": {}, "parallel": parallel}


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in GOOD.items() if name != key}


def test_a_good_job_is_typed_and_filled_in() -> None:
    job = parse_job(GOOD)
    assert job.batch.micro_batches == 4
    assert job.data.sequence_length == 256
    assert parse_job(job.model_dump(mode="json")) == job


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param(changed("colour", 1), "colour: unknown key", id="unknown-key"),
        pytest.param(changed("batch.size", 1), "batch.size: unknown key", id="unknown-nested-key"),
        pytest.param(without("name"), "name: required key is missing", id="no-name"),
        pytest.param(without("model"), "model: required key is missing", id="no-model"),
        pytest.param(changed("name", "a/b"), "name: expected letters", id="bad-name"),
        pytest.param(changed("name", "-rf"), "name: expected letters", id="option-like-name"),
        pytest.param(changed("steps", "ten"), "steps: expected a whole number", id="type"),
        pytest.param(changed("steps", 2.5), "found 2.5", id="fraction"),
        pytest.param(changed("steps", 0), "steps: expected at least 1", id="no-steps"),
        pytest.param(changed("seed", -1), "seed: expected at least 0", id="negative-seed"),
        pytest.param(changed("audit", "maybe"), "audit: expected true or false", id="bool"),
        pytest.param(
            changed("model", "decoder-1m"),
            "model: expected keys of its own such as preset",
            id="not-a-section",
        ),
        pytest.param(changed("model", {}), "model: expected one of preset, path, tr", id="none"),
        pytest.param(
            changed("model.path", "a:b"), "model: expected one of preset, path, tr", id="two-models"
        ),
        pytest.param(
            changed("data.path", "a:b"), "data: expected exactly one of url and path", id="two-data"
        ),
        pytest.param(changed("data", {}), "data: expected exactly one of url and path", id="none"),
        pytest.param(
            changed("data.format", "csv"), "data.format: expected 'auto', 'text'", id="format"
        ),
        pytest.param(changed("data.eval_fraction", 1), "data.eval_fraction: ", id="eval-all"),
        pytest.param(changed("data.vocab_size", 10), "data.vocab_size: ", id="tiny-vocabulary"),
        pytest.param(changed("data.token_bytes", 3), "data.token_bytes: ", id="token-width"),
        pytest.param(changed("data.sequence_length", 1), "data.sequence_length: ", id="length"),
        pytest.param(
            changed("batch.micro_batch_size", 3),
            "batch: global_batch_size 8 is not a multiple of micro_batch_size 3",
            id="indivisible",
        ),
        pytest.param(
            changed("elastic.min_workers", 5),
            "elastic: min_workers 5 is greater than max_workers 4",
            id="min-above-max",
        ),
        pytest.param(
            changed("elastic.max_workers", 5), "fewer than elastic.max_workers 5", id="idle-workers"
        ),
        pytest.param(changed("elastic.form_timeout_s", 0), "elastic.form_timeout_s: ", id="zero"),
        pytest.param(changed("optimizer.lr", -1), "optimizer.lr: ", id="negative-lr"),
        pytest.param(changed("optimizer.betas", [0.9]), "optimizer.betas.1: ", id="one-beta"),
        pytest.param(changed("optimizer.schedule", "step"), "optimizer.schedule: ", id="schedule"),
        pytest.param(
            changed("parallel", {"unused_parameters": True, "tp": 2}),
            "parallel: unused_parameters: is of ddp, fsdp and hsdp without tp, pp and cp",
            id="unused-tp",
        ),
        pytest.param(
            changed("parallel.reduce_gradients", "step"),
            "parallel: reduce_gradients: is of strategy fsdp, hsdp and auto",
            id="nothing-to-reduce-late",
        ),
        pytest.param(
            changed("parallel.loss_chunk_tokens", 0), "parallel.loss_chunk_tokens: ", id="no-chunk"
        ),
        pytest.param(
            changed("parallel", {"loss_chunk_tokens": 64, "pp": 2, "schedule": "zero_bubble"}),
            "parallel: loss_chunk_tokens: not with schedule zero_bubble",
            id="chunks-differentiated-twice",
        ),
        pytest.param(
            changed(
                "parallel",
                {"activation_checkpointing": "selective", "pp": 2, "schedule": "zero_bubble"},
            ),
            "parallel: activation_checkpointing selective: not with schedule zero_bubble",
            id="selective-differentiated-twice",
        ),
        pytest.param(
            changed("parallel", {"loss_chunk_tokens": 64}) | {"precision": {"dtype": "fp16"}},
            "job: parallel.loss_chunk_tokens: not with precision.dtype fp16",
            id="chunks-unscaled",
        ),
        pytest.param(
            changed(
                "parallel", {"offload_activations": True, "activation_checkpointing": "selective"}
            ),
            "parallel: offload_activations: is of engine native on GPUs, with",
            id="offload-selective",
        ),
        pytest.param(
            changed("parallel", {"compile": True, "pp": 2}),
            "parallel: compile: is of ddp, fsdp and hsdp without pp, cp, tp_plan or",
            id="compile-pp",
        ),
        pytest.param(
            changed("parallel.activation_checkpointing", "some"),
            "parallel.activation_checkpointing",
            id="recompute-some",
        ),
        pytest.param(changed("optimizer.schedule", "wsd"), "optimizer: decay_steps: ", id="wsd"),
        pytest.param(
            changed("optimizer.name", "schedule_free_adamw"),
            "optimizer: schedule: schedule_free_adamw takes constant, with or without warmup_steps",
            id="schedule-free-cosine",
        ),
        pytest.param(
            changed("optimizer.name", "schedulefree:RAdamScheduleFree"),
            "optimizer: schedule: schedulefree:RAdamScheduleFree takes constant",
            id="schedule-free-by-path",
        ),
        pytest.param(
            changed("optimizer", SCHEDULE_FREE | {"kwargs": {"warmup_steps": 5}}),
            "optimizer: kwargs.warmup_steps: optimizer.warmup_steps is the warm-up",
            id="schedule-free-warm-up",
        ),
        pytest.param(
            changed(
                "optimizer", SCHEDULE_FREE | {"name": "schedule_free_adamw", "betas": [0, 0.99]}
            ),
            "optimizer: betas: schedule_free_adamw averages with the first: expected above 0",
            id="schedule-free-beta",
        ),
        pytest.param(
            changed("optimizer", SCHEDULE_FREE | {"kwargs": {"momentum": 0}}),
            "optimizer: kwargs.momentum: schedule_free_sgd averages with it: expected above 0",
            id="schedule-free-momentum",
        ),
        pytest.param(
            changed(
                "optimizer",
                SCHEDULE_FREE
                | {"name": "schedulefree:RAdamScheduleFree", "kwargs": {"betas": [1, 0.99]}},
            ),
            "optimizer: kwargs.betas: schedulefree:RAdamScheduleFree averages with the first: ",
            id="schedule-free-kwargs-betas",
        ),
        pytest.param(
            changed("optimizer", SCHEDULE_FREE)
            | {"parallel": {"engine": "deepspeed", "zero_stage": 1}},
            "job: optimizer.name: schedule_free_sgd is of engine native",
            id="schedule-free-deepspeed",
        ),
        pytest.param(
            changed("optimizer.offload", "nvme"),
            "optimizer.offload: nvme: not offered, a step would take a disk's time; cpu is",
            id="offload-nvme",
        ),
        pytest.param(
            changed("optimizer", {"name": "muon", "offload": "cpu"}),
            "optimizer: offload: is of adamw, adam, sgd, schedule_free_adamw, schedule_free_sgd, ",
            id="offload-muon",
        ),
        pytest.param(
            changed("optimizer.offload", "cpu")
            | {"parallel": {"engine": "deepspeed", "zero_stage": 1}},
            "job: optimizer.offload: is of engine native; deepspeed has parallel.offload_optimizer",
            id="offload-deepspeed",
        ),
        pytest.param(
            changed("optimizer.offload", "cpu") | {"comm": {"compress_replicas": "int8"}},
            "job: optimizer.offload: not with comm.compress_replicas",
            id="offload-compressed",
        ),
        pytest.param(
            changed("optimizer.groups", [{"match": "*", "lr": 0}]),
            "optimizer.groups.0.lr: expected more than 0",
            id="group",
        ),
        pytest.param(changed("precision.dtype", "fp8"), "precision.dtype: ", id="precision"),
        pytest.param(changed("parallel.strategy", "zero"), "parallel.strategy: ", id="strategy"),
        pytest.param(changed("parallel.shard_size", 1), "parallel.shard_size: ", id="shard-size"),
        pytest.param(changed("snapshot.copies", 0), "snapshot.copies: ", id="copies"),
        pytest.param(changed("checkpoint.keep_last", 0), "checkpoint.keep_last: ", id="keep-none"),
        pytest.param(None, "job: expected a mapping of sections, found nothing", id="empty"),
        pytest.param([GOOD], "job: expected a mapping of sections, found list", id="a-list"),
        pytest.param(
            changed("elastic.multiple_of", 5),
            "elastic: no multiple of 5 is between min_workers 2 and max_workers 4",
            id="no-world",
        ),
        pytest.param(
            changed("parallel", {"strategy": "auto", "tp": 2}),
            "parallel: strategy auto decides on tp: leave it out",
            id="auto-tp",
        ),
        pytest.param(
            changed("parallel", {"strategy": "auto", "shard_size": 2}),
            "parallel: strategy auto decides on shard_size: leave it out",
            id="auto-shards",
        ),
        pytest.param(own_loop(strategy="fsdp", ep=2), "no tp, pp, cp, ep", id="loop-ep"),
        pytest.param(changed("parallel.ep", 2), "ep: is of strategy fsdp and hsdp", id="ep-ddp"),
        *(
            pytest.param(
                changed("parallel", {"strategy": "fsdp", "ep": 2} | other),
                f"ep: not with {named}",
                id=f"ep-{named}",
            )
            for named, other in (
                ("tp", {"tp": 2}),
                ("pp", {"pp": 2}),
                ("unused_parameters", {"unused_parameters": True}),
                ("engine deepspeed", {"engine": "deepspeed", "zero_stage": 1}),
            )
        ),
        pytest.param(own_loop(cp=2), "loop: has engine native, strategy ddp, ", id="loop-cp"),
        pytest.param(own_loop(compile=True), "parallel.compile: has no ", id="loop-compile"),
        pytest.param(
            changed("comm.compress_shards", "int8"),
            "comm.compress_shards: strategy ddp has no shards",
            id="compress-no-shards",
        ),
        pytest.param(
            changed("comm.compress_replicas", "int8") | {"parallel": {"strategy": "fsdp"}},
            "comm.compress_replicas: strategy fsdp has none",
            id="compress-no-replicas",
        ),
        pytest.param(
            changed("comm.compress_replicas", "int8") | {"parallel": {"tp": 2}},
            "comm.compress_replicas: is of strategy ddp, fsdp and hsdp, without tp, pp",
            id="compress-tp",
        ),
        pytest.param(
            changed("comm.compress_replicas", "int8") | {"precision": {"dtype": "fp16"}},
            "comm.compress_replicas: not with precision.dtype fp16",
            id="compress-fp16",
        ),
        pytest.param(
            own_loop() | {"comm": {"compress_replicas": "powersgd"}},
            "comm.compress_replicas: not with a loop",
            id="compress-loop",
        ),
        pytest.param(
            changed("comm.powersgd_rank", 8),
            "comm: powersgd_rank: is of compress_replicas powersgd",
            id="powersgd-rank",
        ),
        pytest.param(
            changed("precision.fp8", "rowwise"),
            "precision.fp8: needs precision.dtype bf16, found fp32",
            id="fp8-fp32",
        ),
        pytest.param(
            changed("precision", {"dtype": "bf16", "fp8": "rowwise"}) | {"parallel": {"pp": 2}},
            "precision.fp8: is of strategy ddp, fsdp and hsdp, without pp, cp, ep",
            id="fp8-pp",
        ),
        pytest.param(
            own_loop(activation_checkpointing=True),
            "parallel.activation_checkpointing: has no effect on a loop: ",
            id="loop-checkpointing",
        ),
        pytest.param(
            own_loop(offload_activations=True),
            "parallel.offload_activations: has no effect on a loop: ",
            id="loop-offload",
        ),
        pytest.param(
            own_loop(loss_chunk_tokens=4), "parallel.loss_chunk_tokens: has no ", id="loop-chunks"
        ),
        pytest.param(
            own_loop() | {"precision": {"dtype": "bf16"}},
            "precision.dtype: has no effect on a loop with ddp: use torch.autocast in your step",
            id="loop-precision",
        ),
        pytest.param(
            changed("checkpoint.every_s", "10m"),
            "checkpoint.every_s: expected a number or 'auto', found '10m'",
            id="union",
        ),
        pytest.param(
            changed("snapshot.domain_label", 5),
            "snapshot.domain_label: expected text or a list, found 5",
            id="union-of-lists",
        ),
        pytest.param(
            changed("snapshot.domain_label", ["a", 5]),
            "snapshot.domain_label.1: expected text, found 5",
            id="in-a-list-of-a-union",
        ),
        pytest.param(
            changed("precision", "bf16"),
            "precision: expected keys of its own such as dtype, found 'bf16'",
            id="no-section",
        ),
        pytest.param(changed("model.lora", {"r": 8}), "r: unknown key, did you mean rank?", id="r"),
        pytest.param(
            changed("optimizer.groups", [{"match": "a", "lrr": 1}]),
            "optimizer.groups.0.lrr: unknown key, did you mean lr?",
            id="hint-in-a-list",
        ),
        pytest.param(changed("network.ports", "20000"), "such as 20000-20099", id="ports"),
        pytest.param(changed("elastic.spares", -1), "elastic.spares: ", id="spares"),
        pytest.param(
            changed("elastic.straggler_factor", 1.0), "elastic.straggler_factor: ", id="straggler"
        ),
        pytest.param(
            changed("parallel.devices", {"memory_gb": 0}),
            "parallel.devices.memory_gb: ",
            id="no-memory",
        ),
    ],
)
def test_a_mistake_is_one_line_naming_the_key(values: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_job(values)
    message = str(caught.value)
    assert expected in message
    assert "\n" not in message


def test_the_reference_has_every_key_as_it_is() -> None:
    assert [
        key for key, _, meaning in tables.every_key() if not meaning and key not in SECTIONS
    ] == []
    page = (tables.DOCS / "job-file.md").read_text()
    assert page == tables.page("job-file.md"), "run python docs/tables.py"


def test_the_value_found_is_shown() -> None:
    with pytest.raises(ConfigError, match=r"found 'ten'$"):
        parse_job(changed("steps", "ten"))


def test_further_mistakes_are_counted() -> None:
    values = changed("steps", 0) | {"seed": -1, "colour": 1}
    with pytest.raises(ConfigError, match=r"\(and 2 more mistakes\)$"):
        parse_job(values)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("steps", "stpes"), ("name", "nmae"), ("model", "modle")],
)
def test_a_required_key_that_is_misspelt_is_one_mistake(right: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{wrong}: unknown key, did you mean {right}\?$"):
        parse_job({wrong if key == right else key: value for key, value in GOOD.items()})


@pytest.mark.parametrize("key", ["steps", "elastic.max_workers", "optimizer.lr"])
def test_yes_is_no_number(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}: expected a number, found true$"):
        parse_job(changed(key, True))


def test_a_file_given_as_an_import_path_is_told_from_one() -> None:
    with pytest.raises(ConfigError, match=r"data: path: .*, found 'corpus.txt'; a file is a url$"):
        parse_job(without("data") | {"data": {"path": "corpus.txt"}})
