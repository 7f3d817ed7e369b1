"""Data: every format, the samples, the cache that several processes share."""

from __future__ import annotations

import fcntl
import gzip
import json
import multiprocessing
import os
import pickle
from math import prod
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer

from elastic_ft.cli.check_model import check_model_and_data
from elastic_ft.config import DataConfig, parse_job
from elastic_ft.data import corpus as corpus_module
from elastic_ft.data.corpus import open_corpus
from elastic_ft.data.dataset import Dataset, open_dataset
from elastic_ft.errors import DataError, ModelError
from tests.oneproc.texts import DOCUMENTS, write_texts

PROCESSES = 4
DEADLINE_S = 120


def decoded(config: DataConfig) -> list[str]:
    """The documents that the cached tokens of ``config`` spell."""
    corpus = open_corpus(config)
    tokenizer = Tokenizer.from_file(str(Path(corpus.tokens_file).parent / "tokenizer.json"))
    ids = np.fromfile(corpus.tokens_file, corpus.dtype)
    text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    *documents, rest = text.split(corpus_module.EOS)
    assert rest == ""
    return documents


# ---------------------------------------------------------------------------------- formats


def test_a_folder_of_text_files(config: Any, tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts")
    (folder / "_SUCCESS").write_text("not data")
    (folder / ".hidden").write_text("not data")
    (folder / "empty.txt").write_text("")
    assert decoded(config(folder)) == DOCUMENTS


def test_a_glob_of_text_files(config: Any, tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts")
    assert decoded(config(folder / "0*.txt")) == DOCUMENTS[:10]


def test_a_long_document_is_read_in_parts(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_ft.data.sources.BLOCK_CHARACTERS", 100)
    monkeypatch.setattr("elastic_ft.data.corpus.ENCODE_CHARACTERS", 250)
    file = tmp_path / "long.txt"
    text = "".join(DOCUMENTS) + "ünïcode 文字 " * 50  # one line much longer than a block
    file.write_text(text)
    assert decoded(config(file)) == [text]


def test_jsonl(config: Any, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text("\n\n".join(json.dumps({"text": text, "id": 1}) for text in DOCUMENTS))
    assert decoded(config(file)) == DOCUMENTS


def test_compressed_jsonl_with_another_field(config: Any, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl.gz"
    file.write_bytes(gzip.compress("\n".join(json.dumps({"body": t}) for t in DOCUMENTS).encode()))
    assert decoded(config(file, text_field="body")) == DOCUMENTS


def test_parquet(config: Any, tmp_path: Path) -> None:
    file = tmp_path / "data.parquet"
    table = pa.table({"text": [*DOCUMENTS, None], "n": list(range(21))})
    pq.write_table(table, file, row_group_size=3)
    assert decoded(config(file)) == DOCUMENTS


@pytest.mark.parametrize(("width", "largest"), [(2, 60_000), (4, 100_000)])
def test_raw_tokens_are_used_in_place(
    config: Any, tmp_path: Path, width: int, largest: int
) -> None:
    file = tmp_path / "tokens.bin"
    ids = np.linspace(0, largest, 45).astype(f"<u{width}")
    ids.tofile(file)
    bundle = open_dataset(config(file, token_bytes=width, eval_fraction=0), 0)
    assert open_corpus(config(file, token_bytes=width)).tokens_file == str(file)
    assert bundle.vocab_size == largest + 1
    assert len(bundle.train) == 5
    rows = [bundle.train[index]["tokens"] for index in range(5)]
    assert {row.dtype for row in rows} == {torch.int64}
    assert torch.cat(rows).tolist() == ids.tolist()


def test_several_token_files_become_one_row(config: Any, tmp_path: Path) -> None:
    for number in range(3):
        np.arange(number * 10, number * 10 + 10, dtype="<u2").tofile(tmp_path / f"{number}.bin")
    corpus = open_corpus(config(tmp_path / "*.bin"))
    assert np.fromfile(corpus.tokens_file, corpus.dtype).tolist() == list(range(30))


def test_a_remote_url(config: Any) -> None:
    fsspec.filesystem("memory").pipe("/corpus/a.txt", DOCUMENTS[0].encode())
    assert decoded(config("memory://corpus/a.txt")) == DOCUMENTS[:1]
    assert decoded(config("memory://corpus")) == DOCUMENTS[:1]


def test_pythons_own_library(config: Any) -> None:
    bundle = open_dataset(config("stdlib:", max_tokens=5000), 0)
    assert bundle.vocab_size == 300
    assert len(bundle.train) + len(bundle.evaluation or ()) == 5000 // 9


def test_a_given_tokenizer_is_used(config: Any, tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts")
    trained = open_corpus(config(folder))
    file = tmp_path / "tokenizer.json"
    file.write_bytes((Path(trained.tokens_file).parent / "tokenizer.json").read_bytes())
    given = open_corpus(config(folder, tokenizer=str(file), vocab_size=1000))
    assert given.fingerprint == trained.fingerprint
    assert given.vocab_size == trained.vocab_size
    assert given.tokens_file != trained.tokens_file


def test_documents_are_never_joined_without_a_separator(config: Any, tmp_path: Path) -> None:
    """Many a tokenizer ends documents by a token of a name of its own."""
    folder = write_texts(tmp_path / "texts")
    trained = open_corpus(config(folder))
    text = (Path(trained.tokens_file).parent / "tokenizer.json").read_text()
    file = tmp_path / "tokenizer.json"
    file.write_text(text.replace(corpus_module.EOS, "<the end>"))
    with pytest.raises(DataError, match=r"^data.end_token: the tokenizer has no <eos> or "):
        open_corpus(config(folder, tokenizer=str(file)))
    with pytest.raises(DataError, match=r"^data.end_token: the tokenizer has no <end>: "):
        open_corpus(config(folder, tokenizer=str(file), end_token="<end>"))
    for end in ("<the end>", 0):
        named = open_corpus(config(folder, tokenizer=str(file), end_token=end))
        assert named.fingerprint == trained.fingerprint


# ------------------------------------------------------------------------------- the samples


def test_held_out_samples_are_the_last_and_nobody_elses(config: Any, tmp_path: Path) -> None:
    np.arange(20 * 9 + 5, dtype="<u2").tofile(tmp_path / "t.bin")
    bundle = open_dataset(config(tmp_path / "t.bin", eval_fraction=0.25), 0)
    assert bundle.evaluation is not None
    assert (len(bundle.train), len(bundle.evaluation)) == (15, 5)
    seen = [
        id_
        for part in (bundle.train, bundle.evaluation)
        for index in range(len(part))
        for id_ in part[index]["tokens"].tolist()
    ]
    assert seen == list(range(20 * 9))


def test_samples_collate_and_end(config: Any, tmp_path: Path) -> None:
    np.arange(90, dtype="<u2").tofile(tmp_path / "t.bin")
    train = open_dataset(config(tmp_path / "t.bin", eval_fraction=0), 0).train
    assert isinstance(train, Dataset)
    assert train.collate([train[0], train[9]])["tokens"].shape == (2, 9)
    with pytest.raises(IndexError, match="sample 10 of a dataset of 10"):
        train[10]
    assert list(range(10)) == [int(sample["tokens"][0]) // 9 for sample in train]


def test_a_dataset_pickles_without_its_data(config: Any, tmp_path: Path) -> None:
    np.arange(50_000, dtype="<u2").tofile(tmp_path / "t.bin")
    train = open_dataset(config(tmp_path / "t.bin"), 0).train
    pickled = pickle.dumps(train)
    assert len(pickled) < 2000
    assert torch.equal(pickle.loads(pickled)[3]["tokens"], train[3]["tokens"])


# --------------------------------------------------------------------------------- the cache


def modified_ns(config: DataConfig) -> int:
    return Path(open_corpus(config).tokens_file).stat().st_mtime_ns


def test_the_cache_is_used_until_data_or_settings_change(config: Any, tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts")
    first = modified_ns(config(folder))
    assert modified_ns(config(folder)) == first
    assert modified_ns(config(folder, sequence_length=16)) == first  # a view, not the tokens
    assert modified_ns(config(folder, vocab_size=280)) != first
    (folder / "00.txt").write_text("changed " * 40)
    assert modified_ns(config(folder)) != first


def test_tokens_are_the_same_wherever_they_are_made(config: Any, tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts")
    first = open_corpus(config(folder))
    second = open_corpus(config(folder, cache_dir=str(tmp_path / "other")))
    assert first.tokens_file != second.tokens_file
    assert first.fingerprint == second.fingerprint


def test_a_damaged_or_abandoned_entry_is_made_again(config: Any, tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts")
    whole = open_corpus(config(folder))
    entry = Path(whole.tokens_file).parent
    os.truncate(whole.tokens_file, 10)
    abandoned = entry.with_suffix(".partial")
    abandoned.mkdir()
    (abandoned / "tokens.bin").write_text("half")
    assert open_corpus(config(folder)) == whole
    assert not abandoned.exists()
    (entry / "corpus.json").write_text("{half")
    assert open_corpus(config(folder)) == whole


def test_a_failed_attempt_leaves_nothing(config: Any, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "fine"}\nnot json')
    with pytest.raises(DataError):
        open_corpus(config(file))
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_waiting_for_the_lock_has_a_deadline(config: Any, tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts")
    lock = Path(open_corpus(config(folder)).tokens_file).parent.with_suffix(".lock")
    os.truncate(open_corpus(config(folder)).tokens_file, 10)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=r"another process has held .*\.lock for 0.1 s"):
            open_corpus(config(folder), lock_wait_s=0.1)


def open_and_tell(config: DataConfig, log: str, start: Any, results: Any) -> None:
    """Opens the corpus at the same time as the others; logs when it really tokenises."""
    build = corpus_module._build

    def logged(*arguments: Any) -> Any:
        with open(log, "a") as file:  # noqa: PTH123
            file.write(f"{os.getpid()}\n")
        return build(*arguments)

    corpus_module._build = logged
    start.wait(DEADLINE_S)
    results.put(open_corpus(config))


def test_processes_that_start_together_tokenise_once(config: Any, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    log, start, results = tmp_path / "log", context.Barrier(PROCESSES), context.Queue()
    arguments = (config(write_texts(tmp_path / "texts")), str(log), start, results)
    processes = [
        context.Process(target=open_and_tell, args=arguments, daemon=True) for _ in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=DEADLINE_S) for _ in processes]
    for process in processes:
        process.join(DEADLINE_S)
    assert [process.exitcode for process in processes] == [0] * PROCESSES
    assert len(set(found)) == 1
    assert len(log.read_text().split()) == 1


# ------------------------------------------------------------------------------------- preflight


def job(tmp_path: Path, **model: Any) -> Any:
    data = {"url": str(write_texts(tmp_path / "texts")), "cache_dir": str(tmp_path / "cache")}
    sizes = {"vocab_size": 300, "sequence_length": 8}
    return parse_job({"name": "j", "steps": 1, "model": model, "data": data | sizes})


def test_preflight_tells_what_will_be_trained(tmp_path: Path) -> None:
    found = check_model_and_data(job(tmp_path, preset="decoder-7b"))
    assert found.tensors["model.embedding.weight"] == ("float32", (300, 4096))
    assert len(found.tensors) == 3 + 32 * 9
    assert found.parameters == sum(prod(shape) for _, shape in found.tensors.values())


def test_preflight_makes_a_users_model_once(tmp_path: Path) -> None:
    """It may take a while, however little memory. It was made for its table, and once more."""
    MADE.clear()
    check_model_and_data(job(tmp_path, path=f"{__name__}:make_model"))
    assert len(MADE) == 1


MADE: list[str] = []


def make_model() -> torch.nn.Module:
    MADE.append("a model")
    return torch.nn.Linear(2, 2)


def test_preflight_refuses_a_bad_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.preset"):
        check_model_and_data(job(tmp_path, preset="decoder"))
