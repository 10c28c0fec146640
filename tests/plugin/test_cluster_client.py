"""The API server client: each request is valid for a real server, and each response becomes a value or an error."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from lightkube.config.kubeconfig import SingleConfig

from plugin.cluster import client as client_module
from plugin.cluster.client import MAX_ANSWER_BYTES, ApiServerClient
from plugin.cluster.condition import CONDITION_TYPE, ConditionFormat, ConditionPolarity
from plugin.cluster.credentials import Credentials, Kubeconfig, PodServiceAccount
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
from plugin.cluster.gpu_reset import ResetResult
from plugin.cluster.port import ClusterNode, EventContent, EventTarget
from plugin.cluster.view import ConditionStatus, NodeCondition
from scrubber.emulator.cluster import Answer, HttpResponse, Silence
from scrubber.emulator.cluster.resources import BUDGETS, EVENTS
from tests.cluster.plugin_server import PluginApiServer, answer, failure, kubeconfig

NOW = datetime(2031, 5, 6, 7, 8, 9, 123456, tzinfo=UTC)
BEFORE = datetime(2031, 5, 6, 7, 0, 0, tzinfo=UTC)
BAD = NodeCondition(ConditionStatus.FALSE, "SomeOutOfService", "1 of 2 GPUs are in service.")
POD = EventTarget("Pod", "train-0", "uid-1", "team-a")
NODE = EventTarget("Node", "node-1", "node-1")


AUTHORITY = """\
-----BEGIN CERTIFICATE-----
MIIBejCCAR+gAwIBAgIURPXsNCelrFWn6r/uk9ru9AnTAYYwCgYIKoZIzj0EAwIw
ETEPMA0GA1UEAwwGbm9ib2R5MCAXDTI2MTEyMDE4MjQzOFoYDzIxMjYxMDI3MTgy
NDM4WjARMQ8wDQYDVQQDDAZub2JvZHkwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNC
AARkQvzS5IS9JtaLjafbIgcZdDTWlmt7cekOwTSPqRgLTQFucnSdsogaaFnC4KlM
cK7641r15SFZ0HkM+SoejwBJo1MwUTAdBgNVHQ4EFgQU0ydoPF0heUd9uPfVYGEp
CSswZjEwHwYDVR0jBBgwFoAU0ydoPF0heUd9uPfVYGEpCSswZjEwDwYDVR0TAQH/
BAUwAwEB/zAKBggqhkjOPQQDAgNJADBGAiEA1c+3AcHCN/bm0jMDkdLcMURegLYG
X8THSd+iNIqvfDgCIQCT5XQo8lNKU/imQ0+eSiacPAjCRPJsdm7AJirWnMfPog==
-----END CERTIFICATE-----
"""
"""An unrelated certificate; no certificate here is signed by it, and its key does not exist."""


DEEP = b"[" * 100_000 + b"]" * 100_000
PACKED = gzip.compress(b'{"metadata": {"labels": {"zone": "b"}}}' + b" " * (16 << 20))
"""A node, in a few KiB that would decompress to thousands of times that."""


def event(about: EventTarget = POD, message: str = "It is so.") -> EventContent:
    return EventContent(f"{about.name}.abc", about, "GpuOutOfService", message, is_warning=True)


@pytest.fixture
async def server() -> AsyncIterator[PluginApiServer]:
    async with PluginApiServer() as api_server:
        api_server.add_node("node-1", zone="a")
        yield api_server


@pytest.fixture
async def client(server: PluginApiServer, tmp_path: Path) -> AsyncIterator[ApiServerClient]:
    api_client = ApiServerClient(kubeconfig(tmp_path, server.url), "node-1", deadline=20)
    yield api_client
    await api_client.close()


async def test_clients_of_one_process_are_created_one_after_another(
    server: PluginApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two threads at once, ``msgspec`` ends the process with SIGSEGV."""
    read_config, entered, together = client_module._config, threading.Lock(), threading.Event()

    def read_alone(credentials: Credentials) -> SingleConfig:
        if not entered.acquire(blocking=False):
            together.set()
            return read_config(credentials)
        try:
            together.wait(0.05)  # for long enough that another thread would come
            return read_config(credentials)
        finally:
            entered.release()

    monkeypatch.setattr(client_module, "_config", read_alone)
    clients = [ApiServerClient(kubeconfig(tmp_path, server.url), "node-1", deadline=20) for _ in range(4)]
    await asyncio.gather(*(each.get_node() for each in clients))
    await asyncio.gather(*(each.close() for each in clients))
    assert not together.is_set()


