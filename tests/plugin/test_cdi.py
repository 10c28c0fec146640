"""The CDI specification: a container runtime accepts it, and it is always written completely or not at all."""

from __future__ import annotations

import fcntl
import io
import itertools
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from plugin.kubelet.devices import AdvertisedDevice
from plugin.logs import create_logger
from plugin.nvidia.cdi import SPEC_FILE_NAME, CdiPublisher, replace_file, specification
from plugin.nvidia.driver_files import SHARED_CONFIGS, CdiHook, DriverRoot, find_cdi_hook, find_driver_files
from plugin.nvidia.injection import IdStrategy, ListStrategy, NvidiaInjection, cdi_device_name
from scrubber.domain.errors import InvalidConfiguration
from tests.cdi_rules import errors_of
from tests.gpus import DRIVER, gpu, install_driver, instance, nodes

CDI = NvidiaInjection((ListStrategy.CDI_CRI,))
TOOLKIT = CdiHook("/usr/bin/nvidia-ctk")
LIBRARIES = "/usr/lib/x86_64-linux-gnu"


# -- the specification -------------------------------------------------------------------------------------------------


def spec_of(
    root: Path, *gpus: AdvertisedDevice, host: str = "/", hook: CdiHook | None = None, injection: NvidiaInjection = CDI
) -> dict[str, Any]:
    install_driver(root)
    place = DriverRoot(PurePosixPath(host), root)
    return specification(gpus, find_driver_files(place), place, hook, injection)


def mounts(spec: dict[str, Any]) -> dict[str, str]:
    """Return container path → host path of all mounts."""
    return {each["containerPath"]: each["hostPath"] for each in spec["containerEdits"]["mounts"]}


@pytest.mark.parametrize("ids", list(IdStrategy))
@pytest.mark.parametrize("hook", [None, CdiHook("/usr/bin/nvidia-cdi-hook"), CdiHook("/usr/bin/nvidia-ctk")])
@pytest.mark.parametrize("host", ["/", "/run/nvidia/driver"])
def test_generated_cdi_specification_is_valid_for_a_container_runtime(
    tmp_path: Path, ids: IdStrategy, hook: CdiHook | None, host: str
) -> None:
    injection = NvidiaInjection((ListStrategy.CDI_CRI,), ids, dev_root=PurePosixPath(host))
    spec = spec_of(tmp_path, gpu(0), gpu(1), instance(2, 0), host=host, hook=hook, injection=injection)
    assert errors_of(spec) == []


def test_cdi_device_has_nodes_of_its_own_and_all_share_the_driver_nodes(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, gpu(1), instance(0, 2))
    assert {
        each["name"]: [node["path"] for node in each["containerEdits"]["deviceNodes"]] for each in spec["devices"]
    } == {
        gpu(1).id: ["/dev/nvidia1"],
        instance(0, 2).id: ["/dev/nvidia-caps/nvidia-cap21", "/dev/nvidia-caps/nvidia-cap22", "/dev/nvidia0"],
    }
    assert spec["containerEdits"]["deviceNodes"] == [
        {"path": f"/dev/{name}", "permissions": "rw"} for name in ("nvidia-uvm", "nvidia-uvm-tools", "nvidiactl")
    ]


@pytest.mark.parametrize("ids", list(IdStrategy))
def test_cdi_device_is_named_by_uuid_and_never_by_index(tmp_path: Path, ids: IdStrategy) -> None:
    taken_over = replace(gpu(2), index=gpu(1).index)
    spec = spec_of(
        tmp_path, gpu(1), taken_over, instance(0, 2), injection=NvidiaInjection((ListStrategy.CDI_CRI,), ids)
    )
    assert {each["name"]: each["containerEdits"]["deviceNodes"][-1]["path"] for each in spec["devices"]} == {
        gpu(1).id: "/dev/nvidia1",
        gpu(2).id: "/dev/nvidia2",
        instance(0, 2).id: "/dev/nvidia0",
    }


