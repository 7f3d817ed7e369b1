"""What benchmarks and examples import is there: they run too seldom to tell."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
RARE = sorted(p for folder in ("benchmarks", "examples") for p in (ROOT / folder).rglob("*.py"))


def file_of(module: str) -> Path | None:
    path = ROOT / module.replace(".", "/")
    found = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in found if file.is_file()), None)


@cache
def bound_in(path: Path) -> set[str]:
    """Every name that a module may have, wherever in it they are bound."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                names.add(name)
            case ast.AsyncFunctionDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Import() | ast.ImportFrom():
                names.update(alias.asname or alias.name for alias in node.names)
    return names


def missing(code: str) -> list[str]:
    """What is imported of the project's modules that they have not."""
    return [
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.ImportFrom) and (file := file_of(node.module or "")) is not None
        for alias in node.names
        if not {alias.name, "__getattr__"} & bound_in(file)
        and file_of(f"{node.module}.{alias.name}") is None
    ]


def test_what_is_imported_is_there() -> None:
    found = {str(path.relative_to(ROOT)): missing(path.read_text()) for path in RARE}
    assert {path: names for path, names in found.items() if names} == {}


def test_a_name_that_has_gone_would_be_seen() -> None:
    code = "from elastic_ft.core import layouts, membership, gone\nfrom elastic_ft import train"
    assert missing(code) == ["elastic_ft.core.gone"]
