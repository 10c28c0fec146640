"""``scrubber doctor`` on pods that bypass the plugin: the container toolkit, and CDI names in annotations."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from scrubber.doctor.checks import check_node
from scrubber.doctor.model import CheckContext, CheckLevel
from tests.doctor.stage import CONTAINERD, ENVVAR, MOUNTS, TOOLKIT, found, healthy, write

OPERATORS = "usr/local/nvidia/toolkit/.config/nvidia-container-runtime/config.toml"


@pytest.fixture
def node(short_tmp: Path) -> Iterator[CheckContext]:
    with healthy(short_tmp) as node:
        yield node


# --- the container toolkit


@pytest.mark.parametrize(
    "text", ["", f"{ENVVAR} = true\n", f"{ENVVAR} = 'false'\n", f"#{ENVVAR} = false\n", f"[x]\n{ENVVAR} = false\n"]
)
def test_toolkit_that_lets_any_pod_request_gpus_is_an_error_that_names_the_option(
    node: CheckContext, text: str
) -> None:
    write(node.root, TOOLKIT, text)
    check = found(node, "toolkit-envvar")
    assert check.level is CheckLevel.ERROR
    assert "NVIDIA_VISIBLE_DEVICES=all" in check.message
    assert f"{ENVVAR} = false in {node.root / TOOLKIT}" in check.remedy


def test_toolkit_without_a_configuration_lets_any_pod_request_gpus(node: CheckContext) -> None:
    (node.root / TOOLKIT).unlink()
    write(node.root, "usr/bin/nvidia-container-runtime")
    check = found(node, "toolkit-envvar")
    assert check.level is CheckLevel.ERROR
    assert ENVVAR in check.remedy


def test_unreadable_toolkit_configuration_is_never_ok(node: CheckContext) -> None:
    write(node.root, TOOLKIT, f"{ENVVAR} = false\n= nonsense")
    assert found(node, "toolkit-envvar").level is CheckLevel.ERROR
    (node.root / TOOLKIT).unlink()
    (node.root / TOOLKIT).mkdir()
    assert "Is a directory" in found(node, "toolkit-envvar").message


@pytest.mark.parametrize(
    ("name", "file"), [("toolkit-envvar", TOOLKIT), ("cdi-annotations", CONTAINERD)], ids=["toolkit", "runtime"]
)
def test_file_that_is_missing_in_a_container_is_never_ok(node: CheckContext, name: str, file: str) -> None:
    (node.root / file).unlink()
    for root_of_init in (node.root / "proc", node.root / "unreadable"):
        check = found(replace(node, root_of_init=root_of_init), name)
        assert check.level is CheckLevel.WARNING
        assert "is unknown" in check.message
        assert "--node-root /proc/1/root" in check.remedy


def test_toolkit_that_is_missing_on_the_node_is_ok(node: CheckContext) -> None:
    (node.root / TOOLKIT).unlink()
    assert found(replace(node, root_of_init=node.root), "toolkit-envvar").level is CheckLevel.OK


def test_pid_1_of_another_namespace_proves_nothing_about_the_node(node: CheckContext) -> None:
    (node.root / TOOLKIT).unlink()
    (node.root / "proc/self/status").unlink()
    write(node.root, "proc/self/status", "NSpid:\t4711\t1\n")
    assert found(replace(node, root_of_init=node.root), "toolkit-envvar").level is CheckLevel.WARNING


def test_every_existing_toolkit_configuration_is_checked(node: CheckContext) -> None:
    write(node.root, OPERATORS, f"{ENVVAR} = true\n")
    levels = [(check.level, OPERATORS in check.message) for check in check_node(node) if check.name == "toolkit-envvar"]
    assert levels == [(CheckLevel.OK, False), (CheckLevel.ERROR, True)]


def test_toolkit_configuration_named_by_option_is_the_only_one_checked(node: CheckContext) -> None:
    write(node.root, "etc/other.toml", f"{ENVVAR} = true\n")
    assert found(replace(node, toolkit_configs=(Path("/etc/other.toml"),)), "toolkit-envvar").level is CheckLevel.ERROR
    assert (
        found(replace(node, toolkit_configs=(Path("/etc/missing.toml"),)), "toolkit-envvar").level is CheckLevel.ERROR
    )


@pytest.mark.parametrize("text", [f"{ENVVAR} = false\n", f"{ENVVAR} = false\n{MOUNTS} = false\n"])
def test_toolkit_that_accepts_no_request_form_requires_cdi(node: CheckContext, text: str) -> None:
    write(node.root, TOOLKIT, text)
    assert found(node, "toolkit-envvar").level is CheckLevel.OK
    check = found(node, "toolkit-volume-mounts")
    assert check.level is CheckLevel.WARNING
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
        ("etc/crio/crio.conf.d/00-default", "[crio.runtime.runtimes.crun]\nallowed_annotations"),
        ("etc/crio/crio.conf.d/10-gpus.conf", "[crio.runtime.runtimes.nvidia]\nallowed_annotations"),
    ],
)
def test_runtime_that_passes_cdi_annotations_of_pods_is_named(
    node: CheckContext, name: str, section: str, pattern: str
) -> None:
    write(node.root, CONTAINERD, "imports = ['/etc/containerd/conf.d/*.toml']\n")
    write(node.root, name, f"{section} = ['io.example/*', '{pattern}']\n")
    check = found(node, "cdi-annotations")
    assert check.level is CheckLevel.WARNING
    assert str(node.root / name) in check.message
    assert f'"{pattern}"' in check.message
    assert f"Remove that pattern from {section.splitlines()[-1]}" in check.remedy


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[plugins.x.runtimes.nvidia]\npod_annotations = ['io.katacontainers.*', 'sandbox/*']\n",
        # Written by plugins for their containers: the kubelet copies them, and no one else can write them.
        "[plugins.x.runtimes.nvidia]\ncontainer_annotations = ['cdi.k8s.io/*']\n",
    ],
)
def test_runtime_that_passes_no_cdi_annotations_is_ok(node: CheckContext, text: str) -> None:
    write(node.root, CONTAINERD, text)
    assert found(node, "cdi-annotations").level is CheckLevel.OK


def test_unreadable_runtime_configuration_is_never_ok(node: CheckContext) -> None:
    write(node.root, CONTAINERD, "= nonsense")
    check = found(node, "cdi-annotations")
    assert (check.level, "is unknown" in check.message) == (CheckLevel.WARNING, True)


@pytest.mark.parametrize(
    "text", ["imports = ['/none/**', 'a**b', '', '/x/\\u0000*', 7]\n", "imports = 7\n", "a = " + "[" * 5000]
)
def test_invalid_imports_of_a_runtime_configuration_are_not_followed(node: CheckContext, text: str) -> None:
    write(node.root, CONTAINERD, text)
    assert found(node, "cdi-annotations").remedy == ("" if "imports" in text else f"Fix {node.root / CONTAINERD}.")


def test_import_pattern_does_not_search_the_whole_file_system(node: CheckContext) -> None:
    write(node.root, "etc/far/below/x.toml", "[x]\npod_annotations = ['*']\n")
    write(node.root, CONTAINERD, "imports = ['/etc/**/x.toml']\n")
    assert found(node, "cdi-annotations").level is CheckLevel.OK


def test_numbers_too_long_to_be_printed_are_no_patterns_and_no_values(node: CheckContext) -> None:
    number = "0x" + "f" * 5000
    write(node.root, CONTAINERD, f"imports = [{number}]\n[x]\npod_annotations = [{number}]\n")
    assert found(node, "cdi-annotations").level is CheckLevel.OK
    write(node.root, TOOLKIT, f"{ENVVAR} = {number}\n")
    assert "something other than false" in found(node, "toolkit-envvar").message


# --- the NRI plugin of the toolkit


def process(root: Path, pid: int, name: str, *, environ: str = "", cmdline: str = "nvidia-ctk-installer\0") -> None:
    write(root, f"proc/{pid}/comm", f"{name}\n")
    write(root, f"proc/{pid}/environ", environ)
    write(root, f"proc/{pid}/cmdline", cmdline)


@pytest.mark.parametrize("name", ["nvidia-ctk-inst", "nvidia-toolkit"])
@pytest.mark.parametrize(
    "set_by",
    [
        {"environ": "A=b\0ENABLE_NRI_PLUGIN=true\0NRI_NAMESPACE=gpu-operator\0"},
        {"environ": "ENABLE_NRI_PLUGIN=1\0"},
        {"cmdline": "nvidia-ctk-installer\0--enable-nri-plugin\0"},
        {"cmdline": "nvidia-ctk-installer\0--enable-nri-plugin=true\0--no-daemon=false\0"},
    ],
)
def test_nri_plugin_that_injects_for_any_pod_is_reported(node: CheckContext, name: str, set_by: dict[str, str]) -> None:
    process(node.root, 4711, name, **set_by)
    check = found(node, "nri-annotations")
    assert check.level is CheckLevel.WARNING
    assert "PID 4711" in check.message
    assert "deploy/kubernetes/admission" in check.remedy


@pytest.mark.parametrize(
    "set_by",
    [
        {},
        {"environ": "ENABLE_NRI_PLUGIN=false\0"},
        {"environ": "X_ENABLE_NRI_PLUGIN=true\0"},
        {"environ": "ENABLE_NRI_PLUGIN=truely\0"},
        {"cmdline": "nvidia-ctk-installer\0--enable-nri-plugin=false\0"},
    ],
)
def test_toolkit_container_without_its_nri_plugin_is_ok(node: CheckContext, set_by: dict[str, str]) -> None:
    process(node.root, 4711, "nvidia-ctk-inst", **set_by)
    assert found(node, "nri-annotations").level is CheckLevel.OK


def test_other_processes_are_not_taken_for_the_nri_plugin(node: CheckContext) -> None:
    process(node.root, 4711, "python3", environ="ENABLE_NRI_PLUGIN=true\0")
    (node.root / "proc/4712").mkdir()  # it has just ended
    assert found(node, "nri-annotations").level is CheckLevel.OK


@pytest.mark.parametrize(
    ("namespace", "capabilities"), [("user:[1]", "00000000a80425fb"), ("user:[2]", "000001ffffffffff")]
)
def test_process_of_a_tenant_with_the_name_of_the_toolkit_is_not_taken_for_its_nri_plugin(
    node: CheckContext, namespace: str, capabilities: str
) -> None:
    process(node.root, 4711, "nvidia-toolkit", environ="ENABLE_NRI_PLUGIN=true\0")
    for pid, user in ((1, "user:[1]"), (4711, namespace)):
        (node.root / f"proc/{pid}/ns").mkdir(parents=True, exist_ok=True)
        (node.root / f"proc/{pid}/ns/user").symlink_to(user)
    write(node.root, "proc/4711/status", f"Name:\tnvidia-toolkit\nCapEff:\t{capabilities}\n")
    assert found(node, "nri-annotations").level is CheckLevel.OK
    write(node.root, "proc/4711/status", "Name:\tnvidia-toolkit\nCapEff:\t000001ffffffffff\n")
    (node.root / "proc/4711/ns/user").unlink()
    (node.root / "proc/4711/ns/user").symlink_to("user:[1]")
    assert found(node, "nri-annotations").level is CheckLevel.WARNING, "the toolkit's container is privileged"


def test_unreadable_toolkit_process_is_never_ok(node: CheckContext) -> None:
    process(node.root, 4711, "nvidia-ctk-inst")
    (node.root / "proc/4711/environ").unlink()
    (node.root / "proc/4711/environ").mkdir()
    check = found(node, "nri-annotations")
    assert (check.level, "is unknown" in check.message) == (CheckLevel.WARNING, True)
