"""Generated parts of docs/benchmarks.md: between two markers, made anew by the benchmark's run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def put(document: Path, name: str, text: str) -> None:
    """Replaces what is between ``<!-- name:begin -->`` and ``<!-- name:end -->``.

    Raises ValueError if the document has no such place.
    """
    whole = document.read_text()
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if whole.count(begin) != 1 or whole.count(end) != 1:
        raise ValueError(f"{document}: expected {begin} and {end} once each")
    before, rest = whole.split(begin)
    after = rest.split(end)[1]
    document.write_text(f"{before}{begin}\n{text.strip()}\n{end}{after}")


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown: the first column to the left, all others to the right."""
    lines = [titles, ["---", *("---:" for _ in titles[1:])], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
