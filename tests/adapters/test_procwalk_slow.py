"""No process is hidden by one that is slow to scan, and none uses up all of the time; unscanned processes are named.

The clock counts instead of waiting: one tick each time the walk reads it, which it does every few hundred entries.
"""

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scrubber.adapters.procwalk import Budget, DeviceNodeTarget, FileTarget, ProcessMatch, process, scheduler, walk
from tests.adapters.sim_rig import Tenant, report_as_kernel_thread

FULL, RANDOM = (os.stat(f"/dev/{name}").st_rdev for name in ("full", "random"))

Run = Callable[..., Tenant]


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """Provide a device's memory that no other process on this machine uses."""
    path = tmp_path / "memory"
    path.touch()
    return path


def target(memory: Path) -> FileTarget:
    where = memory.stat()
    return FileTarget(where.st_dev, frozenset({where.st_ino}))


@pytest.fixture
def run() -> Iterator[Run]:
    """Start a Python program that prints ``{"ready": true}`` once it holds what the test needs."""
    running: list[Tenant] = []

    def start(program: str, *arguments: str) -> Tenant:
        running.append(Tenant([sys.executable, "-c", program, *arguments]))
        return running[-1].until_ready()

    yield start
    for each in running:
        each.end()


def ticks() -> Callable[[], float]:
    """Return a clock that advances whenever it is read."""
    return itertools.count().__next__


def stopped() -> float:
    """A clock by which no process takes any time."""
    return 0.0


OPEN = """
import json, os, signal, sys
for name in sys.argv[1:]:
    os.open(name, os.O_RDONLY)
print('{"ready": true}', flush=True)
signal.pause()
"""

CROWDED = """
import os, resource, signal, sys
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
first = os.open(sys.argv[1], os.O_RDONLY)
for _ in range(12_000):
    os.dup(first)
os.open(sys.argv[2], os.O_RDONLY)
print('{"ready": true}', flush=True)
signal.pause()
"""
"""Very many descriptors of one device, and after them one of another."""


def test_slow_process_does_not_hide_another_holder(run: Run, memory: Path) -> None:
    crowd, tenant = run(CROWDED, "/dev/null", str(memory)), run(OPEN, str(memory))
    found = walk(target(memory), budget=Budget(per_process=30, total=1_000_000), clock=ticks())
    assert [holder.pid for holder in found.holders] == [tenant.pid]
    (cut_short,) = (each for each in found.unfinished if each.pid == crowd.pid)
    assert (cut_short.started, cut_short.uid, cut_short.parts) == (process.start_time(crowd.pid), os.geteuid(), ())
    assert cut_short.name.startswith("python")
    assert cut_short.reason == "there was no time to scan its descriptors"


def test_last_of_many_descriptors_is_found_given_enough_time(run: Run, memory: Path) -> None:
    crowd = run(CROWDED, "/dev/null", str(memory))
    found = walk(target(memory), budget=Budget(per_process=10_000, total=1_000_000), clock=ticks())
    assert [holder.pid for holder in found.holders] == [crowd.pid]
    assert crowd.pid not in {each.pid for each in found.unfinished}


def test_process_found_holding_one_device_before_the_time_limit_is_a_holder(run: Run) -> None:
    crowd = run(CROWDED, "/dev/random", "/dev/full")
    everything = DeviceNodeTarget(frozenset({FULL, RANDOM}))
    found = walk(everything, budget=Budget(per_process=30, total=1_000_000), clock=ticks())
    assert [holder.parts for holder in found.holders if holder.pid == crowd.pid] == [(RANDOM,)]
    assert [each.parts for each in found.unfinished if each.pid == crowd.pid] == [(RANDOM,)]
    alone = walk(DeviceNodeTarget(frozenset({RANDOM})), budget=Budget(per_process=30, total=1_000_000), clock=ticks())
    assert [holder.parts for holder in alone.holders if holder.pid == crowd.pid] == [(RANDOM,)]
    assert crowd.pid not in {each.pid for each in alone.unfinished}


def test_requested_pid_is_described_however_little_time_remains(run: Run, memory: Path) -> None:
    """A process in the driver's list that was not described would be mistaken for one that is gone."""
    crowd = run(CROWDED, "/dev/null", str(memory))
    found = walk(target(memory), requested_pids=[crowd.pid], budget=Budget(per_process=3, total=30), clock=ticks())
    assert found.holders == (
        ProcessMatch(crowd.pid, process.start_time(crowd.pid) or 0, process.command_line(crowd.pid), False, ()),
    )
    assert found.unfinished[0].pid == crowd.pid


