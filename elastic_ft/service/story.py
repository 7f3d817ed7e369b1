"""What a job does, as its run folder tells it: read again and again, kept in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

from elastic_ft.errors import ElasticError, one_line
from elastic_ft.observe.journal_text import story
from elastic_ft.observe.lines import Line
from elastic_ft.observe.run_reader import RunReader, Tail
from elastic_ft.service.line_stream import Item, LineStream

PIECE_BYTES = 1 << 20  # of a file that are read at once
RATE_S = 20.0  # over which the rate is taken
STEP_KEYS = ("step", "loss", "tokens", "world_size", "generation", "committed_at_s", "layout")


class JobStory:
    """Attributes:
    formed: the last ``generation_formed`` line; {} before the first.
    last: the last committed step's line; {} before the first.
    world: of each generation, when and what.
    result: what is in result.json; {} while there is none. Nothing is known of it while there is
        ``trouble``.
    trouble: why the folder can't be read.
    """

    def __init__(self, run_url: str) -> None:
        self.run_url = run_url
        self.events, self.steps = LineStream(), LineStream()
        self.formed: Line = {}
        self.last: Line = {}
        self.world: list[dict[str, Any]] = []
        self.checkpoint: dict[str, Any] | None = None
        self.seq = -1  # of the last line of the journal
        self.result: dict[str, Any] = {}
        self.trouble = ""
        self._reader = RunReader(run_url)
        self._tails = self._reader.tail("events.jsonl"), self._reader.tail("steps.jsonl")
        self._first_s = 0.0
        self._recent: list[Line] = []
        self._turn = threading.Lock()

    def look(self) -> None:
        """What is new. Any thread; what can't be read now is read later."""
        with self._turn:
            try:
                result = self._reader.known_result()  # before the lines, which are all there then
                for line in _lines(self._tails[0], bool(result)):
                    self._hear(line)
                for line in _lines(self._tails[1], bool(result)):
                    self._count(line)
                self.result, self.trouble = result, ""
            except (ElasticError, OSError) as error:
                self.trouble = one_line(error)

    @property
    def lines(self) -> int:
        """That it keeps in memory."""
        return len(self.events) + len(self.steps)

    def _hear(self, line: Line) -> None:
        seq = int(line.get("seq", self.seq + 1))
        if seq <= self.seq:  # the file was replaced: its lines come again
            return
        self.seq = seq
        at_s = float(line.get("at_s", 0.0))
        self._first_s = self._first_s or at_s
        self.events.add(Item(seq, line | {"text": _text(line, at_s - self._first_s)}))
        match line["event"]:
            case "generation_formed":
                self.formed = line
                fields = {key: line.get(key) for key in ("at_s", "step", "world_size", "layout")}
                self.world.append(fields)
                del self.world[:-1000]
            case "rolled_back":
                self._roll_back(int(line["step"]))
            case "checkpoint_committed":
                self.checkpoint = {"step": line["step"], "at_s": at_s}

    def _roll_back(self, step: int) -> None:
        if self.last and self.last["step"] > step:
            self.steps.add(Item(step, {"step": step}, "rolled_back"))
            self._recent = [line for line in self._recent if line["step"] <= step]
            self.last = self._recent[-1] if self._recent else {"step": step}

    def _count(self, line: Line) -> None:
        if self.last and line["step"] <= self.last["step"]:
            return
        self.last = line
        self.steps.add(Item(line["step"], {key: line.get(key) for key in STEP_KEYS}))
        self._recent.append(line)
        del self._recent[:-200]

    @property
    def committed(self) -> int:
        return int(self.last.get("step", self.formed.get("step", 0)))

    def rates(self) -> tuple[float | None, float | None]:
        """Steps and tokens per second of late; None where that is not known."""
        recent = self._recent[:]
        until_s = recent[-1].get("committed_at_s") if recent else None
        if until_s is None:
            return None, None
        recent = [line for line in recent if line["committed_at_s"] >= until_s - RATE_S]
        spent_s = until_s - recent[0]["committed_at_s"]
        if len(recent) < 2 or spent_s <= 0 or time.time() - until_s > 3 * RATE_S:
            return None, None
        tokens = sum(line.get("tokens", 0) for line in recent[1:])
        return (len(recent) - 1) / spent_s, tokens / spent_s


def _lines(tail: Tail, whole: bool) -> Iterator[Line]:
    """Piece by piece: a file may be of gigabytes. Raises what ``Tail.read`` raises."""
    while found := tail.read(PIECE_BYTES, whole):
        yield from found


def _text(line: Line, elapsed_s: float) -> str:
    try:
        return "\n".join(text.rstrip() for text in story(line, elapsed_s))
    except (KeyError, TypeError, ValueError, AttributeError):  # of another version
        return f"{line['event']}: {line.get('reason', '')}"
