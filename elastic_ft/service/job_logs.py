"""What a job's processes print: Ray's own log files, read on the machines where they are."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from elastic_ft.hosts.ray.ray_private import RAY_NODE_ID_KEY, logs_folder
from elastic_ft.observe import alive
from elastic_ft.service.cluster_watch import Sight
from elastic_ft.service.story import JobStory

log = logging.getLogger(__name__)
READ_TIMEOUT_S = 30.0  # of all machines: a process that reads may have to come up
READ_BYTES_MAX = 1 << 20  # of a file, at once; of its end at first
MARKS = (":job_id:", ":actor_name:", ":task_name:")  # Ray's own lines


@dataclass
class JobLogs:
    """Of one reader, who is told each line once."""

    story: JobStory
    _read: dict[str, dict[str, int]] = field(default_factory=dict)  # by machine, by file
    _told: dict[str, dict[int, str]] = field(default_factory=dict)  # of members, by machine
    _seen: int = 0  # of the journal's lines

    def read(self, sight: Sight) -> list[dict[str, Any]]:
        """What is new: ``{"who", "text"}``. Blocks, for READ_TIMEOUT_S at most."""
        asked, processes = {}, self._processes()
        for host, pids in processes.items():
            node = next((node for node, name in sight.hosts.items() if name == host), None)
            if node is not None:
                asked[host] = _begin_reading(node, list(pids), self._read.get(host, {}))
        found = []
        until_s = time.monotonic() + READ_TIMEOUT_S
        for host, answer in asked.items():
            pids = processes[host]
            try:
                left_s = max(0.0, until_s - time.monotonic())
                for name, pid, offset, lines in ray.get(answer, timeout=left_s):
                    self._read.setdefault(host, {})[name] = offset
                    found += [{"who": pids.get(pid, str(pid)), "text": text} for text in lines]
            except (RayError, GetTimeoutError) as error:
                log.warning("logs on %s can't be read: %s", host, error)
                ray.cancel(answer)
        return found

    def _processes(self) -> dict[str, dict[int, str]]:
        """By machine: who has which process."""
        new, self._seen = self.story.events.since(self._seen)
        for item in new:
            for member in item.data.get("members", ()):
                self._told.setdefault(member["host"], {})[member["pid"]] = member["worker"]
        found = {host: dict(pids) for host, pids in self._told.items()}
        if (sign := alive.last_sign(self.story.run_url)) is not None:
            found.setdefault(sign.host, {})[sign.pid] = "controller"
        return found


def _begin_reading(node: str, pids: list[int], known: dict[str, int]) -> Any:
    """``known``: of that machine's files, how much was told."""
    where = {RAY_NODE_ID_KEY: node}
    reading = ray.remote(num_cpus=0, label_selector=where, max_retries=0)(_new_lines)
    return reading.remote(pids, known)


def _new_lines(pids: list[int], known: dict[str, int]) -> list[tuple[str, int, int, list[str]]]:
    """Runs on a node: file, process, where to go on, whole lines."""
    return list(_each_file(logs_folder(), pids, known))


def _each_file(
    folder: Path, pids: list[int], known: dict[str, int]
) -> Iterator[tuple[str, int, int, list[str]]]:
    for pid in pids:
        for path in sorted(folder.glob(f"worker-*-{pid}.*")):
            size = path.stat().st_size
            begin = known.get(path.name, max(0, size - READ_BYTES_MAX))
            begin = begin if begin <= size else 0  # another file of that name: it was rotated
            with path.open("rb") as file:
                file.seek(begin)
                content = file.read(READ_BYTES_MAX)
            whole, end, _ = content.rpartition(b"\n")
            if not end and len(content) == READ_BYTES_MAX:  # no line's end, as of a progress bar
                whole = content
            texts = whole.decode(errors="replace").splitlines()
            if whole or end:
                told = [text for text in texts if not text.startswith(MARKS)]
                yield path.name, pid, begin + len(whole) + len(end), told
