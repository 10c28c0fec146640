"""A kubelet and its pods: allocation, PreStart before every start, retries, forced deletions, untrusted readings."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from scrubber.domain.assignment import Assignment, KubeletReading, ListedClaim, Pod, Trust
from scrubber.domain.errors import ScrubberError
from tests.simulation.life import start_outside_service
from tests.simulation.process_table import Proc, ProcessTable

__all__ = ["RETRY_AFTER", "START_SECONDS", "Gone", "Kubelet", "Tenant"]

PRE_START_DEADLINE = 30.0
RETRY_AFTER = 2.0
START_SECONDS = 0.05
COMPLETED_STAYS_LISTED = 1.5


class Gone(Exception):
    """The service is not running, or ended before it answered."""


@dataclass(slots=True, eq=False)
class Tenant:
    """A pod, with the state of the kubelet and of the machine.

    Attributes:
        devices: of its GPU containers; an init container passes them on to the main one.
        stages: names of the containers, in the order in which they run.
        starts_after: seconds from the answer of PreStart to the container's first process.
        opens_after: seconds from the start of a container until it opens the devices.
        starting: PreStart was answered, and the container is about to start.
        stage: index of the container that runs or waits for its start.
        starts: how many of its containers were started.
        running: whether its current container has been started and its first process has not ended.
        complete: its last container ended and is not restarted.
        gone_since: when the kubelet removed it; None while the kubelet has it.
        unnamed: it was granted devices while no source could identify it, so that its leftovers can be identified only
            by holding a device.
        unjudged: it was granted a device regardless of its state.
        refusals: errors of PreStart since the last start.
        claim: UID of the claim by which it has its devices; None where a device plugin assigned them.
    """

    pod: Pod
    devices: tuple[str, ...]
    stages: tuple[str, ...] = ("main",)
    starts_after: float = START_SECONDS
    opens_after: float = 0.0
    starting: bool = False
    stage: int = 0
    starts: int = 0
    running: bool = False
    complete: bool = False
    gone_since: float | None = None
    unnamed: bool = False
    unjudged: bool = False
    refusals: list[ScrubberError] = field(default_factory=list)
    claim: str | None = None
    sandbox: Proc | None = None
    first: Proc | None = None
    exited: asyncio.Event = field(default_factory=asyncio.Event)
    worker: asyncio.Task[None] | None = None

    @property
    def uid(self) -> str:
        assert self.pod.uid is not None
        return self.pod.uid

    @property
    def container(self) -> str:
        return self.stages[self.stage]

    @property
    def listed(self) -> bool:
        return self.gone_since is None

    @property
    def waiting(self) -> bool:
        """Return whether a container of it should be started and has not been."""
        return self.listed and not self.running and not self.complete


class Kubelet:
    """The kubelet of one node.

    Args:
        pre_start: requests the devices of a container; returns when they are granted.
        starting: called when the first process of a container exists, before it does anything.
        opened: called when a first process has opened all its devices.

    Attributes:
        trust: the trust of a reading now.
        starts: how often the kubelet was started, as its socket shows.
        delay: additional seconds for every query.
        longest_pause: maximum seconds between two attempts to start a container; pauses double up to this.
        unlogged: UIDs of pods whose containers' log files do not exist yet.
        without_logs: UIDs of pods whose log directories cannot be read.
        listed_claims: UIDs of the claims whose devices it knows, and lists.
        claim_ended: called when a pod with a claim ends, and whether its containers have ended; returns what to wait for
            before the pod is removed.
        claim_name: returns the driver and the name of a claim.
        can_create_container: returns whether the runtime finds the CDI files of a container, right before it starts.
        restarted: called when its memory is lost, and its checkpoint is not.
    """

    def __init__(
        self,
        process_table: ProcessTable,
        *,
        now: Callable[[], float],
        pre_start: Callable[[Tenant], Awaitable[None]],
        starting: Callable[[Tenant, Proc], None],
        opened: Callable[[Proc], None],
    ) -> None:
        self._process_table = process_table
        self._now = now
        self._pre_start = pre_start
        self._starting = starting
        self._opened = opened
        self.trust = Trust.TRUSTED
        self.starts = 1
        self.delay = 0.0
        self.longest_pause = RETRY_AFTER
        self.unlogged: set[str] = set()
        self.without_logs: set[str] = set()
        self.listed_claims: set[str] = set()
        self.claim_ended: Callable[[Tenant, bool], Awaitable[None] | None] = lambda tenant, ordered: None
        self.claim_name: Callable[[str], tuple[str, str]] = lambda uid: ("", uid)
        self.can_create_container: Callable[[Tenant], bool] = lambda tenant: True
        self.restarted: Callable[[], None] = lambda: None
        self.tenants: list[Tenant] = []
        self._uids = 0

    # -- pods ------------------------------------------------------------------------------------------------------

    def admit(
        self,
        namespace: str,
        name: str,
        devices: Iterable[str],
        *,
        init: bool = False,
        starts_after: float = START_SECONDS,
        opens_after: float = 0.0,
        starts: bool = True,
        claim: str | None = None,
    ) -> Tenant:
        """Admit a pod that was allocated ``devices``; its worker starts at once, unless the test sends its requests."""
        self._uids += 1
        tenant = Tenant(
            Pod(namespace, name, f"uid-{self._uids:04d}"),
            tuple(sorted(devices)),
            ("init", "main") if init else ("main",),
            starts_after,
            opens_after,
            claim=claim,
        )
        if claim is None:
            self._start_sandbox(tenant)
        self.tenants.append(tenant)
        if starts:
            self.start_worker(tenant)
        return tenant

    def start_worker(self, tenant: Tenant) -> None:
        """Start what runs the containers of ``tenant``."""
        tenant.worker = start_outside_service(self._work(tenant), f"pod {tenant.uid}")

    def _start_sandbox(self, tenant: Tenant) -> Proc:
        tenant.sandbox = self._process_table.start(tenant.uid, f"{tenant.uid}/sandbox", "", sandbox=True)
        return tenant.sandbox

    def has_processes(self, tenants: Iterable[Tenant]) -> bool:
        """Return whether one of ``tenants`` has a process, sandbox included."""
        return any(True for tenant in tenants for _ in self._process_table.living(tenant.uid))

    def free(self) -> list[str]:
        """Return the unallocated devices."""
        taken = {device for tenant in self.tenants if tenant.listed for device in tenant.devices}
        return sorted(self._process_table.gpus.keys() - taken)

    def of(self, uid: str | None) -> Tenant | None:
        return next((tenant for tenant in self.tenants if tenant.uid == uid), None)

    async def _work(self, tenant: Tenant) -> None:
        """Start, wait for the end, restart: until the pod is removed."""
        pause = RETRY_AFTER
        while True:
            try:
                async with asyncio.timeout(PRE_START_DEADLINE):
                    await self._pre_start(tenant)
            except (ScrubberError, Gone, TimeoutError) as refusal:
                if isinstance(refusal, ScrubberError):
                    tenant.refusals.append(refusal)
                await asyncio.sleep(pause)
                pause = min(self.longest_pause, pause * 2)
                continue
            pause = RETRY_AFTER
            sandbox = tenant.sandbox or self._start_sandbox(tenant)  # the claims of a pod are prepared before it
            tenant.starting = True
            await asyncio.sleep(tenant.starts_after)
            tenant.starting = False
            if not sandbox.alive:
                return
            if not self.can_create_container(tenant):
                await asyncio.sleep(RETRY_AFTER)
                continue
            self._start(tenant)
            await asyncio.sleep(tenant.opens_after)
            if tenant.first is not None and tenant.first.alive:
                for device in tenant.devices:
                    self._process_table.open(tenant.first, device)
                self._opened(tenant.first)
            await tenant.exited.wait()

    def _start(self, tenant: Tenant) -> None:
        tenant.refusals.clear()
        tenant.starts += 1
        container = f"{tenant.uid}/{tenant.container}#{tenant.starts}"
        label = f"{tenant.pod.namespace}/{container}"
        devices = frozenset(tenant.devices)
        tenant.first = self._process_table.start(tenant.uid, container, label, mounted=devices, first=True)
        tenant.running = True
        tenant.exited.clear()
        self._starting(tenant, tenant.first)

    def retry_pre_start(self, tenant: Tenant) -> None:
        """Give up the current call (its deadline, or a kubelet restart), and make the next one."""
        assert tenant.waiting
        self._cancel(tenant)
        tenant.worker = start_outside_service(self._work(tenant), f"pod {tenant.uid}")

    def exit(self, tenant: Tenant, *, again: bool) -> None:
        """End the first process; the next stage or (``again``) the same container follows, or the pod is complete."""
        assert tenant.running
        assert tenant.first is not None
        self._process_table.end(tenant.first)
        tenant.running = False
        if tenant.stage + 1 < len(tenant.stages) and not again:
            tenant.stage += 1
        elif not again:
            self._cancel(tenant)
            tenant.complete = True
            start_outside_service(self._complete(tenant), f"completed {tenant.uid}")
        tenant.exited.set()

    async def _complete(self, tenant: Tenant) -> None:
        await asyncio.sleep(COMPLETED_STAYS_LISTED)
        self._tear_down(tenant)
        await self._remove(tenant)

    async def _remove(self, tenant: Tenant) -> None:
        """Remove a pod whose containers have ended, after its claim was unprepared."""
        pending = None if tenant.claim is None else self.claim_ended(tenant, True)
        if pending is not None:
            await pending
        self._give_up(tenant)

    def delete(self, tenant: Tenant) -> None:
        """Delete with grace: the processes end before the kubelet removes the pod; escaped children live on."""
        self._cancel(tenant)
        self._tear_down(tenant)
        if tenant.claim is None:
            self._give_up(tenant)
        elif not tenant.complete:
            tenant.complete = True
            start_outside_service(self._remove(tenant), f"removal {tenant.uid}")

    def force_delete(self, tenant: Tenant, lives_on: float) -> None:
        """Remove the pod from the kubelet at once; its processes live on, and a pending start may still happen."""
        if not tenant.starting:
            self._cancel(tenant)
        self._give_up(tenant)
        if tenant.claim is not None:
            self.claim_ended(tenant, False)

        async def end() -> None:
            await asyncio.sleep(lives_on)
            self._tear_down(tenant)

        start_outside_service(end(), f"dying {tenant.uid}")

    def _cancel(self, tenant: Tenant) -> None:
        tenant.starting = False
        if tenant.worker is not None:
            tenant.worker.cancel()

    def _give_up(self, tenant: Tenant) -> None:
        if tenant.gone_since is None:
            tenant.gone_since = self._now()
            self._process_table.removed_pods.add(tenant.uid)

    def _tear_down(self, tenant: Tenant) -> None:
        for proc in (tenant.first, tenant.sandbox):
            if proc is not None:
                self._process_table.end(proc)

    def remake_sandbox(self, tenant: Tenant) -> None:
        """Recreate the pod's sandbox under the same UID; its containers end with the old one."""
        assert tenant.sandbox is not None
        self._process_table.end(tenant.sandbox)
        tenant.sandbox = self._process_table.start(tenant.uid, f"{tenant.uid}/sandbox-2", "", sandbox=True)

    def reboot(self) -> None:
        """End every process; the remaining pods start from the beginning."""
        self.restarted()
        for tenant in self.tenants:
            self._cancel(tenant)
        for proc in self._process_table.living():
            proc.killable = True
            self._process_table.end(proc)
        for tenant in self.tenants:
            if not tenant.listed:
                continue
            if tenant.complete:
                if tenant.claim is None:
                    self._give_up(tenant)
                continue  # its claim is being unprepared
            tenant.running, tenant.starting, tenant.stage = False, False, 0
            tenant.sandbox = None
            if tenant.claim is None:
                self._start_sandbox(tenant)
            tenant.worker = start_outside_service(self._work(tenant), f"pod {tenant.uid}")

    def restart(self) -> None:
        """Start the kubelet again: its memory is lost, its checkpoint is not."""
        self.starts += 1
        self.restarted()

    def starts_of(self, pod: Pod) -> Mapping[str, int] | None:
        """Return how often each container of ``pod`` was started, according to its logs; None if they cannot be read."""
        if pod.uid in self.without_logs:
            return None
        if pod.uid in self.unlogged:
            return {}
        mine = (proc for proc in self._process_table.procs.values() if proc.pod == pod.uid and proc.first)
        return Counter(proc.container.rpartition("/")[2].partition("#")[0] for proc in mine)

    # -- data sources ----------------------------------------------------------------------------------------------

    def reading(self) -> KubeletReading:
        """Return the current contents of PodResources and the checkpoint."""
        now = self._now()
        if self.trust is Trust.UNREADABLE:
            return KubeletReading(self.trust, started_at=now, untrusted_reason="the kubelet does not answer")
        alive = [tenant for tenant in self.tenants if tenant.listed]
        main = tuple(
            Assignment(
                tenant.pod,
                "main",
                frozenset(tenant.devices if tenant.claim is None or tenant.claim in self.listed_claims else ()),
                "" if tenant.claim is None else self.claim_name(tenant.claim)[0],
            )
            for tenant in alive
        )
        claims = tuple(
            ListedClaim(
                tenant.pod, self.claim_name(tenant.claim)[0], tenant.pod.namespace, self.claim_name(tenant.claim)[1]
            )
            for tenant in alive
            if tenant.claim in self.listed_claims and tenant.claim is not None
        )
        init = tuple(
            Assignment(tenant.pod, "init", frozenset(tenant.devices)) for tenant in alive if "init" in tenant.stages
        )
        if self.trust is Trust.EMPTY_AFTER_RESTART:
            reason = "the kubelet has just started and lists nothing"
            return KubeletReading(self.trust, (), (*main, *init), now, reason, kubelet_instance=str(self.starts))
        return KubeletReading(self.trust, main, init, now, kubelet_instance=str(self.starts), claims=claims)
