"""``scrubber doctor`` on the machine: the driver, its libraries and nodes, cgroups, kernel and clock."""

import errno
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from scrubber.config.settings import EMULATED
from scrubber.doctor import libraries
from scrubber.doctor.examination import examine
from scrubber.doctor.finding import Check, Level, Node, Places
from tests.doctor.stage import KUBELET, found, healthy, levels, serving, write

SIM = {"backend": "sim"}
UNKNOWN = {"backend": "", "refusal": "Nobody answers."}


@pytest.fixture
def node(short_tmp: Path) -> Iterator[Node]:
    with healthy(short_tmp) as node:
        yield node


# --- the devices' nodes


def test_a_gpu_that_any_local_user_may_open_is_named_with_the_drivers_options(node: Node) -> None:
    for name, mode in {"nvidia0": 0o660, "nvidia1": 0o666, "nvidia2": 0o604, "nvidiactl": 0o666}.items():
        write(node.root, f"dev/{name}").chmod(mode)
    check = found(node, "device-nodes")
    assert check.level is Level.WARNING
    assert f"{node.root}/dev/nvidia1 (0666), {node.root}/dev/nvidia2 (0604), past the kubelet" in check.sentence
    assert "NVreg_DeviceFileMode=0660" in check.remedy


def test_a_node_without_gpus_has_no_nodes_to_look_at(node: Node) -> None:
    (node.root / "dev/nvidia0").unlink()
    assert "device-nodes" not in levels(node)


@pytest.mark.parametrize(("backend", "told"), [("nvidia", True), ("sim", False), ("", False)])
def test_where_use_is_seen_by_driver_contexts_alone_it_is_said(node: Node, backend: str, told: bool) -> None:
    checks = [check for check in examine(serving(node, backend=backend)) if check.name == "unauthorized-use"]
    assert [("only has a GPU's device node open is not seen" in check.sentence) for check in checks] == [True] * told


# --- the driver


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build\nGCC version: gcc 12.2.0\n",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.133.20  Tue Jun  6 22:20:39 UTC 2023\n",
    ],
)
def test_the_driver_is_named_by_its_version(node: Node, text: str) -> None:
    write(node.root, "proc/driver/nvidia/version", text)
    assert found(node, "driver") == Check("driver", Level.OK, "NVIDIA's driver 570.133.20 is loaded.")


def test_a_driver_that_names_no_version_is_a_warning(node: Node) -> None:
    write(node.root, "proc/driver/nvidia/version", "NVRM version: none\n")
    assert found(node, "driver").level is Level.WARNING


@pytest.mark.parametrize(("said", "level"), [({}, Level.ERROR), (SIM, Level.OK), (UNKNOWN, Level.WARNING)])
def test_a_missing_driver_matters_to_whoever_needs_one(node: Node, said: dict[str, str], level: Level) -> None:
    (node.root / "proc/driver/nvidia/version").unlink()
    assert found(serving(node, **said), "driver").level is level


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


# --- libraries


