"""The DRA driver's two sockets: the kubelet's calls about claims, and the kubelet's registration of the driver."""

from __future__ import annotations

import asyncio
import io
import json
import os
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from plugin.api import dra_health_pb2, dra_v1_pb2, dra_v1beta1_pb2
from plugin.api import pluginregistration_pb2 as registration
from plugin.dra.cdi import ClaimCdiSpecs
from plugin.dra.claim_driver import ClaimDriver, ClaimDriverTimes
from plugin.dra.claims import ClaimIdentity
from plugin.dra.paths import DriverSocketPaths
from plugin.dra.registration import SUPPORTED_VERSIONS, DriverRegistration, DriverRegistrationTimes
from plugin.dra.server import HealthStream, add_driver_services
from plugin.kubelet.devices import AdvertisedDevice, AdvertisedDevices, ServiceVerdict
from plugin.kubelet.server import INTERNAL_ERROR
from plugin.logs import create_logger
from scrubber.domain.device import Access, AccessKind
from tests.dra_collaborators import FakeClaimApi, FakeClaimService, FakeWithdrawal, allocated_claim
from tests.fuzz.connections import CONNECTION_SEEDS, CONNECTION_WORDS, DEADLINE, call, frames, send
from tests.fuzz.loop import complete, directory, on_close
from tests.fuzz.target import SOCKET_GOAL, target

_DRIVER, _POOL = "gpu.scrubber.dev", "node-1"
_UIDS = tuple(f"{digit * 8}-2222-3333-4444-555555555555" for digit in "1279")
_ONE, _TWO, _ELSEWHERE, _ABSENT = (
    ClaimIdentity("team-a", name, uid) for name, uid in zip(("one", "two", "elsewhere", "absent"), _UIDS, strict=True)
)
_PREPARABLE: Final = {_ONE: ("sim-0",), _TWO: ("sim-0", "sim-1")}
"""Claims whose devices this node has, with those devices."""


class _Lines(io.StringIO):
    """The lines of the log since :meth:`taken` was last called."""

    def __init__(self) -> None:
        super().__init__()
        self.serving = asyncio.Event()

    def write(self, text: str) -> int:
        if "plugin.serving" in text:
            self.serving.set()
        return super().write(text)

    def taken(self) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.getvalue().splitlines()]
        self.seek(0)
        self.truncate()
        return lines


@dataclass(frozen=True)
class _Served:
    directory: Path
    paths: DriverSocketPaths
    service: FakeClaimService
    registration: DriverRegistration
    log: _Lines
    stack: AsyncExitStack
    calls: grpc.aio.Channel
    registry: grpc.aio.Channel

    @property
    def specified(self) -> set[str]:
        """The UIDs of the claims with a CDI specification."""
        prefix = f"{_DRIVER}-claim_"
        names = {name for name in os.listdir(self.directory / "cdi") if not name.endswith("-claims.lock")}
        assert all(name.startswith(prefix) and name.endswith(".json") for name in names), names
        return {name.removeprefix(prefix).removesuffix(".json") for name in names}


def _device(number: int) -> AdvertisedDevice:
    access = (Access(AccessKind.MOUNT, f"/sim/{number}", f"/dev/simgpu{number}"),)
    return AdvertisedDevice(f"SIM-{number}", str(number), ServiceVerdict.ADVERTISED, healthy=True, access=access)


