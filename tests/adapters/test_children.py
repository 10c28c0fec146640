"""Children: one that hangs, dies or writes nonsense affects only its own request, and none outlives the service."""

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from scrubber.adapters.children.child_socket import ChildSocket
from scrubber.adapters.children.message import MAX_BODY_SIZE, MalformedMessage, Message, body_length, pack, unpack
from scrubber.adapters.children.process import Child, ChildDied, ChildNotStarted, Children
from scrubber.adapters.children.request_pool import RequestPool
from scrubber.domain.errors import DeviceBusy, DeviceLost, DriverTimeout, ScrubberError, Unavailable, Unreadable
from tests.adapters.shortage import descriptors_left
from tests.ahead import advance, advance_until

MODULE = "tests.adapters.wayward_child"
LONG = 30.0


@pytest.fixture
async def children() -> AsyncIterator[Children]:
    made = Children(kill_timeout=LONG)
    yield made
    await made.close()
    assert made.pids() == frozenset()


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


async def it_hangs(fifo: Path) -> None:
    """Return once a child has written to ``fifo`` that it is about to hang."""
    assert await asyncio.to_thread(fifo.read_text, "ascii") == "It hangs."


def is_over(pidfd: int, deadline: float = 20.0) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(deadline * 1000))


async def facts(children: Children, **start: int) -> Message:
    child = await children.start(MODULE, **start)  # type: ignore[arg-type]
    answer = (await child.call({"do": "tell"}, LONG))["ok"]
    assert isinstance(answer, dict)
    return answer


def test_oversized_or_non_object_message_is_refused() -> None:
    with pytest.raises(MalformedMessage):
        pack({"text": "x" * MAX_BODY_SIZE})
    with pytest.raises(MalformedMessage):
        body_length(b"\xff\xff\xff\xff")
    for body in (b"[]", b"{", b"\xff", b"[" * 100_000):
        with pytest.raises(MalformedMessage):
            unpack(body)


