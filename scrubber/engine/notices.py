"""Notices for the owners of pods: a start that is refused repeatedly, a device that went out of service while in use.

The kubelet requests the same device indefinitely, so only its owner or the pod's controller can end such a wait. The
messages name devices, states and scrubs, and no other tenant.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from scrubber.domain.assignment import KubeletReading, Pod, Trust
from scrubber.domain.errors import ScrubberError
from scrubber.domain.jobs import job_of
from scrubber.domain.policy import Enforcement, StuckPodsRule
from scrubber.domain.states import Hygiene
from scrubber.engine.views import DeviceView, PodNotice
from scrubber.ports.runtime import Clock

__all__ = ["RefusedStarts", "out_of_service_notices"]

_FORGET_AFTER = 900.0
"""Seconds without a refusal after which a pod no longer waits: the kubelet's longest pause between tries is 300."""
_MAX_WAITS = 1024
"""Maximum number of pods that are remembered."""


@dataclass(frozen=True, slots=True)
class _Wait:
    """A pod's wait: start (wall-clock and monotonic seconds), the last refusal (monotonic) and its message."""

    since: float
    began: float
    last: float
    message: str


class RefusedStarts:
    """Pods whose starts were refused and not granted since. Not durable: after a restart they are refused again."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waits: dict[tuple[Pod, frozenset[str]], _Wait] = {}

    def record_refusal(self, pods: Iterable[Pod], devices: Collection[str], refusal: ScrubberError) -> None:
        """Record that a start on ``devices`` was refused; ``pods`` are all pods that it can have been for."""
        now = self._clock.monotonic()
        for pod in pods:
            key = (pod, frozenset(devices))
            known = self._waits.get(key)
            if known is None and len(self._waits) >= _MAX_WAITS:
                continue
            since, began = (self._clock.wall(), now) if known is None else (known.since, known.began)
            self._waits[key] = _Wait(since, began, now, refusal.public_message)

    def record_grant(self, pods: Collection[Pod], devices: Collection[str]) -> bool:
        """Record that a start on ``devices`` was granted; return whether this ended a pod's wait.

        It was for one of ``pods``, or, if the pod is unknown (empty), for any pod that waits for these devices.
        """
        met = [
            (pod, waiting_for)
            for pod, waiting_for in self._waits
            if waiting_for & set(devices) and (not pods or pod in pods)
        ]
        for each in met:
            del self._waits[each]
        return bool(met)

    def prune(self, reading: KubeletReading) -> None:
        """Forget pods that no longer exist or no longer request a start."""
        now = self._clock.monotonic()
        named = {each.pod for each in (*reading.assignments, *reading.checkpoint_only)}
        trusted = reading.trust is Trust.TRUSTED
        self._waits = {
            (pod, waiting_for): wait
            for (pod, waiting_for), wait in self._waits.items()
            if (pod in named or not trusted) and now - wait.last < _FORGET_AFTER
        }

    def notices(self, rule: StuckPodsRule) -> tuple[PodNotice, ...]:
        """Pods that have waited long enough for a notice, the longest wait first."""
        now = self._clock.monotonic()
        found = []
        for (pod, waiting_for), wait in self._waits.items():
            # The last refusal counts, not the current time: a pod that was not refused since may be starting.
            waited = wait.last - wait.began
            if waited >= rule.notify_after and now - wait.last < _FORGET_AFTER:
                evict = rule.evict_after is not None and waited >= rule.evict_after
                devices = tuple(sorted(waiting_for))
                found.append(PodNotice(pod, devices, "GpuHandOverRefused", wait.message, wait.since, evict))
        return tuple(sorted(found, key=lambda each: (each.since, each.pod.namespace, each.pod.name)))


def out_of_service_notices(views: Iterable[DeviceView]) -> tuple[PodNotice, ...]:
    """Notices for pods that use a device which is out of service: it stays assigned to them."""
    found: dict[Pod, PodNotice] = {}
    for view in views:
        record, cause = view.record, view.record.cause
        if record.advertised or record.hygiene is not Hygiene.IN_USE or cause is None:
            continue
        if view.policy.enforcement is Enforcement.OBSERVE and not record.quarantined_by_operator:
            continue  # observe mode refuses nothing
        message = (
            f"Device {record.device}, which is assigned to this pod, is {record.health.value} ({cause.code}). "
            "It stays assigned; a restart on it is refused until it returns to service."
        )
        for pod in (pod for grant in record.open_grants if not job_of(grant.claim) for pod in grant.pods):
            known = found.get(pod)
            if known is None:
                found[pod] = PodNotice(pod, (record.device,), "GpuOutOfService", message, cause.since, evict=False)
            elif record.device not in known.devices:
                devices, both = (*known.devices, record.device), f"{known.message} {message}"
                found[pod] = replace(known, devices=devices, message=both)
    return tuple(sorted(found.values(), key=lambda each: (each.since, each.pod.namespace, each.pod.name)))
