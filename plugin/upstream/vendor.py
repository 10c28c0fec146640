"""One registration of a vendor's plugin: a connection that is dialled once and never again.

Promises: every call has a deadline, because the plugin behind it may hang; whatever it answers is a value that was
checked, or an error of ours with a sentence. The vendor's own refusals keep their status and their text.

Never again, because a second ``ListAndWatch`` would share its news with the first: a plugin that keeps one queue of
health events gives each of them to one of its streams only. A plugin that is gone is made to register again instead.
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
"""Of one resource; more than any node has, replicas included, and less than what a list may weigh."""
MAX_TEXT_LENGTH = 1_024
"""Characters of a vendor's text that are passed on."""

_OPTIONS = (
    # Without it a new channel may inherit the connection, or the back-off, of a closed one to the same path.
    ("grpc.use_local_subchannel_pool", 1),
)
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)

_T = TypeVar("_T")


class StreamEnd(Enum):
    """A stream that was over in good order."""

    ENDED = "ended"


ENDED = StreamEnd.ENDED


class VendorTimedOut(Unavailable):
    """The vendor's plugin is there and did not answer in time."""

    code = ErrorCode.UPSTREAM_TIMEOUT


class VendorInvalidAnswer(Refused):
    """The vendor's plugin answered what cannot be used."""

    code = ErrorCode.UPSTREAM_INVALID_RESPONSE


class VendorRefused(Refused):
    """The vendor's plugin refused; its status and its text are passed on."""

    code = ErrorCode.UPSTREAM_REFUSED

    def __init__(self, message: str, *, status: grpc.StatusCode, text: str) -> None:
        super().__init__(message, public_message=text)
        self.status = status


