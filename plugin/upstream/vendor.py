"""One registration of a vendor's plugin: a connection that is dialled once and never again.

Invariants: every call has a deadline, because the plugin may hang. Every response becomes a checked value or an error
of ours with a message. The vendor's own refusals keep their status and their text.

It is never dialled again because a second ``ListAndWatch`` would share updates with the first: a plugin with one queue
of health events delivers each event to only one of its streams. A plugin that is gone is made to register again
instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TypeVar

import grpc

from plugin.api import deviceplugin_pb2 as kubelet
from plugin.api import deviceplugin_pb2_grpc
from plugin.kubelet.sockets import SocketFile
from scrubber.domain.codes import ErrorCode
from scrubber.domain.errors import InvalidConfiguration, Refused, Unavailable

__all__ = ["MAX_DEVICES", "VendorInvalidAnswer", "VendorPlugin", "VendorRefused", "VendorTimedOut", "VendorTimes"]

MAX_DEVICES = 16_384
"""Limit of devices of one resource: more than any node has, replicas included, and below the size limit of a list."""
MAX_TEXT_LENGTH = 1_024
"""Limit of a vendor's text that is passed on, in characters."""

_OPTIONS = (
    # Without this, a new channel may inherit the connection, or the backoff, of a closed one to the same path.
    ("grpc.use_local_subchannel_pool", 1),
)
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)

_T = TypeVar("_T")


class StreamEnd(Enum):
    """A stream that ended cleanly."""

    ENDED = "ended"


ENDED = StreamEnd.ENDED


class VendorTimedOut(Unavailable):
    """The vendor's plugin is present but did not respond in time."""

    code = ErrorCode.UPSTREAM_TIMEOUT


class VendorInvalidAnswer(Refused):
    """The vendor's plugin gave an unusable response."""

    code = ErrorCode.UPSTREAM_INVALID_RESPONSE


class VendorRefused(Refused):
    """The vendor's plugin refused; its status and its text are passed on."""

    code = ErrorCode.UPSTREAM_REFUSED

    def __init__(self, message: str, *, status: grpc.StatusCode, text: str) -> None:
        super().__init__(message, public_message=text)
        self.status = status


@dataclass(frozen=True, slots=True)
class VendorTimes:
    """Time limits of the vendor's plugin, in seconds.

    Attributes:
        dial: to connect, the same as the kubelet allows.
        options: to answer ``GetDevicePluginOptions``.
        first_list: from the start of the stream to the first list.
        poll: interval of checks of the plugin's socket.
        pause: after each list: a plugin that never stops sending would otherwise occupy this process completely.
        heartbeat: silence on the stream after which the plugin is probed.
        probe: to respond to the probe.
        preferred: to answer ``GetPreferredAllocation``; the kubelet's main loop is blocked meanwhile.
        allocate: to answer ``Allocate``, which blocks it too; a refusal then fails the pod.
        pre_start: to answer ``PreStartContainer``, where the kubelet's deadline leaves that long.
    """

    dial: float = 10.0
    options: float = 5.0
    first_list: float = 10.0
    poll: float = 0.5
    pause: float = 0.05
    heartbeat: float = 5.0
    probe: float = 2.0
    preferred: float = 1.0
    allocate: float = 10.0
    pre_start: float = 25.0


