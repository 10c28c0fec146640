"""``scrubber doctor``: each thing that would undo a hand-over is found, named, and comes with what to do about it."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scrubber.api.server import serve
from scrubber.api.sockets import Sockets
from scrubber.cli.doctor import CHECKS, Check, Level, Node, ServiceSaid, examine
from tests.contract.api_service import FakeNode

SERVED = ServiceSaid(version="0.1.0", backend="nvidia", policy="default", enforcement="enforce", ledger="ok")
SOCKET = "var/lib/kubelet/pod-resources/kubelet.sock"
CONTAINERD = "etc/containerd/config.toml"
TOOLKIT = "etc/nvidia-container-runtime/config.toml"
OPERATORS = "usr/local/nvidia/toolkit/.config/nvidia-container-runtime/config.toml"
ENVVAR = "accept-nvidia-visible-devices-envvar-when-unprivileged"
MOUNTS = "accept-nvidia-visible-devices-as-volume-mounts"
VERSION = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build\nGCC version: gcc 12.2.0\n"
)


def write(root: Path, name: str, text: str = "") -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.fixture
def kubelet_socket(short_tmp: Path) -> Iterator[Path]:
    """Where a kubelet listens: this process, so in a PID namespace that every command of a test sees."""
    path = short_tmp / "kubelet.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        yield path


@pytest.fixture
def node(tmp_path: Path, kubelet_socket: Path) -> Node:
    """A node on which all is well."""
    write(tmp_path, TOOLKIT, f"{ENVVAR} = false\n{MOUNTS} = true\n[nvidia-container-runtime]\nmode = 'auto'\n")
    write(tmp_path, "proc/driver/nvidia/version", VERSION)
    write(tmp_path, "proc/driver/nvidia/params", 'EnableMSI: 1\nRegistryDwords: ""\n')
    write(tmp_path, "run/nvidia-persistenced/nvidia-persistenced.pid", "712\n")
    (tmp_path / "proc/712").mkdir()
    for name in ("device-plugins/kubelet.sock", "plugins_registry/x.sock"):
        write(tmp_path, f"var/lib/kubelet/{name}")
    (tmp_path / "var/lib/kubelet/pod-resources").mkdir()
    (tmp_path / SOCKET).symlink_to(kubelet_socket)
    (tmp_path / "proc/self").symlink_to("/proc/self")
    write(tmp_path, "dev/nvidia0")
    (tmp_path / "dev/nvidia0").chmod(0o660)
    write(tmp_path, CONTAINERD, "version = 3\n[plugins.'io.containerd.cri.v1.runtime']\nenable_cdi = true\n")
    return Node(service=SERVED, root=tmp_path)


def found(node: Node, name: str) -> Check:
    (one,) = (check for check in examine(node) if check.name == name)
    return one


def test_a_node_that_is_set_up_well_has_nothing_to_do(node: Node) -> None:
    checks = examine(node)
    assert [check.level for check in checks] == [Level.OK] * len(checks)
    assert not any(check.remedy for check in checks)
    assert [check.name for check in checks] == [
        *("service", "toolkit-envvar", "toolkit-volume-mounts", "cdi-annotations", "driver", "device-nodes"),
        *("scrub-on-free", "persistenced", "kubelet", "pid-namespace"),
    ]


def test_an_empty_node_is_examined_to_the_end(tmp_path: Path) -> None:
    checks = examine(Node(service=ServiceSaid(refusal="The scrub service is not there."), root=tmp_path))
    assert {check.name: check.level for check in checks} == {
        "service": Level.ERROR,
        "toolkit-envvar": Level.OK,
        "driver": Level.WARNING,
        "kubelet": Level.WARNING,
        "pid-namespace": Level.WARNING,
    }


def test_every_check_says_what_it_looks_for() -> None:
    assert all(check.__doc__ for check in CHECKS)


# --- the container toolkit


@pytest.mark.parametrize(
    "text", ["", f"{ENVVAR} = true\n", f"{ENVVAR} = 'false'\n", f"#{ENVVAR} = false\n", f"[x]\n{ENVVAR} = false\n"]
)
def test_a_toolkit_that_lets_any_pod_name_itself_a_gpu_is_an_error_that_names_the_option(node: Node, text: str) -> None:
    write(node.root, TOOLKIT, text)
    check = found(node, "toolkit-envvar")
    assert check.level is Level.ERROR
    assert "NVIDIA_VISIBLE_DEVICES=all" in check.sentence
    assert f"{ENVVAR} = false in {node.root / TOOLKIT}" in check.remedy


def test_a_toolkit_without_a_configuration_lets_any_pod_do_so_too(node: Node) -> None:
    (node.root / TOOLKIT).unlink()
    write(node.root, "usr/bin/nvidia-container-runtime")
    check = found(node, "toolkit-envvar")
    assert check.level is Level.ERROR
    assert ENVVAR in check.remedy


def test_a_toolkit_configuration_that_cannot_be_read_is_never_called_safe(node: Node) -> None:
    write(node.root, TOOLKIT, f"{ENVVAR} = false\n= nonsense")
    assert found(node, "toolkit-envvar").level is Level.ERROR
    (node.root / TOOLKIT).unlink()
    (node.root / TOOLKIT).mkdir()
    assert "Is a directory" in found(node, "toolkit-envvar").sentence


def test_every_configuration_that_is_there_counts(node: Node) -> None:
    write(node.root, OPERATORS, f"{ENVVAR} = true\n")
    levels = [(check.level, OPERATORS in check.sentence) for check in examine(node) if check.name == "toolkit-envvar"]
    assert levels == [(Level.OK, False), (Level.ERROR, True)]


def test_the_configuration_that_is_named_is_the_one_that_counts(node: Node) -> None:
    write(node.root, "etc/other.toml", f"{ENVVAR} = true\n")
    assert found(replace(node, toolkit_configs=(Path("/etc/other.toml"),)), "toolkit-envvar").level is Level.ERROR
    assert found(replace(node, toolkit_configs=(Path("/etc/missing.toml"),)), "toolkit-envvar").level is Level.ERROR


@pytest.mark.parametrize("text", [f"{ENVVAR} = false\n", f"{ENVVAR} = false\n{MOUNTS} = false\n"])
def test_a_toolkit_that_takes_neither_form_leaves_cdi_only(node: Node, text: str) -> None:
    write(node.root, TOOLKIT, text)
    assert found(node, "toolkit-envvar").level is Level.OK
    check = found(node, "toolkit-volume-mounts")
    assert check.level is Level.WARNING
    assert f"{MOUNTS} = true" in check.remedy


# --- CDI names in pods' annotations


@pytest.mark.parametrize("pattern", ["cdi.k8s.io/*", "cdi.k8s.io/gpus", "*", "*/*", "cdi.*/x"])
@pytest.mark.parametrize(
    ("name", "section"),
    [
        (CONTAINERD, "[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.nvidia]\npod_annotations"),
        (CONTAINERD, "[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.nvidia]\npod_annotations"),
        ("etc/containerd/conf.d/99-nvidia.toml", "[plugins.x]\npod_annotations"),
        ("var/lib/rancher/k3s/agent/etc/containerd/config.toml", "[plugins.x]\npod_annotations"),
        ("etc/crio/crio.conf.d/10-gpus.conf", "[crio.runtime.runtimes.nvidia]\nallowed_annotations"),
    ],
)
def test_a_runtime_that_passes_pods_cdi_annotations_on_is_named(
    node: Node, name: str, section: str, pattern: str
) -> None:
    write(node.root, CONTAINERD, "imports = ['/etc/containerd/conf.d/*.toml']\n")
    write(node.root, name, f"{section} = ['io.example/*', '{pattern}']\n")
    check = found(node, "cdi-annotations")
    assert check.level is Level.WARNING
    assert str(node.root / name) in check.sentence
    assert f'"{pattern}"' in check.sentence
    assert f"out of {section.splitlines()[-1]}" in check.remedy


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[plugins.x.runtimes.nvidia]\npod_annotations = ['io.katacontainers.*', 'sandbox/*']\n",
        # What plugins write for their containers: the kubelet copies it, and nobody else writes it.
        "[plugins.x.runtimes.nvidia]\ncontainer_annotations = ['cdi.k8s.io/*']\n",
    ],
)
def test_a_runtime_that_passes_no_pods_cdi_annotations_on_is_as_it_should_be(node: Node, text: str) -> None:
    write(node.root, CONTAINERD, text)
    assert found(node, "cdi-annotations").level is Level.OK


def test_a_runtimes_configuration_that_cannot_be_read_is_never_called_safe(node: Node) -> None:
    write(node.root, CONTAINERD, "= nonsense")
    check = found(node, "cdi-annotations")
    assert (check.level, "is unknown" in check.sentence) == (Level.WARNING, True)


# --- the devices' nodes, the PID namespace


def test_a_gpu_that_any_local_user_may_open_is_named_with_the_drivers_options(node: Node) -> None:
    for name, mode in {"nvidia0": 0o660, "nvidia1": 0o666, "nvidia2": 0o604, "nvidiactl": 0o666}.items():
        write(node.root, f"dev/{name}")
        (node.root / "dev" / name).chmod(mode)
    check = found(node, "device-nodes")
    assert check.level is Level.WARNING
    assert f"{node.root}/dev/nvidia1 (0666), {node.root}/dev/nvidia2 (0604), past the kubelet" in check.sentence
    assert "NVreg_DeviceFileMode=0660" in check.remedy


def test_a_node_without_gpus_has_no_nodes_to_look_at(node: Node) -> None:
    (node.root / "dev/nvidia0").unlink()
    assert "device-nodes" not in {check.name for check in examine(node)}


@pytest.mark.parametrize(("backend", "level"), [("nvidia", Level.ERROR), ("", Level.WARNING), ("sim", Level.OK)])
def test_a_pid_namespace_that_is_not_the_nodes_is_what_the_service_would_refuse(
    node: Node, backend: str, level: Level
) -> None:
    (node.root / "proc/self").unlink()
    write(node.root, "proc/self/status", "Name:\tscrubber\nNSpid:\t5012\t7\n")
    check = found(replace(node, service=replace(SERVED, backend=backend)), "pid-namespace")
    assert check.level is level
    assert ("hostPID: true" in check.remedy) == (level is not Level.OK)


# --- the driver


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (VERSION, "570.133.20"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023\n", "535.54.03"),
    ],
)
def test_the_driver_is_named_by_its_version(node: Node, text: str, version: str) -> None:
    write(node.root, "proc/driver/nvidia/version", text)
    assert found(node, "driver") == Check("driver", Level.OK, f"NVIDIA's driver {version} is loaded.")


@pytest.mark.parametrize(("backend", "level"), [("nvidia", Level.ERROR), ("sim", Level.OK), ("", Level.WARNING)])
def test_a_missing_driver_matters_to_whoever_needs_one(node: Node, backend: str, level: Level) -> None:
    (node.root / "proc/driver/nvidia/version").unlink()
    assert found(replace(node, service=replace(SERVED, backend=backend)), "driver").level is level


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ('RegistryDwords: "RMDisableScrubOnFree=1"\n', Level.WARNING),
        ('RegistryDwords: "RmDisableScrubOnFree=0x1;Other=0"\n', Level.WARNING),
        ("RmDisableScrubOnFree: 1\n", Level.WARNING),
        ('RegistryDwords: "RmDisableScrubOnFree=0"\n', Level.OK),
        ("RmDisableScrubOnFree: 0\n", Level.OK),
    ],
)
def test_a_driver_that_leaves_freed_memory_as_it_is_is_told(node: Node, text: str, level: Level) -> None:
    write(node.root, "proc/driver/nvidia/params", text)
    assert found(node, "scrub-on-free").level is level


@pytest.mark.parametrize("text", ["713\n", "0\n", "", "seven\n", None])
def test_a_pid_file_without_its_process_is_no_persistence_daemon(node: Node, text: str | None) -> None:
    path = node.root / "run/nvidia-persistenced/nvidia-persistenced.pid"
    path.unlink() if text is None else path.write_text(text)
    check = found(node, "persistenced")
    assert (check.level, check.remedy) == (Level.WARNING, "systemctl enable --now nvidia-persistenced")


# --- the service and the kubelet


@pytest.mark.parametrize(
    ("said", "level", "word"),
    [
        (ServiceSaid(refusal="Nobody answers."), Level.ERROR, "Nobody answers."),
        (replace(SERVED, ledger="The disk is full."), Level.ERROR, "The disk is full."),
        (replace(SERVED, enforcement="observe"), Level.WARNING, "only observes"),
    ],
)
def test_a_service_that_would_let_a_dirty_device_pass_is_told(
    node: Node, said: ServiceSaid, level: Level, word: str
) -> None:
    check = found(replace(node, service=said), "service")
    assert (check.level, word in check.sentence) == (level, True)


@pytest.mark.parametrize("name", ["device-plugins", "plugins_registry", "pod-resources"])
def test_a_directory_that_the_kubelet_has_not_made_is_named(node: Node, name: str) -> None:
    (node.root / "var/lib/kubelet" / name).rename(node.root / "elsewhere")
    check = found(node, "kubelet")
    assert check.level is Level.WARNING
    assert f"no {name}" in check.sentence


# --- the command


def run(*words: str) -> tuple[int, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SCRUBBER_")}
    command = [sys.executable, "-m", "scrubber.cli.main", "doctor", *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.stderr == ""
    return ended.returncode, ended.stdout


def in_json(words: Sequence[str]) -> tuple[int, Any]:
    code, out = run(*words, "-o", "json")
    return code, json.loads(out)


@pytest.fixture
async def sockets(short_tmp: Path) -> AsyncIterator[Path]:
    async with serve(FakeNode(), Sockets(short_tmp / "s"), grace=0):
        yield short_tmp / "s"


async def asked(*words: str) -> tuple[int, Any]:
    return await asyncio.to_thread(in_json, words)


async def test_all_well_exits_with_zero(node: Node, sockets: Path) -> None:
    code, told = await asked("--socket", str(sockets), "--node-root", str(node.root))
    assert (code, told["verdict"]) == (0, "ok"), told
    assert told["checks"][0] == {
        "name": "service",
        "level": "ok",
        "sentence": "Version 0.1.0 serves the sim backend under the policy default.",
        "remedy": None,
    }


async def test_warnings_only_exit_with_five(node: Node, sockets: Path) -> None:
    (node.root / "run/nvidia-persistenced/nvidia-persistenced.pid").unlink()
    code, told = await asked("--socket", str(sockets), "--node-root", str(node.root))
    assert (code, told["verdict"]) == (5, "warning")


def test_without_the_service_everything_else_is_still_told(node: Node, short_tmp: Path) -> None:
    code, told = in_json(["--socket", str(short_tmp / "nowhere"), "--node-root", str(node.root)])
    assert (code, told["verdict"]) == (1, "error")
    assert [check["name"] for check in told["checks"] if check["level"] == "error"] == ["service"]
    assert "scrubber serve" in told["checks"][0]["sentence"]


def test_a_person_reads_what_to_do(node: Node, short_tmp: Path) -> None:
    write(node.root, TOOLKIT, "")
    words = ("--socket", str(short_tmp / "nowhere"), "--node-root", str(node.root))
    code, table = run(*words)
    assert (code, table.splitlines()[0].split()) == (1, ["LEVEL", "CHECK", "FOUND"])
    assert f"To do: Set {ENVVAR} = false" in table
    assert run(*words, "-o", "name") == (1, "service\ntoolkit-envvar\n")
