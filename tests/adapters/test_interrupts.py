"""A program that receives termination signals cleans up exactly once, however many arrive and whenever they do."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from scrubber.emulator.interrupts import cancel_on_first_signal

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def ours() -> Iterator[None]:
    """Keep the signals from ending pytest, even if the handlers under test fail."""
    before = [signal.signal(number, lambda *_: None) for number in ENDING]
    yield
    for number, handler in zip(ENDING, before, strict=True):
        signal.signal(number, handler)


async def send_signals(*numbers: signal.Signals) -> None:
    """Send ``numbers`` to this process; return once the loop has handled them, unless one of them ends this first."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGWINCH, done.set)
    try:
        for number in (*numbers, signal.SIGWINCH):
            os.kill(os.getpid(), number)
        await done.wait()
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)


@pytest.mark.parametrize("number", ENDING)
async def test_first_signal_cancels_the_work_and_later_signals_do_not_cancel_the_cleanup(
    ours: None, number: signal.Signals
) -> None:
    with cancel_on_first_signal() as interruption:
        with pytest.raises(asyncio.CancelledError):
            await send_signals(number)
        await send_signals(*ENDING)
    assert interruption.received is number


async def test_no_signal_cancels_the_cleanup_of_work_that_ended_by_itself(ours: None) -> None:
    with cancel_on_first_signal() as interruption:
        interruption.cleaning_up = True
        await send_signals(*ENDING)
    assert interruption.received is None


async def test_signal_after_the_block_ends_the_program_without_a_traceback(ours: None) -> None:
    with cancel_on_first_signal():
        pass
    assert {signal.getsignal(number) for number in ENDING} == {signal.SIG_DFL}


@pytest.mark.parametrize("number", ENDING)
async def test_previously_ignored_signal_stays_ignored_during_and_after_the_block(
    ours: None, number: signal.Signals
) -> None:
    signal.signal(number, signal.SIG_IGN)
    with cancel_on_first_signal() as interruption:
        await send_signals(number)
    assert interruption.received is None
    assert signal.getsignal(number) is signal.SIG_IGN
