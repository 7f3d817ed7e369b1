"""Makes the Grafana dashboards beside this file: ``python deploy/grafana/generate.py``.

A test holds the committed JSON to this, and runs every panel's query on a real Prometheus.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueTextMode,
    GraphDrawStyle,
    LegendDisplayMode,
    LegendPlacement,
    LineInterpolation,
    StackingMode,
)
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh

from deploy.grafana.panels import DASHBOARDS, Panel

HERE = Path(__file__).parent
DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")


def build(name: str) -> dict[str, Any]:
    """The dashboard as Grafana's JSON."""
    title, rows = DASHBOARDS[name]
    board = (
        dashboard.Dashboard(title)
        .uid(f"elastic-ft-{name}")
        .tags(["elastic_ft"])
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
        )
    )
    if name != "service":  # of all jobs
        board = board.with_variable(
            dashboard.QueryVariable("job")
            .label("Job")
            .datasource(DATASOURCE)
            .query("label_values(elastic_ft_generation, job_name)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        )
    for row, panels in rows.items():
        board = board.with_row(dashboard.Row(row))
        for panel in panels:
            board = board.with_panel(_panel(panel))
    built: dict[str, Any] = json.loads(JSONEncoder(sort_keys=True).encode(board.build()))
    return built


def _panel(panel: Panel) -> Any:
    makers = {"number": _number, "table": _table}
    made = makers.get(panel.kind, _series)(panel)
    made = (
        made.title(panel.title)
        .description(panel.why)
        .datasource(DATASOURCE)
        .span(panel.width)
        .height(panel.height)
    )
    for index, query in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query.expr).ref_id(chr(ord("A") + index))
        if query.legend:
            target = target.legend_format(query.legend)
        made = made.with_target(target.instant() if panel.kind == "table" else target)
    return made


def _series(panel: Panel) -> Any:
    legend = (
        common.VizLegendOptions()
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    made = timeseries.Panel().unit(panel.unit).legend(legend).min(0).line_width(1)
    if panel.title in ("Loss", "Learning rate and gradient norm"):
        made = timeseries.Panel().unit(panel.unit).legend(legend).line_width(1)
    if panel.kind == "steps":
        made = made.line_interpolation(LineInterpolation.STEP_AFTER)
    elif panel.kind == "stacked":
        made = made.fill_opacity(30).stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    elif panel.kind == "bars":
        made = made.draw_style(GraphDrawStyle.BARS).fill_opacity(60)
    return made


def _number(panel: Panel) -> Any:
    named = BigValueTextMode.NAME if panel.queries[0].legend else BigValueTextMode.AUTO
    return stat.Panel().unit(panel.unit).text_mode(named)


def _table(panel: Panel) -> Any:
    return table.Panel().unit(panel.unit)


def main() -> None:
    for name in DASHBOARDS:
        text = json.dumps(build(name), indent=2, sort_keys=True)
        (HERE / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
