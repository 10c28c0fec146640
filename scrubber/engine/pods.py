"""Tracks the pods that have, or had, a device: whether they are listed, absent, over, or gone with leftovers."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from scrubber.domain.assignment import (
    Assignment,
    Claim,
    JobManager,
    KubeletReading,
    Pod,
    PodAbsence,
    Process,
    Trust,
    exclude_baseline,
    presumed_sandbox,
    starting_container,
)
from scrubber.domain.claims import ClaimPodFacts
from scrubber.domain.errors import Unreadable
from scrubber.domain.handover_kind import Basis
from scrubber.domain.pods import (
    PodLiveness,
    PodState,
    claim_pod_liveness,
    has_ended,
    job_liveness,
    own_pod_liveness,
    pod_liveness,
    unreadable_pod_liveness,
)
from scrubber.domain.policy import Limits
from scrubber.domain.record import Grant
from scrubber.ports.node import Assignments, Containers, PodCgroups
from scrubber.ports.runtime import Clock

__all__ = ["PodTracker"]

_MIN_SAMPLE_INTERVAL = 0.2
"""Minimum seconds between two samples: a runtime's helper must not count twice because its pod has several devices."""
_MAX_SAMPLE_INTERVAL = 5.0
"""Seconds between two samples of a pod that runs and of which every first process is known. Reading every pod that has a
device each second took most of the service's processor time."""


