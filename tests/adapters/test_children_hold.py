"""Suspending a device: meanwhile no child that ever queried it lives, and the other devices are still served."""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from scrubber.adapters.children.message import Message
from scrubber.adapters.children.process import Children
from scrubber.adapters.children.request_pool import RequestPool
from scrubber.domain.errors import DriverTimeout, Unavailable
from tests.ahead import advance_until

MODULE = "tests.adapters.wayward_child"
LONG = 30.0


@pytest.fixture
async def children() -> AsyncIterator[Children]:
    made = Children(kill_timeout=LONG)
    yield made
    await made.close()
    assert made.pids() == frozenset()


@pytest.fixture
async def pool(children: Children) -> AsyncIterator[RequestPool]:
    made = RequestPool(children, MODULE, deadline=LONG)
    yield made
    await made.close()


@pytest.fixture
async def deaf() -> AsyncIterator[Children]:
    """Provide children that no signal of ours ends; they exit at end of file, unless something prevents it."""
    made = Children(kill_timeout=0.05, send_signal=lambda pidfd, number: None)
    yield made
    made.kill_timeout = LONG  # on a loaded machine that may take a while
    await made.close()


@pytest.fixture
async def deaf_pool(deaf: Children) -> AsyncIterator[RequestPool]:
    made = RequestPool(deaf, MODULE, deadline=LONG)
    yield made
    deaf.kill_timeout = LONG
    await made.close()


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


async def it_hangs(fifo: Path) -> None:
    assert await asyncio.to_thread(fifo.read_text, "ascii") == "It hangs."


async def test_no_child_that_queried_a_device_lives_while_the_device_is_suspended(
    pool: RequestPool, children: Children
) -> None:
    await pool.request("held", {"do": "tell"})
    async with pool.suspend(["held"]):
        assert children.pids() == frozenset()


async def test_suspended_device_gets_no_requests_while_others_use_a_fresh_child(pool: RequestPool) -> None:
    before = await pool.request("other", {"do": "tell"})
    async with pool.suspend(["held", "0000:01:00.0"]):
        for name in ("held", "0000:01:00.0"):
            with pytest.raises(Unavailable, match="is being reset"):
                await pool.request(name, {"do": "tell"})
        during = await pool.request("other", {"do": "tell", "echo": 1})
        assert (during["echo"], during["pid"] != before["pid"]) == (1, True)
    assert (await pool.request("held", {"do": "tell"}))["pid"] == during["pid"]


async def test_request_in_progress_completes_before_suspension_and_queued_ones_are_refused(
    pool: RequestPool,
) -> None:
    names = ("other", "held", "held", "other")
    queue = [asyncio.create_task(pool.request(name, {"do": "tell", "echo": name})) for name in names]
    await asyncio.sleep(0)  # all of them are queued now
    async with pool.suspend(["held"]):
        for refused in queue[1:3]:
            with pytest.raises(Unavailable, match="held"):
                await refused
        assert [(await request)["echo"] for request in (queue[0], queue[3])] == ["other", "other"]


async def test_stuck_device_can_be_suspended_because_its_hung_child_was_killed(
    pool: RequestPool, children: Children
) -> None:
    with pytest.raises(DriverTimeout):
        await pool.request("held", {"do": "hang"}, deadline=0.05)
    async with pool.suspend(["held"]):
        assert all([await pool.request("other", {"do": "tell"})])
        assert len(children.pids()) == 1
    assert (await pool.request("held", {"do": "tell", "echo": 1}))["echo"] == 1


async def test_running_probe_is_killed_before_its_device_is_suspended(
    pool: RequestPool, children: Children, fifo: Path
) -> None:
    with pytest.raises(DriverTimeout):
        await pool.request("held", {"do": "hang"}, deadline=0.05)
    await pool.request("held", {"do": "tell"})  # by now the hung child is dead and the probe is ready
    probing = asyncio.create_task(pool.request("held", {"do": "hang", "fifo": str(fifo)}))
    await it_hangs(fifo)

    async def hold() -> frozenset[int]:
        async with pool.suspend(["held"]):
            return children.pids()

    holding = asyncio.create_task(hold())
    async with asyncio.timeout(LONG):
        while len(children.pids()) > 1:  # until the shared child has ended and the pool waits for the probe
            await asyncio.to_thread(os.sched_yield)
    await advance_until(probing.done)
    assert await holding == frozenset()
    with pytest.raises(DriverTimeout):
        await probing


