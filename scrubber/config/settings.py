"""The settings of the service at its start: paths, watch intervals, logging.

A :class:`ServiceSettings` that exists is valid as far as this can be checked without touching the node; anything else
was refused with a message that names the flag to change. Decisions about devices are in the policy, not here.
"""

from __future__ import annotations

import grp
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Protocol, Self

from scrubber.domain.errors import InvalidConfiguration

if TYPE_CHECKING:
    from scrubber.domain.policy import Policy

__all__ = [
    "EMULATOR_MARKER_FILE",
    "FROM_KUBELET_DIR",
    "Address",
    "ContainerIdentity",
    "DisabledHealthchecks",
    "LogFormat",
    "LogLevel",
    "MetricsTls",
    "ServiceSettings",
    "TraceExport",
]

FROM_KUBELET_DIR = Path()
"""Marks that no PodResources socket was given."""
EMULATOR_MARKER_FILE = "emulated"
"""File that the kubelet emulator writes into its directory; a real kubelet's directory does not have it."""


class ChosenBackend(Protocol):
    """What the settings need to know of the chosen backend: a row of :data:`scrubber.backends.BACKENDS`."""

    @property
    def name(self) -> str: ...
    @property
    def simulated(self) -> bool: ...
    @property
    def check_settings(self) -> Callable[[ServiceSettings], None]: ...


class ContainerIdentity(StrEnum):
    """How the pod of a process is identified: by cgroup, or by the environment markers of the emulator.

    ``auto``: by cgroup wherever the kubelet is real, for every backend. By marker only with the ``sim`` backend, with
    the kubelet emulator or without a kubelet, and when no cgroup root is given.
    """

    AUTO = "auto"
    CGROUP = "cgroup"
    MARKER = "marker"


class LogFormat(StrEnum):
    """``auto``: console on a terminal, JSON elsewhere."""

    AUTO = "auto"
    JSON = "json"
    CONSOLE = "console"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class TraceExport(StrEnum):
    """Where traces are sent: nowhere, or by OTLP to the endpoint in OpenTelemetry's environment variables."""

    OFF = "off"
    OTLP = "otlp"


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP address to listen on. Port 0 lets the system choose."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read ``HOST:PORT`` or ``[IPv6]:PORT``; None for ``off`` and for the empty text: do not listen.

        Raises:
            InvalidConfiguration: the text is neither.
        """
        if text in ("", "off"):
            return None
        host, colon, port = text.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        valid_host = bool(host) and (bracketed or ":" not in host) and not any(each.isspace() for each in host)
        if not (colon and valid_host and port.isascii() and port.isdigit() and int(port) <= 65535):
            raise InvalidConfiguration(
                f'"{text}" is not an address to listen on; write HOST:PORT, such as 127.0.0.1:9464, or off to '
                "disable listening."
            )
        return cls(host[1:-1] if bracketed else host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class MetricsTls:
    """TLS for scrapes, with PEM files. With ``client_ca``, scraping requires a client certificate signed by it."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    @classmethod
    def from_flags(cls, certificate: Path | None, key: Path | None, client_ca: Path | None) -> Self | None:
        """Combine the three flags; None: no encryption. Paths are made absolute.

        Raises:
            InvalidConfiguration: one flag requires another that is missing.
        """
        if certificate is None and key is None:
            if client_ca is not None:
                raise InvalidConfiguration(
                    "--metrics-client-ca needs --metrics-cert and --metrics-key: without them scrapes are "
                    "not encrypted, and no client certificate is requested."
                )
            return None
        if certificate is None or key is None:
            given, lacks = (
                ("--metrics-key", "--metrics-cert") if certificate is None else ("--metrics-cert", "--metrics-key")
            )
            raise InvalidConfiguration(f"{given} needs {lacks}: pass a certificate and its key together.")
        return cls(certificate.absolute(), key.absolute(), None if client_ca is None else client_ca.absolute())