async def test_node_without_our_condition_is_read_without_a_condition_status(client: ApiServerClient) -> None:
    assert await client.get_node() == ClusterNode(None, None, {"zone": "a"})


async def test_condition_is_merged_beside_the_conditions_of_other_writers(
    client: ApiServerClient, server: PluginApiServer
) -> None:
    patched = await client.patch_condition(BAD, since=BEFORE, now=NOW)
    assert server.condition("node-1", CONDITION_TYPE) == {
        "type": CONDITION_TYPE,
        "status": "False",
        "reason": BAD.reason,
        "message": BAD.message,
        "lastTransitionTime": "2031-05-06T07:00:00Z",
        "lastHeartbeatTime": "2031-05-06T07:08:09Z",
    }
    assert server.condition("node-1", "Ready") is not None
    assert patched == await client.get_node() == ClusterNode(ConditionStatus.FALSE, BEFORE, {"zone": "a"})
    assert [each.operation for each in server.log.requests] == ["patch nodes/status", "get nodes"]


async def test_condition_of_bad_polarity_is_written_and_read_inverted(server: PluginApiServer, tmp_path: Path) -> None:
    format_ = ConditionFormat("example.com/GpusOutOfService", ConditionPolarity.BAD)
    client = ApiServerClient(kubeconfig(tmp_path, server.url), "node-1", deadline=20, condition=format_)
    for status, expected in (
        (ConditionStatus.FALSE, "True"),
        (ConditionStatus.TRUE, "False"),
        (ConditionStatus.UNKNOWN, "Unknown"),
    ):
        condition = NodeCondition(status, "SomeReason", "A message.")
        assert (await client.patch_condition(condition, since=BEFORE, now=NOW)).status is status
        written = server.condition("node-1", format_.type)
        assert written is not None
        assert written["status"] == expected
    assert server.condition("node-1", CONDITION_TYPE) is None
    await client.close()


async def test_label_patch_leaves_labels_of_other_writers_unchanged(
    client: ApiServerClient, server: PluginApiServer
) -> None:
    await client.patch_labels({"scrubber.dev/gpus.clean": "2"})
    assert server.labels("node-1") == {"zone": "a", "scrubber.dev/gpus.clean": "2"}


async def test_event_is_created_in_the_namespace_of_its_object_and_a_node_event_in_default(
    client: ApiServerClient, server: PluginApiServer
) -> None:
    await client.create_event(event(), NOW)
    await client.create_event(event(NODE), NOW)
    places = [(each["metadata"]["namespace"], each["metadata"]["name"]) for each in server.events]
    assert places == [("team-a", "train-0.abc"), ("default", "node-1.abc")]
    written = server.events[0]
    assert written["involvedObject"] == {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": "train-0",
        "uid": "uid-1",
        "namespace": "team-a",
    }
    assert (written["type"], written["reason"], written["message"], written["count"]) == (
        *("Warning", "GpuOutOfService", "It is so."),
        1,
    )
    assert written["firstTimestamp"] == written["lastTimestamp"] == "2031-05-06T07:08:09Z"
    assert written["source"] == {"component": "scrubber-plugin", "host": "node-1"}


