"""What someone outside asks of a running job: how many workers, in a file of its run folder.

The newest request stands until the job has ended: a controller that follows another obeys it,
too. Whoever may write the run folder may ask.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass
from typing import Any

import fsspec

from elastic_ft.errors import ConfigError
from elastic_ft.observe.watch import local_path

NAME = "resize.json"


@dataclass(frozen=True, slots=True)
class Resize:
    """``request``: names it, in the journal too."""

    workers: int
    request: str


def ask(run_url: str, workers: int) -> Resize:
    """Writes the request whole or not at all. Raises ConfigError if the folder can't be written."""
    resize = Resize(workers, uuid.uuid4().hex[:12])
    content = json.dumps(asdict(resize)).encode()
    folder = local_path(run_url)
    try:
        if folder is not None:
            swap = folder / f"{NAME}.{resize.request}"
            swap.write_bytes(content)
            swap.replace(folder / NAME)
        else:
            fs, path = fsspec.core.url_to_fs(f"{run_url.rstrip('/')}/{NAME}")
            fs.pipe_file(path, content)
    except Exception as error:  # any filesystem may raise anything
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(f"{run_url}: the request cannot be written: {reason}") from None
    return resize


def parse(content: bytes) -> Resize:
    """Raises ValueError."""
    found: Any = json.loads(content)
    if not isinstance(found, dict) or not isinstance(found.get("workers"), int):
        raise ValueError(f"{NAME}: expected workers, a number; found {content[:80]!r}")
    return Resize(found["workers"], str(found.get("request", "")))