def test_walk_that_ends_early_names_every_unreached_process(
    run: Run, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    *tenants, kernel_thread = [run(OPEN, str(memory)) for _ in range(4)]
    report_as_kernel_thread(monkeypatch, kernel_thread.pid)
    monkeypatch.setattr(scheduler, "_MAX_REPORTED", 1_000_000)
    inspected_none = walk(target(memory), budget=Budget(per_process=1, total=0), clock=ticks())
    assert inspected_none.holders == ()
    assert {tenant.pid for tenant in tenants} <= {each.pid for each in inspected_none.unfinished}
    assert all("not reached" in each.reason for each in inspected_none.unfinished)
    assert kernel_thread.pid not in {each.pid for each in inspected_none.unfinished}, "a kernel thread holds nothing"
    monkeypatch.setattr(scheduler, "_MAX_REPORTED", 1)
    short = walk(target(memory), budget=Budget(per_process=1, total=0), clock=ticks())
    assert len(short.unfinished) == 1
    assert short.unfinished_omitted >= 2


THREADS = """
import ctypes, json, os, signal, sys, threading
libc, ready = ctypes.CDLL(None), threading.Semaphore(0)
def work(last):
    assert libc.unshare(0x400) == 0  # CLONE_FILES: a table of its own
    if last:
        os.open(sys.argv[1], os.O_RDONLY)
    ready.release()
    threading.Event().wait()
for number in range(40):
    threading.Thread(target=work, args=(number == 39,), daemon=True).start()
    ready.acquire()
print(json.dumps({"ready": True}), flush=True)
signal.pause()
"""


def test_threads_with_separate_descriptor_tables_are_distinguished_in_few_comparisons(
    run: Run, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = run(THREADS, str(memory))
    threads = [int(name) for name in os.listdir(f"/proc/{tenant.pid}/task")]
    compare, compared = process._compare_fd_tables, list[tuple[int, int]]()

    def comparing(one: int, other: int) -> int:
        compared.append((one, other))
        return compare(one, other)

    monkeypatch.setattr(process, "_compare_fd_tables", comparing)
    assert len(threads) == 41
    assert sorted(process.distinct_fd_tables(threads)) == sorted(threads)
    assert len(compared) <= 41 * 6
    found = walk(target(memory), budget=Budget(per_process=10_000, total=1_000_000), clock=ticks())
    assert [holder.pid for holder in found.holders] == [tenant.pid]


class Hanging:
    """The memory map of one process blocks readers until it is released."""

    def __init__(self, pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.looks = 0
        self.let_go = threading.Event()
        read = process.ProcessScan._scan_map

        def hang(each: process.ProcessScan, path: str) -> bool:
            if each.pid == pid:
                self.looks += 1
                assert self.let_go.wait(60)
            return read(each, path)

        monkeypatch.setattr(process.ProcessScan, "_scan_map", hang)


def test_scan_that_never_returns_costs_one_thread_and_no_other_result(
    run: Run, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sick, tenant = run(OPEN), run(OPEN, str(memory))
    hanging = Hanging(sick.pid, monkeypatch)
    before = threading.active_count()
    for why in ("the scan of its mappings has not returned", "an earlier scan of it has not returned"):
        found = walk(target(memory), requested_pids=[sick.pid], clock=stopped)
        assert [holder.pid for holder in found.holders] == [tenant.pid]
        (reason,) = (each.reason for each in found.unfinished if each.pid == sick.pid)
        assert why in reason
    assert (hanging.looks, threading.active_count()) == (1, before + 1)
    hanging.let_go.set()
    scheduler._hung_scans[sick.pid][1].join()
    found = walk(target(memory), requested_pids=[sick.pid])
    assert {holder.pid: holder.parts for holder in found.holders} == {
        sick.pid: (),
        tenant.pid: tuple(target(memory).inodes),
    }
    assert sick.pid not in {each.pid for each in found.unfinished}


class Jumping:
    """The clock of the monitor of hanging scans: a test advances it, and it counts how often it is read."""

    def __init__(self) -> None:
        self.looked = 0
        self.late = 0.0

    def monotonic(self) -> float:
        self.looked += 1
        return time.monotonic() + self.late


def test_scan_interrupted_by_a_process_stall_is_not_treated_as_hung(
    run: Run, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant, clock = run(OPEN, str(memory)), Jumping()
    read = process.ProcessScan._scan_map

    def stalling(each: process.ProcessScan, path: str) -> bool:
        if each.pid == tenant.pid and not clock.late:
            clock.late = 3600.0
            seen = clock.looked
            while clock.looked < seen + 2:  # the monitor has read the clock, and does so again
                time.sleep(0.01)
        return read(each, path)

    monkeypatch.setattr(scheduler, "time", clock)
    monkeypatch.setattr(process.ProcessScan, "_scan_map", stalling)
    other = memory.with_name("other")
    other.touch()
    found = walk(target(other), requested_pids=[tenant.pid], clock=stopped)
    assert clock.late
    assert tenant.pid in {each.pid for each in found.holders}
    assert tenant.pid not in {each.pid for each in found.unfinished}


def test_remaining_processes_are_named_and_skipped_when_too_many_scans_hang(
    run: Run, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sick, tenant = run(OPEN), run(OPEN, str(memory))
    hanging = Hanging(sick.pid, monkeypatch)
    monkeypatch.setattr(scheduler, "_MAX_HUNG", 1)
    found = walk(target(memory), requested_pids=[sick.pid], clock=stopped)
    assert found.holders == ()
    assert {sick.pid, tenant.pid} <= {each.pid for each in found.unfinished}
    hanging.let_go.set()
    scheduler._hung_scans.pop(sick.pid)[1].join()


def test_hung_scan_that_returned_no_longer_counts_towards_the_limit(
    run: Run, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "_MAX_HUNG", 2)
    tenant = run(OPEN, str(memory))
    for _ in range(2):
        sick = run(OPEN)
        with monkeypatch.context() as patched:
            hanging = Hanging(sick.pid, patched)
            found = walk(target(memory), requested_pids=[sick.pid], clock=stopped)
        assert [holder.pid for holder in found.holders] == [tenant.pid]
        sick.end()
        hanging.let_go.set()
        scheduler._hung_scans[sick.pid][1].join()


def test_failed_walk_raises_an_error_and_is_never_an_empty_result(
    run: Run, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(OPEN, str(memory))

    def out_of_descriptors(*_: object) -> object:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(process, "read_stat", out_of_descriptors)
    with pytest.raises(OSError, match="Too many open files"):
        walk(target(memory))
