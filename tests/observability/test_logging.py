"""How a line looks: the same in both daemons, for any content, and when the stream fails."""

import contextlib
import io
import json
import logging
import os
import pty
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from structlog.typing import FilteringBoundLogger

from plugin import logs as of_the_plugin
from scrubber.adapters.nvidia.conditions import NVIDIA_SIGNALS
from scrubber.observability.journal import StructlogJournal
from scrubber.observability.log_sink import LostLineCounter
from scrubber.observability.logging import LIBRARY_EVENT, LogFormatName, configure_logging, make_logger
from scrubber.ports.record import Event

NOON = 1_767_182_400.25  # 2025-12-31T12:00:00.25Z

HOSTILE = 'x\n{"event": "health.healthy"}\r\n\x1b[2J\x1b]0;owned\x07\u202egnihton\u2066\u200b\ud800\udc80\x00\x7f\x85\u2028"\'\\'


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def process_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    logging.captureWarnings(capture=False)
    root.handlers[:] = handlers
    root.setLevel(level)


def logger(form: LogFormatName, stream: TextIO | None, level: str = "info", **more: Any) -> FilteringBoundLogger:
    return make_logger(form, level, stream, component="service", now=lambda: NOON, **more)


def write_service_line(form: str, stream: TextIO, text: str) -> None:
    """An event of the service's with ``text`` in it."""
    fields = {"command": text, "message": f"By {text}.", "tenant": text, "pod": text}
    journal = StructlogJournal(registry=CollectorRegistry(), logger=logger(form, stream), signals=NVIDIA_SIGNALS)  # type: ignore[arg-type]
    journal.record([Event("unauthorized.use.detected", NOON, f"GPU-{text}", f"scrub-{text}", f"uid:{text}", fields)])


def write_plugin_line(form: str, stream: TextIO, text: str) -> None:
    """A line of the plugin's with ``text`` in it."""
    log = of_the_plugin.create_logger(form, "info", stream)
    with of_the_plugin.log_context(method="Allocate", resource=text, devices=[text, "sim-0"]):
        log.warning("allocation.refused", code="unavailable", message=text, told={text: [text]}, by=ValueError(text))


DAEMONS = pytest.mark.parametrize("write_line", [write_service_line, write_plugin_line])
WriteLine = Callable[[str, TextIO, str], None]


class TestLogFormat:
    def line(self, stream: io.StringIO, form: Any, environ: Mapping[str, str] | None = None) -> str:
        logger(form, stream, environ=environ or {}).info("scrub.started", device="GPU-a")
        return stream.getvalue()

    def test_every_line_starts_with_timestamp_level_event_and_component(self) -> None:
        line = json.loads(self.line(io.StringIO(), "json"))
        assert list(line.items()) == [
            ("timestamp", "2025-12-31T12:00:00.250Z"),
            ("level", "info"),
            ("event", "scrub.started"),
            ("component", "service"),
            ("device", "GPU-a"),
        ]

    def test_plugin_lines_have_the_same_format(self) -> None:
        stream = io.StringIO()
        of_the_plugin.create_logger("auto", "info", stream).info("plugin.started", timestamp=NOON)
        assert stream.getvalue() == (
            '{"timestamp": "2025-12-31T12:00:00.250Z", "level": "info", "event": "plugin.started", '
            '"component": "plugin"}\n'
        )

    def test_auto_format_is_json_without_a_terminal(self) -> None:
        assert json.loads(self.line(io.StringIO(), "auto"))["device"] == "GPU-a"

    def test_auto_format_is_columns_on_a_terminal(self) -> None:
        line = self.line(Terminal(), "auto")
        assert "scrub.started" in line
        assert "\x1b[" in line

    @pytest.mark.parametrize("plain", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
    def test_no_colour_setting_disables_colours(self, plain: Mapping[str, str]) -> None:
        line = self.line(Terminal(), "console", plain)
        assert "GPU-a" in line
        assert "\x1b[" not in line

    def test_column_format_without_a_terminal_has_no_colours(self) -> None:
        assert "\x1b[" not in self.line(io.StringIO(), "console")

    def test_json_format_can_be_requested_on_a_terminal(self) -> None:
        assert json.loads(self.line(Terminal(), "json"))["event"] == "scrub.started"

    def test_unknown_format_or_level_is_refused(self) -> None:
        with pytest.raises(ValueError, match="no log format 'xml'"):
            logger("xml", io.StringIO())  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="no log level 'loud'"):
            logger("json", io.StringIO(), "loud")

    def test_lines_below_the_requested_level_are_not_written(self) -> None:
        stream = io.StringIO()
        log = logger("json", stream, "warning")
        log.info("scrub.started")
        log.warning("health.suspect")
        assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["health.suspect"]

    def test_policy_exception_field_is_not_rendered_as_a_traceback(self) -> None:
        stream = io.StringIO()
        logger("console", stream).info("handover.granted", exception="same-tenant")
        assert stream.getvalue().count("\n") == 1
        assert "by_exception=same-tenant" in stream.getvalue()


