"""The .jsonl files of a run folder: whole lines, or an error that names the line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from elastic_ft.errors import ConfigError
from elastic_ft.storage.mounts import can_hang, plain_path

Line = dict[str, Any]
NEEDED = {  # keys without which nothing can be made of a line
    "events.jsonl": ("generation", "event"),
    "steps.jsonl": ("step", "generation"),
    "ledger.jsonl": ("step",),
    "inbox.jsonl": ("type",),
}
COUNTS = ("step", "seq", "generation")
SEGMENTS = "segments"  # the folder of a remote run folder's closed segments (observe.segments)


def local_path(url: str) -> Path | None:
    """Returns the folder of a path or file:// URL on a disk of this machine; None for any other
    URL. What lies in a mount that can hang is as far away: it is written and read as an object
    store is, with deadlines."""
    path = plain_path(url)
    return None if path is None or can_hang(path) else path


def parse_lines(content: bytes, where: str, name: str = "") -> list[Line]:
    """The complete lines of ``content``. Raises ConfigError, one line, where one of them is none
    that a run writes, or lacks what a file called ``name`` needs."""
    *whole, _ = content.split(b"\n")
    return [_parse(text, f"{where}:{n}", NEEDED.get(name, ())) for n, text in enumerate(whole, 1)]


def _parse(text: bytes, where: str, needed: Iterable[str]) -> Line:
    try:
        line = json.loads(text)
        if not isinstance(line, dict):
            raise ValueError(f"expected an object, found {type(line).__name__}")
        for key in needed:
            if key not in line:
                raise ValueError(f"it has no {key}")
            if key in COUNTS and not isinstance(line[key], int):
                raise ValueError(f"its {key} is no whole number")
    except (ValueError, RecursionError) as error:
        why = " ".join(str(error).split())[:120]
        raise ConfigError(f"{where} is not a line that a run has written: {why}") from None
    return line


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0
