"""Workers that read a checkpoint from a slow store, while others die."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from chaos.object_store_proxy import ObjectStoreProxy, StoreFault
from chaos.s3_server import s3_server
from elastic_ft.controller.controller import Controller
from elastic_ft.core.assignment import Member
from tests.multiproc.harness import make_job, run_job

SHARDS = r"\.bin"
WORKERS = 2
CALLED_OFF = 2  # the generation of the second start
FORM_TIMEOUT_S = 6.0
READING_S = 7.0  # at least, for one who reads all of it alone
AT_ONCE_S = 1.5  # a reader gives up by itself after 2 s without a byte
WIDE = {"dim": 64, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 128}


class Killer:
    """Kills one worker once all of them wait for the store."""

    def __init__(self, proxy: ObjectStoreProxy) -> None:
        self.proxy = proxy
        self.survivor: Member | None = None
        self.killed_at_s = self.forming_at_s = 0.0

    def __call__(self, controller: Controller) -> None:
        state = controller.state
        if self.survivor is None:
            if self.proxy.fired["stall"] == WORKERS:
                self.survivor, dead = sorted(state.ready.values(), key=lambda m: m.worker)
                self.killed_at_s = time.monotonic()
                controller.host.kill_worker(dead.worker)
        elif not self.forming_at_s and state.generation > CALLED_OFF and state.phase == "forming":
            self.forming_at_s = time.monotonic()


def test_a_reader_is_called_off_and_a_long_read_is_no_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both wait for a shard when one is killed: the other begins anew at once, in its process, and
    then reads for longer than forming may take, for bytes come."""
    with s3_server(tmp_path / "s3") as s3, ObjectStoreProxy(s3.endpoint) as proxy:
        environment = s3.env | {"AWS_ENDPOINT_URL": proxy.endpoint}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        job = make_job(
            "fsdp",
            steps=3,
            workers=WORKERS,
            model={"preset": "decoder-1m", "kwargs": WIDE},
            checkpoint={"url": s3.url("checkpoints")},
            elastic={"form_timeout_s": FORM_TIMEOUT_S, "min_workers": 1, "heartbeat_timeout_s": 10},
        )
        first = run_job(job, tmp_path / "run")
        (written,) = first.all("checkpoint_committed")
        (tmp_path / "run" / "result.json").unlink()  # else it is complete, and nothing is started
        stall = StoreFault("stall", methods=("GET",), path=SHARDS, count=WORKERS)
        pace = written["bytes"] / WORKERS / READING_S  # of each of the shards, at once
        proxy.set(stall, StoreFault("slow", methods=("GET",), path=SHARDS, bytes_per_s=pace))
        killer = Killer(proxy)
        run = run_job(job, tmp_path / "run", watch=killer)
    assert run.result["status"] == "completed", run.story()
    assert run.result["state_digest"] == first.result["state_digest"]
    assert killer.survivor is not None and killer.forming_at_s, run.story()
    assert killer.forming_at_s - killer.killed_at_s < AT_ONCE_S, run.story()
    formed = run.all("generation_formed")[1]
    assert formed["generation"] == CALLED_OFF + 1, run.story()
    assert [m["pid"] for m in formed["members"]] == [killer.survivor.pid], run.story()
    assert formed["at_s"] - run.all("worker_lost")[0]["at_s"] > FORM_TIMEOUT_S
