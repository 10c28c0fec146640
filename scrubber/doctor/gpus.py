"""NVIDIA's driver as the node has set it up: loaded, clearing what is freed, kept awake, and not open to everybody."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator

from scrubber.adapters.proc import number_in, value_in
from scrubber.doctor.finding import Check, Level, Node, unseen
from scrubber.doctor.looking import matching, mode_of, present, read_bytes, read_text

__all__ = ["device_nodes", "driver", "driver_version", "persistenced", "scrub_on_free", "unauthorized_use"]

_VERSION = re.compile(r"\b(\d{3,}\.\d+(?:\.\d+)*)\b")
_NO_SCRUB_ON_FREE = re.compile(r"RmDisableScrubOnFree\s*[=:]\s*(?:0x)?0*[1-9a-f]", re.IGNORECASE)
_GPU_NODE = re.compile(r"nvidia\d+")


def driver_version(node: Node) -> str | None:
    """The version of NVIDIA's kernel driver; None when it is not loaded, or does not say."""
    try:
        found = _VERSION.search(read_text(node.path("/proc/driver/nvidia/version")))
    except OSError:
        return None
    return None if found is None else found[1]


def driver(node: Node) -> Iterator[Check]:
    """NVIDIA's kernel driver is loaded."""
    path = node.path("/proc/driver/nvidia/version")
    try:
        text = read_text(path)
    except OSError as error:
        if node.service.simulated:
            yield Check("driver", Level.OK, "No NVIDIA driver is loaded; the simulated node needs none.")
            return
        level = Level.ERROR if node.service.has_hardware else Level.WARNING
        sentence = f"No NVIDIA driver is loaded ({path}: {error.strerror})."
        yield Check(
            "driver", level, sentence, "modprobe nvidia loads it; dmesg says why not. A GPU Operator loads its own."
        )
        return
    version = _VERSION.search(text)
    if version is None:
        yield Check("driver", Level.WARNING, f"{path} names no version.", "dmesg says more; install the driver again.")
        return
    yield Check("driver", Level.OK, f"NVIDIA's driver {version[1]} is loaded.")


def scrub_on_free(node: Node) -> Iterator[Check]:
    """The driver clears memory that is freed: our scrub is then the proof, not the only broom."""
    path = node.path("/proc/driver/nvidia/params")
    if not node.has_driver:
        return
    try:
        text = read_text(path)
    except OSError as error:
        yield unseen("scrub-on-free", "whether the driver clears freed memory was not seen", error)
        return
    if _NO_SCRUB_ON_FREE.search(text):
        sentence = (
            "The driver was told not to clear freed memory (RmDisableScrubOnFree): what one process of a pod leaves, "
            "its next one reads, and every scrub finds residue."
        )
        remedy = "Remove RmDisableScrubOnFree from NVreg_RegistryDwords (/etc/modprobe.d), and reload the driver."
        yield Check("scrub-on-free", Level.WARNING, sentence, remedy)
        return
    yield Check("scrub-on-free", Level.OK, "The driver was not told to leave freed memory uncleared.")


def persistenced(node: Node) -> Iterator[Check]:
    """Somebody keeps the driver's state while nobody uses a GPU."""
    if not node.has_driver:
        return
    path = node.path("/run/nvidia-persistenced/nvidia-persistenced.pid")
    try:
        pid = number_in(value_in(read_bytes(path, 64)).encode()) if present(path) else 0
    except ValueError:
        pid = 0
    except OSError as error:
        yield unseen("persistenced", "whether nvidia-persistenced runs was not seen", error)
        return
    if pid > 0 and present(node.path(f"/proc/{pid}")):
        sentence = f"nvidia-persistenced runs (PID {pid}); a reset has it let go of the GPU, and brings it back."
        yield Check("persistenced", Level.OK, sentence)
        return
    sentence = (
        "nvidia-persistenced does not run: unless persistence mode is on, the driver forgets a GPU's error counters and "
        "settings whenever nobody uses it, and every first use waits for it."
    )
    yield Check("persistenced", Level.WARNING, sentence, "systemctl enable --now nvidia-persistenced")


def device_nodes(node: Node) -> Iterator[Check]:
    """Nobody but root and one group may open a GPU: local users are in no pod, and ask nobody.

    The driver's own default is 0666. What its options do was read in its documentation, and not tried.
    """
    open_to_all: list[str] = []
    nodes = 0
    try:
        for path in matching(node.path("/dev"), "nvidia*"):
            if not _GPU_NODE.fullmatch(path.name) or not present(path):
                continue
            about = path.stat()
            nodes += 1
            if about.st_mode & (stat.S_IROTH | stat.S_IWOTH):
                open_to_all.append(f"{path} ({mode_of(about)})")
    except OSError as error:
        yield unseen("device-nodes", "who may open the GPUs was not seen", error)
        return
    if open_to_all:
        which = ", ".join(open_to_all[:3]) + (f" and {len(open_to_all) - 3} more" if len(open_to_all) > 3 else "")
        sentence = (
            f"Any local user may open {which}, past the kubelet and this service; it is noticed, and then no pod gets "
            "the GPU until they let go."
        )
        remedy = (
            "Give the nodes to one group: options nvidia NVreg_ModifyDeviceFiles=1 NVreg_DeviceFileUID=0 "
            "NVreg_DeviceFileGID=GID NVreg_DeviceFileMode=0660 in /etc/modprobe.d, and reload the driver. Containers that "
            "do not run as root then need that group (supplementalGroups)."
        )
        yield Check("device-nodes", Level.WARNING, sentence, remedy)
    elif nodes:
        yield Check("device-nodes", Level.OK, "No GPU's device node is open to every local user.")


def unauthorized_use(node: Node) -> Iterator[Check]:
    """How the service notices that a process uses a GPU without a grant, and what it does not notice."""
    if not node.service.has_hardware:
        return
    sentence = (
        "Between scrubs the service looks at driver contexts. A process that only has a GPU's device node open is not seen "
        "before it makes a context, or before the next scrub by the slow path."
    )
    yield Check("unauthorized-use", Level.OK, sentence)
