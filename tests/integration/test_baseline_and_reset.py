"""The expected state of a device, resets by an operator, and the signing key: with the shipped daemons.

Nothing here waits for a time to pass. The service reads its inventory again once a minute; a test does not wait for that,
and has another device come and go, upon which it is read at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from scrubber.adapters.ledger.offline import verify_ledger
from scrubber.adapters.signing.ed25519 import verify_signature
from scrubber.adapters.sim import control
from scrubber.adapters.sim.shape import merge, split
from scrubber.api import scrubber_pb2 as pb
from scrubber.api.client import AdminClient
from scrubber.domain.errors import DeviceBusy, InvalidRequest, Refused
from scrubber.emulator.playground import RESOURCE, Playground
from tests.integration import log_lines
from tests.integration.acting import SOON, found_by, history, reader, running, writer

POLICY = """\
name: firmware
limits:
  driverCall: 3s
  clearTimeoutBase: 20s
health:
  quietPeriod: 200ms
recovery:
  initialBackoff: 1h
  maxBackoff: 1h
  probationScrubs: 1
  probationInterval: 100ms
diagnostics:
  recovery: none
"""
"""Automatic recovery starts after an hour: anything earlier is the work of an operator."""
STRICT = POLICY.replace(
    "  quietPeriod: 200ms\n", "  quietPeriod: 200ms\n  quarantineAfter:\n    baseline-mismatch: 200ms\n"
)
ACTOR = f"uid:{os.geteuid()}"


@asynccontextmanager
async def a_stage(tmp_path: Path, policy: str = POLICY, *, devices: int = 1) -> AsyncIterator[Playground]:
    """A stage whose devices are all clean, and whose service shows metrics on a port of the system's choice."""
    path = tmp_path / "policy.yaml"
    path.write_text(policy)
    async with Playground(devices=devices, memory="2MiB", policy=str(path)) as stage:
        arguments = list(stage.service.arguments)
        arguments[arguments.index("--metrics-address") + 1] = "127.0.0.1:0"
        stage.service.arguments = arguments
        await stage.start_daemons(SOON)
        await stage.wait_until_clean(SOON)
        yield stage


async def first_is(stage: Playground, condition: Callable[[pb.Device], bool]) -> pb.Device:
    """Device 0, once ``condition`` holds of it."""
    devices = await stage.wait_for_devices(
        lambda devices: any(each.index == "0" and condition(each) for each in devices), SOON
    )
    return next(each for each in devices if each.index == "0")


async def health_is(stage: Playground, health: str) -> pb.Device:
    return await first_is(stage, lambda device: device.health == health)


async def written(stage: Playground, firmware: str) -> None:
    """Change the firmware of device 0; split device 1 and merge it again, so that the inventory is read."""
    done = await stage.run_command("sim", "fault", "--dir", str(stage.sim_dir), "--device", "0", "--firmware", firmware)
    assert done.returncode == 0, done.stderr
    split(stage.sim_dir, "1", 2)
    await first_is(stage, lambda device: device.attributes["vbios"] == firmware)
    merge(stage.sim_dir, "1")
    await stage.wait_for_devices(lambda devices: [each.index for each in devices] == ["0", "1"], SOON)


async def read_by_another_tenant(stage: Playground) -> str:
    """What a pod of another tenant finds on the device, once the kubelet may give it."""
    await stage.kubelet.wait_until(lambda kubelet: kubelet.allocatable(RESOURCE) == 1, SOON)
    return await found_by(await stage.kubelet.run(reader("b", "team-b")))


async def accepted(stage: Playground, reason: str = "new VBIOS") -> pb.Device:
    async with AdminClient(stage.socket_dir) as admin:
        return (await admin.accept_baseline("0", reason)).device


async def reset(stage: Playground, reason: str = "hangs, ticket 4711") -> pb.ScrubResult:
    """How the scrub with the reset ended."""
    async with AdminClient(stage.socket_dir) as admin, asyncio.timeout(SOON):
        *_, last = [each async for each in admin.reset("0", reason)]
    return last.result


def logged(stage: Playground, name: str) -> list[dict[str, Any]]:
    """The service's log lines of that name."""
    return [line for line in log_lines.lines(stage.service) if line["event"] == name]