async def test_child_is_a_fresh_interpreter_with_its_own_session_and_environment(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET_OF_THE_SERVICE", "x")
    message = await facts(children)
    assert message["session"] == message["pid"] != os.getpid()
    assert message["environment"] in (["LANG", "PATH", "PYTHONPATH"], ["LANG", "LC_CTYPE", "PATH", "PYTHONPATH"])
    assert children.pids() == {message["pid"]}


async def test_child_runs_with_the_requested_nice_value(children: Children) -> None:
    assert (await facts(children, nice=19))["nice"] == 19


async def test_child_that_cannot_start_raises_an_error_without_waiting(children: Children) -> None:
    with pytest.raises(ChildNotStarted, match="cannot be started"):
        await children.start(MODULE, interpreter="/nonexistent/python")
    with pytest.raises(ChildNotStarted, match="before it was ready"):
        await children.start("scrubber.no_such_module")
    assert children.pids() == frozenset()


async def test_child_not_started_for_lack_of_descriptors_reports_the_shortage(children: Children) -> None:
    refusals: list[str] = []
    for spare in range(12):
        try:
            with descriptors_left(spare):
                child = await children.start(MODULE)
        except ChildNotStarted as pressure:
            refusals.append(str(pressure))
        else:
            assert await child.kill()
    assert 0 < len(refusals) < 12
    assert all("The node is short of a resource" in refusal for refusal in refusals)
    assert children.pids() == frozenset()


async def test_hung_child_misses_its_deadline_and_is_killed(children: Children) -> None:
    child = await children.start(MODULE)
    with pytest.raises(TimeoutError):
        await child.call({"do": "hang"}, 0.05)
    assert await child.kill()


async def test_stopped_child_can_be_killed(children: Children) -> None:
    child = await children.start(MODULE)
    os.kill(child.pid, signal.SIGSTOP)
    assert await child.kill()


async def test_killing_a_child_twice_or_after_its_death_is_harmless(children: Children) -> None:
    child = await children.start(MODULE)
    assert all(await asyncio.gather(child.kill(), child.kill()))
    assert await child.kill()
    with pytest.raises(ChildDied):
        await child.call({"do": "tell"}, LONG)


async def test_child_death_during_a_request_is_reported_at_once(children: Children) -> None:
    child = await children.start(MODULE)
    with pytest.raises(ChildDied):
        await child.call({"do": "die"}, LONG)
    await child.kill()


async def test_killing_a_child_fails_its_pending_request_with_child_died(children: Children, fifo: Path) -> None:
    child = await children.start(MODULE)
    request = asyncio.create_task(child.call({"do": "hang", "fifo": str(fifo)}, LONG))
    await it_hangs(fifo)
    await child.kill()
    with pytest.raises(ChildDied):
        await request


async def test_child_that_writes_garbage_is_treated_as_dead(children: Children) -> None:
    child = await children.start(MODULE, "babble")
    with pytest.raises(ChildDied, match="sent a malformed message"):
        await child.call({"do": "tell"}, LONG)
    assert await child.kill()


async def test_child_that_survives_sigkill_is_abandoned_and_counted() -> None:
    deaf = Children(kill_timeout=0.05, send_signal=lambda pidfd, number: None)
    child = await deaf.start(MODULE, device="GPU-7")
    os.kill(child.pid, signal.SIGSTOP)
    assert not await child.kill()
    assert (child.is_abandoned, deaf.abandoned_total) == (True, 1)
    assert [(each.pid, each.device) for each in deaf.abandoned] == [(child.pid, "GPU-7")]
    assert deaf.pids() == {child.pid}
    os.kill(child.pid, signal.SIGKILL)
    assert await child.wait(LONG)
    assert (child.is_abandoned, deaf.abandoned, deaf.abandoned_total) == (False, (), 1)


# --- a stalled event loop
# -----------------------------------------------------------------------------------------------


async def test_child_that_sends_without_a_pause_does_not_stop_the_event_loop() -> None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    sent = 0
    with suppress(BlockingIOError):
        while True:
            theirs.send(pack({"phase": "clear" * 1000}))
            sent += 1
    link = ChildSocket(ours, "It")
    turns = 0

    async def other_work() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(other_work())
    for _ in range(sent):
        await link.receive()
    other.cancel()
    link.close()
    theirs.close()
    assert turns > 0


class Overheard(Children):
    """Keeps the service's end of the last child's socket, so that a test can see an unread answer in it."""

    link: socket.socket

    async def start(self, module: str, *arguments: str, **_: object) -> Child:
        self.link, theirs = socket.socketpair()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid()), "0", *arguments),
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()
        child = Child(self, process.pid, os.pidfd_open(process.pid), process.wait(), self.link, module, None)
        await self.wait_until_ready(child)
        return child


