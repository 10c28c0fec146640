"""GPUDirect Storage, GDRCopy and MOFED by CDI: the nodes that containers get, and when GPUs are withheld instead."""

from __future__ import annotations

import io
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from plugin.logs import create_logger
from plugin.nvidia.cdi import SPEC_FILE_NAME, CdiPublisher
from plugin.nvidia.driver_files import DriverRoot
from plugin.nvidia.feature_devices import find_feature_devices
from plugin.nvidia.injection import Feature, ListStrategy, NvidiaInjection
from scrubber.domain.errors import InvalidConfiguration
from tests.gpus import gpu, install_driver

ALL = frozenset(Feature)


def device_node(host: Path, name: str) -> None:
    """Create a device node of the host: a link to a character device that every machine has."""
    path = host / "dev" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to("/dev/null")


class Host:
    """A host with a driver, the plugin's view of it, and what the plugin writes."""

    def __init__(self, directory: Path) -> None:
        self.root, self.cdi, self.lines = directory / "host", directory / "cdi", io.StringIO()
        install_driver(self.root)
        (self.root / "dev").mkdir(exist_ok=True)

    def publisher(self, *features: Feature, strategy: ListStrategy = ListStrategy.CDI_CRI) -> CdiPublisher:
        return CdiPublisher(
            self.cdi,
            root=DriverRoot(local_path=self.root),
            hook=None,
            injection=NvidiaInjection((strategy,), features=frozenset(features)),
            log=create_logger("json", "info", self.lines),
            host=self.root,
        )

    def edits(self) -> dict[str, Any]:
        """Return what the specification gives to every container."""
        return dict(json.loads((self.cdi / SPEC_FILE_NAME).read_bytes())["containerEdits"])

    def nodes(self) -> set[str]:
        return {each["path"] for each in self.edits()["deviceNodes"]}

    def logged(self, event: str) -> list[str]:
        lines = [json.loads(line) for line in self.lines.getvalue().splitlines()]
        return [line["message"] for line in lines if line["event"] == event]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    made = Host(tmp_path)
    made.cdi.mkdir()
    return made


@pytest.mark.parametrize(
    ("feature", "found", "others"),
    [
        (Feature.GDRCOPY, ["gdrdrv"], ["nvidia-fs0", "infiniband/uverbs0"]),
        (Feature.GDS, ["nvidia-fs0", "nvidia-fs15"], ["gdrdrv", "infiniband/rdma_cm"]),
        (Feature.MOFED, ["infiniband/uverbs0", "infiniband/rdma_cm"], ["gdrdrv", "infiniband/umad0"]),
    ],
)
@pytest.mark.parametrize("strategy", [ListStrategy.CDI_CRI, ListStrategy.CDI_ANNOTATIONS])
def test_container_gets_the_nodes_of_the_requested_feature_and_of_no_other(
    host: Host, feature: Feature, found: list[str], others: list[str], strategy: ListStrategy
) -> None:
    host.publisher(strategy=strategy).publish([gpu(0)], "one")
    without = host.nodes()
    for name in (*found, *others):
        device_node(host.root, name)
    assert host.publisher(feature, strategy=strategy).publish([gpu(0)], "one") == {}
    assert host.nodes() - without == {f"/dev/{name}" for name in found}


def test_storage_files_are_mounted_read_only_with_a_node_of_gpudirect_storage_only(host: Host) -> None:
    (host.root / "run/udev").mkdir(parents=True)
    (host.root / "etc").mkdir(exist_ok=True)
    (host.root / "etc/cufile.json").write_text("{}")
    publisher = host.publisher(Feature.GDS)
    assert publisher.publish([gpu(0)], "one") == {}
    assert "/etc/cufile.json" not in {each["containerPath"] for each in host.edits()["mounts"]}
    device_node(host.root, "nvidia-fs0")
    assert publisher.publish([gpu(0)], "one") == {}
    mounts = {each["containerPath"]: each for each in host.edits()["mounts"]}
    for path in ("/run/udev", "/etc/cufile.json"):
        assert mounts[path]["hostPath"] == path
        assert "ro" in mounts[path]["options"]


def test_file_that_is_no_device_node_is_not_given_to_containers(host: Host) -> None:
    (host.root / "dev/gdrdrv").write_text("")
    (host.root / "dev/nvidia-fs0").symlink_to("nowhere")
    found = find_feature_devices(ALL, host=host.root, root=DriverRoot(local_path=host.root), gpu_nodes=())
    assert found.nodes == ()


def test_node_without_the_feature_is_a_warning_that_is_logged_once(host: Host) -> None:
    publisher = host.publisher(Feature.GDRCOPY, Feature.MOFED)
    for _ in range(2):
        assert publisher.publish([gpu(0)], "one") == {}
    (message,) = host.logged("cdi.feature-missing")
    assert "gdrcopy (/dev/gdrdrv) and mofed (/dev/infiniband/uverbs*, /dev/infiniband/rdma_cm)" in message


def test_gpus_are_withheld_while_the_hosts_device_nodes_are_not_visible(host: Host) -> None:
    (host.root / "dev").rmdir()
    refused = host.publisher(Feature.GDS).publish([gpu(0)], "one")
    assert set(refused) == {gpu(0).id}
    (message,) = host.logged("cdi.failed")
    assert "gds: the plugin does not see the host's device nodes" in message
    assert "Mount the host's /dev read-only at /host/dev" in message
    assert not (host.cdi / SPEC_FILE_NAME).exists()


@pytest.mark.parametrize(("gpu_node", "visible"), [("/dev/null", True), ("/dev/no-such-gpu", False)])
def test_device_directory_of_this_process_counts_as_the_hosts_if_it_has_the_gpus(gpu_node: str, visible: bool) -> None:
    outcome = nullcontext() if visible else pytest.raises(InvalidConfiguration, match="PrivateDevices=no")
    with outcome:
        find_feature_devices(ALL, host=Path("/"), root=DriverRoot(), gpu_nodes=[gpu_node])


def test_specification_of_nvidias_toolkit_is_completed_with_the_features(host: Host) -> None:
    """It describes the driver's files; the nodes of features are in separate kinds there."""
    device_node(host.root, "gdrdrv")
    toolkit = {
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/gpu",
        "devices": [],
        "containerEdits": {
            "mounts": [
                {"hostPath": "/usr/lib64/libcuda.so.550.54.15", "containerPath": "/usr/lib64/libcuda.so.550.54.15"}
            ]
        },
    }
    library = host.root / "usr/lib64/libcuda.so.550.54.15"
    library.parent.mkdir(parents=True, exist_ok=True)
    library.touch()
    (host.cdi / "nvidia.json").write_text(json.dumps(toolkit))
    assert host.publisher(Feature.GDRCOPY).publish([gpu(0)], "one") == {}
    assert '"source": "toolkit"' in host.lines.getvalue()
    assert "/dev/gdrdrv" in host.nodes()
