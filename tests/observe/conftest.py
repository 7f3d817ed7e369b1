"""Prometheus and its tools are Debian packages: required where CI says so, else skipped."""

from __future__ import annotations

import os
import shutil

import pytest

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
