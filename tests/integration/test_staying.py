"""``scrubber demo --stay``: after the story both daemons can be scraped, and Ctrl-C at the terminal leaves nothing behind."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from tests.contract.terminal import terminal

# The command as it is, with a story that is told at once: the whole one is another test's.
A_SHORT_STORY = """
import sys
from plugin.emulator import story
from scrubber.cli.main import main

async def run(self):
    await self._stage.start_daemons(60)
    await self._stage.all_clean(60)

story.Story.run = run
main(sys.argv[1:])
"""
A_LONG_STORY = A_SHORT_STORY.replace(
    "    await self._stage.all_clean(60)\n",
    "    await self._stage.all_clean(60)\n"
    "    self._console.print(f'so far, with {self._stage.sim}')\n"
    "    await asyncio.Event().wait()\n",
).replace("import sys", "import asyncio, sys")
ADDRESS = r"metrics\s+http://(127\.0\.0\.1):(\d+)/metrics"
PATIENCE = 100.0


def scraped(port: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as page:
        return str(page.read().decode())


@pytest.mark.parametrize("kept", [False, True])
async def test_the_node_stays_until_ctrl_c(kept: bool, short_tmp: Path) -> None:
    flag = ("--keep", "--dir", str(short_tmp / "node")) if kept else ()
    program = (sys.executable, "-c", A_SHORT_STORY)
    async with terminal("demo", "--stay", *flag, columns=400, program=program) as there:
        found = await there.shows(re.compile(r"ask the service +scrubber devices --socket (\S+)/run\n"), PATIENCE)
        await there.shows("break something", PATIENCE)
        node = Path(found[1])
        assert "Every expectation held" in there.screen.text
        ports = [port for _, port in re.findall(ADDRESS, there.screen.text)]
        service, plugin = (scraped(port) for port in ports)
        assert "scrubber_signing_key_info" in service
        assert "scrubber_plugin_" in plugin
        assert "scrubber_plugin_" not in service
        there.type("\x03")
        ended = await there.ended(PATIENCE)
    assert ended.code == 0
    for port in ports:
        with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", int(port))):
            pass
    assert node.exists() is kept
    assert (f"Logs and ledger: {node}" in ended.text) is kept


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("stays", [True, False])
async def test_however_often_it_is_told_to_end_it_leaves_nothing_behind(number: signal.Signals, stays: bool) -> None:
    program = (sys.executable, "-c", A_SHORT_STORY if stays else A_LONG_STORY)
    said = re.compile(r"sim fault --dir (\S+)" if stays else r"so far, with (\S+)\n")
    async with terminal("demo", "--stay", columns=400, program=program) as there:
        found = await there.shows(said, PATIENCE)
        made = Path(f"{found[1]}")
        ended = asyncio.ensure_future(there.ended(PATIENCE))
        while not ended.done():  # all through its clearing up
            with suppress(ProcessLookupError):
                there.process.send_signal(number)
            await asyncio.sleep(0.005)
    # One that comes when everything is done ends the interpreter as it ends.
    assert (await ended).code in (0 if stays else 128 + number, -number)
    assert not made.exists()
    assert not [pid for pid in Path("/proc").glob("[0-9]*") if str(made).encode() in command_of(pid)]


def command_of(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:  # it has just ended
        return b""
