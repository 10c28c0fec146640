"""What a check of the node looks at, and what it finds: one sentence, and what to do.

The promise: what could not be seen is never called ok, whatever the reason; a check that cannot look says so and names what
would let it. And whatever is wrong comes with a command to call or a file to change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from scrubber.backends import BACKENDS
from scrubber.doctor.files import FileSystem, file_system_of

__all__ = [
    "AS_ROOT",
    "CheckContext",
    "CheckFunction",
    "CheckLevel",
    "CheckResult",
    "DeviceReport",
    "KubeletReport",
    "ServicePaths",
    "ServiceReport",
    "unknown_result",
]

AS_ROOT = "Call this as root: sudo scrubber doctor"


class CheckLevel(StrEnum):
    """What a check found. A warning is worth a look, or says that nobody could look; it proves no promise broken."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check found: ``remedy`` says what to do, and is empty when there is nothing to do."""

    name: str
    level: CheckLevel
    message: str
    remedy: str = ""


def unknown_result(name: str, what: str, error: OSError, remedy: str = AS_ROOT) -> CheckResult:
    """The finding that something cannot be looked at. ``what``: a sentence's end, "who may act is unknown"."""
    where = f"{error.filename}: " if error.filename is not None else ""
    return CheckResult(name, CheckLevel.WARNING, f"{where}{error.strerror or error}; {what}.", remedy)


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """One device as the service shows it.

    Attributes:
        unauthorized_users: how many processes use it that nobody granted it.
        uninspected_processes: how many findings of its last scrub name processes that could not be looked through.
        break_glass_until: seconds since the epoch; None while the glass is whole.
    """

    id: str
    index: str
    state: str = "clean"
    advertised: bool = True
    enforcement: str = "enforce"
    policy: str = "default"
    unauthorized_users: int = 0
    uninspected_processes: int = 0
    break_glass_until: float | None = None
    break_glass: str = ""


@dataclass(frozen=True, slots=True)
class ServicePaths:
    """Where the service says that it keeps and finds things; None for what it did not say."""

    state: Path | None = None
    policy: Path | None = None
    kubelet: Path | None = None
    pod_resources: Path | None = None
    pod_logs: Path | None = None
    cgroups: Path | None = None


@dataclass(frozen=True, slots=True)
class ServiceReport:
    """What the service answered about itself; ``error`` is the sentence why it did not, and then the rest is empty.

    Attributes:
        is_permission_denied: it is this user who may not ask.
        import_error: why it could not even be asked: a library of ours does not load.
        key_id: fingerprint of the key that signs certificates.
        audit_head: of the audit, ``SEQ:HASH``.
        devices: None: it did not list them, and ``devices_error`` says why.
        policy_error: why the policy's file as it stands now is not in force.
        kubelet_status: "ok", or why the service does not believe the kubelet's lists; empty: it said nothing of it.
        pid: its own, in its PID namespace; 0: it did not say.
        admin_group, read_group: whose members may act, and look; empty: nobody's.
    """

    error: str = ""
    is_permission_denied: bool = False
    import_error: str = ""
    version: str = ""
    backend: str = ""
    node: str = ""
    policy: str = ""
    policy_digest: str = ""
    enforcement: str = ""
    ledger_status: str = ""
    key_id: str = ""
    audit_head: str = ""
    reset_stop_reason: str = ""
    resets_until: float | None = None
    resets_waiting: int = 0
    quarantine_stop_reason: str = ""
    quarantines_spared: int = 0
    devices: tuple[DeviceReport, ...] | None = None
    devices_error: str = ""
    policy_error: str = ""
    kubelet_status: str = ""
    pid: int = 0
    admin_group: str = ""
    read_group: str = ""
    paths: ServicePaths = ServicePaths()

    @property
    def is_available(self) -> bool:
        return not self.error and not self.import_error

    @property
    def simulated(self) -> bool:
        """Whether it serves a backend that needs no hardware."""
        return self.backend in BACKENDS and BACKENDS[self.backend].simulated

    @property
    def has_hardware(self) -> bool:
        """Whether it serves a backend of real devices; False as well while the backend is not known."""
        return self.backend in BACKENDS and not BACKENDS[self.backend].simulated


@dataclass(frozen=True, slots=True)
class KubeletReport:
    """What came of asking the kubelet for its list of pods, as the service asks it.

    Attributes:
        was_queried: False: nobody tried, for there is no socket.
        is_trusted: its list may be believed.
        message: why not.
        is_recently_started: it answered, and only has not for long: who has asked it before may know better.
        remarks: what else does not fit: a checkpoint or a directory that cannot be read.
        is_permission_denied: this user may not ask.
        containers_with_devices: how many containers have devices of ours by its list.
    """

    was_queried: bool = False
    is_trusted: bool = False
    message: str = ""
    is_recently_started: bool = False
    remarks: tuple[str, ...] = ()
    is_permission_denied: bool = False
    containers_with_devices: int = 0


@dataclass(frozen=True, slots=True)
class CheckContext:
    """Where to look, and what was answered already.

    Attributes:
        root: the node's root directory as it is seen from here.
        kubelet_dir: the kubelet's directory, as the node calls it.
        toolkit_configs: empty: in the usual places.
        socket_dir: the directory of the service's sockets, as it is seen from here.
        state_dir: the service's state directory, as it is seen from here.
        state_dir_known: somebody named it, so it is the service's and no guess.
        policy: a file or the name of a shipped one, as a person named it; empty: nobody did.
        now: seconds since the epoch.
        file_system: tells about the file system that a path is on; raises OSError.
    """

    service: ServiceReport
    kubelet: KubeletReport = KubeletReport()
    root: Path = Path("/")
    kubelet_dir: Path = Path("/var/lib/kubelet")
    toolkit_configs: tuple[Path, ...] = ()
    socket_dir: Path = Path("/run/scrubber")
    state_dir: Path = Path("/var/lib/scrubber")
    state_dir_known: bool = False
    policy: str = ""
    now: float = field(default_factory=time.time)
    file_system: Callable[[Path], FileSystem] = file_system_of

    def path(self, path: Path | str) -> Path:
        """``path`` of the node as it is seen from here."""
        return self.root / Path(path).relative_to("/")

    @property
    def has_driver(self) -> bool:
        """NVIDIA's kernel driver is loaded."""
        return self.path("/proc/driver/nvidia/version").exists()


CheckFunction = Callable[[CheckContext], Iterator[CheckResult]]
"""One thing that is looked at; yields nothing where there is nothing to look at, and raises nothing."""
