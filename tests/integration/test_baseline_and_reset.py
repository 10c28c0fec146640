"""What a device should be, a reset that a person orders, and the key that signs: with the shipped daemons.

Nothing here waits for a time to pass. The service reads its inventory again once a minute; a test does not wait for that,
and has another device come and go, upon which it is read at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from scrubber.adapters.ledger.offline import verify as verify_ledger
from scrubber.adapters.signing.ed25519 import verify
from scrubber.adapters.sim import control
from scrubber.adapters.sim.shape import merge, split
from scrubber.api import scrubber_pb2 as pb
from scrubber.api.client import AdminClient
from scrubber.domain.errors import Held, InvalidRequest, Refused
from scrubber.emulator.stage import RESOURCE, Stage
from tests.integration import log_lines
from tests.integration.acting import SOON, found_by, history, reader, running, writer

POLICY = """\
name: firmware
limits:
  question: 3s
  memory-floor: 20s
health:
  calm: 200ms
recovery:
  backoff-initial: 1h
  backoff-max: 1h
  probation-scrubs: 1
  probation-interval: 100ms
diagnostics:
  recovery: none
"""
"""A recovery by itself comes in an hour: what happens before is a person's doing."""
STRICT = POLICY.replace("  calm: 200ms\n", "  calm: 200ms\n  sustained:\n    baseline-changed: 200ms\n")
ACTOR = f"uid:{os.geteuid()}"


@asynccontextmanager
async def a_stage(tmp_path: Path, policy: str = POLICY, *, devices: int = 1) -> AsyncIterator[Stage]:
    """A stage whose devices are all clean, and whose service shows metrics on a port of the system's choice."""
    path = tmp_path / "policy.yaml"
    path.write_text(policy)
    async with Stage(devices=devices, memory="2MiB", policy=str(path)) as stage:
        arguments = list(stage.service.arguments)
        arguments[arguments.index("--metrics-address") + 1] = "127.0.0.1:0"
        stage.service.arguments = arguments
        await stage.start_daemons(SOON)
        await stage.all_clean(SOON)
        yield stage


async def first_is(stage: Stage, wanted: Callable[[pb.Device], bool]) -> pb.Device:
    """Device 0, once ``wanted`` holds of it."""
    devices = await stage.devices_are(lambda devices: any(each.index == "0" and wanted(each) for each in devices), SOON)
    return next(each for each in devices if each.index == "0")


async def health_is(stage: Stage, health: str) -> pb.Device:
    return await first_is(stage, lambda device: device.health == health)


async def written(stage: Stage, firmware: str) -> None:
    """Somebody writes the firmware of device 0; device 1 is cut and put together again, so that the inventory is read."""
    done = await stage.command("sim", "fault", "--dir", str(stage.sim), "--device", "0", "--firmware", firmware)
    assert done.status == 0, done.err
    split(stage.sim, "1", 2)
    await first_is(stage, lambda device: device.traits["vbios"] == firmware)
    merge(stage.sim, "1")
    await stage.devices_are(lambda devices: [each.index for each in devices] == ["0", "1"], SOON)


async def read_by_another_tenant(stage: Stage) -> str:
    """What a pod of another tenant finds on the device, once the kubelet may give it."""
    await stage.kubelet.changed(lambda kubelet: kubelet.allocatable(RESOURCE) == 1, SOON)
    return await found_by(await stage.kubelet.run(reader("b", "team-b")))


async def accepted(stage: Stage, reason: str = "new VBIOS") -> pb.Device:
    async with AdminClient(stage.sockets) as admin:
        return (await admin.accept_baseline("0", reason)).device


async def reset(stage: Stage, reason: str = "hangs, ticket 4711") -> pb.ScrubResult:
    """How the scrub with the reset ended."""
    async with AdminClient(stage.sockets) as admin, asyncio.timeout(SOON):
        *_, last = [each async for each in admin.reset("0", reason)]
    return last.result


def logged(stage: Stage, name: str) -> list[dict[str, Any]]:
    """The service's log lines of that name."""
    return [line for line in log_lines.lines(stage.service) if line["event"] == name]