class TestTracebacks:
    def fail(self, form: LogFormatName, message: str = "it broke") -> str:
        stream = io.StringIO()
        secret = "-".join(("residue", "of", "a", "tenant"))
        try:
            assert secret
            raise ZeroDivisionError(message)
        except ZeroDivisionError as error:
            logger(form, stream).error("api.failed", exc_info=error)
        return stream.getvalue()

    @pytest.mark.parametrize("form", ["json", "console"])
    def test_traceback_contains_no_local_variables(self, form: LogFormatName) -> None:
        assert "ZeroDivisionError: it broke" in self.fail(form)
        assert "residue-of-a-tenant" not in self.fail(form)

    def test_traceback_is_one_field_of_a_json_line(self) -> None:
        (line,) = self.fail("json").splitlines()
        assert list(json.loads(line))[-1] == "traceback"
        assert "exc_info" not in json.loads(line)

    def test_console_traceback_escapes_control_characters_and_is_indented(self) -> None:
        first, *rest = self.fail("console", HOSTILE).split("\n")[:-1]
        assert "api.failed" in first
        assert all(line.startswith("    ") and line.isprintable() for line in rest)

    def test_oversized_traceback_keeps_its_end(self) -> None:
        shown = json.loads(self.fail("json", "a" * 100_000 + "the end"))["traceback"]
        assert len(shown) < 17_000
        assert shown.rstrip().endswith("the end")


class TestHostileText:
    texts = st.text(max_size=300) | st.text(st.sampled_from(HOSTILE), max_size=300)

    @DAEMONS
    @given(text=texts)
    @example(text=HOSTILE)
    @example(text="\x1b" * 100_000)
    @example(text="\U0001f4a5\ud800" * 50_000)
    def test_hostile_text_is_one_ascii_json_line(self, write_line: WriteLine, text: str) -> None:
        stream = io.StringIO()
        write_line("json", stream, text)
        written = stream.getvalue()
        assert written.endswith("\n")
        assert written[:-1].isascii()
        assert written[:-1].isprintable()
        line = json.loads(written)
        assert line["level"] == "warning"
        assert len(text) > 4000 or json.loads(json.dumps(text)) in line["message"]

    @DAEMONS
    @given(text=texts)
    @example(text=HOSTILE)
    @example(text="\x1b" * 100_000)
    def test_hostile_text_is_one_printable_console_line(self, write_line: WriteLine, text: str) -> None:
        stream = io.StringIO()
        write_line("console", stream, text)
        assert stream.getvalue().endswith("\n")
        assert stream.getvalue()[:-1].isprintable()

    @DAEMONS
    def test_long_text_is_truncated_before_the_collectors_limit(self, write_line: WriteLine) -> None:
        stream = io.StringIO()
        write_line("json", stream, "\U0001f4a5" * 100_000)
        assert "100000 characters)" in stream.getvalue()
        assert len(stream.getvalue()) < 500_000

    def test_hostile_field_name_is_escaped(self) -> None:
        stream = io.StringIO()
        logger("console", stream).info("baseline.recorded", **{HOSTILE: "x"})
        assert stream.getvalue()[:-1].isprintable()

    @given(
        st.floats(allow_nan=True)
        | st.just(10**400)
        | st.just(10**5000)
        | st.just([10**5000, {1: float("nan")}])
        | st.just(Path("/a"))
        | st.just({1: {2}})
    )
    def test_value_without_a_json_representation_is_written_as_valid_json(self, value: object) -> None:
        def strict(word: str) -> None:
            raise AssertionError(f"{word} is no JSON")

        stream = io.StringIO()
        logger("json", stream).info("scrub.finished", seconds=value, outcome="passed")
        assert json.loads(stream.getvalue(), parse_constant=strict)["outcome"] == "passed"


