"""The autoscaler is told what is wanted once, and again where it could not be reached."""

from __future__ import annotations

import threading

from elastic_ft.core.sharing.ledger import Bundles
from elastic_ft.service.cluster_size import ClusterSize

WAIT_S = 60.0


def test_what_could_not_be_asked_is_asked_again() -> None:
    told: list[list[dict[str, float]]] = []
    tries: list[int] = []
    heard = threading.Event()

    def ask(bundles: list[dict[str, float]]) -> None:
        tries.append(len(bundles))
        if len(tries) == 1:
            raise ConnectionError("the head is away")
        told.append(bundles)
        heard.set()

    wanted: Bundles = ((1, 2), (4, 1))
    size = ClusterSize(lambda: wanted, lambda: "GPU", ask)
    size.start()
    assert heard.wait(WAIT_S)
    size.let_go()
    assert tries == [3, 3, 0]  # nothing is asked twice
    assert told == [[{"GPU": 1.0}, {"GPU": 1.0}, {"GPU": 4.0}], []]
