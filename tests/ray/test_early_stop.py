"""A request to stop that comes before the controller is there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry
from ray.train import RunConfig
from trial import job

from elastic_ft.hosts.ray.controller_thread import ControllerThread
from elastic_ft.hosts.ray.trainer import ElasticTrainer


class Asked:
    """Stands for a controller's actor, and for the controller in it."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.stop: Any = SimpleNamespace(remote=self.reasons.append)


def test_the_trainer_passes_it_on_once_there_is_a_controller(tmp_path: Path) -> None:
    config = RunConfig(name="early", storage_path=str(tmp_path))
    trainer, first, second = ElasticTrainer(job("early"), run_config=config), Asked(), Asked()
    trainer.stop("once")
    trainer._controller = first
    trainer._pass_on()
    trainer.stop("twice")
    assert first.reasons == ["once", "twice"]
    trainer._controller = second
    trainer._pass_on()
    assert second.reasons == []


def test_the_actor_passes_it_on_once_there_is_a_controller() -> None:
    """It was swallowed: the job trained on."""
    inbox: list[str] = []

    def make() -> Any:
        thread.stop("meanwhile")
        return SimpleNamespace(
            stop=inbox.append,
            metrics=SimpleNamespace(registry=CollectorRegistry()),
            run=lambda: {"asked": list(inbox)},
        )

    thread = ControllerThread(make)
    thread.stop("before")
    thread.run()
    assert thread.error is None
    assert thread.result == {"asked": ["before", "meanwhile"]}
