"""NVIDIA's own CDI specification: what is taken from it, and when it is not used at all."""

from __future__ import annotations

import io
import json
import socket
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from plugin.logs import create_logger
from plugin.nvidia.cdi import SPEC_FILE_NAME, CdiPublisher
from plugin.nvidia.driver_files import CdiHook, DriverRoot
from plugin.nvidia.injection import ListStrategy, NvidiaInjection
from tests.cdi_rules import errors_of
from tests.gpus import DRIVER, gpu, install_driver

LIBRARIES = "/usr/lib/x86_64-linux-gnu"
MOUNTED = {"options": ["ro", "nosuid", "nodev", "rbind", "rprivate"]}


def hook(name: str, *words: str) -> dict[str, Any]:
    program = "/usr/bin/nvidia-cdi-hook"
    return {"hookName": "createContainer", "path": program, "args": ["nvidia-cdi-hook", name, *words]}


def generated(**changes: Any) -> dict[str, Any]:
    """Return a specification as ``nvidia-ctk cdi generate`` writes it, for a node with two GPUs."""
    files = [f"{LIBRARIES}/libcuda.so.{DRIVER}", f"{LIBRARIES}/libnvidia-ml.so.{DRIVER}", "/usr/bin/nvidia-smi"]
    sockets = ("/run/nvidia-persistenced/socket", "/run/nvidia-fabricmanager/socket", "/tmp/nvidia-mps")
    return {
        "cdiVersion": "0.7.0",
        "kind": "nvidia.com/gpu",
        "devices": [
            {
                "name": name,
                "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia7"}, {"path": "/dev/dri/card7"}]},
            }
            for name in ("0", "all")
        ],
        "containerEdits": {
            "env": ["NVIDIA_VISIBLE_DEVICES=void", f"NVIDIA_CTK_LIBCUDA_DIR={LIBRARIES}"],
            "deviceNodes": [{"path": "/dev/nvidiactl"}, {"path": "/dev/nvidia7"}],
            "hooks": [hook("create-symlinks"), hook("enable-cuda-compat", "--host-driver-version", DRIVER)],
            "mounts": [{"hostPath": path, "containerPath": path, **MOUNTED} for path in (*files, *sockets)],
            **changes,
        },
    }


class Node:
    """A host with a driver and the toolkit; the plugin sees ``root``."""

    def __init__(self, directory: Path) -> None:
        self.root, self.cdi, self.lines = directory / "root", directory / "cdi", io.StringIO()
        install_driver(self.root, hook="nvidia-cdi-hook")
        self.cdi.mkdir()

    def write(self, spec: dict[str, Any], name: str = "nvidia.yaml") -> None:
        text = json.dumps(spec)
        (self.cdi / name).write_text(yaml.safe_dump(json.loads(text)) if name.endswith("yaml") else text)

    def publisher(self, host: str = "/", **options: Any) -> CdiPublisher:
        return CdiPublisher(
            self.cdi,
            root=DriverRoot(PurePosixPath(host), self.root),
            hook=CdiHook("/usr/bin/nvidia-cdi-hook"),
            injection=NvidiaInjection((ListStrategy.CDI_CRI,)),
            log=create_logger("json", "info", self.lines),
            **options,
        )

    def published(self, publisher: CdiPublisher | None = None) -> dict[str, Any]:
        assert (publisher or self.publisher()).publish([gpu(0), gpu(1)], "one") == {}
        spec: dict[str, Any] = json.loads((self.cdi / SPEC_FILE_NAME).read_bytes())
        return spec

    def logged(self, event: str) -> list[dict[str, Any]]:
        lines = (json.loads(line) for line in self.lines.getvalue().splitlines())
        return [line for line in lines if line["event"] == event]


@pytest.fixture
def node(short_tmp: Path) -> Node:
    return Node(short_tmp)


@pytest.mark.parametrize("name", ["nvidia.yaml", "nvidia.json"])
def test_driver_files_and_hooks_are_those_of_nvidias_specification_and_device_nodes_are_not(
    node: Node, name: str
) -> None:
    node.write(generated(additionalGids=[44]), name)
    spec = node.published()
    assert errors_of({**spec, "containerEdits": {**spec["containerEdits"], "additionalGids": []}}) == [
        "unknown edit additionalGids"  # known since CDI 0.7
    ]
    assert (spec["cdiVersion"], spec["kind"]) == ("0.7.0", "scrubber.dev/gpu")
    edits = spec["containerEdits"]
    assert edits["additionalGids"] == [44]
    assert edits["env"] == ["NVIDIA_VISIBLE_DEVICES=void", f"NVIDIA_CTK_LIBCUDA_DIR={LIBRARIES}"]
    assert [each["args"][1] for each in edits["hooks"]] == ["create-symlinks", "enable-cuda-compat"]
    assert {each["containerPath"] for each in edits["mounts"]} == {
        f"{LIBRARIES}/libcuda.so.{DRIVER}",
        f"{LIBRARIES}/libnvidia-ml.so.{DRIVER}",
        "/usr/bin/nvidia-smi",
    }
    assert "nvidia7" not in json.dumps(spec)
    assert "dri" not in json.dumps([spec["devices"], edits["deviceNodes"]])
    assert [each["containerEdits"]["deviceNodes"][0]["path"] for each in spec["devices"]] == [
        "/dev/nvidia0",
        "/dev/nvidia1",
    ]
    assert [line["source"] for line in node.logged("cdi.written")] == ["toolkit"]


