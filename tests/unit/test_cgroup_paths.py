"""Names of cgroups as kubelets and runtimes write them, and ``/proc`` texts as kernels do."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrubber.adapters.containers.hierarchy import hierarchy_of
from scrubber.adapters.containers.paths import pod_directories, pod_uid_in, pod_uid_of_path, usable_uid
from scrubber.adapters.proc import parse_stat
from scrubber.domain.errors import BadConfiguration, Unreadable

UID = "1f6e5f0e-8a57-4f7c-9d57-0b8c5f2f3a11"
SYSTEMD_UID = UID.replace("-", "_")
OTHER = "2d0b51c5-57b5-4a0f-8f0b-7a4f6f1e9c22"
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
    "kind, cgroupfs": f"0::/docker/{ID}/kubelet/kubepods/besteffort/pod{UID}/{ID}\n",
    "containerd with the driver that the kubelet has not": (
        f"0::/system.slice/containerd.service/kubepods-burstable-pod{SYSTEMD_UID}.slice:cri-containerd:{ID}\n"
    ),
    "nested below the container": f"0::/{SLICES}/cri-containerd-{ID}.scope/system.slice/cron.service\n",
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


@pytest.mark.parametrize("name", RECORDED)
def test_the_pod_of_a_recorded_process_is_known(name: str) -> None:
    assert pod_uid_in(RECORDED[name]) == UID
    assert pod_uid_in(RECORDED[name], controllers={"pids"}) == UID
    assert pod_uid_in(RECORDED[name], controllers={"name=systemd"}) == UID


@pytest.mark.parametrize("name", NO_POD)
def test_a_process_of_no_pod_has_no_uid(name: str) -> None:
    assert pod_uid_in(NO_POD[name]) is None


def test_a_static_pods_uid_has_no_dashes() -> None:
    assert (
        pod_uid_of_path(f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{STATIC_UID}.slice")
        == STATIC_UID
    )
    assert pod_uid_of_path(f"/kubepods/burstable/pod{STATIC_UID}/{ID}") == STATIC_UID


def test_the_outermost_pod_counts_for_the_inner_name_is_the_tenants_to_forge() -> None:
    assert pod_uid_in(f"0::/kubepods/pod{UID}/{ID}/kubepods/pod{OTHER}/{ID}\n") == UID
    assert pod_uid_in(f"0::/{SLICES}/x.scope/kubepods.slice/kubepods-pod{OTHER.replace('-', '_')}.slice/y\n") == UID


def test_a_node_that_is_itself_a_pod_counts_from_its_own_root() -> None:
    nested = f"0::/kubepods/pod{OTHER}/{ID}/kubepods/pod{UID}/{ID}\n"
    assert pod_uid_in(nested, below=f"/kubepods/pod{OTHER}/{ID}") == UID
    assert pod_uid_in(nested) == OTHER


def test_the_hierarchy_that_holds_the_pods_is_asked_first() -> None:
    text = f"4:pids:/kubepods/pod{UID}/{ID}\n3:memory:/kubepods/pod{OTHER}/{ID}\n0::/kubepods/pod{OTHER}/{ID}\n"
    assert pod_uid_in(text, controllers={"pids"}) == UID
    assert pod_uid_in(text) == OTHER


@given(st.uuids(), st.sampled_from(["kubepods.slice", "kubelet-kubepods.slice", "kubepods"]))
def test_every_directory_that_is_looked_for_names_its_pod(uid: object, base: str) -> None:
    for directory in pod_directories(Path("/", base), str(uid)):
        assert pod_uid_of_path(f"{directory}/{ID}") == str(uid)


@given(st.text())
def test_no_text_breaks_the_reader(text: str) -> None:
    found = pod_uid_in(text)
    assert found is None or "/" not in found


@given(st.text())
def test_a_usable_uid_cannot_lead_out_of_its_directory(text: str) -> None:
    if usable_uid(text):
        assert Path("/base", f"pod{text}").resolve().parent == Path("/base")


# --- mounts ---

MOUNTS = r"""24 30 0:22 / /proc rw,nosuid shared:5 - proc proc rw
30 1 8:1 / / rw,relatime - ext4 /dev/root rw
41 30 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - tmpfs tmpfs rw,mode=755
42 41 0:27 / /sys/fs/cgroup/unified rw,nosuid - cgroup2 cgroup2 rw,nsdelegate
43 41 0:28 /kubepods/podOUTER/node /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids
44 41 0:29 /kubepods/podOUTER/node /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer
45 41 0:30 / /sys/fs/cgroup/with\040space rw - cgroup cgroup rw,xattr,name=systemd
"""


def test_a_v2_root_is_known_by_its_mount() -> None:
    found = hierarchy_of(Path("/sys/fs/cgroup/unified/part"), MOUNTS)
    assert (found.version, found.controllers, found.below, found.freezer) == (2, frozenset(), "/part", None)


def test_a_v1_root_inside_another_container_starts_where_its_mount_does() -> None:
    found = hierarchy_of(Path("/sys/fs/cgroup/pids/part"), MOUNTS)
    assert (found.version, found.controllers) == (1, frozenset({"pids"}))
    assert found.below == "/kubepods/podOUTER/node/part"
    assert found.freezer == Path("/sys/fs/cgroup/freezer/part")


def test_a_named_hierarchy_is_asked_for_by_its_name() -> None:
    assert hierarchy_of(Path("/sys/fs/cgroup/with space"), MOUNTS).controllers == frozenset({"name=systemd"})


@pytest.mark.parametrize("root", ["/", "/proc", "/sys/fs/cgroup", "/srv"])
def test_a_root_outside_every_hierarchy_is_refused(root: str) -> None:
    with pytest.raises(BadConfiguration, match="not in a cgroup hierarchy"):
        hierarchy_of(Path(root), MOUNTS)


# --- processes ---


def test_a_command_name_cannot_forge_a_start_time() -> None:
    name = b"x) Z 1 1 1 0 -1 4194560 1 1 1 1 1 1 1 1 20 0 1 0 99 ("
    rest = b") S 7 8 8 0 -1 4194304" + b" 0" * 12 + b" 4242" + b" 0" * 27 + b" 5000 6000" + b" 0\n"
    stat = parse_stat(b"1234 (" + name + rest)
    assert (stat.pid, stat.state, stat.parent, stat.started) == (1234, "S", 7, 4242)
    assert stat.identity == (1234, 4242)
    assert not stat.kernel_thread


def test_the_kernels_own_description_of_this_process_is_read() -> None:
    stat = parse_stat(Path("/proc/self/stat").read_bytes())
    assert stat.state == "R"
    assert stat.started > 0
    assert 0 < stat.environment[0] < stat.environment[1]


@pytest.mark.parametrize("data", [b"1", b"", b"1 (sh) S 1", b"x (sh) S" + b" 1" * 50])
def test_a_description_that_makes_no_sense_is_unreadable(data: bytes) -> None:
    with pytest.raises(Unreadable):
        parse_stat(data)
