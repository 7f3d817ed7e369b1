"""A service whose folder is in an object store that goes away, loses answers, and comes back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from uuid import uuid4

import pytest

from chaos.object_store_proxy import ObjectStoreProxy, StoreFault
from chaos.s3_server import S3Server
from elastic_ft.service import chronicle
from tests.oneproc.test_service_alone import JOB, WAIT_S, Served


def test_what_was_answered_is_kept_and_what_is_asked_waits(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chronicle, "AGAIN_S", (0.1,))
    with ObjectStoreProxy(s3.endpoint) as proxy, ThreadPoolExecutor(1) as pool:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        folder = s3.url(f"service/{uuid4().hex}")
        first = Served(folder)
        try:
            client = first.client()
            assert client.submit(JOB)["id"] == "tiny-1"
            lost = StoreFault("lost_ack", count=1, methods=("PUT",), path="journal")
            proxy.set(lost)
            assert client.submit(JOB)["id"] == "tiny-2"
            assert proxy.fired["lost_ack"] == 1
            proxy.set(StoreFault("busy"))
            waiting = pool.submit(client.submit, JOB)
            while first.service.office._chronicle.trouble == "":
                assert not wait([waiting], 0.05).done
            assert [job["id"] for job in client.jobs()] == ["tiny-1", "tiny-2"]
            assert not waiting.done()
            proxy.set()
            assert waiting.result(WAIT_S)["id"] == "tiny-3"
            second = Served(folder)
            try:
                assert first.superseded.wait(WAIT_S)
                ids = [job["id"] for job in second.client().jobs()]
                assert ids == ["tiny-1", "tiny-2", "tiny-3"]
            finally:
                second.close()
        finally:
            first.close()
