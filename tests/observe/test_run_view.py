"""What the picture of a run is made of: small however long the run was, and true to it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_ft.cli.app import COMPLETED, run_command
from elastic_ft.config import parse_job
from elastic_ft.errors import StoreFailed
from elastic_ft.observe.report import render
from elastic_ft.observe.run_view import LOST, PAUSE, START, TRAIN, RunView
from elastic_ft.observe.run_watch import RunWatch
from elastic_ft.observe.series import BINS_MAX, BUCKETS_MAX, Bins, Extremes, Throughput

JOURNALS = Path(__file__).parent / "journals"
NOW_S = 5000.0


class Written:
    """Lines as a run writes them."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self.generation = 0

    def event(self, at_s: float, event: str, reason: str = "because", **fields: Any) -> None:
        line = {"at_s": at_s, "seq": len(self.events), "generation": self.generation}
        self.events.append({**line, "event": event, "reason": reason, **fields})

    def formed(self, at_s: float, world: int, step: int = 0) -> None:
        self.generation += 1
        members = [
            {"worker": f"w{n}", "rank": n, "pid": 100 + n, "node": f"n{n}", "host": "here"}
            for n in range(world)
        ]
        fields = {"step": step, "layout": f"ddp{world}", "world_size": world, "wanted": 2}
        more = {"idle": [], "source": "live", "members": members}
        self.event(at_s, "generation_formed", **fields, **more)

    def step(self, at_s: float, step: int, loss: float | None = 1.0) -> None:
        line = {"step": step, "generation": self.generation, "loss": loss, "tokens": 100}
        self.steps.append({**line, "samples": 8 * step, "committed_at_s": at_s})

    def named(self, **metrics: float | None) -> None:
        self.steps[-1]["metrics"] = metrics

    def recovered(self, at_s: float, lost: int) -> None:
        fields = {"cause": "worker_lost", "at_step": 3, "world_before": 2, "world_after": 1}
        cost = {"paused_s": 1.0, "steps_lost": lost, "steps_redone": 0, "noticed_s": 0.1}
        more = {"survivors_kept_pid": True, "bytes_moved": 5}
        self.event(at_s, "recovered", **fields, **cost, **more)

    def seen(self) -> dict[str, Any]:
        view = RunView(None, "run")
        view.feed(self.events, self.steps)
        return view.as_json(NOW_S)


def lossy() -> Written:
    """Ten seconds of start, ten steps, a loss with a pause of 1 s, ten more, the end."""
    run = Written()
    run.event(1000.0, "job_started", step=0)
    run.formed(1010.0, 2)
    for number in range(10):
        run.step(1011.0 + number, number + 1)
    run.event(1015.0, "resize_requested", "2 workers are wanted", workers=2, before=2, request="r")
    run.event(1020.5, "worker_lost", "its connection ended", worker="w1", node="n1", rank=1)
    run.event(1020.5, "pausing", abort=True)
    run.formed(1021.5, 1, 10)
    run.recovered(1021.5, lost=0)
    for number in range(10):
        run.step(1022.5 + number, number + 11)
    run.event(1032.0, "finished", "all steps", status="completed")
    return run


def test_what_a_picture_shows_of_a_run() -> None:
    seen = lossy().seen()
    assert seen["wall"] == {START: 10.0, TRAIN: 21.0, PAUSE: 1.0}
    assert (seen["state"], seen["step"], seen["now_x"]) == ("completed", 20, 32.0)
    assert seen["worlds"] == [[10.0, 2, "ddp2", 1], [21.5, 1, "ddp1", 2]]
    assert [(m["kind"], m["x"], m["text"]) for m in seen["marks"]] == [
        (LOST, 20.5, "lost w1 (rank 1): its connection ended")
    ]
    assert all(told[5] for told in seen["events"]), "what changes nothing is not told"
    assert [seat["worker"] for seat in seen["workers"]] == ["w0"]
    assert [(seat["worker"], seat["left_x"]) for seat in seen["gone"]] == [("w1", 20.5)]
    assert seen["eta_s"] is None


def test_named_metrics_are_series_of_their_own_and_no_more_than_there_is_room_for() -> None:
    run = lossy()
    run.named(accuracy=0.5, **{f"other{n}": 1.0 for n in range(20)})
    run.step(1032.0, 21)
    run.named(accuracy=math.nan)
    named = run.seen()["series"]["named"]
    assert named["accuracy"] == [(31.5, 20, 0.5), (32.0, 21, None)]
    assert len(named) == 8


def test_lines_that_come_again_change_nothing() -> None:
    run, view = lossy(), RunView(None, "run")
    view.feed(run.events, run.steps)
    once = json.dumps(view.as_json(NOW_S))
    view.feed(run.events, run.steps)
    assert json.dumps(view.as_json(NOW_S)) == once


