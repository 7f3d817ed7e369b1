"""Traces: what is read, generated, scaled and compressed."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from chaos.trace import (
    GENERATED,
    TraceChange,
    compressed,
    load_trace,
    read_csv,
    scaled,
    scenario_of,
)
from elastic_ft.errors import ConfigError


def test_a_trace_becomes_a_curve(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("0,add,a\n0,add,b\n1000,add,c\n1000,add,d\n2000,remove,a\n2000,remove,b\n")
    assert read_csv(path) == (TraceChange(0, 2), TraceChange(1, 4), TraceChange(2, 2))
    assert scaled(read_csv(path), 8) == (TraceChange(0, 4), TraceChange(1, 8), TraceChange(2, 4))
    assert compressed(read_csv(path), 60) == (TraceChange(0, 4), TraceChange(60, 2))


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("0,add,a\n5,jump,b\n")
    with pytest.raises(ConfigError, match=r"trace.csv:2: expected .* found 5,jump,b"):
        read_csv(path)


@pytest.mark.parametrize("name", ["bamboo-aws-p3", *GENERATED])
@pytest.mark.parametrize("workers", [4, 8])
def test_every_trace_becomes_a_scenario(name: str, workers: int) -> None:
    changes = compressed(load_trace(name, workers, seed=1), 300)
    assert changes[0] == TraceChange(0, workers)
    assert changes[-1].at_s == 300
    assert all(2 <= change.nodes <= workers for change in changes)
    assert any(b.nodes < a.nodes for a, b in itertools.pairwise(changes))
    assert len(scenario_of(changes, workers, 300, 0).faults) == len(changes) - 1
    assert load_trace(name, workers, seed=1) == load_trace(name, workers, seed=1)
