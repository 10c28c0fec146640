"""How our own service and plugin run on this node: as a pod or a unit, with which arguments and variables.

The service is the process that holds the lock of its sockets, the plugin the one that listens on its socket in the
kubelet's directory. Only root can create either, so no pod can pass for one of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from scrubber.doctor.files import list_matching, read_bytes, socket_address
from scrubber.doctor.kubelet import OUR_SOCKET_PREFIX
from scrubber.doctor.model import CheckContext
from scrubber.doctor.permissions import service_process
from scrubber.domain.errors import InvalidConfiguration

__all__ = [
    "CDI_STRATEGIES",
    "DraDriver",
    "OurProcess",
    "find_drivers",
    "find_plugin",
    "find_service",
    "is_driver_socket",
    "list_strategies",
    "pod_names",
    "visible_plugin",
]

CDI_STRATEGIES = frozenset({"cdi-annotations", "cdi-cri"})

_DRIVER_COMMAND, _DEFAULT_DRIVER = "dra", "gpu.scrubber.dev"
_MAX_COMMAND_WORDS = 4
"""Interpreter, its option, program and command."""
_POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})")
_UNIT = re.compile(r"/([^/\n]+\.service)(?:/|$)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class OurProcess:
    """One of our processes.

    Attributes:
        pid: in the PID namespace of the node's ``/proc``.
        root: its root directory, as seen from this process.
        arguments: its command line.
        environment: its variables when it started.
        pod_uid: UID of its pod; empty if it is in none.
        namespace: the namespace of its pod, as the kubelet records it; empty if it is not known.
        unit: its systemd unit; empty if it is in a pod.
    """

    pid: int
    root: Path
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    pod_uid: str = ""
    namespace: str = ""
    unit: str = ""

    def setting(self, flag: str, variable: str) -> str:
        """Return the value of a flag, else of its variable; empty where neither is set."""
        for number, word in enumerate(self.arguments):
            if word.startswith(f"{flag}="):
                return word.partition("=")[2]
            if word == flag and number + 1 < len(self.arguments):
                return self.arguments[number + 1]
        return self.environment.get(variable, "")


@dataclass(frozen=True, slots=True)
class DraDriver:
    """A process that is our DRA driver.

    Attributes:
        name: name of the driver.
        socket: on which it registers.
    """

    name: str
    process: OurProcess
    socket: Path


def find_service(node: CheckContext) -> OurProcess | None:
    """Return the service's process; None if there is none, or none that is visible here.

    Raises:
        OSError: this cannot be determined.
    """
    pid = service_process(node)
    return None if pid is None else _process(node, pid)


def find_plugin(node: CheckContext) -> OurProcess | None:
    """Return the plugin's process; None if none listens, or none that is visible here.

    Raises:
        OSError: this cannot be determined.
    """
    directory = node.path(node.kubelet_dir)
    for name in ("device-plugins", "plugins_registry"):
        for path in list_matching(directory / name, f"{OUR_SOCKET_PREFIX}*.sock"):
            if (process := _process_behind(node, path)) is not None:
                return process
    return None


def find_drivers(node: CheckContext) -> tuple[DraDriver, ...]:
    """Return the processes that are our DRA driver, whatever its name.

    Raises:
        OSError: this cannot be determined.
    """
    found: dict[int, DraDriver] = {}
    for path in list_matching(node.path(node.kubelet_dir) / "plugins_registry", "*-reg.sock"):
        process = _process_behind(node, path)
        if process is not None and _DRIVER_COMMAND in process.arguments[:_MAX_COMMAND_WORDS]:
            name = process.setting("--driver-name", "SCRUBBER_DRIVER_NAME") or _DEFAULT_DRIVER
            if path.name.startswith(name):
                found.setdefault(process.pid, DraDriver(name, process, path))
    return tuple(found.values())


def is_driver_socket(path: Path) -> bool:
    """Return whether our DRA driver, by its default name, registers on ``path``."""
    return path.name.startswith(_DEFAULT_DRIVER) and path.name.endswith("-reg.sock")


def _process_behind(node: CheckContext, path: Path) -> OurProcess | None:
    """Return the process that listens on a socket; None where none does, or none that is visible here.

    Raises:
        OSError: this cannot be determined.
    """
    # Imported here: otherwise every other command would wait for what the kubelet's adapter loads.
    from scrubber.adapters.kubelet.listening_process import listening_process

    try:
        with socket_address(path) as address, listening_process(address) as found:
            pid = found.pid
    except PermissionError as error:
        raise PermissionError(error.errno, error.strerror, str(path)) from error
    except OSError:  # a leftover socket
        return None
    return _process(node, pid) if pid > 0 else None


def visible_plugin(node: CheckContext) -> OurProcess | None:
    """Return the plugin's process, or None also where it cannot be read, which the check ``injection`` reports."""
    try:
        return find_plugin(node)
    except OSError:
        return None


def list_strategies(plugin: OurProcess) -> frozenset[str]:
    """Return how the plugin passes devices to the runtime: by its flag, its variable, its configuration file, or the default.

    Empty where the configuration file is not readable or not valid, which the check ``plugin-config-file`` reports.
    """
    value = plugin.setting("--device-list-strategy", "DEVICE_LIST_STRATEGY")
    if value:
        return frozenset(word.strip() for word in value.split(","))
    if file := plugin.setting("--config-file", "CONFIG_FILE"):
        # Imported here: otherwise every run of this command would wait for the plugin's modules.
        from plugin.nvidia.settings import read_config_file

        try:
            options = read_config_file(plugin.root / file.lstrip("/"))
        except InvalidConfiguration:
            return frozenset()
        if options.list_strategies is not None:
            return frozenset(each.value for each in options.list_strategies)
    return frozenset({"envvar"})


def pod_names(node: CheckContext) -> Mapping[str, tuple[str, str]]:
    """Return namespace and name of every pod with a log directory, by its UID.

    Raises:
        OSError: the directory exists and cannot be read.
    """
    # Imported here: otherwise every other command would wait for what the kubelet's adapter loads.
    from scrubber.adapters.kubelet.pod_logs import index_pod_logs

    try:
        entries = os.listdir(node.pod_logs)
    except FileNotFoundError:
        return {}
    return index_pod_logs(entries).names


def _process(node: CheckContext, pid: int) -> OurProcess | None:
    directory = node.path(f"/proc/{pid}")
    try:
        arguments = _words(read_bytes(directory / "cmdline"))
        variables = _words(read_bytes(directory / "environ"))
        cgroup = os.fsdecode(read_bytes(directory / "cgroup"))
    except (FileNotFoundError, ProcessLookupError):
        return None  # it has ended
    found = _POD.search(cgroup)
    uid = "" if found is None else found[1].replace("_", "-")
    units = _UNIT.findall(cgroup)
    return OurProcess(
        pid,
        directory / "root",
        arguments,
        dict(each.split("=", 1) for each in variables if "=" in each),
        uid,
        pod_names(node).get(uid, ("", ""))[0] if uid else "",
        units[-1] if units and not uid else "",
    )


def _words(text: bytes) -> tuple[str, ...]:
    return tuple(os.fsdecode(each) for each in text.split(b"\0") if each)
