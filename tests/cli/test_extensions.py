"""The command line without, or with broken, packages that add to it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest
import typer

from elastic_ft.cli import extensions
from elastic_ft.errors import ConfigError

BROKEN = EntryPoint("chaos", "chaos.gone:app", "elastic_ft.commands")


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    entries: list[EntryPoint] = []
    monkeypatch.setattr(extensions, "entry_points", lambda group: entries)
    extensions.faults.cache_clear()
    yield entries
    extensions.faults.cache_clear()


def test_a_command_that_cannot_be_imported_takes_no_other_along(
    found: list[EntryPoint], capsys: pytest.CaptureFixture[str]
) -> None:
    found.append(BROKEN)
    extensions.add_commands(typer.Typer())
    said = capsys.readouterr().err
    assert said.startswith("elastic-ft: no command chaos (chaos.gone:app): ModuleNotFoundError")
    assert said.count("\n") == 1


def test_a_run_without_faults_needs_no_package_that_injects_them(found: list[EntryPoint]) -> None:
    with extensions.disturbed(None, "runs/x", "runs/x/checkpoints", False) as by:
        assert (by.inside, by.unfired({})) == ((), [])
        with by.injected(None):
            pass
    with pytest.raises(ConfigError, match=r"one package is to inject faults, found none"):
        extensions.disturbed(object(), "runs/x", "runs/x/checkpoints", False)


@pytest.mark.parametrize("times", [1, 2])
def test_a_broken_or_doubled_package_is_named(found: list[EntryPoint], times: int) -> None:
    found.extend([BROKEN] * times)
    with pytest.raises(ConfigError, match=r"chaos\.gone:app"):
        extensions.faults()
