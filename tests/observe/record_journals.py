"""Makes the kept journals: ``python -m tests.observe.record_journals``.

Real runs on plain processes, a few steps each. They are kept so that a later core can be told the
same again; record them anew where it is meant to decide otherwise.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from elastic_ft.controller.controller import Controller
from elastic_ft.faults import PointFault
from elastic_ft.observe.run_folder import read_lines
from tests.multiproc.harness import Gate, make_job, run_job

KEPT = Path(__file__).parent / "journals"
FILES = ("events.jsonl", "inbox.jsonl")


def kill_and_stop(out: Path) -> None:
    """Sharded, on three nodes: a worker is killed, its replacement joins, another is stopped."""
    gate = Gate(out / "gate")
    faults = (
        PointFault("backward", "kill", rank=1, step=4, world=3),
        PointFault("forward", "stop", rank=0, step=8, world=3, after=0),
    )
    job = gate.job("fsdp", steps=12, workers=3)
    run_job(job, out / "run", faults=faults, watch=gate).check()


def drain_and_suspend(out: Path) -> None:
    """A node is drained; another is killed, which leaves too few; a new one comes."""

    def on_step(controller: Controller, line: dict[str, Any]) -> None:
        host: Any = controller.host
        nodes = [member.node for member in controller.state.ready.values()]
        if line["step"] == 4:
            host.drain_node(nodes[0], line["committed_at_s"] + 2.0)
        elif line["step"] == 8:
            host.kill_node(nodes[0])

    def watch(controller: Controller) -> None:
        host: Any = controller.host
        if controller.state.phase == "suspended" and not added:
            added.append("n9")
            host.add_node("n9", 1)

    added: list[str] = []
    job = make_job("ddp", steps=12, workers=3, elastic={"min_workers": 2})
    run_job(job, out / "run", on_step=on_step, watch=watch).check()


def user_error_and_restart(out: Path) -> None:
    """User code raises once; the job is stopped and a second controller goes on with it."""

    def stop(controller: Controller, line: dict[str, Any]) -> None:
        if line["step"] == 6:
            controller.stop("someone asked")

    job = make_job("ddp", steps=10, workers=2)
    raised = [PointFault("backward", "raise", rank=1, step=3)]
    run_job(job, out / "run", faults=raised, on_step=stop)
    run_job(job, out / "run")


def main() -> None:
    for record in (kill_and_stop, drain_and_suspend, user_error_and_restart):
        with tempfile.TemporaryDirectory() as folder:
            record(Path(folder))
            kept = KEPT / record.__name__
            shutil.rmtree(kept, ignore_errors=True)
            kept.mkdir(parents=True)
            for name in FILES:
                lines = read_lines(Path(folder) / "run" / name)
                text = "".join(json.dumps(line) + "\n" for line in lines)
                (kept / name).write_text(text.replace(folder, "/run"))


if __name__ == "__main__":
    main()
