"""docs/layouts.md, experts.md, compression.md, optimizers.md: their jobs train a small model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic_ft.config import parse_job
from tests.multiproc.harness import make_job
from tests.multiproc.layouts import COMMON, MIXTURE, train_from_the_start
from tests.multiproc.pool import Pool

DOCS = Path(__file__).parents[2] / "docs"
SECTIONS: list[dict[str, Any]] = [
    yaml.safe_load(text)
    for page in ("layouts.md", "experts.md", "compression.md", "optimizers.md")
    for text in re.findall(r"```yaml\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
]
# At most: a small model, eight processes.
SCALED = {"tp": 2, "pp": 2, "cp": 2, "ep": 2, "shard_size": 2}
OF_LAYOUTS = ("model", "parallel", "precision", "comm", "optimizer")
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(8) as pool:
        yield pool


def test_the_pages_have_job_files() -> None:
    assert len(SECTIONS) >= 21


def named(sections: dict[str, Any]) -> str:
    return str(sections["parallel"]) + str(sections.get("optimizer", ""))


@pytest.mark.parametrize("sections", SECTIONS, ids=named)
def test_it_is_a_job(sections: dict[str, Any]) -> None:
    values = {"name": "page", "steps": 1, "model": {"preset": "decoder-7b"}}
    parse_job(values | {"data": {"url": "stdlib:"}} | sections)


@pytest.mark.parametrize("sections", SECTIONS, ids=named)
def test_it_trains(pool: Pool, sections: dict[str, Any]) -> None:
    given = sections["parallel"]
    parallel = given | {k: min(v, most) for k, most in SCALED.items() if (v := given.get(k))}
    if sections["parallel"].get("strategy") == "auto":
        parallel = {"strategy": "fsdp"}  # what the planner picks is tests/core's
    data_ranks = 2 * parallel.get("shard_size", 1)
    world = data_ranks * math.prod(parallel.get(name, 1) for name in ("tp", "pp", "cp"))
    given = {key: section for key, section in sections.items() if key in OF_LAYOUTS}
    if str(given.get("model", {}).get("preset")).startswith("decoder-moe"):
        given["model"] = MIXTURE
    job = make_job(workers=1, **(COMMON | given | {"parallel": parallel}))
    results = pool(train_from_the_start, job, 2, world=world)
    assert all(losses == results[0][1] for _, losses in results)
    assert results[0][1][1]["loss"] < 1.02 * results[0][1][0]["loss"]
