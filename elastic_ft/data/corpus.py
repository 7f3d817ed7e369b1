"""One long row of token ids, made once from the files behind a URL and cached on local disk.

The cache folder's name is a digest of everything the tokens depend on: the files' names, sizes
and stamps, and the settings. A folder is written under another name and renamed when it is
complete; a lock makes the processes that start together tokenise once, and frees itself if its
holder dies.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem

from elastic_ft.config import DataConfig
from elastic_ft.data.sources import (
    DataSource,
    TextPiece,
    find_source,
    read_pieces,
    read_tokens,
    reading,
)
from elastic_ft.errors import DataError, StorageError, one_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CACHE_VERSION = 1  # of what this module writes
TOKENS_NAME = "tokens.bin"
EOS = "<eos>"
EOS_NAMES = (EOS, "<|endoftext|>", "</s>", "<|end_of_text|>", "<|im_end|>", "[SEP]", "[EOS]")
TRAINING_CHARACTERS_MAX = 8 << 20
ENCODE_CHARACTERS = 1 << 20  # handed to the tokenizer at once
LOCK_WAIT_S = 3600.0
LOCK_POLL_S = 0.05


@dataclass(frozen=True)
class Corpus:
    """Token ids on local disk: ``token_count`` integers of ``dtype`` at the start of the file."""

    tokens_file: str
    dtype: str  # numpy's name: <u2 or <u4
    token_count: int
    vocab_size: int  # ids are below it
    file_count: int
    fingerprint: str  # of the tokens themselves: equal on two machines if the data is
    end_id: int | None = None  # ends each document, where the job wants to know

    def is_whole(self) -> bool:
        """Whether the file still holds the tokens."""
        needed = self.token_count * np.dtype(self.dtype).itemsize
        path = Path(self.tokens_file)
        return path.is_file() and path.stat().st_size >= needed


def open_corpus(config: DataConfig, lock_wait_s: float = LOCK_WAIT_S) -> Corpus:
    """Returns the tokens of ``config.url``, from the cache if it has them.

    Raises DataError for data that is missing, empty or not of its format, or if another process
    held the cache's lock for ``lock_wait_s`` seconds; StorageError if the URL or the cache
    folder can't be used.
    """
    source = find_source(config)
    tokenizer_json = _read_tokenizer(config.tokenizer) if config.tokenizer else None
    if tokenizer_json is not None and source.format != "tokens":
        _end_token(_tokenizer(tokenizer_json), config.end_token)
    cache = Path(config.cache_dir).expanduser()
    folder = cache / _digest(config, source, tokenizer_json)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        corpus = _load(folder)
        if corpus is None:
            with _locked(folder.with_suffix(".lock"), lock_wait_s):
                corpus = _load(folder) or _build(config, source, tokenizer_json, folder)
        if config.separate_documents:
            corpus = replace(corpus, end_id=_end_id(config, tokenizer_json, folder))
    except OSError as error:
        raise StorageError(f"data.cache_dir: {cache}: {one_line(error)}") from error
    return corpus


def _end_id(config: DataConfig, tokenizer_json: str | None, folder: Path) -> int:
    if isinstance(config.end_token, int):
        return config.end_token
    tokenizer_json = tokenizer_json or (folder / "tokenizer.json").read_text()
    return _end_token(_tokenizer(tokenizer_json), config.end_token)


def _digest(config: DataConfig, source: DataSource, tokenizer_json: str | None) -> str:
    settings = {
        "version": [CACHE_VERSION, importlib.metadata.version("tokenizers")],
        "file_system": type(source.fs).__name__,
        "files": [(file.name, file.size_bytes, file.stamp) for file in source.files],
        "format": source.format,
        "text_field": config.text_field,
        "tokenizer": tokenizer_json,
        **({} if config.end_token is None else {"end_token": config.end_token}),
        "vocab_size": config.vocab_size,
        "token_bytes": config.token_bytes,
        "max_tokens": config.max_tokens,
    }
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:24]


def _load(folder: Path) -> Corpus | None:
    """The corpus in ``folder``, or None if it is not there, or not whole."""
    try:
        corpus = Corpus(**json.loads((folder / "corpus.json").read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    # Joining leaves an absolute path, that of tokens used in place, as it is.
    corpus = replace(corpus, tokens_file=str(folder / corpus.tokens_file))
    return corpus if corpus.is_whole() else None


@contextmanager
def _locked(path: Path, wait_s: float) -> Iterator[None]:
    deadline_s = time.monotonic() + wait_s
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise DataError(
                        f"data.cache_dir: another process has held {path} for {wait_s:g} s"
                    ) from None
                time.sleep(LOCK_POLL_S)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def _build(
    config: DataConfig, source: DataSource, tokenizer_json: str | None, folder: Path
) -> Corpus:
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that died here
    shutil.rmtree(folder, ignore_errors=True)  # present, but not whole
    partial.mkdir()
    try:
        if source.format == "tokens":
            corpus = _take_tokens(config, source, tokenizer_json, partial)
        else:
            corpus = _tokenise(config, source, tokenizer_json, partial)
        (partial / "corpus.json").write_text(json.dumps(asdict(corpus)))
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return replace(corpus, tokens_file=str(folder / corpus.tokens_file))


def _take_tokens(
    config: DataConfig, source: DataSource, tokenizer_json: str | None, folder: Path
) -> Corpus:
    """Ready-made tokens: checked and counted; copied unless they are one plain local file."""
    only = source.files[0].path
    in_place = len(source.files) == 1 and isinstance(source.fs, LocalFileSystem)
    in_place = in_place and Path(only).suffix in ("", ".bin", ".tokens")
    writer = _Writer(f"<u{config.token_bytes}", config.max_tokens)
    writer.drain(
        read_tokens(source, config.token_bytes), None if in_place else folder / TOKENS_NAME
    )
    vocab_size = writer.largest + 1
    if tokenizer_json is not None:
        vocab_size = _vocab_size(_tokenizer(tokenizer_json))
        if writer.largest >= vocab_size:
            raise DataError(
                f"data.url: {source.url}: token {writer.largest} is outside data.tokenizer's "
                f"vocabulary of {vocab_size}"
            )
    return writer.corpus(only if in_place else TOKENS_NAME, vocab_size, source)


def _tokenise(
    config: DataConfig, source: DataSource, tokenizer_json: str | None, folder: Path
) -> Corpus:
    if tokenizer_json is None:
        tokenizer = _train(read_pieces(source, config.text_field), config.vocab_size)
    else:
        tokenizer = _tokenizer(tokenizer_json)
        tokenizer.no_truncation()
        tokenizer.no_padding()
    tokenizer.save(str(folder / "tokenizer.json"))
    vocab_size = _vocab_size(tokenizer)
    writer = _Writer("<u2" if vocab_size <= 1 << 16 else "<u4", config.max_tokens)
    pieces = read_pieces(source, config.text_field)
    end = _end_token(tokenizer, config.end_token)
    writer.drain(_encode(tokenizer, pieces, end), folder / TOKENS_NAME)
    return writer.corpus(TOKENS_NAME, vocab_size, source)


class _Writer:
    """Writes blocks of ids to a file, up to a limit, and keeps count."""

    def __init__(self, dtype: str, tokens_max: int | None) -> None:
        self.dtype = dtype
        self.room = tokens_max
        self.count = 0
        self.largest = 0
        self.hash = hashlib.blake2b(digest_size=16)

    def drain(self, blocks: Iterable[np.ndarray], path: Path | None) -> None:
        """Takes blocks until they end or the limit is reached; ``path`` None: only looks."""
        with open(path or os.devnull, "wb") as file:  # noqa: PTH123
            for ids in blocks:
                ids = ids[: None if self.room is None else self.room - self.count]
                if ids.size:
                    content = ids.astype(self.dtype, copy=False).tobytes()
                    file.write(content)
                    self.hash.update(content)
                    self.count += ids.size
                    self.largest = max(self.largest, int(ids.max()))
                if self.count == self.room:
                    break

    def corpus(self, tokens_file: str, vocab_size: int, source: DataSource) -> Corpus:
        if self.count == 0:
            raise DataError(f"data.url: {source.url}: no tokens in {len(source.files)} files")
        return Corpus(
            tokens_file=tokens_file,
            dtype=self.dtype,
            token_count=self.count,
            vocab_size=vocab_size,
            file_count=len(source.files),
            fingerprint=self.hash.hexdigest(),
        )


def _tokenizer(text: str) -> Tokenizer:
    from tokenizers import Tokenizer  # of use for texts alone

    return Tokenizer.from_str(text)


def _read_tokenizer(url: str) -> str:
    key = "data.tokenizer"
    with reading(url, key), fsspec.open(url, "rb") as file:
        content = file.read()
    try:
        text = content.decode()
        _tokenizer(text)
    except Exception as error:  # tokenizers raises plain Exception
        raise DataError(f"{key}: {url}: not a tokenizer.json: {one_line(error)}") from error
    return text


def _train(pieces: Iterable[TextPiece], vocab_size: int) -> Tokenizer:
    """A byte-level BPE (any text can be encoded) of the first megabytes; the same every time."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first_texts(pieces, TRAINING_CHARACTERS_MAX), trainer)
    return tokenizer


