"""Two simulated nodes as one backend: it fulfils the contract, and a failure in one node does not affect the other."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from scrubber.adapters.sim import control
from scrubber.adapters.sim.backend import SimBackend
from scrubber.adapters.sim.layout import HOST_MEMORY, load_node
from scrubber.composite_backend import composite_backend
from scrubber.domain.device import Device, NodeIdentity, find_device
from scrubber.domain.errors import InvalidRequest, Unavailable, Unreadable
from scrubber.domain.telemetry import Signal, Snapshot
from scrubber.ports.device import DeviceBackend
from tests.adapters.backend_contract import BackendContract, ignore_progress, request
from tests.adapters.sim_rig import Sim, make

FIRST, SECOND = "first", "second"


def ports_of(backend: SimBackend) -> DeviceBackend:
    return DeviceBackend(
        inventory=backend.inventory,
        holders=backend.holders,
        telemetry=backend.telemetry,
        settings=backend.settings,
        resetter=backend.resetter,
        eraser=backend.eraser,
        diagnostics=backend.diagnostics,
        children=backend.children,
    )


@asynccontextmanager
async def opened(backend: SimBackend, ports: DeviceBackend) -> AsyncIterator[DeviceBackend]:
    await backend.start()
    try:
        yield ports
    finally:
        await backend.close()


class Both:
    """The rig of the contract over two nodes of one device each."""

    error_signal = "xid"

    def __init__(self, backend: DeviceBackend, sims: Mapping[str, Sim], places: Mapping[str, Path]) -> None:
        self.backend = backend
        self.sims = sims
        self.places = places

    def of(self, device: Device) -> Sim:
        return next(self.sims[name] for name, place in self.places.items() if device.id in _ids(place))

    async def two(self) -> tuple[Device, Device]:
        first, second = await self.backend.inventory.devices()
        return first, second

    def fill(self, device: Device, text: str) -> None:
        self.of(device).fill(device, text)

    def content(self, device: Device) -> bytes:
        return self.of(device).content(device)

    def hold(self, device: Device) -> AbstractContextManager[int]:
        return self.of(device).hold(device)

    def raise_error(self, device: Device, code: int) -> None:
        self.of(device).raise_error(device, code)

    def add_ecc_errors(self, device: Device, errors: int) -> None:
        self.of(device).add_ecc_errors(device, errors)

    def lose(self, device: Device) -> None:
        self.of(device).lose(device)

    def hang(self, device: Device) -> None:
        self.of(device).hang(device)

    def fail_resets(self, device: Device) -> None:
        self.of(device).fail_resets(device)

    def tamper(self, device: Device) -> tuple[str, str]:
        return self.of(device).tamper(device)

    def remove_driver(self) -> None:
        for sim in self.sims.values():
            sim.remove_driver()


def _ids(place: Path) -> set[str]:
    return {each.device.id for each in load_node(place).devices}


@asynccontextmanager
async def both(directory: Path, **replaced: object) -> AsyncIterator[Both]:
    """Provide two nodes side by side; ``replaced`` are ports that replace those of the first node."""
    places = {name: make(directory / name, devices=1) for name in (FIRST, SECOND)}
    backends = {name: SimBackend(place, driver_call_timeout=2.0) for name, place in places.items()}
    ports = {name: ports_of(backend) for name, backend in backends.items()}
    ports[FIRST] = replace(ports[FIRST], **replaced)  # type: ignore[arg-type]
    async with composite_backend({name: opened(backends[name], ports[name]) for name in places}) as backend:
        sims = {name: Sim(places[name], backends[name]) for name in places}
        await backend.inventory.devices()
        yield Both(backend, sims, places)
        for sim in sims.values():
            sim.close()
    assert [each.children.pids() for each in backends.values()] == [frozenset(), frozenset()]


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Both]:
    async with both(tmp_path) as rig:
        yield rig


class TestCompositeBackend(BackendContract):
    """The contract, over a device of each node."""


async def well(rig: Both, device: Device) -> None:
    """Assert that every port answers for ``device``."""
    ports = rig.backend
    assert (await ports.telemetry.snapshot(device)).device == device.id
    assert not await ports.holders.is_held(device)
    assert (await ports.eraser.erase(device, request(), ignore_progress)).failed_bytes == 0
    await ports.resetter.reset(device, 10.0)


async def test_simulated_devices_of_both_backends_share_the_memory_of_their_host(rig: Both) -> None:
    assert {device.shared_resource for device in await rig.two()} == {HOST_MEMORY}


async def test_missing_driver_affects_only_its_own_backends_devices(rig: Both) -> None:
    first, second = await rig.two()
    rig.sims[FIRST].remove_driver()
    assert await rig.two() == (first, second)
    with pytest.raises(Unreadable):
        await rig.backend.telemetry.snapshot(first)
    await well(rig, second)
    assert list(rig.backend.not_advertised()) == [FIRST]
    control.clear_faults(rig.places[FIRST])
    assert await rig.two() == (first, second)
    await well(rig, first)
    assert rig.backend.not_advertised() == {}


class Defective:
    """Telemetry that raises an error outside the port's contract."""

    async def snapshot(self, device: Device) -> Snapshot:
        raise RuntimeError("a defect")

    def signals(self) -> AsyncIterator[Signal]:
        raise RuntimeError("a defect")


