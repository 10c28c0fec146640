"""One service over the cluster, from its start to its end, composed like the daemon composes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from scrubber.domain.agent_pause import PauseReport
from scrubber.domain.device import Device
from scrubber.domain.errors import LedgerFailure
from scrubber.domain.evidence import PathKind
from scrubber.domain.jobs import Job
from scrubber.domain.node_record import NodeRecord
from scrubber.engine.breaker import watch_breaker
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.loops.health import follow_signals, watch_health
from scrubber.engine.loops.inventory import watch_inventory
from scrubber.engine.loops.pods import follow_pod_ends, watch_pods
from scrubber.engine.loops.reconcile import add_device, reconcile
from scrubber.engine.loops.recovery import run_recovery_loops
from scrubber.engine.loops.usage import watch_use
from scrubber.engine.node import Node
from scrubber.engine.views import (
    ClaimRelease,
    GrantedDevice,
    HandOverCall,
    PrepareClaimCall,
    ScrubUpdate,
    ServiceView,
    StartJobCall,
)
from scrubber.engine.yielding import YieldControl
from scrubber.ports.device import Inventory
from tests.simulation.kubelet import Gone
from tests.simulation.life import Life, listen

__all__ = ["Pace", "Service"]

T = TypeVar("T")

WATCH_EVERY = 1.0
HEALTH_EVERY = 5.0


@dataclass(frozen=True, slots=True)
class Pace:
    """The intervals of a service's checks, in seconds. Above ten, every check voids earlier proofs.

    Attributes:
        watch: of pods and of use.
        health: of the driver's reports, and of the breaker.
        draw: the share of ``watch`` between two usage checks, from 0 to 1; constant unless a test varies it.
    """

    watch: float = WATCH_EVERY
    health: float = HEALTH_EVERY
    draw: Callable[[], float] = lambda: 1.0


class Service:
    """One run of the service.

    Args:
        failed: called with a message when a task ends by an unexpected error, which would end the daemon.

    Attributes:
        ready: every device was checked once.
    """

    def __init__(
        self,
        life: Life,
        tools: Dependencies,
        inventory: Inventory,
        *,
        ledger_health: Callable[[], str],
        failed: Callable[[str], None],
        pace: Pace | None = None,
    ) -> None:
        self.life = life
        self._pace = pace or Pace()
        self.dependencies = tools
        self._inventory = inventory
        self._failed = failed
        identity, policy = tools.identity, tools.policy

        def info() -> ServiceView:
            return ServiceView("0", "world", identity, policy(), ledger_health(), str(life.number))

        yields = YieldControl(NodeRecord(), ledger=tools.ledger, journal=tools.journal, clock=tools.clock)
        self.node = Node(dependencies=tools, service_view=info, epoch=str(life.number), yields=yields)
        self.ready = asyncio.Event()
        self._running = life.start(self._guarded(), f"service {life.number}")

    async def _guarded(self) -> None:
        try:
            await self._run()
        except LedgerFailure as error:
            # It prevents a service from starting, and never ends a running one.
            self._die(error, meant=not self.ready.is_set())
        except Exception as error:  # noqa: BLE001 - the laws check every error that ends the daemon
            self._die(error)
        except BaseExceptionGroup as error:
            self._die(error)

    async def started(self) -> None:
        """Wait until every device was checked, or until the service has died."""
        ready = asyncio.ensure_future(self.ready.wait())
        await asyncio.wait({ready, self._running}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()

    def _die(self, error: BaseException, *, meant: bool = False) -> None:
        if self.life.alive and not meant:
            self._failed(f"service {self.life.number} died of {_leaves(error)}")
        self.life.end()

    async def _run(self) -> None:
        tools, pace = self.dependencies, self._pace
        state = await tools.ledger.load()
        devices = await self._inventory.devices()
        await reconcile(self.node, devices, state, dependencies=tools)
        self.ready.set()

        async def greet(device: Device) -> None:
            await add_device(self.node, device, dependencies=tools)

        async with asyncio.TaskGroup() as group:
            group.create_task(tools.agent_pauses.run(), name="agent pauses")
            group.create_task(self.node.follow_pauses(), name="published pauses")
            group.create_task(run_recovery_loops(self.node, dependencies=tools), name="tending")
            group.create_task(watch_pods(self.node, dependencies=tools, interval=pace.watch), name="pods")
            group.create_task(follow_pod_ends(self.node, dependencies=tools), name="pod ends")
            group.create_task(
                watch_use(self.node, dependencies=tools, interval=pace.watch, random_fraction=pace.draw), name="use"
            )
            group.create_task(watch_health(self.node, dependencies=tools, interval=pace.health), name="health")
            group.create_task(self.node.work_gate.follow(), name="work gate")
            group.create_task(follow_signals(self.node, dependencies=tools), name="signals")
            group.create_task(
                watch_breaker(self.node.devices.breaker, dependencies=tools, interval=pace.health), name="breaker"
            )
            group.create_task(
                watch_inventory(self.node, inventory=self._inventory, dependencies=tools, add_device=greet),
                name="inventory",
            )

    # -- requests over a socket ------------------------------------------------------------------------------------

    async def hand_over(self, call: HandOverCall) -> tuple[GrantedDevice, ...]:
        """Request like the plugin: cancelling cancels the handler, and a service that dies answers nothing.

        Raises:
            Gone: the service is not running, or died before it answered.
        """
        if not self.life.alive:
            raise Gone
        return await self._answer(self.node.hand_over(call), f"hand over {call.devices}")

    async def prepare_claim(self, call: PrepareClaimCall) -> tuple[GrantedDevice, ...]:
        """Request like the driver; as :meth:`hand_over`."""
        if not self.life.alive:
            raise Gone
        return await self._answer(self.node.claims.prepare(call), f"prepare {call.claim.uid}")

    async def unprepare_claim(self, uid: str, wait: float, *, withdrawn: bool = False) -> ClaimRelease:
        """Request like the driver; as :meth:`hand_over`."""
        if not self.life.alive:
            raise Gone
        return await self._answer(self.node.claims.unprepare(uid, wait, withdrawn=withdrawn), f"unprepare {uid}")

    async def start_job(self, call: StartJobCall) -> tuple[GrantedDevice, ...]:
        """Request like a prolog; as :meth:`hand_over`."""
        if not self.life.alive:
            raise Gone
        return await self._answer(self.node.jobs.start(call), f"start {call.job}")

    async def end_job(self, job: Job, wait: float = 0.0) -> ClaimRelease:
        """Report like an epilog; as :meth:`hand_over`."""
        if not self.life.alive:
            raise Gone
        return await self._answer(self.node.jobs.end(job, wait, "uid:0"), f"end {job}")

    async def _answer(self, work: Coroutine[Any, Any, T], name: str) -> T:
        handler = self.life.start(work, name)
        try:
            await asyncio.wait({handler})
        except asyncio.CancelledError:
            handler.add_done_callback(listen)
            handler.cancel()
            raise
        return self._result(handler)

    async def report_pause(self, report: PauseReport) -> None:
        """Report like the plugin; raises :class:`Gone` as :meth:`hand_over` does."""
        if not self.life.alive:
            raise Gone
        handler = self.life.start(self.node.pauses.report(report), "report")
        await asyncio.wait({handler})
        self._result(handler)

    async def scrub(self, device: str, path: PathKind = PathKind.SLOW) -> list[ScrubUpdate]:
        """Return all updates of a scrub on demand, to its end."""
        if not self.life.alive:
            raise Gone

        async def collect() -> list[ScrubUpdate]:
            updates: AsyncIterator[ScrubUpdate] = self.node.actions.scrub(device, path, "uid:0")
            return [each async for each in updates]

        handler = self.life.start(collect(), f"scrub {device}")
        await asyncio.wait({handler})
        return self._result(handler)

    def _result(self, handler: asyncio.Task[T]) -> T:
        if not self.life.alive or handler.cancelled():
            raise Gone
        return handler.result()

    def kill(self) -> None:
        """Simulate kill -9."""
        self.life.end()

    async def stop(self) -> None:
        """Simulate SIGTERM: everything drains; scrubs are abandoned."""
        self._running.cancel()
        await asyncio.wait({self._running})
        drained = self.life.start(self.node.devices.drain(), "drain")
        await asyncio.wait({drained})
        if self.life.alive:
            drained.result()
        self.life.end()


def _leaves(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_leaves(each) for each in error.exceptions)
    return f"{type(error).__name__}: {error}"