async def test_existing_event_is_repeated_and_its_count_is_read(
    client: ApiServerClient, server: PluginApiServer
) -> None:
    await client.create_event(event(), BEFORE)
    with pytest.raises(ApiConflict):
        await client.create_event(event(), NOW)
    server.api.patch(EVENTS, "train-0.abc", {"count": 7}, "team-a")
    assert await client.repeat_event(event(message="Still so."), NOW, None) == 7
    assert await client.repeat_event(event(message="Still so."), NOW, 8) == 8
    (written,) = server.events
    assert (written["message"], written["count"]) == ("Still so.", 8)
    assert (written["firstTimestamp"], written["lastTimestamp"]) == ("2031-05-06T07:00:00Z", "2031-05-06T07:08:09Z")


async def test_pod_is_evicted_by_uid_and_never_a_later_pod_of_the_same_name(
    client: ApiServerClient, server: PluginApiServer
) -> None:
    server.role |= {"create pods/eviction"}
    server.add_pod("team-a", "train-0", "uid-2")
    with pytest.raises(ApiConflict):
        await client.evict_pod("team-a", "train-0", "uid-1")
    await client.evict_pod("team-a", "train-0", "uid-2")
    assert server.evicted == ["uid-2"]
    with pytest.raises(ApiNotFound):
        await client.evict_pod("team-a", "train-0", "uid-2")


async def test_success_response_with_a_failure_status_is_an_error(
    client: ApiServerClient, server: PluginApiServer
) -> None:
    """With two disruption budgets for one pod, the API server answers 201 with a Status that contains "Failure"."""
    server.role |= {"create pods/eviction"}
    server.add_pod("team-a", "train-0", "uid-1")
    for name in ("one", "two"):
        server.api.create(BUDGETS, {"metadata": {"name": name, "namespace": "team-a"}, "spec": {"selector": {}}})
    with pytest.raises(ApiBusy, match="more than one PodDisruptionBudget"):
        await client.evict_pod("team-a", "train-0", "uid-1")
    assert server.evicted == []


