"""The service and the node's PID namespace: decided for every case, and tested in a real namespace where possible."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scrubber.adapters.kubelet.pid_namespace import (
    PidNamespaceView,
    find_problem,
    read_pid_namespace,
    require_node_pid_namespace,
)
from tests.pods import DEADLINE, only_with

INITIAL, ANOTHER = 4026531836, 4026532178
ELSEWHERE = PidNamespaceView(pid=7, proc_pids=(7,), namespace_inode=ANOTHER, kubelet_pid=0)


@pytest.fixture
def kubelet(short_tmp: Path) -> Iterator[Path]:
    """Provide the socket of a kubelet in this PID namespace."""
    path = short_tmp / "kubelet.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        yield path


@pytest.mark.parametrize("kubelet", [None, 0, 812])
def test_initial_pid_namespace_is_accepted_without_a_kubelet(kubelet: int | None) -> None:
    assert find_problem(PidNamespaceView(pid=7, proc_pids=(7,), namespace_inode=INITIAL, kubelet_pid=kubelet)) is None


def test_node_that_is_itself_a_container_is_accepted_by_its_kubelet() -> None:
    assert find_problem(PidNamespaceView(pid=7, proc_pids=(7,), namespace_inode=ANOTHER, kubelet_pid=812)) is None


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (ELSEWHERE, "The kubelet is not in this PID namespace"),
        (PidNamespaceView(pid=7, proc_pids=(7,), namespace_inode=ANOTHER, kubelet_pid=None), "start its kubelet first"),
        (
            PidNamespaceView(pid=7, proc_pids=(7,), namespace_inode=None, kubelet_pid=0),
            "The kubelet is not in this PID namespace",
        ),
        (PidNamespaceView(pid=7, proc_pids=(7,), namespace_inode=None, kubelet_pid=None), "start its kubelet first"),
        # The node's /proc in a container: its PIDs do not exist here, or are those of other processes, which we would
        # signal.
        (
            PidNamespaceView(pid=7, proc_pids=(5012, 7), namespace_inode=ANOTHER, kubelet_pid=812),
            "/proc shows another PID namespace",
        ),
        (
            PidNamespaceView(pid=7, proc_pids=(5012,), namespace_inode=INITIAL, kubelet_pid=812),
            "/proc shows another PID namespace",
        ),
        (
            PidNamespaceView(pid=7, proc_pids=(), namespace_inode=INITIAL, kubelet_pid=812),
            "/proc shows another PID namespace",
        ),
    ],
)
def test_unproved_node_pid_namespace_is_refused(seen: PidNamespaceView, words: str) -> None:
    doubt = find_problem(seen)
    assert doubt is not None
    assert words in f"{doubt.message} {doubt.remedy}"
    assert doubt.remedy.endswith("Set hostPID: true in the service's pod, or run it on the node itself.")


def test_service_in_the_kubelets_pid_namespace_starts(kubelet: Path) -> None:
    seen = read_pid_namespace(kubelet)
    assert (seen.pid, seen.proc_pids, seen.kubelet_pid) == (os.getpid(), (os.getpid(),), os.getpid())
    assert seen.namespace_inode == os.stat("/proc/self/ns/pid").st_ino
    require_node_pid_namespace(kubelet)


def test_kubelet_that_does_not_answer_proves_no_pid_namespace(tmp_path: Path) -> None:
    assert read_pid_namespace(tmp_path / "kubelet.sock").kubelet_pid is None


REFUSED = """
import sys
from pathlib import Path
from scrubber.adapters.kubelet.pid_namespace import require_node_pid_namespace
from scrubber.domain.errors import InvalidConfiguration
try:
    require_node_pid_namespace(Path(sys.argv[1]))
except InvalidConfiguration as error:
    print(error)
else:
    print("starts")
"""

BESIDE_A_KUBELET = """
import os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.bind(sys.argv[1] + ".inner")
    server.listen()
    sys.argv[1] += ".inner"
"""


def _can_unshare() -> bool:
    command = ["unshare", "--pid", "--fork", "--mount-proc", "true"]
    return bool(shutil.which("unshare")) and subprocess.run(command, capture_output=True, check=False).returncode == 0


CAN_UNSHARE = _can_unshare()
if not CAN_UNSHARE:
    print(
        "NOT TESTED HERE: the service in another PID namespace (creating a PID namespace is not permitted)",
        file=sys.__stderr__,
    )


def from_another_namespace(kubelet: Path, *options: str, program: str = REFUSED) -> str:
    command = ["unshare", "--pid", "--fork", *options, sys.executable, "-c", program, str(kubelet)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=DEADLINE)
    return done.stdout.strip()


@only_with(CAN_UNSHARE)
def test_service_refuses_a_pid_namespace_other_than_the_nodes(kubelet: Path) -> None:
    output = from_another_namespace(kubelet, "--mount-proc")
    assert output.startswith("The service does not start outside the node's PID namespace. The kubelet is not in this")
    assert "hostPID: true" in output


@only_with(CAN_UNSHARE)
def test_service_refuses_a_proc_of_another_pid_namespace(kubelet: Path) -> None:
    assert "/proc shows another PID namespace" in from_another_namespace(kubelet)


@only_with(CAN_UNSHARE)
def test_service_refuses_another_pid_namespace_while_no_kubelet_answers(tmp_path: Path) -> None:
    assert "start its kubelet first" in from_another_namespace(tmp_path / "kubelet.sock", "--mount-proc")


@only_with(CAN_UNSHARE)
def test_service_starts_in_a_pid_namespace_shared_with_its_kubelet(short_tmp: Path) -> None:
    """A node may itself be a container."""
    program = BESIDE_A_KUBELET + "\n".join(f"    {line}" for line in REFUSED.strip().splitlines())
    assert from_another_namespace(short_tmp / "kubelet.sock", "--mount-proc", program=program) == "starts"


@pytest.mark.parametrize("pids", ["7\tx", "-7", "7" * 5000])
def test_status_that_is_not_the_kernels_proves_nothing(tmp_path: Path, pids: str) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").write_text(f"Name:\tx\nNSpid:\t{pids}\n")
    assert read_pid_namespace(tmp_path / "none", tmp_path).proc_pids == ()
