"""``scrubber devices --watch``: changes are shown, outdated data is marked, and the terminal is restored."""

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import yaml

from scrubber.api import scrubber_pb2 as pb
from scrubber.domain.errors import NotReady
from tests.cli.stage import BROKEN, CLEAN, SICK, Ended, Service, run, serving, start
from tests.cli.terminal import Terminal, terminal

LIVE = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ  live$", re.MULTILINE)


@pytest.fixture
async def service(short_tmp: Path) -> AsyncIterator[Service]:
    async with serving(short_tmp) as service:
        yield service


def at(directory: Path, **more: str) -> dict[str, str]:
    return {"SCRUBBER_SOCKET_DIR": str(directory), **more}


async def first_line(stream: asyncio.StreamReader | None) -> str:
    assert stream is not None
    return (await asyncio.wait_for(stream.readline(), 30)).decode()


class TestOnATerminal:
    async def test_change_is_drawn_in_place(self, service: Service, short_tmp: Path) -> None:
        async with terminal("devices", "--watch", environment=at(short_tmp)) as session:
            await session.shows("quarantined")
            service.becomes(CLEAN)
            await session.shows(re.compile(r"live\n\nINDEX.*\n0 +SIM-GPU-aa.*\n\Z"))
            assert LIVE.search(session.screen.text)
            assert session.screen.alternate
            assert not session.screen.cursor_shown
            session.type("\x03")
            assert (await session.ended()).code == 130

    async def test_interrupt_leaves_the_last_view_and_restores_the_terminal(
        self, service: Service, short_tmp: Path
    ) -> None:
        async with terminal("devices", "-w", environment=at(short_tmp)) as session:
            await session.shows("quarantined")
            session.type("stray keys")
            session.type("\x03")
            result = await session.ended()
            assert session.is_as_before
        assert result.code == 130
        assert "quarantined" in result.text
        assert "stray" not in result.text

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
    async def test_termination_signal_restores_the_terminal(
        self, service: Service, short_tmp: Path, number: signal.Signals
    ) -> None:
        async with terminal("devices", "-w", environment=at(short_tmp)) as session:
            await session.shows("quarantined")
            session.process.send_signal(number)
            assert (await session.ended()).code == -number
            assert session.is_as_before

    async def test_resized_terminal_is_redrawn(self, service: Service, short_tmp: Path) -> None:
        async with terminal("devices", "-w", columns=200, environment=at(short_tmp)) as session:
            await session.shows(re.compile(r"^INDEX  DEVICE", re.MULTILINE))
            session.resize(50)
            await session.shows(re.compile(r"^INDEX +0\nDEVICE +SIM-GPU-aa$", re.MULTILINE))
            session.screen.too_wide.clear()
            session.resize(80)
            await session.shows(re.compile(r"^INDEX  DEVICE", re.MULTILINE))
            session.type("\x03")
            await session.ended()

    async def test_short_window_states_the_number_of_hidden_lines(self, service: Service, short_tmp: Path) -> None:
        many = [pb.Device(id=f"SIM-GPU-{number:02}", index=str(number), state="clean") for number in range(16)]
        service.becomes(*many)
        async with terminal("devices", "-w", rows=10, environment=at(short_tmp)) as session:
            await session.shows("… 10 more lines: enlarge the window, or name devices.")
            assert len(session.screen.text.splitlines()) == 10
            session.type("\x03")
            await session.ended()

    async def test_suspended_watch_restores_the_terminal_and_resumes(self, service: Service, short_tmp: Path) -> None:
        async with terminal("devices", "-w", environment=at(short_tmp)) as session:
            await session.shows("quarantined")
            session.process.send_signal(signal.SIGTSTP)
            await stopped(session)
            await until(lambda: session.is_as_before)
            session.process.send_signal(signal.SIGCONT)
            await session.shows("quarantined")
            assert session.screen.alternate
            session.type("\x03")
            assert (await session.ended()).code == 130

    async def test_lost_service_is_reported_and_contacted_again(self, short_tmp: Path) -> None:
        async with serving(short_tmp):
            watching = terminal("devices", "-w", environment=at(short_tmp))
            session = await watching.__aenter__()
            await session.shows(LIVE)
        try:
            await session.shows(re.compile(r"NOT LIVE: last update at \S+Z\."))
            await session.shows("quarantined")
            async with serving(short_tmp) as back:
                back.becomes(CLEAN)
                await session.shows(LIVE)
                session.type("\x03")
                assert (await session.ended()).code == 130
        finally:
            await watching.__aexit__(None, None, None)

    async def test_hanging_service_is_not_shown_as_live(self, short_tmp: Path) -> None:
        class Hanging(Service):
            async def GetServiceInfo(self, request: object, context: object) -> pb.ServiceInfo:
                if self.reached.is_set():
                    await asyncio.Event().wait()
                self.reached.set()
                return self.info

            async def _answer(self, request: object, context: object) -> None:
                pass

        async with serving(short_tmp, Hanging()), terminal("devices", "-w", environment=at(short_tmp)) as session:
            await session.shows(LIVE)
            await session.shows(re.compile(r"NOT LIVE: .*The\s+service\s+does\s+not\s+respond\. Retrying\."))
            session.type("\x03")
            assert (await session.ended()).code == 130

    async def test_active_break_glass_override_is_shown_above_the_table(
        self, service: Service, short_tmp: Path
    ) -> None:
        service.becomes(BROKEN)
        async with terminal("devices", "-w", environment=at(short_tmp)) as session:
            await session.shows(
                re.compile(r"live\nNote: Device 2 \(SIM-GPU-cc\) is handed over whatever its checks find", re.MULTILINE)
            )
            assert b"\x1b[2J" not in session.raw.rpartition(b"deadline")[2], "what a person wrote is no command"
            session.type("\x03")
            await session.ended()

    async def test_nothing_is_drawn_without_a_service(self, short_tmp: Path) -> None:
        async with terminal("devices", "-w", environment=at(short_tmp)) as session:
            result = await session.ended()
        assert result.code == 1
        assert result.text.startswith("Error: The scrub service is not reachable:")
        assert b"\x1b[?1049h" not in result.raw

    async def test_unknown_device_is_a_usage_error(self, service: Service, short_tmp: Path) -> None:
        async with terminal("devices", "9", "-w", environment=at(short_tmp)) as session:
            result = await session.ended()
        assert result.code == 2
        assert "No device matches '9'" in result.text

    async def test_dumb_terminal_gets_consecutive_tables(self, service: Service, short_tmp: Path) -> None:
        async with terminal("devices", "-w", environment=at(short_tmp, TERM="dumb")) as session:
            await session.shows("quarantined")
            service.becomes(CLEAN)
            await session.shows(re.compile(r"quarantined.*INDEX", re.DOTALL))
            assert b"\x1b" not in session.raw
            session.process.send_signal(signal.SIGINT)
            assert (await session.ended()).code == 130


