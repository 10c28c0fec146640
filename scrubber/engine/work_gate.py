"""The work gate of devices in a confidential-computing mode: closed unless every device is proved clean, or one is in use.

Without such a mode nothing here does anything. The gate is a second barrier: what keeps a tenant from a device that is
not clean is the hand-over.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress

from scrubber.domain.confidential import may_accept_work
from scrubber.domain.errors import ScrubberError
from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import Hygiene
from scrubber.engine import refusals
from scrubber.engine.dependencies import Dependencies
from scrubber.ports.record import Event

__all__ = ["WorkGate"]

_INTERVAL = 5.0
"""Seconds between two checks whether the driver's switch is as it was set: others can change it."""


# See docs/decisions/0042-confidential-computing.md.
class WorkGate:
    """The only user of :meth:`scrubber.ports.ConfidentialComputing.set_accepting`.

    Args:
        records: returns the records of the node's devices.
    """

    def __init__(self, dependencies: Dependencies, records: Callable[[], Iterable[DeviceRecord]]) -> None:
        self._dependencies = dependencies
        self._records = records
        self._grants = 0
        self._changed = asyncio.Event()
        self._applied: bool | None = None
        self._failure = ""

    def notify(self) -> None:
        """Compare the gate with the devices' records soon, because one of them may have changed."""
        self._changed.set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Keep the gate open for a grant that is about to be committed.

        Raises:
            NotReady: the gate could not be opened, so a container could not use its devices.
        """
        port = self._dependencies.confidential
        if port is None or not port.enabled:
            yield
            return
        self._grants += 1
        try:
            try:
                await self._set(accepting=True)
            except ScrubberError as error:
                raise refusals.work_gate_closed(str(error)) from error
            yield
        finally:
            self._grants -= 1
            self.notify()

    async def follow(self) -> None:
        """Open and close the gate as the devices' records require, until cancelled."""
        port, clock = self._dependencies.confidential, self._dependencies.clock
        if port is None:
            return
        due = clock.monotonic()
        while True:
            self._changed.clear()
            accepting = self._grants > 0 or may_accept_work(self._records())
            if port.enabled and (accepting is not self._applied or clock.monotonic() >= due):
                due = clock.monotonic() + _INTERVAL
                with suppress(ScrubberError):  # recorded, and tried again
                    await self._set(accepting=accepting)
            with suppress(TimeoutError):
                async with clock.timeout(_INTERVAL):
                    await self._changed.wait()

    async def close(self) -> None:
        """Close the gate because the service ends, unless a device is in use."""
        port = self._dependencies.confidential
        if port is not None and port.enabled and not self._in_use():
            with suppress(ScrubberError):  # recorded; the next service closes it
                await self._set(accepting=False)

    def _in_use(self) -> bool:
        return any(record.hygiene is Hygiene.IN_USE for record in self._records())

    async def _set(self, *, accepting: bool) -> None:
        port, clock = self._dependencies.confidential, self._dependencies.clock
        assert port is not None
        try:
            await port.set_accepting(accepting)
        except ScrubberError as error:
            self._applied = None
            if str(error) != self._failure:
                self._failure = str(error)
                fields: dict[str, str | int | float | bool | None] = {"accepting": accepting, "message": self._failure}
                self._dependencies.journal.record([Event("work-gate.failed", clock.wall(), fields=fields)])
            raise
        self._failure = ""
        if self._applied is not accepting:
            self._applied = accepting
            self._dependencies.journal.record(
                [Event("work-gate.changed", clock.wall(), fields={"accepting": accepting})]
            )
