"""The scrub service as the driver sees it: claims are prepared, released, and listed.

The service decides. What the driver says about claims and pods is its word, from the API server, and devices are named
by the service's ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from plugin.dra.claims import ClaimIdentity, ClaimPod

__all__ = [
    "CertificateExtract",
    "ClaimDeviceRequest",
    "ClaimGrant",
    "ClaimService",
    "ClaimToRestore",
    "DeviceOutOfService",
    "RecordedClaim",
    "ReleaseProgress",
]


@dataclass(frozen=True, slots=True)
class ClaimDeviceRequest:
    """A device that is requested for a claim."""

    device_id: str
    admin_access: bool = False


@dataclass(frozen=True, slots=True)
class CertificateExtract:
    """What the pods of a claim may learn of the certificate of their grant; nothing about earlier tenants.

    Attributes:
        digest: of the signed statement, ``sha256:<hex>``.
        issued_at: seconds since the epoch.
    """

    id: str
    digest: str
    issued_at: float
    covered: tuple[str, ...] = ()
    not_covered: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ClaimGrant:
    """A device that was granted to a claim. A device with admin access has neither a grant nor a certificate."""

    device_id: str
    certificate: CertificateExtract | None = None


@dataclass(frozen=True, slots=True)
class DeviceOutOfService:
    """A device that is out of service; ``code`` is its cause."""

    device_id: str
    code: str


@dataclass(frozen=True, slots=True)
class ReleaseProgress:
    """How far the release of a claim is.

    Attributes:
        done: every device of the claim is clean, or out of service; also for a claim that is not prepared.
        waits_for: what the release waits for; may be shown to any tenant.
        withheld: those of its devices that are out of service.
    """

    done: bool
    waits_for: str = ""
    withheld: tuple[DeviceOutOfService, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordedClaim:
    """A claim that the service has recorded: prepared, or not released completely (``releasing``)."""

    ref: ClaimIdentity
    driver: str
    device_ids: tuple[str, ...]
    releasing: bool = False


@dataclass(frozen=True, slots=True)
class ClaimToRestore:
    """A claim that the kubelet lists for a pod with devices, and that the service has not recorded as prepared."""

    driver: str
    namespace: str
    name: str


class ClaimService(Protocol):
    """The requests about claims on the plugin's socket.

    All raise the errors of :mod:`scrubber.domain.errors`, and :class:`~scrubber.domain.errors.Unavailable` where the
    service does not respond. ``wait_seconds`` is how long the service may wait before it answers.
    """

    async def prepare_claim(
        self,
        claim: ClaimIdentity,
        devices: Sequence[ClaimDeviceRequest],
        pods: Sequence[ClaimPod],
        *,
        driver: str,
        wait_seconds: float,
        extended_resources: Sequence[str] = (),
        restores: bool = False,
        withdrawn: bool = False,
    ) -> Sequence[ClaimGrant]:
        """Grant all devices to the claim, or none; durable on return, and the same answer when called again.

        Args:
            extended_resources: for which the scheduler created the claim.
            restores: whether the kubelet takes the claim for prepared and has not called.
            withdrawn: whether the claim has no specification, and gets none before it is prepared.
        """
        ...

    async def unprepare_claim(self, claim_uid: str, *, wait_seconds: float, withdrawn: bool = False) -> ReleaseProgress:
        """Release the claim; return early when that is done.

        Args:
            withdrawn: whether the claim has no specification, and gets none before it is prepared again.
        """
        ...

    async def set_claim_pods(self, claim_uid: str, pods: Sequence[ClaimPod]) -> None:
        """Replace the pods of a prepared claim."""
        ...

    async def list_claims(self) -> Sequence[RecordedClaim]:
        """Return every claim that is prepared, or whose release is not done; also those of other drivers."""
        ...

    async def list_unprepared_claims(self) -> Sequence[ClaimToRestore]:
        """Return the claims of any driver that only the kubelet takes for prepared."""
        ...