async def stopped(session: Terminal) -> None:
    """Wait until the command has stopped itself."""
    stat = Path(f"/proc/{session.process.pid}/stat")
    await until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while True:
            if holds():
                return
            await asyncio.sleep(0.01)


class TestWithoutTerminal:
    async def test_every_change_is_a_line_of_json(self, service: Service, short_tmp: Path) -> None:
        process = await start(short_tmp, "devices", "--watch", "-o", "json")
        first = json.loads(await first_line(process.stdout))
        assert (first["apiVersion"], first["kind"]) == ("cli.scrubber.dev/v1", "DeviceList")
        assert [each["state"] for each in first["items"]] == ["clean", "quarantined"]
        # The service is polled for availability, and nothing is written for that.
        await until(lambda: service.requests.count(pb.GetServiceInfoRequest()) > 1)
        service.becomes(CLEAN)
        assert [each["metadata"]["name"] for each in json.loads(await first_line(process.stdout))["items"]] == [
            "SIM-GPU-aa"
        ]
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
        assert (process.returncode, out, err) == (130, b"", b"")

    async def test_every_change_is_a_yaml_document(self, service: Service, short_tmp: Path) -> None:
        process = await start(short_tmp, "devices", "0", "--watch", "-o", "yaml")
        assert await first_line(process.stdout) == "---\n"
        process.send_signal(signal.SIGINT)
        out, _ = await process.communicate()
        (document,) = yaml.safe_load_all(out)
        assert [each["metadata"]["name"] for each in document["items"]] == ["SIM-GPU-aa"]

    async def test_tables_are_printed_consecutively_each_with_its_time(self, service: Service, short_tmp: Path) -> None:
        process = await start(short_tmp, "devices", "--watch")
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ\n", await first_line(process.stdout))
        assert (await first_line(process.stdout)).startswith("INDEX  DEVICE      HYGIENE")
        process.send_signal(signal.SIGINT)
        out, _ = await process.communicate()
        assert out.decode().endswith("xid-95\n\n")

    async def test_table_is_printed_only_when_what_it_shows_has_changed(
        self, service: Service, short_tmp: Path
    ) -> None:
        process = await start(short_tmp, "devices", "--watch")
        await first_line(process.stdout)
        queries = service.requests.count(pb.GetServiceInfoRequest())
        hotter = pb.Device()
        hotter.CopyFrom(CLEAN)
        hotter.lifetime_counters["retired_pages"] = 3  # of the details of a device only
        service.becomes(hotter, SICK)
        await until(lambda: service.requests.count(pb.GetServiceInfoRequest()) > queries)
        service.becomes(CLEAN)
        shown = [await first_line(process.stdout) for _ in range(6)]
        assert [line.split()[:1] for line in shown[:4]] == [["INDEX"], ["0"], ["1"], []]
        assert shown[5].split()[0] == "INDEX", "the next table"
        process.send_signal(signal.SIGINT)
        out, _ = await process.communicate()
        assert b"SIM-GPU-bb" not in out, "it is the one without that device"

    async def test_lost_service_is_reported_once_on_standard_error(self, short_tmp: Path) -> None:
        async with serving(short_tmp) as service:
            process = await start(short_tmp, "devices", "--watch", "-o", "json")
            await first_line(process.stdout)
            service.error = NotReady("It is busy.")
            service.becomes(SICK)
            assert await first_line(process.stderr) == "Note: It is busy. Retrying until the service responds.\n"
            service.requests.clear()
            await until(lambda: len(service.requests) > 1)
            service.error = None
            assert json.loads(await first_line(process.stdout))["items"][0]["metadata"]["name"] == "SIM-GPU-bb"
            process.send_signal(signal.SIGINT)
            out, err = await process.communicate()
        assert (process.returncode, out, err) == (130, b"", b"")

    @pytest.mark.parametrize("output", ["json", "yaml", "table"])
    async def test_closed_output_ends_the_watch(self, service: Service, short_tmp: Path, output: str) -> None:
        reading, writing = os.pipe()
        process = await start(short_tmp, "devices", "--watch", "-o", output, stdout=writing)
        os.close(writing)
        assert await asyncio.to_thread(os.read, reading, 10)
        os.close(reading)
        service.becomes(CLEAN)
        _, err = await process.communicate()
        assert (process.returncode, err) == (1, b"")

    async def test_watch_with_name_output_is_a_usage_error(self, service: Service, short_tmp: Path) -> None:
        ended = await run(short_tmp, "devices", "--watch", "-o", "name")
        assert isinstance(ended, Ended)
        assert (ended.code, ended.out, service.requests) == (2, "", [])
        assert "Use table, wide, json or yaml." in " ".join(ended.err.split())
