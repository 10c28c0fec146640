"""``scrubber doctor`` on the machine: the driver, its libraries and nodes, cgroups, kernel and clock."""

import errno
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from scrubber.adapters.inotify import Inotify
from scrubber.config.settings import EMULATOR_MARKER_FILE
from scrubber.doctor import libraries
from scrubber.doctor.checks import check_node
from scrubber.doctor.model import CheckContext, CheckLevel, CheckResult, DeviceReport, ServicePaths
from tests.doctor.stage import KUBELET, found, healthy, levels, serving, write

SIM = {"backend": "sim"}
UNKNOWN = {"backend": "", "error": "No answer."}


@pytest.fixture
def node(short_tmp: Path) -> Iterator[CheckContext]:
    with healthy(short_tmp) as node:
        yield node


# --- device nodes


def test_gpu_node_accessible_by_any_local_user_is_reported_with_the_driver_option(node: CheckContext) -> None:
    for name, mode in {"nvidia0": 0o660, "nvidia1": 0o666, "nvidia2": 0o604, "nvidiactl": 0o666}.items():
        write(node.root, f"dev/{name}").chmod(mode)
    check = found(node, "device-nodes")
    assert check.level is CheckLevel.WARNING
    assert f"{node.root}/dev/nvidia1 (0666), {node.root}/dev/nvidia2 (0604), bypassing the kubelet" in check.message
    assert "NVreg_DeviceFileMode=0660" in check.remedy


def test_node_without_gpus_has_no_device_nodes_to_check(node: CheckContext) -> None:
    (node.root / "dev/nvidia0").unlink()
    assert "device-nodes" not in levels(node)


@pytest.mark.parametrize(("backend", "reported"), [("nvidia", True), ("sim", False), ("", False)])
def test_unauthorized_use_coverage_limit_is_reported_for_driver_contexts(
    node: CheckContext, backend: str, reported: bool
) -> None:
    checks = [check for check in check_node(serving(node, backend=backend)) if check.name == "unauthorized-use"]
    assert [("only has a GPU's device node open is not detected" in check.message) for check in checks] == [
        True
    ] * reported


# --- the driver


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build\nGCC version: gcc 12.2.0\n",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.133.20  Tue Jun  6 22:20:39 UTC 2023\n",
    ],
)
def test_driver_is_identified_by_its_version(node: CheckContext, text: str) -> None:
    write(node.root, "proc/driver/nvidia/version", text)
    assert found(node, "driver") == CheckResult("driver", CheckLevel.OK, "NVIDIA's driver 570.133.20 is loaded.")


def test_driver_without_a_version_is_a_warning(node: CheckContext) -> None:
    write(node.root, "proc/driver/nvidia/version", "NVRM version: none\n")
    assert found(node, "driver").level is CheckLevel.WARNING


@pytest.mark.parametrize(
    ("expected", "level"), [({}, CheckLevel.ERROR), (SIM, CheckLevel.OK), (UNKNOWN, CheckLevel.WARNING)]
)
def test_missing_driver_is_an_error_only_for_backends_that_need_one(
    node: CheckContext, expected: dict[str, str], level: CheckLevel
) -> None:
    (node.root / "proc/driver/nvidia/version").unlink()
    assert found(serving(node, **expected), "driver").level is level


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ('RegistryDwords: "RMDisableScrubOnFree=1"\n', CheckLevel.WARNING),
        ('RegistryDwords: "RmDisableScrubOnFree=0x1;Other=0"\n', CheckLevel.WARNING),
        ("RmDisableScrubOnFree: 1\n", CheckLevel.WARNING),
        ('RegistryDwords: "RmDisableScrubOnFree=0"\n', CheckLevel.OK),
        ("RmDisableScrubOnFree: 0\n", CheckLevel.OK),
    ],
)
def test_driver_that_does_not_scrub_memory_on_free_is_reported(
    node: CheckContext, text: str, level: CheckLevel
) -> None:
    write(node.root, "proc/driver/nvidia/params", text)
    assert found(node, "scrub-on-free").level is level


@pytest.mark.parametrize("text", ["713\n", "0\n", "", "seven\n", None])
def test_pid_file_without_a_process_is_no_persistence_daemon(node: CheckContext, text: str | None) -> None:
    path = node.root / "run/nvidia-persistenced/nvidia-persistenced.pid"
    path.unlink() if text is None else path.write_text(text)
    check = found(node, "persistenced")
    assert (check.level, check.remedy) == (CheckLevel.WARNING, "systemctl enable --now nvidia-persistenced")


# --- confidential computing


