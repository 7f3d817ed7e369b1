"""A controller that says nothing may have been succeeded: who follows it asks the store.

Its end is heard at once, that of its connection. One that is stopped (SIGSTOP, a machine that is
moved) keeps its connections: its kernel answers for it. Then whoever has the job by now is known
to the store alone (``storage.owners``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from elastic_ft.errors import ElasticError
from elastic_ft.storage import owners
from elastic_ft.storage.store import Store
from elastic_ft.transport.control import PULSES_PER_TIMEOUT, Welcome
from elastic_ft.transport.wire import Channel

log = logging.getLogger(__name__)


class Succession(threading.Thread):
    """Ends the connection to a controller that is silent and has a successor.

    The one who reads there goes on as if the controller had ended. A silent one without a
    successor, or with a store that can't tell, is waited for.
    """

    def __init__(self, channel: Channel, welcome: Welcome, store: Callable[[str], Store]) -> None:
        super().__init__(name="succession", daemon=True)
        self._channel, self._welcome, self._store = channel, welcome, store
        self._timeout_s = welcome.job.elastic.heartbeat_timeout_s
        self._heard_at_s = time.monotonic()
        self._closed = threading.Event()

    def heard(self) -> None:
        """Something came from the controller."""
        self._heard_at_s = time.monotonic()

    def close(self) -> None:
        self._closed.set()

    def run(self) -> None:
        while not self._closed.wait(self._timeout_s / PULSES_PER_TIMEOUT):
            silent_s = time.monotonic() - self._heard_at_s
            if silent_s > self._timeout_s and self._is_over(silent_s):
                self._channel.close()
                return

    def _is_over(self, silent_s: float) -> bool:
        try:
            store = self._store(self._welcome.checkpoint_url)
            successor = owners.successor(store, self._welcome.owner)
        except ElasticError as error:  # not known: it is asked again
            log.warning("the controller is silent for %.0f s, and %s", silent_s, error)
            return False
        if successor is not None:
            log.warning("the controller is silent for %.0f s, and %s", silent_s, successor)
        return successor is not None
