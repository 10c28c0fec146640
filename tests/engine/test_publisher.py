"""A commit that a cancellation does not cut short, and the publisher that shows the newest state to all readers."""

from __future__ import annotations

import asyncio

import pytest

from scrubber.engine.device.state import to_the_end
from scrubber.engine.publisher import Publisher
from scrubber.engine.views import DeviceView
from tests.world.matter import gpu
from tests.world.samples import record
from tests.world.timeline import in_virtual_time


@in_virtual_time
async def test_work_ends_although_its_caller_is_cancelled_and_the_cancellation_is_told_afterwards() -> None:
    written: list[str] = []

    async def write() -> str:
        written.append("ledger")
        await asyncio.sleep(1.0)
        written.append("belief")
        return "done"

    caller = asyncio.create_task(to_the_end(write()))
    await asyncio.sleep(0.5)
    caller.cancel()
    await asyncio.sleep(0.1)
    assert not caller.done()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert written == ["ledger", "belief"]


@in_virtual_time
async def test_a_result_and_an_error_reach_a_caller_that_was_not_cancelled() -> None:
    async def fail() -> None:
        raise ValueError("no")

    async def answer() -> int:
        return 7

    assert await to_the_end(answer()) == 7
    with pytest.raises(ValueError, match="no"):
        await to_the_end(fail())


def view(version: int) -> tuple[DeviceView, ...]:
    return (DeviceView(gpu(0).device, record(version=version)),)


@in_virtual_time
async def test_a_slow_reader_skips_views_and_never_misses_the_newest() -> None:
    publisher = Publisher("epoch")
    seen: list[int] = []

    async def read() -> None:
        version = 0
        while version < 50:
            shown = await publisher.changed(version)
            seen.append(shown.version)
            version = shown.version
            await asyncio.sleep(1.0)

    reader = asyncio.create_task(read())
    for number in range(1, 51):
        publisher.publish(view(number), ready=True, ledger="ok", envvar_refused=False)
        await asyncio.sleep(0.1)
    await reader
    assert seen == sorted(set(seen))
    assert seen[-1] == 50
    assert len(seen) < 20


@in_virtual_time
async def test_a_view_in_which_nothing_is_new_is_not_shown() -> None:
    publisher = Publisher("epoch")
    publisher.publish(view(1), ready=False, ledger="ok", envvar_refused=False)
    publisher.publish(view(1), ready=False, ledger="ok", envvar_refused=False)
    assert publisher.view.version == 1
    publisher.publish(view(1), ready=True, ledger="ok", envvar_refused=False)
    assert publisher.view.version == 2
    publisher.publish(view(1), ready=True, ledger="the disk is full", envvar_refused=False)
    assert publisher.view.version == 3


@in_virtual_time
async def test_whoever_asks_for_what_is_already_there_does_not_wait() -> None:
    publisher = Publisher("epoch")
    publisher.publish(view(1), ready=True, ledger="ok", envvar_refused=False)
    assert (await publisher.changed(0)).version == 1


@in_virtual_time
async def test_every_reader_is_told() -> None:
    publisher = Publisher("epoch")
    readers = [asyncio.create_task(publisher.changed(0)) for _ in range(20)]
    await asyncio.sleep(0.1)
    publisher.publish(view(1), ready=True, ledger="ok", envvar_refused=False)
    assert {(await reader).version for reader in readers} == {1}
