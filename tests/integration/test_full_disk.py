"""The ledger's disk fills up while the service runs: nothing is handed over, the reason is reported, then it recovers.

The disk is a file system of a few MiB in memory. Only root can mount one; for other users this file reports that it has
no test.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scrubber.adapters.ledger.offline import verify_ledger
from scrubber.api.client import AdminClient
from scrubber.emulator.playground import Playground
from tests.integration.acting import QUICK, SOON, found_by, history, reader, refusal, running, writer

SIZE = "8m"


def _mount(directory: Path) -> bool:
    directory.mkdir(mode=0o700, parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE},mode=0700", "tmpfs", str(directory)]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0


def _can_mount() -> bool:
    probe = Path(f"/tmp/gs-mount-{os.getpid()}")
    try:
        mounted = _mount(probe)
        if mounted:
            subprocess.run(["umount", str(probe)], check=True)
    finally:
        probe.rmdir()
    return mounted


SIZES = [SIZE] if _can_mount() else []
if not SIZES:
    print("NOT TESTED HERE: a full disk at runtime (mounting a tmpfs is not permitted)", file=sys.__stderr__)


@pytest.fixture
def stage_directory(short_tmp: Path) -> Iterator[Path]:
    """Provide a directory for a stage, with a very small disk at ``state``."""
    state = short_tmp / "stage" / "state"
    assert _mount(state)
    yield short_tmp / "stage"
    subprocess.run(["umount", str(state)], check=True)


@pytest.mark.parametrize("size", SIZES)
async def test_hand_overs_are_refused_while_the_disk_is_full_and_continue_once_there_is_room(
    stage_directory: Path, size: str
) -> None:
    state = stage_directory / "state"
    async with Playground(directory=stage_directory, devices=2, memory="2MiB", policy=QUICK) as stage:
        await stage.start_daemons(SOON)
        await stage.wait_until_clean(SOON)
        before = await running(stage, writer("before", "team-a"))
        ballast = state / "ballast"
        _fill(ballast)
        waiting = await stage.kubelet.run(reader("waiting", "team-b"))
        message = await refusal(waiting)
        assert "cannot write its ledger" in message, message
        assert "No space left" in (await stage.read_client.service_info()).ledger_status
        assert stage.service.process is not None
        assert stage.service.process.returncode is None
        async with AdminClient(stage.socket_dir) as operator:
            await operator.quarantine("0", "the disk is full")
            await operator.unquarantine("0", "only a test")
        audit_rows = [await history(stage, name) for name in ("operator.quarantined", "operator.released")]
        assert [len(rows) for rows in audit_rows] == [1, 1], "what people do is recorded on a full disk too"
        assert "No space left" in (await stage.read_client.service_info()).ledger_status
        ballast.unlink()
        assert await found_by(waiting) == ""
        assert (await stage.read_client.service_info()).ledger_status == "ok"
        await stage.kubelet.delete(before, grace=0)
        await stage.wait_until_clean(SOON)
        granted = [row["pod"] for row in await history(stage, "handover.granted")]
        assert granted == ["before", "waiting"]
        assert await stage.service.stop(SOON) == 0
        assert verify_ledger(state).intact


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 4096)
        except OSError:
            return
