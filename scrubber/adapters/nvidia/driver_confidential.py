"""Confidential computing in NVML: the mode, the ready state, and attestation reports. Runs in a child."""

from __future__ import annotations

import ctypes
import hashlib

import pynvml

from scrubber.adapters.children.child import Fault
from scrubber.adapters.nvidia.errors import NvmlFault
from scrubber.adapters.nvidia.nvml import NvmlGpu, NvmlSession

__all__ = ["attest", "read_confidential_mode", "set_ready_state"]

_NONCE_BYTES = 32


def read_confidential_mode(session: NvmlSession) -> str | None:
    """Return ``on`` or ``devtools``; None where no GPU is in a confidential-computing mode, or none can be.

    A mode that cannot be read is an error, not off: its GPUs would be used without the checks that it requires.
    """
    state = session.system_optional("nvmlSystemGetConfComputeState")
    if state is None:
        return None
    on = bool(state.ccFeature) or _multi_gpu_mode(session)
    return None if not on else "devtools" if state.devToolsMode else "on"


def _multi_gpu_mode(session: NvmlSession) -> bool:
    """Whether GPUs are protected together, which the older function does not report."""
    settings = pynvml.c_nvmlSystemConfComputeSettings_v1_t()
    try:
        session.system_checked("nvmlSystemGetConfComputeSettings", ctypes.byref(settings))
    except NvmlFault as fault:
        if fault.not_applicable:
            return False
        raise
    return bool(settings.multiGpuMode != pynvml.NVML_CC_SYSTEM_MULTIGPU_NONE)


def set_ready_state(session: NvmlSession, *, ready: bool) -> bool:
    """Set whether the GPUs accept work, unless they are set so; return what the driver reports afterwards."""
    if _is_ready(session) is not ready:
        session.system("nvmlSystemSetConfComputeGpusReadyState", int(ready))
    return _is_ready(session)


def _is_ready(session: NvmlSession) -> bool:
    found = session.system("nvmlSystemGetConfComputeGpusReadyState")
    return bool(found == pynvml.NVML_CC_ACCEPTING_CLIENT_REQUESTS_TRUE)


def attest(gpu: NvmlGpu, nonce: bytes) -> str:
    """Return the SHA-256 of the GPU's attestation report for ``nonce``, in hexadecimal.

    Raises:
        Fault: there is no report, or it is not for this nonce.
    """
    if len(nonce) != _NONCE_BYTES:
        raise Fault("unreadable", f"The nonce of an attestation report has {_NONCE_BYTES} bytes, not {len(nonce)}.")
    found = gpu.call("nvmlDeviceGetConfComputeGpuAttestationReport", list(nonce))
    size = int(found.attestationReportSize)
    if not 0 < size <= len(found.attestationReport):
        raise Fault("unreadable", f"{gpu.label}: the driver returned an attestation report of {size} bytes.")
    report = bytes(found.attestationReport[:size])
    if nonce not in report:
        raise Fault("unreadable", f"{gpu.label}: the attestation report does not contain the nonce of this scrub.")
    return hashlib.sha256(report).hexdigest()
