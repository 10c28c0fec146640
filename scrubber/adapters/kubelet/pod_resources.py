"""Client of the kubelet's PodResources socket: requests the list, and reports in a message why there is none.

No request is sent to a process that cannot be the kubelet: a forged list would turn legitimate pods into leftovers.
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

__all__ = ["KubeletBusy", "PodResourcesClient", "PodUidLookup", "parse_pod_list"]

_MAX_PATH_LENGTH = 107  # maximum length of a Unix socket address, in bytes
_MAX_BYTES = 16 * 1024 * 1024
_LIST = "/v1.PodResourcesLister/List"
_CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 250),
    # Despite its name, this is how long one connection attempt may take: a loaded kubelet is not an absent one.
    ("grpc.min_reconnect_backoff_ms", 5000),
    # By default channels share connections, and therefore their backoff: a new channel must try at once.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", _MAX_BYTES),
)
_TOO_LARGE = "larger than max"  # in gRPC's message for it, which has the same code as too many requests


class KubeletBusy(Unavailable):
    """The kubelet is reachable and rejects requests because there are too many."""


class PodResourcesClient:
    """A client of one kubelet at a time: another socket at the same path gets another channel.

    Only ``List`` is called. ``Get`` uses as much of the kubelet's rate limit, needs a pod name that is not known yet
    when a container is about to start, and would hide a second pod with the same device.

    The listening process is identified by the kernel once for each channel, and all connections of a channel lead to
    that listener.

    Args:
        pod_uid_of: returns the UID of the pod that a process runs in, by its cgroups; the process that answers as the
            kubelet must be in no pod. Without it only the uid and the PID namespace are checked.

    Raises:
        InvalidConfiguration: The path is too long for a Unix socket.
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
                f"The PodResources socket {socket} has a path of more than {_MAX_PATH_LENGTH} bytes: pass a "
                "shorter one."
            )
        self._socket = socket
        self._clock = clock
        self._deadline = deadline
        self._rate_limiter = rate_limiter
        self._pod_uid_of = pod_uid_of
        self._channel: grpc.aio.Channel | None = None
        self._pinned: PinnedSocket | None = None
        self._connected_to: SocketIdentity | None = None
        self._parsed: tuple[bytes, tuple[ListedPod, ...]] = (b"", ())

    def socket_identity(self) -> SocketIdentity:
        """Return the identity of the socket that exists now.

        Raises:
            Unavailable: The path does not exist, or is not a socket.
        """
        pinned = PinnedSocket(self._socket)
        try:
            return self._identity_of(pinned)
        finally:
            pinned.close()

    async def list_pods(self, identity: SocketIdentity) -> tuple[ListedPod, ...]:
        """Return all active pods, from the kubelet that owns the socket with this ``identity``.

        Raises:
            KubeletBusy: The kubelet rejected every request until the deadline.
            Unavailable: The owner of the socket cannot be the kubelet and no request was sent; or there was no answer
                within the deadline, or a malformed one. The channel is closed, so that the next request does not wait
                for a backoff; only a kubelet that is merely busy keeps its channel.
        """
        channel = await self._channel_to(identity)
        # Decoded here and not by the channel: grpc.aio turns a response that cannot be decoded into None.
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
                    return self._parse(await question(messages.ListPodResourcesRequest(), timeout=left))
                except grpc.aio.AioRpcError as exc:
                    if not _is_busy(exc):
                        raise
                    pause = next(backing_off)
                    if self._clock.monotonic() + pause >= due:
                        raise KubeletBusy(
                            f"The kubelet's PodResources socket {self._socket} rejected every request for "
                            f"{self._deadline:g} s: a process on the node queries it too often "
                            f"({_reason(exc)})."
                        ) from exc
                await self._clock.sleep(pause)
        except grpc.aio.AioRpcError as exc:
            await self.close()
            raise Unavailable(
                f"The kubelet's PodResources socket {self._socket} returned no list: {_reason(exc)}."
            ) from exc
        except KubeletBusy:
            raise
        except Unavailable:
            await self.close()
            raise

    def _parse(self, answer: bytes) -> tuple[ListedPod, ...]:
        if self._parsed[0] != answer:  # mostly nothing has changed
            self._parsed = (answer, parse_pod_list(answer))
        return self._parsed[1]

    async def _wait_for_rate_limit(self, due: float) -> None:
        """Wait until the rate limit permits another request, but not beyond ``due``."""
        now = self._clock.monotonic()
        wait = min(self._rate_limiter.reserve(now), due - now)
        if wait > 0:
            await self._clock.sleep(wait)

    async def close(self) -> None:
        """Close the channel; a later request opens another."""
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
                    raise Unavailable("The kubelet was restarted during the request.")
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
                f"The kubelet's PodResources socket {self._socket} accepts no connection "
                f"({exc.strerror or exc}): is the kubelet running?"
            ) from exc
        if doubt:
            raise Unavailable(f"The process that listens on the kubelet's PodResources socket {self._socket} {doubt}.")

    def _identity_of(self, pinned: PinnedSocket) -> SocketIdentity:
        found = pinned.file_stat
        return SocketIdentity(found.st_ino, found.st_mtime_ns, self._clock.wall() - found.st_mtime)


def parse_pod_list(answer: bytes) -> tuple[ListedPod, ...]:
    """Parse the message that the kubelet sends.

    Raises:
        Unavailable: It is not such a message.
    """
    try:
        response = messages.ListPodResourcesResponse.FromString(answer)
    except DecodeError as exc:
        raise Unavailable(f"The kubelet's list of pods cannot be decoded: {exc}.") from exc
    pods: list[ListedPod] = []
    for pod in response.pod_resources:
        if not pod.name or not pod.namespace:
            raise Unavailable("The kubelet listed a pod without a name or a namespace: its response is invalid.")
        pods.append(_pod(pod))
    return tuple(pods)


def _pod(pod: messages.PodResources) -> ListedPod:
    # There is one entry per device and NUMA node; they all belong to the container.
    containers: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
    claims: defaultdict[str, set[ClaimedDevice]] = defaultdict(set)
    for container in pod.containers:
        held = containers[container.name]
        for entry in container.devices:
            held.update((entry.resource_name, device) for device in entry.device_ids)
        for claim in container.dynamic_resources:
            claims[container.name].update(
                ClaimedDevice(
                    each.driver_name,
                    each.device_name,
                    tuple(sorted(cdi.name for cdi in each.cdi_devices)),
                    claim.claim_namespace,
                    claim.claim_name,
                )
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