async def metrics(stage: Playground) -> dict[str, list[tuple[dict[str, str], float]]]:
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


async def test_changed_firmware_is_reported_and_can_be_accepted_by_an_operator(tmp_path: Path) -> None:
    async with a_stage(tmp_path, devices=2) as stage:
        usual = {row["vbios"] for row in await history(stage, "baseline.recorded")}.pop()
        await written(stage, "evil-2")
        suspect = await health_is(stage, "suspect")
        assert (suspect.cause.code, suspect.advertised) == ("baseline-mismatch", True)
        facts = {each.name: (each.expected, each.actual) for each in suspect.baseline.facts}
        assert facts["vbios"] == (usual, "evil-2")
        async with AdminClient(stage.socket_dir) as admin:
            *_, last = [each async for each in admin.scrub("0", "slow")]
        assert any("warnings: baseline-mismatch" in line for line in last.result.certificate.covered)
        accepted_baseline = await accepted(stage, "new VBIOS, ticket 4711")
        assert (accepted_baseline.baseline.actor, accepted_baseline.baseline.reason) == (
            ACTOR,
            "new VBIOS, ticket 4711",
        )
        await health_is(stage, "healthy")
        (row,) = await history(stage, "baseline.accepted")
        assert (row["previous_vbios"], row["current_vbios"], row["reason"]) == (
            usual,
            "evil-2",
            "new VBIOS, ticket 4711",
        )
        (line,) = logged(stage, "baseline.accepted")
        assert (line["level"], line["actor"], line["device"]) == ("warning", ACTOR, accepted_baseline.id)


