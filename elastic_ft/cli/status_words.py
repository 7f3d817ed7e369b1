"""How a run or a job of the service stands, in words: the same facts in the same lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from elastic_ft.cli.progress import clock
from elastic_ft.observe.wording import counted


def progress(found: Mapping[str, Any], rate: str) -> str:
    """``rate``: in words, empty if it is not known."""
    steps = f"/{found['steps']}" if found["steps"] else ""
    loss = f", loss {found['loss']:.4f}" if found.get("loss") is not None else ""
    rate = f", {rate}" if rate else ""
    eta = f", ETA {clock(found['eta_s'])}" if found["eta_s"] is not None else ""
    return f"step {found['step']}{steps}{loss}{rate}{eta}"


def world(found: Mapping[str, Any]) -> Iterator[str]:
    workers = found["workers"]
    bounds = f" of {workers['min']} to {workers['max']}" if workers["max"] else ""
    laid_out = f"; {found['layout']}" if found["layout"] else ""
    yield f"{counted(workers['now'], 'worker')}{bounds}{laid_out}"
    yield from map(_who, found["members"])


def _who(one: Mapping[str, Any]) -> str:
    """A member; or who waits to be one, of whose process the journal says nothing yet."""
    if one["rank"] is None:
        return f"  {one['worker']} on {one['node']}: {one['state']}"
    return f"  rank {one['rank']}  {one['worker']}  {one['host']}  pid {one['pid']}"
