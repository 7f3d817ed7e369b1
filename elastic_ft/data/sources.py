"""Where text and tokens come from: finding the files behind a URL, and streaming what is in them.

Nothing here holds more than a block of a file in memory.
"""

from __future__ import annotations

import io
import json
import os
import platform
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from elastic_ft.config import DataConfig
from elastic_ft.errors import DataError, StorageError, UsageError, one_line
from elastic_ft.storage.backends import check_protocol

STDLIB_URL = "stdlib:"
BLOCK_CHARACTERS = 1 << 18
BLOCK_BYTES = 4 << 20
PARQUET_BATCH_ROWS = 256
# Set once, here: botocore's own default waits a minute for each of many attempts.
S3_OPTIONS = {"config_kwargs": {"connect_timeout": 5, "retries": {"max_attempts": 3}}}

_SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".bin": "tokens",
    ".tokens": "tokens",
}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4")
_STDLIB_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_STAMPS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created")


@dataclass(frozen=True)
class SourceFile:
    path: str  # for the file system
    name: str  # for the reader and for the cache's digest
    size_bytes: int
    stamp: str  # changes with the content: an ETag, a modification time, a version


@dataclass(frozen=True)
class DataSource:
    """The files of a URL, sorted by name, all of one format."""

    url: str
    fs: AbstractFileSystem
    files: tuple[SourceFile, ...]
    format: str  # text, jsonl, parquet or tokens


class TextPiece(NamedTuple):
    """A document, or a part of one."""

    text: str
    ends_document: bool


def find_source(config: DataConfig) -> DataSource:
    """Returns the files behind ``config.url``: one file, a folder's (recursively) or a glob's.

    Files whose names start with "." or "_" are passed over in folders (``_SUCCESS`` and such).
    Raises DataError for nothing found, empty files or mixed formats, StorageError for a URL that
    can't be reached.
    """
    assert config.url is not None
    if config.url == STDLIB_URL:
        return _stdlib_source(config.url, config.format)
    with reading(config.url):
        options = S3_OPTIONS if config.url.startswith(("s3://", "s3a://")) else {}
        fs, path = url_to_fs(config.url, use_listings_cache=False, **options)
        files = tuple(sorted(_list_files(fs, path), key=lambda file: file.name))
    if not files:
        raise DataError(f"data.url: {config.url}: no files found")
    if not any(file.size_bytes for file in files):
        raise DataError(f"data.url: {config.url}: {len(files)} files found, all of them empty")
    return DataSource(config.url, fs, files, _one_format(config, files))


def _list_files(fs: AbstractFileSystem, path: str) -> Iterator[SourceFile]:
    if any(character in path for character in "*?["):
        infos = list(fs.glob(path, detail=True).values())
    else:
        infos = [fs.info(path)]
        if infos[0]["type"] == "directory":
            found = fs.find(path, detail=True).values()
            infos = [info for info in found if not _is_hidden(info["name"], path)]
    for info in infos:
        if info["type"] == "file":
            stamp = next((str(info[key]) for key in _STAMPS if info.get(key)), "")
            yield SourceFile(info["name"], info["name"], info.get("size") or 0, stamp)


def _is_hidden(name: str, folder: str) -> bool:
    return any(part.startswith((".", "_")) for part in name.removeprefix(folder).split("/"))


def _one_format(config: DataConfig, files: tuple[SourceFile, ...]) -> str:
    if config.format != "auto":
        return config.format
    example_by_format = {_format_of(file.name): file.name for file in reversed(files)}
    if len(example_by_format) > 1:
        found = ", ".join(f"{name} ({kind})" for kind, name in sorted(example_by_format.items()))
        raise DataError(
            f"data.url: {config.url}: files of several formats: {found}; "
            "set data.format, or narrow the URL with a glob"
        )
    return next(iter(example_by_format))


def _format_of(name: str) -> str:
    stem, suffix = os.path.splitext(name)  # noqa: PTH122  a URL's path, not this system's
    if suffix in _COMPRESSED:
        suffix = os.path.splitext(stem)[1]  # noqa: PTH122
    return _SUFFIXES.get(suffix, "text")


def _stdlib_source(url: str, data_format: str) -> DataSource:
    """Python's own library: some 12 MB of real text on any machine."""
    if data_format not in ("auto", "text"):
        raise DataError(f"data.format: {url} is text, found {data_format!r}")
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = _python_files(root)
    version = platform.python_version()
    files = [
        SourceFile(str(path), path.relative_to(root).as_posix(), path.stat().st_size, version)
        for path in paths
    ]
    if not files:
        raise DataError(f"data.url: {url}: this Python has no library sources in {root}")
    ordered = tuple(sorted(files, key=lambda file: file.name))
    return DataSource(url, LocalFileSystem(), ordered, "text")


def _python_files(root: Path) -> list[Path]:
    """Without looking into what is skipped: site-packages has tens of thousands of files."""
    found = []
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in _STDLIB_SKIPPED]
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return [path for path in found if path.is_file()]


