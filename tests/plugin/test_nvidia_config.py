"""Configuration written for NVIDIA's plugin: which source takes precedence, and what is refused with its line."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path, PurePosixPath

import pytest

from plugin.kubelet.resources import MigStrategy
from plugin.kubelet.shares import SharePreference, TimeSlicing
from plugin.nvidia.driver_files import CdiHook, DriverRoot
from plugin.nvidia.injection import Feature, IdStrategy, ListStrategy
from plugin.nvidia.settings import (
    NvidiaOptions,
    NvidiaPluginSettings,
    health_check_warning,
    index_warning,
    kubelet_dir_of,
    options_from_flags,
    read_config_file,
    resolve_settings,
)
from scrubber.domain.errors import InvalidConfiguration
from tests.gpus import install_driver

WHOLE = """\
version: v1
flags:
  migStrategy: "mixed"
  failOnInitError: false
  nvidiaDriverRoot: "/run/nvidia/driver"
  nvidiaDevRoot: "/"
  gdsEnabled: true
  mpsRoot: "/run/nvidia/mps"
  deviceDiscoveryStrategy: auto
  plugin:
    passDeviceSpecs: true
    deviceListStrategy:
      - volume-mounts
      - cdi-cri
    deviceIDStrategy: "index"
    cdiAnnotationPrefix: cdi.example.com/
    nvidiaCTKPath: /usr/local/bin/nvidia-ctk
    containerDriverRoot: /seen
    sharedDevicesAllocationPolicy: packed
  gfd:
    oneshot: false
resources:
  gpus:
    - pattern: "*"
      name: nvidia.com/gpu
  mig:
    - pattern: "1g.10gb+me"
      name: mig-1g.10gb.me
sharing:
  timeSlicing:
    renameByDefault: true
    failRequestsGreaterThanOne: true
    resources:
      - name: nvidia.com/gpu
        replicas: 4
        rename: nvidia.com/gpu.shared
        devices: all
      - name: mig-1g.10gb.me
        replicas: 2
  mps: {resources: []}
imex: {}
"""


def config(directory: Path, text: str) -> Path:
    path = directory / "config.yaml"
    path.write_text(text)
    return path


def refusal(directory: Path, text: str) -> str:
    with pytest.raises(InvalidConfiguration) as caught:
        read_config_file(config(directory, text))
    return str(caught.value).replace(str(directory), "DIR")


def test_complete_nvidia_configuration_file_is_read(tmp_path: Path) -> None:
    assert read_config_file(config(tmp_path, WHOLE)) == NvidiaOptions(
        list_strategies=(ListStrategy.VOLUME_MOUNTS, ListStrategy.CDI_CRI),
        ids=IdStrategy.INDEX,
        pass_device_specs=True,
        driver_root=PurePosixPath("/run/nvidia/driver"),
        dev_root=PurePosixPath("/"),
        driver_root_ctr_path=Path("/seen"),
        mig=MigStrategy.MIXED,
        annotation_prefix="cdi.example.com/",
        hook="/usr/local/bin/nvidia-ctk",
        fail_on_init_error=False,
        gds=True,
        sharing=TimeSlicing(
            {"nvidia.com/gpu": 4, "nvidia.com/mig-1g.10gb.me": 2},
            use_shared_suffix=True,
            single_share_only=True,
        ),
        share_preference=SharePreference.PACKED,
    )


def test_every_setting_of_the_nvidia_configuration_file_has_an_option(tmp_path: Path) -> None:
    written = read_config_file(config(tmp_path, WHOLE))
    unset = {each.name for each in dataclasses.fields(NvidiaOptions) if getattr(written, each.name) is None}
    assert unset == {"gdrcopy", "mofed", "cdi_features", "disabled_cdi_hooks", "ignored"}


def test_example_of_nvidias_documentation_gives_the_defaults(tmp_path: Path) -> None:
    path = config(
        tmp_path,
        """\
version: v1
flags:
  migStrategy: "none"
  failOnInitError: true
  nvidiaDriverRoot: "/"
  plugin:
    passDeviceSpecs: false
    deviceListStrategy: "envvar"
    deviceIDStrategy: "uuid"
