"""The kubelet's DRA side and a driver: one Prepare for a claim, further starts without a call, Unprepare until it succeeds.

The kubelet's side is that of the emulated kubelet, in virtual time and with its checkpoint in memory: the same code decides
when a driver is called in ``make demo ARGS=--dra``, in the tests with processes, and here. Its memory is lost at its restart,
its checkpoint is not. A test may let the calls go to the service directly, or through the driver's process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import grpc

from plugin.api import dra_v1_pb2 as api
from plugin.dra.claim_driver import InjectedDevice
from plugin.dra.claims import ClaimIdentity
from scrubber.domain.assignment import Claim
from scrubber.domain.errors import ScrubberError
from scrubber.emulator.changes import ChangeNotifier
from scrubber.emulator.dra.checkpoint import ClaimInfos, decode_checkpoint, encode_checkpoint
from scrubber.emulator.dra.plugins import ClaimRef
from scrubber.emulator.dra.pod_claims import PodClaims, PrepareFailed, UnprepareFailed
from scrubber.emulator.events import RpcFailed
from scrubber.emulator.pods import ContainerSpec, EmulatedPod, PodClaim, PodSpec
from scrubber.engine.views import ClaimRelease, GrantedDevice, PrepareClaimCall
from tests.simulation.driver import DriverProcess, claim_object
from tests.simulation.kubelet import RETRY_AFTER, Gone, Kubelet, Tenant
from tests.simulation.life import start_outside_service
from tests.simulation.service import Service

__all__ = ["DRIVER", "ClaimDriver", "SimulatedClaim"]

DRIVER = "gpu.scrubber.dev"
PREPARE_SECONDS = 25.0
UNPREPARE_SECONDS = 5.0
ORPHAN_LOOP_SECONDS = 3.0
"""The kubelet's is 60 s; shorter, so that a short plot has several rounds."""


@dataclass(slots=True, eq=False)
class SimulatedClaim:
    """An allocated claim.

    Attributes:
        devices: allocated by the scheduler.
        tenants: pods that reference it, as the kubelet knows.
        answer: of the last Prepare; the driver gets the same again, under the same boot.
        injected: what the driver's process answered then.
        releasing: the kubelet has called Unprepare, and not Prepare since.
        released: Unprepare succeeded, and Prepare was not called since.
    """

    uid: str
    namespace: str
    name: str
    devices: tuple[str, ...]
    tenants: list[Tenant] = field(default_factory=list)
    answer: tuple[GrantedDevice, ...] = ()
    injected: tuple[InjectedDevice, ...] = ()
    boot: str = ""
    releasing: bool = False
    released: bool = False
    withheld: tuple[str, ...] = ()
    waits_for: list[str] = field(default_factory=list)

    @property
    def ref(self) -> ClaimIdentity:
        return ClaimIdentity(self.namespace, self.name, self.uid)

    def call(self, wait: float | None = PREPARE_SECONDS) -> PrepareClaimCall:
        pods = tuple(each.pod for each in self.tenants if each.listed)
        return PrepareClaimCall(Claim(self.uid, self.namespace, self.name, DRIVER, pods), self.devices, (), wait)


