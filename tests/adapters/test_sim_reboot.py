"""A reboot of the simulated node: another boot id, a reloaded driver, and never while it is in use."""

from pathlib import Path

import pytest

from scrubber.adapters.sim import control, layout
from scrubber.adapters.sim.backend import SimBackend
from scrubber.adapters.sim.control import Faults
from scrubber.adapters.sim.inventory import SimInventory
from scrubber.adapters.sim.reboot import reboot
from scrubber.domain.errors import AlreadyRunning, DeviceBusy, InvalidConfiguration, Unavailable
from tests.adapters.sim_rig import Sim, make


@pytest.fixture
def node(tmp_path: Path) -> Path:
    return make(tmp_path / "sim", mebibytes=1)


def place(node: Path) -> Path:
    return node / "devices" / "0"


async def boot(node: Path) -> str:
    return (await SimInventory(node).identity()).boot


async def test_each_reboot_has_a_new_boot_id_and_keeps_the_memory(node: Path) -> None:
    (place(node) / "memory").write_bytes(b"secret" * 4096)
    seen = [await boot(node)]
    for _ in range(2):
        reboot(node)
        seen.append(await boot(node))
    assert len(set(seen)) == 3
    assert seen[0] == Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    assert (place(node) / "memory").read_bytes() == b"secret" * 4096


async def test_reboot_lifts_transient_faults_and_keeps_permanent_ones(node: Path) -> None:
    control.add_faults(node, "0", xid=79, ecc=2, recovery="reboot", lost=True, stuck=True, ghost=True, unkillable=True)
    control.add_faults(node, "0", conditions={"row-remap-pending": "", "pcie-width": "x8 of x16"}, wont_clear=True)
    control.add_faults(node, "0", counters={"retired_pages": 3}, driver_absent=True)
    layout.write_json(place(node) / "settings.json", {"power_limit_watts": "100"})
    reboot(node)
    assert control.read_faults(place(node)) == Faults(
        xid_counts={79: 1}, conditions={"pcie-width": "x8 of x16"}, counters={"retired_pages": 3}, wont_clear=True
    )
    assert not control.is_driver_absent(node)
    (found, _) = layout.load_node(node).devices
    assert layout.current_settings(found.directory, found.defaults) == found.defaults


async def test_boot_id_survives_the_drivers_removal_and_return(node: Path) -> None:
    reboot(node)
    before = await boot(node)
    control.add_faults(node, driver_absent=True)
    with pytest.raises(Unavailable):
        await boot(node)
    control.clear_faults(node)
    assert await boot(node) == before


async def test_reboot_is_refused_while_a_service_or_a_tenant_runs(node: Path) -> None:
    before = await boot(node)
    backend = SimBackend(node)
    sim = Sim(node, backend)
    await backend.start()
    with pytest.raises(AlreadyRunning, match="stop it first"):
        reboot(node)
    device, _ = await backend.inventory.devices()
    await backend.close()
    with sim.hold(device), pytest.raises(DeviceBusy, match="stop it first"):
        reboot(node)
    assert await boot(node) == before
    reboot(node)


async def test_node_file_with_an_invalid_boot_count_means_no_driver(node: Path, tmp_path: Path) -> None:
    layout.write_json(node / "control.json", {"driver_absent": False, "boots": "many"})
    with pytest.raises(Unavailable, match="boots"):
        await boot(node)
    with pytest.raises(InvalidConfiguration, match="sim create"):
        reboot(tmp_path)
