"""A journal against its catalogue."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from elastic_ft.observe.journal import COMMON, EVENTS
from elastic_ft.observe.wording import Line


def undeclared(lines: Iterable[Line]) -> Iterator[str]:
    """What lines of a journal have beyond the catalogue, or lack of it."""
    for line in lines:
        name = line["event"]
        if name not in EVENTS:
            yield f"{name} is not in the catalogue"
            continue
        fields = {field.name: field for field in (*COMMON, *EVENTS[name].fields)}
        for key in sorted(line.keys() - fields.keys()):
            yield f"{name} has {key}, which is not in the catalogue"
        for field in fields.values():
            if field.always and field.name not in line:
                yield f"{name} has no {field.name}"
