"""Scenarios, the runner and its view of a run folder: against a folder written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chaos.clusters import Cluster
from chaos.runner import LOG, Runner, fired_in
from chaos.scenario import SCENARIOS, arm, load_scenario
from elastic_ft.observe.run_reader import Tail, Watch
from tests.waiting import until


class Recorder(Cluster):
    """A cluster that takes notes. ``gone``: pids that are no more."""

    def __init__(self, gone: tuple[int, ...] = ()) -> None:
        self.done: list[tuple[Any, ...]] = []
        self._gone = gone

    def _note(self, *what: Any) -> None:
        self.done.append(what)

    def kill_node(self, node: str) -> None:
        self._note("kill_node", node)

    def kill_raylet(self, node: str) -> None:
        self._note("kill_raylet", node)

    def signal_worker(self, pid: int, name: str) -> None:
        if pid in self._gone:
            raise ProcessLookupError(pid)
        self._note(name, pid)

    def drain_node(self, node: str, deadline_s: float) -> None:
        self._note("drain_node", node, deadline_s)

    def add_node(self) -> None:
        self._note("add_node")


class Written:
    """A run folder, line by line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def line(self, name: str, **values: Any) -> None:
        with (self.path / name).open("a") as file:
            file.write(json.dumps(values) + "\n")

    def formed(self, generation: int, step: int, pids: list[int]) -> None:
        members = [
            {"worker": f"w{pid}", "rank": rank, "pid": pid, "node": f"n{pid}", "raylet_pid": None}
            for rank, pid in enumerate(pids)
        ]
        self.line(
            "events.jsonl",
            event="generation_formed",
            generation=generation,
            step=step,
            members=members,
        )

    def step(self, step: int, generation: int = 1) -> None:
        self.line("steps.jsonl", step=step, generation=generation)


@pytest.fixture
def run(tmp_path: Path) -> Written:
    return Written(tmp_path)


def faults(tmp_path: Path, text: str) -> Any:
    file = tmp_path / "scenario.yaml"
    file.write_text(text)
    return load_scenario(str(file)).external


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_scenario_loads_by_its_name(path: Path) -> None:
    scenario = load_scenario(path.stem)
    assert scenario.description
    assert len(arm(scenario).inside) == len(scenario.at_points)


def test_faults_fire_once_each_at_their_step(run: Written, tmp_path: Path) -> None:
    cluster = Recorder()
    scenario = faults(
        tmp_path,
        """
        faults:
          - {at_step: 2, kill: node, of_rank: 1}
          - {at_step: 2, kill: raylet, of_rank: 0}
          - {at_step: 3, stop: worker, of_rank: 0}
          - {at_step: 3, drain: node, of_rank: 0, deadline_s: 9}
          - {at_step: 4, kill: worker, of_rank: 1}
          - {at_step: 5, add: node}
          - {at_step: 99, add: node}
        """,
    )
    with Runner(scenario, str(tmp_path), cluster) as runner:
        run.formed(1, 0, [10, 11])
        for step in range(1, 6):
            run.step(step)
        until(lambda: len(runner.fired) == 6)
    assert cluster.done == [
        ("kill_node", "n11"),
        ("kill_raylet", "n10"),
        ("STOP", 10),
        ("drain_node", "n10", 9.0),
        ("KILL", 11),
        ("add_node",),
    ]
    assert runner.unfired == ["add node at step 99"]
    logged = [json.loads(line) for line in (tmp_path / "chaos.jsonl").open()]
    assert logged == runner.fired
    assert logged[0]["pid"] == 11


def test_an_event_counts_after_the_faults_before_it(run: Written, tmp_path: Path) -> None:
    cluster = Recorder()
    scenario = faults(
        tmp_path,
        "faults: [{at_step: 2, kill: node, of_rank: 0}, {at_event: suspended, add: node}]",
    )
    with Runner(scenario, str(tmp_path), cluster) as runner:
        run.line("events.jsonl", event="suspended", generation=0)
        run.formed(1, 0, [10])
        run.step(2)
        until(lambda: len(runner.fired) == 1)
        assert cluster.done == [("kill_node", "n10")]
        run.line("events.jsonl", event="suspended", generation=1)
        until(lambda: len(runner.fired) == 2)
    assert runner.unfired == []


