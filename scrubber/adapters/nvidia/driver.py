"""The child that queries NVML: which devices there are, their health, the processes that use them, and their settings.

Every call here may hang in the kernel, so this child runs behind
:class:`~scrubber.adapters.children.request_pool.RequestPool`. A request names its GPU by PCI address and by UUID, so
that a GPU that was replaced is never mistaken for the requested one. Runs as ``python -m
scrubber.adapters.nvidia.driver PROC_DRIVER PCI_DEVICES``.

====================  ==============================  =====================================================
request               besides pci, gpu, instance      reply
====================  ==============================  =====================================================
``identity``          (none of those)                 ``driver``, ``nvml``, ``cuda``, ``confidential``: ``on``,
                                                      ``devtools`` or None
``ready_state``       (none of those) ``ready``       ``ready``, as read back
``describe``          (``pci`` alone)                 see :mod:`scrubber.adapters.nvidia.driver_description`
``snapshot``                                          health, settings, and the reply to ``used``
``used``                                              ``total``, ``reserved``, ``used``, ``processes``: rows of
                                                      PID, bytes or None, list
``restore``           ``wanted``                      ``values``
``compute_mode``                                      ``mode``; None for instances
``fence``                                             ``before``: the mode that ``compute_mode`` would have
                                                      returned
``unfence``           ``mode``                        nothing
``persistence``       ``mode`` (optional: to set)     ``mode``: ``enabled``, ``disabled`` or None
``attest``            ``nonce``: in hexadecimal       ``digest``: SHA-256 of the report, in hexadecimal
====================  ==============================  =====================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from scrubber.adapters.children import child
from scrubber.adapters.children.child import Fault
from scrubber.adapters.children.message import Message
from scrubber.adapters.nvidia import driver_health as health
from scrubber.adapters.nvidia.driver_confidential import attest, read_confidential_mode, set_ready_state
from scrubber.adapters.nvidia.driver_description import describe
from scrubber.adapters.nvidia.driver_settings import (
    COMPUTE_MODE,
    PERSISTENCE_MODE,
    NvmlSetting,
    read_defaults_and_values,
    restore,
)
from scrubber.adapters.nvidia.errors import RESET_REQUIRED, DriverUnavailable, NvmlFault
from scrubber.adapters.nvidia.nvml import NvmlGpu, NvmlInstance, NvmlMemory, NvmlProcess, NvmlSession

__all__: list[str] = []

_DRIVER_GONE = frozenset({1, 9, 18})


@dataclass(frozen=True, slots=True)
class NvmlTarget:
    """The subject of a request: a GPU, or one instance of it."""

    gpu: NvmlGpu
    instance: NvmlInstance | None

    def memory(self) -> NvmlMemory:
        return (self.instance or self.gpu).memory()

    def processes(self) -> tuple[NvmlProcess, ...]:
        """Return the processes of the GPU or the instance.

        One that the driver ties to no instance counts for each of them.
        """
        everything = self.gpu.processes()
        if self.instance is None:
            return everything
        gi, ci = self.instance.ids()
        return tuple(each for each in everything if each.gi in (None, gi) and each.ci in (None, ci))


class NvmlRequestHandler:
    """Handles requests by calling NVML.

    Args:
        proc_driver: the kernel module's directory in ``/proc``.
        pci_devices: the directory of the PCI devices in sysfs.
    """

    def __init__(self, proc_driver: Path, pci_devices: Path) -> None:
        self._proc_driver = proc_driver
        self._session = NvmlSession(proc_driver, pci_devices)
        self._device_handlers: Mapping[object, Callable[[NvmlTarget, Message], Message]] = {
            "snapshot": self._snapshot,
            "used": _usage,
            "restore": _restore,
            "compute_mode": _compute_mode,
            "fence": _fence,
            "unfence": _unfence,
            "persistence": _persistence,
            "attest": _attest,
        }

    def handle(self, request: Message) -> Message:
        """Handle one request.

        Raises:
            Fault: the request failed; the code and the message are sent to the parent.
        """
        ask = request.get("ask")
        if ask == "identity":
            return self._identity()
        if ask == "ready_state":
            return {"ready": set_ready_state(self._session, ready=request.get("ready") is True)}
        if ask == "describe":
            return describe(self._session.gpu(_text(request, "pci")))
        if ask not in self._device_handlers:
            raise Fault("unreadable", f"NVML's child process does not support the request {ask!r}.")
        try:
            return self._device_handlers[ask](self._target(request), request)
        except (DriverUnavailable, NvmlFault) as fault:
            if ask == "snapshot" and fault.nvml_code == RESET_REQUIRED:
                return self._unresponsive()
            if fault.nvml_code in _DRIVER_GONE or isinstance(fault, DriverUnavailable):
                # For the node, a missing driver is "away". A device without a driver is "unreadable": its state is
                # unknown.
                raise Fault("unreadable", fault.message) from fault
            raise

    def _identity(self) -> Message:
        cuda = self._session.system_optional("nvmlSystemGetCudaDriverVersion")
        nvml = self._session.system_optional("nvmlSystemGetNVMLVersion")
        return {
            "driver": str(self._session.system("nvmlSystemGetDriverVersion")),
            "nvml": None if nvml is None else str(nvml),
            "cuda": None if cuda is None else f"{int(cuda) // 1000}.{int(cuda) % 1000 // 10}",
            "confidential": read_confidential_mode(self._session),
        }

    def _target(self, question: Message) -> NvmlTarget:
        address, uuid, instance = _text(question, "pci"), _text(question, "gpu"), question.get("instance")
        gpu = self._session.gpu(address)
        found_uuid = gpu.uuid()
        if found_uuid != uuid:
            raise Fault("lost", f"GPU {address} was replaced by another one ({found_uuid}, not {uuid}).")
        if instance is None:
            return NvmlTarget(gpu, None)
        for each in gpu.instances():
            if each.uuid() == instance:
                return NvmlTarget(gpu, each)
        raise Fault("lost", f"GPU {address} no longer has the MIG instance {instance}.")

    def _snapshot(self, target: NvmlTarget, question: Message) -> Message:
        gpu = target.gpu
        counters = health.read_error_counters(gpu)
        conditions = dict(health.read_conditions(gpu, counters))
        conditions.update(health.scrub_on_free_condition(self._proc_driver))
        # An instance has no settings of its own, and the tenants of other instances may depend on its GPU's.
        defaults, values = ({}, {}) if target.instance is not None else read_defaults_and_values(gpu)
        return {
            **health.read_gauges(gpu),
            **_usage(target, question),
            "conditions": conditions,
            "counters": dict(counters),
            "settings": values,
            "defaults": defaults,
        }

    def _unresponsive(self) -> Message:
        conditions = {**health.reset_required_condition(), **health.scrub_on_free_condition(self._proc_driver)}
        nothing = dict.fromkeys(("ecc_uncorrected", "temperature_celsius", "recovery", "processes"))
        return {**nothing, "conditions": conditions, "counters": {}, "settings": {}, "defaults": {}}


def _usage(target: NvmlTarget, _: Message) -> Message:
    memory = target.memory()
    return {
        "total": memory.total,
        "reserved": memory.reserved,
        "used": memory.used,
        "processes": [[each.pid, each.memory, each.kind] for each in target.processes()],
    }


def _restore(target: NvmlTarget, question: Message) -> Message:
    expected = question.get("wanted")
    if not isinstance(expected, dict):
        raise Fault("unreadable", "Settings to restore must be an object.")
    if target.instance is not None:
        return {"values": {}}
    return {"values": restore(target.gpu, {str(name): str(value) for name, value in expected.items()})}


def _compute_mode(target: NvmlTarget, _: Message) -> Message:
    """Return the compute mode.

    The caller records it before the fence, so that what a killed eraser leaves can be undone.
    """
    found = None if target.instance is not None else COMPUTE_MODE.read(target.gpu)
    return {"mode": None if found is None else found[0]}


def _fence(target: NvmlTarget, question: Message) -> Message:
    """Allow at most one process on the GPU from now on."""
    before = _compute_mode(target, question)["mode"]
    if before is not None:
        COMPUTE_MODE.write(target.gpu, "exclusive-process")
    return {"before": before}


def _unfence(target: NvmlTarget, question: Message) -> Message:
    mode = _text(question, "mode")
    if target.instance is None:
        _set(target.gpu, COMPUTE_MODE, mode)
    return {}


def _persistence(target: NvmlTarget, question: Message) -> Message:
    if question.get("mode") is not None:
        _set(target.gpu, PERSISTENCE_MODE, _text(question, "mode"))
    found = PERSISTENCE_MODE.read(target.gpu)
    return {"mode": None if found is None else found[0]}


def _attest(target: NvmlTarget, question: Message) -> Message:
    # An instance has no report of its own: it is a part of the GPU that attests itself.
    try:
        nonce = bytes.fromhex(_text(question, "nonce"))
    except ValueError as error:
        raise Fault("unreadable", "The nonce of an attestation report must be hexadecimal.") from error
    return {"digest": attest(target.gpu, nonce)}


def _set(gpu: NvmlGpu, setting: NvmlSetting, mode: str) -> None:
    try:
        setting.write(gpu, mode)
    except ValueError as error:
        raise Fault("unreadable", f"{gpu.label}: {mode!r} is not a value of {setting.name}: {error}.") from error


def _text(question: Message, key: str) -> str:
    found = question.get(key)
    if not isinstance(found, str):
        raise Fault("unreadable", f"An NVML request must contain the string {key!r}.")
    return found


def main() -> None:
    link = child.connect_to_parent()
    proc_driver, pci_devices = (Path(each) for each in link.arguments[:2])
    child.serve(link, NvmlRequestHandler(proc_driver, pci_devices).handle)


if __name__ == "__main__":
    main()