def test_sockets_and_hooks_that_are_turned_off_are_left_out_of_nvidias_specification(node: Node) -> None:
    node.write(generated())
    with socket.socket(socket.AF_UNIX) as manager:
        (node.root / "run/nvidia-fabricmanager").mkdir(parents=True)
        manager.bind(str(node.root / "run/nvidia-fabricmanager/socket"))
        assert "nvidia-fabricmanager" in json.dumps(node.published())
        spec = node.published(node.publisher(sockets=False, disabled_hooks=["enable-cuda-compat"]))
    assert "nvidia-fabricmanager" not in json.dumps(spec)
    assert [each["args"][1] for each in spec["containerEdits"]["hooks"]] == ["create-symlinks"]
    assert "hooks" not in node.published(node.publisher(disabled_hooks=["all"]))["containerEdits"]
    for shared in ("nvidia-persistenced/socket", "nvidia-mps"):
        assert shared not in json.dumps(spec)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (
            generated(mounts=[{"hostPath": "/usr/lib/libcuda.so.1.2.3", "containerPath": "/x"}]),
            "is not for the running driver",
        ),
        (
            generated(hooks=[{**hook("create-symlinks"), "path": "/usr/bin/gone"}]),
            "names /usr/bin/gone, which does not exist",
        ),
        (
            generated(
                mounts=[
                    *generated()["containerEdits"]["mounts"],
                    {"hostPath": "/usr/share/gone", "containerPath": "/x"},
                ]
            ),
            "names /usr/share/gone, which does not exist",
        ),
        ({**generated(), "kind": "k8s.device-plugin.nvidia.com/gpu"}, "is not a specification of nvidia.com/gpu"),
        ({**generated(), "cdiVersion": 0.7}, "is not a specification of nvidia.com/gpu"),
        ({**generated(), "containerEdits": None}, "has no edits for all devices"),
        (generated(mounts="all"), "has mounts that are not a list of mappings"),
        (generated(env=[1]), "has env that are not a list of words"),
    ],
)
def test_specification_with_which_no_container_would_work_is_logged_once_and_replaced_by_our_own(
    node: Node, spec: dict[str, Any], reason: str
) -> None:
    node.write(spec)
    publisher = node.publisher()
    found = node.published(publisher)
    assert found["cdiVersion"] == "0.5.0"
    assert node.published(publisher) == found
    (line,) = node.logged("cdi.toolkit-spec-unused")
    assert reason in line["message"]
    assert [each["source"] for each in node.logged("cdi.written")] == ["plugin"]


@pytest.mark.parametrize("content", [b"", b"\xff", b"a: [", b"- 1", b"a: &b 1"])
def test_file_that_is_no_specification_is_not_used(node: Node, content: bytes) -> None:
    (node.cdi / "nvidia.yaml").write_bytes(content)
    assert node.published()["cdiVersion"] == "0.5.0"
    assert len(node.logged("cdi.toolkit-spec-unused")) == 1


def test_specification_of_a_driver_on_the_host_is_not_used_for_one_in_a_container(node: Node) -> None:
    node.write(generated())
    assert node.published(node.publisher("/run/nvidia/driver"))["cdiVersion"] == "0.5.0"
    assert "and the driver is in /run/nvidia/driver" in node.logged("cdi.toolkit-spec-unused")[0]["message"]


def test_file_in_a_directory_that_the_plugin_does_not_see_is_trusted_and_a_socket_there_is_left_out(node: Node) -> None:
    mounts = generated()["containerEdits"]["mounts"]
    node.write(generated(mounts=[*mounts, {"hostPath": "/etc/vulkan/icd.d/nvidia_icd.json", "containerPath": "/x"}]))
    spec = json.dumps(node.published())
    assert "/etc/vulkan/icd.d/nvidia_icd.json" in spec
    assert "nvidia-fabricmanager" not in spec


def test_specification_that_is_generated_removed_or_outdated_while_the_plugin_runs_is_followed(node: Node) -> None:
    publisher = node.publisher()
    assert node.published(publisher)["cdiVersion"] == "0.5.0"
    node.write(generated())
    assert node.published(publisher)["cdiVersion"] == "0.7.0"
    for name in (node.root / LIBRARIES[1:]).iterdir():
        name.unlink()
    install_driver(node.root, "570.1.2", hook="nvidia-cdi-hook")
    assert "libcuda.so.570.1.2" in json.dumps(node.published(publisher))
    (node.cdi / "nvidia.yaml").unlink()
    assert node.published(publisher)["cdiVersion"] == "0.5.0"
    assert [each["source"] for each in node.logged("cdi.written")] == ["plugin", "toolkit", "plugin"]
