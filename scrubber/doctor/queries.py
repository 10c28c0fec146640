"""Queries the service and the kubelet, once, before the checks run; both with a timeout, and neither is changed.

All code that loads gRPC is in this module, and loads it when it is used.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from scrubber.doctor.deployment import DraDriver
from scrubber.doctor.model import (
    ClusterReport,
    DeviceReport,
    KubeletReport,
    ReportedHolder,
    ServicePaths,
    ServiceReport,
)
from scrubber.domain.assignment import Trust
from scrubber.domain.errors import PermissionDenied, ScrubberError
from scrubber.domain.formatting import format_utc

if TYPE_CHECKING:
    from plugin.cluster.credentials import Credentials
    from scrubber.adapters.kubelet.listening_process import PodUidLookup
    from scrubber.api import scrubber_pb2 as pb

__all__ = ["query_cluster", "query_kubelet", "query_service"]

_CLUSTER_SECONDS = 3.0
_SERVICE_SECONDS = 5.0
_KUBELET_SECONDS = 2.0


async def query_service(sockets: Path, seconds: float = _SERVICE_SECONDS) -> ServiceReport:
    """Return the service's reply about itself and its devices; an error where it does not reply within ``seconds``."""
    try:
        from scrubber.api.client import ReadClient
    except Exception as error:  # noqa: BLE001 - generated code has its own error classes for other library versions
        return ServiceReport(import_error=f"{type(error).__name__}: {error}".partition("\n")[0])
    devices: tuple[DeviceReport, ...] | None = None
    devices_refusal = ""
    try:
        async with ReadClient(sockets) as client, asyncio.timeout(seconds):
            info = await client.service_info()
            try:
                devices = tuple(_device_report(each) for each in (await client.devices()).devices)
            except ScrubberError as error:
                devices_refusal = str(error)
    except TimeoutError:
        return ServiceReport(error=f"The scrub service did not answer within {seconds:g} s on {sockets}.")
    except ScrubberError as error:
        return ServiceReport(error=str(error), is_permission_denied=isinstance(error, PermissionDenied))
    return _service_report(info, devices, devices_refusal)


def _service_report(
    info: pb.ServiceInfo, devices: tuple[DeviceReport, ...] | None, devices_refusal: str
) -> ServiceReport:
    breaker, head = info.breaker, info.audit_head
    return ServiceReport(
        version=info.version,
        backend=info.backend,
        node=info.node_name,
        policy=info.policy,
        policy_digest=info.policy_digest,
        enforcement=info.enforcement,
        ledger_status=info.ledger_status,
        key_id=info.key_id,
        audit_head=f"{head.sequence}:{head.hash}" if head.hash else "",
        reset_stop_reason=breaker.resets_stopped_reason,
        resets_until=breaker.resets_stopped_until or None,
        resets_waiting=len(breaker.awaiting_reset_ids),
        quarantine_stop_reason=breaker.soft_quarantines_stopped_reason,
        quarantines_spared=len(breaker.kept_in_service_ids),
        devices=devices,
        devices_error=devices_refusal,
        policy_error=info.policy_rejection,
        kubelet_status=info.kubelet_status,
        yield_reasons=tuple(f"{each.actor}: {each.reason}" for each in info.node_yield.requests),
        yield_remaining=tuple(info.node_yield.remaining_pids),
        agent_pause=_agent_pause(info.agent_pause) if info.HasField("agent_pause") else "",
        is_agent_pause_ending=info.agent_pause.ending,
        plugin_versions=tuple(info.plugin_versions),
        pid=info.pid,
        admin_group=info.admin_group,
        read_group=info.read_group,
        paths=ServicePaths(**{name: _service_path(info, name.replace("_", "-")) for name in ServicePaths.__slots__}),
    )


def _agent_pause(pause: pb.AgentPause) -> str:
    changes = ", ".join(f"{each.key}={each.during}" for each in pause.changes)
    parts = (f"by {pause.way} since {format_utc(pause.since)}", changes and f"with {changes}", pause.message)
    return ". ".join(part.rstrip(".") for part in (" ".join(filter(None, parts[:2])), parts[2]) if part)