class TestLostLogStream:
    def lost(self, stream: TextIO | None) -> int:
        losses, count = LostLineCounter(), []
        log = logger("json", stream, lost_lines=losses)
        log.info("scrub.started")
        losses.set_callback(lambda: count.append(1))
        log.error("health.condemned")
        return len(count)

    def test_closed_stream_loses_only_its_lines(self) -> None:
        stream = io.StringIO()
        stream.close()
        assert self.lost(stream) == 2

    def test_stream_without_a_reader_loses_only_its_lines(self) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        with contextlib.suppress(OSError), os.fdopen(writer, "w") as stream:  # closing it fails as well
            lost = self.lost(stream)
        assert lost == 2

    def test_process_without_standard_error_loses_its_lines(self) -> None:
        assert self.lost(None) == 2

    @DAEMONS
    def test_both_daemons_tolerate_a_closed_stream(self, write_line: WriteLine) -> None:
        stream = io.StringIO()
        stream.close()
        write_line("json", stream, "x")

    @pytest.mark.usefixtures("process_as_it_was")
    def test_library_logging_tolerates_a_closed_stream(self) -> None:
        stream, losses, count = io.StringIO(), LostLineCounter(), []
        configure_logging("json", "info", stream, component="service", lost_lines=losses)
        losses.set_callback(lambda: count.append(1))
        stream.close()
        logging.getLogger("grpc").error("gone")
        assert len(count) == 1

    def test_process_keeps_running_with_a_closed_standard_error(self) -> None:
        code = (
            "import os, sys; os.close(2)\n"
            "from plugin.logs import create_logger\n"
            "create_logger('auto', 'info', libraries=True).error('plugin.failed', exc_info=ValueError('x'))\n"
            "import logging, warnings; logging.getLogger('a').error('b'); warnings.warn('c')\n"
            "print('alive')"
        )
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=False, text=True)
        assert (done.returncode, done.stdout) == (0, "alive\n")


@pytest.mark.usefixtures("process_as_it_was")
class TestLibraryLogging:
    def configured(self, level: str = "info") -> tuple[io.StringIO, Callable[[], list[dict[str, Any]]]]:
        stream = io.StringIO()
        configure_logging("json", level, stream, component="plugin", now=lambda: NOON)
        return stream, lambda: [json.loads(line) for line in stream.getvalue().splitlines()]

    def test_library_message_is_logged_in_the_daemons_format(self) -> None:
        _, lines = self.configured()
        logging.getLogger("grpc").warning("the %s is full", "queue")
        assert lines() == [
            {
                "timestamp": "2025-12-31T12:00:00.250Z",
                "level": "warning",
                "event": LIBRARY_EVENT,
                "component": "plugin",
                "logger": "grpc",
                "message": "the queue is full",
            }
        ]

    def test_library_info_messages_are_logged_only_at_debug_level(self) -> None:
        _, lines = self.configured()
        logging.getLogger("httpx2").info("GET /api/v1/nodes")
        assert lines() == []
        _, lines = self.configured("debug")
        logging.getLogger("httpx2").info("GET /api/v1/nodes")
        assert [line["level"] for line in lines()] == ["info"]

    def test_library_exceptions_warnings_and_odd_levels_are_logged(self) -> None:
        with warnings.catch_warnings():
            _, lines = self.configured()
            try:
                raise ValueError("was not awaited")
            except ValueError:
                logging.getLogger("asyncio").exception("Task exception was never retrieved")
            warnings.simplefilter("always")
            warnings.warn("it is old", DeprecationWarning, stacklevel=1)
        logging.getLogger("odd").log(33, "between two levels")
        failed, warned, odd = lines()
        assert "ValueError: was not awaited" in failed["traceback"]
        assert "it is old" in warned["message"]
        assert (odd["level"], odd["message"]) == ("warning", "between two levels")

    def test_malformed_library_message_does_not_break_logging(self) -> None:
        _, lines = self.configured()
        logging.getLogger("grpc").warning("%d", "no number")
        logging.getLogger("grpc").warning("the next")
        assert [line["message"] for line in lines()] == ["the next"]

    @given(text=TestHostileText.texts)
    def test_hostile_library_text_is_one_printable_line(self, text: str) -> None:
        stream, lines = self.configured()
        logging.getLogger("grpc").warning("%s", text)
        assert stream.getvalue()[:-1].isprintable()
        assert len(lines()) == 1


def test_hostile_tenant_name_is_escaped_on_a_real_terminal() -> None:
    ours, theirs = pty.openpty()
    try:
        with os.fdopen(theirs, "w") as terminal:
            write_plugin_line("auto", terminal, HOSTILE)
        seen = b""
        with contextlib.suppress(OSError):  # once the other end is closed, and all of it was read
            while part := os.read(ours, 65536):  # the kernel passes a line on in parts
                seen += part
    finally:
        os.close(ours)
    assert b"allocation.refused" in seen
    assert b"\x1b[2J" not in seen
    assert b"\x1b]0;" not in seen
    assert "\u202e".encode() not in seen
    assert seen.count(b"\n") == 1
