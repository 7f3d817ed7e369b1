"""What others may write is read with named errors of one line, whatever it is: a job file, a
manifest whose digest is right, the header of a safetensors file, a request to resize.

A hundred mutations of each here; ten thousand with ``make fuzz``.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ft.config import parse_text
from elastic_ft.core.manifest import Manifest, ShardEntry, TensorSpec, incomplete
from elastic_ft.core.sharding import Box
from elastic_ft.errors import ConfigError, ElasticError, StateDamaged, StorageError
from elastic_ft.observe import resize_request
from elastic_ft.storage.safetensors import folder_of
from elastic_ft.storage.shards import odd_sizes, prefix_of
from elastic_ft.storage.store import open_store

LENGTHY = settings(max_examples=10_000)
seeds = st.integers(0, 2**64)

JOB = """\
name: tiny
seed: 3
steps: 10
model: {preset: decoder-1m, kwargs: {dim: 16}}
data: {url: 'stdlib:', sequence_length: 16}
batch: {global_batch_size: 8, micro_batch_size: 1}
optimizer: {lr: 1.0e-3, betas: [0.9, 0.95], kwargs: {fused: true}}
elastic: {min_workers: 2, max_workers: 4, hang_timeout_s: 20}
"""
TOKENS = """*a|&a |!!int |!!python/name:os.system |[|{|}|2024-99-99|.nan|-.inf|0o99|1_0|? |: |<<: |
null|~|'|"|%YAML 9.9\n---\n|1e999|0b2|12:60:70|>9\n|!!timestamp x|!!bool x|\\ud800|\x85|\u2028"""


def mutated_text(seed: int) -> bytes:
    chance = random.Random(seed)
    text = bytearray(JOB.encode())
    tokens = [token.encode("utf-8", "surrogatepass") for token in TOKENS.split("|")]
    for _ in range(chance.randint(1, 4)):
        at, kind = chance.randrange(len(text)), chance.random()
        if kind < 0.4:
            text[at : at + chance.randint(0, 6)] = chance.choice(tokens)
        elif kind < 0.6:
            text[at] = chance.randrange(256)
        elif kind < 0.8:
            del text[at : at + chance.randint(1, 20)]
        else:
            other = chance.randrange(len(text))
            text[at:at] = text[other : other + chance.randint(1, 40)]
    return bytes(text)


WILD: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 2**31, 2**63, 2**70, 10**400, 0.5, float("inf"), float("nan"), ""),
    *("..", "../../etc/passwd", "/etc/passwd", "a\x00b", "a\nb", "x" * 300, [], {}, [0], [64]),
    *([-1], [2**40], [2**62, 2**62], {"a": 1}, "torch.float32", "F32", "xxh3_128:00", "\ud800"),
)


def mutated_json(document: Any, seed: int) -> bytes:
    chance = random.Random(seed)
    document = json.loads(json.dumps(document))
    for _ in range(chance.randint(1, 2)):
        node = document
        while isinstance(node, dict | list) and node:
            key = chance.choice(list(node) if isinstance(node, dict) else range(len(node)))
            if isinstance(node[key], dict | list) and node[key] and chance.random() < 0.75:
                node = node[key]
                continue
            if chance.random() < 0.85:
                node[key] = copy.deepcopy(chance.choice(WILD))
            else:
                del node[key]
            break
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def is_one_line(error: BaseException) -> bool:
    text = str(error)
    return bool(text) and text.isprintable() and len(text) < 1000


# ---------------------------------------------------------------------------- the job file


def read_job(content: bytes) -> None:
    try:
        parse_text(content, "job.yaml")
    except ConfigError as error:
        assert is_one_line(error), str(error)


@given(seeds)
def test_a_job_file(seed: int) -> None:
    read_job(mutated_text(seed))