def stop(pid: int) -> None:
    """Stop the process until it receives SIGCONT."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def stand_still(until: float, descriptor: int | None = None) -> None:
    """Block this process until the clock reaches ``until`` and ``descriptor`` is readable."""
    poll = select.poll()
    if descriptor is not None:
        poll.register(descriptor, select.POLLIN)
        assert poll.poll(LONG * 1000)
    while time.monotonic() < until:
        continue


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


@pytest.fixture
async def overheard() -> AsyncIterator[Overheard]:
    made = Overheard(kill_timeout=LONG)
    yield made
    await made.close()


async def test_answer_already_received_is_in_time_however_long_the_event_loop_stalled(overheard: Overheard) -> None:
    child = await overheard.start(MODULE)
    for echo in range(3):
        stop(child.pid)
        request = asyncio.create_task(child.call({"do": "tell", "echo": echo}, 0.02))
        await turns(1)
        os.kill(child.pid, signal.SIGCONT)
        stand_still(time.monotonic() + 0.05, overheard.link.fileno())
        answer = (await request)["ok"]
        assert isinstance(answer, dict)
        assert answer["echo"] == echo


async def test_event_loop_stall_marks_no_child_hung_and_no_device_stuck(overheard: Overheard) -> None:
    pool = RequestPool(overheard, MODULE, deadline=LONG)
    before = await pool.request("GPU-0", {"do": "tell"})
    [child] = overheard.pids()
    stop(child)
    request = asyncio.create_task(pool.request("GPU-0", {"do": "tell", "echo": 1}, deadline=0.02))
    await turns(3)
    os.kill(child, signal.SIGCONT)
    stand_still(time.monotonic() + 0.05, overheard.link.fileno())
    answer = await request
    assert (answer["echo"], answer["pid"]) == (1, before["pid"])
    assert pool.stuck_devices == frozenset()
    await pool.close()


async def test_hung_child_is_detected_despite_an_event_loop_stall(overheard: Overheard) -> None:
    child = await overheard.start(MODULE)
    request = asyncio.create_task(child.call({"do": "hang"}, 0.02))
    await turns(1)
    stand_still(time.monotonic() + 0.05)
    with pytest.raises(TimeoutError):
        await request
    assert await child.kill()


async def test_child_that_sends_half_an_answer_counts_as_hung(overheard: Overheard) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.send(pack({"ready": True}) + pack({"ok": {}})[:-1])
        child = Child(overheard, os.getpid(), None, asyncio.sleep(0), ours, MODULE, None)
        await overheard.wait_until_ready(child)
        with pytest.raises(TimeoutError):
            await child.call({"do": "tell"}, 0.02)
        await child.kill()


async def test_late_noticed_child_death_leaves_no_abandoned_child() -> None:
    strict = Children(kill_timeout=LONG)
    child = await strict.start(MODULE)
    pidfd = os.pidfd_open(child.pid)
    killing = child.start_kill()
    await turns(2)
    stand_still(time.monotonic(), pidfd)
    os.close(pidfd)
    advance(LONG + 1)
    assert await killing
    assert await child.wait(LONG)  # until the loop has been notified, too
    assert (child.is_abandoned, strict.abandoned_total, strict.pids()) == (False, 0, frozenset())


PARENT = f"""
import asyncio
from scrubber.adapters.children.process import Children
async def main():
    child = await Children().start("{MODULE}")
    print(child.pid, flush=True)
    await child.call({{"do": "hang"}}, 1000)
