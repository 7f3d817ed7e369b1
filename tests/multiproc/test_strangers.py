"""Strangers on the network: training goes on, and nothing that they send is run."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import socket
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from elastic_ft.controller.controller import Controller
from elastic_ft.faults import PointFault
from tests.multiproc.harness import make_job, run_job

SILENT = 1000
CONNECT_S = 0.5


class Exploit:
    """What unpickling this does."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.mark}",)


class Strangers:
    """After step 3: silent connections and random bytes to every port, values to the store."""

    def __init__(self, mark: Path) -> None:
        self.mark, self.ports = mark, set[int]()
        self.held = contextlib.ExitStack()

    def __call__(self, controller: Controller, line: dict[str, Any]) -> None:
        if line["step"] != 3:
            return
        mine = psutil.Process()
        for process in (mine, *mine.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                listening = process.net_connections("tcp")
                self.ports |= {c.laddr.port for c in listening if c.status == psutil.CONN_LISTEN}
        for port in sorted(self.ports):
            noise = [random.Random(size).randbytes(size) for size in (1, 4, 44, 76, 4096)]
            noise += [pickle.dumps(Exploit(self.mark))]
            for data in (*noise, *[b""] * (SILENT // len(self.ports))):
                if not self._connect(port, data):
                    break  # Gloo's take nobody
        self._write_to_store(controller._connections.store[1])

    def _connect(self, port: int, data: bytes) -> bool:
        """Whether anybody answers there."""
        try:
            sock = socket.create_connection(("127.0.0.1", port), CONNECT_S)
        except OSError:
            return False
        self.held.enter_context(sock)
        with contextlib.suppress(ConnectionError):
            sock.sendall(data)
        return True

    def _write_to_store(self, port: int) -> None:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        evil = pickle.dumps(Exploit(self.mark))
        for generation in range(2, 5):
            for name in ("boxes", "schemas", "listeners", "host"):
                for rank in range(3):
                    store.set(f"g{generation}/{name}/{rank}", evil)


def test_training_goes_on_and_nothing_is_executed(tmp_path: Path) -> None:
    strangers = Strangers(tmp_path / "executed")
    job = make_job("fsdp", workers=2)
    fault = PointFault(
        "forward", rank=1, step=6
    )  # the next generation forms through the same store
    with strangers.held:
        run = run_job(job, tmp_path / "run", faults=[fault], on_step=strangers).check()
    assert len(strangers.ports) >= 6, "control, store, metrics, keepers and Gloo"
    assert not strangers.mark.exists()
    assert [(r["steps_lost"], r["survivors_kept_pid"]) for r in run.recoveries] == [(0, True)]
    assert run.result["status"] == "completed"
