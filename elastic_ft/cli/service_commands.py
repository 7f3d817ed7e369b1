"""``elastic-ft service``, ``submit``, ``jobs``, ``logs``, ``priority``; and what of ``events``,
``status``, ``stop`` and ``resize`` is about a job of the service, known by its id.

Exit codes: 0 done; 1 failed, or the service does not answer; 2 bad usage, one line.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic_ft.cli import status_words
from elastic_ft.cli.options import JobFile, Json, LocalNodes, given
from elastic_ft.cli.progress import clock, say
from elastic_ft.cli.run import COMPLETED, FAILED, INTERRUPTED
from elastic_ft.errors import ConfigError
from elastic_ft.observe.wording import counted, head_away

if TYPE_CHECKING:
    from elastic_ft.service.served_at import HowToServe
    from elastic_ft.service.service_client import Client

PORT = 8266
FOLDER = "runs/service"
STOPPED_TIMEOUT_S = 60.0
PIPED_COLUMNS, ID_COLUMNS = 160, 32  # where no terminal says; of an id that is not folded
app = typer.Typer(no_args_is_help=True, help="The service that takes jobs in and shares a cluster.")
ServiceUrl = Annotated[
    str | None,
    typer.Option(
        "--service",
        metavar="URL",
        help="The service (default: ELASTIC_FT_SERVICE, or this machine's).",
    ),
]
JobIdArgument = Annotated[
    str, typer.Argument(metavar="ID", help="A job's id, as submit printed it.", callback=given)
]


def client(url: str | None) -> Client:
    """Of a service that somebody has named: it may be starting anew. Raises ServiceAway."""
    from elastic_ft.service.service_client import AWAY_S, VARIABLE, Client

    is_named = bool(url or os.environ.get(VARIABLE))
    asked = Client(url, away_s=AWAY_S if is_named else 0.0, waiting=say_waiting)
    if not is_named:
        asked.service()
        asked.away_s = AWAY_S
    return asked


def say_waiting(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def is_job(given: str, service: str | None) -> bool:
    """Whether ``given`` is a job of the service, not a run folder. Raises ConfigError where it is
    neither: nobody has said that there is a service, and none answers."""
    from elastic_ft.service.service_client import VARIABLE, Client, ServiceAway

    if service is not None:
        return True
    if "/" in given or Path(given).exists():
        return False
    if os.environ.get(VARIABLE):
        return True
    try:
        Client(away_s=0.0, waiting=say_waiting).service()
    except ServiceAway as error:
        raise ConfigError(f"{given}: not a run folder, and {error}") from None
    except ConfigError:  # it wants a token, say
        return True
    return True


# ------------------------------------------------------------------------------ the service


@app.command("start")
def start(
    address: Annotated[
        str | None,
        typer.Option(metavar="RAY", help="Address of a Ray cluster (default: RAY_ADDRESS)."),
    ] = None,
    local_nodes: LocalNodes = None,
    cpus_per_node: Annotated[
        int, typer.Option(min=1, metavar="N", help="Of --local-nodes: workers that one holds.")
    ] = 1,
    folder: Annotated[
        str, typer.Option(metavar="URL", help="Its journal and its jobs' run folders.")
    ] = FOLDER,
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any.")] = PORT,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Queues, and how they share.")
    ] = None,
    tls_cert: Annotated[str, typer.Option(metavar="FILE", help="A certificate (PEM).")] = "",
    tls_key: Annotated[str, typer.Option(metavar="FILE", help="Its key.")] = "",
    take_over: Annotated[
        bool, typer.Option("--take-over", help="The folder, from a service alive elsewhere, too.")
    ] = False,
) -> int:
    """Start the service, unless it runs, and return."""
    from elastic_ft.cli.run import connected
    from elastic_ft.service import starting
    from elastic_ft.service.service_config import load_config

    said = load_config(config)
    how = starting.HowToServe(
        folder, host, port, said.terms, said.rights, tls_cert, tls_key, said.warm, take_over
    )
    if address is not None and local_nodes is not None:
        raise ConfigError("--address and --local-nodes: expected at most one of them")
    address = address or (None if local_nodes else os.environ.get("RAY_ADDRESS"))
    if address is None and local_nodes is None:
        raise ConfigError("--address, --local-nodes: expected one of them")

    def begin() -> str:
        if local_nodes is not None:
            return starting.start_here(how, local_nodes, cpus_per_node, say)
        assert address is not None
        with connected(address):
            return starting.start_at(how)

    say(_started(how, begin))
    return COMPLETED


def _started(how: HowToServe, begin: Callable[[], str]) -> str:
    """Where the service runs, in words. ``begin``: what starts it, and returns its URL."""
    from elastic_ft.service import starting

    if (found := starting.found_here(how, say_waiting)) is None:
        with starting.one_at_a_time(how):
            if (found := starting.found_here(how, say_waiting)) is None:  # nor has another start
                return f"the service runs: {begin()}"
    return f"the service runs already: {found['url']} (folder {found['folder']})"


@app.command("status")
def service_status(service: ServiceUrl = None, as_json: Json = False) -> int:
    """Tell who the service is, and what its nodes do."""
    found = client(service).service()
    if as_json:
        print(json.dumps(found, indent=2))
        return COMPLETED
    slots = found["slots"]
    print(f"version {found['version']}, folder {found['folder']}, start {found['starts']}")
    print(f"{len(found['nodes'])} nodes, {slots['used']} of {slots['all']} slots used")
    for trouble in filter(None, (found["trouble"], head_away(found.get("cluster_seen_s_ago")))):
        print(trouble)
    for node in found["nodes"]:
        jobs = ", ".join(f"{job} {n}" for job, n in node["jobs"].items()) or "idle"
        print(f"  {node['node'][:12]}  {counted(node['slots'], 'slot')}  {jobs}")
    for queue in found["queues"]:
        print(
            f"queue {queue['queue']}: {queue['running']} running on {queue['used']} slots, "
            f"{queue['waiting']} waiting"
        )
    return COMPLETED


@app.command("token")
def service_token(
    out: Annotated[Path, typer.Option(metavar="FILE", help="A new file, for your eyes alone.")],
) -> int:
    """Make a token; print its digest, for the service's config."""
    from elastic_ft.service.access import new_token

    print(f"token_sha256: {new_token(out)}")
    return COMPLETED


