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
from chaos.s3_server import S3Server
from elastic_ft.cli.app import BAD_USAGE, COMPLETED, FAILED, run_command
from elastic_ft.cli.check_model import check_weights
from elastic_ft.config import ModelConfig
from elastic_ft.core.sharding import Box
from elastic_ft.engines import initial_weights
from elastic_ft.errors import ModelError, StorageError
from elastic_ft.models import build_model
from elastic_ft.state.tensors import StateTensor
from elastic_ft.storage import safetensors
from elastic_ft.storage.inspect import find_one
from elastic_ft.storage.local_files import Local
from elastic_ft.storage.safetensors import SINGLE
from elastic_ft.storage.shards import Want, prefix_of
from elastic_ft.storage.store import Store, open_store
from tests.multiproc.harness import make_job, run_job
from tests.storage.sharded import load_sharded, tiny_model

library = pytest.importorskip("safetensors.torch")
load_file, save_file = library.load_file, library.save_file

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
    return run_command(["checkpoint", "export", url, str(dest), "--format", format_, *options])


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
    total = safetensors.export_folder(find_one(url), open_store(str(several)), file_bytes=10_000)
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


def test_out_to_s3_and_back(run: Path, url: str, saved: Tensors, s3: S3Server) -> None:
    bucket = s3.url("exported")
    assert export(url, bucket, "safetensors") == COMPLETED
    model = tiny_model(str(run / "job.yaml"))
    assert check_weights(bucket, model) == ()
    state = state_of(model, 0, 1)
    initial_weights.load(safetensors.open_folder(bucket), model, state)
    same({n.removeprefix("model."): t.local for n, t in state.items()}, model_of(saved))


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
        pytest.param("there", "safetensors", "DEST: there exists already", id="safetensors-file"),
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


# ------------------------------------------------------------------------------- imports


