"""Checks of NVIDIA's driver on the node: loaded, clearing freed memory, persistent, and not open to all users."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from pathlib import Path

from scrubber.adapters.kernel_text import number_in, value_in
from scrubber.doctor.environment import driver_roots
from scrubber.doctor.files import format_mode, list_matching, path_exists, read_bytes, read_text
from scrubber.doctor.model import CheckContext, CheckLevel, CheckResult, unknown_result

__all__ = [
    "confidential_computing",
    "device_nodes",
    "driver",
    "driver_version",
    "persistenced",
    "scrub_on_free",
    "unauthorized_use",
]

_VERSION = re.compile(r"\b(\d{3,}\.\d+(?:\.\d+)*)\b")
_NO_SCRUB_ON_FREE = re.compile(r"RmDisableScrubOnFree\s*[=:]\s*(?:0x)?0*[1-9a-f]", re.IGNORECASE)
_PERSISTENCED_PID = "run/nvidia-persistenced/nvidia-persistenced.pid"
_GPU_NODE = re.compile(r"nvidia\d+")


def driver_version(node: CheckContext) -> str | None:
    """Return the version of NVIDIA's kernel driver; None when it is not loaded, or reports none."""
    try:
        found = _VERSION.search(read_text(node.path("/proc/driver/nvidia/version")))
    except OSError:
        return None
    return None if found is None else found[1]


def driver(node: CheckContext) -> Iterator[CheckResult]:
    """NVIDIA's kernel driver is loaded."""
    path = node.path("/proc/driver/nvidia/version")
    try:
        text = read_text(path)
    except OSError as error:
        if node.service.simulated:
            yield CheckResult("driver", CheckLevel.OK, "No NVIDIA driver is loaded; the simulated node needs none.")
            return
        level = CheckLevel.ERROR if node.service.has_hardware else CheckLevel.WARNING
        message = f"No NVIDIA driver is loaded ({path}: {error.strerror})."
        yield CheckResult(
            "driver",
            level,
            message,
            "Run modprobe nvidia; dmesg shows why the driver is not loaded. A GPU Operator loads its own.",
        )
        return
    version = _VERSION.search(text)
    if version is None:
        yield CheckResult(
            "driver", CheckLevel.WARNING, f"{path} contains no version.", "Check dmesg; reinstall the driver."
        )
        return
    yield CheckResult("driver", CheckLevel.OK, f"NVIDIA's driver {version[1]} is loaded.")


def scrub_on_free(node: CheckContext) -> Iterator[CheckResult]:
    """The driver clears freed memory, so that our scrub is the proof and not the only clearing."""
    path = node.path("/proc/driver/nvidia/params")
    if not node.has_driver:
        return
    try:
        text = read_text(path)
    except OSError as error:
        yield unknown_result("scrub-on-free", "whether the driver clears freed memory is unknown", error)
        return
    if _NO_SCRUB_ON_FREE.search(text):
        message = (
            "The driver is configured not to clear freed memory (RmDisableScrubOnFree): a process of a pod "
            "can read what an earlier one left, and every scrub finds residue."
        )
        remedy = "Remove RmDisableScrubOnFree from NVreg_RegistryDwords (/etc/modprobe.d), and reload the driver."
        yield CheckResult("scrub-on-free", CheckLevel.WARNING, message, remedy)
        return
    yield CheckResult("scrub-on-free", CheckLevel.OK, "The driver is not configured to leave freed memory uncleared.")


