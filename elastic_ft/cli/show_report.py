"""``elastic-ft report``: what a run did, as one HTML file."""

from __future__ import annotations

from typing import Annotated

import typer

from elastic_ft.cli.options import RunFolderOf
from elastic_ft.errors import ConfigError, ElasticError
from elastic_ft.observe.run_reader import RunReader

WITHIN_S = 30.0


def report(
    run_folder: RunFolderOf,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Where to, any fsspec URL (default: report.html in the run folder).",
        ),
    ] = None,
) -> int:
    """Draw a run, running or ended, into one HTML file."""
    from elastic_ft.observe.report import NAME, render
    from elastic_ft.observe.run_watch import RunWatch
    from elastic_ft.storage.store import open_store

    RunReader(run_folder).content("events.jsonl")
    page = render(RunWatch(run_folder).look())
    url = out or f"{run_folder.rstrip('/')}/{NAME}"
    folder, _, name = url.rpartition("/")
    try:
        open_store(folder or ("/" if url.startswith("/") else "."), deadline_s=WITHIN_S).put(
            name, page
        )
    except (ElasticError, OSError) as error:
        why = " ".join(str(error).split())[:200]
        raise ConfigError(f"--out: {url} can't be written: {why}") from None
    print(f"{url}: {len(page) / 1000:.0f} kB")
    return 0
