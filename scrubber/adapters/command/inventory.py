"""The inventory of a command: its devices as it lists them, checked, with the digest of the command in their driver version."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from scrubber.adapters.command.answers import Answer, Verb
from scrubber.adapters.command.runner import CommandRunner
from scrubber.adapters.kernel_text import value_in
from scrubber.adapters.locks import is_device_id
from scrubber.domain.device import Access, AccessKind, Device, NodeIdentity

__all__ = ["CommandInventory", "parse_devices"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_INDEX = re.compile(r"[0-9]{1,4}(:[0-9]{1,4})?")
_PCI = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CDI = re.compile(r"[A-Za-z0-9.-]+/[A-Za-z0-9_.-]+=[A-Za-z0-9_.:-]+")
_DIGEST_CHARACTERS = len("sha256:") + 12


class CommandInventory:
    """:class:`scrubber.ports.Inventory`. The driver version of a device changes with the command, which voids its certificates."""

    def __init__(self, runner: CommandRunner, node: str) -> None:
        self._runner = runner
        self._node = node
        self.last_devices: tuple[Device, ...] = ()

    async def devices(self) -> tuple[Device, ...]:
        digest, answer = await self._list()
        found = tuple(replace(each, claimed_by=f"command {digest}") for each in parse_devices(answer))
        self._runner.digest, self.last_devices = digest, found
        return found

    async def identity(self) -> NodeIdentity:
        digest, answer = await self._list()
        driver = f"{answer.text('driver')} (command {digest[:_DIGEST_CHARACTERS]})"
        return NodeIdentity(self._node, value_in(_BOOT_ID.read_bytes()), driver)

    async def _list(self) -> tuple[str, Answer]:
        digest = self._runner.check_digest()
        if digest != self._runner.digest or not self._runner.verbs:
            await self._runner.load_capabilities()
        return digest, await self._runner.run(Verb.INVENTORY)


def parse_devices(answer: Answer) -> tuple[Device, ...]:
    """Return the devices that a command lists, ordered by index.

    Raises:
        BrokenCommand: the list is invalid.
    """
    answer.text("driver")
    found = [_device(answer.part(each, f"devices[{at}]")) for at, each in enumerate(answer.objects("devices"))]
    for name, values in {"id": [each.id for each in found], "index": [each.index for each in found]}.items():
        twice = next((each for each in values if values.count(each) > 1), None)
        if twice is not None:
            raise answer.broken(f"two devices have the {name} {twice}")
    return tuple(sorted(found, key=lambda each: tuple(int(part) for part in each.index.split(":"))))


def _device(answer: Answer) -> Device:
    name, index = answer.text("id"), answer.text("index")
    if not is_device_id(f"{name}.query") or not is_device_id(name):
        raise answer.broken(
            f"the id {name!r} is longer than 120 characters, or has others than letters, digits and :._-"
        )
    if not _INDEX.fullmatch(index):
        raise answer.broken(f"the index {index!r} of {name} is not a number such as 0, or 0:1 for a part of a device")
    pci = answer.text("pci", "")
    if pci and not _PCI.fullmatch(pci):
        raise answer.broken(f"the PCI address {pci!r} of {name} is not of the form 0000:3b:00.0")
    parent = answer.text("parent", "")
    return Device(
        name,
        index,
        answer.text("model"),
        answer.required_number("memoryBytes"),
        parent=parent or None,
        numa_node=answer.number("numaNode", maximum=4096),
        peers=frozenset(answer.texts("peers")) - {name},
        access=_access(answer),
        traits=(("pci_address", pci),) if pci else (),
    )


def _access(answer: Answer) -> tuple[Access, ...]:
    found: list[Access] = []
    for at, each in enumerate(answer.objects("nodes")):
        node = answer.part(each, f"nodes[{at}]")
        path = node.text("path")
        inside = node.text("containerPath", path)
        if not _is_plain_path(path) or not _is_plain_path(inside):
            raise answer.broken(f"the node {path!r} is not an absolute path without .. and //")
        kind = AccessKind.MOUNT if Path(path).is_file() else AccessKind.DEVICE_NODE
        found.append(Access(kind, path, inside))
    for name, value in answer.text_mapping("environment").items():
        if not _VARIABLE.fullmatch(name):
            raise answer.broken(f"{name!r} is not the name of an environment variable")
        found.append(Access(AccessKind.ENVIRONMENT, value, name))
    for name in answer.texts("cdi"):
        if not _CDI.fullmatch(name):
            raise answer.broken(f"{name!r} is not the name of a CDI device, such as vendor.com/class=0")
        found.append(Access(AccessKind.CDI, name, ""))
    return tuple(found)


def _is_plain_path(path: str) -> bool:
    return path.startswith("/") and str(Path(path)) == path and ".." not in Path(path).parts
