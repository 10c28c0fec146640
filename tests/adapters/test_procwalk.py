"""Every process that holds a file or a device is found by the kernel's data, under any name and in any thread.

The tenant's process is real. Two device nodes are terminals that no other process on this machine has open, because the
other sides are kept here; one is ``/dev/zero``, which can be mapped.
"""

import ctypes
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from scrubber.adapters.children.child import Fault
from scrubber.adapters.kernel_text import ProcStat
from scrubber.adapters.procwalk import (
    DeviceNodeTarget,
    FileTarget,
    ProcessMatch,
    has_open,
    live_start_time,
    match,
    process,
    start_time,
    walk,
)
from scrubber.adapters.walker import Walker, parse_walk_report, walk_request
from scrubber.domain.errors import Unavailable
from tests import relay
from tests.adapters.sim_rig import Tenant, kill_and_wait, report_as_kernel_thread

_OURS, _THEIRS = zip(os.openpty(), os.openpty(), strict=True)
ONE_NODE, OTHER_NODE = map(os.ttyname, _THEIRS)
ONE, OTHER, ZERO = (os.stat(path).st_rdev for path in (ONE_NODE, OTHER_NODE, "/dev/zero"))
for _each in _THEIRS:
    os.close(_each)

Run = Callable[..., Tenant]


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


def parts(
    target: FileTarget | DeviceNodeTarget, excluded: Iterable[int] = (), named: Iterable[int] = ()
) -> dict[int, tuple[int, ...]]:
    return {found.pid: found.parts for found in walk(target, excluded, named).holders}


def nodes(*numbers: int) -> DeviceNodeTarget:
    return DeviceNodeTarget(frozenset(numbers))


READY = "import json, os, signal, sys\nsay = lambda **more: print(json.dumps({**more, 'ready': True}), flush=True)\n"
OPEN = READY + "fd = os.open(sys.argv[1], os.O_RDONLY)\nsay()\nsignal.pause()"


def test_descriptor_is_found_by_its_device_number(run: Run) -> None:
    tenant, other_tenant = run(OPEN, ONE_NODE), run(OPEN, OTHER_NODE)
    assert parts(nodes(ONE)) == {tenant.pid: (ONE,)}
    assert parts(nodes(OTHER)) == {other_tenant.pid: (OTHER,)}
    assert parts(nodes(ONE, OTHER)) == {tenant.pid: (ONE,), other_tenant.pid: (OTHER,)}
    assert parts(nodes()) == {}


def test_device_that_is_the_standard_input_of_a_process_is_found(run: Run) -> None:
    tenant = run(
        READY + "os.dup2(os.open(sys.argv[1], os.O_RDONLY), 0)\nos.closerange(3, 64)\nsay()\nsignal.pause()", ONE_NODE
    )
    assert parts(nodes(ONE)) == {tenant.pid: (ONE,)}


def test_process_with_two_devices_open_is_a_holder_of_both(run: Run) -> None:
    both = READY + "fds = [os.open(name, os.O_RDONLY) for name in sys.argv[1:]]\nsay()\nsignal.pause()"
    tenant = run(both, ONE_NODE, OTHER_NODE)
    assert parts(nodes(ONE, OTHER, ZERO))[tenant.pid] == tuple(sorted((ONE, OTHER)))


def test_symlink_with_another_name_does_not_hide_a_holder(run: Run, tmp_path: Path) -> None:
    (tmp_path / "innocent").symlink_to(ONE_NODE)
    tenant = run(OPEN, str(tmp_path / "innocent"))
    assert parts(nodes(ONE)) == {tenant.pid: (ONE,)}


def test_device_node_created_inside_a_container_does_not_hide_a_holder(run: Run, tmp_path: Path) -> None:
    path, number = (
        tmp_path / "full",
        os.stat("/dev/full").st_rdev,
    )  # a terminal's node works only where it was created
    try:
        os.mknod(path, 0o20600, number)
        os.close(os.open(path, os.O_RDONLY))
    except PermissionError:  # this user or file system cannot create device nodes: a link is the closest substitute
        path.unlink(missing_ok=True)
        path.symlink_to("/dev/full")
    os.link(path, tmp_path / "hard", follow_symlinks=False)
    tenant = run(OPEN, str(tmp_path / "hard"))
    (tmp_path / "hard").unlink()
    path.unlink()
    assert parts(nodes(number))[tenant.pid] == (number,)  # other processes may have the machine's own node open


