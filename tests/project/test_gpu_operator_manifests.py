"""The overlay and the components for nodes of NVIDIA's GPU Operator.

Nothing here starts a cluster: what the operator does with labels, annotations and files is read from its source.
"""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest

from plugin.nvidia.container_runtime import CONTAINERD_FILES, CRIO_DROP_INS, CRIO_FILE, TOOLKIT_FILES
from plugin.nvidia.driver_files import HOOK_DIRECTORIES, SOCKETS
from plugin.nvidia.injection import ListStrategy, parse_list_strategies
from plugin.nvidia.settings import HOST_MOUNT
from scrubber.cli.commands.plugin import RegistrationChoice
from tests.deployed import (
    BASE,
    CDI,
    DEPLOY,
    GPU_OPERATOR,
    PLUGIN,
    ROOT,
    SERVICE,
    documents,
    environment_of,
    mounts,
    patch_all,
    value_of,
    workload,
)
from tests.plugin_collaborators import DEADLINE
from tests.project.test_deploy import parsed

OF_PLUGIN, OF_SERVICE = workload("scrubber-plugin", GPU_OPERATOR), workload("scrubber", GPU_OPERATOR)
PAGE = (ROOT / "docs" / "deploying.md").read_text()
READY = "/run/nvidia/validations/toolkit-ready"
VALIDATED = "/run/nvidia/validations/driver-ready"
"""Files of the operator's validator."""


def with_component(name: str, directory: Path = GPU_OPERATOR) -> dict[str, dict[str, Any]]:
    """Return the workloads of ``directory`` with a component: name → object."""
    found = copy.deepcopy(documents(directory))
    patch_all(found, DEPLOY / "kubernetes" / name)
    return {value_of(each, "name"): each for each in found if each["kind"] == "DaemonSet"}


def test_overlay_passes_devices_by_both_cdi_strategies() -> None:
    strategies = environment_of(OF_PLUGIN)["DEVICE_LIST_STRATEGY"]
    assert parse_list_strategies([strategies], "test") == (ListStrategy.CDI_ANNOTATIONS, ListStrategy.CDI_CRI)


def test_overlay_takes_the_driver_from_the_validators_file(monkeypatch: pytest.MonkeyPatch) -> None:
    command, values = parsed(OF_PLUGIN.container["args"], monkeypatch, environment_of(OF_PLUGIN))
    assert command == "plugin"
    assert values["registration"] is RegistrationChoice.CLASSIC
    assert values["driver_ready_file"] == Path(VALIDATED)
    assert not {"NVIDIA_DRIVER_ROOT", "NVIDIA_CDI_HOOK_PATH"} & environment_of(OF_PLUGIN).keys()


def test_overlay_mounts_the_parent_of_the_drivers_root_so_that_a_new_driver_container_becomes_visible() -> None:
    added = mounts(OF_PLUGIN) - mounts(PLUGIN)
    assert added == {
        ("/run/nvidia", "/run/nvidia", "ro"),
        ("/usr", f"{HOST_MOUNT}/usr", "ro"),
        ("/etc/containerd", f"{HOST_MOUNT}/etc/containerd", "ro"),
        ("/etc/crio", f"{HOST_MOUNT}/etc/crio", "ro"),
        ("/run/nvidia-fabricmanager", f"{HOST_MOUNT}/run/nvidia-fabricmanager", "ro"),
        ("/var/run/cdi", "/var/run/cdi", "rw"),
    }
    for container in (OF_PLUGIN.container, *OF_PLUGIN.pod["initContainers"], *OF_SERVICE.pod["initContainers"]):
        (mount,) = [each for each in container["volumeMounts"] if each["name"] == "run-nvidia"]
        assert mount["mountPropagation"] == "HostToContainer"


def test_overlay_shows_the_plugin_what_it_looks_for_on_the_host() -> None:
    shown = {to.removeprefix(f"{HOST_MOUNT}/") for _, to, _ in mounts(OF_PLUGIN) if to.startswith(f"{HOST_MOUNT}/")}
    sockets = (f"run/{name}" for name in SOCKETS)
    hooks = (f"{place}/nvidia-cdi-hook" for place in HOOK_DIRECTORIES)
    for name in (CONTAINERD_FILES[0], CRIO_FILE, CRIO_DROP_INS, TOOLKIT_FILES[0], *hooks, *sockets):
        assert any(Path(name).is_relative_to(place) for place in shown), name


