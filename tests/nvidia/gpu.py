"""One GPU of the machine, or one instance of it: its attributes, its memory, and operations of the outside world on it.

See :mod:`tests.nvidia.machine` for the meaning of each file.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid as uuids
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tests.nvidia.build import exported_functions

if TYPE_CHECKING:
    from tests.nvidia.machine import Machine

__all__ = ["HEALTHY", "MIB", "NAMES", "Gpu", "Instance", "Subject", "known", "write"]

MIB = 1 << 20

NAMES = uuids.UUID("6f1d0f0e-2f4b-4f0e-9d6c-3b1f5f0a7c11")
"""Namespace of the devices' UUIDs, which are derived from their numbers: they are the same in each machine, so that
the output of tests can be compared."""

_XID, _DOUBLE_BIT_ECC, _MIG_CHANGED = 0x8, 0x2, 0x100

HEALTHY: Mapping[str, str] = {
    "name": "NVIDIA H200",
    "brand": "2",
    "architecture": "9",
    "compute_capability": "9.0",
    "multiprocessors": "4",
    "vbios": "96.00.D0.00.01",
    "inforom": "G520.0280.00.05",
    "gsp_firmware": "580.65.06",
    "pci_id": "0x233510DE",
    "virtualization": "0",
    "max_mig_devices": "7",
    "mig_mode": "0",
    "mig_mode_pending": "0",
    "used": "0",
    "ecc_mode": "1",
    "ecc_mode_pending": "1",
    "ecc_mode_default": "1",
    "ecc_corrected_volatile": "0",
    "ecc_corrected_aggregate": "0",
    "ecc_uncorrected_volatile": "0",
    "ecc_uncorrected_aggregate": "0",
    "remapped_rows_correctable": "0",
    "remapped_rows_uncorrectable": "0",
    "remapped_rows_pending": "0",
    "remapped_rows_failure": "0",
    "clocks_event_reasons": "0x1",
    "temperature": "31",
    "performance_state": "0",
    "performance_states": "0",
    "pcie_generation": "5",
    "pcie_generation_max": "5",
    "pcie_width": "16",
    "pcie_width_max": "16",
    "pcie_replays": "0",
    "event_types": "0xFD0B",
    "fields/230": "0",
    "compute_mode": "0",
    "application_clocks": "3201 1980",
    "application_clocks_default": "3201 1980",
    "gpu_locked_clocks": "none",
    "memory_locked_clocks": "none",
    "clock_offsets/0.0": "0 -300 300",
    "clock_offsets/2.0": "0 -500 500",
    "power_limit": "700000",
    "power_limit_default": "700000",
    "power_limit_min": "200000",
    "power_limit_max": "700000",
    "persistence_mode": "0",
    "accounting_mode": "0",
    "accounting_pids": "",
    "accounting_buffer_size": "4000",
    "api_restriction/0": "1",
}
"""A GPU without faults. It has no retired pages (it remaps rows), no automatic boost, no fabric."""


def write(path: Path, text: str) -> None:
    """Replace a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(path)


