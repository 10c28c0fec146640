"""The service alone: no kubelet, no plugin, a caller on the plugin's socket."""

from __future__ import annotations

from pathlib import Path

import pytest

from scrubber.api.client import PluginClient
from scrubber.domain.errors import NotReady
from scrubber.emulator.stage import Stage
from tests.integration.acting import QUICK, SOON


async def test_devices_are_handed_over_to_nobody_knows_whom_each_time_on_a_certificate_of_its_own(
    short_tmp: Path,
) -> None:
    stage = Stage(directory=short_tmp / "stage", devices=2, memory="2MiB", policy=QUICK)
    try:
        made = await stage.command("sim", "create", "--dir", str(stage.sim), "--devices", "2", "--memory", "2MiB")
        assert made.status == 0, made.err
        # The kubelet of this stage is never started: none of its directories is there.
        await stage.service.start()
        first, second = (each.id for each in await stage.all_clean(SOON))
        async with PluginClient(stage.sockets) as client:
            answer = await client.hand_over([first, second], wait_seconds=5, timeout=SOON)
            assert {(each.kind, each.grant) for each in answer.devices} == {("unknown", 1)}
            (stage.sim / "devices" / "0" / "memory").write_bytes(b"of nobody knows whom")
            again = await client.hand_over([first], wait_seconds=20, timeout=SOON)
            assert [(each.kind, each.grant) for each in again.devices] == [("unknown", 2)]
        assert not (stage.sim / "devices" / "0" / "memory").read_bytes().strip(b"\0")
    finally:
        await stage.close()


async def test_who_still_holds_a_device_is_waited_for_though_nobody_knows_him(short_tmp: Path) -> None:
    stage = Stage(directory=short_tmp / "stage", devices=1, memory="2MiB", policy=QUICK)
    try:
        made = await stage.command("sim", "create", "--dir", str(stage.sim), "--devices", "1", "--memory", "2MiB")
        assert made.status == 0, made.err
        await stage.service.start()
        (device,) = await stage.all_clean(SOON)
        async with PluginClient(stage.sockets) as client:
            await client.hand_over([device.id], wait_seconds=5, timeout=SOON)
            memory = stage.sim / "devices" / "0" / "memory"
            with memory.open("r+b"), pytest.raises(NotReady, match="in-use"):
                await client.hand_over([device.id], wait_seconds=3, timeout=SOON)
            await client.hand_over([device.id], wait_seconds=20, timeout=SOON)
    finally:
        await stage.close()
