"""A keeper in this process and a desk that hears it; settings of small data; a service.

What they need is imported when they are asked for: most files of this tier have no use for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from elastic_ft.config import DataConfig
    from elastic_ft.core.assignment import Keeper
    from elastic_ft.keeper.node_keeper import NodeKeeper
    from elastic_ft.service.access import Rights
    from tests.oneproc.desks import Desk
    from tests.oneproc.served import Served


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    from tests.oneproc.desks import Desk

    desk = Desk(str(tmp_path))
    yield desk
    desk.server.close()


@pytest.fixture
def node_keeper(desk: Desk) -> NodeKeeper:
    from elastic_ft.keeper.node_keeper import NodeKeeper

    return NodeKeeper(("127.0.0.1", desk.server.port), desk.server.key, "n0", "127.0.0.1")


@pytest.fixture
def keeper(desk: Desk, node_keeper: NodeKeeper) -> Keeper:
    from elastic_ft.core.events import KeeperReady

    threading.Thread(target=node_keeper.serve, daemon=True).start()
    found: Keeper = desk.next(KeeperReady).keeper
    return found


@pytest.fixture
def config(tmp_path: Path) -> Any:
    """Makes a DataConfig with small windows and a private cache."""
    from elastic_ft.config import DataConfig

    def make(url: object = None, **changes: Any) -> DataConfig:
        values = {"vocab_size": 300, "sequence_length": 8, "cache_dir": str(tmp_path / "cache")}
        location = {} if url is None else {"url": str(url)}
        return DataConfig.model_validate(values | location | changes)

    return make


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    from tests.oneproc.served import Served

    opened: list[Served] = []

    def begin(users: dict[str, Rights] | None = None, tls: Any = None) -> Served:
        opened.append(Served(tmp_path / "F", users, tls))
        return opened[-1]

    yield begin
    for served in opened:
        served.close()
