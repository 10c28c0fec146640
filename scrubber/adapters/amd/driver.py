"""The child that reads and writes the kernel's files about GPUs: description, health, use, settings, resets.

Every file may block while a GPU is being reset, so this child runs behind
:class:`~scrubber.adapters.children.request_pool.RequestPool`. A request names its GPU by PCI address and by its unique
number, so that a GPU that was replaced is never mistaken for the requested one. Runs as ``python -m
scrubber.adapters.amd.driver ROOT PROC``.

==============  ======================================  ==========================================================
request         besides ``pci``, ``unique_id``          reply
==============  ======================================  ==========================================================
``driver``      (none of those)                         ``version``
``describe``    (``pci`` alone)                         see :func:`_describe`
``used``        ``gpu_id``, ``whole``                   ``used`` in bytes or None, ``processes``: rows of PID, bytes
``memory``      (none of those) ``pids``, ``numbers``   ``processes``: rows of PID, bytes, from the open nodes
``snapshot``    ``gpu_id``, ``whole``                   health, settings, and the reply to ``used``
``restore``     ``wanted``                              ``values``
``clean``       ``partition``                           ``done``: whether the cleaner shader was started
``reset``       (none of those) ``gpus``,               nothing: the driver is unbound from all, and each is reset
                ``memory_modes`` by address
``bind``        (none of those) ``gpus``                nothing: the driver is bound to those that it was unbound from
``partition``   (none of those) ``modes`` by address    nothing: GPUs in another mode are partitioned
==============  ======================================  ==========================================================
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from scrubber.adapters.amd import cper, kernel_files
from scrubber.adapters.amd.driver_settings import read_settings, restore_settings
from scrubber.adapters.amd.kernel_files import AmdPaths, optional_number, optional_text
from scrubber.adapters.children import child
from scrubber.adapters.children.child import Fault
from scrubber.adapters.children.message import Message

__all__ = ["DriverRequestHandler"]

_GONE = frozenset({errno.ENODEV, errno.ENXIO})
_OFF_THE_BUS = b"\xff\xff\xff\xff"
"""What the first bytes of the configuration space of a device read as that no longer answers."""
_MILLI = 1000


class DriverRequestHandler:
    """Handles requests by reading and writing files below ``paths``."""

    def __init__(self, paths: AmdPaths) -> None:
        self._paths = paths
        self._handlers: Mapping[str, Callable[[Message], Message]] = {
            "driver": self._driver,
            "describe": self._describe,
            "used": self._used,
            "memory": self._memory,
            "snapshot": self._snapshot,
            "restore": self._restore,
            "clean": self._clean,
            "reset": self._reset,
            "bind": self._bind,
            "partition": self._partition,
        }

    def handle(self, request: Message) -> Message:
        """Return the reply to ``request``.

        Raises:
            Fault: ``away`` without a driver for the whole node, ``lost`` for a GPU that has gone, else ``unreadable``.
        """
        handler = self._handlers.get(str(request.get("ask")))
        if handler is None:
            raise Fault("unreadable", f"The driver's child does not know the request {request.get('ask')!r}.")
        try:
            return handler(request)
        except OSError as error:
            code = "lost" if error.errno in _GONE else "unreadable"
            raise Fault(code, f"{error.filename} cannot be read or written: {error.strerror}.") from error
        except ValueError as error:
            raise Fault("unreadable", f"The driver's files are invalid: {error}.") from error

    # --- description

    def _driver(self, _: Message) -> Message:
        if not self._paths.module.is_dir():
            raise Fault("away", "The amdgpu driver is not loaded: load it (modprobe amdgpu).")
        version = optional_text(self._paths.module / "version")  # only packaged drivers have one
        return {"version": version or f"linux-{os.uname().release}"}

    def _describe(self, request: Message) -> Message:
        """Return the GPU's facts and its ``nodes``: one for a whole GPU, one for each partition."""
        address = str(request["pci"])
        place = self._gpu(request)
        nodes = [
            each
            for each in kernel_files.topology_nodes(self._paths.kfd)
            if each.pci_address == _first_function(address)
        ]
        return {
            "unique_id": optional_text(place / "unique_id"),
            "model": optional_text(place / "product_name"),
            "pci_id": optional_text(place / "device"),
            "serial": optional_text(place / "serial_number"),
            "vbios": optional_text(place / "vbios_version"),
            "memory": optional_number(place / "mem_info_vram_total"),
            "numa_node": optional_number(place / "numa_node"),
            "compute_partition": optional_text(place / "current_compute_partition"),
            "memory_partition": optional_text(place / "current_memory_partition"),
            "kfd_number": optional_text(self._paths.kfd / "dev"),
            "reset_methods": _reset_methods(place),
            "gfx_reset_mask": optional_text(place / "gfx_reset_mask"),
            "compute_reset_mask": optional_text(place / "compute_reset_mask"),
            "nodes": [self._node(each) for each in nodes],
        }

    def _node(self, node: kernel_files.TopologyNode) -> Message:
        minor = node.properties.get("drm_render_minor", 0)
        render = self._paths.render(minor)
        device = render / "device"
        cards = self._paths.cards(device)
        per_cu = node.properties.get("simd_per_cu", 0)
        return {
            "name": device.resolve().name,
            "position": node.position,
            "gpu_id": node.gpu_id,
            "partition": node.partition,
            "memory": node.memory_bytes,
            "architecture": node.architecture,
            "compute_units": node.properties.get("simd_count", 0) // per_cu if per_cu else 0,
            "hive": node.properties.get("hive_id", 0),
            "render": f"renderD{minor}",
            "render_number": optional_text(render / "dev"),
            "card": cards[0] if cards else None,
            "card_number": optional_text(device / "drm" / cards[0] / "dev") if cards else None,
        }

    # --- use

    def _used(self, request: Message) -> Message:
        place = self._gpu(request)
        # The counter is the whole GPU's: what is in use on a partition alone is not reported.
        used = optional_number(place / "mem_info_vram_used") if request.get("whole") is True else None
        found = kernel_files.kfd_processes(self._paths.kfd, _number(request, "gpu_id"))
        return {"used": used, "processes": [[each.pid, each.vram_bytes] for each in found]}

    def _memory(self, request: Message) -> Message:
        numbers = frozenset(_numbers(request, "numbers"))
        pids = _numbers(request, "pids")
        return {"processes": [[pid, kernel_files.fdinfo_memory(self._paths.proc, pid, numbers)] for pid in pids]}

    # --- health and settings

    def _snapshot(self, request: Message) -> Message:
        place = self._gpu(request)
        settings, defaults = read_settings(self._paths, place, whole=request.get("whole") is True)
        cards = self._paths.cards(place)
        records = cper.read_records(self._paths.error_records(cards[0])) if cards else None
        return {
            "errors": kernel_files.error_counts(place / "ras"),
            "records": None if records is None else cper.count_kinds(records),
            "fatal_records": [record.identity for record in records or () if record.kind == cper.FATAL],
            "pages": kernel_files.retired_pages(place / "ras" / "gpu_vram_bad_pages"),
            "temperature": _temperature(place),
            "busy_percent": optional_number(place / "gpu_busy_percent"),
            "width": optional_number(place / "current_link_width"),
            "max_width": optional_number(place / "max_link_width"),
            "settings": settings,
            "defaults": defaults,
            **self._used(request),
        }

    def _restore(self, request: Message) -> Message:
        wanted = request.get("wanted")
        if not isinstance(wanted, dict):
            raise Fault("unreadable", "A request to restore settings must contain them.")
        place = self._gpu(request)
        return {"values": restore_settings(self._paths, place, wanted, whole=request.get("whole") is True)}

    # --- actions

    def _clean(self, request: Message) -> Message:
        """Start the driver's cleaner shader, which clears local memory and registers, where the GPU has one."""
        shader = self._gpu(request) / "run_cleaner_shader"
        if not shader.exists():
            return {"done": False}
        _write(shader, str(_number(request, "partition")))
        return {"done": True}

    def _reset(self, request: Message) -> Message:
        """Unbind the driver from the GPUs and reset each by its PCI function; another child binds it again.

        The driver changes the mode of the memory when it is unbound, so the mode is requested before that.
        """
        addresses = _addresses(request)
        for address, mode in _modes(request, "memory_modes").items():
            _write_if_different(self._paths.pci(address) / "current_memory_partition", mode)
        for address in addresses:
            if self._paths.driver_of(address) is not None:
                _write(self._paths.driver / "unbind", address)
        for address in addresses:
            _write(self._paths.pci(address) / "reset", "1")
        return {}

    def _bind(self, request: Message) -> Message:
        for address in _addresses(request):
            if self._paths.driver_of(address) is None:
                _write(self._paths.driver / "bind", address)
        return {}

    def _partition(self, request: Message) -> Message:
        for address, mode in _modes(request, "modes").items():
            _write_if_different(self._paths.pci(address) / "current_compute_partition", mode)
        return {}

    def _gpu(self, request: Message) -> Path:
        """Return the directory of the GPU of a request, if it is still the same GPU and answers."""
        address = str(request["pci"])
        place = self._paths.pci(address)
        if not place.is_dir():
            raise Fault("lost", f"The GPU at {address} is no longer on the PCI bus.")
        if not self._paths.module.is_dir():
            raise Fault("unreadable", "The amdgpu driver is not loaded: load it (modprobe amdgpu).")
        config = place / "config"
        if config.exists() and _first_bytes(config) == _OFF_THE_BUS:
            raise Fault("lost", f"The GPU at {address} does not answer on the PCI bus.")
        expected, found = request.get("unique_id"), optional_text(place / "unique_id")
        if expected is not None and found != expected:
            raise Fault("lost", f"Another GPU ({found}) is at {address} now, instead of {expected}.")
        return place


