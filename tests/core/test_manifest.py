"""The manifest says what a checkpoint is, and can be believed (I5)."""

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ft.core.manifest import Manifest, ShardEntry, TensorSpec, incomplete
from elastic_ft.core.sharding import Box
from elastic_ft.errors import StateDamaged


def entry(tensor: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ShardEntry:
    box = Box(offsets, sizes)
    return ShardEntry(tensor, box, "float32", "rank0.bin", 0, 4 * box.numel, "xxh3_128:00ff")


MANIFEST = Manifest(
    job="demo",
    run="demo-é",
    step=120,
    generation=3,
    nonce="7f3a",
    layout="fsdp2",
    created_at_s=1790000000.125,
    tensors={
        "model.w": TensorSpec("float32", (5, 4)),
        "optim.step": TensorSpec("float32", ()),
        "model.none": TensorSpec("float32", (0, 4)),
    },
    entries=(
        entry("model.w", (0, 0), (3, 4)),
        entry("model.w", (3, 0), (2, 4)),
        entry("optim.step", (), ()),
    ),
    extra={"seed": 7, "samples": 960, "loss_scale": 65536.0, "nested": {"b": [1, None], "a": True}},
)

# ------------------------------------------------------------------------------ as bytes


def test_a_manifest_comes_back_as_it_was() -> None:
    data = MANIFEST.to_json()
    assert Manifest.from_json(data) == MANIFEST
    assert Manifest.from_json(data).to_json() == data


def test_the_form_is_canonical() -> None:
    shuffled = replace(MANIFEST, tensors=dict(sorted(MANIFEST.tensors.items(), reverse=True)))
    assert shuffled.to_json() == MANIFEST.to_json()


def test_anyone_can_check_the_digest() -> None:
    values = json.loads(MANIFEST.to_json())
    digest = values.pop("digest")
    body = json.dumps(values, sort_keys=True, separators=(",", ":")).encode()
    assert digest == "sha256:" + hashlib.sha256(body).hexdigest()


def test_no_byte_can_change_unseen() -> None:
    data = MANIFEST.to_json()
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(StateDamaged):
            Manifest.from_json(bytes(damaged))


def test_no_torn_manifest_is_read() -> None:
    data = MANIFEST.to_json()
    for length in range(len(data)):
        with pytest.raises(StateDamaged):
            Manifest.from_json(data[:length])
    with pytest.raises(StateDamaged):
        Manifest.from_json(data + b"\n")


def test_damage_names_its_source() -> None:
    with pytest.raises(StateDamaged, match=r"^s3://b/step-1: 3 bytes that do not") as found:
        Manifest.from_json(b"{}\n", "s3://b/step-1")
    assert found.value.holder == "s3://b/step-1"


def signed(values: Any) -> bytes:
    """A document with a right digest, whatever it says."""
    body = json.dumps(values, sort_keys=True, separators=(",", ":")).encode()
    head = b'{"digest":"sha256:' + hashlib.sha256(body).hexdigest().encode()
    return head + b'",' + body[1:]


def changed(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(MANIFEST.to_json())
    del values["digest"]
    for key, value in changes.items():
        if value is None:
            del values[key]
        else:
            values[key] = value
    return values


ENTRY = MANIFEST.entries[0].to_dict()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (changed(format_version=2), "format_version 2, this program reads 1"),
        (changed(step="12"), "step: expected a whole number from 0, found '12'"),
        (changed(step=True), "step: expected a whole number"),
        (changed(nonce=None), "manifest: missing key 'nonce'"),
        (changed(zeal=1), "manifest: unknown key 'zeal'"),
        (changed(created_at_s="now"), "created_at_s: expected a number"),
        (changed(tensors=[]), "tensors: expected an object"),
        (changed(tensors={"w": {"dtype": "int8"}}), "tensor w: missing key 'shape'"),
        (changed(entries=[1]), "shard entry: expected an object, found int"),
        (changed(entries=[ENTRY | {"sizes": [3, -4]}]), "sizes: expected whole numbers from 0"),
        (changed(entries=[ENTRY | {"sizes": [3]}]), "differ in length"),
        (changed(entries=[ENTRY | {"digest": 5}]), "digest: expected text, found 5"),
    ],
)
def test_a_bad_schema_is_refused_in_words(values: dict[str, Any], message: str) -> None:
    with pytest.raises(StateDamaged) as found:
        Manifest.from_json(signed(values))
    assert message in str(found.value)


def test_what_json_cannot_say_is_refused_when_writing() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        replace(MANIFEST, extra={"loss": float("nan")}).to_json()


@given(
    tensor=st.text(),
    ranges=st.lists(st.tuples(st.integers(0, 2**60), st.integers(0, 2**60)), max_size=4),
    offset=st.integers(0, 2**60),
)
def test_entries_go_through_plain_json(
    tensor: str, ranges: list[tuple[int, int]], offset: int
) -> None:
    box = Box(tuple(o for o, _ in ranges), tuple(s for _, s in ranges))
    one = ShardEntry(tensor, box, "bfloat16", "a/b.bin", offset, 12, "sha256:ab")
    assert ShardEntry.from_dict(json.loads(json.dumps(one.to_dict()))) == one


# --------------------------------------------------------------------------- what it says


def with_entries(*entries: ShardEntry) -> Manifest:
    tensors = {"model.w": TensorSpec("float32", (5, 4))}
    return replace(MANIFEST, tensors=tensors, entries=entries)


TOP, BOTTOM = entry("model.w", (0, 0), (3, 4)), entry("model.w", (3, 0), (2, 4))


def test_a_whole_checkpoint_is_complete() -> None:
    assert incomplete(MANIFEST) == []
    assert incomplete(with_entries(BOTTOM, TOP)) == []


@pytest.mark.parametrize(
    ("entries", "flaw"),
    [
        ([], "model.w: no entry holds [0:5, 0:4]"),
        ([TOP], "model.w: no entry holds [3:5, 0:4]"),
        ([TOP, TOP, BOTTOM], "model.w: [0:3, 0:4] and [0:3, 0:4] overlap"),
        ([TOP, entry("model.w", (2, 0), (3, 4))], "model.w: [0:3, 0:4] and [2:5, 0:4] overlap"),
        ([TOP, entry("model.w", (3, 0), (3, 4))], "model.w: [3:6, 0:4] is not inside [0:5, 0:4]"),
        ([entry("model.w", (0,), (20,))], "model.w: [0:20] is not inside [0:5, 0:4]"),
        (
            [TOP, replace(BOTTOM, dtype="bfloat16")],
            "model.w: [3:5, 0:4] is bfloat16, the tensor is float32",
        ),
    ],
)
def test_what_is_incomplete_is_named(entries: list[ShardEntry], flaw: str) -> None:
    assert incomplete(with_entries(*entries)) == [flaw]


def test_scalars_must_be_there_once() -> None:
    scalar = entry("s", (), ())
    base = replace(MANIFEST, tensors={"s": TensorSpec("float32", ())})
    assert incomplete(replace(base, entries=(scalar,))) == []
    assert incomplete(replace(base, entries=())) == ["s: no entry holds []"]
    assert incomplete(replace(base, entries=(scalar, scalar))) == ["s: [] and [] overlap"]


def test_entries_of_unknown_tensors_are_named() -> None:
    stray = replace(MANIFEST, tensors={}, entries=(TOP,))
    assert incomplete(stray) == ["model.w: has entries, but is not among the tensors"]
