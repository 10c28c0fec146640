"""A kubelet that runs pods of several containers, according to ``facts/kubelet.md`` and the kubelet's source.

- All containers are allocated at admission, in order. Devices of an ordinary init container are passed on to later
  containers that request the same resource; a sidecar and a main container keep theirs.
- The sandbox exists in a separate cgroup before any container does. Init containers start one after another, each when
  the one before has succeeded or, a sidecar, runs; then the main containers, one after another; a refused one does not
  delay the others. Every start of a container has a separate cgroup, in which the runtime's helper comes first.
- ``PreStartContainer`` is called before every start of a container that has devices, once per resource. After a refusal
  it is called again after 0.4 s, and then every 12 to 15 s. A start can still fail after it.
- A container that ends is restarted according to the policy: at once, and after 10 s and more when it keeps ending.
- A deleted pod ends its main containers, then its sidecars from the last to the first, then its sandbox.
- PodResources lists native sidecars and main containers of active pods; ordinary init containers are in the checkpoint
  only.
- A restarted kubelet lists nothing at first. While its plugin has not registered it starts containers without calling
  it; a pod with a device whose container does not run fails permanently then, including a completed init container.
- A reboot ends every process. Pods start from the beginning, in a new sandbox; under Never they fail.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from scrubber.domain.assignment import Assignment, KubeletReading, Pod, Share, Trust
from scrubber.domain.errors import ScrubberError
from tests.simulation.kubelet import PRE_START_DEADLINE, Gone, Kubelet, Tenant
from tests.simulation.life import start_outside_service
from tests.simulation.process_table import Proc, ProcessTable
from tests.simulation.shapes.shape import Kind, Policy, Shape

__all__ = ["RESOURCES", "SHARED", "Container", "ShapedKubelet", "ShapedPod", "State"]

SHARED = "scrubber.dev/gpu.shared"
RESOURCES = {"G": "scrubber.dev/gpu", "O": "scrubber.dev/other", "S": SHARED}
"""The resource of each kind of device."""
SHARES = 10
FIRST_RETRY = 0.4
RETRY = (12.0, 15.0)
FIRST_CRASH_DELAY, LONGEST_CRASH_DELAY = 10.0, 300.0
CREATION = 0.05
"""Seconds from the answer of PreStart to a container's first process."""
TERMINATION = 0.3
LEAVES_LIST = 0.1
COMPLETED_LEAVES_LIST = 1.7
KUBELET_STARTS = 0.5
"""Seconds from the end of a kubelet until the next one takes over its pods."""
LISTS_NOTHING = 1.5


