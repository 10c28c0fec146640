"""The scrub service's answers about claims, through its client."""

from __future__ import annotations

from collections.abc import Sequence

from plugin.dra.claim_service import (
    CertificateExtract,
    ClaimDeviceRequest,
    ClaimGrant,
    ClaimToRestore,
    DeviceOutOfService,
    RecordedClaim,
    ReleaseProgress,
)
from plugin.dra.claims import ClaimIdentity, ClaimPod
from scrubber.api import scrubber_pb2 as pb
from scrubber.api.client import PluginClient

__all__ = ["ScrubServiceClaims"]

ANSWER_SECONDS = 2.0
"""How much longer than its wait the service may take, before it counts as away."""

_SHORTEST_WAIT = 0.001
"""Seconds. 0 would mean as long as the policy allows."""


class ScrubServiceClaims:
    """A :class:`plugin.dra.claim_service.ClaimService` on the plugin's socket."""

    def __init__(self, client: PluginClient) -> None:
        self._client = client

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
        response = await self._client.prepare_claim(
            pb.Claim(uid=claim.uid, namespace=claim.namespace, name=claim.name),
            [pb.ClaimDevice(device_id=each.device_id, admin_access=each.admin_access) for each in devices],
            [_pod(each) for each in pods],
            driver=driver,
            extended_resources=extended_resources,
            deadline_seconds=max(wait_seconds, _SHORTEST_WAIT),
            timeout=wait_seconds + ANSWER_SECONDS,
            restores=restores,
            withdrawn=withdrawn,
        )
        certificates = {each.device_id: each for each in response.certificates}
        return [ClaimGrant(each.id, _extract(certificates.get(each.id))) for each in response.devices]

    async def unprepare_claim(self, claim_uid: str, *, wait_seconds: float, withdrawn: bool = False) -> ReleaseProgress:
        response = await self._client.unprepare_claim(
            claim_uid, deadline_seconds=wait_seconds, timeout=wait_seconds + ANSWER_SECONDS, withdrawn=withdrawn
        )
        withheld = tuple(DeviceOutOfService(each.device_id, each.cause_code) for each in response.withheld)
        return ReleaseProgress(response.done, response.waits_for, withheld)

    async def set_claim_pods(self, claim_uid: str, pods: Sequence[ClaimPod]) -> None:
        await self._client.set_claim_pods(claim_uid, [_pod(each) for each in pods], ANSWER_SECONDS)

    async def list_claims(self) -> Sequence[RecordedClaim]:
        response = await self._client.list_claims(ANSWER_SECONDS)
        return [
            RecordedClaim(
                ClaimIdentity(each.claim.namespace, each.claim.name, each.claim.uid),
                each.driver,
                tuple(device.device_id for device in each.devices),
                each.releasing,
            )
            for each in response.claims
        ]

    async def list_unprepared_claims(self) -> Sequence[ClaimToRestore]:
        response = await self._client.list_claims(ANSWER_SECONDS)
        return [ClaimToRestore(each.driver, each.namespace, each.name) for each in response.unprepared]


def _extract(certificate: pb.ClaimCertificate | None) -> CertificateExtract | None:
    if certificate is None:
        return None
    return CertificateExtract(
        certificate.id,
        certificate.digest,
        certificate.issued_at,
        tuple(certificate.covered),
        tuple(certificate.not_covered),
    )


def _pod(pod: ClaimPod) -> pb.ClaimPod:
    return pb.ClaimPod(uid=pod.uid, namespace=pod.namespace, name=pod.name)