@pytest.mark.parametrize("pieces", (1, 2, 7))
def test_a_run_read_in_pieces_is_the_same(pieces: int) -> None:
    run, view = lossy(), RunView(None, "run")
    waiting: list[dict[str, Any]] = list(run.events)
    for n in range(0, len(run.steps), pieces):
        waiting = view.feed(waiting, run.steps[n : n + pieces], until_last_step=True)
    view.feed(waiting, [])
    assert view.as_json(NOW_S) == run.seen()


def test_a_job_that_is_written_later_is_known_then(tmp_path: Path) -> None:
    """The service's page may look before the run has begun."""
    watch = RunWatch(str(tmp_path))
    seen = watch.look()
    assert (seen["state"], seen["steps"], seen["config"]) == ("starting", None, [])
    job = {"name": "later", "steps": 99, "model": {"preset": "decoder-1m"}}
    text = yaml.safe_dump(job | {"data": {"url": "stdlib:"}, "elastic": {"max_workers": 2}})
    (tmp_path / "job.yaml").write_text(text)
    seen = watch.look()
    assert (seen["name"], seen["steps"], seen["max_workers"]) == ("later", 99, 2)
    assert seen["unit"] == "tokens" and dict(seen["config"])["model"] == "decoder-1m"


def test_time_in_which_nobody_ran_it_is_left_out() -> None:
    run = lossy()
    run.event(5000.0, "job_started", step=20)
    run.formed(5010.0, 1, 20)
    run.step(5011.0, 21)
    view = RunView(None, "run")
    view.feed(run.events, run.steps)
    seen = view.as_json(5012.0)
    assert seen["gaps"] == [(32.0, 3968.0)]
    assert seen["now_x"] == 44.0 and sum(seen["wall"].values()) == pytest.approx(44.0)
    assert seen["series"]["loss"][-1][:2] == (43.0, 21)
    assert seen["state"] == "running"


def test_steps_that_are_lost_count_as_trained_again() -> None:
    run = lossy()
    run.recovered(1033.0, lost=5)
    wall = run.seen()["wall"]
    assert wall["again"] == pytest.approx(5.0, rel=0.2)
    assert wall["again"] + wall[TRAIN] == pytest.approx(21.0, abs=0.6)


def test_a_running_run_says_when_it_ends() -> None:
    """Twenty of fifty steps are done, one a second of late."""
    values = {"name": "x", "steps": 50, "model": {"preset": "decoder-1m"}}
    view, run = RunView(parse_job({**values, "data": {"url": "stdlib:"}}), "run"), lossy()
    view.feed(run.events[:-1], run.steps)
    seen = view.as_json(1032.0)
    assert seen["state"] == "running" and seen["ended_at_s"] is None
    assert seen["rate"] == pytest.approx(100.0, rel=0.1)
    assert seen["eta_s"] == pytest.approx(30.0, rel=0.1)
    dead = view.as_json(1090.0, dead="no controller is alive")
    assert (dead["state"], dead["eta_s"], dead["now_x"]) == ("dead", None, 31.5)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # of a starved machine
@given(st.lists(st.floats(-1e6, 1e6) | st.none(), max_size=3000))
def test_a_series_keeps_its_ends_and_extremes(values: list[float | None]) -> None:
    series = Extremes()
    for step, value in enumerate(values, 1):
        series.add(step * 0.5, step, value)
    points = series.points()
    assert len(points) <= 5 * BUCKETS_MAX
    assert [p[1] for p in points] == sorted({p[1] for p in points})
    if len(values) <= BUCKETS_MAX:
        assert [p[2] for p in points] == values
    known = [v for v in values if v is not None]
    kept = [p[2] for p in points if p[2] is not None]
    if values:
        assert points[0][1] == 1 and points[-1][1] == len(values)
    if known:
        assert (min(kept), max(kept)) == (min(known), max(known))
    assert (None in values) == (len(kept) < len(points))


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 300), st.floats(0, 5)), max_size=200))
def test_bins_lose_nothing(parts: list[tuple[float, float]]) -> None:
    bins, x = Bins(), 0.0
    for spent, amount in parts:
        bins.add("a", x, x + spent, amount)
        x += spent
    assert len(bins.bins) <= BINS_MAX
    assert bins.totals().get("a", 0.0) == pytest.approx(math.fsum(a for _, a in parts))
    assert bins.wider(1e5).totals() == pytest.approx(bins.totals())


def test_steps_committed_together_are_no_peak() -> None:
    rate = Throughput()
    rate.begin(0.0)
    for number in range(10):
        for _ in range(3):
            rate.add(3.0 * (number + 1), 30.0)
    _, values = rate.per_second(0.25)
    assert values == [pytest.approx(30.0)] * len(values)


