"""The kubelet's PodResources socket: ask for the list, and say in a sentence why there is none.

Nothing is asked of whoever cannot be the kubelet: a forged list would make rightful pods leftovers.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from google.protobuf.message import DecodeError

from scrubber.adapters.kubelet.crosscheck import ClaimedDevice, ListedPod
from scrubber.adapters.kubelet.listening_process import PinnedSocket, PodUidLookup, reason_not_kubelet
from scrubber.adapters.kubelet.rate_limiter import RateLimiter, backoff_delays
from scrubber.adapters.kubelet.trust import SocketIdentity
from scrubber.domain.errors import InvalidConfiguration, Unavailable
from scrubber.wire import podresources_pb2 as messages

if TYPE_CHECKING:
    from scrubber.ports.runtime import Clock

__all__ = ["KubeletBusy", "PodResourcesClient", "PodUidLookup"]

_MAX_PATH_LENGTH = 107  # bytes that a Unix socket's address holds
_MAX_BYTES = 16 * 1024 * 1024
_LIST = "/v1.PodResourcesLister/List"
_CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 250),
    # In spite of its name, how long one attempt to connect may take: a loaded kubelet is not an absent one.
    ("grpc.min_reconnect_backoff_ms", 5000),
    # Channels share connections, and so their back-off, unless told not to: a new channel must try at once.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", _MAX_BYTES),
)
_TOO_LARGE = "larger than max"  # in what gRPC says of it, under the very code of a kubelet that is asked too often


class KubeletBusy(Unavailable):
    """The kubelet is there and says that it is asked too often."""


class PodResourcesClient:
    """A client of one kubelet at a time: another socket at the same path gets another channel.

    Only ``List`` is asked. ``Get`` costs the kubelet as much of its allowance, needs a name that nobody has told us yet
    when a container is about to start, and would hide a second pod that has the same device.

    Who listens is asked of the kernel once for each channel, and all connections of a channel lead to that listener.

    Args:
        pod_uid_of: the UID of the pod that a process runs in, by its cgroups; whoever answers as the kubelet must be in
            none. Without it only the uid and the PID namespace are looked at.

    Raises:
        InvalidConfiguration: the path is too long for a Unix socket.
    """

    def __init__(
        self,
        socket: Path,
        *,
        clock: Clock,
        deadline: float,
        rate_limiter: RateLimiter,
        pod_uid_of: PodUidLookup | None = None,
    ) -> None:
        if len(os.fsencode(socket)) > _MAX_PATH_LENGTH:
            raise InvalidConfiguration(
                f"The PodResources socket {socket} has a path of more than {_MAX_PATH_LENGTH} bytes: name a shorter one."
            )
        self._socket = socket
        self._clock = clock
        self._deadline = deadline
        self._rate_limiter = rate_limiter
        self._pod_uid_of = pod_uid_of
        self._channel: grpc.aio.Channel | None = None
        self._pinned: PinnedSocket | None = None
        self._connected_to: SocketIdentity | None = None

    def socket_identity(self) -> SocketIdentity:
        """Which socket is there now.

        Raises:
            Unavailable: none, or something that is no socket.
        """
        pinned = PinnedSocket(self._socket)
        try:
            return self._identity_of(pinned)
        finally:
            pinned.close()

    async def list_pods(self, identity: SocketIdentity) -> tuple[ListedPod, ...]:
        """All active pods, from the kubelet that owns the socket ``socket_identity``.

        Raises:
            KubeletBusy: it turned every question down until the deadline.
            Unavailable: whoever owns it cannot be the kubelet and was asked nothing; or no answer within the deadline, or
                one that makes no sense. The channel is given up, so that the next question does not wait for a back-off; only a
                kubelet that is merely busy keeps its channel.
        """
        channel = await self._channel_to(identity)
        # Decoded here and not by the channel: grpc.aio turns an answer that cannot be decoded into None.
        question: grpc.aio.UnaryUnaryMultiCallable[messages.ListPodResourcesRequest, bytes] = channel.unary_unary(
            _LIST, request_serializer=messages.ListPodResourcesRequest.SerializeToString
        )
        due = self._clock.monotonic() + self._deadline
        backing_off = backoff_delays()
        try:
            while True:
                await self._wait_for_rate_limit(due)
                left = max(due - self._clock.monotonic(), 0.001)
                try:
                    return _pods(await question(messages.ListPodResourcesRequest(), timeout=left))
                except grpc.aio.AioRpcError as exc:
                    if not _is_busy(exc):
                        raise
                    pause = next(backing_off)
                    if self._clock.monotonic() + pause >= due:
                        raise KubeletBusy(
                            f"The kubelet's PodResources socket {self._socket} turned every question down for "
                            f"{self._deadline:g} s: somebody on the node asks it too often ({_reason(exc)})."
                        ) from exc
                await self._clock.sleep(pause)
        except grpc.aio.AioRpcError as exc:
            await self.close()
            raise Unavailable(
                f"The kubelet's PodResources socket {self._socket} gave no list: {_reason(exc)}."
            ) from exc
        except KubeletBusy:
            raise
        except Unavailable:
            await self.close()
            raise

    async def _wait_for_rate_limit(self, due: float) -> None:
        """Wait until one more question is within the allowance, but not beyond ``due``."""
        now = self._clock.monotonic()
        wait = min(self._rate_limiter.reserve(now), due - now)
        if wait > 0:
            await self._clock.sleep(wait)

    async def close(self) -> None:
        """Close the channel; a later question opens another."""
        channel, self._channel = self._channel, None
        pinned, self._pinned = self._pinned, None
        if channel is not None:
            await channel.close()
        if pinned is not None:
            pinned.close()

    async def _channel_to(self, identity: SocketIdentity) -> grpc.aio.Channel:
        if self._connected_to is None or not self._connected_to.is_same_socket(identity):
            await self.close()
        if self._channel is None:
            pinned = PinnedSocket(self._socket)
            try:
                if not self._identity_of(pinned).is_same_socket(identity):
                    raise Unavailable("The kubelet was restarted while it was asked.")
                await self._require_kubelet(pinned)
            except BaseException:
                pinned.close()
                raise
            self._pinned = pinned
            self._channel = grpc.aio.insecure_channel(f"unix:{pinned.address}", options=_CHANNEL_OPTIONS)
        self._connected_to = identity
        return self._channel

    async def _require_kubelet(self, pinned: PinnedSocket) -> None:
        try:
            doubt = await reason_not_kubelet(pinned.address, own_uid=os.geteuid(), pod_uid_of=self._pod_uid_of)
        except OSError as exc:
            raise Unavailable(
                f"The kubelet's PodResources socket {self._socket} takes no connection ({exc.strerror or exc}): "
                "is the kubelet running?"
            ) from exc
        if doubt:
            raise Unavailable(f"Whoever answers on the kubelet's PodResources socket {self._socket} {doubt}.")

    def _identity_of(self, pinned: PinnedSocket) -> SocketIdentity:
        found = pinned.file_stat
        return SocketIdentity(found.st_ino, found.st_mtime_ns, self._clock.wall() - found.st_mtime)


def _pods(answer: bytes) -> tuple[ListedPod, ...]:
    try:
        response = messages.ListPodResourcesResponse.FromString(answer)
    except DecodeError as exc:
        raise Unavailable(f"The kubelet's list of pods is not a message that can be read: {exc}.") from exc
    pods: list[ListedPod] = []
    for pod in response.pod_resources:
        if not pod.name or not pod.namespace:
            raise Unavailable("The kubelet listed a pod without a name or a namespace: its answer makes no sense.")
        pods.append(_pod(pod))
    return tuple(pods)


def _pod(pod: messages.PodResources) -> ListedPod:
    # One entry per device and NUMA node: they are one container's all the same.
    containers: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
    claims: defaultdict[str, set[ClaimedDevice]] = defaultdict(set)
    for container in pod.containers:
        held = containers[container.name]
        for entry in container.devices:
            held.update((entry.resource_name, device) for device in entry.device_ids)
        for claim in container.dynamic_resources:
            claims[container.name].update(
                ClaimedDevice(each.driver_name, each.device_name, tuple(sorted(cdi.name for cdi in each.cdi_devices)))
                for each in claim.claim_resources
            )
    return ListedPod(
        pod.namespace,
        pod.name,
        {name: frozenset(devices) for name, devices in containers.items()},
        {name: frozenset(devices) for name, devices in claims.items()},
    )


def _is_busy(exc: grpc.aio.AioRpcError) -> bool:
    return exc.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE not in (exc.details() or "")


def _reason(exc: grpc.aio.AioRpcError) -> str:
    details = re.sub(r"unix:/proc/self/fd/\d+", "it", " ".join((exc.details() or "").split()))
    return f"{exc.code().name}, {details[:200]}" if details else exc.code().name
