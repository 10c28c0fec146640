"""Storms: a driver that reports endless XIDs about one device, while all other devices keep working normally.

Nothing is timed. A storm is a separate process, and pods come and go on the other devices for as long as it lasts.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import plugin
import scrubber
from scrubber.adapters.ledger.chain import ChainReport
from scrubber.adapters.ledger.offline import verify_ledger
from scrubber.api import scrubber_pb2 as pb
from scrubber.emulator.playground import Playground
from tests.chaos.staging import SOON, chaos_stage
from tests.integration.acting import found_by, reader, running, writer

APPLICATION = (31,)
CLASSES = (13, 43, 45, 48, 61, 79, 95, 999)
"""One of each class: application, ignored, context, reset twice, service, reboot, and one that is in no table."""
RATE = 1000
XIDS = 2000
MINUTE = 60.0
MOST_CODES = 32
"""Codes of one device that the service reports within a minute."""

RAISE = """
import json, sys
from pathlib import Path
from scrubber.adapters.sim.xid_storm import raise_xids
directory, device, codes, repeat, rate = sys.argv[1:]
raise_xids(Path(directory), device, json.loads(codes), repeat=int(repeat), rate=float(rate))
"""

ROWS = 40
BOUNDED = """
import sys
if "serve" in sys.orig_argv:
    from scrubber.adapters.ledger.sqlite import SqliteLedger
    SqliteLedger.__init__.__kwdefaults__["max_audit_rows"] = {rows}
"""
"""Makes a service keep fewer audit rows: it has no flag for that, and 100,000 are too many for a test."""


@dataclass
class Weather:
    """Observations during a storm.

    Attributes:
        healths: index of a device → every health that it had.
        found: what each pod found on its device.
        minutes: minutes begun during the storm.
    """

    healths: dict[str, set[str]] = field(default_factory=dict)
    answers: int = 0
    found: list[str] = field(default_factory=list)
    minutes: int = 0


@asynccontextmanager
async def struck(tmp_path: Path, *, hook: str | None = None) -> AsyncIterator[tuple[Playground, str]]:
    """Provide four devices, one of which a tenant has, and the id of that one."""
    async with chaos_stage(tmp_path, memory_floor="30s") as stage:
        if hook is not None:
            (tmp_path / "sitecustomize.py").write_text(hook)
            packages = {str(Path(each.__file__ or "").parents[1]) for each in (scrubber, plugin)}
            stage.service.environment = {"PYTHONPATH": ":".join([str(tmp_path), *sorted(packages)])}
            await stage.service.stop(SOON)
            await stage.service.start()
        await stage.wait_until_clean(SOON)
        pod = await running(stage, writer("victim", "team-v"))
        (device,) = pod.device_ids
        yield stage, device


async def rage(stage: Playground, device: str, codes: Sequence[int], *, xids: int = XIDS) -> Weather:
    """Raise ``xids`` XIDs of ``codes``, and run pods on the other devices until that is done."""
    weather, began = Weather(), time.time()
    arguments = (str(stage.sim_dir), device, str(list(codes)), str(xids), str(RATE))
    storm = await asyncio.create_subprocess_exec(sys.executable, "-c", RAISE, *arguments)
    looking = asyncio.create_task(_look(stage, weather))
    try:
        for number in range(1000):
            pods = [await stage.kubelet.run(reader(f"p{number}-{lane}", f"team-{lane}")) for lane in range(3)]
            weather.found += await asyncio.gather(*(found_by(pod) for pod in pods))
            await asyncio.gather(*(stage.kubelet.delete(pod, grace=0) for pod in pods))
            if storm.returncode is not None:
                break
        assert await storm.wait() == 0
    finally:
        looking.cancel()
        if storm.returncode is None:
            storm.kill()
            await storm.wait()
    weather.minutes = 1 + int((time.time() - began) / MINUTE)
    return weather


async def _look(stage: Playground, weather: Weather) -> None:
    """Query the devices repeatedly, as an operator would; the answers have to keep coming."""
    while True:
        async with asyncio.timeout(SOON):
            devices = (await stage.read_client.devices()).devices
        weather.answers += 1
        for each in devices:
            weather.healths.setdefault(each.index, set()).add(each.health)
        await asyncio.sleep(0.05)


async def rows(stage: Playground, device: str, since: float) -> list[pb.HistoryEntry]:
    return list((await stage.read_client.history(device=device, since=since, limit=1000)).entries)


async def index_of(stage: Playground, device: str) -> str:
    return next(each.index for each in (await stage.read_client.devices()).devices if each.id == device)


def others_were_left_alone(weather: Weather, index: str) -> None:
    assert len(weather.found) >= 3
    assert set(weather.found) == {""}
    assert weather.answers >= 3
    assert {each: seen for each, seen in weather.healths.items() if each != index} == {
        each: {"healthy"} for each in "0123" if each != index
    }


async def and_the_service_lived(stage: Playground, pid: int) -> ChainReport:
    assert stage.service.pid == pid
    assert stage.service.process is not None
    assert stage.service.process.returncode is None
    assert await stage.service.stop(SOON) == 0
    report = verify_ledger(stage.directory / "state")
    assert report.intact, report.message
    return report


async def test_storm_of_application_xids_changes_no_health_and_writes_one_audit_row_a_minute(tmp_path: Path) -> None:
    async with struck(tmp_path) as (stage, device):
        pid, index, began = stage.service.pid, await index_of(stage, device), time.time()
        weather = await rage(stage, device, APPLICATION)
        others_were_left_alone(weather, index)
        assert weather.healths[index] == {"healthy"}
        recorded = await rows(stage, device, began)
        assert {each.event for each in recorded} == {"health.errors-reported"}
        assert 1 <= len(recorded) <= weather.minutes
        await and_the_service_lived(stage, pid)


@pytest.mark.parametrize("seed", [1, 2])
async def test_storm_of_xids_of_all_classes_quarantines_that_device_and_no_other(tmp_path: Path, seed: int) -> None:
    codes = [*CLASSES, *random.Random(seed).sample(range(1, 999), 60)]
    async with struck(tmp_path) as (stage, device):
        pid, index, began = stage.service.pid, await index_of(stage, device), time.time()
        weather = await rage(stage, device, codes)
        others_were_left_alone(weather, index)
        assert "quarantined" in weather.healths[index]
        recorded = await rows(stage, device, began)
        signals = Counter(each.fields_json for each in recorded if each.event == "health.errors-reported")
        assert 1 <= signals.total() <= MOST_CODES * weather.minutes
        assert len(recorded) <= len(codes) * weather.minutes
        await and_the_service_lived(stage, pid)


async def test_ledger_stays_within_its_bound_during_a_storm_and_keeps_every_device_state(tmp_path: Path) -> None:
    async with struck(tmp_path, hook=BOUNDED.format(rows=ROWS)) as (stage, device):
        pid, index = stage.service.pid, await index_of(stage, device)
        weather = await rage(stage, device, CLASSES)
        others_were_left_alone(weather, index)
        out = {each.index: each.health for each in (await stage.read_client.devices()).devices}
        assert out.pop(index) == "quarantined"
        assert set(out.values()) == {"healthy"}
        audit_log = await and_the_service_lived(stage, pid)
        assert audit_log.rows <= ROWS
        assert audit_log.pruned.sequence > 0
