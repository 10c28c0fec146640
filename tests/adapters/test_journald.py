"""The line about a reset, to a datagram socket in place of the journal's."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from scrubber.adapters.journald import AnnouncingResetter
from scrubber.domain.device import Device
from scrubber.domain.errors import Unreadable
from scrubber.domain.reset_plan import ResetPlan

GPU = Device("GPU-1a2b", "0", "GPU", 1 << 20)


class Resets:
    """A resetter without a device."""

    def __init__(self) -> None:
        self.fails = False
        self.also_reset: tuple[str, ...] = ()

    async def plan(self, device: Device) -> ResetPlan:
        return ResetPlan(device.id, "bus", (), also_reset=self.also_reset)

    async def reset(self, device: Device, deadline: float) -> None:
        if self.fails:
            raise Unreadable("the reset failed")


class Journal:
    """The socket, and the failures to reach it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failures: list[tuple[str, str]] = []
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)

    def entries(self) -> list[bytes]:
        found: list[bytes] = []
        while True:
            try:
                found.append(self.socket.recv(4096))
            except BlockingIOError:
                return found

    def announcing(self, resets: Resets) -> AnnouncingResetter:
        return AnnouncingResetter(resets, self.path, on_failure=lambda device, why: self.failures.append((device, why)))


@pytest.fixture
def journal(short_tmp: Path) -> Iterator[Journal]:
    found = Journal(short_tmp / "journal")
    yield found
    found.socket.close()


def entry(device: str) -> bytes:
    return (
        f"MESSAGE=GPU reset executed: {device}, success: true\nPRIORITY=6\nSYSLOG_IDENTIFIER=nvsentinel-gpu-reset\n"
    ).encode()


async def test_successful_reset_is_one_entry_with_nvsentinels_identifier(journal: Journal) -> None:
    journal.socket.bind(str(journal.path))
    await journal.announcing(Resets()).reset(GPU, 1)
    assert journal.entries() == [entry("GPU-1a2b")]
    assert journal.failures == []


async def test_every_gpu_that_was_reset_together_is_named(journal: Journal) -> None:
    journal.socket.bind(str(journal.path))
    resets = Resets()
    resets.also_reset = ("GPU-3c4d", "GPU-5e6f")
    announcing = journal.announcing(resets)
    assert (await announcing.plan(GPU)).also_reset == resets.also_reset
    await announcing.reset(GPU, 1)
    assert journal.entries() == [entry("GPU-1a2b"), entry("GPU-3c4d"), entry("GPU-5e6f")]
    await announcing.plan(replace(GPU, id="GPU-7"))
    assert journal.entries() == []


async def test_reset_of_an_instance_is_reported_once_for_its_whole_gpu(journal: Journal) -> None:
    journal.socket.bind(str(journal.path))
    instance = replace(GPU, id="MIG-9", index="0:1", parent=GPU.id)
    resets = Resets()
    resets.also_reset = ("MIG-10",)
    announcing = journal.announcing(resets)
    await announcing.plan(instance)
    await announcing.reset(instance, 1)
    assert journal.entries() == [entry("GPU-1a2b")]


async def test_failed_reset_is_not_reported_as_executed(journal: Journal) -> None:
    journal.socket.bind(str(journal.path))
    resets = Resets()
    resets.fails = True
    with pytest.raises(Unreadable):
        await journal.announcing(resets).reset(GPU, 1)
    assert journal.entries() == []


async def test_absent_journal_fails_no_reset_and_is_reported(journal: Journal) -> None:
    await journal.announcing(Resets()).reset(GPU, 1)
    assert journal.failures == [("GPU-1a2b", f"{journal.path}: No such file or directory")]


async def test_journal_that_does_not_read_delays_no_reset(journal: Journal) -> None:
    journal.socket.bind(str(journal.path))
    announcing = journal.announcing(Resets())
    for _ in range(10_000):
        await announcing.reset(GPU, 1)
        if journal.failures:
            break
    assert journal.failures == [("GPU-1a2b", f"{journal.path}: Resource temporarily unavailable")]
    assert set(journal.entries()) == {entry("GPU-1a2b")}
    await announcing.reset(GPU, 1)
    assert journal.entries() == [entry("GPU-1a2b")]
