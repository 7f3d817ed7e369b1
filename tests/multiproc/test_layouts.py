"""Every layout trains as one process does.

The losses and gradient norms of one process are data, golden/layouts.json;
``python -m tests.multiproc.test_layouts`` makes them. One set of processes runs all layouts: in CI
those that no other test compares with one process, in the soak every one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.groups.waits import SecondsByKind
from tests.multiproc.harness import make_job
from tests.multiproc.layouts import (
    COMMON,
    LAYOUTS,
    STEPS,
    VARIANTS,
    job_of,
    timed_from_the_start,
    train_from_the_start,
    variant_of,
)
from tests.multiproc.pool import Pool
from tests.multiproc.test_moves import CHAINS

GOLDEN = Path(__file__).parent / "golden" / "layouts.json"
TOLERANCE = 1e-5  # relative
TRAINED = 3  # of the golden steps; test_moves goes on with most of these layouts to step 80
pytestmark = pytest.mark.timeout(600)  # the first test's includes all the training
# What test_moves trains by golden losses of one process, to step 80.
IN_MOVES = {
    *("ddp1-tp2", "ddp1-tp3", "fsdp2-tp2", "pp3-ddp1 1f1b", "pp2-fsdp2 1f1b"),
    *("pp2-fsdp2 zero_bubble", "pp2-ddp1-tp2 1f1b", "ddp1-cp3", "ddp1-cp2-tp2"),
    *("fsdp3-ep3", "hsdp2x2-ep2", "ddp3 zero0", "fsdp3 zero1", "fsdp3 zero2"),
}
# What test_engines compares with one process, but for the last, of which each pair is here.
IN_ENGINES = {"pp2-ddp1 gpipe", "pp2-ddp1 interleaved1f1b", "pp2-ddp1 zero_bubble"}
IN_ENGINES |= {"pp2-ddp2-tp2 1f1b"}
HERE = [name for name in LAYOUTS if name not in IN_MOVES | IN_ENGINES]

Found = tuple[str, list[dict[str, float]], tuple[SecondsByKind, SecondsByKind]]
# What each rank waits for in Python, whatever else; DDP's own waits are in C++.
WAITED = {
    "ddp4": {"all_reduce"},
    "fsdp4": {"all_gather", "reduce_scatter"},
    "hsdp2x2": {"all_gather", "reduce_scatter", "all_reduce"},
    "ddp2-tp2": {"functional"},
    "pp2-ddp1 1f1b": {"send_recv"},
    "ddp1-cp2": {"all_gather", "reduce_scatter"},
    "fsdp4-ep2": {"all_gather", "reduce_scatter", "functional"},
    "fsdp3 zero3": {"all_gather"},
}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(max(world for _, world, _ in LAYOUTS.values())) as pool:
        yield pool


@pytest.fixture(scope="module")
def trained(pool: Pool) -> dict[str, list[Found] | Exception]:
    """By name, what every rank found."""
    found: dict[str, list[Found] | Exception] = {}
    for name in HERE:
        try:
            found[name] = pool(timed_from_the_start, job_of(name), TRAINED, world=LAYOUTS[name][1])
        except RuntimeError as error:
            found[name] = error
    return found


@pytest.mark.parametrize("name", HERE)
def test_trains_as_one_process_does(trained: dict[str, Any], name: str) -> None:
    if isinstance(trained[name], Exception):
        raise trained[name]
    assert_golden(name, trained[name], TRAINED)


def test_what_is_left_to_the_moves_is_there() -> None:
    """With the same schedule and stage of ZeRO, by whatever method ranks share positions."""
    moved = set[str]()
    for moves, options in CHAINS.values():
        parallel = options.get("parallel", {})
        stage = f" zero{parallel['zero_stage']}" if "zero_stage" in parallel else ""
        for layout in {layout for move in moves for layout in (move.before, move.after)}:
            schedule = f" {parallel.get('schedule', '1f1b')}" if "pp" in layout else ""
            moved.add(layout + schedule + stage)
    assert moved >= IN_MOVES


@pytest.mark.soak
@pytest.mark.parametrize("name", LAYOUTS)
def test_trains_all_golden_steps(pool: Pool, name: str) -> None:
    world = LAYOUTS[name][1]
    assert_golden(name, pool(timed_from_the_start, job_of(name), STEPS, world=world), STEPS)


def assert_golden(name: str, found: list[Found], steps: int) -> None:
    golden: dict[str, list[float]] = json.loads(GOLDEN.read_text())[variant_of(name)]
    for layout, trained, _ in found:
        assert layout == name.split()[0]
        for key, expected in golden.items():
            assert len(expected) == STEPS
            losses = [step[key] for step in trained]
            assert losses == pytest.approx(expected[:steps], rel=TOLERANCE, abs=0)


@pytest.mark.parametrize("name", WAITED)
def test_what_a_step_waits_for_is_timed(trained: dict[str, Any], name: str) -> None:
    """FSDP2 on Gloo waits for whatever it sends; DDP sends behind its backward."""
    if isinstance(trained[name], Exception):
        raise trained[name]
    for _, _, (exposed, hidden) in trained[name]:
        assert exposed.keys() >= WAITED[name], exposed
        assert min(exposed.values()) >= 0 and sum(exposed.values()) > 0
        is_ddp = name == "ddp4"
        assert hidden.keys() == ({"all_reduce"} if is_ddp else set())
        assert not is_ddp or hidden["all_reduce"] + exposed["all_reduce"] > 0


def make_golden() -> None:
    found = {}
    with Pool(1) as pool:
        for name, sections in VARIANTS.items():
            job = make_job("ddp", workers=1, **(COMMON | sections))
            ((_, steps),) = pool(train_from_the_start, job, STEPS, world=1)
            found[name] = {key: [step[key] for step in steps] for key in ("loss", "grad_norm")}
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    make_golden()