@dataclass(frozen=True, slots=True)
class DisabledHealthchecks:
    """XIDs to ignore: all of them, or those in ``codes``.

    The environment variable is that of NVIDIA's plugin; setting ``xids: ignore`` in the policy is preferable here.
    """

    all_codes: bool = False
    codes: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return self.all_codes or bool(self.codes)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``all``, ``xids``, or XIDs separated by commas; the empty text disables nothing.

        Raises:
            InvalidConfiguration: it is none of these.
        """
        words = [word.strip() for word in text.lower().split(",") if word.strip()]
        everything = any(word in ("all", "xids") for word in words)
        codes = [word for word in words if word not in ("all", "xids")]
        odd = [word for word in codes if not (word.isascii() and word.isdigit() and 1 <= int(word) <= 9999)]
        if odd:
            raise InvalidConfiguration(
                f'DP_DISABLE_HEALTHCHECKS: "{odd[0]}" is not an XID; write all, xids, or numbers such as 13,31,43.'
            )
        return cls(everything, frozenset(int(word) for word in codes))

    def apply_to(self, policy: Policy) -> Policy:
        """Return ``policy`` and its overrides, with these XIDs ignored."""
        from scrubber.domain.health.signal_table import (
            ErrorClass,  # the plugin shares these settings but does not use policies
        )

        overrides = tuple(replace(each, policy=self.apply_to(each.policy)) for each in policy.overrides)
        if self.all_codes:
            return replace(policy, error_classes={}, unlisted_error=ErrorClass.IGNORE, overrides=overrides)
        classes = {**policy.error_classes, **dict.fromkeys(sorted(self.codes), ErrorClass.IGNORE)}
        return replace(policy, error_classes=classes, overrides=overrides)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """All settings of ``scrubber serve``. Paths are made absolute, because child processes run in other directories.

    Attributes:
        backend: a row of :data:`scrubber.backends.BACKENDS`.
        sim_dir: directory of the simulated node; needed by the ``sim`` backend only.
        config: file of the backend; needed by the ``command`` backend only.
        state_dir: directory of the ledger; mode 0700. The backend manages the devices' lock files.
        socket_dir: directory of the service's sockets.
        policy: path of a policy file, or the name of a bundled policy.
        kubelet_dir: the kubelet's directory; it need not exist.
        pod_resources_socket: default: ``pod-resources/kubelet.sock`` in ``kubelet_dir``.
        pod_logs_dir: the kubelet's ``<namespace>_<name>_<uid>`` directories.
        metrics_address: address that Prometheus scrapes; None: no metrics are served.
        metrics_required: whether an address in use ends the service; otherwise the service warns and serves no metrics.
        metrics_tls: TLS for scrapes; None: no encryption.
        probe_address: address of the kubelet's probes; None: no probes are served.
        reset_journal: socket of systemd's journal to which successful resets are reported for NVSentinel; None: they are
            not.
        traces: whether traces are sent; OpenTelemetry's own environment variables define the destination.
        node_name: node name in every certificate.
        cgroup_root: where cgroups are mounted; None: determined automatically, where cgroups are used.
        container_identity: how the pod of a process is identified; see :class:`ContainerIdentity`.
        reflection: whether the sockets offer gRPC reflection.
        admin_group: its members may use the admin and read sockets; None: root only.
        read_group: its members may use the read socket, instead of the admin group; None: the admin group.
        poll_interval: seconds between two checks of holders; checks of device users are at most 1 s apart.
        nvidia_driver_root: where NVIDIA's driver is installed: its libraries, its programs, its device nodes.
        amd_root: where the files of AMD's driver, its device nodes and ROCm are: ``sys``, ``dev``, ``opt/rocm``.
        kubelet: whether the node has a kubelet; otherwise only jobs get devices, and nothing is expected of a kubelet.
        dcgmi: the program that lets DCGM release the driver for a reset; None: DCGM is not asked to.
        dcgm_address: of DCGM's host engine; empty: the program's own default.
        fail_on_init_error: whether a missing driver at the start ends the service; otherwise the service waits for it.
        disabled_healthchecks: the value of ``DP_DISABLE_HEALTHCHECKS``: XIDs to ignore.
        list_stabilize_seconds: seconds after a kubelet's start during which an empty pod list proves nothing.

    Raises:
        InvalidConfiguration: a value that cannot work.
    """

    backend: ChosenBackend
    sim_dir: Path | None = None
    config: Path | None = None
    state_dir: Path = Path("/var/lib/scrubber")
    socket_dir: Path = Path("/run/scrubber")
    policy: str = "default"
    kubelet: bool = True
    kubelet_dir: Path = Path("/var/lib/kubelet")
    pod_resources_socket: Path = FROM_KUBELET_DIR
    pod_logs_dir: Path = Path("/var/log/pods")
    metrics_address: Address | None = Address("127.0.0.1", 9464)
    metrics_required: bool = False
    metrics_tls: MetricsTls | None = None
    probe_address: Address | None = None
    reset_journal: Path | None = None
    traces: TraceExport = TraceExport.OFF
    node_name: str = field(default_factory=gethostname)
    cgroup_root: Path | None = None
    container_identity: ContainerIdentity = ContainerIdentity.AUTO
    log_format: LogFormat = LogFormat.AUTO
    log_level: LogLevel = LogLevel.INFO
    reflection: bool = False
    admin_group: str | None = None
    read_group: str | None = None
    poll_interval: float = 1.0
    list_stabilize_seconds: float = 60.0
    nvidia_driver_root: Path = Path("/")
    amd_root: Path = Path("/")
    dcgmi: Path | None = None
    dcgm_address: str = ""
    fail_on_init_error: bool = False
    disabled_healthchecks: DisabledHealthchecks = DisabledHealthchecks()

    def __post_init__(self) -> None:
        if self.pod_resources_socket == FROM_KUBELET_DIR:
            object.__setattr__(self, "pod_resources_socket", self.kubelet_dir / "pod-resources" / "kubelet.sock")
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Path):
                object.__setattr__(self, each.name, value.absolute())
        self.backend.check_settings(self)
        if not self.policy:
            raise InvalidConfiguration(
                "--policy is empty; pass a policy file or the name of a bundled policy, such as default."
            )
        if not self.node_name or any(each.isspace() for each in self.node_name):
            raise InvalidConfiguration(
                f'"{self.node_name}" is not a valid node name; pass one without spaces with --node-name.'
            )
        if self.dcgm_address.startswith("-") or any(each.isspace() for each in self.dcgm_address):
            raise InvalidConfiguration(
                f'"{self.dcgm_address}" is not an address of DCGM; pass HOST or HOST:PORT with --dcgm-address.'
            )
        self._check_directories()
        self._check_times()
        for flag, group in {"--admin-group": self.admin_group, "--read-group": self.read_group}.items():
            if group is not None:
                _check_group(flag, group)

    @property
    def uses_cgroups(self) -> bool:
        """Whether processes are assigned to pods by cgroup; ``auto`` decides by the configured kubelet."""
        if self.container_identity is not ContainerIdentity.AUTO:
            return self.container_identity is ContainerIdentity.CGROUP
        if not self.backend.simulated or self.cgroup_root is not None:
            return True
        has_kubelet = _exists(self.kubelet_dir, unreadable=True) or _exists(self.pod_resources_socket, unreadable=True)
        return has_kubelet and not _exists(self.kubelet_dir / EMULATOR_MARKER_FILE, unreadable=False)

    def _check_directories(self) -> None:
        directories = {
            "--sim-dir": self.sim_dir,
            "--state-dir": self.state_dir,
            "--socket-dir": self.socket_dir,
            "--kubelet-dir": self.kubelet_dir,
            "--pod-logs-dir": self.pod_logs_dir,
            "--cgroup-root": self.cgroup_root,
            "--nvidia-driver-root": self.nvidia_driver_root,
            "--amd-root": self.amd_root,
        }
        for flag, path in directories.items():
            if path is not None and path.exists() and not path.is_dir():
                raise InvalidConfiguration(f"{flag} {path} is not a directory; pass a directory.")

    def _check_times(self) -> None:
        if not (math.isfinite(self.poll_interval) and 0 < self.poll_interval <= 60):
            raise InvalidConfiguration(
                f"--poll-interval cannot be {self.poll_interval:g} s; write a time above 0 and up to 1m, such as 1s."
            )
        if not (math.isfinite(self.list_stabilize_seconds) and self.list_stabilize_seconds >= 0):
            raise InvalidConfiguration(
                f"--list-stabilization-window cannot be {self.list_stabilize_seconds:g} s; write a time such as 60s."
            )


def _exists(path: Path, *, unreadable: bool) -> bool:
    """Whether ``path`` exists; ``unreadable`` where this process has no permission to know."""
    try:
        return path.exists()
    except OSError:
        return unreadable


def _check_group(flag: str, name: str) -> None:
    try:
        grp.getgrnam(name)
    except KeyError as error:
        raise InvalidConfiguration(
            f'The group "{name}" does not exist on this machine; create it (groupadd {name}) or change {flag}.'
        ) from error
