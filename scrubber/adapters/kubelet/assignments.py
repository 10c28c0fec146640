"""A reading of who has which device: asked for, corroborated and judged anew for every caller."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from scrubber.adapters.kubelet.checkpoint import CheckpointFile
from scrubber.adapters.kubelet.crosscheck import (
    ListedPod,
    assignments_of,
    checkpoint_only_assignments,
    missing_pods,
    pods_with_unmapped_ids,
    pods_without_devices,
    shares_of,
    unconfirmed_pods,
)
from scrubber.adapters.kubelet.device_ids import AliasResolver, DeviceIdResolver
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
    """:class:`scrubber.ports.node.Assignments` from a kubelet on this node.

    Args:
        pod_resources_socket: ``pod-resources/kubelet.sock``; need not exist yet.
        kubelet_dir: the directory that holds ``device-plugins/``.
        pod_logs_dir: ``/var/log/pods``.
        device_ids: the ids of our devices now; everything else that containers have is left out.
        clock: monotonic times for readings, wall time for the age of the socket.
        resolve_alias: what a resource's own id of a device means, where it is not made of one of ``device_ids``; as it was
            announced by its plugin.
        restart_grace: seconds after which a restarted kubelet's short or empty list is believed.
        deadline: seconds for one question, waiting for its turn included.
        rate: questions a second that are asked at most, in the long run; the kubelet answers the node 100.
        burst: how many of them may follow each other at once.
        pod_uid_of: the UID of the pod that a process runs in, by its cgroups; whoever answers as the kubelet must be in
            none. Without it only uid and PID namespace are asked for.

    Raises:
        InvalidConfiguration: the socket's path is too long.
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
        self._resolve_alias = resolve_alias
        self._restart_grace = restart_grace
        self._trust_state = TrustState()
        self._listed_pods: set[Pod] = set()
        self._single_flight = SingleFlight(self._query)

    async def read(self) -> KubeletReading:
        """A reading that began after this call; one question serves all callers who wait for the same one.

        Takes at most twice the deadline: somebody else's question first, then the own one.
        """
        return await self._single_flight.get()

    def container_starts(self, pod: Pod) -> Mapping[str, int] | None:
        return count_container_starts(self._pod_logs_dir, pod)

    async def close(self) -> None:
        """Give up questions under way and the connection. Readers that wait are cancelled."""
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
                raise Unavailable("The kubelet was restarted while it was asked.")
        except KubeletBusy as exc:
            return self._crosscheck(ListAttempt(at, socket, answered=True, failure=str(exc)), None)
        except Unavailable as exc:
            listed, failure = None, str(exc)
        return self._crosscheck(ListAttempt(at, socket, failure=failure), listed)

    def _crosscheck(self, seen: ListAttempt, listed: tuple[ListedPod, ...] | None) -> KubeletReading:
        # After the list, so that what it names has already left its traces here.
        checkpoint = self._checkpoint.read()
        logs = read_pod_logs(self._pod_logs_dir)
        ours = DeviceIdResolver(self._device_ids(), self._resolve_alias)
        unconfirmed = () if checkpoint.error else unconfirmed_pods(checkpoint, listed or (), ours)
        doubt = checkpoint.error or _disagreement_message(self._kubelet_dir, unconfirmed)
        remarks = tuple(remark for remark in (doubt, logs.error) if remark)

        assignments = assignments_of(listed or (), checkpoint, logs, ours)
        missing = missing_pods(assignments, checkpoint, logs, ours)
        unlisted = missing_pods(assignments, checkpoint, logs, None)
        self._remember_listed(seen, assignments)
        seen = replace(
            seen,
            pod_count=None if listed is None else len(listed),
            missing_pods=tuple(sorted(f"{pod.namespace}/{pod.name}" for pod in missing)),
            checkpoint_unreliable=bool(remarks),
        )
        verdict = judge_trust(self._trust_state, seen, restart_grace=self._restart_grace)
        self._trust_state = verdict.state
        trusted = verdict.trust is Trust.TRUSTED
        return KubeletReading(
            trust=verdict.trust,
            assignments=assignments,
            checkpoint_only=checkpoint_only_assignments(assignments, checkpoint, logs, ours, active_only=trusted),
            started_at=seen.started_at,
            finished_at=self._clock.monotonic(),
            untrusted_reason="" if trusted else " ".join((verdict.untrusted_reason, *remarks)),
            init_containers_known=not doubt,
            without_devices=frozenset()
            if doubt or not trusted
            else pods_without_devices(listed or (), checkpoint, logs),
            caveats=remarks,
            not_yet_listed=frozenset(pod for pod in unlisted if not {pod, replace(pod, uid=None)} & self._listed_pods),
            shares=shares_of(listed or (), checkpoint, logs, ours),
            with_unmapped_ids=pods_with_unmapped_ids(listed or (), checkpoint, logs, ours),
            kubelet_instance=""
            if seen.socket is None or listed is None
            else f"{seen.socket.inode}:{seen.socket.created_ns}",
        )

    def _remember_listed(self, seen: ListAttempt, assignments: Collection[Assignment]) -> None:
        """Which pods this kubelet has listed since its start, as far as we can know of one."""
        before = self._trust_state.socket
        if before is not None and seen.socket is not None and not before.is_same_socket(seen.socket):
            self._listed_pods.clear()
        self._listed_pods.update(each.pod for each in assignments)


def _disagreement_message(kubelet_dir: Path, unconfirmed: tuple[str, ...]) -> str:
    if not unconfirmed:
        return ""
    return (
        f"The kubelet's checkpoint in {kubelet_dir} does not have the devices that the kubelet lists for "
        f"{', '.join(unconfirmed[:3])}: if this stays so, name the directory of the kubelet that is asked."
    )
