"""The kinds of panels on the boards: number, graph, state timeline, heat map, histogram over time, table.

Each takes the question that it answers, which becomes its description, and the unit of its values. Properties common to
all panels of a kind are defined here, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from grafana_foundation_sdk.builders import common as look
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import heatmap, prometheus, stat, statetimeline, statushistory, table, timeseries
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import heatmap as heatmap_model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from grafana_foundation_sdk.models.table import Options as TableOptions

from dashboards.value_mappings import COMMON_COLOURS, Colour

__all__ = [
    "CLUSTER_COLUMN",
    "DATASOURCE",
    "PanelColumn",
    "Query",
    "event_count_panel",
    "heat_map_panel",
    "histogram_over_time_panel",
    "stat_panel",
    "state_timeline_panel",
    "table_panel",
    "time_series_panel",
]

DATASOURCE: Final = model.DataSourceRef(type_val="prometheus", uid="${datasource}")

_BAR_COUNT: Final = 120
"""Over the time range."""

_CELL_COUNT: Final = 60
"""Over the time range."""

_LEAST_OBSERVATION: Final = 1e-9
"""Cells with fewer observations are not drawn."""

_MAX_GAP: Final = 600_000
"""Milliseconds."""

_REFS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class Query:
    """A query to Prometheus.

    Attributes:
        text: PromQL.
        legend: name of its series; ``{{label}}`` is replaced.
        exemplars: also request exemplars, with the id of their scrub.
    """

    text: str
    legend: str = ""
    exemplars: bool = False


@dataclass(frozen=True, slots=True)
class PanelColumn:
    """A column of a table.

    Attributes:
        source: a label, or ``Value`` for the value of the table's only query, ``Value #B`` for that of its second.
        title: heading.
        unit: unit of its values.
        width: in pixels; None: an equal share of the remaining width.
        mappings: texts and colours for its values; the colours apply to the cell's text.
        filled: the colours apply to the cell's background instead: dark red is unsuitable for text.
        steps: (from, colour) in ascending order, starting with the colour of the lowest values.
        link: target of a click.
    """

    source: str
    title: str
    unit: str | None = None
    width: int | None = None
    mappings: Sequence[model.ValueMapping] = ()
    filled: bool = False
    steps: Sequence[tuple[float | None, str]] = ()
    link: tuple[str, str] | None = None
    decimals: int | None = None
    properties: Mapping[str, object] = field(default_factory=dict)


CLUSTER_COLUMN: Final = PanelColumn("cluster", "Cluster", width=110, properties={"noValue": " "})
"""Before each column of a node. Series of a single cluster usually have no such label, and a table then no such column."""


def stat_panel(
    title: str,
    question: str,
    query: str,
    *,
    unit: str,
    span: int = 4,
    height: int = 4,
    steps: Sequence[tuple[float | None, str]] = ((None, Colour.NEUTRAL),),
    mappings: Sequence[model.ValueMapping] = (),
    nothing: str | None = None,
    decimals: int | None = None,
    filled: bool = False,
    size: int | None = None,
) -> model.Panel:
    """Return a panel with one number, as of now or over the time range; ``nothing`` is shown without data.

    Args:
        filled: colour the panel instead of the text.
        size: font size in pixels; otherwise neighbouring numbers and words would have different sizes.
    """
    panel = (
        stat.Panel()
        .title(title)
        .description(question)
        .datasource(DATASOURCE)
        .height(height)
        .span(span)
        .unit(unit)
        .mappings(list(mappings))
        .thresholds(_thresholds(steps))
        .color_scheme(build.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))
        .color_mode(common.BigValueColorMode.BACKGROUND_SOLID if filled else common.BigValueColorMode.VALUE)
        .graph_mode(common.BigValueGraphMode.NONE)
        .text_mode(common.BigValueTextMode.VALUE)
        .justify_mode(common.BigValueJustifyMode.CENTER)
        .reduce_options(look.ReduceDataOptions().calcs(["lastNotNull"]).values(False).fields(""))
        .with_target(_target(Query(query), "A").instant())
    )
    if decimals is not None:
        panel = panel.decimals(decimals)
    if size is not None:
        panel = panel.text(look.VizTextDisplayOptions().value_size(size))
    if nothing is not None:
        panel = panel.no_value(nothing)
    return panel.build()


def time_series_panel(
    title: str,
    question: str,
    *queries: Query,
    unit: str,
    span: int = 8,
    height: int = 7,
    stacked: bool = False,
    bars: bool = False,
    top: float | None = None,
    colours: Mapping[str, str] | None = None,
    steps: Sequence[tuple[float | None, str]] = (),
    hue: str | None = None,
    rare: bool = False,
    points: int | None = None,
    decimals: int | None = None,
    nothing: str | None = None,
) -> model.Panel:
    """Return a graph of values over time, from zero up.

    Args:
        colours: of series by name; by default the colours of common terms.
        steps: draw a line where the value becomes bad.
        hue: all other series are shades of this colour; without it each has an arbitrary colour.
        rare: values are sparse; gaps up to a limit are bridged by a line.
        points: maximum number over the time range, so that bars are wide enough to be visible.
    """
    panel = (
        timeseries.Panel()
        .title(title)
        .description(question)
        .datasource(DATASOURCE)
        .height(height)
        .span(span)
        .unit(unit)
        .min(0)
        .draw_style(common.GraphDrawStyle.BARS if bars else common.GraphDrawStyle.LINE)
        .line_interpolation(common.LineInterpolation.STEP_AFTER if stacked else common.LineInterpolation.LINEAR)
        .line_width(0 if stacked else 2)
        .fill_opacity(70 if stacked or bars else 0)
        .show_points(common.VisibilityMode.NEVER if stacked or bars else common.VisibilityMode.AUTO)
        .point_size(4)
        .stacking(
            look.StackingConfig().mode(common.StackingMode.NORMAL if stacked else common.StackingMode.NONE).group("A")
        )
        .color_scheme(build.FieldColor().mode(model.FieldColorModeId.PALETTE_CLASSIC))
        .legend(_legend())
        .tooltip(look.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING))
        .targets(
            [_target(each, ref).range().exemplar(each.exemplars) for ref, each in zip(_REFS, queries, strict=False)]
        )
    )
    if top is not None:
        panel = panel.max(top)
    if points is not None:
        panel = panel.max_data_points(points)
    if decimals is not None:
        panel = panel.decimals(decimals)
    if unit in ("short", "none"):  # otherwise a quiet minute would be drawn on a scale of a hundred
        panel = panel.axis_soft_max(1)
    if unit == "percentunit" and top is None:  # otherwise zero would be drawn on a scale of ten thousand per cent
        panel = panel.axis_soft_max(0.01)
    if hue is not None:
        panel = panel.color_scheme(build.FieldColor().mode(model.FieldColorModeId.SHADES).fixed_color(hue))
    if rare:
        panel = panel.span_nulls(_MAX_GAP)
    if steps:
        panel = panel.thresholds(_thresholds(steps)).thresholds_style(
            look.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED)
        )
    if nothing is not None:
        panel = panel.no_value(nothing)
    for name, colour in (COMMON_COLOURS if colours is None else colours).items():
        panel = panel.override_by_name(name, [_fixed(colour)])
    return panel.build()


def event_count_panel(
    title: str,
    question: str,
    *queries: Query,
    colours: Mapping[str, str] | None = None,
    span: int = 8,
    nothing: str | None = None,
) -> model.Panel:
    """Return a bar graph of occasional events; each query counts the events since the previous point."""
    return time_series_panel(
        title,
        f"{question} (Each bar counts the events since the previous one.)",
        *queries,
        unit="none",
        decimals=0,
        span=span,
        bars=True,
        stacked=True,
        points=_BAR_COUNT,
        colours={} if colours is None else colours,
        nothing=nothing,
    )


def state_timeline_panel(
    title: str,
    question: str,
    *queries: Query,
    mappings: Sequence[model.ValueMapping],
    span: int = 24,
    height: int = 8,
    link: tuple[str, str] | None = None,
    nothing: str | None = None,
) -> model.Panel:
    """Return states over time, one row per series; ``mappings`` define text and colour of each number."""
    panel = (
        statetimeline.Panel()
        .title(title)
        .description(question)
        .datasource(DATASOURCE)
        .height(height)
        .span(span)
        .unit("none")
        .mappings(list(mappings))
        .thresholds(_thresholds(((None, Colour.NEUTRAL),)))
        .color_scheme(build.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))
        .merge_values(True)
        .show_value(common.VisibilityMode.AUTO)
        .align_value(common.TimelineValueAlignment.LEFT)
        .row_height(0.85)
        .line_width(0)
        .fill_opacity(80)
        .legend(_legend())
        .tooltip(look.VizTooltipOptions().mode(common.TooltipDisplayMode.SINGLE))
        .targets([_target(each, ref).range() for ref, each in zip(_REFS, queries, strict=False)])
    )
    if link is not None:
        panel = panel.data_links([_link(*link)])
    if nothing is not None:
        panel = panel.no_value(nothing)
    return panel.build()


def heat_map_panel(
    title: str,
    question: str,
    query: Query,
    *,
    unit: str,
    steps: Sequence[tuple[float | None, str]],
    link: tuple[str, str],
    span: int = 12,
    height: int = 9,
    decimals: int | None = None,
    nothing: str | None = None,
) -> model.Panel:
    """Return a row of coloured cells for each series, so that a pattern in time or across rows is visible."""
    panel = (
        statushistory.Panel()
        .title(title)
        .description(question)
        .datasource(DATASOURCE)
        .height(height)
        .span(span)
        .unit(unit)
        .thresholds(_thresholds(steps))
        .color_scheme(build.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))
        .show_value(common.VisibilityMode.NEVER)
        .row_height(0.9)
        .line_width(0)
        .fill_opacity(80)
        .max_data_points(_CELL_COUNT)
        .legend(_legend())
        .tooltip(look.VizTooltipOptions().mode(common.TooltipDisplayMode.SINGLE))
        .targets([_target(query, "A").range()])
        .data_links([_link(*link)])
    )
    if decimals is not None:
        panel = panel.decimals(decimals)
    if nothing is not None:
        panel = panel.no_value(nothing)
    return panel.build()


def histogram_over_time_panel(
    title: str,
    question: str,
    buckets: str,
    *,
    unit: str,
    span: int = 12,
    height: int = 9,
    nothing: str | None = None,
) -> model.Panel:
    """Return a heat map of the query ``buckets``, which returns cumulative buckets by ``le``.

    A row is a bucket and a column a moment; the stronger the colour of a cell, the more observations it has.
    """
    panel = (
        heatmap.Panel()
        .title(title)
        .description(question)
        .datasource(DATASOURCE)
        .height(height)
        .span(span)
        .unit(unit)
        .calculate(False)
        .y_axis(heatmap.YAxisConfig().unit(unit).axis_placement(common.AxisPlacement.LEFT))
        .rows_frame(heatmap.RowsHeatmapOptions().layout(common.HeatmapCellLayout.AUTO))
        .cell_values(heatmap.CellValues().unit("none").decimals(0))
        .cell_gap(1)
        .filter_values(heatmap.FilterValueRange().le(_LEAST_OBSERVATION))
        .color(
            heatmap.HeatmapColorOptions()
            .mode(heatmap_model.HeatmapColorMode.OPACITY)
            .fill(Colour.IN_USE)
            .scale(heatmap_model.HeatmapColorScale.EXPONENTIAL)
            .exponent(0.5)
            .reverse(False)
        )
        .max_data_points(_CELL_COUNT)
        .targets([_target(Query(buckets, "{{le}}"), "A").range().format(PromQueryFormat.HEATMAP)])
    )
    if nothing is not None:
        panel = panel.no_value(nothing)
    return panel.build()


def table_panel(
    title: str,
    question: str,
    *queries: str,
    columns: Sequence[PanelColumn],
    span: int = 24,
    height: int = 8,
    sort: str | None = None,
    smallest_first: bool = False,
    nothing: str | None = None,
) -> model.Panel:
    """Return a table as of now, joined on equal labels; ``sort`` names a column, largest first."""
    panel = (
        table.Panel()
        .title(title)
        .description(question)
        .datasource(DATASOURCE)
        .height(height)
        .span(span)
        .unit("none")
        .thresholds(_thresholds(((None, Colour.NEUTRAL),)))
        .color_scheme(build.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))
        .align(common.FieldTextAlignment.LEFT)
        .cell_options(common.TableAutoCellOptions())
        .show_header(True)
        .cell_height(common.TableCellHeight.SM)
        .targets(
            [
                _target(Query(text), ref).instant().format(PromQueryFormat.TABLE)
                for ref, text in zip(_REFS, queries, strict=False)
            ]
        )
        .transformations(
            [
                *([model.DataTransformerConfig(id_val="merge", options={})] if len(queries) > 1 else []),
                model.DataTransformerConfig(
                    id_val="organize",
                    options={
                        "excludeByName": {"Time": True} | _unlisted(columns, len(queries)),
                        "indexByName": {each.source: place for place, each in enumerate(columns)},
                        "renameByName": {each.source: each.title for each in columns},
                    },
                ),
            ]
        )
    )
    if sort is not None:
        panel = panel.sort_by([look.TableSortByFieldState().display_name(sort).desc(not smallest_first)])
    if nothing is not None:
        panel = panel.no_value(nothing)
    for each in columns:
        if properties := _properties(each):
            panel = panel.override_by_name(each.title, properties)
    made = panel.build()
    if isinstance(made.options, TableOptions):
        made.options.footer = None  # the SDK's default; Grafana 12 has no such option
    return made


def _legend() -> look.VizLegendOptions:
    return (
        look.VizLegendOptions()
        .display_mode(common.LegendDisplayMode.LIST)
        .placement(common.LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs([])
    )


def _target(query: Query, ref: str) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.text).ref_id(ref).datasource(DATASOURCE)
    return target.legend_format(query.legend) if query.legend else target


def _unlisted(columns: Sequence[PanelColumn], queries: int) -> dict[str, bool]:
    """Return the values without a column: those of queries that only add labels."""
    values = ["Value"] if queries == 1 else [f"Value #{ref}" for ref in _REFS[:queries]]
    return {value: True for value in values if value not in {each.source for each in columns}}


def _properties(column: PanelColumn) -> list[model.DynamicConfigValue]:
    properties: dict[str, object] = {}
    if column.unit is not None:
        properties["unit"] = column.unit
    if column.decimals is not None:
        properties["decimals"] = column.decimals
    if column.width is not None:
        properties["custom.width"] = column.width
    if column.mappings:
        properties["mappings"] = list(column.mappings)
    if column.steps:
        properties["thresholds"] = _thresholds(column.steps).build()
    if column.filled:
        properties["custom.cellOptions"] = common.TableColoredBackgroundCellOptions(
            mode=common.TableCellBackgroundDisplayMode.BASIC
        )
    elif column.mappings or column.steps:
        properties["custom.cellOptions"] = common.TableColorTextCellOptions()
    if column.link is not None:
        properties["links"] = [_link(*column.link).build()]
    properties |= column.properties
    return [model.DynamicConfigValue(id_val=name, value=value) for name, value in properties.items()]


def _thresholds(steps: Sequence[tuple[float | None, str]]) -> build.ThresholdsConfig:
    return (
        build.ThresholdsConfig()
        .mode(model.ThresholdsMode.ABSOLUTE)
        .steps([model.Threshold(value=value, color=colour) for value, colour in steps])
    )


def _fixed(colour: str) -> model.DynamicConfigValue:
    return model.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": colour})


def _link(title: str, url: str) -> build.DashboardLink:
    return build.DashboardLink(title).url(url)
