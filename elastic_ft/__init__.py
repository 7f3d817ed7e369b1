"""Fault-tolerant, elastic training on Ray: a lost node costs a pause, not the job.

Names are imported when they are first used, so that ``import elastic_ft.core`` needs neither
torch nor ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_ft.config import Job as Job
    from elastic_ft.config import load_job as load_job
    from elastic_ft.config import parse_job as parse_job
    from elastic_ft.errors import ElasticError as ElasticError
    from elastic_ft.errors import JobFailed as JobFailed
    from elastic_ft.errors import UsageError as UsageError
    from elastic_ft.hosts.local import run_local as run_local
    from elastic_ft.hosts.ray.trainer import ElasticTrainer as ElasticTrainer
    from elastic_ft.service.service_client import Client as Client
    from elastic_ft.state.torch_checkpoints import CheckpointReader as CheckpointReader
    from elastic_ft.training.context import Context as Context
    from elastic_ft.training.context import init as init
    from elastic_ft.worker.step import Step as Step
    from elastic_ft.worker.this_process import train as train

__version__ = "0.1.0"

_HOMES = {
    "Client": "elastic_ft.service.service_client",
    "CheckpointReader": "elastic_ft.state.torch_checkpoints",
    "Context": "elastic_ft.training.context",
    "ElasticError": "elastic_ft.errors",
    "ElasticTrainer": "elastic_ft.hosts.ray.trainer",
    "Job": "elastic_ft.config",
    "JobFailed": "elastic_ft.errors",
    "Step": "elastic_ft.worker.step",
    "UsageError": "elastic_ft.errors",
    "init": "elastic_ft.training.context",
    "load_job": "elastic_ft.config",
    "parse_job": "elastic_ft.config",
    "run_local": "elastic_ft.hosts.local",
    "train": "elastic_ft.worker.this_process",
}

__all__ = [
    "CheckpointReader",
    "Client",
    "Context",
    "ElasticError",
    "ElasticTrainer",
    "Job",
    "JobFailed",
    "Step",
    "UsageError",
    "init",
    "load_job",
    "parse_job",
    "run_local",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
