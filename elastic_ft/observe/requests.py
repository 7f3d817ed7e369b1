"""What someone outside may ask of a job: files in its run folder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container
from functools import partial
from pathlib import Path

from elastic_ft.observe import files, handover, resize_request, stop_request
from elastic_ft.storage.store import Store, if_there

NAMES = (stop_request.NAME, stop_request.NOW, handover.NAME, resize_request.NAME)


def fetch(store: Store, folder: Path, removed: Container[str] = ()) -> None:
    """From a remote run folder: nobody tells its controller. Of what is ``removed`` the store has
    not heard yet. Raises StoreFailed, OSError."""
    for name in NAMES:
        if name in removed:
            continue
        path, content = folder / name, if_there(partial(store.get, name))
        if content is not None and (not path.exists() or path.read_bytes() != content):
            files.replace(path, content)


class Requested(ABC):
    """What is asked of the run that has the folder ``path``."""

    path: Path
    _request_seen: files.Stamp | None = None

    @property
    @abstractmethod
    def _run(self) -> str | None:
        """None while the folder is nobody's."""

    def new_request(self) -> resize_request.Resize | None:
        """What was asked for since the last look. Raises ValueError if it makes no sense."""
        path = self.path / resize_request.NAME
        try:
            stamp = files.stamp_of(path.stat())
            if stamp == self._request_seen:
                return None
            self._request_seen = stamp
            return resize_request.parse(path.read_bytes())
        except FileNotFoundError:
            return None

    def places(self) -> dict[str, int]:
        """Where workers may be, by the last request; {}: anywhere, or there is none."""
        try:
            return resize_request.parse((self.path / resize_request.NAME).read_bytes()).places
        except (FileNotFoundError, ValueError):  # of one that makes no sense ``new_request`` tells
            return {}

    def asked(self, name: str) -> str | None:
        """Why, "" where that is not said; None where nobody asks. Of the requests that name a run:
        what names another one, or none at all, is none."""
        try:
            run, why = handover.asked_of((self.path / name).read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        return why if run == self._run else None