class Counting(Local):
    """Counts what is read of each file."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: list[tuple[str, int, int]] = []

    def get(self, key: str, start: int | None, end: int | None, timeout_s: float) -> Any:
        data = super().get(key, start, end, timeout_s)
        self.reads.append((key, start or 0, (start or 0) + len(memoryview(data))))
        return data


class Tied(torch.nn.Module):
    """Two names of one tensor, a buffer, a scalar, a buffer that no file holds."""

    base_model_prefix = "inner"

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Embedding(6, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.inner.weight
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.register_buffer("count", torch.tensor([3]))
        self.register_buffer("mask", torch.ones(2), persistent=False)


def state_of(model: torch.nn.Module, rank: int, world: int) -> dict[str, StateTensor]:
    """A rank's empty state, cut along dimension 0 as FSDP2 cuts it."""
    state = {}
    for name, tensor in [*model.named_parameters(), ("count", getattr(model, "count", None))]:
        if tensor is None:
            continue
        shape = tuple(tensor.shape)
        box = Box.whole(shape)
        if shape:
            each = -(-shape[0] // world)
            start, stop = min(rank * each, shape[0]), min((rank + 1) * each, shape[0])
            box = Box((start, *box.offsets[1:]), (stop - start, *shape[1:]))
        local = torch.full(box.sizes, -1, dtype=tensor.dtype)
        state[f"model.{name}"] = StateTensor(shape, box, local)
    return state


def save(tensors: Tensors, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({n: t.detach().clone().contiguous() for n, t in tensors.items()}, folder / SINGLE)
    return folder


@pytest.mark.parametrize("object_bytes", [64 * 2**20, 1000], ids=["whole", "cut"])
def test_each_rank_reads_its_own_bytes(
    run: Path,
    url: str,
    saved: Tensors,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    object_bytes: int,
) -> None:
    safetensors.export_folder(find_one(url), open_store(str(tmp_path)), file_bytes=10_000)
    monkeypatch.setattr(safetensors, "OBJECT_BYTES", object_bytes)
    model = tiny_model(str(run / "job.yaml"))
    total = sum(tensor.nbytes for tensor in model.parameters())
    whole: Tensors = {name: torch.empty_like(t) for name, t in model.named_parameters()}
    for rank in range(WORLD):
        backend = Counting(tmp_path)
        folder = safetensors.folder_of(Store(str(tmp_path), backend))
        headers = len(backend.reads)
        state = state_of(model, rank, WORLD)
        nbytes, remarks = initial_weights.load(folder, model, state)
        assert remarks == ()
        reads = backend.reads[headers:]
        assert sum(end - start for _, start, end in reads) == nbytes
        assert nbytes == sum(t.local.nbytes for t in state.values())
        assert abs(nbytes - total / WORLD) < 0.05 * total
        assert max(end - start for _, start, end in reads) <= object_bytes
        for name, target in state.items():
            rows = slice(target.box.offsets[0], target.box.stops[0])
            whole[name.removeprefix("model.")].data[rows] = target.local
    same({n: t.detach() for n, t in whole.items()}, model_of(saved))


@pytest.mark.parametrize("kept", ["inner.weight", "head.weight", "weight"])
def test_a_tied_tensor_may_have_any_of_its_names(tmp_path: Path, kept: str) -> None:
    model = Tied()
    tensors = {kept: model.inner.weight, "scale": model.scale, "count": model.count}
    state = state_of(model, 0, 1)
    initial_weights.load(safetensors.open_folder(str(save(tensors, tmp_path))), model, state)
    assert torch.equal(state["model.inner.weight"].local, model.inner.weight)
    assert torch.equal(state["model.scale"].local, model.scale.detach())
    assert torch.equal(state["model.count"].local, model.count)


@pytest.mark.parametrize(
    "rotation", [{"rope_theta": 500.0}, {"rope_parameters": {"rope_theta": 500.0}}]
)
def test_a_folder_of_a_model_that_computes_otherwise_is_named(
    tmp_path: Path, rotation: dict[str, Any]
) -> None:
    """D3: its tensors fit, and it trained with the default rotation and norm without a word."""
    kwargs = {"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 32}
    config = ModelConfig(preset="decoder-1m", kwargs=kwargs)
    model = build_model(config, vocab_size=300, sequence_length=16)
    url = str(save(dict(model.state_dict()), tmp_path))
    assert check_weights(url, model) == (), "it has no config.json"
    same_as_ours = {"rope_theta": 10_000, "rms_norm_eps": 1e-5, "hidden_size": 16, "torch_dtype": 1}
    (tmp_path / "config.json").write_text(json.dumps(same_as_ours))
    assert check_weights(url, model) == ()
    (tmp_path / "config.json").write_text(json.dumps({"rms_norm_eps": 1e-2, **rotation}))
    norm, theta = check_weights(url, model)
    assert "config.json: rms_norm_eps is 0.01 there, the model has norm_eps 1e-05" in norm
    assert "config.json: rope_theta is 500.0 there, the model has rope_theta 10000.0" in theta
    (tmp_path / "config.json").write_text("[")
    assert check_weights(url, model) == ()


def test_floats_are_converted_and_that_is_said(tmp_path: Path) -> None:
    model = Tied()
    tensors = {"inner.weight": model.inner.weight.bfloat16(), "scale": model.scale}
    tensors |= {"count": model.count, "other": torch.zeros(2)}
    state = state_of(model, 0, 1)
    url = str(save(tensors, tmp_path) / SINGLE)  # a file's own URL
    _, remarks = initial_weights.load(safetensors.open_folder(url), model, state)
    assert torch.equal(state["model.inner.weight"].local, model.inner.weight.bfloat16().float())
    converted, unused = remarks
    assert converted.endswith("1 of the tensors converted from bfloat16 to float32")
    assert unused.endswith("not used, for the model has no such tensors: other")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({"scale": None}, "scale is missing", id="missing"),
        pytest.param(
            {"inner.weight": torch.zeros(6, 5)},
            "inner.weight is [6, 5], the model has [6, 4]",
            id="shape",
        ),
        pytest.param(
            {"scale": torch.tensor(1, dtype=torch.int8)},
            "scale is int8, the model has float32",
            id="dtype",
        ),
        pytest.param(
            {"inner.weight": None, "scale": None, "count": None},
            "scale is missing; count is missing; inner.weight is missing",
            id="three",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    model = Tied()
    tensors = {"inner.weight": model.inner.weight, "scale": model.scale, "count": model.count}
    kept = {n: t for n, t in (tensors | changes).items() if t is not None}
    with pytest.raises(ModelError, match=r"^model\.weights: ") as caught:
        check_weights(str(save(kept or {"x": torch.zeros(1)}, tmp_path)), model)
    assert expected in str(caught.value)


def test_what_is_no_folder_of_weights_is_refused(tmp_path: Path) -> None:
    def refusal() -> str:
        with pytest.raises(StorageError, match=r"^model\.weights: ") as caught:
            check_weights(str(tmp_path), Tied())
        return str(caught.value)

    assert "neither model.safetensors.index.json nor model.safetensors is there" in refusal()
    file = save({"scale": torch.zeros(100)}, tmp_path) / SINGLE
    whole = file.read_bytes()
    file.write_bytes(whole[:-4])
    assert f"has {len(whole) - 4} bytes, its header says {len(whole)}" in refusal()
    file.write_bytes(b"not a safetensors file at all")
    assert "not a safetensors file" in refusal()
    file.rename(tmp_path / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"scale": "model-00002-of-00002.safetensors"}}
    (tmp_path / safetensors.INDEX).write_text(json.dumps(index))
    assert "no model-00002-of-00002.safetensors there" in refusal()
    (tmp_path / safetensors.INDEX).write_text("[]")
    assert "not an index" in refusal()