async def test_defect_in_one_backend_affects_only_its_own_devices(tmp_path: Path) -> None:
    async with both(tmp_path, telemetry=Defective()) as rig:
        first, second = await rig.two()
        signals = rig.backend.telemetry.signals()
        with pytest.raises(Unreadable, match=r"backend first raised an unexpected error: RuntimeError\('a defect'\)"):
            await rig.backend.telemetry.snapshot(first)
        rig.raise_error(second, 95)
        async with asyncio.timeout(20):
            while await anext(signals) != Signal(second.id, "xid", 95):
                continue
        await well(rig, second)


class Changing:
    """An inventory whose driver is loaded later, and replaced."""

    def __init__(self) -> None:
        self.driver = ""

    async def devices(self) -> tuple[Device, ...]:
        return (Device("later", "0", "Toy 1", 1),)

    async def identity(self) -> NodeIdentity:
        if not self.driver:
            raise Unavailable("No driver is loaded.")
        return NodeIdentity("other", "other", self.driver)


async def test_driver_change_in_one_backend_affects_only_its_own_devices(tmp_path: Path) -> None:
    inventory = Changing()
    async with both(tmp_path, inventory=inventory) as rig:
        signals, at_first = rig.backend.telemetry.signals(), await rig.backend.inventory.identity()
        (second,) = await rig.backend.inventory.devices()
        for driver in ("1", "2"):
            inventory.driver = driver
            assert await rig.backend.inventory.identity() == replace(at_first, node="other", boot="other")
            async with asyncio.timeout(20):
                while await anext(signals) != Signal(None, "changed"):
                    continue
            assert await rig.two() == (Device("later", "0", "Toy 1", 1, driver=driver, backend=FIRST), second)
        assert at_first.for_device(second).driver == second.driver != ""


async def test_index_shared_by_two_devices_identifies_no_device(rig: Both) -> None:
    devices = await rig.two()
    with pytest.raises(InvalidRequest, match="index of 2 devices"):
        find_device(devices, "0")
    assert find_device(devices, devices[1].id) == devices[1]


# --- confidential computing


class Mode:
    """:class:`scrubber.ports.ConfidentialComputing` of the first node; the second one has no such mode."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.calls: list[bool] = []

    async def set_accepting(self, accepting: bool) -> None:
        self.calls.append(accepting)

    async def attest(self, device: Device, nonce: bytes) -> str | None:
        return f"{device.id} {nonce.hex()}"


@pytest.mark.parametrize("enabled", [True, False])
async def test_confidential_computing_concerns_only_the_backend_that_is_in_the_mode(
    short_tmp: Path, enabled: bool
) -> None:
    mode = Mode(enabled=enabled)
    async with both(short_tmp, confidential=mode) as rig:
        combined = rig.backend.confidential
        assert combined is not None
        assert combined.enabled is enabled
        await combined.set_accepting(True)
        assert mode.calls == [True] * enabled
        first, second = await rig.two()
        assert await combined.attest(first, b"\x01") == (f"{first.id} 01" if enabled else None)
        assert await combined.attest(second, b"\x01") is None