@dataclass(frozen=True, slots=True)
class _FirstProcess:
    """The oldest process of a container so far.

    Attributes:
        samples: how many samples in a row it was alive in.
        beside: identities of all processes of the container at the last of these samples.
    """

    process: Process
    samples: int
    beside: frozenset[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Sample:
    """The processes of a pod at one moment.

    Attributes:
        at, wall: when they were read, in monotonic and wall-clock seconds.
        processes: None: they cannot be determined.
        is_settled: whether the kubelet listed the pod with a device, and the first process of each container is known.
    """

    at: float
    wall: float
    processes: tuple[Process, ...] | None = None
    is_settled: bool = False


class PodTracker:
    """Readings of the kubelet and of the pods' processes, remembered as far as proofs need them.

    Absence is counted per pod over trusted readings. The first process of each container is remembered for as long as
    its pod is tracked. All of it is lost when the service ends, which only makes proofs take longer.
    """

    def __init__(
        self, *, assignments: Assignments, containers: Containers, pod_cgroups: PodCgroups, clock: Clock
    ) -> None:
        self._assignments = assignments
        self._containers = containers
        self._pod_cgroups = pod_cgroups
        self._clock = clock
        self._absences: dict[Pod, PodAbsence] = {}
        self._first_processes: dict[Pod, dict[str, _FirstProcess]] = {}
        self._last_run: dict[Pod, float] = {}
        self._samples: dict[Pod, _Sample] = {}
        self._sampling: defaultdict[Pod, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._withdrawn: dict[tuple[str, float], float] = {}
        """Since when a released claim has had no CDI specification (monotonic), by its UID and the time of its release."""
        self.reading = KubeletReading(Trust.UNREADABLE, untrusted_reason="it has not been read yet")

    def track(self, pods: Iterable[Pod]) -> None:
        """Track exactly these pods from now on; forget all others."""
        tracked, now = set(pods), self._clock.wall()
        self._absences = {pod: self._absences.get(pod, PodAbsence()) for pod in tracked}
        self._first_processes = {pod: self._first_processes.get(pod, {}) for pod in tracked}
        self._last_run = {pod: at for pod, at in self._last_run.items() if pod in tracked and at <= now}
        self._samples = {pod: sample for pod, sample in self._samples.items() if pod in tracked}
        for pod in self._sampling.keys() - tracked:
            if not self._sampling[pod].locked():
                del self._sampling[pod]

    def track_more(self, pods: Iterable[Pod]) -> None:
        """Track these pods in addition to the current ones."""
        self.track({*self._absences, *pods})

    def note_withdrawn(self, uid: str, claims: Iterable[Claim]) -> None:
        """Note that the released claim ``uid`` has no CDI specification, and gets none before it is prepared again.

        Args:
            claims: all that have an open grant; what is noted of others is forgotten.
        """
        now = self._clock.monotonic()
        released = {(each.uid, each.released_at) for each in claims if each.released_at is not None}
        kept = {key: at for key, at in self._withdrawn.items() if key in released}
        self._withdrawn = {(uid, at): now for known, at in released if known == uid} | kept

    async def refresh(self) -> KubeletReading:
        """Return a reading that began after this call, and update the absence counts with it."""
        reading = await self._assignments.read()
        if reading.started_at >= self.reading.started_at and reading is not self.reading:
            self.reading = reading
            for pod, absence in self._absences.items():
                self._absences[pod] = absence.with_reading(reading, pod)
        return reading

    async def baseline(self, assignment: Assignment | None, earlier_grants: Iterable[Grant]) -> tuple[Process, ...]:
        """Return the processes that the pod had before its first grant.

        Args:
            earlier_grants: grants of any device under this boot; the first of them to the same pod already contains the
                baseline.

        Raises:
            Unreadable: the pod's processes cannot be determined.
        """
        if assignment is None or assignment.pod.uid is None:
            return ()
        for grant in earlier_grants:
            if grant.pod is not None and grant.pod.uid == assignment.pod.uid and grant.basis is not Basis.ADOPTED:
                return grant.baseline
        return await self._containers.processes(assignment.pod)

    def is_absent(self, pod: Pod) -> bool:
        """Whether it is proved that the pod is no longer in the kubelet's lists."""
        return pod in self._absences and self._absences[pod].proved

    async def is_gone(self, pod: Pod) -> bool:
        """Whether it is proved that the kubelet no longer lists the pod, and that no process of it is left."""
        if pod.uid is None or not self.is_absent(pod):
            return False
        try:
            return not await self._containers.processes(pod)
        except Unreadable:
            return False

    async def claim_pod_facts(self, pod: Pod, requested: Collection[Pod], *, limits: Limits) -> ClaimPodFacts:
        """Return what is known about a pod of a prepared claim; call :meth:`refresh` first.

        Args:
            requested: the pods for which the kubelet requests that claim right now.
        """
        if pod.uid is None:
            return ClaimPodFacts()
        try:
            processes = await self._containers.processes(pod)
            remaining = await self._pod_cgroups.remaining_cgroups(pod)
        except Unreadable:
            return ClaimPodFacts()
        absence = self._absences.get(pod, PodAbsence())
        long_gone = absence.is_proved_for(limits.leftover_grace_period, self._clock.monotonic())
        removed = self.is_absent(pod) and (remaining is None or not remaining.pod)
        return ClaimPodFacts(bool(processes), removed, pod in requested, long_gone)

    async def sample_processes(self, grant: Grant) -> bool:
        """Sample the processes of a grant's pod, to know later the first process of each container, and that it ran.

        Return whether a process was found that keeps the pod from being over; False proves nothing. A sample counts for
        every device of the pod, and for longer while the pod runs and nothing indicates a change.

        A runtime's own helpers come and go before a container's first process starts. A process that is gone at the
        next sample was therefore not the first process, as long as the kubelet lists the pod. Once the pod is absent
        from the kubelet's lists, or its claim is released, nothing new is recorded.

        With a claim, the first process of a container is not replaced by what ran beside it: the kubelet lists the pod
        until the claim is released, so a child would otherwise become its container's first process, and nothing would
        ever prove that it is a leftover.
        """
        pod = grant.pod
        if pod is None or pod.uid is None or self._is_missing(pod):
            return False
        if grant.claim is not None and not grant.claim.is_prepared:
            return False
        async with self._sampling[pod]:
            sample = self._samples.get(pod)
            if sample is None or not self._is_current(sample, grant):
                sample = self._samples[pod] = await self._sample(pod, grant)
        return not self._is_missing(pod) and bool(exclude_baseline(sample.processes or (), grant.baseline))

    def _is_missing(self, pod: Pod) -> bool:
        """Whether a trusted reading lacked the pod, and no later one named it."""
        return self._absences.get(pod, PodAbsence()).times > 0

    def _is_current(self, sample: _Sample, grant: Grant) -> bool:
        age = self._clock.monotonic() - sample.at
        if age < _MIN_SAMPLE_INTERVAL:
            return True
        since_grant = sample.wall >= grant.at and self.has_run(grant) and grant.claim is None
        return sample.is_settled and since_grant and age < _MAX_SAMPLE_INTERVAL

    async def _sample(self, pod: Pod, grant: Grant) -> _Sample:
        at, wall = self._clock.monotonic(), self._clock.wall()
        try:
            processes = await self._containers.processes(pod)
        except Unreadable:
            return _Sample(at, wall)
        sandbox = {each.identity for each in grant.baseline} & {each.identity for each in processes}
        # A pod that was named before it had a sandbox gets one although no container has run.
        if exclude_baseline(processes, grant.baseline if sandbox else presumed_sandbox(processes, held=False)):
            self._last_run[pod] = self._clock.wall()
        known = self._first_processes.get(pod, {})
        seen: dict[str, _FirstProcess] = {}
        for container in {process.container for process in processes}:
            mine = [process for process in processes if process.container == container]
            living = frozenset(process.identity for process in mine)
            before = known.get(container)
            if before is not None and before.process.identity in living:
                seen[container] = _FirstProcess(before.process, before.samples + 1, living)
            elif before is None or grant.claim is None or not living <= before.beside:
                oldest = min(mine, key=lambda each: (each.started, each.pid))
                seen[container] = _FirstProcess(oldest, 1, living)
        self._first_processes[pod] = known | seen
        known_firsts = all(first.samples >= 2 for first in seen.values())
        return _Sample(at, wall, processes, known_firsts and self.reading.may_start_container(pod))

    def note_use(self, device: str, uid: str, since: float) -> None:
        """Note that a process of pod ``uid`` used ``device`` in a check that began at ``since`` (wall-clock time)."""
        for pod in self._absences:
            if pod.uid == uid:
                self._last_run[pod] = max(since, self._last_run.get(pod, -math.inf))

    def with_starting_container(self, assignment: Assignment, device: str) -> Assignment:
        """Return ``assignment`` with the container that starts on ``device``, which can be an init container."""
        init = self.reading.init_containers_of(assignment.pod, device)
        starts = self._assignments.container_starts(assignment.pod) if init else None
        if starts is None:
            return assignment
        return replace(assignment, container=starting_container(assignment.container, init, starts))

    def note_container_created(self, pod: Pod, at: float) -> None:
        """Note that a container of ``pod``, which was granted a device, was created at ``at`` (wall-clock seconds).

        This proves that the container ran, however short its life is.
        """
        self._last_run[pod] = max(at, self._last_run.get(pod, -math.inf))
        if pod in self._samples:
            self._samples[pod] = replace(self._samples[pod], is_settled=False)

    def has_run(self, grant: Grant) -> bool:
        """Whether the pod of ``grant`` was seen to run since the grant.

        If it was not, the container that started on the grant may belong to another pod: the kubelet names only
        devices, and can reassign one between its request and our reading of its list.

        A run of the future was seen before the clock was set back. Later grants would seem to precede it.
        """
        if grant.pod is None:
            return False
        ran_at = self._last_run.get(grant.pod, -math.inf)
        if ran_at > self._clock.wall():
            del self._last_run[grant.pod]
            return False
        return ran_at >= grant.at

    async def _own_liveness(self, pod: Pod, grant: Grant) -> PodLiveness:
        cgroups = () if self._is_contradicted(grant) else grant.cgroups
        try:
            processes = await self._containers.processes(pod)
        except Unreadable:
            return PodLiveness(PodState.ALIVE if cgroups else PodState.OVER, in_other_containers=True)
        return own_pod_liveness(processes, sandbox=presumed_sandbox(processes, held=False), cgroups=cgroups)

    def _is_contradicted(self, grant: Grant) -> bool:
        """Whether the kubelet certainly assigns no device of ``grant`` to its container, unlike the ledger."""
        given, reading = grant.assignment, self.reading
        return given is None or (
            reading.trust is Trust.TRUSTED
            and reading.init_containers_known
            and not any(
                (each.pod, each.container) == (given.pod, given.container)
                for device in given.devices
                for each in reading.all_assignments(device)
            )
        )

    def _known_first_processes(self, pod: Pod) -> dict[str, Process]:
        """Return the first processes that were alive in at least two samples."""
        return {
            container: first.process
            for container, first in self._first_processes.get(pod, {}).items()
            if first.samples >= 2
        }

    async def liveness(
        self,
        grant: Grant,
        *,
        limits: Limits,
        boot: str,
        wall: float,
        free_for: float,
        starting_pod: Pod | None = None,
        shares: bool = False,
    ) -> PodLiveness:
        """Return the liveness of the pod of ``grant`` from what is known now (call :meth:`refresh` first).

        A pod whose processes cannot be determined counts as alive: that proves nothing, and is not a fault of the
        device.

        Args:
            free_for: seconds for which no process was seen to hold the device; used only for a pod of unknown UID.
            starting_pod: the pod whose container is about to start. Of its earlier use only the container that had
                the device last counts (:func:`~scrubber.domain.pods.own_pod_liveness`).
            shares: the starting pod has other shares of the device, so any of its containers may be using it.
        """
        pod = grant.pod
        if grant.boot != boot:
            return PodLiveness(PodState.OVER)
        if grant.claim is not None:
            return await self._claim_liveness(grant, grant.claim, limits=limits, wall=wall)
        if pod is None or pod.uid is None:
            gone = pod is None or (pod in self._absences and self._absences[pod].proved)
            # The device was free before the grant too: only the time since the grant is evidence.
            free_since_grant = min(free_for, _age(grant, wall))
            return PodLiveness(
                PodState.OVER if gone and free_since_grant >= limits.unknown_pod_idle_period else PodState.ALIVE
            )
        if pod == starting_pod and not shares:
            return await self._own_liveness(pod, grant)
        try:
            everything = await self._containers.processes(pod)
        except Unreadable:
            absence = PodAbsence() if pod == starting_pod else self._absences.get(pod, PodAbsence())
            return unreadable_pod_liveness(
                absence, now=self._clock.monotonic(), leftover_grace_period=limits.leftover_grace_period
            )
        baseline = grant.baseline
        if pod == starting_pod:
            baseline = _sandbox_now(everything, grant, held=free_for <= 0)
        processes = exclude_baseline(everything, baseline)
        if pod == starting_pod:
            return PodLiveness(PodState.ALIVE if processes else PodState.OVER, processes)
        absence = self._absences.get(pod, PodAbsence())
        ended = not everything and await self._has_ended(pod, grant)
        return pod_liveness(
            # Processes of the baseline may have been passed the device since (a sidecar, over a socket). They are
            # excluded only while nothing indicates that the pod is gone: its sandbox ends with it.
            tuple(sorted(everything)) if absence.times else processes,
            absence,
            listed=self.reading.may_start_container(pod),
            trusted=self.reading.trust is Trust.TRUSTED,
            sandbox=not baseline or len(processes) < len(everything),
            baseline=baseline,
            first_processes=self._known_first_processes(pod),
            now=self._clock.monotonic(),
            grant_age=_age(grant, wall),
            leftover_grace_period=limits.leftover_grace_period,
            unknown_pod_idle_period=limits.unknown_pod_idle_period,
            ended=ended,
        )

    async def _claim_liveness(self, grant: Grant, claim: Claim, *, limits: Limits, wall: float) -> PodLiveness:
        pod = grant.pod
        if claim.manager is not None and pod is not None:
            return await self._job_liveness(pod, claim)
        if claim.released_at is None or pod is None or pod.uid is None:
            return PodLiveness(PodState.ALIVE)
        absence = self._absences.get(pod, PodAbsence())
        try:
            processes = await self._containers.processes(pod)
            remaining = None if processes else await self._pod_cgroups.remaining_cgroups(pod)
        except Unreadable:
            if pod not in claim.listed_pods:
                return PodLiveness(PodState.ALIVE)
            return unreadable_pod_liveness(
                absence, now=self._clock.monotonic(), leftover_grace_period=limits.leftover_grace_period
            )
        listed = self.reading.trust is Trust.TRUSTED and self.reading.is_listed(pod)
        withdrawn = self._withdrawn.get((claim.uid, claim.released_at))
        waits = withdrawn is not None and bool(processes) and listed
        return claim_pod_liveness(
            processes,
            absence,
            remaining,
            released_for=_since(claim.released_at, wall),
            listed=listed,
            withdrawn_for=None if withdrawn is None else self._clock.monotonic() - withdrawn,
            never_started=waits and self._has_never_started(pod),
            named_by_kubelet=pod in claim.listed_pods,
            seen=self._first_processes.get(pod, {}),
            first_processes=self._known_first_processes(pod),
            now=self._clock.monotonic(),
            leftover_grace_period=limits.leftover_grace_period,
        )

    def _has_never_started(self, pod: Pod) -> bool:
        """Whether the logs of ``pod`` show that no container of it was ever started."""
        starts = self._assignments.container_starts(pod)
        return starts is not None and not any(starts.values())

    async def _job_liveness(self, job: Pod, claim: Claim) -> PodLiveness:
        may_start_more = claim.is_prepared and claim.manager is not JobManager.RUN
        if may_start_more:
            return job_liveness((), may_start_more=True)
        try:
            return job_liveness(await self._containers.processes(job), may_start_more=False)
        except Unreadable:
            return PodLiveness(PodState.ALIVE)

    async def _has_ended(self, pod: Pod, grant: Grant) -> bool:
        """Whether the kernel shows that ``pod``, which has no process, is over."""
        if not grant.started:
            return False
        try:
            remaining = await self._pod_cgroups.remaining_cgroups(pod)
        except Unreadable:
            return False
        seen = self._first_processes.get(pod, {})
        return remaining is not None and has_ended(remaining, started=grant.started, seen=seen, sandbox=grant.baseline)


def _sandbox_now(everything: Collection[Process], grant: Grant, *, held: bool) -> tuple[Process, ...]:
    """Return the processes that are the sandbox of a pod that starts a container; such a pod has a sandbox."""
    living = {process.identity for process in everything}
    if any(process.identity in living for process in grant.baseline):
        return grant.baseline
    if grant.baseline:
        return presumed_sandbox(everything, held=held)  # the runtime has created another sandbox since
    # The grant was adopted while the pod's processes could not be determined, or made before it had a sandbox, or the
    # pod keeps none.
    return presumed_sandbox(everything, held=held and grant.basis is not Basis.ADOPTED)


def _age(grant: Grant, wall: float) -> float:
    """Return the seconds since ``grant``."""
    return _since(grant.at, wall)


def _since(at: float, wall: float) -> float:
    """Return the seconds since ``at``; a time in the future means that the clock was set back: treat it as long ago."""
    age = wall - at
    return age if age >= 0 else math.inf
