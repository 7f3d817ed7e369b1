"""``report.html``: the picture of a run in one file that needs nothing else, and tells nobody."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic_ft.config import Job
from elastic_ft.errors import ConfigError, ElasticError
from elastic_ft.observe import files
from elastic_ft.observe.page import DRAWING, static
from elastic_ft.observe.run_watch import RunWatch

NAME = "report.html"
READ_EVERY_S = 5.0
REST = 4.0  # times what reading a piece of a long run took: for the threads that run it
END_WITHIN_S = 1.0  # what the end of a job waits for it at most
log = logging.getLogger(__name__)

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main id="run">
<noscript><p>This page is drawn by its own script, which is switched off.</p></noscript>
</main>
<script type="application/json" id="seen">{seen}</script>
<script>{script}</script>
</body>
</html>
"""


def render(seen: dict[str, Any]) -> bytes:
    """The report of what ``RunWatch.look`` has seen. No text of the run is taken as HTML."""
    style = static("page.css").decode()
    script = "\n".join(static(name).decode() for name in DRAWING)
    script += "\nshowReport();\n"
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    text = json.dumps(files.finite(seen), allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    name = "".join(c for c in str(seen["name"]) if c.isalnum() or c in "._- ")
    page = PAGE.format(
        policy=policy, title=f"{name}: report", style=style, seen=text, script=script
    )
    return page.encode()


def _digest(text: str) -> str:
    """As a Content-Security-Policy names what it allows."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


class ReportAtEnd:
    """Follows the run of this process, so that its report takes milliseconds when it ends.

    It reads what the controller has written, on a thread of its own; whatever goes wrong with it
    is logged, and the job does not notice.

    Args:
        check: raises where the folder is another controller's by now.
    """

    def __init__(self, folder: Path, job: Job, check: Callable[[], object]) -> None:
        self._folder, self._job, self._check = folder, job, check
        self._over, self._is_wanted = threading.Event(), False
        self._result: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._follow, name="report", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Without a report."""
        self._over.set()

    def write(self, result: dict[str, Any]) -> None:
        """The run has ended with ``result``. Returns once it is there, or after a second."""
        if not self._thread.is_alive():
            return
        self._result, self._is_wanted = result, True
        self._over.set()
        self._thread.join(END_WITHIN_S)
        if self._thread.is_alive():
            log.warning("no %s in time: elastic-ft report makes it", NAME)

    def _follow(self) -> None:
        try:
            watch = RunWatch(str(self._folder), self._job)
            while not self._over.wait(READ_EVERY_S):
                watch.read(REST)
            if self._is_wanted:
                page = render(watch.look(self._result))
                files.replace(self._folder / NAME, page, self._check)
        except (ConfigError, ElasticError, OSError) as error:
            log.warning("no %s: %s", NAME, " ".join(str(error).split()))
