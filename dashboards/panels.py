"""The four kinds of panels that the boards are made of: a number, a graph, a timeline of states, a table.

Each takes the question that it answers, which becomes its description, and the unit of what it shows. What all panels of
a kind have in common is said here, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from grafana_foundation_sdk.builders import common as look
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import prometheus, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from dashboards.value_mappings import COMMON_COLOURS, Colour

__all__ = [
    "DATASOURCE",
    "PanelColumn",
    "Query",
    "event_count_panel",
    "stat_panel",
    "state_timeline_panel",
    "table_panel",
    "time_series_panel",
]

DATASOURCE: Final = model.DataSourceRef(type_val="prometheus", uid="${datasource}")

_BAR_COUNT: Final = 120
"""Over the time range."""

_MAX_GAP: Final = 600_000
"""Milliseconds."""

_REFS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class Query:
    """A question to Prometheus.

    Attributes:
        text: PromQL.
        legend: what its series are called; ``{{label}}`` is replaced.
        exemplars: ask for single measured cases, with the id of their scrub, as well.
    """

    text: str
    legend: str = ""
    exemplars: bool = False


@dataclass(frozen=True, slots=True)
class PanelColumn:
    """A column of a table.

    Attributes:
        source: a label, or ``Value`` for the value of the table's only query, ``Value #B`` for that of its second.
        title: what stands above it.
        unit: of a value.
        width: in pixels; None shares what is left.
        mappings: texts and colours for its values; they then colour the cell's text.
        filled: they colour the cell instead: dark red is no colour for letters.
        steps: (from, colour) in rising order, beginning with that of the lowest values.
        link: where a click leads.
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
    """One number as it is now, or over the time range; ``nothing`` is shown where there is none.

    Args:
        filled: the panel has the colour, not the letters.
        size: of the letters in pixels, where numbers and words beside each other would else have one each.
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
    """Values over time, from zero up.

    Args:
        colours: of series by name; those of words that mean the same everywhere unless given.
        steps: draw a line where it becomes bad.
        hue: all other series are shades of this; without it each has a colour of its own, which then means nothing.
        rare: there is a value only now and then; it is drawn through to the next one where that comes soon.
        points: at most so many over the time range, so that a bar is wide enough to be seen.
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
        .legend(
            look.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs([])
        )
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
    if unit == "short":  # a quiet minute is not drawn on a scale of a hundred
        panel = panel.axis_soft_max(1)
    if unit == "percentunit" and top is None:  # nor nothing on one of ten thousand per cent
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
    """What happens now and then, as bars; each query counts what came since the point before."""
    return time_series_panel(
        title,
        f"{question} (Each bar counts what came since the one before.)",
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
    """States over time, one row for each series; ``mappings`` give numbers their texts and colours."""
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
        .legend(
            look.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs([])
        )
        .tooltip(look.VizTooltipOptions().mode(common.TooltipDisplayMode.SINGLE))
        .targets([_target(each, ref).range() for ref, each in zip(_REFS, queries, strict=False)])
    )
    if link is not None:
        panel = panel.data_links([_link(*link)])
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
    """A table as of now. Rows of several queries with equal labels become one; ``sort`` names a column, largest first."""
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
    return panel.build()


def _target(query: Query, ref: str) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.text).ref_id(ref).datasource(DATASOURCE)
    return target.legend_format(query.legend) if query.legend else target


def _unlisted(columns: Sequence[PanelColumn], queries: int) -> dict[str, bool]:
    """Values that no column shows: those of queries that are there for their labels alone."""
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
