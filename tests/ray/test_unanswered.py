"""Calls of a controller that are not answered: its own first one, and its driver's for the end."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.train import RunConfig

from elastic_ft.hosts.ray import trainer as trainers
from elastic_ft.hosts.ray.cluster import LocalCluster
from elastic_ft.hosts.ray.lives import call_until
from elastic_ft.hosts.ray.trainer import ElasticTrainer
from elastic_ft.hosts.ray.trainer_parts import JobFailedError
from tests.multiproc.harness import make_job

WAIT_S = 60.0


class Reborn:
    """An actor that lives again: its first call is kept back by Ray, as if it did not."""

    def __init__(self) -> None:
        self.calls = 0

    async def begin(self) -> None:
        self.calls += 1
        if self.calls == 1:
            await asyncio.sleep(WAIT_S)

    async def has_begun(self) -> bool:
        return self.calls > 1


def test_a_call_that_is_kept_back_is_overtaken(cluster: LocalCluster) -> None:
    """A warm standby was in charge 2.3 s after a controller's death, not 0.3 s: its process called
    itself in the moment in which it had not been told that it lives, and waited for an answer."""
    actor = ray.remote(num_cpus=0)(Reborn).remote()
    ray.get(actor.has_begun.remote())  # it is up
    begun_s = time.monotonic()
    call_until(lambda: ray.get(actor.has_begun.remote()), actor.begin.remote)
    assert time.monotonic() - begun_s < 2.0
    ray.kill(actor)


class Standing:
    """A controller, as far as its driver sees: it answers nothing any more."""

    async def await_result(self) -> None:
        await asyncio.Event().wait()


@pytest.fixture
def driver(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ElasticTrainer]:
    monkeypatch.setattr(trainers, "LOOK_S", 0.1, raising=False)
    monkeypatch.setattr(trainers, "UNANSWERED_S", 0.3, raising=False)
    config = RunConfig(name="run", storage_path=str(tmp_path))
    made = ElasticTrainer(make_job(steps=3, workers=1), run_config=config)
    made._controller = ray.remote(num_cpus=0)(Standing).remote()
    yield made
    ray.kill(made._controller)


def write_result(driver: ElasticTrainer, status: str, ended_at_s: float) -> None:
    path = Path(driver.run_url) / "result.json"
    path.parent.mkdir(exist_ok=True)
    result = {"status": status, "reason": "for a test", "steps": 3, "ended_at_s": ended_at_s}
    path.write_text(json.dumps(result))


def asked(driver: ElasticTrainer) -> tuple[threading.Thread, list[Any]]:
    found = list[Any]()

    def ask() -> None:
        try:
            found.append(driver._ask_for_result())
        except JobFailedError as error:
            found.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    return asking, found


@pytest.mark.parametrize("status", ["completed", "failed"])
def test_the_run_folder_says_how_a_job_has_ended(driver: ElasticTrainer, status: str) -> None:
    """Nobody ends a controller that stands still once its keepers are released: its driver waited
    for it for ever."""
    write_result(driver, "stopped", 1.0)  # an earlier start's
    driver._earlier = trainers.RunReader(driver.run_url).result()
    asking, found = asked(driver)
    asking.join(2.0)
    assert asking.is_alive(), "of an earlier start it says nothing"
    write_result(driver, status, 2.0)
    asking.join(WAIT_S)
    (end,) = found
    assert end.status == "completed" if status == "completed" else "for a test" in str(end)
