"""What a person who waits for a run sees of it."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from elastic_ft.config import Job
from elastic_ft.config.section import COUNT_MAX
from elastic_ft.errors import StoreFailed
from elastic_ft.observe.journal_text import brief
from elastic_ft.observe.run_reader import RunReader, Watch
from elastic_ft.observe.wording import counted

LONG_S = 20.0  # of what may take seconds: more, and a person wonders
NAMED_SHOWN = 4  # metrics of a step, on its line
STEP_LINE_EVERY_S = 5.0  # where there is no terminal
WATCH_EVERY_S = 0.2
RATE_STEPS, RATE_S = 500, 5.0  # tokens/s and ETA: over the last seconds, at most so many steps

console = Console(highlight=False, soft_wrap=True)


def say(text: str) -> None:
    console.print(text, markup=False)


@contextlib.contextmanager
def saying_if_long(what: str, first_s: float = LONG_S) -> Iterator[None]:
    """Says how long it has taken so far: after ``first_s``, then after twice as long, and so on."""
    is_over, began_s = threading.Event(), time.monotonic()

    def tell() -> None:
        next_s = first_s
        while not is_over.wait(began_s + next_s - time.monotonic()):
            say(f"{what}: {next_s:g} s so far")
            next_s *= 2

    threading.Thread(target=tell, name="saying-if-long", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def print_json(values: Any) -> None:
    print(json.dumps(values, indent=2, allow_nan=False))


class ProgressDisplay:
    """Says what a run does, from its folder: lines, and on a terminal a status below them."""

    def __init__(self, job: Job, out: str, watch: Watch | None = None) -> None:
        self._job = job
        self._watch = watch or RunReader(out).follow()
        self._recent: deque[dict[str, Any]] = deque(maxlen=RATE_STEPS)
        self._began_s = time.monotonic()
        self._next_line_s = 0.0
        self._over = threading.Event()
        shows_status = console.is_terminal and not console.is_dumb_terminal
        self._status = console.status("starting") if shows_status else None
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)

    def __enter__(self) -> ProgressDisplay:
        if self._status is not None:
            self._status.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10)
        if self._status is not None:
            self._status.stop()

    def _follow(self) -> None:
        last = False
        while not last:
            last = self._over.wait(WATCH_EVERY_S)
            try:
                news, steps = self._watch.poll(whole=last)
            except StoreFailed as error:
                self._say(f"the last lines can't be read: {error}")
                break
            for line in news:
                if told := brief(line):
                    self._say(told)
            self._recent.extend(steps)
            if steps:
                self._show_step(steps[-1], last)

    def _say(self, text: str) -> None:
        say(f"{time.monotonic() - self._began_s:7.1f} s  {text}")

    def _show_step(self, line: dict[str, Any], last: bool) -> None:
        text = self._describe(line)
        if self._status is not None:
            self._status.update(text)
            return
        now = time.monotonic()
        if now >= self._next_line_s or last or line["step"] == self._job.steps:
            self._next_line_s = now + STEP_LINE_EVERY_S
            self._say(text)

    def _describe(self, line: dict[str, Any]) -> str:
        recent = [s for s in self._recent if s["generation"] == line["generation"]]  # no pauses
        long_ago = line["committed_at_s"] - RATE_S  # several steps may be committed at once
        start = max((i for i, s in enumerate(recent) if s["committed_at_s"] <= long_ago), default=0)
        first, after = recent[start], recent[start + 1 :]
        known = self._job.steps < COUNT_MAX  # else a loop ends when it likes
        of = f"/{self._job.steps}" if known else ""
        loss = "nan" if line["loss"] is None else f"{line['loss']:.4f}"
        text = f"step {line['step']}{of}  loss {loss}"
        named = [*(line.get("metrics") or {}).items()][:NAMED_SHOWN]
        text += "".join(f"  {name} {value:.4g}" for name, value in named)
        spent_s = line["committed_at_s"] - first["committed_at_s"]
        if after and spent_s > 1:
            left_s = (self._job.steps - line["step"]) * spent_s / len(after)
            text += f"  {self._amount(after) / spent_s:,.0f} {self._job.unit}/s"
            text += f"  ETA {clock(left_s)}" if known else ""
        return f"{text}  {counted(line['world_size'], 'worker')}  generation {line['generation']}"

    def _amount(self, after: list[dict[str, Any]]) -> int:
        """What the steps ``after`` took, in ``Job.unit``: some of them may be made again."""
        if self._job.unit == "samples":
            return len(after) * self._job.batch.global_batch_size
        return int(sum(step["tokens"] for step in after))


def clock(seconds: float) -> str:
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"
