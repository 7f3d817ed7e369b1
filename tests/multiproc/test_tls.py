"""A job whose own connections are encrypted."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.controller.controller import Controller
from elastic_ft.faults import PointFault
from elastic_ft.keeper.protocol import FROM_KEEPER
from elastic_ft.transport.control import TO_WORKER
from elastic_ft.transport.tls import JobKey, WrongCertificate, new_key
from elastic_ft.transport.wire import dial
from tests.multiproc.harness import Gate, run_job

SILENT = 200
REFUSED_S = 2.0
CALL_AT, LOSE_AT = 2, 6  # steps


class Strangers:
    """They call the controller and every keeper."""

    def __init__(self) -> None:
        self.called: list[tuple[str, int]] = []
        self.held = contextlib.ExitStack()

    def __call__(self, controller: Controller, line: dict[str, Any]) -> None:
        if line["step"] == CALL_AT:
            self._call_all(controller)

    def _call_all(self, controller: Controller) -> None:
        server = controller._connections.server
        other = new_key(tls=True)
        wrong = JobKey(server.key.secret, other.certificate, other.private_key)
        keepers = [keeper.address for keeper in controller.state.keepers.values()]
        self.called = [("127.0.0.1", server.port), *keepers]
        for address in self.called:
            messages = TO_WORKER if address[1] == server.port else FROM_KEEPER
            with pytest.raises(WrongCertificate):
                dial(address, wrong, messages)
            with pytest.raises((OSError, EOFError)):  # it has the key, and speaks no TLS
                dial(address, JobKey(server.key.secret), messages, REFUSED_S / len(self.called))
            for _ in range(SILENT // len(self.called)):
                self.held.enter_context(socket.create_connection(address, REFUSED_S))


def test_a_worker_is_lost_and_another_joins_under_tls(tmp_path: Path) -> None:
    strangers, gate = Strangers(), Gate(tmp_path / "gate")
    job = gate.job("fsdp", steps=10, workers=3, network={"tls": True})
    fault = PointFault("forward", rank=1, step=LOSE_AT)
    with strangers.held:
        run = run_job(job, tmp_path / "run", faults=[fault], on_step=strangers, watch=gate).check()
    assert len(strangers.called) == 4, "the controller and three keepers"
    assert run.worlds() == [3, 2, 3], run.story()
    (lost, joined) = run.recoveries
    assert (lost["cause"], lost["steps_lost"]) == ("worker_lost", 0), run.story()
    assert lost["survivors_kept_pid"] and joined["survivors_kept_pid"], run.story()
    assert not run.all("message_refused"), run.story()
