"""The API server by its client: each request is one that a real server takes, and each answer becomes a value or a refusal."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from plugin.cluster.client import LONGEST, ApiServer
from plugin.cluster.credentials import ServiceAccount
from plugin.cluster.errors import Busy, ClusterError, Denied, Exists, Later, Missing, Rejected
from plugin.cluster.port import EventText, NodeSeen, Regarding
from plugin.cluster.view import CONDITION, Condition, Status
from tests.cluster.api_server import DROP, HANG, ApiServerStandIn, Said, failure, kubeconfig

NOW = datetime(2031, 5, 6, 7, 8, 9, 123456, tzinfo=UTC)
BEFORE = datetime(2031, 5, 6, 7, 0, 0, tzinfo=UTC)
BAD = Condition(Status.FALSE, "SomeOutOfService", "1 of 2 GPUs are in service.")
POD = Regarding("Pod", "train-0", "uid-1", "team-a")
NODE = Regarding("Node", "node-1", "node-1")


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
"""Somebody's; nobody here is signed by it, and nobody has its key."""


DEEP = b"[" * 100_000 + b"]" * 100_000
PACKED = gzip.compress(b'{"metadata": {"labels": {"zone": "b"}}}' + b" " * (16 << 20))
"""A node; a few KiB that would be thousands of times that."""


def event(about: Regarding = POD, sentence: str = "It is so.") -> EventText:
    return EventText(f"{about.name}.abc", about, "GpuOutOfService", sentence, warning=True)


@pytest.fixture
async def server() -> AsyncIterator[ApiServerStandIn]:
    async with ApiServerStandIn() as standing:
        standing.add_node("node-1", zone="a")
        yield standing


@pytest.fixture
async def client(server: ApiServerStandIn, tmp_path: Path) -> AsyncIterator[ApiServer]:
    asking = ApiServer(kubeconfig(tmp_path, server.url), "node-1", deadline=20)
    yield asking
    await asking.close()


async def test_a_node_without_our_condition_is_seen_as_one(client: ApiServer) -> None:
    assert await client.node() == NodeSeen(None, None, {"zone": "a"})


async def test_the_condition_is_merged_beside_those_of_others(client: ApiServer, server: ApiServerStandIn) -> None:
    answered = await client.show_condition(BAD, since=BEFORE, now=NOW)
    assert server.condition("node-1", CONDITION) == {
        "type": CONDITION,
        "status": "False",
        "reason": BAD.reason,
        "message": BAD.message,
        "lastTransitionTime": "2031-05-06T07:00:00Z",
        "lastHeartbeatTime": "2031-05-06T07:08:09Z",
    }
    assert server.condition("node-1", "Ready") is not None
    assert answered == await client.node() == NodeSeen(Status.FALSE, BEFORE, {"zone": "a"})
    assert [each.what for each in server.asked] == ["patch nodes/status", "get nodes"]


async def test_labels_of_others_are_left_alone(client: ApiServer, server: ApiServerStandIn) -> None:
    await client.show_labels({"scrubber.dev/gpus.clean": "2"})
    assert server.nodes["node-1"]["metadata"]["labels"] == {"zone": "a", "scrubber.dev/gpus.clean": "2"}


async def test_an_event_lives_where_its_object_does_and_a_nodes_in_default(
    client: ApiServer, server: ApiServerStandIn
) -> None:
    await client.create_event(event(), NOW)
    await client.create_event(event(NODE), NOW)
    assert set(server.events) == {("team-a", "train-0.abc"), ("default", "node-1.abc")}
    written = server.events["team-a", "train-0.abc"]
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


async def test_an_event_that_is_there_is_repeated_and_its_count_is_learnt(
    client: ApiServer, server: ApiServerStandIn
) -> None:
    await client.create_event(event(), BEFORE)
    with pytest.raises(Exists):
        await client.create_event(event(), NOW)
    server.events["team-a", "train-0.abc"]["count"] = 7
    assert await client.repeat_event(event(sentence="Still so."), NOW, None) == 7
    assert await client.repeat_event(event(sentence="Still so."), NOW, 8) == 8
    written = server.events["team-a", "train-0.abc"]
    assert (written["message"], written["count"]) == ("Still so.", 8)
    assert (written["firstTimestamp"], written["lastTimestamp"]) == ("2031-05-06T07:00:00Z", "2031-05-06T07:08:09Z")


