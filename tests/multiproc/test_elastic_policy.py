"""Who makes the world, on real processes: spares, resizing, worlds in multiples, the planner's
choice, and a rank that is slower than the others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic_ft.cli.resize import resize
from elastic_ft.config import Job
from elastic_ft.controller.controller import Controller
from elastic_ft.observe.replay import check_replay
from tests.multiproc.harness import CORPUS, PATIENT, Run, make_job, run_job
from tests.multiproc.slow import SLOW_S

MODEL: dict[str, Any] = {
    "preset": "decoder-1m",
    "kwargs": {"dim": 32, "n_layers": 4, "n_heads": 4, "n_kv_heads": 4, "ffn_dim": 64},
}
THIN = MODEL | {"kwargs": MODEL["kwargs"] | {"n_layers": 1}}
SMALL_BATCH = {"global_batch_size": 4}
RESIZE_S, DEADLINE_S = 60.0, 150.0


def ready(controller: Controller) -> int:
    return len(controller.state.ready)


def world(controller: Controller) -> int:
    state = controller.state
    return len(state.ranks) if state.phase == "running" else 0


class Hold:
    """Holds training back, between two steps, while a condition of the controller's holds."""

    def __init__(self, path: Path, condition: Callable[[Controller], bool]) -> None:
        self.gate, self._condition = path, condition

    def job(self, strategy: str, **sections: Any) -> Job:
        kwargs = {"gate": str(self.gate), **CORPUS}
        data = {"path": "tests.multiproc.tiny:gated", "kwargs": kwargs}
        return make_job(strategy, data=data, **sections)

    def __call__(self, controller: Controller) -> None:
        if self._condition(controller):
            self.gate.touch()
        else:
            self.gate.unlink(missing_ok=True)


def lose(controller: Controller, rank: int) -> str:
    """Kills the member of that rank. Returns its name."""
    assert controller.state.assignment is not None
    worker = controller.state.assignment.members[rank].worker
    controller.host.kill_worker(worker)
    return worker


def formed(run: Run) -> list[tuple[str, int]]:
    """(layout, idle workers) of each generation."""
    return [(line["layout"], len(line["idle"])) for line in run.all("generation_formed")]


def test_a_spare_takes_the_place_of_a_lost_worker(tmp_path: Path) -> None:
    lost: list[str] = []
    hold = Hold(tmp_path / "gate", lambda c: c.state.committed >= 2 and ready(c) < 4 and not lost)
    job = hold.job("fsdp", workers=3, steps=30, elastic={"spares": 1} | PATIENT)

    def on_step(controller: Controller, line: dict[str, Any]) -> None:
        if line["step"] >= 3 and ready(controller) == 4 and not lost:
            lost.append(lose(controller, 1))

    nodes = {f"n{i}": 1 for i in range(4)}
    run = run_job(
        job, tmp_path / "run", nodes=nodes, on_step=on_step, watch=hold, deadline_s=DEADLINE_S
    ).check()
    assert run.worlds()[:2] == [3, 3], run.story()
    (used, *_) = run.all("spare_used")
    members = run.all("generation_formed")[1]["members"]
    assert used["replaces"] == lost[0]
    assert used["worker"] in {member["worker"] for member in members}
    (recovery, *_) = run.recoveries
    assert (recovery["cause"], recovery["steps_lost"]) == ("worker_lost", 0)
    assert (recovery["world_before"], recovery["world_after"]) == (3, 3)


def test_resized_down_and_up_while_it_runs(tmp_path: Path) -> None:
    """By the command, which waits for the world it asked for."""
    path, codes = tmp_path / "run", {}
    asked: list[threading.Thread] = []

    def ask(workers: int) -> None:
        codes[workers] = resize(str(path), workers, RESIZE_S)

    def held(controller: Controller) -> bool:
        if world(controller) == 0 or not asked:
            return False
        wanted = (2, 3)[len(asked) - 1]
        waits = len(asked) == 1 and world(controller) == 2 and asked[0].is_alive()
        return waits or controller.state.target != wanted or ready(controller) < wanted

    def on_step(controller: Controller, line: dict[str, Any]) -> None:
        first = line["step"] >= 3 and not asked
        then = len(asked) == 1 and line["world_size"] == 2 and not asked[0].is_alive()
        if first or then:
            asked.append(threading.Thread(target=ask, args=(2 if first else 3,)))
            asked[-1].start()

    hold = Hold(tmp_path / "gate", held)
    job = hold.job("fsdp", workers=3, steps=40, elastic={"min_workers": 1} | PATIENT)
    run = run_job(job, path, on_step=on_step, watch=hold, deadline_s=DEADLINE_S).check()
    for thread in asked:
        thread.join(RESIZE_S)
    assert codes == {2: 0, 3: 0}, run.story()
    assert run.worlds() == [3, 2, 3]
    assert [(r["cause"], r["steps_lost"]) for r in run.recoveries] == [
        ("resized", 0),
        ("worker_joined", 0),
    ]
    assert not run.all("worker_hung")
    assert not (path / "resize.json").exists()