def test_regular_file_named_like_a_device_is_no_device(run: Run, tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    run(OPEN, str(tmp_path / "nvidia0"))
    assert parts(nodes(ONE)) == {}


def test_path_only_descriptor_is_no_holder(run: Run) -> None:
    """Any user may open a node with ``O_PATH``, without any right to the device: that must not block the device."""
    tenant = run(READY + "fd = os.open(sys.argv[1], os.O_PATH)\nsay()\nsignal.pause()", ONE_NODE)
    assert parts(nodes(ONE)) == {}
    assert parts(nodes(ONE), named=[tenant.pid]) == {tenant.pid: ()}


def test_name_of_a_dma_buffer_forges_no_inode_of_a_descriptor() -> None:
    """A kernel before 5.14 writes no inode, and one after 5.3 writes the name as its user chose it, with line breaks."""
    text = b"pos:\t0\nflags:\t02000002\nmnt_id:\t15\nsize:\t4096\ncount:\t2\nexp_name:\tsystem\nname:\tx\nino:\t7\n"
    assert match.parse_fdinfo(text) == (0o2000002, None)
    assert match.parse_fdinfo(text.replace(b"15\n", b"15\nino:\t4711\n")) == (0o2000002, 4711)
    assert match.parse_fdinfo(b"name:\tx\n" + text) == (0, None)


def test_child_that_inherited_a_descriptor_is_a_holder(run: Run) -> None:
    program = (
        READY
        + "import subprocess\nfd = os.open(sys.argv[1], os.O_RDONLY)\n"
        + "child = subprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read()'], stdin=subprocess.PIPE, pass_fds=[fd])\n"
        + "os.close(fd)\nsay(child=child.pid)\nsignal.pause()"
    )
    child = run(program, ONE_NODE).message["child"]
    assert isinstance(child, int)
    assert list(parts(nodes(ONE))) == [child]
    kill_and_wait(child)


def test_child_of_an_ended_process_with_its_descriptor_is_found(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
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
            kill_and_wait(child)


END_THIS_THREAD = (
    "import ctypes, platform\n"
    "end = lambda: ctypes.CDLL(None).syscall({'x86_64': 60, 'aarch64': 93}[platform.machine()], 0)\n"
)


def test_descriptor_is_found_in_a_thread_that_outlived_its_leader(run: Run) -> None:
    program = (
        READY
        + END_THIS_THREAD
        + "import threading\nfd = os.open(sys.argv[1], os.O_RDONLY)\n"
        + "threading.Thread(target=threading.Event().wait).start()\nsay()\nend()"
    )
    tenant = run(program, ONE_NODE).until_its_leader_is_dead()
    (found,) = walk(nodes(ONE)).holders
    assert (found.pid, found.hung) == (tenant.pid, True)


def test_thread_with_its_own_descriptor_table_does_not_hide_a_holder(run: Run) -> None:
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
def test_chain_of_short_lived_threads_does_not_hide_a_holder(tmp_path: Path, way: str) -> None:
    memory = tmp_path / "memory"
    memory.write_bytes(bytes(4096))
    tenant = Tenant([relay.compiled(tmp_path), '{"ready": true}', way, str(memory)])
    try:
        tenant.until_ready()
        looks = [process.ProcessScan(tenant.pid, file_of(memory), set()) for _ in range(100)]
        found = [each.run() is not None or each.interrupted_in is not None for each in looks]
        assert all(found), f"overlooked {found.count(False)} times"
        assert {live_start_time(tenant.pid) for _ in range(100)} == {start_time(tenant.pid)}
        seen = walk(file_of(memory))
        assert tenant.pid in {each.pid for each in seen.holders} | {each.pid for each in seen.unfinished}
    finally:
        tenant.end()


def test_process_that_creates_threads_endlessly_is_fully_scanned(run: Run, tmp_path: Path) -> None:
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
    looks = [process.ProcessScan(busy.pid, file_of(memory), set()) for _ in range(100)]
    assert [each.run() for each in looks] == [None] * 100
    # Each list may contain a new thread, and a scan reads at most sixteen lists; one that was interrupted is repeated.
    cut = [each.interrupted_in for each in looks]
    assert set(cut) <= {None, "threads"}
    assert cut.count(None) > len(looks) // 2


MAPPED = (
    READY
    + "import mmap\nfd = os.open(sys.argv[1], os.O_RDONLY)\n"
    + "kept = mmap.mmap(fd, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)\n"
    + "os.close(fd)\nsay()\nsignal.pause()"
)


def test_mapping_with_a_closed_descriptor_is_a_holder(run: Run, tmp_path: Path) -> None:
    (tmp_path / "innocent").symlink_to("/dev/zero")
    tenant = run(MAPPED, str(tmp_path / "innocent"))
    found = walk(nodes(ZERO), requested_pids=[tenant.pid])
    if may_follow_maps():
        assert {each.pid: each.parts for each in found.holders}[tenant.pid] == (ZERO,)
    else:
        assert os.geteuid() in dict(found.unreadable)


def test_holder_of_one_device_that_is_exiting_may_have_left_the_other_to_a_child(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant, read_stat = run(OPEN, ONE_NODE), process.read_stat

    def exiting(path: str) -> ProcStat | None:
        found = read_stat(path)
        return found and replace(found, exiting=True)

    monkeypatch.setattr(process, "read_stat", exiting)
    for target, missed in ((nodes(ONE), False), (nodes(ONE, ZERO), True)):
        scan = process.ProcessScan(tenant.pid, target, set())
        found = scan.run()
        assert found is not None
        assert (found.parts, scan.has_exited) == ((ONE,), missed)


def test_holder_that_may_not_be_inspected_completely_is_counted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    tenant, scan_mappings = run(OPEN, ONE_NODE), process.ProcessScan._scan_mappings

    def denied(scan: process.ProcessScan) -> None:
        if scan.pid == tenant.pid:
            raise PermissionError
        scan_mappings(scan)

    monkeypatch.setattr(process.ProcessScan, "_scan_mappings", denied)
    found = parse_walk_report(Walker().handle(walk_request(nodes(ONE, ZERO), requested_pids=[tenant.pid])))
    assert {each.pid: each.parts for each in found.holders}[tenant.pid] == (ONE,)
    assert tenant.pid in found.partial_pids


def may_follow_maps() -> bool:
    """Return whether this user may list mappings; the walk reports it if not."""
    try:
        os.stat(f"/proc/self/map_files/{os.listdir('/proc/self/map_files')[0]}")
    except PermissionError:
        return False
    return True


def test_mapped_file_has_a_holder_for_that_file_alone(run: Run, tmp_path: Path) -> None:
    target, other = tmp_path / "wanted", tmp_path / "other"
    for path in (target, other):
        path.write_bytes(bytes(4096))
    tenant = run(MAPPED, str(target))
    assert parts(file_of(target)) == {tenant.pid: (target.stat().st_ino,)}
    assert parts(file_of(other)) == {}


def file_of(path: Path) -> FileTarget:
    where = path.stat()
    return FileTarget(where.st_dev, frozenset({where.st_ino}))


def test_walk_skips_excluded_pids(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with path.open("rb"):
        assert list(parts(file_of(path))) == [os.getpid()]
        assert parts(file_of(path), excluded=[os.getpid()]) == {}


def test_requested_pid_is_described_although_the_process_holds_no_device(run: Run) -> None:
    tenant = run(OPEN, OTHER_NODE)
    (found,) = walk(nodes(ONE), requested_pids=[tenant.pid]).holders
    assert found == ProcessMatch(tenant.pid, start_time(tenant.pid) or 0, found.command, False, ())
    assert "import json" in found.command


def test_gone_or_zombie_pid_is_not_described(run: Run) -> None:
    tenant = run(OPEN, ONE_NODE)
    pidfd = os.pidfd_open(tenant.pid)
    tenant.process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)  # ended, and not reaped yet
    os.close(pidfd)
    assert start_time(tenant.pid) is not None
    assert live_start_time(tenant.pid) is None
    assert walk(nodes(ONE), requested_pids=[tenant.pid]).holders == ()
    tenant.end()
    assert start_time(tenant.pid) is live_start_time(tenant.pid) is None
    assert walk(nodes(ONE), requested_pids=[tenant.pid]).holders == ()


def test_kernel_thread_holds_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    thread = run(OPEN, ONE_NODE)
    assert parts(nodes(ONE), named=[thread.pid]) == {thread.pid: (ONE,)}
    report_as_kernel_thread(monkeypatch, thread.pid)
    assert parts(nodes(ONE), named=[thread.pid]) == {}


def test_walk_does_not_stat_descriptors_of_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file may be one that never answers; the kernel's own data shows which descriptors need no ``stat``."""
    target, other = tmp_path / "wanted", tmp_path / "other"
    target.touch()
    other.touch()
    queried: list[str] = []
    real_stat = os.stat

    def counting_stat(path: str, *, dir_fd: int | None = None) -> os.stat_result:
        queried.append(path)
        return real_stat(path, dir_fd=dir_fd)

    with target.open("rb") as file, other.open("rb") as other_tenant:
        where = os.fstat(file.fileno())
        monkeypatch.setattr(match, "_STATX", None)
        monkeypatch.setattr(os, "stat", counting_stat)
        assert has_open("/proc/self", where.st_dev, where.st_ino)
        assert str(file.fileno()) in queried
        assert str(other_tenant.fileno()) not in queried


def test_walk_results_are_the_same_with_and_without_statx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [ONE_NODE, OTHER_NODE, str(tmp_path), "/proc/self/exe", "/proc/self/fd/0"]
    quiet = match.StatxReader()
    assert quiet.uses_statx
    assert [nodes(ONE).match(quiet.stat(place)) for place in places] == [ONE, None, None, None, None]
    monkeypatch.setattr(match, "_STATX", None)
    reader = match.StatxReader()
    assert not reader.uses_statx
    assert [statx_result(reader, place) for place in places] == [statx_result(quiet, place) for place in places]


def statx_result(eye: match.StatxReader, place: str) -> tuple[int, int, int | None]:
    seen = eye.stat(place)
    return seen.device, seen.inode, nodes(ONE, OTHER, ZERO).match(seen)


def refused(*_: object) -> int:
    ctypes.set_errno(errno.EPERM)
    return -1


def test_seccomp_filter_that_refuses_statx_does_not_blind_the_walk(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    tenant = run(OPEN, ONE_NODE)
    monkeypatch.setattr(match, "_STATX", match._if_supported(refused))
    assert not match.StatxReader().uses_statx
    assert parts(nodes(ONE)) == {tenant.pid: (ONE,)}


def test_every_thread_is_scanned_without_kcmp(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    tenant = run(OPEN, ONE_NODE)
    monkeypatch.setattr(process, "_KCMP_CALL", -1)
    assert parts(nodes(ONE)) == {tenant.pid: (ONE,)}


def test_threads_are_listed_again_after_one_that_is_ending(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have created another that is not in the list."""
    program = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    tenant = run(READY + program + "say()\nsignal.pause()")
    leader, other = sorted(map(int, os.listdir(f"/proc/{tenant.pid}/task")))
    lists = [[leader], [leader, other], [leader, other]]
    monkeypatch.setattr(process, "_threads", lambda pid: lists.pop(0))
    monkeypatch.setattr(process.ProcessScan, "_is_ending", lambda self, thread: thread == other)
    process.ProcessScan(tenant.pid, FileTarget(0, frozenset({1})), set())._scan_all_threads(set(), [])
    assert lists == []


def test_file_of_a_process_that_cannot_be_inspected_is_not_taken_for_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(scan: process.ProcessScan, directory: str) -> None:
        scan.permission_denied = True

    monkeypatch.setattr(process.ProcessScan, "_scan_descriptors", refused)
    with pytest.raises(PermissionError):
        has_open("/proc/1", 0, 1)


def test_threads_that_share_a_descriptor_table_are_scanned_once(run: Run) -> None:
    program = (
        READY
        + "import threading\nfd = os.open(sys.argv[1], os.O_RDONLY)\n"
        + "for _ in range(8): threading.Thread(target=threading.Event().wait, daemon=True).start()\nsay()\nsignal.pause()"
    )
    tenant = run(program, ONE_NODE)
    threads = [int(name) for name in os.listdir(f"/proc/{tenant.pid}/task")]
    assert len(threads) == 9
    assert list(process.distinct_fd_tables(threads)) == threads[:1]
    assert parts(nodes(ONE)) == {tenant.pid: (ONE,)}


HOSTILE = (
    READY
    + """
import ctypes, struct, threading
libc = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWUSER, PRIVATE = 0x20000, 0x10000000, 0x44000
root = os.geteuid() == 0
if libc.unshare(NEWNS if root else NEWNS | NEWUSER) != 0 or not os.access("/dev/fuse", os.R_OK | os.W_OK):
    say(opener=os.getpid(), fd=0, requested="not tested: mounting a file system is not permitted here")
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
            print(json.dumps({"requested": opcode}), flush=True)  # and no answer, ever
            continue
        body = answer(opcode, node)
        os.write(connection, struct.pack("=IiQ", 16 + len(body), 0, unique) + body)

# The server must not have the file open itself: its end would wait for its own answer.
alive, lives = os.pipe()
(receiver, sender) = os.pipe()
opener = os.fork()
if opener == 0:
    os.close(connection)
    os.close(lives)
    fd = os.open(sys.argv[1] + "/file", os.O_RDONLY)
    os.write(sender, bytes([fd]))
    os.read(alive, 1)
    os._exit(0)
threading.Thread(target=serve, daemon=True).start()
(fd,) = os.read(receiver, 1)
opened.set()
say(opener=opener, fd=fd)
signal.pause()
"""
)


def test_walk_does_not_query_a_file_system_that_never_answers(run: Run, tmp_path: Path) -> None:
    """A tenant may mount one and open a file on it. A plain ``stat`` would query it, and wait forever."""
    hostile = run(HOSTILE, str(tmp_path))
    opener = int(str(hostile.message["opener"]))
    tenant = run(OPEN, ONE_NODE)
    assert parts(nodes(ONE)) == {tenant.pid: (ONE,)}
    assert parts(nodes(ONE), named=[opener]) == {tenant.pid: (ONE,), opener: ()}
    with subprocess.Popen(
        ["stat", "-L", f"/proc/{opener}/fd/{hostile.message['fd']}"], stderr=subprocess.DEVNULL
    ) as plain:
        try:
            assert "requested" in hostile.message or '"requested"' in hostile.line()
        finally:
            hostile.end()
    assert plain.returncode != 0 or "requested" in hostile.message


@pytest.mark.parametrize("target", [nodes(ONE, ZERO), FileTarget(259, frozenset({42, 43}))])
def test_walk_request_reaches_the_child_unchanged(target: FileTarget | DeviceNodeTarget) -> None:
    found = parse_walk_report(Walker().handle(walk_request(target, requested_pids=[os.getpid()])))
    assert [holder.pid for holder in found.holders if holder.pid == os.getpid()] == [os.getpid()]
    assert all(isinstance(holder, ProcessMatch) for holder in found.holders)
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
def test_malformed_walk_request_is_refused(question: dict[str, object]) -> None:
    with pytest.raises(Fault):
        Walker().handle({"excluded": [], "named": [], "milliseconds": [1, 2, 3], "first": [], **question})


NOTHING: dict[str, object] = {
    "holders": [],
    "unreadable": [],
    "unfinished": [],
    "relays": [],
    "counts": [0, 0, 0, 0, 0, 0],
    "omitted": [],
    "partial": [],
}


def test_uninspected_processes_are_counted_by_user() -> None:
    messages = parse_walk_report(
        {**NOTHING, "unreadable": [[0, 40], [33, 2]], "counts": [3, 0, 4, 5, 1, 0]}
    ).not_covered
    assert messages == (
        "holders: 42 process(es) of uid 0, 33 could not be inspected",
        "holders: 3 more process(es) than are named could not be fully inspected",
        "holders: 4 short-lived process(es) exited before they could be inspected",
        (
            "holders: 5 process(es) were inspected in parts, over several walks; "
            "descriptors moved meanwhile are not detected"
        ),
    )


@pytest.mark.parametrize(
    "message",
    [
        {"holders": None},
        {"holders": [[1]]},
        {"holders": [[1, 2, 3, 4, []]]},
        {"holders": [[-1, 2, "a", False, []]]},
        {"holders": [[0, 2, "a", False, []]]},
        {"holders": [[2**31, 2, "a", False, []]]},
        {"holders": [[1, 2, "a", False, [2**64]]]},
        {"unreadable": [[float("inf"), 1]]},
        {"unreadable": [[1000, -1]]},
        {"unfinished": [[-7, 2, "a", 0, "why", [], None, 1, "/"]]},
        {"counts": [0, 0, -1, 0, 0, 0]},
        {"unfinished": [[1, 2, "a", 0, None, [], None, 1, "/"]]},
        {"unfinished": [[1, 2, "a", 0, "why", ["part"], None, 1, "/"]]},
        {"unfinished": [[1, 2, "a", 0, "why", [], True, 1, "/"]]},
        {"unfinished": [[1, 2, "a", 0, "why", [], ["node"], 1, "/"]]},
        {"unfinished": [[1, 2, "a", 0, "why", [], None, 1, None]]},
        {"relays": [[1, None, None]]},
        {"relays": [["/", None, False]]},
        {"counts": [0]},
        {"omitted": [[1]]},
        {"partial": [-1]},
    ],
)
def test_malformed_walk_report_is_no_answer_and_no_device_fault(message: dict[str, object]) -> None:
    with pytest.raises(Unavailable):
        parse_walk_report({**NOTHING, **message})