class State(Enum):
    """State of a container, in the present sandbox."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Container:
    """One container of a pod.

    Attributes:
        ids: by resource, the kubelet's ids of its allocation.
        devices: the devices of these ids.
        runs: how often it was started, over all sandboxes.
        sandbox: the number of the sandbox that it ran in last.
        granted: PreStart was answered for the present run, or was not necessary.
        stillborn: how many starts still have to fail after PreStart was answered.
        not_before: the kubelet does not retry before.
        refusal: the last error of PreStart.
    """

    name: str
    kind: Kind
    ids: Mapping[str, tuple[str, ...]]
    devices: frozenset[str]
    state: State = State.WAITING
    exit_code: int | None = None
    runs: int = 0
    first: Proc | None = None
    granted: bool = True
    stillborn: int = 0
    not_before: float = 0.0
    refusals: int = 0
    refusal: str = ""
    crash_delay: float = 0.0
    sandbox: int = 0

    def forgotten(self) -> None:
        """Reset the backoff: a restarted kubelet remembers no earlier attempt."""
        self.not_before, self.refusals, self.crash_delay = 0.0, 0, 0.0


@dataclass(slots=True, eq=False)
class ShapedPod(Tenant):
    """A pod of several containers; ``devices`` are those of all of them.

    Attributes:
        over: it ended permanently, or is being deleted: none of its containers is started any more.
        failed: why the kubelet failed it; empty if it did not.
    """

    policy: Policy = Policy.ALWAYS
    boxes: tuple[Container, ...] = ()
    pauses: int = 1
    over: bool = False
    failed: str = ""
    sandboxes: int = 0
    pausing: list[Proc] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    creating: asyncio.Task[None] | None = None

    @property
    def inits(self) -> tuple[Container, ...]:
        return tuple(each for each in self.boxes if each.kind is not Kind.MAIN)

    @property
    def mains(self) -> tuple[Container, ...]:
        return tuple(each for each in self.boxes if each.kind is Kind.MAIN)

    def restarts(self, main: Container) -> bool:
        """Return whether a main container that has ended is restarted."""
        return self.policy is Policy.ALWAYS or (self.policy is Policy.ON_FAILURE and main.exit_code != 0)

    @property
    def waits_for(self) -> list[Container]:
        """Return containers that should run, or succeed, and have not yet; none of a pod that is over."""
        if self.over:
            return []
        found = []
        for each in self.boxes:
            if each.kind is Kind.INIT:
                done = each.state is State.ENDED and each.exit_code == 0
            elif each.kind is Kind.SIDECAR:
                done = each.state is State.RUNNING
            else:
                done = each.state is State.RUNNING or (each.state is State.ENDED and not self.restarts(each))
            if not done:
                found.append(each)
        return found


class ShapedKubelet(Kubelet):
    """The kubelet of one node.

    Args:
        resources: by resource, the ids of its devices.
        pre_start: calls the plugin; returns when the devices are granted.
        container_starts: called when a container's first process exists, before it does anything.
        happened: called with the description of every event, as it happens.

    Attributes:
        registered: whether the plugin has registered with the present kubelet.
        down: whether no kubelet is running now.
    """

    def __init__(
        self,
        process_table: ProcessTable,
        *,
        now: Callable[[], float],
        resources: Mapping[str, tuple[str, ...]],
        pre_start: Callable[[ShapedPod, Container, str], Coroutine[Any, Any, None]],
        container_starts: Callable[[ShapedPod, Container], None],
        happened: Callable[[str], None],
        seed: str,
    ) -> None:
        async def unused(tenant: Tenant) -> None:
            raise AssertionError("a pod of several containers is requested container by container")

        super().__init__(process_table, now=now, pre_start=unused, starting=lambda *_: None, opened=lambda _: None)
        self._resources = resources
        self._request_start = pre_start
        self._container_starts = container_starts
        self._happened = happened
        self._rng = random.Random(seed)
        self._calls: set[asyncio.Task[None]] = set()
        self.pods: list[ShapedPod] = []
        self.registered = True
        self.down = False

    # -- admission -------------------------------------------------------------------------------------------------

    def allocate(self, shape: Shape) -> list[dict[str, tuple[str, ...]]]:
        """Return the allocation of each container of ``shape``, by resource."""
        taken = {id_ for pod in self.pods if pod.listed for box in pod.boxes for ids in box.ids.values() for id_ in ids}
        reusable: dict[str, list[str]] = {}
        found: list[dict[str, tuple[str, ...]]] = []
        for box in shape:
            if box.device not in RESOURCES:
                found.append({})
                continue
            resource = RESOURCES[box.device]
            again = reusable.setdefault(resource, [])
            id_ = again[0] if again else next(each for each in self._resources[resource] if each not in taken)
            taken.add(id_)
            if box.kind is Kind.INIT and id_ not in again:
                again.append(id_)
            elif box.kind is not Kind.INIT and id_ in again:
                again.remove(id_)
            found.append({resource: (id_,)})
        return found

    def take(
        self,
        pod: Pod,
        shape: Shape,
        allocated: list[dict[str, tuple[str, ...]]],
        policy: Policy,
        *,
        pauses: int = 1,
        stillborn: bool = False,
    ) -> ShapedPod:
        """Admit a pod with this allocation; its worker starts."""
        boxes = []
        for number, (box, ids) in enumerate(zip(shape, allocated, strict=True)):
            devices = frozenset(id_.partition("::")[0] for each in ids.values() for id_ in each)
            boxes.append(Container(f"c{number}", box.kind, ids, devices, stillborn=int(stillborn and bool(devices))))
        everything = tuple(sorted({device for each in boxes for device in each.devices}))
        taken = ShapedPod(pod, everything, policy=policy, boxes=tuple(boxes), pauses=pauses)
        self.tenants.append(taken)
        self.pods.append(taken)
        self._take_up(taken)
        return taken

    def _take_up(self, pod: ShapedPod) -> None:
        pod.worker = start_outside_service(self._look_after(pod), f"pod {pod.uid}")

    def _set_up(self, pod: ShapedPod) -> None:
        pod.sandboxes += 1
        name = _opaque(f"{pod.uid}/sandbox-{pod.sandboxes}")
        pod.pausing = [self._process_table.start(pod.uid, name, "", sandbox=True) for _ in range(pod.pauses)]
        pod.sandbox = pod.pausing[0]

    # -- the pod's worker ------------------------------------------------------------------------------------------

    async def _look_after(self, pod: ShapedPod) -> None:
        """Start every container that is due, repeatedly, until the pod is over."""
        if pod.creating is not None:
            await asyncio.wait({pod.creating})
        if not pod.pausing:
            self._set_up(pod)
        while not pod.over:
            pod.wake.clear()
            inits, mains = self._to_start(pod)
            for each in inits:
                if not await self._start_box(pod, each) and each.kind is Kind.INIT:
                    break
            for each in mains:
                await self._start_box(pod, each)
            if self._complete_now(pod):
                pod.over = True
                start_outside_service(self._ends(pod, completed=True), f"completed {pod.uid}")
                return
            if not pod.wake.is_set():
                await self._wait(pod)

    async def _wait(self, pod: ShapedPod) -> None:
        inits, mains = self._to_start(pod)
        due = min((each.not_before for each in (*inits, *mains)), default=None)
        left = None if due is None else max(0.0, due - self._now())
        try:
            async with asyncio.timeout(left):
                await pod.wake.wait()
        except TimeoutError:
            return

    def _to_start(self, pod: ShapedPod) -> tuple[list[Container], list[Container]]:
        """Return the init containers and main containers that should be started now."""
        # Ends in an earlier sandbox do not count in this one: its init containers run again.
        begun_here = [each for each in pod.mains if each.state is not State.WAITING and each.sandbox == pod.sandboxes]
        inits, initialized = pod.inits, bool(begun_here)
        begun = [number for number, each in enumerate(inits) if each.state is not State.WAITING]
        due: list[Container] = []
        if not initialized and inits:
            last = inits[begun[-1]] if begun else None
            if last is None:
                return [inits[0]], []
            due = [each for each in inits[: begun[-1]] if each.kind is Kind.SIDECAR and each.state is State.ENDED]
            past = last.state is State.RUNNING if last.kind is Kind.SIDECAR else (last.exit_code == 0)
            if not past and last.state is State.RUNNING:
                return due, []
            if not past:
                return [*due, last], []
            if last is not inits[-1]:
                return [*due, inits[begun[-1] + 1]], []
        elif inits:
            due = [each for each in inits if each.kind is Kind.SIDECAR and each.state is not State.RUNNING]
        mains = [
            each
            for each in pod.mains
            if each.state is State.WAITING or (each.state is State.ENDED and pod.restarts(each))
        ]
        return due, mains

    def _complete_now(self, pod: ShapedPod) -> bool:
        return all(each.state is State.ENDED and not pod.restarts(each) for each in pod.mains)

    async def _start_box(self, pod: ShapedPod, box: Container) -> bool:
        """Start a container; return whether it runs now."""
        if pod.over or box.not_before > self._now():
            return False
        box.granted = self.registered or not box.ids
        if box.granted:
            for resource in box.ids:
                if not await self._granted(pod, box, resource):
                    return False
        await asyncio.sleep(0)  # a kubelet that ended with the answer starts nothing
        if box.stillborn:
            box.stillborn -= 1
            box.not_before = self._now() + self._rng.uniform(*RETRY)
            self._happened(f"{box.name} was not created")
            return False
        pod.creating = start_outside_service(self._create(pod, box), f"creating {pod.uid}/{box.name}")
        await asyncio.wait({pod.creating})
        return box.state is State.RUNNING

    async def _granted(self, pod: ShapedPod, box: Container, resource: str) -> bool:
        """Request one resource of a container; a refusal is retried later."""
        self._happened(f"{box.name} is requested")
        began = self._now()
        call = start_outside_service(self._request_start(pod, box, resource), f"PreStart of {pod.uid}/{box.name}")
        self._calls.add(call)
        try:
            await asyncio.wait({call}, timeout=PRE_START_DEADLINE)
        finally:
            self._calls.discard(call)
            if not call.done():
                call.cancel()
        error: BaseException | None = None if not call.cancelled() else Gone()
        if call.done() and not call.cancelled():
            error = call.exception()
        if error is None and call.done():
            box.refusals, box.refusal = 0, ""
            self._happened(f"{box.name} is answered")
            return True
        if error is not None and not isinstance(error, ScrubberError | Gone):
            raise error
        late = self._now() - began >= PRE_START_DEADLINE
        box.refusal = str(error) if isinstance(error, ScrubberError) else "no answer"
        box.not_before = self._now() + (FIRST_RETRY if late or not box.refusals else self._rng.uniform(*RETRY))
        box.refusals += 1
        return False

    async def _create(self, pod: ShapedPod, box: Container) -> None:
        """Create the container like the runtime: continues across kubelet restarts, and ends with the sandbox."""
        group = _opaque(f"{pod.uid}/{box.name}#{box.runs + 1}")
        helper = self._process_table.start(pod.uid, group, "")
        sandbox = pod.sandbox
        await asyncio.sleep(CREATION)
        self._process_table.end(helper)
        if sandbox is None or not sandbox.alive or sandbox is not pod.sandbox:
            return
        box.runs, box.sandbox = box.runs + 1, pod.sandboxes
        label = f"{pod.pod.namespace}/{pod.uid}/{box.name}#{box.runs}"
        box.first = self._process_table.start(pod.uid, group, label, mounted=box.devices, first=True)
        box.state = State.RUNNING
        self._container_starts(pod, box)
        self._happened(f"{box.name} runs")

    def ended(self, pod: ShapedPod, box: Container, code: int) -> None:
        """End a container's first process."""
        if box.state is not State.RUNNING or box.first is None:
            return
        self._process_table.end(box.first)
        box.state, box.exit_code = State.ENDED, code
        box.not_before = max(box.not_before, self._now() + box.crash_delay)
        box.crash_delay = min(LONGEST_CRASH_DELAY, max(FIRST_CRASH_DELAY, 2 * box.crash_delay))
        pod.wake.set()
        self._happened(f"{box.name} ended")

    # -- the end of a pod ------------------------------------------------------------------------------------------

    def delete_pod(self, pod: ShapedPod) -> None:
        """Delete with grace: nothing new is started, its containers end in order, and then its devices are free."""
        self._stop(pod)
        start_outside_service(self._ends(pod, completed=False), f"deleted {pod.uid}")

    def force_delete_pod(self, pod: ShapedPod, lives_on: float) -> None:
        """Delete by force: its devices are free at once; its containers, and one being created, live on for a while."""
        self._stop(pod)
        self._give_up(pod)

        async def end() -> None:
            await asyncio.sleep(lives_on)
            self._end_everything(pod)

        start_outside_service(end(), f"dying {pod.uid}")

    def _stop(self, pod: ShapedPod) -> None:
        pod.over = True
        if pod.worker is not None:
            pod.worker.cancel()

    async def _ends(self, pod: ShapedPod, *, completed: bool) -> None:
        if pod.creating is not None:
            await asyncio.wait({pod.creating})
        await asyncio.sleep(TERMINATION)
        for each in (*pod.mains, *(each for each in pod.inits if each.kind is Kind.INIT)):
            self._end_box(each)
        for each in reversed([each for each in pod.inits if each.kind is Kind.SIDECAR and each.state is State.RUNNING]):
            await asyncio.sleep(TERMINATION)
            self._end_box(each)
        await asyncio.sleep(COMPLETED_LEAVES_LIST if completed else LEAVES_LIST)
        self._end_everything(pod)
        self._give_up(pod)

    def _end_box(self, box: Container) -> None:
        if box.first is not None:
            self._process_table.end(box.first)
        box.state = State.ENDED

    def _end_everything(self, pod: ShapedPod) -> None:
        for proc in self._process_table.living(pod.uid):
            self._process_table.end(proc)
        for each in pod.boxes:
            each.state = State.ENDED

    def _fail(self, pod: ShapedPod, why: str) -> None:
        """Fail the pod permanently."""
        if not pod.over:
            pod.failed = why
            self.delete_pod(pod)

    # -- restarts --------------------------------------------------------------------------------------------------

    def plugin_ends(self) -> None:
        """End the plugin; its calls end with it."""
        for call in tuple(self._calls):
            call.cancel()

    async def kubelet_restarts(self, *, unregistered: float = 0.0) -> None:
        """Restart the kubelet: its calls end with it; the next one lists nothing at first.

        Args:
            unregistered: seconds after which the plugin registers with it, from its first sync of the pods.
        """
        self.down, self.starts, self.trust = True, self.starts + 1, Trust.EMPTY_AFTER_RESTART
        self.plugin_ends()
        for pod in self.pods:
            if not pod.over and pod.worker is not None:
                pod.worker.cancel()
        await asyncio.sleep(KUBELET_STARTS)
        self.down, self.registered = False, not unregistered
        for pod in self.pods:
            for box in pod.boxes:
                box.forgotten()
            if pod.over:
                continue
            if not self.registered and any(each.ids and each.state is not State.RUNNING for each in pod.boxes):
                self._fail(pod, "UnexpectedAdmissionError")
            else:
                self._take_up(pod)
        await asyncio.sleep(unregistered)
        self.registered = True
        await asyncio.sleep(LISTS_NOTHING)
        self.trust = Trust.TRUSTED

    def power_off(self) -> None:
        """End every process at once."""
        self.down, self.starts = True, self.starts + 1
        self.plugin_ends()
        for pod in self.pods:
            if pod.worker is not None:
                pod.worker.cancel()
        for proc in self._process_table.living():
            self._process_table.end(proc)

    async def power_on(self) -> None:
        """Start the remaining pods from the beginning."""
        self.down, self.trust = False, Trust.EMPTY_AFTER_RESTART
        for pod in self.pods:
            pod.pausing, pod.sandbox, pod.creating = [], None, None
            ran = any(each.runs for each in pod.boxes)
            for box in pod.boxes:
                box.forgotten()
                succeeded = box.kind is Kind.MAIN and box.state is State.ENDED and box.exit_code == 0
                if not (succeeded and pod.policy is Policy.ON_FAILURE):
                    box.state, box.exit_code = State.WAITING, None
            if pod.over:
                self._give_up(pod)
            elif (pod.policy is Policy.NEVER and ran) or self._complete_now(pod):
                pod.over = True
                pod.failed = "" if self._complete_now(pod) else "the node was rebooted"
                self._give_up(pod)
            elif pod.listed:
                self._take_up(pod)
        await asyncio.sleep(LISTS_NOTHING)
        self.trust = Trust.TRUSTED

    # -- data sources ----------------------------------------------------------------------------------------------

    def starts_of(self, pod: Pod) -> Mapping[str, int]:
        return {box.name: box.runs for each in self.pods if each.pod == pod for box in each.boxes if box.runs}

    def reading(self) -> KubeletReading:
        """Return the current contents of PodResources and the checkpoint."""
        now = self._now()
        listed: list[Assignment] = []
        hinted: list[Assignment] = []
        shares: list[Share] = []
        for pod in self.pods:
            if not pod.listed:
                continue
            for box in pod.boxes:
                for resource, ids in box.ids.items():
                    devices = frozenset(id_.partition("::")[0] for id_ in ids)
                    (hinted if box.kind is Kind.INIT else listed).append(
                        Assignment(pod.pod, box.name, devices, resource=resource)
                    )
                    if resource == SHARED:
                        shares += [Share(pod.pod, box.name, resource, each, frozenset(ids)) for each in devices]
        if self.down:
            return KubeletReading(
                Trust.UNREADABLE, (), (*listed, *hinted), now, "no kubelet answers", shares=tuple(shares)
            )
        if self.trust is Trust.EMPTY_AFTER_RESTART:
            reason = "the kubelet has just started and lists nothing"
            everything = (*listed, *hinted)
            return KubeletReading(
                self.trust, (), everything, now, reason, kubelet_instance=str(self.starts), shares=tuple(shares)
            )
        return KubeletReading(
            Trust.TRUSTED,
            tuple(listed),
            tuple(hinted),
            now,
            kubelet_instance=str(self.starts),
            shares=tuple(shares),
            finished_at=now,
        )


def _opaque(what: str) -> str:
    """Return the name of a cgroup, which does not reveal the container."""
    return f"cri-containerd-{hashlib.sha256(what.encode()).hexdigest()[:12]}.scope"


def shares_of(device: str) -> tuple[str, ...]:
    """Return the ids of a shared device."""
    return tuple(f"{device}::{number}" for number in range(SHARES))


def numbered(devices: Iterable[str], resource: str) -> tuple[str, ...]:
    """Return the kubelet's ids of ``devices`` under ``resource``."""
    if resource == SHARED:
        return tuple(id_ for device in devices for id_ in shares_of(device))
    return tuple(devices)
