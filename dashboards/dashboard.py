"""Common parts of the boards: variables, links between boards, and the layout of panels.

A board keeps its ``uid``: links, bookmarks and the import of a newer version identify it by that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as model

from dashboards.annotations import annotation_models
from dashboards.panels import DATASOURCE

__all__ = [
    "DEVICE_LINK",
    "NODE_LINK",
    "RECOVERY_LINK",
    "RUNBOOKS",
    "RUNBOOK_LINK",
    "DashboardName",
    "Row",
    "build_dashboard",
    "device_series_link",
    "node_series_link",
    "to_json",
]

_WIDTH: Final = 24
"""Columns of Grafana's grid."""

_KEPT_PARAMETERS: Final = "${datasource:queryparam}&${job:queryparam}&${__url_time_range}"


class DashboardName(StrEnum):
    """The boards, by the name of their file."""

    FLEET = "fleet"
    NODE = "node"
    DEVICE = "device"

    @property
    def uid(self) -> str:
        return f"scrubber-{self}"


RUNBOOKS: Final = "docs/runbooks"
"""Where the runbooks are, unless the boards are generated with another address."""

RUNBOOK_LINK: Final = ("Show the runbook", "${runbooks}/${__data.fields.Alert}.md")
"""A link from a row of a table with a column ``Alert``."""

RECOVERY_LINK: Final = ("What to do about operator or reboot", "${runbooks}/ScrubberDeviceNeedsOperator.md")
"""A link from the recovery of a device that is out of service."""

NODE_LINK: Final = (
    "Show this node",
    f"/d/{DashboardName.NODE.uid}?var-cluster=${{__data.fields.Cluster}}&var-instance=${{__data.fields.Node}}&{_KEPT_PARAMETERS}",
)
"""A link from a row of a table with the columns ``Cluster`` and ``Node``."""

DEVICE_LINK: Final = (
    "Show this device",
    f"/d/{DashboardName.DEVICE.uid}?var-cluster=${{__data.fields.Cluster}}&var-instance=${{__data.fields.Node}}&var-device=${{__data.fields.Device}}&{_KEPT_PARAMETERS}",
)
"""A link from a row of a table with columns ``Cluster``, ``Node`` and ``Device``."""


def device_series_link() -> tuple[str, str]:
    """Return a link from a series with the labels ``cluster``, ``instance`` and ``device``."""
    labels = "var-cluster=${__field.labels.cluster}&var-instance=${__field.labels.instance}&var-device=${__field.labels.device}"
    return "Show this device", f"/d/{DashboardName.DEVICE.uid}?{labels}&{_KEPT_PARAMETERS}"


def node_series_link() -> tuple[str, str]:
    """Return a link from a series with the labels ``cluster`` and ``instance``."""
    labels = "var-cluster=${__field.labels.cluster}&var-instance=${__field.labels.instance}"
    return "Show this node", f"/d/{DashboardName.NODE.uid}?{labels}&{_KEPT_PARAMETERS}"


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one title, from left to right and then down. The first row of a board needs no title."""

    title: str | None
    panels: Sequence[model.Panel]


def build_dashboard(
    name: DashboardName, title: str, description: str, rows: Sequence[Row], *, since: str, refresh: str
) -> model.Dashboard:
    """Return a complete board.

    Args:
        since: start of the initial time range, which ends now (``now-6h``).
        refresh: refresh interval (``1m``).
    """
    head = (
        build.Dashboard(title)
        .uid(name.uid)
        .description(description)
        .tags(["gpu", "gpu-scrubber"])
        .timezone("browser")
        .readonly()
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .time(since, "now")
        .refresh(refresh)
        .variables(_variables(name))
        .links([_link(other) for other in DashboardName if other is not name])
    )
    made = head.build()
    for variable in made.templating.list_val or []:
        variable.auto = variable.auto_min = variable.auto_count = None  # of intervals only; not in Grafana's schema
    made.annotations = model.AnnotationContainer(list_val=annotation_models())
    made.panels = _place_panels(rows)
    return made


def to_json(dashboard: model.Dashboard | dict[str, Any]) -> str:
    """Return the content of a board's file."""
    return json.dumps(dashboard, cls=JSONEncoder, indent=2, ensure_ascii=False, sort_keys=True) + "\n"


def _variables(which: DashboardName) -> list[Any]:
    info = '__name__=~"scrubber_build_info|scrubber_plugin_build_info"'
    variables: list[Any] = [
        build.DatasourceVariable("datasource").label("Data source").type("prometheus"),
        _multi_value_query("cluster", "Cluster", f"label_values({{{info}}}, cluster)", everything=".*"),
        _multi_value_query("job", "Job", f'label_values({{{info}, cluster=~"$cluster"}}, job)'),
        _multi_value_query(
            "instance", "Instance", f'label_values({{{info}, cluster=~"$cluster", job=~"$job"}}, instance)'
        ),
    ]
    variables.append(build.TextBoxVariable("runbooks").label("Runbooks").default_value(RUNBOOKS))
    if which is DashboardName.DEVICE:
        query = 'label_values(scrubber_device_state{cluster=~"$cluster", job=~"$job", instance=~"$instance"}, device)'
        variables.append(_query("device", "Device", query))
    return variables


def _query(name: str, label: str, query: str) -> build.QueryVariable:
    return (
        build.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query(query)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
    )


def _multi_value_query(name: str, label: str, query: str, *, everything: str = ".+") -> build.QueryVariable:
    """Return a variable with multiple values, initially all.

    Args:
        everything: regular expression of all values; ``.*`` if series may lack the label.
    """
    initially = model.VariableOption(selected=True, text=["All"], value=["$__all"])
    return _query(name, label, query).multi(True).include_all(True).all_value(everything).current(initially)


def _link(to: DashboardName) -> build.DashboardLink:
    return (
        build.DashboardLink(to.capitalize())
        .type(model.DashboardLinkType.LINK)
        .url(f"/d/{to.uid}")
        .icon("dashboard")
        .tooltip(f"Open the {to} dashboard with the current selection")
        .include_vars(True)
        .keep_time(True)
    )


def _place_panels(rows: Sequence[Row]) -> list[model.Panel | model.RowPanel]:
    placed: list[model.Panel | model.RowPanel] = []
    top = 0
    for row in rows:
        if row.title is not None:
            heading = model.RowPanel(
                id_val=len(placed) + 1, title=row.title, grid_pos=model.GridPos(x=0, y=top, w=_WIDTH, h=1), panels=[]
            )
            placed.append(heading)
            top += 1
        left, tallest = 0, 0
        for panel in row.panels:
            assert panel.grid_pos is not None, panel.title
            width, height = panel.grid_pos.w, panel.grid_pos.h
            if left + width > _WIDTH:
                left, top, tallest = 0, top + tallest, 0
            panel.id_val = len(placed) + 1
            panel.repeat_direction = None
            panel.grid_pos = model.GridPos(x=left, y=top, w=width, h=height)
            placed.append(panel)
            left, tallest = left + width, max(tallest, height)
        top += tallest
    return placed
