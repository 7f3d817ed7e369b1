"""Where the processes are from which a job's next controller is forked."""

from __future__ import annotations

from typing import Any

from elastic_ft.hosts.ray.controller_place import HEAD, LABEL, ControllerPlaces
from elastic_ft.hosts.ray.ray_private import RAY_NODE_ID_KEY
from elastic_ft.hosts.ray.warm_standby import standby_nodes


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
    assert standby_nodes(order, nodes) == ["a", "b"]
    assert standby_nodes(order, [node("a", alive=False), *nodes[:3]]) == ["b", "c"]


def test_standbys_that_are_gone_are_replaced_where_a_controller_may_be() -> None:
    """On nodes that came later, labelled ones before others, the head last."""
    later = [node("h", head=True), node("x"), node("y", labelled=True), node("a", alive=False)]
    assert standby_nodes(["a"], later) == ["y", "x"]
    assert standby_nodes(["a"], later[:1]) == ["h"]
    assert standby_nodes(["a"], [node("a", alive=False)]) == []
