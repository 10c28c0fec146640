"""What the kubelet's plugin watcher is told of us when it comes to our socket, and what it makes of that."""

from __future__ import annotations

from pathlib import Path

import grpc

from plugin.api import pluginregistration_pb2, pluginregistration_pb2_grpc
from plugin.logs import Log
from plugin.observing import RegistrationObserver

__all__ = ["Visits"]

TYPE = "DevicePlugin"


class Visits(pluginregistration_pb2_grpc.RegistrationServicer):
    """Serves ``endpoint`` for ``resource``, by ``version`` of the device-plugin protocol.

    Attributes:
        heard: the kubelet was here.
        accepted: it said that it took us.
    """

    def __init__(
        self, resource: str, endpoint: Path, version: str, *, log: Log, observer: RegistrationObserver
    ) -> None:
        self._resource = resource
        self._endpoint = endpoint
        self._version = version
        self._log = log
        self._observer = observer
        self.heard = False
        self.accepted = False

    async def GetInfo(
        self,
        request: pluginregistration_pb2.InfoRequest,
        context: grpc.aio.ServicerContext[pluginregistration_pb2.InfoRequest, pluginregistration_pb2.PluginInfo],
    ) -> pluginregistration_pb2.PluginInfo:
        self.heard = True
        return pluginregistration_pb2.PluginInfo(
            type=TYPE, name=self._resource, endpoint=str(self._endpoint), supported_versions=[self._version]
        )

    async def NotifyRegistrationStatus(
        self,
        request: pluginregistration_pb2.RegistrationStatus,
        context: grpc.aio.ServicerContext[
            pluginregistration_pb2.RegistrationStatus, pluginregistration_pb2.RegistrationStatusResponse
        ],
    ) -> pluginregistration_pb2.RegistrationStatusResponse:
        self.heard = True
        self.accepted = request.plugin_registered
        if not request.plugin_registered:
            self._observer.attempted(self._resource, "watcher", "refused")
            self._log.error("kubelet.refused", resource=self._resource, sentence=request.error)
        return pluginregistration_pb2.RegistrationStatusResponse()
