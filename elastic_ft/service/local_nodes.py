"""A Ray cluster on this machine for a service, which outlives the terminal that started it.

``python -m elastic_ft.service.local_nodes '{...}'``: starts nodes and service, and ends with the
last of service and jobs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from elastic_ft import errors
from elastic_ft.core.typed import decoder
from elastic_ft.errors import ConfigError, JobFailed, UsageError
from elastic_ft.observe import files

FILE = "local-nodes.json"  # in the service's folder
LOG = "local-nodes.log"
LOOK_EVERY_S = 0.5
OURS = re.compile(r"\belastic_ft\.errors\.(?P<kind>\w+): (?P<text>.*)")  # as tracebacks have it
log = logging.getLogger(__name__)


def main(options: dict[str, Any]) -> int:
    import ray

    from elastic_ft.hosts.ray.cluster import LocalCluster
    from elastic_ft.hosts.ray.names import ROOT, actor_named, actors_of
    from elastic_ft.service.served_at import HowToServe
    from elastic_ft.service.service_actor import NAME, start_actor
    from elastic_ft.transport.title import set_title

    set_title("ef-local-nodes")
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    folder = Path(options["folder"])
    with LocalCluster(options["nodes"], options["cpus_per_node"]) as cluster:
        cluster.connect()
        actor = start_actor(decoder(HowToServe)(options), this_node=True)
        try:
            where = ray.get(actor.where.remote(), timeout=120)
        except Exception as error:
            _say(folder, {"error": str(why_not_started(error)), "pid": os.getpid()})
            return 1
        del actor
        _say(folder, {"address": cluster.address, "pid": os.getpid(), "url": where["url"]})
        while not over.wait(LOOK_EVERY_S):
            if actor_named(NAME) is None and not actors_of(ROOT):
                break
    with contextlib.suppress(OSError):
        (folder / FILE).unlink()
    return 0


def _say(folder: Path, what: dict[str, Any]) -> None:
    files.replace(folder / FILE, json.dumps(what | {"at_s": time.time()}).encode())


def why_not_started(error: Exception) -> ConfigError | JobFailed:
    """As the actor has said it, in a line: the user's to fix, or not."""
    cause = error.__cause__ or error
    lines = [line for line in str(cause).splitlines() if line.strip()]
    if isinstance(cause, UsageError):
        return ConfigError(lines[-1])
    found = [ours for line in lines if (ours := OURS.search(line))]
    if found and issubclass(getattr(errors, found[-1]["kind"], Exception), UsageError):
        return ConfigError(found[-1]["text"])
    text = found[-1]["text"] if found else (lines or [type(error).__name__])[-1].strip()
    return JobFailed(f"the service did not start: {text}")


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