@pytest.mark.parametrize(
    ("response", "kind", "message"),
    [
        (failure(400, "BadRequest", "no"), ApiInvalidRequest, "returned 400: no"),
        (failure(403, "Forbidden", "may not"), ApiForbidden, "returned 403: may not"),
        (failure(404, "NotFound", "is not"), ApiNotFound, "returned 404: is not"),
        (failure(409, "Conflict", "is"), ApiConflict, "returned 409: is"),
        (failure(422, "Invalid", "never"), ApiInvalidRequest, "returned 422: never"),
        (failure(429, "TooManyRequests", "slower", after=7), ApiBusy, "returned 429: slower"),
        (failure(500, "InternalError", "oh"), ApiBusy, "returned 500: oh"),
        (failure(504, "Timeout", "late"), ApiBusy, "returned 504: late"),
        (failure(401, "Unauthorized", "who?"), ApiUnavailable, "returned 401: who"),
        (
            b"HTTP/1.1 503 Word\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>",
            ApiBusy,
            "returned 503: Word",
        ),
        (HttpResponse(502, content_type=""), ApiBusy, "returned 502"),
        (HttpResponse(403, b"<html>"), ApiForbidden, "returned 403"),
        (HttpResponse(500, b"null"), ApiBusy, "returned 500"),
        (HttpResponse(302, b"", (("Location", "/elsewhere"),)), ApiUnavailable, "returned 302"),
        (HttpResponse(200, b"<html>no"), ApiUnavailable, "response is invalid"),
        (HttpResponse(200, b"[]"), ApiUnavailable, "response is invalid"),
        (HttpResponse(200, b'{"status": {"conditions": 3}}'), ApiUnavailable, "response is invalid"),
        (HttpResponse(200, b"\xff\xfe"), ApiUnavailable, "response is invalid"),
        pytest.param(
            HttpResponse(403, b'{"details":' + DEEP + b"}"), ApiForbidden, "returned 403", id="403, nested deep"
        ),
        pytest.param(
            HttpResponse(200, b'{"metadata":' + DEEP + b"}"),
            ApiUnavailable,
            "response is invalid",
            id="200, nested deep",
        ),
        pytest.param(
            HttpResponse(200, b" " * (MAX_ANSWER_BYTES + 1)),
            ApiAnswerTooLong,
            f"longer than {MAX_ANSWER_BYTES} bytes",
            id="200, too long",
        ),
        pytest.param(
            HttpResponse(500, b" " * (MAX_ANSWER_BYTES + 1)),
            ApiAnswerTooLong,
            f"longer than {MAX_ANSWER_BYTES} bytes",
            id="500, too long",
        ),
        pytest.param(
            HttpResponse(200, PACKED, (("Content-Encoding", "gzip"),)),
            ApiUnavailable,
            "is compressed",
            id="200, compressed",
        ),
        (Silence.DROP, ApiUnavailable, "request to the API server failed"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", ApiUnavailable, "request to the API server failed"),
    ],
    ids=str,
)
async def test_every_error_response_becomes_a_cluster_error_with_a_message(
    client: ApiServerClient, server: PluginApiServer, response: Answer, kind: type[ClusterError], message: str
) -> None:
    server.intercept = lambda request: response
    with pytest.raises(ClusterError, match=message) as raised:
        await client.get_node()
    assert type(raised.value) is kind
    assert raised.value.retry_after == (7 if message.startswith("returned 429") else 0)
    server.intercept = lambda request: None
    assert (await client.get_node()).labels == {"zone": "a"}  # and the next request is unaffected


async def test_response_of_the_maximum_length_is_read(client: ApiServerClient, server: PluginApiServer) -> None:
    node = b'{"metadata": {"labels": {"zone": "b"}}}'
    server.intercept = lambda request: HttpResponse(200, node + b" " * (MAX_ANSWER_BYTES - len(node)))
    assert (await client.get_node()).labels == {"zone": "b"}


async def test_responses_are_requested_uncompressed(client: ApiServerClient, server: PluginApiServer) -> None:
    await client.get_node()
    await client.patch_labels({})
    assert [each.http.headers["accept-encoding"] for each in server.log.requests] == ["identity", "identity"]


async def test_request_without_a_response_ends_at_its_deadline(server: PluginApiServer, tmp_path: Path) -> None:
    server.intercept = lambda request: Silence.HANG
    client = ApiServerClient(kubeconfig(tmp_path, server.url), "node-1", deadline=0.05)
    with pytest.raises(ApiUnavailable, match=r"did not respond within 0\.05 s"):
        await client.get_node()
    await client.close()


async def test_api_server_that_was_down_is_reached_again_later(
    client: ApiServerClient, server: PluginApiServer
) -> None:
    await client.get_node()
    await server.stop()
    with pytest.raises(ApiUnavailable, match="request to the API server failed"):
        await client.get_node()
    await server.start()
    await client.get_node()


async def test_replaced_token_is_read_again(client: ApiServerClient, server: PluginApiServer, tmp_path: Path) -> None:
    await client.get_node()
    server.token = "better"
    with pytest.raises(ApiUnavailable, match="returned 401"):
        await client.get_node()
    (tmp_path / "token").write_text("better")
    await client.get_node()


async def test_pod_service_account_uses_its_token_file_and_ca_certificate(
    server: PluginApiServer, tmp_path: Path
) -> None:
    account = PodServiceAccount(server.url, tmp_path / "ca.crt", tmp_path / "token")
    (tmp_path / "token").write_text("good\n")
    client = ApiServerClient(account, "node-1", deadline=20)
    with pytest.raises(
        ApiUnavailable, match="request to the API server failed"
    ):  # without the authority's certificate no server is trusted
        await client.get_node()
    assert server.log.requests == []
    (tmp_path / "ca.crt").write_text(AUTHORITY)
    await client.get_node()
    server.token = "better"
    (tmp_path / "token").write_text("better\n")  # the kubelet does that before the old token expires
    await client.get_node()
    assert [each.http.headers["authorization"] for each in server.log.requests] == [
        "Bearer good",
        "Bearer good",
        "Bearer better",
    ]
    await client.close()


@pytest.mark.parametrize(
    ("user", "message"),
    [
        (
            {"exec": {"apiVersion": "client.authentication.k8s.io/v1beta1", "command": "touch"}},
            "gets its token from a program",
        ),
        ({"auth-provider": {"name": "gcp"}}, "gets its token from a program"),
    ],
)
async def test_kubeconfig_that_needs_a_credential_program_is_refused(
    server: PluginApiServer, tmp_path: Path, user: dict[str, Any], message: str
) -> None:
    client = ApiServerClient(kubeconfig(tmp_path, server.url, **user), "node-1", deadline=20)
    with pytest.raises(ApiUnavailable, match=message):
        await client.get_node()
    assert server.log.requests == []


@pytest.mark.parametrize("text", [None, "", "}{", "current-context: nowhere\ncontexts: []\nclusters: []\n", "[1]"])
async def test_invalid_kubeconfig_is_refused_until_it_is_valid(
    server: PluginApiServer, tmp_path: Path, text: str | None
) -> None:
    login = kubeconfig(tmp_path, server.url)
    good = login.path.read_text()
    login.path.unlink()
    if text is not None:
        login.path.write_text(text)
    client = ApiServerClient(login, "node-1", deadline=20)
    with pytest.raises(ApiUnavailable):
        await client.get_node()
    login.path.write_text(good)
    await client.get_node()
    await client.close()


@pytest.mark.parametrize(
    ("user", "broken"),
    [
        ("{token: Se-cr-et, a: }}", "not valid YAML (line 10)"),
        ("{token: Se-cr-et: x}", "not valid YAML (line 10)"),
        ('{token: "Se-cr-et}', "not valid YAML (line 11)"),
        ("{token: Se-cr-et\0}", "not valid YAML"),
        (r'{token: "Se-cr-et\nx"}', "check the token"),
        (r'{token: "Se-cr-et\0"}', "check the token"),
        (r'{token: "\ud800Se-cr-et"}', "request to the API server failed"),
        ("{token: [Se-cr-et]}", "cannot be used"),
    ],
)
async def test_no_message_about_a_kubeconfig_contains_its_secrets(
    server: PluginApiServer, tmp_path: Path, user: str, broken: str
) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(
        "current-context: here\ncontexts:\n- name: here\n  context: {cluster: c, user: u}\nclusters:\n- name: c\n"
        f"  cluster: {{server: '{server.url}'}}\nusers:\n- name: u\n  user: {user}\n"
    )
    client = ApiServerClient(Kubeconfig(path), "node-1", deadline=20)
    with pytest.raises(ApiUnavailable) as raised:
        await client.get_node()
    assert broken in str(raised.value)
    assert "cr-et" not in str(raised.value)
    await client.close()


async def test_token_that_no_header_may_contain_is_read_again(
    client: ApiServerClient, server: PluginApiServer, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("Se-cr-et\nmore")
    with pytest.raises(ApiUnavailable, match="check the token") as raised:
        await client.get_node()
    assert "cr-et" not in str(raised.value)
    (tmp_path / "token").write_text("good")
    await client.get_node()


async def test_message_with_the_words_of_the_api_server_is_one_printable_line(
    client: ApiServerClient, server: PluginApiServer
) -> None:
    for refusal in (failure(403, "Forbidden", "a\x1b[2J\nb"), b"HTTP/1.1 403 a\x1b[2J b\r\nContent-Length: 0\r\n\r\n"):
        server.intercept = lambda request, refusal=refusal: refusal  # type: ignore[misc]
        with pytest.raises(ClusterError) as raised:
            await client.get_node()
        assert str(raised.value).isprintable()


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        ("2031-05-06T09:00:00+02:00", BEFORE.replace(hour=7)),
        ("2031-05-06T07:00:00", BEFORE),
        ("0001-01-01T00:00:00+23:59", None),
        ("9999-12-31T23:59:59-23:59", None),
    ],
)
async def test_time_of_the_condition_is_read_in_utc_and_is_unknown_where_it_has_no_equivalent(
    client: ApiServerClient, server: PluginApiServer, time: str, expected: datetime | None
) -> None:
    condition = {"type": CONDITION_TYPE, "status": "True", "lastTransitionTime": time}
    server.intercept = lambda request: answer({"status": {"conditions": [condition]}})
    node = await client.get_node()
    assert (node.status, node.transition_time) == (ConditionStatus.TRUE, expected)