def test_cdi_specification_mounts_only_the_drivers_libraries_and_programs_read_only(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, gpu(0), hook=CdiHook("/usr/bin/nvidia-cdi-hook"))
    names = ("libcuda", "libnvcuvid", "libnvidia-ml", "libnvidia-ptxjitcompiler")
    expected = ["/usr/bin/nvidia-smi", *(f"{LIBRARIES}/{name}.so.{DRIVER}" for name in names)]
    assert mounts(spec) == {path: path for path in expected}
    assert {tuple(each["options"]) for each in spec["containerEdits"]["mounts"]} == {("ro", "nosuid", "nodev", "bind")}


def test_driver_in_a_separate_root_is_mounted_at_the_standard_container_paths(tmp_path: Path) -> None:
    injection = replace(CDI, dev_root=PurePosixPath("/run/nvidia/driver"))
    spec = spec_of(tmp_path, gpu(0), host="/run/nvidia/driver", injection=injection)
    assert mounts(spec)["/usr/bin/nvidia-smi"] == "/run/nvidia/driver/usr/bin/nvidia-smi"
    (device,) = spec["devices"]
    assert device["containerEdits"]["deviceNodes"] == [
        {"path": "/dev/nvidia0", "hostPath": "/run/nvidia/driver/dev/nvidia0", "permissions": "rw"}
    ]


@pytest.mark.parametrize(
    ("path", "begin"),
    [
        ("/usr/bin/nvidia-cdi-hook", ["nvidia-cdi-hook"]),
        ("/usr/local/nvidia/toolkit/nvidia-ctk", ["nvidia-ctk", "hook"]),
    ],
)
def test_cdi_hooks_create_symlinks_and_update_the_ldcache(tmp_path: Path, path: str, begin: list[str]) -> None:
    hooks = spec_of(tmp_path, gpu(0), hook=CdiHook(path))["containerEdits"]["hooks"]
    assert [(each["hookName"], each["path"]) for each in hooks] == [("createContainer", path)] * 2
    links, cache = (each["args"] for each in hooks)
    assert links[: len(begin) + 1] == [*begin, "create-symlinks"]
    assert f"libcuda.so.1::{LIBRARIES}/libcuda.so" in links
    assert f"libcuda.so.{DRIVER}::{LIBRARIES}/libcuda.so.1" in links
    assert cache == [*begin, "update-ldcache", "--folder", LIBRARIES]


def test_library_links_are_mounted_if_there_is_no_cdi_hook(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, gpu(0))
    assert "hooks" not in spec["containerEdits"]
    for link in ("libcuda.so", "libcuda.so.1"):
        assert mounts(spec)[f"{LIBRARIES}/{link}"] == f"{LIBRARIES}/libcuda.so.{DRIVER}"


@pytest.mark.parametrize(
    ("disabled", "commands"),
    [
        (["update-ldcache"], ["create-symlinks"]),
        (["create-symlinks", "enable-cuda-compat"], ["update-ldcache"]),
        (["all"], []),
        (["create-symlinks", "update-ldcache"], []),
    ],
)
def test_disabled_hooks_are_left_out_and_links_become_mounts_where_no_hook_creates_them(
    tmp_path: Path, disabled: list[str], commands: list[str]
) -> None:
    install_driver(tmp_path)
    root = DriverRoot(local_path=tmp_path)
    hook = CdiHook("/usr/bin/nvidia-cdi-hook")
    spec = specification([gpu(0)], find_driver_files(root), root, hook, CDI, disabled_hooks=disabled)
    assert [each["args"][1] for each in spec["containerEdits"].get("hooks", [])] == commands
    assert (f"{LIBRARIES}/libcuda.so.1" in mounts(spec)) is ("create-symlinks" not in commands)
    assert errors_of(spec) == []


def test_cdi_specification_sets_nvidia_visible_devices_to_void(tmp_path: Path) -> None:
    assert spec_of(tmp_path, gpu(0))["containerEdits"]["env"] == ["NVIDIA_VISIBLE_DEVICES=void"]


# -- completeness ------------------------------------------------------------------------------------------------------