@app.command("stop")
def service_stop(
    service: ServiceUrl = None,
    jobs: Annotated[
        str, typer.Option(metavar="keep|stop", help="Jobs go on without it, or are stopped.")
    ] = "keep",
) -> int:
    """Stop the service.

    A cluster of --local-nodes ends with the last job.
    """
    from elastic_ft.service import starting

    asked = client(service)
    asked.away_s = 0.0
    about = asked.service()
    asked.stop_service(jobs)
    if not starting.is_gone(asked, about, STOPPED_TIMEOUT_S):
        say("the service ends once the cluster's head answers it")
        return FAILED
    if jobs == "stop" and not starting.ended_here(about["folder"], STOPPED_TIMEOUT_S):
        say("the service has ended, its local nodes have not yet")
        return FAILED
    say("the service has ended")
    return COMPLETED


# ----------------------------------------------------------------------------------- its jobs


def submit(
    job_file: JobFile,
    service: ServiceUrl = None,
    priority: Annotated[int, typer.Option(metavar="N", help="Higher comes first.")] = 0,
    queue: Annotated[str, typer.Option(metavar="NAME")] = "default",
    name: Annotated[str | None, typer.Option(metavar="NAME", help="In place of its own.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Until it has ended.")] = False,
) -> int:
    """Hand a job to the service; print its id and its page."""
    asked = client(service)
    found = asked.submit(job_file, priority=priority, queue=queue, name=name)
    print(found["id"])
    print(found["page"], flush=True)
    return _ended(asked.wait(found["id"])) if wait else COMPLETED


def _ended(job: dict[str, Any]) -> int:
    say(f"{_end_of(job)}; run folder: {job['run_folder']}")
    return {"completed": COMPLETED, "stopped": INTERRUPTED}.get(job["state"], FAILED)