@pytest.mark.fuzz
@LENGTHY
@given(seeds)
def test_job_files(seed: int) -> None:
    read_job(mutated_text(seed))


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {k: 1, l: 2}\n" + "".join(
    f"{name}: &{name}\n  <<: [{', '.join([f'*{before}'] * 90)}]\n"
    for before, name in zip("abcde", "bcdef", strict=True)
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(JOB.replace("tiny", "2024-13-45"), "job.yaml: not YAML: ", id="no-such-date"),
        pytest.param("[" * 3000, "job.yaml: not YAML: ", id="deep"),
        pytest.param("a: &a [*a]\n", "job.yaml: more than", id="circle"),
        pytest.param(f"a: {'[' * 150}{']' * 150}\n", "job.yaml: more than 100 levels", id="levels"),
        pytest.param(BOMB, "job.yaml: more than", id="aliases"),
        pytest.param(MERGES, "job.yaml: not YAML: line 4, column 4: too many keys", id="merges"),
        pytest.param(JOB + "sed: 1\n", "sed: unknown key, did you mean seed? (in job.yaml)"),
        pytest.param(
            JOB.replace("lr:", "learning_rate_of:"), "optimizer.learning_rate_of: unknown key"
        ),
        pytest.param(
            JOB.replace("micro_batch_size", "micro_batch_sise"),
            "batch.micro_batch_sise: unknown key, did you mean micro_batch_size?",
        ),
        pytest.param(JOB.replace("seed: 3", "seed: 18446744073709551616"), "seed: "),
        pytest.param(JOB.replace("10\n", "0x" + "f" * 5000 + "\n"), "steps: "),
        pytest.param(JOB.replace("1.0e-3", ".inf"), "optimizer.lr: "),
        pytest.param(JOB.replace("[0.9, 0.95]", "[5, -7]"), "optimizer.betas.0: "),
        pytest.param(JOB.replace("lr: 1.0e-3", "weight_decay: .inf"), "optimizer.weight_decay: "),
        pytest.param(JOB.replace("20}", ".inf}"), "elastic.hang_timeout_s: "),
        pytest.param(JOB.replace("20}", "1.0e-300}"), "elastic.hang_timeout_s: "),
        pytest.param(JOB.replace("16}\nb", "99999999999999}\nb"), "data.sequence_length: "),
        pytest.param(JOB.replace("tiny", "x" * 100_000 + "/"), "name: "),
    ],
)
def test_what_looks_like_a_job_file(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_text(text.encode(), "job.yaml")
    assert expected in str(refused.value)
    assert is_one_line(refused.value)


# ---------------------------------------------------------------------------- manifests

ENTRY = ShardEntry("model.w", Box((0,), (64,)), "uint8", "r0-0.bin", 0, 64, "xxh3_128:00")
MANIFEST = Manifest(
    job="j",
    run="r7f3a",
    step=10,
    generation=1,
    nonce="n",
    layout="ddp1",
    created_at_s=1.0,
    tensors={"model.w": TensorSpec("uint8", (64,))},
    entries=(ENTRY,),
)


def read_manifest(body: bytes) -> None:
    digest = hashlib.sha256(body).hexdigest()
    try:
        found = Manifest.from_json(b'{"digest":"sha256:' + digest.encode() + b'",' + body[1:])
        flaws = [*incomplete(found), *odd_sizes(found)]
    except StateDamaged as error:
        assert is_one_line(error), str(error)
        return
    assert all(flaw.isprintable() for flaw in flaws)
    assert ".." not in prefix_of(found).split("/")
    assert not any(".." in entry.file.split("/") for entry in found.entries)


def of_manifest(seed: int) -> bytes:
    values = json.loads(MANIFEST.to_json())
    values.pop("digest")
    return mutated_json(values, seed)


@given(seeds)
def test_a_manifest(seed: int) -> None:
    read_manifest(of_manifest(seed))


@pytest.mark.fuzz
@LENGTHY
@given(seeds)
def test_manifests(seed: int) -> None:
    read_manifest(of_manifest(seed))


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../b", "", "a\\b", "a\x00b", "."])
def test_a_manifest_names_nothing_outside_its_place(name: str) -> None:
    values = json.loads(MANIFEST.to_json())
    values.pop("digest")
    for changed in (
        values | {"run": name},
        values | {"entries": [values["entries"][0] | {"file": name}]},
    ):
        body = json.dumps(changed, sort_keys=True, separators=(",", ":")).encode()
        digest = hashlib.sha256(body).hexdigest()
        with pytest.raises(StateDamaged, match=r"expected a plain"):
            Manifest.from_json(b'{"digest":"sha256:' + digest.encode() + b'",' + body[1:])


# ------------------------------------------------------------------------- safetensors

HEADER = {
    "__metadata__": {"format": "pt"},
    "w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
}
INDEX = {"metadata": {"total_size": 16}, "weight_map": {"w": "model.safetensors"}}


def read_weights(folder: Path, header: bytes, index: bytes | None = None) -> None:
    store = open_store(str(folder))
    content = len(header).to_bytes(8, "little") + header + bytes(16)
    (folder / "model.safetensors").write_bytes(content)
    if index is not None:
        (folder / "model.safetensors.index.json").write_bytes(index)
    try:
        folder_of(store)
    except (StorageError, ElasticError) as error:
        assert is_one_line(error), str(error)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("indexed")


def read_both(folders: tuple[Path, Path], seed: int) -> None:
    plain, indexed = folders
    read_weights(plain, mutated_json(HEADER, seed))
    read_weights(indexed, json.dumps(HEADER).encode(), mutated_json(INDEX, seed))


@given(seed=seeds)
def test_a_safetensors_folder(folders: tuple[Path, Path], seed: int) -> None:
    read_both(folders, seed)


@pytest.mark.fuzz
@LENGTHY
@given(seed=seeds)
def test_safetensors_folders(folders: tuple[Path, Path], seed: int) -> None:
    read_both(folders, seed)


@pytest.mark.parametrize(
    "header", [b"[" * 200_000, b'{"w":{"dtype":"F32","shape":[1e999],"data_offsets":[0,16]}}']
)
def test_odd_safetensors_headers(folders: tuple[Path, Path], header: bytes) -> None:
    read_weights(folders[0], header)


@pytest.mark.parametrize("file", ["../../../etc/hostname", "/etc/hostname", "", 3, None])
def test_an_index_names_files_of_its_folder(folders: tuple[Path, Path], file: Any) -> None:
    (folders[1] / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"w": file}})
    )
    with pytest.raises(StorageError, match="not an index"):
        folder_of(open_store(str(folders[1])))


# ------------------------------------------------------------------------------ requests


def read_request(content: bytes) -> None:
    try:
        found = resize_request.parse(content)
    except ValueError as error:
        assert is_one_line(error), str(error)
        return
    assert 0 < found.workers <= 10**6
    assert found.request.isprintable()


@given(st.one_of(st.binary(max_size=50), seeds.map(lambda seed: mutated_json(REQUEST, seed))))
def test_a_request(content: bytes) -> None:
    read_request(content)


@pytest.mark.fuzz
@LENGTHY
@given(st.one_of(st.binary(max_size=50), seeds.map(lambda seed: mutated_json(REQUEST, seed))))
def test_requests(content: bytes) -> None:
    read_request(content)


REQUEST = {"workers": 3, "request": "a1b2"}
ODD: list[Callable[[], bytes]] = [
    lambda: b"[" * 100_000,
    lambda: b'{"workers": true}',
    lambda: b'{"workers": -5}',
    lambda: b'{"workers": 100000000000000000000}',
]


@pytest.mark.parametrize("content", ODD)
def test_an_odd_request_is_refused_by_name(content: Callable[[], bytes]) -> None:
    with pytest.raises(ValueError, match=r"resize\.json: "):
        resize_request.parse(content())
