"""A parallel dimension is spelled out in few files: whoever adds one touches these.

A file counts where its code has `tp`, say: as a name, an attribute, an argument or a keyword, by
itself or as a word of a longer one (`max_tp`), or as a whole string. Comments and messages don't
count. Others ask ``Layout``, or go through its list of dimensions.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OTHERWISE = {"tp_plan", "pp_plan"}  # of their own: how a model says that it is cut
FILES_MAX = 9


def names_in(code: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.keyword(arg=str(name)) | ast.Constant(value=str(name)):
                yield name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name


def spelled_out(codes: Iterable[tuple[str, str]], spelled: Collection[str]) -> list[str]:
    """The files, of (name, code) each, that name one of the dimensions ``spelled``."""
    return [
        file
        for file, code in codes
        if any(
            {*spelled} & {*name.split("_")}
            for name in names_in(code)
            if name not in OTHERWISE and name.isidentifier()
        )
    ]


@pytest.mark.parametrize("spelled", [("tp", "pp"), ("cp",), ("ep",)])
def test_few_files_spell_out_a_dimension(spelled: tuple[str, ...]) -> None:
    sources = sorted((ROOT / "elastic_ft").rglob("*.py"))
    codes = ((str(p.relative_to(ROOT)), p.read_text()) for p in sources)
    found = spelled_out(codes, spelled)
    assert "elastic_ft/core/layouts/layout.py" in found
    assert len(found) <= FILES_MAX, found


def test_what_counts() -> None:
    counted = ("layout.pp", "def cut(tp): ...", "Layout(pp=2)", "max_tp = 1", "sizes['tp']")
    assert spelled_out([(code, code) for code in counted], ("tp", "pp")) == [*counted]
    others = ("layout.has_stages", "job.parallel.tp_plan", "raise ValueError('no tp')", "# pp")
    assert spelled_out([(code, code) for code in others], ("tp", "pp")) == []
