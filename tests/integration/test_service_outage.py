"""The node while the scrub service is away: at first no change, then no healthy devices; then it recovers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import plugin
import scrubber
from scrubber.emulator.playground import RESOURCE, Playground
from scrubber.emulator.pods import ContainerState
from tests.integration import log_lines
from tests.integration.acting import QUICK, SOON, Capacity, found_by, reader, refusal, running, staged, writer

PATIENT = """
import sys
if "plugin" in sys.orig_argv:
    from plugin.service_client import WatchTimes
    assert WatchTimes().grace == 10.0
    WatchTimes.__init__.__defaults__ = (300.0, *WatchTimes.__init__.__defaults__[1:])
"""
"""Gives the plugin a longer grace period: a busy machine may take more than ten seconds to restart the service."""


async def test_service_restart_changes_no_health_and_starts_wait_for_the_service(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(PATIENT)
    packages = {str(Path(each.__file__ or "").parents[1]) for each in (scrubber, plugin)}
    async with Playground(memory="2MiB", policy=QUICK) as stage:
        stage.plugin.environment = {"PYTHONPATH": ":".join([str(tmp_path), *sorted(packages)])}
        await stage.start_daemons(SOON)
        await stage.wait_until_clean(SOON)
        pod = await running(stage, writer("a", "team-a"))
        seen = Capacity(stage)
        watching = asyncio.create_task(seen.watch())
        try:
            await stage.service.kill()
            waiting = await stage.kubelet.run(reader("b", "team-b"))
            assert "does not respond" in await refusal(waiting), "refused only after two seconds"
            await stage.service.start()
            assert await found_by(waiting) == ""
            assert set(seen.allocatable) == {4}
        finally:
            watching.cancel()
        mine = next(each for each in (await stage.read_client.devices()).devices if each.id in pod.device_ids)
        assert (mine.state, mine.pod) == ("in-use", "a")
        assert pod.status.containers["main"].state is ContainerState.RUNNING
        log_lines.check(stage)


async def test_service_outage_makes_all_devices_unallocatable_until_the_service_is_back() -> None:
    async with staged(devices=2) as stage:
        pod = await running(stage, writer("a", "team-a"))
        await stage.service.kill()
        await stage.kubelet.wait_until(lambda kubelet: kubelet.allocatable(RESOURCE) == 0, SOON)
        assert stage.kubelet.capacity(RESOURCE) == 2
        assert pod.status.containers["main"].state is ContainerState.RUNNING
        await stage.service.start()
        await stage.kubelet.wait_until(lambda kubelet: kubelet.allocatable(RESOURCE) == 2, SOON)
        assert await found_by(await stage.kubelet.run(reader("b", "team-b"))) == ""


async def test_certificate_does_not_survive_a_sigkill_of_the_service() -> None:
    async with staged(devices=1) as stage:
        (before,) = (await stage.read_client.devices()).devices
        await stage.service.kill()
        await stage.service.start()
        (after,) = await stage.wait_for_devices(
            lambda devices: any(
                each.state == "clean" and each.certificate.id != before.certificate.id for each in devices
            ),
            SOON,
        )
        assert after.certificate.sequence > before.certificate.sequence
