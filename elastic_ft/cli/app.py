"""``elastic-ft``: run a job file, watch it, break it on purpose.

Exit codes: 0 completed, left running, or handed over to another start of the job; 1 failed or
suspended, or a fault of the scenario never fired; 2 bad usage or a bad job file, one line says
which key and why, nothing was started; 130 stopped, with a checkpoint, or interrupted. What is
heavy (torch, ray) is imported once the cheap checks have passed.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from elastic_ft.cli import (
    attach,
    checkpoint,
    drain,
    extensions,
    gc,
    launch,
    options,
    plan,
    resize,
    service_commands,
    show_events,
    show_report,
    show_status,
    simulate,
    to_loggers,
)
from elastic_ft.cli.demo import JOB_FILE, run_demo
from elastic_ft.cli.progress import say
from elastic_ft.cli.run import (
    BAD_USAGE,
    COMPLETED,
    FAILED,
    INTERRUPTED,
    How,
    begun_anew,
    complain,
    say_checked,
    train_job,
)
from elastic_ft.cli.terminal import interrupt_on_sigterm, leave_when_interrupted
from elastic_ft.cli.where import where_to_run
from elastic_ft.config import load_job
from elastic_ft.errors import ElasticError, UsageError
from elastic_ft.observe.run_reader import RunReader

__all__ = ["BAD_USAGE", "COMPLETED", "FAILED", "INTERRUPTED", "app", "main", "run_command"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # Rich would show "<bool>" for each flag
    context_settings={"max_content_width": 100},
    help="Fault-tolerant, elastic training on Ray: a lost node costs a pause, not the job.",
)


def _version(is_asked: bool) -> None:
    if is_asked:
        print(f"elastic-ft {version('elastic-ft')}")
        raise typer.Exit


@app.callback()
def _options(
    is_asked: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_version, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    code = run_command(sys.argv[1:])
    leave_when_interrupted(code)
    sys.exit(code)


def run_command(arguments: list[str]) -> int:
    """Returns the exit code. A user's mistake is one line on stderr."""
    interrupt_on_sigterm()
    try:
        return int(typer.main.get_command(app).main(arguments, "elastic-ft", standalone_mode=False))
    except UsageError as error:
        return complain(error, BAD_USAGE)
    except ElasticError as error:
        return complain(error, FAILED)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:
        if hasattr(error, "format_message"):  # click's own, of a module that typer moves about
            message = error.format_message()
            return complain(f"{message} (see elastic-ft --help)", BAD_USAGE) if message else 2
        raise


# ----------------------------------------------------------------------------- commands


@app.command()
def run(
    job_file: options.JobFile,
    address: options.RayAddress = None,
    local_nodes: options.LocalNodes = None,
    processes: options.Processes = False,
    chaos: options.ScenarioName = None,
    out: options.Out = None,
    accept_changes: options.AcceptChanges = False,
    from_scratch: options.FromScratch = False,
    foreground: options.Foreground = False,
) -> int:
    """Train a job, or go on from its newest good checkpoint.

    Without --address, --local-nodes and --processes: on the cluster at RAY_ADDRESS if that is set,
    else on a local one of as many nodes as the job asks for.
    """
    job = begun_anew(load_job(job_file), from_scratch)
    where = where_to_run(job, address, local_nodes, processes)
    how = How(chaos, accept_changes=accept_changes, foreground=foreground)
    return train_job(job, out or f"runs/{job.name}", where, how)


@app.command()
def check(
    job_file: options.JobFile,
    address: options.RayAddress = None,
    local_nodes: options.LocalNodes = None,
    processes: options.Processes = False,
    chaos: options.ScenarioName = None,
    out: options.Out = None,
    accept_changes: options.AcceptChanges = False,
) -> int:
    """Say what `run` would refuse a job for, and start nothing.

    The model and the data are made, too.
    """
    from elastic_ft.cli.preflight import check_job

    job = load_job(job_file)
    where = where_to_run(job, address, local_nodes, processes)
    say_checked(job, check_job(job, out or f"runs/{job.name}", where, chaos, accept_changes))
    return COMPLETED


@app.command()
def resume(
    run_folder: options.RunFolderOf,
    address: options.RayAddress = None,
    local_nodes: options.LocalNodes = None,
    processes: options.Processes = False,
    chaos: options.ScenarioName = None,
    accept_changes: options.AcceptChanges = False,
    from_scratch: options.FromScratch = False,
    foreground: options.Foreground = False,
) -> int:
    """Go on with an earlier run, at any number of workers.

    It begins from the newest good checkpoint. Where it runs is told anew, as to `run`: a run of
    --processes goes on there only if that is given again.
    """
    job = begun_anew(RunReader(run_folder).job(), from_scratch)
    if imported := job.imports():
        say(f"{run_folder}/job.yaml imports {', '.join(imported)}")  # whoever wrote it chose it
    where = where_to_run(job, address, local_nodes, processes)
    return train_job(job, run_folder, where, How(chaos, True, accept_changes, foreground))


@app.command()
def demo(out: options.Out = None) -> int:
    """Lose a node of four, get one back, and show what it cost."""
    return run_demo(load_job(JOB_FILE), out or "runs/demo")


# In the order of --help: who comes with a job looks for how to run and to follow it.
app.command("launch", context_settings=launch.SETTINGS)(launch.launch)
app.command("attach")(attach.attach)
app.command("status")(show_status.status)
app.command("stop")(attach.stop)
app.command("resize")(resize.resize)
app.command("events")(show_events.events)
app.command("report")(show_report.report)
app.command("replay")(show_events.replay)
app.command("plan")(plan.plan)
app.command("tensorboard")(to_loggers.tensorboard)
app.command("wandb")(to_loggers.wandb)
app.command("mlflow")(to_loggers.mlflow)
for command in service_commands.COMMANDS:
    app.command(command.__name__)(command)
app.command("drain")(drain.drain)
app.command("gc")(gc.gc)
app.command("simulate")(simulate.simulate)
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(service_commands.app, name="service")
extensions.add_commands(app)
