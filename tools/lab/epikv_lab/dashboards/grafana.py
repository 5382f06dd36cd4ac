"""Dashboards as JSON that Grafana imports, by Grafana's own builders."""

import json
from collections.abc import Sequence
from typing import Any

from grafana_foundation_sdk.builders import common as c
from grafana_foundation_sdk.builders import dashboard as d
from grafana_foundation_sdk.builders import prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from epikv_lab.dashboards.panels import Dashboard, Kind, Panel, Query, Variable

TAG = "epikv"
SOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")
HEIGHTS = {Kind.NUMBER: 4, Kind.LINES: 8, Kind.TABLE: 8}
GOOD, BAD = "green", "red"
# Columns that Prometheus adds to a table, and that say nothing here.
NO_COLUMNS = ("Time", "Value", "__name__")


def to_json(of: Dashboard) -> str:
    return json.dumps(_dashboard(of).build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _dashboard(of: Dashboard) -> d.Dashboard:
    made = (
        d.Dashboard(of.title)
        .uid(of.name)
        .description(of.tells)
        .tags([TAG])
        .editable()
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .timezone("browser")
        .refresh("30s")
        .with_variable(d.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .link(
            d.DashboardLink("epikv")
            .type(dashboard.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(False)
            .keep_time(True)
        )
    )
    for variable in of.variables:
        made = made.with_variable(_variable(variable))
    number = 0
    for row in of.rows:
        made = made.with_row(d.Row(row.title))
        for panel in row.panels:
            number += 1
            made = made.with_panel(_panel(panel, number))
    return made


def _variable(of: Variable) -> d.QueryVariable:
    everything: Any = dashboard.VariableOption(selected=True, text=["All"], value=["$__all"])
    made = (
        d.QueryVariable(of.name)
        .label(of.name)
        .query({"query": of.values_of, "refId": of.name})
        .datasource(SOURCE)
        .multi(True)
        .include_all(True)
        .current(everything)
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
    )
    return made if of.whole is None else made.all_value(of.whole)


def _panel(of: Panel, number: int) -> Any:
    made: Any
    match of.kind:
        case Kind.LINES:
            made = _lines(of)
        case Kind.NUMBER:
            made = _number(of)
        case Kind.TABLE:
            made = _table(of)
    made = (
        made.id(number)
        .title(of.title)
        .description(of.tells)
        .datasource(SOURCE)
        .unit(of.unit)
        .span(of.width)
        .height(HEIGHTS[of.kind])
        .thresholds(_limits(of))
    )
    for letter, query in zip("ABCDEFGH", of.queries, strict=False):
        made = made.with_target(_target(query, letter, of.kind))
    return made


def _limits(of: Panel) -> d.ThresholdsConfig:
    below, above = (BAD, GOOD) if of.low_is_bad else (GOOD, BAD)
    steps = [dashboard.Threshold(value=None, color=below)]
    if of.limit is not None:
        steps.append(dashboard.Threshold(value=of.limit, color=above))
    return d.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(steps)


def _target(query: Query, letter: str, kind: Kind) -> prometheus.Dataquery:
    made = prometheus.Dataquery().expr(query.promql).ref_id(letter).datasource(SOURCE)
    if kind is Kind.TABLE:
        return made.instant().format(PromQueryFormat.TABLE)
    return made.range().format(PromQueryFormat.TIME_SERIES).legend_format(query.legend or "__auto")


def _lines(of: Panel) -> timeseries.Panel:
    made = (
        timeseries.Panel()
        .legend(
            c.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(
            c.VizTooltipOptions()
            .mode(common.TooltipDisplayMode.MULTI)
            .sort(common.SortOrder.DESCENDING)
        )
        .fill_opacity(30 if of.stacked else 0)
        .show_points(common.VisibilityMode.NEVER)
    )
    if not of.logarithmic:
        made = made.axis_soft_min(0)
    if of.stacked:
        made = made.stacking(c.StackingConfig().mode(common.StackingMode.NORMAL))
    if of.logarithmic:
        made = made.scale_distribution(
            c.ScaleDistributionConfig().type(common.ScaleDistribution.LOG).log(10)
        )
    if of.limit is not None:
        made = made.thresholds_style(
            c.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED)
        )
    return made


def _number(of: Panel) -> stat.Panel:
    return (
        stat.Panel()
        .reduce_options(c.ReduceDataOptions().calcs(["lastNotNull"]))
        .graph_mode(common.BigValueGraphMode.AREA)
        .color_mode(
            common.BigValueColorMode.NONE if of.limit is None else common.BigValueColorMode.VALUE
        )
    )


def _table(of: Panel) -> table.Panel:
    # Where its values are what is looked at, they stay.
    hidden: Sequence[str] = of.hidden_columns and (*NO_COLUMNS, *of.hidden_columns)
    organize = dashboard.DataTransformerConfig(
        id_val="organize", options={"excludeByName": dict.fromkeys(hidden or ("Time",), True)}
    )
    return table.Panel().with_transformation(organize)
