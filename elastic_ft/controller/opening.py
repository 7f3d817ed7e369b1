"""How a controller comes to have its job: the run folder, workers there are, its own server."""

from __future__ import annotations

import time
from typing import Any

from elastic_ft.controller.parts import ControllerParts
from elastic_ft.core import events as ev
from elastic_ft.core.assignment import CheckpointRef
from elastic_ft.observe.metrics import write_targets
from elastic_ft.observe.run_folder import last_generation
from elastic_ft.transport.control import WELCOME_TIMEOUT_S, Hello, Welcome
from elastic_ft.transport.succession import format_address


class ControllerOpening(ControllerParts):
    """That part of a ``Controller``."""

    def _open(self) -> tuple[CheckpointRef, ...] | None:
        """Returns the checkpoints to go on from, () where workers are; None if it is known by now
        how the job ends."""
        killed = self._takeover.claim_folder(self._alive)
        found = None
        if not self._heir.find() and (found := self._takeover.complete(killed)) is None:
            return None
        self._connections.open(self._welcome, self._hearing)
        server = self._connections.server
        address = (self._connections.address, server.port)
        if found is None and not self._adopt(format_address(address), killed):
            found = None if self._finish is not None else self._takeover.complete(killed)
            if found is None:
                return None
        self._in_charge.set()
        self._alive.in_charge = True
        self._report.start()
        self._serve_metrics()
        if found is not None:
            self._publisher.sweep()
        if places := self.run_folder.places():
            self.host.use_places(places)
        self.host.start(self.post, address, server.key)
        if self._is_adoptable:
            self._durability.start()
        return found or ()

    def _adopt(self, address: str, killed: tuple[str, ...]) -> bool:
        if not self._heir.take_over(address, killed):
            return False
        heritage = self._heir.heritage
        assert heritage is not None and heritage.policy is not None
        self.state, self.policy = heritage.state, heritage.policy
        self.run_id = heritage.standing.run
        return True

    def _begin(self, found: tuple[CheckpointRef, ...]) -> None:
        """Tells the core that the job is ours."""
        if self._heir.heritage is not None:
            for event in self._heir.news(self._publisher.claim.number):
                self._handle(event)
            return
        before = last_generation(self.run_folder.path / "events.jsonl")
        self._observer.begin(self.policy, self._standing())
        self._heir.tell_begun(self._publisher.claim.number, before)
        self._handle(ev.JobStarted(time.time(), found, before, self._takeover.recorded))

    def _standing(self) -> dict[str, Any]:
        return self._heir.standing(self.run_id, self.state).as_json()

    def _serve_metrics(self) -> None:
        network = self.job.network
        port = self._observer.metrics.serve(network.metrics_address, network.port_range)
        served = network.metrics_address
        served = self._connections.address if served in ("0.0.0.0", "::") else served
        write_targets(self.run_folder.path, f"{served}:{port}")
        fields = {"port": port, "run": self.run_id}
        self._observer.journal("metrics_served", 0, "Prometheus metrics of this job", fields)

    def _welcome(self, hello: Hello) -> Welcome:
        if not self._in_charge.wait(WELCOME_TIMEOUT_S):  # the address is public a little before
            raise TimeoutError("this controller has not got the job")
        return Welcome(
            self.job,
            self.run_id,
            self.checkpoint_url,
            self._connections.store,
            self._faults,
            dict(self._continuity.data),
            self._publisher.claim.number,
            self.job.elastic.controller_timeout_s if self._is_adoptable else 0.0,
            self._hearing.heard.get(hello.sender, 0),
            self.state.committed > 0 and not self.job.checkpoint.from_scratch,
        )
