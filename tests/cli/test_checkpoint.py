"""``elastic-ft checkpoint``: what it says, what it deletes, and how it ends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic_ft.cli.app import BAD_USAGE, COMPLETED, FAILED, run_command
from elastic_ft.core.assignment import CheckpointRef
from elastic_ft.core.manifest import Manifest, ShardEntry, TensorSpec
from elastic_ft.core.sharding import Box
from elastic_ft.storage.shards import attempt_prefix, write_shards
from elastic_ft.storage.store import Store, open_store
from tests.storage.published import commit

HOUR_S = 3600.0
WORLD = 3
Arrays = dict[str, "np.ndarray[Any, Any]"]


def some_state(seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    return {
        "model.embed": rng.normal(size=(10, 4)).astype("f4"),
        "model.half": rng.integers(0, 2**14, (6, 2)).astype("u2"),  # carried as bfloat16
        "optim.embed.step": np.array(3.0, "f4"),
    }


def dtype_of(name: str) -> str:
    return "bfloat16" if name == "model.half" else "float32"


def write_data(store: Store, state: Arrays, step: int, run: str) -> list[ShardEntry]:
    """The shards of an attempt, cut over WORLD ranks; no manifest."""
    entries: list[ShardEntry] = []
    for rank in range(WORLD):
        pieces = []
        for name, array in state.items():
            box = Box.whole(array.shape)
            if array.shape:
                each = -(-array.shape[0] // WORLD)
                start, stop = min(rank * each, len(array)), min((rank + 1) * each, len(array))
                inner = array.shape[1:]
                box = Box((start, *(0,) * len(inner)), (stop - start, *inner))
                array = np.ascontiguousarray(array[start:stop])
            elif rank:
                continue
            raw = array.reshape(-1).view(np.uint8).data
            pieces.append((name, box, dtype_of(name), raw))
        written = write_shards(store, attempt_prefix(run, 1, step), rank, pieces)
        entries += map(ShardEntry.from_dict, written)
    return entries


@dataclass
class Folder:
    """A checkpoint folder, written as a job of three FSDP ranks writes it."""

    url: str

    def add(
        self, step: int, state: Arrays | None = None, run: str = "r1", age_s: float = 0.0
    ) -> CheckpointRef:
        state = some_state() if state is None else state
        store = open_store(self.url)
        manifest = Manifest(
            job="tiny",
            run=run,
            step=step,
            generation=1,
            nonce=f"{run}-{step}",
            layout="fsdp3",
            created_at_s=time.time() - age_s,
            tensors={n: TensorSpec(dtype_of(n), a.shape) for n, a in state.items()},
            entries=tuple(write_data(store, state, step, run)),
        )
        return commit(store, manifest, keep_last=100).ref

    def attempt(self, step: int, run: str) -> None:
        write_data(open_store(self.url), some_state(), step, run)

    def file(self, step: int, run: str = "r1", rank: int = 1) -> Path:
        return Path(self.url) / attempt_prefix(run, 1, step) / f"r{rank}-0.bin"

    def damage(self, step: int) -> Path:
        path = self.file(step)
        data = bytearray(path.read_bytes())
        data[0] ^= 1
        path.write_bytes(data)
        return path

    def manifests(self) -> list[int]:
        return sorted(int(p.name.split("-")[0]) for p in Path(self.url, "manifests").iterdir())

    def data(self) -> list[str]:
        return sorted("/".join(p.parts[-2:]) for p in Path(self.url, "data").glob("*/*"))


@pytest.fixture
def saved(folder: Path) -> Folder:
    return Folder(str(folder / "checkpoints"))


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: str) -> tuple[int, str, str]:
        """(exit code, stdout, stderr)."""
        code = run_command(["checkpoint", *arguments])
        return code, *capfd.readouterr()

    return run


Call = Callable[..., tuple[int, str, str]]


# ------------------------------------------------------------------------------------ ls


def test_ls_tells_what_is_there(saved: Folder, call: Call) -> None:
    saved.add(10, age_s=5 * HOUR_S)
    saved.add(20)
    saved.add(30)
    saved.attempt(40, "r1")
    saved.file(20).unlink()
    Path(saved.url, "manifests", "0000000030-0.json").write_text("{}")
    code, out, err = call("ls", saved.url, "--json")
    assert (code, err) == (COMPLETED, "")
    found = json.loads(out)
    assert [(c["step"], c["complete"]) for c in found["checkpoints"]] == [
        (30, False),
        (20, False),
        (10, True),
    ]
    torn, short, good = found["checkpoints"]
    assert "do not start like a manifest" in torn["problem"]
    assert short["problem"] == "no r1-0.bin"
    assert good["age_s"] == pytest.approx(5 * HOUR_S, abs=60)
    nbytes = 10 * 4 * 4 + 6 * 2 * 2 + 4
    assert (good["bytes"], good["layout"], good["run"], good["generation"]) == (
        nbytes,
        "fsdp3",
        "r1",
        1,
    )
    attempts = {(a["step"], a["bytes"], a["files"]) for a in found["incomplete"]}
    assert attempts == {(40, nbytes, 3), (30, nbytes, 3)}  # whose manifest can't be read
    code, out, _ = call("ls", saved.url)
    assert code == COMPLETED
    assert "5.0 h  188 B  fsdp3" in out
    assert "no manifest" in out


# -------------------------------------------------------------------------------- verify


def test_verify_names_what_is_damaged(saved: Folder, call: Call) -> None:
    saved.add(10)
    saved.add(20)
    assert call("verify", saved.url)[0] == COMPLETED
    saved.damage(10)
    saved.file(20, rank=2).unlink()
    code, out, _ = call("verify", saved.url, "--json")
    assert code == FAILED
    newer, older = json.loads(out)["checkpoints"]
    assert (newer["ok"], older["ok"]) == (False, False)
    assert "r2-0.bin is missing" in newer["problems"][0]
    (problem,) = older["problems"]
    assert problem.startswith("model.embed [4:8, 0:4] in r1-0.bin: digest ")
    code, out, _ = call("verify", saved.url, "--step", "10")
    assert code == FAILED
    assert "step 10: damaged" in out
    assert "model.embed" in out
    assert "step 20" not in out


def test_verify_takes_the_url_of_a_manifest(saved: Folder, call: Call) -> None:
    good, _ = saved.add(10), saved.add(20)
    saved.damage(20)
    assert call("verify", good.url)[0] == COMPLETED
    assert call("verify", saved.url)[0] == FAILED


# ---------------------------------------------------------------------------------- diff


def test_diff_of_equals(saved: Folder, call: Call) -> None:
    saved.add(10)
    saved.add(20)
    code, out, _ = call("diff", saved.url, "--step", "10", "--step", "20")
    assert code == COMPLETED
    assert "3 tensors are equal, 0 differ" in out


def test_diff_says_what_differs_and_by_how_much(
    saved: Folder, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_ft.storage.inspect.OBJECT_BYTES", 50)  # several batches
    monkeypatch.setattr("elastic_ft.storage.inspect.ELEMENTS_AT_ONCE", 3)
    first, second = some_state(), some_state()
    second["model.embed"][0, 0] += 0.5
    second["model.embed"][9, 3] -= 2.0
    second["model.half"][0, 0] = 0x7FC0  # NaN
    first["model.half"][1, 0] = second["model.half"][1, 0] = 0x7F80  # infinity, on both sides
    second["model.new"] = np.zeros((3, 1), "f4")
    first["model.gone"] = np.zeros((3, 1), "f4")
    first["model.shape"], second["model.shape"] = np.zeros((3, 1), "f4"), np.zeros((3, 2), "f4")
    a, b = saved.add(10, first), saved.add(20, second)
    code, out, _ = call("diff", a.url, b.url, "--json")
    assert code == FAILED
    found = json.loads(out)
    assert (found["only_in_a"], found["only_in_b"]) == (["model.gone"], ["model.new"])
    assert found["specs"] == [{"name": "model.shape", "a": "float32 [3, 1]", "b": "float32 [3, 2]"}]
    tensors = {t["name"]: (t["equal"], t["max_abs_difference"]) for t in found["tensors"]}
    assert tensors["model.embed"] == (False, pytest.approx(2.0, abs=1e-6))
    assert tensors["model.half"] == (False, None)
    assert tensors["optim.embed.step"] == (True, 0.0)
    assert not found["equal"]
    code, out, _ = call("diff", a.url, b.url)
    assert code == FAILED
    assert "model.embed" in out
    assert "1 tensors are equal, 5 differ" in out


def test_diff_of_a_damaged_one_is_refused(saved: Folder, call: Call) -> None:
    a, b = saved.add(10), saved.add(20)
    saved.damage(20)
    code, out, err = call("diff", a.url, b.url)
    assert (code, out) == (FAILED, "")
    assert "model.embed [4:8, 0:4] in r1-0.bin: digest" in err


# --------------------------------------------------------------------------------- prune


def test_prune_by_count(saved: Folder, call: Call) -> None:
    for step in (10, 20, 30, 40):
        saved.add(step)
    code, out, _ = call("prune", saved.url, "--keep-last", "2", "--dry-run", "--json")
    assert code == COMPLETED
    assert [c["step"] for c in json.loads(out)["deleted"]] == [20, 10]
    assert saved.manifests() == [10, 20, 30, 40]
    code, out, _ = call("prune", saved.url, "--keep-last", "2")
    assert code == COMPLETED
    assert "kept steps: 40, 30" in out
    assert saved.manifests() == [30, 40]
    assert saved.data() == ["r1/g1-s30", "r1/g1-s40"]


def test_prune_by_age_leaves_the_newest(saved: Folder, call: Call) -> None:
    for step in (10, 20):
        saved.add(step, age_s=(100 - step) * HOUR_S)
    assert call("prune", saved.url, "--older-than", "1")[0] == COMPLETED
    assert saved.manifests() == [20]


def test_both_conditions_must_hold(saved: Folder, call: Call) -> None:
    for step, age_h in ((10, 9), (20, 0.5), (30, 0.2)):
        saved.add(step, age_s=age_h * HOUR_S)
    call("prune", saved.url, "--keep-last", "1", "--older-than", "1")
    assert saved.manifests() == [20, 30]


def test_the_last_good_one_is_never_pruned(saved: Folder, call: Call) -> None:
    for step in (10, 20, 30, 40):
        saved.add(step)
    saved.file(30).unlink()
    saved.file(40).unlink()
    code, out, _ = call("prune", saved.url, "--keep-last", "1", "--json")
    assert code == COMPLETED
    assert [c["step"] for c in json.loads(out)["deleted"]] == [10]
    assert call("verify", saved.url, "--step", "20")[0] == COMPLETED
    saved.file(20).unlink()
    code, out, _ = call("prune", saved.url, "--keep-last", "1")
    assert "no checkpoint is complete: none is deleted" in out
    assert saved.manifests() == [20, 30, 40]


def test_abandoned_data_goes_when_asked(saved: Folder, call: Call) -> None:
    saved.add(10, run="r0", age_s=HOUR_S)
    saved.add(20)
    for step, run in ((5, "r9"), (15, "r0"), (18, "r1"), (30, "r1")):
        saved.attempt(step, run)
    call("prune", saved.url, "--keep-last", "1", "--dry-run")
    code, out, _ = call("prune", saved.url, "--abandoned")
    assert code == COMPLETED
    assert "data/r1/g1-s30 stays: it may be being written" in out
    assert saved.data() == ["r0/g1-s10", "r1/g1-s20", "r1/g1-s30"]
    assert saved.manifests() == [10, 20]


def test_no_data_goes_while_a_manifest_is_not_understood(saved: Folder, call: Call) -> None:
    saved.add(10)
    saved.attempt(5, "r0")
    Path(saved.url, "manifests", "0000000010-0.json").write_text("{}")
    _, out, _ = call("prune", saved.url, "--abandoned", "--keep-last", "1")
    assert "no data is deleted" in out
    assert saved.data() == ["r0/g1-s5", "r1/g1-s10"]


# ----------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(["ls", "nowhere"], "nowhere: no checkpoints there", id="missing"),
        pytest.param(["ls", "."], "./checkpoints has some", id="run-folder"),
        pytest.param(["ls", "odd://x"], "odd://x: ", id="filesystem"),
        pytest.param(
            ["verify", "checkpoints", "--step", "7"], "no checkpoint of step 7", id="step"
        ),
        pytest.param(["verify", "checkpoints/manifests/3-0.json"], "no such manifest", id="url"),
        pytest.param(["diff", "checkpoints"], "URL_B: expected a second URL", id="one-url"),
        pytest.param(["prune", "checkpoints"], "expected --keep-last, --older-than", id="nothing"),
        pytest.param(["prune", "checkpoints", "--keep-last", "0"], "--keep-last", id="none-kept"),
    ],
)
def test_bad_input_is_one_line(
    saved: Folder, call: Call, arguments: list[str], expected: str
) -> None:
    saved.add(10)
    code, out, err = call(*arguments)
    assert (code, out) == (BAD_USAGE, "")
    assert expected in err
    assert err.count("\n") == 1


LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}


def test_a_checkpoint_is_exported_for_from_pretrained(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from elastic_ft.config import ModelConfig
    from elastic_ft.models.build import build_model

    model = build_model(ModelConfig(transformers=LLAMA), vocab_size=40, sequence_length=None)
    run = tmp_path / "run"
    folder = Folder(f"{run}/checkpoints")
    folder.add(3, {f"model.{n}": p.detach().numpy() for n, p in model.named_parameters()})
    job = {"name": "x", "steps": 3, "model": {"transformers": LLAMA}, "data": {"url": "stdlib:"}}
    (run / "job.yaml").write_text(json.dumps(job))
    out = tmp_path / "out"
    command = ("checkpoint", "export", folder.url, str(out), "--format", "huggingface")
    assert run_command(command) == COMPLETED
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
    assert type(loaded) is type(model) and loaded.config.vocab_size == 40
    for name, parameter in loaded.named_parameters():
        assert (parameter == dict(model.named_parameters())[name]).all()
    (run / "job.yaml").unlink()
    assert run_command((*command[:3], str(tmp_path / "other"), *command[4:])) == BAD_USAGE