async def metrics(stage: Stage) -> dict[str, list[tuple[dict[str, str], float]]]:
    """What the service shows Prometheus in its present life: by name, each series with its value."""
    address = logged(stage, "metrics.serving")[-1]["address"]

    def scrape() -> str:
        with urlopen(f"http://{address}/metrics", timeout=SOON) as page:
            return str(page.read().decode())

    page = await asyncio.to_thread(scrape)
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


# -- the baseline ------------------------------------------------------------------------------------------------------


async def test_firmware_that_somebody_wrote_is_told_and_a_person_accepts_it(tmp_path: Path) -> None:
    async with a_stage(tmp_path, devices=2) as stage:
        usual = {row["vbios"] for row in await history(stage, "baseline.taken")}.pop()
        await written(stage, "evil-2")
        suspect = await health_is(stage, "suspect")
        assert (suspect.cause.code, suspect.offered) == ("baseline-changed", True)
        facts = {each.name: (each.expected, each.found) for each in suspect.baseline.facts}
        assert facts["vbios"] == (usual, "evil-2")
        async with AdminClient(stage.sockets) as admin:
            *_, last = [each async for each in admin.scrub("0", "slow")]
        assert any("warns of baseline-changed" in line for line in last.result.certificate.covered)
        told = await accepted(stage, "new VBIOS, ticket 4711")
        assert (told.baseline.actor, told.baseline.reason) == (ACTOR, "new VBIOS, ticket 4711")
        await health_is(stage, "healthy")
        (row,) = await history(stage, "baseline.accepted")
        assert (row["was_vbios"], row["is_vbios"], row["reason"]) == (usual, "evil-2", "new VBIOS, ticket 4711")
        (line,) = logged(stage, "baseline.accepted")
        assert (line["level"], line["actor"], line["device"]) == ("warning", ACTOR, told.id)


