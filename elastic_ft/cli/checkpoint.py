"""``elastic-ft checkpoint``: what is stored, whether it is sound, and getting it out.

Exit codes: 0; 1 something is damaged, or differs; 2 bad usage, one line.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from elastic_ft.cli.options import Json, given
from elastic_ft.cli.progress import console, print_json, say
from elastic_ft.errors import ConfigError
from elastic_ft.observe.wording import human_size

if TYPE_CHECKING:
    from elastic_ft.config import Job
    from elastic_ft.storage.inspect import Checkpoint, Difference
    from elastic_ft.storage.prune import Pruning
    from elastic_ft.storage.store import Store

DIFFERENCES_SHOWN = 20
EXPORT_DEADLINE_S = 600.0  # to write one file

app = typer.Typer(no_args_is_help=True, help="List, verify, compare, export, prune checkpoints.")


class Format(StrEnum):
    SAFETENSORS = "safetensors"
    TORCH = "torch"
    DCP = "dcp"
    HUGGINGFACE = "huggingface"
    PEFT = "peft"


Url = Annotated[
    str,
    typer.Argument(
        metavar="URL", help="Of a folder of checkpoints, or of one manifest.", callback=given
    ),
]
StepOption = Annotated[
    int | None, typer.Option(metavar="N", min=0, help="That step (default: the newest).")
]


# ------------------------------------------------------------------------------- looking


@app.command("ls")
def list_(url: Url, as_json: Json = False) -> int:
    """List checkpoints, and data that no manifest references."""
    from elastic_ft.storage.inspect import LATE, find_checkpoints, list_checkpoints

    store, _ = find_checkpoints(url)
    listing = list_checkpoints(store)
    now_s = time.time()
    if as_json:
        attempts = (
            {"step": a.step, "bytes": a.nbytes, "run": a.run, "generation": a.generation}
            | {"files": a.files, "prefix": a.prefix, "complete": False}
            for a in listing.attempts
        )
        found = [_as_json(checkpoint, now_s) for checkpoint in listing.checkpoints]
        print_json({"url": store.url, "checkpoints": found, "incomplete": list(attempts)})
        return 0
    table = _table("step", "age", "size", "layout", "run", "generation", "state")
    for c in listing.checkpoints:
        age = "?" if c.created_at_s is None else _duration(now_s - c.created_at_s)
        state = c.problem if c.problem in ("", LATE) else f"damaged: {c.problem}"
        cells = (
            c.ref.step,
            age,
            human_size(c.nbytes),
            c.layout,
            c.run,
            c.generation,
            state or "complete",
        )
        table.add_row(*("?" if cell is None else str(cell) for cell in cells))
    for a in listing.attempts:
        state, size = "no manifest: being written, or abandoned", human_size(a.nbytes)
        table.add_row(str(a.step), "?", size, "?", a.run, str(a.generation), state, style="dim")
    console.print(table)
    return 0


def _as_json(c: Checkpoint, now_s: float) -> dict[str, Any]:
    return {
        "step": c.ref.step,
        "age_s": None if c.created_at_s is None else round(now_s - c.created_at_s, 3),
        "bytes": c.nbytes,
        "layout": c.layout,
        "run": c.run,
        "generation": c.generation,
        "complete": not c.problem,
        "problem": c.problem,
        "url": c.ref.url,
    }


@app.command()
def verify(
    url: Url,
    step: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="That step (default: all there are).")
    ] = None,
    as_json: Json = False,
) -> int:
    """Read every byte and check every digest."""
    from elastic_ft.storage.inspect import find_checkpoints, verify_checkpoint

    store, refs = find_checkpoints(url, step)
    found = []
    for ref in refs:
        began_s = time.monotonic()
        verified = verify_checkpoint(store, ref)
        spent_s = time.monotonic() - began_s
        found.append(verified)
        if not as_json:
            state = "damaged" if verified.problems else "ok"
            say(f"step {ref.step}: {state}, {human_size(verified.nbytes)} in {spent_s:.1f} s")
            for problem in verified.problems:
                say(f"  {problem}")
    damaged = sum(bool(verified.problems) for verified in found)
    if as_json:
        print_json(
            {
                "url": store.url,
                "damaged": damaged,
                "checkpoints": [
                    {"step": v.ref.step, "url": v.ref.url, "bytes": v.nbytes}
                    | {"ok": not v.problems, "problems": list(v.problems)}
                    for v in found
                ],
            }
        )
    elif not found:
        say("no checkpoint has a manifest: nothing to verify")
    return 1 if damaged else 0


@app.command()
def diff(
    url_a: Annotated[
        str,
        typer.Argument(metavar="URL_A", help="A folder, or a manifest's URL.", callback=given),
    ],
    url_b: Annotated[str | None, typer.Argument(metavar="[URL_B]", help="Another one.")] = None,
    step: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="Once: of both; twice: of the first, of the second."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Compare two checkpoints, tensor by tensor.

    They are of two folders, or two steps of one.
    """
    from elastic_ft.storage.inspect import compare_checkpoints, find_one

    steps: list[int | None] = list(step or ())
    if len(steps) > 2:
        raise ConfigError(f"--step: expected at most two, found {len(steps)}")
    if url_b is None and len(steps) != 2:
        raise ConfigError("URL_B: expected a second URL, or --step twice")
    first, second = steps if len(steps) == 2 else (steps or [None]) * 2
    a, b = find_one(url_a, first), find_one(url_b or url_a, second)
    difference = compare_checkpoints(a, b)
    if as_json:
        print_json({"a": a.url, "b": b.url} | _difference_as_json(difference))
    else:
        _show_difference(a.url, b.url, difference)
    return 0 if difference.equal else 1


