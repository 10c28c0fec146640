"""The input of a check and its result: one message, and what to do.

The promise: what could not be checked is never reported as ok, for any reason; a check that cannot run reports that,
and names what it needs. And every problem comes with a command to run or a file to change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from scrubber.backends import BACKENDS, Backend
from scrubber.doctor.files import FileSystem, file_system_of

__all__ = [
    "AS_ROOT",
    "CheckContext",
    "CheckFunction",
    "CheckLevel",
    "CheckResult",
    "ClusterReport",
    "DeviceReport",
    "KubeletReport",
    "Recommendation",
    "ReportedHolder",
    "ServicePaths",
    "ServiceReport",
    "unknown_result",
]

AS_ROOT = "Run this as root: sudo scrubber doctor"


class CheckLevel(StrEnum):
    """What a check found.

    A warning deserves attention, or means that the check could not run; it does not prove a broken promise.
    """

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The configuration that fits this node.

    Attributes:
        environment: what was recognized, for people.
        resources: kustomizations, as the kustomization of a cluster lists them; empty for systemd units.
        components: components beside them.
        choices: components of which one is right, where the node does not show which.
        chart_values: values of the Helm chart in place of these kustomizations and components, as ``helm --set`` reads
            them; empty for systemd units.
        plugin_environment: further variables of the plugin.
        cluster_policy: keys of the GPU Operator's ClusterPolicy and their values.
        toolkit_environment: entries of ``toolkit.env`` in the ClusterPolicy.
        policy: lines for a policy of ours; empty where the bundled ones fit.
        notes: what else to do.
    """

    environment: str
    resources: tuple[str, ...] = ()
    components: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    chart_values: tuple[tuple[str, str], ...] = ()
    plugin_environment: tuple[tuple[str, str], ...] = ()
    cluster_policy: tuple[tuple[str, str], ...] = ()
    toolkit_environment: tuple[tuple[str, str], ...] = ()
    policy: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check.

    Attributes:
        remedy: what to do; empty when there is nothing to do.
        recommendation: the configuration that fits this node, from the check that determines it.
    """

    name: str
    level: CheckLevel
    message: str
    remedy: str = ""
    recommendation: Recommendation | None = None


def unknown_result(name: str, what: str, error: OSError, remedy: str = AS_ROOT) -> CheckResult:
    """Return the result of a check that could not run. ``what``: the end of a message, "who may act is unknown"."""
    where = f"{error.filename}: " if error.filename is not None else ""
    return CheckResult(name, CheckLevel.WARNING, f"{where}{error.strerror or error}; {what}.", remedy)


@dataclass(frozen=True, slots=True)
class ReportedHolder:
    """A process that holds a device, as the service reports it.

    Attributes:
        kind: its kind; ``validation`` for a program of the node's infrastructure.
        since: seconds since the epoch.
    """

    pid: int
    command: str = ""
    kind: str = "process"
    code: str = ""
    namespace: str = ""
    pod: str = ""
    pod_uid: str = ""
    unit: str = ""
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """One device as the service reports it.

    Attributes:
        unauthorized_users: number of processes that use it without a grant.
        uninspected_processes: number of findings of its last scrub that name processes which could not be inspected.
        holders: processes beside which the device, which is free, cannot be cleared.
        agents: processes of the node's infrastructure that hold it, also while a pod has it: they block a reset.
        break_glass_until: end of the break-glass override, in seconds since the epoch; None while none is active.
        confidential: its confidential-computing mode; empty for none.
        model, parent, profile: as the driver reports them; the last two of an instance, otherwise empty.
    """

    id: str
    index: str
    state: str = "clean"
    advertised: bool = True
    enforcement: str = "enforce"
    policy: str = "default"
    unauthorized_users: int = 0
    uninspected_processes: int = 0
    holders: tuple[ReportedHolder, ...] = ()
    agents: tuple[ReportedHolder, ...] = ()
    break_glass_until: float | None = None
    break_glass: str = ""
    confidential: str = ""
    model: str = ""
    parent: str = ""
    profile: str = ""


@dataclass(frozen=True, slots=True)
class ServicePaths:
    """Paths that the service reports; None for those that it does not report."""

    state: Path | None = None
    policy: Path | None = None
    kubelet: Path | None = None
    pod_resources: Path | None = None
    pod_logs: Path | None = None
    cgroups: Path | None = None


@dataclass(frozen=True, slots=True)
class ServiceReport:
    """The service's reply about itself; ``error`` is the message why there is none, and then the rest is empty.

    Attributes:
        is_permission_denied: whether this user may not query it.
        import_error: why it could not be queried at all: one of our libraries does not load.
        key_id: fingerprint of the key that signs certificates.
        audit_head: head of the audit log, ``SEQ:HASH``.
        devices: None if it did not list them; ``devices_error`` contains the reason.
        policy_error: why the present content of the policy file is not active.
        kubelet_status: "ok", "none" on a node without a kubelet, or why the service does not trust the kubelet's lists; empty if it reports neither.
        pid: its PID in its PID namespace; 0 if it reports none.
        admin_group, read_group: groups whose members may administer and read; empty if there is none.
        yield_reasons: why the node is yielded, one text for each request; empty while it is not.
        yield_remaining: PIDs of processes of the service that could not be killed and may use the driver.
        agent_pause: how agents are paused for a reset, since when, and what was changed for it; empty while none are.
        is_agent_pause_ending: whether they are to be restored.
        plugin_versions: of the plugins that are connected to it.
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
    yield_reasons: tuple[str, ...] = ()
    yield_remaining: tuple[int, ...] = ()
    agent_pause: str = ""
    is_agent_pause_ending: bool = False
    plugin_versions: tuple[str, ...] = ()
    paths: ServicePaths = ServicePaths()

    @property
    def is_available(self) -> bool:
        return not self.error and not self.import_error

    @property
    def has_no_kubelet(self) -> bool:
        """Whether the service runs without a kubelet, according to its settings."""
        return self.kubelet_status == "none"

    @property
    def simulated(self) -> bool:
        """Whether it serves a backend that needs no hardware."""
        rows = self._backends()
        return bool(rows) and all(each.simulated for each in rows)

    @property
    def has_hardware(self) -> bool:
        """Whether it serves a backend of real devices; also False while the backend is not known."""
        return any(not each.simulated for each in self._backends())

    def _backends(self) -> list[Backend]:
        """Return the rows of the backends that it serves; none while they are not known."""
        return [BACKENDS[each] for each in self.backend.split(",") if each in BACKENDS]


