"""An interrupted walk is resumed by the next one, a pod uses no more than its share, and a relay is named.

The clock counts, as in ``test_procwalk_slow.py``: one tick each time the walk reads it. Pods are declared, not created.
"""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from scrubber.adapters.children.message import MAX_BODY_SIZE, pack
from scrubber.adapters.procwalk import (
    Budget,
    ChurningGroup,
    DeviceNodeTarget,
    FileTarget,
    WalkProgress,
    confinement,
    process,
    scheduler,
    walk,
)
from scrubber.adapters.procwalk.budget_group import BudgetGroup, budget_group_of, parse_budget_group, pod_of_path
from scrubber.adapters.procwalk.confinement import Confinement, has_device_capabilities, shows_device_capabilities
from scrubber.adapters.procwalk.match import FileStat, StatxReader
from scrubber.adapters.walker import Walker, parse_walk_report, uninspected_from, walk_request
from tests.adapters.sim_rig import Tenant, kill_and_wait

Run = Callable[..., Tenant]

UID = "0e1c5b6a-7a44-4a6e-9d3a-0c1f7b2d3e4f"


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """Provide a device's memory that no other process on this machine uses."""
    path = tmp_path / "memory"
    path.write_bytes(bytes(4096))
    return path


def target(memory: Path) -> FileTarget:
    where = memory.stat()
    return FileTarget(where.st_dev, frozenset({where.st_ino}))


@pytest.fixture
def run() -> Iterator[Run]:
    """Start a program that prints ``{"ready": true}`` once it holds what the test needs."""
    running: list[Tenant] = []

    def start(program: str, *arguments: str) -> Tenant:
        running.append(Tenant([sys.executable, "-c", program, *arguments]))
        return running[-1].until_ready()

    yield start
    for each in running:
        each.end()


def ticks() -> Callable[[], float]:
    return count().__next__


def in_pods(pods: dict[int, str]) -> Callable[[int], BudgetGroup | None]:
    """Return ``budget_group_of`` with these processes assigned to these pods."""

    def group(pid: int) -> BudgetGroup | None:
        return BudgetGroup(pods[pid], pods[pid]) if pid in pods else budget_group_of(pid)

    return group


OPEN = """
import os, signal, sys
for name in sys.argv[1:]:
    os.open(name, os.O_RDONLY)
print('{"ready": true}', flush=True)
signal.pause()
"""

CROWDED = """
import ctypes, mmap, os, resource, signal, sys, threading
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
tables, way, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
null, ready = os.open("/dev/null", os.O_RDONLY), threading.Semaphore(0)
for _ in range(6_000):
    os.dup(null)
def work(last):
    assert ctypes.CDLL(None).unshare(0x400) == 0  # CLONE_FILES: a table of its own
    if last:
        os.open(path, os.O_RDONLY)
    ready.release()
    threading.Event().wait()
for number in range(tables):
    threading.Thread(target=work, args=(way == "descriptor" and number == tables - 1,), daemon=True).start()
    ready.acquire()
if way == "mapping":
    descriptor = os.open(path, os.O_RDONLY)
    kept = mmap.mmap(descriptor, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    os.close(descriptor)
print('{"ready": true}', flush=True)
signal.pause()
"""
"""A cheap way to have very many descriptors in several tables; the device is opened behind all of them."""


@pytest.mark.parametrize("way", ["descriptor", "mapping"])
def test_repeatedly_interrupted_scan_resumes_at_its_position(run: Run, memory: Path, way: str) -> None:
    crowd = run(CROWDED, "4", way, str(memory))
    position, looks, found = None, 0, None
    while found is None and looks < 200:
        left = iter([False] * 6)
        each = process.ProcessScan(crowd.pid, target(memory), set(), lambda left=left: next(left, True), position)  # type: ignore[misc]
        found, position = each.run(), each.position
        assert found or each.interrupted_in
        looks += 1
    assert found is not None
    assert found.parts == tuple(target(memory).inodes)
    assert looks > 3


def test_scan_position_of_an_earlier_process_with_the_same_pid_is_ignored(run: Run, memory: Path) -> None:
    crowd = run(CROWDED, "1", "descriptor", str(memory))
    beyond = process.ScanPosition(started=1, thread=(crowd.pid, 1), descriptor=10_000_000, address=1 << 60)
    found = process.ProcessScan(crowd.pid, target(memory), set(), start=beyond).run()
    assert found is not None


