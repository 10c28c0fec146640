"""Readings of device assignments: queried, corroborated and evaluated again for every caller."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from scrubber.adapters.kubelet.checkpoint import CheckpointFile
from scrubber.adapters.kubelet.crosscheck import Crosschecker, ListedPod
from scrubber.adapters.kubelet.device_ids import AliasResolver
from scrubber.adapters.kubelet.pod_logs import count_container_starts, read_pod_logs
from scrubber.adapters.kubelet.pod_resources import KubeletBusy, PodResourcesClient, PodUidLookup
from scrubber.adapters.kubelet.rate_limiter import RateLimiter
from scrubber.adapters.kubelet.single_flight import SingleFlight
from scrubber.adapters.kubelet.trust import ListAttempt, SocketIdentity, TrustState, judge_trust
from scrubber.domain.assignment import Assignment, KubeletReading, Pod, Trust
from scrubber.domain.errors import Unavailable

if TYPE_CHECKING:
    from scrubber.ports.runtime import Clock

__all__ = ["KubeletAssignments"]


class KubeletAssignments:
    """:class:`scrubber.ports.node.Assignments` from the kubelet of this node.

    Args:
        pod_resources_socket: ``pod-resources/kubelet.sock``; need not exist yet.
        kubelet_dir: directory that contains ``device-plugins/``.
        pod_logs_dir: ``/var/log/pods``.
        device_ids: returns the current IDs of our devices; everything else that containers have is omitted.
        clock: monotonic times for readings, wall time for the age of the socket.
        resolve_alias: resolves a plugin's own ID of a device that is not derived from one of ``device_ids``, as
            announced by that plugin.
        restart_grace: seconds after which a restarted kubelet's short or empty list is trusted.
        deadline: seconds for one request, including the wait for the rate limit.
        rate: maximum long-term requests per second; the kubelet serves 100 to the whole node.
        burst: maximum number of requests that may follow each other immediately.
        pod_uid_of: returns the UID of the pod that a process runs in, by its cgroups; the process that answers as the
            kubelet must be in no pod. Without it only uid and PID namespace are checked.

    Raises:
        InvalidConfiguration: The socket's path is too long.
    """

    def __init__(
        self,
        *,
        pod_resources_socket: Path,
        kubelet_dir: Path,
        pod_logs_dir: Path,
        device_ids: Callable[[], Collection[str]],
        clock: Clock,
        resolve_alias: AliasResolver | None = None,
        restart_grace: float = 60.0,
        deadline: float = 2.0,
        rate: float = 80.0,
        burst: float = 8.0,
        pod_uid_of: PodUidLookup | None = None,
    ) -> None:
        self._pod_resources = PodResourcesClient(
            pod_resources_socket,
            clock=clock,
            deadline=deadline,
            rate_limiter=RateLimiter(rate=rate, burst=burst),
            pod_uid_of=pod_uid_of,
        )
        self._kubelet_dir = kubelet_dir
        self._checkpoint = CheckpointFile(kubelet_dir)
        self._pod_logs_dir = pod_logs_dir
        self._device_ids = device_ids
        self._clock = clock
        self._crosschecker = Crosschecker(resolve_alias)
        self._restart_grace = restart_grace
        self._trust_state = TrustState()
        self._listed_pods: set[Pod] = set()
        self._single_flight = SingleFlight(self._query)

    async def read(self) -> KubeletReading:
        """Return a reading that began after this call; all callers that wait for the same reading share one request.

        Takes at most twice the deadline: the request already running first, then the caller's own.
        """
        return await self._single_flight.get()

    def container_starts(self, pod: Pod) -> Mapping[str, int] | None:
        return count_container_starts(self._pod_logs_dir, pod)

    async def close(self) -> None:
        """Cancel requests in progress and close the connection. Waiting readers are cancelled."""
        await self._single_flight.close()
        await self._pod_resources.close()

    async def _query(self) -> KubeletReading:
        at = self._clock.monotonic()
        socket: SocketIdentity | None = None
        listed: tuple[ListedPod, ...] | None = None
        failure = ""
        try:
            socket = self._pod_resources.socket_identity()
            listed = await self._pod_resources.list_pods(socket)
            if not self._pod_resources.socket_identity().is_same_socket(socket):
                raise Unavailable("The kubelet was restarted during the request.")
        except KubeletBusy as exc:
            return self._crosscheck(ListAttempt(at, socket, answered=True, failure=str(exc)), None)
        except Unavailable as exc:
            listed, failure = None, str(exc)
        return self._crosscheck(ListAttempt(at, socket, failure=failure), listed)

    def _crosscheck(self, seen: ListAttempt, listed: tuple[ListedPod, ...] | None) -> KubeletReading:
        # Read after the list, so that the pods it lists have already left their traces here.
        checkpoint = self._checkpoint.read()
        logs = read_pod_logs(self._pod_logs_dir)
        found = self._crosschecker(listed or (), checkpoint, logs, self._device_ids())
        doubt = checkpoint.error or _disagreement_message(self._kubelet_dir, found.unconfirmed)
        remarks = tuple(remark for remark in (doubt, logs.error) if remark)

        self._remember_listed(seen, found.assignments)
        seen = replace(
            seen,
            pod_count=None if listed is None else len(listed),
            missing_pods=tuple(sorted(f"{pod.namespace}/{pod.name}" for pod in found.missing)),
            checkpoint_unreliable=bool(remarks),
        )
        verdict = judge_trust(self._trust_state, seen, restart_grace=self._restart_grace)
        self._trust_state = verdict.state
        trusted = verdict.trust is Trust.TRUSTED
        return KubeletReading(
            trust=verdict.trust,
            assignments=found.assignments,
            checkpoint_only=found.checkpoint_only_active if trusted else found.checkpoint_only,
            started_at=seen.started_at,
            finished_at=self._clock.monotonic(),
            untrusted_reason="" if trusted else " ".join((verdict.untrusted_reason, *remarks)),
            init_containers_known=not doubt,
            without_devices=frozenset() if doubt or not trusted else found.without_devices,
            caveats=remarks,
            not_yet_listed=frozenset(
                pod for pod in found.unlisted if not {pod, replace(pod, uid=None)} & self._listed_pods
            ),
            shares=found.shares,
            claims=found.claims,
            with_unmapped_ids=found.with_unmapped_ids,
            kubelet_instance=""
            if seen.socket is None or listed is None
            else f"{seen.socket.inode}:{seen.socket.created_ns}",
        )

    def _remember_listed(self, seen: ListAttempt, assignments: Collection[Assignment]) -> None:
        """Record which pods this kubelet has listed since its last known start."""
        before = self._trust_state.socket
        if before is not None and seen.socket is not None and not before.is_same_socket(seen.socket):
            self._listed_pods.clear()
        self._listed_pods.update(each.pod for each in assignments)


def _disagreement_message(kubelet_dir: Path, unconfirmed: tuple[str, ...]) -> str:
    if not unconfirmed:
        return ""
    return (
        f"The kubelet's checkpoint in {kubelet_dir} does not contain the devices that the kubelet lists for "
        f"{', '.join(unconfirmed[:3])}: if this persists, pass the directory of the kubelet that is queried."
    )
