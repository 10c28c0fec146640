"""The kubelet's PodResources socket: ask for the list, and say in a sentence why there is none."""

from __future__ import annotations

import os
import stat
from collections import defaultdict
from pathlib import Path
from urllib.parse import quote

import grpc
from google.protobuf.message import DecodeError

from scrubber.adapters.kubelet.corroboration import ListedPod
from scrubber.adapters.kubelet.trust import SocketIdentity
from scrubber.domain.errors import Away, BadConfiguration
from scrubber.ports.clock import Clock
from scrubber.wire import podresources_pb2 as messages

__all__ = ["PodResources"]

_LONGEST_PATH = 107  # bytes that a Unix socket's address holds
_LIST = "/v1.PodResourcesLister/List"
_CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 250),
    # In spite of its name, how long one attempt to connect may take: a loaded kubelet is not an absent one.
    ("grpc.min_reconnect_backoff_ms", 5000),
    # Channels share connections, and so their back-off, unless told not to: a new channel must try at once.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
)
_BUSY_PAUSE = 0.01  # seconds: the kubelet allows one more question after that


class PodResources:
    """A client of one kubelet at a time: another socket at the same path gets another channel.

    Raises:
        BadConfiguration: the path is too long for a Unix socket.
    """

    def __init__(self, socket: Path, *, clock: Clock, deadline: float) -> None:
        if len(os.fsencode(socket)) > _LONGEST_PATH:
            raise BadConfiguration(
                f"The PodResources socket {socket} has a path of more than {_LONGEST_PATH} bytes: name a shorter one."
            )
        self._socket = socket
        self._clock = clock
        self._deadline = deadline
        self._channel: grpc.aio.Channel | None = None
        self._connected_to: SocketIdentity | None = None

    def identity(self) -> SocketIdentity:
        """Which socket is there now.

        Raises:
            Away: none, or something that is no socket.
        """
        try:
            found = os.stat(self._socket)
        except OSError as exc:
            raise Away(
                f"The kubelet's PodResources socket {self._socket} is not there ({exc.strerror or exc}): is the kubelet running?"
            ) from exc
        if not stat.S_ISSOCK(found.st_mode):
            raise Away(f"{self._socket} is not a socket: name the kubelet's pod-resources/kubelet.sock.")
        return SocketIdentity(found.st_ino, found.st_ctime_ns, self._clock.wall() - found.st_ctime)

    async def list(self, identity: SocketIdentity) -> tuple[ListedPod, ...]:
        """All active pods, from the kubelet that owns the socket ``identity``.

        Raises:
            Away: no answer within the deadline, or one that makes no sense. The channel is given up, so that the next
                question does not wait for a back-off; only a kubelet that is merely busy keeps its channel.
        """
        channel = await self._channel_to(identity)
        # Decoded here and not by the channel: grpc.aio turns an answer that cannot be decoded into None.
        question: grpc.aio.UnaryUnaryMultiCallable[messages.ListPodResourcesRequest, bytes] = channel.unary_unary(
            _LIST, request_serializer=messages.ListPodResourcesRequest.SerializeToString
        )
        due = self._clock.monotonic() + self._deadline
        try:
            while True:
                left = max(due - self._clock.monotonic(), 0.001)
                try:
                    return _pods(await question(messages.ListPodResourcesRequest(), timeout=left))
                except grpc.aio.AioRpcError as exc:
                    busy = exc.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                    if not busy or self._clock.monotonic() + _BUSY_PAUSE >= due:
                        raise
                await self._clock.sleep(_BUSY_PAUSE)
        except grpc.aio.AioRpcError as exc:
            await self.close()
            raise Away(f"The kubelet's PodResources socket {self._socket} gave no list: {_reason(exc)}.") from exc
        except Away:
            await self.close()
            raise

    async def close(self) -> None:
        """Close the channel; a later question opens another."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def _channel_to(self, identity: SocketIdentity) -> grpc.aio.Channel:
        if self._connected_to is None or not self._connected_to.same_as(identity):
            await self.close()
        if self._channel is None:
            path = quote(str(self._socket.absolute()))
            self._channel = grpc.aio.insecure_channel(f"unix:{path}", options=_CHANNEL_OPTIONS)
        self._connected_to = identity
        return self._channel


def _pods(answer: bytes) -> tuple[ListedPod, ...]:
    try:
        response = messages.ListPodResourcesResponse.FromString(answer)
    except DecodeError as exc:
        raise Away(f"The kubelet's list of pods is not a message that can be read: {exc}.") from exc
    pods: list[ListedPod] = []
    for pod in response.pod_resources:
        if not pod.name or not pod.namespace:
            raise Away("The kubelet listed a pod without a name or a namespace: its answer makes no sense.")
        # One entry per device and NUMA node: they are one container's all the same.
        containers: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
        for container in pod.containers:
            held = containers[container.name]
            for entry in container.devices:
                held.update((entry.resource_name, device) for device in entry.device_ids)
        frozen = {name: frozenset(devices) for name, devices in containers.items()}
        pods.append(ListedPod(pod.namespace, pod.name, frozen))
    return tuple(pods)


def _reason(exc: grpc.aio.AioRpcError) -> str:
    details = " ".join((exc.details() or "").split())
    return f"{exc.code().name}, {details[:200]}" if details else exc.code().name
