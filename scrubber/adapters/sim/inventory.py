"""The devices of the simulated node, and where their files are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from scrubber.adapters.kernel_text import value_in
from scrubber.adapters.sim.control import boot_count, is_driver_absent, read_combined_faults
from scrubber.adapters.sim.layout import SimDevice, SimNode, load_node, read_node
from scrubber.domain.device import Device, NodeIdentity
from scrubber.domain.errors import DeviceLost, InvalidConfiguration, Unavailable, Unreadable

__all__ = ["SimInventory"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SimInventory:
    """:class:`scrubber.ports.Inventory` of a directory; also provides the other adapters with a device's files.

    A device whose description breaks while the service runs stays in the list as last read: requests about it then find
    it unreadable and it is quarantined, instead of vanishing from the node's capacity.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory.absolute()
        self._known_devices: dict[str, SimDevice] = {}
        self._firmware: dict[str, str] = {}

    async def devices(self) -> tuple[Device, ...]:
        node = self._read_with_driver(load_node)
        unsound = {*node.broken_devices, *self._conflicting_indexes(node)}
        kept = [self._known_devices[index] for index in unsound if index in self._known_devices]
        self._known_devices = {
            found.device.index: found
            for found in (*(each for each in node.devices if each.device.index not in unsound), *kept)
        }
        handed_out = (found for found in self._known_devices.values() if not found.has_instances)
        return tuple(sorted(map(self._with_firmware, handed_out), key=_order))

    async def identity(self) -> NodeIdentity:
        node = self._read_with_driver(read_node)  # first: it raises for a malformed node file
        boot, pretended = value_in(_BOOT_ID.read_bytes()), boot_count(self._directory)
        return NodeIdentity(node=node.name, boot=f"{boot}-{pretended}" if pretended else boot, driver=node.driver)

    def find_sim_device(self, device: Device) -> SimDevice:
        """Return where the files of ``device`` are.

        Raises:
            DeviceLost: the device or the node no longer exists.
        """
        found = self._known_devices.get(device.index)
        if found is None or found.device.id != device.id:
            try:
                node = load_node(self._directory)
            except InvalidConfiguration as error:
                raise DeviceLost(str(error)) from error
            found = next((each for each in node.devices if each.device.id == device.id), None)
            if found is not None and found.device.index == device.index:
                self._known_devices[device.index] = found
        if found is None or found.device.index != device.index:
            raise DeviceLost(f"Device {device.index} ({device.id}) no longer exists.")
        return found

    def _conflicting_indexes(self, node: SimNode) -> set[str]:
        """Return the indexes of devices that took the id of another one, which that broke: both stay as last read."""
        owners = {found.device.id: index for index, found in self._known_devices.items()}
        return {
            found.device.index
            for found in node.devices
            if (owner := owners.get(found.device.id)) is not None
            and owner != found.device.index
            and owner in node.broken_devices
        }

    def _with_firmware(self, found: SimDevice) -> Device:
        """Return the device with its firmware. Where its faults are unreadable, the last known firmware is used."""
        try:
            self._firmware[found.device.id] = read_combined_faults(found.control_directories).firmware
        except Unreadable:
            if found.device.id not in self._firmware:
                return found.device
        return replace(found.device, traits=(("vbios", self._firmware[found.device.id]),))

    def _read_with_driver(self, read: Callable[[Path], SimNode]) -> SimNode:
        """Return the node as ``read`` finds it, if there is a driver to report it."""
        try:
            node, absent = read(self._directory), is_driver_absent(self._directory)
        except (InvalidConfiguration, Unreadable) as error:
            raise Unavailable(str(error)) from error
        if absent:
            raise Unavailable("The driver is not loaded.")
        return node


def _order(device: Device) -> tuple[int, ...]:
    return tuple(int(part) for part in device.index.split(":"))
