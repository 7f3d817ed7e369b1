"""What several commands can be told alike."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def given(value: str | None) -> str | None:
    """Of a variable of the shell's that is not set nothing is left: it names no place."""
    if value == "":
        raise typer.BadParameter("expected a path, a URL or a name, found nothing")
    return value


JobFile = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file.")]
RunFolderOf = Annotated[
    str, typer.Argument(metavar="RUN", help="The folder of a run.", callback=given)
]
RunOrJob = Annotated[
    str,
    typer.Argument(metavar="RUN", help="Its run folder, or its id at the service.", callback=given),
]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]
RayAddress = Annotated[
    str | None, typer.Option(metavar="RAY", help="On the Ray cluster at this address.")
]
ThatCluster = Annotated[
    str, typer.Option(metavar="RAY", envvar="RAY_ADDRESS", help="Address of the Ray cluster.")
]
LocalNodes = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="On a Ray cluster of N nodes, started on this machine."),
]
Processes = Annotated[
    bool, typer.Option("--processes", help="On plain processes of this machine, without Ray.")
]
ScenarioName = Annotated[
    str | None,
    typer.Option(metavar="SCENARIO", help="Faults to inject: a file, or a name.", callback=given),
]
AcceptChanges = Annotated[
    bool,
    typer.Option(
        "--accept-changes",
        help="Go on from a checkpoint of another seed, batch, optimizer, data, or job name.",
    ),
]
FromScratch = Annotated[
    bool,
    typer.Option(
        "--from-scratch",
        help="Begin anew from the seed where steps are recorded, but no checkpoint is good.",
    ),
]
Foreground = Annotated[
    bool,
    typer.Option(
        "--foreground", help="With --processes: the controller runs in this process, for debuggers."
    ),
]
Out = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="The run folder, or any fsspec URL (default: runs/<name>).",
        callback=given,
    ),
]
