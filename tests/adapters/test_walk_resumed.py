"""A walk that is cut short goes on in the next one, a pod takes no more than its share, and a relay is named.

The clock is counted, as in ``test_walk_slow.py``: a tick each time that the walk looks at it. Pods are said, not made.
"""

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

from scrubber.adapters.children.message import LIMIT, pack
from scrubber.adapters.walk import Budget, File, Nodes, Progress, Relay, confinement, look, rounds, walk
from scrubber.adapters.walk.confinement import Confinement, has_powers
from scrubber.adapters.walk.group import Group, group_of, pod_of_path
from scrubber.adapters.walk.seeing import Eye, Seen
from scrubber.adapters.walker import Walker, about, read_walk, uninspected
from tests.adapters.sim_rig import Tenant

Run = Callable[..., Tenant]

UID = "0e1c5b6a-7a44-4a6e-9d3a-0c1f7b2d3e4f"


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """A device's memory that no other process on this machine knows."""
    path = tmp_path / "memory"
    path.write_bytes(bytes(4096))
    return path


def target(memory: Path) -> File:
    where = memory.stat()
    return File(where.st_dev, where.st_ino)


@pytest.fixture
def run() -> Iterator[Run]:
    """Starts a program that says ``{"ready": true}`` once it holds what it is to hold."""
    running: list[Tenant] = []

    def start(program: str, *arguments: str) -> Tenant:
        running.append(Tenant([sys.executable, "-c", program, *arguments]))
        return running[-1].until_ready()

    yield start
    for each in running:
        each.end()


def ticks() -> Callable[[], float]:
    return count().__next__


def in_pods(pods: dict[int, str]) -> Callable[[int], Group | None]:
    """As ``group_of``, with these processes in these pods."""

    def group(pid: int) -> Group | None:
        return Group(pods[pid], pods[pid]) if pid in pods else group_of(pid)

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
"""Very many descriptors in several tables, for little money, and behind all of them the one that is looked for."""


@pytest.mark.parametrize("way", ["descriptor", "mapping"])
def test_a_look_that_is_cut_again_and_again_goes_on_where_it_stopped(run: Run, memory: Path, way: str) -> None:
    crowd = run(CROWDED, "4", way, str(memory))
    position, looks, found = None, 0, None
    while found is None and looks < 200:
        left = iter([False] * 6)
        each = look.Look(crowd.pid, target(memory), set(), lambda left=left: next(left, True), position)  # type: ignore[misc]
        found, position = each.run(), each.position
        assert found or each.cut
        looks += 1
    assert found is not None
    assert found.parts == (target(memory).inode,)
    assert looks > 3


def test_a_look_goes_on_in_the_same_process_only(run: Run, memory: Path) -> None:
    crowd = run(CROWDED, "1", "descriptor", str(memory))
    beyond = look.Position(started=1, thread=(crowd.pid, 1), descriptor=10_000_000, address=1 << 60)
    found = look.Look(crowd.pid, target(memory), set(), start=beyond).run()
    assert found is not None


def test_a_process_that_no_walk_gets_through_is_looked_through_by_several(run: Run, memory: Path) -> None:
    crowd, progress = run(CROWDED, "4", "descriptor", str(memory)), Progress()
    seen: list[int] = []
    holders: list[int] = []
    while crowd.pid not in holders:
        found = walk(target(memory), budget=Budget(15, 1_000_000), clock=ticks(), progress=progress)
        holders = [each.pid for each in found.holders]
        seen += [each.walks for each in found.unfinished if each.pid == crowd.pid and not holders]
    assert seen == list(range(1, len(seen) + 1))
    assert len(seen) >= 2


