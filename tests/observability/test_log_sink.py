"""The sink of log lines: a reader that does not read causes lost lines, and never blocks the daemon."""

from __future__ import annotations

import io
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import IO

import pytest

from scrubber.observability.log_sink import WRITE_TIMEOUT, LineWriter, LostLineCounter

LONG = "x" * 20_000


class Pipe:
    """A stream that is read only on request."""

    def __init__(self, timeout: float = WRITE_TIMEOUT) -> None:
        self._ours, theirs = os.pipe()
        self.stream: IO[str] = os.fdopen(theirs, "w", encoding="utf-8")
        self.lost = 0
        losses = LostLineCounter()
        losses.set_callback(self._count)
        self.lines = LineWriter(self.stream, losses, write_timeout=timeout)

    def _count(self) -> None:
        self.lost += 1

    def filled(self) -> int:
        """Fill it; return the number of lines that it took."""
        taken = 0
        while not self.lost:
            self.lines.write(json.dumps({"number": taken, "text": LONG}))
            taken += 1
        return taken - 1

    def read(self) -> str:
        """Read everything available now."""
        found = b""
        while select.select([self._ours], [], [], 0)[0]:
            found += os.read(self._ours, 65536)
        return found.decode()

    def leave(self) -> None:
        """Close the reading end."""
        os.close(self._ours)

    def close(self) -> None:
        self.stream.close()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


def whole(text: str) -> list[dict[str, object]]:
    """Return the lines that are valid JSON, in their order."""
    found = []
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def test_full_pipe_loses_lines_and_counts_each_lost_line(pipe: Pipe) -> None:
    taken = pipe.filled()
    for _ in range(1_000):
        pipe.lines.write("more")
    assert pipe.lost >= 900  # the remaining space may take a few short ones
    assert [each["number"] for each in whole(pipe.read())] == list(range(taken))


def test_line_after_a_torn_line_starts_on_its_own_line(pipe: Pipe) -> None:
    taken = pipe.filled()
    half = pipe.read()
    assert not half.endswith("\n")  # the last one is incomplete
    pipe.lines.write('{"number": "after"}')
    pipe.lines.write('{"number": "and after"}')
    assert [each["number"] for each in whole(half + pipe.read())] == [*range(taken), "after", "and after"]
    assert pipe.lost == 1


def test_line_longer_than_the_pipe_is_written_whole_to_an_active_reader() -> None:
    pipe = Pipe(timeout=60.0)
    writing = threading.Thread(target=pipe.lines.write, args=("y" * 1_000_000,))
    writing.start()
    found = ""
    while not found.endswith("\n") and not pipe.lost:
        found += pipe.read()
    writing.join()
    assert found == "y" * 1_000_000 + "\n"
    pipe.close()


def test_concurrent_threads_do_not_interleave_their_lines(pipe: Pipe) -> None:
    writers = [threading.Thread(target=pipe.lines.write, args=(letter * 10_000,)) for letter in "abcd"]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
    assert sorted(pipe.read().split()) == [letter * 10_000 for letter in "abcd"]


def test_closed_reader_loses_lines(pipe: Pipe) -> None:
    pipe.leave()
    pipe.lines.write("one")
    assert pipe.lost == 1


def test_reused_descriptor_of_a_closed_stream_is_never_written(pipe: Pipe) -> None:
    number = pipe.stream.fileno()
    reused, other = os.pipe()
    pipe.stream.close()
    taken = os.dup2(other, number)
    try:
        pipe.lines.write("one")
        assert pipe.lost == 1
        assert select.select([reused], [], [], 0)[0] == []
    finally:
        for each in {reused, other, taken}:
            os.close(each)


def test_in_memory_stream_receives_the_line_unchanged() -> None:
    stream = io.StringIO()
    LineWriter(stream, LostLineCounter()).write("one")
    assert stream.getvalue() == "one\n"


def test_missing_stream_counts_as_a_lost_line() -> None:
    lost: list[None] = []
    losses = LostLineCounter()
    LineWriter(None, losses).write("one")
    losses.set_callback(lambda: lost.append(None))
    assert len(lost) == 1


def test_unencodable_character_is_written_escaped(pipe: Pipe) -> None:
    pipe.lines.write("\ud800 ü")
    assert pipe.read() == "\\ud800 ü\n"


@pytest.mark.parametrize("component", ["service", "plugin"])
def test_process_with_unread_standard_error_keeps_running(component: str) -> None:
    """Writes more lines than any pipe can hold."""
    program = (
        "import sys; from scrubber.observability.logging import configure_logging\n"
        f"log = configure_logging('auto', 'info', sys.stderr, component={component!r})\n"
        f"for _ in range(500): log.info('scrub.finished', message={LONG[:4000]!r})\n"
        "print('through', flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read() == b"through\n"
        assert process.wait() == 0
