"""The job file as text: what is not YAML, or not what was meant, is one line that says where."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_ft.config import load_job, parse_text, parse_yaml
from elastic_ft.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "found"),
    [
        pytest.param("elastic:", "elastic: .*, found nothing", id="empty-section"),
        pytest.param("seed: 2026-01-31", "seed: .*, found the date 2026-01-31", id="date"),
    ],
)
def test_what_yaml_makes_of_a_value_is_said_without_python(text: str, found: str) -> None:
    job = "name: a\nsteps: 1\nmodel: {preset: p}\ndata: {url: 'stdlib:'}\n"
    with pytest.raises(ConfigError, match=found):
        parse_text((job + text).encode(), "job.yaml")


def test_a_job_file_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("{name: a, steps: 1, model: {preset: p}, data: {url: 'stdlib:'}}")
    assert load_job(file).name == "a"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param("name: [a", "not YAML: ", id="broken"),
        pytest.param("a: b: c", "not YAML: line 1, column 5: ", id="two-colons"),
        pytest.param("a: 1\nb:\n\tc: 2", "line 3, column 1: a tab, and YAML is", id="tab"),
        pytest.param("name: \x00", "not YAML: ", id="control-character"),
        pytest.param("", "expected a mapping of sections, found nothing", id="empty"),
        pytest.param(
            "steps: 1\nbatch: {}\nname: a\nbatch: {}\n",
            "batch: twice, in lines 2 and 4",
            id="twice",
        ),
        pytest.param(
            "data: {url: a,\n  url: b}", "url: twice, in lines 1 and 2", id="twice-inside"
        ),
        pytest.param("just words", "expected a mapping of sections, found str", id="words"),
    ],
)
def test_a_bad_file_is_one_line_naming_it(tmp_path: Path, content: str, expected: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_job(file)
    message = str(caught.value)
    assert message.startswith(str(file))
    assert expected in message
    assert "\n" not in message


def test_what_is_merged_may_be_said_otherwise() -> None:
    content = """
usual: &usual {steps: 1, name: a}
other: &other {<<: *usual, name: b}
third: {<<: *other, <<: {seed: 1}, name: c}
"""
    assert parse_yaml(content.encode(), "job")["third"] == {"steps": 1, "seed": 1, "name": "c"}


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.yaml: cannot be read: No such file"):
        load_job(tmp_path / "no.yaml")


def test_a_folder_is_no_job_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_job(tmp_path)


def test_a_file_that_is_not_text_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_bytes(b"\xff\xfe\x80binary")
    with pytest.raises(ConfigError) as caught:
        load_job(file)
    assert "\n" not in str(caught.value)
