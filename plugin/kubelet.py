"""How the kubelet gets to know this plugin, and gets to know it again.

Promises: the plugin serves before it registers. It registers again whenever the kubelet's socket is created anew, its
own socket is removed, or a ``ListAndWatch`` stream ends for any reason: the kubelet never reconnects, and until then
it starts containers without asking. At any time it has a socket in one of the kubelet's two directories only, and only one
instance of the plugin on a node is registered (:mod:`plugin.instance_lock`).

Two ways. By the *classic* way the plugin calls ``Register``, which takes milliseconds; a restarted kubelet has it before
its first node status. By the *watcher*, the kubelet comes to a socket in ``plugins_registry/``; but after a restart it looks
there only when it has published that the node has no devices, which stays so until the next node status, 10 s later.
``auto`` is the classic way, and the watcher only where ``device-plugins/`` is not there.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NoReturn

import grpc

from plugin.api import deviceplugin_pb2, deviceplugin_pb2_grpc, pluginregistration_pb2, pluginregistration_pb2_grpc
from plugin.devices import AdvertisedDevices
from plugin.endpoint import Endpoint
from plugin.instance_lock import InstanceLock
from plugin.logs import Log, Reminder
from plugin.observing import KubeletObserver, Nobody, RegistrationObserver
from plugin.server import Streams
from plugin.sockets import SocketIdentity, check_fits, remove_dead
from scrubber.domain.errors import Away, BadConfiguration

__all__ = ["KubeletPlaces", "Registrar", "Registration", "RegistrationTimes", "resource_complaint"]

VERSION = "v1beta1"
UNANSWERED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
"""Statuses that say that there was no answer; any other one is the kubelet's."""


class Registration(StrEnum):
    """How to register."""

    AUTO = "auto"
    WATCHER = "watcher"
    CLASSIC = "classic"


class Over(StrEnum):
    """Why an incarnation of the plugin is over."""

    STREAM_ENDED = "the kubelet's stream ended"
    NO_STREAM = "the kubelet accepted the plugin but opened no stream"
    SOCKET_REMOVED = "the plugin's socket was removed"
    KUBELET_ANEW = "the kubelet's socket was created anew"
    UNHEARD = "the kubelet did not come to plugins_registry/"

    @property
    def word(self) -> str:
        """For metrics."""
        return self.name.lower().replace("_", "-")


@dataclass(frozen=True, slots=True)
class RegistrationTimes:
    """Seconds.

    Attributes:
        poll: between looks at socket files while the plugin is not registered; a kubelet that has just started is noticed
            within this time.
        idle_poll: the same once it is; a kubelet that goes ends its stream, which is noticed at once.
        patience: that ``device-plugins/`` may be missing before ``auto`` takes the watcher: a kubelet's first start makes
            both directories, one after the other.
        visit: that the kubelet may take to come to ``plugins_registry/`` before the log says that it is waited for.
        register: for ``Register``; the kubelet dials us back inside and takes up to 10 s.
        stream: from an accepted registration to the kubelet's stream, which comes within milliseconds, or never when
            the end of an older stream took the new client along; doubled each time in a row, up to ``stream_most``.
        retry: between attempts to register with a kubelet that does not answer or refuses.
        turn: between looks whether another instance of the plugin has gone.
        settle: from the end of a stream to the next ``Register``, by whichever instance. The kubelet first drops the
            connection and then marks the resource's endpoint, whichever it is by then, as stopped; nothing tells an
            endpoint that registered in between.
        steady: a registration that the kubelet dropped is made again at once when it lasted for so long, or was the
            first in a row to be shorter.
        back_off: the pause after the second such one, doubling up to ``back_off_most``.
        remind: between log lines about something that is waited for.
    """

    poll: float = 0.05
    idle_poll: float = 1.0
    patience: float = 5.0
    visit: float = 2.0
    register: float = 15.0
    stream: float = 0.3
    stream_most: float = 10.0
    retry: float = 0.5
    turn: float = 0.01
    settle: float = 0.01
    steady: float = 10.0
    back_off: float = 0.05
    back_off_most: float = 5.0
    remind: float = 30.0


