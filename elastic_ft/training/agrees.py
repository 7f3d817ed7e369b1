"""What a script says of a job that others have started."""

from __future__ import annotations

from typing import Any

from elastic_ft.config import Job, parse_job
from elastic_ft.errors import ConfigError


def check_agrees(job: Job, sections: dict[str, Any]) -> None:
    """Raises ConfigError where the script says other than the job."""
    if not sections:
        return
    said = parse_job({"name": job.name, "loop": {}} | sections)
    for key in said.model_fields_set & sections.keys():
        given, known = getattr(said, key), getattr(job, key)
        names = sorted(given.model_fields_set) if hasattr(given, "model_fields_set") else [None]
        for name in names:
            mine, its = (getattr(v, name) if name else v for v in (given, known))
            if mine != its:
                path = f"{key}.{name}" if name else key
                raise ConfigError(f"{path}: elastic_ft.init says {mine}, the job has {its}")