async def test_what_should_be_outlives_kill_9_and_what_was_written_meanwhile_is_found(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        before = (await stage.read.devices()).devices[0].baseline
        await stage.service.kill()
        control.fault(stage.sim, "0", firmware="evil-2")
        await stage.service.start()
        suspect = await health_is(stage, "suspect")
        assert suspect.baseline.at == before.at
        assert [each.expected for each in suspect.baseline.facts] == [each.expected for each in before.facts]
        assert len(await history(stage, "baseline.taken")) == 1


async def test_where_the_policy_is_strict_it_goes_out_and_both_words_of_a_person_bring_it_back(tmp_path: Path) -> None:
    async with a_stage(tmp_path, STRICT, devices=2) as stage:
        await written(stage, "evil-2")
        out = await health_is(stage, "quarantined")
        assert (out.cause.code, out.cause.way_back, out.offered) == ("baseline-changed", "person", False)
        await stage.service.kill()
        await stage.service.start()
        await health_is(stage, "quarantined")
        async with AdminClient(stage.sockets) as admin:
            await admin.unquarantine("0", "it looks all right")
        await first_is(stage, lambda device: len(device.strikes) == 2)  # it went out once more
        await accepted(stage)
        async with AdminClient(stage.sockets) as admin:
            await admin.unquarantine("0", "and so it is")
        assert (await health_is(stage, "healthy")).offered


async def test_a_narrow_slot_is_normal_once_a_person_says_so_and_a_narrower_one_is_not(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        control.fault(stage.sim, "0", conditions={"pcie-width": "x8 of x16"})
        await health_is(stage, "suspect")
        told = await accepted(stage, "that slot has eight lanes")
        assert [(each.name, each.expected) for each in told.baseline.conditions] == [("pcie-width", "x8 of x16")]
        await health_is(stage, "healthy")
        control.fault(stage.sim, "0", conditions={"pcie-width": "x4 of x16"})
        await health_is(stage, "suspect")


async def test_nobody_accepts_without_a_reason_or_what_there_is_not(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage, AdminClient(stage.sockets) as admin:
        for device, reason in (("0", " "), ("7", "why")):
            with pytest.raises(InvalidRequest):
                await admin.accept_baseline(device, reason)
        assert await history(stage, "baseline.accepted") == []


# -- a reset -----------------------------------------------------------------------------------------------------------


async def test_a_person_resets_an_idle_device_and_everybody_can_see_who_and_why(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        result = await reset(stage)
        assert (result.scrub.outcome, result.scrub.occasion, result.scrub.actor) == ("passed", "on-demand", ACTOR)
        assert "reset: done" in result.certificate.covered
        (entry,) = [each for each in (await stage.read.history(limit=1000)).entries if each.name == "operator.reset"]
        assert (entry.actor, entry.scrub_id, entry.device) == (ACTOR, result.scrub.id, result.device.id)
        assert json.loads(entry.fields_json) == {"reason": "hangs, ticket 4711"}
        (line,) = logged(stage, "operator.reset")
        assert (line["level"], line["scrub_id"], line["reason"]) == ("warning", result.scrub.id, "hangs, ticket 4711")
        assert await read_by_another_tenant(stage) == ""


async def test_a_pod_that_has_the_device_keeps_it_and_the_person_is_told_whose_it_is(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        pod = await running(stage, writer("train", "team-a"))
        with pytest.raises(Held, match="in use by team-a/train"):
            await reset(stage)
        assert stage.processes_of(pod)
        assert await history(stage, "operator.reset") == []
        await stage.kubelet.delete(pod, grace=0)
        await first_is(stage, lambda device: device.state == "clean")
        assert (await reset(stage)).scrub.outcome == "passed"


async def test_a_device_that_would_have_waited_an_hour_comes_back_by_a_persons_reset(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        control.fault(stage.sim, "0", xid=95)
        out = await health_is(stage, "quarantined")
        assert out.must_reset
        result = await reset(stage)
        assert (result.device.health, result.device.must_reset) == ("probation", False)
        back = await health_is(stage, "healthy")
        assert [(each.reset, each.ordered) for each in back.attempts] == [(True, True)]


async def test_a_reset_that_fails_takes_the_device_out_and_the_person_sees_why(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        control.fault(stage.sim, "0", reset="fail")
        result = await reset(stage)
        assert (result.scrub.outcome, result.device.health, result.device.cause.code) == (
            *("failed", "quarantined", "reset-failed"),
        )


async def test_a_policy_that_never_resets_is_not_overruled(tmp_path: Path) -> None:
    async with a_stage(tmp_path, POLICY + "reset: never\n") as stage:
        with pytest.raises(Refused, match="never"):
            await reset(stage)
        assert {each.health for each in (await stage.read.devices()).devices} == {"healthy"}


async def test_kill_9_in_the_middle_leaves_a_device_that_nobody_gets_before_it_is_clean(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        control.fault(stage.sim, "0", slow_clear=600.0)
        async with AdminClient(stage.sockets) as admin:
            updates = admin.reset("0", "hangs")
            await anext(updates)
            await stage.service.kill()
            await updates.aclose()
        control.clear(stage.sim, "0")
        await stage.service.start()
        assert (await first_is(stage, lambda device: True)).state in ("dirty", "scrubbing", "clean")
        assert await read_by_another_tenant(stage) == ""
        assert [row["reason"] for row in await history(stage, "operator.reset")] == ["hangs"]
        assert await stage.service.stop(SOON) == 0
        assert verify_ledger(stage.directory / "state").intact


# -- the key and the audit's head --------------------------------------------------------------------------------------


async def test_every_certificate_verifies_with_the_key_that_the_service_names(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        assert await read_by_another_tenant(stage) == ""
        await first_is(stage, lambda device: device.state == "clean")
        info = await stage.read.info()
        entries = (await stage.read.history(limit=1000)).entries
        names = {each.certificate.id for each in entries if each.HasField("certificate")}
        told = [await stage.read.certificate(name) for name in sorted(names)]
        assert {each.certificate.path for each in told} == {"slow", "fast"}
        assert {"used", "unused"} <= {each.standing for each in told}
        for each in told:
            assert each.certificate.key_id == info.key_id
            assert verify(info.public_key, each.payload, each.certificate.signature)
        assert (await metrics(stage))["scrubber_signing_key_info"] == [({"key_id": info.key_id}, 1.0)]


async def test_the_key_is_the_nodes_own_and_another_one_shows_everywhere(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        key = stage.directory / "state" / "signing.key"
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        first = await stage.read.info()
        old = (await stage.read.devices()).devices[0].certificate
        assert [row["key_id"] for row in await history(stage, "key.created")] == [first.key_id]

        assert await stage.service.stop(SOON) == 0
        await stage.service.start()
        await stage.all_clean(SOON)
        assert (await stage.read.info()).key_id == first.key_id
        assert len(await history(stage, "key.created")) == 1

        assert await stage.service.stop(SOON) == 0
        key.unlink()
        await stage.service.start()
        await stage.all_clean(SOON)
        second = await stage.read.info()
        assert second.key_id != first.key_id
        assert [row["key_id"] for row in await history(stage, "key.created")] == [first.key_id, second.key_id]
        starts = [row["key_id"] for row in await history(stage, "service.started")]
        assert starts == [first.key_id, first.key_id, second.key_id]
        assert [line["key_id"] for line in logged(stage, "key.loaded")] == starts
        assert {line["level"] for line in logged(stage, "key.created")} == {"warning"}
        before = await stage.read.certificate(old.id)
        assert verify(first.public_key, before.payload, before.certificate.signature)
        assert not verify(second.public_key, before.payload, before.certificate.signature)
        assert before.standing == "void"
        now = (await stage.read.devices()).devices[0].certificate
        assert now.key_id == second.key_id
        assert (await metrics(stage))["scrubber_signing_key_info"] == [({"key_id": second.key_id}, 1.0)]


@pytest.mark.parametrize("spoilt", ["others may read it", "it is no key"])
async def test_a_key_that_is_not_the_nodes_alone_keeps_the_service_from_starting_and_says_what_to_do(
    tmp_path: Path, spoilt: str
) -> None:
    async with a_stage(tmp_path) as stage:
        assert await stage.service.stop(SOON) == 0
        key = stage.directory / "state" / "signing.key"
        if spoilt == "others may read it":
            key.chmod(0o644)
        else:
            key.write_text("nothing of the kind")
        await stage.service.start()
        assert stage.service.process is not None
        async with asyncio.timeout(SOON):
            assert await stage.service.process.wait() != 0
        said = stage.service.log.read_text().splitlines()[-1]
        assert str(key) in said
        assert "remove it" in said


async def test_the_head_of_the_audit_is_the_same_in_the_metric_the_log_the_service_and_the_ledger(
    tmp_path: Path,
) -> None:
    async with a_stage(tmp_path) as stage:
        await reset(stage)
        async with asyncio.timeout(SOON):
            while True:
                head = (await stage.read.info()).audit_head
                shown = await metrics(stage)
                sequence = int(shown["scrubber_audit_head_sequence"][0][1])
                if sequence == head.sequence == (await stage.read.info()).audit_head.sequence:
                    break
                await asyncio.sleep(0.05)
        parts = {labels["part"]: int(value) for labels, value in shown["scrubber_audit_head_hash"]}
        assert "".join(f"{parts[part]:08x}" for part in sorted(parts)) == head.hash
        told = [*logged(stage, "audit.head"), *logged(stage, "service.ready")]
        pages = [page async for page in stage.read.audit()]  # after the log: each row that it names is in there
        rows = {row.sequence: row.hash for page in pages for row in page.rows}
        assert rows[head.sequence] == head.hash
        for line in told:
            number, _, digest = str(line.get("head") or line["audit_head"]).partition(":")
            assert rows[int(number)] == digest
        assert [line for line in told if line["event"] == "audit.head"]
        assert await stage.service.stop(SOON) == 0
        assert verify_ledger(stage.directory / "state").intact