def _difference_as_json(found: Difference) -> dict[str, Any]:
    return {
        "equal": found.equal,
        "only_in_a": list(found.only_in_a),
        "only_in_b": list(found.only_in_b),
        "specs": [{"name": n, "a": str(a), "b": str(b)} for n, a, b in found.specs],
        "tensors": [
            {"name": t.name, "dtype": t.spec.dtype, "shape": list(t.spec.shape), "equal": t.equal}
            # null: not a number, or infinite
            | {"max_abs_difference": t.max_abs if math.isfinite(t.max_abs) else None}
            for t in found.tensors
        ],
    }


def _show_difference(url_a: str, url_b: str, found: Difference) -> None:
    say(f"a: {url_a}\nb: {url_b}")
    table = _table("tensor", "in a", "in b", "greatest difference")
    table.columns[0].overflow = "fold"
    rows = [(name, "yes", "no", "") for name in found.only_in_a]
    rows += [(name, "no", "yes", "") for name in found.only_in_b]
    rows += [(name, str(a), str(b), "") for name, a, b in found.specs]
    unequal = sorted(
        (t for t in found.tensors if not t.equal),
        key=lambda t: (not t.name.startswith("model."), -t.max_abs, t.name),
    )
    rows += [(t.name, str(t.spec), str(t.spec), f"{t.max_abs:.3g}") for t in unequal]
    for row in rows[:DIFFERENCES_SHOWN]:
        table.add_row(*row)
    if rows:
        console.print(table)
    if len(rows) > DIFFERENCES_SHOWN:
        say(f"and {len(rows) - DIFFERENCES_SHOWN} more (all of them: --json)")
    say(f"{len(found.tensors) - len(unequal)} tensors are equal, {len(rows)} differ")


# ----------------------------------------------------------------------------- exporting


@app.command()
def export(
    url: Url,
    dest: Annotated[
        str, typer.Argument(metavar="DEST", help="A folder; torch: a file. Must be new or empty.")
    ],
    format_: Annotated[
        Format,
        typer.Option(
            "--format",
            help="safetensors: weights, as Hugging Face has them; huggingface: with config.json; "
            "peft: an adapter (model.lora).",
        ),
    ],
    step: StepOption = None,
    job_file: Annotated[
        Path | None,
        typer.Option(
            "--job",
            metavar="FILE",
            help="huggingface, peft: the job's (default: job.yaml of the run folder).",
        ),
    ] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="torch, dcp: without the optimizer's state.")
    ] = False,
) -> int:
    """Write a checkpoint for others to read, each digest verified."""
    from elastic_ft.state.averaged_reader import averaging_reader
    from elastic_ft.storage.inspect import find_one

    reader = averaging_reader(find_one(url, step))
    config = _configuration(reader, url, job_file) if format_ is Format.HUGGINGFACE else None
    if format_ is Format.PEFT:
        nbytes = _export_adapter(reader, dest, _job_of(url, job_file))
    elif format_ in (Format.SAFETENSORS, Format.HUGGINGFACE):
        nbytes = _export_safetensors(reader, dest, config)
    else:
        path = _new_local_path(dest, format_)
        from elastic_ft.state import torch_checkpoints

        write = (
            torch_checkpoints.export_torch
            if format_ is Format.TORCH
            else torch_checkpoints.export_dcp
        )
        nbytes = write(reader, path, weights_only)
    say(f"step {reader.manifest.step}: {human_size(nbytes)} of tensors as {format_} in {dest}")
    return 0


def _export_safetensors(reader: Any, dest: str, config: bytes | None) -> int:
    from elastic_ft.storage import safetensors

    store = _new_store(dest)
    nbytes = safetensors.export_folder(reader, store)
    if config is not None:
        store.put("config.json", config)
    return nbytes


def _export_adapter(reader: Any, dest: str, job: Job) -> int:
    """As peft loads it. Raises ConfigError, ModelError."""
    from elastic_ft.models import lora
    from elastic_ft.storage import safetensors

    if job.model.lora is None or job.model.pretrained is None:
        raise ConfigError("--format: peft is of a job with model.lora; this one has none")
    prefix = "model."
    names = [n.removeprefix(prefix) for n in reader.manifest.tensors if n.startswith(prefix)]
    if not all(map(lora.is_adapter, names)):
        raise ConfigError(f"--job: model.lora: {reader.url} has weights that are no adapter's")
    config, called = lora.files_of(job.model.lora, job.model.pretrained, names)
    store = _new_store(dest)
    named = {prefix + name: other for name, other in called.items()}
    nbytes = safetensors.export_file(reader, store, "adapter_model.safetensors", named)
    store.put("adapter_config.json", config)
    return nbytes


