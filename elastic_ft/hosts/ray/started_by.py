"""What Ray starts for a run's processes: Python, or what has them forked (``warm_nodes``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_ft.controller.host import WORKER_ENVIRONMENT
from elastic_ft.hosts.ray.ray_private import RunConfig

KEY = "py_executable"  # of a runtime environment


def executable_of(run_config: RunConfig) -> str:
    """Of all processes of the run; "": Python."""
    return str((run_config.worker_runtime_env or {}).get(KEY, ""))


def environment_by(executable: str, variables: Mapping[str, str]) -> dict[str, Any]:
    """The runtime environment of an actor of ``variables``. A forked process has read the
    environment of the one that it is forked from: it is a worker's."""
    if not executable:
        return {"env_vars": dict(variables)} if variables else {}
    return {KEY: executable, "env_vars": WORKER_ENVIRONMENT | variables}