async def test_a_pod_is_evicted_by_its_uid_and_no_later_one_of_its_name(
    client: ApiServer, server: ApiServerStandIn
) -> None:
    server.allowed.add("create pods/eviction")
    server.pods["team-a", "train-0"] = "uid-2"
    with pytest.raises(Exists):
        await client.evict("team-a", "train-0", "uid-1")
    await client.evict("team-a", "train-0", "uid-2")
    assert server.evicted == ["uid-2"]
    with pytest.raises(Missing):
        await client.evict("team-a", "train-0", "uid-2")


async def test_a_failure_that_comes_as_a_success_is_a_failure(client: ApiServer, server: ApiServerStandIn) -> None:
    """Two disruption budgets for one pod: the API server answers 201, with a Status that says "Failure"."""
    server.fault = lambda asked: Said(201, failure(500, "", "This pod has more than one PodDisruptionBudget").body)
    with pytest.raises(Busy, match="more than one PodDisruptionBudget"):
        await client.evict("team-a", "train-0", "uid-1")


@pytest.mark.parametrize(
    ("said", "kind", "sentence"),
    [
        (failure(400, "BadRequest", "no"), Rejected, "answered 400: no"),
        (failure(403, "Forbidden", "may not"), Denied, "answered 403: may not"),
        (failure(404, "NotFound", "is not"), Missing, "answered 404: is not"),
        (failure(409, "Conflict", "is"), Exists, "answered 409: is"),
        (failure(422, "Invalid", "never"), Rejected, "answered 422: never"),
        (failure(429, "TooManyRequests", "slower", after=7), Busy, "answered 429: slower"),
        (failure(500, "InternalError", "oh"), Busy, "answered 500: oh"),
        (failure(504, "Timeout", "late"), Busy, "answered 504: late"),
        (failure(401, "Unauthorized", "who?"), Later, "answered 401: who"),
        (Said(503, b"<html>", (("Content-Type", "text/html"),)), Busy, "answered 503: Word"),
        (Said(502, b"", (("Content-Type", ""),)), Busy, "answered 502"),
        (Said(403, b"<html>"), Denied, "answered 403"),
        (Said(500, b"null"), Busy, "answered 500"),
        (Said(302, b"", (("Location", "/elsewhere"),)), Later, "answered 302"),
        (Said(200, b"<html>no"), Later, "makes no sense"),
        (Said(200, b"[]"), Later, "makes no sense"),
        (Said(200, b'{"status": {"conditions": 3}}'), Later, "makes no sense"),
        (Said(200, b"\xff\xfe"), Later, "makes no sense"),
        pytest.param(Said(403, b'{"details":' + DEEP + b"}"), Denied, "answered 403", id="403, nested deep"),
        pytest.param(Said(200, b'{"metadata":' + DEEP + b"}"), Later, "makes no sense", id="200, nested deep"),
        pytest.param(Said(200, b" " * (LONGEST + 1)), Later, f"longer than {LONGEST} bytes", id="200, too long"),
        pytest.param(Said(500, b" " * (LONGEST + 1)), Later, f"longer than {LONGEST} bytes", id="500, too long"),
        pytest.param(Said(200, PACKED, (("Content-Encoding", "gzip"),)), Later, "is packed", id="200, packed"),
        (DROP, Later, "cannot be asked"),
        (Said(raw=b"SSH-2.0-OpenSSH_9.2\r\n"), Later, "cannot be asked"),
    ],
    ids=str,
)
async def test_whatever_comes_back_is_a_refusal_with_a_sentence(
    client: ApiServer, server: ApiServerStandIn, said: Said, kind: type[ClusterError], sentence: str
) -> None:
    server.fault = lambda asked: said
    with pytest.raises(ClusterError, match=sentence) as raised:
        await client.node()
    assert type(raised.value) is kind
    assert raised.value.retry_after == (7 if said.code == 429 else 0)
    server.fault = lambda asked: None
    assert (await client.node()).labels == {"zone": "a"}  # and the next one is asked as if nothing had been


