"""The simulated cluster in one place: devices, pods, a kubelet, durable state, and the service that runs in it or does not.

Tests cause events (:meth:`SimulatedCluster.admit`, :meth:`SimulatedCluster.kill`, :meth:`SimulatedCluster.reboot` …) and let time pass
(:meth:`SimulatedCluster.run`); the laws check. All state that a test may inspect is an attribute.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from itertools import count

from scrubber.adapters.nvidia.conditions import NVIDIA_SIGNALS
from scrubber.adapters.signing.ed25519 import EphemeralKey
from scrubber.domain.assignment import Trust
from scrubber.domain.device import NodeIdentity
from scrubber.domain.errors import RetryableError, ScrubberError
from scrubber.domain.handover_kind import UNCONDITIONAL_BASES
from scrubber.domain.health.signal_table import ErrorClass
from scrubber.domain.policy import Policy
from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import Hygiene
from scrubber.domain.telemetry import Signal
from scrubber.engine.agent_pauses import AgentPauses
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.device.controller import DeviceController
from scrubber.engine.node import Node
from scrubber.engine.views import GrantedDevice, HandOverCall
from scrubber.ports.device import AgentControl, ConfidentialComputing
from scrubber.ports.record import LedgerChange
from scrubber.ports.runtime import NOOP_TRACER, Tracer
from tests.simulation.claims import ClaimDriver
from tests.simulation.erasing import Erasers, Erasing, SimulatedEraser
from tests.simulation.kubelet import START_SECONDS, Gone, Kubelet, Tenant
from tests.simulation.laws import Laws
from tests.simulation.ledger_store import LedgerStore
from tests.simulation.life import Life, follow_lives
from tests.simulation.ports import (
    SimulatedAssignments,
    SimulatedClock,
    SimulatedContainers,
    SimulatedDiagnostics,
    SimulatedHolders,
    SimulatedInventory,
    SimulatedJournal,
    SimulatedOwners,
    SimulatedResetter,
    SimulatedSettings,
    SimulatedTelemetry,
)
from tests.simulation.process_table import Gpu, Proc, ProcessTable, gpu
from tests.simulation.service import Pace, Service
from tests.simulation.timeline import VirtualClock, VirtualLoop

__all__ = ["DEFAULT", "LEISURELY", "SimulatedCluster", "leisurely_cluster", "simulated_cluster"]

DEFAULT = Policy(
    digest="sha256:default",
    signals=NVIDIA_SIGNALS,
    error_classes={31: ErrorClass.APPLICATION, 79: ErrorClass.REBOOT, 95: ErrorClass.RESET, 154: ErrorClass.CONTEXT},
)
"""The shipped default policy, as far as the engine reads it, with one XID of each kind."""


LEISURELY = Pace(watch=8.0, health=10.0)
"""For tests of minutes and hours: as few checks as possible without a watch gap."""


class SimulatedCluster:
    """Created inside a running virtual loop, with ``devices`` GPUs and no service yet."""

    def __init__(
        self, devices: int = 2, policy: Policy = DEFAULT, *, pace: Pace | None = None, gpus: Iterable[Gpu] = ()
    ) -> None:
        loop = asyncio.get_running_loop()
        follow_lives(loop)
        self.clock = VirtualClock(loop)
        self.policy = policy
        self.pace = pace or Pace()
        self.signer = EphemeralKey()
        self.agent_control: AgentControl | None = None
        """For services that start from now on."""
        self.boots = 1
        self.unreadable: set[str] = set()
        """Devices whose holders, and UIDs of pods whose processes, cannot be determined."""
        self.tracer: Tracer = NOOP_TRACER
        """For services that start from now on."""
        self.confidential: ConfidentialComputing | None = None
        """Likewise."""
        self.service: Service | None = None
        self.telemetry: SimulatedTelemetry | None = None
        self.journal: SimulatedJournal | None = None
        self.lives = 0
        self.process_table = ProcessTable(list(gpus) or [gpu(number) for number in range(devices)], self._opens)
        self.erasers = Erasers(self.process_table, self._eraser_starts, self._eraser_works)
        self.ledger_store = LedgerStore(self.kill, self._stored)
        self.kubelet = Kubelet(
            self.process_table,
            now=self.clock.monotonic,
            pre_start=self._pre_start,
            starting=self._container_starts,
            opened=self._read_all,
        )
        self.laws = Laws(
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
        self.claims = ClaimDriver(
            self.kubelet,
            service=self._serving_service,
            granted=self._claim_granted,
            refused=self.laws.refused,
            boot=lambda: self.identity.boot,
            breach=self.laws.breach,
            released=lambda claim: self.laws.claim_released(claim.uid, claim.devices, claim.withheld),
        )
        self._unseen: set[str] = set()

    @property
    def identity(self) -> NodeIdentity:
        return NodeIdentity("node-1", f"boot-{self.boots}", "driver-1")

    # -- the service -----------------------------------------------------------------------------------------------

    async def start_service(self) -> Service:
        """Start one and wait until it has checked every device, or has died."""
        assert not self.serving
        self.laws.service_starts()
        self.lives += 1
        life = Life(self.lives)
        tools = self._dependencies(life)
        inventory = SimulatedInventory(life, self.process_table, self.identity)
        self.service = Service(
            life,
            tools,
            inventory,
            ledger_health=self.ledger_store.ledger.health,
            failed=lambda why: self.laws.breach("8", why),
            pace=self.pace,
        )
        await self.service.started()
        return self.service

    def _dependencies(self, life: Life) -> Dependencies:
        """Return the engine's dependencies, with counted ids: ``scrub-2.7`` is the seventh id of the second service."""
        numbers = count(1)
        clock = SimulatedClock(life, self.clock)
        containers = SimulatedContainers(life, self.process_table, self.laws.signalled, self.unreadable)
        self.telemetry = SimulatedTelemetry(life, self.process_table)
        self.journal = SimulatedJournal(life)
        ledger = self.ledger_store.next_service(life)
        return Dependencies(
            clock=clock,
            inventory=SimulatedInventory(life, self.process_table, self.identity),
            holders=SimulatedHolders(life, self.process_table, self.erasers, self.unreadable),
            telemetry=self.telemetry,
            settings=SimulatedSettings(life, self.process_table),
            resetter=SimulatedResetter(life, self.process_table, self.laws.resets),
            eraser=SimulatedEraser(life, self.process_table, self.erasers),
            diagnostics=SimulatedDiagnostics(life, self.process_table),
            assignments=SimulatedAssignments(life, self.kubelet),
            containers=containers,
            pod_cgroups=containers,
            owners=SimulatedOwners(self.process_table, self.kubelet),
            ledger=ledger,
            audit_log=ledger,
            certificates=ledger,
            signer=self.signer,
            journal=self.journal,
            identity=self.identity,
            agent_pauses=AgentPauses(
                self.ledger_store.agent_pause,
                ledger=ledger,
                journal=self.journal,
                clock=clock,
                new_id=lambda kind: f"{kind}-{life.number}.{next(numbers)}",
                backend=self.agent_control,
            ),
            policy=lambda: self.policy,
            new_id=lambda kind: f"{kind}-{life.number}.{next(numbers)}",
            tracer=self.tracer,
            confidential=self.confidential,
        )

    @property
    def serving(self) -> bool:
        return self.service is not None and self.service.life.alive

    @property
    def node(self) -> Node:
        assert self.service is not None
        return self.service.node

    def controller(self, number: int = 0) -> DeviceController:
        return self.node.devices.controllers[self.gpu(number).id]

    def kill(self) -> None:
        """Simulate kill -9 of the service; its erasers continue."""
        if self.service is not None:
            self.service.kill()

    def reboot(self) -> None:
        """End every process and the driver's state; durable state, and the memory, stay."""
        self.kill()
        for erasing in list(self.erasers.running.values()):
            erasing.task.cancel()
        self.kubelet.reboot()
        for each in self.process_table.gpus.values():
            each.was_rebooted()
        self.boots += 1

    # -- events ----------------------------------------------------------------------------------------------------

    def gpu(self, number: int = 0) -> Gpu:
        return list(self.process_table.gpus.values())[number]

    def record(self, number: int = 0) -> DeviceRecord:
        """Return the stored record."""
        return self.ledger_store.records[self.gpu(number).id]

    def pause(self, seconds: float) -> None:
        """Let time pass while the service stalls."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.stall(seconds)

    async def run(self, seconds: float) -> None:
        """Let time pass."""
        await asyncio.sleep(seconds)

    async def until(self, condition: Callable[[], bool], within: float = 120.0) -> None:
        """Let time pass until ``condition()`` holds."""
        end = self.clock.monotonic() + within
        while not condition():
            assert self.clock.monotonic() < end, f"not within {within:g} s; breaches: {self.laws.breaches}"
            await asyncio.sleep(0.05)

    async def admit(
        self,
        namespace: str,
        name: str,
        devices: Iterable[int] = (0,),
        *,
        init: bool = False,
        starts_after: float = START_SECONDS,
        opens_after: float = 0.0,
        starts: bool = True,
    ) -> Tenant | None:
        """Admit a pod: Allocate for each of its containers, then its worker starts. None when it was refused."""
        ids = [self.gpu(number).id for number in devices]
        for _ in range(2 if init else 1):
            if not self.serving:
                self._unseen |= set(ids)
                continue
            try:
                await self.node.reserve(ids)
            except RetryableError:
                self._unseen |= set(ids)
            except ScrubberError as refusal:
                self.laws.refused(refusal)
                return None
        return self.kubelet.admit(
            namespace, name, ids, init=init, starts_after=starts_after, opens_after=opens_after, starts=starts
        )

    def write_all(self, tenant: Tenant) -> None:
        """Make every living process of ``tenant`` read, and then fill, all that it holds."""
        for proc in self.process_table.living(tenant.uid):
            for device in sorted(proc.holds):
                self.laws.read(proc, device)
                self.process_table.write(proc, device)

    def signal(self, number: int, code: str = "changed") -> None:
        """Let the driver report that something about a device happened."""
        if self.telemetry is not None and self.serving:
            self.telemetry.happened.put_nowait(Signal(self.gpu(number).id, code))

    def signal_xid(self, number: int, code: int) -> None:
        """Let the driver report an XID of a device as an event; whether snapshots list it is up to the device."""
        if self.telemetry is not None and self.serving:
            self.laws.health.reported(self.gpu(number).id)
            self.telemetry.happened.put_nowait(Signal(self.gpu(number).id, "xid", code))

    def restart_kubelet(self) -> None:
        """Restart the kubelet: it lists nothing for a while, and absence from its list proves nothing."""
        self.kubelet.trust = Trust.EMPTY_AFTER_RESTART

    def settled(self) -> bool:
        """Return whether every device of the running service is clean or in use."""
        return self.serving and all(
            controller.state.record.hygiene in (Hygiene.CLEAN, Hygiene.IN_USE)
            for controller in self.node.devices.controllers.values()
        )

    async def end(self) -> None:
        """End every task."""
        self.kill()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def check_laws(self) -> None:
        """Check the laws that hold between any two steps."""
        if self.serving:
            self.laws.at_rest(
                {
                    device: controller.state.record.version
                    for device, controller in self.node.devices.controllers.items()
                },
                {device: record.version for device, record in self.ledger_store.records.items()},
                self.node.view().devices,
            )
            for device, controller in self.node.devices.controllers.items():
                if controller.view != controller.build_view():
                    self.laws.breach("7", f"{device}: an outdated view is kept")

    # -- callbacks -------------------------------------------------------------------------------------------------

    def _serving_service(self) -> Service:
        if self.service is None or not self.serving:
            raise Gone
        return self.service

    def _claim_granted(self, tenant: Tenant, answer: tuple[GrantedDevice, ...]) -> None:
        self.laws.granted(tenant, answer)
        tenant.unjudged = tenant.unjudged or any(each.basis in UNCONDITIONAL_BASES for each in answer)

    async def _pre_start(self, tenant: Tenant) -> None:
        if tenant.claim is not None:
            await self.claims.before_start(tenant)
            return
        if self.service is None:
            raise Gone
        unseen = frozenset(self._unseen & set(tenant.devices))
        try:
            answer = await self.service.hand_over(HandOverCall(tenant.devices, None, unseen))
        except ScrubberError as refusal:
            self.laws.refused(refusal)
            raise
        self._unseen -= unseen
        self.laws.granted(tenant, answer)
        grants = [self.ledger_store.grants.get((each.device, each.grant)) for each in answer]
        tenant.unjudged = tenant.unjudged or any(each.basis in UNCONDITIONAL_BASES for each in answer)
        tenant.unnamed = tenant.unnamed or any(grant is not None and grant.pod is None for grant in grants)

    def _container_starts(self, tenant: Tenant, proc: Proc) -> None:
        self.laws.started(tenant, proc)

    def _read_all(self, proc: Proc) -> None:
        for device in sorted(proc.holds):
            self.laws.read(proc, device)

    def _opens(self, proc: Proc, memory: Gpu) -> None:
        self.laws.opened(proc, memory)

    def _eraser_starts(self, memory: Gpu) -> None:
        self.laws.eraser_starts(memory)

    def _eraser_works(self, erasing: Erasing) -> None:
        self.laws.eraser_works(erasing)

    def _stored(self, change: LedgerChange) -> None:
        self.laws.stored(change)


@asynccontextmanager
async def simulated_cluster(
    devices: int = 2,
    policy: Policy = DEFAULT,
    *,
    settled: bool = True,
    pace: Pace | None = None,
    gpus: Iterable[Gpu] = (),
) -> AsyncIterator[SimulatedCluster]:
    """Provide a simulated cluster with a service whose devices are all clean (``settled``), or without a service.

    Asserts that no law is violated in it.

    Args:
        gpus: its devices, instead of ``devices`` whole ones.
    """
    cluster = SimulatedCluster(devices, policy, pace=pace, gpus=gpus)
    try:
        if settled:
            await cluster.start_service()
            await cluster.until(cluster.settled)
        yield cluster
        cluster.check_laws()
        assert cluster.laws.breaches == []
    finally:
        await cluster.end()


leisurely_cluster = partial(simulated_cluster, pace=LEISURELY)
