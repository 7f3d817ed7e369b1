"""``elastic-ft drain``: this node goes away soon. What a pod runs before it is stopped.

A pod's SIGTERM reaches its first process, which is Ray's, and ends the node at once; what runs
before (Kubernetes' ``preStop``) has the pod's grace for it.

Exit codes: 0 no worker is left here; 1 some are, and the time is over; 2 bad usage, one line.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer

from elastic_ft.cli.options import ThatCluster
from elastic_ft.cli.progress import say
from elastic_ft.errors import ConfigError

POLL_S = 0.5


def drain(
    within_s: Annotated[
        float, typer.Option("--within", metavar="S", min=1, help="Seconds until the node is gone.")
    ],
    node: Annotated[
        str | None, typer.Option(metavar="ID", help="Ray's id of the node, instead of this one.")
    ] = None,
    address: ThatCluster = "auto",
) -> int:
    """Have all jobs leave this node, for a pod's preStop hook.

    They leave at a step boundary. Returns once none of their workers is on the node.
    """
    import ray

    from elastic_ft.cli.run import connected
    from elastic_ft.hosts.ray import names, ray_private

    until_s = time.time() + within_s
    with connected(address):
        context = ray.get_runtime_context()
        here = node or context.get_node_id()
        try:
            ray_private.drain_node(context.gcs_address, here, "preemption", until_s)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"--node: {error}") from None
        while left := names.workers_on(here):
            if time.time() > until_s:
                say(f"{left} workers are still on node {here:.12}, and its time is over")
                return 1
            time.sleep(POLL_S)
    say(f"no worker is left on node {here:.12}, {until_s - time.time():.0f} s before its end")
    return 0