async def test_an_answer_of_the_longest_kind_is_read(client: ApiServer, server: ApiServerStandIn) -> None:
    node = b'{"metadata": {"labels": {"zone": "b"}}}'
    server.fault = lambda asked: Said(200, node + b" " * (LONGEST - len(node)))
    assert (await client.node()).labels == {"zone": "b"}


async def test_no_answer_is_asked_for_packed(client: ApiServer, server: ApiServerStandIn) -> None:
    await client.node()
    await client.show_labels({})
    assert [each.encodings for each in server.asked] == ["identity", "identity"]


async def test_silence_ends_at_the_deadline(server: ApiServerStandIn, tmp_path: Path) -> None:
    server.fault = lambda asked: HANG
    client = ApiServer(kubeconfig(tmp_path, server.url), "node-1", deadline=0.05)
    with pytest.raises(Later, match=r"did not answer within 0\.05 s"):
        await client.node()
    await client.close()


async def test_an_api_server_that_is_away_is_asked_again_later(client: ApiServer, server: ApiServerStandIn) -> None:
    await client.node()
    await server.stop()
    with pytest.raises(Later, match="cannot be asked"):
        await client.node()
    await server.start()
    await client.node()


async def test_a_token_that_was_replaced_is_read_anew(
    client: ApiServer, server: ApiServerStandIn, tmp_path: Path
) -> None:
    await client.node()
    server.token = "better"
    with pytest.raises(Later, match="answered 401"):
        await client.node()
    (tmp_path / "token").write_text("better")
    await client.node()


async def test_a_pods_own_account_is_its_token_file_and_the_authority(server: ApiServerStandIn, tmp_path: Path) -> None:
    account = ServiceAccount(server.url, tmp_path / "ca.crt", tmp_path / "token")
    (tmp_path / "token").write_text("good\n")
    client = ApiServer(account, "node-1", deadline=20)
    with pytest.raises(Later, match="cannot be asked"):  # without the authority's certificate nobody is believed
        await client.node()
    assert server.asked == []
    (tmp_path / "ca.crt").write_text(AUTHORITY)
    await client.node()
    server.token = "better"
    (tmp_path / "token").write_text("better\n")  # the kubelet does that before the old one runs out
    await client.node()
    assert [each.token for each in server.asked] == ["Bearer good", "Bearer good", "Bearer better"]
    await client.close()


@pytest.mark.parametrize(
    ("user", "sentence"),
    [
        ({"exec": {"apiVersion": "client.authentication.k8s.io/v1beta1", "command": "touch"}}, "has a program make"),
        ({"auth-provider": {"name": "gcp"}}, "has a program make"),
    ],
)
async def test_no_program_is_run_to_get_a_token(
    server: ApiServerStandIn, tmp_path: Path, user: dict[str, Any], sentence: str
) -> None:
    client = ApiServer(kubeconfig(tmp_path, server.url, **user), "node-1", deadline=20)
    with pytest.raises(Later, match=sentence):
        await client.node()
    assert server.asked == []


@pytest.mark.parametrize("text", [None, "", "}{", "current-context: nowhere\ncontexts: []\nclusters: []\n", "[1]"])
async def test_a_kubeconfig_that_is_none_is_a_refusal_until_it_is_one(
    server: ApiServerStandIn, tmp_path: Path, text: str | None
) -> None:
    login = kubeconfig(tmp_path, server.url)
    good = login.kubeconfig.read_text()
    login.kubeconfig.unlink()
    if text is not None:
        login.kubeconfig.write_text(text)
    client = ApiServer(login, "node-1", deadline=20)
    with pytest.raises(Later):
        await client.node()
    login.kubeconfig.write_text(good)
    await client.node()
    await client.close()