def persistenced(node: CheckContext) -> Iterator[CheckResult]:
    """nvidia-persistenced keeps the driver's state while no process uses a GPU."""
    if not node.has_driver:
        return
    try:
        pids = [_pid_in(root / _PERSISTENCED_PID) for root in driver_roots(node)]
    except OSError as error:
        yield unknown_result("persistenced", "whether nvidia-persistenced runs is unknown", error)
        return
    pid = next((each for each in pids if each > 0 and path_exists(node.path(f"/proc/{each}"))), 0)
    if pid:
        message = f"nvidia-persistenced is running (PID {pid}); a reset makes it release the GPU, and reconnects it."
        yield CheckResult("persistenced", CheckLevel.OK, message)
        return
    message = (
        "nvidia-persistenced is not running: unless persistence mode is enabled, the driver loses a GPU's "
        "error counters and settings whenever no process uses it, and every first use is slow."
    )
    yield CheckResult("persistenced", CheckLevel.WARNING, message, "systemctl enable --now nvidia-persistenced")


def _pid_in(path: Path) -> int:
    """Return the PID in a file; 0 if there is none. Raises OSError."""
    try:
        return number_in(value_in(read_bytes(path, 64)).encode()) if path_exists(path) else 0
    except ValueError:
        return 0


def device_nodes(node: CheckContext) -> Iterator[CheckResult]:
    """Only root and one group may open a GPU: local users are in no pod and bypass the plugin.

    The driver's own default is 0666. The effect of its options was taken from its documentation and not tried.
    """
    open_to_all: list[str] = []
    nodes = 0
    try:
        for path in list_matching(node.path("/dev"), "nvidia*"):
            if not _GPU_NODE.fullmatch(path.name) or not path_exists(path):
                continue
            about = path.stat()
            nodes += 1
            if about.st_mode & (stat.S_IROTH | stat.S_IWOTH):
                open_to_all.append(f"{path} ({format_mode(about)})")
    except OSError as error:
        yield unknown_result("device-nodes", "which users may open the GPUs is unknown", error)
        return
    if open_to_all:
        which = ", ".join(open_to_all[:3]) + (f" and {len(open_to_all) - 3} more" if len(open_to_all) > 3 else "")
        message = (
            f"Any local user may open {which}, bypassing the kubelet and this service; such use is detected, "
            "and no pod gets the GPU until it ends."
        )
        remedy = (
            "Give the device nodes to one group: options nvidia NVreg_ModifyDeviceFiles=1 "
            "NVreg_DeviceFileUID=0 NVreg_DeviceFileGID=GID NVreg_DeviceFileMode=0660 in /etc/modprobe.d, and "
            "reload the driver. Containers that do not run as root then need that group (supplementalGroups)."
        )
        yield CheckResult("device-nodes", CheckLevel.WARNING, message, remedy)
    elif nodes:
        yield CheckResult("device-nodes", CheckLevel.OK, "No GPU's device node is accessible to every local user.")


def unauthorized_use(node: CheckContext) -> Iterator[CheckResult]:
    """How the service detects that a process uses a GPU without a grant, and what it does not detect."""
    if not node.service.has_hardware:
        return
    message = (
        "Between scrubs the service checks driver contexts. A process that only has a GPU's device node open "
        "is not detected until it creates a context, or until the next slow path."
    )
    yield CheckResult("unauthorized-use", CheckLevel.OK, message)


def confidential_computing(node: CheckContext) -> Iterator[CheckResult]:
    """Which GPUs are in a confidential-computing mode, and whether that mode protects them; nothing if none is."""
    modes = {device.index: device.confidential for device in node.service.devices or () if device.confidential}
    if not modes:
        return
    which = f"GPU {', '.join(sorted(modes))}"
    if "devtools" in modes.values():
        message = f"The confidential-computing mode of {which} is for debuggers: they can read what it should protect."
        remedy = "Set the mode on (gpu-admin-tools: --set-cc-mode=on), and reset the GPUs."
        yield CheckResult("confidential-computing", CheckLevel.WARNING, message, remedy)
        return
    message = (
        f"{which}: in a confidential-computing mode. The service alone sets the GPUs ready, and certificates carry the "
        "digest of an attestation report, which is not compared with reference values."
    )
    yield CheckResult("confidential-computing", CheckLevel.OK, message)
