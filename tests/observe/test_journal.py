"""The journal is what docs/journal.md says: what is written is declared, what is declared is
written, and whoever reads the journal goes by the same names."""

from __future__ import annotations

import ast
import string
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.scenario import load_scenario
from docs import tables
from elastic_ft.core import invariants
from elastic_ft.errors import ConfigError
from elastic_ft.observe import journal
from elastic_ft.observe.catalogue import METRICS
from tests.observe.undeclared import undeclared

ROOT = Path(__file__).parents[2]
WRITERS = {  # what writes a line -> which argument is the event's name
    **dict.fromkeys(("journal", "_journal", "decided", "_write", "note"), 0),
    **{"Journal": 0, "Note": 2},
}


def test_the_document_has_every_event() -> None:
    page = (tables.DOCS / "journal.md").read_text()
    assert page == tables.page("journal.md"), "run python docs/tables.py"


def written(source: Path, constants: dict[str, str]) -> Iterator[str]:
    """The names of the events that a module writes."""
    tree = ast.parse(source.read_text())
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            parameters = {argument.arg for argument in function.args.args}
            chosen = {
                name.id: statement.value
                for statement in ast.walk(function)
                if isinstance(statement, ast.Assign)
                for name in statement.targets
                if isinstance(name, ast.Name)
            }
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and (at := position(call)) is not None:
                    name = call.args[at]
                    if not (isinstance(name, ast.Name) and name.id in parameters):
                        yield from named(name, chosen, constants)


def position(call: ast.Call) -> int | None:
    called = call.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    at = WRITERS.get(name)
    return at if at is not None and len(call.args) > at + 1 else None


def named(name: ast.expr, chosen: dict[str, ast.expr], constants: dict[str, str]) -> Iterator[str]:
    if isinstance(name, ast.Constant):
        yield str(name.value)
    elif isinstance(name, ast.IfExp):
        yield from named(name.body, chosen, constants)
        yield from named(name.orelse, chosen, constants)
    elif isinstance(name, ast.Name) and name.id in chosen:
        yield from named(chosen[name.id], {}, constants)
    elif isinstance(name, ast.Name) and name.id in constants:
        yield constants[name.id]
    else:  # handed on, and found where it comes from; the other is a time
        known = ast.unparse(name).endswith(".event") or ast.unparse(name) == "time.time()"
        assert known, f"which event is {ast.unparse(name)}?"


def constants_of(sources: list[Path]) -> dict[str, str]:
    """The strings that modules give names in capital letters."""
    found = {}
    for source in sources:
        for statement in ast.parse(source.read_text()).body:
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
                for name in statement.targets:
                    if isinstance(name, ast.Name) and isinstance(statement.value.value, str):
                        found[name.id] = statement.value.value
    return found


def test_what_is_written_is_declared_and_the_other_way_round() -> None:
    planner = ROOT / "elastic_ft" / "core" / "layouts"  # its notes are none of a journal
    sources = [path for path in (ROOT / "elastic_ft").rglob("*.py") if planner not in path.parents]
    constants = constants_of(sources)
    found = {name for source in sources for name in written(source, constants)}
    assert found - journal.EVENTS.keys() == set(), "written, and not in the catalogue"
    assert journal.EVENTS.keys() - found == set(), "in the catalogue, and written by nobody"


def test_an_undeclared_name_would_be_seen(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text(
        "def do(turn, bad):\n"
        "    name = 'one' if bad else 'two'\n"
        "    turn.journal(name, 'why', worker='w')\n"
        "    turn.journal(THREE, 'why')\n"
        "    send(Note('w', 3, 'four', 'why'))\n"
        "def hand_on(event):\n"
        "    journal(event, 'why')\n"
    )
    assert set(written(source, {"THREE": "three"})) == {"one", "two", "three", "four"}


@pytest.mark.parametrize("event", journal.EVENTS.values(), ids=lambda event: event.name)
def test_an_events_texts_and_metric_are_of_what_there_is(event: journal.JournalEvent) -> None:
    assert event.meaning.endswith(".")
    fields = {field.name for field in (*journal.COMMON, *event.fields) if field.always}
    for text in (event.brief, event.full):
        if isinstance(text, str):
            used = {name for _, name, _, _ in string.Formatter().parse(text) if name}
            assert used <= fields
    if event.counted is not None:
        name, labels = event.counted
        assert METRICS[name].kind == "counter"
        assert set(labels) == set(METRICS[name].labels)


def test_each_field_is_used() -> None:
    used = {field.name for event in journal.EVENTS.values() for field in event.fields}
    assert {field.name for field in journal._FIELDS} == used


def test_invariants_are_checked_by_fields_that_every_line_has() -> None:
    for name, keys in invariants._KEYS_OF_EVENT.items():
        always = {field.name for field in journal.EVENTS[name].fields if field.always}
        assert set(keys) <= always, name
    assert {field.name for field in journal.COMMON} == set(invariants._EVENT_KEYS)


def test_a_line_that_is_not_as_declared_is_found() -> None:
    common = {"at_s": 1.0, "seq": 0, "generation": 0, "reason": "why"}
    lines = [
        common | {"event": "keeper_lost", "node": "n0"},
        common | {"event": "keeper_lost", "worker": "w0"},
        common | {"event": "keeper_found"},
    ]
    assert list(undeclared(lines)) == [
        "keeper_lost has worker, which is not in the catalogue",
        "keeper_lost has no node",
        "keeper_found is not in the catalogue",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "faults: [{at_event: supended, add: node}]",
        "faults: [{at_step: 2, add: node}]\nexpect: {no_events: [supended]}",
        "faults: [{at_step: 2, fill: run_folder, lasts_s: 1, until_event: supended}]",
    ],
)
def test_a_scenario_with_a_misspelt_event_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"no event 'supended': docs/journal\.md"):
        load_scenario(str(path))