def test_process_too_large_for_one_walk_is_scanned_by_several_walks(run: Run, memory: Path) -> None:
    crowd, progress = run(CROWDED, "4", "descriptor", str(memory)), WalkProgress()
    seen: list[int] = []
    holders: list[int] = []
    while crowd.pid not in holders:
        found = walk(target(memory), budget=Budget(15, 1_000_000), clock=ticks(), progress=progress)
        holders = [each.pid for each in found.holders]
        seen += [each.walks for each in found.unfinished if each.pid == crowd.pid and not holders]
    assert seen == list(range(1, len(seen) + 1))
    assert len(seen) >= 2


def test_scan_completed_in_pieces_is_reported_and_begins_again_in_the_next_walk(
    run: Run, memory: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.touch()
    crowd, progress = run(CROWDED, "4", "descriptor", str(other)), WalkProgress()
    pods = in_pods({crowd.pid: UID})
    unfinished: list[bool] = []
    pieces: list[int] = []
    while unfinished.count(False) < 2 and len(unfinished) < 80:
        found = walk(
            target(memory),
            budget=Budget(15, 1_000_000, 30),
            clock=ticks(),
            progress=progress,
            priority_pods=[UID],
            budget_group=pods,
        )
        assert found.holders == ()
        unfinished.append(crowd.pid in {each.pid for each in found.unfinished})
        if not unfinished[-1]:
            pieces.append(found.resumed_count)
    assert all(pieces), "this machine's other processes may have been looked through in pieces as well"
    first = unfinished.index(False)
    assert unfinished == [*[True] * first, False, *[True] * first, False]


LATER = """
import os, resource, signal, sys
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
null = os.open("/dev/null", os.O_RDONLY)
for _ in range(6_000):
    os.dup(null)
where = int(sys.argv[2])
os.close(where)
print('{"ready": true}', flush=True)
sys.stdin.readline()
assert os.open(sys.argv[1], os.O_RDONLY) == where
print("open", flush=True)
signal.pause()
"""
"""Very many descriptors; the device is opened when a line arrives, at a number in the middle of them."""


@pytest.fixture
def later(memory: Path) -> Iterator[Callable[[int], "subprocess.Popen[str]"]]:
    running: list[subprocess.Popen[str]] = []

    def start(where: int) -> "subprocess.Popen[str]":
        words = [sys.executable, "-c", LATER, str(memory), str(where)]
        running.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        read_line(running[-1])
        return running[-1]

    yield start
    for each in running:
        each.kill()
        each.communicate()


def read_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def open_now(process: "subprocess.Popen[str]") -> None:
    print(file=process.stdin, flush=True)
    assert read_line(process) == "open\n"


SHORT, LONG = Budget(15, 1_000_000, 30), Budget(100_000, 1_000_000, 100_000)


def test_device_opened_after_an_unfinished_scrub_is_found_by_the_next_scrub(
    later: Callable[[int], "subprocess.Popen[str]"], memory: Path
) -> None:
    """The descriptor is beyond what a quick scan reaches, and before the position at which the first scrub stopped."""
    crowd = later(1_000)
    walker = Walker(partial(walk, clock=ticks(), budget_group=in_pods({crowd.pid: UID})))

    def answer(scrub: str | None, budget: Budget) -> tuple[set[int], set[int]]:
        read = parse_walk_report(
            walker.handle(walk_request(target(memory), budget=budget, priority_pods=[UID], scrub_id=scrub))
        )
        return {each.pid for each in read.holders}, {each.pid for each in read.unfinished}

    assert crowd.pid in answer("scrub-1", SHORT)[1]
    open_now(crowd)
    assert crowd.pid in answer("scrub-2", LONG)[0]


def test_walk_outside_a_scrub_does_not_resume_an_earlier_walk(run: Run, memory: Path) -> None:
    crowd, progress = run(CROWDED, "4", "descriptor", str(memory)), WalkProgress()
    for walks, scrub in enumerate(("one", "two", None, None), start=1):
        progress.begin(scrub)
        assert all(not each.positions and not each.completed for each in progress.groups.values())
        found = walk(
            target(memory),
            budget=SHORT,
            clock=ticks(),
            progress=progress,
            budget_group=in_pods({crowd.pid: UID}),
        )
        assert crowd.pid in {each.pid for each in found.unfinished}
        assert crowd.pid in progress.groups[UID].positions
        assert {each.walks for each in found.unfinished if each.pid == crowd.pid} == {walks}


@pytest.mark.parametrize("first", [[UID], []])
def test_every_walk_begins_each_process_at_its_first_descriptor(
    later: Callable[[int], "subprocess.Popen[str]"], memory: Path, first: list[str]
) -> None:
    crowd, progress = later(3), WalkProgress()
    found = walk(
        target(memory),
        budget=SHORT,
        clock=ticks(),
        progress=progress,
        priority_pods=first,
        budget_group=in_pods({crowd.pid: UID}),
    )
    assert crowd.pid in {each.pid for each in found.unfinished}
    open_now(crowd)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scheduler, "_FIRST_SLICE", 3)
        found = walk(
            target(memory),
            budget=SHORT,
            clock=ticks(),
            progress=progress,
            priority_pods=first,
            budget_group=in_pods({crowd.pid: UID}),
        )
    assert crowd.pid in {each.pid for each in found.holders}


