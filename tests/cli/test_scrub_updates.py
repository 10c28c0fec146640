"""Following scrubs, independent of any service: how many at once, and what is kept when a stream ends early."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from scrubber.api import scrubber_pb2 as pb
from scrubber.cli.scrub_updates import FollowEnd, ScrubTarget, TargetStatus, follow_scrubs
from scrubber.domain.errors import DeviceBusy, Unavailable


class Display:
    """Records what it was shown."""

    def __init__(self) -> None:
        self.shown: list[TargetStatus] = []
        self.closed = 0

    def update(self, status: TargetStatus) -> None:
        assert not self.closed
        self.shown.append(status)

    def close(self) -> None:
        self.closed += 1


class Streams:
    """Streams that report the start of a scrub, and its end once ``end`` is set; a device called "held" is refused."""

    def __init__(self) -> None:
        self.end = asyncio.Event()
        self.open = 0

    async def __call__(self, device: str) -> AsyncGenerator[pb.ScrubUpdate, None]:
        self.open += 1
        try:
            if device == "held":
                raise DeviceBusy("It is in use.")
            yield pb.ScrubUpdate(progress=pb.ScrubProgress(scrub_id=f"s-{device}", device_id=device))
            await self.end.wait()
            yield pb.ScrubUpdate(result=pb.ScrubResult(scrub=pb.Scrub(id=f"s-{device}", device_id=device)))
        finally:
            self.open -= 1


@pytest.fixture
def streams() -> Streams:
    return Streams()


@pytest.fixture
def display() -> Display:
    return Display()


async def rest() -> None:
    """Run every task until it waits for something."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_at_most_64_scrubs_are_followed_at_a_time_and_all_in_the_end(streams: Streams, display: Display) -> None:
    targets = [ScrubTarget(str(number)) for number in range(80)]
    following = asyncio.create_task(follow_scrubs(targets, streams, display, wait=True, timeout=None))
    await rest()
    assert streams.open == 64
    streams.end.set()
    followed = await following
    assert followed.end is FollowEnd.COMPLETED
    assert [each.device_id for each in followed.statuses] == [str(number) for number in range(80)]
    assert all(each.result is not None for each in followed.statuses)
    assert (display.closed, len(display.shown), streams.open) == (1, 160, 0)


async def test_interrupt_keeps_the_received_updates(streams: Streams, display: Display) -> None:
    targets = [ScrubTarget("0"), ScrubTarget("held"), ScrubTarget("2")]
    following = asyncio.create_task(follow_scrubs(targets, streams, display, wait=True, timeout=None))
    await rest()
    following.cancel()
    followed = await following
    assert followed.end is FollowEnd.INTERRUPTED
    first, held, last = followed.statuses
    assert (first.progress is not None, first.result) == (True, None)
    assert (str(held.error), held.progress) == ("It is in use.", None)
    assert last.device_id == "2"
    assert (display.closed, streams.open) == (1, 0)


async def test_timeout_keeps_the_received_updates(streams: Streams, display: Display) -> None:
    followed = await follow_scrubs([ScrubTarget("0")], streams, display, wait=True, timeout=0.01)
    assert followed.end is FollowEnd.TIMED_OUT
    assert followed.statuses[0].result is None
    assert (display.closed, streams.open) == (1, 0)


async def test_scrub_is_followed_only_until_its_start_without_waiting(streams: Streams, display: Display) -> None:
    followed = await follow_scrubs([ScrubTarget("0"), ScrubTarget("held")], streams, display, wait=False, timeout=None)
    assert followed.end is FollowEnd.COMPLETED
    begun, held = followed.statuses
    assert begun.progress is not None
    assert isinstance(held.error, DeviceBusy)
    assert streams.open == 0


async def test_stream_that_ends_without_a_result_is_an_error(display: Display) -> None:
    async def cut(device: str) -> AsyncGenerator[pb.ScrubUpdate, None]:
        yield pb.ScrubUpdate(progress=pb.ScrubProgress(scrub_id="s-1", device_id="GPU-1"))

    followed = await follow_scrubs([ScrubTarget("1")], cut, display, wait=True, timeout=None)
    assert isinstance(followed.statuses[0].error, Unavailable)
    assert "Run `scrubber device GPU-1` to see its state." in str(followed.statuses[0].error)


async def test_unexpected_exception_while_following_propagates(display: Display) -> None:
    async def faulty(device: str) -> AsyncGenerator[pb.ScrubUpdate, None]:
        known: dict[str, str] = {}
        yield pb.ScrubUpdate(progress=pb.ScrubProgress(scrub_id=known[device]))

    with pytest.raises(ExceptionGroup) as group:
        await follow_scrubs([ScrubTarget("1")], faulty, display, wait=True, timeout=None)
    assert group.group_contains(KeyError)
    assert display.closed == 1
