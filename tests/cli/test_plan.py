"""``elastic-ft plan``: the ranked table, its JSON, what a loss leads to, and bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.cli.app import BAD_USAGE, COMPLETED, FAILED, run_command
from elastic_ft.cli.plan import parse_devices, without_last
from elastic_ft.core.layouts.layout import Layout

RATES = (4e14, 3e11, 4e10)
LLAMA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
}
GPT2 = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_inner": 128}


def test_the_table_says_what_to_take_and_what_a_loss_leads_to(
    write_job: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    job = write_job({"batch.global_batch_size": 64})
    assert run_command(["plan", job, "--devices", "2x4:16GB"]) == COMPLETED
    out, err = capfd.readouterr()
    assert err == ""
    assert "8 devices on 2 nodes" in out
    assert ", because\n  fits: " in out
    assert "1 lost: " in out
    assert "2 lost: " in out
    assert "8 lost: " not in out  # there would be none left


def test_json_has_every_number(
    write_job: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    job = write_job(
        {"model.preset": "decoder-7b", "model.kwargs": {}, "precision": {"dtype": "bf16"}}
    )
    assert run_command(["plan", job, "--devices", "2x8:40GB", "--json", "--top", "3"]) == COMPLETED
    found = json.loads(capfd.readouterr().out)
    first, *_ = plans = found["plans"]
    assert len(plans) == 3
    assert first["memory_bytes"]["total"] <= 40e9
    assert first["step_s"]["total"] > 0
    layout = Layout(first["dp_replicate"], first["dp_shard"], first["pp"], first["tp"])
    assert str(layout) == first["layout"]
    assert layout.world_size + sum(first["idle"]) == 16
    assert [loss["lost"] for loss in found["losses"]] == [1, 2, 8]
    assert all(loss["plan"]["bytes_moved"] >= 0 for loss in found["losses"])


def test_experts_are_shared_out_where_it_pays(
    write_job: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    model = {"preset": "decoder-moe-16b", "kwargs": {}}
    batch = {"global_batch_size": 64, "micro_batch_size": 1}
    job = write_job({"model": model, "batch": batch, "precision": {"dtype": "bf16"}})
    assert (
        run_command(["plan", job, "--devices", "2x8:80GB", "--json", "--max-pp", "1"]) == COMPLETED
    )
    first, *_ = json.loads(capfd.readouterr().out)["plans"]
    assert first["ep"] > 1 and first["layout"].endswith(f"-ep{first['ep']}")
    assert first["step_s"]["ep"] > 0
    assert any(reason.startswith("expert parallelism: without it ") for reason in first["why"])


def test_nothing_fits(write_job: Callable[..., str], capfd: pytest.CaptureFixture[str]) -> None:
    job = write_job({"model.preset": "decoder-7b", "model.kwargs": {}})
    assert run_command(["plan", job, "--devices", "1x2:8GB"]) == FAILED
    out, _ = capfd.readouterr()
    assert "nothing fits on 2 devices: the least need is" in out


@pytest.mark.parametrize(
    ("changes", "devices", "expected"),
    [
        pytest.param({}, "8x8", "--devices: expected NODESxEACH:MEMORY", id="no-memory"),
        pytest.param({}, "8x8:80", "--devices: expected", id="no-unit"),
        pytest.param({}, "0x8:80GB", "at least one device", id="no-node"),
        pytest.param({}, "8,0:80GB", "at least one device", id="empty-node"),
        pytest.param({}, "99999999x8:80GB", "--devices: expected at most 100000", id="too-many"),
        pytest.param({}, "60000,60000:80GB", "--devices: expected at most", id="too-many-listed"),
        pytest.param({"colour": 1}, "8x8:80GB", "colour: unknown key", id="bad-job"),
        pytest.param({"model.preset": "gpt-9"}, "8x8:80GB", "model.preset: expected", id="preset"),
        pytest.param({"model.kwargs.dim": -1}, "8x8:80GB", "model.kwargs: dim", id="size"),
        pytest.param({"model": {"path": "a:b"}}, "8x8:80GB", "model.path: the planner", id="path"),
        pytest.param({"optimizer": {"name": "a:b"}}, "8x8:80GB", "optimizer.name", id="optimizer"),
    ],
)
def test_bad_input_is_one_line(
    write_job: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, object],
    devices: str,
    expected: str,
) -> None:
    assert run_command(["plan", write_job(changes), "--devices", devices]) == BAD_USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert expected in err


@pytest.mark.parametrize("option", ["--flops", "--intra", "--inter"])
@pytest.mark.parametrize("rate", ["nan", "inf", "-1", "0"])
def test_a_rate_is_a_number_above_0(
    write_job: Callable[..., str], capsys: pytest.CaptureFixture[str], option: str, rate: str
) -> None:
    asked = ["plan", write_job(), "--devices", "8x8:80GB", option, rate]
    assert run_command(asked) == BAD_USAGE
    expected = f"elastic-ft: {option}: expected a number above 0, found {rate}\n"
    assert capsys.readouterr() == ("", expected)


def test_what_is_lost_goes_from_the_end() -> None:
    there = parse_devices("2x4:16GiB", *RATES)
    assert there.memory_bytes == 16 * 2**30
    less, survivors = without_last(there, 5)
    assert less.nodes == (3,)
    assert survivors == (0, 1, 2)
    assert parse_devices("8,8,7:80GB", *RATES).nodes == (8, 8, 7)


def test_a_transformers_model_by_its_sizes(
    write_job: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    llama = {"model_type": "llama", "num_hidden_layers": 2, **sizes}
    assert (
        run_command(["plan", write_job({"model": {"transformers": llama}}), "--devices", "1x2:8GB"])
        == 0
    )
    del llama["hidden_size"]
    job = write_job({"model": {"transformers": llama}})
    assert run_command(["plan", job, "--devices", "1x2:8GB"]) == BAD_USAGE
    assert "model.transformers.hidden_size: the planner needs it" in capfd.readouterr().err


MODELS: dict[str, tuple[dict[str, Any], tuple[set[int], set[int]]]] = {
    "llama": (
        {"transformers": {"model_type": "llama", "num_key_value_heads": 2, **LLAMA}},
        ({1, 2}, {1, 2}),
    ),
    "tied, by which both ends are cut": (
        {"transformers": {"model_type": "qwen3", "tie_word_embeddings": True, **LLAMA}},
        ({1, 2, 4}, {1, 2}),
    ),
    "no plan for stages": ({"transformers": {"model_type": "gpt2", **GPT2}}, ({1}, {1})),
    "stages, no tensor parallelism": (
        {"transformers": {"model_type": "mixtral", "num_local_experts": 2, **LLAMA}},
        ({1}, {1, 2}),
    ),
    "mixture": ({"preset": "decoder-moe-4m"}, ({1}, {1, 2, 3, 4})),
}


@pytest.mark.parametrize(("model", "sizes"), MODELS.values(), ids=MODELS)
def test_it_offers_what_the_engine_can_do(
    write_job: Callable[..., str],
    capfd: pytest.CaptureFixture[str],
    model: dict[str, Any],
    sizes: tuple[set[int], set[int]],
) -> None:
    job = write_job({"model": model, "batch.global_batch_size": 8})
    asked = ["plan", job, "--devices", "1x4:80GB", "--json", "--top", "99"]
    assert run_command(asked) == COMPLETED
    found = json.loads(capfd.readouterr().out)["plans"]
    assert tuple({plan[key] for plan in found} for key in ("tp", "pp")) == sizes


def test_it_offers_what_the_job_file_may_say(
    write_job: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    job = write_job({"parallel.unused_parameters": True, "model.kwargs.n_layers": 2})
    assert run_command(["plan", job, "--devices", "1x2:80GB", "--json"]) == COMPLETED
    found = json.loads(capfd.readouterr().out)["plans"]
    assert {(plan["tp"], plan["pp"], plan["ep"]) for plan in found} == {(1, 1, 1)}


def test_a_runs_steps_say_what_its_devices_reach(
    write_job: Callable[..., str], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = write_job({"batch.global_batch_size": 64})
    run = folder / "run"
    run.mkdir()
    members = [{"worker": f"w{i}", "node": f"n{i // 2}"} for i in range(4)]
    formed = {"event": "generation_formed", "generation": 1, "layout": "ddp4", "members": members}
    (run / "events.jsonl").write_text(json.dumps(formed) + "\n")
    step = {"step": 1, "generation": 1, "step_time_s": 1.5}
    (run / "steps.jsonl").write_text((json.dumps(step) + "\n") * 8)
    asked = ["plan", job, "--devices", "2x2:16GB", "--run", str(run)]
    assert run_command(asked) == COMPLETED
    assert "measured: ddp4 takes 1.5 s a step, " in capfd.readouterr().out
    assert run_command([*asked, "--json"]) == COMPLETED
    found = json.loads(capfd.readouterr().out)
    assert found["measured"]["measured_s"] == 1.5
    assert found["plans"][0]["step_s"]["total"] > 0.1  # at that rate, not the default's
    timed = step | {"exposed_s": {"all_reduce": 0.9, "agreement": 0.1}}
    (run / "steps.jsonl").write_text((json.dumps(timed) + "\n") * 8)
    assert run_command([*asked, "--json"]) == COMPLETED
    found = json.loads(capfd.readouterr().out)
    assert found["measured"]["waited_s"] == pytest.approx(0.9)
    assert 0 < found["measured"]["links"] < 1
    (run / "steps.jsonl").write_text((json.dumps(step) + "\n") * 3)
    assert run_command(asked) == BAD_USAGE
    assert "no generation has trained for 8 steps" in capfd.readouterr().err
    assert run_command(["plan", job, "--devices", "2x2:16GB", "--run", "nowhere"]) == BAD_USAGE
    assert "not a run folder" in capfd.readouterr().err
