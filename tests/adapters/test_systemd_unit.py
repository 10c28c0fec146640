"""The node's own daemons are identified by their systemd cgroup, and no other process can pass for one."""

import os
from pathlib import Path

import pytest

from scrubber.adapters.cgroups.systemd_unit import parse_systemd_unit, systemd_unit_of

UNIT = "nvidia-persistenced.service"
CONTAINER = "cri-containerd-" + "a" * 64 + ".scope"
POD = "kubepods-burstable-pod11111111_2222_3333_4444_555555555555.slice"


def v2(path: str) -> bytes:
    return f"0::{path}\n".encode()


def v1(path: str, elsewhere: str = "/") -> bytes:
    return f"12:pids:{path}\n4:memory:{elsewhere}\n1:name=systemd:{path}\n0::/\n".encode()


def hybrid(path: str, unified: str | None = None) -> bytes:
    return f"12:pids:{path}\n1:name=systemd:{path}\n0::{path if unified is None else unified}\n".encode()


INIT = v2("/init.scope")


@pytest.mark.parametrize(
    ("path", "unit"),
    [
        (f"/system.slice/{UNIT}", UNIT),
        ("/system.slice/system-nvidia.slice/nvidia-dcgm@0.service", "nvidia-dcgm@0.service"),
        (f"/system.slice/{UNIT}/payload", None),  # a container, or anything else that the unit started below itself
        (f"/system.slice/docker.service/docker/{'a' * 64}", None),
        (f"/system.slice/docker-{'a' * 64}.scope", None),
        (f"/system.slice/containerd.service/kubepods-pod1.slice/{UNIT}", None),
        (f"/user.slice/user-1000.slice/user@1000.service/app.slice/{UNIT}", None),
        (f"/user.slice/user-1000.slice/user@1000.service/system.slice/{UNIT}", None),
        (f"/kubepods.slice/kubepods-burstable.slice/{POD}/{CONTAINER}", None),
        (f"/kubepods.slice/{POD}/{CONTAINER}/system.slice/{UNIT}", None),
        (f"/machine.slice/system.slice/{UNIT}", None),
        ("/system.slice/dev-mqueue.mount", None),
        ("/system.slice", None),
        ("/system.slice/", None),
        (f"/system.slice/evil/{UNIT}", None),
        (f"/system.slice/evil.slice/{UNIT}", None),
        (f"/system.slice/../user.slice/{UNIT}", None),
        (f"/system.slice/{UNIT} (deleted)", None),
        (f"/{UNIT}", None),
        ("/init.scope", None),
        ("/", None),
        ("", None),
    ],
)
def test_cgroup_path_maps_to_its_systemd_unit_or_to_none(path: str, unit: str | None) -> None:
    assert parse_systemd_unit(v2(path), INIT) == unit
    assert parse_systemd_unit(v1(path), v1("/init.scope")) == unit
    assert parse_systemd_unit(hybrid(path), hybrid("/init.scope")) == unit


def test_service_in_a_container_resolves_the_same_units() -> None:
    """Seen from its own cgroup namespace, all other cgroups are some levels up."""
    above = "/../../.."
    init = v2(f"{above}/init.scope")
    assert parse_systemd_unit(v2(f"{above}/system.slice/{UNIT}"), init) == UNIT
    assert parse_systemd_unit(v2(f"/../../system.slice/{UNIT}"), init) is None  # beside us, in our own pod
    assert parse_systemd_unit(v2(f"/system.slice/{UNIT}"), init) is None  # in our own container
    assert parse_systemd_unit(v2(f"{above}/../system.slice/{UNIT}"), init) is None


def test_node_without_systemd_has_no_units() -> None:
    for init in (b"", v2("/"), v2("/docker/abc"), v1("/")):
        assert parse_systemd_unit(v2(f"/system.slice/{UNIT}"), init) is None


def test_hierarchies_that_disagree_resolve_to_no_unit() -> None:
    init = hybrid("/init.scope")
    assert parse_systemd_unit(hybrid(f"/system.slice/{UNIT}", "/system.slice/other.service"), init) is None
    assert parse_systemd_unit(hybrid(f"/system.slice/{UNIT}", "/user.slice"), init) is None
    assert parse_systemd_unit(f"1:name=systemd:/system.slice/{UNIT}\n".encode(), init) is None


def test_other_cgroup_v1_controllers_are_ignored() -> None:
    memory = f"5:memory:/system.slice/{UNIT}\n1:name=systemd:/user.slice\n0::/\n".encode()
    assert parse_systemd_unit(memory, v1("/init.scope")) is None


class Proc:
    """A proc file system of a node with systemd, and one process on it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.process(1, "/init.scope")
        self._link("self", "pid:[1]")

    def process(self, pid: int, path: str, *, namespace: str = "pid:[1]", state: str = "S") -> None:
        place = self.root / str(pid)
        (place / "task").mkdir(parents=True, exist_ok=True)
        fields = [state, "1", *["0"] * 17, "4711", *["0"] * 30]
        (place / "stat").write_text(f"{pid} (daemon) {' '.join(fields)}\n")
        (place / "cgroup").write_bytes(v2(path))
        self._link(str(pid), namespace)

    def _link(self, name: str, namespace: str) -> None:
        place = self.root / name / "ns"
        place.mkdir(parents=True, exist_ok=True)
        (place / "pid").unlink(missing_ok=True)
        (place / "pid").symlink_to(namespace)


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


def test_host_daemon_resolves_to_its_unit_name(proc: Proc) -> None:
    proc.process(50, f"/system.slice/{UNIT}")
    assert systemd_unit_of(50, proc=proc.root) == UNIT


def test_container_in_the_units_own_cgroup_is_not_the_unit(proc: Proc) -> None:
    proc.process(50, f"/system.slice/{UNIT}", namespace="pid:[2]")
    assert systemd_unit_of(50, proc=proc.root) is None


def test_gone_dead_or_uninspectable_process_has_no_unit(proc: Proc) -> None:
    assert systemd_unit_of(50, proc=proc.root) is None
    proc.process(50, f"/system.slice/{UNIT}", state="Z")
    assert systemd_unit_of(50, proc=proc.root) is None
    proc.process(50, f"/system.slice/{UNIT}")
    (proc.root / "50/ns/pid").unlink()
    assert systemd_unit_of(50, proc=proc.root) is None


def test_no_process_has_a_unit_without_pid_1(proc: Proc) -> None:
    proc.process(50, f"/system.slice/{UNIT}")
    (proc.root / "1/stat").unlink()
    assert systemd_unit_of(50, proc=proc.root) is None


def test_reused_pid_has_no_unit(proc: Proc, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cgroup that was read may belong to either process."""
    proc.process(50, f"/system.slice/{UNIT}")
    really_read = os.readlink

    def read(path: Path) -> str:
        stat = proc.root / "50/stat"
        stat.write_text(stat.read_text().replace(" 4711 ", " 4712 "))
        return really_read(path)

    monkeypatch.setattr(os, "readlink", read)
    assert systemd_unit_of(50, proc=proc.root) is None
