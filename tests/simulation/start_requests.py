"""Shortcuts for tests: run a pod, let one wait, and send its start request."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from scrubber.domain.errors import ScrubberError
from scrubber.domain.handover_kind import HandOverKind
from scrubber.domain.policy import RequiredProof
from scrubber.engine.views import GrantedDevice, HandOverCall
from tests.simulation.cluster import DEFAULT, SimulatedCluster
from tests.simulation.kubelet import Tenant

__all__ = ["STRICT", "TRUSTED", "admitted", "refusal_of", "request_start", "started"]

STRICT = replace(
    DEFAULT,
    name="strict",
    digest="sha256:strict",
    required_proofs=dict.fromkeys(HandOverKind, RequiredProof.CERTIFICATE),
)
TRUSTED = replace(
    DEFAULT,
    name="trusted",
    digest="sha256:trusted",
    required_proofs={**DEFAULT.required_proofs, HandOverKind.SAME_TENANT: RequiredProof.CHECKS},
)


async def started(cluster: SimulatedCluster, namespace: str = "acme", name: str = "train-0", *devices: int) -> Tenant:
    """Return a pod that runs on ``devices`` and has filled them."""
    tenant = await cluster.admit(namespace, name, devices or (0,))
    assert tenant is not None
    await cluster.until(lambda: tenant.running and bool(cluster.process_table.holders(tenant.devices[0])))
    cluster.write_all(tenant)
    return tenant


async def admitted(
    cluster: SimulatedCluster, namespace: str = "umbrella", name: str = "serve-0", *devices: int
) -> Tenant:
    """Return a pod that waits for its start; the test sends the requests instead of its worker."""
    tenant = await cluster.admit(namespace, name, devices or (0,), starts=False)
    assert tenant is not None
    return tenant


def request_start(
    cluster: SimulatedCluster, tenant: Tenant, wait: float | None = None
) -> asyncio.Task[tuple[GrantedDevice, ...]]:
    assert cluster.service is not None
    return asyncio.create_task(cluster.service.hand_over(HandOverCall(tenant.devices, wait)))


async def refusal_of(call: asyncio.Task[tuple[GrantedDevice, ...]]) -> ScrubberError:
    with pytest.raises(ScrubberError) as refusal:
        await call
    return refusal.value
