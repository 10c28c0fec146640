"""DCGM's host engine releases the driver on request: a real ``dcgmi`` that works, refuses, hangs, or is too old."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from scrubber.adapters.nvidia.dcgm import DcgmControl
from scrubber.domain.errors import Refused, Unavailable
from tests.nvidia.dcgmi import HOST_ENGINE, DcgmStandIn

SOON = 30.0


@pytest.fixture
def dcgm(tmp_path: Path) -> DcgmStandIn:
    directory = tmp_path / "dcgm"
    directory.mkdir()
    return DcgmStandIn(directory)


@pytest.fixture
async def engine(dcgm: DcgmStandIn, tmp_path: Path) -> AsyncIterator[tuple[Process, Path]]:
    """A host engine that has a node open."""
    node = tmp_path / "nvidia0"
    node.touch()
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", HOST_ENGINE, dcgm.state, node, stdout=PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline()
    yield process, node
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def is_open(process: Process, node: Path) -> bool:
    links = Path(f"/proc/{process.pid}/fd").iterdir()
    return any(os.path.samefile(link, node) for link in links if link.exists())


async def test_host_engine_closes_its_devices_and_opens_them_again(
    dcgm: DcgmStandIn, engine: tuple[Process, Path]
) -> None:
    control = DcgmControl(dcgm.path, "localhost:5555", timeout=SOON)
    assert control.actions == (f"run {dcgm.path} set --detach-driver --host localhost:5555",)
    await control.pause()
    assert not is_open(*engine)
    await control.restore()
    assert is_open(*engine)
    await control.restore()
    assert is_open(*engine), "attaching twice does no harm"
    assert dcgm.calls[:2] == ["--version", "set --detach-driver --host localhost:5555"]


@pytest.mark.parametrize("version", ["3.3.9", "4.4.2"])
async def test_dcgm_before_4_5_is_refused_with_a_message_that_names_what_to_do(tmp_path: Path, version: str) -> None:
    dcgm = DcgmStandIn(tmp_path, version)
    with pytest.raises(Refused, match=r"DCGM 4\.5 or newer.*--pause-labels") as refusal:
        await DcgmControl(dcgm.path, timeout=SOON).pause()
    assert version in str(refusal.value)
    assert dcgm.calls == ["--version"]


async def test_dcgmi_that_does_not_know_the_option_is_explained_and_nothing_needs_restoring(dcgm: DcgmStandIn) -> None:
    dcgm.set_mode("old")
    with pytest.raises(Refused, match="does not know --detach-driver"):
        await DcgmControl(dcgm.path, timeout=SOON).pause()


async def test_missing_dcgmi_is_refused_with_the_name_of_the_setting(tmp_path: Path) -> None:
    control = DcgmControl(tmp_path / "dcgmi", timeout=SOON)
    with pytest.raises(Refused, match=r"No such file or directory.*--dcgmi"):
        await control.pause()
    with pytest.raises(Unavailable, match="--attach-driver"):
        await control.restore()


async def test_refusal_of_the_host_engine_names_what_to_check(dcgm: DcgmStandIn) -> None:
    dcgm.set_mode("refuse")
    control = DcgmControl(dcgm.path, timeout=SOON)
    with pytest.raises(Unavailable, match=r"Host engine is not running.*--dcgm-address"):
        await control.pause()
    with pytest.raises(Unavailable, match=r"may still be without the driver.*restart the host engine"):
        await control.restore()


async def test_dcgmi_that_hangs_is_killed_at_its_deadline(dcgm: DcgmStandIn) -> None:
    dcgm.set_mode("hang-detach")
    with pytest.raises(Unavailable, match="did not end within 2 s and was killed"):
        await DcgmControl(dcgm.path, timeout=2.0).pause()


async def test_cancelled_run_leaves_no_process(dcgm: DcgmStandIn) -> None:
    dcgm.set_mode("hang-attach")
    restoring = asyncio.create_task(DcgmControl(dcgm.path, timeout=SOON).restore())
    async with asyncio.timeout(SOON):
        while True:
            if dcgm.calls:
                break
            await asyncio.sleep(0.01)
    restoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await restoring
    running = [each for each in Path("/proc").glob("[0-9]*/cmdline") if str(dcgm.path).encode() in _read(each)]
    assert running == []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
