"""One stage for all chaos runs of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chaos.trial import Stage


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with Stage(tmp_path_factory.mktemp("chaos")) as stage:
        yield stage
