"""Shortcuts for tests: run a pod, let one wait, and send its start request."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from scrubber.domain.errors import ScrubberError
from scrubber.domain.handover_kind import HandOverKind
from scrubber.domain.policy import RequiredProof
from scrubber.engine.views import GrantedDevice, HandOverCall
from tests.world.kubelet import Tenant
from tests.world.world import DEFAULT, World

__all__ = ["STRICT", "TRUSTED", "admitted", "answered", "ask", "started"]

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


async def started(world: World, namespace: str = "acme", name: str = "train-0", *devices: int) -> Tenant:
    """Return a pod that runs on ``devices`` and has filled them."""
    tenant = await world.admit(namespace, name, devices or (0,))
    assert tenant is not None
    await world.until(lambda: tenant.running and bool(world.matter.holders(tenant.devices[0])))
    world.write_all(tenant)
    return tenant


async def admitted(world: World, namespace: str = "umbrella", name: str = "serve-0", *devices: int) -> Tenant:
    """Return a pod that waits for its start; the test sends the requests instead of its worker."""
    tenant = await world.admit(namespace, name, devices or (0,), starts=False)
    assert tenant is not None
    return tenant


def ask(world: World, tenant: Tenant, wait: float | None = None) -> asyncio.Task[tuple[GrantedDevice, ...]]:
    assert world.service is not None
    return asyncio.create_task(world.service.hand_over(HandOverCall(tenant.devices, wait)))


async def answered(call: asyncio.Task[tuple[GrantedDevice, ...]]) -> ScrubberError:
    with pytest.raises(ScrubberError) as refusal:
        await call
    return refusal.value
