"""The registry of backends: one row for each kind of device that the service supports, and rows that combine several.

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

__all__ = ["BACKENDS", "Backend", "BackendContext", "choose_backend"]

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
        members: the backends that it combines, each with its own signal table; empty for a single one.
        check_settings: checks the settings that only this backend has. Raises :class:`InvalidConfiguration`.
        open: starts the adapters and yields their ports; closes them on exit. Raises :class:`InvalidConfiguration`.
        lock_directories: returns the directories of the locks that its erasers hold; none where it has no erasers.
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
    lock_directories: Callable[[ServiceSettings], tuple[Path, ...]] = lambda _: ()
    unsupported_settings: Callable[[Mapping[str, str]], Sequence[str]] = lambda _: ()
    agents: Callable[[ServiceSettings], AgentControl | None] = lambda _: None
    members: tuple[Backend, ...] = ()

    def member_tables(self) -> Mapping[str, SignalTable]:
        """Return the signal table of each backend that it combines, by its name."""
        return {each.name: each.signal_table() for each in self.members}


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


def _own_locks(settings: ServiceSettings) -> tuple[Path, ...]:
    return (settings.state_dir / _LOCKS,)


_ROWS = (
    Backend(
        name="sim",
        summary="the simulated node",
        simulated=True,
        signal_table=_nvidia_signals,  # simulated devices have the faults of an NVIDIA GPU
        check_settings=_check_simulated,
        open=_open_simulated,
        lock_directories=lambda settings: () if settings.sim_dir is None else (settings.sim_dir / _LOCKS,),
        agents=_dcgm,
    ),
    Backend(
        name="nvidia",
        summary="NVIDIA's driver",
        signal_table=_nvidia_signals,
        check_settings=_check_nvidia,
        open=_open_nvidia,
        lock_directories=_own_locks,
        agents=_dcgm,
        unsupported_settings=_unsupported_by_nvidia,
    ),
    Backend(
        name="amd",
        summary="AMD Instinct GPUs",
        signal_table=_amd_signals,
        check_settings=_check_amd,
        open=_open_amd,
        lock_directories=_own_locks,
        unsupported_settings=_unsupported_by_amd,
    ),
    Backend(
        name="command",
        summary="a program of yours",
        signal_table=_command_signals,
        check_settings=_check_command,
        open=_open_command,
        lock_directories=_own_locks,
    ),
)

BACKENDS: Mapping[str, Backend] = {each.name: each for each in _ROWS}
"""All backends by name, in the order of the help text; the first one is the default."""


def choose_backend(names: Sequence[str]) -> Backend:
    """Return the row of the backend that ``names`` contains, or one that combines several of them.

    Raises:
        InvalidConfiguration: there is no such backend, or one is named twice.
    """
    unknown = next((each for each in names if each not in BACKENDS), None)
    if unknown is not None:
        raise InvalidConfiguration(f'"{unknown}" is not a backend; --backend has: {", ".join(BACKENDS)}.')
    twice = next((each for each in names if names.count(each) > 1), None)
    if twice is not None:
        raise InvalidConfiguration(f"--backend names {twice} twice; name each backend once.")
    rows = tuple(BACKENDS[each] for each in names)
    return rows[0] if len(rows) == 1 else _combined(rows)


def _combined(rows: tuple[Backend, ...]) -> Backend:
    """Return a row that serves the devices of all ``rows``; see :mod:`scrubber.composite_backend`."""

    def signal_table() -> SignalTable:
        first, *others = (each.signal_table() for each in rows)
        return first.merged_with(others)

    def check_settings(settings: ServiceSettings) -> None:
        for each in rows:
            each.check_settings(settings)

    def open_all(context: BackendContext) -> AbstractAsyncContextManager[DeviceBackend]:
        from scrubber.composite_backend import composite_backend

        return composite_backend({each.name: each.open(context) for each in rows})

    def unsupported_settings(settings: Mapping[str, str]) -> Sequence[str]:
        messages = ([each.unsupported_settings({name: value}) for each in rows] for name, value in settings.items())
        return [message for found in messages if all(found) for message in found[0]]

    return Backend(
        name=",".join(each.name for each in rows),
        summary=" and ".join(each.summary for each in rows),
        simulated=all(each.simulated for each in rows),
        signal_table=signal_table,
        check_settings=check_settings,
        open=open_all,
        lock_directories=lambda settings: tuple(
            dict.fromkeys(path for each in rows for path in each.lock_directories(settings))
        ),
        unsupported_settings=unsupported_settings,
        agents=lambda settings: next(filter(None, (each.agents(settings) for each in rows)), None),
        members=rows,
    )
