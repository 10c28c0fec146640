"""Asks the service and the kubelet, once, before anything is looked at; both within their bound, and neither is changed.

Everything that loads gRPC is in here, and is loaded when it is used.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from scrubber.doctor.finding import DeviceSaid, KubeletSaid, Places, ServiceSaid
from scrubber.domain.assignment import Trust
from scrubber.domain.errors import NotPermitted, ScrubberError

if TYPE_CHECKING:
    from scrubber.adapters.kubelet.listener import InAPod
    from scrubber.api import scrubber_pb2 as pb

__all__ = ["ask_kubelet", "ask_service"]

_SERVICE_SECONDS = 5.0
_KUBELET_SECONDS = 2.0


async def ask_service(sockets: Path, seconds: float = _SERVICE_SECONDS) -> ServiceSaid:
    """What the service says of itself and of its devices; a refusal where it does not, or not within ``seconds``."""
    try:
        from scrubber.api.client import ReadClient
    except Exception as error:  # noqa: BLE001 - generated code has error classes of its own for a library of another version
        return ServiceSaid(broken=f"{type(error).__name__}: {error}".partition("\n")[0])
    devices: tuple[DeviceSaid, ...] | None = None
    devices_refusal = ""
    try:
        async with ReadClient(sockets) as client, asyncio.timeout(seconds):
            info = await client.info()
            try:
                devices = tuple(_device(each) for each in (await client.devices()).devices)
            except ScrubberError as error:
                devices_refusal = str(error)
    except TimeoutError:
        return ServiceSaid(refusal=f"The scrub service did not answer within {seconds:g} s on {sockets}.")
    except ScrubberError as error:
        return ServiceSaid(refusal=str(error), barred=isinstance(error, NotPermitted))
    return _said(info, devices, devices_refusal)


def _said(info: pb.ServiceInfo, devices: tuple[DeviceSaid, ...] | None, devices_refusal: str) -> ServiceSaid:
    breaker, head = info.breaker, info.audit_head
    return ServiceSaid(
        version=info.version,
        backend=info.backend,
        node=info.node,
        policy=info.policy,
        policy_digest=info.policy_digest,
        enforcement=info.enforcement,
        ledger=info.ledger,
        key=info.key_id,
        head=f"{head.sequence}:{head.hash}" if head.hash else "",
        resets=breaker.resets,
        resets_until=breaker.resets_until or None,
        resets_waiting=len(breaker.waiting),
        soft=breaker.soft,
        soft_spared=len(breaker.spared),
        devices=devices,
        devices_refusal=devices_refusal,
        policy_refused=info.policy_refused,
        kubelet=info.kubelet,
        pid=info.pid,
        admin_group=info.admin_group,
        read_group=info.read_group,
        places=Places(**{name: _place(info, name.replace("_", "-")) for name in Places.__slots__}),
    )


def _place(info: pb.ServiceInfo, name: str) -> Path | None:
    """None for a path that is not absolute, too: it would be looked for where this command happens to run."""
    path = info.places.get(name, "")
    return Path(path) if path.startswith("/") and "\0" not in path else None


def _device(said: pb.Device) -> DeviceSaid:
    broken = said.HasField("glass")
    return DeviceSaid(
        id=said.id,
        index=said.index,
        state=said.state,
        offered=said.offered,
        enforcement=said.enforcement,
        policy=said.policy,
        strangers=len(said.strangers),
        uninspected=len(said.uninspected),
        glass_until=said.glass.until if broken else None,
        glass=f"{said.glass.actor} broke the glass ({said.glass.reason})" if broken else "",
    )


async def ask_kubelet(
    socket: Path,
    *,
    kubelet_dir: Path,
    pod_logs: Path,
    cgroups: Path,
    device_ids: Iterable[str],
    seconds: float = _KUBELET_SECONDS,
) -> KubeletSaid:
    """One question to the kubelet, as the service asks it: only of whoever can be the kubelet.

    Args:
        cgroups: below which cgroups are mounted; who answers from a pod is not asked.
        device_ids: the ids of our devices, so that the kubelet's list can be held against its checkpoint.
    """
    try:
        socket.stat()
        if not os.access(socket, os.W_OK, effective_ids=True):
            return KubeletSaid(asked=True, forbidden=True)
    except PermissionError:
        return KubeletSaid(asked=True, forbidden=True)
    except OSError:
        return KubeletSaid()
    try:
        from scrubber.adapters.clock import SystemClock
        from scrubber.adapters.kubelet.assignments import KubeletAssignments
    except Exception as error:  # noqa: BLE001 - as above
        return KubeletSaid(
            asked=True, sentence=f"It cannot be asked ({type(error).__name__}: {error}).".replace("\n", " ")
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
                in_a_pod=_in_a_pod(cgroups, stack),
                deadline=seconds,
            )
            stack.push_async_callback(assignments.close)
            async with asyncio.timeout(2 * seconds):
                reading = await assignments.read()
        except TimeoutError:
            return KubeletSaid(asked=True, sentence=f"The kubelet did not answer within {2 * seconds:g} s on {socket}.")
        except (ScrubberError, OSError) as error:
            return KubeletSaid(asked=True, sentence=str(error))
    return KubeletSaid(
        asked=True,
        believed=reading.trust is Trust.TRUSTED,
        sentence=reading.detail,
        young=reading.trust is Trust.EMPTY_AFTER_RESTART,
        remarks=reading.remarks,
        has_devices=len(reading.assignments),
    )


def _in_a_pod(cgroups: Path, stack: AsyncExitStack) -> InAPod | None:
    from scrubber.adapters.containers import CgroupContainers, discover_root

    try:
        root = discover_root(cgroups)
        if root is None:
            return None
        containers = CgroupContainers(root)
    except (ScrubberError, OSError):
        return None  # the check of the cgroups says what is wrong with them
    stack.callback(containers.close)
    return containers.pod_uid_of
