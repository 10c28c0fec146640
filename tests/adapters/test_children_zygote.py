"""The zygote: the children that it forks start with loaded libraries, and otherwise behave like any child."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

import scrubber
from scrubber.adapters.children.child_socket import ChildSocket
from scrubber.adapters.children.message import Message, pack
from scrubber.adapters.children.process import ChildDied, ChildNotStarted, Children, wait_for_exit
from scrubber.adapters.children.request_pool import parse_answer
from scrubber.adapters.children.zygote_client import Zygote
from scrubber.domain.errors import DeviceBusy, Unavailable
from tests.adapters.shortage import descriptors_left
from tests.adapters.test_children import is_over

ZYGOTE = "scrubber.adapters.cuda.zygote"
PROGRAM = "tests.adapters.wayward_child"
ROOT = str(Path(scrubber.__file__).parent.parent)
LONG = 30.0


@pytest.fixture
async def children() -> AsyncIterator[Children]:
    made = Children(kill_timeout=LONG)
    yield made
    await made.close()
    assert made.pids() == frozenset()


def library(directory: Path, text: str) -> Mapping[str, str]:
    """Return an environment in which ``import cupy`` runs ``text``."""
    directory.mkdir()
    (directory / "cupy.py").write_text(text, encoding="utf-8")
    return {"PYTHONPATH": f"{directory}:{ROOT}"}


@pytest.fixture
def zygote(children: Children, tmp_path: Path) -> Zygote:
    loaded = library(tmp_path / "loaded", f"open({str(tmp_path / 'imports')!r}, 'a').write('x')")
    return Zygote(children, ZYGOTE, programs=[PROGRAM], nice=5, environment=loaded)


async def ended(pid: int) -> None:
    """Return once the process has ended; it may already have ended and been reaped."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    async with asyncio.timeout(LONG):
        await wait_for_exit(pidfd)
    os.close(pidfd)


async def fork_and_report(zygote: Zygote, **variables: str) -> Message:
    child = await zygote.fork(PROGRAM, environment=variables)
    return parse_answer(await child.call({"do": "tell", "variables": " ".join(variables)}, LONG))


async def test_zygote_loads_the_library_once_and_each_fork_is_fresh(zygote: Zygote, tmp_path: Path) -> None:
    first, second = await fork_and_report(zygote), await fork_and_report(zygote)
    assert (tmp_path / "imports").read_text(encoding="ascii") == "x"
    assert first["pid"] != second["pid"]
    assert first["parent"] == second["parent"] == zygote.pid
    assert first["session"] == first["pid"]
    assert first["threads"] == 1
    assert first["nice"] == min(19, os.nice(0) + 5)


async def test_forked_child_has_its_own_environment_and_only_its_own_socket(zygote: Zygote) -> None:
    first = await fork_and_report(zygote, CUDA_VISIBLE_DEVICES="GPU-1")
    second = await fork_and_report(zygote, CUDA_VISIBLE_DEVICES="GPU-2")
    assert (first["variables"], second["variables"]) == (
        {"CUDA_VISIBLE_DEVICES": "GPU-1"},
        {"CUDA_VISIBLE_DEVICES": "GPU-2"},
    )
    assert "CUDA_VISIBLE_DEVICES" not in (await fork_and_report(zygote))["environment"]  # type: ignore[operator]
    assert "HOME" not in first["environment"]  # type: ignore[operator]
    assert first["descriptors"] == second["descriptors"] == 5  # standard streams, socket, directory listing


async def test_forked_child_is_counted_answers_and_is_killed_like_any_child(zygote: Zygote, children: Children) -> None:
    child = await zygote.fork(PROGRAM, device="GPU-7")
    assert children.pids() == {zygote.pid, child.pid}
    with pytest.raises(DeviceBusy):
        parse_answer(await child.call({"do": "refuse", "code": "held"}, LONG))
    with pytest.raises(TimeoutError):
        await child.call({"do": "hang"}, 0.05)
    assert await child.kill()
    assert children.pids() == {zygote.pid}
    with pytest.raises(ChildDied):
        await child.call({"do": "tell"}, LONG)


async def test_forked_child_that_exits_is_noticed_and_leaves_no_zombie(zygote: Zygote) -> None:
    child = await zygote.fork(PROGRAM)
    with pytest.raises(ChildDied):
        await child.call({"do": "die"}, LONG)
    assert await child.wait(LONG)
    assert await child.kill()
    await fork_and_report(zygote)  # it has handled a request since, so it has reaped the dead child
    assert not Path(f"/proc/{child.pid}").exists()


async def test_forked_child_that_survives_sigkill_is_abandoned_and_counted(tmp_path: Path) -> None:
    deaf = Children(kill_timeout=0.05, send_signal=lambda pidfd, number: None)
    zygote = Zygote(deaf, ZYGOTE, programs=[PROGRAM], environment=library(tmp_path / "empty", ""))
    child = await zygote.fork(PROGRAM, device="GPU-7")
    os.kill(child.pid, signal.SIGSTOP)
    assert not await child.kill()
    assert (child.is_abandoned, deaf.abandoned_total) == (True, 1)
    assert [(each.pid, each.device) for each in deaf.abandoned] == [(child.pid, "GPU-7")]
    os.kill(child.pid, signal.SIGKILL)
    assert await child.wait(LONG)
    assert (child.is_abandoned, deaf.abandoned) == (False, ())
    assert zygote.pid is not None
    os.kill(zygote.pid, signal.SIGKILL)
    deaf.kill_timeout = LONG
    await zygote.close()


