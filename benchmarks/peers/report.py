"""The tables in docs/benchmarks.md and the README, and the plots, from the raw file alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.document import put, table
from benchmarks.peers.analysis import spread

EQUAL = 0.05  # two medians this close, relatively, are no win
Spread = dict[str, float] | None
README = "README.md"
LOSS = "loss: largest difference from the undisturbed training"


@dataclass(frozen=True, slots=True)
class Figure:
    """One column: where it stands in a case's record, and which way is better."""

    title: str
    case: str
    key: str
    inside: str = ""  # a record within the case's
    more_is_better: bool = False
    show: Callable[[float], str] = "{:.2f}".format


def _count(value: float) -> str:
    return f"{value:g}"


FIGURES = (
    Figure("worker killed: noticed, s", "worker", "noticed_s"),
    Figure("worker killed: paused, s", "worker", "paused_s"),
    Figure("worker killed: until whole, cost, s", "worker", "cost_s"),
    Figure("worker killed: steps redone", "worker", "steps_redone", show=_count),
    Figure("worker killed: samples lost", "worker", "samples_lost", show=_count),
    Figure("worker killed: samples repeated", "worker", "samples_repeated", show=_count),
    Figure("node killed: noticed, s", "node", "noticed_s"),
    Figure("node killed: paused, s", "node", "paused_s"),
    Figure("node killed: steps redone", "node", "steps_redone", show=_count),
    Figure("node killed: samples lost", "node", "samples_lost", show=_count),
    Figure("node joins: paused, s", "node", "paused_s", inside="join"),
    Figure("node joins: steps redone", "node", "steps_redone", inside="join", show=_count),
    Figure("worker hangs: noticed, s", "hang", "noticed_s"),
    Figure("worker hangs: paused, s", "hang", "paused_s"),
    Figure("worker hangs: steps redone", "hang", "steps_redone", show=_count),
    Figure("node drained: paused, s", "drain", "paused_s"),
    Figure("node drained: steps redone", "drain", "steps_redone", show=_count),
    Figure("replay: goodput, %", "replay", "goodput", more_is_better=True, show="{:.1%}".format),
    Figure("replay: steps redone", "replay", "steps_redone", show=_count),
    Figure("replay: samples lost", "replay", "samples_lost", show=_count),
    Figure("trace: goodput, %", "trace", "goodput", more_is_better=True, show="{:.1%}".format),
    Figure("trace: steps redone", "trace", "steps_redone", show=_count),
    Figure("trace: samples lost", "trace", "samples_lost", show=_count),
    Figure("trace: samples repeated", "trace", "samples_repeated", show=_count),
    Figure("steady: tokens/s", "steady", "tokens_per_s", more_is_better=True, show="{:.0f}".format),
    Figure("steady: workers' PSS, MB", "steady", "pss_workers_mb", show="{:.0f}".format),
    Figure("steady: PSS of all it starts, MB", "steady", "pss_all_mb", show="{:.0f}".format),
)


def figures(values: dict[str, Any], system: str) -> dict[str, Spread]:
    """By title; None where there is none."""
    cases = [case for case in values["cases"] if case["system"] == system]
    found: dict[str, Spread] = {}
    for figure in FIGURES:
        some = []
        for case in cases:
            record = case.get(figure.inside, {}) if figure.inside else case
            if case["case"] == figure.case and record.get(figure.key) is not None:
                some.append(float(record[figure.key]))
        found[figure.title] = spread(some)
    return found


def loss_differences(values: dict[str, Any], system: str) -> list[float]:
    """Per run: the largest one from the undisturbed training, over the steps that both have."""
    reference = values.get("reference", [])
    found = []
    for run in values["runs"]:
        if run["system"] != system:
            continue
        both = zip(run["losses"], reference, strict=False)
        gaps = [abs(ours - its) for ours, its in both if ours is not None]
        if gaps:
            found.append(max(gaps))
    return found


def steps_compared(values: dict[str, Any], system: str) -> int:
    """Of the longest run: rounding grows with them."""
    runs = [run["losses"] for run in values["runs"] if run["system"] == system]
    both = (zip(losses, values.get("reference", []), strict=False) for losses in runs)
    return max((sum(loss is not None for loss, _ in some) for some in both), default=0)


BRIEFLY = (
    "worker killed: paused, s",
    "worker killed: steps redone",
    "worker killed: samples lost",
    "node killed: paused, s",
    "node joins: paused, s",
    "worker hangs: paused, s",
    "replay: goodput, %",
    "trace: goodput, %",
    "steady: tokens/s",
)


def briefly(values: dict[str, Any]) -> str:
    """Some of the figures, medians alone; a system is a row."""
    rows = []
    for system in systems_of(values):
        found = figures(values, system)
        some = [(figure, found[figure.title]) for figure in FIGURES if figure.title in BRIEFLY]
        rows.append([system, *(f.show(value["median"]) if value else "-" for f, value in some)])
    return table(["median", *BRIEFLY], rows)


def systems_of(values: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(case["system"] for case in values["cases"]))


def wins_of_peers(values: dict[str, Any]) -> list[str]:
    """Where a peer's median is clearly better than one of ours, whichever hosts it: a line for each
    peer."""
    all_of = {system: figures(values, system) for system in systems_of(values)}
    lines = []
    for figure in FIGURES:
        medians = {s: f["median"] for s, some in all_of.items() if (f := some[figure.title])}
        shown = {system: figure.show(value) for system, value in medians.items()}
        lines += _ahead(figure.title, medians, shown, figure.more_is_better)
    gaps = {s: max(found) for s in systems_of(values) if (found := loss_differences(values, s))}
    return lines + _ahead(LOSS, gaps, {system: _loss(values, system) for system in gaps}, False)


