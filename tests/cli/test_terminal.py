"""The terminal of the tests is as strict as a real one: otherwise tests with it would prove nothing."""

import sys

import pytest

from tests.cli.terminal import Screen, at_terminal, terminal

PYTHON = (sys.executable, "-c")


def shown(*written: str, columns: int = 10) -> Screen:
    screen = Screen(columns)
    for each in written:
        assert screen.feed(each) == ""
    return screen


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("one\r\ntwo\r\n", "one\ntwo\n"),
        ("one\rON", "ONe\n"),
        ("\x1b[31mred\x1b[0m", "red\n"),
        ("a\r\nb\r\nc\x1b[2A\rX", "X\nb\nc\n"),
        ("one\r\x1b[Ktwo", "two\n"),
        ("one\r\ntwo\x1b[H\x1b[J", "\n"),
        ("one\r\ntwo\x1b[2J\x1b[Hx", "x\n"),
        ("main\x1b[?1049hother", "other\n"),
        ("main\x1b[?1049hother\x1b[?1049l", "main\n"),
    ],
)
def test_screen_shows_the_text_left_after_control_sequences(written: str, text: str) -> None:
    assert shown(written).text == text


def test_incomplete_escape_sequence_is_kept_until_completed() -> None:
    assert Screen(10).feed("x\x1b[3") == "\x1b[3"


@pytest.mark.parametrize("written", ["a" * 11, "東京東京東京", "a" * 10 + "\x1b[0mb"])
def test_text_beyond_the_last_column_is_detected(written: str) -> None:
    assert shown(written).too_wide


@pytest.mark.parametrize("written", ["a" * 10, "東京東京東", "cafe\u0301 cafe\u0301\r\n", "a" * 10 + "\r\n" + "a" * 10])
def test_text_that_fits_exactly_is_not_too_wide(written: str) -> None:
    assert not shown(written).too_wide


def test_unknown_escape_sequence_fails() -> None:
    with pytest.raises(AssertionError, match="does not know"):
        Screen(80).feed("\x1b\x01" + "x" * 40)


async def test_overlong_line_fails_the_test() -> None:
    with pytest.raises(AssertionError, match="wider than 20"):
        await at_terminal("print('x' * 21)", columns=20, program=PYTHON)


async def test_keys_resizes_and_interrupts_reach_the_command() -> None:
    code = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGWINCH, lambda *_: print(os.get_terminal_size().columns, flush=True))\n"
        "print('ready', flush=True)\n"
        "print('got', sys.stdin.readline(), flush=True)\n"
        "while True: time.sleep(0.01)"  # a pause() that begins right after a signal waits for the next one
    )
    async with terminal(code, columns=70, program=PYTHON) as session:
        await session.shows("ready")
        session.type("word\n")
        await session.shows("got word")
        session.resize(60)
        await session.shows("\n60\n")
        session.type("\x03")
        assert await session.process.wait() == -2


async def test_redirected_streams_are_no_terminals() -> None:
    result = await at_terminal(
        "import sys; print([each.isatty() for each in (sys.stdin, sys.stdout, sys.stderr)])",
        columns=80,
        program=PYTHON,
        streams=("stderr",),
    )
    assert result.out == "[False, False, True]\n"


async def test_terminal_wait_ends_at_its_timeout() -> None:
    async with terminal("import time; time.sleep(600)", columns=80, program=PYTHON) as session:
        with pytest.raises(AssertionError, match="was not shown"):
            await session.shows("anything", seconds=0.05)
    assert session.process.returncode == -9
