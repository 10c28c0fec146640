"""The registry of backends: one row for each kind of device that the service supports.

To add a backend, add a folder in ``scrubber/adapters`` and a row here. A row's adapters are imported on first use, so
that the command line can read the registry without loading them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scrubber.domain.errors import InvalidConfiguration

if TYPE_CHECKING:
    from pathlib import Path

    from scrubber.config.settings import ServiceSettings
    from scrubber.domain.health.signal_table import SignalTable
    from scrubber.ports.device import AgentControl, DeviceBackend, InfrastructureLookup

__all__ = ["BACKENDS", "Backend", "BackendContext"]

_LOCKS = "locks"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendContext:
    """What the service passes to a backend.

    Attributes:
        driver_call_timeout: seconds that one driver query may take.
    """

    settings: ServiceSettings
    driver_call_timeout: float
    infrastructure: InfrastructureLookup


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One row of the registry.

    Attributes:
        summary: a short description of the backend, for help texts.
        simulated: whether its devices are not hardware: the service needs neither the host's PID namespace nor cgroups
            for them.
        signal_table: returns the signal table of its devices.
        check_settings: checks the settings that only this backend has. Raises :class:`InvalidConfiguration`.
        open: starts the adapters and yields their ports; closes them on exit. Raises :class:`InvalidConfiguration`.
        lock_directory: returns the directory of the locks that its erasers hold; None: it has no erasers.
        unsupported_settings: returns one message for each device setting of a policy that no device of this backend
            has.
        agents: returns what lets agents of the devices' vendor release the driver; None where that is not set up.
    """

    name: str
    summary: str
    simulated: bool = False
    signal_table: Callable[[], SignalTable]
    check_settings: Callable[[ServiceSettings], None]
    open: Callable[[BackendContext], AbstractAsyncContextManager[DeviceBackend]]
    lock_directory: Callable[[ServiceSettings], Path | None] = lambda _: None
    unsupported_settings: Callable[[Mapping[str, str]], Sequence[str]] = lambda _: ()
    agents: Callable[[ServiceSettings], AgentControl | None] = lambda _: None


def _check_simulated(settings: ServiceSettings) -> None:
    if settings.sim_dir is None:
        raise InvalidConfiguration(
            "The sim backend needs the directory of a simulated node: pass it with --sim-dir DIR (scrubber "
            "sim create --dir DIR creates one)."
        )


def _open_simulated(context: BackendContext) -> AbstractAsyncContextManager[DeviceBackend]:
    from scrubber.adapters.sim.backend import sim_backend

    assert context.settings.sim_dir is not None  # checked with the settings
    return sim_backend(
        context.settings.sim_dir,
        driver_call_timeout=context.driver_call_timeout,
        infrastructure=context.infrastructure,
    )


def _command_signals() -> SignalTable:
    from scrubber.adapters.command.conditions import COMMAND_SIGNALS

    return COMMAND_SIGNALS


def _check_command(settings: ServiceSettings) -> None:
    from scrubber.config.command_file import CommandFileSource

    if settings.config is None:
        raise InvalidConfiguration(
            "The command backend needs a file that names its program: pass it with --config FILE."
        )
    CommandFileSource(settings.config)


def _open_command(context: BackendContext) -> AbstractAsyncContextManager[DeviceBackend]:
    from scrubber.adapters.command.backend import command_backend
    from scrubber.config.command_file import CommandFileSource

    assert context.settings.config is not None  # checked with the settings
    return command_backend(
        CommandFileSource(context.settings.config),
        context.settings.state_dir / _LOCKS,
        node=context.settings.node_name,
        infrastructure=context.infrastructure,
        owner=os.geteuid(),
    )


def _nvidia_signals() -> SignalTable:
    from scrubber.adapters.nvidia.conditions import NVIDIA_SIGNALS

    return NVIDIA_SIGNALS


def _check_nvidia(settings: ServiceSettings) -> None:
    if not settings.nvidia_driver_root.is_dir():
        raise InvalidConfiguration(
            f"--nvidia-driver-root {settings.nvidia_driver_root} does not exist; pass the directory that "
            "contains the driver's libraries, such as / or /run/nvidia/driver."
        )


def _open_nvidia(context: BackendContext) -> AbstractAsyncContextManager[DeviceBackend]:
    from scrubber.adapters.nvidia.backend import nvidia_backend
    from scrubber.adapters.nvidia.driver_paths import DriverPaths

    return nvidia_backend(
        DriverPaths.below(context.settings.nvidia_driver_root),
        context.settings.state_dir,
        node=context.settings.node_name,
        driver_call_timeout=context.driver_call_timeout,
        infrastructure=context.infrastructure,
    )


def _dcgm(settings: ServiceSettings) -> AgentControl | None:
    from scrubber.adapters.nvidia.dcgm import DcgmControl

    return None if settings.dcgmi is None else DcgmControl(settings.dcgmi, settings.dcgm_address)


def _unsupported_by_nvidia(settings: Mapping[str, str]) -> Sequence[str]:
    from scrubber.adapters.nvidia.setting_values import validation_errors

    return validation_errors(settings)


def _amd_signals() -> SignalTable:
    from scrubber.adapters.amd.conditions import AMD_SIGNALS

    return AMD_SIGNALS


def _check_amd(settings: ServiceSettings) -> None:
    if not settings.amd_root.is_dir():
        raise InvalidConfiguration(
            f"--amd-root {settings.amd_root} does not exist; pass the directory that contains sys, dev and opt/rocm, "
            "usually /."
        )


def _open_amd(context: BackendContext) -> AbstractAsyncContextManager[DeviceBackend]:
    from scrubber.adapters.amd.backend import amd_backend

    return amd_backend(
        context.settings.amd_root,
        context.settings.state_dir,
        node=context.settings.node_name,
        driver_call_timeout=context.driver_call_timeout,
        infrastructure=context.infrastructure,
    )


def _unsupported_by_amd(settings: Mapping[str, str]) -> Sequence[str]:
    from scrubber.adapters.amd.driver_settings import validation_errors

    return validation_errors(settings)


_ROWS = (
    Backend(
        name="sim",
        summary="the simulated node",
        simulated=True,
        signal_table=_nvidia_signals,  # simulated devices have the faults of an NVIDIA GPU
        check_settings=_check_simulated,
        open=_open_simulated,
        lock_directory=lambda settings: settings.sim_dir and settings.sim_dir / _LOCKS,
        agents=_dcgm,
    ),
    Backend(
        name="nvidia",
        summary="NVIDIA's driver",
        signal_table=_nvidia_signals,
        check_settings=_check_nvidia,
        open=_open_nvidia,
        lock_directory=lambda settings: settings.state_dir / _LOCKS,
        agents=_dcgm,
        unsupported_settings=_unsupported_by_nvidia,
    ),
    Backend(
        name="amd",
        summary="AMD Instinct GPUs",
        signal_table=_amd_signals,
        check_settings=_check_amd,
        open=_open_amd,
        lock_directory=lambda settings: settings.state_dir / _LOCKS,
        unsupported_settings=_unsupported_by_amd,
    ),
    Backend(
        name="command",
        summary="a program of yours",
        signal_table=_command_signals,
        check_settings=_check_command,
        open=_open_command,
        lock_directory=lambda settings: settings.state_dir / _LOCKS,
    ),
)

BACKENDS: Mapping[str, Backend] = {each.name: each for each in _ROWS}
"""All backends by name, in the order of the help text; the first one is the default."""
