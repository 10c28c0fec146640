"""Scenarios: everything that can happen in a simulated cluster, as acts with choices, and the repair at the end of a scenario.

A plot is a list of steps: an act, its choices, and the time that passes after it. Choices of a pod or a process are
numbers modulo the existing ones, so that a plot stays valid when steps are removed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from scrubber.domain.assignment import Trust
from scrubber.domain.codes import ErrorCode
from scrubber.domain.errors import ScrubberError
from scrubber.domain.evidence import PathKind
from scrubber.domain.handover_kind import HandOverKind
from scrubber.domain.policy import BreakerRule, Policy, RequiredProof, ResetMode
from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import Health, Hygiene, RecoveryMethod
from tests.simulation.cluster import DEFAULT, SimulatedCluster
from tests.simulation.driver import DriverProcess
from tests.simulation.faults import inject_fault
from tests.simulation.kubelet import START_SECONDS, Gone, Tenant
from tests.simulation.ledger_store import CrashPoint
from tests.simulation.life import start_outside_service
from tests.simulation.process_table import Proc
from tests.simulation.service import Pace
from tests.simulation.timeline import Livelock, VirtualLoop

__all__ = ["DEVICES", "POLICIES", "Plot", "Scenario", "Step", "play_plot", "shortest"]

DEVICES = 3
STRICT = Policy(
    name="strict",
    digest="sha256:strict",
    required_proofs=dict.fromkeys(HandOverKind, RequiredProof.CERTIFICATE),
    reset=ResetMode.REQUIRED,
    error_classes=DEFAULT.error_classes,
    signals=DEFAULT.signals,
)
TRUSTED = Policy(
    name="trusted",
    digest="sha256:trusted",
    required_proofs={
        **DEFAULT.required_proofs,
        HandOverKind.SAME_POD: RequiredProof.CHECKS,
        HandOverKind.SAME_TENANT: RequiredProof.CHECKS,
    },
    error_classes=DEFAULT.error_classes,
    signals=DEFAULT.signals,
)
POLICIES = {policy.name: policy for policy in (DEFAULT, STRICT, TRUSTED)}
MANY_RESETS = BreakerRule(max_resets=10_000)
"""A scenario has more faults in minutes than a node in an hour; work stopped by its breaker would wait for the end
of the hour."""

SUPERVISOR_WAITS = 1.0


@dataclass(frozen=True, slots=True)
class Step:
    """One act by the name of a method of :class:`Scenario`, its choices, and the seconds that pass after it."""

    act: str
    choices: dict[str, Any]
    then: float

    def __str__(self) -> str:
        chosen = ", ".join(f"{name}={value!r}" for name, value in self.choices.items())
        return f"{self.act}({chosen}), then {self.then:g} s"


Plot = tuple[Step, ...]


def play_plot(policy: str, plot: Plot) -> str | None:
    """Play ``plot`` in a new simulated cluster, and repair that at the end; return the first failure, or None."""
    story = Scenario(replace(POLICIES[policy], breaker=MANY_RESETS))
    try:
        return story.play(plot)
    finally:
        story.close()


def shortest(policy: str, plot: Plot, *, tries: int = 300) -> Plot:
    """Return ``plot`` without the steps that its failure does not need."""
    manner = _manner(play_plot(policy, plot))
    size = max(1, len(plot) // 2)
    while tries > 0:
        left_out, at = False, 0
        while at < len(plot) and tries > 0:
            candidate, tries = plot[:at] + plot[at + size :], tries - 1
            if _manner(play_plot(policy, candidate)) == manner:
                plot, left_out = candidate, True
            else:
                at += size
        if size == 1 and not left_out:
            break
        size = max(1, size // 2)
    return plot


def _manner(wrong: str | None) -> str:
    """Return the kind of a failure: numbers and times differ between attempts."""
    return re.sub(r"[\d.]+", "#", wrong or "")[:50]


class Scenario:
    """One cluster and every possible act in it. A service that died is restarted by its supervisor."""

    def __init__(self, policy: Policy, devices: int = DEVICES, pace: Pace | None = None) -> None:
        self._loop = VirtualLoop()
        self._hosts: list[Proc] = []
        self._away = SUPERVISOR_WAITS
        self._driver_away = SUPERVISOR_WAITS
        self.cluster: SimulatedCluster
        self._driver: DriverProcess

        async def begin() -> None:
            self.cluster = SimulatedCluster(devices, policy, pace=pace)
            await self.cluster.start_service()
            self._driver = await self.cluster.claims.use_process(tuple(self.cluster.process_table.gpus))
            start_outside_service(self._supervise(), "supervisor")
            start_outside_service(self._supervise_driver(), "supervisor of the driver")

        self._loop.run_until_complete(begin())

    async def _supervise(self) -> None:
        while True:
            assert self.cluster.service is not None
            await self.cluster.service.life.ended.wait()
            away, self._away = self._away, SUPERVISOR_WAITS
            await asyncio.sleep(away)
            if not self.cluster.serving:
                await self.cluster.start_service()

    async def _supervise_driver(self) -> None:
        while True:
            await self._driver.killed.wait()
            away, self._driver_away = self._driver_away, SUPERVISOR_WAITS
            await asyncio.sleep(away)
            if not self._driver.is_running:
                await self._driver.start()

    def play(self, plot: Plot) -> str | None:
        """Play every step, then repair the cluster; stop at the first failure and return it."""
        try:
            for step in plot:
                self._loop.run_until_complete(self._act(step))
                if self.cluster.laws.breaches:
                    break
            else:
                self._loop.run_until_complete(self.ends())
        except (AssertionError, Livelock) as wrong:
            return self.cluster.laws.breaches[0] if self.cluster.laws.breaches else f"{type(wrong).__name__}: {wrong}"
        return self.cluster.laws.breaches[0] if self.cluster.laws.breaches else None

    async def ends(self) -> None:
        """Repair the cluster, and let every waiting pod start."""
        await _EndWell(self).describe()

    async def _act(self, step: Step) -> None:
        acted = getattr(self, step.act)(**step.choices)
        if asyncio.iscoroutine(acted):
            await acted
        await asyncio.sleep(step.then)
        self.cluster.check_laws()

    def close(self) -> None:
        """End every task of this world."""
        self._loop.run_until_complete(self.cluster.end())
        self._loop.close()
        assert self._loop.unretrieved == []

    # -- pods ------------------------------------------------------------------------------------------------------

    async def a_pod_is_admitted(self, namespace: str, name: str, device_count: int, kind: str) -> None:
        """Admit a pod.

        ``kind``: plain, init (an init container uses the devices first), late (to start) or slow (to open them).
        """
        cluster = self.cluster
        free = [device for device in cluster.kubelet.free() if self._advertised(device)]
        numbers = [list(cluster.process_table.gpus).index(device) for device in free[:device_count]]
        names = {(each.pod.namespace, each.pod.name) for each in cluster.kubelet.tenants if each.listed}
        if numbers and (namespace, name) not in names:
            starts_after = 2.0 if kind == "late" else START_SECONDS
            opens_after = 3.0 if kind == "slow" else 0.0
            await cluster.admit(
                namespace, name, numbers, init=kind == "init", starts_after=starts_after, opens_after=opens_after
            )

    async def a_pod_follows_another(self, namespace: str, device_count: int, writes: bool, lives_on: float) -> None:
        """Delete the oldest pod by force; it lives on, and its devices go to the next one at once."""
        tenant = self._listed(0)
        if tenant is not None:
            if writes:
                self.cluster.write_all(tenant)
            self.cluster.kubelet.force_delete(tenant, lives_on)
        await self.a_pod_is_admitted(namespace, "follower-0", device_count, "plain")

    # -- claims ----------------------------------------------------------------------------------------------------

    def a_claim_is_allocated(self, namespace: str, name: str, device_count: int, kind: str) -> None:
        """Allocate free devices to a claim, and admit a pod with it. ``kind``: plain or late (to start)."""
        cluster = self.cluster
        free = [device for device in cluster.kubelet.free() if self._advertised(device)]
        names = {(each.pod.namespace, each.pod.name) for each in cluster.kubelet.tenants if each.listed}
        if free and (namespace, name) not in names:
            claim = cluster.claims.allocate(namespace, free[:device_count])
            cluster.claims.admit(claim, name, starts_after=2.0 if kind == "late" else START_SECONDS)

    def a_claim_follows_another(self, namespace: str, choice: int, writes: bool, lives_on: float) -> None:
        """Delete a pod by force; it lives on, and the scheduler gives its devices to another claim at once."""
        tenant = self._listed(choice)
        if tenant is not None:
            if writes:
                self.cluster.write_all(tenant)
            self.cluster.kubelet.force_delete(tenant, lives_on)
        self.a_claim_is_allocated(namespace, "follower-0", 1, "plain")

    def a_claim_is_forgotten(self, choice: int, writes: bool, lives_on: float, again: bool) -> None:
        """Delete the pods of a claim by force, and let the kubelet forget it: no Unprepare ever comes.

        Args:
            lives_on: seconds for which their processes do.
            again: whether the claim itself is allocated then, with other devices; otherwise its devices are, to another one.
        """
        cluster, living = self.cluster, self.cluster.claims.living()
        if not living:
            return
        claim = living[choice % len(living)]
        for tenant in [each for each in claim.tenants if each.listed]:
            if writes:
                cluster.write_all(tenant)
            cluster.kubelet.force_delete(tenant, lives_on)
        cluster.claims.forget(claim)
        if again:
            free = [each for each in cluster.kubelet.free() if self._advertised(each) and each not in claim.devices]
            if free:
                cluster.claims.allocate_again(claim, free[:1])
                cluster.claims.admit(claim, "again-0")
        elif set(claim.devices) <= set(cluster.kubelet.free()):
            cluster.claims.admit(cluster.claims.allocate("acme-space", claim.devices), "again-0")

    def a_claim_is_refused_beside_another(self, namespace: str, name: str, seconds: float, fails: bool) -> None:
        """Allocate a free device to one of two claims of a pod; the other one is refused for ``seconds``.

        Args:
            fails: whether the device has an error in between.
        """
        cluster = self.cluster
        free = [device for device in cluster.kubelet.free() if self._advertised(device)]
        names = {(each.pod.namespace, each.pod.name) for each in cluster.kubelet.tenants if each.listed}
        if not free or (namespace, name) in names:
            return
        claim, gpu = cluster.claims.allocate(namespace, free[:1]), cluster.process_table.gpus[free[0]]
        cluster.claims.admit(claim, name, refused_beside=seconds)

        async def fail() -> None:
            await asyncio.sleep(seconds / 2)
            gpu.ecc = (gpu.ecc or 0) + 1

        if fails:
            start_outside_service(fail(), f"error {gpu.id}")

    def a_pod_shares_a_claim(self, choice: int, name: str, late: float) -> None:
        """Admit one more pod with a claim that is in use; the kubelet does not call Prepare for it.

        Args:
            late: seconds for which it waits for something else, such as a volume, before its claims.
        """
        kubelet, living = self.cluster.kubelet, self.cluster.claims.living()
        names = {(each.pod.namespace, each.pod.name) for each in kubelet.tenants if each.listed}
        if not living or (living[choice % len(living)].namespace, name) in names:
            return
        tenant = self.cluster.claims.admit(living[choice % len(living)], name, starts=not late)

        async def start() -> None:
            await asyncio.sleep(late)
            if tenant.listed and not tenant.complete and tenant.worker is None:
                kubelet.start_worker(tenant)

        if late:
            start_outside_service(start(), f"volume {tenant.uid}")

    async def the_driver_reports_pods(self, choice: int) -> None:
        """Let the driver report the pods for which a claim is reserved."""
        living, service = self.cluster.claims.living(), self.cluster.service
        if living and service is not None and self.cluster.serving:
            claim = living[choice % len(living)]
            pods = [each.pod for each in claim.tenants if each.listed]
            service.life.start(_quietly(service.node.claims.set_pods(claim.uid, pods)), "report")

    def a_pod_writes_everywhere(self, choice: int) -> None:
        tenants = [
            tenant for tenant in self.cluster.kubelet.tenants if any(self.cluster.process_table.living(tenant.uid))
        ]
        if tenants:
            self.cluster.write_all(tenants[choice % len(tenants)])

    def a_container_exits(self, choice: int, again: bool, writes: bool, child: str) -> None:
        """End a container. ``child``: none is left behind, one that holds the devices, or one that has closed them."""
        tenant = self._running(choice)
        if tenant is not None:
            if writes:
                self.cluster.write_all(tenant)
            self._leave_behind(tenant, child)
            self.cluster.kubelet.exit(tenant, again=again)

    def a_pod_is_deleted(self, choice: int, lives_on: float | None, child: str) -> None:
        tenant = self._listed(choice)
        if tenant is None:
            return
        if tenant.running:
            self._leave_behind(tenant, child)
        if lives_on is None:
            self.cluster.kubelet.delete(tenant)
        else:
            self.cluster.kubelet.force_delete(tenant, lives_on)

    def _leave_behind(self, tenant: Tenant, child: str) -> None:
        if child != "none" and tenant.first is not None and tenant.first.alive:
            left = self.cluster.process_table.fork(tenant.first)
            if child == "lets-go" and not tenant.unnamed:
                left.holds.clear()

    def a_child_exits_by_itself(self, choice: int) -> None:
        children = [
            proc for proc in self.cluster.process_table.living() if not proc.first and not proc.sandbox and proc.pod
        ]
        if children:
            self.cluster.process_table.end(children[choice % len(children)])

    def the_kubelet_gives_up_a_call_and_asks_again(self, choice: int) -> None:
        waiting = [tenant for tenant in self.cluster.kubelet.tenants if tenant.waiting]
        if waiting:
            self.cluster.kubelet.retry_pre_start(waiting[choice % len(waiting)])

    def _advertised(self, device: str) -> bool:
        record = self.cluster.ledger_store.records.get(device)
        return record is None or record.advertised

    def _listed(self, choice: int) -> Tenant | None:
        listed = [tenant for tenant in self.cluster.kubelet.tenants if tenant.listed and not tenant.complete]
        return listed[choice % len(listed)] if listed else None

    def _running(self, choice: int) -> Tenant | None:
        running = [tenant for tenant in self.cluster.kubelet.tenants if tenant.listed and tenant.running]
        return running[choice % len(running)] if running else None

    # -- faults ----------------------------------------------------------------------------------------------------

    def the_end_of_containers_is_observed_or_not(self, observed: bool) -> None:
        self.cluster.process_table.has_cgroups = observed

    def the_kubelet_can_be_trusted_or_not(self, trust: str) -> None:
        self.cluster.kubelet.trust = Trust(trust)

    def a_device_fails(self, number: int, fault: str, reported: bool) -> None:
        """Let a device fail. ``reported``: whether the driver reports it, or the next check has to find it."""
        inject_fault(self.cluster, number, fault)
        if reported and fault.startswith("xid-"):
            self.cluster.signal_xid(number, int(fault.removeprefix("xid-")))
        elif reported:
            self.cluster.signal(number)

    def a_device_leaves_the_node_or_comes_back(self, number: int, present: bool, notified: bool) -> None:
        """Remove or return a device, like an instance of a repartitioned GPU, or a pulled GPU.

        ``notified``: whether the driver reports it.
        """
        gpu = self.cluster.gpu(number)
        gpu.listed, gpu.lost = present, not present
        if notified and self.cluster.serving:
            self.cluster.node.devices.inventory_changed.set()

    def a_device_is_well_again(self, number: int) -> None:
        self.cluster.gpu(number).clear_faults()
        self.cluster.unreadable.discard(self.cluster.gpu(number).id)

    def the_machine_fails(self, choice: int, what: str) -> None:
        cluster, tenant = self.cluster, self._listed(choice)
        procs = [proc for proc in cluster.process_table.living() if not proc.sandbox and proc.pod is not None]
        match what:
            case "unreadable-pod" if tenant is not None:
                cluster.unreadable.add(tenant.uid)
            case "unkillable" if procs:
                procs[choice % len(procs)].killable = False
            case "erasers":
                cluster.erasers.unkillable = not cluster.erasers.unkillable
            case "disk":
                cluster.ledger_store.refuses = "the disk is full" if cluster.ledger_store.refuses is None else None

    def a_process_of_the_host_looks_at_a_device(self, number: int, opens: bool) -> None:
        if not opens:
            self.hosts_leave()
            return
        host = self.cluster.process_table.start(None, "", "host")
        self.cluster.process_table.open(host, self.cluster.gpu(number).id)
        self._hosts.append(host)

    def a_host_process_writes_on_a_device(self, number: int, stays: float) -> None:
        """Let an unauthorized process write on an unassigned device.

        It stays long enough to be noticed (0: while the whole service stalls).
        """
        cluster, gpu = self.cluster, self.cluster.gpu(number)
        users = [proc for proc in cluster.process_table.living() if gpu.id in proc.mounted and not proc.sandbox]
        starting = any(tenant.starting and gpu.id in tenant.devices for tenant in cluster.kubelet.tenants)
        if users or starting or gpu.id not in cluster.kubelet.free():
            return
        if not stays:
            cluster.pause(12.0)
        process = cluster.process_table.start(None, "", "host/stranger/x#1")
        cluster.process_table.open(process, gpu.id)
        cluster.process_table.write(process, gpu.id)

        async def leave() -> None:
            await asyncio.sleep(stays)
            cluster.process_table.end(process)

        if stays:
            start_outside_service(leave(), f"stranger {process.pid}")
        else:
            cluster.process_table.end(process)

    def the_kubelet_starts_again(self) -> None:
        self.cluster.kubelet.restart()
        self._driver.drop_calls()

    def hosts_leave(self) -> None:
        """End all processes of the host."""
        for host in self._hosts:
            self.cluster.process_table.end(host)
        self._hosts.clear()

    # -- operators -------------------------------------------------------------------------------------------------

    def an_operator_acts(self, number: int, action: str) -> None:
        service, device = self.cluster.service, self.cluster.gpu(number).id
        if service is None or not self.cluster.serving:
            return
        match action:
            case "out":
                service.life.start(_quietly(service.node.actions.quarantine(device, "because", "uid:0")), "person")
            case "glass":
                service.life.start(
                    _quietly(service.node.actions.break_glass(device, 600.0, "because", "uid:0")), "person"
                )
            case "back":
                service.life.start(_quietly(service.node.actions.unquarantine(device, "because", "uid:0")), "person")
            case _:
                start_outside_service(_quietly(service.scrub(device, PathKind(action))), "person")

    # -- the service -----------------------------------------------------------------------------------------------

    async def the_service_ends(self, away: float, how: str) -> None:
        """End the service. ``away``: seconds until it is restarted."""
        if how == "reboot":
            self.cluster.reboot()
            self.lose_driver()
        elif how == "stop" and self.cluster.serving:
            assert self.cluster.service is not None
            await self.cluster.service.stop()
        else:
            self.cluster.kill()
        self._away = away

    # -- the driver ------------------------------------------------------------------------------------------------

    def lose_driver(self) -> None:
        """End the driver with its CDI files, as a reboot does."""
        self._driver.cdi.files.clear()
        self._driver.kill()

    def the_driver_ends(self, away: float) -> None:
        """Kill the driver. ``away``: seconds until it is restarted."""
        self._driver.kill()
        self._driver_away = away

    async def the_driver_is_updated(self) -> None:
        """Start another instance of the driver, as a rolling update does; the old one completes its calls."""
        if self._driver.is_running:
            await self._driver.start()

    def the_cdi_files_are_lost(self, away: float) -> None:
        """Remove the files of all claims while the driver restarts."""
        self.lose_driver()
        self._driver_away = away

    def every_process_is_killed(self, away: float) -> None:
        """Kill the service, the driver and the kubelet at once; containers go on. ``away``: as elsewhere."""
        self.cluster.kill()
        self._away = away
        self.the_driver_ends(away)
        self.the_kubelet_starts_again()

    def the_service_will_be_killed_at_a_write(self, writes: int, durable: bool) -> None:
        self.cluster.ledger_store.point = CrashPoint(writes, durable)

    def clear_faults(self) -> None:
        """Remove every fault of devices and of the machine."""
        cluster = self.cluster
        cluster.ledger_store.point, cluster.ledger_store.refuses = None, None
        cluster.kubelet.trust = Trust.TRUSTED
        cluster.unreadable.clear()
        cluster.erasers.unkillable = False
        for erasing in cluster.erasers.running.values():
            erasing.killable = True
        for gpu in cluster.process_table.gpus.values():
            gpu.clear_faults()
        if cluster.serving:
            cluster.node.devices.inventory_changed.set()
        self.hosts_leave()
        for proc in cluster.process_table.living():
            proc.killable = True
            tenant = cluster.kubelet.of(proc.pod)
            if tenant is None or proc.sandbox:
                continue
            current = tenant.running and proc is tenant.first
            # A pod that shared a claim for a moment may have been neither reported nor listed.
            unnamed = tenant.unnamed or (tenant.claim is not None and tenant.pod not in cluster.ledger_store.claim_pods)
            if (tenant.listed and not current) or (unnamed and not tenant.listed):
                # Leftovers of a living pod are its own to end, and for an unidentified pod nothing can be proved.
                cluster.process_table.end(proc)


class _EndWell:
    """Ends faults, restores trusted data, runs a service: after a while every waiting pod starts."""

    def __init__(self, story: Scenario) -> None:
        self._story = story
        self._cluster = story.cluster

    async def describe(self) -> None:
        cluster = self._cluster
        self._story.clear_faults()
        await cluster.run(10.0)  # pending events have arrived
        if any(_needs_reboot(record) for record in cluster.ledger_store.records.values()):
            cluster.reboot()
            self._story.lose_driver()
        await self._eventually(lambda record: not self._needs_an_operator(record))
        for device, record in list(cluster.ledger_store.records.items()):
            if self._needs_an_operator(record):
                await cluster.node.actions.unquarantine(device, "looked at", "uid:0")
        await self._eventually(lambda record: True)
        for tenant in cluster.kubelet.tenants:
            if tenant.listed:
                cluster.kubelet.delete(tenant)
        await self._eventually(lambda record: True)
        await self._request_forgotten_devices()
        await cluster.until(lambda: all(_at_rest(record) for record in cluster.ledger_store.records.values()), 300.0)

    async def _request_forgotten_devices(self) -> None:
        """Let a last claim get each device for which the kubelet will never call Unprepare."""
        cluster = self._cluster
        records = cluster.ledger_store.records.values()
        forgotten = {
            record.device
            for record in records
            for each in record.prepared_claims
            if each.uid not in cluster.kubelet.listed_claims
        }
        for device in sorted(forgotten):
            cluster.claims.admit(cluster.claims.allocate("acme-space", [device]), f"last-{device}")
        if forgotten:
            await self._eventually(lambda record: True)
            for tenant in cluster.kubelet.tenants:
                if tenant.listed:
                    cluster.kubelet.delete(tenant)
            await self._eventually(lambda record: True)

    def _end_pods_that_only_the_driver_named(self) -> None:
        """End, as an operator has to, what is left of pods for which the kubelet never listed their released claim."""
        cluster = self._cluster
        claims = [grant.claim for record in cluster.ledger_store.records.values() for grant in record.open_grants]
        named = {pod for each in claims if each and not each.is_prepared for pod in {*each.pods} - {*each.listed_pods}}
        for tenant in cluster.kubelet.tenants:
            if tenant.pod in named and tenant.gone_since is not None:
                for proc in cluster.process_table.living(tenant.pod.uid):
                    cluster.process_table.end(proc)

    def _delete_pods_of_failed_claims(self) -> None:
        """Delete, as their refusal tells their owner, pods that wait for a device which failed while it was prepared.

        The only pod of a claim need not be deleted before it has a process: it has to start by itself.
        """
        kubelet, claims = self._cluster.kubelet, self._cluster.claims
        failed = [each for each in kubelet.tenants if each.waiting and each.claim is not None and each.refusals]
        for tenant in failed:
            if "once the claim's pods are deleted" in tenant.refusals[-1].public_message:
                tenants = claims.claim_of(tenant).tenants
                if len([each for each in tenants if each.listed]) == 1 and not kubelet.has_processes(tenants):
                    continue
                for each in tenants:
                    if each.listed and not each.complete:
                        kubelet.delete(each)

    def _scrub_forgotten_devices_of_pods(self) -> None:
        """Scrub, as its refusal tells an operator, each device of a forgotten claim for which a plugin's pod waits."""
        service = self._cluster.service
        for tenant in self._cluster.kubelet.tenants:
            if service is None or not tenant.waiting or tenant.claim is not None or not tenant.refusals:
                continue
            if tenant.refusals[-1].code == ErrorCode.PREPARED_FOR_CLAIM and "`scrubber scrub`" in str(
                tenant.refusals[-1]
            ):
                for device in tenant.devices:
                    start_outside_service(_quietly(service.scrub(device)), "person")

    def _needs_an_operator(self, record: DeviceRecord) -> bool:
        """Return whether the device needs an operator, or rests until the next day (an operator need not wait)."""
        if record.health is Health.CONDEMNED:
            return True
        if record.health is not Health.QUARANTINED or record.cause is None:
            return False
        rests = (record.retry_at or 0.0) > self._cluster.clock.wall() + DEFAULT.recovery.max_backoff
        return rests or record.cause.by_operator or record.cause.recovery_method is RecoveryMethod.OPERATOR

    async def _eventually(self, counts: Callable[[DeviceRecord], bool]) -> None:
        """Wait until every pod that waits for such devices is started, and these are clean or in use."""
        cluster = self._cluster
        waiting: list[Tenant] = []
        dirty: list[str] = []
        for _ in range(120):
            await cluster.run(5.0)
            cluster.check_laws()
            self._delete_pods_of_failed_claims()
            self._end_pods_that_only_the_driver_named()
            self._scrub_forgotten_devices_of_pods()
            owed = {device for device, record in cluster.ledger_store.records.items() if counts(record)}
            waiting = [each for each in cluster.kubelet.tenants if each.waiting and owed.issuperset(each.devices)]
            # A pod that waits for a device which an operator has to release keeps its other devices as they are.
            kept = {device for each in cluster.kubelet.tenants if each.waiting for device in each.devices} - {
                device for each in waiting for device in each.devices
            }
            at_rest = (Hygiene.CLEAN, Hygiene.IN_USE)
            dirty = [each for each in owed - kept if cluster.ledger_store.records[each].hygiene not in at_rest]
            if cluster.laws.breaches or (not waiting and not dirty and cluster.serving):
                return
        pods = [(each.pod.name, each.devices, [str(why) for why in each.refusals[-1:]]) for each in waiting]
        states = {device: record.state for device, record in cluster.ledger_store.records.items()}
        raise AssertionError(f"waiting for ever: {pods}; never clean: {dirty}; {states}")


async def _quietly(work: Coroutine[Any, Any, object]) -> None:
    """Do the work of an operator who accepts a refusal."""
    try:
        await work
    except (ScrubberError, Gone):
        return


def _at_rest(record: DeviceRecord) -> bool:
    """Return whether it is clean, or assigned to an unidentified pod: only the next hand-over checks such a device."""
    return record.state == "clean" or any(grant.pod is None for grant in record.open_grants)


def _needs_reboot(record: DeviceRecord) -> bool:
    return (
        record.health is Health.QUARANTINED
        and record.cause is not None
        and record.cause.recovery_method is RecoveryMethod.REBOOT
    )