def test_pod_with_many_descriptors_uses_only_its_share_of_the_walk(run: Run, memory: Path) -> None:
    """The hostile process comes first by its PID, and has more open than the whole walk could scan."""
    crowd, tenant = run(CROWDED, "8", "none", str(memory)), run(OPEN, str(memory))
    neighbours = {crowd.pid: UID, tenant.pid: "another-pod"}
    clock = count()
    found = walk(
        target(memory),
        budget=Budget(100_000, 100_000, 20),
        clock=clock.__next__,
        budget_group=in_pods(neighbours),
    )
    assert [each.pid for each in found.holders] == [tenant.pid]
    (left,) = (each for each in found.unfinished if each.pid == crowd.pid)
    assert left.confined == (os.geteuid() != 0), "root without a container has every power"
    everything = 9 * 6_000 // 256
    assert next(clock) < everything + 20 * len(os.listdir("/proc"))


def test_previous_pods_of_the_device_may_use_the_whole_walk(run: Run, memory: Path) -> None:
    crowd = run(CROWDED, "4", "descriptor", str(memory))
    budget, pods = Budget(100_000, 100_000, 5), in_pods({crowd.pid: UID})
    assert walk(target(memory), budget=budget, clock=ticks(), budget_group=pods).holders == ()
    found = walk(target(memory), budget=budget, clock=ticks(), budget_group=pods, priority_pods=[UID])
    assert [each.pid for each in found.holders] == [crowd.pid]


# --- hanging scans


