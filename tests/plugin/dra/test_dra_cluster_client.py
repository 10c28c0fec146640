"""The API server client's requests about claims and slices, over HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from plugin.cluster.client import ApiServerClient
from plugin.cluster.errors import ApiBusy, ApiConflict, ApiForbidden, ApiInvalidRequest, ApiNotFound, ApiUnavailable
from scrubber.emulator.cluster import Answer, ApiRequest, HttpResponse, StatusError
from scrubber.emulator.cluster.patches import MERGE_PATCH
from tests.cluster.plugin_server import PluginApiServer, answer, failure, kubeconfig
from tests.plugin_collaborators import DEADLINE

DRIVER = "gpu.scrubber.dev"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
FUTURE = {"newField": {"of": ["a", "later", "version"]}}
POOL = {"name": "node-1", "generation": 1, "resourceSliceCount": 1}
SLICE = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "ResourceSlice",
    "metadata": {"name": "0-a", "uid": "uid-1", "resourceVersion": "7"},
    "spec": {"driver": DRIVER, "nodeName": "node-1", "pool": POOL, "devices": [{"name": "gpu-0", **FUTURE}]},
}


@asynccontextmanager
async def connected(directory: Path, *answers: Answer) -> AsyncIterator[tuple[ApiServerClient, list[ApiRequest]]]:
    """Provide a client, and the requests that the API server received; it gives ``answers`` in turn,
    and the last one from then on."""
    waiting = list(answers)

    def next_answer(request: ApiRequest) -> Answer:
        return waiting.pop(0) if len(waiting) > 1 else waiting[0]

    async with PluginApiServer() as server:
        server.intercept = next_answer
        client = ApiServerClient(kubeconfig(directory, server.url), "node-1", deadline=DEADLINE)
        yield client, server.log.requests
        await client.close()


def watch_events(*events: tuple[str, dict[str, Any]]) -> Answer:
    lines = "".join(json.dumps({"type": kind, "object": object_}) + "\n" for kind, object_ in events)
    return HttpResponse(200, lines.encode())


async def test_claim_is_read_with_fields_that_the_library_does_not_know(tmp_path: Path) -> None:
    claim = {"metadata": {"name": "c", "namespace": "team-a", "uid": "u"}, "spec": FUTURE}
    async with connected(tmp_path, answer(claim)) as (client, requests):
        assert await client.get_claim("team-a", "c") == claim
        assert requests[0].http.path == "/apis/resource.k8s.io/v1/namespaces/team-a/resourceclaims/c"


async def test_device_class_is_read(tmp_path: Path) -> None:
    found = {"metadata": {"name": "gpus"}, "spec": {"extendedResourceName": "nvidia.com/gpu"}}
    async with connected(tmp_path, answer(found)) as (client, requests):
        assert await client.get_device_class("gpus") == found
        assert requests[0].http.path == "/apis/resource.k8s.io/v1/deviceclasses/gpus"


async def test_claim_status_is_changed_by_a_merge_patch_of_the_subresource(tmp_path: Path) -> None:
    patch = {"status": {"devices": [{"driver": DRIVER}]}}
    async with connected(tmp_path, answer({"metadata": {"name": "c"}})) as (client, requests):
        await client.patch_claim_status("team-a", "c", patch)
        (request,) = requests
        assert request.http.path == "/apis/resource.k8s.io/v1/namespaces/team-a/resourceclaims/c/status"
        assert (request.http.method, request.http.headers["content-type"], request.body) == (
            "PATCH",
            MERGE_PATCH,
            patch,
        )


async def test_slices_of_the_driver_on_this_node_are_listed_with_the_lists_version(tmp_path: Path) -> None:
    found = {"metadata": {"resourceVersion": "41"}, "items": [SLICE]}
    async with connected(tmp_path, answer(found)) as (client, requests):
        assert await client.list_slices(DRIVER) == ("41", [SLICE])
        selector = requests[0].http.query["fieldSelector"]
        assert sorted(selector.split(",")) == [f"spec.driver={DRIVER}", "spec.nodeName=node-1"]


async def test_slice_is_created_replaced_and_deleted(tmp_path: Path) -> None:
    answers = answer(SLICE, 201), answer(SLICE), answer({"kind": "Status", "status": "Success"})
    async with connected(tmp_path, *answers) as (client, requests):
        assert await client.create_slice(SLICE) == SLICE
        assert await client.replace_slice(SLICE) == SLICE
        await client.delete_slice(SLICE)
        assert [(each.http.method, each.http.path) for each in requests] == [
            ("POST", SLICES),
            ("PUT", f"{SLICES}/0-a"),
            ("DELETE", f"{SLICES}/0-a"),
        ]
        assert requests[0].body == requests[1].body == SLICE
        assert requests[2].body["preconditions"] == {"uid": "uid-1", "resourceVersion": "7"}


async def test_watch_of_slices_begins_after_a_version_and_yields_each_change(tmp_path: Path) -> None:
    raw = watch_events(("MODIFIED", SLICE), ("DELETED", SLICE))
    async with connected(tmp_path, raw) as (client, requests):
        changes = client.watch_slices(DRIVER, "41")
        assert [await anext(changes), await anext(changes)] == [("MODIFIED", SLICE), ("DELETED", SLICE)]
        await changes.aclose()
        assert requests[0].http.query["resourceVersion"] == "41"


GONE = failure(410, "Expired", "too old resource version: 41 (99)")


@pytest.mark.parametrize("answer", [GONE, watch_events(("ERROR", GONE.body))], ids=["status", "event"])
async def test_watch_from_a_version_that_is_too_old_is_not_found(tmp_path: Path, answer: Answer) -> None:
    async with connected(tmp_path, answer) as (client, _):
        with pytest.raises(ApiNotFound, match="410"):
            await anext(client.watch_slices(DRIVER, "41"))


async def test_error_event_of_a_watch_that_asks_for_a_pause_keeps_its_kind(tmp_path: Path) -> None:
    busy = failure(429, "TooManyRequests", "the server is busy")
    async with connected(tmp_path, watch_events(("ERROR", busy.body))) as (client, _):
        with pytest.raises(ApiBusy, match="the server is busy"):
            await anext(client.watch_slices(DRIVER, "41"))


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (failure(403, "Forbidden", "cannot create resourceslices"), ApiForbidden),
        (failure(409, "Conflict", "modified"), ApiConflict),
        (failure(422, "Invalid", "status.devices: Forbidden"), ApiInvalidRequest),
        (failure(401, "Unauthorized", "who are you"), ApiUnavailable),
    ],
)
async def test_refusal_of_a_slice_becomes_an_error_with_the_servers_message(
    tmp_path: Path, answer: StatusError, error: type[Exception]
) -> None:
    async with connected(tmp_path, answer) as (client, _):
        with pytest.raises(error, match=str(answer)):
            await client.create_slice(SLICE)


async def test_uid_of_the_node_is_read_for_the_owner_reference(tmp_path: Path) -> None:
    async with connected(tmp_path, answer({"metadata": {"name": "node-1", "uid": "node-uid"}})) as (client, _):
        assert await client.get_node_uid() == "node-uid"


async def test_all_claims_are_listed_in_pages_and_only_selected_ones_are_kept(tmp_path: Path) -> None:
    claims = [{"metadata": {"name": name, "namespace": "team-a", "uid": name}} for name in "abc"]
    pages = (
        answer({"metadata": {"resourceVersion": "41", "continue": "more"}, "items": claims[:2]}),
        answer({"metadata": {"resourceVersion": "41"}, "items": claims[2:]}),
    )
    async with connected(tmp_path, *pages) as (client, requests):
        found = await client.list_claims(lambda each: each["metadata"]["name"] != "a")
        assert found == ("41", claims[1:])
        assert {each.http.path for each in requests} == {"/apis/resource.k8s.io/v1/resourceclaims"}
        assert [(each.http.query["limit"], each.http.query.get("continue")) for each in requests] == [
            ("100", None),
            ("100", "more"),
        ]


async def test_long_claims_of_a_tenant_keep_no_other_claim_from_being_listed(tmp_path: Path) -> None:
    """A claim of 1.5 MiB can have six times that length as JSON, and any tenant can write several."""
    long = "<" * (1536 << 10)
    claims = [
        {"metadata": {"name": str(number), "uid": str(number), "annotations": {"a": long if number in (3, 4) else ""}}}
        for number in range(13)
    ]

    def page(request: ApiRequest) -> Answer:
        query = request.http.query
        first, limit = int(query.get("continue", 0)), int(query["limit"])
        found = {"items": claims[first : first + limit], "metadata": {"resourceVersion": "41"}}
        if first + limit < len(claims):
            found["metadata"] = {"resourceVersion": "41", "continue": str(first + limit)}
        return HttpResponse(200, json.dumps(found).replace("<", "\\u003c").encode())

    async with PluginApiServer() as server:
        server.intercept = page
        client = ApiServerClient(kubeconfig(tmp_path, server.url), "node-1", deadline=DEADLINE)
        version, found = await client.list_claims(lambda each: True)
        await client.close()
    assert version == "41"
    assert [each["metadata"]["name"] for each in found] == [each["metadata"]["name"] for each in claims]
    assert [each["metadata"]["annotations"]["a"] == long for each in found].count(True) == 2


async def test_change_of_a_long_claim_of_a_tenant_ends_no_watch_before_it_was_seen(tmp_path: Path) -> None:
    claim = {"metadata": {"name": "c", "uid": "u", "resourceVersion": "42", "annotations": {"a": "a" * (9 << 20)}}}
    async with connected(tmp_path, watch_events(("MODIFIED", claim))) as (client, _):
        changes = client.watch_claims("41")
        assert await anext(changes) == ("MODIFIED", claim)
        await changes.aclose()


async def test_all_claims_are_watched_after_a_version(tmp_path: Path) -> None:
    claim = {"metadata": {"name": "c", "namespace": "team-a", "uid": "u", "resourceVersion": "42"}}
    async with connected(tmp_path, watch_events(("MODIFIED", claim))) as (client, requests):
        changes = client.watch_claims("41")
        assert await anext(changes) == ("MODIFIED", claim)
        await changes.aclose()
        assert requests[0].http.path == "/apis/resource.k8s.io/v1/resourceclaims"
        assert requests[0].http.query["resourceVersion"] == "41"


async def test_one_claim_is_watched_in_its_namespace(tmp_path: Path) -> None:
    claim = {"metadata": {"name": "c", "namespace": "team-a", "uid": "u", "resourceVersion": "7"}}
    async with connected(tmp_path, watch_events(("ADDED", claim))) as (client, requests):
        changes = client.watch_claim("team-a", "c")
        assert await anext(changes) == ("ADDED", claim)
        await changes.aclose()
        assert requests[0].http.path == "/apis/resource.k8s.io/v1/namespaces/team-a/resourceclaims"
        assert requests[0].http.query["fieldSelector"] == "metadata.name=c"


def nested(depth: int) -> bytes:
    """Return a claim with parameters that are nested ``depth`` times, as the API server accepts up to 10 KiB of them."""
    claim = {"metadata": {"name": "deep", "uid": "d", "resourceVersion": "43"}, "spec": {"parameters": ["here", "]["]}}
    deep = b'{"a":' * (depth // 2) + b"[" * (depth // 2) + b"]" * (depth // 2) + b"}" * (depth // 2)
    return json.dumps(claim).encode().replace(b'"here"', deep)


async def test_deeply_nested_claim_of_a_tenant_keeps_no_other_claim_from_being_listed(tmp_path: Path) -> None:
    other = {"metadata": {"name": "c", "uid": "u"}, "spec": FUTURE}
    body = b'{"items": [%s, %s], "metadata": {"resourceVersion": "41"}}' % (nested(5000), json.dumps(other).encode())
    async with connected(tmp_path, HttpResponse(200, body)) as (client, _):
        _, (deep, same) = await client.list_claims(lambda each: True)
    assert same == other
    assert (deep["metadata"]["name"], deep["spec"]["parameters"][1]) == ("deep", "][")


async def test_change_of_a_deeply_nested_claim_ends_no_watch(tmp_path: Path) -> None:
    claim = {"metadata": {"name": "c", "namespace": "team-a", "uid": "u", "resourceVersion": "44"}, "spec": FUTURE}
    event = b'{"type": "MODIFIED", "object": %s}\n' % nested(5000)
    answers = watch_events(("MODIFIED", claim))
    assert isinstance(answers, HttpResponse)
    async with connected(tmp_path, HttpResponse(200, event + answers.body)) as (client, _):
        changes = client.watch_claims("41")
        _, deep = await anext(changes)
        assert deep["metadata"] == {"name": "deep", "uid": "d", "resourceVersion": "43"}
        assert await anext(changes) == ("MODIFIED", claim)
        await changes.aclose()


async def test_claim_that_is_nested_as_far_as_any_reader_follows_is_read_unchanged(tmp_path: Path) -> None:
    body = nested(80)
    async with connected(tmp_path, HttpResponse(200, body)) as (client, _):
        assert await client.get_claim("team-a", "deep") == json.loads(body)


@pytest.mark.parametrize("text", ["a\x85b", "a\u2028b", "a\x0bb", "\x85" * 3])
async def test_watch_yields_an_object_with_a_text_that_has_line_separators(tmp_path: Path, text: str) -> None:
    """The API server writes U+0085 as it is, and a tenant chooses the annotations of a claim."""
    claim = {"metadata": {"name": "c", "annotations": {"note": text}}}
    lines = json.dumps({"type": "ADDED", "object": claim}, ensure_ascii=False).encode() + b"\n"
    async with connected(tmp_path, HttpResponse(200, lines * 2)) as (client, _):
        changes = client.watch_claims("41")
        assert [await anext(changes), await anext(changes)] == [("ADDED", claim)] * 2
        await changes.aclose()


async def test_list_without_a_version_is_invalid(tmp_path: Path) -> None:
    versionless: tuple[dict[str, Any], ...] = ({"items": []}, {"items": [], "metadata": {}})
    for found in versionless:
        async with connected(tmp_path, answer(found)) as (client, _):
            for request in (client.list_slices(DRIVER), client.list_claims(lambda _: True)):
                with pytest.raises(ApiUnavailable, match="the list has no resource version"):
                    await request


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"metadata": None},
        {"metadata": {"name": None}},
        {"metadata": {"name": "c", "uid": []}},
        {"metadata": {"name": "c"}, "status": []},
        {"metadata": {"name": "c"}, "status": {"devices": [{"pool": "p", "device": "d"}]}},
        {"metadata": {"name": "c"}, "status": {"devices": [{"driver": "d", "pool": "p", "device": {}}]}},
        {
            "metadata": {"name": "c"},
            "status": {"devices": [{"driver": "d", "pool": "p", "device": "d", "conditions": [[]]}]},
        },
    ],
    ids=str,
)
async def test_claim_without_the_shape_of_one_is_invalid(tmp_path: Path, found: dict[str, Any]) -> None:
    listed = answer({"items": [found], "metadata": {"resourceVersion": "1"}})
    async with connected(tmp_path, listed) as (client, _):
        with pytest.raises(ApiUnavailable, match="response is invalid"):
            await client.list_claims(lambda _: True)
    async with connected(tmp_path, answer(found)) as (client, _):
        for request in (client.get_claim("team-a", "c"), client.patch_claim_status("team-a", "c", {})):
            with pytest.raises(ApiUnavailable, match="response is invalid"):
                await request
    async with connected(tmp_path, watch_events(("ADDED", found))) as (client, _):
        for watch in (client.watch_claims("41"), client.watch_claim("team-a", "c")):
            with pytest.raises(ApiUnavailable, match="response is invalid"):
                await anext(watch)


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"metadata": {"name": "0-a"}},
        {"metadata": {"name": "0-a"}, "spec": {}},
        {"metadata": {"name": 7}, "spec": {"pool": POOL}},
        {"metadata": {"name": "0-a", "ownerReferences": [7]}, "spec": {"pool": POOL}},
        {"metadata": {"name": "0-a"}, "spec": {"pool": {**POOL, "generation": "x"}}},
        {"metadata": {"name": "0-a"}, "spec": {"pool": {**POOL, "generation": 10**400}}},
        {"metadata": {"name": "0-a"}, "spec": {"pool": POOL, "devices": [{}]}},
        {"metadata": {"name": "0-a"}, "spec": {"pool": POOL, "devices": [{"name": "d", "taints": [{"key": []}]}]}},
        {"metadata": {"name": "0-a"}, "spec": {"pool": POOL, "sharedCounters": 7}},
    ],
    ids=lambda found: str(found)[:90],
)
async def test_slice_without_the_shape_of_one_is_invalid(tmp_path: Path, found: dict[str, Any]) -> None:
    listed = answer({"items": [found], "metadata": {"resourceVersion": "1"}})
    async with connected(tmp_path, listed) as (client, _):
        with pytest.raises(ApiUnavailable, match="response is invalid"):
            await client.list_slices(DRIVER)
    async with connected(tmp_path, answer(found)) as (client, _):
        for request in (client.create_slice(SLICE), client.replace_slice(SLICE)):
            with pytest.raises(ApiUnavailable, match="response is invalid"):
                await request
    async with connected(tmp_path, watch_events(("ADDED", found))) as (client, _):
        with pytest.raises(ApiUnavailable, match="response is invalid"):
            await anext(client.watch_slices(DRIVER, "41"))
