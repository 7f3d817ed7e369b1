"""Checkpoints go out to plain PyTorch and safetensors, and safetensors come in, bit by bit."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import elastic_ft
from elastic_ft.cli import BAD_USAGE, COMPLETED, FAILED, _main
from elastic_ft.core.sharding import Box
from elastic_ft.errors import StorageError
from elastic_ft.storage import safetensors
from elastic_ft.storage.inspect import find_one
from elastic_ft.storage.shards import Want, prefix_of
from elastic_ft.storage.store import open_store
from tests.multiproc.harness import make_job, run_job
from tests.storage.sharded import load_sharded, tiny_model

load_file = pytest.importorskip("safetensors.torch").load_file

DEADLINE_S = 60.0
WORLD = 2
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job of three FSDP ranks, with one checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    data = {"cache_dir": str(tmp_path_factory.mktemp("cache"))}
    job = make_job("fsdp", steps=2, workers=3, elastic={"min_workers": 3}, data=data)
    run_job(job, folder).check()
    return folder


@pytest.fixture(scope="module")
def url(run: Path) -> str:
    return str(run / "checkpoints")


@pytest.fixture(scope="module")
def saved(url: str) -> Tensors:
    """What the checkpoint holds, by its own names, read without any of what is tested here."""
    reader = find_one(url)
    assert reader.manifest.layout == "fsdp3"
    found: Tensors = {}
    for name, spec in reader.manifest.tensors.items():
        found[name] = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        out = memoryview(found[name].reshape(-1).view(torch.uint8).numpy())
        reader.read([Want(name, Box.whole(spec.shape), out)])
    return found


@pytest.fixture
def damaged(url: str, tmp_path: Path) -> str:
    """A copy with one byte of the model flipped."""
    shutil.copytree(url, tmp_path / "damaged")
    manifest = find_one(url).manifest
    entry = next(e for e in manifest.entries if e.tensor.startswith("model."))
    path = tmp_path / "damaged" / prefix_of(manifest) / entry.file
    data = bytearray(path.read_bytes())
    data[entry.offset] ^= 1
    path.write_bytes(data)
    return str(tmp_path / "damaged")


def load(state: dict[str, Any], **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, **options)


def export(url: str, dest: Path | str, format_: str, *options: str) -> int:
    return _main(["checkpoint", "export", url, str(dest), "--format", format_, *options])


def model_of(saved: Tensors) -> Tensors:
    return {n.removeprefix("model."): t for n, t in saved.items() if n.startswith("model.")}


def same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name


# ------------------------------------------------------- torch.distributed.checkpoint.load


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "bare"])
def test_one_process_loads_a_model(run: Path, url: str, saved: Tensors, nested: bool) -> None:
    state = tiny_model(str(run / "job.yaml")).state_dict()
    assert not torch.equal(state["output.weight"], saved["model.output.weight"])
    load({"model": state} if nested else state, storage_reader=elastic_ft.CheckpointReader(url))
    same(state, model_of(saved))


def test_any_tensor_in_any_form(url: str, saved: Tensors) -> None:
    name = "optim.output.weight.exp_avg"
    plain = torch.zeros_like(saved[name])
    columns = torch.zeros(saved[name].T.shape).T  # not contiguous
    other = torch.zeros(saved["model.norm.weight"].shape, dtype=torch.float64)
    state = {name: plain, "optim.state.output.weight.exp_avg": columns, "model.norm.weight": other}
    load(state, storage_reader=elastic_ft.CheckpointReader(url, step=2))
    assert torch.equal(plain, saved[name])
    assert torch.equal(columns, saved[name])
    assert torch.equal(other, saved["model.norm.weight"].double())


def test_two_ranks_load_a_sharded_model_and_optimizer(run: Path, url: str, tmp_path: Path) -> None:
    expected = tmp_path / "expected.pt"
    assert export(url, expected, "torch") == COMPLETED
    context = multiprocessing.get_context("forkserver")
    shared = (WORLD, str(tmp_path / "store"), str(run / "job.yaml"), url, str(expected))
    ranks = [context.Process(target=load_sharded, args=(rank, *shared)) for rank in range(WORLD)]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(DEADLINE_S)
        assert [rank.exitcode for rank in ranks] == [0] * WORLD
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def test_a_damaged_checkpoint_does_not_load(run: Path, damaged: str) -> None:
    state = {"model": tiny_model(str(run / "job.yaml")).state_dict()}
    with pytest.raises(dcp.CheckpointException, match=r"StateDamaged: .*: digest xxh3"):
        load(state, storage_reader=elastic_ft.CheckpointReader(damaged))


def test_ranks_that_found_different_checkpoints_are_told() -> None:
    plans = [dcp.LoadPlan([], storage_data=url) for url in ("a/manifests/1", "a/manifests/2")]
    with pytest.raises(StorageError, match="different newest checkpoints: a/manifests/1"):
        elastic_ft.CheckpointReader("a").prepare_global_plan(plans)


# ------------------------------------------------------------------------------- exports


def test_dcp_export_loads_plainly(run: Path, url: str, saved: Tensors, tmp_path: Path) -> None:
    assert export(url, tmp_path / "x", "dcp") == COMPLETED
    model = tiny_model(str(run / "job.yaml")).state_dict()
    moment = torch.zeros_like(saved["optim.norm.weight.exp_avg"])
    optimizer = {"state": {"norm.weight": {"exp_avg": moment}}}
    load({"model": model, "optim": optimizer}, checkpoint_id=str(tmp_path / "x"))
    same(model, model_of(saved))
    assert torch.equal(moment, saved["optim.norm.weight.exp_avg"])


def test_torch_export(url: str, saved: Tensors, tmp_path: Path) -> None:
    assert export(url, tmp_path / "all.pt", "torch") == COMPLETED
    assert export(url, tmp_path / "weights.pt", "torch", "--weights-only") == COMPLETED
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    same(found["model"], model_of(saved))
    steps = {name: float(state["step"]) for name, state in found["optim"]["state"].items()}
    assert set(steps.values()) == {2.0}
    assert steps.keys() == found["model"].keys()
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert weights.keys() == {"model"}
    same(weights["model"], model_of(saved))


def test_safetensors_export(url: str, saved: Tensors, tmp_path: Path) -> None:
    assert export(url, tmp_path / "one", "safetensors", "--step", "2") == COMPLETED
    same(load_file(tmp_path / "one" / "model-00001-of-00001.safetensors"), model_of(saved))
    several = tmp_path / "several"
    total = safetensors.export(find_one(url), open_store(str(several)), file_bytes=10_000)
    index = json.loads((several / safetensors.INDEX).read_text())
    assert index["metadata"]["total_size"] == total
    files = sorted(several.glob("*.safetensors"))
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 3
    found: Tensors = {}
    for file in files:
        part = load_file(file)
        assert {index["weight_map"][name] for name in part} == {file.name}
        found |= part
    same(found, model_of(saved))


@pytest.mark.parametrize("format_", ["dcp", "torch", "safetensors"])
def test_damage_is_not_exported(damaged: str, tmp_path: Path, format_: str, capfd: Any) -> None:
    assert export(damaged, tmp_path / "x", format_) == FAILED
    assert "digest xxh3_128" in capfd.readouterr().err
    written = {p.name for p in tmp_path.rglob("*")}
    assert not written & {".metadata", "x.pt", safetensors.INDEX}


@pytest.mark.parametrize(
    ("dest", "format_", "expected"),
    [
        pytest.param(".", "dcp", "DEST: . is not empty", id="folder"),
        pytest.param(".", "torch", "DEST: . is a folder, expected a file", id="file"),
        pytest.param("there", "torch", "DEST: there exists already", id="exists"),
        pytest.param(".", "safetensors", "DEST: . is not empty", id="safetensors"),
        pytest.param("s3://b/x", "dcp", "DEST: dcp is written to a local path", id="remote"),
        pytest.param("x", "pickle", "--format", id="format"),
    ],
)
def test_a_bad_destination_is_one_line(
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    dest: str,
    format_: str,
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").write_text("")
    assert export(url, dest, format_) == BAD_USAGE
    err = capfd.readouterr().err
    assert expected in err
    assert err.count("\n") == 1
