"""Client of the API server: the only module that uses ``lightkube``, and the boundary where its errors are translated.

It is loaded only if there are credentials, and not in the event loop, because loading takes a noticeable part of a
second.

Invariants: one request at a time from this node, each within its own deadline. Every response, including one that is
malformed or never ends, becomes either a value or a :class:`plugin.cluster.errors.ClusterError`, and uses at most a few
times :data:`MAX_ANSWER_BYTES` of memory, or :data:`MAX_CLAIMS_BYTES` for claims. Claims and slices have the shape that their
readers rely on. No message contains a part of the credentials.
"""

from __future__ import annotations

import asyncio
import functools
import re
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar, cast

from httpx2 import (
    AsyncByteStream,
    HTTPError,
    HTTPStatusError,
    InvalidURL,
    LocalProtocolError,
    Response,
    Timeout,
)
from lightkube import AsyncClient
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.config.models import Cluster as Server
from lightkube.config.models import User
from lightkube.core.exceptions import ApiError, ConfigError, NotReadyError
from lightkube.core.generic_client import ALL_NS
from lightkube.generic_resource import create_global_resource, create_namespaced_resource
from lightkube.models.authorization_v1 import ResourceAttributes, SelfSubjectAccessReviewSpec
from lightkube.models.coordination_v1 import LeaseSpec
from lightkube.models.core_v1 import EventSource, ObjectReference
from lightkube.models.core_v1 import Node as NodeModel
from lightkube.models.meta_v1 import DeleteOptions, ObjectMeta, Preconditions
from lightkube.resources.authorization_v1 import SelfSubjectAccessReview
from lightkube.resources.coordination_v1 import Lease
from lightkube.resources.core_v1 import Event, Node, NodeStatus, PodEviction
from lightkube.types import PatchType
from msgspec import Meta, MsgspecError, Struct, convert, json
from yaml import MarkedYAMLError, YAMLError

from plugin.cluster.condition import ConditionFormat
from plugin.cluster.credentials import Credentials, PodServiceAccount
from plugin.cluster.errors import (
    ApiAnswerTooLong,
    ApiBusy,
    ApiConflict,
    ApiForbidden,
    ApiInvalidRequest,
    ApiNotFound,
    ApiUnavailable,
    ClusterError,
)
from plugin.cluster.gpu_reset import GpuReset
from plugin.cluster.port import ClusterNode, EventContent, LeaseState
from plugin.cluster.text import one_line
from plugin.cluster.view import ConditionStatus, NodeCondition

__all__ = ["MAX_ANSWER_BYTES", "MAX_CLAIMS_BYTES", "ApiServerClient"]

FIELD_MANAGER = "scrubber-plugin"
"""The plugin's name in ``managedFields`` and in the source of events."""

MAX_ANSWER_BYTES = 2 << 20
"""Limit of a response, in bytes. etcd accepts no object larger than 1.5 MiB, and a node has about ten KiB."""

MAX_CLAIMS_BYTES = 10 << 20
"""The same for claims, one or several: any tenant can write one of 1.5 MiB, whose characters have up to six bytes in JSON."""

MAX_CLAIMS_DEPTH = 100
"""How deeply nested values of claims are read; deeper ones are null. No field of the API needs more, but any tenant can write
parameters for which a parser has too small a stack.
"""

CLAIMS_PER_PAGE = 100
"""Of a list of all claims: a claim with eight devices and their certificates can have 20 KiB. Fewer where they are longer."""

WATCH_SECONDS = 240
"""How long one watch of the node lasts, in seconds."""

_GpuReset = create_global_resource("janitor.dgxc.nvidia.com", "v1alpha1", "GPUReset", "gpuresets")
_ResourceClaim = create_namespaced_resource("resource.k8s.io", "v1", "ResourceClaim", "resourceclaims")
_DeviceClass = create_global_resource("resource.k8s.io", "v1", "DeviceClass", "deviceclasses")
_ResourceSlice = create_global_resource("resource.k8s.io", "v1", "ResourceSlice", "resourceslices")
"""As JSON: a typed object would lose fields that this version of the library does not know."""

_NO_VERSION = "the list has no resource version"

