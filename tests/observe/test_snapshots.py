"""The inbox stays small: the core's state takes the place of all that it was told before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.core.membership import step as decide
from elastic_ft.core.policy import Policy
from elastic_ft.core.sharing.ledger import Sharing
from elastic_ft.core.state import State
from elastic_ft.errors import ConfigError
from elastic_ft.observe import inbox_file, replay, snapshots
from elastic_ft.observe.run_folder import RunFolder
from elastic_ft.observe.run_reader import read_lines
from tests.observe.test_replay import JOURNALS, KEPT


def told(name: str) -> Iterator[tuple[Policy, State, replay.ToldLine]]:
    """Each event of a kept journal, with the state before it."""
    state, policy = State(), Policy(1, 1)
    for item in replay.parse_inbox(read_lines(KEPT / name / "inbox.jsonl")):
        if isinstance(item, replay.Begun):
            policy = item.policy
        elif isinstance(item, replay.ToldLine):
            if type(item.event).__name__ == "JobStarted":
                state = State()
            yield policy, state, item
            state, _ = decide(state, item.event, policy)


@pytest.mark.parametrize("name", JOURNALS)
def test_every_state_of_a_run_comes_back_whole_and_decides_the_same(name: str) -> None:
    count = 0
    for policy, state, item in told(name):
        again = snapshots.decode(json.loads(json.dumps(snapshots.as_plain_values(state))))
        assert again == state
        assert decide(again, item.event, policy) == decide(state, item.event, policy)
        count += 1
    assert count > 50


@pytest.mark.parametrize("name", JOURNALS)
def test_a_long_run_stays_bounded_and_can_be_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As the controller writes it: many times the bound is told, little more is kept."""
    monkeypatch.setattr(inbox_file, "INBOX_BYTES", 10_000)
    folder = RunFolder(str(tmp_path))
    path, begun, snapshot, longest = tmp_path / "inbox.jsonl", 0, 0, 0
    for number, (policy, state, item) in enumerate(told(name)):
        line = {"type": "Policy", "at_s": 0.0, **asdict(policy)}
        if number == 0:
            folder.record_inbox(line)
        if folder.inbox_is_full:
            folder.begin_inbox(item.at_s, line, snapshots.as_plain_values(state))
            begun += 1
            snapshot = path.stat().st_size
        event = item.event
        before = path.stat().st_size
        told_line = {"type": type(event).__name__, "told_at_s": item.at_s, **asdict(event)}
        folder.record_inbox(told_line)
        longest = max(longest, path.stat().st_size - before)
        for command in decide(state, event, policy)[1]:
            for decided in replay.journal_line_of(command):
                fields = dict(decided)
                parts = (fields.pop(key) for key in ("event", "generation", "reason"))
                folder.journal(item.at_s, *parts, fields)
        assert path.stat().st_size <= snapshot + 10_000 + longest + 1000 * (begun == 0)
    assert begun >= 2
    verdict = replay.check_replay(tmp_path)
    assert verdict.difference == ""
    assert verdict.told < number
    lines = read_lines(path)
    assert [line["type"] for line in lines[:2]] == ["Policy", "Snapshot"]
    assert (path.stat().st_mode & 0o777) == 0o600, "it has what workers said"


@pytest.mark.parametrize(
    "value",
    [
        {"is": "os.system", "has": {}},
        {"is": "records.os", "has": {}},
        {"is": "events", "has": {}},
        {"is": "state.Turn", "has": {}},
        {"is": "dict", "has": [[{"is": "dict", "has": []}, 1]]},
        {"is": "layouts.layout.Layout", "has": {"dp_shard": {"is": 3}}},
        {"has": 1},
    ],
    ids=str,
)
def test_nothing_but_the_cores_data_is_made_of_a_snapshot(value: Any) -> None:
    with pytest.raises(ConfigError, match="can't be understood"):
        snapshots.decode({"version": snapshots.VERSION, "state": value})


def test_a_snapshot_of_another_version_is_refused_by_its_number() -> None:
    """The first form had none."""
    written = snapshots.as_plain_values(State(generation=3))
    assert snapshots.decode(written) == State(generation=3)
    for value in (written["state"], {**written, "version": 2}):
        with pytest.raises(ConfigError, match=r"is of form [12], and this version .* reads form 4"):
            snapshots.decode(value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda parts: parts.pop("left"), r"state\.State lacks 'left'"),
        (lambda parts: parts.update(unheard_of=1), r"has an unknown part, 'unheard_of'"),
        (lambda parts: parts["left"]["has"].pop("early"), r"records\.LeftBehind lacks 'early'"),
    ],
    ids=["lacks", "unknown", "inside"],
)
def test_no_snapshot_is_half_read(change: Any, said: str) -> None:
    written = snapshots.as_plain_values(State(generation=3))
    change(written["state"]["has"])
    with pytest.raises(ConfigError, match=said):
        snapshots.decode(written)


def test_the_service_reads_its_own_where_a_jobs_state_has_another_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each has a number of its own: what was before the service's snapshots may be gone."""
    sharing = snapshots.as_plain_values(Sharing(submitted=3))
    assert sharing["version"] == 4  # as those that were written while there was one number
    monkeypatch.setattr(snapshots, "VERSION", snapshots.VERSION + 1)
    assert snapshots.as_plain_values(State())["version"] == snapshots.VERSION
    assert snapshots.decode_as(Sharing, sharing) == Sharing(submitted=3)
    with pytest.raises(ConfigError, match=r"is of form 4, and this version .* reads form 5"):
        snapshots.decode_as(State, sharing)


def test_a_snapshot_of_something_else_is_refused() -> None:
    value = {"version": snapshots.VERSION, "state": {"is": "tuple", "has": []}}
    with pytest.raises(ConfigError, match="a snapshot is of tuple"):
        snapshots.decode(value)