def _end_of(job: dict[str, Any]) -> str:
    why = f": {job['reason']}" if job["reason"] else ""
    return f"{job['id']}: {job['state']} at step {job['step']}{why}"


def jobs(
    service: ServiceUrl = None,
    all: Annotated[bool, typer.Option("--all", help="Those that have ended, too.")] = False,
    state: Annotated[
        list[str] | None,
        typer.Option(metavar="STATE", help="Those of this state alone; may be given again."),
    ] = None,
    as_json: Json = False,
) -> int:
    """List jobs: how they stand, and why they wait."""
    pages = client(service).job_pages(all, states=state or ())
    if as_json:
        _print_array(job for page in pages for job in page)
        return COMPLETED
    from rich.console import Console

    is_piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    width = PIPED_COLUMNS if is_piped else None
    console = Console(markup=False, emoji=False, highlight=False, width=width)  # as they are told
    page: list[dict[str, Any]] = []
    for page in pages:
        console.print(_table(page))
    if not page:
        console.print(_table([]))
    return COMPLETED


def _print_array(values: Iterable[Any]) -> None:
    """As ``json.dumps`` with an indent, each as it comes."""
    begin = "["
    for value in values:
        print(begin)
        print(textwrap.indent(json.dumps(value, indent=2), "  "), end="", flush=True)
        begin = ","
    print("[]" if begin == "[" else "\n]")


def _table(page: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("id", "name", "queue"):
        longest = max((len(job[title]) for job in page), default=0)
        whole = min(longest, ID_COLUMNS) if title == "id" else None  # to be copied
        table.add_column(title, overflow="fold", min_width=whole)
    table.add_column("priority", overflow="fold")
    for title in ("state", "workers", "step", "rate", "ETA"):
        table.add_column(title, no_wrap=True)
    table.add_column("why", overflow="fold")
    for job in page:
        workers = job["workers"]
        table.add_row(
            job["id"],
            job["name"],
            job["queue"],
            str(job["priority"]),
            job["state"],
            f"{workers['now']}/{workers['min']}/{workers['max']}",
            f"{job['step']}" + (f"/{job['steps']}" if job["steps"] else ""),
            f"{job['rate']:.2f}/s" if job["rate"] else "",
            clock(job["eta_s"]) if job["eta_s"] is not None else "",
            job["why"] or job["reason"],
        )
    return table


def logs(
    job: JobIdArgument,
    service: ServiceUrl = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until it ends.")] = False,
) -> int:
    """Print what a job's processes print."""
    for line in client(service).logs(job, follow):
        print(line, flush=True)
    return COMPLETED


def priority(
    job: JobIdArgument,
    value: Annotated[int, typer.Argument(metavar="N", help="Higher comes first.")],
    service: ServiceUrl = None,
) -> int:
    """Change a job's priority."""
    found = client(service).set_priority(job, value)
    print(f"{job}: priority {found['priority']}")
    return COMPLETED


COMMANDS = (submit, jobs, logs, priority)


def status_of_job(job: str, service: str | None, as_json: bool) -> int:
    found = client(service).status(job)
    if as_json:
        print(json.dumps(found, indent=2))
        return COMPLETED
    print(f"{found['id']}: {found['state']}; queue {found['queue']}, priority {found['priority']}")
    if why := found["why"] or found["reason"]:
        print(why)
    rate = f"{found['rate']:.2f} steps/s" if found["rate"] else ""
    print(status_words.progress(found, rate), *status_words.world(found), sep="\n")
    for decision in found["decisions"][-10:]:
        print(f"{decision['what']}: {decision['why']}")
    print(f"run folder: {found['run_folder']}")
    return COMPLETED


def stop_job(job: str, service: str | None, now: bool, timeout_s: float) -> int:
    asked = client(service)
    asked.stop(job, now)
    found = asked.wait(job, timeout_s)
    say(_end_of(found))
    return COMPLETED


def resize_job(job: str, service: str | None, workers: int) -> int:
    found = client(service).resize(job, workers)
    print(f"{job}: {counted(workers, 'worker')} at most; it has {found['workers']['now']}")
    return COMPLETED
