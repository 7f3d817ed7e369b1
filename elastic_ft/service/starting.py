"""How a service is started, once: on a Ray cluster, or on one of this machine that is started."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import psutil

from elastic_ft.errors import ConfigError, JobFailed
from elastic_ft.service import local_nodes
from elastic_ft.service.access import LOOPBACK
from elastic_ft.service.served_at import HowToServe
from elastic_ft.service.service_client import Client, ServiceAway
from elastic_ft.storage.mounts import plain_path

START_TIMEOUT_S = 180.0  # nodes and imports, on a machine that has much to do
ENDING_TIMEOUT_S = 15.0  # local nodes whose service was just stopped; with jobs left they stay
LOOK_EVERY_S = 0.1
LOCK = "start.lock"


def running(url: str, folder: str, say: Callable[[str], object]) -> dict[str, Any] | None:
    """The service that answers there; None if nobody does. Raises ConfigError where it is another
    folder's; ServiceAway where somebody listens there and does not answer."""
    try:
        found = Client(url, away_s=0.0, waiting=say).service()
    except ServiceAway as away:
        if away.is_silent:
            raise
        return None
    except (ConfigError, ValueError, KeyError) as error:
        raise ConfigError(f"--port: somebody answers at {url}: {error}") from None
    local = plain_path(folder)
    wanted = folder.rstrip("/") if local is None else str(local)
    if found.get("folder") != wanted:
        raise ConfigError(
            f"--folder: the service at {url} is that of {found.get('folder')}; expected that "
            "folder, or another --port"
        )
    return found


@contextlib.contextmanager
def one_at_a_time(how: HowToServe) -> Iterator[None]:
    """Of those that start a service in one folder of this machine. Raises ConfigError,
    JobFailed where another takes too long."""
    path, until_s = plain_path(how.folder), time.monotonic() + START_TIMEOUT_S
    with contextlib.ExitStack() as held:
        if path is not None:
            try:
                path.mkdir(parents=True, exist_ok=True)
                file = held.enter_context((path / LOCK).open("w"))
            except OSError as error:
                raise ConfigError(f"--folder: {path}: {error.strerror}") from None
            while not _locked(file):
                if time.monotonic() > until_s:
                    raise JobFailed(f"--folder: another start in {path} is not done yet")
                time.sleep(LOOK_EVERY_S)
        yield


def _locked(file: IO[str]) -> bool:
    """Until it is closed, or its process ends. A file system that has no locks has no second start
    at the same moment, either."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def found_here(how: HowToServe, say: Callable[[str], object]) -> dict[str, Any] | None:
    """The folder's service, if it answers on this machine, with its ``url``. Raises what
    ``running`` raises."""
    if how.port and (found := running(how.url_here, how.folder, say)) is not None:
        return found | {"url": how.url_here}
    path = plain_path(how.folder)
    if path is None or _living(path / local_nodes.FILE) is None:
        return None
    url = str(_read(path / local_nodes.FILE).get("url", ""))
    found = running(url, how.folder, say) if url else None
    return found and found | {"url": url}


def start_here(
    how: HowToServe, nodes: int, cpus_per_node: int, say: Callable[[str], object]
) -> str:
    """Starts nodes and service in a process of their own. Returns the service's URL.

    Raises ConfigError, JobFailed.
    """
    path, folder = plain_path(how.folder), how.folder
    if path is None:
        raise ConfigError("--folder: of a local cluster it is a folder of this machine")
    how.tls()  # before a cluster is started
    path.mkdir(parents=True, exist_ok=True)
    file = path / local_nodes.FILE
    if not ended_here(folder, ENDING_TIMEOUT_S) and (pid := _living(file)) is not None:
        raise ConfigError(
            f"--local-nodes: process {pid} has the local nodes of {folder} already, and jobs are "
            "left on them: service start --address goes on with them"
        )
    file.unlink(missing_ok=True)
    options = asdict(how) | {
        "folder": str(path),
        "nodes": nodes,
        "cpus_per_node": cpus_per_node,
    }
    say(f"starting a Ray cluster of {nodes} nodes on this machine")
    with (path / local_nodes.LOG).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", local_nodes.__name__, json.dumps(options)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    until_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until_s:
        said = _read(file)
        if "error" in said:
            raise ConfigError(said["error"])
        if "url" in said:
            return str(said["url"])
        if process.poll() is not None:
            break
        time.sleep(LOOK_EVERY_S)
    raise JobFailed(f"the service did not start: see {path / local_nodes.LOG}")


def start_at(how: HowToServe) -> str:
    """Starts the service on the cluster that this process is a driver of. Returns its URL.

    Raises ConfigError, JobFailed.
    """
    import ray
    from ray.exceptions import RayError

    from elastic_ft.service.service_actor import start_actor

    local = plain_path(how.folder)
    wanted = how.folder.rstrip("/") if local is None else str(local)
    actor = start_actor(replace(how, folder=wanted), this_node=how.host in LOOPBACK)
    try:
        where = ray.get(actor.where.remote(), timeout=START_TIMEOUT_S)
    except RayError as error:
        raise local_nodes.why_not_started(error) from error
    if where["folder"] != wanted:
        raise ConfigError(
            f"--folder: this cluster's service is that of {where['folder']}, at {where['url']}"
        )
    return str(where["url"])


def is_gone(client: Client, about: dict[str, Any], timeout_s: float) -> bool:
    """Whether the service that had said ``about`` itself answers no more, once it does not: until
    then another start would find it."""
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        try:
            if client.service().get("starts") != about.get("starts"):
                return True
        except ConfigError:
            return True
        except ServiceAway as away:
            if not away.is_silent:
                return True
        time.sleep(LOOK_EVERY_S)
    return False


def ended_here(folder: str, timeout_s: float) -> bool:
    """Whether the local nodes of a service that was stopped are gone, once they are."""
    path, until_s = plain_path(folder), time.monotonic() + timeout_s
    while path is not None and _living(path / local_nodes.FILE) is not None:
        if time.monotonic() > until_s:
            return False
        time.sleep(LOOK_EVERY_S)
    return True


def _living(file: Path) -> int | None:
    """The process that has written it, if it lives."""
    pid = _read(file).get("pid")
    with contextlib.suppress(psutil.Error, TypeError):
        if pid is not None and pid != os.getpid():
            process = psutil.Process(pid)
            command = process.cmdline()
            if local_nodes.__name__ in command and process.status() != psutil.STATUS_ZOMBIE:
                return int(pid)
    return None


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
