"""Consent, apart from any terminal: who is asked, and what counts as yes."""

import io
import sys

import pytest
import typer

from scrubber.cli.consent import ask


class Keyboard(io.StringIO):
    """A terminal on which something was typed."""

    def isatty(self) -> bool:
        return True


class Broken(Keyboard):
    """One that answers with an error."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        raise self._error


class Desk:
    """Where a person sits: a keyboard and a screen, or what stands in their place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.screen: io.StringIO = Keyboard()

    def agrees(self, keyboard: io.StringIO | None, *, yes: bool = False, no_input: bool = False) -> bool:
        # In here, because pytest puts its own streams in place before each test.
        self._monkeypatch.setattr(sys, "stdin", keyboard)
        self._monkeypatch.setattr(sys, "stderr", self.screen)
        try:
            ask("It is \x1b[2Jgone.", yes=yes, no_input=no_input)
        except typer.Exit as no:
            if no.exit_code == 1:
                return False
            raise
        finally:
            self._monkeypatch.undo()
        return True


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(monkeypatch)


@pytest.mark.parametrize("typed", ["y\n", "Y\n", "yes\n", "  Yes  \n", "y"])
def test_yes_is_yes(typed: str, desk: Desk) -> None:
    assert desk.agrees(Keyboard(typed))
    assert desk.screen.getvalue().rstrip("\n") == "It is \N{REPLACEMENT CHARACTER}[2Jgone.\nGo on? [y/N] "


@pytest.mark.parametrize("typed", ["", "\n", "n\n", "no\n", "ye\n", "yess\n", "y n\n", "ja\n", "\x00\n", "\uff59\n"])
def test_anything_else_is_no(typed: str, desk: Desk) -> None:
    assert not desk.agrees(Keyboard(typed))
    assert desk.screen.getvalue().endswith("Nothing was changed.\n")


def test_what_is_no_text_is_no(desk: Desk) -> None:
    assert not desk.agrees(Broken(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")))


def test_the_end_of_input_leaves_a_line_of_its_own(desk: Desk) -> None:
    assert not desk.agrees(Keyboard(""))
    assert desk.screen.getvalue().endswith("[y/N] \nNothing was changed.\n")


def test_an_interrupt_is_said_to_have_changed_nothing(desk: Desk) -> None:
    with pytest.raises(KeyboardInterrupt):
        desk.agrees(Broken(KeyboardInterrupt()))
    assert desk.screen.getvalue().endswith("\nNothing was changed.\n")


def test_yes_on_the_command_line_reads_and_writes_nothing(desk: Desk) -> None:
    assert desk.agrees(Broken(AssertionError("it was read")), yes=True, no_input=True)
    assert desk.screen.getvalue() == ""


def closed() -> Keyboard:
    keyboard = Keyboard("y\n")
    keyboard.close()
    return keyboard


@pytest.mark.parametrize("keyboard", [None, io.StringIO("y\n"), closed()])
def test_nobody_is_asked_who_is_not_there(keyboard: io.StringIO | None, desk: Desk) -> None:
    with pytest.raises(typer.BadParameter, match="say --yes"):
        desk.agrees(keyboard)
    assert desk.screen.getvalue() == ""


def test_a_question_that_nobody_sees_is_not_put(desk: Desk) -> None:
    desk.screen = io.StringIO()
    with pytest.raises(typer.BadParameter, match="say --yes"):
        desk.agrees(Keyboard("y\n"))


def test_no_input_is_no_question(desk: Desk) -> None:
    with pytest.raises(typer.BadParameter, match="say --yes"):
        desk.agrees(Keyboard("y\n"), no_input=True)
    assert desk.screen.getvalue() == ""
