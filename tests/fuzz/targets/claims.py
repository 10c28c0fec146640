"""Claims and slices of the API server as the DRA driver follows them: lists, lines of watches, and answers to its writes."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from httpx2 import Request

from plugin.cluster.errors import ApiUnavailable
from plugin.cluster.reporter import BackoffTimes
from plugin.dra.binding import BindingConditions
from plugin.dra.claim_reports import merged_devices
from plugin.dra.slices import (
    DeviceTaint,
    Readiness,
    SliceDevice,
    SliceFeatures,
    SliceOwner,
    SlicePlan,
    clean_condition,
    dropped_features,
    not_clean_condition,
    plan_slices,
    slice_contents,
    taint_times,
)
from plugin.kubelet.devices import AdvertisedDevice, AdvertisedDevices, ServiceVerdict
from plugin.logs import create_logger
from scrubber.domain.states import BindingState
from tests.dra_collaborators import FakeWithdrawal
from tests.fuzz.api_server import NODE, ApiAnswers, Reply, at, client_of, finish, parsed, split_lines, verify_message
from tests.fuzz.structure import EDIT_SEEDS, EDITS, edited, json_input
from tests.fuzz.target import SLOW_GOAL, target

_DRIVER: Final = "gpu.scrubber.dev"
_CLEAN, _NOT_CLEAN = clean_condition(_DRIVER), not_clean_condition(_DRIVER)
_WORDS = (b'"bindingConditions":', b'"conditions":', b'"resourceVersion":', b'"shareID":', b'"adminAccess":true')


def _claim(name: str, device: str = "gpu-0", **more: Any) -> dict[str, Any]:
    result = {
        "request": "gpu",
        "driver": _DRIVER,
        "pool": NODE,
        "device": device,
        "bindingConditions": [_CLEAN],
        "bindingFailureConditions": [_NOT_CLEAN],
    }
    other = {"driver": "other.example", "pool": "p", "device": "d", "conditions": [{"type": "x", "status": "True"}]}
    return {
        "metadata": {"namespace": "team-a", "name": name, "uid": f"uid-{name}", "resourceVersion": "5", **more},
        "status": {"allocation": {"devices": {"results": [result]}}, "devices": [other]},
    }


# -- binding conditions

_LISTED: Final = [_claim("one"), _claim("two", "gpu-1")]
_CHANGES: Final = [
    {"type": "MODIFIED", "object": _claim("one", "gpu-1", annotations={"note": "a\x85b"})},
    {"type": "ADDED", "object": _claim("three")},
    {"type": "DELETED", "object": _claim("two", "gpu-1")},
]
_NAME: Final = re.compile("[a-z0-9-]{1,60}")


class _Cluster(ApiAnswers):
    """Lists claims, sends changes, and keeps the claims that the driver reads and writes."""

    def __init__(self, listed: bytes, changes: bytes) -> None:
        super().__init__()
        self.claims: dict[str, Any] = {}
        self.written: list[tuple[str, Any, Any]] = []
        self.lists = 0
        self.watches = 0
        self._listed = Reply(b'{"metadata": {"resourceVersion": "5"}, "items": ' + listed + b"}")
        self._changes = changes

    def reply(self, request: Request, content: Any) -> Reply:
        path = request.url.path
        if path.endswith("/v1/resourceclaims"):
            if "watch" in request.url.params:
                self.watches += 1
                return Reply(self._changes if self.watches == 1 else b"", hangs=True)
            self.lists += 1
            return self._listed if self.lists == 1 else Reply(b'{"metadata": {"resourceVersion": "6"}, "items": []}')
        place = path.removesuffix("/status")
        found = self.claims.get(place)
        if found is None:
            return Reply(b'{"kind": "Status", "message": "not found", "code": 404}', 404)
        if request.method == "PATCH":
            self.written.append((place, found, content))
            found = {**found, "status": {**found["status"], **content["status"]}}
            self.claims[place] = found
        return Reply(json.dumps(found).encode())


def _path(claim: Any) -> str:
    """Return the path of a claim; empty for one whose names the API server would not accept."""
    names = [at(claim, "metadata", key) for key in ("namespace", "name", "uid")]
    if not all(isinstance(each, str) and _NAME.fullmatch(each) for each in names):
        return ""
    return f"/apis/resource.k8s.io/v1/namespaces/{names[0]}/resourceclaims/{names[1]}"


def _awaited(claim: Any) -> bool:
    """Whether the scheduler waits for a device of this node, as Python's reader finds it."""
    decided = {
        (entry["driver"], entry["pool"], entry["device"], entry.get("shareID") or "")
        for entry in at(claim, "status", "devices") or []
        if any(
            (one["type"], one["status"]) in ((_CLEAN, "True"), (_NOT_CLEAN, "True"))
            for one in entry.get("conditions") or []
        )
    }
    return any(
        each.get("driver") == _DRIVER
        and each.get("pool") == NODE
        and _CLEAN in (each.get("bindingConditions") or [])
        and (_DRIVER, NODE, each.get("device"), each.get("shareID") or "") not in decided
        for each in at(claim, "status", "allocation", "devices", "results") or []
    )


