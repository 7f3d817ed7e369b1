"""What the pages tell people to type exists."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import yaml

from elastic_ft.cli.app import app
from elastic_ft.cli.preflight import check_workers
from elastic_ft.cli.where import Where
from elastic_ft.config import parse_job

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> Iterator[str]:
    for language, text in FENCE.findall(page.read_text()):
        if language in languages:
            yield text


def commands(page: Path) -> Iterator[list[str]]:
    """Every command line, of blocks and in running text, as words."""
    text = page.read_text()
    lines = [
        line for block in blocks(page, "", "sh", "bash", "console") for line in block.splitlines()
    ]
    for line in [*lines, *INLINE.findall(FENCE.sub("", text))]:
        try:
            words = shlex.split(line.removeprefix("$ "), comments=True)
        except ValueError:  # a drawing
            continue
        if words:
            yield words


def make_targets() -> set[str]:
    rules = re.findall(r"^([a-z][a-z -]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return {target for rule in rules for target in rule.split()}


def test_the_readme_begins_with_the_two_commands() -> None:
    first = next(blocks(README, "", "sh", "bash"))
    assert [line.split("#")[0].strip() for line in first.splitlines()] == ["make demo", "make test"]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_make_targets_exist(page: Path) -> None:
    named = {word for words in commands(page) if words[0] == "make" for word in words[1:2]}
    assert named <= make_targets()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_subcommands_and_options_exist(page: Path) -> None:
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for words in commands(page):
        if words[0] != "elastic-ft" or len(words) == 1 or words[1].startswith("-"):
            continue
        names, commands_known = words[1], known
        if hasattr(known.get(names), "commands"):  # `elastic-ft checkpoint ls`
            names, commands_known = words[2] if len(words) > 2 else "", known[names].commands
        for subcommand in filter(None, names.split("|")):  # `elastic-ft run|demo`
            assert subcommand in commands_known, " ".join(words)
            params = commands_known[subcommand].params
            options = {option for p in params for option in p.opts} | {"--help"}
            used = {word.split("=")[0] for word in words if word.startswith("--")}
            assert used <= options, " ".join(words)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_blocks_compile(page: Path) -> None:
    for text in blocks(page, "python", "py"):
        compile(text, name_of(page), "exec")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "elastic_ft":
                import elastic_ft

                assert node.attr in elastic_ft.__all__, f"elastic_ft.{node.attr}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_job_files_in_pages_are_valid(page: Path) -> None:
    for text in blocks(page, "yaml"):
        values = yaml.safe_load(text)
        if isinstance(values, dict) and {"model", "data"} <= values.keys():
            check_workers(parse_job(values, name_of(page)), Where(address="auto"))
            assert "max_workers" in values.get("elastic", {}), "it would train on one worker"
