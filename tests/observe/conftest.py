"""Prometheus and its tools are Debian packages: required where CI says so, else skipped.

One run that loses workers is there for all.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.multiproc.harness import Run
    from tests.observe.disturbed import Lifetimes

REQUIRED = "ELASTIC_FT_REQUIRE_PROMETHEUS"  # set by .ci/run, which installs them


def tool(name: str) -> str:
    """The path of a program. Skips the test where it is not installed, or fails in CI."""
    path = shutil.which(name)
    if path is None:
        reason = f"{name} is not installed: apt-get install prometheus prometheus-alertmanager"
        if os.environ.get(REQUIRED):
            pytest.fail(reason)
        pytest.skip(reason)
    return path


@pytest.fixture(scope="session")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Lifetimes]:
    from tests.observe.disturbed import disturbed_run

    return disturbed_run(tmp_path_factory.mktemp("disturbed") / "run")