def test_overlay_changes_nothing_in_the_services_container() -> None:
    assert OF_SERVICE.container == SERVICE.container
    assert {**OF_SERVICE.pod, "initContainers": [], "volumes": []} == {
        **SERVICE.pod,
        "initContainers": [],
        "volumes": [],
    }


@pytest.mark.parametrize("of", [OF_PLUGIN, OF_SERVICE], ids=["plugin", "service"])
def test_init_container_is_confined_and_mounts_only_the_operators_directory(of: Any) -> None:
    (container,) = of.pod["initContainers"]
    assert container["image"] == "scrubber:VERSION"
    assert container["securityContext"] == PLUGIN.container["securityContext"]
    assert [(each["mountPath"], each["readOnly"]) for each in container["volumeMounts"]] == [("/run/nvidia", True)]
    # A liveness check of that file would end a pod whenever the validator restarts.
    assert READY not in str({key: value for key, value in of.container.items() if "Probe" in key})


async def run_init(of: Any, directory: Path) -> asyncio.subprocess.Process:
    """Start the init container's own command, with its directory below ``directory``."""
    (container,) = of.pod["initContainers"]
    words = [word.replace(READY, str(directory / "toolkit-ready")) for word in container["command"]]
    assert words != container["command"]
    return await asyncio.create_subprocess_exec(*words)


@pytest.mark.parametrize("of", [OF_PLUGIN, OF_SERVICE], ids=["plugin", "service"])
async def test_init_container_waits_for_the_toolkit_and_ends_at_once_when_its_pod_is_deleted(
    of: Any, tmp_path: Path
) -> None:
    async with asyncio.timeout(DEADLINE):
        waiting = await run_init(of, tmp_path)
        await sleeps(waiting)
        waiting.terminate()
        assert await waiting.wait() == 1
        waiting = await run_init(of, tmp_path)
        (tmp_path / "toolkit-ready").touch()
        assert await waiting.wait() == 0


async def sleeps(process: asyncio.subprocess.Process) -> None:
    """Return once the shell waits, with its trap set."""
    while True:
        if b"sleep" in b"".join(_commands_of_children(process.pid)):
            return
        await asyncio.sleep(0.01)


def _commands_of_children(pid: int) -> list[bytes]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = []
    for child in children:
        try:
            found.append(Path(f"/proc/{child}/cmdline").read_bytes())
        except OSError:  # it has ended
            continue
    return found


@pytest.mark.parametrize("directory", [BASE, CDI, GPU_OPERATOR])
@pytest.mark.parametrize(
    ("component", "label"),
    [
        ("gpu-operator-client-label", "nvidia.com/gpu.deploy.client"),
        ("gpu-operator-plugin-label", "nvidia.com/gpu.deploy.device-plugin"),
    ],
)
def test_label_component_lets_the_operator_end_both_pods_before_it_replaces_the_driver(
    component: str, label: str, directory: Path
) -> None:
    found = with_component(component, directory)
    assert set(found) == {"scrubber", "scrubber-plugin"}
    for name, whole in found.items():
        before = workload(name, directory).whole
        selector = whole["spec"]["template"]["spec"]["nodeSelector"]
        assert selector == {**before["spec"]["template"]["spec"]["nodeSelector"], label: "true"}
        del selector[label]
        if name == "scrubber":  # what `scrubber doctor` reads
            env = whole["spec"]["template"]["spec"]["containers"][0]["env"]
            assert env.pop() == {"name": "SCRUBBER_DEPLOY_LABEL", "value": label}
        assert whole == before


def test_nri_component_gives_the_service_the_driver_without_a_runtime_class() -> None:
    found = with_component("gpu-operator-nri")
    template = found["scrubber"]["spec"]["template"]
    assert "runtimeClassName" not in template["spec"]
    assert template["metadata"].pop("annotations") == {
        f"nvidia.cdi.k8s.io/container.{SERVICE.container['name']}": "management.nvidia.com/gpu=all"
    }
    assert {**template["spec"], "runtimeClassName": "nvidia"} == OF_SERVICE.pod
    assert found["scrubber-plugin"] == OF_PLUGIN.whole


@pytest.mark.parametrize(
    "name", ["gpu-operator", "gpu-operator-client-label", "gpu-operator-plugin-label", "gpu-operator-nri"]
)
def test_deployment_page_describes_each_operator_kustomization(name: str) -> None:
    assert f"| `{name}` |" in PAGE
