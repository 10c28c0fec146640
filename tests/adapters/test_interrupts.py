"""A program that is told to end clears up once, however often and whenever it is told."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from scrubber.emulator.interrupts import ended_once

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def ours() -> Iterator[None]:
    """None of the signals ends pytest, whatever becomes of the handlers under test."""
    before = [signal.signal(number, lambda *_: None) for number in ENDING]
    yield
    for number, handler in zip(ENDING, before, strict=True):
        signal.signal(number, handler)


async def told(*numbers: signal.Signals) -> None:
    """Return once the loop has dealt with ``numbers``, unless one of them ends this first."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGWINCH, done.set)
    try:
        for number in (*numbers, signal.SIGWINCH):
            os.kill(os.getpid(), number)
        await done.wait()
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)


@pytest.mark.parametrize("number", ENDING)
async def test_the_first_ends_what_is_done_and_those_that_follow_do_not_end_the_clearing_up(
    ours: None, number: signal.Signals
) -> None:
    with ended_once() as interruption:
        with pytest.raises(asyncio.CancelledError):
            await told(number)
        await told(*ENDING)
    assert interruption.by is number


async def test_none_ends_the_clearing_up_of_what_ended_by_itself(ours: None) -> None:
    with ended_once() as interruption:
        interruption.over = True
        await told(*ENDING)
    assert interruption.by is None


async def test_afterwards_each_ends_the_program_without_a_traceback(ours: None) -> None:
    with ended_once():
        pass
    assert {signal.getsignal(number) for number in ENDING} == {signal.SIG_DFL}


@pytest.mark.parametrize("number", ENDING)
async def test_one_that_was_ignored_before_stays_ignored_then_and_afterwards(
    ours: None, number: signal.Signals
) -> None:
    signal.signal(number, signal.SIG_IGN)
    with ended_once() as interruption:
        await told(number)
    assert interruption.by is None
    assert signal.getsignal(number) is signal.SIG_IGN