@dataclass(frozen=True, slots=True)
class KubeletPlaces:
    """Where the kubelet keeps what concerns a device plugin, below ``root`` (``/var/lib/kubelet``)."""

    root: Path
    resource: str

    @property
    def classic(self) -> Path:
        return self.root / "device-plugins"

    @property
    def registry(self) -> Path:
        return self.root / "plugins_registry"

    @property
    def socket(self) -> Path:
        return self.classic / "kubelet.sock"

    @property
    def prefix(self) -> str:
        """How the names of our sockets begin."""
        return f"scrubber-{self.resource.rpartition('/')[2][:24]}"

    def writer_directory(self, mode: Registration) -> Path:
        """Where the lock of the instance that writes to the API server is: in a directory that ``mode`` registers in."""
        by_watcher = mode is Registration.AUTO and not self.classic.is_dir() and self.registry.is_dir()
        return self.registry if mode is Registration.WATCHER or by_watcher else self.classic

    def own_socket(self, directory: Path, token: str) -> Path:
        return directory / f"{self.prefix}-{token}.sock"

    def check(self) -> None:
        """Refuse what cannot work, before anything is tried.

        Raises:
            BadConfiguration: a resource name that the kubelet would refuse; a directory that is a file or whose
                sockets' paths would be too long; a file where the kubelet's socket should be.
        """
        if complaint := resource_complaint(self.resource):
            raise BadConfiguration(complaint)
        for directory in (self.root, self.classic, self.registry):
            if directory.exists() and not directory.is_dir():
                raise BadConfiguration(f"{directory} is a file: the kubelet's directory is asked for.")
            check_fits(self.own_socket(directory, "0" * 8), "this plugin's socket")
        check_fits(self.socket, "the kubelet's socket")
        SocketIdentity.of(self.socket)


def resource_complaint(name: str) -> str:
    """Why the kubelet would refuse a resource of this name; empty when it would not."""
    domain, _, base = name.partition("/")
    label = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
    hint = "Write DOMAIN/NAME, such as scrubber.dev/gpu."
    name_part = r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
    if not re.fullmatch(rf"{label}(\.{label})*", domain) or not re.fullmatch(name_part, base):
        return f"{name!r} is no name for a resource. {hint}"
    if len(domain) > 244 or len(base) > 63:
        return f"{name!r} is too long: 244 characters before the slash and 63 after it. {hint}"
    if "kubernetes.io/" in name or name.startswith("requests."):
        return f"{name!r} belongs to Kubernetes: choose a domain of your own. {hint}"
    return ""


