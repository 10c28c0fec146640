"""The boards, from the whole fleet down to one device. Each shows at its top what its reader needs first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from grafana_foundation_sdk.models import dashboard as model

from dashboards.boards import device, fleet, node
from dashboards.dashboard import DashboardName

__all__ = ["BOARDS"]

BOARDS: Final[Mapping[DashboardName, Callable[[], model.Dashboard]]] = {
    DashboardName.FLEET: fleet.fleet_dashboard,
    DashboardName.NODE: node.node_dashboard,
    DashboardName.DEVICE: device.device_dashboard,
}
