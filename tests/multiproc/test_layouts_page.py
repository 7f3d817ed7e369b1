"""Every job file in README and docs that says how to train: it trains a small model."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic_ft.config import Job, parse_job
from tests.multiproc.harness import make_job
from tests.multiproc.layouts import COMMON, MIXTURE, MODEL, train_from_the_start
from tests.multiproc.pool import Pool

Train = Callable[[Job, int], list[Any]]
ROOT = Path(__file__).parents[2]
OF_LAYOUTS = ("model", "parallel", "precision", "comm", "optimizer")
# One page for each technique, and each has a job file of it.
TECHNIQUES = ("layouts", "experts", "compression", "optimizers", "long-sequences", "training")
# At most: of a small model.
SCALED = {"tp": 2, "pp": 2, "cp": 2, "ep": 2, "shard_size": 2}
SMALL = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6}
SMALL |= {"num_key_value_heads": 2, "intermediate_size": 36, "sliding_window": 5}
BATCH = {"batch": {"global_batch_size": 8, "micro_batch_size": 2}}
SHALLOW = {**MODEL, "kwargs": MODEL["kwargs"] | {"n_layers": 2}}
ROUND = {**MODEL, "kwargs": MODEL["kwargs"] | {"dim": 32, "n_heads": 2, "n_kv_heads": 1}}
# What takes a compiler's minute, or a folder of weights: where the same job trains.
ELSEWHERE = {"compile": "test_compiling.py", "pretrained": "test_lora_job.py"}
pytestmark = pytest.mark.timeout(300)


def sections_of(page: Path) -> list[Any]:
    blocks = re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
    found = [yaml.safe_load(text) for text in blocks]
    return [given for given in found if isinstance(given, dict) and given.keys() & {*OF_LAYOUTS}]


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SECTIONS = [
    pytest.param(sections, id=f"{page.stem} {number}")
    for page in PAGES
    for number, sections in enumerate(sections_of(page))
]


@pytest.fixture(scope="module")
def train() -> Iterator[Train]:
    """What each rank finds; jobs that are the same once they are small are run once."""
    found: dict[str, list[Any]] = {}
    with Pool(4) as pool:

        def run(job: Job, world: int) -> list[Any]:
            key = f"{world} {job.model_dump_json()}"
            if key not in found:
                found[key] = pool(train_from_the_start, job, 2, world=world)
            return found[key]

        yield run


@pytest.mark.parametrize("page", TECHNIQUES)
def test_a_page_of_techniques_has_job_files(page: str) -> None:
    assert sections_of(ROOT / "docs" / f"{page}.md")


@pytest.mark.parametrize("sections", SECTIONS)
def test_it_is_a_job(sections: dict[str, Any]) -> None:
    values = {"name": "page", "steps": 1, "model": {"preset": "decoder-7b"}}
    parse_job(values | {"data": {"url": "stdlib:"}} | sections)


@pytest.mark.parametrize("sections", SECTIONS)
def test_it_trains(train: Train, sections: dict[str, Any]) -> None:
    """On four ranks at most: two that read data, if the others leave room for them."""
    if elsewhere := trained_elsewhere(sections):
        pytest.skip(f"trains in {elsewhere}")
    parallel = scaled(sections.get("parallel", {}))
    of_one = parallel.get("shard_size", 1)
    of_one *= math.prod(parallel.get(name, 1) for name in ("tp", "pp", "cp"))
    given = {key: sections[key] for key in OF_LAYOUTS if key in sections}
    given |= {"parallel": parallel, "model": small(sections)}
    results = train(make_job(workers=1, **(COMMON | BATCH | given)), min(4, 2 * of_one))
    assert all(losses == results[0][1] for _, losses in results)
    assert results[0][1][1]["loss"] < 1.02 * results[0][1][0]["loss"]


def trained_elsewhere(sections: dict[str, Any]) -> str | None:
    for key, test in ELSEWHERE.items():
        if any(key in sections.get(section, {}) for section in ("parallel", "model")):
            assert f'"{key}"' in (ROOT / "tests/multiproc" / test).read_text()
            return test
    return None


def scaled(parallel: dict[str, Any]) -> dict[str, Any]:
    if parallel.get("strategy") == "auto":
        return {"strategy": "fsdp"}  # what the planner picks is tests/core's
    given = {k: min(v, most) for k, most in SCALED.items() if (v := parallel.get(k))}
    return parallel | given


def small(sections: dict[str, Any]) -> dict[str, Any]:
    """The job's kind of model."""
    model = sections.get("model", {})
    if config := model.get("transformers"):
        less = {key: min(config[key], SMALL[key]) for key in SMALL if key in config}
        if "schedule" in sections.get("parallel", {}):  # which may want two stages of a rank
            less["num_hidden_layers"] = config["num_hidden_layers"]
        return {"transformers": config | less}
    if str(model.get("preset")).startswith("decoder-moe"):
        return MIXTURE
    if "fp8" in sections.get("precision", {}):  # which takes multiples of 16
        return ROUND
    if "path" in model:
        return model
    return MODEL if "schedule" in sections.get("parallel", {}) else SHALLOW
