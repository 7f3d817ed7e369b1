"""What is around a run besides its machines: the object store, and the disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from chaos.fault_kinds import StoreNeeds
from chaos.object_store_proxy import ObjectStoreProxy, StoreFault
from chaos.scenario import Scenario
from elastic_ft.errors import ConfigError
from elastic_ft.observe.lines import local_path

ENDPOINT = "AWS_ENDPOINT_URL"
DISK_MAX_BYTES = 1 << 30  # a larger one is never filled: it is not a scenario's own
FILLER = ".chaos-filler"


class Surroundings:
    """Attributes:
    proxy: in front of the object store; None where no fault is in it.
    disk: a folder on the file system that faults fill; None likewise.
    """

    def __init__(self) -> None:
        self.proxy: ObjectStoreProxy | None = None
        self.disk: Path | None = None
        self._store_faults: list[StoreFault] = []

    def break_store(self, fault: StoreNeeds) -> tuple[Callable[[], bool], Callable[[], None]]:
        """Returns what tells whether a request has suffered it, and what ends it."""
        proxy = self.proxy
        assert proxy is not None
        before = proxy.fired[fault.store]
        armed = StoreFault(fault.store, fault.probability, methods=fault.methods, path=fault.path)
        self._store_faults.append(armed)
        proxy.set(*self._store_faults)

        def heal() -> None:
            self._store_faults.remove(armed)
            proxy.set(*self._store_faults)

        return lambda: proxy.fired[fault.store] > before, heal

    def fill(self) -> Callable[[], None]:
        """Writes until nothing more can be. Returns what makes room again."""
        assert self.disk is not None
        filler = self.disk / FILLER
        with filler.open("ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):  # down to the last byte
                try:
                    while file.write(bytes(size)):
                        pass
                except OSError:
                    continue
        return lambda: filler.unlink(missing_ok=True)


@contextmanager
def surroundings(scenario: Scenario, out: str, checkpoint_url: str) -> Iterator[Surroundings]:
    """To be entered before anything of the run starts: what it starts finds the proxy.

    Raises ConfigError where the scenario's faults can't happen to this run.
    """
    around = Surroundings()
    if scenario.needs_disk:
        around.disk = _disk(
            scenario.needs_disk, out if scenario.needs_disk == "run_folder" else checkpoint_url
        )
    if not scenario.needs_store:
        yield around
        return
    endpoint = os.environ.get(ENDPOINT, "")
    if not checkpoint_url.startswith("s3://") or not endpoint.startswith("http://"):
        raise ConfigError(
            f"checkpoint.url: {checkpoint_url} at {endpoint or 'no endpoint'}: faults of the store "
            f"need an s3:// URL and an http:// endpoint in {ENDPOINT}"
        )
    with ObjectStoreProxy(endpoint) as proxy:
        around.proxy = proxy
        os.environ[ENDPOINT] = proxy.endpoint
        try:
            yield around
        finally:
            os.environ[ENDPOINT] = endpoint
            proxy.set()


def _disk(what: str, url: str) -> Path:
    folder = local_path(url)
    if folder is None:
        raise ConfigError(f"{url}: only the disk of a local folder can be filled")
    folder.mkdir(parents=True, exist_ok=True)
    found = os.statvfs(folder)
    size = found.f_blocks * found.f_frsize
    if size > DISK_MAX_BYTES:
        raise ConfigError(
            f"{folder}: its file system has {size:,} bytes: a scenario fills none larger than "
            f"{DISK_MAX_BYTES:,} (elastic-ft chaos run mounts a small one)"
        )
    return folder