async def test_time_of_a_lease_without_an_equivalent_in_utc_is_unknown(
    client: ApiServerClient, server: PluginApiServer
) -> None:
    server.intercept = lambda request: answer({"spec": {"renewTime": "0001-01-01T00:00:00+23:59"}})
    assert (await client.get_lease("scrubber-system", "pause")).renewed_at is None


@pytest.mark.parametrize(
    "found",
    [
        {"metadata": {"name": "r"}, "spec": {"nodeName": None}},
        {"metadata": {"name": None}},
        {"metadata": {"name": "r"}, "status": {"completionTime": 7}},
        {"metadata": {"name": "r"}, "status": {"conditions": [{"reason": {}}]}},
    ],
    ids=str,
)
async def test_reset_without_the_shape_of_one_is_invalid(
    client: ApiServerClient, server: PluginApiServer, found: dict[str, Any]
) -> None:
    server.intercept = lambda request: answer(found)
    with pytest.raises(ApiUnavailable, match="response is invalid"):
        await client.get_gpu_reset("r")
    server.intercept = lambda request: answer({"items": [found]})
    with pytest.raises(ApiUnavailable, match="response is invalid"):
        await client.list_gpu_resets()


async def test_reason_that_only_looks_like_success_is_none(client: ApiServerClient, server: PluginApiServer) -> None:
    condition = {"type": "Complete", "status": "True", "reason": "GPUResetSucceeded\u2028"}
    status = {"completionTime": "2026-01-01T00:00:00Z", "conditions": [condition]}
    server.intercept = lambda request: answer({"metadata": {"name": "r"}, "status": status})
    assert (await client.get_gpu_reset("r")).result is ResetResult.FAILED