@pytest.mark.parametrize("held", ["sick", "well"])
async def test_device_is_not_suspended_while_a_child_that_queried_the_device_cannot_be_killed(
    deaf: Children, deaf_pool: RequestPool, held: str
) -> None:
    await deaf_pool.request("well", {"do": "tell"})
    with pytest.raises(DriverTimeout):
        await deaf_pool.request("sick", {"do": "hang"}, deadline=0.05)
    with pytest.raises(DriverTimeout, match=rf"{held}.*cannot be killed"):
        async with deaf_pool.suspend([held]):
            raise AssertionError("it was held")
    # The child of the last request exits at end of file, and may take longer than the limit.
    (undying,) = (each for each in deaf.abandoned if each.device == "sick")
    os.kill(undying.pid, signal.SIGKILL)
    async with asyncio.timeout(LONG):
        while True:  # until its end is noticed
            with suppress(DriverTimeout):
                async with deaf_pool.suspend([held]):
                    break
    assert (await deaf_pool.request(held, {"do": "tell", "echo": 1}))["echo"] == 1


async def test_unkillable_child_blocks_every_later_suspension_of_its_devices(
    deaf: Children, deaf_pool: RequestPool
) -> None:
    await deaf_pool.request("held", {"do": "tell"})
    (undying,) = deaf.pids()
    os.kill(undying, signal.SIGSTOP)
    assert await _undying(deaf_pool, "held") == undying
    await _end_by_hand(undying, deaf_pool, "held")


async def test_lingering_child_with_a_closed_socket_blocks_suspension_of_its_device(
    deaf: Children, deaf_pool: RequestPool, tmp_path: Path
) -> None:
    await deaf_pool.request("held", {"do": "tell"})
    (lingering,) = deaf.pids()
    fresh = await deaf_pool.request("held", {"do": "leave-once", "marker": str(tmp_path / "left")})
    assert await _undying(deaf_pool, "held") == lingering
    assert (await deaf_pool.request("held", {"do": "tell"}))["pid"] == fresh["pid"], (
        "a child that cannot be killed must not delay other devices"
    )
    await _end_by_hand(lingering, deaf_pool, "held")


async def test_unkillable_probe_that_has_answered_blocks_suspension_of_its_device(
    deaf: Children, deaf_pool: RequestPool, tmp_path: Path
) -> None:
    cure = tmp_path / "cure"
    question: Message = {"do": "hang-without", "file": str(cure), "then": "linger"}
    await deaf_pool.request("well", {"do": "tell"})
    (hung,) = deaf.pids()
    with pytest.raises(DriverTimeout):
        await deaf_pool.request("held", question, deadline=0.05)
    os.kill(hung, signal.SIGKILL)
    cure.touch()
    async with asyncio.timeout(LONG):
        while True:  # until the end of the hung child is noticed
            with suppress(DriverTimeout):
                probe = await deaf_pool.request("held", question)
                break
    assert await _undying(deaf_pool, "held") == probe["pid"]
    deaf.kill_timeout = LONG  # the shared child exits at end of file, which may take a while on a loaded machine
    async with deaf_pool.suspend(["well"]):
        pass  # the probe has never queried this device
    await _end_by_hand(int(str(probe["pid"])), deaf_pool, "held")


async def _undying(pool: RequestPool, device: str) -> int:
    """Return the process that keeps preventing ``device`` from being suspended."""
    named = set[int]()
    for _ in range(2):
        with pytest.raises(DriverTimeout, match="cannot be killed") as refusal:
            async with pool.suspend([device]):
                raise AssertionError("it was held")
        named |= {int(each) for each in re.findall(r"process (\d+)", str(refusal.value))}
    (pid,) = named
    return pid


async def _end_by_hand(pid: int, pool: RequestPool, device: str) -> None:
    """Kill the process and return once the pool has noticed, and the device can be suspended."""
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(LONG):
        while True:
            with suppress(DriverTimeout):
                async with pool.suspend([device]):
                    return


async def test_device_suspended_twice_stays_suspended_until_both_suspensions_end(pool: RequestPool) -> None:
    async with pool.suspend(["held"]):
        async with pool.suspend(["held", "other"]):
            pass
        with pytest.raises(Unavailable):
            await pool.request("held", {"do": "tell"})
        assert (await pool.request("other", {"do": "tell", "echo": 1}))["echo"] == 1
    assert (await pool.request("held", {"do": "tell", "echo": 2}))["echo"] == 2


async def test_cancelled_suspension_releases_the_device(pool: RequestPool, fifo: Path) -> None:
    hung = asyncio.create_task(pool.request("other", {"do": "hang", "fifo": str(fifo)}))
    await it_hangs(fifo)

    async def hold() -> None:
        async with pool.suspend(["held"]):
            raise AssertionError("the child that hangs was not waited for")

    holding = asyncio.create_task(hold())
    await asyncio.sleep(0)
    holding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holding
    await advance_until(hung.done)
    assert (await pool.request("held", {"do": "tell", "echo": 1}))["echo"] == 1
    with pytest.raises(DriverTimeout):
        await hung