def long_folder(folder: Path, steps: int) -> list[int]:
    """A run that loses and regains a worker again and again; the steps at which it loses one."""
    run, at_s, lost = Written(), 1000.0, []
    run.event(at_s, "job_started", step=0)
    run.formed(at_s + 1, 2)
    for step in range(1, steps + 1):
        at_s += 0.5
        run.step(at_s, step, 9.0 if step == steps // 3 else 1.0)
        if step % (steps // 300) == 0:
            lost.append(step)
            run.event(at_s, "worker_lost", "gone", worker="w1", node="n1", rank=1)
            run.formed(at_s + 0.1, 2, step)
        if step % 10 == 0:
            run.event(at_s, "evaluated", step=step, loss=2.0, tokens=5)
    run.event(at_s + 1, "finished", "all steps", status="completed")
    for name, lines in (("events", run.events), ("steps", run.steps)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    return lost


def test_the_report_of_a_long_run_is_small_and_keeps_every_fault(tmp_path: Path) -> None:
    lost = long_folder(tmp_path, 6000)
    seen = RunWatch(str(tmp_path)).look()
    assert [mark["x"] for mark in seen["marks"]] == [pytest.approx(0.5 * s) for s in lost]
    assert len([e for e in seen["events"] if e[3] == "worker_lost"]) == len(lost) == 300
    assert max(point[2] for point in seen["series"]["loss"]) == 9.0
    assert len(render(seen)) < 200_000


def test_a_store_that_goes_away_in_the_middle_of_a_look_costs_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that are read are not read again: the look that broke off had them."""
    lost = long_folder(tmp_path, 600)
    expected, watch = RunWatch(str(tmp_path)).look(), RunWatch(str(tmp_path))
    read, asked = watch._events.read, []

    def away_once(*args: Any, **options: Any) -> Any:
        asked.append(options)
        if len(asked) == 1:
            raise StoreFailed("connection refused")
        return read(*args, **options)

    monkeypatch.setattr(watch._events, "read", away_once)
    seen = watch.look({"status": "completed"})
    assert len(asked) > 1 and len(seen["marks"]) == len(lost)
    losses = [point[1:] for point in expected["series"]["loss"]]
    assert [point[1:] for point in seen["series"]["loss"]] == losses


def test_more_faults_than_a_picture_has_room_for_are_counted(tmp_path: Path) -> None:
    run = Written()
    run.event(1000.0, "job_started", step=0)
    run.formed(1001.0, 2)
    for n in range(3000):
        run.event(1002.0 + n, "worker_lost", "gone", worker=f"x{n}", node="n", rank=None)
    seen = run.seen()
    assert sum(mark["count"] for mark in seen["marks"]) == seen["counts"][LOST] == 3000
    assert len(seen["marks"]) <= 400 and len(seen["events"]) <= 400
    assert len(seen["events"]) + seen["events_left_out"] == 3002


@pytest.mark.parametrize("name", sorted(path.name for path in JOURNALS.iterdir()))
def test_recorded_journals_are_told(name: str, tmp_path: Path) -> None:
    seen = RunWatch(str(JOURNALS / name)).look()
    assert seen["generation"] > 0 and seen["marks"] and seen["wall"][TRAIN] > 0
    assert seen["ended_at_s"] is not None
    assert sum(seen["wall"].values()) == pytest.approx(seen["now_x"], abs=0.01)


HOSTILE = "</script><img src=x onerror=alert(1)>&\u2028"


def test_no_text_of_a_run_is_html() -> None:
    run = lossy()
    run.event(1040.0, "worker_lost", HOSTILE, worker=HOSTILE, node=HOSTILE, rank=1)
    view = RunView(None, HOSTILE)
    view.feed(run.events, run.steps)
    page = render(view.as_json(NOW_S)).decode()
    assert page.count("</script>") == 2 and "<img" not in page and "\u2028" not in page
    inside = page.split('id="seen">')[1].split("</script>")[0]
    assert json.loads(inside)["name"] == HOSTILE
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")


def test_the_command_makes_a_report_of_any_run_folder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    long_folder(tmp_path, 300)
    assert run_command(["report", str(tmp_path)]) == COMPLETED
    assert (tmp_path / "report.html").read_bytes().startswith(b"<!doctype html>")
    assert capfd.readouterr().out.startswith(f"{tmp_path}/report.html: ")
    assert run_command(["report", str(tmp_path), "--out", "/dev/null/x"]) == 2
    assert run_command(["report", str(tmp_path / "nowhere")]) == 2
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 2 and "can't be written" in told[0] and "not a run folder" in told[1]


@pytest.mark.parametrize(
    "line", ({"at_s": "x"}, {"at_s": 1e999}, {"seq": None}, {"at_s": None}), ids=str
)
def test_a_line_that_makes_no_sense_is_one_line_of_words(
    line: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = lossy()
    run.events[2] |= line
    for name, lines in (("events", run.events), ("steps", run.steps)):
        text = "".join(json.dumps(one) + "\n" for one in lines)
        (tmp_path / f"{name}.jsonl").write_text(text)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({"name": "x"}))
    assert run_command(["report", str(tmp_path)]) == 2
    told = capfd.readouterr().err
    assert told.count("\n") == 1 and "events.jsonl has a line that can't be shown" in told
