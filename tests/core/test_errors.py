"""No message of ours tells the secrets of a URL, or more than a reader can use."""

import errno
import os
import pickle
import time

import pytest

from elastic_ft.errors import LOOKED_AT, DataError, StateDamaged, one_line, printable, redacted
from elastic_ft.storage.backends import explain
from elastic_ft.storage.kinds import FailureKind
from elastic_ft.storage.store import StorageError, StoreError, open_store


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("ftp://trainer:S3cr3t@host/ck: gone", "ftp://***@host/ck: gone"),
        ("cannot read http://h/x?sig=TOKEN&e=1 twice", "cannot read http://h/x?*** twice"),
        ("'https://u:p@h:8080/x?sig=T/manifests'", "'https://***@h:8080/x?***'"),
        (
            "s3://bucket/part-?.txt and s3://bucket/a@b:c",
            "s3://bucket/part-?.txt and s3://bucket/a@b:c",
        ),
        ("ftp://trainer@host/x", "ftp://trainer@host/x"),
        ("redis://:S3cr3t@host/x", "redis://***@host/x"),
        ("s3://bucket/what?/a?sig=T", "s3://bucket/what?/a?***"),
        ("s3://bucket/year-?/month=1", "s3://bucket/year-?/month=1"),
    ],
)
def test_secrets_of_urls_are_left_out(said: str, shown: str) -> None:
    assert redacted(said) == shown
    assert str(DataError(said)) == shown
    damaged = pickle.loads(pickle.dumps(StateDamaged(said, "holder", "s0", "url")))
    assert (str(damaged), damaged.holder, damaged.shard) == (shown, "holder", "s0")
    assert damaged.missing == "url"
    assert str(pickle.loads(pickle.dumps(StoreError(said, FailureKind.MISSING)))) == shown


def test_what_a_store_says_is_a_sentence() -> None:
    """A full disk was told as 'StoreError: cannot write ...: OSError: [Errno 28] No space ...'."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    kind, why = explain(full)
    assert (kind, why) == (FailureKind.FAILED, "No space left on device")
    assert one_line(StoreError(f"cannot write x: {why}", kind)) == f"cannot write x: {why}"
    assert one_line(full).startswith("OSError: ")


@pytest.mark.parametrize("url", ["s3://KEY:S3cr3t@bucket/ck", "http://h/ck?sig=S3cr3t"])
def test_a_url_with_a_secret_is_no_place_for_a_run(url: str) -> None:
    with pytest.raises(StorageError, match="a URL with a password or a token") as refused:
        open_store(url)
    assert "S3cr3t" not in str(refused.value)


def test_of_gloos_words_is_left_what_happened() -> None:
    where = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537]"
    why = "This is typically caused by a remote worker hanging or bugs in the application. GLHF!"
    error = RuntimeError(f"{where} Read error [127.0.0.1]:5394: Connection reset by peer. {why}")
    assert one_line(error) == "RuntimeError: Read error [127.0.0.1]:5394: Connection reset by peer"


def test_of_what_an_error_says_nothing_is_left_that_a_terminal_would_obey() -> None:
    """Why a job failed is in the table of everybody who shares its cluster."""
    error = ValueError(
        "\x1b[1;31mbad\x1b[0m\x1b]0;title\x07 shape\n\u202e3 x\u2028 4 \N{GRINNING FACE}"
    )
    assert one_line(error) == "ValueError: bad?]0;title? shape ?3 x 4 \N{GRINNING FACE}"


@pytest.mark.parametrize("between", ["\N{ZERO WIDTH SPACE}", "\0", "\x1b[0m", "\u202e"])
def test_what_no_terminal_shows_hides_no_secret(between: str) -> None:
    """It was made a "?" first, and what followed was taken for none of the URL's query."""
    for url in ("s3://me:S3cr3t@host/a: gone", "s3://b/a?X-Sig=S3cr3t"):
        for at in range(url.index("S3cr3t") + 6):
            said = ValueError(f"can't read {url[:at]}{between}{url[at:]}")
            assert "S3cr3t" not in one_line(said) and "S3cr3t" not in printable(said)


def test_a_secret_at_the_end_of_what_is_looked_at_is_left_out() -> None:
    """Of a text of 10 MB that is not much: it took 0.7 s."""
    for length in range(LOOKED_AT - 40, LOOKED_AT):
        said = "\0" * length + "s3://me:S3cr3t@host/a?X-Sig=S3cr3t"
        assert "S3cr3t" not in one_line(ValueError(said), 2 * LOOKED_AT)
    assert one_line(ValueError("x" * 2 * LOOKED_AT)) == f"ValueError: {'x' * 300}..."
    began_s = time.process_time()
    assert len(one_line(ValueError("\0 s3://a" * 2_000_000))) < 400
    assert time.process_time() - began_s < 0.3