""",
    )
    nowhere = tmp_path / "nowhere"
    assert (
        resolve_settings(NvidiaOptions(), path, mounted_root=nowhere)
        == resolve_settings(NvidiaOptions(), mounted_root=nowhere)
        == NvidiaPluginSettings()
    )


def test_nvidia_configuration_file_may_be_json(tmp_path: Path) -> None:
    assert read_config_file(config(tmp_path, '{"version": "v1", "flags": {"migStrategy": "single"}}')) == NvidiaOptions(
        mig=MigStrategy.SINGLE
    )


def test_flags_and_variables_override_single_settings_of_the_file(tmp_path: Path) -> None:
    path = config(tmp_path, "flags: {migStrategy: mixed, failOnInitError: true, plugin: {deviceIDStrategy: index}}")
    settings = resolve_settings(options_from_flags(mig="single", fail_on_init_error=False), path)
    assert settings.mig is MigStrategy.SINGLE
    assert not settings.fail_on_init_error
    assert settings.injection.ids is IdStrategy.INDEX


def test_explicit_false_overrides_true_in_the_file(tmp_path: Path) -> None:
    path = config(tmp_path, "flags: {plugin: {passDeviceSpecs: true}}")
    assert resolve_settings(NvidiaOptions(), path).injection.pass_device_specs
    assert not resolve_settings(options_from_flags(pass_device_specs=False), path).injection.pass_device_specs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version: v2", 'DIR/config.yaml:1: version is "v2"; only v1 is supported.'),
        (
            "flags:\n  migStrategy: half",
            'DIR/config.yaml:2: flags.migStrategy is "half"; use one of: none, single, mixed.',
        ),
        ("flags:\n  failOnInitError: yes", 'DIR/config.yaml:2: flags.failOnInitError is "yes"; use true or false.'),
        (
            "flags:\n  nvidiaDriverRoot: run",
            'DIR/config.yaml:2: flags.nvidiaDriverRoot is "run"; use a path that begins with /.',
        ),
        (
            "flags:\n  plugin:\n    deviceListStrategy: envvar,mount",
            'DIR/config.yaml:3: flags.plugin.deviceListStrategy: "mount" is not a way to pass devices. Use one or more',
        ),
        ("flags:\n  plugin: cdi-cri", "DIR/config.yaml:2: flags.plugin must be a mapping of keys to values."),
        (
            "flags:\n  deviceDiscoveryStrategy: tegra",
            "DIR/config.yaml:2: flags.deviceDiscoveryStrategy must be auto or nvml: the scrub service uses NVML.",
        ),
        (
            "sharing:\n  mps:\n    resources:\n      - {name: nvidia.com/gpu, replicas: 2}",
            "DIR/config.yaml:2: sharing.mps requests MPS, which is not supported: the service does not scrub",
        ),
        (
            'resources:\n  gpus:\n    - pattern: "A100*"\n      name: a100',
            "DIR/config.yaml:3: resources.gpus.0 renames A100* to a100, but this file cannot rename resources",
        ),
        ("imex: {channelIDs: [0]}", "DIR/config.yaml:1: imex requests IMEX channels"),
        (
            "sharing:\n  timeSlicing:\n    resources: {name: nvidia.com/gpu, replicas: 4}",
            "DIR/config.yaml:3: sharing.timeSlicing.resources must be a list of entries with name and replicas.",
        ),
        (
            "sharing:\n  timeslicing:\n    replicas: 4",
            "DIR/config.yaml:2: sharing.timeslicing is not a known key; known are mps, timeSlicing.",
        ),
        ('sharing: {"a\\nb": 4}', "DIR/config.yaml:1: sharing.a\\nb is not a known key"),
        ("sharing: {mps: true}", "DIR/config.yaml:1: sharing.mps must be a mapping of keys to values."),
        (
            "resources:\n  gpus: {pattern: A100, name: a100}",
            "DIR/config.yaml:2: resources.gpus must be a list of entries with pattern and name.",
        ),
        (
            "flags:\n  plugin:\n    nvidiaCTKPath: nvidia-ctk",
            'DIR/config.yaml:3: flags.plugin.nvidiaCTKPath is "nvidia-ctk"; use a path that begins with /.',
        ),
        ("version: " + "9" * 5000, "DIR/config.yaml:1: the number 99999999999999999999… has 5000 digits"),
        ("- version", "DIR/config.yaml:1: the file must be a mapping of keys to values."),
        ("flags: {", "DIR/config.yaml:"),
    ],
)
def test_unsupported_setting_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    assert refusal(tmp_path, text).startswith(message)


SLICED = "sharing:\n  timeSlicing:\n    resources:\n"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("    - replicas: 2", "4: sharing.timeSlicing.resources.0 has no name; set a resource name, such as nvidia"),
        ("    - name: nvidia.com/gpu", "4: sharing.timeSlicing.resources.0 has no replicas; set the number of shares"),
        ("    - {name: gpu, replicas: 1}", '4: sharing.timeSlicing.resources.0.replicas is "1"; use a number from 2'),
        (
            "    - name: gpu\n      replicas: 257",
            '5: sharing.timeSlicing.resources.0.replicas is "257"; use a number',
        ),
        ("    - {name: gpu, replicas: yes}", '4: sharing.timeSlicing.resources.0.replicas is "yes"; use a number'),
        ("    - {name: gpu, replicas: true}", '4: sharing.timeSlicing.resources.0.replicas is "True"; use a number'),
        ("    - {name: gpu, replicas: 2.5}", '4: sharing.timeSlicing.resources.0.replicas is "2.5"; use a number'),
        (
            "    - {name: gpu, replicas: 2}\n    - {name: nvidia.com/gpu, replicas: 3}",
            "5: sharing.timeSlicing.resources.1 lists nvidia.com/gpu twice.",
        ),
        (
            "    - name: gpu\n      replicas: 2\n      rename: gpu.mine",
            "6: sharing.timeSlicing.resources.0.rename renames nvidia.com/gpu to gpu.mine, which NVIDIA's plugin ignores: the",
        ),
        (
            "    - name: gpu\n      replicas: 2\n      devices: [0, 1]",
            "6: sharing.timeSlicing.resources.0.devices selects devices, which NVIDIA's plugin ignores: it shares all.",
        ),
        (
            "    - {name: no good, replicas: 2}",
            "4: sharing.timeSlicing.resources.0 cannot be advertised: 'nvidia.com/no",
        ),
        (
            "    - {name: gpu, replica: 2}",
            "4: sharing.timeSlicing.resources.0.replica is not a known key; known are devices",
        ),
        ("    - gpu", "4: sharing.timeSlicing.resources.0 must be a mapping of keys to values."),
    ],
)
def test_unsupported_sharing_entry_is_refused_with_its_line(tmp_path: Path, entries: str, message: str) -> None:
    assert refusal(tmp_path, SLICED + entries).startswith(f"DIR/config.yaml:{message}")


UNKNOWN = """\
version: ""
flags:
  migStrategies: none
  plugin: {passDeviceSpecs: true, newInAnotherVersion: 1}
  gfd: {oneshot: true, anything: 2}
