"""The stories in docs/architecture.md are walks through the code as it is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
STORIES = dict(re.findall(r"<!-- story: (.*?) -->\n(.*?)<!-- end -->", PAGE, re.DOTALL))
STAY = re.compile(r"\d+\. `(\S+)`: `(\S+)`: [^[\n]*(?:\[(\w+)\])?")
Stay = tuple[str, str, str]


def source_of(path: str, name: str) -> str:
    """The text of a function or ``Class.method``. Raises StopIteration where it is not there."""
    text = (ROOT / "elastic_ft" / path).read_text()
    found: ast.AST = ast.parse(text)
    for part in name.split("."):
        defined = ast.ClassDef | ast.FunctionDef
        body = found.body  # type: ignore[attr-defined]
        found = next(n for n in body if isinstance(n, defined) and n.name == part)
    return ast.get_source_segment(text, found) or ""


def test_there_are_three() -> None:
    assert len(STORIES) == 3
    assert all(len(STAY.findall(text)) == len(text.splitlines()) for text in STORIES.values())


@pytest.mark.parametrize("title", STORIES)
def test_each_stay_leads_to_the_next(title: str) -> None:
    stays: list[Stay] = STAY.findall(STORIES[title])
    missing = []
    for path, name, leads_to in stays:
        source = source_of(path, name)
        if leads_to and not re.search(rf"\b{leads_to}\b", source):
            missing.append(f"{path}: {name} does not name {leads_to}")
    assert missing == []
