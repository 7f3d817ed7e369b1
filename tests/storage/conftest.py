"""A real S3 server for the whole session, and one kind of store after another."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:  # plain `pytest`, where `python -m pytest` would have it
    sys.path.insert(0, str(ROOT))

from chaos.s3_server import S3Server, s3_server  # noqa: E402


@pytest.fixture(scope="session")
def s3_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def s3(s3_session: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, with this process's environment set up for it."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name, value in s3_session.env.items():
        monkeypatch.setenv(name, value)
    return s3_session


@pytest.fixture(params=["local", "file", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh URL of each kind."""
    if request.param == "s3":
        return str(request.getfixturevalue("s3").url(f"t/{uuid4().hex}"))
    return {
        "local": f"{tmp_path}/store",
        "file": f"file://{tmp_path}/store",
        "memory": f"memory://t/{uuid4().hex}",
    }[request.param]
