"""Runs side by side on one cluster: who may end what."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorUnavailableError
from ray.train import RunConfig
from ray.util.placement_group import placement_group
from trial import job

from elastic_ft.errors import ConfigError
from elastic_ft.hosts.ray import names as names_module
from elastic_ft.hosts.ray import trainer as trainer_module
from elastic_ft.hosts.ray.cluster import LocalCluster, wait_for
from elastic_ft.hosts.ray.names import (
    NAMESPACE,
    RunNames,
    abandoned,
    actor_named,
    actors_of,
    clear_away,
    end_actor,
    groups_of,
    reap,
    unanswered,
)
from elastic_ft.hosts.ray.trainer import ElasticTrainer

pytestmark = pytest.mark.timeout(120)


class InCharge:
    """A process with a controller's name."""

    def pid(self) -> int:
        import os

        return os.getpid()

    process = pid


@pytest.fixture
def trainer(cluster: LocalCluster, tmp_path: Path) -> Iterator[ElasticTrainer]:
    """Of a run whose controller's name is taken."""
    config = RunConfig(name="turns", storage_path=str(tmp_path))
    trainer = ElasticTrainer(job("turns"), run_config=config)
    name = RunNames("turns", trainer.run_url).controller
    begin(name)
    yield trainer
    end_actor(name)


def begin(name: str) -> Any:
    return ray.get(begun(name).pid.remote())


def begun(name: str, **options: Any) -> Any:
    options |= {"num_cpus": 0, "name": name, "namespace": NAMESPACE, "lifetime": "detached"}
    return ray.remote(**options)(InCharge).remote()


def test_a_controller_that_no_node_is_left_for_can_be_cleared_away(cluster: LocalCluster) -> None:
    """Its run's workers held their resources for as long as the cluster lived."""
    names, led = RunNames("nowhere", "/run"), RunNames("led", "/run")
    begin(led.controller)
    begun(names.controller, label_selector={"nobody": "has-this"})
    begin(names.worker("w0"))
    try:
        assert abandoned() == {}
        assert unanswered(3.0) == [names.prefix]
        end_actor(names.controller)
        wait_for(lambda: list(abandoned()) == [names.prefix], 60, "nobody is in charge")
        assert clear_away(names.prefix, abandoned()[names.prefix])
        wait_for(lambda: not actors_of(names.prefix), 60, "the worker is gone")
    finally:
        end_actor(led.controller)
        reap(names.prefix)


class Restarting:
    """Answers of a controller that Ray is just restarting: at once, at first; of another, none."""

    def __init__(self, name: str, refusals: int) -> None:
        self.name, self.refusals, self.asked = name, refusals, 0
        self.process = SimpleNamespace(remote=self.ask)

    def ask(self) -> tuple[Restarting, int]:
        self.asked += 1
        return self, self.asked

    def get(self, number: int) -> tuple[str, int]:
        if number <= self.refusals:
            raise ActorUnavailableError("it is restarted", None)
        return "n1", 1


def test_a_controller_that_ray_restarts_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was taken for silent at once: its run was ended, and its workers with it."""
    soon, never = RunNames("soon", "/run"), RunNames("never", "/run")
    actors = {soon.controller: Restarting("soon", 2), never.controller: Restarting("never", 1000)}
    monkeypatch.setattr(names_module, "actors_of", lambda prefix: sorted(actors))
    monkeypatch.setattr(names_module, "actor_named", actors.get)
    monkeypatch.setattr(ray, "wait", lambda asked, **_: (asked, []))
    monkeypatch.setattr(ray, "get", lambda answer: answer[0].get(answer[1]))
    assert unanswered(1.5) == [never.prefix]
    assert actors[soon.controller].asked == 3


def test_a_run_on_another_disk_is_left_alone(
    trainer: ElasticTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two laptops, one cluster: the same path, the same job's name."""
    monkeypatch.setattr(trainer_module, "END_TIMEOUT_S", 1.0)
    with pytest.raises(ConfigError, match="its folder is not this machine's"):
        trainer.fit()
    actor: Any = actor_named(RunNames("turns", trainer.run_url).controller)
    assert ray.get(actor.pid.remote(), timeout=60) > 0


def hold(name: str) -> None:
    ray.get(placement_group([{"CPU": 0.1}], name=name, lifetime="detached").ready())


def test_what_begins_while_one_clears_away_is_left_alone(cluster: LocalCluster) -> None:
    names = RunNames("cleared", "/run")
    began, stale = [f"{names.prefix}place/{name}" for name in ("began", "stale")]
    hold(stale)
    begin(names.worker("w0"))
    left = abandoned()
    assert list(left) == [names.prefix]
    begin(names.controller)
    hold(began)
    try:
        assert abandoned() == {}
        assert not clear_away(names.prefix, left[names.prefix])
        assert len(actors_of(names.prefix)) == len(groups_of(names.prefix)) == 2
        end_actor(names.controller)
        wait_for(lambda: actor_named(names.controller) is None, 60, "the controller is gone")
        assert clear_away(names.prefix, left[names.prefix])
        wait_for(lambda: list(groups_of(names.prefix)) == [began], 60, "the other one is free")
        wait_for(lambda: not actors_of(names.prefix), 60, "the worker is gone")
    finally:
        reap(names.prefix)