asyncio.run(main())
"""


def test_child_does_not_outlive_a_killed_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pidfd = os.pidfd_open(int(parent.stdout.readline()))
        assert not is_over(pidfd, 0)
        parent.kill()
        assert is_over(pidfd)
        os.close(pidfd)


def test_end_of_file_ends_a_child_while_its_parent_lives() -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", MODULE, str(theirs.fileno()), str(os.getpid()), "0"]
    with subprocess.Popen(command, pass_fds=(theirs.fileno(),)) as child:
        theirs.close()
        assert ours.recv(4)  # it is ready
        ours.shutdown(socket.SHUT_RDWR)
        assert child.wait(20) == 0
        ours.close()


def test_child_whose_parent_is_already_gone_ends() -> None:
    ours, theirs = socket.socketpair()
    other_parent = str(os.getppid())
    with subprocess.Popen(
        [sys.executable, "-m", MODULE, str(theirs.fileno()), other_parent, "0"], pass_fds=(theirs.fileno(),)
    ) as child:
        theirs.close()
        assert child.wait(20) == 0
        assert ours.recv(1) == b""
        ours.close()


@pytest.mark.parametrize(
    "module", ["scrubber.adapters.sim.driver", "scrubber.adapters.sim.eraser", "scrubber.adapters.sim.zygote"]
)
def test_child_modules_import_nothing_heavy(module: str) -> None:
    script = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"asyncio", "grpc", "multiprocessing", "prometheus_client", "pydantic", "structlog"} & set(loaded)


# --- requests
# -----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def pool(children: Children) -> AsyncIterator[RequestPool]:
    made = RequestPool(children, MODULE, deadline=LONG)
    yield made
    await made.close()


async def test_one_child_serves_requests_for_all_devices(pool: RequestPool, children: Children) -> None:
    answers = await asyncio.gather(*(pool.request(f"GPU-{each}", {"do": "tell", "echo": each}) for each in range(8)))
    assert [answer["echo"] for answer in answers] == list(range(8))
    assert {answer["pid"] for answer in answers} == children.pids()


async def test_stuck_device_does_not_fail_requests_for_other_devices(pool: RequestPool) -> None:
    sick = asyncio.create_task(pool.request("sick", {"do": "hang"}, deadline=0.2))
    more_sick = asyncio.create_task(pool.request("sick", {"do": "hang"}, deadline=0.2))
    well = [asyncio.create_task(pool.request(f"well-{each}", {"do": "tell", "echo": each})) for each in range(4)]
    answers = await asyncio.gather(*well)
    assert [answer["echo"] for answer in answers] == [0, 1, 2, 3]
    for hung in (sick, more_sick):
        with pytest.raises(DriverTimeout, match="sick"):
            await hung
    assert pool.stuck_devices == {"sick"}


async def test_request_to_a_stuck_device_hangs_only_its_own_child(pool: RequestPool, fifo: Path) -> None:
    with pytest.raises(DriverTimeout):
        await pool.request("sick", {"do": "hang"}, deadline=0.05)
    before = await pool.request("well", {"do": "tell"})
    hung = asyncio.create_task(pool.request("sick", {"do": "hang", "fifo": str(fifo)}))
    await it_hangs(fifo)
    during = await pool.request("well", {"do": "tell"})
    await advance_until(hung.done)
    with pytest.raises(DriverTimeout):
        await hung
    after = await pool.request("well", {"do": "tell"})
    assert before["pid"] == during["pid"] == after["pid"]


async def test_stuck_device_costs_at_most_one_unkillable_child() -> None:
    deaf = Children(kill_timeout=0.05, send_signal=lambda pidfd, number: None)
    pool = RequestPool(deaf, MODULE, deadline=LONG)
    with pytest.raises(DriverTimeout, match="did not answer"):
        await pool.request("sick", {"do": "hang"}, deadline=0.05)
    for _ in range(10):
        with pytest.raises(DriverTimeout, match="cannot be killed"):
            await pool.request("sick", {"do": "tell"}, deadline=0.2)
    well = await pool.request("well", {"do": "tell"})
    (undying,) = deaf.abandoned
    assert undying.device == "sick"
    assert deaf.pids() == {undying.pid, well["pid"]}
    os.kill(undying.pid, signal.SIGKILL)
    again: dict[str, object] = {}
    async with asyncio.timeout(LONG):
        while not again:  # until its end is noticed
            with suppress(DriverTimeout):
                again = await pool.request("sick", {"do": "tell", "echo": 1})
    assert again["echo"] == 1
    deaf.kill_timeout = LONG  # they exit at end of file, which may take a while on a loaded machine
    await pool.close()
    await deaf.close()


async def test_request_for_which_no_child_can_start_marks_no_device_stuck(pool: RequestPool) -> None:
    with descriptors_left(0), pytest.raises(ChildNotStarted) as refusal:
        await pool.request("GPU-0", {"do": "tell"})
    assert isinstance(refusal.value, Unavailable)
    assert pool.stuck_devices == frozenset()
    assert (await pool.request("GPU-0", {"do": "tell", "echo": 1}))["echo"] == 1


async def test_device_that_answers_again_returns_to_the_shared_child(pool: RequestPool, tmp_path: Path) -> None:
    cure = tmp_path / "cure"
    question: Message = {"do": "hang-without", "file": str(cure)}
    with pytest.raises(DriverTimeout):
        await pool.request("sick", question, deadline=0.05)
    cure.touch()
    probe = await pool.request("sick", question)
    assert pool.stuck_devices == frozenset()
    shared = await pool.request("well", {"do": "tell"})
    again = await pool.request("sick", {"do": "tell"})
    assert again["pid"] == shared["pid"] != probe["pid"]


async def test_device_with_some_hanging_requests_delays_others_by_one_deadline_at_most(
    pool: RequestPool,
) -> None:
    with pytest.raises(DriverTimeout):
        await pool.request("sick", {"do": "hang"}, deadline=0.05)
    before = await pool.request("well", {"do": "tell"})
    questions: list[Message] = [{"do": "hang"}, {"do": "hang", "otherwise": True}]
    for _ in range(2):
        assert (await pool.request("sick", {"do": "tell", "echo": 1}))["echo"] == 1
        for hangs in questions:
            with pytest.raises(DriverTimeout):
                await pool.request("sick", hangs, deadline=0.05)
    assert (await pool.request("well", {"do": "tell"}))["pid"] == before["pid"]


async def test_hang_of_a_cancelled_request_is_not_attributed_to_the_next_device(pool: RequestPool, fifo: Path) -> None:
    leaving = asyncio.create_task(pool.request("sick", {"do": "hang", "fifo": str(fifo)}))
    await it_hangs(fifo)
    leaving.cancel()
    await advance_until(lambda: bool(pool.stuck_devices))
    assert (await pool.request("well", {"do": "tell", "echo": 1}))["echo"] == 1
    assert pool.stuck_devices == {"sick"}


async def test_child_that_dies_is_replaced_and_its_request_retried_once(pool: RequestPool, tmp_path: Path) -> None:
    marker = tmp_path / "died"
    answer = await pool.request("GPU-0", {"do": "die-once", "marker": str(marker), "echo": 7})
    assert answer["echo"] == 7
    assert marker.exists()


async def test_request_that_kills_two_children_is_unreadable_and_is_not_retried(pool: RequestPool) -> None:
    with pytest.raises(Unreadable, match="Two child processes"):
        await pool.request("GPU-0", {"do": "die"})
    assert (await pool.request("GPU-0", {"do": "tell", "echo": 1}))["echo"] == 1


async def test_request_too_large_to_send_does_not_cost_the_child(pool: RequestPool) -> None:
    before = await pool.request("GPU-0", {"do": "tell"})
    with pytest.raises(Unreadable, match="cannot be sent"):
        await pool.request("GPU-0", {"do": "tell", "echo": "x" * MAX_BODY_SIZE})
    assert (await pool.request("GPU-0", {"do": "tell"}))["pid"] == before["pid"]


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("away", Unavailable),
        ("held", DeviceBusy),
        ("lost", DeviceLost),
        ("stuck", DriverTimeout),
        ("unreadable", Unreadable),
        ("?", Unreadable),
    ],
)
async def test_every_fault_code_of_a_child_maps_to_a_scrubber_error(
    pool: RequestPool, code: str, error: type[ScrubberError]
) -> None:
    with pytest.raises(error, match="No\\."):
        await pool.request("GPU-0", {"do": "refuse", "code": code})


async def test_closing_the_pool_ends_every_child_and_every_wait(children: Children, fifo: Path) -> None:
    pool = RequestPool(children, MODULE, deadline=LONG)
    hang: Message = {"do": "hang", "fifo": str(fifo)}
    request = [asyncio.create_task(pool.request(f"GPU-{each}", hang)) for each in range(3)]
    await it_hangs(fifo)
    await pool.close()
    for each in request:
        with pytest.raises(Unavailable):
            await each
    with pytest.raises(Unavailable):
        await pool.request("GPU-0", {"do": "tell"})
    assert children.pids() == frozenset()