@contextmanager
def reading(url: str, key: str = "data.url") -> Iterator[None]:
    """Turns what a file system raises into one line: DataError or StorageError."""
    try:
        check_protocol(url)
    except StorageError as error:
        raise StorageError(f"{key}: {error}") from None
    try:
        yield
    except UsageError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{key}: {url}: no such file or folder") from error
    except PermissionError as error:
        raise StorageError(f"{key}: {url}: access denied: {one_line(error)}") from error
    except Exception as error:  # fsspec's file systems raise errors of many packages
        raise StorageError(f"{key}: {url}: cannot be read: {one_line(error)}") from error


def read_pieces(source: DataSource, text_field: str) -> Iterator[TextPiece]:
    """Yields the documents of a text, jsonl or parquet source, in order; long ones in parts.

    Raises DataError, naming file and line, for what is not of the format; StorageError if the
    storage fails.
    """
    for file in source.files:
        if file.size_bytes == 0:
            continue
        with reading(file.name):
            if source.format == "parquet":
                yield from _parquet_pieces(source.fs, file, text_field)
                continue
            with source.fs.open(file.path, "rb", compression="infer") as raw:
                text = io.TextIOWrapper(raw, encoding="utf-8", errors="replace")
                if source.format == "jsonl":
                    yield from _jsonl_pieces(text, file.name, text_field)
                else:
                    yield from _text_pieces(text, file.name)


def _text_pieces(file: io.TextIOWrapper, name: str) -> Iterator[TextPiece]:
    block = _whole_lines(file)
    if "\0" in block:
        raise DataError(f"data.url: {name}: expected text, found binary data (set data.format)")
    while block:
        following = _whole_lines(file)
        yield TextPiece(block, ends_document=not following)
        block = following


def _whole_lines(file: io.TextIOWrapper) -> str:
    """The next block up to a line's end, so that a cut rarely splits a token."""
    return file.read(BLOCK_CHARACTERS) + file.readline(BLOCK_CHARACTERS)


def _jsonl_pieces(file: io.TextIOWrapper, name: str, text_field: str) -> Iterator[TextPiece]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"data.url: {name}, line {number}: not JSON: {error}") from None
        yield TextPiece(_text_of(record, text_field, f"{name}, line {number}"), ends_document=True)


def _text_of(record: Any, text_field: str, where: str) -> str:
    if not isinstance(record, dict):
        raise DataError(f"data.url: {where}: expected an object, found {type(record).__name__}")
    if text_field not in record:
        raise DataError(
            f"data.text_field: {where}: no field {text_field!r}; found {', '.join(record)[:200]}"
        )
    text = record[text_field]
    if not isinstance(text, str):
        raise DataError(
            f"data.text_field: {where}: {text_field!r} is {type(text).__name__}, expected text"
        )
    return text


def _parquet_pieces(
    fs: AbstractFileSystem, file: SourceFile, text_field: str
) -> Iterator[TextPiece]:
    import pyarrow as pa  # of use for such files alone
    import pyarrow.parquet as pq

    with fs.open(file.path, "rb") as raw:
        try:
            table = pq.ParquetFile(raw)
            _check_text_column(table.schema_arrow, text_field, file.name)
            for batch in table.iter_batches(PARQUET_BATCH_ROWS, columns=[text_field]):
                for text in batch.column(0).to_pylist():
                    if text:
                        yield TextPiece(text, ends_document=True)
        except pa.ArrowException as error:
            raise DataError(
                f"data.url: {file.name}: unreadable parquet: {one_line(error)}"
            ) from error


def _check_text_column(schema: Any, text_field: str, name: str) -> None:
    if text_field not in schema.names:
        raise DataError(
            f"data.text_field: {name}: no column {text_field!r}; "
            f"found {', '.join(schema.names)[:200]}"
        )
    import pyarrow as pa

    kind = schema.field(text_field).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise DataError(
            f"data.text_field: {name}: column {text_field!r} is {kind}, expected string"
        )


def read_tokens(source: DataSource, token_bytes: int) -> Iterator[np.ndarray]:
    """Yields the token ids of a source of raw little-endian unsigned integers, block by block.

    Raises DataError for a file that is not a whole number of tokens, StorageError if the storage
    fails.
    """
    for file in source.files:
        with reading(file.name), source.fs.open(file.path, "rb", compression="infer") as raw:
            rest = b""
            while block := raw.read(BLOCK_BYTES):
                block = rest + block
                whole = len(block) - len(block) % token_bytes
                yield np.frombuffer(block[:whole], dtype=f"<u{token_bytes}")
                rest = block[whole:]
        if rest:
            raise DataError(
                f"data.url: {file.name}: not a whole number of {token_bytes}-byte tokens "
                f"({len(rest)} bytes left over; see data.token_bytes)"
            )