def _service_path(info: pb.ServiceInfo, name: str) -> Path | None:
    """Return the path, or None if it is not absolute: it would be resolved relative to this command's directory."""
    path = info.paths.get(name, "")
    return Path(path) if path.startswith("/") and "\0" not in path else None


def _device_report(device: pb.Device) -> DeviceReport:
    broken = device.HasField("break_glass")
    return DeviceReport(
        id=device.id,
        index=device.index,
        state=device.state,
        advertised=device.advertised,
        enforcement=device.enforcement,
        policy=device.policy,
        unauthorized_users=len(device.unauthorized_users),
        uninspected_processes=len(device.uninspected_processes),
        holders=tuple(_holder_report(each) for each in device.holders if each.blocking and device.hygiene != "in-use"),
        agents=tuple(_holder_report(each) for each in device.holders if each.kind == "infrastructure"),
        break_glass_until=device.break_glass.expires_at if broken else None,
        break_glass=f"{device.break_glass.actor} set a break-glass override ({device.break_glass.reason})"
        if broken
        else "",
        confidential=device.attributes.get("confidential", ""),
        model=device.model,
        parent=device.parent,
        profile=device.profile,
    )


def _holder_report(holder: pb.DeviceHolder) -> ReportedHolder:
    return ReportedHolder(
        pid=holder.pid,
        command=holder.command,
        kind=holder.kind,
        code=holder.code,
        namespace=holder.namespace,
        pod=holder.pod,
        pod_uid=holder.pod_uid,
        unit=holder.unit,
        since=holder.since,
    )


async def query_kubelet(
    socket: Path,
    *,
    kubelet_dir: Path,
    pod_logs: Path,
    cgroups: Path,
    device_ids: Iterable[str],
    seconds: float = _KUBELET_SECONDS,
) -> KubeletReport:
    """Query the kubelet once, as the service does: only a process that can be the kubelet.

    Args:
        cgroups: directory below which cgroups are mounted; a process in a pod is not queried.
        device_ids: ids of our devices, with which the kubelet's list is compared with its checkpoint.
    """
    try:
        socket.stat()
        if not os.access(socket, os.W_OK, effective_ids=True):
            return KubeletReport(was_queried=True, is_permission_denied=True)
    except PermissionError:
        return KubeletReport(was_queried=True, is_permission_denied=True)
    except OSError:
        return KubeletReport()
    try:
        from scrubber.adapters.clock import SystemClock
        from scrubber.adapters.kubelet.assignments import KubeletAssignments
    except Exception as error:  # noqa: BLE001 - generated code has its own error classes
        return KubeletReport(
            was_queried=True, message=f"It cannot be queried ({type(error).__name__}: {error}).".replace("\n", " ")
        )
    known = frozenset(device_ids)
    async with AsyncExitStack() as stack:
        try:
            assignments = KubeletAssignments(
                pod_resources_socket=socket,
                kubelet_dir=kubelet_dir,
                pod_logs_dir=pod_logs,
                device_ids=lambda: known,
                clock=SystemClock(),
                pod_uid_of=_pod_lookup(cgroups, stack),
                deadline=seconds,
            )
            stack.push_async_callback(assignments.close)
            async with asyncio.timeout(2 * seconds):
                reading = await assignments.read()
        except TimeoutError:
            return KubeletReport(
                was_queried=True, message=f"The kubelet did not answer within {2 * seconds:g} s on {socket}."
            )
        except (ScrubberError, OSError) as error:
            return KubeletReport(was_queried=True, message=str(error))
    return KubeletReport(
        was_queried=True,
        is_trusted=reading.trust is Trust.TRUSTED,
        message=reading.untrusted_reason,
        is_recently_started=reading.trust is Trust.EMPTY_AFTER_RESTART,
        remarks=reading.caveats,
        containers_with_devices=sum(bool(each.devices) for each in reading.assignments),
        # Only the name of a device plugin's resource contains a slash.
        containers_with_claims=sum(
            bool(each.devices and each.resource) and "/" not in each.resource for each in reading.assignments
        ),
        pods_with_devices=frozenset(
            (each.pod.namespace, each.pod.name) for each in reading.assignments if each.devices
        ),
    )