class Registrar:
    """Keeps the plugin registered with the kubelet.

    Args:
        plugin: makes the servicer of one incarnation.
        token: makes eight characters that were never used before.
        clock: monotonic seconds.

    Attributes:
        prepared: this instance has been ready to register since its start, apart from another one that may be registered.
    """

    def __init__(
        self,
        places: KubeletPlaces,
        mode: Registration,
        *,
        plugin: Callable[[Streams], deviceplugin_pb2_grpc.DevicePluginServicer],
        advertised: AdvertisedDevices,
        times: RegistrationTimes,
        token: Callable[[], str],
        log: Log,
        clock: Callable[[], float],
        observer: KubeletObserver | None = None,
    ) -> None:
        self._observer = observer or Nobody()
        self._places = places
        self._mode = mode
        self._plugin = plugin
        self._advertised = advertised
        self._times = times
        self._token = token
        self._log = log
        self._clock = clock
        self._reminder = Reminder(log, every=times.remind, clock=clock)
        self._stream_patience = times.stream
        self._locks: dict[Path, InstanceLock] = {}
        self.prepared = False

    async def run(self) -> NoReturn:
        """Until cancelled; leaving ends the streams and removes our socket."""
        pause = self._times.settle
        over: Over | None = None
        self._observer.registered(self._places.resource, now=False)
        try:
            while True:
                way = await self._way()
                began = self._clock()
                try:
                    over = await (self._by_watcher() if way is Registration.WATCHER else self._by_register())
                except Away as error:
                    self._waiting(str(error))
                    await asyncio.sleep(self._times.retry)
                    continue
                self._observer.ended(self._places.resource, over.word)
                if over is Over.NO_STREAM:
                    self._stream_patience = min(2 * self._stream_patience, self._times.stream_most)
                elif over is Over.STREAM_ENDED:
                    self._stream_patience = self._times.stream
                self._log.warning(
                    "kubelet.registering-again",
                    resource=self._places.resource,
                    reason=over.word,
                    sentence=f"{over.value.capitalize()}.",
                    way=way.value,
                )
                dropped = over in (Over.STREAM_ENDED, Over.NO_STREAM)
                if not dropped or self._clock() - began >= self._times.steady:
                    pause = self._times.settle
                if dropped:
                    await asyncio.sleep(pause)
                    pause = min(max(2 * pause, self._times.back_off), self._times.back_off_most)
        finally:
            for lock in self._locks.values():
                lock.release()

    async def _way(self) -> Registration:
        """How to register this time; waits until there is a directory to do it in."""
        places = self._places
        since = self._clock()
        while True:
            if self._mode is not Registration.WATCHER and places.classic.is_dir():
                return Registration.CLASSIC
            given_up = self._mode is Registration.WATCHER or self._clock() - since >= self._times.patience
            if self._mode is not Registration.CLASSIC and given_up and places.registry.is_dir():
                return Registration.WATCHER
            wanted = places.registry if self._mode is Registration.WATCHER else places.classic
            self._waiting(f"{wanted} does not exist.")
            await asyncio.sleep(self._times.poll)

    async def _by_watcher(self) -> Over:
        """One incarnation in ``plugins_registry/``, until it is over."""
        times = self._times
        path = self._places.own_socket(self._places.registry, self._token())
        watcher = _PluginInfoService(self._places.resource, path, log=self._log, observer=self._observer)
        accepted_at: float | None = None
        await self._turn(path.parent, None)  # first: the kubelet comes to a socket as soon as it is there
        expected = self._clock() + times.visit
        async with self._serving(path, watcher) as endpoint:
            while True:
                over = await self._look(endpoint, None)
                if over is not None:
                    return over
                now = self._clock()
                if endpoint.streams.opened.is_set():
                    continue
                if watcher.accepted:
                    accepted_at = accepted_at if accepted_at is not None else now
                    if now - accepted_at >= self._stream_patience:
                        return Over.NO_STREAM
                elif not watcher.heard:
                    if self._mode is Registration.AUTO and self._places.classic.is_dir():
                        return Over.UNHEARD
                    if now >= expected:
                        self._waiting("It has not come to plugins_registry/ yet.")

    async def _by_register(self) -> Over:
        """One incarnation in ``device-plugins/``, until it is over."""
        kubelet = await self._kubelet()
        path = self._places.own_socket(self._places.classic, self._token())
        async with self._serving(path, None) as endpoint:
            over = await self._turn(path.parent, endpoint, kubelet)
            while over is None:
                try:
                    await self._register(path.name)
                    break
                except Away as error:
                    self._waiting(str(error))
                over = await self._look_for(endpoint, kubelet, self._times.retry)
            if over is None:
                over = await self._look_for(endpoint, kubelet, self._stream_patience)
            while over is None:
                if not endpoint.streams.opened.is_set():
                    return Over.NO_STREAM
                over = await self._look(endpoint, kubelet)
            return over

    async def _turn(
        self, directory: Path, endpoint: Endpoint | None, kubelet: SocketIdentity | None = None
    ) -> Over | None:
        """Wait until no other instance is registered. Return why ``endpoint`` is over, if it is before that."""
        self.prepared = True
        lock = self._locks.setdefault(directory, InstanceLock(directory, self._places.resource))
        waited = 0
        while not lock.take():
            if not waited:
                self._log.info("plugin.standing-by", resource=self._places.resource)
            waited += 1
            await asyncio.sleep(self._times.turn)
            if endpoint is not None and waited % 10 == 0 and (over := self._gone(endpoint, kubelet)) is not None:
                return over
        return None

    async def _kubelet(self) -> SocketIdentity:
        """The kubelet's socket; waits for it."""
        while (identity := SocketIdentity.of(self._places.socket)) is None:
            self._waiting(f"{self._places.socket} does not exist.")
            await asyncio.sleep(self._times.poll)
        return identity

    async def _register(self, endpoint: str) -> None:
        """Call ``Register``; on a channel of its own, because a channel that failed once backs off for seconds.

        Raises:
            Away: the kubelet does not answer, or refuses; the message says what it said.
        """
        request = deviceplugin_pb2.RegisterRequest(
            version=VERSION, endpoint=endpoint, resource_name=self._places.resource
        )
        async with grpc.aio.insecure_channel(f"unix:{self._places.socket}") as channel:
            try:
                await deviceplugin_pb2_grpc.RegistrationStub(channel).Register(request, timeout=self._times.register)
            except grpc.aio.AioRpcError as error:
                said = f"{error.code().name}: {error.details()}"
                outcome = "failed" if error.code() in UNANSWERED else "refused"
                self._observer.attempted(self._places.resource, Registration.CLASSIC.value, outcome)
                raise Away(f"Register at {self._places.socket} failed, {said}") from error

    @asynccontextmanager
    async def _serving(self, path: Path, watcher: _PluginInfoService | None) -> AsyncIterator[Endpoint]:
        dead = await remove_dead(path.parent, self._places.prefix, older_than=1.0, now=time.time())
        if dead:
            self._log.info("plugin.sockets-removed", paths=[str(path) for path in dead])
        streams = Streams(self._advertised, self._places.resource, observer=self._observer)
        endpoint = Endpoint(
            path, plugin=self._plugin(streams), streams=streams, registration=watcher, observer=self._observer
        )
        async with endpoint:
            self._log.info("plugin.serving", resource=self._places.resource, socket=str(path))
            announcement = asyncio.create_task(self._announce(endpoint), name="announcement")
            try:
                yield endpoint
            except asyncio.CancelledError:
                await self._hand_on(endpoint)
                raise
            finally:
                announcement.cancel()
                self._observer.registered(self._places.resource, now=False)

    async def _hand_on(self, endpoint: Endpoint) -> None:
        """End the streams and let the next instance register, before the calls under way are waited for."""
        await endpoint.withdraw()
        await asyncio.sleep(self._times.settle)
        for lock in self._locks.values():
            lock.release()

    def _waiting(self, sentence: str) -> None:
        self._reminder.waiting("kubelet.away", resource=self._places.resource, sentence=sentence)

    async def _announce(self, endpoint: Endpoint) -> None:
        await endpoint.streams.opened.wait()
        self._reminder.over("kubelet.there", resource=self._places.resource)
        way = Registration.WATCHER if endpoint.path.parent == self._places.registry else Registration.CLASSIC
        self._observer.attempted(self._places.resource, way.value, "ok")
        self._observer.registered(self._places.resource, now=True)
        self._log.info("kubelet.registered", resource=self._places.resource, way=way.value, socket=str(endpoint.path))

    async def _look_for(self, endpoint: Endpoint, kubelet: SocketIdentity | None, seconds: float) -> Over | None:
        """Look until the incarnation is over, a stream is open, or ``seconds`` have passed."""
        until = self._clock() + seconds
        while not endpoint.streams.opened.is_set() and self._clock() < until:
            over = await self._look(endpoint, kubelet)
            if over is not None:
                return over
        return None

    async def _look(self, endpoint: Endpoint, kubelet: SocketIdentity | None) -> Over | None:
        """Why the incarnation is over, if it is. Takes one poll unless a stream ends."""
        registered = endpoint.streams.opened.is_set()
        try:
            async with asyncio.timeout(self._times.idle_poll if registered else self._times.poll):
                await endpoint.streams.ended.wait()
            return Over.STREAM_ENDED
        except TimeoutError:
            return self._gone(endpoint, kubelet)

    def _gone(self, endpoint: Endpoint, kubelet: SocketIdentity | None) -> Over | None:
        """Why the incarnation is over, by the socket files."""
        if not endpoint.intact:
            return Over.SOCKET_REMOVED
        if kubelet is not None and SocketIdentity.of(self._places.socket) not in (None, kubelet):
            return Over.KUBELET_ANEW
        return None


