"""A controller that is stopped (SIGSTOP, a deadlock) does not end: keepers see to it, on Ray.

Ray restarts an actor that has ended, and takes one that stands still for alive. A keeper hears
nothing of such a controller, and sees that it renews no sign of life in the run folder, either:
then it ends it, and Ray starts the next one, which adopts the workers. Not one of the two alone: a
keeper that is cut off hears nothing of a controller that lives, whose disk may be full.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_ft.observe import alive
from elastic_ft.observe.lines import local_path

log = logging.getLogger(__name__)
LOOKS_PER_TIMEOUT = 8
END_TIMEOUT_S = 30.0
TITLE = "ElasticController"  # in what Ray calls the process
BOOT_S = 2.0  # psutil counts a process's start from the machine's, which is told in whole seconds


class StoppedControllers(threading.Thread):
    """Of a keeper's process.

    Args:
        timeout_s: after so long a silence a controller is ended.
        silent_s: since it was last heard.
        end: its process, of which this is the last sign.
    """

    def __init__(
        self,
        run_url: str,
        timeout_s: float,
        silent_s: Callable[[], float],
        end: Callable[[alive.Sign], None],
    ) -> None:
        super().__init__(name="stopped-controllers", daemon=True)
        self._url, self._silent_s, self._end = run_url, silent_s, end
        self._timeout_s, self._still_s = timeout_s, timeout_s / 2
        if local_path(run_url) is None:  # what is there is some seconds old
            self._still_s = self._timeout_s = max(timeout_s, alive.STILL_REMOTE_S)
        self._sign: alive.Sign | None = None
        self._since_s = 0.0
        self._pause = threading.Event()

    def run(self) -> None:
        while not self._pause.wait(self._timeout_s / LOOKS_PER_TIMEOUT):
            if self._silent_s() > self._timeout_s / 2:
                self.look(time.monotonic())

    def look(self, now_s: float) -> None:
        sign = alive.last_sign(self._url)
        if sign is None or sign != self._sign:
            self._sign, self._since_s = sign, now_s
        elif now_s - self._since_s > self._still_s and self._silent_s() > self._timeout_s:
            self._since_s = now_s  # if it comes to nothing, again after a while
            self._end(sign)


def end_controller(run_url: str, sign: alive.Sign) -> None:
    """Where it runs. Bounded."""
    try:
        if sign.host == os.uname().nodename:
            was_ended = end_here(run_url, sign)
        else:
            was_ended = any(_end_on(node, run_url, sign) for node in _nodes_of(sign.host))
    except (RayError, GetTimeoutError) as error:
        log.warning("process %d on %s could not be ended: %s", sign.pid, sign.host, error)
        return
    if was_ended:  # otherwise it had ended long ago, or another keeper was first
        log.warning("process %d on %s, the controller, stood still: ended", sign.pid, sign.host)


def _nodes_of(host: str) -> list[str]:
    nodes = ray.nodes()
    return [n["NodeID"] for n in nodes if n["Alive"] and n["NodeManagerHostname"] == host]


def _end_on(node: str, run_url: str, sign: alive.Sign) -> bool:
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    ending = ray.remote(num_cpus=0, scheduling_strategy=there)(end_here).remote(run_url, sign)
    try:
        return bool(ray.get(ending, timeout=END_TIMEOUT_S))
    except GetTimeoutError:
        ray.cancel(ending)  # it would be done some time later
        raise


def end_here(run_url: str, sign: alive.Sign) -> bool:
    """Whether there was one: the process that gave ``sign``, and no later one since."""
    try:
        process = psutil.Process(sign.pid)
        began_before = process.create_time() <= sign.at_s + BOOT_S
        if not began_before or not any(TITLE in part for part in process.cmdline()):
            return False
        if alive.last_sign(run_url) not in (None, sign):  # this was asked for a while ago
            return False
        process.kill()
    except psutil.Error:
        return False
    return True
