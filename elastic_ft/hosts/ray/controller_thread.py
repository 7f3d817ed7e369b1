"""elastic_ft's controller, in a thread of Ray Train's."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from elastic_ft.controller.controller import Controller
from elastic_ft.hosts.ray.ray_metrics import RayMetrics

log = logging.getLogger(__name__)


class ControllerThread(threading.Thread):
    """Args:
    make: the controller, in this thread.
    on_end: called in it once all is said.

    Attributes:
    result: what is in result.json, once the job has ended.
    error: why there is none.
    """

    def __init__(
        self, make: Callable[[], Controller], on_end: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__(name="elastic-controller", daemon=True)
        self._make, self._on_end = make, on_end
        self.controller: Controller | None = None
        self._asked: list[str] = []  # to stop, while there is no controller yet
        self._lock = threading.Lock()
        self.result: dict[str, Any] | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            controller = self._make()
            with self._lock:
                self.controller = controller
                for reason in self._asked:
                    controller.stop(reason)
            with RayMetrics(self.controller.metrics.registry):
                self.result = self.controller.run()
        except BaseException as error:  # told to Ray Train's loop, which ends the run with it
            log.exception("elastic_ft's controller failed")
            self.error = error
        self._on_end()

    def stop(self, reason: str) -> None:
        """From any thread, also before it has begun."""
        with self._lock:
            if self.controller is None:
                self._asked.append(reason)
            else:
                self.controller.stop(reason)
