"""What a cluster has written for NVIDIA's plugin, read here: which place wins, and what is refused with its line."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path, PurePosixPath

import pytest

from plugin.driverfiles import DriverRoot, Hook
from plugin.injection import Feature, IdStrategy, ListStrategy
from plugin.nvidia_config import (
    NvidiaSettings,
    Written,
    from_words,
    health_check_warning,
    index_warning,
    read_config,
    settle,
)
from plugin.resources import MigStrategy
from plugin.shares import Preference, Sharing
from scrubber.domain.errors import BadConfiguration
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
    with pytest.raises(BadConfiguration) as caught:
        read_config(config(directory, text))
    return str(caught.value).replace(str(directory), "DIR")


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    assert read_config(config(tmp_path, WHOLE)) == Written(
        list_strategies=(ListStrategy.VOLUME_MOUNTS, ListStrategy.CDI_CRI),
        ids=IdStrategy.INDEX,
        pass_device_specs=True,
        driver_root=PurePosixPath("/run/nvidia/driver"),
        dev_root=PurePosixPath("/"),
        driver_root_seen=Path("/seen"),
        mig=MigStrategy.MIXED,
        annotation_prefix="cdi.example.com/",
        hook="/usr/local/bin/nvidia-ctk",
        fail_on_init_error=False,
        gds=True,
        sharing=Sharing(
            {"nvidia.com/gpu": 4, "nvidia.com/mig-1g.10gb.me": 2},
            renamed=True,
            one_each=True,
            preference=Preference.PACKED,
        ),
    )


def test_every_setting_of_the_file_is_one_that_can_be_written_elsewhere(tmp_path: Path) -> None:
    written = read_config(config(tmp_path, WHOLE))
    unset = {each.name for each in dataclasses.fields(Written) if getattr(written, each.name) is None}
    assert unset == {"gdrcopy", "mofed"}


def test_the_example_of_nvidias_documentation_means_the_defaults(tmp_path: Path) -> None:
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
    assert settle(Written(), path, mounted_root=nowhere) == settle(Written(), mounted_root=nowhere) == NvidiaSettings()


def test_json_is_read_too(tmp_path: Path) -> None:
    assert read_config(config(tmp_path, '{"version": "v1", "flags": {"migStrategy": "single"}}')) == Written(
        mig=MigStrategy.SINGLE
    )


def test_flags_and_variables_win_over_the_file_one_setting_at_a_time(tmp_path: Path) -> None:
    path = config(tmp_path, "flags: {migStrategy: mixed, failOnInitError: true, plugin: {deviceIDStrategy: index}}")
    settings = settle(from_words(mig="single", fail_on_init_error=False), path)
    assert settings.mig is MigStrategy.SINGLE
    assert not settings.fail_on_init_error
    assert settings.injection.ids is IdStrategy.INDEX


def test_false_that_is_written_wins_over_true_in_the_file(tmp_path: Path) -> None:
    path = config(tmp_path, "flags: {plugin: {passDeviceSpecs: true}}")
    assert settle(Written(), path).injection.pass_device_specs
    assert not settle(from_words(pass_device_specs=False), path).injection.pass_device_specs


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("version: v2", 'DIR/config.yaml:1: version is "v2"; only v1 is read.'),
        (
            "flags:\n  migStrategy: half",
            'DIR/config.yaml:2: flags.migStrategy is "half"; write one of none, single, mixed.',
        ),
        ("flags:\n  failOnInitError: yes", 'DIR/config.yaml:2: flags.failOnInitError is "yes"; write true or false.'),
        (
            "flags:\n  nvidiaDriverRoot: run",
            'DIR/config.yaml:2: flags.nvidiaDriverRoot is "run"; write a path that begins with /.',
        ),
        (
            "flags:\n  plugin:\n    deviceListStrategy: envvar,mount",
            'DIR/config.yaml:3: flags.plugin.deviceListStrategy: "mount" is no way to pass devices; write one or more',
        ),
        ("flags:\n\n  migStrategies: none", "DIR/config.yaml:3: flags.migStrategies is not known; there is "),
        ("flags:\n  plugin: cdi-cri", "DIR/config.yaml:2: flags.plugin must be a section of keys and values."),
        (
            "flags:\n  deviceDiscoveryStrategy: tegra",
            "DIR/config.yaml:2: flags.deviceDiscoveryStrategy must be auto or nvml: the scrub service uses NVML.",
        ),
        (
            "sharing:\n  mps:\n    resources:\n      - {name: nvidia.com/gpu, replicas: 2}",
            "DIR/config.yaml:2: sharing.mps asks for MPS, which is detected and not provided: the service scrubs no",
        ),
        (
            'resources:\n  gpus:\n    - pattern: "A100*"\n      name: a100',
            "DIR/config.yaml:3: resources.gpus.0 calls A100* a100: resources are not renamed by this file",
        ),
        ("imex: {channelIDs: [0]}", "DIR/config.yaml:1: imex asks for IMEX channels"),
        ("imex:\n  channels: [0]", "DIR/config.yaml:2: imex.channels is not known; there is channelIDs, required."),
        (
            "sharing:\n  timeSlicing:\n    resources: {name: nvidia.com/gpu, replicas: 4}",
            "DIR/config.yaml:3: sharing.timeSlicing.resources must be a list of names and replicas.",
        ),
        (
            "sharing:\n  timeslicing:\n    replicas: 4",
            "DIR/config.yaml:2: sharing.timeslicing is not known; there is mps, timeSlicing.",
        ),
        ("sharing: {mps: true}", "DIR/config.yaml:1: sharing.mps must be a section of keys and values."),
        (
            "resources:\n  gpus: {pattern: A100, name: a100}",
            "DIR/config.yaml:2: resources.gpus must be a list of patterns and names.",
        ),
        (
            "flags:\n  plugin:\n    nvidiaCTKPath: nvidia-ctk",
            'DIR/config.yaml:3: flags.plugin.nvidiaCTKPath is "nvidia-ctk"; write a path that begins with /.',
        ),
        ("version: " + "9" * 5000, "DIR/config.yaml:1: the number 99999999999999999999… has 5000 digits"),
        ("- version", "DIR/config.yaml:1: the file must be a section of keys and values."),
        ("flags: {", "DIR/config.yaml:"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_line(tmp_path: Path, text: str, sentence: str) -> None:
    assert refusal(tmp_path, text).startswith(sentence)


SLICED = "sharing:\n  timeSlicing:\n    resources:\n"


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ("    - replicas: 2", "4: sharing.timeSlicing.resources.0 has no name; write the resource's, such as nvidia"),
        ("    - name: nvidia.com/gpu", "4: sharing.timeSlicing.resources.0 has no replicas; write how many shares"),
        ("    - {name: gpu, replicas: 1}", '4: sharing.timeSlicing.resources.0.replicas is "1"; write a number from 2'),
        (
            "    - name: gpu\n      replicas: 257",
            '5: sharing.timeSlicing.resources.0.replicas is "257"; write a number',
        ),
        ("    - {name: gpu, replicas: yes}", '4: sharing.timeSlicing.resources.0.replicas is "yes"; write a number'),
        ("    - {name: gpu, replicas: true}", '4: sharing.timeSlicing.resources.0.replicas is "True"; write a number'),
        ("    - {name: gpu, replicas: 2.5}", '4: sharing.timeSlicing.resources.0.replicas is "2.5"; write a number'),
        (
            "    - {name: gpu, replicas: 2}\n    - {name: nvidia.com/gpu, replicas: 3}",
            "5: sharing.timeSlicing.resources.1 names nvidia.com/gpu a second time.",
        ),
        (
            "    - name: gpu\n      replicas: 2\n      rename: gpu.mine",
            "6: sharing.timeSlicing.resources.0.rename calls nvidia.com/gpu gpu.mine, which NVIDIA's plugin ignores: it",
        ),
        (
            "    - name: gpu\n      replicas: 2\n      devices: [0, 1]",
            "6: sharing.timeSlicing.resources.0.devices chooses devices, which NVIDIA's plugin ignores: it shares all.",
        ),
        (
            "    - {name: no good, replicas: 2}",
            "4: sharing.timeSlicing.resources.0 cannot be advertised: 'nvidia.com/no",
        ),
        ("    - {name: gpu, replica: 2}", "4: sharing.timeSlicing.resources.0.replica is not known; there is devices"),
        ("    - gpu", "4: sharing.timeSlicing.resources.0 must be a section of keys and values."),
    ],
)
def test_what_cannot_be_shared_as_written_is_refused_with_its_line(tmp_path: Path, entries: str, sentence: str) -> None:
    assert refusal(tmp_path, SLICED + entries).startswith(f"DIR/config.yaml:{sentence}")


def test_nothing_is_shared_where_nothing_is_written(tmp_path: Path) -> None:
    for text in ("version: v1", "sharing: {}", "sharing: {timeSlicing: {renameByDefault: true, resources: []}}"):
        assert settle(Written(), config(tmp_path, text), mounted_root=tmp_path / "no").sharing == Sharing()


def test_the_devices_of_a_simulated_node_are_shared_by_their_resources_name(tmp_path: Path) -> None:
    path = config(tmp_path, SLICED + "    - {name: scrubber.dev/gpu, replicas: 4}")
    assert settle(Written(), path).sharing == Sharing({"scrubber.dev/gpu": 4})


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match=r"--config-file .*/no.yaml cannot be read: No such file or directory\."):
        settle(Written(), tmp_path / "no.yaml")


def test_a_pipe_or_a_path_that_no_file_can_have_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(BadConfiguration, match="NVIDIA's configuration is a regular file"):
            settle(Written(), path)
    with pytest.raises(BadConfiguration, match="cannot be read"):
        settle(Written(), Path("a\0b"))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"strategies": ["envvar,cd"]}, '--device-list-strategy: "cd" is no way to pass devices'),
        ({"driver_root": "driver"}, '--nvidia-driver-root: "driver" is no place on the host'),
        ({"dev_root": "dev"}, '--nvidia-dev-root: "dev" is no place on the host'),
        ({"driver_root_seen": "x"}, '--driver-root-ctr-path: "x" is no place on the host'),
        ({"hook": "nvidia-ctk"}, '--nvidia-cdi-hook-path: "nvidia-ctk" is no place on the host'),
    ],
)
def test_a_flag_that_cannot_work_is_refused_by_its_name(words: dict[str, object], sentence: str) -> None:
    with pytest.raises(BadConfiguration, match=sentence):
        from_words(**words)  # type: ignore[arg-type]


def test_an_empty_text_is_not_written() -> None:
    empty = from_words(strategies=[], driver_root="", dev_root="", driver_root_seen="", annotation_prefix="", hook="")
    assert empty == Written()


def test_device_nodes_are_below_the_drivers_root_unless_another_is_named() -> None:
    driver = "/run/nvidia/driver"
    assert settle(from_words(driver_root=driver)).injection.dev_root == PurePosixPath(driver)
    assert settle(from_words(driver_root=driver, dev_root="/")).injection.dev_root == PurePosixPath("/")


def test_the_drivers_root_is_seen_where_nvidias_manifests_mount_it(tmp_path: Path) -> None:
    words = from_words(driver_root="/run/nvidia/driver")
    host = PurePosixPath("/run/nvidia/driver")
    assert settle(words, mounted_root=tmp_path).root == DriverRoot(host, tmp_path)
    assert settle(words, mounted_root=tmp_path / "no").root == DriverRoot(host, Path("/run/nvidia/driver"))
    told = from_words(driver_root="/run/nvidia/driver", driver_root_seen="/elsewhere")
    assert settle(told, mounted_root=tmp_path).root == DriverRoot(host, Path("/elsewhere"))


@pytest.mark.parametrize("name", ["nvidia-cdi-hook", "nvidia-ctk"])
def test_the_hook_program_is_found_on_the_host_and_looked_for_only_with_cdi(tmp_path: Path, name: str) -> None:
    install_driver(tmp_path, hook=name)
    cdi = from_words(strategies=["cdi-cri"])
    assert settle(cdi, mounted_root=tmp_path).hook == Hook(f"/usr/bin/{name}")
    assert settle(Written(), mounted_root=tmp_path).hook is None
    assert settle(dataclasses.replace(cdi, hook="/opt/nvidia-ctk"), mounted_root=tmp_path).hook == Hook(
        "/opt/nvidia-ctk"
    )
    assert settle(dataclasses.replace(cdi, driver_root=PurePosixPath("/d")), mounted_root=tmp_path).hook is None


def test_features_are_the_flags_of_nvidias_runtime() -> None:
    asked = from_words(features={Feature.GDS: True, Feature.MOFED: False, Feature.GDRCOPY: None})
    assert settle(asked).injection.features == {Feature.GDS}


def test_indices_that_a_runtime_counts_by_itself_are_warned_of() -> None:
    for strategies, warned in ((["envvar"], True), (["volume-mounts", "cdi-cri"], True), (["cdi-cri"], False)):
        assert bool(index_warning(settle(from_words(strategies=strategies, ids="index")).injection)) is warned
        assert index_warning(settle(from_words(strategies=strategies)).injection) == ""


def test_disabled_health_checks_are_not_passed_over_in_silence() -> None:
    assert health_check_warning("") == ""
    for value in ("all", "xids", "48,79"):
        warning = health_check_warning(value)
        assert warning.startswith(f"DP_DISABLE_HEALTHCHECKS={value} changes nothing in the plugin")
        assert "Set it for scrubber serve" in warning
        assert "xids: ignore" in warning