def _new_store(dest: str) -> Store:
    """Raises ConfigError where something is there already."""
    from elastic_ft.storage.store import open_store

    store = open_store(dest, deadline_s=EXPORT_DEADLINE_S)
    if Path(store.url).is_file():
        raise ConfigError(f"DEST: {dest} exists already")
    if store.list():
        raise ConfigError(f"DEST: {dest} is not empty")
    return store


def _job_of(url: str, job_file: Path | None) -> Job:
    """That a checkpoint is of. Raises ConfigError."""
    from elastic_ft.config import load_job

    path = job_file or Path(url.removeprefix("file://")).parent / "job.yaml"
    if not path.is_file():
        raise ConfigError(f"--job: {path} is no file: name the job that the checkpoint is of")
    return load_job(path)


def _configuration(reader: Any, url: str, job_file: Path | None) -> bytes:
    """Of the job's model, for weights of this checkpoint. Raises ConfigError, ModelError."""
    from elastic_ft.engines.pretrained import resolved
    from elastic_ft.models.build import configuration

    model = _job_of(url, job_file).model
    prefix = "model."
    tensors = reader.manifest.tensors.items()
    shapes = {n.removeprefix(prefix): tuple(s.shape) for n, s in tensors if n.startswith(prefix)}
    return configuration(resolved(model)[0], shapes)


def _new_local_path(dest: str, format_: Format) -> Path:
    """Raises ConfigError if it is no local path, or something is there already."""
    protocol, separator, rest = dest.partition("://")
    if separator and protocol != "file":
        raise ConfigError(f"DEST: {format_} is written to a local path, found {dest}")
    path = Path(rest if separator else dest)
    if path.is_dir() and (format_ is Format.TORCH or any(path.iterdir())):
        what = "a folder, expected a file" if format_ is Format.TORCH else "not empty"
        raise ConfigError(f"DEST: {dest} is {what}")
    if path.is_file():
        raise ConfigError(f"DEST: {dest} exists already")
    return path


# ------------------------------------------------------------------------------ deleting


@app.command()
def prune(
    url: Url,
    keep_last: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Keep the newest N complete ones.")
    ] = None,
    older_than: Annotated[
        float | None, typer.Option(metavar="HOURS", min=0, help="Keep those that are younger.")
    ] = None,
    abandoned: Annotated[
        bool,
        typer.Option("--abandoned", help="Also data without a manifest: only with no job running."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted.")] = False,
    as_json: Json = False,
) -> int:
    """Delete older checkpoints; never the newest complete one."""
    from elastic_ft.storage import prune as pruning
    from elastic_ft.storage.inspect import find_checkpoints, list_checkpoints

    if keep_last is None and older_than is None and not abandoned:
        raise ConfigError("prune: expected --keep-last, --older-than or --abandoned")
    store, _ = find_checkpoints(url)
    older_than_s = None if older_than is None else older_than * 3600
    plan = pruning.plan_pruning(
        list_checkpoints(store),
        time.time(),
        keep_last=keep_last,
        older_than_s=older_than_s,
        abandoned=abandoned,
    )
    warnings = () if dry_run else pruning.carry_out(store, plan)
    (_dump_pruned if as_json else _say_pruned)(plan, warnings, dry_run)
    return 1 if warnings else 0


def _dump_pruned(plan: Pruning, warnings: Sequence[str], dry_run: bool) -> None:
    print_json(
        {
            "dry_run": dry_run,
            "deleted": [{"step": c.ref.step, "url": c.ref.url} for c in plan.doomed],
            "abandoned": [a.prefix for a in plan.abandoned],
            "kept": [{"step": c.ref.step, "url": c.ref.url} for c in plan.kept],
            "bytes": plan.nbytes,
            "notes": list(plan.notes),
            "warnings": list(warnings),
        }
    )


def _say_pruned(plan: Pruning, warnings: Sequence[str], dry_run: bool) -> None:
    verb = "would delete" if dry_run else "deleted"
    for c in plan.doomed:
        say(f"{verb} step {c.ref.step}, {human_size(c.nbytes)}: {c.ref.url}")
    for a in plan.abandoned:
        say(f"{verb} abandoned data, {human_size(a.nbytes)}: {a.prefix}")
    for line in (*plan.notes, *(f"warning: {warning}" for warning in warnings)):
        say(line)
    kept = ", ".join(str(c.ref.step) for c in plan.kept) or "none"
    say(f"{verb} {human_size(plan.nbytes)}; kept steps: {kept}")


# -------------------------------------------------------------------------------- words


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        right = column in ("step", "age", "size", "generation", "greatest difference")
        table.add_column(column, justify="right" if right else "left", no_wrap=right)
    return table


def _duration(seconds: float) -> str:
    for length_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length_s:
            return f"{seconds / length_s:.1f} {unit}"
    return f"{seconds:.0f} s"
