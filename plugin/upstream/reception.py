"""A kubelet's socket for vendors' plugins: they register here instead of with the kubelet.

Promises: the socket is made anew at every start of ours, as the kubelet does, and whenever a plugin that is gone does
not come back by itself. The directory is ours alone: one that others may write to, that another kubelet serves, or
that is the real kubelet's is refused. A plugin is dialled before its registration is accepted, as by the kubelet.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import grpc

from plugin.api import deviceplugin_pb2 as kubelet
from plugin.api import deviceplugin_pb2_grpc
from plugin.endpoint import PRIVATE
from plugin.kubelet import VERSION, resource_complaint
from plugin.logs import Log, Reminder
from plugin.sockets import SocketIdentity, answers, check_fits
from plugin.upstream.front import Front
from plugin.upstream.renewal import Renewals
from plugin.upstream.vendor import Vendor, VendorTimes
from scrubber.domain.errors import BadConfiguration, InvalidRequest, ScrubberError

__all__ = ["Reception", "ReceptionTimes", "check_directory"]

KUBELET = "kubelet.sock"
LOCK = ".scrubber.lock"
MOST_RESOURCES = 64
MOST_AT_ONCE = 16
"""Registrations that are dialled at the same time."""


@dataclass(frozen=True, slots=True)
class ReceptionTimes:
    """Seconds.

    Attributes:
        poll: between looks at our own socket and at who is missing.
        patience: see :class:`Renewals`.
        probe: that a stranger at our socket may take to answer.
        closing: for registrations under way when the socket is made anew.
        remind: between log lines about something that is waited for.
    """

    poll: float = 0.25
    patience: float = 2.0
    probe: float = 1.0
    closing: float = 1.0
    remind: float = 30.0


def check_directory(directory: Path, kubelet_dir: Path) -> None:
    """Make ``directory`` if it is not there, and refuse one that cannot be ours.

    Raises:
        BadConfiguration: it is one of the real kubelet's, is no directory, cannot be made, belongs to somebody else,
            may be written to by others, or its sockets' paths would be too long.
    """
    for name in ("device-plugins", "plugins_registry"):
        real = kubelet_dir / name
        if directory.resolve() == real.resolve() or (directory.exists() and real.exists() and directory.samefile(real)):
            raise BadConfiguration(
                f"{directory} is the kubelet's own directory: a socket of ours there would take the kubelet's place. "
                "Name an empty directory, and mount that one where the vendor's plugin looks for the kubelet."
            )
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
    except OSError as error:
        raise BadConfiguration(f"{directory} cannot be made a directory: {error.strerror}.") from error
    if found.st_uid not in (0, os.geteuid()) or stat.S_IMODE(found.st_mode) & 0o022:
        raise BadConfiguration(
            f"{directory} belongs to uid {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}: who may write "
            f"there may register as a device plugin. Give it to uid {os.geteuid()} alone (chmod 0700)."
        )
    check_fits(directory / f".kubelet-{'0' * 8}.sock", "the kubelet's socket for vendors' plugins")


class _Registrations(deviceplugin_pb2_grpc.RegistrationServicer):
    """Answers ``Register`` in sentences."""

    def __init__(self, reception: Reception) -> None:
        self._reception = reception

    async def Register(
        self,
        request: kubelet.RegisterRequest,
        context: grpc.aio.ServicerContext[kubelet.RegisterRequest, kubelet.Empty],
    ) -> kubelet.Empty:
        try:
            await self._reception.register(request)
        except ScrubberError as error:
            self._reception.log.warning(
                "vendor.refused",
                resource=request.resource_name,
                endpoint=request.endpoint,
                sentence=str(error),
            )
            wrong = isinstance(error, InvalidRequest)
            code = grpc.StatusCode.INVALID_ARGUMENT if wrong else grpc.StatusCode.UNAVAILABLE
            await context.abort(code, str(error))
        return kubelet.Empty()


@dataclass(slots=True)
class Reception:
    """Serves ``kubelet.sock`` in ``directory``.

    Attributes:
        token: makes eight characters that were never used before.
        clock: monotonic seconds.
    """

    directory: Path
    front: Front
    times: ReceptionTimes
    vendor_times: VendorTimes
    log: Log
    token: Callable[[], str]
    clock: Callable[[], float]
    _renewals: Renewals = field(init=False)
    _reminder: Reminder = field(init=False)
    _at_once: asyncio.Semaphore = field(init=False)
    _made: SocketIdentity | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._renewals = Renewals(self.times.patience)
        self._reminder = Reminder(self.log, every=self.times.remind, clock=self.clock)
        self._at_once = asyncio.Semaphore(MOST_AT_ONCE)

    @property
    def socket(self) -> Path:
        return self.directory / KUBELET

    async def run(self) -> NoReturn:
        """Until cancelled; leaving removes our socket.

        Raises:
            BadConfiguration: somebody else serves there, or no socket can be made.
        """
        async with self._alone():
            await self._refuse_a_living_kubelet()
            server: grpc.aio.Server | None = None
            try:
                while True:
                    server = await self._anew(server)
                    why = await self._until_due()
                    self.log.warning("reception.renewed", sentence=why)
            finally:
                if self._intact:
                    self.socket.unlink(missing_ok=True)
                if server is not None:
                    await server.stop(None)

    async def register(self, request: kubelet.RegisterRequest) -> None:
        """Dial a plugin, and follow it from now on.

        Raises:
            InvalidRequest: what it says of itself cannot be.
            Away: nobody answers at its socket.
        """
        vendor = Vendor(request.resource_name, self._endpoint(request), times=self.vendor_times, clock=self.clock)
        try:
            async with self._at_once:
                await vendor.dial()
                await self.front.admit(vendor)
        except BaseException:
            await vendor.close()
            raise
        self.log.info("vendor.registered", resource=vendor.resource, socket=str(vendor.socket))

    def _endpoint(self, request: kubelet.RegisterRequest) -> Path:
        if request.version != VERSION:
            raise InvalidRequest(f"Version {request.version!r} is not supported: register as {VERSION}.")
        if complaint := resource_complaint(request.resource_name):
            raise InvalidRequest(complaint)
        if request.resource_name not in self.front.upstreams and len(self.front.upstreams) >= MOST_RESOURCES:
            raise InvalidRequest(f"{MOST_RESOURCES} resources are registered here already, and no more are taken.")
        name = request.endpoint
        if not name or name in (".", "..", KUBELET) or "/" in name or "\0" in name:
            raise InvalidRequest(f"{name!r} is no endpoint: it is the base name of a socket beside {KUBELET}.")
        try:
            check_fits(self.directory / name, "the plugin's socket")
        except BadConfiguration as error:
            raise InvalidRequest(str(error)) from error
        return self.directory / name

    async def _anew(self, before: grpc.aio.Server | None) -> grpc.aio.Server:
        """Put a new socket in the place of the last; answers its server.

        It serves before it has its name, and the name is removed and made again: plugins watch for either, and try to
        register at once. gRPC removes by path when it stops, so it is given a name that nobody else will have.
        """
        hidden = self.directory / f".kubelet-{self.token()}.sock"
        server = grpc.aio.server()
        deviceplugin_pb2_grpc.add_RegistrationServicer_to_server(_Registrations(self), server)
        mask = os.umask(PRIVATE)
        try:
            server.add_insecure_port(f"unix:{hidden}")
        except RuntimeError as error:
            raise BadConfiguration(
                f"No socket can be made in {self.directory}: is it writable for uid {os.geteuid()}?"
            ) from error
        finally:
            os.umask(mask)
        await server.start()
        SocketIdentity.of(self.socket)
        self.socket.unlink(missing_ok=True)
        os.link(hidden, self.socket)
        hidden.unlink()
        self._made = SocketIdentity.of(self.socket)
        self.log.info("reception.serving", socket=str(self.socket))
        if before is not None:
            await before.stop(self.times.closing)
        return server

    async def _until_due(self) -> str:
        """Wait until the socket is to be made anew; answers why."""
        while True:
            await asyncio.sleep(self.times.poll)
            if not self._intact:
                return "The socket for vendors' plugins was removed; it is made anew."
            missing = self.front.missing()
            if self._renewals.due(missing, self.clock()):
                return (
                    f"No plugin answers for {', '.join(sorted(missing))}; the socket is made anew for them to notice."
                )

    @property
    def _intact(self) -> bool:
        return self._made is not None and SocketIdentity.of(self.socket) == self._made

    async def _refuse_a_living_kubelet(self) -> None:
        """We have the lock, so whoever answers at the socket is no instance of ours."""
        if await answers(self.socket, self.times.probe):
            raise BadConfiguration(
                f"Somebody else serves {self.socket}: is {self.directory} the directory of a running kubelet? "
                "Name an empty one."
            )

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Hold the directory's lock; waits for an instance that is still there. Two would take the plugins from each
        other by making the socket anew in turns.
        """
        try:
            lock = os.open(self.directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise BadConfiguration(f"{self.directory / LOCK} cannot be made: {error.strerror}.") from error
        try:
            while True:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                self._reminder.waiting("reception.waiting", directory=str(self.directory))
                await asyncio.sleep(self.times.poll)
            self._reminder.over("reception.taken", directory=str(self.directory))
            yield
        finally:
            os.close(lock)
