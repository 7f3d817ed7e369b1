"""A job as somebody hands it in: what of it the service can keep and tell, as JSON. Pure."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from elastic_ft.config import Job, parse_job, parse_yaml
from elastic_ft.config.mistakes import SHOWN
from elastic_ft.config.section import COUNT_MAX
from elastic_ft.errors import ConfigError, printable

NO_TEXT = re.compile(r"[\0\ud800-\udfff]")  # in no file's name, no environment and no UTF-8
REQUEST_MAX = 100  # characters
JOB_BYTES_MAX = 1 << 18  # the service has all jobs that there ever were in its memory


def handed_in_job(asked: dict[str, Any]) -> Job:
    """Raises ConfigError, one line."""
    given = asked.get("job")
    if isinstance(given, str):
        given = parse_yaml(given.encode(errors="surrogatepass"), "job")
    if isinstance(given, dict) and asked.get("name") is not None:
        given = given | {"name": asked["name"]}
    job = parse_job(given)  # which bounds how deep it is
    check_values(given)
    if len(json.dumps(given, ensure_ascii=False).encode()) > JOB_BYTES_MAX:
        raise ConfigError(
            f"job: larger than {JOB_BYTES_MAX} bytes as JSON: name a file or a URL for what is long"
        )
    return job


def check_request(request: Any) -> str:
    """Raises ConfigError."""
    if (
        not isinstance(request, str)
        or not 1 <= len(request) <= REQUEST_MAX
        or NO_TEXT.search(request)
    ):
        raise ConfigError(f"request: expected a text of 1 to {REQUEST_MAX} characters")
    return request


def check_values(values: Any, where: str = "") -> None:
    """Raises ConfigError where JSON has no such value, or only some that read JSON do: the job
    would be another one. What is the user's own (``kwargs``, say) is looked at by nobody else."""
    if isinstance(values, dict):
        for key, value in values.items():
            inside = f"{where}.{printable(key, SHOWN)}" if where else printable(key, SHOWN)
            if not isinstance(key, str | int) or (isinstance(key, str) and NO_TEXT.search(key)):
                raise ConfigError(f"{inside}: this key can't be sent as JSON: expected text")
            check_values(value, inside)
    elif isinstance(values, list):
        for number, value in enumerate(values):
            check_values(value, f"{where}.{number}")
    elif why := _why_not(values):
        raise ConfigError(f"{where}: this can't be sent as JSON: {why}")


def _why_not(value: Any) -> str:
    """ "" where it can."""
    if value is None or isinstance(value, bool):
        return ""
    if isinstance(value, str):
        return "a text with characters that no text has" if NO_TEXT.search(value) else ""
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"the number {value}"
    if isinstance(value, int):
        return "" if abs(value) <= COUNT_MAX**2 else "a number of very many digits"
    return f"a {type(value).__name__}"
