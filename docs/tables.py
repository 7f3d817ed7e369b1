"""Makes the tables of docs/job-file.md, journal.md and metrics.md: ``python docs/tables.py``.

What a key of a job file means is the comment at its field. A page's tables are all that comes from
its first heading below the title on; tests hold the pages to them.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import tokenize
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from elastic_ft.config import Job
from elastic_ft.config.mistakes import section_of
from elastic_ft.observe import catalogue, journal

DOCS = Path(__file__).parent
FIRST = "\n## "
KINDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}
BOUNDS = {"ge": ">=", "gt": ">", "lt": "<"}
SHOWN_MAX = 1000  # of bounds: what nobody comes near is left out
INTERNAL = ("own",)  # set where a job has a loop


def page(name: str) -> str:
    """All of a page, with its tables as they should be."""
    said, _, _ = (DOCS / name).read_text().partition(FIRST)
    return said + "\n" + "\n".join(TABLES[name]()).strip() + "\n"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


# ---------------------------------------------------------------------------- journal, metrics


def journal_tables() -> list[str]:
    lines = ["## Of every event", "", "| field | meaning |", "|---|---|"]
    lines += [f"| `{field.name}` | {_in_words(field)} |" for field in journal.COMMON]
    for title, group in journal.GROUPS.items():
        lines += ["", f"## {title}", "", "| event | meaning | fields |", "|---|---|---|"]
        for event in group:
            fields = "<br>".join(f"`{field.name}`: {_in_words(field)}" for field in event.fields)
            lines.append(_row((f"`{event.name}`", event.meaning, fields)))
    return lines


def _in_words(field: journal.Field) -> str:
    unit = f" ({field.unit})" if field.unit else ""
    return field.meaning.removesuffix(".") + unit + ("." if field.always else "; not always.")


def metrics_tables() -> list[str]:
    lines = []
    for title, group in catalogue.GROUPS.items():
        lines += [f"## {title}", "", "| name | type | unit | labels | meaning |"]
        lines += ["|---|---|---|---|---|"]
        for metric in group:
            labels = ", ".join(metric.labels)
            cells = (f"`{metric.full_name}`", metric.kind, metric.unit, labels, metric.meaning)
            lines.append(_row(cells))
        lines.append("")
    return lines


# --------------------------------------------------------------------------------- the job file


def job_file_tables() -> list[str]:
    lines = _table("the job's own", Job, "")
    for name, field in Job.model_fields.items():
        section = section_of(field.annotation)
        if section is not None:
            lines += _table(f"`{name}`", section, f"{name}.")
    return lines


def every_key(
    section: type[BaseModel] = Job, prefix: str = ""
) -> Iterator[tuple[str, FieldInfo, str]]:
    """Every key below a section with its field and meaning; "" where it has no comment."""
    meanings = _comments(section)
    for name, field in section.model_fields.items():
        inner = section_of(_element(field.annotation))
        if name not in INTERNAL:
            yield f"{prefix}{name}", field, meanings.get(name, "")
        if inner is not None:
            dots = "[]." if inner is not section_of(field.annotation) else "."
            yield from every_key(inner, f"{prefix}{name}{dots}")


def _table(title: str, section: type[BaseModel], prefix: str) -> list[str]:
    said = inspect.getdoc(section) if section is not Job and section.__dict__.get("__doc__") else ""
    lines = [f"## {title[:1].upper()}{title[1:]}", ""]
    lines += [" ".join(said.replace("``", "`").split()), ""] if said else []
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, field, meaning in every_key(section, prefix):
        if section is Job and ("." in key or section_of(field.annotation) is not None):
            continue  # it has a table of its own
        cells = (f"`{key}`", _kind(field.annotation, field.metadata), _default(field), meaning)
        lines.append(_row(cell.replace("|", r"\|") for cell in cells))
    return [*lines, ""]


def _element(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is tuple else annotation


def _kind(annotation: Any, bounds: Any = ()) -> str:
    """The values that a field takes, in words; that it may have none its default says."""
    arguments, origin = get_args(annotation), get_origin(annotation)
    if origin is Annotated:
        return _kind(arguments[0], arguments[1].metadata)
    if origin in (Union, types.UnionType):
        kinds = (_kind(one, bounds) for one in arguments if one is not type(None))
        return " or ".join(dict.fromkeys(kinds))
    if origin is Literal:
        return ", ".join(f"`{json.dumps(one).strip(chr(34))}`" for one in arguments)
    if origin is tuple:
        return f"list of {_kind(arguments[0])}"
    if origin is dict:
        return "keys and values"
    if section_of(annotation) is not None:
        return "keys, see below"
    numbers = annotation in (int, float)
    found = [(BOUNDS[k], getattr(b, k)) for b in bounds for k in BOUNDS if hasattr(b, k)]
    limits = [f" {sign} {bound:g}" for sign, bound in found if bound <= SHOWN_MAX]
    return KINDS[annotation] + ",".join(limits if numbers else [])


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value in ((), {}) or isinstance(value, BaseModel):
        return "none" if not isinstance(value, BaseModel) else ""
    return f"`{json.dumps(value).strip(chr(34))}`"


def _comments(section: type[BaseModel]) -> dict[str, str]:
    """What is written above each field, and behind it."""
    source = inspect.getsource(section)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    said = {t.start[0]: t for t in tokens if t.type == tokenize.COMMENT}
    found = {}
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if not isinstance(node, ast.AnnAssign):
            continue
        first, above = node.lineno, []
        while (t := said.get(first - 1)) is not None and not t.line[: t.start[1]].strip():
            first -= 1
            above.insert(0, t.string)
        behind = [
            said[n].string for n in range(node.lineno, (node.end_lineno or 0) + 1) if n in said
        ]
        texts = (" ".join(c.lstrip("# ") for c in part).rstrip(".") for part in (above, behind))
        found[ast.unparse(node.target)] = "; ".join(filter(None, texts))
    return found


TABLES = {
    "job-file.md": job_file_tables,
    "journal.md": journal_tables,
    "metrics.md": metrics_tables,
}

if __name__ == "__main__":
    for name in TABLES:
        (DOCS / name).write_text(page(name))