def _first_texts(pieces: Iterable[TextPiece], characters_max: int) -> Iterator[str]:
    room = characters_max
    for piece in pieces:
        yield piece.text[:room]
        room -= len(piece.text)
        if room <= 0:
            return


def _end_token(tokenizer: Tokenizer, wanted: str | int | None) -> int:
    """The id that ends each document. Raises DataError where it can't be told: documents without
    anything between them would be one."""
    if isinstance(wanted, int):
        if wanted >= (size := _vocab_size(tokenizer)):
            raise DataError(f"data.end_token: {wanted} is outside the vocabulary of {size}")
        return wanted
    names = EOS_NAMES if wanted is None else (wanted,)
    for name in names:
        if (found := tokenizer.token_to_id(name)) is not None:
            return found
    raise DataError(
        f"data.end_token: the tokenizer has no {' or '.join(names)}: name the token of its "
        "vocabulary that ends a document"
    )


def _encode(tokenizer: Tokenizer, pieces: Iterable[TextPiece], end: int) -> Iterator[np.ndarray]:
    for batch in _batched(pieces):
        encodings = tokenizer.encode_batch([p.text for p in batch], add_special_tokens=False)
        for piece, encoding in zip(batch, encodings, strict=True):
            yield np.array(encoding.ids + [end] * piece.ends_document, dtype=np.uint32)


def _batched(pieces: Iterable[TextPiece]) -> Iterator[list[TextPiece]]:
    batch: list[TextPiece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= ENCODE_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _vocab_size(tokenizer: Tokenizer) -> int:
    """One more than the largest id: a vocabulary may have holes."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