async def test_killed_zygote_takes_its_forks_with_it_and_the_next_fork_starts_a_new_zygote(
    zygote: Zygote,
) -> None:
    child = await zygote.fork(PROGRAM)
    first = zygote.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    with pytest.raises(ChildDied):
        await child.receive()
    assert await child.wait(LONG)
    assert await child.kill()
    assert (await fork_and_report(zygote))["parent"] == zygote.pid != first


async def test_stopped_zygote_fails_its_callers_and_the_next_fork_starts_a_new_zygote(
    zygote: Zygote, children: Children
) -> None:
    await zygote.warm_up()
    first = zygote.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    start_timeout, children.start_timeout = children.start_timeout, 0.2
    with pytest.raises(ChildNotStarted, match="did not answer"):
        await zygote.fork(PROGRAM)
    children.start_timeout = start_timeout
    assert (await fork_and_report(zygote))["parent"] == zygote.pid != first
    await ended(first)


async def test_concurrent_forks_all_succeed(zygote: Zygote) -> None:
    answers = await asyncio.gather(*(fork_and_report(zygote, NAME=str(each)) for each in range(8)))
    assert [answer["variables"] for answer in answers] == [{"NAME": str(each)} for each in range(8)]
    assert len({answer["pid"] for answer in answers}) == 8


async def test_fork_of_a_cancelled_caller_is_killed_and_not_given_to_the_next_caller(
    zygote: Zygote, children: Children
) -> None:
    await zygote.warm_up()

    async def leave() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await zygote.fork(PROGRAM)

    await asyncio.gather(leave(), leave(), leave())
    child = await zygote.fork(PROGRAM)
    assert parse_answer(await child.call({"do": "tell"}, LONG))["pid"] == child.pid
    assert zygote.pid is not None
    for abandoned in children.pids() - {zygote.pid, child.pid}:
        await ended(abandoned)


async def test_missing_library_is_reported_with_the_package_to_install(children: Children, tmp_path: Path) -> None:
    missing = library(tmp_path / "missing", "raise ImportError('libcudart is not there')")
    zygote = Zygote(children, ZYGOTE, programs=[PROGRAM], environment=missing)
    for attempt in (zygote.warm_up, lambda: zygote.fork(PROGRAM), zygote.warm_up):
        with pytest.raises(Unavailable, match=r"libcudart is not there.*install the service with its extra cuda12"):
            await attempt()
    (tmp_path / "missing" / "cupy.py").write_text("", encoding="ascii")
    await zygote.warm_up()  # CuPy was installed meanwhile


async def test_zygote_refuses_to_fork_from_a_library_that_started_threads(children: Children, tmp_path: Path) -> None:
    threaded = library(
        tmp_path / "threaded",
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
    )
    zygote = Zygote(children, ZYGOTE, programs=[PROGRAM], environment=threaded)
    with pytest.raises(Unavailable, match="2 threads"):
        await zygote.fork(PROGRAM)


async def test_answer_of_a_child_that_ends_at_once_is_received(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = socket.socketpair()
    send_fds = socket.send_fds

    def answered_and_over(link: socket.socket, buffers: list[bytes], descriptors: list[int]) -> int:
        sent = send_fds(link, buffers, descriptors)
        theirs.sendall(pack({"ok": {}}))
        theirs.close()
        return sent

    monkeypatch.setattr(socket, "send_fds", answered_and_over)
    conversation = ChildSocket(ours, "Child 1")
    await conversation.send({"program": PROGRAM}, (ours.fileno(),))
    assert await conversation.receive() == {"ok": {}}
    conversation.close()


async def test_program_unknown_to_the_zygote_is_refused(zygote: Zygote) -> None:
    with pytest.raises(Unavailable, match="no_such_program"):
        await zygote.fork("no_such_program")
    assert (await fork_and_report(zygote))["parent"] == zygote.pid


async def test_fork_refused_for_lack_of_descriptors_reports_the_shortage(zygote: Zygote, children: Children) -> None:
    await zygote.warm_up()
    refusals = 0
    for spare in range(8):
        try:
            with descriptors_left(spare):
                child = await zygote.fork(PROGRAM)
        except ChildNotStarted:
            refusals += 1
        else:
            assert await child.kill()
    assert 0 < refusals < 8
    assert (await fork_and_report(zygote))["parent"] == zygote.pid
    assert len(children.pids()) == 2


SERVICE = f"""
import asyncio, sys
from scrubber.adapters.children.zygote_client import Zygote
from scrubber.adapters.children.process import Children
async def main():
    zygote = Zygote(Children(), "{ZYGOTE}", programs=["{PROGRAM}"], environment={{"PYTHONPATH": sys.argv[1]}})
    child = await zygote.fork("{PROGRAM}")
    print(zygote.pid, child.pid, flush=True)
    await child.call({{"do": "hang"}}, 1000)
asyncio.run(main())
"""


def test_zygote_and_forked_children_do_not_outlive_a_killed_service(tmp_path: Path) -> None:
    path = library(tmp_path / "empty", "")["PYTHONPATH"]
    with subprocess.Popen([sys.executable, "-c", SERVICE, path], stdout=subprocess.PIPE) as service:
        assert service.stdout is not None
        handles = [os.pidfd_open(int(word)) for word in service.stdout.readline().split()]
        assert len(handles) == 2
        assert not any(is_over(handle, 0) for handle in handles)
        service.kill()
        assert all(is_over(handle) for handle in handles)
        for handle in handles:
            os.close(handle)


async def test_real_cupy_can_be_forked_from(children: Children) -> None:
    zygote = Zygote(children, ZYGOTE, programs=[PROGRAM], environment={"OPENBLAS_NUM_THREADS": "1"})
    assert (await fork_and_report(zygote))["threads"] == 1
