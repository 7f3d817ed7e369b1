"""A headless Chromium, by Playwright: required where CI says so, else what needs it is skipped."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

REQUIRED = "ELASTIC_FT_REQUIRE_BROWSER"  # set by .ci/run, which installs both
BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
MISSING = "no browser: apt-get install chromium-headless-shell, pip install playwright"
SOON_S = 60.0


@contextlib.contextmanager
def opened() -> Iterator[Any]:
    """None where there is none. While it is open, its event loop is this thread's."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        path = None
    if path is None:
        if os.environ.get(REQUIRED):
            pytest.fail(MISSING)
        yield None
        return
    with sync_playwright() as playwright:
        # No sandbox: it has none for root, and opens nothing but our own pages.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with opened() as browser:
        if browser is None:
            pytest.skip(MISSING)
        yield browser


class LivePage:
    """A page of the service, as its user has it. What goes wrong in it is in ``wrong``."""

    def __init__(self, browser: Any, url: str, width: int = 390) -> None:
        self._context = browser.new_context(viewport={"width": width, "height": 800})
        self.page, self.wrong = self._context.new_page(), list[str]()
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", self._said)
        self.page.goto(url)

    def _said(self, message: Any) -> None:
        if "Failed to load resource" not in message.text:  # the service is away: the page says so
            self.wrong.append(message.text)

    def points(self) -> int:
        drawn = self.page.locator("path.loss")
        path = (drawn.get_attribute("d") or "") if drawn.count() else ""
        return path.count("L") + path.count("M")

    def step(self) -> int:
        found = self.page.locator(".tiles dd")
        text = found.first.inner_text() if found.count() else "0"
        return int(text.partition(" ")[0].replace(",", ""))

    def text(self, selector: str) -> str:
        found = self.page.locator(selector)
        return str(found.first.inner_text()) if found.count() else ""

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        until_s = time.monotonic() + SOON_S
        while not condition():
            if time.monotonic() > until_s:
                pytest.fail(f"{what}: the page says:\n{self.text('body')}")
            self.page.wait_for_timeout(100)

    def press(self, button: str, yes: bool = True) -> str:
        """Presses a button and answers what it asks. Returns the question."""
        self.page.get_by_role("button", name=button, exact=True).click()
        asked = self.text("#ask-words")
        self.page.locator("#ask-yes" if yes else "#ask button[value=no]").click()
        return asked

    @property
    def fits(self) -> bool:
        return bool(self.page.evaluate("document.documentElement.scrollWidth <= innerWidth"))

    def close(self) -> None:
        self._context.close()