async def _serve(top: Path) -> _Served:
    for name in ("cdi", "plugins", "registry"):
        (top / name).mkdir()
    lines = _Lines()
    log = create_logger("json", "info", lines)
    advertised = AdvertisedDevices()
    await advertised.update((_device(0), _device(1)), "one")
    service, api, located = FakeClaimService(), FakeClaimApi(), asyncio.Event()
    for ref, devices in {**_PREPARABLE, _ELSEWHERE: ("sim-7",)}.items():
        api.add(allocated_claim(ref, *(f"main:{each}" for each in devices)))
    driver = ClaimDriver(
        _DRIVER,
        _POOL,
        service=service,
        api=api,
        devices=advertised,
        specs=ClaimCdiSpecs(top / "cdi", _DRIVER, log=log),
        withdrawal=FakeWithdrawal(),
        gpu_driver_located=located,
        was_ready=lambda: True,
        times=ClaimDriverTimes(call=DEADLINE, margin=0.0),
        log=log,
        clock=time.monotonic,
    )
    paths = DriverSocketPaths(_DRIVER, top / "plugins", top / "registry")
    numbers = count()
    kept = DriverRegistration(
        paths,
        add_services=lambda server: add_driver_services(
            server, driver, HealthStream(_POOL, advertised, interval=DEADLINE)
        ),
        times=DriverRegistrationTimes(),
        token=lambda: f"{next(numbers):08x}",
        log=log,
        clock=time.monotonic,
    )
    task = asyncio.create_task(kept.run())
    stack = AsyncExitStack()

    async def stop() -> None:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    stack.push_async_callback(stop)
    async with asyncio.timeout(DEADLINE):
        await lines.serving.wait()
    calls, registry = await _channels(stack, paths.calls_socket, paths.registration_socket)
    return _Served(top, paths, service, kept, lines, stack, calls, registry)


async def _channels(stack: AsyncExitStack, *sockets: Path) -> tuple[grpc.aio.Channel, ...]:
    return tuple([await stack.enter_async_context(grpc.aio.insecure_channel(f"unix:{path}")) for path in sockets])


@cache
def _driver() -> _Served:
    served = complete(_serve(directory()))

    def stop() -> None:
        complete(served.stack.aclose())
        _driver.cache_clear()

    on_close(stop)
    return served