def _is_awaited(claim: Any) -> bool:
    return _is_defined(claim) and _awaited(claim)


def _is_defined(claim: Any) -> bool:
    """Whether the parts of a claim that the driver reads have the types that the API defines."""

    def each(found: Any, **types: type) -> bool:
        return isinstance(found, list | None) and all(
            isinstance(one, dict)
            and all(isinstance(one.get(name), kind) for name, kind in types.items())
            and isinstance(one.get("shareID"), str | None)
            and (one.get("adminAccess") is None or isinstance(one["adminAccess"], bool))
            and isinstance(one.get("bindingConditions"), list | None)
            and all(isinstance(name, str) for name in one.get("bindingConditions") or [])
            and ("conditions" not in one or each(one["conditions"], type=str, status=str))
            for one in found or []
        )

    status = at(claim, "status")
    if isinstance(claim, dict) and "status" in claim and not isinstance(status, dict):
        return False
    allocation, devices = at(status, "allocation"), at(status, "devices")
    if isinstance(allocation, dict) and "devices" in allocation and not isinstance(allocation["devices"], dict):
        return False
    return (
        all(isinstance(at(claim, "metadata", key), str) for key in ("namespace", "name", "uid"))
        and each(at(allocation, "devices", "results"), request=str, driver=str, pool=str, device=str)
        and each(at(allocation, "devices", "config"))
        and each(devices, driver=str, pool=str, device=str)
    )


def _states(listed: Sequence[Any], changes: bytes) -> Iterator[dict[str, Any]]:
    """Yield the claims for which the scheduler waits, by UID: after the list, and after each change."""
    waiting = {at(each, "metadata", "uid"): each for each in listed if _is_awaited(each)}
    yield dict(waiting)
    for line in split_lines(changes):
        event = parsed(line)
        claim, kind = at(event, "object"), at(event, "type")
        uid = at(claim, "metadata", "uid")
        if not (isinstance(kind, str) and isinstance(at(claim, "metadata"), dict) and isinstance(uid, str | None)):
            return
        if kind == "ERROR":
            return
        waiting.pop(uid or "", None)
        if kind != "DELETED" and _is_awaited(claim):
            waiting[uid] = claim
        yield dict(waiting)


@target(
    "binding-claims",
    parser="the list of all claims and the lines of its watch, for binding conditions",
    covers=("plugin.dra.binding", "plugin.dra.claims", "plugin.cluster.client"),
    oracle="the driver goes on whatever it receives, and writes exactly about the claims for which the scheduler then waits, "
    "by Python's JSON reader: from the version that it read, with every other part of the status as it was",
    seeds=(
        *(bytes((mode,)) + edits for mode in (0, 1) for edits in EDIT_SEEDS),
        *(
            bytes((mode,)) + EDITS + bytes((place, operation, 3))
            for mode in (0, 1)
            for place in range(0, 60, 5)
            for operation in (0, 2)
        ),
        b"\0" + json.dumps(_LISTED).encode(),
        b"\1" + json.dumps({"type": "ERROR", "object": {"code": 410}}).encode(),
    ),
    words=_WORDS,
    goal=SLOW_GOAL,
    share=150,
)
def binding_claims(data: bytes) -> bool:
    listed, changes = json.dumps(_LISTED).encode(), _lines(_CHANGES)
    if data[:1] == b"\1":
        changes = _lines(edited(data[2:], _CHANGES)) if data[1:].startswith(EDITS) else data[1:]
    else:
        listed = json_input(data[1:], _LISTED)
    found = parsed(listed)
    states = list(_states(found, changes)) if isinstance(found, list) else [{}]
    cluster = _Cluster(listed, changes)
    every = [claim for state in states for claim in state.values()]
    cluster.claims = {_path(claim): claim for claim in every if _path(claim)}
    finish(_bind(cluster))
    for place, before, patch in cluster.written:
        assert _awaited(before), place
        _verify_patch(before, patch)
    written = {place for place, _, _ in cluster.written}
    # With two claims of one name, what is read is one of them.
    if (
        len({json.dumps(each) for each in every})
        == len(cluster.claims)
        == len({at(each, "metadata", "uid") for each in every})
    ):
        possible = [{_path(claim) for claim in state.values()} for state in states]
        if cluster.lists > 1:
            # The list was refused, or the API server says that changes were missed; the next list is empty.
            possible = [{_path(claim) for claim in state.values()} for state in _states([], changes)] + [set()]
        elif cluster.watches == 1:
            possible = possible[-1:]
        assert written in possible, (written, possible)
    return bool(written)


