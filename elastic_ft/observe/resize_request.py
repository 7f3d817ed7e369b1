"""What someone outside asks of a running job: how many workers, in a file of its run folder.

The newest request stands until the job has ended: a controller that follows another obeys it,
too. Whoever may write the run folder may ask.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass, field
from typing import Any

from elastic_ft.config.section import WORKERS_MAX
from elastic_ft.errors import ConfigError, StoreFailed

NAME = "resize.json"


@dataclass(frozen=True, slots=True)
class Resize:
    """Attributes:
    request: names it, in the journal too.
    places: by node, where so many of them may be; {}: anywhere.
    """

    workers: int
    request: str
    places: dict[str, int] = field(default_factory=dict)


def ask_to_resize(run_url: str, workers: int, places: dict[str, int] | None = None) -> Resize:
    """Writes the request whole or not at all. Raises ConfigError if the folder can't be written."""
    from elastic_ft.storage.store import open_store  # commands begin without it

    resize = Resize(workers, uuid.uuid4().hex[:12], places or {})
    content = json.dumps(asdict(resize)).encode()
    try:
        open_store(run_url).put(NAME, content)
    except StoreFailed as error:
        raise ConfigError(f"{run_url}: the request cannot be written: {error}") from None
    return resize


def parse(content: bytes) -> Resize:
    """Raises ValueError."""
    try:
        found: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{NAME}: not JSON: {' '.join(str(error).split())[:80]}") from None
    workers = found.get("workers") if isinstance(found, dict) else None
    if not isinstance(workers, int) or isinstance(workers, bool) or not 0 < workers <= WORKERS_MAX:
        raise ValueError(
            f"{NAME}: expected workers, a number from 1 to {WORKERS_MAX}; found {content[:80]!r}"
        )
    request = "".join(c for c in str(found.get("request", ""))[:40] if c.isprintable())
    places = found.get("places") or {}
    if not isinstance(places, dict) or not all(
        type(here) is int and 0 < here <= WORKERS_MAX for here in places.values()
    ):
        raise ValueError(f"{NAME}: expected places, a number for each node; found {content[:80]!r}")
    return Resize(workers, request, places)