def _methods() -> Iterator[tuple[str, type[Any], type[Any]]]:
    for file in (dra_v1_pb2, dra_v1beta1_pb2, dra_health_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                types = (getattr(file, each.name) for each in (method.input_type, method.output_type))
                yield (f"/{service.full_name}/{method.name}", *types)


_METHODS: Final = tuple(_methods())


def _request(number: int, *claims: ClaimIdentity) -> bytes:
    found = _METHODS[number][1](
        claims=[{"namespace": each.namespace, "name": each.name, "uid": each.uid} for each in claims]
    )
    return bytes((number,)) + bytes(found.SerializeToString())


@target(
    "claim-requests",
    parser="the kubelet's requests on the DRA driver's socket",
    covers=("plugin.dra.server", "plugin.dra.claim_driver", "plugin.dra.cdi"),
    oracle="exactly the claims of the request are answered; a claim is prepared if and only if the API server has it with this "
    "UID and with devices of this node, and exactly the prepared claims have a CDI specification",
    seeds=(
        *(_request(number, _ONE) for number in range(4)),
        *(_request(number, _ONE, _TWO, _ABSENT) for number in range(4)),
        _request(0, _ELSEWHERE),
        _request(0, ClaimIdentity(_ONE.namespace, _ONE.name, _TWO.uid)),
        _request(0, _ONE, ClaimIdentity("team-b", "gone", _ONE.uid)),
        _request(1, ClaimIdentity("", "", "../../x")),
        b"\4",
    ),
    words=(
        *(each.encode() for each in _UIDS),
        b"team-a",
        b"one",
        b"two",
        b"elsewhere",
        b"../",
        b"\x0a\x24",
        b"\x1a\x24",
    ),
    longest=512,
    seconds=60,
    goal=SOCKET_GOAL,
    share=60,
)
def claim_requests(data: bytes) -> bool:
    served = _driver()
    name, request_type, answer_type = _METHODS[(data[0] if data else 0) % len(_METHODS)]
    status, answers = complete(call(served.calls, name, data[1:], answers=1))
    requested = [uid for uid, *_ in served.service.requests]
    for each in (served.service.requests, served.service.released, served.service.waits):
        each.clear()
    served.service.extended_resources.clear()
    served.log.taken()
    assert served.specified == set(served.service.prepared), (
        "a specification without a prepared claim, or none with one"
    )
    try:
        request = request_type.FromString(data[1:])
    except DecodeError:
        assert status is grpc.StatusCode.UNKNOWN, "the library's answer to what is not protobuf"
        assert not requested
        return False
    assert status is grpc.StatusCode.OK, (name, status)
    answer = answer_type.FromString(answers[0])
    if name.endswith("WatchResources"):
        assert [each.device.device_name for each in answer.devices] == ["sim-0", "sim-1"]
        return True
    claims = {each.uid: ClaimIdentity(each.namespace, each.name, each.uid) for each in request.claims}
    assert answer.claims.keys() == claims.keys()
    assert INTERNAL_ERROR not in [each.error for each in answer.claims.values()], request
    if name.endswith("NodeUnprepareResources"):
        assert not any(each.error for each in answer.claims.values())
        assert not claims.keys() & served.service.prepared.keys()
        return bool(claims)
    for uid, each in answer.claims.items():
        devices = _PREPARABLE.get(claims[uid], ())
        assert bool(each.error) == (not devices), each.error
        assert [one.device_name for one in each.devices] == list(devices)
        assert all(f"{_DRIVER}/claim={uid}-{one.device_name}" in one.cdi_device_ids for one in each.devices)
    assert sorted(requested) == sorted(uid for uid, each in answer.claims.items() if not each.error)
    return bool(requested)


_REGISTRATION: Final = registration.DESCRIPTOR.services_by_name["Registration"]


def _status(*, registered: bool, error: str = "") -> bytes:
    return b"\1" + registration.RegistrationStatus(plugin_registered=registered, error=error).SerializeToString()


@target(
    "registration-requests",
    parser="the kubelet's requests on the DRA driver's registration socket",
    covers=("plugin.dra.registration", "plugin.kubelet.registration"),
    oracle="the driver describes itself with the same information at all times, counts as registered if the kubelet said so "
    "last, and a refusal is one line of the log with the kubelet's reason",
    seeds=(
        b"\0",
        _status(registered=True),
        _status(registered=False, error="no such version"),
        _status(registered=False, error='a\nb\u2028{"event": "kubelet.registered"}'),
    ),
    words=(b"\x08\1", b"\x08\0", b"\x12\4", b"\n{", b"\x1b[2J"),
    longest=256,
    seconds=30,
    goal=SOCKET_GOAL,
    share=60,
)
def registration_requests(data: bytes) -> bool:
    served = _driver()
    method = _REGISTRATION.methods[(data[0] if data else 0) % len(_REGISTRATION.methods)]
    before = served.registration.is_registered
    status, _ = complete(call(served.registry, f"/{_REGISTRATION.full_name}/{method.name}", data[1:], answers=1))
    refusals = [each for each in served.log.taken() if each["event"] == "kubelet.registration-refused"]
    _check_info(served)
    try:
        request = getattr(registration, method.input_type.name).FromString(data[1:])
    except DecodeError:
        assert status is grpc.StatusCode.UNKNOWN, "the library's answer to what is not protobuf"
        assert served.registration.is_registered == before
        return False
    assert status is grpc.StatusCode.OK, status
    if method.name == "GetInfo":
        assert served.registration.is_registered == before
        return True
    assert served.registration.is_registered == request.plugin_registered
    assert [each["message"] for each in refusals] == ([] if request.plugin_registered else [request.error])
    return True


def _check_info(served: _Served) -> None:
    status, answers = complete(call(served.registry, f"/{_REGISTRATION.full_name}/GetInfo", b"", answers=1))
    assert status is grpc.StatusCode.OK, status
    info = registration.PluginInfo.FromString(answers[0])
    assert (info.type, info.name, info.endpoint) == ("DRAPlugin", _DRIVER, str(served.paths.calls_socket))
    assert tuple(info.supported_versions) == SUPPORTED_VERSIONS


@target(
    "driver-connections",
    parser="raw bytes and HTTP/2 frames on the DRA driver's sockets",
    covers=("plugin.dra.registration", "plugin.dra.server"),
    oracle="the server ends the connection once the client has ended it, and both sockets answer the next caller",
    seeds=CONNECTION_SEEDS,
    words=CONNECTION_WORDS,
    longest=512,
    seconds=60,
    goal=SOCKET_GOAL,
    share=40,
)
def driver_connections(data: bytes) -> bool:
    served = _driver()
    answer = complete(send((served.paths.calls_socket, served.paths.registration_socket)[sum(data) % 2], frames(data)))
    _check_info(served)
    status, answers = complete(call(served.calls, _METHODS[4][0], b"", answers=1))
    assert status is grpc.StatusCode.OK, status
    assert len(dra_health_pb2.NodeWatchResourcesResponse.FromString(answers[0]).devices) == 2
    served.log.taken()
    return bool(answer)
