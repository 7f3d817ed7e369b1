"""``--help`` says in whole sentences what there is, and no type of what takes no value."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import typer

from elastic_ft.cli.app import app, run_command

TREE = typer.main.get_command(app)


def _groups() -> Iterator[list[str]]:
    yield []
    yield from ([name] for name, one in TREE.commands.items() if hasattr(one, "commands"))  # type: ignore[attr-defined]


def _helps(capfd: pytest.CaptureFixture[str]) -> Iterator[str]:
    for group in _groups():
        one = TREE.commands[group[0]] if group else TREE  # type: ignore[attr-defined]
        for words in ([*group], *([*group, name] for name in one.commands)):
            assert run_command([*words, "--help"]) == 0
            yield capfd.readouterr().out


def test_flags_have_no_type(capfd: pytest.CaptureFixture[str]) -> None:
    """`demo --help` showed `--help  <bool>`."""
    helps = list(_helps(capfd))
    assert len(helps) > 30
    assert [text for text in helps if "bool" in text] == []


def test_what_commands_do_is_not_cut_off(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for group in _groups():
        run_command([*group, "--help"])
        commands = capfd.readouterr().out.split("Commands:")[1].splitlines()
        assert [line for line in commands if line.endswith("...")] == []