def _addresses(request: Message) -> list[str]:
    gpus = request.get("gpus")
    if not isinstance(gpus, list) or not gpus:
        raise Fault("unreadable", "A request for a reset must name the GPUs.")
    return [str(gpu) for gpu in gpus]


def _modes(request: Message, key: str) -> dict[str, str]:
    found = request.get(key)
    if not isinstance(found, dict) or not all(isinstance(mode, str) for mode in found.values()):
        raise Fault("unreadable", f"A request to the driver's child needs modes by address under {key!r}.")
    return found


def _first_function(address: str) -> str:
    return f"{address.rpartition('.')[0]}.0"


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(_OFF_THE_BUS))


def _write(path: Path, text: str) -> None:
    """Write a value to an existing file in one call, as the kernel expects."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode("ascii"))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def _write_if_different(path: Path, text: str) -> None:
    """Write a value, unless the file has it already or does not exist."""
    if optional_text(path) not in (text, None):
        _write(path, text)


def _reset_methods(place: Path) -> str | None:
    """Return the ways in which the PCI bus can reset the GPU; None when there is none, as in a virtual machine."""
    if not (place / "reset").exists():
        return None
    methods = optional_text(place / "reset_method")  # kernels before 5.15 do not name them
    return methods or (None if (place / "reset_method").exists() else "of the kernel's choice")


def _temperature(place: Path) -> int | None:
    """Return the temperature of the edge sensor in °C, or of the junction where there is no edge sensor."""
    found: dict[str, int] = {}
    for label in place.glob("hwmon/hwmon*/temp*_label"):
        value = optional_number(label.with_name(label.name.replace("_label", "_input")))
        if value is not None:
            found[optional_text(label) or ""] = value // _MILLI
    return found.get("edge", found.get("junction"))


def _number(request: Message, key: str) -> int:
    found = request.get(key)
    if not isinstance(found, int) or isinstance(found, bool):
        raise Fault("unreadable", f"A request to the driver's child needs a number under {key!r}.")
    return found


def _numbers(request: Message, key: str) -> list[int]:
    found = request.get(key)
    if not isinstance(found, list) or not all(isinstance(each, int) for each in found):
        raise Fault("unreadable", f"A request to the driver's child needs a list of numbers under {key!r}.")
    return found


def main() -> None:
    link = child.connect_to_parent()
    root, proc = link.arguments
    child.serve(link, DriverRequestHandler(AmdPaths(Path(root), Path(proc))).handle)


if __name__ == "__main__":
    main()
