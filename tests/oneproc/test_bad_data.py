"""Data that is missing, damaged or of another kind: one line says what was found where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from elastic_ft.data.corpus import open_corpus
from elastic_ft.data.dataset import open_dataset
from elastic_ft.errors import DataError, StorageError
from tests.oneproc.texts import write_texts


class Forbidding(MemoryFileSystem):
    protocol = "forbidding"

    def info(self, path: str, **kwargs: Any) -> Any:
        raise PermissionError("403 Forbidden")


fsspec.register_implementation("forbidding", Forbidding, clobber=True)


@pytest.mark.parametrize(
    ("content", "changes", "error", "expected"),
    [
        pytest.param(
            {}, {"url": "{}/none"}, DataError, "none: no such file or folder", id="missing"
        ),
        pytest.param({}, {"url": "{}/*.txt"}, DataError, "no files found", id="empty-glob"),
        pytest.param({"_x": "a"}, {}, DataError, "no files found", id="nothing-but-hidden"),
        pytest.param({"a.txt": ""}, {}, DataError, "1 files found, all of them empty", id="empty"),
        pytest.param(
            {"a.txt": "short"},
            {},
            DataError,
            r"found \d tokens, one sample needs 9 \(data.sequence_length 8 and the next token\)",
            id="less-than-a-sample",
        ),
        pytest.param({"a.txt": "a\0b"}, {}, DataError, "expected text, found binary", id="binary"),
        pytest.param(
            {"a.txt": "x", "b.jsonl": "{}"},
            {},
            DataError,
            r"several formats: .*b.jsonl \(jsonl\), .*a.txt \(text\)",
            id="mixed",
        ),
        pytest.param(
            {"a.jsonl": '{"text": "a"}\nnope'}, {}, DataError, "line 2: not JSON", id="not-json"
        ),
        pytest.param({"a.jsonl": "[1]"}, {}, DataError, "expected an object", id="json-list"),
        pytest.param(
            {"a.jsonl": '{"body": "x", "id": 1}'},
            {},
            DataError,
            "data.text_field: .*line 1: no field 'text'; found body, id",
            id="no-field",
        ),
        pytest.param(
            {"a.jsonl": '{"text": 3}'}, {}, DataError, "'text' is int, expected text", id="number"
        ),
        pytest.param({"a.jsonl": "\n\n"}, {}, DataError, "no tokens in 1 files", id="blank-lines"),
        pytest.param(
            {"a.parquet": "PAR1 not really"}, {}, DataError, "unreadable parquet", id="bad-parquet"
        ),
        pytest.param(
            {"a.bin": "abc"}, {}, DataError, "not a whole number of 2-byte tokens", id="odd-bytes"
        ),
        pytest.param(
            {"a.txt": "text"},
            {"tokenizer": "{}/a.txt"},
            DataError,
            "data.tokenizer: .*not a tokenizer.json",
            id="bad-tokenizer",
        ),
        pytest.param(
            {"a.txt": "text"},
            {"tokenizer": "{}/none.json"},
            DataError,
            "data.tokenizer: .*no such file",
            id="no-tokenizer",
        ),
        pytest.param(
            {"a.txt": "text"},
            {"cache_dir": "{}/a.txt"},
            StorageError,
            "data.cache_dir: ",
            id="cache-is-a-file",
        ),
        pytest.param(
            {},
            {"url": "nope://x"},
            StorageError,
            "data.url: .* nope:// is not known",
            id="protocol",
        ),
        pytest.param(
            {}, {"url": "forbidding://x"}, StorageError, "access denied: .*403", id="forbidden"
        ),
        pytest.param(
            {}, {"url": "stdlib:", "format": "jsonl"}, DataError, "stdlib: is text", id="stdlib"
        ),
        pytest.param(
            {"a.txt": "word " * 200},
            {"eval_every_steps": 5, "eval_fraction": 0},
            DataError,
            "data.eval_every_steps: 5, but no samples are held out",
            id="nothing-to-evaluate",
        ),
    ],
)
def test_bad_data_is_one_line(
    config: Any,
    tmp_path: Path,
    content: dict[str, str],
    changes: dict[str, Any],
    error: type[Exception],
    expected: str,
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name, text in content.items():
        (folder / name).write_text(text)
    filled = {k: v.format(folder) if isinstance(v, str) else v for k, v in changes.items()}
    with pytest.raises(error, match=expected) as caught:
        open_dataset(config(**{"url": str(folder)} | filled), 0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ({"body": ["a"], "id": [1]}, "no column 'text'; found body, id"),
        ({"text": [1]}, "column 'text' is int64, expected string"),
    ],
)
def test_a_parquet_file_without_text_is_one_line(
    config: Any, tmp_path: Path, column: dict[str, list[Any]], expected: str
) -> None:
    pq.write_table(pa.table(column), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=f"data.text_field: .*{expected}"):
        open_corpus(config(tmp_path / "a.parquet"))


def test_tokens_outside_the_tokenizer_are_refused(config: Any, tmp_path: Path) -> None:
    trained = open_corpus(config(write_texts(tmp_path / "texts")))
    tokenizer = Path(trained.tokens_file).parent / "tokenizer.json"
    np.array([1, 2, 9999], dtype="<u2").tofile(tmp_path / "t.bin")
    with pytest.raises(DataError, match=r"token 9999 is outside data.tokenizer's vocabulary of"):
        open_corpus(config(tmp_path / "t.bin", tokenizer=str(tokenizer)))


def test_an_unreachable_store_is_one_line(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # discard: nobody listens
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with pytest.raises(StorageError, match=r"data.url: s3://bucket/x: cannot be read: .*endpoint"):
        open_dataset(config("s3://bucket/x"), 0)
