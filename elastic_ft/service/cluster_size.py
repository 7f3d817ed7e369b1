"""What the cluster's autoscaler is asked for: the workers that the core wants it to hold.

Ray keeps the last request, whoever made it: so the first thing a service with an autoscaler does is
to make its own, and one that is stopped asks for nothing. What was asked for and not taken back is
noted in the service's folder: a later one without an autoscaler takes that back, once. Ray keeps it
in its head's memory alone, and forgets it where that starts again: so what is wanted is asked for
now and then. Nodes that idle once nothing is are the autoscaler's to end, after its own timeout.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from elastic_ft.core.sharing.ledger import Bundles
from elastic_ft.storage.store import Store, if_there

log = logging.getLogger(__name__)
EVERY_S = 0.5
AGAIN_S = 30.0  # the same: nobody tells that it is forgotten
LET_GO_S = 10.0  # for the head's answer when the service is stopped
NOTE = "autoscaler-asked.json"  # of a service's folder: Ray may hold what it was asked for
TAKEN_BACK = b'{"asked": false}'
Ask = Callable[[list[dict[str, float]]], object]


class AskNote:
    """Whether the autoscaler was asked for something, from before it is until that is taken back: a
    service may be killed between any two of these."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def asks(self) -> bool | None:
        """None where no service has noted anything: none has asked, or one of a version that made
        no notes. Raises StoreFailed."""
        content = if_there(lambda: self._store.get(NOTE))
        return None if content is None else content != TAKEN_BACK

    def keep(self, asks: bool) -> None:
        """Raises StoreFailed."""
        self._store.put(NOTE, b"{}" if asks else TAKEN_BACK)


class ClusterSize:
    """Asks in a thread of its own: while the head is away a call blocks, and nobody waits for it.

    ``ask`` replaces what was asked before; ``wanted``: slots of a worker, and how many of those;
    ``kind``: what a slot is, CPU or GPU; "" while it is not known: then nothing is asked for;
    ``note``: called before something is asked for with True, after it was taken back with False.
    """

    def __init__(
        self,
        wanted: Callable[[], Bundles],
        kind: Callable[[], str],
        ask: Ask,
        note: Callable[[bool], object] = lambda asks: None,
    ) -> None:
        self._wanted, self._kind, self._ask, self._note = wanted, kind, ask, note
        self._asked: tuple[str, Bundles] | None = None
        self._again_s = 0.0  # monotonic
        self._over, self._lets_go = threading.Event(), False
        self._thread = threading.Thread(target=self._always, name="cluster-size", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._over.set()

    def let_go(self) -> None:
        """Nothing is wanted any more. Of a service that has never asked for anything: nothing."""
        if not self._thread.is_alive():
            return
        self._lets_go = True
        self._over.set()
        self._thread.join(LET_GO_S)
        if self._thread.is_alive():
            log.warning("the head does not answer: the autoscaler keeps what was asked for last")

    def _always(self) -> None:
        while not self._over.is_set():
            self._tell(self._wanted())
            self._over.wait(EVERY_S)
        if self._lets_go:
            self._tell(())

    def _tell(self, wanted: Bundles) -> None:
        kind = self._kind() if wanted else ""
        if wanted and not kind:
            return
        is_news = (asked := (kind, wanted)) != self._asked
        if not is_news and (not wanted or time.monotonic() < self._again_s):
            return
        each = [{kind: float(size)} for size, count in wanted for _ in range(count)]
        try:
            if is_news and each:
                self._note(True)
            self._ask(each)
            if not each:
                self._note(False)
        except Exception as error:  # the head is away, or the store: asked again
            log.warning("the autoscaler: %s: %s", type(error).__name__, error)
            return
        if is_news:
            log.info("the autoscaler is asked for %d workers in all", len(each))
        self._asked, self._again_s = asked, time.monotonic() + AGAIN_S


def ask_rays_autoscaler(bundles: list[dict[str, float]]) -> None:
    """Imported here: it brings much along that a service without one has no use for."""
    from ray.autoscaler.sdk import request_resources

    request_resources(bundles=bundles)
