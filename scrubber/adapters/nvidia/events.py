"""The child that waits for one GPU's events: XIDs, uncorrected memory errors, changes of its MIG layout.

It also has the GPU's InfoROM validated from time to time: the driver reads the whole flash for that, and nothing waits
for a reply of this child.

There is one child per GPU, because registering attaches the GPU and can hang: a faulty GPU costs only its own child.
NVML delivers events to the process that has registered and stores none, so this child does nothing but wait, and sends
a heartbeat every few seconds. It is forked by :mod:`scrubber.adapters.nvidia.zygote`. The parent sends one message:
``proc_driver`` and ``pci_devices``, the kernel's files, and ``address``, the GPU's on the PCI bus.

====================================================  ===================================================
message to the parent                                 meaning
====================================================  ===================================================
``registered``: types                                 from now on no event of these types is missed
``watching``: true                                    no event arrived, and the driver still responds
``inforom``: true or false                            whether its checksums are correct
``event``: type, ``data``, ``gi``, ``ci``             one event; the last two are None for the whole GPU
``fault``: code, ``sentence``                         no more events; this process ends
====================================================  ===================================================
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml

from scrubber.adapters.children.child import Fault, ParentSocket
from scrubber.adapters.children.message import Message
from scrubber.adapters.nvidia.errors import CORRUPTED_INFOROM, NvmlFault
from scrubber.adapters.nvidia.nvml import NvmlGpu, NvmlSession

__all__ = ["EVENT_WAIT_SECONDS", "run", "watch_events"]

EVENT_WAIT_SECONDS = 0.5
"""Maximum duration of one wait in the driver, in seconds: the child ends at most this long after its parent."""

_HEARTBEAT_SECONDS = 5.0
_INFOROM_SECONDS = 600.0
_TIMEOUT = 10
_NO_INSTANCE = 0xFFFFFFFF

# These accompany ordinary work, up to thousands per second, and are not about health. Corrected errors are read from
# their counters; a storm of them has its own type.
_IGNORED_EVENTS = (
    pynvml.nvmlEventTypePState
    | pynvml.nvmlEventTypeClock
    | pynvml.nvmlEventTypePowerSourceChange
    | pynvml.nvmlEventTypeSingleBitEccError
)


def watch_events(gpu: NvmlGpu, link: ParentSocket, monotonic: Callable[[], float]) -> None:
    """Report every event of ``gpu`` to the parent until the parent is gone.

    Raises:
        Fault: there will be no more events.
    """
    types = int(gpu.optional("nvmlDeviceGetSupportedEventTypes") or 0) & ~_IGNORED_EVENTS
    if not types:
        link.send({"inforom": _inforom_intact(gpu)})
        raise Fault("not-applicable", f"{gpu.label} reports no events.")
    events = _checked(gpu, pynvml.nvmlEventSetCreate)
    gpu.call("nvmlDeviceRegisterEvents", types, events)
    link.send({"registered": types})
    reported_at = check_at = monotonic()
    while not link.is_parent_gone():
        message, now = _next_event(gpu, events), monotonic()
        if now >= check_at:
            link.send({"inforom": _inforom_intact(gpu)})
            check_at = now + _INFOROM_SECONDS
        if message is None and now - reported_at < _HEARTBEAT_SECONDS:
            continue
        link.send(message or {"watching": True})
        reported_at = now


def _inforom_intact(gpu: NvmlGpu) -> bool:
    """Whether the checksums of the InfoROM are correct; also True where there is no InfoROM."""
    try:
        gpu.optional("nvmlDeviceValidateInforom")
    except NvmlFault as fault:
        if fault.nvml_code != CORRUPTED_INFOROM:
            raise
        return False
    return True


def _next_event(gpu: NvmlGpu, events: Any) -> Message | None:
    """Return the next event; None when there is none for :data:`EVENT_WAIT_SECONDS`."""
    try:
        found = _checked(gpu, pynvml.nvmlEventSetWait_v2, events, int(EVENT_WAIT_SECONDS * 1000))
    except NvmlFault as fault:
        if fault.nvml_code == _TIMEOUT:
            return None
        raise
    return {
        "event": int(found.eventType),
        "data": int(found.eventData),
        "gi": _instance(found.gpuInstanceId),
        "ci": _instance(found.computeInstanceId),
    }


def _checked(gpu: NvmlGpu, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        raise NvmlFault(int(error.value), f"{gpu.label}, {function.__name__}") from error


def _instance(number: int) -> int | None:
    return None if int(number) == _NO_INSTANCE else int(number)


def run(link: ParentSocket) -> None:
    """Wait for events of the GPU that the parent names until the parent is gone."""
    request = link.receive()
    if request is None:
        return
    proc_driver, pci_devices = Path(str(request["proc_driver"])), Path(str(request["pci_devices"]))
    try:
        watch_events(NvmlSession(proc_driver, pci_devices).gpu(str(request["address"])), link, time.monotonic)
    except Fault as fault:
        link.send({"fault": fault.code, "message": fault.message})
