"""The component that runs the DRA driver: its privileges, its permissions, and the devices that its classes select."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from plugin.dra.paths import DEFAULT_DRIVER_NAME, DriverSocketPaths
from plugin.dra.slices import PublishedType
from tests.cel import AdmissionPolicy, evaluate
from tests.deployed import BASE, DEPLOY, ROOT, documents, mounts, value_of, workload, yaml_of

DRA = DEPLOY / "kubernetes" / "dra"
Document = dict[str, Any]


def added() -> list[Document]:
    names = yaml_of(DRA)["resources"]
    return [each for name in names for each in yaml.safe_load_all((DRA / name).read_text())]


def of_kind(kind: str) -> list[Document]:
    return [each for each in added() if each["kind"] == kind]


def pod() -> Document:
    (found,) = of_kind("DaemonSet")
    spec: Document = found["spec"]["template"]["spec"]
    return spec


def test_every_file_of_the_component_is_used() -> None:
    assert set(yaml_of(DRA)["resources"]) == {each.name for each in DRA.iterdir()} - {"kustomization.yaml"}


def test_driver_has_the_privileges_of_the_plugin() -> None:
    (plugin,) = [
        each for each in documents(BASE) if value_of(each, "name") == "scrubber-plugin" and each["kind"] == "DaemonSet"
    ]
    known = plugin["spec"]["template"]["spec"]
    assert pod()["securityContext"] == known["securityContext"]
    (mine,), (plugins,) = pod()["containers"], known["containers"]
    for field in ("securityContext", "resources", "startupProbe", "livenessProbe", "readinessProbe", "image"):
        assert mine[field] == plugins[field]
    assert not {"hostPID", "hostNetwork", "hostIPC"} & pod().keys()


def test_service_may_read_where_the_driver_registers() -> None:
    registry = str(DriverSocketPaths(DEFAULT_DRIVER_NAME).registry)
    assert mounts(workload("scrubber", DRA)) - mounts(workload("scrubber")) == {(registry, registry, "ro")}


def test_driver_mounts_its_own_directories_only() -> None:
    (container,) = pod()["containers"]
    paths = DriverSocketPaths(DEFAULT_DRIVER_NAME)
    assert {each["mountPath"]: each.get("readOnly", False) for each in container["volumeMounts"]} == {
        "/run/scrubber/plugin": True,
        str(paths.directory): False,
        str(paths.registry): False,
        "/var/run/cdi": False,
        "/driver-root/usr": True,
    }
    where = {each["name"]: each["hostPath"]["path"] for each in pod()["volumes"]}
    assert all(
        where[each["name"]] in (each["mountPath"], each["mountPath"].removeprefix("/driver-root"))
        for each in container["volumeMounts"]
    )


def test_component_runs_the_driver_in_place_of_the_plugin_and_leaves_the_rest_of_the_base() -> None:
    def named(objects: list[Document]) -> list[tuple[str, str]]:
        return sorted((each["kind"], value_of(each, "name")) for each in objects)

    built = [*documents(DRA), *added()]
    workloads = [name for kind, name in named(built) if kind == "DaemonSet"]
    assert workloads == ["scrubber", "scrubber-dra"]
    kept = [each for each in named(documents(BASE)) if each != ("DaemonSet", "scrubber-plugin")]
    assert named(documents(DRA)) == kept
    assert len(named(built)) == len(set(named(built)))


def test_component_names_the_namespace_because_that_of_the_base_applies_to_the_base_only() -> None:
    namespaced = [each for each in added() if each["kind"] in ("ServiceAccount", "DaemonSet", "NetworkPolicy")]
    assert len(namespaced) == 3
    assert {each["metadata"].get("namespace") for each in namespaced} == {yaml_of(BASE)["namespace"]}


def test_role_is_bound_to_the_drivers_account() -> None:
    (binding,), (role,) = of_kind("ClusterRoleBinding"), of_kind("ClusterRole")
    assert binding["roleRef"]["name"] == value_of(role, "name")
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": pod()["serviceAccountName"], "namespace": yaml_of(BASE)["namespace"]}
    ]
    for rule in role["rules"]:
        if rule["resources"] == ["resourceclaims/driver"]:
            assert rule["resourceNames"] == [DEFAULT_DRIVER_NAME]


ACCOUNT = "system:serviceaccount:scrubber-system:scrubber-dra"
POOL = {"name": "node-1"}
SLICE = {"spec": {"driver": DEFAULT_DRIVER_NAME, "nodeName": "node-1", "pool": POOL}}
OTHERS_SLICE = {"spec": {"driver": "gpu.example.com", "nodeName": "node-1", "pool": POOL}}
OTHERS_POOL = {"spec": {"driver": DEFAULT_DRIVER_NAME, "nodeName": "node-1", "pool": {"name": "node-2"}}}
NO_NODE = {"spec": {"driver": DEFAULT_DRIVER_NAME, "allNodes": True, "pool": POOL}}


def user(node: str | None = "node-1") -> Document:
    extra = {} if node is None else {"extra": {"authentication.kubernetes.io/node-name": [node]}}
    return {"username": ACCOUNT, **extra}


@pytest.mark.parametrize(
    ("operation", "slice_", "who", "allowed"),
    [
        ("CREATE", SLICE, user(), True),
        ("UPDATE", SLICE, user(), True),
        ("DELETE", SLICE, user(), True),
        ("CREATE", SLICE, user("node-2"), False),
        ("DELETE", SLICE, user("node-2"), False),
        ("CREATE", SLICE, user(None), False),
        ("CREATE", NO_NODE, user(), False),
        ("UPDATE", OTHERS_SLICE, user(), False),
        ("CREATE", OTHERS_POOL, user(), False),
        ("DELETE", SLICE, {"username": "system:serviceaccount:other:driver"}, True),
    ],
)
def test_driver_may_write_only_slices_of_its_own_node(
    operation: str, slice_: Document, who: Document, allowed: bool
) -> None:
    (manifest,) = of_kind("ValidatingAdmissionPolicy")
    present = (
        {"object": None, "oldObject": slice_} if operation == "DELETE" else {"object": slice_, "oldObject": slice_}
    )
    refusals = AdmissionPolicy(manifest).refusals(request={"operation": operation, "userInfo": who}, **present)
    assert (refusals == []) is allowed


@pytest.mark.parametrize(("name", "kind"), [("gpu.scrubber.dev", "gpu"), ("instance.gpu.scrubber.dev", "instance")])
def test_device_classes_select_the_driver_devices_by_type(name: str, kind: str) -> None:
    (found,) = [each for each in of_kind("DeviceClass") if value_of(each, "name") == name]
    ((selector),) = found["spec"]["selectors"]

    def selected(driver: str, type_: str) -> bool:
        device = {"driver": driver, "attributes": {driver: {"type": type_}}}
        return bool(evaluate(selector["cel"]["expression"], device=device))

    assert [each for each in PublishedType if selected(DEFAULT_DRIVER_NAME, each)] == [kind]
    assert not selected("gpu.example.com", kind)


def test_page_names_the_component() -> None:
    assert "deploy/kubernetes/dra" in (ROOT / "docs" / "dra.md").read_text()