async def _bind(cluster: _Cluster) -> None:
    """Let the driver follow ``cluster``, and then show it that its devices are clean."""
    being_cleaned = tuple(
        AdvertisedDevice(
            f"GPU-{number}", str(number), ServiceVerdict.ADVERTISED, healthy=True, binding=BindingState.BEING_CLEANED
        )
        for number in range(2)
    )
    devices = AdvertisedDevices()
    await devices.update(being_cleaned, "one")
    conditions = BindingConditions(
        _DRIVER,
        NODE,
        api=client_of(cluster),
        watch=client_of(cluster),
        devices=devices,
        withdrawal=FakeWithdrawal(),
        log=create_logger("json", "info", io.StringIO()),
        clock=asyncio.get_running_loop().time,
        wall_clock=lambda: 100.0,
        jitter=lambda: 0.0,
        backoff=BackoffTimes(first=1e-4, max=1e-4, denied=1e-4),
    )
    running = asyncio.create_task(conditions.run())
    drained = asyncio.create_task(cluster.drained.wait())
    try:
        await asyncio.wait({running, drained}, return_when=asyncio.FIRST_COMPLETED)
        await devices.update(tuple(replace(each, binding=BindingState.READY) for each in being_cleaned), "one")
        conditions.on_devices()
        for _ in range(100):  # nothing here waits for anything but its turn
            await asyncio.sleep(0)
        assert not running.done(), running.exception()
    finally:
        for each in (running, drained):
            each.cancel()
        await asyncio.gather(running, drained, return_exceptions=True)


def _verify_patch(before: Any, patch: Any) -> None:
    assert patch["metadata"] == {"resourceVersion": before["metadata"].get("resourceVersion")}
    present = before["status"].get("devices") or []
    written = patch["status"]["devices"]
    assert list(patch) == ["metadata", "status"]
    assert list(patch["status"]) == ["devices"]
    for old, new in zip(present, written, strict=False):
        if old != new:
            assert (new["driver"], new["pool"]) == (_DRIVER, NODE)
            assert {**old, "conditions": None} == {**new, "conditions": None}
            assert _other_conditions(old) == _other_conditions(new)
    for new in written[len(present) :]:
        assert (new["driver"], new["pool"]) == (_DRIVER, NODE)
        assert _other_conditions(new) == []
    assert len(written) >= len(present)


def _other_conditions(entry: Any) -> list[Any]:
    return [each for each in entry.get("conditions") or [] if each["type"] not in (_CLEAN, _NOT_CLEAN)]


def _lines(events: Any) -> bytes:
    texts = [json.dumps(each, ensure_ascii=False) for each in (events if isinstance(events, list) else [events])]
    return b"".join(text.encode("utf-8", "surrogatepass") + b"\n" for text in texts)


# -- the status of a claim

