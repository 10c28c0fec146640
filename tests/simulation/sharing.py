"""A simulated cluster with shared devices: pods have ``<device id>::<n>`` of them, and pods of one namespace may share one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from scrubber.domain.assignment import Assignment, KubeletReading, Share, Trust
from scrubber.domain.errors import ScrubberError
from scrubber.domain.handover_kind import Basis
from scrubber.domain.policy import Policy
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.views import GrantedDevice, HandOverCall
from tests.simulation.cluster import DEFAULT, SimulatedCluster
from tests.simulation.kubelet import Gone, Tenant
from tests.simulation.laws import Laws
from tests.simulation.life import Life
from tests.simulation.ports import SimulatedAssignments
from tests.simulation.process_table import Gpu, Proc

__all__ = ["RESOURCE", "SharedDeviceCluster", "shared_device_cluster"]

RESOURCE = "scrubber.dev/gpu.shared"


class SharedLaws(Laws):
    """The laws of a shared device: one tenant at a time, and no tenant reads another one's data."""

    def started(self, tenant: Tenant, proc: Proc) -> None:
        for device in tenant.devices:
            if device in self._erasers.running:
                self.breach("5", f"{proc.label} starts while an eraser works on {device}")
            for other in self._unauthorized_processes(device, tenant.uid):
                if other.label.partition("/")[0] != tenant.pod.namespace:
                    self.breach("4", f"{proc.label} starts on {device} beside {other.label} (PID {other.pid})")

    def _may_see(self, reader: str, writer: str) -> bool:
        return reader.partition("/")[0] == writer.partition("/")[0]

    def _one_granted(self, tenant: Tenant, answer: GrantedDevice) -> None:
        if answer.basis is not Basis.SHARED:
            super()._one_granted(tenant, answer)
            return
        record, grant = (
            self._ledger_store.records[answer.device],
            self._ledger_store.grants[answer.device, answer.grant],
        )
        if record.last_grant != grant or grant not in record.open_grants or grant.pod != tenant.pod:
            self.breach("2", f"{answer.device} is answered as shared and the ledger does not say so")


class AssignmentsOfShares(SimulatedAssignments):
    """The assignments as the kubelet lists them: with share ids under our resource, and those of other plugins."""

    def __init__(self, life: Life, cluster: SharedDeviceCluster) -> None:
        super().__init__(life, cluster.kubelet)
        self._cluster = cluster

    async def read(self) -> KubeletReading:
        return self._cluster.with_shares(await super().read())


class SharedDeviceCluster(SimulatedCluster):
    """A simulated cluster with shared devices.

    Attributes:
        shares: by UID, the kubelet's ids of the pod's container; pods that are missing have whole devices.
        elsewhere: assignments by another plugin.
    """

    def __init__(self, devices: int = 1, policy: Policy = DEFAULT) -> None:
        super().__init__(devices, policy)
        self.shares: dict[str, tuple[str, ...]] = {}
        self.elsewhere: tuple[Assignment, ...] = ()
        self.laws = SharedLaws(
            process_table=self.process_table,
            kubelet=self.kubelet,
            erasers=self.erasers,
            ledger_store=self.ledger_store,
            policy=lambda: self.policy,
            boot=lambda: self.identity.boot,
            now=self.clock.monotonic,
            wall=self.clock.wall,
            late=lambda: 2 * self.pace.health,
        )

    def _dependencies(self, life: Life) -> Dependencies:
        return replace(super()._dependencies(life), assignments=AssignmentsOfShares(life, self))

    def with_shares(self, reading: KubeletReading) -> KubeletReading:
        ours = tuple(replace(each, resource=RESOURCE) for each in reading.assignments)
        hinted = tuple(replace(each, resource=RESOURCE) for each in reading.checkpoint_only)
        shares = tuple(
            Share(each.pod, each.container, RESOURCE, device, frozenset(ids))
            for each in (*ours, *hinted)
            for device in sorted(each.devices)
            if (ids := [id_ for id_ in self.shares.get(each.pod.uid or "", ()) if id_.startswith(f"{device}::")])
        )
        more = self.elsewhere if reading.trust is Trust.TRUSTED else ()
        return replace(reading, assignments=(*ours, *more), checkpoint_only=hinted, shares=shares)

    def share(self, number: int, *, of: int = 0) -> str:
        """Return the id of share ``number`` of a device."""
        return f"{self.gpu(of).id}::{number}"

    async def admit_shares(self, namespace: str, name: str, *shares: str, starts: bool = True) -> Tenant:
        """Admit a pod with ``shares``; its worker starts at once, unless the test sends its requests."""
        await self.node.reserve(shares, RESOURCE)
        devices = {id_.partition("::")[0] for id_ in shares}
        tenant = self.kubelet.admit(namespace, name, devices, starts=False)
        self.shares[tenant.uid] = shares
        if starts:
            self.kubelet.retry_pre_start(tenant)
        return tenant

    async def start(self, namespace: str, name: str, *shares: str, writes: bool = True) -> Tenant:
        """Return a pod that runs on ``shares`` and has filled their devices."""
        tenant = await self.admit_shares(namespace, name, *shares)
        await self.until(lambda: tenant.running and bool(tenant.first and tenant.first.holds))
        if writes:
            self.write_all(tenant)
        return tenant

    def call(self, tenant: Tenant, wait: float | None = None) -> asyncio.Task[tuple[GrantedDevice, ...]]:
        """Request a start for the pod, instead of its worker."""
        assert self.service is not None
        ids = self.shares.get(tenant.uid, tenant.devices)
        return asyncio.create_task(self.service.hand_over(HandOverCall(ids, wait, frozenset(), RESOURCE)))

    async def refused(self, tenant: Tenant, wait: float = 1.0) -> ScrubberError:
        """Return the pod's refusal when its wait is over."""
        with pytest.raises(ScrubberError) as refusal:
            await self.call(tenant, wait)
        self.laws.refused(refusal.value)
        return refusal.value

    def use(self, device: Gpu, pod: str | None = None) -> Proc:
        """Let a process without a grant open ``device``."""
        proc = self.process_table.start(pod, "elsewhere", "other/elsewhere/x#1", mounted=frozenset({device.id}))
        self.process_table.open(proc, device.id)
        return proc

    async def _pre_start(self, tenant: Tenant) -> None:
        if self.service is None:
            raise Gone
        try:
            answer = await self.call(tenant)
        except ScrubberError as refusal:
            self.laws.refused(refusal)
            raise
        self.laws.granted(tenant, answer)


@asynccontextmanager
async def shared_device_cluster(devices: int = 1, policy: Policy = DEFAULT) -> AsyncIterator[SharedDeviceCluster]:
    """Provide a simulated cluster whose service has certified all devices; asserts that no law is violated."""
    cluster = SharedDeviceCluster(devices, policy)
    try:
        await cluster.start_service()
        await cluster.until(cluster.settled)
        yield cluster
        cluster.check_laws()
        assert cluster.laws.breaches == []
    finally:
        await cluster.end()
