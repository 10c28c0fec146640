"""Confirmation, independent of any terminal: when it is requested, and what counts as yes."""

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator

import pytest
import typer

from scrubber.cli.confirmation import confirm


class Screen(io.StringIO):
    """An output terminal."""

    def isatty(self) -> bool:
        return True


class Keyboard(io.TextIOWrapper):
    """A terminal with typed input, followed by end of file unless it stays ``open``."""

    def __init__(self, typed: str | bytes = "", *, open: bool = False) -> None:
        ours, theirs = os.pipe()
        os.write(theirs, typed.encode() if isinstance(typed, str) else typed)
        self._theirs = theirs if open else None
        if not open:
            os.close(theirs)
        super().__init__(io.FileIO(ours), encoding="utf-8", newline="\n")

    def isatty(self) -> bool:
        return True

    def close(self) -> None:
        super().close()
        if self._theirs is not None:
            os.close(self._theirs)
            self._theirs = None


class Desk:
    """The user's end: a keyboard and a screen, or substitutes for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.screen: io.StringIO = Screen()
        self._keyboards: list[io.TextIOBase] = []

    def agrees(self, keyboard: io.TextIOBase | None, *, yes: bool = False, no_input: bool = False) -> bool:
        self._keyboards += [] if keyboard is None else [keyboard]
        # Done here, because pytest installs its own streams before each test.
        self._monkeypatch.setattr(sys, "stdin", keyboard)
        self._monkeypatch.setattr(sys, "stderr", self.screen)
        try:
            confirm("It is \x1b[2Jgone.", yes=yes, no_input=no_input)
        except typer.Exit as no:
            if no.exit_code == 1:
                return False
            raise
        finally:
            self._monkeypatch.undo()
        return True

    def cleared(self) -> None:
        for keyboard in self._keyboards:
            keyboard.close()


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    desk = Desk(monkeypatch)
    yield desk
    desk.cleared()


@pytest.mark.parametrize("typed", ["y\n", "Y\n", "yes\n", "  Yes  \n", "y"])
def test_typed_yes_confirms(typed: str, desk: Desk) -> None:
    assert desk.agrees(Keyboard(typed))
    assert desk.screen.getvalue().rstrip("\n") == "It is \N{REPLACEMENT CHARACTER}[2Jgone.\nContinue? [y/N] "


@pytest.mark.parametrize("typed", ["", "\n", "n\n", "no\n", "ye\n", "yess\n", "y n\n", "ja\n", "\x00\n", "\uff59\n"])
def test_any_other_answer_declines(typed: str, desk: Desk) -> None:
    assert not desk.agrees(Keyboard(typed))
    assert desk.screen.getvalue().endswith("Nothing was changed.\n")


def test_non_utf8_answer_declines(desk: Desk) -> None:
    assert not desk.agrees(Keyboard(b"y\xff\n"))


def test_end_of_input_ends_the_prompt_line(desk: Desk) -> None:
    assert not desk.agrees(Keyboard(""))
    assert desk.screen.getvalue().endswith("[y/N] \nNothing was changed.\n")


def test_interrupt_in_any_thread_reports_that_nothing_was_changed(desk: Desk) -> None:
    """The kernel may deliver a signal to any thread, such as gRPC's; that does not interrupt the main thread's read."""

    def interrupt() -> None:
        while "[y/N]" not in desk.screen.getvalue():
            threading.Event().wait(0.001)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    other = threading.Thread(target=interrupt)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        desk.agrees(Keyboard(open=True))
    other.join()
    assert desk.screen.getvalue().endswith("\nNothing was changed.\n")


def test_yes_option_reads_and_writes_nothing(desk: Desk) -> None:
    keyboard = Keyboard("n\n")
    assert desk.agrees(keyboard, yes=True, no_input=True)
    assert keyboard.readline() == "n\n"
    assert desk.screen.getvalue() == ""


def closed() -> Keyboard:
    keyboard = Keyboard("y\n")
    keyboard.close()
    return keyboard


@pytest.mark.parametrize("keyboard", [None, io.StringIO("y\n"), closed()])
def test_no_prompt_is_shown_without_a_terminal_for_input(keyboard: io.TextIOBase | None, desk: Desk) -> None:
    with pytest.raises(typer.BadParameter, match=r"^stdin is not a terminal; pass --yes to confirm\.$"):
        desk.agrees(keyboard)
    assert desk.screen.getvalue() == ""


def test_no_prompt_is_shown_without_a_terminal_for_output(desk: Desk) -> None:
    desk.screen = io.StringIO()
    with pytest.raises(typer.BadParameter, match=r"^stderr is not a terminal; pass --yes to confirm\.$"):
        desk.agrees(Keyboard("y\n"))


def test_no_input_option_shows_no_prompt(desk: Desk) -> None:
    with pytest.raises(typer.BadParameter, match="pass --yes"):
        desk.agrees(Keyboard("y\n"), no_input=True)
    assert desk.screen.getvalue() == ""