class Subject:
    """Common parts of a whole GPU and an instance: attributes, and a memory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.directory.name} {self.get('uuid')}>"

    @property
    def uuid(self) -> str:
        return self.text("uuid")

    @property
    def memory(self) -> Path:
        return self.directory / "memory"

    @property
    def usable_bytes(self) -> int:
        """Return the memory available to programs: all except the driver's reserve."""
        return self.number("total") - self.number("reserved")

    def get(self, attribute: str) -> str | None:
        path = self.directory / attribute
        return path.read_text().strip() if path.is_file() else None

    def text(self, attribute: str) -> str:
        found = self.get(attribute)
        assert found is not None, f"{self.directory} has no attribute {attribute}"
        return found

    def number(self, attribute: str) -> int:
        return int(self.text(attribute), 0)

    def set(self, attribute: str, value: str | int) -> None:
        write(self.directory / attribute, f"{value}\n")

    def unset(self, *attributes: str) -> None:
        for attribute in attributes:
            (self.directory / attribute).unlink(missing_ok=True)

    def fill(self, text: str) -> None:
        """Fill the memory with ``text``."""
        pattern, size = text.encode(), self.usable_bytes
        self.memory.write_bytes((pattern * (size // len(pattern) + 1))[:size])

    def content(self) -> bytes:
        return self.memory.read_bytes()

    def _make_memory(self) -> None:
        with self.memory.open("wb") as file:
            file.truncate(self.usable_bytes)


class Instance(Subject):
    """A MIG instance; created by :meth:`Gpu.split`."""

    @property
    def ids(self) -> tuple[int, int]:
        """The ids of GPU instance and compute instance."""
        return self.number("gi"), self.number("ci")


class Gpu(Subject):
    """One GPU, and operations of the outside world on it."""

    def __init__(self, machine: Machine, number: int) -> None:
        super().__init__(machine.root / "state" / "gpus" / str(number))
        self.machine = machine
        self.index = number

    @property
    def node(self) -> Path:
        """Its device node; open it with ``O_NOCTTY``, because it is a terminal."""
        return self.machine.root / "dev" / f"nvidia{self.text('minor')}"

    @property
    def pci_address(self) -> str:
        """Its PCI address as in sysfs: ``0000:1b:00.0``."""
        domain, bus, rest = self.text("pci").lower().split(":")
        return f"{domain[-4:]}:{bus}:{rest}"

    @property
    def pci_device(self) -> Path:
        """Its directory on the PCI bus."""
        return self.machine.root / "sys/bus/pci/devices" / self.pci_address

    @property
    def instances(self) -> tuple[Instance, ...]:
        return tuple(Instance(each) for each in sorted((self.directory / "mig").glob("[0-9]*")))

    # --- faults

    def fail(self, function: str, code: int) -> None:
        """Make ``function`` return ``code`` for this GPU."""
        self.set(f"errors/{known(function)}", code)

    def heal(self) -> None:
        """Remove all errors and hangs."""
        for name in ("errors", "hangs", "stubborn"):
            shutil.rmtree(self.directory / name, ignore_errors=True)
        self.unset("error", "hang", "reset")

    def hang(self, function: str | None = None) -> None:
        """Make calls about this GPU hang forever: all of them, or those of ``function``."""
        self.set("hang" if function is None else f"hangs/{known(function)}", "")

    def lose(self) -> None:
        """Let it fall off the bus."""
        self.set("error", 15)

    def need_reset(self) -> None:
        """Make every call return that the GPU must be reset."""
        self.set("error", 16)

    def refuse_changes(self, attribute: str) -> None:
        """Make setters of ``attribute`` succeed without effect."""
        self.set(f"stubborn/{attribute}", "")

    def fail_resets(self) -> None:
        self.set("reset", "fail")

    def hang_resets(self) -> None:
        self.set("reset", "hang")

    def raise_event(self, kind: int, data: int = 0, instance: Instance | None = None) -> None:
        """Send an event to every process that registered for events of ``kind``."""
        ids = "" if instance is None else " {} {}".format(*instance.ids)
        with (self.directory / "events").open("a") as file:
            file.write(f"{kind} {data}{ids}\n")

    def raise_xid(self, code: int, instance: Instance | None = None) -> None:
        self.raise_event(_XID, code, instance)

    def add_ecc_errors(self, errors: int) -> None:
        """Add uncorrected errors, to the volatile and the aggregate count, and send an event."""
        for attribute in ("ecc_uncorrected_volatile", "ecc_uncorrected_aggregate"):
            self.set(attribute, self.number(attribute) + errors)
        self.raise_event(_DOUBLE_BIT_ECC)

    # --- users

    def add_process(
        self, pid: int, used_bytes: int | None = 0, *, list_name: str = "compute", instance: Instance | None = None
    ) -> None:
        """List ``pid`` until :meth:`remove_process`, whether or not it lives; None bytes: NVML does not know."""
        ids = "" if instance is None else " {} {}".format(*instance.ids)
        lines = self._listed(list_name)
        lines.append(f"{pid} {'-' if used_bytes is None else used_bytes}{ids}")
        self.set(f"processes/{list_name}", "\n".join(lines))

    def remove_process(self, pid: int, *, list_name: str = "compute") -> None:
        kept = [line for line in self._listed(list_name) if line.split()[0] != str(pid)]
        self.set(f"processes/{list_name}", "\n".join(kept))

    def _listed(self, list_name: str) -> list[str]:
        return [line for line in (self.get(f"processes/{list_name}") or "").splitlines() if line.strip()]

    def attached(self) -> tuple[int, ...]:
        """The PIDs of all processes that made the driver open this GPU, in order."""
        return tuple(int(line) for line in (self.get("attached") or "").split())

    def resets(self) -> int:
        """Return how often it was reset."""
        return len((self.get("resets") or "").splitlines())

    def link(self, number: int, remote: Gpu | str, *, active: bool = True) -> None:
        """Add an NVLink to another GPU, or to the switch at a PCI address."""
        address, kind = (remote, 2) if isinstance(remote, str) else (remote.text("pci"), 0)
        self.set(f"nvlink/{number}", f"{int(active)} {address} {kind} 0 0 0 0 0")

    def place_near(self, other: Gpu, level: int) -> None:
        """Make the two GPUs meet on the PCI bus at ``level``, one of NVML's ``NVML_TOPOLOGY_…``."""
        self.set(f"topology/{other.index}", level)
        other.set(f"topology/{self.index}", level)

    # --- MIG

    def split(self, *profiles: str) -> tuple[Instance, ...]:
        """Partition it into instances of ``profiles`` (``1g.18gb``), each with a share of its memory by its slices."""
        self.set("mig_mode", 1)
        self.set("mig_mode_pending", 1)
        for number, profile in enumerate(profiles):
            self._make_instance(number, profile)
        self._publish_instances()
        return self.instances

    def merge(self) -> None:
        """Remove all instances and disable MIG mode."""
        shutil.rmtree(self.directory / "mig", ignore_errors=True)
        self.set("mig_mode", 0)
        self.set("mig_mode_pending", 0)
        self._publish_instances()

    def _publish_instances(self) -> None:
        self.machine.write_mig_minors()
        self.raise_event(_MIG_CHANGED)

    def _make_instance(self, number: int, profile: str) -> None:
        matched = re.fullmatch(r"(?:(\d)c\.)?(\d)g\.(\d+)gb(?:\+.*)?", profile)
        assert matched is not None, f"{profile} is no MIG profile"
        slices = int(matched[2])
        compute_slices = int(matched[1] or slices)
        reserved = self.number("reserved") // 8
        share = self.usable_bytes // 8 // MIB * MIB * (8 if slices == 7 else slices)
        assert share, f"{self.usable_bytes} bytes are too few to be split; make the GPU larger"
        made = Instance(self.directory / "mig" / str(number))
        values: dict[str, str | int] = {
            "gi": number + 1,
            "ci": 0,
            "name": f"{self.text('name')} MIG {profile}",
            "architecture": self.text("architecture"),
            "compute_capability": self.text("compute_capability"),
            "multiprocessors": max(1, self.number("multiprocessors") * compute_slices // 8),
            "gpu_slices": slices,
            "compute_slices": compute_slices,
            "profile_megabytes": int(matched[3]) * 1024 - 256,
            "total": share + reserved,
            "reserved": reserved,
            "used": 0,
        }
        for attribute, value in values.items():
            made.set(attribute, value)
        made._make_memory()
        # last, because an instance exists once it has a UUID
        made.set("uuid", f"MIG-{uuids.uuid5(NAMES, f'{self.uuid} {number} {profile}')}")


def known(function: str) -> str:
    """Return ``function``, if the library has it; a test with a misspelled name would prove nothing."""
    assert function in exported_functions(), f"the stand-in has no {function}"
    return function