class VendorPlugin:
    """The plugin behind ``socket``, for one resource.

    Args:
        clock: monotonic seconds.

    Attributes:
        options: the plugin's response when it was dialled.
    """

    def __init__(self, resource: str, socket: Path, *, times: VendorTimes, clock: Callable[[], float]) -> None:
        self.resource = resource
        self.socket = socket
        self.options = kubelet.DevicePluginOptions()
        self._times = times
        self._clock = clock
        self._identity: SocketFile | None = None
        self._channel = grpc.aio.insecure_channel(f"unix:{socket}", options=_OPTIONS)
        self._plugin = deviceplugin_pb2_grpc.DevicePluginStub(self._channel)

    async def dial(self) -> None:
        """Connect, and request the options.

        Raises:
            Unavailable: no process responds there in time, or not as a device plugin does.
        """
        self._identity = self._socket_file()
        try:
            async with asyncio.timeout(self._times.dial):
                await self._channel.channel_ready()
        except TimeoutError:
            raise VendorTimedOut(f"No process responded at {self.socket} within {self._times.dial:g} s.") from None
        self.options = await self._ask_options(self._times.options)

    async def lists(self) -> AsyncGenerator[tuple[kubelet.Device, ...], None]:
        """Yield every full list that the plugin sends. Close it when done (:func:`contextlib.aclosing`).

        Raises:
            Unavailable: the stream has ended, the plugin's socket is gone, or the plugin no longer responds.
            VendorInvalidAnswer: a list that cannot be used.
        """
        call = self._plugin.ListAndWatch(kubelet.Empty())
        stream = aiter(call)
        coming = asyncio.ensure_future(anext(stream, ENDED))
        last_message_at, first = self._clock(), True
        try:
            while True:
                done, _ = await asyncio.wait({coming}, timeout=self._times.poll)
                if done:
                    yield self._checked(await self._translated("ListAndWatch", coming))
                    await asyncio.sleep(self._times.pause)
                    coming = asyncio.ensure_future(anext(stream, ENDED))
                    last_message_at, first = self._clock(), False
                    continue
                if self._socket_file() != self._identity:
                    raise Unavailable(
                        f"The socket of the vendor's plugin for {self.resource}, {self.socket}, was recreated."
                    )
                silent = self._clock() - last_message_at
                if first and silent >= self._times.first_list:
                    raise VendorTimedOut(f"The vendor's plugin for {self.resource} sent no list within {silent:.0f} s.")
                if not first and silent >= self._times.heartbeat:
                    await self._ask_options(self._times.probe)
                    last_message_at = self._clock()
        finally:
            coming.cancel()
            call.cancel()
            await asyncio.gather(coming, return_exceptions=True)

    async def get_preferred_allocation(
        self, request: kubelet.PreferredAllocationRequest
    ) -> kubelet.PreferredAllocationResponse:
        """Call ``GetPreferredAllocation``; raises the errors of :meth:`allocate`."""
        call: Awaitable[kubelet.PreferredAllocationResponse] = self._plugin.GetPreferredAllocation(request)
        return await self._with_timeout("GetPreferredAllocation", self._times.preferred, call)

    async def allocate(self, request: kubelet.AllocateRequest) -> kubelet.AllocateResponse:
        """Call ``Allocate``.

        Raises:
            Unavailable: the plugin is gone; :class:`VendorTimedOut` when it is present and does not respond.
            VendorInvalidAnswer: a response that cannot be read, or that lacks a container.
            VendorRefused: the plugin's own refusal.
        """
        call: Awaitable[kubelet.AllocateResponse] = self._plugin.Allocate(request)
        answer = await self._with_timeout("Allocate", self._times.allocate, call)
        requested, answered = len(request.container_requests), len(answer.container_responses)
        if answered < requested:
            raise self._invalid(f"it answered Allocate for {answered} of {requested} containers")
        return answer

    async def pre_start_container(
        self, request: kubelet.PreStartContainerRequest, left: float
    ) -> kubelet.PreStartContainerResponse:
        """Call ``PreStartContainer`` with a limit of ``left`` seconds; raises the errors of :meth:`allocate`."""
        limit = min(left, self._times.pre_start)
        if limit <= 0:
            raise self._timed_out("PreStartContainer", "in the remaining time")
        call: Awaitable[kubelet.PreStartContainerResponse] = self._plugin.PreStartContainer(request, timeout=limit)
        return await self._with_timeout("PreStartContainer", limit, call)

    async def close(self) -> None:
        """Close the connection; calls in progress fail with :class:`Unavailable`."""
        await self._channel.close()

    def _socket_file(self) -> SocketFile:
        try:
            found = SocketFile.of(self.socket)
        except InvalidConfiguration as error:
            raise Unavailable(str(error)) from error
        if found is None:
            raise Unavailable(
                f"The socket of the vendor's plugin for {self.resource}, {self.socket}, no longer exists."
            )
        return found

    async def _ask_options(self, timeout: float) -> kubelet.DevicePluginOptions:
        call: Awaitable[kubelet.DevicePluginOptions] = self._plugin.GetDevicePluginOptions(kubelet.Empty())
        return await self._with_timeout("GetDevicePluginOptions", timeout, call)

    def _checked(self, response: kubelet.ListAndWatchResponse | StreamEnd) -> tuple[kubelet.Device, ...]:
        if isinstance(response, StreamEnd):
            raise Unavailable(f"The vendor's plugin for {self.resource} closed its stream of lists.")
        devices: Sequence[kubelet.Device] = response.devices
        ids = {device.ID for device in devices}
        if "" in ids:
            raise self._invalid("its list contains a device without an id")
        if len(ids) < len(devices):
            raise self._invalid("its list contains a device twice")
        if len(ids) > MAX_DEVICES:
            raise self._invalid(f"its list has {len(ids)} devices; the limit is {MAX_DEVICES}")
        return tuple(devices)

    async def _with_timeout(self, name: str, seconds: float, call: Awaitable[_T | None]) -> _T:
        try:
            async with asyncio.timeout(seconds):
                return await self._translated(name, call)
        except TimeoutError:
            raise self._timed_out(name, f"within {seconds:g} s") from None

    async def _translated(self, name: str, call: Awaitable[_T | None]) -> _T:
        """Await ``call``; translate gRPC's errors into ours."""
        try:
            answer = await call
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
            if error.code() in _LOST:
                raise self._away(name, reason) from error
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise self._timed_out(name, f"({reason})") from error
            raise VendorRefused(
                f"The vendor's plugin for {self.resource} refused {name}: {reason}",
                status=error.code(),
                text=(error.details() or "The vendor's plugin gave no reason.")[:MAX_TEXT_LENGTH],
            ) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # The connection was closed during the call: another registration has replaced it.
            raise self._away(name, "the connection was closed") from None
        if answer is None:  # gRPC's result for bytes that are not a valid message
            raise self._invalid(f"its response to {name} is not a valid message")
        return answer

    def _away(self, name: str, reason: str) -> Unavailable:
        message = f"The vendor's plugin for {self.resource} is not available. The call is retried."
        return Unavailable(
            f"The vendor's plugin for {self.resource} did not respond to {name}: {reason}", public_message=message
        )

    def _timed_out(self, name: str, when: str) -> VendorTimedOut:
        message = f"The vendor's plugin for {self.resource} did not respond to {name} {when}."
        return VendorTimedOut(message, public_message=message)

    def _invalid(self, what: str) -> VendorInvalidAnswer:
        message = f"The vendor's plugin for {self.resource} cannot be used: {what}."
        return VendorInvalidAnswer(message, public_message=message)
