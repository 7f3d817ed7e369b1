"""What someone outside may ask of a job: files in its run folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from elastic_ft.observe import files, handover, resize_request, stop_request
from elastic_ft.storage.store import Store, if_there

NAMES = (stop_request.NAME, stop_request.NOW, handover.NAME, resize_request.NAME)


def fetch(store: Store, folder: Path) -> None:
    """From a remote run folder: nobody tells its controller. Raises StoreFailed, OSError."""
    for name in NAMES:
        path, content = folder / name, if_there(partial(store.get, name))
        if content is not None and (not path.exists() or path.read_bytes() != content):
            files.replace(path, content)
