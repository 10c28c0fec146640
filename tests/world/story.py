"""Scenarios: everything that can happen in a world, as acts with choices, and the repair at the end of a scenario.

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
from scrubber.domain.errors import ScrubberError
from scrubber.domain.evidence import PathKind
from scrubber.domain.handover_kind import HandOverKind
from scrubber.domain.policy import BreakerRule, Policy, RequiredProof, ResetMode
from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import Health, Hygiene, RecoveryMethod
from tests.world.faults import befall
from tests.world.kubelet import START_SECONDS, Gone, Tenant
from tests.world.life import in_the_world
from tests.world.matter import Proc
from tests.world.service import Pace
from tests.world.timeline import Livelock, VirtualLoop
from tests.world.vault import CrashPoint
from tests.world.world import DEFAULT, World

__all__ = ["DEVICES", "POLICIES", "Plot", "Step", "Story", "shortest", "tell"]

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
    """One act by the name of a method of :class:`Story`, its choices, and the seconds that pass after it."""

    act: str
    choices: dict[str, Any]
    then: float

    def __str__(self) -> str:
        chosen = ", ".join(f"{name}={value!r}" for name, value in self.choices.items())
        return f"{self.act}({chosen}), then {self.then:g} s"


Plot = tuple[Step, ...]


def tell(policy: str, plot: Plot) -> str | None:
    """Play ``plot`` in a new world, and repair that at the end; return the first failure, or None."""
    story = Story(replace(POLICIES[policy], breaker=MANY_RESETS))
    try:
        return story.play(plot)
    finally:
        story.close()


def shortest(policy: str, plot: Plot, *, tries: int = 300) -> Plot:
    """Return ``plot`` without the steps that its failure does not need."""
    wanted = _manner(tell(policy, plot))
    size = max(1, len(plot) // 2)
    while tries > 0:
        left_out, at = False, 0
        while at < len(plot) and tries > 0:
            candidate, tries = plot[:at] + plot[at + size :], tries - 1
            if _manner(tell(policy, candidate)) == wanted:
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


class Story:
    """One world and every possible act in it. A service that died is restarted by its supervisor."""

    def __init__(self, policy: Policy, devices: int = DEVICES, pace: Pace | None = None) -> None:
        self._loop = VirtualLoop()
        self._hosts: list[Proc] = []
        self._away = SUPERVISOR_WAITS
        self.world: World

        async def begin() -> None:
            self.world = World(devices, policy, pace=pace)
            await self.world.start_service()
            in_the_world(self._supervise(), "supervisor")

        self._loop.run_until_complete(begin())

    async def _supervise(self) -> None:
        while True:
            await asyncio.sleep(self._away)
            self._away = SUPERVISOR_WAITS
            if not self.world.serving:
                await self.world.start_service()

    def play(self, plot: Plot) -> str | None:
        """Play every step, then repair the world; stop at the first failure and return it."""
        try:
            for step in plot:
                self._loop.run_until_complete(self._act(step))
                if self.world.laws.breaches:
                    break
            else:
                self._loop.run_until_complete(self.ends())
        except (AssertionError, Livelock) as wrong:
            return self.world.laws.breaches[0] if self.world.laws.breaches else f"{type(wrong).__name__}: {wrong}"
        return self.world.laws.breaches[0] if self.world.laws.breaches else None

    async def ends(self) -> None:
        """Repair the world, and let every waiting pod start."""
        await _EndWell(self).tell()

    async def _act(self, step: Step) -> None:
        acted = getattr(self, step.act)(**step.choices)
        if asyncio.iscoroutine(acted):
            await acted
        await asyncio.sleep(step.then)
        self.world.look()

    def close(self) -> None:
        """End every task of this world."""
        self._loop.run_until_complete(self.world.end())
        self._loop.close()
        assert [each for each in self._loop.unheard if "Killed(" not in each] == []

    # -- pods ------------------------------------------------------------------------------------------------------

    async def a_pod_is_admitted(self, namespace: str, name: str, wants: int, kind: str) -> None:
        """Admit a pod.

        ``kind``: plain, init (an init container uses the devices first), late (to start) or slow (to open them).
        """
        world = self.world
        free = [device for device in world.kubelet.free() if self._advertised(device)]
        numbers = [list(world.matter.gpus).index(device) for device in free[:wants]]
        names = {(each.pod.namespace, each.pod.name) for each in world.kubelet.tenants if each.listed}
        if numbers and (namespace, name) not in names:
            starts_after = 2.0 if kind == "late" else START_SECONDS
            opens_after = 3.0 if kind == "slow" else 0.0
            await world.admit(
                namespace, name, numbers, init=kind == "init", starts_after=starts_after, opens_after=opens_after
            )

    async def a_pod_follows_another(self, namespace: str, wants: int, writes: bool, lives_on: float) -> None:
        """Delete the oldest pod by force; it lives on, and its devices go to the next one at once."""
        tenant = self._listed(0)
        if tenant is not None:
            if writes:
                self.world.write_all(tenant)
            self.world.kubelet.force_delete(tenant, lives_on)
        await self.a_pod_is_admitted(namespace, "follower-0", wants, "plain")

    def a_pod_writes_everywhere(self, choice: int) -> None:
        tenants = [tenant for tenant in self.world.kubelet.tenants if any(self.world.matter.living(tenant.uid))]
        if tenants:
            self.world.write_all(tenants[choice % len(tenants)])

    def a_container_exits(self, choice: int, again: bool, writes: bool, child: str) -> None:
        """End a container. ``child``: none is left behind, one that holds the devices, or one that has closed them."""
        tenant = self._running(choice)
        if tenant is not None:
            if writes:
                self.world.write_all(tenant)
            self._leave_behind(tenant, child)
            self.world.kubelet.exit(tenant, again=again)

    def a_pod_is_deleted(self, choice: int, lives_on: float | None, child: str) -> None:
        tenant = self._listed(choice)
        if tenant is None:
            return
        if tenant.running:
            self._leave_behind(tenant, child)
        if lives_on is None:
            self.world.kubelet.delete(tenant)
        else:
            self.world.kubelet.force_delete(tenant, lives_on)

    def _leave_behind(self, tenant: Tenant, child: str) -> None:
        if child != "none" and tenant.first is not None and tenant.first.alive:
            left = self.world.matter.fork(tenant.first)
            if child == "lets-go" and not tenant.unnamed:
                left.holds.clear()

    def a_child_exits_by_itself(self, choice: int) -> None:
        children = [proc for proc in self.world.matter.living() if not proc.first and not proc.sandbox and proc.pod]
        if children:
            self.world.matter.end(children[choice % len(children)])

    def the_kubelet_gives_up_a_call_and_asks_again(self, choice: int) -> None:
        waiting = [tenant for tenant in self.world.kubelet.tenants if tenant.waiting]
        if waiting:
            self.world.kubelet.ask_again(waiting[choice % len(waiting)])

    def _advertised(self, device: str) -> bool:
        record = self.world.vault.records.get(device)
        return record is None or record.advertised

    def _listed(self, choice: int) -> Tenant | None:
        listed = [tenant for tenant in self.world.kubelet.tenants if tenant.listed and not tenant.complete]
        return listed[choice % len(listed)] if listed else None

    def _running(self, choice: int) -> Tenant | None:
        running = [tenant for tenant in self.world.kubelet.tenants if tenant.listed and tenant.running]
        return running[choice % len(running)] if running else None

    # -- faults ----------------------------------------------------------------------------------------------------

    def the_kubelet_can_be_trusted_or_not(self, trust: str) -> None:
        self.world.kubelet.trust = Trust(trust)

    def a_device_fails(self, number: int, fault: str, told: bool) -> None:
        """Let a device fail. ``told``: whether the driver reports it, or the next check has to find it."""
        befall(self.world, number, fault)
        if told:
            self.world.signal(number)

    def a_device_leaves_the_node_or_comes_back(self, number: int, there: bool, told: bool) -> None:
        """Remove or return a device, like an instance of a repartitioned GPU, or a pulled GPU.

        ``told``: whether the driver reports it.
        """
        gpu = self.world.gpu(number)
        gpu.listed, gpu.lost = there, not there
        if told and self.world.serving:
            self.world.node.devices.inventory_changed.set()

    def a_device_is_well_again(self, number: int) -> None:
        self.world.gpu(number).mend()
        self.world.unreadable.discard(self.world.gpu(number).id)

    def the_machine_fails(self, choice: int, what: str) -> None:
        world, tenant = self.world, self._listed(choice)
        procs = [proc for proc in world.matter.living() if not proc.sandbox and proc.pod is not None]
        match what:
            case "untold" if tenant is not None:
                world.unreadable.add(tenant.uid)
            case "unkillable" if procs:
                procs[choice % len(procs)].killable = False
            case "erasers":
                world.erasers.unkillable = not world.erasers.unkillable
            case "disk":
                world.vault.refuses = "the disk is full" if world.vault.refuses is None else None

    def a_process_of_the_host_looks_at_a_device(self, number: int, opens: bool) -> None:
        if not opens:
            self.hosts_leave()
            return
        host = self.world.matter.start(None, "", "host")
        self.world.matter.open(host, self.world.gpu(number).id)
        self._hosts.append(host)

    def a_stranger_writes_on_a_device(self, number: int, stays: float) -> None:
        """Let an unauthorized process write on an unassigned device.

        It stays long enough to be noticed (0: while the whole service stalls).
        """
        world, gpu = self.world, self.world.gpu(number)
        users = [proc for proc in world.matter.living() if gpu.id in proc.mounted and not proc.sandbox]
        starting = any(tenant.starting and gpu.id in tenant.devices for tenant in world.kubelet.tenants)
        if users or starting or gpu.id not in world.kubelet.free():
            return
        if not stays:
            world.pause(12.0)
        stranger = world.matter.start(None, "", "host/stranger/x#1")
        world.matter.open(stranger, gpu.id)
        world.matter.write(stranger, gpu.id)

        async def leave() -> None:
            await asyncio.sleep(stays)
            world.matter.end(stranger)

        if stays:
            in_the_world(leave(), f"stranger {stranger.pid}")
        else:
            world.matter.end(stranger)

    def the_kubelet_starts_again(self) -> None:
        self.world.kubelet.starts += 1

    def hosts_leave(self) -> None:
        """End all processes of the host."""
        for host in self._hosts:
            self.world.matter.end(host)
        self._hosts.clear()

    # -- operators -------------------------------------------------------------------------------------------------

    def a_person_acts(self, number: int, wants: str) -> None:
        service, device = self.world.service, self.world.gpu(number).id
        if service is None or not self.world.serving:
            return
        match wants:
            case "out":
                service.life.start(_quietly(service.node.actions.quarantine(device, "because", "uid:0")), "person")
            case "glass":
                service.life.start(
                    _quietly(service.node.actions.break_glass(device, 600.0, "because", "uid:0")), "person"
                )
            case "back":
                service.life.start(_quietly(service.node.actions.unquarantine(device, "because", "uid:0")), "person")
            case _:
                in_the_world(_quietly(service.scrub(device, PathKind(wants))), "person")

    # -- the service -----------------------------------------------------------------------------------------------

    async def the_service_ends(self, away: float, how: str) -> None:
        """End the service. ``away``: seconds until it is restarted."""
        if how == "reboot":
            self.world.reboot()
        elif how == "stop" and self.world.serving:
            assert self.world.service is not None
            await self.world.service.stop()
        else:
            self.world.kill()
        self._away = away

    def the_service_will_be_killed_at_a_write(self, writes: int, durable: bool) -> None:
        self.world.vault.point = CrashPoint(writes, durable)

    def mend(self) -> None:
        """Remove every fault of devices and of the machine."""
        world = self.world
        world.vault.point, world.vault.refuses = None, None
        world.kubelet.trust = Trust.TRUSTED
        world.unreadable.clear()
        world.erasers.unkillable = False
        for erasing in world.erasers.running.values():
            erasing.killable = True
        for gpu in world.matter.gpus.values():
            gpu.mend()
        if world.serving:
            world.node.devices.inventory_changed.set()
        self.hosts_leave()
        for proc in world.matter.living():
            proc.killable = True
            tenant = world.kubelet.of(proc.pod)
            if tenant is None or proc.sandbox:
                continue
            current = tenant.running and proc is tenant.first
            if (tenant.listed and not current) or (tenant.unnamed and not tenant.listed):
                # Leftovers of a living pod are its own to end, and for an unidentified pod nothing can be proved.
                world.matter.end(proc)


class _EndWell:
    """Ends faults, restores trusted data, runs a service: after a while every waiting pod starts."""

    def __init__(self, story: Story) -> None:
        self._story = story
        self._world = story.world

    async def tell(self) -> None:
        world = self._world
        self._story.mend()
        await world.run(10.0)  # pending events have arrived
        if any(_needs_reboot(record) for record in world.vault.records.values()):
            world.reboot()
        await self._eventually(lambda record: not self._for_a_person(record))
        for device, record in list(world.vault.records.items()):
            if self._for_a_person(record):
                await world.node.actions.unquarantine(device, "looked at", "uid:0")
        await self._eventually(lambda record: True)
        for tenant in world.kubelet.tenants:
            if tenant.listed:
                world.kubelet.delete(tenant)
        await self._eventually(lambda record: True)
        await world.until(lambda: all(_at_rest(record) for record in world.vault.records.values()), 300.0)

    def _for_a_person(self, record: DeviceRecord) -> bool:
        """Return whether the device needs an operator, or rests until the next day (an operator need not wait)."""
        if record.health is Health.CONDEMNED:
            return True
        if record.health is not Health.QUARANTINED or record.cause is None:
            return False
        rests = (record.retry_at or 0.0) > self._world.clock.wall() + DEFAULT.recovery.max_backoff
        return rests or record.cause.by_operator or record.cause.recovery_method is RecoveryMethod.OPERATOR

    async def _eventually(self, counts: Callable[[DeviceRecord], bool]) -> None:
        """Wait until every pod that waits for such devices is started, and these are clean or in use."""
        world = self._world
        waiting: list[Tenant] = []
        dirty: list[str] = []
        for _ in range(120):
            await world.run(5.0)
            world.look()
            owed = {device for device, record in world.vault.records.items() if counts(record)}
            waiting = [each for each in world.kubelet.tenants if each.waiting and owed.issuperset(each.devices)]
            # A pod that waits for a device which an operator has to release keeps its other devices as they are.
            kept = {device for each in world.kubelet.tenants if each.waiting for device in each.devices} - {
                device for each in waiting for device in each.devices
            }
            at_rest = (Hygiene.CLEAN, Hygiene.IN_USE)
            dirty = [each for each in owed - kept if world.vault.records[each].hygiene not in at_rest]
            if world.laws.breaches or (not waiting and not dirty and world.serving):
                return
        told = [(each.pod.name, each.devices, [str(why) for why in each.refusals[-1:]]) for each in waiting]
        states = {device: record.state for device, record in world.vault.records.items()}
        raise AssertionError(f"waiting for ever: {told}; never clean: {dirty}; {states}")


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
