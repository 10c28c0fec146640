"""The soak's reader receives what tenants see and how they end; the tenants are processes over a plain file."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos.judgement import Message
from tests.chaos.lives import tenant
from tests.chaos.reader import Hearing

SOON = 20.0
SIZE = 64 * 1024


@pytest.fixture
def hearing(short_tmp: Path) -> Iterator[Hearing]:
    hearing = Hearing(short_tmp / "reader.sock")
    yield hearing
    hearing.close()


@pytest.fixture
def root(short_tmp: Path) -> Path:
    """Provide a container's directory with one device of zeros in it."""
    device = short_tmp / "dev" / "simgpu3"
    device.parent.mkdir()
    device.write_bytes(bytes(SIZE))
    return short_tmp


Started = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(root: Path) -> Iterator[Started]:
    """Start tenants; remaining processes of their sessions are killed at the end."""
    started: list[subprocess.Popen[bytes]] = []

    def start(uid: str = "u-1", seconds: str = "forever", **words: str) -> subprocess.Popen[bytes]:
        command = tenant(root / "reader.sock", "team-a/p/main", seconds, **words)
        marks = {"SCRUBBER_SIM_POD_UID": uid, "SCRUBBER_SIM_RUN": f"run-{len(started)}"}
        started.append(
            subprocess.Popen(command, cwd=root, env=marks, stdout=subprocess.DEVNULL, start_new_session=True)
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def until(hearing: Hearing, expected: Callable[[Message], bool]) -> Message:
    """Return the first received message that is ``expected``."""
    ends = time.monotonic() + SOON
    while not (found := [each for each in hearing.messages if expected(each)]):
        assert time.monotonic() < ends, f"not received; received: {hearing.messages}"
        hearing.turn(0.1)
    return found[0]


def is_report(what: str, pid: int) -> Callable[[Message], bool]:
    return lambda each: each.what == what and each.pid == pid


def test_tenant_reports_the_bytes_it_read_before_writing(hearing: Hearing, start: Started, root: Path) -> None:
    start()
    came = until(hearing, lambda each: each.what == "came")
    assert (came.facts["device"], came.facts["bytes"], came.facts["strange"]) == ("simgpu3", str(SIZE), "0")
    until(hearing, lambda each: each.what == "wrote")
    assert (root / "dev" / "simgpu3").read_bytes().startswith(b"team-a/p/main u-1 team-a/p/main u-1 ")


def test_tenant_reports_bytes_of_another_pod_as_foreign_and_its_own_as_not(hearing: Hearing, start: Started) -> None:
    start(seconds="0")
    until(hearing, lambda each: each.what == "ended")
    start(seconds="0")
    again = until(hearing, lambda each: each.what == "came" and each.number == 2)
    assert again.facts["strange"] == "0"
    until(hearing, lambda each: each.what == "ended" and each.number == 2)
    start(uid="u-2")
    reported = until(hearing, lambda each: each.what == "came" and each.number == 3)
    assert int(reported.facts["strange"]) > 0
    assert bytes.fromhex(reported.facts["found"]).startswith(b"team-a/p/main u-1")


def test_tenant_reports_a_changed_byte(hearing: Hearing, start: Started, root: Path) -> None:
    start(hold="map")
    until(hearing, lambda each: each.what == "wrote")
    device = os.open(root / "dev" / "simgpu3", os.O_WRONLY)
    os.pwrite(device, b"\0", 5000)
    os.close(device)
    damaged = until(hearing, lambda each: each.what == "damaged")
    assert damaged.facts["wrong"] == "1"


def test_device_read_through_a_descriptor_in_flight_is_verified(hearing: Hearing, start: Started) -> None:
    start(hold="flight", seconds="0.3")
    until(hearing, lambda each: each.what == "left")
    assert hearing.bytes_read > SIZE
    assert not [each for each in hearing.messages if each.what == "damaged"]


def test_end_of_a_killed_process_is_reported(hearing: Hearing, start: Started) -> None:
    process = start()
    until(hearing, lambda each: each.what == "wrote")
    process.kill()
    ended = until(hearing, lambda each: each.what == "ended")
    assert ended.pid == process.pid
    assert not [each for each in hearing.messages if each.what == "left"]


def test_signal_is_reported_with_its_sender_and_sigterm_ends_the_tenant_unless_ignored(
    hearing: Hearing, start: Started
) -> None:
    for words in ({"deaf": "yes"}, {}):
        process = start(**words)
        until(hearing, is_report("wrote", process.pid))
        process.send_signal(signal.SIGTERM)
        reported = until(hearing, is_report("signalled", process.pid))
        assert (reported.facts["number"], reported.facts["sender"]) == (str(int(signal.SIGTERM)), str(os.getpid()))
    until(hearing, lambda each: each.what == "ended")
    assert [each.number for each in hearing.messages if each.what == "left"] == [2]


def test_process_on_a_device_beside_another_pods_process_is_reported(hearing: Hearing, start: Started) -> None:
    first = start()
    until(hearing, lambda each: each.what == "wrote")
    start(uid="u-2")
    beside = until(hearing, lambda each: each.what == "beside")
    assert (beside.uid, beside.facts["device"], beside.facts["other_pid"]) == ("u-2", "simgpu3", str(first.pid))


def test_process_after_the_end_of_another_is_not_reported_as_beside_it(hearing: Hearing, start: Started) -> None:
    first = start()
    until(hearing, lambda each: each.what == "wrote")
    first.kill()
    first.wait()
    start(uid="u-2", seconds="0.1").wait()
    until(hearing, lambda each: each.what == "left" and each.uid == "u-2")
    assert not [each for each in hearing.messages if each.what == "beside"]


@pytest.mark.parametrize("kind", ["child", "escaped", "idle"])
def test_process_left_by_a_tenant_reports_for_itself(hearing: Hearing, start: Started, kind: str) -> None:
    process = start(seconds="0", leave=kind, life="0.5")
    hello = until(hearing, lambda each: each.what == "hello" and each.role == kind)
    assert (hello.uid, hello.run) == ("u-1", "run-0")
    assert hello.pid != process.pid
    assert hello.devices == (() if kind == "idle" else ("simgpu3",))
    process.wait()
    until(hearing, lambda each: each.what == "ended" and each.role == kind)


def test_foreign_process_reports_residue_and_writes_nothing(hearing: Hearing, start: Started, root: Path) -> None:
    device = root / "dev" / "simgpu3"
    device.write_bytes(b"secret" + bytes(SIZE - 6))
    start(seconds="0", **{"device": str(device), "as": "simgpu3"}).wait()
    came = until(hearing, lambda each: each.what == "came")
    assert (came.role, came.facts["strange"]) == ("unauthorized", "6")
    assert device.read_bytes() == b"secret" + bytes(SIZE - 6)