def _pod_lookup(cgroups: Path, stack: AsyncExitStack) -> PodUidLookup | None:
    from scrubber.adapters.cgroups import CgroupContainers, discover_root

    try:
        root = discover_root(cgroups)
        if root is None:
            return None
        containers = CgroupContainers(root)
    except (ScrubberError, OSError):
        return None  # the cgroups check reports what is wrong with them
    stack.callback(containers.close)
    return containers.pod_uid_of


async def query_cluster(driver: DraDriver, seconds: float = _CLUSTER_SECONDS) -> ClusterReport:
    """Query the API server with the credentials of our DRA driver; nothing is changed there.

    Args:
        seconds: limit of all requests together.
    """
    try:
        from plugin.cluster.client import ApiServerClient
        from plugin.cluster.errors import ClusterError
    except Exception as error:  # noqa: BLE001 - generated code has its own error classes
        return ClusterReport(error=f"{type(error).__name__}: {error}".partition("\n")[0])
    node = driver.process.setting("--node-name", "SCRUBBER_NODE_NAME")
    credentials = _credentials_of(driver)
    if credentials is None:
        return ClusterReport(error="Its credentials were not found.")
    client = ApiServerClient(credentials, node, deadline=seconds)
    try:
        async with asyncio.timeout(seconds):
            version = await client.get_version()
            denied = [each for each in _required_access(driver.name) if not await client.is_allowed(*each)]
            labels = {} if _NODE_ACCESS in denied else (await client.get_node()).labels
            try:
                _, slices = await client.list_slices(driver.name)
            except ClusterError as error:
                names = _access_names(denied)
                return ClusterReport(version=version, denied=names, slices_error=str(error), labels=labels)
    except (ClusterError, TimeoutError) as error:
        return ClusterReport(error=str(error) or f"It did not respond within {seconds:g} s.")
    finally:
        await client.close()
    devices = [device for each in slices for device in each["spec"].get("devices") or []]
    return ClusterReport(
        version=version,
        denied=_access_names(denied),
        slices=len(slices),
        devices=len(devices),
        devices_with_taints=sum(bool(each.get("taints")) for each in devices),
        devices_with_conditions=sum(bool(each.get("bindingConditions")) for each in devices),
        labels=labels,
    )


_Access = tuple[str, str, str]
"""Verb, group, and resource with its subresource and, after a colon, the name."""
_NODE_ACCESS: _Access = ("get", "", "nodes")


def _required_access(driver: str) -> list[_Access]:
    group = "resource.k8s.io"
    return [
        *((verb, group, "resourceslices") for verb in ("list", "watch", "create", "update", "delete")),
        *((verb, group, "resourceclaims") for verb in ("get", "list", "watch")),
        ("patch", group, "resourceclaims/status"),
        ("associated-node:patch", group, f"resourceclaims/driver:{driver}"),
        _NODE_ACCESS,
    ]


def _access_names(denied: Iterable[_Access]) -> tuple[str, ...]:
    return tuple(f"{verb} {resource.partition(':')[0]}" for verb, _, resource in denied)


def _credentials_of(driver: DraDriver) -> Credentials | None:
    from plugin.cluster.credentials import SERVICE_ACCOUNT_DIRECTORY, Kubeconfig, find_credentials

    process = driver.process
    if file := process.setting("--kubeconfig", "SCRUBBER_KUBECONFIG"):
        return Kubeconfig(process.root / file.lstrip("/"))
    inside = {name: value for name, value in process.environment.items() if name != "KUBECONFIG"}
    # /var/run is a link in most images, which would lead out of the driver's root.
    places = [process.root / str(SERVICE_ACCOUNT_DIRECTORY).lstrip("/").removeprefix(each) for each in ("var/", "")]
    found = (find_credentials(inside, each) for each in places)
    return next((each for each in found if each is not None), None)