GRAPHICS = (
    *(
        "libEGL_nvidia",
        "libGLX_nvidia",
        "libGLESv2_nvidia",
        "libnvidia-eglcore",
        "libnvidia-glcore",
        "libnvidia-rtcore",
    ),
    *("libnvidia-allocator", "libnvidia-vulkan-producer", "libnvoptix", "libnvidia-opticalflow", "libnvidia-gpucomp"),
)


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def listen(path: Path) -> socket.socket:
    """Return a socket that listens at ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    return made


def test_cdi_specification_gives_what_nvidias_generator_gives_for_egl_vulkan_opencl_and_xorg(tmp_path: Path) -> None:
    """The list is that of container toolkit 1.20; the machine's name is part of one file's name."""
    base = LIBRARIES.lstrip("/")
    libraries = [f"{base}/{name}.so.{DRIVER}" for name in GRAPHICS]
    libraries += [f"{base}/vdpau/libvdpau_nvidia.so.{DRIVER}", f"{base}/libnvidia-nvvm70.so.4"]
    versions = {"gbm": "1.1.2", "wayland": "1.1.13", "wayland2": "1.0.0", "xcb": "1.0.1", "xlib": "1.0.1"}
    libraries += [f"{base}/libnvidia-egl-{name}.so.{version}" for name, version in versions.items()]
    modules = [f"{base}/nvidia/xorg/nvidia_drv.so", f"{base}/nvidia/xorg/libglxserver_nvidia.so.{DRIVER}"]
    programs = [f"usr/bin/{name}" for name in ("nvidia-imex", "nvidia-imex-ctl", "nvidia-xconfig")]
    shared = [f"usr/share/{name}" for name in SHARED_CONFIGS]
    etc = [f"etc/{name}" for name in ("OpenCL/vendors/nvidia.icd", "vulkan/implicit_layer.d/nvidia_layers.json")]
    vulkan = [
        f"vulkan/icd.d/{name}.json" for name in ("nvidia_icd", f"nvidia_icd.{platform.machine()}", "nvidia_layers")
    ]
    firmware = f"nvidia/{DRIVER}/gsp_ga10x.bin"
    touch(tmp_path, *libraries, *modules, *programs, *shared, *etc, *(f"usr/share/{each}" for each in vulkan))
    touch(tmp_path, f"usr/lib/firmware/{firmware}", "usr/lib/firmware/nvidia/1.2.3/gsp_ga10x.bin")
    touch(tmp_path, f"{base}/libnvidia-egl-gbm.so.1.1.2.old", f"{base}/libEGL_nvidia.so.1.2.3")

    spec = spec_of(tmp_path, gpu(0), host="/run/nvidia/driver", hook=CdiHook("/usr/bin/nvidia-cdi-hook"))
    plain = spec_of(tmp_path / "plain", gpu(0), host="/run/nvidia/driver", hook=CdiHook("/usr/bin/nvidia-cdi-hook"))
    added = {path: host for path, host in mounts(spec).items() if path not in mounts(plain)}
    same = {f"/{name}": f"/run/nvidia/driver/{name}" for name in (*libraries, *modules, *programs, *shared, *etc)}
    moved = {f"/etc/{name}": f"/run/nvidia/driver/usr/share/{name}" for name in vulkan}
    assert added == same | moved | {f"/lib/firmware/{firmware}": f"/run/nvidia/driver/usr/lib/firmware/{firmware}"}
    assert errors_of(spec) == []

    links, cache = (each["args"] for each in spec["containerEdits"]["hooks"])
    assert f"../libnvidia-allocator.so.1::{LIBRARIES}/gbm/nvidia-drm_gbm.so" in links
    assert f"libGLX_nvidia.so.{DRIVER}::{LIBRARIES}/libGLX_indirect.so.0" in links
    assert f"libnvidia-opticalflow.so.1::{LIBRARIES}/libnvidia-opticalflow.so" in links
    assert f"{LIBRARIES}/vdpau" in cache


def test_firmware_that_the_kernel_would_load_first_is_mounted(tmp_path: Path) -> None:
    release = os.uname().release
    name = f"nvidia/{DRIVER}/gsp_tu10x.bin"
    touch(tmp_path, f"lib/firmware/{name}", f"lib/firmware/updates/{release}/{name}")
    assert mounts(spec_of(tmp_path, gpu(0)))[f"/lib/firmware/{name}"] == f"/lib/firmware/updates/{release}/{name}"


def test_socket_of_the_fabric_manager_is_passed_and_those_that_tenants_would_share_are_not(short_tmp: Path) -> None:
    names = ("nvidia-fabricmanager/socket", "nvidia-persistenced/socket")
    with ExitStack() as open_:
        for name in names:
            open_.enter_context(listen(short_tmp / "run" / name))
        (short_tmp / "tmp/nvidia-mps").mkdir(parents=True)
        spec = spec_of(short_tmp, gpu(0), host="/run/nvidia/driver")
    assert {
        "hostPath": "/run/nvidia/driver/run/nvidia-fabricmanager/socket",
        "containerPath": "/run/nvidia-fabricmanager/socket",
        "options": ["nosuid", "nodev", "noexec", "bind"],
    } in spec["containerEdits"]["mounts"]
    assert "nvidia-persistenced/socket" not in json.dumps(spec)
    assert "nvidia-mps" not in json.dumps(spec)
    assert errors_of(spec) == []
    root = DriverRoot(local_path=short_tmp)
    without = specification([gpu(0)], find_driver_files(root), root, None, CDI, sockets=False)
    assert "nvidia-fabricmanager/socket" not in json.dumps(without)


# -- the driver's files ------------------------------------------------------------------------------------------------


def kernel_runs(root: Path, version: str) -> None:
    content = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build  (builder@host)\nGCC version:\n"
    (root / "proc/driver/nvidia").mkdir(parents=True, exist_ok=True)
    (root / "proc/driver/nvidia/version").write_text(content)


def test_kernel_module_decides_which_of_two_installed_drivers_is_used(tmp_path: Path) -> None:
    for version in ("535.104.05", DRIVER):
        install_driver(tmp_path, version)
    kernel_runs(tmp_path, "535.104.05")
    files = find_driver_files(DriverRoot(local_path=tmp_path))
    assert files.version == "535.104.05"
    assert all(path.endswith(".so.535.104.05") for path in files.libraries)


@pytest.mark.parametrize(
    ("installed", "kernel", "message"),
    [
        ((), None, "NVIDIA's driver was not found: there is no libcuda.so.<version>"),
        (("535.104.05", DRIVER), None, "The version of the running driver is unknown"),
        ((DRIVER,), "570.1.2", f"The kernel runs NVIDIA's driver 570.1.2, but there is only libcuda.so.{DRIVER}"),
    ],
)
def test_libraries_of_a_driver_other_than_the_running_one_are_never_mounted(
    tmp_path: Path, installed: tuple[str, ...], kernel: str | None, message: str
) -> None:
    for version in installed:
        install_driver(tmp_path, version)
    if kernel is not None:
        kernel_runs(tmp_path, kernel)
    with pytest.raises(InvalidConfiguration, match=re.escape(message)):
        find_driver_files(DriverRoot(local_path=tmp_path))


def test_library_directory_that_links_to_another_is_read_once(tmp_path: Path) -> None:
    install_driver(tmp_path)
    (tmp_path / "usr/lib64").symlink_to("lib/x86_64-linux-gnu")
    (tmp_path / "lib").symlink_to("usr/lib")
    files = find_driver_files(DriverRoot(local_path=tmp_path))
    assert files.directories == (LIBRARIES,)


def test_driver_file_whose_name_cannot_be_written_as_json_is_ignored(tmp_path: Path) -> None:
    install_driver(tmp_path)
    directory = os.fsencode(tmp_path / LIBRARIES[1:])
    for name in (b"libnvidia-\xff.so.", b"libnvidia-a::b.so.", b"libnvidia-a\n.so."):
        Path(os.fsdecode(directory + b"/" + name + DRIVER.encode())).touch()
    assert len(find_driver_files(DriverRoot(local_path=tmp_path)).libraries) == 4


def test_cdi_hook_of_the_operators_toolkit_is_preferred_and_searched_wherever_the_host_is_visible(
    tmp_path: Path,
) -> None:
    host = tmp_path / "host"
    assert find_cdi_hook([tmp_path / "missing", host]) is None
    install_driver(host, hook="nvidia-cdi-hook")
    assert find_cdi_hook([tmp_path / "missing", host]) == CdiHook("/usr/bin/nvidia-cdi-hook")
    (host / "usr/local/nvidia/toolkit").mkdir(parents=True)
    (host / "usr/local/nvidia/toolkit/nvidia-cdi-hook").touch()
    assert find_cdi_hook([tmp_path / "missing", host]) == CdiHook("/usr/local/nvidia/toolkit/nvidia-cdi-hook")


# -- the file ----------------------------------------------------------------------------------------------------------


class Desk:
    """A publisher, the files that it has written and the lines that it has logged."""

    def __init__(self, directory: Path, *, hook: CdiHook | None = TOOLKIT) -> None:
        self.root, self.cdi, self.lines = directory / "root", directory / "cdi", io.StringIO()
        self.publisher = CdiPublisher(
            self.cdi,
            root=DriverRoot(local_path=self.root),
            hook=hook,
            injection=CDI,
            log=create_logger("json", "info", self.lines),
        )

    @property
    def file(self) -> Path:
        return self.cdi / SPEC_FILE_NAME

    @property
    def names(self) -> list[str]:
        return [each["name"] for each in json.loads(self.file.read_bytes())["devices"]]

    @property
    def events(self) -> list[str]:
        return [json.loads(line)["event"] for line in self.lines.getvalue().splitlines()]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    made = Desk(tmp_path)
    install_driver(made.root)
    made.publisher.check()
    return made


def test_cdi_specification_is_byte_equal_for_any_device_order_and_after_a_restart(desk: Desk, tmp_path: Path) -> None:
    devices = [gpu(0), gpu(1), instance(2, 0)]
    assert desk.publisher.publish(devices, "one") == {}
    before = (desk.file.read_bytes(), desk.file.stat().st_mtime_ns, desk.file.stat().st_ino)
    for order in itertools.permutations(devices):
        assert Desk(tmp_path).publisher.publish(order, "two") == {}
    assert (desk.file.read_bytes(), desk.file.stat().st_mtime_ns, desk.file.stat().st_ino) == before
    assert desk.file.stat().st_mode & 0o777 == 0o644


def test_cdi_specification_follows_added_and_removed_devices(desk: Desk) -> None:
    desk.publisher.publish([gpu(0)], "one")
    desk.publisher.publish([gpu(0), gpu(1)], "one")
    assert desk.names == [gpu(0).id, gpu(1).id]
    desk.publisher.publish([replace(gpu(0), gone=True), gpu(1)], "one")
    assert desk.names == [gpu(1).id]


def test_cdi_specification_that_was_removed_or_changed_is_rewritten(desk: Desk) -> None:
    desk.publisher.publish([gpu(0)], "one")
    content = desk.file.read_bytes()
    desk.file.unlink()
    desk.publisher.publish([gpu(0)], "one")
    assert desk.file.read_bytes() == content
    desk.file.write_text("{}")
    desk.publisher.publish([gpu(0)], "one")
    assert desk.file.read_bytes() == content


def test_cdi_specification_is_not_written_without_devices(desk: Desk) -> None:
    assert desk.publisher.publish([], "one") == {}
    assert not desk.file.exists()


def test_failure_to_write_the_cdi_specification_is_logged_once_and_withholds_its_devices(desk: Desk) -> None:
    desk.file.mkdir()
    for _ in range(2):
        assert desk.publisher.publish([gpu(0)], "one") == {
            gpu(0).id: f"Device {gpu(0).id} cannot be given to a container: its CDI specification cannot be written. "
            "The plugin's log on the node contains the cause."
        }
    assert desk.events == ["cdi.failed"]
    desk.file.rmdir()
    assert desk.publisher.publish([gpu(0)], "one") == {}


def test_devices_are_withheld_until_the_driver_is_installed(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.publisher.check()
    assert set(desk.publisher.publish([gpu(0)], "one")) == {gpu(0).id}
    install_driver(desk.root)
    assert desk.publisher.publish([gpu(0)], "one") == {}


def remove_driver(root: Path) -> None:
    for name in (root / "usr/lib/x86_64-linux-gnu").iterdir():
        name.unlink()


@pytest.mark.parametrize("epoch", ["one", "", "two"])
def test_cdi_specification_follows_a_replaced_driver_whatever_the_service_does_meanwhile(
    desk: Desk, epoch: str
) -> None:
    assert desk.publisher.publish([gpu(0)], "one") == {}
    remove_driver(desk.root)
    assert set(desk.publisher.publish([gpu(0)], epoch)) == {gpu(0).id}
    install_driver(desk.root, "570.1.2")
    assert desk.publisher.publish([gpu(0)], epoch) == {}
    assert "libcuda.so.570.1.2" in desk.file.read_text()
    assert DRIVER not in desk.file.read_text()


def test_cdi_specification_follows_the_kernel_module_when_two_drivers_are_installed(desk: Desk) -> None:
    kernel_runs(desk.root, DRIVER)
    desk.publisher.publish([gpu(0)], "one")
    install_driver(desk.root, "570.1.2")
    desk.publisher.publish([gpu(0)], "one")
    assert DRIVER in desk.file.read_text()
    kernel_runs(desk.root, "570.1.2")
    desk.publisher.publish([gpu(0)], "one")
    assert "libcuda.so.570.1.2" in desk.file.read_text()


def test_added_driver_files_appear_in_the_cdi_specification_with_the_next_service_run(desk: Desk) -> None:
    desk.publisher.publish([gpu(0)], "one")
    (desk.root / "usr/bin/nvidia-debugdump").touch()
    desk.publisher.publish([gpu(0)], "one")
    assert "nvidia-debugdump" not in desk.file.read_text()
    desk.publisher.publish([gpu(0)], "two")
    assert "nvidia-debugdump" in desk.file.read_text()


def test_cdi_specification_follows_a_driver_container_that_mounts_a_new_root_with_the_same_version(desk: Desk) -> None:
    desk.publisher.publish([gpu(0)], "one")
    desk.root.rename(desk.root.with_name("of-the-old-container"))
    install_driver(desk.root)
    (desk.root / "usr/bin/nvidia-debugdump").touch()
    assert desk.publisher.publish([gpu(0)], "one") == {}
    assert "nvidia-debugdump" in desk.file.read_text()


def test_cdi_specification_follows_a_daemon_that_starts_and_ends(short_tmp: Path) -> None:
    desk = Desk(short_tmp)
    install_driver(desk.root)
    desk.publisher.check()
    file = desk.root / "run/nvidia-fabricmanager/socket"
    for _ in range(2):
        desk.publisher.publish([gpu(0)], "one")
        assert "/run/nvidia-fabricmanager/socket" not in desk.file.read_text()
        with listen(file):
            desk.publisher.publish([gpu(0)], "one")
            assert "/run/nvidia-fabricmanager/socket" in desk.file.read_text()
        file.unlink()  # a mount of a missing file would keep every container from starting


def test_devices_are_withheld_while_no_driver_root_is_mounted(desk: Desk) -> None:
    desk.publisher.publish([gpu(0)], "one")
    desk.root.rename(desk.root.with_name("of-the-old-container"))
    assert set(desk.publisher.publish([gpu(0)], "one")) == {gpu(0).id}
    desk.root.mkdir()
    assert set(desk.publisher.publish([gpu(0)], "one")) == {gpu(0).id}


def test_driver_that_is_missing_below_a_separate_root_is_refused_with_the_necessary_mount(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration, match="mount the parent directory with mountPropagation: HostToContainer"):
        find_driver_files(DriverRoot(PurePosixPath("/run/nvidia/driver"), tmp_path))


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Hold the lock of another plugin instance that is about to replace the file."""
    handle = os.open(directory, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(handle)


def test_failure_to_write_the_cdi_specification_withholds_only_devices_whose_entry_is_missing_or_outdated(
    desk: Desk,
) -> None:
    desk.publisher.publish([gpu(0), gpu(1)], "one")
    with writing(desk.cdi):
        assert desk.publisher.publish([gpu(0)], "one") == {}
        moved = replace(gpu(1), access=nodes("nvidia7", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"))
        assert set(desk.publisher.publish([gpu(0), moved, gpu(2)], "one")) == {gpu(1).id, gpu(2).id}
    assert desk.publisher.publish([gpu(0), moved, gpu(2)], "one") == {}
    assert desk.names == [gpu(0).id, gpu(1).id, gpu(2).id]


def test_existing_cdi_specification_with_libraries_of_another_driver_withholds_its_devices(desk: Desk) -> None:
    desk.publisher.publish([gpu(0)], "one")
    remove_driver(desk.root)
    install_driver(desk.root, "570.1.2")
    with writing(desk.cdi):
        assert set(desk.publisher.publish([gpu(0)], "one")) == {gpu(0).id}
        desk.file.write_text('{"devices": 5}')
        assert set(desk.publisher.publish([gpu(0)], "one")) == {gpu(0).id}


def test_device_that_cannot_be_described_in_cdi_is_withheld_and_the_others_are_written(desk: Desk) -> None:
    old_style = replace(instance(1, 0), id="MIG-GPU-0/1/2")
    bare = replace(gpu(2), access=nodes("nvidiactl"))
    refused = desk.publisher.publish([gpu(0), old_style, bare], "one")
    assert set(refused) == {old_style.id, bare.id}
    assert desk.names == [gpu(0).id]


def test_missing_cdi_hook_is_logged_at_the_start(tmp_path: Path) -> None:
    desk = Desk(tmp_path, hook=None)
    desk.publisher.check()
    assert len(desk.events) == 1
    assert desk.events[0] == "cdi.hook-missing"


def test_unwritable_cdi_directory_is_refused_at_the_start(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.cdi.write_text("a file")
    with pytest.raises(
        InvalidConfiguration, match=r"Cannot write a CDI specification to .*use a --device-list-strategy"
    ):
        desk.publisher.check()


def test_cdi_device_names_use_the_kind_of_the_specification(desk: Desk) -> None:
    desk.publisher.publish([gpu(0)], "one")
    kind = json.loads(desk.file.read_bytes())["kind"]
    assert cdi_device_name(gpu(0).id) == f"{kind}={gpu(0).id}"


# -- killed while writing ----------------------------------------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
from plugin.nvidia.cdi import replace_file

def stopped(temporary, final):
    print(temporary.name, flush=True)
    sys.stdin.read()

replace_file(Path(sys.argv[1]), "a.json", b"new", rename=stopped)
"""


def test_writer_killed_before_the_rename_leaves_the_old_file_and_does_not_block_the_next_writer(tmp_path: Path) -> None:
    replace_file(tmp_path, "a.json", b"old")
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        temporary = writer.stdout.readline().strip()
        assert (tmp_path / temporary).read_bytes() == b"new"
        with pytest.raises(BlockingIOError):
            replace_file(tmp_path, "a.json", b"other")
        os.kill(writer.pid, signal.SIGKILL)
    assert (tmp_path / "a.json").read_bytes() == b"old"
    assert not temporary.endswith((".json", ".yaml"))
    replace_file(tmp_path, "a.json", b"newest")
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_bytes() == b"newest"


def test_devices_of_a_damaged_file_that_cannot_be_written_again_are_refused(desk: Desk) -> None:
    assert desk.publisher.publish([gpu(0)], "1") == {}
    spec = json.loads(desk.file.read_bytes())
    assert desk.publisher._devices_in_file(spec) == {gpu(0).id}
    spec["devices"][0]["containerEdits"]["number"] = 1
    for damaged in (json.dumps(spec).replace('"number": 1', '"number": true'), "[" * 100_000):
        desk.file.write_text(damaged)
        assert desk.publisher._devices_in_file(spec) == frozenset()


def test_replace_file_does_not_write_through_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / ".a.json.tmp").symlink_to("precious")
    with pytest.raises(OSError, match="symbolic links"):
        replace_file(tmp_path, "a.json", b"new")
    assert (tmp_path / "precious").read_text() == "kept"