def test_a_worker_that_fits_no_tensor_parallel_group_stays_warm(tmp_path: Path) -> None:
    lost: list[str] = []
    hold = Hold(tmp_path / "gate", lambda c: world(c) == 2 and ready(c) < 4)
    elastic = {"min_workers": 2, "multiple_of": 2} | PATIENT
    job = hold.job(
        "fsdp",
        workers=4,
        steps=20,
        model=THIN,
        parallel={"tp": 2},
        elastic=elastic,
        batch=SMALL_BATCH,
    )

    def on_step(controller: Controller, line: dict[str, Any]) -> None:
        if line["step"] >= 3 and not lost:
            lost.append(lose(controller, 1))

    run = run_job(
        job,
        tmp_path / "run",
        nodes={"a": 2, "b": 2},
        on_step=on_step,
        watch=hold,
        deadline_s=DEADLINE_S,
    )
    run.check()
    assert formed(run)[:3] == [("fsdp2-tp2", 0), ("ddp1-tp2", 1), ("fsdp2-tp2", 0)], run.story()
    small = run.all("generation_formed")[1]
    assert [idle["reason"] for idle in small["idle"]] == ["worlds are multiples of 2"]
    assert len({member["node"] for member in small["members"]}) == 1  # the node that is whole
    again = {member["pid"] for member in run.all("generation_formed")[2]["members"]}
    first = {m["worker"]: m["pid"] for m in run.all("generation_formed")[0]["members"]}
    assert first[small["idle"][0]["worker"]] in again  # the same process
    assert all(recovery["steps_lost"] == 0 for recovery in run.recoveries)
    whole = make_job("ddp", workers=2, steps=20, model=THIN, batch=SMALL_BATCH)
    run.same_losses_as(run_job(whole, tmp_path / "whole").check())


def test_the_planner_lays_out_who_is_left(tmp_path: Path) -> None:
    """Devices that hold a third of the model: shards, then stages, then tensor parallelism."""
    lost: list[str] = []
    model, nodes = MODEL, {f"n{i}": 1 for i in range(4)}
    parallel = {"devices": {"memory_gb": 0.0007}}

    def on_step(controller: Controller, line: dict[str, Any]) -> None:
        if line["step"] >= 3 * (len(lost) + 1) and line["world_size"] == 4 - len(lost) > 2:
            controller.host.want_workers(0)  # no replacements
            lost.append(lose(controller, 1))

    common: dict[str, Any] = {"steps": 30, "model": model, "batch": SMALL_BATCH}
    job = make_job("auto", workers=4, parallel=parallel, elastic=PATIENT, **common)
    run = run_job(
        job, tmp_path / "run", nodes=nodes, on_step=on_step, deadline_s=DEADLINE_S
    ).check()
    assert [layout for layout, _ in formed(run)] == ["fsdp4", "pp3-ddp1", "ddp1-tp2"], run.story()
    assert not check_replay(run.path).difference  # plans are pure: told the same, the same
    for line in run.all("generation_formed"):
        assert line["reason"].startswith(f"planned {line['layout']}: fits: ")
    assert [recovery["steps_lost"] for recovery in run.recoveries] == [0, 0]
    whole = make_job("ddp", workers=2, **common)
    run.same_losses_as(run_job(whole, tmp_path / "whole").check())


def test_a_slowed_rank_is_replaced_by_a_spare(tmp_path: Path) -> None:
    victims, slow = tmp_path / "victims", []

    def held(controller: Controller) -> bool:
        return controller.state.committed >= 1 and ready(controller) < 4 and not slow

    def on_step(controller: Controller, line: dict[str, Any]) -> None:
        if line["step"] >= 3 and ready(controller) == 4 and not slow:
            assert controller.state.assignment is not None
            member = controller.state.assignment.members[2]
            slow.append(member.worker)
            victims.write_text(f"{member.pid}\n")

    hold = Hold(tmp_path / "gate", held)
    elastic = {"spares": 1, "evict_stragglers": True, "straggler_window_steps": 6} | PATIENT
    model = {"path": "tests.multiproc.slow:slowed", "kwargs": {"victims": str(victims)}}
    job = hold.job("fsdp", workers=3, steps=24, model=model, elastic=elastic, batch=SMALL_BATCH)
    nodes = {f"n{i}": 1 for i in range(4)}
    run = run_job(
        job, tmp_path / "run", nodes=nodes, on_step=on_step, watch=hold, deadline_s=DEADLINE_S
    ).check()
    assert not check_replay(run.path).difference
    (evicted,) = run.all("straggler_evicted")
    assert evicted["worker"] == slow[0], run.story()
    assert evicted["pace_s"] > SLOW_S > evicted["typical_s"]
    assert run.worlds()[:2] == [3, 3]
    (recovery, *_) = run.recoveries
    assert (recovery["cause"], recovery["steps_lost"]) == ("straggler_evicted", 0)
    assert slow[0] not in {m["worker"] for m in run.all("generation_formed")[1]["members"]}
