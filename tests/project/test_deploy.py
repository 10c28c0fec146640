"""Deployment files: manifests, units and the image give each program what it needs, and the plugin nothing more.

Nothing here starts a cluster. The files are compared with the programs that they start: their flags, paths and
deadlines.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from plugin.kubelet.registration import KubeletPaths
from plugin.main import PluginSettings
from plugin.nvidia.settings import DRIVER_ROOT_MOUNT
from scripts.build_image import PROGRAM
from scrubber.adapters.kubelet.checkpoint import CHECKPOINT
from scrubber.adapters.nvidia.driver_paths import DriverPaths
from scrubber.api.sockets import Purpose, Sockets
from scrubber.backends import BACKENDS
from scrubber.cli.command_tree import app
from scrubber.cli.commands.plugin import RegistrationChoice
from scrubber.config.policy_file import load_policy
from scrubber.config.settings import Address, ServiceSettings
from scrubber.observability.probes import CONNECTION_TIMEOUT
from scrubber.observability.systemd import DEFAULT_WATCHDOG_INTERVAL
from tests.deployed import (
    BASE,
    CDI,
    DEPLOY,
    GPU_OPERATOR,
    PLUGIN,
    ROOT,
    SERVICE,
    UNITS,
    Workload,
    documents,
    environment_of,
    mounts,
    unit,
    value_of,
    workload,
    yaml_of,
)

NVSENTINEL = DEPLOY / "kubernetes" / "nvsentinel"
PAGE = (ROOT / "docs" / "deploying.md").read_text()
NOT_OURS = {"NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "POD_IP"}
"""Variables that NVIDIA's container runtime or the kubelet reads, and neither of our programs."""


