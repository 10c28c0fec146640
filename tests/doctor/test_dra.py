"""Checks of our DRA driver."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from scrubber.doctor.deployment import DraDriver, OurProcess, find_drivers
from scrubber.doctor.dra import dra_cdi, dra_cluster, dra_driver
from scrubber.doctor.model import CheckContext, CheckLevel, ClusterReport, DeviceReport
from scrubber.doctor.queries import query_cluster
from scrubber.emulator.cluster import Account
from scrubber.emulator.cluster.resources import NODES, SLICES
from tests.cluster.emulated import allowed, device, slice_of
from tests.cluster.plugin_server import PluginApiServer, failure, kubeconfig
from tests.doctor.stage import KUBELET, found, healthy, levels, process, serving, with_driver

BINDING_FIELDS = {
    "bindingConditions": ["gpu.scrubber.dev/clean"],
    "bindingFailureConditions": ["gpu.scrubber.dev/failed"],
}
DRIVER = ("/opt/scrubber/bin/python", "/opt/scrubber/bin/scrubber", "dra", "--node-name", "n1")
REGISTRY = f"{KUBELET}/plugins_registry"
PUBLISHED = ClusterReport(version="v1.36.2", slices=1, devices=2)
LISTEN = "import socket, sys; s = socket.socket(1); s.bind(sys.argv[1]); s.listen(); print(); sys.stdin.read()"
"""Listens on a socket of family 1, which is AF_UNIX."""


@pytest.fixture
def node(short_tmp: Path) -> Iterator[CheckContext]:
    """A healthy node with a DRA driver instead of the device plugin; this process is the driver."""
    with healthy(short_tmp) as node:
        (node.root / REGISTRY / "scrubber-gpu-1.sock").unlink()
        with_driver(node)
        process(node.root, os.getpid(), arguments=DRIVER)
        yield replace(
            node,
            cluster=PUBLISHED,
            kubelet=replace(node.kubelet, containers_with_devices=0, pods_with_devices=frozenset()),
        )


@pytest.fixture
def other(node: CheckContext) -> Iterator[int]:
    """The PID of another process, which listens on ``other.sock`` of the node's root."""
    command = [sys.executable, "-c", LISTEN, str(node.root / "other.sock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield child.pid
        child.kill()


def test_node_with_a_well_configured_driver_passes_every_check_of_it(node: CheckContext) -> None:
    checked = levels(node)
    names = ["device-plugins", "dra-driver", "dra-cluster", "dra-cdi", "dra-restarts"]
    assert {name: checked[name] for name in names} == dict.fromkeys(names, CheckLevel.OK)
    assert "can find what the claim's own pods left" in found(node, "dra-restarts").message


def test_missing_device_plugin_is_no_finding_while_pods_use_devices_by_claims(node: CheckContext) -> None:
    kubelet = replace(node.kubelet, containers_with_devices=2, containers_with_claims=2)
    assert found(replace(node, kubelet=kubelet), "device-plugins").level is CheckLevel.OK
    kubelet = replace(kubelet, containers_with_claims=1)
    check = found(replace(node, kubelet=kubelet), "device-plugins")
    assert (check.level, "1 container uses our devices" in check.message) == (CheckLevel.ERROR, True)


def test_driver_is_found_below_a_root_directory_whose_name_is_longer_than_an_address_of_a_socket(
    node: CheckContext, short_tmp: Path
) -> None:
    root = short_tmp / ("n" * 107)
    root.symlink_to(node.root)
    below = replace(node, root=root)
    assert {found(below, name).level for name in ("device-plugins", "dra-driver")} == {CheckLevel.OK}


def test_node_without_a_driver_has_no_check_of_it(short_tmp: Path) -> None:
    with healthy(short_tmp) as plain:
        assert [name for name in levels(plain) if name.startswith("dra-")] == []


def test_driver_of_another_name_is_found_by_its_process(node: CheckContext) -> None:
    process(node.root, os.getpid(), arguments=(*DRIVER, "--driver-name", "gpu.example.com"))
    (node.root / REGISTRY / "gpu.scrubber.dev-reg.sock").rename(node.root / REGISTRY / "gpu.example.com-uid-reg.sock")
    assert [each.name for each in find_drivers(node)] == ["gpu.example.com"]
    assert found(node, "dra-driver").level is CheckLevel.OK


def test_driver_whose_process_is_not_visible_is_a_warning(node: CheckContext) -> None:
    (node.root / f"proc/{os.getpid()}/cmdline").unlink()
    check = found(node, "dra-driver")
    assert (check.level, "not visible" in check.message) == (CheckLevel.WARNING, True)


def test_second_driver_with_the_same_name_is_a_warning(node: CheckContext, other: int) -> None:
    (node.root / REGISTRY / "gpu.scrubber.dev-uid-reg.sock").symlink_to(node.root / "other.sock")
    process(node.root, other, arguments=DRIVER)
    check = found(node, "dra-driver")
    assert check.level is CheckLevel.WARNING
    assert str(other) in check.message
    assert "--driver-name" in check.remedy


def test_drivers_of_different_names_are_no_finding(node: CheckContext, other: int) -> None:
    (node.root / REGISTRY / "b.dev-reg.sock").symlink_to(node.root / "other.sock")
    process(node.root, other, arguments=(*DRIVER, "--driver-name=b.dev"))
    assert levels(node)["dra-driver"] is CheckLevel.OK


def test_driver_of_nvidia_for_the_same_gpus_is_an_error(node: CheckContext, other: int) -> None:
    (node.root / REGISTRY / "gpu.nvidia.com-reg.sock").symlink_to(node.root / "other.sock")
    process(node.root, other, arguments=("gpu-kubelet-plugin",))
    (rival, ours) = (check for check in dra_driver(node) if check.name == "dra-driver")
    assert (rival.level, "gpu.nvidia.com-reg.sock" in rival.message) == (CheckLevel.ERROR, True)
    assert ours.level is CheckLevel.OK


def test_cdi_directory_that_the_driver_does_not_have_is_an_error(node: CheckContext) -> None:
    (node.root / f"proc/{os.getpid()}/root/var/run/cdi").unlink()
    check = found(node, "dra-cdi")
    assert (check.level, "does not exist" in check.message) == (CheckLevel.ERROR, True)


def test_read_only_cdi_directory_is_an_error(node: CheckContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    check = found(node, "dra-cdi")
    assert (check.level, "is read-only" in check.message) == (CheckLevel.ERROR, True)


def test_cdi_directory_where_no_runtime_looks_is_a_warning(node: CheckContext) -> None:
    process(node.root, os.getpid(), arguments=(*DRIVER, "--cdi-dir", "/data/cdi"))
    (node.root / f"proc/{os.getpid()}/root/data/cdi").mkdir(parents=True)
    check = found(node, "dra-cdi")
    assert (check.level, "cdi_spec_dirs" in check.message) == (CheckLevel.WARNING, True)


def test_cdi_directory_of_the_node_is_found_from_the_services_pod(node: CheckContext, short_tmp: Path) -> None:
    (node.root / "run/cdi").mkdir(parents=True)
    (node.root / "var/run/cdi").rmdir()
    (node.root / "var/run").rmdir()
    (node.root / "var/run").symlink_to("/run")
    driver = node.root / f"proc/{os.getpid()}/root/var/run/cdi"
    driver.unlink()
    driver.symlink_to(node.root / "run/cdi")
    assert found(node, "dra-cdi").level is CheckLevel.OK
    (own := short_tmp / "own").mkdir()
    for name in ("proc", KUBELET):
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).symlink_to(node.root / name)
    in_pod = replace(node, root=own)
    assert [each.level for each in dra_cdi(in_pod)] == [CheckLevel.WARNING]
    assert [each.level for each in dra_cdi(replace(in_pod, root_of_init=node.root))] == [CheckLevel.OK]


def test_cdi_directory_is_found_where_var_run_is_an_absolute_link_in_the_drivers_image(node: CheckContext) -> None:
    inside = node.root / f"proc/{os.getpid()}/root"
    (inside / "var/run/cdi").unlink()
    (inside / "var/run").rmdir()
    (inside / "var/run").symlink_to("/run")
    (inside / "run").mkdir()
    (inside / "run/cdi").symlink_to(node.root / "var/run/cdi")
    assert found(node, "dra-cdi").level is CheckLevel.OK


@pytest.mark.parametrize(
    ("of_plugin", "of_driver", "level"),
    [
        ((), (), CheckLevel.ERROR),
        (("--devices", "0"), ("--devices=GPU-b",), CheckLevel.OK),
        (("--devices", "0"), ("--devices", "!1"), CheckLevel.ERROR),
        (("--devices", "gpu"), ("--devices", "instance"), CheckLevel.OK),
        (("--devices", "0-1"), (), CheckLevel.ERROR),
    ],
)
def test_device_that_the_plugin_and_the_driver_both_offer_is_an_error(
    node: CheckContext, other: int, of_plugin: tuple[str, ...], of_driver: tuple[str, ...], level: CheckLevel
) -> None:
    (node.root / REGISTRY / "scrubber-gpu-1.sock").symlink_to(node.root / "other.sock")
    process(node.root, other, arguments=("python", "scrubber", "plugin", *of_plugin))
    process(node.root, os.getpid(), arguments=(*DRIVER, *of_driver))
    assert found(node, "dra-devices").level is level


def test_device_that_both_offer_is_named(node: CheckContext, other: int) -> None:
    (node.root / REGISTRY / "scrubber-gpu-1.sock").symlink_to(node.root / "other.sock")
    process(node.root, other, arguments=("python", "scrubber", "plugin"))
    check = found(node, "dra-devices")
    assert "both offer GPU-a and 1 more" in check.message
    assert "--devices" in check.remedy


@pytest.mark.parametrize(
    ("cluster", "level", "message"),
    [
        (ClusterReport(error="It did not respond within 3 s."), CheckLevel.WARNING, "did not respond"),
        (ClusterReport(version="v1.33.4"), CheckLevel.ERROR, "Kubernetes is v1.33.4"),
        (replace(PUBLISHED, version="v1.34.0-gke.1"), CheckLevel.OK, "2 of the node's devices in 1 ResourceSlice,"),
        (replace(PUBLISHED, denied=("get nodes", "watch resourceclaims")), CheckLevel.ERROR, "get nodes, watch res"),
        (replace(PUBLISHED, slices=0), CheckLevel.ERROR, "no ResourceSlice"),
        (ClusterReport(version="v1.36.2", slices_error="403: cannot list"), CheckLevel.ERROR, "cannot list"),
    ],
)
def test_what_the_api_server_says_is_judged(
    node: CheckContext, cluster: ClusterReport, level: CheckLevel, message: str
) -> None:
    check = found(replace(node, cluster=cluster), "dra-cluster")
    assert (check.level, message in check.message) == (level, True)


def test_device_out_of_service_without_any_taint_hints_at_the_feature_gate(node: CheckContext) -> None:
    sick = serving(node, devices=(DeviceReport("GPU-a", "0", advertised=False),))
    first, *_ = dra_cluster(sick)
    assert (first.level, "DRADeviceTaints" in first.message) == (CheckLevel.WARNING, True)
    assert [each.level for each in dra_cluster(replace(sick, cluster=replace(PUBLISHED, devices_with_taints=1)))] == [
        CheckLevel.OK
    ]


BINDING = (*DRIVER, "--binding-conditions")


@pytest.mark.parametrize(
    ("cluster", "state", "level", "message"),
    [
        (replace(PUBLISHED, devices_with_conditions=1), "scrubbing", CheckLevel.OK, "1 of the published devices"),
        (PUBLISHED, "scrubbing", CheckLevel.WARNING, "GPU-a is being cleaned"),
        (PUBLISHED, "recovering", CheckLevel.WARNING, "DRADeviceBindingConditions"),
        (PUBLISHED, "clean", CheckLevel.OK, "none has them now"),
        (replace(PUBLISHED, version="v1.35.1"), "clean", CheckLevel.WARNING, "Kubernetes v1.35.1 does not support"),
    ],
)
def test_binding_conditions_that_the_api_server_does_not_keep_are_a_warning(
    node: CheckContext, cluster: ClusterReport, state: str, level: CheckLevel, message: str
) -> None:
    process(node.root, os.getpid(), arguments=BINDING)
    here = serving(replace(node, cluster=cluster), devices=(DeviceReport("GPU-a", "0", state=state, advertised=True),))
    check = found(here, "dra-binding")
    assert (check.level, message in check.message) == (level, True)
    assert ("--binding-conditions" in check.remedy) is (level is CheckLevel.WARNING)


def test_driver_without_binding_conditions_has_no_check_of_them(node: CheckContext) -> None:
    assert "dra-binding" not in levels(serving(node, devices=(DeviceReport("GPU-a", "0", state="dirty"),)))


def driver_with(credentials: Path) -> DraDriver:
    arguments = (*DRIVER, "--kubeconfig", str(credentials))
    return DraDriver("gpu.scrubber.dev", OurProcess(1, Path("/"), arguments, {}), Path("/gpu.scrubber.dev-reg.sock"))


async def test_api_server_reports_what_the_driver_may_do_and_has_published(short_tmp: Path) -> None:
    taint = {"key": "k", "effect": "NoSchedule"}
    slices = tuple(f"{verb} resourceslices" for verb in ("list", "watch", "create", "update", "delete"))
    claims = tuple(f"{verb} resourceclaims" for verb in ("get", "list", "watch"))
    status = "associated-node:patch resourceclaims/driver"
    granted = (*slices, *claims, "patch resourceclaims/status", status)
    async with PluginApiServer() as server:
        server.api.create(NODES, {"metadata": {"name": "n1", "labels": {"pool": "gpu"}}})
        server.api.create(SLICES, slice_of(device("a", **BINDING_FIELDS), device("b", taints=[taint]), node="n1"))
        names = {status: ["gpu.example.com"]}
        server.add_account(Account("driver", allowed(*granted, "get nodes", names=names)), "good")
        driver = driver_with(kubeconfig(short_tmp, server.url).path)
        expected = ClusterReport(
            version="v1.36.2",
            denied=("associated-node:patch resourceclaims/driver",),
            slices=1,
            devices=2,
            devices_with_taints=1,
            devices_with_conditions=1,
            labels={"pool": "gpu"},
        )
        assert await query_cluster(driver) == expected
        server.add_account(Account("driver", allowed(*granted, names=names)), "good")
        without_node = replace(expected, denied=(*expected.denied, "get nodes"), labels={})
        assert await query_cluster(driver) == without_node
        assert {each.http.method for each in server.log.requests} == {"GET", "POST"}


async def test_api_server_that_refuses_or_is_away_is_an_error_of_the_report(short_tmp: Path) -> None:
    async with PluginApiServer() as server:
        server.intercept = lambda _: failure(401, "Unauthorized", "no")
        path = kubeconfig(short_tmp, server.url).path
        assert "401" in (await query_cluster(driver_with(path))).error
    assert (await query_cluster(driver_with(path))).error
    assert (
        "not found"
        in (await query_cluster(replace(driver_with(path), process=OurProcess(1, short_tmp, DRIVER, {})))).error
    )
