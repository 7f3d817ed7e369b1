"""Where the processes are from which a job's next controller is forked."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ft.errors import JobFailed
from elastic_ft.hosts.ray import controller_actor, warm_standby
from elastic_ft.hosts.ray.controller_actor import ElasticController
from elastic_ft.hosts.ray.controller_place import HEAD, LABEL, ControllerPlaces
from elastic_ft.hosts.ray.ray_private import RAY_NODE_ID_KEY
from elastic_ft.hosts.ray.submission import STARTS_MAX, Submitted
from elastic_ft.hosts.ray.warm_standby import Standby, Standbys, standby_nodes, standby_of

PREFIX = "elastic_ft/job/run/"
WAIT_S = 60.0


def node(name: str, *, alive: bool = True, labelled: bool = False, head: bool = False) -> Any:
    resources = {"CPU": 1.0} | ({HEAD: 1.0} if head else {})
    labels = {LABEL: "true"} if labelled else {}
    return {"NodeID": name, "Alive": alive, "Resources": resources, "Labels": labels}


def test_standbys_are_where_the_controller_is_next() -> None:
    order = ["a", "b", "c"]
    places = ControllerPlaces([{LABEL: "true"}, {}], order).in_order(order)
    assert places.selectors[:3] == [{RAY_NODE_ID_KEY: name} for name in order]
    assert places.selectors[3:] == [{LABEL: "true"}, {}]
    nodes = [node(name) for name in ("h", "c", "b", "a")]
    assert standby_nodes("a", order, nodes) == ["a", "b"]
    assert standby_nodes("b", order, [node("a", alive=False), *nodes[:3]]) == ["b", "c"]


def test_standbys_that_are_gone_are_replaced_where_a_controller_may_be() -> None:
    """On nodes that came later, labelled ones before others, the head last."""
    later = [node("h", head=True), node("x"), node("y", labelled=True), node("a", alive=False)]
    assert standby_nodes("y", ["a"], later) == ["y", "x"]
    assert standby_nodes("h", ["a"], later[:1]) == ["h"]
    assert standby_nodes("a", ["a"], [node("a", alive=False)]) == []


def test_a_standby_is_where_the_controller_is_once_the_order_is_used_up() -> None:
    """It was wherever the GCS happened to name a node first, another one at each look."""
    later = [node("h", head=True), node("z"), node("x"), node("y", labelled=True)]
    assert standby_nodes("z", ["a"], later) == ["z", "y"]
    assert standby_nodes("z", ["a"], later[:3]) == ["z", "x"]
    for nodes in (later[1:3], later[2:0:-1]):
        assert standby_nodes("h", ["a"], [*nodes, later[0]]) == ["h", "x"]


def test_standbys_that_end_as_they_begin_are_made_seldom(
    ended: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There was a new detached actor every 5 s."""
    monkeypatch.setattr(warm_standby.ray, "nodes", lambda: [node("n")])
    there: list[str] = []
    monkeypatch.setattr(warm_standby, "actors_of", lambda prefix: there)
    made: list[float] = []
    monkeypatch.setattr(Standby, "make", lambda self, node: made.append(now_s))
    standbys = Standbys(Standby(PREFIX, ["n"], {}, is_tied=False))
    for now_s in range(1000, 1200, 5):
        standbys.look(now_s)
    assert made == [1000, 1010, 1040, 1160]
    there.append(f"{PREFIX}standby/n/1")
    standbys.look(now_s := 1300)
    there.clear()
    standbys.look(now_s := 1305)  # it had lived
    assert made[4:] == [1305]


class Ended(list[str]):
    """Prefixes whose actors were ended, of a cluster without nodes."""


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Ended:
    ended, name = Ended(), f"{PREFIX}controller"
    context = SimpleNamespace(get_node_id=lambda: "n", get_actor_name=lambda: name)
    cluster = SimpleNamespace(
        nodes=list, get_runtime_context=lambda: context, kill=lambda actor: None
    )
    monkeypatch.setattr(warm_standby, "ray", cluster)
    monkeypatch.setattr(warm_standby, "actors_of", lambda prefix: [])
    monkeypatch.setattr(warm_standby, "reap", ended.append)
    monkeypatch.setattr(controller_actor, "ray", cluster)
    return ended


def test_who_submits_starts_no_standby(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it submits may be refused yet: they were left, and nobody's."""

    def asked(prefix: str) -> list[str]:
        raise AssertionError(prefix)

    monkeypatch.setattr(warm_standby, "actors_of", asked)
    assert standby_of(PREFIX, ControllerPlaces([{}, {}], ["a"]), {}).order == ["a"]


@pytest.mark.parametrize(("starts", "why"), [(0, "No such file"), (STARTS_MAX, "ended within")])
def test_standbys_end_with_a_controller_that_can_not_begin(
    tmp_path: Path, ended: Ended, starts: int, why: str
) -> None:
    """Its submission is gone, or too many have ended early: nobody comes after it."""
    submitted = Submitted(str(tmp_path), "0" * 64)
    early = json.dumps([time.time()] * starts)
    (tmp_path / f"{submitted.name}.starts").write_text(early)
    with pytest.raises(JobFailed, match=why):
        ElasticController(submitted, None)  # type: ignore[arg-type]
    assert ended == [f"{PREFIX}standby/"]


def test_standbys_end_before_the_next_controller_has_nothing_to_begin_from(
    tmp_path: Path, ended: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in between, it left them: the next one found no submission."""
    submitted = Submitted(str(tmp_path), "0" * 64)
    left = tmp_path / submitted.name
    left.touch()
    there: list[bool] = []
    monkeypatch.setattr(warm_standby, "reap", lambda prefix: there.append(left.exists()))
    monkeypatch.setattr(controller_actor, "LINGER_S", 0.0)

    async def live() -> None:
        standbys = Standbys(Standby(PREFIX, ["a"], {}, is_tied=False))
        standbys.start()
        actor: Any = SimpleNamespace(
            run=lambda: asyncio.sleep(0),
            _hosting=None,
            _itself=None,
            _delivered=SimpleNamespace(close=lambda: None),
            _starts=SimpleNamespace(close=lambda: None),
            _standbys=standbys,
            _submitted=submitted,
            _is_over=asyncio.Event(),
        )
        await ElasticController._live(actor)

    asyncio.run(live())
    assert there == [True] and not left.exists()


def test_standbys_end_though_their_controller_still_looks(
    ended: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow GCS holds up the look, which then would make one that nobody ends."""
    monkeypatch.setattr(warm_standby, "END_TIMEOUT_S", 4.0)
    looks, goes_on = threading.Event(), threading.Event()

    def nodes() -> list[Any]:
        looks.set()
        assert goes_on.wait(WAIT_S)
        return [node("n")]

    monkeypatch.setattr(warm_standby.ray, "nodes", nodes)
    made: list[str] = []
    monkeypatch.setattr(Standby, "make", lambda self, node: made.append(node))
    standbys = Standbys(Standby(PREFIX, ["n"], {}, is_tied=False))
    standbys.start()
    assert looks.wait(WAIT_S)
    asyncio.run(asyncio.wait_for(standbys.end(), WAIT_S))
    assert ended == [f"{PREFIX}standby/"]
    goes_on.set()
    standbys.join(WAIT_S)
    assert made == []
