"""``elastic-ft plan``: which layouts fit given devices, which to take, and what a loss leads to.

Exit codes: 0; 1 nothing fits; 2 bad usage or a bad job file, one line.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer
from rich.table import Table

from elastic_ft.cli.options import JobFile, Json
from elastic_ft.cli.progress import console, print_json, say
from elastic_ft.config import Job, load_job
from elastic_ft.core.layouts.calibration import (
    STEPS_MIN,
    Calibration,
    as_measured,
    calibrate,
    on_links,
)
from elastic_ft.core.layouts.layout import DIMENSIONS, WISHES, Layout, LayoutWish
from elastic_ft.core.layouts.layout_plan import LayoutPlan, NoLayout
from elastic_ft.core.layouts.moved import Previous
from elastic_ft.core.layouts.plan_words import gb
from elastic_ft.core.layouts.planner import Limits, allowed, as_asked, best, plans
from elastic_ft.core.layouts.work import Devices, Work
from elastic_ft.errors import ConfigError
from elastic_ft.observe.run_reader import RunReader

LOST = (1, 2, 8)
AGAIN = {False: "no", "selective": "selective", True: "yes"}
DEVICES_MAX = 100_000
UNITS = {"GB": 1e9, "GiB": 2.0**30, "MB": 1e6, "MiB": 2.0**20, "TB": 1e12}


DevicesOption = Annotated[
    str,
    typer.Option(
        metavar="NODESxEACH:MEMORY", help="Such as 8x8:80GB, or of each node: 8,8,7:80GB."
    ),
]
Flops = Annotated[
    float,
    typer.Option(metavar="FLOPS", show_default="4e14", help="That a device reaches, per second."),
]
Intra = Annotated[
    float,
    typer.Option(
        metavar="BYTES", show_default="3e11", help="From a device, within its node, per second."
    ),
]
Inter = Annotated[
    float,
    typer.Option(
        metavar="BYTES", show_default="4e10", help="From a device, to other nodes, per second."
    ),
]
MaxTp = Annotated[int | None, typer.Option(metavar="N", min=1, help="parallel.tp at most.")]
MaxPp = Annotated[int | None, typer.Option(metavar="N", min=1, help="parallel.pp at most.")]


def plan(
    job_file: JobFile,
    devices: DevicesOption,
    flops: Flops = 400e12,
    intra: Intra = 300e9,
    inter: Inter = 40e9,
    max_tp: MaxTp = None,
    max_pp: MaxPp = None,
    run: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="A run of this job on such devices: its steps say FLOPS."),
    ] = None,
    top: Annotated[int, typer.Option(metavar="N", min=1, help="Rows of the table, at most.")] = 10,
    as_json: Json = False,
) -> int:
    """Rank the layouts of a job that fit given devices.

    Also says what losing 1, 2 and 8 of the devices would lead to.
    """
    job = load_job(job_file)
    there = parse_devices(devices, flops, intra, inter)
    work, can, engines = _describe(job, there.count)
    measured = None if run is None else measure(job, work, there, run)
    if measured is not None:
        there = as_measured(there, measured.flops_per_s, measured.links)
        if measured.waited_s is not None:  # that is measured on CPUs alone
            there = on_cpus(there)
    limits = _limits(job, engines, can, max_tp, max_pp)
    try:
        ranked = plans(work, there, limits, top=top)
    except NoLayout as error:
        return _refuse(str(error), as_json)
    after = {n: _after(work, there, limits, ranked[0], n) for n in LOST if n < there.count}
    if as_json:
        _dump_all(ranked, after, measured)
    else:
        if measured is not None:
            say(f"measured: {measured}")
        _show(work, there, ranked)
        _show_losses(ranked[0], after)
    return 0


def _limits(
    job: Job,
    engines: Limits,
    can: Callable[[LayoutWish], bool],
    max_tp: int | None,
    max_pp: int | None,
) -> Limits:
    """``engines``: what it can do; of that, what was asked for."""
    limits = (
        engines if job.parallel.strategy == "auto" else as_asked(engines, job.parallel.wish, can)
    )
    return replace(
        limits,
        schedules=(job.parallel.schedule,),
        tp_max=max_tp,
        pp_max=min(engines.pp_max or 1, max_pp or engines.pp_max or 1),
    )


def _refuse(why: str, as_json: bool) -> int:
    if as_json:
        print_json({"plans": [], "refused": why})
    else:
        say(why)
    return 1


def parse_devices(text: str, flops: float, intra: float, inter: float) -> Devices:
    """Returns the devices of "8x8:80GB" (nodes x devices) or "8,8,7:80GB". Raises ConfigError."""
    for option, rate in (("--flops", flops), ("--intra", intra), ("--inter", inter)):
        if not 0 < rate < math.inf:
            raise ConfigError(f"{option}: expected a number above 0, found {rate:g}")
    counts = r"(?:(\d{1,9})x(\d{1,9})|(\d{1,9}(?:,\d{1,9})*))"
    match = re.fullmatch(counts + r":(\d{1,9}(?:\.\d+)?)([KMGT]i?B)", text.strip())
    if match is None or match[5] not in UNITS:
        raise ConfigError(f"--devices: expected NODESxEACH:MEMORY such as 8x8:80GB, found {text!r}")
    each = [int(count) for count in (match[3] or match[2]).split(",")]
    times = int(match[1] or 1)
    if max(times, times * sum(each)) > DEVICES_MAX:
        raise ConfigError(f"--devices: expected at most {DEVICES_MAX}, found {text!r}")
    try:
        return Devices(
            tuple(each) * times,
            float(match[4]) * UNITS[match[5]],
            flops_per_s=flops,
            intra_bytes_per_s=intra,
            inter_bytes_per_s=inter,
        )
    except ValueError as error:
        raise ConfigError(f"--devices: {error}, found {text!r}") from None


def _describe(job: Job, most: int) -> tuple[Work, Callable[[LayoutWish], bool], Limits]:
    """And what the engine can do with the job's model on up to ``most`` ranks: the question that
    ``auto`` asks."""
    from elastic_ft.controller.planning import engine_of, may_offload, recomputes_of
    from elastic_ft.engines.pretrained import with_model_read
    from elastic_ft.models.describe import describe_job

    job, _ = with_model_read(job)
    work, can = describe_job(job), engine_of(job)
    engines = replace(
        allowed(work.model, most, can), recompute=recomputes_of(job), may_offload=may_offload(job)
    )
    return work, can, engines


def measure(job: Job, work: Work, there: Devices, run: str) -> Calibration:
    """What the last generation of a run says of its devices. Raises ConfigError."""
    reader = RunReader(run)
    formed = [line for line in reader.events() if line["event"] == "generation_formed"]
    steps = reader.steps()
    if not formed or not steps:
        raise ConfigError(f"--run: {run}: not a run folder, or no step of it is committed")
    counts: Counter[str] = Counter()
    mine: list[dict[str, Any]] = []
    for line in reversed(formed):  # the last one that has trained for a while
        mine = [step for step in steps if step["generation"] == line["generation"]]
        if len(mine) >= STEPS_MIN:
            counts = Counter(member["node"] for member in line["members"])
            break
    else:
        raise ConfigError(f"--run: {run}: no generation has trained for {STEPS_MIN} steps")
    limits = Limits(
        micro_batches=(job.batch.micro_batch_size,),
        recompute=(job.parallel.activation_checkpointing,),
        schedules=(job.parallel.schedule,),
    )
    devices = replace(there, nodes=tuple(counts.values()))
    timed = [step for step in mine if "exposed_s" in step and step["step_time_s"] > 0]
    waited = [on_links(step["exposed_s"]) / step["step_time_s"] for step in timed]
    layout, steps_s = Layout.parse(line["layout"]), [step["step_time_s"] for step in mine]
    devices = on_cpus(devices) if waited else devices
    found = calibrate(work, devices, limits, layout, steps_s, waited)
    assert found is not None
    return found


def on_cpus(devices: Devices) -> Devices:
    return replace(devices, fused=False, overlaps=False)


def without_last(there: Devices, count: int) -> tuple[Devices, tuple[int, ...]]:
    """Devices after the last ``count`` have gone, and the numbers that the others had."""
    left = there.count - count
    nodes: list[int] = []
    for size in there.nodes:
        nodes.append(min(size, left - sum(nodes)))
    kept = tuple(size for size in nodes if size)
    return replace(there, nodes=kept), tuple(range(left))


def _after(
    work: Work, there: Devices, limits: Limits, now: LayoutPlan, count: int
) -> LayoutPlan | str:
    """The plan when ``count`` devices are lost, or why there is none."""
    less, survivors = without_last(there, count)
    rank_of = {device: rank for rank, device in enumerate(now.devices)}
    previous = Previous(now.layout, tuple(rank_of.get(device) for device in survivors))
    try:
        return best(work, less, limits, previous)
    except NoLayout as error:
        return str(error)


# -------------------------------------------------------------------------------- words


def _show(work: Work, there: Devices, ranked: tuple[LayoutPlan, ...]) -> None:
    header = f"{work.model.parameters / 1e9:.2f} B parameters, global batch {work.global_batch}, "
    say(f"{header}{there.count} devices on {len(there.nodes)} nodes")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("layout", "micro-batch", "recompute", "memory", "step", "of it idle", "devices"):
        table.add_column(column, justify="left" if column == "layout" else "right", no_wrap=True)
    for p in ranked:
        time_s, choice = p.time, p.choice
        waiting_s = time_s.total - time_s.compute - time_s.recompute - time_s.offload
        table.add_row(
            *(str(p.layout), str(choice.micro_batch), AGAIN[choice.recompute]),
            *(gb(p.memory.total), _seconds(time_s.total), f"{waiting_s / time_s.total:.0%}"),
            str(p.layout.world_size),
        )
    console.print(table)
    say(f"{ranked[0].layout}, because")
    for reason in ranked[0].why:
        say(f"  {reason}")


def _show_losses(now: LayoutPlan, after: dict[int, LayoutPlan | str]) -> None:
    for count, found in after.items():
        if isinstance(found, str):
            say(f"{count} lost: {found}")
            continue
        slower = found.time.total / now.time.total - 1
        idle = f", {sum(found.idle)} idle" if sum(found.idle) else ""
        moved = gb(found.bytes_moved or 0)
        say(
            f"{count} lost: {found.layout}, micro-batch {found.choice.micro_batch}, "
            f"{_seconds(found.time.total)} ({slower:+.0%}), {moved} moved{idle}"
        )


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _as_json(p: LayoutPlan) -> dict[str, Any]:
    layout, choice = p.layout, p.choice
    return {
        "layout": str(layout),
        **{name: getattr(layout, name) for name in dict.fromkeys((*DIMENSIONS, *WISHES))},
        "micro_batch": choice.micro_batch,
        "recompute": choice.recompute,
        "schedule": choice.schedule if layout.has_stages else None,
        "memory_bytes": {k: round(v) for k, v in p.memory._asdict().items()}
        | {"total": round(p.memory.total)},
        "host_bytes": round(p.host_bytes),
        "step_s": p.time._asdict() | {"total": p.time.total},
        "world_size": layout.world_size,
        "idle": list(p.idle),
        "bytes_moved": p.bytes_moved,
        "why": list(p.why),
    }


def _loss_as_json(found: LayoutPlan | str) -> dict[str, Any]:
    return {"refused": found} if isinstance(found, str) else {"plan": _as_json(found)}


def _dump_all(
    ranked: tuple[LayoutPlan, ...], after: dict[int, LayoutPlan | str], measured: Calibration | None
) -> None:
    losses = [{"lost": n} | _loss_as_json(found) for n, found in after.items()]
    found = None if measured is None else asdict(measured) | {"layout": str(measured.layout)}
    print_json({"plans": [_as_json(p) for p in ranked], "losses": losses, "measured": found})
