"""What the service asks of the cluster's autoscaler is what Ray knows of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ray._private.ray_constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
from ray.experimental.internal_kv import _internal_kv_get

from elastic_ft.core.sharing.asks import SharingTerms
from elastic_ft.hosts.ray.cluster import LocalCluster, wait_for
from elastic_ft.service.service import Service

WAIT_S = 60.0


def asked() -> Any:
    """Of Ray's autoscaler, by whoever asked last; None: nobody ever has."""
    found = _internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL)
    return None if found is None else json.loads(found)


def test_a_job_without_room_is_asked_for_until_it_goes(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    def begin(job: Any, run_url: str) -> None:
        raise AssertionError("no job has room here")

    service = Service(str(tmp_path), SharingTerms(autoscaler=True), begin, print)
    service.start()
    try:
        wait_for(lambda: asked() == [], WAIT_S, "what was asked before is replaced")
        job = {
            "name": "wide",
            "steps": 10,
            "model": {"preset": "decoder-1m"},
            "data": {"url": "stdlib:"},
            "batch": {"global_batch_size": 64, "micro_batch_size": 1},
            "elastic": {"min_workers": 60, "max_workers": 64},
        }
        id = service.submit({"job": job}, "").result(WAIT_S)
        wait_for(lambda: len(asked()) == 60, WAIT_S, "it is asked for")
        size = service.office.standing.sharing.jobs[id].slots
        assert asked() == [{"CPU": float(size)}] * 60
        journal = [path.read_text() for path in sorted((tmp_path / "journal").iterdir())]
        lines = [json.loads(line) for line in "".join(journal).splitlines()]
        reasons = [line["asked"]["why"] for line in lines if "asked" in line]
        assert reasons[0].startswith("1 job can't start without: the first of queue default")
        service.stop(id, False, "").result(WAIT_S)
        wait_for(lambda: asked() == [], WAIT_S, "nothing is missing any more")

        service.submit({"job": job}, "").result(WAIT_S)
        wait_for(lambda: len(asked()) == 60, WAIT_S, "another is asked for")
        service.let_go()
        assert asked() == []
    finally:
        service.close()