@dataclass(frozen=True, slots=True)
class KubeletReport:
    """The result of querying the kubelet for its list of pods, in the way in which the service queries it.

    Attributes:
        was_queried: False if there is no socket, so that no query was made.
        is_trusted: whether its list is trusted.
        message: why it is not.
        is_recently_started: whether it replied but was started only recently: a client that queried it earlier may know
            better.
        remarks: other inconsistencies: a checkpoint or a directory that cannot be read.
        is_permission_denied: whether this user may not query it.
        containers_with_devices: number of containers in its list with devices of ours.
        containers_with_claims: number of those whose devices are of resource claims.
        pods_with_devices: namespace and name of the pods of these containers.
    """

    was_queried: bool = False
    is_trusted: bool = False
    message: str = ""
    is_recently_started: bool = False
    remarks: tuple[str, ...] = ()
    is_permission_denied: bool = False
    containers_with_devices: int = 0
    containers_with_claims: int = 0
    pods_with_devices: frozenset[tuple[str, str]] = frozenset()


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """The API server's reply to our DRA driver, whose credentials are used.

    Attributes:
        error: why it could not be queried; the rest is then empty.
        version: of Kubernetes, ``v1.36.2``.
        denied: what the driver needs, and its role does not allow.
        slices, devices, devices_with_taints, devices_with_conditions: numbers of what the driver has published for this
            node; the last one of devices with binding conditions.
        slices_error: why that is not known.
        labels: labels of the node.
    """

    error: str = ""
    version: str = ""
    denied: tuple[str, ...] = ()
    slices: int = 0
    devices: int = 0
    devices_with_taints: int = 0
    devices_with_conditions: int = 0
    slices_error: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckContext:
    """Paths to check, and the replies of the service and the kubelet.

    Attributes:
        cluster: None where no DRA driver of ours runs.
        root: the node's root directory as seen from this process.
        root_of_init: the root directory of PID 1, to prove that ``root`` is the node's and not a container's; None if the
            user named ``root``.
        kubelet_dir: the kubelet's directory, as a path on the node.
        pod_logs: the directory of the kubelet's pod logs, as seen from this process.
        toolkit_configs: configuration files of NVIDIA's toolkit; empty for the usual paths.
        socket_dir: the directory of the service's sockets, as seen from this process.
        state_dir: the service's state directory, as seen from this process.
        state_dir_known: whether it was given explicitly or by the service, and is not a guess.
        policy: a file or the name of a bundled policy, as the user gave it; empty if none was given.
        now: seconds since the epoch.
        file_system: returns the file system of a path; raises OSError.
    """

    service: ServiceReport
    kubelet: KubeletReport = KubeletReport()
    cluster: ClusterReport | None = None
    root: Path = Path("/")
    root_of_init: Path | None = None
    kubelet_dir: Path = Path("/var/lib/kubelet")
    pod_logs: Path = Path("/var/log/pods")
    toolkit_configs: tuple[Path, ...] = ()
    socket_dir: Path = Path("/run/scrubber")
    state_dir: Path = Path("/var/lib/scrubber")
    state_dir_known: bool = False
    policy: str = ""
    now: float = field(default_factory=time.time)
    file_system: Callable[[Path], FileSystem] = file_system_of

    def path(self, path: Path | str) -> Path:
        """Return ``path`` of the node as seen from this process."""
        return self.root / Path(path).relative_to("/")

    @property
    def has_driver(self) -> bool:
        """Whether NVIDIA's kernel driver is loaded."""
        return self.path("/proc/driver/nvidia/version").exists()


CheckFunction = Callable[[CheckContext], Iterator[CheckResult]]
"""One check; yields nothing where there is nothing to check, and raises nothing."""