def _ahead(
    title: str, found: dict[str, float], shown: dict[str, str], more_is_better: bool
) -> list[str]:
    ours = {system: value for system, value in found.items() if system.startswith("elastic_ft")}
    lines = []
    for system, value in found.items():
        behind = [
            f"{name} {shown[name]}"
            for name, own in ours.items()
            if (value > own if more_is_better else value < own)
            and abs(value - own) > EQUAL * max(abs(value), abs(own))
        ]
        if system not in ours and behind:
            lines.append(f"{title}: {system} {shown[system]}, {', '.join(behind)}")
    return lines


def _loss(values: dict[str, Any], system: str) -> str:
    gaps = loss_differences(values, system)
    return f"{max(gaps):.1e} in {steps_compared(values, system)} steps" if gaps else "-"


def markdown(values: dict[str, Any], raw: str) -> str:
    systems = systems_of(values)
    all_of = {system: figures(values, system) for system in systems}
    rows = [
        [figure.title, *(_cell(figure, all_of[system][figure.title]) for system in systems)]
        for figure in FIGURES
    ]
    rows.append([LOSS, *(_loss(values, system) for system in systems)])
    parts = [
        _conditions(values, raw),
        table(["median (min to max)", *systems], rows),
        "A dash: no such figure, because the system has no use for a notice, or the case failed "
        "(below).",
    ]
    wins = wins_of_peers(values)
    parts.append("**Where a peer is ahead:**" if wins else "No peer is clearly ahead in any row.")
    if wins:
        parts.append("\n".join(f"- {line}" for line in wins))
    failed = [case for case in values["cases"] if "failed" in case]
    if failed:
        told = (f"- {c['system']}, round {c['round']}, {c['case']}: {c['failed']}" for c in failed)
        parts += [
            "**Cases that failed** (a deadline passed, or the system ended):",
            "\n".join(told),
        ]
    tuned = (f"- {name}: {_settings(some)}" for name, some in values["tuned"].items())
    parts += ["Settings beside each system's defaults:", "\n".join(tuned)]
    return "\n\n".join(parts)


def _cell(figure: Figure, value: Spread) -> str:
    if value is None:
        return "-"
    show = figure.show
    low, high = show(value["min"]), show(value["max"])
    middle = show(value["median"])
    if value["n"] == 1:
        return f"{middle} (once)"
    return middle if low == high else f"{middle} ({low} to {high})"


def _settings(some: dict[str, str]) -> str:
    return "; ".join(f"{name}: {value}" for name, value in some.items())


def _conditions(values: dict[str, Any], raw: str) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in values["versions"].items())
    loads = spread([case["load"] for case in values["cases"]])
    assert loads is not None
    rounds = len({case["round"] for case in values["cases"]})
    return (
        f"Rounds: {rounds}. Versions: {versions}. Machine: {values['machine']['cores']} cores; "
        f"load average at the end of the cases {loads['median']:.1f} ({loads['min']:.1f} to "
        f"{loads['max']:.1f}). Every number is from `{raw}`; made by `{values['command']}`."
    )


# ---------------------------------------------------------------------------------- plots

PAUSES = ("worker killed", "node killed", "node joins", "worker hangs", "node drained")


def plot(values: dict[str, Any], folder: Path) -> list[Path]:
    """The pauses, and the replay's goodput. Needs matplotlib (the bench extra)."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "peers"  # equal input, equal file
    import matplotlib.pyplot as plt

    systems = systems_of(values)
    all_of = {system: figures(values, system) for system in systems}
    figure, axes = plt.subplots(figsize=(9, 4))
    width = 0.8 / max(1, len(systems))
    for number, system in enumerate(systems):
        bars = [all_of[system][f"{fault}: paused, s"] for fault in PAUSES]
        places = [index + number * width for index in range(len(PAUSES))]
        _bars(axes, places, bars, width, system)
    axes.set_yscale("log")
    axes.set_ylabel("paused, s (median, min to max)")
    axes.set_xticks([index + 0.4 for index in range(len(PAUSES))], PAUSES)
    axes.legend(fontsize=7)
    paths = [_save(figure, folder / "peers-pauses.svg")]
    figure, axes = plt.subplots(figsize=(9, 3))
    bars = [all_of[system]["replay: goodput, %"] for system in systems]
    _bars(axes, list(range(len(systems))), bars, 0.6, None)
    axes.set_ylabel("goodput over the replay")
    axes.set_xticks(range(len(systems)), systems, fontsize=7)
    paths.append(_save(figure, folder / "peers-replay.svg"))
    return paths


def _bars(
    axes: Any, places: Sequence[float], bars: Sequence[Spread], width: float, label: str | None
) -> None:
    some = [(place, bar) for place, bar in zip(places, bars, strict=True) if bar is not None]
    heights = [bar["median"] for _, bar in some]
    below = [bar["median"] - bar["min"] for _, bar in some]
    above = [bar["max"] - bar["median"] for _, bar in some]
    axes.bar([p for p, _ in some], heights, width, yerr=[below, above], label=label, capsize=2)


def _save(figure: Any, path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def write(values: dict[str, Any], raw: Path, document: str, *, plots: bool = True) -> None:
    if not values["cases"]:
        return
    text = markdown(values, str(raw))
    print(text)
    if plots:
        pictures = [f"![{path.stem}](../{path})" for path in plot(values, raw.parent)]
        text = "\n\n".join([text, *pictures])
    if document:
        put(Path(document), "peers", text)
        put(Path(README), "peers", briefly(values))
