"""The simulated node fulfils the contract of every backend, and belongs to one service at a time."""

import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scrubber.adapters.sim import shape
from scrubber.adapters.sim.backend import SimBackend
from scrubber.domain.errors import AlreadyRunning, InvalidConfiguration
from tests.adapters.backend_contract import BackendContract
from tests.adapters.sim_rig import Sim, make


class TestSimBackend(BackendContract):
    @pytest.fixture
    async def rig(self, tmp_path: Path) -> AsyncIterator[Sim]:
        backend = SimBackend(make(tmp_path / "sim"), driver_call_timeout=2.0)
        await backend.start()
        sim = Sim(tmp_path / "sim", backend)
        yield sim
        sim.close()
        await backend.close()
        assert backend.children.pids() == frozenset()


@pytest.fixture
async def sim(tmp_path: Path) -> AsyncIterator[Sim]:
    backend = SimBackend(make(tmp_path / "sim", mebibytes=1))
    await backend.start()
    sim = Sim(tmp_path / "sim", backend)
    yield sim
    sim.close()
    await backend.close()


SERVICE = """
import asyncio, sys
from pathlib import Path
from scrubber.adapters.sim.backend import SimBackend
async def main():
    await SimBackend(Path(sys.argv[1])).start()
    print('{"ready": true}', flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_second_service_on_the_simulated_node_is_refused_by_name(sim: Sim) -> None:
    second = SimBackend(sim.directory)
    with pytest.raises(AlreadyRunning, match=rf"PID {os.getpid()}.* stop it first, or .*--sim-dir"):
        await second.start()
    await second.close()  # and changes nothing for the first
    with pytest.raises(AlreadyRunning):
        await SimBackend(sim.directory).start()


async def test_simulated_node_is_free_again_after_its_service_is_closed_or_killed(tmp_path: Path) -> None:
    directory = make(tmp_path / "sim", mebibytes=1)
    backend = SimBackend(directory)
    sim = Sim(directory, backend)
    killed = sim.run([sys.executable, "-c", SERVICE, str(directory)]).until_ready()
    with pytest.raises(AlreadyRunning, match=f"PID {killed.pid}"):
        await backend.start()
    sim.close()
    for _ in range(2):
        await backend.start()
        await backend.close()
        backend = SimBackend(directory)


async def test_lock_of_the_simulated_node_does_not_follow_a_symlink(tmp_path: Path) -> None:
    directory = make(tmp_path / "sim", mebibytes=1)
    (directory / "locks" / "service").symlink_to(directory / "elsewhere")
    with pytest.raises(InvalidConfiguration, match="locks/service"):
        await SimBackend(directory).start()
    assert not (directory / "elsewhere").exists()


async def test_device_layout_can_change_and_a_tenant_can_run_while_a_service_uses_the_node(sim: Sim) -> None:
    device, other = await sim.backend.inventory.devices()
    parts = shape.split(sim.directory, device.id, 2)
    handed_out = await sim.backend.inventory.devices()
    assert [each.id for each in handed_out] == [*(part.device.id for part in parts), other.id]
    shape.merge(sim.directory, device.id)
    with sim.hold(other):
        assert await sim.backend.holders.is_held(other)
