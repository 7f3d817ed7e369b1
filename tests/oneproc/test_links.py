"""Links to the store are made before anyone waits for them, whatever the DNS does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from elastic_ft.groups import store_links
from elastic_ft.groups.store_links import TRIES, StoreLinks, inet_sockets, serve_store
from elastic_ft.transport.reception import listen

TIMEOUT_S = 10.0


@pytest.fixture
def store() -> Iterator[dist.TCPStore]:
    yield dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def refused_at_first(monkeypatch: pytest.MonkeyPatch, failures: int) -> list[str]:
    """The first connects fail, as they do when the DNS does not answer. Returns all that began."""
    began: list[str] = []
    real = dist.TCPStore

    def connect(*args: Any, **kwargs: Any) -> dist.TCPStore:
        began.append(args[0])
        if len(began) <= failures:
            raise dist.DistNetworkError("The client socket has timed out")
        return real(*args, **kwargs)

    monkeypatch.setattr(store_links.dist, "TCPStore", connect)
    return began


def test_the_first_link_is_there_once_it_was_waited_for(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = refused_at_first(monkeypatch, failures=1)
    made = StoreLinks(("127.0.0.1", store.port), TIMEOUT_S)
    made.prepare()
    made.wait()
    assert len(began) == 2
    link = made.take()
    assert len(began) == 2, "nobody connects when the generation forms"
    link.store.set("key", "value")
    assert store.get("key") == b"value"


def test_a_wait_ends_where_there_can_be_no_link(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = refused_at_first(monkeypatch, failures=TRIES)
    made = StoreLinks(("127.0.0.1", store.port), TIMEOUT_S)
    made.prepare()
    made.wait()
    assert len(began) == TRIES
    assert made.take().store.num_keys() >= 0  # it tries itself


def test_the_store_is_at_its_one_address_only() -> None:
    before = {s.inode for s in inet_sockets()}
    served = serve_store("127.0.0.1", listen("127.0.0.1"))
    listening = [s.local for s in inet_sockets() if s.peer is None and s.inode not in before]
    assert listening == [("127.0.0.1", served.port)]
    StoreLinks(("127.0.0.1", served.port), TIMEOUT_S).take().store.set("key", "value")
    assert served.get("key") == b"value"
