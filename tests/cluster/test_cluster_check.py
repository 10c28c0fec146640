"""``make cluster-check`` with bad input, a missing permission, and a cluster that cannot run its pods."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from scrubber.emulator.cluster import Account, ApiServer, ControlPlane, EmulatedApi
from scrubber.emulator.cluster.api import reconcile_on_change
from scrubber.emulator.cluster.resources import NAMESPACES, NODES, PODS, SECRETS
from tests.cluster.emulated import Json, node
from tests.cluster_checks import PAGE, ROLE, Checker, scenarios
from tests.clustercheck.check import of_hand_over
from tests.clustercheck.manifests import PodSettings, pod
from tests.clustercheck.placement import Path as DevicePath
from tests.clustercheck.placement import Placement
from tests.clustercheck.report import HandOver, Report, Result, ScenarioReport

RESOURCE = "nvidia.com/gpu"


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer() as running, ControlPlane(running.api):
        yield running


def add_node(api: EmulatedApi, count: int = 1) -> None:
    api.create(NODES, node("node-a", **{"kubernetes.io/hostname": "node-a"}))
    api.patch(NODES, "node-a", {"status": {"allocatable": {RESOURCE: str(count)}}}, subresource="status")


def namespaces(api: EmulatedApi) -> set[str]:
    return {each["metadata"]["name"] for each in api.store.items(NAMESPACES)}


class NoImages:
    """A kubelet that can pull no image: its pods wait, until they are deleted."""

    def __init__(self, api: EmulatedApi) -> None:
        self._api = api

    def reconcile(self) -> None:
        for each in self._api.list(PODS):
            place = each["metadata"]["name"], each["metadata"]["namespace"]
            if "deletionTimestamp" in each["metadata"]:
                self._api.delete(PODS, *place, options={"gracePeriodSeconds": 0})
            elif each["spec"].get("nodeName") and not each["status"].get("containerStatuses"):
                self._api.patch(PODS, place[0], {"status": WAITING}, place[1], subresource="status")


WAITING: Json = {
    "containerStatuses": [
        {
            "name": "main",
            "restartCount": 0,
            "state": {"waiting": {"reason": "ErrImagePull", "message": "no image scrubber:nowhere"}},
        }
    ]
}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "Set RESOURCE"),
        (("--resource", "cpu"), "'cpu' is no extended resource"),
        (("--resource", RESOURCE, "--kubeconfig", ""), "Set KUBECONFIG"),
        (("--resource", RESOURCE, "--kubeconfig", "/nonexistent"), "/nonexistent not found"),
        (("--resource", RESOURCE, "--kubeconfig", "a:b"), "names several files"),
        (("--resource", RESOURCE, "--namespace-prefix", "Team_A"), "'Team_A' must be"),
        (("--resource", RESOURCE, "--timeout", "0"), "must be positive"),
        (("--resource", RESOURCE, "--pull-secret-file", "/nonexistent"), "/nonexistent cannot be read"),
        (("--resource", RESOURCE, "--pull-secret-file", "/dev/null"), "/dev/null is no Docker configuration file"),
        (("--resource", RESOURCE), "The cluster has no nodes."),
        (("--resource", RESOURCE, "--node", "node-z"), "The cluster has no node node-z."),
    ],
)
async def test_bad_input_is_refused_with_what_to_change(
    server: ApiServer, tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    found = await Checker(server, tmp_path).run(*flags)
    assert found.code == 2
    assert message in found.errors


async def test_file_that_is_no_kubeconfig_is_refused(server: ApiServer, tmp_path: Path) -> None:
    checker = Checker(server, tmp_path)
    checker.kubeconfig.write_text("clusters: [")
    found = await checker.run("--resource", RESOURCE)
    assert found.code == 2
    assert f"The kubeconfig file {checker.kubeconfig} cannot be used" in found.errors


async def test_cluster_without_the_resource_or_the_class_is_named(server: ApiServer, tmp_path: Path) -> None:
    add_node(server.api, 0)
    checker = Checker(server, tmp_path)
    assert f"No ready, schedulable node offers {RESOURCE}" in (await checker.run("--resource", RESOURCE)).errors
    found = await checker.run("--device-class", "gpu.scrubber.dev")
    assert (found.code, "no device class gpu.scrubber.dev" in found.errors) == (2, True)


@pytest.mark.parametrize(
    ("resource", "verb"), [("nodes", "list"), ("namespaces", "create"), ("pods", "create"), ("events", "list")]
)
async def test_missing_permission_is_named(server: ApiServer, tmp_path: Path, resource: str, verb: str) -> None:
    add_node(server.api)
    rules = [
        {**each, "verbs": [word for word in each["verbs"] if resource not in each["resources"] or word != verb]}
        for each in ROLE["rules"]
    ]
    kubelet = asyncio.create_task(reconcile_on_change(server.api, NoImages(server.api).reconcile))
    found = await Checker(server, tmp_path, Account("auditor", rules)).run("--resource", RESOURCE, "--timeout", "2")
    kubelet.cancel()
    assert found.code == 2
    assert f'User "auditor" cannot {verb} resource "{resource}"' in found.errors
    assert namespaces(server.api) == {"default", "kube-system"}


async def test_image_that_cannot_be_pulled_is_reported_in_the_pods_own_words(server: ApiServer, tmp_path: Path) -> None:
    add_node(server.api)
    kubelet = asyncio.create_task(reconcile_on_change(server.api, NoImages(server.api).reconcile))
    flags = "--image", "scrubber:nowhere", "--timeout", "3", *scenarios(["exits"])
    found = await Checker(server, tmp_path).run("--resource", RESOURCE, *flags)
    kubelet.cancel()
    assert found.code == 3
    assert found.results == {"exits": "incomplete"}
    assert "ErrImagePull no image scrubber:nowhere" in found.scenario("exits")["reason"]
    assert "ErrImagePull no image scrubber:nowhere" in found.output
    assert namespaces(server.api) == {"default", "kube-system"}


async def test_credentials_for_the_image_are_copied_into_the_checks_own_namespaces_only(
    server: ApiServer, tmp_path: Path
) -> None:
    add_node(server.api)
    file = tmp_path / "config.json"
    file.write_text('{"auths": {"registry.example.com": {"auth": "dXNlcjpzZWNyZXQ="}}}')
    kubelet = asyncio.create_task(reconcile_on_change(server.api, NoImages(server.api).reconcile))
    flags = "--pull-secret-file", str(file), "--timeout", "3", *scenarios(["exits"])
    found = await Checker(server, tmp_path).run("--resource", RESOURCE, *flags)
    kubelet.cancel()
    changes = server.api.store.changes_since(0)
    secrets = [each.after for each in changes if each.kind is SECRETS and each.before is None and each.after]
    assert len(secrets) == 2
    for each in secrets:
        assert each["metadata"]["namespace"].startswith("scrubber-check-")
        assert base64.b64decode(each["data"][".dockerconfigjson"]).decode() == file.read_text()
    pods = [each.after for each in changes if each.kind is PODS and each.after]
    names = {each["name"] for pod in pods for each in pod["spec"]["imagePullSecrets"]}
    assert names == {each["metadata"]["name"] for each in secrets}
    assert "dXNlcjpzZWNyZXQ" not in found.output + found.errors + str(found.report)
    assert namespaces(server.api) == {"default", "kube-system"}


@pytest.mark.parametrize("auths", ["", ', "auths": {}', ', "auths": {"registry.example.com": {}}', ', "auths": 3'])
async def test_docker_configuration_without_credentials_is_refused(
    server: ApiServer, tmp_path: Path, auths: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(f'{{"credsStore": "desktop"{auths}}}')
    found = await Checker(server, tmp_path).run("--resource", RESOURCE, "--pull-secret-file", str(file))
    assert (found.code, "has no credentials under auths" in found.errors) == (2, True)


def test_warnings_that_cannot_concern_devices_are_no_evidence_of_the_hand_over() -> None:
    def warning(reason: str) -> Json:
        return {"reason": reason, "message": "", "count": 1}

    others = ("MissingClusterDNS", "DNSConfigForming", "FailedScheduling", "FailedToRetrieveImagePullSecret")
    kept = of_hand_over([warning(each) for each in (*others, "FailedPrepareDynamicResources", "GpuHandOverRefused")])
    assert [each["reason"] for each in kept] == ["FailedPrepareDynamicResources", "GpuHandOverRefused"]


async def test_what_a_killed_check_left_is_deleted_by_the_next_one_and_nothing_else(
    server: ApiServer, tmp_path: Path
) -> None:
    add_node(server.api)
    checker = Checker(server, tmp_path)
    first = await checker.start("--resource", RESOURCE)
    assert await server.api.store.changes.wait_until(lambda: len(namespaces(server.api)) == 4, 30.0)
    first.kill()
    await first.wait()
    left = namespaces(server.api) - {"default", "kube-system"}
    for name, labels in (("scrubber-check-mine", {}), ("other-a", {"scrubber.dev/cluster-check": "other"})):
        server.api.create(NAMESPACES, {"metadata": {"name": name, "labels": labels}})
    kubelet = asyncio.create_task(reconcile_on_change(server.api, NoImages(server.api).reconcile))
    found = await checker.run("--resource", RESOURCE, "--timeout", "3", *scenarios(["exits"]))
    kubelet.cancel()
    assert set(found.report["deletedLeftovers"]) == left
    assert all(name in found.errors for name in left)
    assert namespaces(server.api) == {"default", "kube-system", "scrubber-check-mine", "other-a"}


def test_program_in_a_pod_is_not_changed_by_the_kubelets_expansion_of_variables() -> None:
    placement = Placement(DevicePath.DEVICE_PLUGIN, 1, RESOURCE, "", node("node-a"))
    settings = PodSettings("scrubber:0.1.0", placement, "", 1 << 30)
    (container,) = pod("a", settings, {"role": "write", "end": "exit", "secret": "00"}, count=1)["spec"]["containers"]
    texts = [*container["command"], *(each["value"] for each in container["env"])]
    assert not [each for each in texts if "$(" in each or "$$" in each]


def test_every_key_of_the_report_is_documented() -> None:
    made = ScenarioReport("exits", Result.FOUND, hand_over=HandOver([{"id": "x"}]))
    report = Report("run", "0", "image", datetime.now(UTC), scenarios=[made]).to_json()
    keys = {*report, *report["scenarios"][0], *report["scenarios"][0]["handOver"]} - {"metadata"}
    page = PAGE.read_text()
    assert [key for key in keys if f"`{key}`" not in page] == []


@pytest.mark.parametrize(
    ("results", "code"),
    [
        ((Result.CLEAN, Result.NOT_COVERED), 0),
        ((Result.CLEAN, Result.FOUND, Result.INCOMPLETE), 1),
        ((Result.CLEAN, Result.INCOMPLETE), 3),
        ((Result.NOT_COVERED,), 3),
        ((), 3),
    ],
)
def test_exit_code_is_the_worst_result(results: tuple[Result, ...], code: int) -> None:
    made = [ScenarioReport(str(number), result) for number, result in enumerate(results)]
    assert Report("run", "0", "image", datetime.now(UTC), scenarios=made).exit_code == code
