"""The service alone: no kubelet, no plugin, a client on the plugin's socket."""

from __future__ import annotations

from pathlib import Path

import pytest

from scrubber.api.client import PluginClient
from scrubber.domain.errors import NotReady
from scrubber.emulator.playground import Playground
from tests.integration.acting import QUICK, SOON


async def test_hand_overs_without_a_kubelet_are_of_unknown_kind_and_each_needs_a_certificate(
    short_tmp: Path,
) -> None:
    stage = Playground(directory=short_tmp / "stage", devices=2, memory="2MiB", policy=QUICK)
    try:
        made = await stage.run_command(
            "sim", "create", "--dir", str(stage.sim_dir), "--devices", "2", "--memory", "2MiB"
        )
        assert made.returncode == 0, made.stderr
        # The kubelet of this stage is never started: none of its directories exists.
        await stage.service.start()
        first, second = (each.id for each in await stage.wait_until_clean(SOON))
        async with PluginClient(stage.socket_dir) as client:
            answer = await client.hand_over([first, second], wait_seconds=5, timeout=SOON)
            assert {(each.hand_over_kind, each.grant) for each in answer.devices} == {("unknown", 1)}
            (stage.sim_dir / "devices" / "0" / "memory").write_bytes(b"bytes of an unknown pod")
            again = await client.hand_over([first], wait_seconds=20, timeout=SOON)
            assert [(each.hand_over_kind, each.grant) for each in again.devices] == [("unknown", 2)]
        assert not (stage.sim_dir / "devices" / "0" / "memory").read_bytes().strip(b"\0")
    finally:
        await stage.close()


async def test_hand_over_without_a_kubelet_waits_for_an_unknown_holder(short_tmp: Path) -> None:
    stage = Playground(directory=short_tmp / "stage", devices=1, memory="2MiB", policy=QUICK)
    try:
        made = await stage.run_command(
            "sim", "create", "--dir", str(stage.sim_dir), "--devices", "1", "--memory", "2MiB"
        )
        assert made.returncode == 0, made.stderr
        await stage.service.start()
        (device,) = await stage.wait_until_clean(SOON)
        async with PluginClient(stage.socket_dir) as client:
            await client.hand_over([device.id], wait_seconds=5, timeout=SOON)
            memory = stage.sim_dir / "devices" / "0" / "memory"
            with memory.open("r+b"), pytest.raises(NotReady, match="in-use"):
                await client.hand_over([device.id], wait_seconds=3, timeout=SOON)
            await client.hand_over([device.id], wait_seconds=20, timeout=SOON)
    finally:
        await stage.close()