class _PluginInfoService(pluginregistration_pb2_grpc.RegistrationServicer):
    """What the kubelet's plugin watcher is told when it comes to our socket, and what it makes of that.

    Attributes:
        heard: the kubelet was here.
        accepted: it said that it took us.
    """

    def __init__(self, resource: str, endpoint: Path, *, log: Log, observer: RegistrationObserver) -> None:
        self._resource = resource
        self._endpoint = endpoint
        self._log = log
        self._observer = observer
        self.heard = False
        self.accepted = False

    async def GetInfo(
        self,
        request: pluginregistration_pb2.InfoRequest,
        context: grpc.aio.ServicerContext[pluginregistration_pb2.InfoRequest, pluginregistration_pb2.PluginInfo],
    ) -> pluginregistration_pb2.PluginInfo:
        self.heard = True
        return pluginregistration_pb2.PluginInfo(
            type="DevicePlugin", name=self._resource, endpoint=str(self._endpoint), supported_versions=[VERSION]
        )

    async def NotifyRegistrationStatus(
        self,
        request: pluginregistration_pb2.RegistrationStatus,
        context: grpc.aio.ServicerContext[
            pluginregistration_pb2.RegistrationStatus, pluginregistration_pb2.RegistrationStatusResponse
        ],
    ) -> pluginregistration_pb2.RegistrationStatusResponse:
        self.heard = True
        self.accepted = request.plugin_registered
        if not request.plugin_registered:
            self._observer.attempted(self._resource, "watcher", "refused")
            self._log.error("kubelet.refused", resource=self._resource, sentence=request.error)
        return pluginregistration_pb2.RegistrationStatusResponse()
