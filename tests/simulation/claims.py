"""The kubelet's DRA side and a driver: one Prepare for a claim, further starts without a call, Unprepare until it succeeds.

The kubelet knows in memory that a claim is prepared, so it calls Prepare again after its restart and after a reboot. It calls
Unprepare when the last pod of a claim has ended, after a forced deletion without waiting for that, again after a failure, and
never after a success. A test may let the calls go to the service directly, or through the driver's process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from plugin.dra.claim_driver import InjectedDevice
from plugin.dra.claims import ClaimIdentity
from scrubber.domain.assignment import Claim
from scrubber.domain.errors import ScrubberError
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
        releasing: the kubelet calls Unprepare.
        released: Unprepare succeeded: the kubelet has forgotten the claim.
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
        pods = tuple(each.pod for each in self.tenants)
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
        self.claims: list[SimulatedClaim] = []
        self.process: DriverProcess | None = None

    async def use_process(self, devices: Sequence[str]) -> DriverProcess:
        """Let the calls go through a driver's process from now on."""

        def read(namespace: str, name: str) -> dict[str, Any] | None:
            claim = next((each for each in self.claims if (each.namespace, each.name) == (namespace, name)), None)
            if claim is None:
                return None
            pods = (each.pod for each in claim.tenants if each.listed)
            return claim_object(claim.ref, DRIVER, claim.devices, devices, pods)

        self.process = DriverProcess(DRIVER, devices, service=self._service, refused=self._refused, read=read)
        await self.process.start()
        return self.process

    def allocate(self, namespace: str, devices: Sequence[str]) -> SimulatedClaim:
        """Let the scheduler allocate ``devices``: to a claim without a pod yet."""
        number = next(self._numbers)
        claim = SimulatedClaim(f"claim-uid-{number:04d}", namespace, f"claim-{number}", tuple(sorted(devices)))
        self.claims.append(claim)
        return claim

    def admit(self, claim: SimulatedClaim, name: str, *, starts_after: float = 0.05, starts: bool = True) -> Tenant:
        """Admit a pod that references ``claim``; it shares the claim if others do."""
        tenant = self._kubelet.admit(
            claim.namespace, name, claim.devices, starts_after=starts_after, claim=claim.uid, starts=False
        )
        claim.tenants.append(tenant)
        if starts:
            self._kubelet.start_worker(tenant)
        return tenant

    def claim_of(self, tenant: Tenant) -> SimulatedClaim:
        return next(each for each in self.claims if each.uid == tenant.claim)

    def living(self) -> list[SimulatedClaim]:
        """Return the claims that have a listed pod, and that the kubelet does not release."""
        return [each for each in self.claims if not each.releasing and any(tenant.listed for tenant in each.tenants)]

    # -- the kubelet -----------------------------------------------------------------------------------------------

    async def before_start(self, tenant: Tenant) -> None:
        """Call Prepare, unless the kubelet knows that the claim is prepared.

        Raises:
            Gone: also where the runtime does not find the claim's CDI file; the kubelet does not call Prepare for that.
        """
        claim = self.claim_of(tenant)
        if claim.uid not in self._kubelet.prepared_claims:
            await self.prepare(claim, tenant)
            if not claim.released:
                self._kubelet.prepared_claims.add(claim.uid)
                self._kubelet.listed_claims.add(claim.uid)
        if self.process is not None and claim.uid not in self.process.cdi.files and not claim.released:
            raise Gone

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
        if claim.answer and claim.boot == self._boot() and not claim.releasing and answer != claim.answer:
            self._breach("dra", f"{claim.uid} was prepared with {claim.answer}, and then with {answer}")
        claim.answer, claim.boot = answer, self._boot()
        self._granted(tenant, answer)
        return answer

    def ended(self, tenant: Tenant, *, ordered: bool) -> Awaitable[None] | None:
        """Take note that ``tenant`` ends; return what the kubelet waits for before it removes an ``ordered`` pod."""
        claim = self.claim_of(tenant)
        others = [each for each in claim.tenants if each is not tenant and each.listed and not each.complete]
        if others or claim.releasing:
            return None
        claim.releasing = True
        if ordered:
            return self._unprepare(claim)

        async def orphan_loop() -> None:
            await asyncio.sleep(ORPHAN_LOOP_SECONDS)
            await self._unprepare(claim)

        start_outside_service(orphan_loop(), f"orphans of {claim.uid}")
        return None

    async def _unprepare(self, claim: SimulatedClaim) -> None:
        """Call Unprepare until it succeeds, and forget the claim."""
        while True:
            try:
                done, withheld, waits_for = await self._call_unprepare(claim)
            except (ScrubberError, Gone) as refusal:
                if isinstance(refusal, ScrubberError) and self.process is None:
                    self._refused(refusal)
            else:
                if done:
                    claim.withheld = withheld
                    break
                claim.waits_for.append(waits_for)
            await asyncio.sleep(RETRY_AFTER)
        self._kubelet.prepared_claims.discard(claim.uid)
        self._kubelet.listed_claims.discard(claim.uid)
        claim.released = True
        self._released(claim)

    async def _call_unprepare(self, claim: SimulatedClaim) -> tuple[bool, tuple[str, ...], str]:
        if self.process is not None:
            progress = await self.process.unprepare(claim.ref)
            return progress.done, tuple(each.device_id for each in progress.withheld), progress.waits_for
        result: ClaimRelease = await self._service().unprepare_claim(claim.uid, UNPREPARE_SECONDS)
        return result.done, tuple(each.device for each in result.withheld), result.waits_for
