"""A job from a YAML file or a mapping; what is wrong with it is one line (``ConfigError``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from elastic_ft.config.job import Job
from elastic_ft.config.mistakes import SHOWN, first_mistake
from elastic_ft.errors import ConfigError, printable

FILE_BYTES_MAX = 4 << 20  # of a job file
VALUES_MAX = 100_000  # in a job file, aliases resolved
DEPTH_MAX = 100  # of values in values; what writes them goes no deeper than 255
# What PyYAML's constructors let through, as for the date 2024-13-45.
ESCAPES = (ValueError, LookupError, AttributeError, TypeError, RecursionError)
MERGED_MAX = 100  # of merge keys in one mapping


def parse_job(values: Any, where: str = "job") -> Job:
    """Returns the typed job. Raises ConfigError with one line: the first bad key and why.

    ``where``: what the values are from; a file's name is part of the line.
    """
    if not isinstance(values, dict):
        found = "nothing" if values is None else type(values).__name__
        raise ConfigError(f"{where}: expected a mapping of sections, found {found}")
    check_size(values, where)
    try:
        return Job.model_validate(values)
    except ValidationError as error:
        key, message = first_mistake(error, Job)
        inside = f" (in {where})" if key and where != "job" else ""
        raise ConfigError(f"{key or where}: {message}{inside}") from None
    except (RecursionError, OverflowError, TypeError) as error:  # of a value that refers to itself
        raise ConfigError(f"{where}: not a job: {printable(error, SHOWN)}") from None


def check_size(values: Any, where: str) -> None:
    """Raises ConfigError. Aliases are counted wherever they are used, so what goes round in a
    circle is too deep."""
    count, left = 0, [(values, 1)]
    while left:
        one, depth = left.pop()
        count += 1
        if count > VALUES_MAX:
            raise ConfigError(f"{where}: more than {VALUES_MAX} values, which no job has")
        if depth > DEPTH_MAX:
            raise ConfigError(f"{where}: more than {DEPTH_MAX} levels, which no job has")
        if isinstance(one, dict):
            left.extend((value, depth + 1) for value in one.values())
        elif isinstance(one, list | tuple | set):
            left.extend((value, depth + 1) for value in one)


class _Repeated(yaml.YAMLError):
    """A key twice in one mapping. The message says where."""


class _Loader(yaml.SafeLoader):
    """Merge keys ("<<") copy what they merge: bounded, or a few lines of them would fill memory."""

    def flatten_mapping(self, node: Any) -> None:
        for _, value in node.value:
            if isinstance(value, yaml.SequenceNode) and len(value.value) > MERGED_MAX:
                self._refuse(node) if any(k.value == "<<" for k, _ in node.value) else None
        super().flatten_mapping(node)
        if len(node.value) > MERGED_MAX * 10:
            self._refuse(node)

    def compose_mapping_node(self, anchor: Any) -> Any:
        """YAML forbids a key twice in one mapping; PyYAML drops the first without a word."""
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                continue
            if name in lines:
                raise _Repeated(
                    f"{printable(key.value, SHOWN)}: twice, in lines {lines[name]} and {line}"
                )
            lines[name] = line
        return node

    def _refuse(self, node: Any) -> None:
        raise yaml.constructor.ConstructorError(None, None, "too many keys", node.start_mark)


def _mistake(error: Exception) -> str:
    """One line: where in the file, counted from 1 as editors do, and what is wrong there."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return printable(error, 300)
    if "'\\t'" in problem:
        problem = "a tab, and YAML is indented by spaces"
    return f"line {mark.line + 1}, column {mark.column + 1}: {printable(problem)}"


def load_job(path: str | Path) -> Job:
    """Returns the job in a YAML file. Raises ConfigError."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    return parse_text(content, str(path))


def parse_text(content: bytes, where: str) -> Job:
    """As ``parse_job``, of a job file's content."""
    return parse_job(parse_yaml(content, where), where)


def parse_yaml(content: bytes, where: str) -> Any:
    """The values in a YAML file. Raises ConfigError, one line that begins with ``where``."""
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{where}: larger than {FILE_BYTES_MAX} bytes, which no job file is")
    try:
        return yaml.load(content.decode(), _Loader)
    except _Repeated as error:
        raise ConfigError(f"{where}: {error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not a text file in UTF-8: {error.reason}") from None
    except (yaml.YAMLError, *ESCAPES) as error:
        raise ConfigError(f"{where}: not YAML: {_mistake(error)}") from None
