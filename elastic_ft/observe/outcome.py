"""How a run ended, from its folder: what a start asks before it starts anything."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from elastic_ft.errors import ConfigError


def complete(result: dict[str, Any], steps: int) -> str:
    """That a job of ``steps`` steps has been run to its end, in words; empty if it has not."""
    if result.get("status") != "completed" or result.get("steps") != steps:
        return ""
    ended_s = result.get("ended_at_s")
    when = ""
    if isinstance(ended_s, int | float):
        when = f", result of {datetime.fromtimestamp(ended_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
    return f"is complete: {steps} steps{when}"


def check_resume_point(steps: int, resumes_at: int, url: str) -> None:
    """Raises ConfigError where the newest checkpoint is of a later step than the job's last."""
    if resumes_at > steps:
        raise ConfigError(
            f"steps: {steps} is below step {resumes_at}, from which this run would go on ({url}): "
            f"expected at least {resumes_at}, or another run folder and checkpoint.url"
        )
