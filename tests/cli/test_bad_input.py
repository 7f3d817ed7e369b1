"""Bad input: exit code 2, one line that names the key, and nothing was started."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from chaos.s3_server import s3_server
from elastic_ft import __version__
from elastic_ft.cli import preflight
from elastic_ft.cli.app import BAD_USAGE, COMPLETED, run_command
from elastic_ft.cli.check_stores import check_apart
from elastic_ft.cli.preflight import check_workers, one_worker
from elastic_ft.cli.where import Where
from elastic_ft.config import load_job
from elastic_ft.errors import ConfigError

Refused = Callable[..., str]
PROCESSES = ["--processes"]


@pytest.fixture
def refused(
    write_job: Callable[..., str], folder: Path, capfd: pytest.CaptureFixture[str]
) -> Refused:
    def run(changes: dict[str, Any], *arguments: str, options: list[str] = PROCESSES) -> str:
        """Returns the one line that a run of JOB with ``changes`` is refused with."""
        job = write_job(changes)
        before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
        children = {child.pid for child in psutil.Process().children(recursive=True)}
        assert run_command(["run", job, *options, *arguments]) == BAD_USAGE
        assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
        assert {c.pid for c in psutil.Process().children(recursive=True)} <= children
        out, err = capfd.readouterr()
        assert out == ""
        assert err.count("\n") == 1, err
        return err

    return run


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({"colour": 1}, "colour: unknown key", id="unknown-key"),
        pytest.param({"batch.sise": 1}, "batch.sise: unknown key", id="unknown-nested-key"),
        pytest.param({"steps": "ten"}, "steps: ", id="wrong-type"),
        pytest.param({"elastic.min_workers": 3}, "min_workers 3 is greater than", id="min-max"),
        pytest.param({"batch.micro_batch_size": 3}, "global_batch_size 4 is not", id="indivisible"),
        pytest.param({"parallel.strategy": "hsdp"}, "parallel.shard_size: required", id="hsdp"),
        pytest.param({"parallel.shard_size": 2}, "parallel.shard_size: 2 has no mean", id="ddp"),
        pytest.param(
            {"parallel.shard_size": 4, "parallel.strategy": "hsdp"},
            "parallel.shard_size: 4 is greater than elastic.max_workers 2",
            id="shard-size",
        ),
        pytest.param(
            {"parallel.tp": 2, "parallel.pp": 2},
            "parallel.tp: 2 x parallel.pp 2 is greater than elastic.max_workers 2",
            id="tp-pp",
        ),
        pytest.param(
            {"parallel.tp": 2, "elastic": {"min_workers": 3, "max_workers": 3}},
            "elastic.multiple_of: no multiple of 2 (parallel.tp x parallel.pp x parallel.cp) is",
            id="no-world",
        ),
        pytest.param({"parallel.pp": 2, "model.kwargs": {"n_layers": 1}}, "parallel.pp: ", id="pp"),
        pytest.param({"parallel.engine": "deepspeed"}, "parallel.zero_stage: req", id="no-stage"),
        pytest.param({"parallel.zero_stage": 2}, "parallel.zero_stage: 2 has no m", id="stage"),
        pytest.param(
            {"parallel.engine": "deepspeed", "parallel.zero_stage": 1, "parallel.strategy": "fsdp"},
            "parallel.strategy: fsdp has no meaning for engine deepspeed",
            id="deepspeed-strategy",
        ),
        pytest.param(
            {"parallel.engine": "deepspeed", "parallel.zero_stage": 1, "parallel.tp": 2},
            "parallel.engine: deepspeed has no tp (2)",
            id="deepspeed-tp",
        ),
        pytest.param(
            {"parallel.engine": "deepspeed", "parallel.zero_stage": 0}
            | {"parallel.offload_optimizer": True},
            "parallel.offload_optimizer: only for",
            id="offload",
        ),
        pytest.param(
            {"parallel.offload_optimizer": "nvme"},
            "parallel.offload_optimizer: offload to NVMe",
            id="nvme",
        ),
        pytest.param({"data.url": "nowhere/*.txt"}, "data.url: ", id="missing-data"),
        pytest.param({"data.url": "empty.txt"}, "data.url: ", id="empty-data"),
        pytest.param({"data.path": "no_such:data", "data.url": None}, "data.path: ", id="data"),
        pytest.param({"model.preset": "decoder-9t"}, "model.preset: ", id="unknown-preset"),
        pytest.param(
            {"model": {"path": "no_such.module:Model"}}, "model.path: cannot import", id="model"
        ),
        pytest.param({"model": {"path": "torch.nn:Nope"}}, "model.path: ", id="model-name"),
        pytest.param({"model.weights": "nowhere"}, "model.weights: ", id="weights"),
        pytest.param({"optimizer.name": "no_such:Adam"}, "optimizer.name: ", id="optimizer"),
        pytest.param({"optimizer.name": "lion"}, "optimizer.name: ", id="unknown-optimizer"),
        pytest.param({"optimizer.kwargs": {"nu": 1}}, "optimizer.kwargs: ", id="optimizer-kwargs"),
        pytest.param({"faults.scenario": "nope"}, "faults.scenario: nope: unknown", id="scenario"),
        pytest.param({"checkpoint.url": "odd://x"}, "checkpoint.url: odd://x", id="filesystem"),
        pytest.param({"checkpoint.url": "empty.txt/x"}, "checkpoint.url: ", id="no-folder"),
    ],
)
def test_a_bad_job_is_refused(
    refused: Refused, folder: Path, changes: dict[str, Any], expected: str
) -> None:
    (folder / "empty.txt").write_text("")
    line = refused({k: v for k, v in changes.items() if v is not None} | _without(changes))
    assert line.startswith("elastic-ft: ")
    assert expected in line


def _without(changes: dict[str, Any]) -> dict[str, Any]:
    """A section cannot lose a key by a change: the whole of it is replaced."""
    if "data.path" in changes:
        return {"data": {"path": changes["data.path"]}}
    return {}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(["--chaos", "nope"], "--chaos: nope: unknown fault scenario", id="scenario"),
        pytest.param(["--out", "/proc/nowhere"], "run folder (--out): /proc/nowhere", id="proc"),
        pytest.param(["--out", "job.yaml"], "job.yaml is not a folder", id="file"),
        pytest.param(["--out", "b\udce4d"], r"b\udce4d: expected a path in UTF-8", id="latin-1"),
        pytest.param(["--out", "odd://x"], "run folder (--out): odd://x", id="filesystem"),
        pytest.param(["--local-nodes", "2"], "--local-nodes and --processes", id="both"),
        pytest.param(["--colour"], "No such option: --colour", id="option"),
    ],
)
def test_bad_arguments_are_refused(refused: Refused, arguments: list[str], expected: str) -> None:
    assert expected in refused({}, *arguments)


def test_one_worker_by_default_is_said(write_job: Callable[..., str]) -> None:
    anywhere = Where(address="auto")
    alone = {"elastic": {}, "parallel": {"strategy": "fsdp"}}
    with pytest.raises(ConfigError) as told:
        check_workers(load_job(write_job(alone | {"parallel.cp": 4})), anywhere)
    said = "parallel.cp: 4 is greater than elastic.max_workers 1, its default"
    assert str(told.value) == said
    assert one_worker(load_job(write_job(alone))) == (
        "parallel.strategy: fsdp shares nothing out on one worker: elastic.max_workers 1, its "
        "default",
    )
    assert one_worker(load_job(write_job(alone | {"parallel.ep": 8})))[0].startswith(
        "parallel.ep: 8 shares nothing out on one worker"
    )
    assert one_worker(load_job(write_job({"elastic": {}}))) == ()
    assert one_worker(load_job(write_job({"parallel.strategy": "fsdp"}))) == ()


def test_more_workers_than_local_nodes_have_slots(refused: Refused) -> None:
    line = refused({"elastic.min_workers": 2}, options=["--local-nodes", "1"])
    assert "elastic.min_workers: 2 workers are needed" in line
    assert "has room for 1" in line


@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        pytest.param("faults: []", "faults: ", id="no-faults"),
        pytest.param("faults: [{at_step: 3}]", "faults.0: expected exactly one of", id="no-kind"),
        pytest.param(
            "faults: [{at_step: 3, kill: node}]", "faults.0.of_rank: required", id="no-rank"
        ),
        pytest.param(
            "faults: [{kill: node, of_rank: 1}]", "expected exactly one of at_step", id="no-moment"
        ),
        pytest.param(
            "faults: [{at_step: 3, kill: moon, of_rank: 1}]", "faults.0.kill: ", id="no-such-thing"
        ),
        pytest.param("faults: [{point: lunch}]", "faults.0.point: unknown point", id="point"),
        pytest.param(
            "faults: [{at_step: 3, kill: raylet, of_rank: 0}]", "has no raylets", id="no-raylet"
        ),
        pytest.param("faults: [", "not YAML", id="not-yaml"),
    ],
)
def test_a_bad_scenario_is_refused(
    refused: Refused, folder: Path, scenario: str, expected: str
) -> None:
    (folder / "faults.yaml").write_text(scenario)
    line = refused({}, "--chaos", "faults.yaml")
    assert "faults.yaml: " in line
    assert expected in line


def test_nothing_is_broken_on_a_cluster_of_others(refused: Refused, folder: Path) -> None:
    (folder / "faults.yaml").write_text("faults: [{at_step: 3, add: node}]")
    with socket.create_server(("127.0.0.1", 0)) as someone:
        threading.Thread(target=lambda: someone.accept()[0].close(), daemon=True).start()
        options = ["--address", f"127.0.0.1:{someone.getsockname()[1]}"]
        line = refused({}, "--chaos", "faults.yaml", options=options)
    assert "is not ours to break" in line


def test_there_is_no_cluster_at_that_address(refused: Refused) -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))  # bound, never listening: connections are refused
        address = f"127.0.0.1:{unheard.getsockname()[1]}"
        line = refused({}, options=["--address", address])
    assert f"--address: no Ray cluster at {address}: Connection refused" in line


@pytest.mark.parametrize(
    "command", [["gc"], ["drain", "--within", "9"], ["service", "start", "--port", "0"]]
)
def test_no_command_lets_ray_look_for_a_cluster_that_is_not_there(
    folder: Path, capfd: pytest.CaptureFixture[str], command: list[str]
) -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unheard.getsockname()[1]}"
        assert run_command([*command, "--address", address]) == BAD_USAGE
    expected = f"elastic-ft: --address: no Ray cluster at {address}: Connection refused\n"
    assert capfd.readouterr() == ("", expected)


@pytest.mark.parametrize("command", [["gc"], ["service", "start", "--port", "0"]])
def test_a_head_that_takes_connections_and_says_nothing_is_not_waited_for(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    command: list[str],
) -> None:
    """Of a stopped process the kernel takes them. Ray tried for a quarter of an hour."""
    monkeypatch.setattr(preflight, "HEAD_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert run_command([*command, "--address", address]) == BAD_USAGE
    said = f"--address: who listens at {address} does not answer within 0.2 s: it may stand still"
    assert capfd.readouterr() == ("", f"elastic-ft: {said}\n")


def test_an_unreachable_store_is_refused(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))  # bound, never listening: connections are refused
        port = unheard.getsockname()[1]
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        line = refused({"checkpoint.url": "s3://bucket/run"})
    assert "checkpoint.url: " in line
    assert "unreachable" in line


def test_a_forbidden_and_a_missing_bucket_are_refused(
    refused: Refused, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        line = refused({"checkpoint.url": "s3://no-such-bucket/run"})
        assert "checkpoint.url: " in line
        assert "no such bucket" in line
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        line = refused({"checkpoint.url": server.url("run")})
        assert "checkpoint.url: " in line
        assert "forbidden" in line


@pytest.mark.parametrize(
    ("out", "checkpoints", "key"),
    [
        pytest.param("there", "there", "checkpoint.url: ", id="the-same"),
        pytest.param("there", "there/../there/", "checkpoint.url: ", id="the-same-in-other-words"),
        pytest.param("there", "there/owners", "checkpoint.url: ", id="among-the-folders-owners"),
        pytest.param("there", "there/segments/x", "checkpoint.url: ", id="among-its-segments"),
        pytest.param("there/data/run", "there", "run folder (--out): ", id="among-the-shards"),
        pytest.param("there/owners", "there", "run folder (--out): ", id="among-the-owners"),
        pytest.param("memory://a/b", "memory://a/b/", "checkpoint.url: ", id="the-same-bucket"),
    ],
)
def test_a_run_folder_and_checkpoints_in_one_place_are_refused(
    out: str, checkpoints: str, key: str
) -> None:
    with pytest.raises(ConfigError, match=r"a place of its own") as told:
        check_apart(out, checkpoints)
    assert str(told.value).startswith(key)


def test_checkpoints_in_the_run_folder_itself_are_refused(refused: Refused) -> None:
    line = refused({"checkpoint.url": "there"}, "--out", "there")
    assert "checkpoint.url: " in line and "a place of its own" in line


@pytest.mark.parametrize(
    ("out", "checkpoints"),
    [("there", "there/checkpoints"), ("there/run", "there"), ("there", "there-too")],
)
def test_one_may_lie_beside_the_others_files(folder: Path, out: str, checkpoints: str) -> None:
    check_apart(str(folder / out), str(folder / checkpoints))


def test_a_checkpoint_of_another_model_is_refused(
    refused: Refused, write_job: Callable[..., str], start: Callable[..., Any]
) -> None:
    code, _, err = start("run", write_job(), *PROCESSES, "--out", "there").finish()
    assert code == COMPLETED, err
    line = refused({"model.kwargs.dim": 32, "checkpoint.url": "there/checkpoints"})
    assert "checkpoint.url: " in line
    assert "is a checkpoint of another model: model.embedding.weight is float32 [300, 16]" in line
    assert "the model has float32 [300, 32]" in line


def test_a_job_is_checked_and_nothing_started(
    write_job: Callable[..., str], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for changes, code in (({"parallel.strategy": "fsdp"}, COMPLETED), ({"model.preset": "x"}, 2)):
        job = write_job(changes)
        before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
        assert run_command(["check", job, "--processes"]) == code
        assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    out, err = capfd.readouterr()
    assert re.fullmatch(r"tiny: [\d,]+ parameters; .* samples.*\n", out)
    assert err.startswith("elastic-ft: model.preset: ") and err.count("\n") == 1


def test_the_version_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--version"]) == COMPLETED
    assert capfd.readouterr().out == f"elastic-ft {__version__}\n"


def test_a_file_that_is_no_job(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "list.yaml").write_text(yaml.safe_dump([1, 2]))
    for name, expected in (
        ("list.yaml", "expected a mapping"),
        ("nowhere.yaml", "cannot be read: No such file"),
        (".", "cannot be read: Is a directory"),
    ):
        assert run_command(["run", name]) == BAD_USAGE
        err = capfd.readouterr().err
        assert err.count("\n") == 1
        assert name in err
        assert expected in err


def test_other_commands_refuse_what_is_no_run(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for command in ("resume", "events"):
        assert run_command([command, "nowhere"]) == BAD_USAGE
        assert "nowhere: not a run folder" in capfd.readouterr().err


@pytest.mark.parametrize("address", ["x", "ray://x", "", "10.0.0.1", "host:1x", "host:65536"])
def test_an_address_without_a_port_is_none(refused: Refused, address: str) -> None:
    """Ray looked for it for 15 s, and `check` found nothing to say."""
    line = refused({}, options=["--address", address])
    assert line == f"elastic-ft: --address: expected HOST:PORT or auto, found {address!r}\n"


def test_a_mistake_is_answered_without_torch_and_ray(write_job: Callable[..., str]) -> None:
    program = """
import sys
from elastic_ft.cli.app import run_command
code = run_command(sys.argv[1:])
heavy = {"torch", "ray", "numpy", "pyarrow"} & sys.modules.keys()
sys.exit(f"imported {heavy}" if heavy else code)
"""
    for arguments, expected in (
        (["run", write_job({"colour": 1})], BAD_USAGE),
        (["--help"], COMPLETED),
        (["run", "--help"], COMPLETED),
    ):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == expected, done.stderr
