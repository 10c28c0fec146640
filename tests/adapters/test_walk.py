"""Whoever holds a file or a device is found by what the kernel says, under any name and in any thread.

A tenant's process is a real one. Two device nodes are terminals that nobody else on this machine has open, as the other
sides are kept here; one is ``/dev/zero``, which can be mapped.
"""

import ctypes
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from scrubber.adapters.children.child import Fault
from scrubber.adapters.walk import File, Found, Nodes, has_open, living_since, look, seeing, start_time, walk
from scrubber.adapters.walker import Walker, about, read_walk
from scrubber.domain.errors import Away
from tests import relay
from tests.adapters.sim_rig import Tenant

_OURS, _THEIRS = zip(os.openpty(), os.openpty(), strict=True)
ONE_NODE, OTHER_NODE = map(os.ttyname, _THEIRS)
ONE, OTHER, ZERO = (os.stat(path).st_rdev for path in (ONE_NODE, OTHER_NODE, "/dev/zero"))
for _each in _THEIRS:
    os.close(_each)

Run = Callable[..., Tenant]


@pytest.fixture
def run() -> Iterator[Run]:
    """Starts a Python program that says ``{"ready": true}`` once it holds what it is to hold."""
    running: list[Tenant] = []

    def start(program: str, *arguments: str) -> Tenant:
        running.append(Tenant([sys.executable, "-c", program, *arguments]))
        return running[-1].until_ready()

    yield start
    for each in running:
        each.end()


def parts(target: File | Nodes, excluded: Iterable[int] = (), named: Iterable[int] = ()) -> dict[int, tuple[int, ...]]:
    return {found.pid: found.parts for found in walk(target, excluded, named).holders}


def nodes(*numbers: int) -> Nodes:
    return Nodes(frozenset(numbers))


READY = "import json, os, signal, sys\nsay = lambda **more: print(json.dumps({**more, 'ready': True}), flush=True)\n"
OPEN = READY + "fd = os.open(sys.argv[1], os.O_RDONLY)\nsay()\nsignal.pause()"


def test_a_descriptor_is_found_by_the_number_of_its_device(run: Run) -> None:
    tenant, stranger = run(OPEN, ONE_NODE), run(OPEN, OTHER_NODE)
    assert parts(nodes(ONE)) == {tenant.pid: (ONE,)}
    assert parts(nodes(OTHER)) == {stranger.pid: (OTHER,)}
    assert parts(nodes(ONE, OTHER)) == {tenant.pid: (ONE,), stranger.pid: (OTHER,)}
    assert parts(nodes()) == {}


def test_a_process_with_two_of_the_devices_has_both(run: Run) -> None:
    both = READY + "fds = [os.open(name, os.O_RDONLY) for name in sys.argv[1:]]\nsay()\nsignal.pause()"
    tenant = run(both, ONE_NODE, OTHER_NODE)
    assert parts(nodes(ONE, OTHER, ZERO))[tenant.pid] == tuple(sorted((ONE, OTHER)))


def test_a_link_by_another_name_hides_nothing(run: Run, tmp_path: Path) -> None:
    (tmp_path / "innocent").symlink_to(ONE_NODE)
    tenant = run(OPEN, str(tmp_path / "innocent"))
    assert parts(nodes(ONE)) == {tenant.pid: (ONE,)}


def test_a_node_that_a_container_made_for_itself_hides_nothing(run: Run, tmp_path: Path) -> None:
    path, number = tmp_path / "full", os.stat("/dev/full").st_rdev  # a terminal's node works where it was made only
    try:
        os.mknod(path, 0o20600, number)
        os.close(os.open(path, os.O_RDONLY))
    except PermissionError:  # this user, or this file system, makes no nodes: a link is the next best
        path.unlink(missing_ok=True)
        path.symlink_to("/dev/full")
    os.link(path, tmp_path / "hard", follow_symlinks=False)
    tenant = run(OPEN, str(tmp_path / "hard"))
    (tmp_path / "hard").unlink()
    path.unlink()
    assert parts(nodes(number))[tenant.pid] == (number,)  # others may have the machine's own open


