"""Names of cgroups as kubelets and runtimes write them, and ``/proc`` texts as kernels write them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrubber.adapters.cgroups.hierarchy import Hierarchy, hierarchy_of, sibling_hierarchies
from scrubber.adapters.cgroups.paths import (
    is_valid_uid,
    kubepods_below,
    mentions_pod,
    pod_directories,
    pod_uid_of_path,
    stray_directories,
)
from scrubber.adapters.cgroups.procfs import ProcFs
from scrubber.adapters.cgroups.tree import CgroupTree
from scrubber.adapters.kernel_text import parse_stat
from scrubber.domain.errors import InvalidConfiguration, Unreadable
from tests.pods import only_with

UID = "1f6e5f0e-8a57-4f7c-9d57-0b8c5f2f3a11"
SYSTEMD_UID = UID.replace("-", "_")
OTHER = "2d0b51c5-57b5-4a0f-8f0b-7a4f6f1e9c22"
SYSTEMD_OTHER = OTHER.replace("-", "_")
STATIC_UID = "5b9c0b8f0d6a2d7a3c5b2a1f4e6d7c8b"
ID = "3fa9" * 16
SLICES = f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SYSTEMD_UID}.slice"

V1_SYSTEMD = f"""\
12:pids:/{SLICES}/docker-{ID}.scope
11:cpu,cpuacct:/{SLICES}/docker-{ID}.scope
10:freezer:/{SLICES}/docker-{ID}.scope
2:net_cls,net_prio:/
1:name=systemd:/{SLICES}/docker-{ID}.scope
"""

RECORDED = {
    "containerd, systemd, v2": f"0::/{SLICES}/cri-containerd-{ID}.scope\n",
    "containerd, systemd, guaranteed, v2": f"0::/kubepods.slice/kubepods-pod{SYSTEMD_UID}.slice/cri-containerd-{ID}.scope\n",
    "containerd, cgroupfs, v2": f"0::/kubepods/besteffort/pod{UID}/{ID}\n",
    "containerd, cgroupfs, guaranteed, v2": f"0::/kubepods/pod{UID}/{ID}\n",
    "cri-o, systemd, v2": f"0::/{SLICES}/crio-{ID}.scope/container\n",
    "cri-o, cgroupfs, v2": f"0::/kubepods/burstable/pod{UID}/crio-{ID}\n",
    "docker, systemd, v2": f"0::/{SLICES}/docker-{ID}.scope\n",
    "docker, cgroupfs, v2": f"0::/kubepods/burstable/pod{UID}/{ID}\n",
    "containerd, systemd, v1": V1_SYSTEMD.replace("docker-", "cri-containerd-"),
    "cri-o, systemd, v1": V1_SYSTEMD.replace("docker-", "crio-"),
    "docker, systemd, v1": V1_SYSTEMD,
    "docker, cgroupfs, v1": f"9:pids:/kubepods/burstable/pod{UID}/{ID}\n1:name=systemd:/kubepods/burstable/pod{UID}/{ID}\n",
    "v1 and v2 side by side": f"4:pids:/kubepods/pod{UID}/{ID}\n1:name=systemd:/kubepods/pod{UID}/{ID}\n0::/\n",
    "from another cgroup namespace": f"0::/../../{SLICES.split('/', 1)[1]}/cri-containerd-{ID}.scope\n",
    "kind, systemd": (
        f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/"
        f"kubelet-kubepods-besteffort-pod{SYSTEMD_UID}.slice/cri-containerd-{ID}.scope\n"
    ),
    "kind, cgroupfs": f"0::/kubelet/kubepods/besteffort/pod{UID}/{ID}\n",
    "containerd with the driver that the kubelet has not": (
        f"0::/system.slice/containerd.service/kubepods-burstable-pod{SYSTEMD_UID}.slice:cri-containerd:{ID}\n"
    ),
    "nested below the container": f"0::/{SLICES}/cri-containerd-{ID}.scope/system.slice/cron.service\n",
    "the same, v1": (
        f"9:pids:/system.slice/containerd.service/kubepods-pod{SYSTEMD_UID}.slice:cri-containerd:{ID}\n"
        f"1:name=systemd:/system.slice/containerd.service/kubepods-pod{SYSTEMD_UID}.slice:cri-containerd:{ID}\n"
    ),
    "the same, below no service": f"0::/kubepods-besteffort-pod{SYSTEMD_UID}.slice:cri-containerd:{ID}\n",
    "cri-o's monitor": f"0::/{SLICES}/crio-conmon-{ID}.scope\n",
    "the pod's own": f"0::/{SLICES}\n",
    "removed while a zombie is left": f"0::/kubepods/pod{UID}/{ID} (deleted)\n",
    "removed pod": f"0::/kubepods/pod{UID} (deleted)\n",
}

NO_POD = {
    "the host's": "0::/system.slice/containerd.service\n",
    "a docker container of no pod": f"0::/docker/{ID}\n12:pids:/docker/{ID}\n",
    "a user session": "0::/user.slice/user-1000.slice/session-2.scope\n",
    "the class's own slice": "0::/kubepods.slice/kubepods-burstable.slice\n",
    "pod without kubepods": f"0::/machine/pod{UID}/{ID}\n",
    "kubepods with something in between": f"0::/kubepods/other/pod{UID}/{ID}\n",
    "root": "0::/\n",
    "nothing": "",
    "nonsense": "not a cgroup line\n:\n",
}


BASES = ("kubepods.slice", "kubepods", "kubelet.slice/kubelet-kubepods.slice", "kubelet/kubepods")
"""Where kubelets put their pods; no node has all of them."""


def test_pod_of_a_recorded_process_is_identified_in_every_hierarchy() -> None:
    for name, text in RECORDED.items():
        found = {line.split(":")[1]: pod_uid_of_path(line.split(":", 2)[2], BASES) for line in text.splitlines()}
        elsewhere = {"net_cls,net_prio"} if "net_cls" in text else set()
        elsewhere |= {""} if "side by side" in name else set()
        assert found == {names: None if names in elsewhere else UID for names in found}, name


@pytest.mark.parametrize("name", NO_POD)
def test_process_outside_pods_has_no_pod_uid(name: str) -> None:
    for line in NO_POD[name].splitlines():
        assert pod_uid_of_path(line.rpartition(":")[2], BASES) is None


def test_static_pod_uid_has_no_dashes() -> None:
    slices = f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{STATIC_UID}.slice"
    assert pod_uid_of_path(slices, BASES) == STATIC_UID
    assert pod_uid_of_path(f"/kubepods/burstable/pod{STATIC_UID}/{ID}", BASES) == STATIC_UID


FORGED = {
    "kubepods in a container": (f"/kubepods/pod{UID}/{ID}/kubepods/pod{OTHER}/{ID}", UID),
    "a slice in a container": (f"/{SLICES}/x.scope/kubepods.slice/kubepods-pod{SYSTEMD_OTHER}.slice/y", UID),
    "a stray in a container": (f"/{SLICES}/x.scope/kubepods-pod{SYSTEMD_OTHER}.slice:cri-containerd:{ID}", UID),
    "a pod in a pod's place of a container": (f"/kubepods/burstable/pod{UID}/pod{OTHER}", UID),
    "a slice in a user's service": (
        f"/user.slice/user-1000.slice/user@1000.service/kubepods-pod{SYSTEMD_OTHER}.slice",
        None,
    ),
    "any prefix in a user's service": (
        f"/user.slice/user-1000.slice/user@1000.service/app-kubepods-burstable-pod{SYSTEMD_OTHER}.slice/{ID}",
        None,
    ),
    "kubepods in a user's service": (
        f"/user.slice/user-1000.slice/user@1000.service/kubepods/burstable/pod{OTHER}/{ID}",
        None,
    ),
    "a stray in a user's service": (
        f"/user.slice/user-1000.slice/user@1000.service/kubepods-pod{SYSTEMD_OTHER}.slice:cri-containerd:{ID}",
        None,
    ),
    "a stray deep in a service": (
        f"/system.slice/x.service/sub/kubepods-pod{SYSTEMD_OTHER}.slice:cri-containerd:{ID}",
        None,
    ),
    "kubepods in a container of no pod": (f"/docker/{ID}/kubepods/pod{OTHER}/{ID}", None),
    "a slice of another stem in kubepods": (f"/kubepods.slice/x-kubepods-pod{SYSTEMD_OTHER}.slice/{ID}", None),
    "beside the pods, not among them": (f"/kubepods/burstable/other/pod{OTHER}/{ID}", None),
}


@pytest.mark.parametrize("name", FORGED)
def test_pod_name_counts_only_where_the_kubelet_creates_pod_cgroups(name: str) -> None:
    path, uid = FORGED[name]
    assert pod_uid_of_path(path, ("kubepods.slice", "kubepods")) == uid


def test_no_pod_name_counts_where_the_kubelet_has_no_cgroups() -> None:
    assert pod_uid_of_path(f"/{SLICES}/x", ()) is None
    assert pod_uid_of_path(f"/kubepods/pod{UID}/{ID}", ("kubelet/kubepods",)) is None


@pytest.mark.parametrize(
    "path",
    [
        f"/../../../kubepods/burstable/pod{UID}/{ID}",
        f"/../../../burstable/pod{UID}/{ID}",
        f"/../../pod{UID}/{ID}",
        f"/../../../../kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SYSTEMD_UID}.slice/x.scope",
        f"/../../kubepods-burstable.slice/kubepods-burstable-pod{SYSTEMD_UID}.slice/x.scope",
        f"/../kubepods-burstable-pod{SYSTEMD_UID}.slice/x.scope/kubepods-pod{SYSTEMD_OTHER}.slice",
    ],
)
def test_service_in_its_own_cgroup_namespace_identifies_pods(path: str) -> None:
    assert pod_uid_of_path(path, BASES) == UID
    assert pod_uid_of_path(f"/..{path}", BASES) == UID


def test_nested_cgroup_of_the_services_own_pod_cannot_name_another_pod() -> None:
    assert pod_uid_of_path(f"/../{ID}/kubepods/pod{OTHER}/{ID}", BASES) is None


def tree(version: int = 2, below: str = "/", root: Path = Path("/"), *, names: tuple[str, ...] = ()) -> CgroupTree:
    return CgroupTree(Hierarchy(root, version, frozenset(names), below), ProcFs())


def test_node_that_is_itself_a_pod_resolves_pods_from_its_own_root(tmp_path: Path) -> None:
    (tmp_path / "kubepods").mkdir()
    outer = f"/kubepods/pod{OTHER}/{ID}"
    node = tree(below=outer, root=tmp_path)
    assert node.pod_uid_in({"": f"{outer}/kubepods/pod{UID}/{ID}"}) == UID
    assert node.pod_uid_in({"": f"{outer}/system.slice/kubelet.service"}) is None
    assert node.pod_uid_in({"": f"/kubepods/pod{UID}/{ID}"}) is None, "it is a pod of the outer node"
    assert tree(root=tmp_path).pod_uid_in({"": f"{outer}/kubepods/pod{UID}/{ID}"}) == OTHER


def test_each_hierarchy_reads_its_own_line_of_proc_cgroup(tmp_path: Path) -> None:
    (tmp_path / "kubepods").mkdir()
    text = {"pids": f"/kubepods/pod{UID}/{ID}", "cpu,cpuacct": f"/kubepods/pod{OTHER}/{ID}", "": "/"}
    assert tree(1, root=tmp_path, names=("pids",)).pod_uid_in(text) == UID
    assert tree(1, root=tmp_path, names=("cpuacct",)).pod_uid_in(text) == OTHER
    assert tree(2, root=tmp_path).pod_uid_in(text) is None
    assert tree(1, root=tmp_path, names=("freezer",)).pod_uid_in(text) is None


def test_pod_is_found_anywhere_in_the_text_when_checking_for_a_wrong_root() -> None:
    for name, text in RECORDED.items():
        assert mentions_pod(text.encode(), UID), name
        assert not mentions_pod(text.encode(), OTHER), name


# --- directories ---


@given(st.uuids(), st.sampled_from(BASES))
def test_every_candidate_pod_directory_resolves_to_its_pod_uid(uid: object, base: str) -> None:
    for directory in pod_directories(Path("/", base), str(uid)):
        assert pod_uid_of_path(f"{directory}/{ID}", BASES) == str(uid)


@pytest.mark.parametrize(
    "kubepods",
    [
        "kubepods.slice",
        "kubepods",
        "kubelet.slice/kubelet-kubepods.slice",
        "kubelet/kubepods",
        "a.slice/a-b.slice/a-b-kubepods.slice",
    ],
)
def test_kubelet_cgroups_are_found_at_the_top_or_below_a_configured_root(tmp_path: Path, kubepods: str) -> None:
    (tmp_path / "system.slice" / "containerd.service").mkdir(parents=True)
    (tmp_path / kubepods).mkdir(parents=True)
    assert kubepods_below(tmp_path) == (tmp_path / kubepods,)
    assert kubepods_below((tmp_path / kubepods).parent) == (tmp_path / kubepods,), "also when that root is named"


def test_cgroups_of_both_drivers_count_while_a_node_migrates(tmp_path: Path) -> None:
    for name in ("kubepods.slice", "kubepods"):
        (tmp_path / name).mkdir()
    assert set(kubepods_below(tmp_path)) == {tmp_path / "kubepods.slice", tmp_path / "kubepods"}


@pytest.mark.parametrize(
    "forged",
    [
        "user.slice/user-1000.slice/user@1000.service/kubepods.slice",
        "user@1000.service/kubepods",
        "docker-abc.scope/kubepods",
        "a/b/kubepods",
    ],
)
def test_unit_or_deeper_cgroup_is_not_a_kubelet_root(tmp_path: Path, forged: str) -> None:
    (tmp_path / forged).mkdir(parents=True)
    assert kubepods_below(tmp_path) == ()


@only_with(os.geteuid() == 0)
def test_cgroup_delegated_to_a_user_is_no_kubelet_root_and_no_runtime_cgroup(tmp_path: Path) -> None:
    (tmp_path / "given" / "kubepods").mkdir(parents=True)
    service = tmp_path / "system.slice" / "x.service"
    stray = service / f"kubepods-pod{SYSTEMD_UID}.slice:cri-containerd:{ID}"
    stray.mkdir(parents=True)
    assert kubepods_below(tmp_path) == (tmp_path / "given" / "kubepods",)
    assert stray_directories(tmp_path, UID) == (stray,)
    assert stray_directories(tmp_path, OTHER) == ()
    for each in (tmp_path / "given", service):
        os.chown(each, 12_345, -1)
    assert kubepods_below(tmp_path) == ()
    assert stray_directories(tmp_path, UID) == ()


@given(st.text())
def test_arbitrary_text_never_breaks_the_cgroup_path_parser(text: str) -> None:
    found = pod_uid_of_path(text, BASES)
    assert found is None or "/" not in found


@given(st.text())
def test_usable_pod_uid_cannot_escape_its_directory(text: str) -> None:
    if is_valid_uid(text):
        assert Path("/base", f"pod{text}").resolve().parent == Path("/base")


# --- mounts ---

MOUNTS = rb"""24 30 0:22 / /proc rw,nosuid shared:5 - proc proc rw
30 1 8:1 / / rw,relatime - ext4 /dev/root rw
41 30 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - tmpfs tmpfs rw,mode=755
42 41 0:27 / /sys/fs/cgroup/unified rw,nosuid - cgroup2 cgroup2 rw,nsdelegate
43 41 0:28 /kubepods/podOUTER/node /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids
44 41 0:29 /kubepods/podOUTER/node /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer
45 41 0:30 / /sys/fs/cgroup/with\040space rw - cgroup cgroup rw,xattr,name=systemd
"""


def test_cgroup_v2_root_is_identified_by_its_mount() -> None:
    found = hierarchy_of(Path("/sys/fs/cgroup/unified/part"), MOUNTS)
    assert (found.version, found.controllers, found.path) == (2, frozenset(), "/part")


def test_cgroup_v1_root_inside_another_container_starts_at_its_mount() -> None:
    found = hierarchy_of(Path("/sys/fs/cgroup/pids/part"), MOUNTS)
    assert (found.version, found.controllers) == (1, frozenset({"pids"}))
    assert found.path == "/kubepods/podOUTER/node/part"


def test_other_hierarchies_with_pods_are_found_in_the_mount_table(tmp_path: Path) -> None:
    names = ("unified", "pids", "systemd", "cpuset", "freezer")
    lines = [f"41 30 0:26 / {tmp_path} rw - tmpfs tmpfs rw"]
    for number, name in enumerate(names):
        (tmp_path / name / "part").mkdir(parents=True)
        kind, options = ("cgroup2", "rw") if name == "unified" else ("cgroup", f"rw,xattr,{name}")
        options = options.replace("systemd", "name=systemd")
        lines.append(f"{50 + number} 41 0:{number} / {tmp_path / name} rw - {kind} {kind} {options}")
    (tmp_path / "freezer" / "part").rmdir()
    mounts = "\n".join(lines).encode()
    first = hierarchy_of(tmp_path / "pids" / "part", mounts)
    others = sibling_hierarchies(first, mounts)
    assert [(each.root.parent.name, each.version, each.path) for each in others] == [
        ("unified", 2, "/part"),
        ("systemd", 1, "/part"),
    ]


def test_named_hierarchy_is_requested_by_its_name() -> None:
    assert hierarchy_of(Path("/sys/fs/cgroup/with space"), MOUNTS).controllers == frozenset({"name=systemd"})


@pytest.mark.parametrize("root", ["/", "/proc", "/sys/fs/cgroup", "/srv"])
def test_root_outside_every_cgroup_hierarchy_is_refused(root: str) -> None:
    with pytest.raises(InvalidConfiguration, match="not in a cgroup hierarchy"):
        hierarchy_of(Path(root), MOUNTS)


# --- processes ---


def test_command_name_cannot_forge_a_start_time() -> None:
    name = b"x) Z 1 1 1 0 -1 4194560 1 1 1 1 1 1 1 1 20 0 1 0 99 ("
    rest = b") S 7 8 8 0 -1 4194304" + b" 0" * 12 + b" 4242" + b" 0" * 27 + b" 5000 6000" + b" 0\n"
    stat = parse_stat(b"1234 (" + name + rest)
    assert (stat.pid, stat.state, stat.parent, stat.started) == (1234, "S", 7, 4242)
    assert stat.identity == (1234, 4242)
    assert not stat.kernel_thread


def test_proc_stat_of_this_process_is_parsed() -> None:
    stat = parse_stat(Path("/proc/self/stat").read_bytes())
    assert stat.state == "R"
    assert stat.started > 0
    assert 0 < stat.environment_range[0] < stat.environment_range[1]


@pytest.mark.parametrize("data", [b"1", b"", b"1 (sh) S 1", b"x (sh) S" + b" 1" * 50, b"1 (sh)  " + b" 1" * 50])
def test_malformed_proc_stat_is_unreadable(data: bytes) -> None:
    with pytest.raises(Unreadable):
        parse_stat(data)
