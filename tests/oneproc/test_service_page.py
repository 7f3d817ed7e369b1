"""The service's page in a browser, without a cluster: jobs that wait, tokens, a lost connection."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.errors import ConfigError
from elastic_ft.service.access import Rights, new_token, read_token
from tests.browser import LivePage
from tests.oneproc.served import JOB, Served


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path / "F")
    yield served
    served.close()


def test_a_job_is_changed_and_stopped_by_buttons(served: Served, browser: Any) -> None:
    client = served.client()
    job = client.submit({**JOB, "elastic": {"min_workers": 2, "max_workers": 4}})["id"]
    wide = LivePage(browser, served.url, 800)
    wide.until("it is listed", lambda: job in wide.text("table"))
    queue = wide.page.get_by_role("cell", name="default", exact=True)
    broken = "node => { const r = document.createRange(); r.selectNodeContents(node);"
    assert queue.evaluate(f"{broken} return r.getClientRects().length }}") == 1, "no word is broken"
    assert wide.text(".badge") == "queued", "as every other place calls it"
    assert not wide.page.get_by_role("button", name="Later jobs").is_visible(), "this is all"
    wide.close()
    live = LivePage(browser, served.url)
    live.until("it is listed", lambda: job in live.text("table"))
    assert "waits for 2" in live.text("table") and live.fits
    live.page.get_by_role("link", name=job).click()
    live.until("its page is there", lambda: live.text("h1") == job)
    assert "waits for 2" in live.text(".lead")

    live.page.get_by_label("Priority").fill("7")
    assert "priority 7 instead of 0?" in live.press("Set priority")
    live.until("it is taken down", lambda: "taken it down" in live.text("#said"))
    assert client.status(job)["priority"] == 7

    live.page.get_by_label("Workers").fill("9")  # more than it may have: nothing is asked
    live.page.get_by_role("button", name="Resize", exact=True).click()
    assert not live.page.locator("#ask").is_visible()

    assert f"Stop {job}?" in live.press("Stop", yes=False)
    assert client.status(job)["state"] == "queued"
    live.press("Stop")
    live.until("it is stopped", lambda: live.text(".badge") == "stopped")
    assert client.status(job)["state"] == "stopped"
    assert live.fits and live.wrong == []
    live.close()


def test_the_page_says_that_it_is_not_connected(served: Served, browser: Any) -> None:
    job = served.client().submit(JOB)["id"]
    live = LivePage(browser, f"{served.url}/jobs/{job}")
    live.until("it is live", lambda: live.text("#link") == "live")
    live.page.context.set_offline(True)
    live.until("it says so", lambda: live.text("#link").startswith("Not connected"))
    assert "what you see is of" in live.text("#link")
    served.client().set_priority(job, 5)
    live.page.context.set_offline(False)
    live.until("it is live again", lambda: live.text("#link") == "live")
    live.until("news", lambda: live.page.get_by_label("Priority").input_value() == "5")
    served.client().stop(job)  # its streams end
    live.page.goto(f"{served.url}/jobs/nosuch")
    live.until("no such job", lambda: "there is no job nosuch" in live.text("main"))
    live.close()


def test_without_a_token_there_is_nothing_to_see(tmp_path: Path, browser: Any) -> None:
    digest = new_token(tmp_path / "ann")
    served = Served(tmp_path / "F", {"ann": Rights(digest, read=("*",), write=("*",))})
    try:
        job = served.client(tmp_path / "ann").submit(JOB)["id"]
        live = LivePage(browser, served.url)
        live.until("it asks", lambda: live.page.get_by_label("Token").count() == 1)
        assert job not in live.text("body")
        live.page.get_by_label("Token").fill("no-such-token")
        live.page.get_by_role("button", name="Use it").click()
        live.until("refused", lambda: "a token that the service knows" in live.text("form.token"))
        live.page.get_by_label("Token").fill(read_token(tmp_path / "ann"))
        live.page.get_by_role("button", name="Use it").click()
        live.until("it is listed", lambda: job in live.text("table"))
        assert live.page.evaluate("document.cookie + JSON.stringify(sessionStorage)") == "{}"
        with pytest.raises(ConfigError, match="no token"):
            served.client().jobs()
        live.close()
    finally:
        served.close()


def test_thousands_of_jobs_are_turned_over(served: Served, browser: Any) -> None:
    """All of them were in one table. Those that have ended: the last ones first."""
    client = served.client()
    ids = [client.submit(JOB)["id"] for _ in range(203)]
    client.stop(ids[-1])
    live = LivePage(browser, served.url)

    def shown() -> tuple[str, str]:
        texts = live.page.locator("table a").all_text_contents() or [""]
        return texts[0], texts[-1]

    live.until("the first page", lambda: shown() == (ids[0], ids[199]))
    assert live.page.get_by_role("button", name="Earlier jobs").is_disabled()
    live.page.get_by_role("button", name="Later jobs").click()
    live.until("the rest", lambda: shown() == (ids[200], ids[201]))
    live.page.get_by_role("button", name="Earlier jobs").click()
    live.until("back", lambda: shown() == (ids[0], ids[199]))
    live.page.get_by_label("with those that have ended").check()
    live.until("the last ones", lambda: shown() == (ids[3], ids[202]))
    live.page.get_by_role("button", name="Earlier jobs").click()
    live.until("those before", lambda: shown() == (ids[0], ids[2]))
    assert live.fits and live.wrong == []
    live.close()