def parsed(
    words: list[str], monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> tuple[str, dict[str, Any]]:
    """Return the command and its values, by the real parser; unknown arguments fail."""
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    command = group.commands[words[0]]
    known = {
        each
        for option in command.params
        for each in ([option.envvar] if isinstance(option.envvar, str) else option.envvar or ())
    }
    for name in known:
        monkeypatch.delenv(name, raising=False)
    assert set(environment) - NOT_OURS <= known
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return words[0], command.make_context(words[0], words[1:]).params


# --- the plugin ------------------------------------------------------------------------------------------------------


def needed_by_the_plugin() -> set[tuple[str, str, str]]:
    """Return the mounts by the program's defaults: its socket directory of the service, and the kubelet's."""
    settings = PluginSettings()
    kubelet = KubeletPaths(settings.kubelet_dir, "nvidia.com/gpu")
    own = str(Sockets(settings.socket).path(Purpose.PLUGIN).parent)
    return {(own, own, "ro"), (str(kubelet.device_plugins), str(kubelet.device_plugins), "rw")}


def test_plugin_manifest_mounts_exactly_the_needed_paths() -> None:
    assert mounts(PLUGIN) == needed_by_the_plugin()
    assert {path for path, _, _ in mounts(PLUGIN)} == {"/run/scrubber/plugin", "/var/lib/kubelet/device-plugins"}
    for each in PLUGIN.container["volumeMounts"]:
        assert set(each) <= {"name", "mountPath", "readOnly"}  # no propagation, no subpath of a volume
    assert [each for each in PLUGIN.pod["volumes"] if set(each) != {"name", "hostPath"}] == []
    assert len(PLUGIN.pod["volumes"]) == len(PLUGIN.container["volumeMounts"])


def test_cdi_overlay_adds_mounts_for_cdi_specifications_and_driver_files_only() -> None:
    found = mounts(workload("scrubber-plugin", CDI))
    assert found > mounts(PLUGIN)
    written = str(PluginSettings().nvidia.cdi_directory)
    assert found - mounts(PLUGIN) == {(written, written, "rw"), ("/usr", f"{DRIVER_ROOT_MOUNT}/usr", "ro")}
    assert workload("scrubber", CDI) == SERVICE


@pytest.mark.parametrize("directory", [BASE, CDI, GPU_OPERATOR])
def test_plugin_container_runs_as_root_without_capabilities_in_its_own_namespaces(directory: Path) -> None:
    of = workload("scrubber-plugin", directory)
    assert of.pod["securityContext"] == {"runAsUser": 0, "runAsGroup": 0, "seccompProfile": {"type": "RuntimeDefault"}}
    assert of.container["securityContext"] == {
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostPID", "hostNetwork", "hostIPC", "hostUsers", "shareProcessNamespace"} & set(of.pod)
    assert "ephemeralContainers" not in of.pod
    assert ("initContainers" in of.pod) is (directory == GPU_OPERATOR)


def test_plugin_unit_is_as_confined_as_the_plugin_container() -> None:
    directives = unit("scrubber-plugin.service")
    assert directives["CapabilityBoundingSet"] == [""]
    assert "AmbientCapabilities" not in directives
    assert directives["BindPaths"] == [" ".join(sorted(path for path, _, _ in needed_by_the_plugin()))]
    assert directives["TemporaryFileSystem"] == ["/run:ro /var:ro"]
    assert directives["ProtectSystem"] == ["strict"]
    assert directives["BindReadOnlyPaths"] == ["/run/systemd/notify"]  # where the service manager expects READY
    assert "ReadWritePaths" not in directives
    for directive in ("NoNewPrivileges", "PrivateDevices", "PrivateNetwork", "ProtectHome", "ProtectKernelModules"):
        assert directives[directive] == ["yes"], directive


def test_deployments_do_not_use_the_envvar_list_strategy() -> None:
    assert environment_of(PLUGIN)["DEVICE_LIST_STRATEGY"] == "volume-mounts"
    assert environment_of(workload("scrubber-plugin", CDI))["DEVICE_LIST_STRATEGY"] == "cdi-cri"
    assert unit("scrubber-plugin.service")["Environment"] == ["DEVICE_LIST_STRATEGY=volume-mounts"]


def test_nvsentinel_component_adds_only_its_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    now = workload("scrubber-plugin", NVSENTINEL)
    directory = "/var/run/nvsentinel"
    assert mounts(now) - mounts(PLUGIN) == {(directory, directory, "ro")}
    service, journal = workload("scrubber", NVSENTINEL), "/run/systemd/journal"
    assert mounts(service) - mounts(SERVICE) == {(journal, journal, "ro")}
    _, values = parsed(service.container["args"], monkeypatch, environment_of(service))
    assert values["nvsentinel_reset_journal"] == Path(journal) / "socket"
    assert len(service.container["env"]) == len(SERVICE.container["env"]) + 1
    _, values = parsed(now.container["args"], monkeypatch, environment_of(now))
    assert values["nvsentinel_socket"] == Path(directory) / "nvsentinel.sock"
    assert values["nvsentinel_strategy"] == "store-only"
    assert values["node_name"]
    added = environment_of(now).keys() - environment_of(PLUGIN).keys()
    assert added == {"SCRUBBER_NVSENTINEL_SOCKET"}
    assert set(yaml_of(NVSENTINEL)) == {"apiVersion", "kind", "patches"}


# --- the service -----------------------------------------------------------------------------------------------------


def test_service_manifest_mounts_exactly_the_paths_of_its_settings() -> None:
    settings = ServiceSettings(backend=BACKENDS["nvidia"])
    read = [
        settings.pod_resources_socket.parent,
        (settings.kubelet_dir / CHECKPOINT).parent,
        settings.pod_logs_dir,
    ]
    written = [settings.socket_dir, settings.state_dir, DriverPaths().dev, DriverPaths().sys / "fs" / "cgroup"]
    assert mounts(SERVICE) == {
        *((str(path), str(path), "ro") for path in read),
        *((str(path), str(path), "rw") for path in written),
    }


def test_service_container_shares_the_nodes_process_namespace() -> None:
    assert SERVICE.pod["hostPID"] is True
    assert SERVICE.container["securityContext"] == {"runAsUser": 0, "runAsGroup": 0, "privileged": True}
    assert not {"hostNetwork", "hostIPC", "hostUsers", "shareProcessNamespace"} & set(SERVICE.pod)
    (name,) = [each for each in SERVICE.container["env"] if each["name"] == "SCRUBBER_NODE_NAME"]
    assert name["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    # With the node's /dev mounted, the default would be a file in it.
    assert not SERVICE.container["terminationMessagePath"].startswith("/dev/")


def test_service_unit_allows_everything_that_the_service_needs() -> None:
    directives = unit("scrubber.service")
    closed = {
        "PrivateDevices",
        "DeviceAllow",
        "DevicePolicy",
        "ProtectClock",
    }  # each denies /dev/nvidia*
    blind = {"ProtectProc", "ProcSubset", "PrivatePIDs", "PrivateUsers", "PrivateNetwork", "RootDirectory", "User"}
    assert not closed & set(directives)
    assert blind & set(directives) == {"User"}
    assert directives["User"] == ["root"]
    assert directives["ProtectControlGroups"] == directives["ProtectKernelTunables"] == ["no"]
    assert not {"CapabilityBoundingSet", "MemoryDenyWriteExecute", "ProtectKernelModules", "MemoryMax"} & set(
        directives
    )


def test_service_unit_creates_the_directories_that_the_service_uses() -> None:
    directives, settings = unit("scrubber.service"), ServiceSettings(backend=BACKENDS["nvidia"])
    assert (
        f"/var/lib/{directives['StateDirectory'][0]}" == str(settings.state_dir) == directives["RequiresMountsFor"][0]
    )
    assert f"/run/{directives['RuntimeDirectory'][0]}" == str(settings.socket_dir)
    assert directives["StateDirectoryMode"] == ["0700"]
    # A pod has a directory below it mounted, and would keep a removed one.
    assert directives["RuntimeDirectoryPreserve"] == ["yes"]


def test_stop_timeout_outlasts_a_reset_and_no_eraser_survives_a_stop() -> None:
    directives = unit("scrubber.service")
    assert directives["KillMode"] == ["mixed"]  # SIGTERM to the service alone, then SIGKILL to the rest of its cgroup
    reset = load_policy("default").limits.reset
    assert SERVICE.pod["terminationGracePeriodSeconds"] >= 2 * reset
    assert int(directives["TimeoutStopSec"][0].removesuffix("s")) >= 2 * reset


# --- both ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "of",
    [SERVICE, PLUGIN, *(workload("scrubber-plugin", each) for each in (CDI, GPU_OPERATOR))],
    ids=["service", "plugin", "cdi", "gpu-operator"],
)
class TestBothWorkloads:
    def test_workload_flags_and_variables_are_valid_for_its_program(
        self, of: Workload, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        command, values = parsed(of.container["args"], monkeypatch, environment_of(of))
        assert command == ("serve" if of.pod.get("hostPID") else "plugin")
        if command == "serve":
            assert values["backend"] == ["nvidia"]
        else:  # the only way to register that its mounts permit
            assert values["registration"] is RegistrationChoice.CLASSIC
        assert "command" not in of.container  # the image's entry point

    def test_workload_has_no_token_and_no_service_links(self, of: Workload) -> None:
        assert of.pod["automountServiceAccountToken"] is False
        assert of.pod["enableServiceLinks"] is False
        (account,) = [
            each
            for each in documents()
            if (each["kind"], value_of(each, "name")) == ("ServiceAccount", of.pod["serviceAccountName"])
        ]
        assert account["automountServiceAccountToken"] is False

    def test_workload_tolerates_all_taints_and_has_node_critical_priority(self, of: Workload) -> None:
        assert of.pod["priorityClassName"] == "system-node-critical"
        assert of.pod["tolerations"] == [{"operator": "Exists"}]
        assert set(of.container["resources"]["requests"]) == {"cpu", "memory"}
        assert "cpu" not in of.container["resources"].get("limits", {})  # a throttled gate answers late

    def test_an_update_starts_a_second_plugin_beside_the_first_and_never_a_second_service(self, of: Workload) -> None:
        service = bool(of.pod.get("hostPID"))
        expected = {"maxUnavailable": 1, "maxSurge": 0} if service else {"maxUnavailable": 0, "maxSurge": 1}
        assert of.whole["spec"]["updateStrategy"] == {"type": "RollingUpdate", "rollingUpdate": expected}

    def test_workload_selector_matches_its_own_pods_only(self, of: Workload) -> None:
        labels = of.whole["spec"]["template"]["metadata"]["labels"]
        assert of.whole["spec"]["selector"] == {"matchLabels": labels}
        assert labels["app.kubernetes.io/component"] == ("service" if of.pod.get("hostPID") else "plugin")

    def test_workload_image_is_a_placeholder(self, of: Workload) -> None:
        assert of.container["image"] == "scrubber:VERSION"

    def test_deployment_page_explains_each_mount(self, of: Workload) -> None:
        for path, _, _ in mounts(of):
            assert re.search(rf"^\| `{re.escape(path)}` \| .{{20,}} \|$", PAGE, re.MULTILINE), path


@pytest.mark.parametrize(
    "of",
    [SERVICE, PLUGIN, workload("scrubber-plugin", CDI), workload("scrubber-plugin", GPU_OPERATOR)],
    ids=["service", "plugin", "cdi", "gpu-operator"],
)
def test_kubelet_probes_the_address_that_the_program_serves(of: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    _, values = parsed(of.container["args"], monkeypatch, environment_of(of))
    address = Address.parse(values["probe_address"])
    assert address is not None
    assert address.host == "$(POD_IP)"  # an instance serves its own pod's address only, and the kubelet probes that
    assert {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}} in of.container["env"]
    names = [each["name"] for each in of.container["env"]]
    assert names.index("POD_IP") < min(names.index(each) for each in names if each.endswith("PROBE_ADDRESS"))
    probes = {name: of.container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    # Only the readiness depends on anything but the event loop: waiting for another program is no reason for a restart.
    assert probes == {
        "startupProbe": {"path": "/livez", "port": address.port},
        "livenessProbe": {"path": "/livez", "port": address.port},
        "readinessProbe": {"path": "/readyz", "port": address.port},
    }


@pytest.mark.parametrize(("of", "name"), [(SERVICE, "scrubber.service"), (PLUGIN, "scrubber-plugin.service")])
def test_systemd_watchdog_and_liveness_probe_tolerate_a_stall_of_half_a_minute(of: Workload, name: str) -> None:
    directives, probe = unit(name), of.container["livenessProbe"]
    assert directives["Type"] == ["notify"]
    assert int(directives["WatchdogSec"][0].removesuffix("s")) == 30 >= 4 * DEFAULT_WATCHDOG_INTERVAL
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 30
    assert probe["timeoutSeconds"] >= CONNECTION_TIMEOUT


def test_plugin_instances_use_no_host_port() -> None:
    for directory in (BASE, CDI, GPU_OPERATOR, DEPLOY / "kubernetes" / "metrics"):
        of = workload("scrubber-plugin", directory)
        assert "hostNetwork" not in of.pod
        assert all("hostPort" not in each for each in of.container.get("ports", []))


@pytest.mark.parametrize("name", sorted(UNITS))
def test_systemd_unit_starts_an_existing_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    directives = unit(name)
    ((program, *words),) = [line.split() for line in directives["ExecStart"]]
    environment = dict(line.split("=", 1) for line in directives.get("Environment", []))
    command, values = parsed(words, monkeypatch, environment)
    assert values.get("registration", RegistrationChoice.CLASSIC) is RegistrationChoice.CLASSIC
    assert program == PROGRAM == "/opt/scrubber/bin/scrubber"  # which is also the entry point of the image
    assert command == {"scrubber.service": "serve", "scrubber-plugin.service": "plugin"}[name]
    assert directives["Restart"] == ["always"]
    assert directives["StartLimitIntervalSec"] == ["0"]
    assert directives["LimitCORE"] == ["0"]  # a core dump would contain a tenant's bytes
    assert int(directives["OOMScoreAdjust"][0]) <= -900
    assert {"LimitNOFILE", "TasksMax"} <= set(directives)


def test_killing_an_eraser_for_lack_of_memory_does_not_end_the_service() -> None:
    assert "memory" not in SERVICE.container["resources"].get(
        "limits", {}
    )  # the kernel would kill the container as a whole
    directives = unit("scrubber.service")
    assert directives["OOMPolicy"] == ["continue"]
    assert not {"MemoryMax", "MemoryHigh", "MemoryLimit"} & set(directives)


def test_deployment_page_states_that_no_real_gpu_node_was_tested() -> None:
    assert "a node with a real GPU has not been tried.**" in PAGE
    for name in [*UNITS, "kubernetes/base", "kubernetes/cdi", "make image"]:
        assert name in PAGE
