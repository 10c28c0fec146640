"""The file with which the GPU Operator's validator announces the driver, and the settings that follow from it."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from plugin.kubelet.resources import MigStrategy
from plugin.nvidia.driver_files import CdiHook, DriverRoot
from plugin.nvidia.driver_ready import DriverReady, parse_driver_ready, read_driver_ready
from plugin.nvidia.settings import NvidiaOptions, NvidiaPluginSettings, NvidiaSettingsSource, options_from_flags
from scrubber.domain.errors import InvalidConfiguration

ON_THE_HOST = """\
IS_HOST_DRIVER=true
NVIDIA_DRIVER_ROOT=/
DRIVER_ROOT_CTR_PATH=/host
NVIDIA_DEV_ROOT=/
DEV_ROOT_CTR_PATH=/host
"""
IN_A_CONTAINER = """\
IS_HOST_DRIVER=false
NVIDIA_DRIVER_ROOT=/run/nvidia/driver
DRIVER_ROOT_CTR_PATH=/driver-root
NVIDIA_DEV_ROOT=/
DEV_ROOT_CTR_PATH=/host
"""


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (ON_THE_HOST, DriverReady(PurePosixPath("/"), Path("/host"), PurePosixPath("/"))),
        (IN_A_CONTAINER, DriverReady(PurePosixPath("/run/nvidia/driver"), Path("/driver-root"), PurePosixPath("/"))),
        (
            f"# later versions\nNEW_KEY=1\n\n{ON_THE_HOST}",
            DriverReady(PurePosixPath("/"), Path("/host"), PurePosixPath("/")),
        ),
    ],
)
def test_file_of_the_validator_is_read(content: str, expected: DriverReady) -> None:
    assert parse_driver_ready(content.encode(), "driver-ready") == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("NVIDIA_DRIVER_ROOT=$(reboot)\n", "driver-ready:1: 'NVIDIA_DRIVER_ROOT=$(reboot)' is not an assignment"),
        ("NVIDIA_DRIVER_ROOT=`id`", "driver-ready:1: "),
        ("NVIDIA_DRIVER_ROOT=/; rm -rf /x", "driver-ready:1: "),
        ('NVIDIA_DRIVER_ROOT="/"', "driver-ready:1: "),
        ("export NVIDIA_DRIVER_ROOT=/", "driver-ready:1: "),
        (f"{ON_THE_HOST}. /etc/profile", "driver-ready:6: "),
        ("NVIDIA_DRIVER_ROOT=/\r\n", "driver-ready:1: "),
        (f"{ON_THE_HOST}NVIDIA_DRIVER_ROOT=/run", "driver-ready:6: NVIDIA_DRIVER_ROOT is assigned twice."),
        ("", 'driver-ready: NVIDIA_DRIVER_ROOT is ""; the validator writes an absolute path.'),
        (ON_THE_HOST.replace("CTR_PATH=/host", "CTR_PATH=host", 1), 'DRIVER_ROOT_CTR_PATH is "host"; the validator'),
        (ON_THE_HOST.replace("NVIDIA_DEV_ROOT=/", "NVIDIA_DEV_ROOT=/a/../.."), 'NVIDIA_DEV_ROOT is "/a/../.."; the'),
        ("\udcff".encode("utf-8", "surrogatepass"), "driver-ready:1: "),
    ],
)
def test_anything_but_plain_assignments_of_paths_is_refused(content: str | bytes, message: str) -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        parse_driver_ready(content.encode() if isinstance(content, str) else content, "driver-ready")
    assert message in str(caught.value)


def test_missing_file_means_that_nothing_is_known_and_an_unreadable_one_is_refused(tmp_path: Path) -> None:
    assert read_driver_ready(tmp_path / "validations" / "driver-ready") is None
    with pytest.raises(InvalidConfiguration, match=r"--driver-ready-file .* cannot be read: Is a directory\."):
        read_driver_ready(tmp_path)


class Node:
    """The directories of an operator's node as the plugin's container may see them."""

    def __init__(self, root: Path) -> None:
        self.host, self.driver_root, self.file = root / "host", root / "driver-root", root / "driver-ready"
        self.config = root / "config.yaml"
        self.config.write_text("flags: {nvidiaDriverRoot: /of/the/file}")

    def announce(self, content: str) -> None:
        self.file.write_text(
            content.replace("=/host", f"={self.host}").replace("=/driver-root", f"={self.driver_root}")
        )

    def source(self, options: NvidiaOptions | None = None) -> NvidiaSettingsSource:
        return NvidiaSettingsSource(
            options or options_from_flags(strategies=["cdi-cri"]),
            self.config,
            driver_ready=self.file,
            mounted_root=self.driver_root,
            host_root=self.host,
        )

    def load(self, options: NvidiaOptions | None = None) -> NvidiaPluginSettings:
        return self.source(options).load()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_driver_on_the_host_is_read_where_the_host_is_mounted(node: Node) -> None:
    node.host.mkdir()
    node.announce(ON_THE_HOST)
    assert node.load().root == DriverRoot(PurePosixPath("/"), node.host)


def test_driver_in_a_container_is_read_where_the_validator_says_or_at_its_path_on_the_host(node: Node) -> None:
    node.announce(IN_A_CONTAINER)
    driver = PurePosixPath("/run/nvidia/driver")
    assert node.load().root == DriverRoot(driver, Path(driver))
    assert node.load().injection.dev_root == PurePosixPath("/")
    node.driver_root.mkdir()
    assert node.load().root == DriverRoot(driver, node.driver_root)


@pytest.mark.parametrize("place", ["usr/local/nvidia/toolkit", "usr/bin"])
def test_hook_is_found_on_the_host_although_a_container_has_the_driver(node: Node, place: str) -> None:
    node.announce(IN_A_CONTAINER)
    assert node.load().hook is None
    (node.host / place).mkdir(parents=True)
    (node.host / place / "nvidia-cdi-hook").touch()
    assert node.load().hook == CdiHook(f"/{place}/nvidia-cdi-hook")


def test_hook_that_vanishes_while_the_driver_is_replaced_stays_until_another_one_is_found(node: Node) -> None:
    node.announce(IN_A_CONTAINER)
    first, second = (node.host / place / "nvidia-cdi-hook" for place in ("usr/bin", "usr/local/nvidia/toolkit"))
    first.parent.mkdir(parents=True)
    first.touch()
    source = node.source()
    settings = source.load()
    first.unlink()
    assert source.follow_driver(settings) == settings
    assert settings.hook == CdiHook("/usr/bin/nvidia-cdi-hook")
    second.parent.mkdir(parents=True)
    second.touch()
    assert source.follow_driver(settings).hook == CdiHook("/usr/local/nvidia/toolkit/nvidia-cdi-hook")


def test_flags_override_what_the_validator_wrote_and_that_overrides_the_configuration_file(node: Node) -> None:
    node.announce(IN_A_CONTAINER)
    assert node.load().root.host == PurePosixPath("/run/nvidia/driver")
    flags = options_from_flags(driver_root="/opt/driver", hook="/opt/hook", strategies=["cdi-cri"])
    found = node.load(flags)
    assert (found.root.host, found.injection.dev_root) == (PurePosixPath("/opt/driver"), PurePosixPath("/opt/driver"))
    assert found.hook == CdiHook("/opt/hook")
    node.file.unlink()
    assert node.load(flags) == found  # nothing to wait for


def test_settings_wait_for_the_file_and_outlive_a_restart_of_the_validator(node: Node) -> None:
    source = node.source()
    assert source.load().pending.startswith(f"{node.file} does not exist: the GPU Operator's validator has not found")
    node.announce(IN_A_CONTAINER)
    found = source.load()
    assert not found.pending
    node.file.unlink()
    assert source.load() == found
    node.announce(ON_THE_HOST)
    assert source.load().root.host == PurePosixPath("/")


def test_following_the_driver_does_not_read_a_configuration_file_that_is_being_edited(node: Node) -> None:
    node.announce(IN_A_CONTAINER)
    node.config.write_text("flags: {migStrategy: single}")
    source = node.source()
    settings = source.load()
    node.config.write_text("flags: {")
    node.announce(ON_THE_HOST)
    followed = source.follow_driver(settings)
    assert (followed.root.host, followed.mig) == (PurePosixPath("/"), MigStrategy.SINGLE)
    with pytest.raises(InvalidConfiguration, match=r"config\.yaml:"):
        source.load()