async def test_status_of_a_reset_is_one_printable_line(client: ApiServerClient, server: PluginApiServer) -> None:
    condition = {"type": "Complete", "status": "True", "reason": "a\x1b[2J", "message": "b\nc"}
    server.intercept = lambda request: answer({"metadata": {"name": "r"}, "status": {"conditions": [condition]}})
    assert (await client.get_gpu_reset("r")).status_text == r"a\x1b[2J: b c"


@pytest.mark.parametrize("version", [None, 7, {}])
async def test_version_that_is_no_text_is_invalid(
    client: ApiServerClient, server: PluginApiServer, version: object
) -> None:
    server.intercept = lambda request: answer({"gitVersion": version})
    with pytest.raises(ApiUnavailable, match="response is invalid"):
        await client.get_version()
    server.intercept = lambda request: answer({"gitVersion": "v1.36\x1b[2J\n"})
    assert await client.get_version() == r"v1.36\x1b[2J"


async def test_reason_why_a_pod_was_not_evicted_is_one_printable_line(
    client: ApiServerClient, server: PluginApiServer
) -> None:
    server.intercept = lambda request: answer({"status": "Failure", "message": "a\x1b[2J\nb"}, 201)
    with pytest.raises(ApiBusy) as raised:
        await client.evict_pod("team-a", "train-0", "uid-1")
    assert str(raised.value) == r"The API server did not evict the pod: a\x1b[2J b"
