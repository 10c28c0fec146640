"""Answers of the API server about nodes, Leases, resets by NVSentinel, and its errors, as the plugin's client reads them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, cast

from plugin.cluster.client import ApiServerClient
from plugin.cluster.condition import CONDITION_TYPE, ConditionFormat, ConditionPolarity
from plugin.cluster.errors import (
    ApiBusy,
    ApiConflict,
    ApiForbidden,
    ApiInvalidRequest,
    ApiNotFound,
    ApiUnavailable,
    ClusterError,
)
from plugin.cluster.gpu_reset import ResetResult
from plugin.cluster.pause_labels import LeaseName
from plugin.cluster.pause_lease import PauseLease
from plugin.cluster.port import EventContent, EventTarget
from plugin.cluster.taint import NodeTaint, TaintEffect
from plugin.cluster.text import MAX_TEXT_CHARS, one_line
from plugin.cluster.view import ClusterDevice, ClusterView, ConditionStatus, DeviceServiceStatus
from plugin.cluster.writers import ConditionWriter, TaintWriter, WriterTimes
from tests.fuzz.api_server import NODE, ApiAnswers, Reply, at, client_of, finish, parsed, split_lines, verify_message
from tests.fuzz.structure import EDIT_SEEDS, EDITS, edited, json_input
from tests.fuzz.target import SLOW_GOAL, target

_ANSWERS: Final = ApiAnswers()
_EDITS: Final = tuple(EDITS + bytes((place, operation, 3)) for place in range(0, 40, 3) for operation in (0, 2))
"""One changed value each, nearly everywhere in a document."""


def _events_input(data: bytes, events: Sequence[Any]) -> bytes:
    """Return ``data``, or the lines of a watch that it describes as edits of ``events``."""
    if not data.startswith(EDITS):
        return data
    found = edited(data[1:], events)
    lines = found if isinstance(found, list) else [found]
    texts = [json.dumps(each, ensure_ascii=bool(place % 2)) for place, each in enumerate(lines)]
    return b"".join(text.encode("utf-8", "surrogatepass") + b"\n" for text in texts)


# -- errors

_STATUS = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "nodes is forbidden", "code": 403}
_KINDS: Final[Mapping[int, type[ClusterError]]] = {
    **dict.fromkeys((400, 413, 415, 422), ApiInvalidRequest),
    **dict.fromkeys((404, 410), ApiNotFound),
    403: ApiForbidden,
    409: ApiConflict,
    429: ApiBusy,
}
_RETRY_AFTER: Final = (
    "",
    "7",
    "0",
    "99999",
    "100000",
    "-1",
    "1.5",
    "1e9",
    "nan",
    " 7",
    "7 ",
    "Wed, 21 Oct 2037 07:28:00 GMT",
)
_TYPES: Final = ("application/json", "application/json; charset=utf-8", "text/html", "")


def _kind(code: object) -> type[ClusterError]:
    if isinstance(code, int) and code >= 500:
        return ApiBusy
    return _KINDS.get(code, ApiUnavailable) if isinstance(code, int) else ApiUnavailable


@target(
    "api-errors",
    parser="refusals of the API server, as answers and as events of a watch",
    covers=("plugin.cluster.client", "plugin.cluster.errors", "plugin.cluster.text"),
    oracle="the error is the one of the status, with the API server's words on one printable line, and a wait of at most a "
    "day that the answer asks for",
    seeds=(
        *(bytes((code, 0, 0)) + EDITS for code in range(0, 256, 9)),
        *(bytes((103, retry, kind)) + EDITS for retry in range(12) for kind in range(4)),
        *(bytes((255, 255, 0)) + each for each in (*EDIT_SEEDS, *_EDITS)),
        b"\x67\0\0" + json.dumps({**_STATUS, "message": "a\x1b[2J\nb"}).encode(),
    ),
    words=(b'"message":', b'"code":410', b'"code":', b'"ERROR"', b"<html>"),
)
def api_errors(data: bytes) -> bool:
    head, body = data[:3].ljust(3, b"\0"), json_input(data[3:], _STATUS)
    if head[:2] == b"\xff\xff":
        return _watched_error(body)
    code = 300 + head[0] + (44 if head[1] & 128 else 0)
    retry, kind = _RETRY_AFTER[head[1] % 128 % len(_RETRY_AFTER)], _TYPES[head[2] % len(_TYPES)]
    headers = tuple((name, value) for name, value in (("Content-Type", kind), ("Retry-After", retry)) if value)
    _ANSWERS.reset([Reply(body, code, headers)] * 2)  # the token is read again after 401
    error = finish(_failure(client_of(_ANSWERS).get_node()))
    verify_message(error)
    assert type(error) is _kind(code), (code, error)
    assert f"returned {code}" in str(error)
    assert error.retry_after == (float(retry) if retry.strip() == retry and retry in {"7", "0", "99999"} else 0.0)
    message = at(parsed(body), "message")
    stated = kind == "application/json" and isinstance(message, str) and one_line(message) in str(error)
    return stated and bool(message)


def _watched_error(body: bytes) -> bool:
    _ANSWERS.reset([Reply(b'{"type": "ERROR", "object": ' + body + b"}\n")])
    labels = cast("AsyncGenerator[Mapping[str, str], None]", client_of(_ANSWERS).watch_labels())
    error = finish(_failure(anext(labels)))
    verify_message(error)
    if type(error) is ApiUnavailable:
        return False
    # A line feed in the body begins another line, so that it is none of the API server's.
    code = at(parsed(body), "code")
    assert b"\n" not in body.rstrip(b"\n")
    assert type(error) is _kind(code), (code, error)
    assert error.retry_after == 0.0
    return True


async def _failure(request: Awaitable[Any]) -> ClusterError:
    try:
        found = await request
    except ClusterError as error:
        return error
    raise AssertionError(f"accepted: {found!r}")


# -- nodes

_OURS = {"type": CONDITION_TYPE, "status": "True", "lastTransitionTime": "2026-01-02T03:04:05Z", "reason": "r"}
_OTHER_TAINT = {
    "key": "example.com/maintenance",
    "value": "x",
    "effect": "NoExecute",
    "timeAdded": "2026-01-02T03:04:05Z",
}
_NODE: dict[str, Any] = {
    "metadata": {"name": NODE, "resourceVersion": "7", "labels": {"zone": "a", "scrubber.dev/gpus.clean": "1"}},
    "spec": {
        "taints": [
            _OTHER_TAINT,
            {"key": "scrubber.dev/out", "effect": "NoExecute"},
            {"key": "scrubber.dev/out", "effect": "NoSchedule"},
        ]
    },
    "status": {"conditions": [{"type": "Ready", "status": "True"}, _OURS]},
}
_TAINT = NodeTaint("scrubber.dev/out", "", TaintEffect.NO_SCHEDULE)
_IN_SERVICE = ClusterView(
    service_ready=True, devices=(ClusterDevice("GPU-1", DeviceServiceStatus.IN_SERVICE, True, "in-service"),)
)
_NONE = ClusterView(
    service_ready=True, devices=(ClusterDevice("GPU-1", DeviceServiceStatus.OUT_OF_SERVICE, False, "quarantined"),)
)
_NOW = datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC)


@target(
    "node-object",
    parser="the node object, as the API server returns it",
    covers=("plugin.cluster.client", "plugin.cluster.writers", "plugin.cluster.taint", "plugin.cluster.condition"),
    oracle="a node is refused as unavailable, or has the labels, the version and the condition that Python's JSON reader finds; "
    "the condition keeps its transition time while its status stays, and taints of others are written back as they were",
    seeds=(
        *(bytes((mode,)) + edits for mode in range(4) for edits in (*EDIT_SEEDS, *_EDITS)),
        *(bytes((mode,)) + json.dumps(_NODE).encode() for mode in range(4)),
    ),
    words=(
        b'"labels":',
        b'"taints":',
        b'"conditions":',
        b'"Unknown"',
        b'"lastTransitionTime":',
        b"+23:59",
        b"0001-01-01",
    ),
    goal=SLOW_GOAL,
)
def node_object(data: bytes) -> bool:
    mode, body = data[:1], json_input(data[1:], _NODE)
    polarity = ConditionPolarity.BAD if mode == b"\1" else ConditionPolarity.GOOD
    _ANSWERS.reset([Reply(body)] * 4)
    api = client_of(_ANSWERS, ConditionFormat(polarity=polarity))
    try:
        node = finish(api.get_node())
    except ApiUnavailable as error:
        verify_message(error)
        return False
    document = parsed(body)
    assert node.labels == (at(document, "metadata", "labels") or {})
    assert node.resource_version == (at(document, "metadata", "resourceVersion") or "")
    ours = _our_condition(document)
    status = None if ours is None else ConditionStatus(ours["status"])
    if polarity is ConditionPolarity.BAD and status in (ConditionStatus.TRUE, ConditionStatus.FALSE):
        status = ConditionStatus.TRUE if status is ConditionStatus.FALSE else ConditionStatus.FALSE
    assert node.status is status
    _ANSWERS.requests.clear()
    if mode in {b"\2", b"\3"}:
        _verify_taints(api, document, add=mode == b"\2")
    else:
        _verify_condition(api, ours, kept=status is ConditionStatus.TRUE)
    return True


def _our_condition(document: Any) -> Any:
    conditions = at(document, "status", "conditions") or []
    known = set(ConditionStatus)
    return next((each for each in conditions if each["type"] == CONDITION_TYPE and each["status"] in known), None)


def _verify_condition(api: ApiServerClient, ours: Any, *, kept: bool) -> None:
    writer = ConditionWriter(api, times=WriterTimes(), wall=_NOW.timestamp, jitter=lambda: 0.0, on_node=lambda _: None)
    writer.update(_IN_SERVICE)
    finish(writer.write(0.0))
    _, (method, _, patch) = _ANSWERS.requests
    assert method == "PATCH"
    (written,) = patch["status"]["conditions"]
    before = _moment(ours.get("lastTransitionTime")) if kept else None
    assert abs(_required(written["lastTransitionTime"]) - (before or _NOW)) < timedelta(seconds=1)
    assert written["type"] == CONDITION_TYPE


def _verify_taints(api: ApiServerClient, document: Any, *, add: bool) -> None:
    writer = TaintWriter(api, _TAINT, times=WriterTimes())
    writer.update(_NONE if add else _IN_SERVICE)
    finish(writer.write(0.0))
    present = [_taint(each) for each in at(document, "spec", "taints") or []]
    others = [each for each in present if (each["key"], each["effect"]) != (_TAINT.key, _TAINT.effect.value)]
    writes = _ANSWERS.requests[1:]
    assert bool(writes) == (add == (len(others) == len(present)))
    for _, _, patch in writes:
        written = [_taint(each) for each in patch["spec"]["taints"]]
        assert written == others + ([_taint(_TAINT.to_api())] if add else [])
        assert patch["metadata"]["resourceVersion"] == (at(document, "metadata", "resourceVersion") or "")


def _taint(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{name: found.get(name) for name in ("key", "value", "effect")},
        "timeAdded": _moment(found.get("timeAdded")),
    }


def _moment(text: str | None) -> datetime | None:
    """Return a time of the API to the second; None for one that has no equivalent in UTC."""
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).astimezone(UTC).replace(microsecond=0)
    except (ValueError, OverflowError):
        return None


def _required(text: str) -> datetime:
    found = _moment(text)
    assert found is not None, text
    return found


_NODE_EVENTS = [
    {"type": "ADDED", "object": _NODE},
    {
        "type": "MODIFIED",
        "object": {"metadata": {"name": NODE, "annotations": {"note": "a\x85b\u2028c"}, "labels": {"a": "\x85"}}},
    },
    {"type": "MODIFIED", "object": {"metadata": {"name": NODE, "labels": {"a": "\x85"}}}},
    {"type": "DELETED", "object": {"metadata": {"name": NODE}}},
]


@target(
    "node-watch",
    parser="the lines of a watch of the node",
    covers=("plugin.cluster.client",),
    oracle="labels are reported at each change that Python's JSON reader finds in lines that end at line feeds only, until the "
    "first line that is refused as unavailable",
    seeds=(
        *EDIT_SEEDS,
        *_EDITS,
        _events_input(EDITS, _NODE_EVENTS),
        b'{"type": "ADDED", "object": {"metadata": {"name": "node-1", "annotations": {"note": "a\xc2\x85b"}}}}\n',
        *(EDITS + bytes((place, 5, 20)) for place in range(30)),
        b"\0\x1a\3\x1a\6" + b":" * 29,  # an empty list where the labels are
    ),
    words=(
        b'{"type":"MODIFIED","object":{"metadata":{"labels":{"a":"b"}}}}\n',
        b"\n",
        b"\r\n",
        b"\xc2\x85",
        b"\xe2\x80\xa8",
    ),
)
def node_watch(data: bytes) -> bool:
    body = _events_input(data, _NODE_EVENTS)
    _ANSWERS.reset([Reply(body)])
    found, error = finish(_watched(client_of(_ANSWERS)))
    verify_message(error)
    expected, complete = _label_changes(body)
    assert found == expected[: len(found)]
    if "no answer is left" in str(error):
        assert complete
        assert found == expected
    elif complete:
        assert not all(map(_is_plain, map(parsed, split_lines(body)))), error
        # The library knows the types of the fields; Python's reader accepts more.
        assert "response is invalid" in str(error), error
    return bool(found)


async def _watched(api: ApiServerClient) -> tuple[list[Mapping[str, str]], ClusterError]:
    found = []
    try:
        async for labels in api.watch_labels():
            found.append(labels)
    except ClusterError as error:
        return found, error
    raise AssertionError("the watch ended without an error, although there is no next answer")


def _is_plain(event: Any) -> bool:
    """Whether an event has only texts in its metadata, and nothing else, so that nothing in it can be refused."""
    metadata = at(event, "object", "metadata")
    if set(event) != {"type", "object"} or set(event["object"]) != {"metadata"}:
        return False
    maps = [{} if metadata.get(key) is None else metadata[key] for key in ("labels", "annotations")]
    return (
        set(metadata) <= {"name", "labels", "annotations"}
        and isinstance(metadata.get("name", ""), str)
        and all(isinstance(each, dict) and all(isinstance(text, str) for text in each.values()) for each in maps)
        and not any(0xD800 <= ord(each) < 0xE000 for each in json.dumps(event, ensure_ascii=False))
    )


def _label_changes(body: bytes) -> tuple[list[Mapping[str, str]], bool]:
    """Return the labels at each change, and whether every line is an event of an object."""
    changes: list[Mapping[str, str]] = []
    for line in split_lines(body):
        event = parsed(line)
        labels = at(event, "object", "metadata", "labels") or {}
        if not (isinstance(at(event, "object", "metadata"), dict) and isinstance(labels, dict)):
            return changes, False
        if not isinstance(at(event, "type"), str) or event["type"] == "ERROR":
            return changes, False
        if not changes or labels != changes[-1]:
            changes.append(labels)
    return changes, True


# -- Leases

_LEASE: dict[str, Any] = {
    "metadata": {"name": "pause", "namespace": "scrubber-system", "resourceVersion": "7"},
    "spec": {
        "holderIdentity": NODE,
        "leaseDurationSeconds": 90,
        "renewTime": "2026-01-02T03:04:05.000000Z",
        "leaseTransitions": 3,
    },
}
_OTHER_LEASE = {**_LEASE, "spec": {**_LEASE["spec"], "holderIdentity": "node-2"}}
_OWN_SECONDS: Final = 60


@target(
    "pause-lease",
    parser="the Lease by which one node at a time pauses its agents",
    covers=("plugin.cluster.pause_lease", "plugin.cluster.client"),
    oracle="a Lease is refused as unavailable, or is taken at once only if it is free or this node's, and from another node "
    "only after its own time without a change; each write names the version that was read",
    seeds=(
        *EDIT_SEEDS,
        *_EDITS,
        *(
            EDITS + bytes((document, place, operation, 5))
            for document in (0, 1)
            for place in range(12)
            for operation in (0, 7)
        ),
    ),
    words=(
        b'"holderIdentity":',
        b'"leaseDurationSeconds":-1',
        b'"renewTime":',
        b'"node-1"',
        b'""',
        b"+23:59",
        b"9999-12-31",
    ),
    goal=SLOW_GOAL,
)
def pause_lease(data: bytes) -> bool:
    body = json_input(data, _LEASE, _OTHER_LEASE)
    _ANSWERS.reset([Reply(body)] * 12)
    now = [1000.0]
    lease = PauseLease(
        LeaseName("scrubber-system", "pause"),
        NODE,
        seconds=_OWN_SECONDS,
        clock=lambda: now[0],
        wall_clock=_NOW.timestamp,
    )
    api = client_of(_ANSWERS)
    try:
        holder = finish(lease.acquire(api))
    except ApiUnavailable as error:
        verify_message(error)
        return False
    document = parsed(body)
    stated = at(document, "spec", "holderIdentity") or ""
    assert holder == ("" if stated in {"", NODE} else stated)
    if not holder:
        _verify_taken(document)
        _ANSWERS.requests.clear()
        finish(lease.release(api))
        if stated == NODE:
            *_, (_, _, patch) = _ANSWERS.requests
            assert patch["spec"]["holderIdentity"] is None
            assert _moment(patch["spec"]["renewTime"]) == _moment(at(document, "spec", "renewTime"))
        return True
    seconds = at(document, "spec", "leaseDurationSeconds") or 0
    now[0] += seconds if 0 < seconds < 1e6 else _OWN_SECONDS
    assert finish(lease.acquire(api)) == holder
    assert all(method == "GET" for method, _, _ in _ANSWERS.requests)
    now[0] += 1
    if seconds < 1e6:
        assert finish(lease.acquire(api)) == ""
        _verify_taken(document)
    return True


def _verify_taken(document: Any) -> None:
    *_, (method, path, patch) = _ANSWERS.requests
    assert (method, path) == ("PATCH", "/apis/coordination.k8s.io/v1/namespaces/scrubber-system/leases/pause")
    spec = at(document, "spec") or {}
    is_new = spec.get("holderIdentity") != NODE and spec.get("renewTime") is not None
    assert patch["metadata"] == {"resourceVersion": at(document, "metadata", "resourceVersion") or ""}
    assert patch["spec"]["holderIdentity"] == NODE
    assert patch["spec"]["leaseTransitions"] == (spec.get("leaseTransitions") or 0) + is_new
    assert patch["spec"]["leaseDurationSeconds"] == _OWN_SECONDS
    assert abs(_required(patch["spec"]["renewTime"]) - _NOW) < timedelta(seconds=1)


# -- NVSentinel

_RESET: dict[str, Any] = {
    "metadata": {"name": "pause-1", "labels": {"app.kubernetes.io/managed-by": "scrubber-plugin"}},
    "spec": {"nodeName": NODE, "selector": {"uuids": ["GPU-1"]}},
    "status": {
        "startTime": "2026-01-01T00:00:00Z",
        "completionTime": "2026-01-01T00:01:00Z",
        "conditions": [
            {"type": "Ready", "status": "True", "reason": "Started", "message": "reset\nstarted"},
            {"type": "Complete", "status": "True", "reason": "GPUResetSucceeded", "message": "done"},
        ],
    },
}


@target(
    "gpu-reset",
    parser="NVSentinel's objects GPUReset",
    covers=("plugin.cluster.gpu_reset", "plugin.cluster.client"),
    oracle="an object is refused as unavailable, or its reset has succeeded only if it has a completion time and the true "
    "condition Complete with the reason of success, has failed only with that condition for another reason, and its status "
    "is one printable line",
    seeds=(
        *(bytes((mode,)) + edits for mode in range(2) for edits in (*EDIT_SEEDS, *_EDITS)),
        *(bytes((0,)) + EDITS + bytes((place, 6, other)) for place in range(6, 20) for other in range(5)),
        b"\0" + json.dumps(_RESET).encode(),
        b"[\0\x8e\r\xf7",  # a reason that is that of success but for a line separator at its end
    ),
    words=(b'"completionTime":', b'"conditions":', b'"Complete"', b'"GPUResetSucceeded"', b'"reason":', b'"nodeName":'),
)
def gpu_reset(data: bytes) -> bool:
    body = json_input(data[1:], _RESET)
    is_list = data[:1] == b"\1"
    _ANSWERS.reset([Reply(b'{"metadata": {"resourceVersion": "9"}, "items": [' + body + b"]}" if is_list else body)])
    api = client_of(_ANSWERS)
    try:
        found = finish(api.list_gpu_resets()) if is_list else [finish(api.get_gpu_reset("pause-1"))]
    except ApiUnavailable as error:
        verify_message(error)
        return False
    items = parsed(b"[" + body + b"]") if is_list else [parsed(body)]
    for reset, item in zip(found, items, strict=True):
        assert reset.name == item["metadata"]["name"]
        assert reset.node == (at(item, "spec", "nodeName") or "")
        complete = [
            each
            for each in at(item, "status", "conditions") or []
            if each.get("type") == "Complete" and each.get("status") == "True"
        ]
        over = bool(at(item, "status", "completionTime")) and bool(complete)
        succeeded = over and any(each.get("reason") == "GPUResetSucceeded" for each in complete)
        if reset.result is ResetResult.SUCCEEDED:
            assert succeeded
        elif reset.result is ResetResult.FAILED:
            assert over
            assert any(each.get("reason") != "GPUResetSucceeded" for each in complete)
        elif len(complete) == 1 and (complete[0].get("reason") or complete[0].get("message")):
            assert not over
        assert reset.status_text.isprintable()
        assert len(reset.status_text) <= 2 * MAX_TEXT_CHARS + 2
    return bool(found)


# -- answers of a word or two

_EVENT = EventContent("a.b", EventTarget("Node", NODE, NODE), "GpuOutOfService", "m", is_warning=True)
_SMALL: Final[tuple[dict[str, Any], ...]] = (
    {"kind": "SelfSubjectAccessReview", "spec": {}, "status": {"allowed": True, "denied": False, "reason": "r"}},
    {"major": "1", "minor": "36", "gitVersion": "v1.36.2", "goVersion": "go1.25"},
    {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "two\nbudgets", "code": 201},
    {"kind": "Event", "metadata": {"name": "a.b"}, "involvedObject": {}, "count": 3, "message": "m"},
    {"metadata": {"uid": "uid-1", "name": NODE}},
)


@target(
    "api-answers",
    parser="answers of the API server to requests for permissions, its version, evictions and events",
    covers=("plugin.cluster.client",),
    oracle="an answer is refused as unavailable, or is used as Python's JSON reader finds it: an action is allowed only if the "
    "answer says true, a pod is evicted unless it says Failure, and a version is one printable line",
    seeds=(
        *(
            bytes((mode,)) + edits
            for mode in range(5)
            for edits in (*EDIT_SEEDS, EDITS + b"\x02\0\3", EDITS + b"\1\2\0")
        ),
        *(bytes((mode,)) + json.dumps(each).encode() for mode, each in enumerate(_SMALL)),
    ),
    words=(b'"allowed":true', b'"allowed":', b'"gitVersion":', b'"status":"Failure"', b'"count":', b'"uid":'),
)
def api_answers(data: bytes) -> bool:
    mode = (data[0] if data else 0) % len(_SMALL)
    body = json_input(data[1:], _SMALL[mode])
    _ANSWERS.reset([Reply(body)])
    api = client_of(_ANSWERS)
    try:
        match mode:
            case 0:
                allowed = finish(api.is_allowed("get", "", "pods/status:name"))
                assert allowed is (at(parsed(body), "status", "allowed") is True)
            case 1:
                version = finish(api.get_version())
                assert version == one_line(at(parsed(body), "gitVersion"))
                assert version.isprintable()
                assert len(version) <= MAX_TEXT_CHARS
            case 2:
                finish(api.evict_pod("team-a", "train-0", "uid-1"))
                assert at(parsed(body), "status") != "Failure"
            case 3:
                count = finish(api.repeat_event(_EVENT, _NOW, 2))
                assert count == (at(parsed(body), "count") or 1)
            case _:
                assert finish(api.get_node_uid()) == (at(parsed(body), "metadata", "uid") or "")
    except ApiBusy as error:
        verify_message(error)
        assert mode == 2
        assert at(parsed(body), "status") == "Failure"
        return True
    except ApiUnavailable as error:
        verify_message(error)
        return False
    return True