async def test_baseline_survives_sigkill_and_firmware_changed_meanwhile_is_detected(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        before = (await stage.read_client.devices()).devices[0].baseline
        await stage.service.kill()
        control.add_faults(stage.sim_dir, "0", firmware="evil-2")
        await stage.service.start()
        suspect = await health_is(stage, "suspect")
        assert suspect.baseline.recorded_at == before.recorded_at
        assert [each.expected for each in suspect.baseline.facts] == [each.expected for each in before.facts]
        assert len(await history(stage, "baseline.recorded")) == 1


async def test_strict_policy_quarantines_changed_firmware_until_acceptance_and_release_by_an_operator(
    tmp_path: Path,
) -> None:
    async with a_stage(tmp_path, STRICT, devices=2) as stage:
        await written(stage, "evil-2")
        out = await health_is(stage, "quarantined")
        assert (out.cause.code, out.cause.recovery_method, out.advertised) == ("baseline-mismatch", "operator", False)
        await stage.service.kill()
        await stage.service.start()
        await health_is(stage, "quarantined")
        async with AdminClient(stage.socket_dir) as admin:
            await admin.unquarantine("0", "it looks all right")
        await first_is(stage, lambda device: len(device.quarantines) == 2)  # it went out once more
        await accepted(stage)
        async with AdminClient(stage.socket_dir) as admin:
            await admin.unquarantine("0", "and so it is")
        assert (await health_is(stage, "healthy")).advertised


async def test_accepted_pcie_width_is_normal_and_a_narrower_one_makes_the_device_suspect(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        control.add_faults(stage.sim_dir, "0", conditions={"pcie-width": "x8 of x16"})
        await health_is(stage, "suspect")
        accepted_baseline = await accepted(stage, "that slot has eight lanes")
        assert [(each.name, each.expected) for each in accepted_baseline.baseline.accepted_conditions] == [
            ("pcie-width", "x8 of x16")
        ]
        await health_is(stage, "healthy")
        control.add_faults(stage.sim_dir, "0", conditions={"pcie-width": "x4 of x16"})
        await health_is(stage, "suspect")


async def test_baseline_acceptance_without_a_reason_or_a_known_device_is_refused(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage, AdminClient(stage.socket_dir) as admin:
        for device, reason in (("0", " "), ("7", "why")):
            with pytest.raises(InvalidRequest):
                await admin.accept_baseline(device, reason)
        assert await history(stage, "baseline.accepted") == []


# -- a reset -----------------------------------------------------------------------------------------------------------


async def test_operator_reset_of_an_idle_device_is_audited_and_logged_with_actor_and_reason(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        result = await reset(stage)
        assert (result.scrub.outcome, result.scrub.trigger, result.scrub.actor) == ("passed", "on-demand", ACTOR)
        assert "reset: done" in result.certificate.covered
        (entry,) = [
            each for each in (await stage.read_client.history(limit=1000)).entries if each.event == "operator.reset"
        ]
        assert (entry.actor, entry.scrub_id, entry.device_id) == (ACTOR, result.scrub.id, result.device.id)
        assert json.loads(entry.fields_json) == {"reason": "hangs, ticket 4711"}
        (line,) = logged(stage, "operator.reset")
        assert (line["level"], line["scrub_id"], line["reason"]) == ("warning", result.scrub.id, "hangs, ticket 4711")
        assert await read_by_another_tenant(stage) == ""


async def test_reset_is_reported_to_the_journal_only_if_that_was_requested(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as journal:
            journal.bind(str(stage.directory / "journal"))
            assert (await reset(stage)).scrub.outcome == "passed"
            with pytest.raises(BlockingIOError):
                journal.recv(4096)
            stage.service.environment = {"SCRUBBER_NVSENTINEL_RESET_JOURNAL": str(stage.directory / "journal")}
            assert await stage.service.stop(SOON) == 0
            await stage.service.start()
            await stage.wait_until_clean(SOON)
            result = await reset(stage)
            assert f"MESSAGE=GPU reset executed: {result.device.id}, success: true".encode() in (
                await asyncio.wait_for(asyncio.get_running_loop().sock_recv(journal, 4096), SOON)
            )


async def test_operator_reset_of_a_device_in_use_is_refused_and_names_the_pod(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        pod = await running(stage, writer("train", "team-a"))
        with pytest.raises(DeviceBusy, match="in use by team-a/train"):
            await reset(stage)
        assert stage.pod_processes(pod)
        assert await history(stage, "operator.reset") == []
        await stage.kubelet.delete(pod, grace=0)
        await first_is(stage, lambda device: device.state == "clean")
        assert (await reset(stage)).scrub.outcome == "passed"


async def test_operator_reset_returns_a_device_that_would_have_waited_an_hour(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        control.add_faults(stage.sim_dir, "0", xid=95)
        out = await health_is(stage, "quarantined")
        assert out.reset_pending
        result = await reset(stage)
        assert (result.device.health, result.device.reset_pending) == ("probation", False)
        back = await health_is(stage, "healthy")
        assert [(each.reset, each.by_operator) for each in back.recovery_attempts] == [(True, True)]


async def test_failed_operator_reset_quarantines_the_device_and_returns_the_cause(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        control.add_faults(stage.sim_dir, "0", reset="fail")
        result = await reset(stage)
        assert (result.scrub.outcome, result.device.health, result.device.cause.code) == (
            *("failed", "quarantined", "reset-failed"),
        )


async def test_operator_reset_is_refused_by_a_policy_without_resets(tmp_path: Path) -> None:
    async with a_stage(tmp_path, POLICY + "reset: never\n") as stage:
        with pytest.raises(Refused, match="never"):
            await reset(stage)
        assert {each.health for each in (await stage.read_client.devices()).devices} == {"healthy"}


async def test_sigkill_during_an_operator_reset_leaves_a_device_that_is_clean_before_its_next_grant(
    tmp_path: Path,
) -> None:
    async with a_stage(tmp_path) as stage:
        control.add_faults(stage.sim_dir, "0", slow_clear=600.0)
        async with AdminClient(stage.socket_dir) as admin:
            updates = admin.reset("0", "hangs")
            await anext(updates)
            await stage.service.kill()
            await updates.aclose()
        control.clear_faults(stage.sim_dir, "0")
        await stage.service.start()
        assert (await first_is(stage, lambda device: True)).state in ("dirty", "scrubbing", "clean")
        assert await read_by_another_tenant(stage) == ""
        assert [row["reason"] for row in await history(stage, "operator.reset")] == ["hangs"]
        assert await stage.service.stop(SOON) == 0
        assert verify_ledger(stage.directory / "state").intact


# -- the key and the audit's head --------------------------------------------------------------------------------------


async def test_every_certificate_verifies_with_the_key_that_the_service_reports(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        assert await read_by_another_tenant(stage) == ""
        await first_is(stage, lambda device: device.state == "clean")
        info = await stage.read_client.service_info()
        entries = (await stage.read_client.history(limit=1000)).entries
        names = {each.certificate.id for each in entries if each.HasField("certificate")}
        accepted_baseline = [await stage.read_client.certificate(name) for name in sorted(names)]
        assert {each.certificate.path for each in accepted_baseline} == {"slow", "fast"}
        assert {"consumed", "unused"} <= {each.status for each in accepted_baseline}
        for each in accepted_baseline:
            assert each.certificate.key_id == info.key_id
            assert verify_signature(info.public_key, each.payload, each.certificate.signature)
        assert (await metrics(stage))["scrubber_signing_key_info"] == [({"key_id": info.key_id}, 1.0)]


async def test_replaced_signing_key_is_reported_everywhere_and_verifies_new_certificates_only(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        key = stage.directory / "state" / "signing.key"
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        first = await stage.read_client.service_info()
        old = (await stage.read_client.devices()).devices[0].certificate
        assert [row["key_id"] for row in await history(stage, "key.created")] == [first.key_id]

        assert await stage.service.stop(SOON) == 0
        await stage.service.start()
        await stage.wait_until_clean(SOON)
        assert (await stage.read_client.service_info()).key_id == first.key_id
        assert len(await history(stage, "key.created")) == 1

        assert await stage.service.stop(SOON) == 0
        key.unlink()
        await stage.service.start()
        await stage.wait_until_clean(SOON)
        second = await stage.read_client.service_info()
        assert second.key_id != first.key_id
        assert [row["key_id"] for row in await history(stage, "key.created")] == [first.key_id, second.key_id]
        starts = [row["key_id"] for row in await history(stage, "service.started")]
        assert starts == [first.key_id, first.key_id, second.key_id]
        assert [line["key_id"] for line in logged(stage, "key.loaded")] == starts
        assert {line["level"] for line in logged(stage, "key.created")} == {"warning"}
        before = await stage.read_client.certificate(old.id)
        assert verify_signature(first.public_key, before.payload, before.certificate.signature)
        assert not verify_signature(second.public_key, before.payload, before.certificate.signature)
        assert before.status == "voided"
        now = (await stage.read_client.devices()).devices[0].certificate
        assert now.key_id == second.key_id
        assert (await metrics(stage))["scrubber_signing_key_info"] == [({"key_id": second.key_id}, 1.0)]


@pytest.mark.parametrize("spoilt", ["others may read it", "it is no key"])
async def test_unsafe_or_invalid_signing_key_stops_the_service_at_the_start_with_the_remedy(
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
        line = stage.service.log.read_text().splitlines()[-1]
        assert str(key) in line
        assert "remove it" in line


async def test_audit_head_is_the_same_in_metric_log_service_and_ledger(
    tmp_path: Path,
) -> None:
    async with a_stage(tmp_path) as stage:
        await reset(stage)
        async with asyncio.timeout(SOON):
            while True:
                head = (await stage.read_client.service_info()).audit_head
                shown = await metrics(stage)
                sequence = int(shown["scrubber_audit_head_sequence"][0][1])
                if sequence == head.sequence == (await stage.read_client.service_info()).audit_head.sequence:
                    break
                await asyncio.sleep(0.05)
        parts = {labels["part"]: int(value) for labels, value in shown["scrubber_audit_head_hash"]}
        assert "".join(f"{parts[part]:08x}" for part in sorted(parts)) == head.hash
        lines = [*logged(stage, "audit.head-published"), *logged(stage, "service.ready")]
        pages = [
            page async for page in stage.read_client.audit_pages()
        ]  # after the log: each row that it names is in there
        rows = {row.sequence: row.hash for page in pages for row in page.rows}
        assert rows[head.sequence] == head.hash
        for line in lines:
            number, _, digest = str(line.get("head") or line["audit_head"]).partition(":")
            assert rows[int(number)] == digest
        assert [line for line in lines if line["event"] == "audit.head-published"]
        assert await stage.service.stop(SOON) == 0
        assert verify_ledger(stage.directory / "state").intact
