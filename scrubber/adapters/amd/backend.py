"""The AMD backend: the kernel's files describe the GPUs and their users, HIP clears and diagnoses them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from scrubber.adapters.amd.erasure import AmdDiagnostics, AmdEraser
from scrubber.adapters.amd.errors import ErrorCounters
from scrubber.adapters.amd.holders import AmdHolders
from scrubber.adapters.amd.inventory import AmdInventory
from scrubber.adapters.amd.jobs import AmdJobRunner
from scrubber.adapters.amd.kernel_files import AmdPaths
from scrubber.adapters.amd.requests import DRIVER_MODULE, driver_arguments
from scrubber.adapters.amd.resetter import AmdResetter
from scrubber.adapters.amd.settings import AmdSettings
from scrubber.adapters.amd.telemetry import AmdTelemetry
from scrubber.adapters.children.process import Children
from scrubber.adapters.children.request_pool import RequestPool
from scrubber.adapters.kernel_text import value_in
from scrubber.ports.device import DeviceBackend, InfrastructureLookup

__all__ = ["amd_backend"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ERRORS = "amd-errors.json"


@asynccontextmanager
async def amd_backend(
    root: Path,
    state: Path,
    *,
    node: str,
    driver_call_timeout: float,
    infrastructure: InfrastructureLookup,
    poll_interval: float = 5.0,
    walk_timeout: float = 10.0,
    children: Children | None = None,
) -> AsyncIterator[DeviceBackend]:
    """Build the backend for the node's AMD GPUs.

    Args:
        root: the directory that contains ``sys``, ``dev`` and ``opt/rocm``.
        state: a directory that only the service uses: locks, and error counters at the last reset.
        driver_call_timeout: seconds that one query of the driver's files may take.
        poll_interval: seconds between two polls of the error counters.
        walk_timeout: deadline for the reply to one walk over ``/proc``, in seconds.
    """
    paths = AmdPaths(root)
    own = children or Children()
    locks = state / "locks"
    locks.mkdir(mode=0o700, parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(own.close)
        requests = RequestPool(own, DRIVER_MODULE, arguments=driver_arguments(paths), deadline=driver_call_timeout)
        stack.push_async_callback(requests.close)
        inventory = AmdInventory(paths, requests, node=node)
        holders = AmdHolders(own, requests, infrastructure=infrastructure, walk_deadline=walk_timeout)
        stack.push_async_callback(holders.close)
        errors = ErrorCounters(state / _ERRORS, value_in(_BOOT_ID.read_bytes()))
        telemetry = AmdTelemetry(
            requests,
            holders,
            errors,
            devices=lambda: inventory.last_devices,
            fingerprint=inventory.fingerprint,
            poll_interval=poll_interval,
        )
        stack.push_async_callback(telemetry.close)
        jobs = AmdJobRunner(paths, own, holders, locks)
        eraser = AmdEraser(jobs, requests)
        settings = AmdSettings(requests)
        resetter = AmdResetter(
            paths,
            own,
            requests,
            devices=lambda: inventory.last_devices,
            inventory=inventory,
            holders=holders,
            erasers=eraser,
            telemetry=telemetry,
            settings=settings,
        )
        yield DeviceBackend(
            inventory=inventory,
            holders=holders,
            telemetry=telemetry,
            settings=settings,
            resetter=resetter,
            eraser=eraser,
            diagnostics=AmdDiagnostics(jobs),
            children=own,
            not_advertised=lambda: inventory.not_advertised,
        )