def test_a_library_that_is_missing_or_of_another_age_is_named(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ["grpcio<2,>=999", "protobuf<1", "no-such-thing>=1", "rich", "cupy-cuda12x>=99; extra == 'cuda12'"]
    monkeypatch.setattr(metadata, "requires", lambda _: needs)
    check = found(node, "libraries")
    assert check.level is Level.ERROR
    assert f"grpcio is {metadata.version('grpcio')}, and >=999 is needed" in check.sentence
    assert f"protobuf is {metadata.version('protobuf')}, and <1 is needed" in check.sentence
    assert "no-such-thing is not installed." in check.sentence
    assert "rich" not in check.sentence
    assert "cupy" not in check.sentence


def test_a_tree_that_is_not_installed_says_nothing_of_what_it_needs(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def requires(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    assert found(node, "libraries").level is Level.WARNING


@pytest.mark.parametrize(
    ("installed", "said", "level", "words"),
    [
        ({"nvidia-ml-py": "13.6", "cupy-cuda12x": "14.2"}, {}, Level.OK, "cupy-cuda12x 14.2"),
        ({"cupy-cuda12x": "14.2"}, {}, Level.ERROR, "(nvidia-ml-py)"),
        ({"nvidia-ml-py": "13.6"}, {}, Level.ERROR, "CuPy is not installed"),
        ({}, UNKNOWN, Level.WARNING, "CuPy are not installed"),
        ({}, SIM, Level.OK, "needs neither"),
        ({"nvidia-ml-py": "13.6", "cupy-cuda12x": "14", "cupy-cuda13x": "14"}, {}, Level.ERROR, "overwrite each other"),
        ({"nvidia-ml-py": "13.6", "cupy-cuda13x": "14.2"}, {}, Level.ERROR, "from 580 on; this one is 570.133.20"),
    ],
)
def test_the_bindings_are_there_and_fit_the_driver(
    node: Node,
    monkeypatch: pytest.MonkeyPatch,
    installed: dict[str, str],
    said: dict[str, str],
    level: Level,
    words: str,
) -> None:
    monkeypatch.setattr(libraries, "_version", installed.get)
    (check,) = libraries.bindings(serving(node, **said))
    assert (check.level, words in check.sentence) == (level, True), check.sentence


def test_bindings_and_libraries_are_nobodys_concern_where_there_is_no_driver(node: Node) -> None:
    (node.root / "proc/driver/nvidia/version").unlink()
    assert {"bindings", "driver-libraries"}.isdisjoint(levels(serving(node, **UNKNOWN)))


@pytest.mark.parametrize(("said", "level"), [({}, Level.WARNING), (UNKNOWN, Level.ERROR)])
def test_a_library_of_the_drivers_that_is_in_no_usual_place_is_named(
    node: Node, said: dict[str, str], level: Level
) -> None:
    (node.root / "usr/lib/x86_64-linux-gnu/libcuda.so.1").unlink()
    check = found(serving(node, **said), "driver-libraries")
    assert (check.level, check.sentence.partition(" ")[0]) == (level, "libcuda.so.1")
    assert "--nvidia-driver-root" in check.remedy


def test_the_loaders_cache_says_where_else_a_library_is(node: Node) -> None:
    (node.root / "usr/lib/x86_64-linux-gnu/libcuda.so.1").unlink()
    cache = write(node.root, "etc/ld.so.cache")
    cache.write_bytes(b"\xff\xfe\0libcuda.so.1\0/gone/libcuda.so.1\0/opt/d/libcuda.so.1\0\x80")
    assert found(node, "driver-libraries").level is Level.WARNING
    write(node.root, "opt/d/libcuda.so.1")
    check = found(node, "driver-libraries")
    assert (check.level, f"{node.root}/opt/d/libcuda.so.1" in check.sentence) == (Level.OK, True)


@pytest.mark.parametrize("kind", ["pipe", "endless"])
def test_a_cache_of_the_loaders_that_is_none_is_not_waited_for(node: Node, kind: str) -> None:
    (node.root / "usr/lib/x86_64-linux-gnu/libcuda.so.1").unlink()
    cache = write(node.root, "etc/ld.so.cache")
    cache.unlink()
    os.mkfifo(cache) if kind == "pipe" else cache.symlink_to("/dev/zero")
    assert found(node, "driver-libraries").level is Level.WARNING


# --- cgroups


def mounted(node: Node, *lines: str) -> None:
    write(node.root, "proc/self/mountinfo", "".join(f"{line}\n" for line in lines).replace("ROOT", str(node.root)))


def test_pods_are_found_in_v2_and_ended_by_its_own_switch(node: Node) -> None:
    check = found(node, "cgroups")
    assert check.sentence == (
        f"cgroup v2 at {node.root}/sys/fs/cgroup, pods in kubepods.slice; leftovers are ended by cgroup.kill."
    )


def test_an_older_kernel_freezes_and_the_oldest_does_neither(node: Node) -> None:
    kubepods = node.root / "sys/fs/cgroup/kubepods.slice"
    (kubepods / "cgroup.kill").rename(kubepods / "cgroup.freeze")
    assert "are frozen, then ended" in found(node, "cgroups").sentence
    (kubepods / "cgroup.freeze").unlink()
    check = found(node, "cgroups")
    assert (check.level, "one by one" in check.sentence) == (Level.WARNING, True)


def test_a_v2_hierarchy_in_which_cgroup_namespaces_are_no_boundary_is_an_error(node: Node) -> None:
    mounted(node, "30 20 0:9 / ROOT/sys/fs/cgroup rw - cgroup2 cgroup2 rw,memory_recursiveprot")
    check = found(node, "cgroups")
    assert (check.level, "without nsdelegate" in check.sentence) == (Level.ERROR, True)
    assert "mount -o remount,nsdelegate" in check.remedy


@pytest.mark.parametrize("options", ["rw", "rw,nsdelegate"])
def test_a_v2_hierarchy_beside_v1_wants_nsdelegate_just_the_same(node: Node, options: str) -> None:
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
    check = found(serving(node, places=Places(cgroups=Path("/sys/fs/cgroup/pids"))), "cgroups")
    assert check.level is (Level.ERROR if options == "rw" else Level.OK)


@pytest.mark.parametrize("freezer", [True, False])
def test_pods_in_v1_want_the_freezer(node: Node, freezer: bool) -> None:
    (node.root / "sys/fs/cgroup").rename(node.root / "v2")
    write(node.root, "sys/fs/cgroup/pids/cgroup.procs")
    (node.root / "sys/fs/cgroup/pids/kubepods").mkdir()
    if freezer:
        write(node.root, "sys/fs/cgroup/freezer/cgroup.procs")
    mounted(node, "31 20 0:8 / ROOT/sys/fs/cgroup/pids rw - cgroup cgroup rw,pids")
    check = found(node, "cgroups")
    assert check.sentence.startswith(f"cgroup v1 at {node.root}/sys/fs/cgroup/pids, pods in kubepods; ")
    assert check.level is (Level.OK if freezer else Level.WARNING)
    assert ("mount -t cgroup -o freezer" in check.remedy) == (not freezer)


@pytest.mark.parametrize(("said", "level"), [({}, Level.ERROR), (UNKNOWN, Level.WARNING)])
def test_without_cgroups_no_process_is_known_as_a_pods(node: Node, said: dict[str, str], level: Level) -> None:
    (node.root / "sys/fs/cgroup").rename(node.root / "elsewhere")
    assert found(serving(node, **said), "cgroups").level is level


def test_a_directory_that_is_no_mounted_hierarchy_is_not_believed(node: Node) -> None:
    mounted(node, "30 20 0:9 / ROOT/sys rw - tmpfs tmpfs rw")
    check = found(node, "cgroups")
    assert (check.level, "--cgroup-root" in check.remedy) == (Level.ERROR, True)


def test_a_simulated_node_that_uses_cgroups_has_them_looked_at(node: Node) -> None:
    theirs = serving(node, **SIM, places=Places(cgroups=Path("/sys/fs/cgroup")))
    assert "cgroup v2" in found(theirs, "cgroups").sentence


@pytest.mark.parametrize(
    ("backend", "kubelet", "level", "part"),
    [
        ("sim", "real", Level.WARNING, "the kubelet in ROOT/var/lib/kubelet is real: its containers carry no markers"),
        ("nvidia", "real", Level.ERROR, "the kubelet in ROOT/var/lib/kubelet is real: its containers carry no markers"),
        ("sim", "emulated", Level.OK, "as the kubelet emulator's containers carry them"),
        ("sim", "none", Level.OK, "there is no kubelet in ROOT/var/lib/kubelet"),
    ],
)
def test_markers_are_what_the_containers_of_no_real_kubelet_carry(
    node: Node, backend: str, kubelet: str, level: Level, part: str
) -> None:
    match kubelet:
        case "emulated":
            write(node.root, f"{KUBELET}/{EMULATED}")
        case "none":
            (node.root / KUBELET).rename(node.root / "elsewhere")
    check = found(serving(node, backend=backend, places=Places(kubelet=Path("/var/lib/kubelet"))), "cgroups")
    assert check.level is level
    assert "by environment markers" in check.sentence
    assert part.replace("ROOT", str(node.root)) in check.sentence
    assert ("--containers cgroup" in check.remedy) == (kubelet == "real")


def test_cgroups_that_cannot_be_written_end_nobody(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs

    def read_only(path: Path) -> os.statvfs_result:
        told = list(real(path))
        told[8] |= os.ST_RDONLY
        return os.statvfs_result(told)

    monkeypatch.setattr(os, "statvfs", read_only)
    check = found(node, "cgroups")
    assert (check.level, "cannot be written" in check.sentence) == (Level.ERROR, True)
    assert "ProtectControlGroups=no" in check.remedy


# --- kernel and clock


def test_a_kernel_without_pidfds_signals_nobody_safely(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "pidfd_open", missing)
    check = found(node, "kernel")
    assert (check.level, "Linux 6.18.0-test has no pidfds" in check.sentence) == (Level.ERROR, True)


def test_a_kernel_that_does_not_let_us_ask_is_not_called_ok(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def barred(_: int) -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "pidfd_open", barred)
    assert found(node, "kernel").level is Level.WARNING


def test_a_kernel_that_knows_its_peers_by_number_alone_is_a_warning(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Older(socket.socket):
        def getsockopt(self, *_: object) -> int:  # type: ignore[override]
            raise OSError(errno.ENOPROTOOPT, os.strerror(errno.ENOPROTOOPT))

    monkeypatch.setattr(socket, "socketpair", lambda *_: (Older(), Older()))
    check = found(node, "kernel")
    assert (check.level, "6.5" in check.remedy) == (Level.WARNING, True)


def test_a_clock_that_begins_with_unix_is_set_before_anything_is_proved(node: Node) -> None:
    check = found(replace(node, now=60.0), "clock")
    assert (check.level, check.remedy.partition(" ")[0]) == (Level.ERROR, "timedatectl")


def test_a_boot_that_cannot_be_named_is_not_called_ok(node: Node) -> None:
    (node.root / "proc/sys/kernel/random/boot_id").unlink()
    assert found(node, "clock").level is Level.WARNING
    assert [check.name for check in examine(node) if check.level is not Level.OK] == ["clock"]