def test_a_victim_that_is_gone_is_sought_again(run: Written, tmp_path: Path) -> None:
    cluster = Recorder(gone=(10,))
    scenario = faults(tmp_path, "faults: [{at_step: 1, kill: worker, of_rank: 0}]")
    with Runner(scenario, str(tmp_path), cluster) as runner:
        run.formed(1, 0, [10])
        run.step(1)
        until(lambda: "ProcessLookupError" in "".join(runner.unfired))
        run.formed(2, 1, [12])
        until(lambda: runner.fired)
    assert cluster.done == [("KILL", 12)]


def test_what_a_cluster_cant_do_is_said_and_holds_up_nothing(run: Written, tmp_path: Path) -> None:
    scenario = faults(
        tmp_path,
        """
        faults:
          - {at_step: 1, kill: controller}
          - {at_event: suspended, add: node}
          - {at_step: 3, kill: worker, of_rank: 0}
          - {at_step: 1, kill: terminal}
        """,
    )
    log = tmp_path / LOG
    with Runner(scenario, str(tmp_path), Recorder()) as runner:
        run.formed(1, 0, [10])
        run.step(1)
        until(lambda: "".join(runner.unfired).count("Unsupported") == 2)
        run.line("events.jsonl", event="suspended", generation=1)
        until(lambda: len(runner.fired) == 1)
        run.step(3)
        until(lambda: len(runner.fired) == 2)
    assert runner.unfired == [
        "kill controller at step 1 (Unsupported: kill controller)",
        "kill terminal at step 1 (Unsupported: kill terminal)",
    ]
    assert fired_in(log) == {1, 2}, "the last one was noted before it could not be"


def test_an_earlier_run_in_the_folder_triggers_nothing(run: Written, tmp_path: Path) -> None:
    run.formed(1, 0, [10])
    run.step(50)
    watch = Watch(str(tmp_path))
    assert watch.poll() == ([], [])
    run.formed(2, 50, [20])
    run.step(51, generation=2)
    _, steps = watch.poll()
    assert [line["step"] for line in steps] == [51]
    member = watch.member(0)
    assert member is not None
    assert member["pid"] == 20
    assert watch.member(1) is None


def test_steps_that_were_rolled_back_come_again(run: Written, tmp_path: Path) -> None:
    watch = Watch(str(tmp_path))
    run.formed(1, 0, [10])
    for step in (1, 2, 3):
        run.step(step)
    assert len(watch.poll()[1]) == 3
    run.line("events.jsonl", event="rolled_back", generation=1, step=1)
    swap = tmp_path / "swap"
    swap.write_text(json.dumps({"step": 1, "generation": 1}) + "\n")
    swap.replace(tmp_path / "steps.jsonl")
    run.step(2, generation=2)
    _, steps = watch.poll()
    assert [line["step"] for line in steps] == [2]
    assert watch.step == 2


def test_a_torn_line_waits_for_its_end(tmp_path: Path) -> None:
    tail = Tail(str(tmp_path), "events.jsonl")
    assert tail.read() == []
    path = tmp_path / "events.jsonl"
    path.write_text('{"a": 1}\n{"a"')
    assert tail.read() == [{"a": 1}]
    with path.open("a") as file:
        file.write(": 2}\n")
    assert tail.read() == [{"a": 2}]
    assert tail.read() == []


def test_a_remote_folder_is_read_too() -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    fs.pipe_file("/chaos-test/events.jsonl", b'{"a": 1}\n')
    assert Tail("memory://chaos-test", "events.jsonl").read() == [{"a": 1}]
    fs.rm("/chaos-test", recursive=True)