@pytest.mark.parametrize(
    ("mode", "level", "words"),
    [
        ("on", CheckLevel.OK, "GPU 0, 1: in a confidential-computing mode"),
        ("devtools", CheckLevel.WARNING, "GPU 0, 1 is for debuggers"),
    ],
)
def test_confidential_computing_mode_is_shown_and_the_one_for_debuggers_is_a_warning(
    node: CheckContext, mode: str, level: CheckLevel, words: str
) -> None:
    devices = tuple(DeviceReport(f"GPU-{each}", str(each), confidential=mode) for each in range(2))
    check = found(serving(node, devices=devices), "confidential-computing")
    assert check.level is level
    assert words in check.message


def test_node_without_a_confidential_computing_mode_has_no_such_check(node: CheckContext) -> None:
    devices = (DeviceReport("GPU-0", "0"),)
    assert "confidential-computing" not in levels(serving(node, devices=devices))


# --- libraries


def test_missing_or_mismatched_python_package_is_named(node: CheckContext, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ["grpcio<2,>=999", "protobuf<1", "no-such-thing>=1", "rich", "cupy-cuda12x>=99; extra == 'cuda12'"]
    monkeypatch.setattr(metadata, "requires", lambda _: needs)
    check = found(node, "dependencies")
    assert check.level is CheckLevel.ERROR
    assert f"grpcio is version {metadata.version('grpcio')}, but >=999 is needed" in check.message
    assert f"protobuf is version {metadata.version('protobuf')}, but <1 is needed" in check.message
    assert "no-such-thing is not installed." in check.message
    assert "rich" not in check.message
    assert "cupy" not in check.message


def test_source_tree_without_installed_metadata_is_a_warning(
    node: CheckContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def requires(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    assert found(node, "dependencies").level is CheckLevel.WARNING


@pytest.mark.parametrize(
    ("installed", "expected", "level", "words"),
    [
        ({"nvidia-ml-py": "13.6", "cupy-cuda12x": "14.2"}, {}, CheckLevel.OK, "cupy-cuda12x 14.2"),
        ({"cupy-cuda12x": "14.2"}, {}, CheckLevel.ERROR, "(nvidia-ml-py)"),
        ({"nvidia-ml-py": "13.6"}, {}, CheckLevel.ERROR, "CuPy is not installed"),
        ({}, UNKNOWN, CheckLevel.WARNING, "CuPy are not installed"),
        ({}, SIM, CheckLevel.OK, "needs neither"),
        (
            {"nvidia-ml-py": "13.6", "cupy-cuda12x": "14", "cupy-cuda13x": "14"},
            {},
            CheckLevel.ERROR,
            "overwrite each other",
        ),
        (
            {"nvidia-ml-py": "13.6", "cupy-cuda13x": "14.2"},
            {},
            CheckLevel.ERROR,
            "from 580 on; this driver is 570.133.20",
        ),
    ],
)
def test_cuda_bindings_must_be_installed_and_match_the_driver(
    node: CheckContext,
    monkeypatch: pytest.MonkeyPatch,
    installed: dict[str, str],
    expected: dict[str, str],
    level: CheckLevel,
    words: str,
) -> None:
    monkeypatch.setattr(libraries, "_version", installed.get)
    (check,) = libraries.bindings(serving(node, **expected))
    assert (check.level, words in check.message) == (level, True), check.message


def test_bindings_and_driver_libraries_are_not_checked_without_a_driver(node: CheckContext) -> None:
    (node.root / "proc/driver/nvidia/version").unlink()
    assert {"driver-bindings", "driver-libraries"}.isdisjoint(levels(serving(node, **UNKNOWN)))


@pytest.mark.parametrize(("expected", "level"), [({}, CheckLevel.WARNING), (UNKNOWN, CheckLevel.ERROR)])
def test_driver_library_missing_from_the_usual_directories_is_named(
    node: CheckContext, expected: dict[str, str], level: CheckLevel
) -> None:
    (node.root / "usr/lib/x86_64-linux-gnu/libcuda.so.1").unlink()
    check = found(serving(node, **expected), "driver-libraries")
    assert (check.level, check.message.partition(" ")[0]) == (level, "libcuda.so.1")
    assert "--nvidia-driver-root" in check.remedy


def test_driver_library_is_found_through_the_loader_cache(node: CheckContext) -> None:
    (node.root / "usr/lib/x86_64-linux-gnu/libcuda.so.1").unlink()
    cache = write(node.root, "etc/ld.so.cache")
    cache.write_bytes(b"\xff\xfe\0libcuda.so.1\0/gone/libcuda.so.1\0/opt/d/libcuda.so.1\0\x80")
    assert found(node, "driver-libraries").level is CheckLevel.WARNING
    write(node.root, "opt/d/libcuda.so.1")
    check = found(node, "driver-libraries")
    assert (check.level, f"{node.root}/opt/d/libcuda.so.1" in check.message) == (CheckLevel.OK, True)


@pytest.mark.parametrize("kind", ["pipe", "endless"])
def test_loader_cache_that_is_no_regular_file_does_not_block(node: CheckContext, kind: str) -> None:
    (node.root / "usr/lib/x86_64-linux-gnu/libcuda.so.1").unlink()
    cache = write(node.root, "etc/ld.so.cache")
    cache.unlink()
    os.mkfifo(cache) if kind == "pipe" else cache.symlink_to("/dev/zero")
    assert found(node, "driver-libraries").level is CheckLevel.WARNING


# --- cgroups


def mounted(node: CheckContext, *lines: str) -> None:
    write(node.root, "proc/self/mountinfo", "".join(f"{line}\n" for line in lines).replace("ROOT", str(node.root)))


def test_cgroup_v2_with_cgroup_kill_is_reported_ok(node: CheckContext) -> None:
    check = found(node, "cgroups")
    assert check.message == (
        f"cgroup v2 at {node.root}/sys/fs/cgroup, pods in kubepods.slice; leftover processes are killed with cgroup.kill."
    )


def test_older_kernel_uses_the_freezer_and_the_oldest_kills_one_by_one(node: CheckContext) -> None:
    kubepods = node.root / "sys/fs/cgroup/kubepods.slice"
    (kubepods / "cgroup.kill").rename(kubepods / "cgroup.freeze")
    assert "are frozen, then killed" in found(node, "cgroups").message
    (kubepods / "cgroup.freeze").unlink()
    check = found(node, "cgroups")
    assert (check.level, "one by one" in check.message) == (CheckLevel.WARNING, True)


def test_cgroup_v2_without_nsdelegate_is_an_error(node: CheckContext) -> None:
    mounted(node, "30 20 0:9 / ROOT/sys/fs/cgroup rw - cgroup2 cgroup2 rw,memory_recursiveprot")
    check = found(node, "cgroups")
    assert (check.level, "without nsdelegate" in check.message) == (CheckLevel.ERROR, True)
    assert "mount -o remount,nsdelegate" in check.remedy


@pytest.mark.parametrize("options", ["rw", "rw,nsdelegate"])
def test_cgroup_v2_beside_v1_requires_nsdelegate(node: CheckContext, options: str) -> None:
    (node.root / "sys/fs/cgroup").rename(node.root / "v2")
    for each in ("pids", "freezer"):
        write(node.root, f"sys/fs/cgroup/{each}/cgroup.procs")
    (node.root / "sys/fs/cgroup/pids/kubepods").mkdir()
    (node.root / "v2").rename(node.root / "sys/fs/cgroup/unified")
    mounted(
        node,
        "31 20 0:8 / ROOT/sys/fs/cgroup/pids rw - cgroup cgroup rw,pids",
        f"32 20 0:9 / ROOT/sys/fs/cgroup/unified rw - cgroup2 cgroup2 {options}",
    )
    check = found(serving(node, paths=ServicePaths(cgroups=Path("/sys/fs/cgroup/pids"))), "cgroups")
    assert check.level is (CheckLevel.ERROR if options == "rw" else CheckLevel.OK)


@pytest.mark.parametrize("freezer", [True, False])
def test_pods_in_cgroup_v1_require_the_freezer(node: CheckContext, freezer: bool) -> None:
    (node.root / "sys/fs/cgroup").rename(node.root / "v2")
    write(node.root, "sys/fs/cgroup/pids/cgroup.procs")
    (node.root / "sys/fs/cgroup/pids/kubepods").mkdir()
    if freezer:
        write(node.root, "sys/fs/cgroup/freezer/cgroup.procs")
    mounted(node, "31 20 0:8 / ROOT/sys/fs/cgroup/pids rw - cgroup cgroup rw,pids")
    check = found(node, "cgroups")
    assert check.message.startswith(f"cgroup v1 at {node.root}/sys/fs/cgroup/pids, pods in kubepods; ")
    assert check.level is (CheckLevel.OK if freezer else CheckLevel.WARNING)
    assert ("mount -t cgroup -o freezer" in check.remedy) == (not freezer)


@pytest.mark.parametrize(("expected", "level"), [({}, CheckLevel.ERROR), (UNKNOWN, CheckLevel.WARNING)])
def test_missing_cgroups_are_reported_because_pod_processes_cannot_be_identified(
    node: CheckContext, expected: dict[str, str], level: CheckLevel
) -> None:
    (node.root / "sys/fs/cgroup").rename(node.root / "elsewhere")
    assert found(serving(node, **expected), "cgroups").level is level


def test_cgroups_that_cannot_be_watched_are_a_warning_that_names_the_limit(
    node: CheckContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> bool:
        raise OSError(errno.ENOSPC, "inotify: No space left on device (see fs.inotify.max_user_watches)")

    monkeypatch.setattr(Inotify, "add", refuse)
    check = found(node, "cgroups")
    assert (check.level, "fs.inotify.max_user_watches" in check.message) == (CheckLevel.WARNING, True)
    assert "sysctl -w" in check.remedy


def test_directory_that_is_no_mounted_hierarchy_is_not_trusted(node: CheckContext) -> None:
    mounted(node, "30 20 0:9 / ROOT/sys rw - tmpfs tmpfs rw")
    check = found(node, "cgroups")
    assert (check.level, "--cgroup-root" in check.remedy) == (CheckLevel.ERROR, True)


def test_simulated_node_that_uses_cgroups_has_its_cgroups_checked(node: CheckContext) -> None:
    theirs = serving(node, **SIM, paths=ServicePaths(cgroups=Path("/sys/fs/cgroup")))
    assert "cgroup v2" in found(theirs, "cgroups").message


@pytest.mark.parametrize(
    ("backend", "kubelet", "level", "part"),
    [
        (
            "sim",
            "real",
            CheckLevel.WARNING,
            "the kubelet in ROOT/var/lib/kubelet is real: its containers have no markers",
        ),
        (
            "nvidia",
            "real",
            CheckLevel.ERROR,
            "the kubelet in ROOT/var/lib/kubelet is real: its containers have no markers",
        ),
        ("sim", "emulated", CheckLevel.OK, "which the kubelet emulator's containers have"),
        ("sim", "none", CheckLevel.OK, "there is no kubelet in ROOT/var/lib/kubelet"),
    ],
)
def test_markers_beside_a_real_kubelet_are_reported(
    node: CheckContext, backend: str, kubelet: str, level: CheckLevel, part: str
) -> None:
    match kubelet:
        case "emulated":
            write(node.root, f"{KUBELET}/{EMULATOR_MARKER_FILE}")
        case "none":
            (node.root / KUBELET).rename(node.root / "elsewhere")
    check = found(serving(node, backend=backend, paths=ServicePaths(kubelet=Path("/var/lib/kubelet"))), "cgroups")
    assert check.level is level
    assert "by environment markers" in check.message
    assert part.replace("ROOT", str(node.root)) in check.message
    assert ("--container-identity cgroup" in check.remedy) == (kubelet == "real")


def test_read_only_cgroups_are_reported_because_leftovers_cannot_be_killed(
    node: CheckContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs

    def read_only(path: Path) -> os.statvfs_result:
        reported = list(real(path))
        reported[8] |= os.ST_RDONLY
        return os.statvfs_result(reported)

    monkeypatch.setattr(os, "statvfs", read_only)
    check = found(node, "cgroups")
    assert (check.level, "cannot be written" in check.message) == (CheckLevel.ERROR, True)
    assert "ProtectControlGroups=no" in check.remedy


# --- kernel and clock


def test_kernel_without_pidfds_is_an_error(node: CheckContext, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "pidfd_open", missing)
    check = found(node, "kernel")
    assert (check.level, "Linux 6.18.0-test has no pidfds" in check.message) == (CheckLevel.ERROR, True)


def test_kernel_feature_check_without_permission_is_never_ok(
    node: CheckContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def barred(_: int) -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "pidfd_open", barred)
    assert found(node, "kernel").level is CheckLevel.WARNING


def test_kernel_without_peer_pidfds_is_a_warning(node: CheckContext, monkeypatch: pytest.MonkeyPatch) -> None:
    class Older(socket.socket):
        def getsockopt(self, *_: object) -> int:  # type: ignore[override]
            raise OSError(errno.ENOPROTOOPT, os.strerror(errno.ENOPROTOOPT))

    monkeypatch.setattr(socket, "socketpair", lambda *_: (Older(), Older()))
    check = found(node, "kernel")
    assert (check.level, "6.5" in check.remedy) == (CheckLevel.WARNING, True)


def test_clock_at_the_unix_epoch_is_an_error(node: CheckContext) -> None:
    check = found(replace(node, now=60.0), "clock")
    assert (check.level, check.remedy.partition(" ")[0]) == (CheckLevel.ERROR, "timedatectl")


def test_missing_boot_id_is_never_ok(node: CheckContext) -> None:
    (node.root / "proc/sys/kernel/random/boot_id").unlink()
    assert found(node, "clock").level is CheckLevel.WARNING
    assert [check.name for check in check_node(node) if check.level is not CheckLevel.OK] == ["clock"]