@dataclass(frozen=True, slots=True)
class VendorTimes:
    """Seconds.

    Attributes:
        dial: to connect, as the kubelet gives.
        options: to answer ``GetDevicePluginOptions``.
        first_list: from the stream's beginning to the first list.
        poll: between looks at the plugin's socket, and the pause after each list: a plugin that never stops sending
            would otherwise have all of this process.
        heartbeat: of silence on the stream after which the plugin is asked whether it is there.
        probe: that it may take to answer that.
        preferred: to answer ``GetPreferredAllocation``; the kubelet's main loop stands still meanwhile.
        allocate: to answer ``Allocate``, likewise; a refusal then fails the pod.
        pre_start: to answer ``PreStartContainer``, where the kubelet leaves as long.
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
        options: as the plugin answered when it was dialled.
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
        """Connect, and ask for the options.

        Raises:
            Unavailable: nobody answers there in time, or not as a device plugin does.
        """
        self._identity = self._socket_file()
        try:
            async with asyncio.timeout(self._times.dial):
                await self._channel.channel_ready()
        except TimeoutError:
            raise VendorTimedOut(f"Nobody answers at {self.socket} within {self._times.dial:g} s.") from None
        self.options = await self._ask_options(self._times.options)

    async def lists(self) -> AsyncGenerator[tuple[kubelet.Device, ...], None]:
        """Every full list that the plugin sends. Close it when done (:func:`contextlib.aclosing`).

        Raises:
            Unavailable: the stream has ended, the plugin's socket is gone, or the plugin does not answer any more.
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
                        f"The socket of the vendor's plugin for {self.resource}, {self.socket}, was made anew."
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
        """``GetPreferredAllocation``; raises as :meth:`allocate`."""
        call: Awaitable[kubelet.PreferredAllocationResponse] = self._plugin.GetPreferredAllocation(request)
        return await self._with_timeout("GetPreferredAllocation", self._times.preferred, call)

    async def allocate(self, request: kubelet.AllocateRequest) -> kubelet.AllocateResponse:
        """``Allocate``.

        Raises:
            Unavailable: the plugin is gone; :class:`VendorTimedOut` when it is there and does not answer.
            VendorInvalidAnswer: an answer that cannot be read, or that lacks a container.
            VendorRefused: as the plugin says.
        """
        call: Awaitable[kubelet.AllocateResponse] = self._plugin.Allocate(request)
        answer = await self._with_timeout("Allocate", self._times.allocate, call)
        asked, answered = len(request.container_requests), len(answer.container_responses)
        if answered < asked:
            raise self._invalid(f"it answered Allocate for {answered} of {asked} containers")
        return answer

    async def pre_start_container(
        self, request: kubelet.PreStartContainerRequest, left: float
    ) -> kubelet.PreStartContainerResponse:
        """``PreStartContainer``, within ``left`` seconds; raises as :meth:`allocate`."""
        limit = min(left, self._times.pre_start)
        if limit <= 0:
            raise self._timed_out("PreStartContainer", "in the time that was left")
        call: Awaitable[kubelet.PreStartContainerResponse] = self._plugin.PreStartContainer(request, timeout=limit)
        return await self._with_timeout("PreStartContainer", limit, call)

    async def close(self) -> None:
        """Let go of the connection; calls under way end as :class:`Unavailable`."""
        await self._channel.close()

    def _socket_file(self) -> SocketFile:
        try:
            found = SocketFile.of(self.socket)
        except InvalidConfiguration as error:
            raise Unavailable(str(error)) from error
        if found is None:
            raise Unavailable(f"The socket of the vendor's plugin for {self.resource}, {self.socket}, is gone.")
        return found

    async def _ask_options(self, timeout: float) -> kubelet.DevicePluginOptions:
        call: Awaitable[kubelet.DevicePluginOptions] = self._plugin.GetDevicePluginOptions(kubelet.Empty())
        return await self._with_timeout("GetDevicePluginOptions", timeout, call)

    def _checked(self, response: kubelet.ListAndWatchResponse | StreamEnd) -> tuple[kubelet.Device, ...]:
        if isinstance(response, StreamEnd):
            raise Unavailable(f"The vendor's plugin for {self.resource} ended its list.")
        devices: Sequence[kubelet.Device] = response.devices
        ids = {device.ID for device in devices}
        if "" in ids:
            raise self._invalid("its list has a device without an id")
        if len(ids) < len(devices):
            raise self._invalid("its list names a device twice")
        if len(ids) > MAX_DEVICES:
            raise self._invalid(f"its list has {len(ids)} devices, and {MAX_DEVICES} are the most that are taken")
        return tuple(devices)

    async def _with_timeout(self, name: str, seconds: float, call: Awaitable[_T | None]) -> _T:
        try:
            async with asyncio.timeout(seconds):
                return await self._translated(name, call)
        except TimeoutError:
            raise self._timed_out(name, f"within {seconds:g} s") from None

    async def _translated(self, name: str, call: Awaitable[_T | None]) -> _T:
        """Await ``call``; foreign errors become ours."""
        try:
            answer = await call
        except grpc.aio.AioRpcError as error:
            said = f"{error.code().name}: {error.details()}"
            if error.code() in _LOST:
                raise self._away(name, said) from error
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise self._timed_out(name, f"({said})") from error
            raise VendorRefused(
                f"The vendor's plugin for {self.resource} refused {name}, {said}",
                status=error.code(),
                text=(error.details() or "The vendor's plugin gave no reason.")[:MAX_TEXT_LENGTH],
            ) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # The connection was closed under the call: another registration has taken its place.
            raise self._away(name, "the connection was closed") from None
        if answer is None:  # gRPC's way to say that the bytes are no message
            raise self._invalid(f"its answer to {name} cannot be read")
        return answer

    def _away(self, name: str, said: str) -> Unavailable:
        told = f"The vendor's plugin for {self.resource} is away. It is asked again."
        return Unavailable(
            f"The vendor's plugin for {self.resource} did not answer {name}, {said}", public_message=told
        )

    def _timed_out(self, name: str, when: str) -> VendorTimedOut:
        message = f"The vendor's plugin for {self.resource} did not answer {name} {when}."
        return VendorTimedOut(message, public_message=message)

    def _invalid(self, what: str) -> VendorInvalidAnswer:
        message = f"The vendor's plugin for {self.resource} cannot be used: {what}."
        return VendorInvalidAnswer(message, public_message=message)
