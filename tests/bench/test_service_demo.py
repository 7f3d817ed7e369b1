"""`make service-demo` begins; the rest of it takes a cluster."""

from __future__ import annotations

from pathlib import Path

from benchmarks.service_demo import Demo


def test_it_asks_nobody_before_the_service_is_there(tmp_path: Path) -> None:
    assert Demo(tmp_path).client.url
