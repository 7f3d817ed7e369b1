"""The report of a real run: it agrees with the run's result, and a browser shows it to anybody."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.observe.report import render
from elastic_ft.observe.run_view import AGAIN, PAUSE, START, TRAIN, RunView
from elastic_ft.observe.run_watch import RunWatch
from tests.multiproc.harness import Run
from tests.observe.disturbed import Lifetimes
from tests.observe.test_run_view import HOSTILE, lossy

WIDTHS = (1100, 390)
PHONE = 390


def test_the_picture_of_a_run_says_what_its_result_says(disturbed: tuple[Run, Lifetimes]) -> None:
    run, _ = disturbed
    seen = RunWatch(str(run.path)).look()
    wall_s, badput = run.result["wall_s"], run.result["badput"]
    recovering_s = sum(s for cause, s in badput.items() if cause.startswith("recovery"))
    parts = {TRAIN: run.result["goodput"] * wall_s, PAUSE: recovering_s, START: badput["startup"]}
    parts[TRAIN] -= seen["wall"].get(AGAIN, 0.0)
    # The picture begins with the journal, the run a moment before: longer where much else runs.
    parts[START] -= wall_s - (run.events[-1]["at_s"] - run.events[0]["at_s"])
    for kind, seconds in parts.items():
        assert seen["wall"][kind] == pytest.approx(seconds, abs=0.01 * wall_s), kind
    assert seen["step"] == run.result["steps"]
    assert seen["recoveries"]["count"] == len(run.result["recoveries"])
    assert all(any(w in mark["text"] for mark in seen["marks"]) for w in losses(run))


def test_a_run_leaves_its_report_beside_its_result(disturbed: tuple[Run, Lifetimes]) -> None:
    run, _ = disturbed
    page = (run.path / "report.html").read_text()
    made = json.loads(page.split('id="seen">')[1].split("</script>")[0])
    later = json.loads(json.dumps(RunWatch(str(run.path)).look()))
    assert {**made, "made_at_s": 0} == {**later, "made_at_s": 0}


@pytest.fixture
def page(
    browser: Any, disturbed: tuple[Run, Lifetimes], request: pytest.FixtureRequest
) -> Iterator[Any]:
    """The report, opened; what goes wrong in it fails the test."""
    wanted = getattr(request, "param", {})
    context = browser.new_context(viewport={"width": wanted.get("width", 1100), "height": 800})
    page, wrong = context.new_page(), []
    page.emulate_media(color_scheme=wanted.get("scheme", "light"))
    page.on("console", lambda said: wrong.append(said.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda asked: wrong.append(asked.url) if "report" not in asked.url else 0)
    page.goto(f"file://{disturbed[0].path}/report.html")
    yield page
    context.close()
    assert wrong == []


def losses(run: Run) -> list[str]:
    found = [line["worker"] for line in run.all("worker_lost") + run.all("worker_hung")]
    assert len(found) >= 2
    return found


@pytest.mark.parametrize("page", [{"width": width} for width in WIDTHS], ids=str, indirect=True)
def test_a_browser_shows_the_run(page: Any, disturbed: tuple[Run, Lifetimes]) -> None:
    run, _ = disturbed
    assert page.title() == "tiny: report"
    assert page.locator("h1").inner_text() == "tiny"
    drawn = page.locator("path.loss").get_attribute("d")
    assert len(re.findall("[ML]", drawn)) == len(run.steps) == 60
    for chart in range(4):
        marks = page.locator("svg.chart").nth(chart).locator(".mark.lost")
        assert marks.count() >= 1
    told = page.get_by_role("region", name="Events of the run").inner_text()
    assert all(f"lost {worker}" in told for worker in losses(run))
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_dark_mode_is_dark(page: Any) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(ground)
    assert (light, dark) == ("rgb(255, 255, 255)", "rgb(20, 23, 27)")


def test_keys_alone_move_through_the_run(page: Any, disturbed: tuple[Run, Lifetimes]) -> None:
    """To each mark by buttons, along the time by arrows; what is there is said in words."""
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    slider = page.get_by_role("slider", name="Moment of the run")
    assert page.evaluate("document.activeElement.id") == "moment"
    at_the_end = page.locator("#readout").inner_text()
    page.keyboard.press("PageDown")
    assert page.locator("#readout").inner_text() != at_the_end
    before = float(page.evaluate("document.activeElement.value"))
    page.keyboard.press("ArrowLeft")  # too little, maybe, for other words
    assert float(page.evaluate("document.activeElement.value")) < before
    said = set()
    for _ in range(8):
        page.get_by_role("button", name="To the mark before").press("Enter")
        said.add(slider.get_attribute("aria-valuetext"))
    for worker in losses(disturbed[0]):
        assert any(f"lost {worker}" in text for text in said), said


def test_a_screen_reader_has_words_and_a_table_for_each_picture(page: Any) -> None:
    images = page.get_by_role("img").all()
    assert len(images) == 4
    assert all(len(image.get_attribute("aria-label")) > 30 for image in images)
    for details in page.locator("details").all():
        if details.get_attribute("open") is None:
            details.locator("summary").first.press("Enter")
        details.locator("tbody tr, p").first.wait_for(state="attached")
    worlds = page.get_by_role("region", name="Worlds").inner_text()
    assert "fsdp3" in worlds and "fsdp2" in worlds
    unnamed = "[...document.querySelectorAll('button, input')].filter((e) => !e.labels?.length && "
    assert page.evaluate(unnamed + "!e.ariaLabel && !e.textContent.trim()).length") == 0


def test_what_looks_like_html_is_text(browser: Any, tmp_path: Path) -> None:
    run, view = lossy(), RunView(None, HOSTILE)
    run.event(1040.0, "worker_lost", HOSTILE, worker=HOSTILE, node=HOSTILE, rank=1)
    view.feed(run.events, run.steps)
    (tmp_path / "report.html").write_bytes(render(view.as_json(1050.0)))
    page = browser.new_page()
    page.goto(f"file://{tmp_path}/report.html")
    assert "<img src=x" in page.locator("h1").inner_text()
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    page.get_by_role("region", name="Workers that are gone").wait_for()
    assert page.locator("img").count() == 0
    assert "<img src=x" in page.get_by_role("region", name="Events of the run").inner_text()
    page.close()
