"""The command backend for the composition root: every device port over one program, started and closed together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Protocol

from scrubber.adapters.children.process import Children
from scrubber.adapters.command.health import CommandSettings, CommandTelemetry
from scrubber.adapters.command.holders import CommandHolders
from scrubber.adapters.command.inventory import CommandInventory
from scrubber.adapters.command.runner import CommandOptions, CommandRun, CommandRunner
from scrubber.adapters.command.work import CommandResetter, CommandWork
from scrubber.adapters.shared_walks import SharedWalks
from scrubber.ports.device import DeviceBackend, InfrastructureLookup

__all__ = ["CommandSource", "command_backend"]


class CommandSource(Protocol):
    """The administrator's file, read again when it changes."""

    @property
    def rejection(self) -> str:
        """Why the file as last read is not in force; empty otherwise."""

    def current(self) -> CommandOptions:
        """Return what is in force."""


@asynccontextmanager
async def command_backend(
    source: CommandSource,
    locks: Path,
    *,
    node: str,
    infrastructure: InfrastructureLookup | None,
    owner: int = 0,
    walk_timeout: float = 10.0,
    children: Children | None = None,
    observe: Callable[[CommandRun], None] = lambda _: None,
) -> AsyncIterator[DeviceBackend]:
    """Build the backend of the program that ``source`` names.

    Args:
        locks: directory of the devices' locks, which only the service uses.
        node: name of the node, for certificates.
        owner: uid that may own the program, besides root.
        walk_timeout: deadline for one walk over ``/proc``, in seconds.
        observe: called after each run of the program that was answered.
    """
    own = children or Children()
    locks.mkdir(mode=0o700, parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(own.close)
        runner = CommandRunner(source.current, own, lock_directory=locks, owner=owner, observe=observe)
        stack.push_async_callback(runner.close)
        walks = SharedWalks.in_children(own, walk_timeout)
        stack.push_async_callback(walks.close)
        inventory = CommandInventory(runner, node)
        holders = CommandHolders(runner, walks, infrastructure=infrastructure)
        telemetry = CommandTelemetry(
            runner, lambda: inventory.last_devices, interval=lambda: source.current().poll_interval
        )
        stack.push_async_callback(telemetry.close)
        work = CommandWork(runner, holders)

        def not_advertised() -> Mapping[str, str]:
            return {"command": source.rejection} if source.rejection else {}

        yield DeviceBackend(
            inventory=inventory,
            holders=holders,
            telemetry=telemetry,
            settings=CommandSettings(runner),
            resetter=CommandResetter(runner, holders),
            eraser=work,
            diagnostics=work,
            children=own,
            not_advertised=not_advertised,
            poll_interval=lambda _: source.current().poll_interval,
        )