class ClaimDriver:
    """The driver of the node, and the part of the kubelet that calls it.

    Args:
        service: returns the running service; raises :class:`Gone` without one.
        granted: called with a tenant and the answer to a Prepare that granted its devices.
        refused: called with every refusal.
        boot: returns the boot ID.
        released: called with a claim, before its device may be given to the next one.
    """

    def __init__(
        self,
        kubelet: Kubelet,
        *,
        service: Callable[[], Service],
        granted: Callable[[Tenant, tuple[GrantedDevice, ...]], None],
        refused: Callable[[ScrubberError], None],
        boot: Callable[[], str],
        breach: Callable[[str, str], None],
        released: Callable[[SimulatedClaim], None],
    ) -> None:
        self._kubelet = kubelet
        self._service = service
        self._granted = granted
        self._refused = refused
        self._boot = boot
        self._breach = breach
        self._released = released
        self._numbers = count(1)
        self._calls = _Calls(self)
        self._checkpoint = encode_checkpoint(ClaimInfos())
        self._pod_claims = self._kubelet_process()
        self._orphan_loop: asyncio.Task[None] | None = None
        self._refused_beside: dict[str, float] = {}
        """Until when another claim of a tenant is refused, by the tenant's UID and the time of the event loop."""
        self.claims: list[SimulatedClaim] = []
        self.process: DriverProcess | None = None
        self.refusals: dict[str, ScrubberError] = {}
        """The last refusal of a claim's Prepare, by its UID."""
        kubelet.claim_ended = self._ended
        kubelet.claim_name = lambda uid: (DRIVER, self.claim(uid).name)
        kubelet.can_create_container = self._finds_cdi_file
        kubelet.restarted = self._restart_kubelet

    async def use_process(self, devices: Sequence[str]) -> DriverProcess:
        """Let the calls go through a driver's process from now on."""

        def read(namespace: str, name: str) -> dict[str, Any] | None:
            claim = next((each for each in self.claims if (each.namespace, each.name) == (namespace, name)), None)
            return None if claim is None else self._object(claim, devices)

        def restored(uid: str, answer: tuple[GrantedDevice, ...]) -> None:
            claim = self.claim(uid)
            claim.answer, claim.boot = answer, self._boot()
            claim.releasing = claim.released = False
            for tenant in claim.tenants:
                if tenant.listed and tenant.waiting:
                    self._granted(tenant, answer)

        self.process = DriverProcess(
            DRIVER, devices, service=self._service, refused=self._refused, read=read, restored=restored
        )
        await self.process.start()
        return self.process

    def allocate(self, namespace: str, devices: Sequence[str]) -> SimulatedClaim:
        """Let the scheduler allocate ``devices``: to a claim without a pod yet."""
        number = next(self._numbers)
        claim = SimulatedClaim(f"claim-uid-{number:04d}", namespace, f"claim-{number}", tuple(sorted(devices)))
        self.claims.append(claim)
        if self._orphan_loop is None:
            self._orphan_loop = start_outside_service(self._release_orphans(), "orphans")
        return claim

    def allocate_again(self, claim: SimulatedClaim, devices: Sequence[str]) -> None:
        """Let the scheduler allocate ``devices`` to a claim that no pod uses any more, and that was deallocated."""
        assert not any(tenant.listed for tenant in claim.tenants)
        claim.devices, claim.answer, claim.injected = tuple(sorted(devices)), (), ()

    def forget(self, claim: SimulatedClaim) -> None:
        """Let the kubelet forget a claim that no pod uses any more: it never calls Unprepare for it."""
        info = self._pod_claims.claims.get(claim.namespace, claim.name)
        if info is not None and not any(tenant.listed for tenant in claim.tenants):
            self._pod_claims.claims.remove(info)
            self._write_checkpoint(self._pod_claims.claims)

    def admit(
        self,
        claim: SimulatedClaim,
        name: str,
        *,
        starts_after: float = 0.05,
        starts: bool = True,
        refused_beside: float = 0.0,
    ) -> Tenant:
        """Admit a pod that references ``claim``; it shares the claim if others do.

        Args:
            refused_beside: seconds for which another claim of the pod is refused: the kubelet takes none of its claims as
                prepared until then, and calls for all of them again.
        """
        tenant = self._kubelet.admit(
            claim.namespace, name, claim.devices, starts_after=starts_after, claim=claim.uid, starts=False
        )
        claim.tenants.append(tenant)
        if refused_beside:
            self._refused_beside[tenant.uid] = asyncio.get_running_loop().time() + refused_beside
        if starts:
            self._kubelet.start_worker(tenant)
        return tenant

    def claim(self, uid: str) -> SimulatedClaim:
        return next(each for each in self.claims if each.uid == uid)

    def claim_of(self, tenant: Tenant) -> SimulatedClaim:
        return next(each for each in self.claims if each.uid == tenant.claim)

    def living(self) -> list[SimulatedClaim]:
        """Return the claims that have a listed pod, also while the kubelet releases them."""
        return [each for each in self.claims if any(tenant.listed for tenant in each.tenants)]

    def never_release(self) -> None:
        """Let the kubelet call Unprepare no more."""
        self._kubelet.claim_ended = lambda tenant, ordered: None
        if self._orphan_loop is not None:
            self._orphan_loop.cancel()

    # -- the kubelet -----------------------------------------------------------------------------------------------

    async def before_start(self, tenant: Tenant) -> None:
        """Call Prepare, unless the kubelet knows that the claim is prepared.

        The kubelet does so before a sandbox, and here before every container, which repeats no call that it remembers.

        Raises:
            Gone: another claim of the pod is refused, or the driver did not answer.
        """
        claim = self.claim_of(tenant)
        self.refusals.pop(claim.uid, None)
        known = self._pod_claims.claims.get(claim.namespace, claim.name)
        was_prepared = known is not None and known.prepared
        try:
            await self._pod_claims.prepare(_emulated(tenant, claim))
        except PrepareFailed:
            raise self.refusals.pop(claim.uid, None) or Gone from None
        if asyncio.get_running_loop().time() < self._refused_beside.get(tenant.uid, 0.0):
            info = self._pod_claims.claims.get(claim.namespace, claim.name)
            if info is not None and not was_prepared:
                info.prepared = False
            raise Gone

    def _finds_cdi_file(self, tenant: Tenant) -> bool:
        return tenant.claim is None or self.process is None or tenant.claim in self.process.cdi.files

    def _ended(self, tenant: Tenant, ordered: bool) -> Awaitable[None] | None:
        """Return what the kubelet waits for before it removes an ``ordered`` pod; orphans are left to their loop."""
        return self._unprepare_pod(tenant) if ordered else None

    async def _unprepare_pod(self, tenant: Tenant) -> None:
        while True:
            kubelet = self._pod_claims
            try:
                await kubelet.unprepare(_emulated(tenant, self.claim_of(tenant)))
            except UnprepareFailed:
                await asyncio.sleep(RETRY_AFTER)
            else:
                if kubelet is self._pod_claims:  # not a process that is gone
                    return

    async def _release_orphans(self) -> None:
        while True:
            await asyncio.sleep(ORPHAN_LOOP_SECONDS)
            await self._pod_claims.reconcile()

    def _restart_kubelet(self) -> None:
        self._pod_claims = self._kubelet_process()

    def _kubelet_process(self) -> PodClaims:
        """Return what a kubelet knows that has just started."""

        def save(claims: ClaimInfos) -> None:
            if claims is self._pod_claims.claims:  # not a process that is gone
                self._write_checkpoint(claims)

        return PodClaims(
            decode_checkpoint(self._checkpoint),
            read_claim=self._read_claim,
            get_driver=lambda driver: self._calls,
            save=save,
            active_pod_uids=lambda: [each.uid for each in self._kubelet.tenants if each.listed],
            on_change=lambda: None,
            on_orphan=lambda uid, reason: None,
        )

    def _write_checkpoint(self, claims: ClaimInfos) -> None:
        self._checkpoint = encode_checkpoint(claims)
        self._kubelet.listed_claims = {each.uid for each in claims if any(each.drivers.values())}

    def _read_claim(self, namespace: str, name: str) -> dict[str, Any]:
        claim = next(each for each in self.claims if (each.namespace, each.name) == (namespace, name))
        return self._object(claim, claim.devices)

    def _object(self, claim: SimulatedClaim, devices: Sequence[str]) -> dict[str, Any]:
        return claim_object(
            claim.ref, DRIVER, claim.devices, devices, (each.pod for each in claim.tenants if each.listed)
        )

    # -- the driver ------------------------------------------------------------------------------------------------

    async def prepare(
        self, claim: SimulatedClaim, tenant: Tenant, wait: float = PREPARE_SECONDS
    ) -> tuple[GrantedDevice, ...]:
        injected: tuple[InjectedDevice, ...] = ()
        if self.process is not None:
            injected, answer = await self.process.prepare(claim.ref)
        else:
            try:
                answer = await self._service().prepare_claim(claim.call(wait))
            except ScrubberError as refusal:
                self._refused(refusal)
                raise
        if claim.injected and claim.injected != injected:
            self._breach("dra", f"{claim.uid} was answered with {claim.injected}, and then with {injected}")
        claim.injected = injected
        repeats = claim.boot == self._boot() and not claim.releasing and self._kubelet.has_processes(claim.tenants)
        if claim.answer and repeats and answer != claim.answer:
            self._breach("dra", f"{claim.uid} was prepared with {claim.answer}, and then with {answer}")
        claim.answer, claim.boot = answer, self._boot()
        claim.releasing = claim.released = False
        self._granted(tenant, answer)
        return answer

    async def unprepare(self, claim: SimulatedClaim) -> str:
        """Return what the release waits for; empty once the claim is released."""
        claim.releasing = True
        try:
            if self.process is not None:
                progress = await self.process.unprepare(claim.ref)
                done, waits_for = progress.done, progress.waits_for
                withheld = tuple(each.device_id for each in progress.withheld)
            else:
                result: ClaimRelease = await self._service().unprepare_claim(claim.uid, UNPREPARE_SECONDS)
                done, waits_for = result.done, result.waits_for
                withheld = tuple(each.device for each in result.withheld)
        except ScrubberError as refusal:
            if self.process is None:
                self._refused(refusal)
            return refusal.public_message
        if not done:
            claim.waits_for.append(waits_for)
            return waits_for
        claim.withheld, claim.released = withheld, True
        self._released(claim)
        return ""


