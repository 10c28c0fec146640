"""The service and the node's PID namespace: decided for every case, and tried in a real namespace where one can be made."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scrubber.adapters.kubelet.pid_namespace import Sight, doubt_about, look_around, refuse_another_pid_namespace
from tests.pods import PATIENCE, only_with

INITIAL, ANOTHER = 4026531836, 4026532178
ELSEWHERE = Sight(pid=7, in_proc=(7,), namespace=ANOTHER, kubelet=0)


@pytest.fixture
def kubelet(short_tmp: Path) -> Iterator[Path]:
    """The socket of a kubelet in this PID namespace."""
    path = short_tmp / "kubelet.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        yield path


@pytest.mark.parametrize("kubelet", [None, 0, 812])
def test_the_initial_namespace_needs_no_kubelet_to_be_known(kubelet: int | None) -> None:
    assert doubt_about(Sight(pid=7, in_proc=(7,), namespace=INITIAL, kubelet=kubelet)) is None


def test_a_node_that_is_itself_a_container_is_known_by_its_kubelet() -> None:
    assert doubt_about(Sight(pid=7, in_proc=(7,), namespace=ANOTHER, kubelet=812)) is None


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (ELSEWHERE, "The kubelet is not in this PID namespace"),
        (Sight(pid=7, in_proc=(7,), namespace=ANOTHER, kubelet=None), "start its kubelet first"),
        (Sight(pid=7, in_proc=(7,), namespace=None, kubelet=0), "The kubelet is not in this PID namespace"),
        (Sight(pid=7, in_proc=(7,), namespace=None, kubelet=None), "start its kubelet first"),
        # The node's /proc in a container: its PIDs are nobody's, or somebody else's, whom we would signal.
        (Sight(pid=7, in_proc=(5012, 7), namespace=ANOTHER, kubelet=812), "/proc shows another PID namespace"),
        (Sight(pid=7, in_proc=(5012,), namespace=INITIAL, kubelet=812), "/proc shows another PID namespace"),
        (Sight(pid=7, in_proc=(), namespace=INITIAL, kubelet=812), "/proc shows another PID namespace"),
    ],
)
def test_whatever_is_not_proved_to_be_the_nodes_namespace_is_refused(seen: Sight, words: str) -> None:
    doubt = doubt_about(seen)
    assert doubt is not None
    assert words in f"{doubt.sentence} {doubt.remedy}"
    assert doubt.remedy.endswith("Set hostPID: true in the service's pod, or run it on the node itself.")


def test_a_service_beside_its_kubelet_starts(kubelet: Path) -> None:
    seen = look_around(kubelet)
    assert (seen.pid, seen.in_proc, seen.kubelet) == (os.getpid(), (os.getpid(),), os.getpid())
    assert seen.namespace == os.stat("/proc/self/ns/pid").st_ino
    refuse_another_pid_namespace(kubelet)


def test_a_kubelet_that_does_not_answer_is_no_witness(tmp_path: Path) -> None:
    assert look_around(tmp_path / "kubelet.sock").kubelet is None


REFUSED = """
import sys
from pathlib import Path
from scrubber.adapters.kubelet.pid_namespace import refuse_another_pid_namespace
from scrubber.domain.errors import BadConfiguration
try:
    refuse_another_pid_namespace(Path(sys.argv[1]))
except BadConfiguration as error:
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
    print("NOT TESTED HERE: the service in another PID namespace (nobody may make one)", file=sys.__stderr__)


def from_another_namespace(kubelet: Path, *options: str, program: str = REFUSED) -> str:
    command = ["unshare", "--pid", "--fork", *options, sys.executable, "-c", program, str(kubelet)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE)
    return done.stdout.strip()


@only_with(CAN_UNSHARE)
def test_the_service_refuses_another_pid_namespace_than_the_nodes(kubelet: Path) -> None:
    said = from_another_namespace(kubelet, "--mount-proc")
    assert said.startswith("The service does not start outside the node's PID namespace. The kubelet is not in this")
    assert "hostPID: true" in said


@only_with(CAN_UNSHARE)
def test_the_service_refuses_a_proc_of_another_pid_namespace_than_its_own(kubelet: Path) -> None:
    assert "/proc shows another PID namespace" in from_another_namespace(kubelet)


@only_with(CAN_UNSHARE)
def test_the_service_refuses_another_pid_namespace_while_no_kubelet_answers(tmp_path: Path) -> None:
    assert "start its kubelet first" in from_another_namespace(tmp_path / "kubelet.sock", "--mount-proc")


@only_with(CAN_UNSHARE)
def test_the_service_starts_in_a_namespace_that_its_kubelet_shares(short_tmp: Path) -> None:
    """As in a node that is itself a container."""
    program = BESIDE_A_KUBELET + "\n".join(f"    {line}" for line in REFUSED.strip().splitlines())
    assert from_another_namespace(short_tmp / "kubelet.sock", "--mount-proc", program=program) == "starts"