def test_a_file_that_is_only_called_like_a_device_is_none(run: Run, tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    run(OPEN, str(tmp_path / "nvidia0"))
    assert parts(nodes(ONE)) == {}


def test_a_descriptor_that_can_do_nothing_holds_nothing(run: Run) -> None:
    """Anybody may open a node with ``O_PATH``, without any right to the device: that must keep nobody out of it."""
    tenant = run(READY + "fd = os.open(sys.argv[1], os.O_PATH)\nsay()\nsignal.pause()", ONE_NODE)
    assert parts(nodes(ONE)) == {}
    assert parts(nodes(ONE), named=[tenant.pid]) == {tenant.pid: ()}


def test_a_child_that_inherited_the_descriptor_holds_it_too(run: Run) -> None:
    program = (
        READY
        + "import subprocess\nfd = os.open(sys.argv[1], os.O_RDONLY)\n"
        + "child = subprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read()'], stdin=subprocess.PIPE, pass_fds=[fd])\n"
        + "os.close(fd)\nsay(child=child.pid)\nsignal.pause()"
    )
    tenant = run(program, ONE_NODE)
    assert list(parts(nodes(ONE))) == [tenant.said["child"]]


def test_a_process_that_leaves_its_descriptor_to_a_child_and_ends_is_found_in_that_child(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves_on = (
        READY
        + "fd = os.open(sys.argv[1], os.O_RDONLY)\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
        + "say()\nsignal.sigwait([signal.SIGUSR1])\nchild = os.fork()\n"
        + "if child:\n    print(child, flush=True)\n    os._exit(0)\nsignal.pause()"
    )
    tenant = run(moves_on, ONE_NODE)
    listdir, children = os.listdir, list[int]()

    def moving_on_once_the_processes_are_listed(path: str) -> list[str]:
        names = listdir(path)
        if path == "/proc" and not children:
            os.kill(tenant.pid, signal.SIGUSR1)
            children.append(int(tenant.line()))
            tenant.process.wait()
        return names

    monkeypatch.setattr(os, "listdir", moving_on_once_the_processes_are_listed)
    try:
        found = parts(nodes(ONE))
        assert found == dict.fromkeys(children, (ONE,))
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)


END_THIS_THREAD = (
    "import ctypes, platform\n"
    "end = lambda: ctypes.CDLL(None).syscall({'x86_64': 60, 'aarch64': 93}[platform.machine()], 0)\n"
)


def test_a_descriptor_is_found_in_a_thread_that_outlived_its_leader(run: Run) -> None:
    program = (
        READY
        + END_THIS_THREAD
        + "import threading\nfd = os.open(sys.argv[1], os.O_RDONLY)\n"
        + "threading.Thread(target=threading.Event().wait).start()\nsay()\nend()"
    )
    tenant = run(program, ONE_NODE).until_its_leader_is_dead()
    (found,) = walk(nodes(ONE)).holders
    assert (found.pid, found.hung) == (tenant.pid, True)


def test_a_thread_with_a_table_of_its_own_hides_nothing(run: Run) -> None:
    program = (
        READY
        + "import ctypes, threading\nopened = threading.Event()\n"
        + "def work():\n"
        + "    assert ctypes.CDLL(None).unshare(0x400) == 0\n"  # CLONE_FILES
        + "    os.open(sys.argv[1], os.O_RDONLY)\n"
        + "    opened.set()\n"
        + "    threading.Event().wait()\n"
        + "threading.Thread(target=work, daemon=True).start()\nopened.wait()\nsay()\nsignal.pause()"
    )
    tenant = run(program, ONE_NODE)
    assert parts(nodes(ONE)) == {tenant.pid: (ONE,)}


@pytest.mark.parametrize("way", relay.WAYS)
def test_threads_that_each_make_the_next_and_end_hide_nothing(tmp_path: Path, way: str) -> None:
    memory = tmp_path / "memory"
    memory.write_bytes(bytes(4096))
    tenant = Tenant([relay.compiled(tmp_path), '{"ready": true}', way, str(memory)])
    try:
        tenant.until_ready()
        looks = [look.Look(tenant.pid, file_of(memory), set()) for _ in range(100)]
        found = [each.run() is not None or each.cut is not None for each in looks]
        assert all(found), f"overlooked {found.count(False)} times"
        assert {living_since(tenant.pid) for _ in range(100)} == {start_time(tenant.pid)}
        seen = walk(file_of(memory))
        assert tenant.pid in {each.pid for each in seen.holders} | {each.pid for each in seen.unfinished}
    finally:
        tenant.end()


def test_a_process_that_makes_threads_without_end_is_looked_through(run: Run, tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.write_bytes(bytes(4096))
    program = (
        READY
        + "import threading\n"
        + "for number in range(1_000_000):\n"
        + "    thread = threading.Thread(target=int)\n"
        + "    thread.start()\n"
        + "    if number == 10: say()\n"
        + "    thread.join()"
    )
    busy = run(program)
    looks = [look.Look(busy.pid, file_of(memory), set()) for _ in range(100)]
    assert [each.run() for each in looks] == [None] * 100
    # Each list may have somebody new, and a look has sixteen; one that was cut is no look, and the next one is.
    cut = [each.cut for each in looks]
    assert set(cut) <= {None, "threads"}
    assert cut.count(None) > len(looks) // 2


MAPPED = (
    READY
    + "import mmap\nfd = os.open(sys.argv[1], os.O_RDONLY)\n"
    + "kept = mmap.mmap(fd, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)\n"
    + "os.close(fd)\nsay()\nsignal.pause()"
)


def test_a_mapping_is_a_holder_when_its_descriptor_is_closed(run: Run, tmp_path: Path) -> None:
    (tmp_path / "innocent").symlink_to("/dev/zero")
    tenant = run(MAPPED, str(tmp_path / "innocent"))
    found = walk(nodes(ZERO), named=[tenant.pid])
    if may_follow_maps():
        assert {each.pid: each.parts for each in found.holders}[tenant.pid] == (ZERO,)
    else:
        assert os.geteuid() in dict(found.unreadable)


def may_follow_maps() -> bool:
    """Whether this user may ask what is mapped; a user who may not is told so by the walk."""
    try:
        os.stat(f"/proc/self/map_files/{os.listdir('/proc/self/map_files')[0]}")
    except PermissionError:
        return False
    return True


def test_a_mapped_file_is_a_holder_of_that_file_alone(run: Run, tmp_path: Path) -> None:
    wanted, other = tmp_path / "wanted", tmp_path / "other"
    for path in (wanted, other):
        path.write_bytes(bytes(4096))
    tenant = run(MAPPED, str(wanted))
    assert parts(file_of(wanted)) == {tenant.pid: (wanted.stat().st_ino,)}
    assert parts(file_of(other)) == {}


def file_of(path: Path) -> File:
    where = path.stat()
    return File(where.st_dev, where.st_ino)


def test_the_walk_skips_whom_it_is_told_to_skip(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with path.open("rb"):
        assert list(parts(file_of(path))) == [os.getpid()]
        assert parts(file_of(path), excluded=[os.getpid()]) == {}


def test_a_process_that_is_asked_for_by_name_is_described_without_holding_anything(run: Run) -> None:
    tenant = run(OPEN, OTHER_NODE)
    (found,) = walk(nodes(ONE), named=[tenant.pid]).holders
    assert found == Found(tenant.pid, start_time(tenant.pid) or 0, found.command, False, ())
    assert "import json" in found.command


def test_who_is_gone_or_a_zombie_is_not_described(run: Run) -> None:
    tenant = run(OPEN, ONE_NODE)
    pidfd = os.pidfd_open(tenant.pid)
    tenant.process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)  # over, and not reaped yet
    os.close(pidfd)
    assert start_time(tenant.pid) is not None
    assert living_since(tenant.pid) is None
    assert walk(nodes(ONE), named=[tenant.pid]).holders == ()
    tenant.end()
    assert start_time(tenant.pid) is living_since(tenant.pid) is None
    assert walk(nodes(ONE), named=[tenant.pid]).holders == ()


def test_a_kernel_thread_holds_nothing() -> None:
    kthreadd = 2
    assert all(found.pid != kthreadd for found in walk(nodes(ONE), named=[kthreadd]).holders)


def test_a_descriptor_of_another_file_is_never_asked_about_its_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be one that never answers; the kernel itself tells which descriptors need no question."""
    wanted, other = tmp_path / "wanted", tmp_path / "other"
    wanted.touch()
    other.touch()
    asked: list[str] = []
    really_ask = os.stat

    def ask(path: str, *, dir_fd: int | None = None) -> os.stat_result:
        asked.append(path)
        return really_ask(path, dir_fd=dir_fd)

    with wanted.open("rb") as file, other.open("rb") as stranger:
        where = os.fstat(file.fileno())
        monkeypatch.setattr(seeing, "_STATX", None)
        monkeypatch.setattr(os, "stat", ask)
        assert has_open("/proc/self", where.st_dev, where.st_ino)
        assert str(file.fileno()) in asked
        assert str(stranger.fileno()) not in asked


def test_what_the_kernel_says_is_the_same_with_and_without_statx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [ONE_NODE, OTHER_NODE, str(tmp_path), "/proc/self/exe", "/proc/self/fd/0"]
    quiet = seeing.Eye()
    assert quiet.quiet
    assert [nodes(ONE).part(quiet.see(place)) for place in places] == [ONE, None, None, None, None]
    monkeypatch.setattr(seeing, "_STATX", None)
    asking = seeing.Eye()
    assert not asking.quiet
    assert [told(asking, place) for place in places] == [told(quiet, place) for place in places]


def told(eye: seeing.Eye, place: str) -> tuple[int, int, int | None]:
    seen = eye.see(place)
    return seen.device, seen.inode, nodes(ONE, OTHER, ZERO).part(seen)


def refused(*_: object) -> int:
    ctypes.set_errno(errno.EPERM)
    return -1


def test_a_filter_that_refuses_statx_does_not_blind_the_walk(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    tenant = run(OPEN, ONE_NODE)
    monkeypatch.setattr(seeing, "_STATX", seeing._if_it_works(refused))
    assert not seeing.Eye().quiet
    assert parts(nodes(ONE)) == {tenant.pid: (ONE,)}


def test_without_kcmp_every_thread_is_looked_at(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    tenant = run(OPEN, ONE_NODE)
    monkeypatch.setattr(look, "_KCMP_CALL", None)
    assert parts(nodes(ONE)) == {tenant.pid: (ONE,)}


def test_threads_that_share_their_descriptors_are_asked_once(run: Run) -> None:
    program = (
        READY
        + "import threading\nfd = os.open(sys.argv[1], os.O_RDONLY)\n"
        + "for _ in range(8): threading.Thread(target=threading.Event().wait, daemon=True).start()\nsay()\nsignal.pause()"
    )
    tenant = run(program, ONE_NODE)
    threads = [int(name) for name in os.listdir(f"/proc/{tenant.pid}/task")]
    assert len(threads) == 9
    assert list(look.own_tables(threads)) == threads[:1]
    assert parts(nodes(ONE)) == {tenant.pid: (ONE,)}


HOSTILE = (
    READY
    + """
import ctypes, struct, threading
libc = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWUSER, PRIVATE = 0x20000, 0x10000000, 0x44000
root = os.geteuid() == 0
if libc.unshare(NEWNS if root else NEWNS | NEWUSER) != 0 or not os.access("/dev/fuse", os.R_OK | os.W_OK):
    say(opener=os.getpid(), fd=0, asked="nobody: this place lets no tenant mount a file system, so none can do it here")
    signal.pause()
assert libc.mount(b"none", b"/", None, PRIVATE, None) == 0
connection = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={connection},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()}".encode()
assert libc.mount(b"hostile", sys.argv[1].encode(), b"fuse", 0, options) == 0, os.strerror(ctypes.get_errno())
LOOKUP, GETATTR, OPEN, INIT = 1, 3, 14, 26

def attributes(node):
    mode = 0o40755 if node == 1 else 0o100644
    return struct.pack("=6Q10I", node, 0, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 512, 0)

def answer(opcode, node):
    if opcode == INIT:
        return struct.pack("=IIIIHHIIHHI", 7, 31, 0, 0, 12, 9, 4096, 1, 0, 0, 0) + bytes(28)
    if opcode == LOOKUP:
        return struct.pack("=QQQQII", 2, 0, 0, 0, 0, 0) + attributes(2)
    if opcode == GETATTR:
        return struct.pack("=QII", 0, 0, 0) + attributes(node)
    return struct.pack("=QII", 0, 0, 0)

opened = threading.Event()
def serve():
    while True:
        _, opcode, unique, node = struct.unpack("=IIQQ", os.read(connection, 65536)[:24])
        if opened.is_set():
            print(json.dumps({"asked": opcode}), flush=True)  # and no answer, ever
            continue
        body = answer(opcode, node)
        os.write(connection, struct.pack("=IiQ", 16 + len(body), 0, unique) + body)

# Whoever serves must not have the file open itself: its end would wait for its own answer.
alive, lives = os.pipe()
(there, said) = os.pipe()
opener = os.fork()
if opener == 0:
    os.close(connection)
    os.close(lives)
    fd = os.open(sys.argv[1] + "/file", os.O_RDONLY)
    os.write(said, bytes([fd]))
    os.read(alive, 1)
    os._exit(0)
threading.Thread(target=serve, daemon=True).start()
(fd,) = os.read(there, 1)
opened.set()
say(opener=opener, fd=fd)
signal.pause()
"""
)


def test_a_file_system_that_never_answers_is_not_asked(run: Run, tmp_path: Path) -> None:
    """A tenant may mount one and open a file on it. A plain ``stat`` would ask it, and wait for ever."""
    hostile = run(HOSTILE, str(tmp_path))
    opener = int(str(hostile.said["opener"]))
    tenant = run(OPEN, ONE_NODE)
    assert parts(nodes(ONE)) == {tenant.pid: (ONE,)}
    assert parts(nodes(ONE), named=[opener]) == {tenant.pid: (ONE,), opener: ()}
    with subprocess.Popen(
        ["stat", "-L", f"/proc/{opener}/fd/{hostile.said['fd']}"], stderr=subprocess.DEVNULL
    ) as plain:
        try:
            assert "asked" in hostile.said or '"asked"' in hostile.line()
        finally:
            hostile.end()
    assert plain.returncode != 0 or "asked" in hostile.said


@pytest.mark.parametrize("target", [nodes(ONE, ZERO), File(259, 42)])
def test_a_question_reaches_the_child_as_it_was_asked(target: File | Nodes) -> None:
    found = read_walk(Walker().answer(about(target, named=[os.getpid()])))
    assert [holder.pid for holder in found.holders if holder.pid == os.getpid()] == [os.getpid()]
    assert all(isinstance(holder, Found) for holder in found.holders)
    assert found.unfinished == ()


@pytest.mark.parametrize(
    "question",
    [
        {},
        {"file": [1]},
        {"nodes": "all"},
        {"nodes": [1], "excluded": [None]},
        {"nodes": [1], "milliseconds": [1, 2]},
        {"nodes": [1], "first": [1]},
    ],
)
def test_a_question_that_makes_no_sense_is_refused(question: dict[str, object]) -> None:
    with pytest.raises(Fault):
        Walker().answer({"excluded": [], "named": [], "milliseconds": [1, 2, 3], "first": [], **question})


NOTHING: dict[str, object] = {
    "holders": [],
    "unreadable": [],
    "unfinished": [],
    "relays": [],
    "counts": [0, 0, 0, 0],
}


def test_processes_that_could_not_be_looked_at_are_counted_by_user() -> None:
    said = read_walk({**NOTHING, "unreadable": [[0, 40], [33, 2]], "counts": [3, 0, 4, 5]}).not_covered
    assert said == (
        "holders: 42 process(es) of uid 0, 33 could not be looked into",
        "holders: 3 more process(es) than are named could not be looked through",
        "holders: 4 short-lived process(es) ended before they could be looked at",
        "holders: 5 process(es) were looked through in pieces, over several walks; descriptors moved meanwhile are not seen",
    )


@pytest.mark.parametrize(
    "message",
    [
        {"holders": None},
        {"holders": [[1]]},
        {"holders": [[1, 2, 3, 4, []]]},
        {"unfinished": [[1, 2, "a", 0, None, [], True, 1]]},
        {"unfinished": [[1, 2, "a", 0, "why", ["part"], True, 1]]},
        {"unfinished": [[1, 2, "a", 0, "why", [], "yes", 1]]},
        {"relays": [[1, None]]},
        {"counts": [0]},
    ],
)
def test_an_answer_that_makes_no_sense_is_no_answer_and_no_fault_of_a_device(message: dict[str, object]) -> None:
    with pytest.raises(Away):
        read_walk({**NOTHING, **message})
