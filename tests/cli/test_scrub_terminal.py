"""Scrubs at a terminal: a line for each device while they run, and only the verdicts afterwards."""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scrubber.domain.errors import DeviceBusy
from tests.cli.acting_stage import MIB, NEVER, Node, begun, device, passed, served
from tests.cli.terminal import WIDTHS, agrees_with, at_terminal, terminal

ZERO, ONE, TWO, THREE = (device(n) for n in range(4))
IN_USE = DeviceBusy("Device GPU-3a is in use by red/train (main); it is scrubbed when it is released.")
PEOPLE = ("stdin", "stderr")
"""The terminal shows progress, and standard output goes to a script."""


@pytest.fixture
async def node(short_tmp: Path) -> AsyncIterator[Node]:
    async with served(short_tmp) as node:
        node.devices = [ZERO, ONE, TWO, THREE]
        node.scripts = {each.id: [passed(each)] for each in (ZERO, ONE, TWO)} | {THREE.id: [IN_USE]}
        yield node


@pytest.fixture
def environment(short_tmp: Path) -> dict[str, str]:
    return {"SCRUBBER_SOCKET_DIR": str(short_tmp)}


@pytest.mark.parametrize("columns", WIDTHS)
async def test_verdict_of_one_device_fits_the_terminal(node: Node, environment: dict[str, str], columns: int) -> None:
    node.scripts["0"] = [begun(ZERO), passed(ZERO)]
    result = await at_terminal("scrub", "0", columns=columns, environment=environment)
    assert result.code == 0
    agrees_with(f"scrub-one-{columns}", result.text)


@pytest.mark.parametrize("columns", WIDTHS)
async def test_verdicts_of_several_devices_fit_the_terminal(
    node: Node, environment: dict[str, str], columns: int
) -> None:
    result = await at_terminal("scrub", "0", "1", "3", columns=columns, environment=environment)
    assert result.code == 3
    agrees_with(f"scrub-several-{columns}", result.text)


@pytest.mark.parametrize("columns", WIDTHS)
async def test_progress_has_a_line_per_device_that_disappears_at_the_end(
    node: Node, environment: dict[str, str], columns: int
) -> None:
    end = asyncio.Event()
    node.scripts[ZERO.id] = [begun(ZERO, done=64 * MIB), end, passed(ZERO)]
    node.scripts[ONE.id] = [begun(ONE, step="holders", phase="", done=0, joined=True), end, passed(ONE)]
    async with terminal("scrub", "0", "1", "2", columns=columns, environment=environment, streams=PEOPLE) as session:
        await session.shows(re.compile(rf"^0 {ZERO.id[:12]}\S* +memory: clear +.*64.0/256.0 MiB", re.MULTILINE))
        await session.shows(re.compile(rf"^1 {ONE.id[:12]}\S* +holders +.*joined", re.MULTILINE))
        await session.shows(re.compile(rf"^2 {TWO.id[:12]}\S* +passed", re.MULTILINE))
        end.set()
        result = await session.ended()
        assert session.is_as_before
    assert (result.code, result.text.strip()) == (0, "")
    assert [line.split()[2] for line in result.out.splitlines()[1:]] == ["passed"] * 3


@pytest.mark.parametrize("columns", [20, 40, 80])
async def test_progress_fits_a_narrow_terminal(node: Node, environment: dict[str, str], columns: int) -> None:
    end = asyncio.Event()
    node.scripts["0"] = [begun(ZERO, done=64 * MIB), end, passed(ZERO)]
    async with terminal("scrub", "0", columns=columns, environment=environment, streams=PEOPLE) as session:
        await session.shows("memory")
        end.set()
        assert (await session.ended()).code == 0


async def test_progress_fits_a_terminal_that_becomes_narrow(node: Node, environment: dict[str, str]) -> None:
    end = asyncio.Event()
    node.scripts["0"] = [begun(ZERO, done=64 * MIB), end, passed(ZERO)]
    async with terminal("scrub", "0", columns=200, environment=environment, streams=PEOPLE) as session:
        await session.shows(ZERO.id)
        session.resize(60)
        await session.shows("GPU-0a-0000-…")
        session.screen.too_wide.clear()  # drawn before it was notified of the new size
        end.set()
        assert (await session.ended()).code == 0


async def test_devices_beyond_the_terminals_rows_are_counted(node: Node, environment: dict[str, str]) -> None:
    end = asyncio.Event()
    node.devices = [device(n) for n in range(30)]
    node.scripts = {each.id: [begun(each), end, passed(each)] for each in node.devices}
    async with terminal("scrub", "--all-idle", rows=10, environment=environment, streams=PEOPLE) as session:
        await session.shows("… 30 devices, 0 finished")
        end.set()
        assert (await session.ended()).code == 0


@pytest.mark.parametrize("columns", WIDTHS)
async def test_interrupt_reports_each_scrub_that_continues(
    node: Node, environment: dict[str, str], columns: int
) -> None:
    node.scripts |= {ONE.id: [begun(ONE), NEVER], TWO.id: [begun(TWO), NEVER]}
    async with terminal("scrub", "0", "1", "2", columns=columns, environment=environment, streams=PEOPLE) as session:
        for shown in (r"^0 .*passed", r"^1 .*memory: clear", r"^2 .*memory: clear"):
            await session.shows(re.compile(shown, re.MULTILINE))
        session.type("\x03")
        result = await session.ended()
        assert session.is_as_before
    assert (result.code, [line.split()[2] for line in result.out.splitlines()[1:]]) == (130, ["passed"])
    agrees_with(f"scrub-interrupted-{columns}", result.text.lstrip("\n^C"))


@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"NO_COLOR": "1"}])
async def test_plain_terminal_gets_no_colours_or_control_sequences(
    node: Node, environment: dict[str, str], variables: dict[str, str]
) -> None:
    node.scripts["0"] = [begun(ZERO), passed(ZERO)]
    result = await at_terminal("scrub", "0", columns=80, environment=environment | variables)
    assert result.code == 0
    assert b"\x1b[3" not in result.raw, "no colours"
    assert ("TERM" not in variables) or (b"\x1b" not in result.raw and result.raw.startswith(b"INDEX"))


async def test_no_progress_is_printed_without_a_terminal(node: Node, environment: dict[str, str]) -> None:
    node.scripts["0"] = [begun(ZERO), passed(ZERO)]
    result = await at_terminal("scrub", "0", columns=80, environment=environment, streams=("stdout",))
    assert (result.code, result.screen.cursor_shown, b"\x1b[?25" in result.raw) == (0, True, False)


async def test_device_text_is_escaped_in_the_progress_display(node: Node, environment: dict[str, str]) -> None:
    end = asyncio.Event()
    node.scripts["0"] = [begun(ZERO, step="mem\x1b[2Jory", phase="\x9b7m\u202e"), end, passed(ZERO)]
    async with terminal("scrub", "0", environment=environment, streams=PEOPLE) as session:
        await session.shows("mem\N{REPLACEMENT CHARACTER}[2Jory")
        end.set()
        result = await session.ended()
    assert b"\x1b[2J" not in result.raw
    assert os.linesep.encode() in result.raw