def test_what_was_looked_through_in_pieces_is_said_and_looked_through_anew_the_next_time(
    run: Run, memory: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.touch()
    crowd, progress = run(CROWDED, "4", "descriptor", str(other)), Progress()
    pods = in_pods({crowd.pid: UID})
    unfinished: list[bool] = []
    pieces: list[int] = []
    while unfinished.count(False) < 2 and len(unfinished) < 80:
        found = walk(
            target(memory), budget=Budget(15, 1_000_000, 30), clock=ticks(), progress=progress, first=[UID], group=pods
        )
        assert found.holders == ()
        unfinished.append(crowd.pid in {each.pid for each in found.unfinished})
        if not unfinished[-1]:
            pieces.append(found.pieces)
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
"""Very many descriptors; the one that is looked for is opened when a line comes, at a number in their midst."""


@pytest.fixture
def later(memory: Path) -> Iterator[Callable[[int], "subprocess.Popen[str]"]]:
    running: list[subprocess.Popen[str]] = []

    def start(where: int) -> "subprocess.Popen[str]":
        words = [sys.executable, "-c", LATER, str(memory), str(where)]
        running.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        said(running[-1])
        return running[-1]

    yield start
    for each in running:
        each.kill()
        each.communicate()


def said(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def open_now(process: "subprocess.Popen[str]") -> None:
    print(file=process.stdin, flush=True)
    assert said(process) == "open\n"


SHORT, LONG = Budget(15, 1_000_000, 30), Budget(100_000, 1_000_000, 100_000)


def test_a_device_opened_after_an_unfinished_scrub_is_found_by_the_next_scrub(
    later: Callable[[int], "subprocess.Popen[str]"], memory: Path
) -> None:
    """The descriptor is behind what a quick look gets through, and before the place where the first scrub stopped."""
    crowd = later(1_000)
    walker = Walker(partial(walk, clock=ticks(), group=in_pods({crowd.pid: UID})))

    def answer(scrub: str | None, budget: Budget) -> tuple[set[int], set[int]]:
        read = read_walk(walker.answer(about(target(memory), budget=budget, first=[UID], scrub=scrub)))
        return {each.pid for each in read.holders}, {each.pid for each in read.unfinished}

    assert crowd.pid in answer("scrub-1", SHORT)[1]
    open_now(crowd)
    assert crowd.pid in answer("scrub-2", LONG)[0]


def test_what_no_scrub_asked_for_goes_on_from_no_earlier_walk(run: Run, memory: Path) -> None:
    crowd, progress = run(CROWDED, "4", "descriptor", str(memory)), Progress()
    for walks, scrub in enumerate(("one", "two", None, None), start=1):
        progress.begin(scrub)
        assert all(not each.at and not each.done for each in progress.series.values())
        found = walk(target(memory), budget=SHORT, clock=ticks(), progress=progress, group=in_pods({crowd.pid: UID}))
        assert crowd.pid in {each.pid for each in found.unfinished}
        assert crowd.pid in progress.series[UID].at
        assert {each.walks for each in found.unfinished if each.pid == crowd.pid} == {walks}


@pytest.mark.parametrize("first", [[UID], []])
def test_every_walk_begins_each_process_at_its_first_descriptor(
    later: Callable[[int], "subprocess.Popen[str]"], memory: Path, first: list[str]
) -> None:
    crowd, progress = later(3), Progress()
    found = walk(
        target(memory), budget=SHORT, clock=ticks(), progress=progress, first=first, group=in_pods({crowd.pid: UID})
    )
    assert crowd.pid in {each.pid for each in found.unfinished}
    open_now(crowd)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rounds, "_MOMENT", 3)
        found = walk(
            target(memory), budget=SHORT, clock=ticks(), progress=progress, first=first, group=in_pods({crowd.pid: UID})
        )
    assert crowd.pid in {each.pid for each in found.holders}


def test_one_pod_takes_its_share_and_what_it_has_open_delays_no_other_process(run: Run, memory: Path) -> None:
    """The hostile one comes first by its PID, and has more open than the whole walk could get through."""
    crowd, tenant = run(CROWDED, "8", "none", str(memory)), run(OPEN, str(memory))
    neighbours = {crowd.pid: UID, tenant.pid: "another-pod"}
    clock = count()
    found = walk(
        target(memory),
        budget=Budget(100_000, 100_000, 20),
        clock=clock.__next__,
        group=in_pods(neighbours),
    )
    assert [each.pid for each in found.holders] == [tenant.pid]
    (left,) = (each for each in found.unfinished if each.pid == crowd.pid)
    assert left.confined == (os.geteuid() != 0), "root without a container has every power"
    everything = 9 * 6_000 // 256
    assert next(clock) < everything + 20 * len(os.listdir("/proc"))


def test_pods_that_had_the_device_have_all_of_the_walk(run: Run, memory: Path) -> None:
    crowd = run(CROWDED, "4", "descriptor", str(memory))
    budget, pods = Budget(100_000, 100_000, 5), in_pods({crowd.pid: UID})
    assert walk(target(memory), budget=budget, clock=ticks(), group=pods).holders == ()
    found = walk(target(memory), budget=budget, clock=ticks(), group=pods, first=[UID])
    assert [each.pid for each in found.holders] == [crowd.pid]


# --- looks that hang


class Hanging:
    """The memory maps of some processes cannot be read before they are let go; ``looks``: at whom it was tried."""

    def __init__(self, pids: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
        self.looks: list[int] = []
        self._let_go = threading.Event()
        read = look.Look._map_of

        def hang(each: look.Look, path: str) -> bool:
            if each.pid in pids:
                self.looks.append(each.pid)
                assert self._let_go.wait(60)
            return read(each, path)

        monkeypatch.setattr(look.Look, "_map_of", hang)

    def end(self) -> None:
        self._let_go.set()
        for pid in set(self.looks):
            rounds._hanging.pop(pid)[1].join()


def stopped() -> float:
    return 0.0


def test_looks_that_hang_over_a_pods_processes_keep_none_of_the_node_from_being_looked_through(
    run: Run, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slow process of the node is looked through after the first round, in which the pod's looks hang."""
    crowd, tenant, sick = run(CROWDED, "1", "descriptor", str(memory)), run(OPEN, str(memory)), run(OPEN)
    hanging = Hanging({sick.pid}, monkeypatch)
    monkeypatch.setattr(rounds, "_MOST_HANGING", 1)
    monkeypatch.setattr(rounds, "_MOST_OF_A_POD", 1)
    longer = rounds._Rounds._longer

    def with_time(self: rounds._Rounds, moment: float) -> Iterator[tuple[int, float]]:
        assert hanging.looks == [sick.pid]
        yield from longer(self, moment)

    def at_once(each: look.Look, place: str, first: int = 0) -> None:
        if each.pid == crowd.pid and each.pid not in cut:
            cut.add(each.pid)
            raise look._Late
        return really(each, place, first)

    cut: set[int] = set()
    really = look.Look._open
    monkeypatch.setattr(look.Look, "_open", at_once)
    monkeypatch.setattr(rounds._Rounds, "_longer", with_time)
    pods = in_pods({sick.pid: UID, tenant.pid: "another-pod"})
    found = walk(target(memory), clock=stopped, group=pods)
    hanging.end()
    assert {crowd.pid, tenant.pid} <= {each.pid for each in found.holders}
    assert sick.pid in {each.pid for each in found.unfinished}


def test_a_look_that_hangs_is_charged_to_its_pod(run: Run, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sick = {run(OPEN).pid for _ in range(3)}
    hanging = Hanging(sick, monkeypatch)
    found = walk(target(memory), budget=Budget(4, 60, 1), group=in_pods(dict.fromkeys(sick, UID)))
    hanging.end()
    assert len(hanging.looks) == 1, "it took longer than its pod may take of a walk"
    assert sick <= {each.pid for each in found.unfinished}


def test_of_a_pod_whose_looks_hang_no_more_than_a_few_are_begun(
    run: Run, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sick = {run(OPEN).pid for _ in range(2)}
    hanging = Hanging(sick, monkeypatch)
    monkeypatch.setattr(rounds, "_MOST_OF_A_POD", 1)
    found = walk(target(memory), clock=stopped, group=in_pods(dict.fromkeys(sick, UID)))
    hanging.end()
    assert len(hanging.looks) == 1
    assert {each.why for each in found.unfinished if each.pid in sick - set(hanging.looks)} == {
        "too many looks at processes like it have not come back from the kernel"
    }


# --- confinement


FULL = os.stat("/dev/full").st_rdev
NOWHERE = os.makedev(510, 77)
"""The number of a device that has no node on this machine."""


@pytest.mark.parametrize(
    ("powers", "numbers", "own", "confined"),
    [
        (False, {FULL}, set(), False),
        (False, {NOWHERE}, set(), True),
        (False, {FULL, NOWHERE}, {NOWHERE}, True),
        (False, {FULL, NOWHERE}, {FULL}, False),
        (True, {NOWHERE}, set(), False),
        (None, {NOWHERE}, set(), False),
    ],
)
def test_a_process_is_confined_if_it_has_neither_a_power_nor_a_node_of_the_device(
    powers: bool | None, numbers: set[int], own: set[int], confined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confinement, "has_powers", lambda pid: powers)
    judge = Confinement(Nodes(frozenset(numbers)), frozenset(own))
    for _ in range(2):
        assert judge.is_confined(os.getpid(), UID) == confined


def test_a_process_whose_dev_cannot_be_read_is_not_confined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement, "has_powers", lambda pid: False)
    assert not Confinement(Nodes(frozenset({NOWHERE}))).is_confined(4_194_305, UID)
    for what in ("_MOST_ENTRIES", "_MOST_DIRECTORIES", "_MOST_ROOTS", "_MOUNTS_LENGTH"):
        with monkeypatch.context() as patched:
            patched.setattr(confinement, what, 0)
            assert not Confinement(Nodes(frozenset({NOWHERE}))).is_confined(os.getpid(), UID), what
    with monkeypatch.context() as patched:
        patched.setattr(confinement, "_SAFE", (b"fuse",))
        assert not Confinement(Nodes(frozenset({NOWHERE}))).is_confined(os.getpid(), UID)


def test_a_node_below_a_directory_of_dev_is_seen_and_a_link_to_one_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/full")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "kept").touch()
    numbers = frozenset({FULL})

    class Seeing(Eye):
        def __init__(self, node: str) -> None:
            super().__init__()
            self._node = node

        def see(self, path: str, directory: int | None = None) -> Seen:
            return super().see("/dev/full") if path == self._node else super().see(path, directory)

    for node, seen in (("kept", True), ("none", False)):
        with ExitStack() as opened:
            top = os.open(tmp_path, os.O_PATH)
            opened.callback(os.close, top)
            assert confinement._has_node(top, confinement._mount_of(top), numbers, Seeing(node), opened) is seen


def test_a_process_in_a_user_namespace_of_its_own_is_judged_by_its_capabilities_there(run: Run) -> None:
    """Making one gives all of them: the process may have been privileged before."""
    alone = run("import ctypes\nctypes.CDLL(None).unshare(0x10000000)" + OPEN)
    same = os.readlink(f"/proc/{alone.pid}/ns/user") == os.readlink("/proc/self/ns/user")
    assert same or has_powers(alone.pid), "not every user of every machine may make one"


def test_of_a_group_that_is_too_large_to_be_told_the_unconfined_processes_are_told_first(
    run: Run, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = sorted(run(OPEN).pid for _ in range(3))
    monkeypatch.setattr(confinement, "has_powers", lambda pid: pid == pids[-1])
    monkeypatch.setattr(rounds, "_MOST_TOLD", 1)
    found = walk(
        target(memory),
        budget=Budget(each=1, whole=0),
        clock=ticks(),
        group=lambda pid: Group(UID, UID) if pid in pids else None,
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
    signal(SIGCHLD, SIG_IGN);
    alarm(110);
    if (open(words[1], O_RDWR) < 0)
        return 1;
    setpgid(0, 0);
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
    """Process group of a process that forks and ends without end, and hands its descriptor on."""
    if shutil.which("gcc") is None:
        raise RuntimeError("A relay of processes is compiled by the tests: install gcc.")
    (tmp_path / "forks.c").write_text(RELAY)
    program = tmp_path / "forks"
    subprocess.run(["gcc", "-O1", "-w", "-o", str(program), str(tmp_path / "forks.c")], check=True, capture_output=True)
    first = Tenant([str(program), str(memory)]).until_ready()
    first.process.wait()
    yield first.pid
    os.killpg(first.pid, signal.SIGKILL)  # a fork that is under way is made again once the signal was taken: never
    first.end()


def test_a_relay_of_processes_is_found_or_its_group_is_named(relay: int, memory: Path) -> None:
    """It is in no list that is still true when it is read: each of its processes has ended when it is looked at."""

    def group(pid: int) -> Group | None:
        try:
            return Group(UID, UID) if os.getpgid(pid) == relay else group_of(pid)
        except ProcessLookupError:
            return None

    for _ in range(2):
        found = walk(target(memory), group=group)
        assert found.holders or {UID, ""} & {each.group for each in found.relays}


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
def test_a_relay_is_a_group_that_may_have_been_in_every_list(lists: Missed, named: list[str]) -> None:
    missed = [Counter(None if each is None else Group(each, None) for each in groups) for groups in lists]
    assert sorted("" if each is None else each.key for each in rounds._relays(missed)) == named


def test_a_neighbour_that_forks_now_and_then_delays_nothing_and_is_no_relay(
    run: Run, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 200 forks a second a process that ends before it is looked at is in every third list at most."""
    tenant, listdir, lists = run(OPEN, str(memory)), os.listdir, count()
    gone = count(4_000_000)  # beyond any PID that Linux gives

    def with_a_short_lived_one(path: str) -> list[str]:
        names = listdir(path)
        if path == "/proc" and next(lists) % 3 == 1:
            names.append(str(next(gone)))
        return names

    monkeypatch.setattr(os, "listdir", with_a_short_lived_one)
    found = walk(target(memory), group=lambda pid: Group(UID, UID) if pid >= 4_000_000 else group_of(pid))
    assert [each.pid for each in found.holders] == [tenant.pid]
    assert found.relays == ()


def test_a_process_that_ends_between_two_looks_at_it_has_its_children_looked_for(
    run: Run, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is slow to look through, hands everything on to a child once all lists were read, and ends."""
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
    longer = rounds._Rounds._longer

    def once_it_has_moved_on(self: rounds._Rounds, moment: float) -> Iterator[tuple[int, float]]:
        if not children:
            assert tenant.pid in self._again
            print(file=tenant.stdin, flush=True)
            assert tenant.stdout is not None
            children.append(int(tenant.stdout.readline()))
            tenant.wait()
        yield from longer(self, moment)

    monkeypatch.setattr(rounds, "_MOMENT", 3)
    monkeypatch.setattr(rounds._Rounds, "_longer", once_it_has_moved_on)
    try:
        found = walk(target(memory), budget=Budget(100_000, 100_000), clock=ticks())
        assert [each.pid for each in found.holders] == children
    finally:
        for child in children:
            os.kill(child, 9)
        tenant.stdin.close()
        tenant.stdout.close()


def test_a_relay_of_a_pod_is_as_confined_as_the_processes_of_its_pod(
    run: Run, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, newest = run(OPEN).pid, run(OPEN).pid
    monkeypatch.setattr(rounds, "_newest", lambda: newest)

    def relay(privileged: set[int], *caught: int) -> Relay:
        monkeypatch.setattr(confinement, "has_powers", lambda pid: pid in privileged)
        wanted, pods = target(memory), in_pods(dict.fromkeys((parent, *caught), UID))
        each = rounds._Rounds(
            wanted, frozenset(), frozenset(), Budget(), stopped, frozenset(), Progress(), pods, Confinement(wanted)
        )
        each._place(parent)
        return each._relay(Group(UID, UID))

    assert relay(set(), newest).confined
    assert not relay({parent}, newest).confined
    assert not relay({newest}, newest).confined
    assert not relay(set()).confined, "none of those that come and go was seen"


def test_a_relay_of_a_pod_is_no_more_confined_than_its_processes_are() -> None:
    assert [each.confined for each in uninspected((), (Relay(UID, UID), Relay(UID, UID, confined=True)))] == [
        False,
        True,
    ]


# --- answers


def test_hundreds_of_holders_with_long_names_fit_into_one_answer(memory: Path) -> None:
    """Each character of their names takes twelve bytes of an answer."""
    program = OPEN.replace("sys.argv[1:]", "sys.argv[1:2]").replace(
        "print(",
        "import ctypes\nfor _ in range(449):\n    if os.fork() == 0:\n        ctypes.CDLL(None).prctl(1, 9)\n"
        "        signal.pause()\nprint(",
    )
    crowd = Tenant([sys.executable, "-c", program, str(memory), "\U0001f480" * 400])
    try:
        crowd.until_ready()
        message = Walker().answer(about(target(memory)))
        assert len(pack(message)) < LIMIT / 2
        read = read_walk(message)
        assert len(read.holders) + read.more == 450
        assert read.more > 0
    finally:
        crowd.end()


def test_of_many_holders_at_least_one_of_each_pod_is_told(memory: Path, run: Run) -> None:
    crowd = [run(OPEN, str(memory)) for _ in range(4)]
    pods = {each.pid: "many" for each in crowd[:3]} | {crowd[3].pid: "one"}
    for most in (2, 3):
        found = _with(most, lambda: walk(target(memory), group=in_pods(pods)))
        assert {pods[each.pid] for each in found.holders} == {"many", "one"}
        assert found.more == 4 - most
    everything = _with(1, lambda: walk(target(memory), named=[each.pid for each in crowd], group=in_pods(pods)))
    assert (len(everything.holders), everything.more) == (4, 0), "those that were asked for are told in any case"


def _with(most: int, act: Callable[[], rounds.Walk]) -> rounds.Walk:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rounds, "_MOST_TOLD", most)
        return act()


# --- groups


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
def test_only_a_pod_component_that_root_has_made_counts(path: str, uid: str | None) -> None:
    assert pod_of_path(path) == uid


def test_what_a_tenant_makes_below_its_pod_leads_out_of_no_pod() -> None:
    assert pod_of_path(f"/kubepods/pod{UID}/x/kubepods/pod{'0' * 32}") == UID
