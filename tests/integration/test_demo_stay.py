"""``scrubber demo --keep-running``: after the scenario both daemons can be scraped, and Ctrl-C leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import signal
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cli.terminal import terminal

# The real command, with a scenario that completes at once: another test runs the whole one. If the process that runs
# the tests ignored SIGHUP, as nohup does, the demo would inherit that.
A_SHORT_STORY = """
import asyncio, os, signal, sys
from contextlib import suppress
from scrubber.emulator import scenario
from scrubber.cli.main import main

async def run(self):
    await self._playground.start_daemons(60)
    await self._playground.wait_until_clean(60)

scenario.DemoScenario.run = run
signal.signal(signal.SIGHUP, signal.SIG_DFL)
main(sys.argv[1:])
"""
A_LONG_STORY = A_SHORT_STORY.replace(
    "    await self._playground.wait_until_clean(60)\n",
    "    await self._playground.wait_until_clean(60)\n"
    "    self._console.print(f'so far, with {self._playground.sim_dir} and {self._playground.directory}')\n"
    "    await asyncio.Event().wait()\n",
)
A_STORY_WHOSE_TERMINAL_GOES = A_LONG_STORY.replace(
    "    await asyncio.Event().wait()\n",
    "    with suppress(OSError):\n"
    "        await asyncio.to_thread(os.read, 0, 1)  # returns when the terminal has gone\n"
    "    self._console.print('and on it goes')\n"
    "    await asyncio.Event().wait()\n",
)
ADDRESS = r"metrics\s+http://(127\.0\.0\.1):(\d+)/metrics"
DEADLINE = 100.0


def scraped(port: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as page:
        return str(page.read().decode())


async def test_demo_node_stays_until_ctrl_c(short_tmp: Path) -> None:
    flags = ("--keep-files", "--dir", str(short_tmp / "node"))
    program = (sys.executable, "-c", A_SHORT_STORY)
    async with terminal("demo", "--keep-running", *flags, columns=400, program=program) as session:
        found = await session.shows(
            re.compile(r"query the service +scrubber devices --socket-dir (\S+)/run\n"), DEADLINE
        )
        await session.shows("inject a fault", DEADLINE)
        node = Path(found[1])
        assert "All expectations were met" in session.screen.text
        ports = [port for _, port in re.findall(ADDRESS, session.screen.text)]
        service, plugin = (scraped(port) for port in ports)
        assert "scrubber_signing_key_info" in service
        assert "scrubber_plugin_" in plugin
        assert "scrubber_plugin_" not in service
        doors = {door for door in listening() if door[0] in map(int, ports)}
        assert len(doors) == 2
        session.type("\x03")
        ended = await session.ended(DEADLINE)
    assert ended.code == 0
    assert doors.isdisjoint(listening())  # their port numbers may be in use by other processes now
    assert node.exists()
    assert f"Logs and ledger: {node}" in ended.text


async def test_demo_node_with_claims_prints_a_command_that_reads_its_resource_slices(short_tmp: Path) -> None:
    program = (sys.executable, "-c", A_SHORT_STORY)
    async with terminal("demo", "--dra", "--keep-running", columns=400, program=program) as session:
        found = await session.shows(re.compile(r"read the slices +curl -s -H '(\S+): (Bearer \w+)' (\S+)\n"), DEADLINE)
        header, token, url = found.groups()

        def read() -> str:
            with urllib.request.urlopen(urllib.request.Request(url, headers={header: token}), timeout=60) as page:
                return str(page.read().decode())

        assert '"kind":"ResourceSliceList"' in await asyncio.to_thread(read)
        session.type("\x03")
        ended = await session.ended(DEADLINE)
    assert ended.code == 0


@pytest.mark.parametrize(("number", "stays"), [(signal.SIGINT, False), (signal.SIGTERM, True), (signal.SIGHUP, False)])
async def test_demo_leaves_nothing_behind_after_any_number_of_signals(number: signal.Signals, stays: bool) -> None:
    program = (sys.executable, "-c", A_SHORT_STORY if stays else A_LONG_STORY)
    pattern = re.compile(r"sim fault --dir (\S+)" if stays else r"so far, with (\S+) and (\S+)\n")
    async with terminal("demo", "--keep-running", columns=400, program=program) as session:
        found = await session.shows(pattern, DEADLINE)
        made = Path(f"{found[1]}")
        ended = asyncio.ensure_future(session.ended(DEADLINE))
        while not ended.done():  # during all of its cleanup
            send_signal(session.process, number)
            await asyncio.sleep(0.005)
    # A signal after the cleanup kills the interpreter during its exit.
    assert (await ended).code in (0 if stays else 128 + number, -number)
    assert not made.exists()
    assert not [pid for pid in Path("/proc").glob("[0-9]*") if str(made).encode() in command_of(pid)]


@pytest.mark.parametrize("terminated", [True, False])
async def test_closed_terminal_ends_the_demo_and_leaves_nothing_behind(terminated: bool) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as screen:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", A_STORY_WHOSE_TERMINAL_GOES, "demo"),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,  # without a controlling terminal: the kernel sends it no SIGHUP
        )
        os.close(theirs)
        seen = b""
        while (found := re.search(rb"so far, with (\S+) and (\S+)\r\n", seen)) is None:
            seen += await asyncio.to_thread(screen.read, 4096)
    if terminated:
        send_signal(process, signal.SIGHUP)
    async with asyncio.timeout(DEADLINE):
        assert await process.wait() == 128 + signal.SIGHUP
    made = [Path(each.decode()) for each in found.groups()]
    assert not [each for each in made if each.exists()]
    assert not [pid for pid in Path("/proc").glob("[0-9]*") if bytes(made[0]) in command_of(pid)]


def listening() -> set[tuple[int, str]]:
    """Return port and inode of every listening TCP socket on 127.0.0.1 (proc_net_tcp)."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ours = [fields for fields in lines if fields[3] == "0A" and fields[1].startswith("0100007F:")]
    return {(int(fields[1].rpartition(":")[2], 16), fields[9]) for fields in ours}


def send_signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Do not use its ``send_signal``: that polls the process, and its exit status would be lost to asyncio."""
    with suppress(ProcessLookupError):
        os.kill(process.pid, number)


def command_of(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:  # it has just ended
        return b""