_MINE: Final[list[dict[str, Any]]] = [
    {
        "driver": _DRIVER,
        "pool": NODE,
        "device": "gpu-0",
        "conditions": [
            {"type": "Ready", "status": "True", "reason": "Certified", "lastTransitionTime": "2031-05-06T07:08:09Z"}
        ],
    }
]
_REPORTED: Final = _claim("one")
_REPORTED["status"]["devices"] += [
    {
        "driver": _DRIVER,
        "pool": NODE,
        "device": "gpu-0",
        "conditions": [
            {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-02T03:04:05Z"},
            {"type": _CLEAN, "status": "True"},
        ],
    },
    {"driver": _DRIVER, "pool": NODE, "device": "gpu-7", "shareID": "s"},
]


@target(
    "claim-status",
    parser="the devices in the status of a claim, into which the driver writes its own",
    covers=("plugin.dra.claim_reports", "plugin.cluster.client"),
    oracle="a claim is refused as unavailable, or entries of other drivers and conditions of other types stay as they were, this "
    "driver's entries are the reported ones, and a second write changes nothing",
    seeds=(
        *EDIT_SEEDS,
        json.dumps(_REPORTED).encode(),
        *(EDITS + bytes((place, operation, 3)) for place in range(0, 70, 3) for operation in (0, 2, 6)),
    ),
    words=_WORDS,
)
def claim_status(data: bytes) -> bool:
    answers = ApiAnswers([Reply(json_input(data, _REPORTED))])
    try:
        claim = finish(client_of(answers).get_claim("team-a", "one"))
    except ApiUnavailable as error:
        verify_message(error)
        return False
    present = list((claim.get("status") or {}).get("devices") or [])
    merged = merged_devices(present, _MINE, _DRIVER)
    others = [each for each in present if each["driver"] != _DRIVER]
    assert merged[: len(others)] == others
    (mine,) = merged[len(others) :]
    assert {**mine, "conditions": None} == {**_MINE[0], "conditions": None}
    before = [
        each
        for each in present
        if all(each.get(key) == mine.get(key) for key in ("driver", "pool", "device", "shareID"))
    ]
    kept = {each["type"]: each for entry in before[-1:] for each in entry.get("conditions") or []}
    ready, *rest = mine["conditions"]
    assert {each["type"]: each for each in rest} == {name: each for name, each in kept.items() if name != "Ready"}
    assert {**ready, "lastTransitionTime": None} == {**_MINE[0]["conditions"][0], "lastTransitionTime": None}
    stays = kept.get("Ready", {}).get("status") == "True"
    expected = kept["Ready"].get("lastTransitionTime") if stays else "2031-05-06T07:08:09Z"
    assert ready["lastTransitionTime"] == expected
    assert merged_devices(merged, _MINE, _DRIVER) == merged
    return bool(present)


# -- slices

_DEVICES: Final = (
    SliceDevice("GPU-0", "0", Readiness.CLEAN, model="H100", memory_bytes=80 << 30),
    SliceDevice("GPU-1", "1", Readiness.DIRTY, model="H100", taints=(DeviceTaint("quarantined"),)),
    SliceDevice("GPU-2", "2", Readiness.DIRTY, being_cleaned=True),
    SliceDevice("MIG-1", "3:0", Readiness.WITHHELD, memory_bytes=10 << 30, parent="GPU-3", profile="1g.10gb"),
)
_OWNER: Final = SliceOwner(_DRIVER, NODE, "uid-of-node")
_CONTENTS: Final = slice_contents(_DEVICES, _DRIVER, SliceFeatures(binding_conditions=True))


def _published() -> list[Any]:
    plan = plan_slices(_CONTENTS, [], _OWNER, times={}, last_generation=3, token=lambda: "abcd")
    stored = json.loads(json.dumps(plan.create))
    for number, each in enumerate(stored):
        each["metadata"] |= {"uid": f"uid-{number}", "resourceVersion": str(7 + number)}
    stored[0]["spec"]["devices"][1]["taints"][0]["timeAdded"] = "2026-01-02T03:04:05Z"
    return list(stored)


_SLICES: Final = _published()
_NEWER: Final = [
    {**each, "spec": {**each["spec"], "pool": {**each["spec"]["pool"], "generation": 5 + number}}}
    for number, each in enumerate(_SLICES)
]
_OLD: Final = {**_SLICES[0], "metadata": {"name": "07-left", "uid": "u", "resourceVersion": "3"}}


@target(
    "resource-slices",
    parser="the list of ResourceSlices, and what the API server returns for one that was written",
    covers=("plugin.dra.slices", "plugin.cluster.client"),
    oracle="a list is refused as unavailable, or the planned requests end with exactly the slices that are to be published, in a "
    "pool whose generation has not gone back; a feature is given up only where a field of it was dropped",
    seeds=(
        *(bytes((mode,)) + edits for mode in (0, 1) for edits in EDIT_SEEDS),
        *(
            bytes((mode,)) + EDITS + bytes((place, operation, 3))
            for mode in (0, 1)
            for place in range(0, 80, 4)
            for operation in (0, 2)
        ),
        b"\0" + json.dumps([*_SLICES, _OLD]).encode(),
        b"\0" + json.dumps(_NEWER).encode(),
        b"\1\0eLLLLLrat",  # a number where the slice has a list
    ),
    words=(
        b'"generation":',
        b'"pool":',
        b'"taints":',
        b'"timeAdded":',
        b'"devices":[]',
        b'"name":"00-x"',
        b'"sharedCounters":',
    ),
    goal=SLOW_GOAL,
)
def resource_slices(data: bytes) -> bool:
    if data[:1] == b"\1":
        return _written_slice(json_input(data[1:], _SLICES[0]))
    body = json_input(data[1:], [*_SLICES, _OLD])
    answers = ApiAnswers([Reply(b'{"metadata": {"resourceVersion": "9"}, "items": ' + body + b"}")])
    try:
        version, slices = finish(client_of(answers).list_slices(_DRIVER))
    except ApiUnavailable as error:
        verify_message(error)
        return False
    assert version == "9"
    stored = {each["metadata"]["name"]: each for each in slices}
    before = max([each["spec"]["pool"]["generation"] for each in stored.values()], default=0)
    numbers = itertools.count()
    again: dict[str, Any] = stored
    for _ in range(2):  # the first plan may find a name twice in the list
        plan = _plan(again.values(), numbers)
        assert plan.generation >= before
        again = {name: each for name, each in again.items() if all(each is not one for one in plan.delete)}
        again |= {each["metadata"]["name"]: each for each in json.loads(json.dumps((*plan.create, *plan.replace)))}
    assert not _plan(again.values(), numbers)
    assert len(again) == len(_CONTENTS)
    published = [each["spec"] for _, each in sorted(again.items())]
    for spec, content in zip(published, _CONTENTS, strict=True):
        assert [_untimed(each) for each in spec.get("devices") or []] == content.get("devices", [])
        assert (spec["pool"]["name"], spec["pool"]["resourceSliceCount"]) == (NODE, len(_CONTENTS))
    assert len({spec["pool"]["generation"] for spec in published}) == 1
    return bool(stored)


def _plan(stored: Iterable[Any], numbers: Iterator[int]) -> SlicePlan:
    found = list(stored)
    return plan_slices(
        _CONTENTS, found, _OWNER, times=taint_times(found), last_generation=3, token=lambda: f"t{next(numbers):03d}"
    )


def _untimed(device: Any) -> Any:
    """Return a device without empty values and without the times of its taints."""
    if isinstance(device, dict):
        return {
            name: _untimed(each) for name, each in device.items() if name != "timeAdded" and each not in ({}, [], None)
        }
    return [_untimed(each) for each in device] if isinstance(device, list) else device


def _length(value: object) -> int:
    """The length of a list; a value of another type, which only another server would send, counts as one entry."""
    return len(value) if isinstance(value, list) else int(bool(value))


def _written_slice(body: bytes) -> bool:
    sent = _SLICES[0]
    answers = ApiAnswers([Reply(body)])
    try:
        received = finish(client_of(answers).replace_slice(sent))
    except ApiUnavailable as error:
        verify_message(error)
        return False
    kept = dropped_features(sent, received)
    devices = {each["name"]: each for each in received["spec"].get("devices") or []}
    for name, fields in (
        ("taints", ("taints",)),
        ("counters", ("consumesCounters",)),
        ("binding_conditions", ("bindingConditions",)),
    ):
        dropped = any(
            _length(devices.get(each["name"], {}).get(field)) < len(each.get(field, []))
            for each in sent["spec"]["devices"]
            for field in fields
        )
        assert getattr(kept, name) or dropped, name
        if dropped and name == "taints":
            assert not kept.taints
    return kept == SliceFeatures(binding_conditions=True)
