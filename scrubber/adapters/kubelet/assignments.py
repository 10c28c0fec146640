"""A reading of who has which device: asked for, corroborated and judged anew for every caller."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from scrubber.adapters.kubelet.allowance import Allowance
from scrubber.adapters.kubelet.checkpoint import CheckpointFile
from scrubber.adapters.kubelet.corroboration import (
    ListedPod,
    assignments_of,
    hints_of,
    missing_from,
    shares_of,
    spent_among,
    unconfirmed_by,
    unexplained_among,
)
from scrubber.adapters.kubelet.freshness import SharedAnswer
from scrubber.adapters.kubelet.naming import Alias, Naming
from scrubber.adapters.kubelet.pod_logs import container_starts, read_pod_logs
from scrubber.adapters.kubelet.pod_resources import Busy, InAPod, PodResources
from scrubber.adapters.kubelet.trust import Observation, SocketIdentity, Standing, judge
from scrubber.domain.assignment import Assignment, Pod, Reading, Trust
from scrubber.domain.errors import Away

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
        alias: what a resource's own id of a device means, where it is not made of one of ``device_ids``; as it was
            announced by its plugin.
        settle: seconds after which a restarted kubelet's short or empty list is believed.
        deadline: seconds for one question, waiting for its turn included.
        rate: questions a second that are asked at most, in the long run; the kubelet answers the node 100.
        burst: how many of them may follow each other at once.
        in_a_pod: the UID of the pod that a process runs in, by its cgroups; whoever answers as the kubelet must be in
            none. Without it only uid and PID namespace are asked for.

    Raises:
        BadConfiguration: the socket's path is too long.
    """

    def __init__(
        self,
        *,
        pod_resources_socket: Path,
        kubelet_dir: Path,
        pod_logs_dir: Path,
        device_ids: Callable[[], Collection[str]],
        clock: Clock,
        alias: Alias | None = None,
        settle: float = 60.0,
        deadline: float = 2.0,
        rate: float = 80.0,
        burst: float = 8.0,
        in_a_pod: InAPod | None = None,
    ) -> None:
        self._pod_resources = PodResources(
            pod_resources_socket,
            clock=clock,
            deadline=deadline,
            allowance=Allowance(rate=rate, burst=burst),
            in_a_pod=in_a_pod,
        )
        self._kubelet_dir = kubelet_dir
        self._checkpoint = CheckpointFile(kubelet_dir)
        self._pod_logs_dir = pod_logs_dir
        self._device_ids = device_ids
        self._clock = clock
        self._alias = alias
        self._settle = settle
        self._standing = Standing()
        self._listed: set[Pod] = set()
        self._answer = SharedAnswer(self._ask)

    async def read(self) -> Reading:
        """A reading that began after this call; one question serves all callers who wait for the same one.

        Takes at most twice the deadline: somebody else's question first, then the own one.
        """
        return await self._answer.get()

    def starts(self, pod: Pod) -> Mapping[str, int] | None:
        return container_starts(self._pod_logs_dir, pod)

    async def close(self) -> None:
        """Give up questions under way and the connection. Readers that wait are cancelled."""
        await self._answer.close()
        await self._pod_resources.close()

    async def _ask(self) -> Reading:
        at = self._clock.monotonic()
        socket: SocketIdentity | None = None
        listed: tuple[ListedPod, ...] | None = None
        failure = ""
        try:
            socket = self._pod_resources.identity()
            listed = await self._pod_resources.list(socket)
            if not self._pod_resources.identity().same_as(socket):
                raise Away("The kubelet was restarted while it was asked.")
        except Busy as exc:
            return self._corroborated(Observation(at, socket, answered=True, failure=str(exc)), None)
        except Away as exc:
            listed, failure = None, str(exc)
        return self._corroborated(Observation(at, socket, failure=failure), listed)

    def _corroborated(self, seen: Observation, listed: tuple[ListedPod, ...] | None) -> Reading:
        # After the list, so that what it names has already left its traces here.
        checkpoint = self._checkpoint.read()
        logs = read_pod_logs(self._pod_logs_dir)
        ours = Naming(self._device_ids(), self._alias)
        unconfirmed = () if checkpoint.unreadable else unconfirmed_by(checkpoint, listed or (), ours)
        doubt = checkpoint.unreadable or _disagreement(self._kubelet_dir, unconfirmed)
        remarks = tuple(remark for remark in (doubt, logs.unreadable) if remark)

        assignments = assignments_of(listed or (), checkpoint, logs, ours)
        missing = missing_from(assignments, checkpoint, logs, ours)
        unlisted = missing_from(assignments, checkpoint, logs, None)
        self._remember(seen, assignments)
        seen = replace(
            seen,
            pods=None if listed is None else len(listed),
            missing=tuple(sorted(f"{pod.namespace}/{pod.name}" for pod in missing)),
            uncertain=bool(remarks),
        )
        verdict = judge(self._standing, seen, settle=self._settle)
        self._standing = verdict.standing
        trusted = verdict.trust is Trust.TRUSTED
        return Reading(
            trust=verdict.trust,
            assignments=assignments,
            hinted=hints_of(assignments, checkpoint, logs, ours, active_only=trusted),
            at=seen.at,
            done=self._clock.monotonic(),
            detail="" if trusted else " ".join((verdict.detail, *remarks)),
            init_containers_known=not doubt,
            spent=frozenset() if doubt or not trusted else spent_among(listed or (), checkpoint, logs),
            remarks=remarks,
            unproved=frozenset(pod for pod in unlisted if not {pod, replace(pod, uid=None)} & self._listed),
            shares=shares_of(listed or (), checkpoint, logs, ours),
            unexplained=unexplained_among(listed or (), checkpoint, logs, ours),
            kubelet="" if seen.socket is None or listed is None else f"{seen.socket.inode}:{seen.socket.created_ns}",
        )

    def _remember(self, seen: Observation, assignments: Collection[Assignment]) -> None:
        """Which pods this kubelet has listed since its start, as far as we can know of one."""
        before = self._standing.socket
        if before is not None and seen.socket is not None and not before.same_as(seen.socket):
            self._listed.clear()
        self._listed.update(each.pod for each in assignments)


def _disagreement(kubelet_dir: Path, unconfirmed: tuple[str, ...]) -> str:
    if not unconfirmed:
        return ""
    return (
        f"The kubelet's checkpoint in {kubelet_dir} does not have the devices that the kubelet lists for "
        f"{', '.join(unconfirmed[:3])}: if this stays so, name the directory of the kubelet that is asked."
    )
