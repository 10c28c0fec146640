"""A commit that a cancellation does not interrupt, and the publisher that gives all readers the newest state."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from scrubber.completion import run_to_completion
from scrubber.engine.publisher import Publisher
from scrubber.engine.views import DeviceView
from tests.simulation.process_table import gpu
from tests.simulation.samples import record
from tests.simulation.timeline import in_virtual_time


@in_virtual_time
async def test_run_to_completion_finishes_its_work_before_a_cancellation_is_raised() -> None:
    written: list[str] = []

    async def write() -> str:
        written.append("ledger")
        await asyncio.sleep(1.0)
        written.append("belief")
        return "done"

    caller = asyncio.create_task(run_to_completion(write()))
    await asyncio.sleep(0.5)
    caller.cancel()
    await asyncio.sleep(0.1)
    assert not caller.done()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert written == ["ledger", "belief"]


@in_virtual_time
async def test_run_to_completion_passes_result_and_error_to_its_caller() -> None:
    async def fail() -> None:
        raise ValueError("no")

    async def answer() -> int:
        return 7

    assert await run_to_completion(answer()) == 7
    with pytest.raises(ValueError, match="no"):
        await run_to_completion(fail())


def view(version: int) -> tuple[DeviceView, ...]:
    return (DeviceView(gpu(0).device, record(version=version)),)


@in_virtual_time
async def test_slow_reader_of_the_publisher_skips_views_and_never_misses_the_newest() -> None:
    publisher = Publisher("epoch")
    seen: list[int] = []

    async def read() -> None:
        version = 0
        while version < 50:
            shown = await publisher.wait_for_change(version)
            seen.append(shown.version)
            version = shown.version
            await asyncio.sleep(1.0)

    reader = asyncio.create_task(read())
    for number in range(1, 51):
        publisher.publish(view(number), ready=True, ledger_status="ok", refuses_envvar=False)
        await asyncio.sleep(0.1)
    await reader
    assert seen == sorted(set(seen))
    assert seen[-1] == 50
    assert len(seen) < 20


@in_virtual_time
async def test_view_without_changes_is_not_published() -> None:
    publisher = Publisher("epoch")
    publisher.publish(view(1), ready=False, ledger_status="ok", refuses_envvar=False)
    publisher.publish(view(1), ready=False, ledger_status="ok", refuses_envvar=False)
    assert publisher.view.version == 1
    publisher.publish(view(1), ready=True, ledger_status="ok", refuses_envvar=False)
    assert publisher.view.version == 2
    publisher.publish(view(1), ready=True, ledger_status="the disk is full", refuses_envvar=False)
    assert publisher.view.version == 3


@in_virtual_time
async def test_reader_of_an_outdated_version_does_not_wait_for_the_publisher() -> None:
    publisher = Publisher("epoch")
    publisher.publish(view(1), ready=True, ledger_status="ok", refuses_envvar=False)
    assert (await publisher.wait_for_change(0)).version == 1


@in_virtual_time
async def test_every_reader_of_the_publisher_gets_the_new_view() -> None:
    publisher = Publisher("epoch")
    readers = [asyncio.create_task(publisher.wait_for_change(0)) for _ in range(20)]
    await asyncio.sleep(0.1)
    publisher.publish(view(1), ready=True, ledger_status="ok", refuses_envvar=False)
    assert {(await reader).version for reader in readers} == {1}


def test_device_that_did_not_change_keeps_its_view_in_the_next_one() -> None:
    publisher = Publisher("epoch")
    first, second = DeviceView(gpu(0).device, record()), DeviceView(gpu(1).device, record(device=gpu(1).id))
    publisher.publish((first, second), ready=True, ledger_status="ok", refuses_envvar=False)
    changed = replace(second, advertised=False)
    publisher.publish((changed, replace(first)), ready=True, ledger_status="ok", refuses_envvar=False)
    assert publisher.view.devices == (changed, first)
    assert publisher.view.devices[1] is first
