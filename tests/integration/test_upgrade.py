"""An upgrade of a node and a rollback, daemon by daemon: grants and quarantines stay, and pods only wait for a scrub.

The daemons of two versions, with different ledgers and APIs, run on one node as in a rolling upgrade.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from scrubber import __version__
from scrubber.adapters.ledger.offline import verify_ledger
from scrubber.adapters.ledger.schema import CURRENT
from scrubber.emulator import playground
from scrubber.emulator.playground import LONGEST_WAIT, RESOURCE, Daemon, Playground
from scrubber.emulator.pods import EmulatedPod, PodPhase
from tests import forkserver
from tests.integration.acting import QUICK, SOON, found_by, history, reader, refusal, running, writer
from tests.integration.log_lines import lines
from tests.other_version import NEXT, OtherVersion, build, other_versions

TREE = "PYTHONPATH"


async def start(module: str, *arguments: str, **options: Any) -> asyncio.subprocess.Process:
    """Start a module of this tree by forking, and one of another tree as a program of its own."""
    tree = options["env"].get(TREE)
    if tree is None:
        return await forkserver.start(module, *arguments, **options)
    # The directory of the process comes first on the path of python -m.
    return await asyncio.create_subprocess_exec(sys.executable, "-m", module, *arguments, cwd=tree, **options)


@pytest.fixture(autouse=True)
def trees(forked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TREE, raising=False)
    monkeypatch.setattr(playground, "start_module", start)


def become(daemon: Daemon, version: OtherVersion | None) -> None:
    """Have the daemon run another version from its next start on; None: this one."""
    daemon.environment = {} if version is None else {TREE: str(version.tree)}


async def replace_service(stage: Playground, version: OtherVersion | None) -> None:
    """Replace the service as a rolling update does; meanwhile a pod is scheduled, which waits for it, and for a scrub."""
    earlier = {each.id: each for each in (await stage.read_client.devices()).devices}
    await stage.service.stop()
    become(stage.service, version)
    waiting = await stage.kubelet.run(reader(f"waits-{stage.kubelet.pod_resources_requests}", "team-b"))
    assert "does not respond" in await refusal(waiting)
    await stage.service.start()
    await waiting.wait(PodPhase.SUCCEEDED, LONGEST_WAIT)  # the interpreter of another tree has to import everything
    assert await found_by(waiting) == ""
    await until_allocatable(stage)
    info = await stage.read_client.service_info()
    assert info.version == (__version__ if version is None else version.version)
    later = {each.id: each for each in (await stage.read_client.devices()).devices}
    for id_, device in earlier.items():
        if device.health == "quarantined":
            assert (later[id_].health, later[id_].cause) == (device.health, device.cause)
        elif device.pod == "stays":
            assert list(later[id_].open_grants) == list(device.open_grants)
    assert await scrubs_of_last_start(stage, *waiting.device_ids) == 1


async def scrubs_of_last_start(stage: Playground, device: str) -> int:
    """Return how many slow paths the device had between the last start of the service and its next grant.

    Not counted is a repetition because this machine stalled, so that the device was not watched.
    """
    began = (await history(stage, "service.started"))[-1]["sequence"]
    granted = min(
        row["sequence"]
        for row in await history(stage, "handover.granted")
        if row["device"] == device and row["sequence"] > began
    )
    rows = [row for row in await history(stage, "scrub.finished") if row["device"] == device]
    since = [row for row in rows if began < row["sequence"] < granted]
    return sum(row["path"] == "slow" and row["trigger"] != "certificate-voided" for row in since)


async def replace_plugin(stage: Playground, version: OtherVersion | None) -> None:
    await stage.plugin.stop()
    become(stage.plugin, version)
    await stage.plugin.start()
    expected = __version__ if version is None else version.version
    async with asyncio.timeout(LONGEST_WAIT):
        while list((await stage.read_client.service_info()).plugin_versions) != [expected]:
            pass
    await until_allocatable(stage)


async def until_allocatable(stage: Playground) -> None:
    """Wait until the kubelet has all devices except the one that an operator quarantined."""
    await stage.kubelet.wait_until(lambda kubelet: kubelet.allocatable(RESOURCE) == 3, SOON)


async def still_served(stage: Playground, pod: EmulatedPod, name: str) -> None:
    """Check that ``pod`` was not disturbed, and that a new one gets a clean device."""
    assert pod.status.phase is PodPhase.RUNNING
    assert pod.status.containers["main"].restarts == 0
    await stage.kubelet.delete(await running(stage, writer(f"{name}-writes", "team-a")))
    assert await found_by(await stage.kubelet.run(reader(f"{name}-reads", "team-b"))) == ""


@pytest.mark.parametrize("which", other_versions())
async def test_rolling_upgrade_and_rollback_lose_no_grant_and_no_quarantine(which: str, short_tmp: Path) -> None:
    other = build(which, short_tmp / "tree")
    old, new = (None, other) if other.is_newer else (other, None)
    stage = Playground(memory="2MiB", policy=QUICK)
    become(stage.service, old)
    become(stage.plugin, old)
    async with stage:
        await stage.start_daemons()
        await stage.wait_until_clean(SOON)
        stays = await running(stage, writer("stays", "team-a"))
        out = next(each.id for each in (await stage.read_client.devices()).devices if each.id not in stays.device_ids)
        ordered = await stage.run_command("quarantine", out, "--reason", "spare part ordered")
        assert ordered.returncode == 0, ordered.stderr

        await replace_service(stage, new)
        await still_served(stage, stays, "service-upgraded")
        await replace_plugin(stage, new)
        await still_served(stage, stays, "plugin-upgraded")

        await replace_plugin(stage, old)
        await still_served(stage, stays, "plugin-back")
        await replace_service(stage, old)
        await still_served(stage, stays, "service-back")

        converted = await history(stage, "ledger.converted")
        if which == NEXT:
            schema, newer = CURRENT.number, CURRENT.number + 1
            assert [(row["from_schema"], row["to_schema"]) for row in converted] == [(schema, newer), (newer, schema)]
            assert [(row["omitted"], row["quarantined"]) for row in converted] == [(0, None), (0, None)]
        differing = [line for line in lines(stage.service) if line["event"] == "plugin.version-differs"]
        assert differing
        assert [line for line in lines(stage.plugin) if line["event"] == "plugin.version-refused"] == []
        assert (await stage.service.stop(), await stage.plugin.stop()) == (0, 0)
        assert verify_ledger(stage.directory / "state").intact