_OWN = {"app.kubernetes.io/managed-by": FIELD_MANAGER}
"""Labels of the objects that plugins create."""

_CONNECTING = threading.Lock()
"""Held while a client is created. ``msgspec`` ends the process with SIGSEGV if two threads use one of its types for the first
time at once, as the types of a kubeconfig are used here."""

_T = TypeVar("_T")


class ApiServerClient:
    """The API server through ``lightkube``, on behalf of one node.

    Args:
        deadline: seconds for one request, from the first byte to the last.
        condition: type and polarity of the condition; None: the defaults.
    """

    def __init__(
        self,
        credentials: Credentials,
        node: str,
        *,
        deadline: float,
        condition: ConditionFormat | None = None,
    ) -> None:
        self._format = condition or ConditionFormat()
        self._credentials = credentials
        self._node = node
        self._deadline = deadline
        self._lock = asyncio.Lock()
        self._client: AsyncClient | None = None

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def get_node(self) -> ClusterNode:
        return self._cluster_node(await self._request(lambda client: client.get(Node, self._node)))

    async def watch_labels(self) -> AsyncIterator[Mapping[str, str]]:
        """Yield the labels of the node, now and after each change, for :data:`WATCH_SECONDS`.

        Nothing else can be requested from this client meanwhile. The end, and a new start, bounds the time for which a
        connection that broke without notice goes undetected.

        Raises:
            ClusterError: as for every request; also when the response grows beyond :data:`MAX_ANSWER_BYTES`.
        """
        known: Mapping[str, str] | None = None
        fields = {"metadata.name": self._node}
        async with aclosing(self._watch(Node, fields, "get and watch nodes")) as nodes:
            async for _, node in nodes:
                labels = (node.metadata.labels if node.metadata is not None else None) or {}
                if labels != known:
                    known = labels
                    yield labels

    async def _watch(
        self,
        resource: Any,
        fields: dict[str, str],
        permissions: str,
        version: str | None = None,
        namespace: str | None = None,
        read: Callable[[Any], Any] = lambda found: found,
    ) -> AsyncGenerator[tuple[str, Any], None]:
        """Yield changes of objects for :data:`WATCH_SECONDS`.

        Args:
            permissions: what the role must allow, for the message when it does not.
            version: begin after this resource version; None: with the present objects.
            read: returns an object as it is yielded; raises one of the library's errors for one that is not valid.
        """
        async with self._lock:
            try:
                async with asyncio.timeout(self._deadline):
                    client = await self._connect()
                watch = client.watch(
                    resource,
                    namespace=namespace,
                    fields={**fields},
                    server_timeout=WATCH_SECONDS,
                    resource_version=version,
                )
                ends = asyncio.get_running_loop().time() + WATCH_SECONDS
                # Declared as an iterable by the library, and a generator; closing it closes the connection.
                async with aclosing(cast("AsyncGenerator[tuple[str, Any], None]", watch)) as changes:
                    while True:
                        try:
                            async with asyncio.timeout_at(ends):
                                kind, found = await anext(changes)
                        except TimeoutError:
                            return
                        yield kind, read(found)
            except ClusterError:
                raise
            except TimeoutError:
                await self.close()
                raise ApiUnavailable(f"The API server did not respond within {self._deadline:g} s.") from None
            except _LIBRARY_ERRORS as error:
                refusal, _ = _cluster_error(error)
                await self.close()
                if isinstance(refusal, ApiForbidden):  # the body, which names the verb, is not read
                    raise ApiForbidden(f"{refusal} The plugin's role must allow it to {permissions}.") from error
                raise refusal from error

    async def patch_condition(self, condition: NodeCondition, *, since: datetime, now: datetime) -> ClusterNode:
        entry = {
            "type": self._format.type,
            "status": self._format.translate(condition.status).value,
            "reason": condition.reason,
            "message": condition.message,
            "lastTransitionTime": _time(since),
            "lastHeartbeatTime": _time(now),
        }
        # The strategic merge key is the condition's type, so the conditions of other writers stay unchanged.
        patch = {"status": {"conditions": [entry]}}
        return self._cluster_node(await self._request(lambda client: client.patch(NodeStatus, self._node, patch)))

    async def patch_labels(self, labels: Mapping[str, str]) -> None:
        patch = {"metadata": {"labels": dict(labels)}}
        await self._request(lambda client: client.patch(Node, self._node, patch))

    async def change_labels(self, labels: Mapping[str, str | None], resource_version: str) -> ClusterNode:
        patch = {"metadata": {"resourceVersion": resource_version, "labels": dict(labels)}}
        return self._cluster_node(await self._request(lambda client: client.patch(Node, self._node, patch)))

    async def get_lease(self, namespace: str, name: str) -> LeaseState:
        return _lease_state(await self._request(lambda client: client.get(Lease, name, namespace=namespace)))

    async def create_lease(self, namespace: str, name: str, lease: LeaseState) -> LeaseState:
        created = Lease(metadata=ObjectMeta(name=name, namespace=namespace), spec=LeaseSpec(**_lease_fields(lease)))
        return _lease_state(await self._request(lambda client: client.create(created)))

    async def update_lease(self, namespace: str, name: str, lease: LeaseState) -> LeaseState:
        # A patch, so that labels and other fields of the object stay.
        fields = {
            key: _micro_time(each) if isinstance(each, datetime) else each for key, each in _lease_fields(lease).items()
        }
        patch = {"metadata": {"resourceVersion": lease.resource_version}, "spec": fields}
        return _lease_state(await self._request(lambda client: client.patch(Lease, name, patch, namespace=namespace)))

    async def list_gpu_resets(self) -> Sequence[GpuReset]:
        async def listed(client: AsyncClient) -> list[GpuReset]:
            return [_gpu_reset(each) async for each in client.list(_GpuReset, labels={**_OWN})]

        return await self._request(listed)

    async def get_gpu_reset(self, name: str) -> GpuReset:
        async def got(client: AsyncClient) -> GpuReset:
            return _gpu_reset(await client.get(_GpuReset, name))

        return await self._request(got)

    async def create_gpu_reset(self, name: str, uuids: Sequence[str]) -> GpuReset:
        wish = _GpuReset(
            metadata=ObjectMeta(name=name, labels=_OWN),
            spec={"nodeName": self._node, "selector": {"uuids": list(uuids)}},
        )

        async def created(client: AsyncClient) -> GpuReset:
            return _gpu_reset(await client.create(wish))

        return await self._request(created)

    async def delete_gpu_reset(self, name: str) -> None:
        await self._request(lambda client: client.delete(_GpuReset, name))

    # -- dynamic resource allocation
    # ----------------------------------------------------------------------------

    async def get_node_uid(self) -> str:
        node = await self._request(lambda client: client.get(Node, self._node))
        return (node.metadata.uid if node.metadata is not None else None) or ""

    async def get_version(self) -> str:
        """Return the version of Kubernetes, ``v1.36.2``."""

        async def got(client: AsyncClient) -> str:
            rest: Any = client._client
            response = await rest.send(rest._client.build_request("GET", "version"))
            rest.raise_for_status(response)
            return one_line(json.decode(response.content, type=_Version).gitVersion)

        return await self._request(got)

    async def is_allowed(self, verb: str, group: str, resource: str) -> bool:
        """Return whether the role of these credentials allows ``verb`` in all namespaces.

        Args:
            resource: ``pods``, ``pods/status``, or ``pods/status:NAME``.
        """
        kind, _, name = resource.partition(":")
        kind, _, subresource = kind.partition("/")
        attributes = ResourceAttributes(
            verb=verb, group=group, resource=kind, subresource=subresource or None, name=name or None
        )
        review = SelfSubjectAccessReview(spec=SelfSubjectAccessReviewSpec(resourceAttributes=attributes))
        answer = await self._request(lambda client: client.create(review))
        return answer.status is not None and answer.status.allowed

    async def get_claim(self, namespace: str, name: str) -> Mapping[str, Any]:
        async def got(client: AsyncClient) -> Mapping[str, Any]:
            return _claim(await client.get(_ResourceClaim, name, namespace=namespace))

        return await self._request(got)

    async def get_device_class(self, name: str) -> Mapping[str, Any]:
        return await self._request(lambda client: client.get(_DeviceClass, name))

    async def patch_claim_status(self, namespace: str, name: str, patch: Mapping[str, Any]) -> Mapping[str, Any]:
        async def patched(client: AsyncClient) -> Mapping[str, Any]:
            merge, status = PatchType.MERGE, _ResourceClaim.Status
            return _claim(await client.patch(status, name, {**patch}, namespace=namespace, patch_type=merge))

        return await self._request(patched)

    async def watch_claim(self, namespace: str, name: str) -> AsyncGenerator[tuple[str, Mapping[str, Any]], None]:
        """Yield a claim, now and after each change, for :data:`WATCH_SECONDS`.

        Nothing else can be requested from this client meanwhile.
        """
        fields = {"metadata.name": name}
        permissions = "list and watch resourceclaims"
        watch = self._watch(_ResourceClaim, fields, permissions, namespace=namespace, read=_claim)
        async with aclosing(watch) as changes:
            async for change in changes:
                yield change

    async def list_claims(
        self, selected: Callable[[Mapping[str, Any]], bool]
    ) -> tuple[str, Sequence[Mapping[str, Any]]]:
        claims: list[Mapping[str, Any]] = []
        limit, start = CLAIMS_PER_PAGE, ""
        while True:
            try:
                version, page, start = await self._claims_page(limit, start)
            except ApiAnswerTooLong:
                if limit == 1:
                    raise
                limit = max(1, limit // 10)
                continue
            claims += (each for each in page if selected(each))
            if not start:
                return version, claims
            limit = min(CLAIMS_PER_PAGE, limit * 10)

    async def _claims_page(self, limit: int, start: str) -> tuple[str, Sequence[Mapping[str, Any]], str]:
        """Return the version of the list, at most ``limit`` claims of it, and where the next page begins; empty at its end."""

        async def listed(client: AsyncClient) -> tuple[str, Sequence[Mapping[str, Any]], str]:
            # lightkube's own list has one page size for all pages.
            rest: Any = client._client
            options = {"limit": limit, "continue": start or None}
            request = rest.prepare_request("list", _ResourceClaim, namespace=ALL_NS, params=options)
            response = await rest.send(rest.build_adapter_request(request))
            more, version, page = rest.handle_response("list", response, request)
            if not version:
                raise ValueError(_NO_VERSION)
            return str(version), [_claim(each) for each in page], request.params["continue"] if more else ""

        return await self._request(listed)

    async def watch_claims(self, version: str) -> AsyncGenerator[tuple[str, Mapping[str, Any]], None]:
        """Yield changes of the claims of all namespaces for :data:`WATCH_SECONDS`.

        Nothing else can be requested from this client meanwhile.
        """
        permissions = "list and watch resourceclaims"
        watch = self._watch(_ResourceClaim, {}, permissions, version, namespace=ALL_NS, read=_claim)
        async with aclosing(watch) as changes:
            async for change in changes:
                yield change

    async def list_slices(self, driver: str) -> tuple[str, Sequence[Mapping[str, Any]]]:
        async def listed(client: AsyncClient) -> tuple[str, Sequence[Mapping[str, Any]]]:
            found = client.list(_ResourceSlice, fields={"spec.driver": driver, "spec.nodeName": self._node})
            slices = [_slice(each) async for each in found]
            return _list_version(found), slices

        return await self._request(listed)

    async def watch_slices(self, driver: str, version: str) -> AsyncGenerator[tuple[str, Mapping[str, Any]], None]:
        """Yield changes of the driver's slices of this node for :data:`WATCH_SECONDS`.

        Nothing else can be requested from this client meanwhile.
        """
        fields = {"spec.driver": driver, "spec.nodeName": self._node}
        watch = self._watch(_ResourceSlice, fields, "list and watch resourceslices", version, read=_slice)
        async with aclosing(watch) as changes:
            async for change in changes:
                yield change

    async def create_slice(self, slice_: Mapping[str, Any]) -> Mapping[str, Any]:
        async def created(client: AsyncClient) -> Mapping[str, Any]:
            return _slice(await client.create(_ResourceSlice(**slice_)))

        return await self._request(created)

    async def replace_slice(self, slice_: Mapping[str, Any]) -> Mapping[str, Any]:
        async def replaced(client: AsyncClient) -> Mapping[str, Any]:
            return _slice(await client.replace(_ResourceSlice(**slice_)))

        return await self._request(replaced)

    async def delete_slice(self, slice_: Mapping[str, Any]) -> None:
        metadata = slice_["metadata"]
        known = {key: metadata[key] for key in ("uid", "resourceVersion") if key in metadata}

        async def deleted(client: AsyncClient) -> None:
            # lightkube has no option for preconditions of a deletion.
            rest: Any = client._client
            request = rest.prepare_request("delete", _ResourceSlice, name=metadata["name"])
            request.data = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": known}
            rest.handle_response("delete", await rest.send(rest.build_adapter_request(request)), request)

        await self._request(deleted)

    async def replace_taints(self, taints: Sequence[Mapping[str, Any]], resource_version: str) -> None:
        # Taints have no merge key: the patch replaces the whole list, so it must not overwrite another client's change.
        patch = {"metadata": {"resourceVersion": resource_version}, "spec": {"taints": [dict(each) for each in taints]}}
        await self._request(lambda client: client.patch(Node, self._node, patch))

    async def create_event(self, event: EventContent, now: datetime) -> None:
        about = event.target
        # core/v1, not events.k8s.io/v1: the latter does not allow the note of a repeated event to be updated.
        created = Event(
            metadata=ObjectMeta(name=event.name, namespace=about.event_namespace),
            involvedObject=ObjectReference(
                apiVersion=about.api_version,
                kind=about.kind,
                name=about.name,
                uid=about.uid or None,
                namespace=about.namespace or None,
            ),
            reason=event.reason,
            message=event.message,
            type="Warning" if event.is_warning else "Normal",
            count=1,
            firstTimestamp=now.replace(microsecond=0),
            lastTimestamp=now.replace(microsecond=0),
            source=EventSource(component=FIELD_MANAGER, host=self._node),
            reportingComponent=FIELD_MANAGER,
            reportingInstance=self._node,
        )
        await self._request(lambda client: client.create(created))

    async def repeat_event(self, event: EventContent, now: datetime, count: int | None) -> int:
        patch: dict[str, Any] = {"message": event.message, "lastTimestamp": _time(now)}
        if count is not None:
            patch["count"] = count
        namespace = event.target.event_namespace
        answer = await self._request(
            lambda client: client.patch(Event, event.name, patch, namespace=namespace, patch_type=PatchType.MERGE)
        )
        return answer.count or 1

    async def evict_pod(self, namespace: str, pod: str, uid: str) -> None:
        wish = _Eviction(
            metadata=ObjectMeta(name=pod, namespace=namespace),
            deleteOptions=DeleteOptions(preconditions=Preconditions(uid=uid)),
        )
        answer = await self._request(lambda client: client.create(wish, name=pod, namespace=namespace))
        if answer.status == "Failure":
            raise ApiBusy(f"The API server did not evict the pod: {one_line(answer.message) or 'it gave no reason.'}")

    def _cluster_node(self, node: NodeModel) -> ClusterNode:
        conditions = (node.status.conditions if node.status is not None else None) or []
        labels = (node.metadata.labels if node.metadata is not None else None) or {}
        version = (node.metadata.resourceVersion if node.metadata is not None else None) or ""
        taints = tuple(each.to_dict() for each in (node.spec.taints if node.spec is not None else None) or [])
        for each in conditions:
            if each.type == self._format.type and each.status in set(ConditionStatus):
                status = self._format.translate(ConditionStatus(each.status))
                return ClusterNode(status, _utc(each.lastTransitionTime), labels, taints, version)
        return ClusterNode(None, None, labels, taints, version)

    # -- translation of the library's errors
    # ----------------------------------------------------------------------------

    async def _connect(self) -> AsyncClient:
        if self._client is None:
            try:
                self._client = await asyncio.to_thread(_connected, self._credentials, self._deadline)
            except _LIBRARY_ERRORS as error:
                raise ApiUnavailable(
                    f"The request to the API server failed: {self._credentials} cannot be used: {_error_text(error)}"
                ) from error
        return self._client

    async def _request(self, request: Callable[[AsyncClient], Awaitable[_T]]) -> _T:
        async with self._lock:
            try:
                async with asyncio.timeout(self._deadline):
                    return await request(await self._connect())
            except ClusterError:
                raise
            except TimeoutError:
                await self.close()
                raise ApiUnavailable(f"The API server did not respond within {self._deadline:g} s.") from None
            except _LIBRARY_ERRORS as error:
                refusal, sound = _cluster_error(error)
                if not sound:
                    # Certificates and tokens are files that other processes renew: the next request reads them again.
                    await self.close()
                raise refusal from error


def _lease_state(lease: Lease) -> LeaseState:
    spec = lease.spec or LeaseSpec()
    version = (lease.metadata.resourceVersion if lease.metadata is not None else None) or ""
    return LeaseState(
        spec.holderIdentity or "",
        spec.leaseDurationSeconds or 0,
        _utc(spec.renewTime),
        spec.leaseTransitions or 0,
        version,
    )


def _lease_fields(lease: LeaseState) -> dict[str, Any]:
    renewed = lease.renewed_at
    if renewed is not None and not renewed.microsecond:
        # The API accepts these times only with six decimals, which the library leaves out where they are zero.
        renewed = renewed.replace(microsecond=1)
    return {
        "holderIdentity": lease.holder or None,
        "leaseDurationSeconds": lease.seconds,
        "renewTime": renewed,
        "leaseTransitions": lease.transitions,
    }


def _gpu_reset(found: Mapping[str, Any]) -> GpuReset:
    """Return the object; raises one of the library's errors if another client wrote something else."""
    reset = convert(found, _Reset)
    status = reset.status or _ResetStatus()
    conditions = [each for each in status.conditions or [] if each.reason or each.message]
    complete = next((each for each in conditions if each.type == "Complete"), None)
    done = complete is not None and complete.status == "True"
    shown = complete if complete is not None and done else (conditions[-1] if conditions else _ResetCondition())
    return GpuReset(
        reset.metadata.name,
        (reset.spec or _ResetSpec()).nodeName,
        completed=bool(status.completionTime),
        complete=done,
        reason=shown.reason or "",
        message=shown.message or "",
    )


# -- the shape of objects that are read as JSON
# -----------------------------------------------------------------------------------------------------------------


class _Metadata(Struct):
    name: str
    namespace: str = ""
    uid: str = ""
    resourceVersion: str = ""  # noqa: N815 - the names of the API


class _Named(Struct):
    metadata: _Metadata


class _Condition(Struct):
    type: str
    status: str


class _DeviceStatus(Struct):
    driver: str
    pool: str
    device: str
    shareID: str | None = None  # noqa: N815
    conditions: list[_Condition] | None = None


class _ClaimStatus(Struct):
    devices: list[_DeviceStatus] | None = None


class _Claim(_Named):
    status: _ClaimStatus | None = None


class _Pool(Struct):
    name: str
    generation: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    resourceSliceCount: int  # noqa: N815


class _Taint(Struct):
    key: str
    effect: str
    timeAdded: str | None = None  # noqa: N815


class _Device(Struct):
    name: str
    taints: list[_Taint] | None = None


class _SliceSpec(Struct):
    pool: _Pool
    devices: list[_Device] | None = None
    sharedCounters: list[dict[str, Any]] | None = None  # noqa: N815


class _OwnedMetadata(_Metadata):
    ownerReferences: list[dict[str, Any]] | None = None  # noqa: N815


class _Slice(Struct):
    metadata: _OwnedMetadata
    spec: _SliceSpec


class _ResetCondition(Struct):
    type: str = ""
    status: str = ""
    reason: str | None = None
    message: str | None = None


class _ResetStatus(Struct):
    completionTime: str | None = None  # noqa: N815
    conditions: list[_ResetCondition] | None = None


class _ResetSpec(Struct):
    nodeName: str = ""  # noqa: N815


class _Reset(_Named):
    spec: _ResetSpec | None = None
    status: _ResetStatus | None = None


class _Version(Struct):
    gitVersion: str = ""  # noqa: N815


def _claim(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the claim; raises one of the library's errors if its parts are not of the types that readers rely on."""
    convert(found, _Claim)
    return found


def _slice(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the slice; raises as :func:`_claim` does."""
    convert(found, _Slice)
    return found


def _list_version(found: Any) -> str:
    try:
        return str(found.resourceVersion)
    except NotReadyError as error:
        raise ValueError(_NO_VERSION) from error


class _Eviction(PodEviction):
    """An eviction and its response, a ``Status``: 201 with "Failure" when two disruption budgets match the pod."""

    status: str | None = None
    message: str | None = None


_LIBRARY_ERRORS = (
    *(HTTPError, InvalidURL, ConfigError, MsgspecError, YAMLError, OSError),
    # lightkube raises one of these itself when a response has no content type or a status that is not an object.
    *(ValueError, LookupError, TypeError, AttributeError, RecursionError),
)
"""Every error that the client raises, including those for a response that is not from the API."""

_KINDS: Mapping[int, type[ClusterError]] = {
    400: ApiInvalidRequest,
    403: ApiForbidden,
    404: ApiNotFound,
    409: ApiConflict,
    413: ApiInvalidRequest,
    410: ApiNotFound,
    415: ApiInvalidRequest,
    422: ApiInvalidRequest,
}


def _cluster_error(error: Exception) -> tuple[ClusterError, bool]:
    """Return the error for the caller, and whether the connection and its credentials may be kept."""
    answered: BaseException | None = error
    while answered is not None and not isinstance(answered, HTTPStatusError):
        answered = answered.__context__
    if answered is None:
        if isinstance(error, HTTPError | InvalidURL | ConfigError | YAMLError | OSError | UnicodeEncodeError):
            return ApiUnavailable(f"The request to the API server failed: {_error_text(error)}"), False
        return ApiUnavailable(f"The API server's response is invalid: {_error_text(error)}"), True
    response = cast("Response | None", answered.response)
    if response is None:  # an error within a watch, which has a body only
        code, after = (answered.status.code or 0 if isinstance(answered, ApiError) else 0), ""
    else:
        code, after = response.status_code, response.headers.get("Retry-After", "")
    words = _error_text(error) if response is None or isinstance(error, ApiError) else one_line(response.reason_phrase)
    message = f"The API server returned {code}: {words}"
    kind = _KINDS.get(code, ApiBusy if code == 429 or code >= 500 else ApiUnavailable)
    return kind(message, retry_after=_retry_after(after)), code != 401


def _error_text(error: Exception) -> str:
    if isinstance(error, YAMLError):  # the library's own text quotes the line, which may be the token
        mark = error.problem_mark if isinstance(error, MarkedYAMLError) else None
        return f"not valid YAML{'' if mark is None else f' (line {mark.line + 1})'}"
    if isinstance(error, LocalProtocolError):  # the same for the value of the header
        return "a header of the request is not valid; check the token for line breaks and control characters"
    if isinstance(error, KeyError):
        return one_line(f"{error} is missing")
    return one_line(error) or type(error).__name__


def _retry_after(header: str) -> float:
    """Return ``Retry-After`` in seconds. API servers do not use its other form, a date."""
    return float(header) if header.isdecimal() and len(header) < 6 else 0.0


def _connected(credentials: Credentials, deadline: float) -> AsyncClient:
    with _CONNECTING:
        client = AsyncClient(_config(credentials), timeout=Timeout(deadline), field_manager=FIELD_MANAGER)
    # lightkube has no option for this. A custom transport would do it, but then no proxy configuration is read.
    http = client._client._client
    http.headers["Accept-Encoding"] = "identity"
    http.event_hooks = {"response": [_prepare_body]}
    return client


async def _prepare_body(response: Response) -> None:
    """Limit the length of the response body; refuse a compressed one without reading it.

    Its lines end at line feeds only. The library also splits at U+0085, which the API server writes as it is where a
    tenant has put it into an object: no watch would get past that object.

    Raises:
        ApiUnavailable: the response is compressed, although that was not requested. One byte can expand to a thousand.
    """
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise ApiUnavailable(
            "The API server's response is compressed, which was not requested; a proxy may have compressed it."
        )
    assert isinstance(response.stream, AsyncByteStream)
    of_claims = "resourceclaims" in response.request.url.path.split("/")
    body = _LimitedBody(response.stream, MAX_CLAIMS_BYTES if of_claims else MAX_ANSWER_BYTES)
    response.stream = _ShallowLines(body) if of_claims else body
    setattr(response, "aiter_lines", functools.partial(_lines, response))  # noqa: B010 - a method


async def _lines(response: Response) -> AsyncIterator[bytes]:
    waiting = bytearray()
    async for chunk in response.aiter_bytes():
        first, *more = chunk.split(b"\n")
        waiting += first
        for each in more:
            yield bytes(waiting)
            waiting[:] = each
    if waiting:
        yield bytes(waiting)


class _LimitedBody(AsyncByteStream):
    """A response body that raises :class:`ApiAnswerTooLong` when it has more than ``limit`` bytes."""

    def __init__(self, stream: AsyncByteStream, limit: int) -> None:
        self._stream = stream
        self._limit = limit

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = self._limit
        async for chunk in self._stream:
            left -= len(chunk)
            if left < 0:
                raise ApiAnswerTooLong(f"The API server's response is longer than {self._limit} bytes.")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


class _ShallowLines(AsyncByteStream):
    """A body of JSON documents, each in a line of its own, without what is nested deeper than :data:`MAX_CLAIMS_DEPTH`."""

    def __init__(self, stream: AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        parts: list[bytes] = []
        async for chunk in self._stream:
            *ended, rest = chunk.split(b"\n")
            for line in ended:
                yield _shallow(b"".join((*parts, line))) + b"\n"
                parts.clear()
            parts.append(rest)
        yield _shallow(b"".join(parts))

    async def aclose(self) -> None:
        await self._stream.aclose()


_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_STRING_OR_BRACKET = re.compile(_STRING.pattern + rb"|[][{}]")
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))


def _shallow(document: bytes) -> bytes:
    """Return a JSON document in which each value at a depth of more than :data:`MAX_CLAIMS_DEPTH` is null."""
    brackets = _STRING.sub(b"", document).translate(None, _NO_BRACKET)
    for _ in range(MAX_CLAIMS_DEPTH // 2):  # each time without the innermost one or two levels
        if not brackets:
            return document
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
    kept, begin, depth = [], 0, 0
    for found in _STRING_OR_BRACKET.finditer(document):
        if found[0] in b"[{":
            depth += 1
            if depth == MAX_CLAIMS_DEPTH + 1:
                kept.append(document[begin : found.start()] + b"null")
        elif found[0] in b"]}":
            if depth == MAX_CLAIMS_DEPTH + 1:
                begin = found.end()
            depth -= 1
    # Of a document that ends within a value, which is no JSON, nothing is appended.
    return b"".join(kept) + (document[begin:] if depth <= MAX_CLAIMS_DEPTH else b"")


def _config(credentials: Credentials) -> SingleConfig:
    """Return the connection configuration for ``lightkube``.

    Raises:
        ApiUnavailable: the file cannot be used in its present form.
    """
    if isinstance(credentials, PodServiceAccount):
        server = Server(server=credentials.server, certificate_auth=str(credentials.ca_file))
        config = KubeConfig.from_one(cluster=server, user=User(token_file=str(credentials.token_file))).get()
    else:
        config = KubeConfig.from_file(credentials.path).get()
    if config is None or config.user is None:
        raise ApiUnavailable(f"{credentials} contains no user, so the API server could not authenticate the plugin.")
    if config.user.exec is not None or config.user.auth_provider is not None:
        raise ApiUnavailable(
            f"{credentials} gets its token from a program, which is not supported; use a token file or a client certificate."
        )
    return config


def _utc(moment: datetime | None) -> datetime | None:
    """Return a time of the API server in UTC; None for one that has no equivalent there."""
    if moment is None:
        return None
    try:
        return moment.astimezone(UTC) if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    except OverflowError:
        return None


def _time(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _micro_time(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