class _Calls:
    """What the kubelet calls; :class:`scrubber.emulator.dra.pod_claims.DriverCalls`."""

    driver = DRIVER

    def __init__(self, node: ClaimDriver) -> None:
        self._node = node

    async def prepare(
        self, claims: Sequence[ClaimRef], *, pod: str, uid: str
    ) -> Mapping[str, api.NodePrepareResourceResponse]:
        answers = {}
        for each in claims:
            claim = self._node.claim(each.uid)
            tenant = next(tenant for tenant in claim.tenants if tenant.uid == uid)
            try:
                granted = await self._node.prepare(claim, tenant)
            except Gone:
                raise _no_answer() from None
            except ScrubberError as refusal:
                self._node.refusals[claim.uid] = refusal
                answers[each.uid] = api.NodePrepareResourceResponse(error=refusal.public_message)
            else:
                devices = [api.Device(pool_name="node-1", device_name=grant.device) for grant in granted]
                answers[each.uid] = api.NodePrepareResourceResponse(devices=devices)
        return answers

    async def unprepare(
        self, claims: Sequence[ClaimRef], *, pod: str, uid: str
    ) -> Mapping[str, api.NodeUnprepareResourceResponse]:
        try:
            return {
                each.uid: api.NodeUnprepareResourceResponse(
                    error=await self._node.unprepare(self._node.claim(each.uid))
                )
                for each in claims
            }
        except Gone:
            raise _no_answer() from None


def _no_answer() -> RpcFailed:
    return RpcFailed(grpc.StatusCode.UNAVAILABLE, "the driver is not running")


def _emulated(tenant: Tenant, claim: SimulatedClaim) -> EmulatedPod:
    """Return a pod as the emulated kubelet has it."""
    container = ContainerSpec("main", ("true",), claims=("gpu",))
    claims = (PodClaim("gpu", claim=claim.name),)
    spec = PodSpec(tenant.pod.name, tenant.pod.namespace, (container,), claims=claims)
    pod = EmulatedPod(spec, tenant.uid, Path(), Path(), ChangeNotifier())
    pod.item = {
        "metadata": {"namespace": spec.namespace, "name": spec.name, "uid": tenant.uid},
        "spec": {"resourceClaims": [{"name": "gpu", "resourceClaimName": claim.name}]},
    }
    return pod
