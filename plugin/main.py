"""The device plugin as a process: the one file that wires it.

Promises: it waits for a kubelet and for a service that are not there. If one of its tasks dies, all drain and the
process ends, for its supervisor to start again. SIGTERM ends the kubelet's streams in good order, so that the kubelet
stops placing pods here at once, and the process exits with 0.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from plugin.board import Board
from plugin.gate import Gate, GateTimes
from plugin.kubelet import KubeletPlaces, Registrar, Registration, RegistrationTimes
from plugin.logs import logger
from plugin.server import DevicePlugin
from plugin.service import ServiceWatch, WatchTimes
from scrubber.api.client import PluginClient
from scrubber.domain.errors import BadConfiguration, ScrubberError

__all__ = ["PluginSettings", "PluginTimes", "run"]


@dataclass(frozen=True, slots=True)
class PluginTimes:
    """All durations of the plugin; tests scale them, nobody else needs to."""

    gate: GateTimes = field(default_factory=GateTimes)
    registration: RegistrationTimes = field(default_factory=RegistrationTimes)
    watch: WatchTimes = field(default_factory=WatchTimes)


@dataclass(frozen=True, slots=True)
class PluginSettings:
    """What the plugin is told.

    Attributes:
        kubelet_dir: contains ``device-plugins/`` and ``plugins_registry/``.
        socket: directory of the service's sockets.
        resource_name: what pods ask for; ``nvidia.com/gpu`` on NVIDIA.
        registration: ``auto``, ``watcher`` or ``classic``.
        log_format: ``auto`` (for people on a terminal, else JSON lines), ``json`` or ``console``.
        log_level: ``debug``, ``info``, ``warning`` or ``error``.
    """

    kubelet_dir: Path = Path("/var/lib/kubelet")
    socket: Path = Path("/run/scrubber")
    resource_name: str = "scrubber.dev/gpu"
    registration: str = "auto"
    log_format: str = "auto"
    log_level: str = "info"
    times: PluginTimes = field(default_factory=PluginTimes)


async def run(settings: PluginSettings) -> int:
    """Run the plugin until SIGTERM or SIGINT; answers the exit status.

    Raises:
        BadConfiguration: a setting cannot work; nothing was started, or what runs has been drained.
    """
    log = logger(settings.log_format, settings.log_level)
    mode = _registration(settings.registration)
    places = KubeletPlaces(settings.kubelet_dir.absolute(), settings.resource_name)
    places.check()
    board = Board()
    client = PluginClient(settings.socket.absolute())
    gate = Gate(client, board, times=settings.times.gate, log=log, clock=time.monotonic)
    watch = ServiceWatch(client, board, times=settings.times.watch, log=log, clock=time.monotonic)
    registrar = Registrar(
        places,
        mode,
        plugin=lambda streams: DevicePlugin(board, gate, streams=streams, log=log),
        board=board,
        times=settings.times.registration,
        token=lambda: secrets.token_hex(4),
        log=log,
        clock=time.monotonic,
    )
    stop = _stop_signals()
    log.info("Device plugin started", resource=places.resource, kubelet=str(places.root), service=str(settings.socket))
    try:
        async with asyncio.TaskGroup() as tasks:
            service = tasks.create_task(watch.run(), name="service snapshots")
            registration = tasks.create_task(_register(registrar, board), name="registration")
            await stop.wait()
            log.info("Stopping: the kubelet's streams end now")
            registration.cancel()
            await asyncio.wait({registration})
            service.cancel()
    except BaseExceptionGroup as group:
        error = _on_purpose(group)
        if error is None:
            raise
        raise error from group
    finally:
        await client.close()
    log.info("Device plugin stopped")
    return 0


async def _register(registrar: Registrar, board: Board) -> NoReturn:
    """Register once a first snapshot has come: before it there is no list to send."""
    await board.until(lambda: board.version > 0)
    await registrar.run()


def _registration(name: str) -> Registration:
    try:
        return Registration(name)
    except ValueError:
        known = ", ".join(Registration)
        raise BadConfiguration(f"{name!r} is no way to register: write one of {known}.") from None


def _stop_signals() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def _on_purpose(group: BaseExceptionGroup[BaseException]) -> ScrubberError | None:
    """The first error in ``group`` that this project raised on purpose, if there is one."""
    for error in group.exceptions:
        found = _on_purpose(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(found, ScrubberError):
            return found
    return None
