"""The policy file is replaced while the service runs."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from scrubber.emulator.playground import Playground
from tests.integration.acting import SOON, found_by, history, reader, staged


def replace(file: Path, text: str) -> None:
    """Replace the file atomically: no reader sees an empty or incomplete file."""
    draft = file.with_suffix(".new")
    draft.write_text(text)
    draft.replace(file)


async def newest_row(stage: Playground, name: str) -> dict[str, object]:
    """Return the newest audit row of that name, once there is one."""
    async with asyncio.timeout(SOON):
        while True:
            rows = await history(stage, name)
            if rows:
                return rows[-1]
            await asyncio.sleep(0.05)


async def test_replaced_policy_file_takes_effect_and_an_invalid_one_does_not(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\n")
    async with staged(devices=1, policy=str(file)) as stage:
        replace(file, "name: mine\nsharing: sometime\n")
        os.kill(stage.service.pid, signal.SIGHUP)
        message = str((await newest_row(stage, "policy.rejected"))["message"])
        assert f'{file}:2: sharing: "sometime" is not a valid value' in message
        assert message.endswith("The policy mine stays in force.")
        before = (await stage.read_client.service_info()).policy_digest
        replace(file, "name: mine\nsharing: never\n")
        assert (await newest_row(stage, "policy.accepted"))["changed"] is True
        assert (await stage.read_client.service_info()).policy_digest != before
        await stage.wait_until_clean(SOON)
        assert await found_by(await stage.kubelet.run(reader("a", "team-a"))) == ""