class Hanging:
    """The memory maps of some processes block readers until released; ``looks`` lists the attempts by PID."""

    def __init__(self, pids: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
        self.looks: list[int] = []
        self._let_go = threading.Event()
        read = process.ProcessScan._scan_map

        def hang(each: process.ProcessScan, path: str) -> bool:
            if each.pid in pids:
                self.looks.append(each.pid)
                assert self._let_go.wait(60)
            return read(each, path)

        monkeypatch.setattr(process.ProcessScan, "_scan_map", hang)

    def end(self) -> None:
        self._let_go.set()
        for pid in set(self.looks):
            scheduler._hung_scans.pop(pid)[1].join()


def stopped() -> float:
    return 0.0


def test_hanging_scans_of_a_pod_do_not_prevent_scans_of_host_processes(
    run: Run, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slow process of the node is scanned after the first round, in which the pod's scans hang."""
    crowd, tenant, sick = run(CROWDED, "1", "descriptor", str(memory)), run(OPEN, str(memory)), run(OPEN)
    hanging = Hanging({sick.pid}, monkeypatch)
    monkeypatch.setattr(scheduler, "_MAX_HUNG", 1)
    monkeypatch.setattr(scheduler, "_MAX_HUNG_PER_POD", 1)
    longer = scheduler._Scheduler._rescan

    def with_time(self: scheduler._Scheduler, moment: float) -> Iterator[tuple[int, float]]:
        assert hanging.looks == [sick.pid]
        yield from longer(self, moment)

    def at_once(each: process.ProcessScan, place: str, first: int = 0) -> None:
        if each.pid == crowd.pid and each.pid not in cut:
            cut.add(each.pid)
            raise process._OutOfTime
        return really(each, place, first)

    cut: set[int] = set()
    really = process.ProcessScan._scan_descriptors
    monkeypatch.setattr(process.ProcessScan, "_scan_descriptors", at_once)
    monkeypatch.setattr(scheduler._Scheduler, "_rescan", with_time)
    pods = in_pods({sick.pid: UID, tenant.pid: "another-pod"})
    found = walk(target(memory), clock=stopped, budget_group=pods)
    hanging.end()
    assert {crowd.pid, tenant.pid} <= {each.pid for each in found.holders}
    assert sick.pid in {each.pid for each in found.unfinished}


def test_time_of_a_hanging_scan_is_charged_to_its_pod(run: Run, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sick = {run(OPEN).pid for _ in range(3)}
    hanging = Hanging(sick, monkeypatch)
    found = walk(target(memory), budget=Budget(4, 60, 1), budget_group=in_pods(dict.fromkeys(sick, UID)))
    hanging.end()
    assert len(hanging.looks) == 1, "it took longer than its pod may take of a walk"
    assert sick <= {each.pid for each in found.unfinished}


def test_number_of_hanging_scans_per_pod_is_limited(run: Run, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sick = {run(OPEN).pid for _ in range(2)}
    hanging = Hanging(sick, monkeypatch)
    monkeypatch.setattr(scheduler, "_MAX_HUNG_PER_POD", 1)
    found = walk(target(memory), clock=stopped, budget_group=in_pods(dict.fromkeys(sick, UID)))
    hanging.end()
    assert len(hanging.looks) == 1
    assert {each.reason for each in found.unfinished if each.pid in sick - set(hanging.looks)} == {
        "too many scans of similar processes have not returned from the kernel"
    }


# --- confinement


FULL, ZERO = os.stat("/dev/full").st_rdev, os.stat("/dev/zero").st_rdev
NOWHERE = os.makedev(510, 77)
"""The number of a device that has no node on this machine."""


@pytest.mark.parametrize(
    ("powers", "numbers", "own", "reach"),
    [
        (False, {FULL}, set(), {FULL}),
        (False, {NOWHERE}, set(), set()),
        (False, {FULL, NOWHERE}, {NOWHERE}, set()),
        (False, {FULL, NOWHERE}, {FULL}, {FULL}),
        (False, {FULL, ZERO, NOWHERE}, set(), {FULL, ZERO}),
        (True, {NOWHERE}, set(), None),
        (None, {NOWHERE}, set(), None),
    ],
)
def test_process_without_capabilities_could_open_the_devices_that_have_nodes_in_its_dev(
    powers: bool | None, numbers: set[int], own: set[int], reach: set[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confinement, "has_device_capabilities", lambda pid: powers)
    judge = Confinement(DeviceNodeTarget(frozenset(numbers)), frozenset(own))
    for _ in range(2):
        assert judge.reach(os.getpid(), UID) == reach


def test_process_whose_groups_fill_its_status_may_have_every_capability() -> None:
    """A tenant that may set its groups chooses where the text is cut, as within its capabilities."""
    status = b"Name:\tx\nGroups:\t0 \nCapInh:\t%016x\nCapPrm:\t%016x\nCapEff:\t%016x\nCapBnd:\t%016x\nCapAmb:\t%016x\n"
    powers = 1 << 21
    assert shows_device_capabilities(status % (0, 0, 0, 1, 0)) is False
    assert shows_device_capabilities(status % (0, 0, 0, powers, 0)) is True
    whole = status % (0, 0, 0, powers, 0)
    assert {shows_device_capabilities(whole[:length]) for length in range(len(whole))} == {None, True}


def test_process_with_an_unreadable_dev_directory_could_open_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement, "has_device_capabilities", lambda pid: False)
    assert Confinement(DeviceNodeTarget(frozenset({NOWHERE}))).reach(4_194_305, UID) is None
    for what in ("_MAX_ENTRIES", "_MAX_DIRECTORIES", "_MAX_ROOTS", "_MOUNTS_LENGTH"):
        with monkeypatch.context() as patched:
            patched.setattr(confinement, what, 0)
            assert Confinement(DeviceNodeTarget(frozenset({NOWHERE}))).reach(os.getpid(), UID) is None, what
    with monkeypatch.context() as patched:
        patched.setattr(confinement, "_MEMORY_FILE_SYSTEMS", (b"fuse",))
        assert Confinement(DeviceNodeTarget(frozenset({NOWHERE}))).reach(os.getpid(), UID) is None
    with monkeypatch.context() as patched:
        patched.setattr(confinement, "_MAX_REACH", 1)
        assert Confinement(DeviceNodeTarget(frozenset({FULL, ZERO}))).reach(os.getpid(), UID) is None


def test_device_node_in_a_subdirectory_of_dev_is_found_and_symlinks_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/full")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "kept").touch()
    numbers = frozenset({FULL})

    class Seeing(StatxReader):
        def __init__(self, node: str) -> None:
            super().__init__()
            self._node = node

        def stat(self, path: str, directory: int | None = None) -> FileStat:
            return super().stat("/dev/full") if path == self._node else super().stat(path, directory)

    for node, seen in (("kept", numbers), ("none", frozenset())):
        with ExitStack() as opened:
            top = os.open(tmp_path, os.O_PATH)
            opened.callback(os.close, top)
            assert confinement._nodes_below(top, confinement._mount_of(top), numbers, Seeing(node), opened) == seen


def test_process_in_its_own_user_namespace_is_judged_by_its_capabilities_there(run: Run) -> None:
    """Creating a user namespace gives all capabilities: the process may have been privileged before."""
    alone = run("import ctypes\nctypes.CDLL(None).unshare(0x10000000)" + OPEN)
    same = os.readlink(f"/proc/{alone.pid}/ns/user") == os.readlink("/proc/self/ns/user")
    assert same or has_device_capabilities(alone.pid), "not every user of every machine may make one"


def test_unconfined_processes_are_reported_first_when_a_group_exceeds_the_report_limit(
    run: Run, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = sorted(run(OPEN).pid for _ in range(3))
    monkeypatch.setattr(confinement, "has_device_capabilities", lambda pid: pid == pids[-1])
    monkeypatch.setattr(scheduler, "_MAX_REPORTED", 1)
    found = walk(
        target(memory),
        budget=Budget(per_process=1, total=0),
        clock=ticks(),
        budget_group=lambda pid: BudgetGroup(UID, UID),
    )
    assert [(each.pid, each.confined) for each in found.unfinished if each.pid in pids] == [(pids[-1], False)]


# --- relays


RELAY = r"""
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

int main(int count, char **words) { /* the file that each of them has open */
    signal(SIGCHLD, SIG_IGN); /* the kernel reaps them itself, at any rate of forks */
    setpgid(0, 0);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    if (fork() > 0)
        for (;;)
            pause();
    if (open(words[1], O_RDWR) < 0)
        return 1;
    char ready[] = "{\"ready\": true}\n";
    if (write(1, ready, strlen(ready)) < 0)
        return 1;
    for (;;)
        if (fork() > 0)
            _exit(0);
    return count;
}
"""


@pytest.fixture
def relay(tmp_path: Path, memory: Path) -> Iterator[int]:
    """Process group of a process that endlessly forks and exits; its children inherit the descriptor.

    An idle process adopts the children.
    """
    if shutil.which("gcc") is None:
        raise RuntimeError("A relay of processes is compiled by the tests: install gcc.")
    (tmp_path / "forks.c").write_text(RELAY)
    program = tmp_path / "forks"
    subprocess.run(["gcc", "-O1", "-w", "-o", str(program), str(tmp_path / "forks.c")], check=True, capture_output=True)
    adopter = Tenant([str(program), str(memory)]).until_ready()
    yield adopter.pid
    os.killpg(adopter.pid, signal.SIGKILL)  # SIGKILL also prevents the restart of a fork in progress
    adopter.end()


def test_chain_of_short_lived_processes_is_found_or_reported_as_a_churning_group(relay: int, memory: Path) -> None:
    """Every process list is outdated when it is read: each process of the chain has ended when it is inspected."""

    def group(pid: int) -> BudgetGroup | None:
        try:
            return BudgetGroup(UID, UID) if os.getpgid(pid) == relay else budget_group_of(pid)
        except ProcessLookupError:
            return None

    for _ in range(2):
        found = walk(target(memory), budget_group=group)
        assert found.holders or {UID, ""} & {each.group for each in found.churning_groups}


Missed = list[set[str | None]]


@pytest.mark.parametrize(
    ("lists", "named"),
    [
        ([{"a"}] * 14, ["a"]),
        ([{"a"}] * 13 + [{"b"}], []),
        ([{"a", "b"}] * 14, ["a", "b"]),
        ([{"a", None}, {None}, {None}] * 4, ["a"]),
        ([{"a", "b", None}, {"a", None}] * 4, ["a"]),
        ([{"a", None}, *[{None}] * 12], [""]),
        ([{"a", None}] * 12 + [{"b"}], []),
        ([{None}] * 14, [""]),
        ([{"a"}, {"b"}] * 7, []),
        ([], []),
    ],
)
def test_churning_group_is_one_that_may_have_been_in_every_process_list(lists: Missed, named: list[str]) -> None:
    missed = [Counter(None if each is None else BudgetGroup(each, None) for each in groups) for groups in lists]
    assert sorted("" if each is None else each.key for each in scheduler._find_churning_groups(missed)) == named


def test_occasionally_forking_neighbour_delays_no_walk_and_is_no_churning_group(
    run: Run, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 200 forks a second, a process that ends before it is inspected appears in at most every third list."""
    tenant, listdir, lists = run(OPEN, str(memory)), os.listdir, count()
    gone = count(4_000_000)  # beyond any PID that Linux assigns

    def with_a_short_lived_one(path: str) -> list[str]:
        names = listdir(path)
        if path == "/proc" and next(lists) % 3 == 1:
            names.append(str(next(gone)))
        return names

    monkeypatch.setattr(os, "listdir", with_a_short_lived_one)
    found = walk(
        target(memory), budget_group=lambda pid: BudgetGroup(UID, UID) if pid >= 4_000_000 else budget_group_of(pid)
    )
    assert [each.pid for each in found.holders] == [tenant.pid]
    assert found.churning_groups == ()


@pytest.mark.parametrize(("pod_uid", "churning"), [(UID, [UID]), (None, [])])
def test_short_lived_children_of_an_inspected_process_are_exempt_only_outside_pods(
    run: Run, memory: Path, monkeypatch: pytest.MonkeyPatch, pod_uid: str | None, churning: list[str]
) -> None:
    """A relay process whose parent has ended is adopted, as by PID 1 of its container, and looks like its child."""
    adopter, listdir, gone = run(OPEN).pid, os.listdir, count(4_000_000)  # beyond any PID that Linux assigns
    listed: list[int] = []

    def with_a_short_lived_one(path: str) -> list[str]:
        names = listdir(path)
        if path == "/proc":
            listed.append(next(gone))
            names.append(str(listed[-1]))
        return names

    def parent(pid: int) -> int | None:
        return adopter if pid in listed else parent_pid(pid)

    parent_pid = scheduler._parent_pid
    monkeypatch.setattr(os, "listdir", with_a_short_lived_one)
    monkeypatch.setattr(scheduler, "_parent_pid", parent)
    found = walk(
        target(memory), budget_group=lambda pid: BudgetGroup(UID, pod_uid) if pid in listed else budget_group_of(pid)
    )
    assert [each.group for each in found.churning_groups] == churning


@pytest.mark.parametrize("pod_uid", [None, UID])
def test_children_of_a_process_that_ends_between_two_scans_are_scanned(
    run: Run, memory: Path, monkeypatch: pytest.MonkeyPatch, pod_uid: str | None
) -> None:
    """The process is slow to scan, passes everything on to a child once all lists were read, and ends."""
    program = (
        CROWDED.replace("signal.pause()", "")
        + "sys.stdin.readline()\nchild = os.fork()\nif child:\n    print(child, flush=True)\n    os._exit(0)\nsignal.pause()\n"
    )
    tenant = subprocess.Popen(
        [sys.executable, "-c", program, "0", "mapping", str(memory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert tenant.stdin is not None
    assert tenant.stdout is not None
    tenant.stdout.readline()
    children: list[int] = []
    longer = scheduler._Scheduler._rescan

    def once_it_has_moved_on(self: scheduler._Scheduler, moment: float) -> Iterator[tuple[int, float]]:
        if not children:
            assert tenant.pid in self._rescan_pids
            print(file=tenant.stdin, flush=True)
            assert tenant.stdout is not None
            children.append(int(tenant.stdout.readline()))
            tenant.wait()
        yield from longer(self, moment)

    monkeypatch.setattr(scheduler, "_FIRST_SLICE", 3)
    monkeypatch.setattr(scheduler._Scheduler, "_rescan", once_it_has_moved_on)
    try:
        pods = in_pods({} if pod_uid is None else dict.fromkeys((tenant.pid, *children), pod_uid))
        found = walk(target(memory), budget=Budget(100_000, 100_000, 100_000), clock=ticks(), budget_group=pods)
        assert [each.pid for each in found.holders] == children
        assert found.churning_groups == ()
    finally:
        for child in children:
            kill_and_wait(child)
        tenant.stdin.close()
        tenant.stdout.close()


def test_churning_group_of_a_pod_is_confined_only_if_all_its_known_processes_are(
    run: Run, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, newest = run(OPEN).pid, run(OPEN).pid
    monkeypatch.setattr(scheduler, "_newest_pid", lambda: newest)

    def relay(privileged: set[int], *caught: int) -> ChurningGroup:
        monkeypatch.setattr(confinement, "has_device_capabilities", lambda pid: pid in privileged)
        node, pods = target(memory), in_pods(dict.fromkeys((parent, *caught), UID))
        each = scheduler._Scheduler(
            node, frozenset(), frozenset(), Budget(), stopped, frozenset(), WalkProgress(), pods, Confinement(node)
        )
        each._record_group(parent)
        return each._churning_group(BudgetGroup(UID, UID))

    assert relay(set(), newest).confined
    assert not relay({parent}, newest).confined
    assert not relay({newest}, newest).confined
    assert not relay(set()).confined, "none of those that come and go was seen"


def test_confinement_of_a_churning_group_is_reported_unchanged() -> None:
    assert [
        each.confined for each in uninspected_from((), (ChurningGroup(UID, UID), ChurningGroup(UID, UID, frozenset())))
    ] == [
        False,
        True,
    ]


# --- answers


def test_hundreds_of_holders_with_long_names_fit_into_one_report(memory: Path) -> None:
    """Each character of their names takes twelve bytes of a report."""
    program = OPEN.replace("sys.argv[1:]", "sys.argv[1:2]").replace(
        "print(",
        "import ctypes\nfor _ in range(449):\n    if os.fork() == 0:\n        ctypes.CDLL(None).prctl(1, 9)\n"
        "        signal.pause()\nprint(",
    )
    crowd = Tenant([sys.executable, "-c", program, str(memory), "\U0001f480" * 400])
    try:
        crowd.until_ready()
        message = Walker().handle(walk_request(target(memory)))
        assert len(pack(message)) < MAX_BODY_SIZE / 2
        read = parse_walk_report(message)
        assert len(read.holders) + read.holders_omitted == 450
        assert read.holders_omitted > 0
    finally:
        crowd.end()


def test_thousands_of_requested_processes_of_several_devices_fit_into_one_report() -> None:
    pids = range(4_000_000, 4_002_000)
    numbers = tuple(range(50_000, 50_008))
    walked = scheduler._Scheduler(
        DeviceNodeTarget(frozenset(numbers)),
        frozenset(),
        frozenset(pids),
        Budget(1, 0),
        lambda: 0.0,
        frozenset(),
        scheduler.WalkProgress(),
        lambda _: BudgetGroup(UID, UID),
        Confinement(DeviceNodeTarget(frozenset(numbers)), frozenset()),
    )
    for pid in pids:
        walked._record_group(pid)
        walked._matches[pid] = process.ProcessMatch(pid, 123_456_789, "\U0001f480" * 200, False, numbers)
        walked._incomplete[pid] = ("the scan of its descriptors has not returned from the kernel", numbers)
    walked._unfinished = lambda pid: scheduler.UnfinishedProcess(  # type: ignore[method-assign]
        pid, 123_456_789, "\ufffd" * 15, 4_000_000_000, *walked._incomplete[pid], frozenset(numbers)
    )
    message = Walker(lambda *_, **__: walked.result()).handle(walk_request(DeviceNodeTarget(frozenset(numbers))))
    assert len(pack(message)) < MAX_BODY_SIZE
    read = parse_walk_report(message)
    assert len(read.holders) == len(read.unfinished) == len(pids)


def test_at_least_one_holder_of_each_pod_is_reported(memory: Path, run: Run) -> None:
    crowd = [run(OPEN, str(memory)) for _ in range(4)]
    pods = {each.pid: "many" for each in crowd[:3]} | {crowd[3].pid: "one"}
    for most in (2, 3):
        found = _with(most, lambda: walk(target(memory), budget_group=in_pods(pods)))
        assert {pods[each.pid] for each in found.holders} == {"many", "one"}
        assert found.holders_omitted == 4 - most
        assert found.omitted_by_part == tuple((part, 4 - most) for part in target(memory).inodes)
    everything = _with(
        1, lambda: walk(target(memory), requested_pids=[each.pid for each in crowd], budget_group=in_pods(pods))
    )
    assert (len(everything.holders), everything.holders_omitted) == (4, 0), "requested PIDs are always reported"


def test_requested_processes_take_no_other_process_its_place_in_the_report(memory: Path, run: Run) -> None:
    """Processes in the driver's lists of one device would otherwise hide those that hold another."""
    *crowd, other = [run(OPEN, str(memory)) for _ in range(4)]
    found = _with(1, lambda: walk(target(memory), requested_pids=[each.pid for each in crowd]))
    assert {each.pid for each in found.holders} == {each.pid for each in (*crowd, other)}


def test_kinds_of_uninspected_processes_that_have_no_place_in_the_report_are_counted(memory: Path, run: Run) -> None:
    pods = {run(OPEN, str(memory)).pid: pod for pod in ("one", "another")}

    def reach_none() -> scheduler.WalkResult:
        return walk(target(memory), budget=Budget(1, 0), budget_group=in_pods(pods))

    assert _with(1_000, reach_none).kinds_omitted == 0
    assert _with(1, reach_none).kinds_omitted >= 1


def _with(most: int, act: Callable[[], scheduler.WalkResult]) -> scheduler.WalkResult:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scheduler, "_MAX_REPORTED", most)
        return act()


# --- groups


def test_churning_groups_with_long_names_fit_into_one_report(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pods = [scheduler.ChurningGroup(f"pod-{number}", f"pod-{number}", frozenset({1})) for number in range(20)]
    crowd = [scheduler.ChurningGroup(f"/{number}/" + "\ufffd" * 4000, None) for number in range(300)]
    monkeypatch.setattr(
        scheduler._Scheduler, "_add_churning", lambda self, _: setattr(self, "_churning", (*crowd, *pods))
    )
    monkeypatch.setattr(scheduler, "_MAX_LISTS", 1)
    message = Walker().handle(walk_request(target(memory)))
    assert len(pack(message)) < MAX_BODY_SIZE / 2
    groups = parse_walk_report(message).churning_groups
    assert {each.pod_uid for each in groups if each.pod_uid} == {each.pod_uid for each in pods}
    assert groups[-1] == scheduler.ChurningGroup("", None), "the others may hold any device"


def test_processes_of_any_number_of_users_that_may_not_be_inspected_fit_into_one_report(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = {pid: 1_000_000_000 + pid for pid in range(1, 60_001)} | dict.fromkeys(range(60_001, 60_004), 33)
    whole = scheduler._Scheduler.walk

    def with_many_users(self: scheduler._Scheduler) -> None:
        whole(self)
        self._denied_uids = users

    monkeypatch.setattr(scheduler._Scheduler, "walk", with_many_users)
    message = Walker().handle(walk_request(target(memory)))
    assert len(pack(message)) < MAX_BODY_SIZE / 2
    (denied,) = (each for each in parse_walk_report(message).not_covered if "could not be inspected" in each)
    assert denied.startswith(f"holders: {len(users)} process(es) of uid 33, ")
    assert " and others " in denied
    assert len(denied) < 1000


@pytest.mark.parametrize(
    ("path", "uid"),
    [
        (f"/kubepods/burstable/pod{UID}/{'a' * 64}", UID),
        (f"/kubepods/pod{UID}", UID),
        (f"/kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice/cri-containerd-{'a' * 64}.scope", UID),
        (f"/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{UID.replace('-', '_')}.slice/x", UID),
        (f"/../../kubepods/besteffort/pod{UID}/x", UID),
        (f"/system.slice/rogue.service/kubepods/pod{UID}", None),
        (f"/user.slice/user-1000.slice/x-kubepods-pod{UID.replace('-', '_')}.slice", None),
        (f"/docker/{'a' * 64}/kubepods/pod{UID}", None),
        (f"/pod{UID}", None),
        ("/", None),
    ],
)
def test_only_pod_path_components_created_by_root_count(path: str, uid: str | None) -> None:
    assert pod_of_path(path) == uid


def test_nested_pod_directory_created_by_a_tenant_does_not_change_the_pod() -> None:
    assert pod_of_path(f"/kubepods/pod{UID}/x/kubepods/pod{'0' * 32}") == UID


def test_unreadable_path_of_a_process_in_nested_cgroups_does_not_end_a_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel before 6.10 refuses to print a path that is longer than PATH_MAX, and a tenant chooses its length."""

    def refuse(descriptor: int, length: int) -> bytes:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))

    monkeypatch.setattr(os, "read", refuse)
    assert budget_group_of(os.getpid()) is None


def test_line_break_in_the_name_of_a_cgroup_makes_a_process_of_a_pod_no_process_of_the_node() -> None:
    """Linux before 5.13 allows such a name in a v1 hierarchy. A process of the node may be exempt from inspection."""
    pod = f"4:pids:/kubepods/pod{UID}/x".encode()
    assert parse_budget_group(pod + b"\n") == BudgetGroup(UID, UID)
    assert parse_budget_group(pod + b"\n0::/kubepods/pod%b/x\n" % (b"0" * 32)) is None
    assert parse_budget_group(pod + b"\n4:pids:/user.slice\n") is None