health:
  policy: none
imex: {channelIDs: [], required: true, channels: [0]}
resources:
  gpus:
    - {pattern: "*", name: nvidia.com/gpu, weight: 2}
"""


def test_unknown_keys_outside_of_sharing_are_reported_in_one_warning_and_the_others_count(tmp_path: Path) -> None:
    path = config(tmp_path, UNKNOWN)
    settings = resolve_settings(NvidiaOptions(), path)
    assert settings.injection.pass_device_specs
    (warning,) = settings.ignored
    keys = "6: health, 11: resources.gpus.0.weight, 8: imex.channels, 3: flags.migStrategies"
    assert warning == f"{path}: keys that are not known have no effect: {keys}, 4: flags.plugin.newInAnotherVersion."


@pytest.mark.parametrize(
    ("words", "allocation", "expected"),
    [
        ({}, "packed", SharePreference.PACKED),
        ({"share_preference": "distributed"}, "packed", SharePreference.DISTRIBUTED),
        ({"share_preference": "packed"}, "distributed", SharePreference.PACKED),
    ],
)
def test_allocation_policy_of_the_command_line_overrides_that_of_the_file(
    tmp_path: Path, words: dict[str, str], allocation: str, expected: SharePreference
) -> None:
    text = (
        f"flags: {{plugin: {{sharedDevicesAllocationPolicy: {allocation}}}}}\n{SLICED}    - {{name: gpu, replicas: 4}}"
    )
    settings = resolve_settings(
        options_from_flags(share_preference=words.get("share_preference")), config(tmp_path, text)
    )
    assert settings.sharing == TimeSlicing({"nvidia.com/gpu": 4}, preference=expected)


def test_cdi_feature_flags_and_disabled_hooks_are_read_like_lists_of_nvidias_plugin() -> None:
    options = options_from_flags(
        cdi_features=["disable-ipc-discoverer,disable-nvsandboxutils", "no-additional-gids-for-device-nodes"],
        disabled_cdi_hooks=["update-ldcache, enable-cuda-compat"],
    )
    settings = resolve_settings(options)
    assert not settings.ipc_sockets
    assert settings.disabled_cdi_hooks == {"update-ldcache", "enable-cuda-compat"}
    assert settings.ignored == ()
    assert resolve_settings(NvidiaOptions()).ipc_sockets


def test_feature_flags_and_hooks_that_are_not_known_are_reported() -> None:
    settings = resolve_settings(options_from_flags(cdi_features=["enable-x", "y"], disabled_cdi_hooks=["ldcache"]))
    assert settings.ignored[0] == "--cdi-feature-flags: enable-x, y: not known, and without effect."
    assert settings.ignored[1].startswith("--cdi-disable-hooks: ldcache: no such hook is known; known are all, chmod, ")


@pytest.mark.parametrize(
    ("socket", "directory", "expected"),
    [
        (None, "/var/lib/kubelet", "/var/lib/kubelet"),
        ("/var/lib/kubelet/device-plugins/kubelet.sock", "/var/lib/kubelet", "/var/lib/kubelet"),
        ("/data/kubelet/device-plugins/kubelet.sock", "/var/lib/kubelet", "/data/kubelet"),
        ("/data/kubelet/device-plugins/kubelet.sock", "/data/kubelet", "/data/kubelet"),
    ],
)
def test_kubelet_socket_of_nvidias_plugin_gives_the_kubelets_directory(
    socket: str | None, directory: str, expected: str
) -> None:
    assert kubelet_dir_of(socket, Path(directory), Path("/var/lib/kubelet")) == Path(expected)


@pytest.mark.parametrize(
    ("socket", "directory", "message"),
    [
        ("", "/var/lib/kubelet", '--kubelet-socket: "" is not supported. Use the path of device-plugins/kubelet.sock'),
        ("device-plugins/kubelet.sock", "/var/lib/kubelet", "set that directory with --kubelet-dir"),
        ("/run/kubelet.sock", "/var/lib/kubelet", '"/run/kubelet.sock" is not supported'),
        ("/a/device-plugins/kubelet.sock", "/b", "is not in --kubelet-dir /b. Remove one of them."),
    ],
)
def test_kubelet_socket_that_no_kubelet_has_is_refused(socket: str, directory: str, message: str) -> None:
    with pytest.raises(InvalidConfiguration, match=re.escape(message)):
        kubelet_dir_of(socket, Path(directory), Path("/var/lib/kubelet"))


def test_no_device_is_shared_without_a_sharing_entry(tmp_path: Path) -> None:
    for text in ("version: v1", "sharing: {}", "sharing: {timeSlicing: {renameByDefault: true, resources: []}}"):
        assert (
            resolve_settings(NvidiaOptions(), config(tmp_path, text), mounted_root=tmp_path / "no").sharing
            == TimeSlicing()
        )


def test_simulated_devices_are_shared_by_their_resource_name(tmp_path: Path) -> None:
    path = config(tmp_path, SLICED + "    - {name: scrubber.dev/gpu, replicas: 4}")
    assert resolve_settings(NvidiaOptions(), path).sharing == TimeSlicing({"scrubber.dev/gpu": 4})


def test_missing_configuration_file_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidConfiguration, match=r"--config-file .*/no.yaml cannot be read: No such file or directory\."
    ):
        resolve_settings(NvidiaOptions(), tmp_path / "no.yaml")


def test_configuration_file_that_is_no_regular_file_is_refused_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(InvalidConfiguration, match="NVIDIA's configuration must be a regular file"):
            resolve_settings(NvidiaOptions(), path)
    with pytest.raises(InvalidConfiguration, match="cannot be read"):
        resolve_settings(NvidiaOptions(), Path("a\0b"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"strategies": ["envvar,cd"]}, '--device-list-strategy: "cd" is not a way to pass devices'),
        ({"driver_root": "driver"}, '--nvidia-driver-root: "driver" is not an absolute path'),
        ({"dev_root": "dev"}, '--nvidia-dev-root: "dev" is not an absolute path'),
        ({"driver_root_ctr_path": "x"}, '--driver-root-ctr-path: "x" is not an absolute path'),
        ({"hook": "nvidia-ctk"}, '--nvidia-cdi-hook-path: "nvidia-ctk" is not an absolute path'),
        ({"discovery": "tegra"}, "--device-discovery-strategy: tegra is not supported: the scrub service uses NVML"),
        ({"imex_channels": ["0"]}, r"--imex-channel-ids: IMEX channels \(0\) are not supported; remove the flag"),
    ],
)
def test_invalid_flag_is_refused_by_name(words: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidConfiguration, match=message):
        options_from_flags(**words)  # type: ignore[arg-type]


def test_empty_flag_counts_as_unset() -> None:
    empty = options_from_flags(
        strategies=[],
        driver_root="",
        dev_root="",
        driver_root_ctr_path="",
        annotation_prefix="",
        hook="",
        discovery="",
        share_preference="",
        cdi_features=[""],
        disabled_cdi_hooks=[],
        imex_channels=["", ","],
    )
    assert empty == NvidiaOptions()


def test_device_nodes_are_below_the_driver_root_unless_a_dev_root_is_given() -> None:
    driver = "/run/nvidia/driver"
    assert resolve_settings(options_from_flags(driver_root=driver)).injection.dev_root == PurePosixPath(driver)
    assert resolve_settings(options_from_flags(driver_root=driver, dev_root="/")).injection.dev_root == PurePosixPath(
        "/"
    )


def test_driver_root_is_read_at_the_mount_point_of_nvidias_manifests(tmp_path: Path) -> None:
    words = options_from_flags(driver_root="/run/nvidia/driver")
    host = PurePosixPath("/run/nvidia/driver")
    assert resolve_settings(words, mounted_root=tmp_path).root == DriverRoot(host, tmp_path)
    assert resolve_settings(words, mounted_root=tmp_path / "no").root == DriverRoot(host, Path("/run/nvidia/driver"))
    options = options_from_flags(driver_root="/run/nvidia/driver", driver_root_ctr_path="/elsewhere")
    assert resolve_settings(options, mounted_root=tmp_path).root == DriverRoot(host, Path("/elsewhere"))


@pytest.mark.parametrize("name", ["nvidia-cdi-hook", "nvidia-ctk"])
def test_cdi_hook_program_is_searched_on_the_host_and_only_with_a_cdi_strategy(tmp_path: Path, name: str) -> None:
    install_driver(tmp_path, hook=name)
    cdi = options_from_flags(strategies=["cdi-cri"])
    assert resolve_settings(cdi, mounted_root=tmp_path).hook == CdiHook(f"/usr/bin/{name}")
    assert resolve_settings(NvidiaOptions(), mounted_root=tmp_path).hook is None
    assert resolve_settings(dataclasses.replace(cdi, hook="/opt/nvidia-ctk"), mounted_root=tmp_path).hook == CdiHook(
        "/opt/nvidia-ctk"
    )
    assert (
        resolve_settings(dataclasses.replace(cdi, driver_root=PurePosixPath("/d")), mounted_root=tmp_path).hook is None
    )


def test_enabled_features_are_passed_to_nvidias_runtime() -> None:
    options = options_from_flags(features={Feature.GDS: True, Feature.MOFED: False, Feature.GDRCOPY: None})
    assert resolve_settings(options).injection.features == {Feature.GDS}


def test_index_strategy_is_warned_about_where_a_runtime_numbers_devices_by_itself() -> None:
    for strategies, warned in ((["envvar"], True), (["volume-mounts", "cdi-cri"], True), (["cdi-cri"], False)):
        assert (
            bool(index_warning(resolve_settings(options_from_flags(strategies=strategies, ids="index")).injection))
            is warned
        )
        assert index_warning(resolve_settings(options_from_flags(strategies=strategies)).injection) == ""


def test_disabled_health_checks_are_answered_with_a_warning() -> None:
    assert health_check_warning("") == ""
    assert health_check_warning("", "79").startswith(
        "DP_ENABLE_HEALTHCHECKS=79 has no effect: the scrub service checks"
    )
    assert health_check_warning("all", "79").startswith("DP_DISABLE_HEALTHCHECKS=all has no effect")
    for value in ("all", "xids", "48,79"):
        warning = health_check_warning(value)
        assert warning.startswith(f"DP_DISABLE_HEALTHCHECKS={value} has no effect on the plugin")
        assert "Set it for scrubber serve" in warning
        assert "xids: ignore" in warning
