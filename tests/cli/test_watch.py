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
        async with terminal("devices", "--watch", environment=at(short_tmp)) as there:
            await there.shows("quarantined")
            service.becomes(CLEAN)
            await there.shows(re.compile(r"live\n\nINDEX.*\n0 +SIM-GPU-aa.*\n\Z"))
            assert LIVE.search(there.screen.text)
            assert there.screen.alternate
            assert not there.screen.cursor_shown
            there.type("\x03")
            assert (await there.ended()).code == 130

    async def test_interrupt_leaves_the_last_view_and_restores_the_terminal(
        self, service: Service, short_tmp: Path
    ) -> None:
        async with terminal("devices", "-w", environment=at(short_tmp)) as there:
            await there.shows("quarantined")
            there.type("stray keys")
            there.type("\x03")
            told = await there.ended()
            assert there.is_as_before
        assert told.code == 130
        assert "quarantined" in told.text
        assert "stray" not in told.text

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
    async def test_termination_signal_restores_the_terminal(
        self, service: Service, short_tmp: Path, number: signal.Signals
    ) -> None:
        async with terminal("devices", "-w", environment=at(short_tmp)) as there:
            await there.shows("quarantined")
            there.process.send_signal(number)
            assert (await there.ended()).code == -number
            assert there.is_as_before

    async def test_resized_terminal_is_redrawn(self, service: Service, short_tmp: Path) -> None:
        async with terminal("devices", "-w", columns=200, environment=at(short_tmp)) as there:
            await there.shows("MODEL")
            there.resize(60)
            await there.shows(re.compile(r"^INDEX +0\nDEVICE +SIM-GPU-aa$", re.MULTILINE))
            there.screen.too_wide.clear()
            there.resize(80)
            await there.shows(re.compile(r"^INDEX  DEVICE", re.MULTILINE))
            assert "MODEL" not in there.screen.text
            there.type("\x03")
            await there.ended()

    async def test_short_window_states_the_number_of_hidden_lines(self, service: Service, short_tmp: Path) -> None:
        many = [pb.Device(id=f"SIM-GPU-{number:02}", index=str(number), state="clean") for number in range(16)]
        service.becomes(*many)
        async with terminal("devices", "-w", rows=10, environment=at(short_tmp)) as there:
            await there.shows("… 10 more lines: make the window taller, or name devices.")
            assert len(there.screen.text.splitlines()) == 10
            there.type("\x03")
            await there.ended()

    async def test_suspended_watch_restores_the_terminal_and_resumes(self, service: Service, short_tmp: Path) -> None:
        async with terminal("devices", "-w", environment=at(short_tmp)) as there:
            await there.shows("quarantined")
            there.process.send_signal(signal.SIGTSTP)
            await stopped(there)
            await until(lambda: there.is_as_before)
            there.process.send_signal(signal.SIGCONT)
            await there.shows("quarantined")
            assert there.screen.alternate
            there.type("\x03")
            assert (await there.ended()).code == 130

    async def test_lost_service_is_reported_and_contacted_again(self, short_tmp: Path) -> None:
        async with serving(short_tmp):
            watching = terminal("devices", "-w", environment=at(short_tmp))
            there = await watching.__aenter__()
            await there.shows(LIVE)
        try:
            await there.shows(re.compile(r"NOT LIVE: this is as of \S+Z\."))
            await there.shows("quarantined")
            async with serving(short_tmp) as back:
                back.becomes(CLEAN)
                await there.shows(LIVE)
                there.type("\x03")
                assert (await there.ended()).code == 130
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

        async with serving(short_tmp, Hanging()), terminal("devices", "-w", environment=at(short_tmp)) as there:
            await there.shows(LIVE)
            await there.shows(re.compile(r"NOT LIVE: .*Nothing\s+was\s+heard"))
            there.type("\x03")
            assert (await there.ended()).code == 130

    async def test_active_break_glass_override_is_shown_above_the_table(
        self, service: Service, short_tmp: Path
    ) -> None:
        service.becomes(BROKEN)
        async with terminal("devices", "-w", environment=at(short_tmp)) as there:
            await there.shows(re.compile(r"live\nNote: Until .* nothing is refused for device 2", re.MULTILINE))
            assert b"\x1b[2J" not in there.raw.rpartition(b"deadline")[2], "what a person wrote is no command"
            there.type("\x03")
            await there.ended()

    async def test_nothing_is_drawn_without_a_service(self, short_tmp: Path) -> None:
        async with terminal("devices", "-w", environment=at(short_tmp)) as there:
            told = await there.ended()
        assert told.code == 1
        assert told.text.startswith("Error: The scrub service is not there:")
        assert b"\x1b[?1049h" not in told.raw

    async def test_unknown_device_is_a_usage_error(self, service: Service, short_tmp: Path) -> None:
        async with terminal("devices", "9", "-w", environment=at(short_tmp)) as there:
            told = await there.ended()
        assert told.code == 2
        assert "No device is called '9'" in told.text

    async def test_dumb_terminal_gets_consecutive_tables(self, service: Service, short_tmp: Path) -> None:
        async with terminal("devices", "-w", environment=at(short_tmp, TERM="dumb")) as there:
            await there.shows("quarantined")
            service.becomes(CLEAN)
            await there.shows(re.compile(r"quarantined.*INDEX", re.DOTALL))
            assert b"\x1b" not in there.raw
            there.process.send_signal(signal.SIGINT)
            assert (await there.ended()).code == 130


async def stopped(there: Terminal) -> None:
    """Wait until the command has stopped itself."""
    stat = Path(f"/proc/{there.process.pid}/stat")
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
        await until(lambda: service.asked.count(pb.GetServiceInfoRequest()) > 1)
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
        (told,) = yaml.safe_load_all(out)
        assert [each["metadata"]["name"] for each in told["items"]] == ["SIM-GPU-aa"]

    async def test_tables_are_printed_consecutively_each_with_its_time(self, service: Service, short_tmp: Path) -> None:
        process = await start(short_tmp, "devices", "--watch")
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ\n", await first_line(process.stdout))
        assert (await first_line(process.stdout)).startswith("INDEX  DEVICE      HYGIENE")
        process.send_signal(signal.SIGINT)
        out, _ = await process.communicate()
        assert out.decode().endswith("seen.\n\n")

    async def test_lost_service_is_reported_once_on_standard_error(self, short_tmp: Path) -> None:
        async with serving(short_tmp) as service:
            process = await start(short_tmp, "devices", "--watch", "-o", "json")
            await first_line(process.stdout)
            service.error = NotReady("It is busy.")
            service.becomes(SICK)
            assert await first_line(process.stderr) == "Note: It is busy. It is asked again until it answers.\n"
            service.asked.clear()
            await until(lambda: len(service.asked) > 1)
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
        assert (ended.code, ended.out, service.asked) == (2, "", [])
        assert "-o table, json or yaml" in " ".join(ended.err.split())
