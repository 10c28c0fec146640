"""Following scrubs, apart from any service: how many at once, and what is kept when the listening ends early."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from scrubber.api import scrubber_pb2 as pb
from scrubber.cli.following import Course, Ended, Target, follow
from scrubber.domain.errors import Away, Held


class Display:
    """Remembers what it was shown."""

    def __init__(self) -> None:
        self.shown: list[Course] = []
        self.closed = 0

    def show(self, course: Course) -> None:
        assert not self.closed
        self.shown.append(course)

    def close(self) -> None:
        self.closed += 1


class Streams:
    """Updates that say that a scrub began, and its end once ``end`` is set; a device called "held" is refused."""

    def __init__(self) -> None:
        self.end = asyncio.Event()
        self.open = 0

    async def __call__(self, device: str) -> AsyncGenerator[pb.ScrubUpdate, None]:
        self.open += 1
        try:
            if device == "held":
                raise Held("It is in use.")
            yield pb.ScrubUpdate(progress=pb.ScrubProgress(scrub=f"s-{device}", device=device))
            await self.end.wait()
            yield pb.ScrubUpdate(result=pb.ScrubResult(scrub=pb.Scrub(id=f"s-{device}", device=device)))
        finally:
            self.open -= 1


@pytest.fixture
def streams() -> Streams:
    return Streams()


@pytest.fixture
def display() -> Display:
    return Display()


async def rest() -> None:
    """Let every task go on until it waits for something."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_64_are_listened_to_at_a_time_and_all_in_the_end(streams: Streams, display: Display) -> None:
    targets = [Target(str(number)) for number in range(80)]
    following = asyncio.create_task(follow(targets, streams, display, wait=True, timeout=None))
    await rest()
    assert streams.open == 64
    streams.end.set()
    followed = await following
    assert followed.ended is Ended.ALL_SAID
    assert [each.device for each in followed.courses] == [str(number) for number in range(80)]
    assert all(each.result is not None for each in followed.courses)
    assert (display.closed, len(display.shown), streams.open) == (1, 160, 0)


async def test_an_interrupt_keeps_what_was_heard(streams: Streams, display: Display) -> None:
    targets = [Target("0"), Target("held"), Target("2")]
    following = asyncio.create_task(follow(targets, streams, display, wait=True, timeout=None))
    await rest()
    following.cancel()
    followed = await following
    assert followed.ended is Ended.INTERRUPTED
    first, held, last = followed.courses
    assert (first.progress is not None, first.result) == (True, None)
    assert (str(held.error), held.progress) == ("It is in use.", None)
    assert last.device == "2"
    assert (display.closed, streams.open) == (1, 0)


async def test_a_time_that_is_over_keeps_what_was_heard(streams: Streams, display: Display) -> None:
    followed = await follow([Target("0")], streams, display, wait=True, timeout=0.01)
    assert followed.ended is Ended.TIME_OVER
    assert followed.courses[0].result is None
    assert (display.closed, streams.open) == (1, 0)


async def test_without_waiting_each_is_left_once_it_has_begun(streams: Streams, display: Display) -> None:
    followed = await follow([Target("0"), Target("held")], streams, display, wait=False, timeout=None)
    assert followed.ended is Ended.ALL_SAID
    begun, held = followed.courses
    assert begun.progress is not None
    assert isinstance(held.error, Held)
    assert streams.open == 0


async def test_an_end_without_a_result_is_an_error(display: Display) -> None:
    async def cut(device: str) -> AsyncGenerator[pb.ScrubUpdate, None]:
        yield pb.ScrubUpdate(progress=pb.ScrubProgress(scrub="s-1", device="GPU-1"))

    followed = await follow([Target("1")], cut, display, wait=True, timeout=None)
    assert isinstance(followed.courses[0].error, Away)
    assert "scrubber device GPU-1 shows" in str(followed.courses[0].error)


async def test_a_fault_of_ours_is_no_course(display: Display) -> None:
    async def faulty(device: str) -> AsyncGenerator[pb.ScrubUpdate, None]:
        known: dict[str, str] = {}
        yield pb.ScrubUpdate(progress=pb.ScrubProgress(scrub=known[device]))

    with pytest.raises(ExceptionGroup) as group:
        await follow([Target("1")], faulty, display, wait=True, timeout=None)
    assert group.group_contains(KeyError)
    assert display.closed == 1
