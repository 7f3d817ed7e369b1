"""A file can be read in one sitting, and a function fits a screen."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE_LINES = 450
FUNCTION_LINES = 50

SOURCES = sorted([*(ROOT / "elastic_ft").rglob("*.py"), *(ROOT / "chaos").rglob("*.py")])
OTHERS = sorted(
    path
    for folder in ("tests", "benchmarks", "deploy", "examples")
    for path in (ROOT / folder).rglob("*.py")
)


def test_files() -> None:
    files = [*SOURCES, *OTHERS]
    lines = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in files}
    long = {name for name, count in lines.items() if count > FILE_LINES}
    assert not long, "cut it by its subjects"


def test_functions() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= FUNCTION_LINES
    ]
    assert long == [], "cut it by what it does"
