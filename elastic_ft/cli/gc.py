"""``elastic-ft gc``: what vanished jobs have left on a Ray cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from elastic_ft.cli.options import ThatCluster
from elastic_ft.cli.progress import say

ANSWER_S = 30.0


def gc(
    address: ThatCluster = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")
    ] = False,
    unanswered: Annotated[
        bool,
        typer.Option(
            "--unanswered",
            help=f"Also runs whose controller says nothing for {ANSWER_S:g} s: it stands still, or "
            "Ray finds no node for it.",
        ),
    ] = False,
) -> int:
    """Free what runs without a controller have left on a cluster.

    Their workers and placement groups outlive whoever started them.

    A run whose controller lives, or is being restarted by Ray, is left alone (but see
    --unanswered); so are keepers, which save what they have and end by themselves.
    """
    from elastic_ft.cli.run import connected
    from elastic_ft.hosts.ray import names

    with connected(address):
        for run in names.unanswered(ANSWER_S) if unanswered else ():
            say(f"{'would end' if dry_run else 'ended'} the controller of {run}: it says nothing")
            if not dry_run:
                names.end_actor(f"{run}controller")
        left = names.abandoned()
        for run, remains in left.items():
            if not dry_run and not names.clear_away(run, remains):
                say(f"{run} has a controller by now: it is left alone")
                continue
            for name in (*remains.actors, *remains.groups):
                say(f"{'would remove' if dry_run else 'removed'} {name}")
    if not left:
        say("nothing is left of runs without a controller")
    return 0
