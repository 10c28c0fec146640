"""Out of service and back, with the shipped daemons: what the driver reports, and what the kubelet receives.

Nothing here waits for a time to pass. Where it matters that a device stays out, another one goes out and comes back
meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from scrubber.adapters.ledger.offline import verify_ledger
from scrubber.adapters.sim import control
from scrubber.adapters.sim.reboot import reboot
from scrubber.api import scrubber_pb2 as pb
from scrubber.api.client import AdminClient
from scrubber.emulator.playground import RESOURCE, Playground
from scrubber.emulator.pods import ContainerState
from tests.integration.acting import SOON, Capacity, found_by, history, reader, running, staged, writer

POLICY = """\
name: health
limits:
  driverCall: 3s
  clearTimeoutBase: 20s
health:
  quarantineAfter:
    power-brake: 300ms
    too-hot: 1h
  quietPeriod: 200ms
  tenantQuarantineThreshold: 1
recovery:
  initialBackoff: 100ms
  maxBackoff: 400ms
  maxAttempts: 3
  probationScrubs: 2
  probationInterval: 100ms
diagnostics:
  recovery: none
breaker:
  maxResets: 100
  maxSoftPercent: 100
"""


@asynccontextmanager
async def health_stage(tmp_path: Path, *, devices: int = 2, policy: str = POLICY) -> AsyncIterator[Playground]:
    path = tmp_path / "health.yaml"
    path.write_text(policy)
    async with staged(devices=devices, policy=str(path)) as stage:
        yield stage


async def first_is(stage: Playground, *healths: str) -> pb.Device:
    """Device 0, once its health is one of ``healths``."""
    devices = await stage.wait_for_devices(
        lambda devices: any(each.index == "0" and each.health in healths for each in devices), SOON
    )
    return _first(devices)


def _first(devices: Sequence[pb.Device]) -> pb.Device:
    return next(each for each in devices if each.index == "0")


async def advertised(stage: Playground, expected: int) -> None:
    """Wait until the kubelet counts ``expected`` healthy devices."""
    await stage.kubelet.wait_until(lambda kubelet: kubelet.allocatable(RESOURCE) == expected, SOON)


async def the_other_goes_and_comes(stage: Playground, *, left: int = 0) -> None:
    """Time passes: device 1 is reset and comes back, while ``left`` devices beside it are healthy."""
    control.add_faults(stage.sim_dir, "1", xid=95)
    await advertised(stage, left)
    await advertised(stage, left + 1)


async def life(stage: Playground, device: str) -> list[str]:
    """The states of health that ``device`` went through, by the audit log."""
    names = [each.event for each in (await stage.read_client.history(device=device, limit=1000)).entries[::-1]]
    return [
        name.removeprefix("health.")
        for name in names
        if name.startswith("health.") and name != "health.errors-reported"
    ]


BACK = ["quarantined", "recovering", "probation", "healthy"]


# --- transient faults


async def test_lasting_condition_makes_a_device_suspect_then_quarantined_and_its_end_returns_the_device(
    tmp_path: Path,
) -> None:
    async with health_stage(tmp_path) as stage:
        control.add_faults(stage.sim_dir, "0", conditions={"power-brake": "reasons 0x80"})
        await advertised(stage, 1)
        out = await first_is(stage, "quarantined")
        assert (out.cause.code, out.cause.recovery_method) == ("power-brake", "wait")
        await the_other_goes_and_comes(stage)
        assert (await first_is(stage, "quarantined", "recovering", "probation", "healthy")).health == "quarantined"
        control.clear_faults(stage.sim_dir, "0", ["power-brake"])
        await advertised(stage, 2)
        assert await life(stage, out.id) == ["suspect", *BACK]
        assert await found_by(await stage.kubelet.run(reader("b", "team-b"))) == ""


async def test_short_condition_makes_a_device_suspect_and_the_kubelet_sees_no_change(tmp_path: Path) -> None:
    async with health_stage(tmp_path) as stage:
        seen = Capacity(stage)
        watching = asyncio.create_task(seen.watch())
        control.add_faults(stage.sim_dir, "0", temperature=99)
        suspect = await first_is(stage, "suspect")
        assert suspect.cause.code == "too-hot"
        assert suspect.advertised
        assert await found_by(await stage.kubelet.run(reader("b", "team-b"))) == ""
        control.clear_faults(stage.sim_dir, "0", ["temperature"])
        await first_is(stage, "healthy")
        watching.cancel()
        assert seen.allocatable == [2]
        assert await life(stage, suspect.id) == ["suspect", "healthy"]


async def test_application_error_is_logged_and_takes_no_device_out_of_service(tmp_path: Path) -> None:
    async with health_stage(tmp_path) as stage:
        pod = await running(stage, writer("a", "team-a"))
        (device,) = pod.device_ids
        control.add_faults(stage.sim_dir, device, xid=31)
        rows = await _rows(stage, "health.errors-reported")
        assert (rows[0]["code"], rows[0]["class"], rows[0]["tenant"]) == ("xid-31", "application", "team-a")
        assert await life(stage, device) == []
        assert {each.health for each in (await stage.read_client.devices()).devices} == {"healthy"}


# --- the ways back


async def test_device_with_a_hung_driver_returns_once_the_driver_answers_again(tmp_path: Path) -> None:
    async with health_stage(tmp_path) as stage:
        control.add_faults(stage.sim_dir, "0", stuck=True)
        await advertised(stage, 1)
        out = await first_is(stage, "quarantined")
        assert (out.cause.code, out.cause.recovery_method) == ("driver-timeout", "wait")
        control.clear_faults(stage.sim_dir, "0")
        await advertised(stage, 2)
        assert await life(stage, out.id) == BACK


async def test_device_quarantined_for_a_clear_timeout_returns_by_a_scrub(tmp_path: Path) -> None:
    policy = POLICY.replace("clearTimeoutBase: 20s", "clearTimeoutBase: 1s").replace(
        "maxAttempts: 3", "maxAttempts: 100"
    )
    async with health_stage(tmp_path, devices=1, policy=policy) as stage:
        pod = await running(stage, writer("a", "team-a"))
        control.add_faults(stage.sim_dir, "0", slow_clear=600.0)
        await stage.kubelet.delete(pod, grace=0)
        await advertised(stage, 0)
        out = await first_is(stage, "quarantined", "recovering")
        assert (out.cause.code, out.cause.recovery_method) == ("erase-timeout", "scrub")
        control.clear_faults(stage.sim_dir, "0")
        await advertised(stage, 1)
        assert (await life(stage, out.id))[-3:] == ["recovering", "probation", "healthy"]
        assert await found_by(await stage.kubelet.run(reader("b", "team-b"))) == ""


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        pytest.param({"xid": 95}, "xid-95", id="XID"),
        pytest.param({"conditions": {"row-remap-pending": "1"}}, "row-remap-pending", id="rows to remap"),
        pytest.param({"recovery": "drain-and-reset"}, "driver-requests-reset", id="the driver asks"),
        pytest.param({"ecc": 1}, "ecc-uncorrected", id="ECC"),
    ],
)
async def test_device_with_a_resettable_fault_returns_by_a_reset(
    tmp_path: Path, fault: dict[str, object], code: str
) -> None:
    async with health_stage(tmp_path) as stage:
        control.add_faults(stage.sim_dir, "0", **fault)  # type: ignore[arg-type]
        await advertised(stage, 1)
        await advertised(stage, 2)
        back = await first_is(stage, "healthy")
        assert await life(stage, back.id) == BACK
        (out,) = [row for row in await history(stage, "health.quarantined") if row["device"] == back.id]
        assert (out["cause"], out["recovery_method"]) == (code, "reset")


async def test_device_that_needs_a_reboot_returns_after_a_reboot_only(tmp_path: Path) -> None:
    async with health_stage(tmp_path) as stage:
        control.add_faults(stage.sim_dir, "0", xid=79)
        await advertised(stage, 1)
        out = await first_is(stage, "quarantined")
        assert out.cause.recovery_method == "reboot"
        await the_other_goes_and_comes(stage)
        assert (await first_is(stage, "quarantined", "recovering", "probation", "healthy")).health == "quarantined"
        assert await stage.service.stop(SOON) == 0
        reboot(stage.sim_dir)
        await stage.service.start()
        await first_is(stage, "healthy")
        await advertised(stage, 2)
        assert (await life(stage, out.id))[-3:] == ["recovering", "probation", "healthy"]


async def test_device_with_a_hardware_fault_returns_after_its_release_by_an_operator(tmp_path: Path) -> None:
    async with health_stage(tmp_path) as stage:
        control.add_faults(stage.sim_dir, "0", conditions={"row-remap-failure": "a row could not be remapped"})
        await advertised(stage, 1)
        out = await first_is(stage, "quarantined")
        assert out.cause.recovery_method == "operator"
        control.clear_faults(stage.sim_dir, "0")
        await the_other_goes_and_comes(stage)
        assert (await first_is(stage, "quarantined", "recovering", "probation", "healthy")).health == "quarantined"
        done = await stage.run_command("unquarantine", "0", "--yes", "--reason", "its memory was changed")
        assert done.returncode == 0, done.stderr
        await advertised(stage, 2)
        (released,) = await history(stage, "operator.released")
        assert released["reason"] == "its memory was changed"
        assert await life(stage, out.id) == ["quarantined", "healthy"]  # its probation is reported by operator.released


async def test_device_that_no_reset_repairs_is_condemned_and_returns_by_an_operator(
    tmp_path: Path,
) -> None:
    async with health_stage(tmp_path) as stage:
        control.add_faults(stage.sim_dir, "0", xid=95, reset="fail")
        out = await first_is(stage, "condemned")
        assert "3 recovery attempts failed" in out.cause.message
        assert out.cause.recovery_method == "operator"
        control.clear_faults(stage.sim_dir, "0")
        async with AdminClient(stage.socket_dir) as admin:
            await admin.unquarantine("0", "reseated")
        await advertised(stage, 2)


# --- nothing launders health


CAUSES = [
    pytest.param({"conditions": {"power-brake": ""}}, "quarantined", id="what lasts"),
    pytest.param({"temperature": 99}, "suspect", id="suspect"),
    pytest.param({"conditions": {"row-remap-failure": ""}}, "quarantined", id="for a person"),
    pytest.param({"xid": 79}, "quarantined", id="for a reboot"),
    pytest.param({"xid": 95, "reset": "fail"}, "condemned", id="condemned"),
]


@pytest.mark.parametrize(("fault", "health"), CAUSES)
async def test_sigkill_of_the_service_changes_the_health_of_no_device(
    tmp_path: Path, fault: dict[str, object], health: str
) -> None:
    async with health_stage(tmp_path) as stage:
        control.add_faults(stage.sim_dir, "0", **fault)  # type: ignore[arg-type]
        before = await first_is(stage, health)
        for _ in range(2):
            await stage.service.kill()
            await stage.service.start()
            assert await _healths(stage, _other_is_clean) == [health]
        after = await first_is(stage, health)
        assert (after.cause.code, after.cause.since) == (before.cause.code, before.cause.since)
        await advertised(stage, 2 if health == "suspect" else 1)
        assert await stage.service.stop(SOON) == 0
        assert verify_ledger(stage.directory / "state").intact


async def test_faults_that_occurred_while_the_service_was_down_are_detected_at_the_start(tmp_path: Path) -> None:
    async with health_stage(tmp_path, devices=3) as stage:
        await stage.service.kill()
        control.add_faults(stage.sim_dir, "0", xid=95, reset="fail")
        control.add_faults(stage.sim_dir, "1", temperature=99)
        await stage.service.start()
        await stage.wait_for_devices(
            lambda devices: [each.health for each in devices] == ["condemned", "suspect", "healthy"], SOON
        )
        await advertised(stage, 2)


async def test_interrupted_probation_continues_and_is_never_skipped(tmp_path: Path) -> None:
    policy = POLICY.replace("probationScrubs: 2", "probationScrubs: 8")
    async with health_stage(tmp_path, policy=policy) as stage:
        control.add_faults(stage.sim_dir, "0", xid=95, slow_clear=1.0)  # each scrub takes so long
        before = await first_is(stage, "probation")
        await stage.service.kill()
        await stage.service.start()

        def over(devices: Sequence[pb.Device]) -> bool:
            control.clear_faults(stage.sim_dir, "0", ["slow-clear"])  # its health has been seen once
            return _first(devices).health == "healthy"

        assert await _healths(stage, over) == ["probation", "healthy"]
        scrubs = [row for row in await history(stage, "scrub.finished") if row["device"] == before.id]
        assert len([row for row in scrubs if row["trigger"] == "recovery" and row["outcome"] == "passed"]) >= 8


# --- effects of one device on other devices, and on the pod that has it


async def test_open_breaker_delays_the_reset_of_one_device_and_nothing_else(tmp_path: Path) -> None:
    async with health_stage(tmp_path, devices=3, policy=POLICY.replace("maxResets: 100", "maxResets: 1")) as stage:
        control.add_faults(stage.sim_dir, "0", xid=95)
        await advertised(stage, 2)
        await advertised(stage, 3)
        control.add_faults(stage.sim_dir, "0", xid=95)
        await advertised(stage, 2)
        (opened, *_) = await _rows(stage, "breaker.opened")
        assert (opened["breaker"], bool(opened["message"])) == ("resets", True)
        assert (await stage.read_client.service_info()).breaker.resets_stopped_reason
        for name in ("b", "c"):
            assert await found_by(await stage.kubelet.run(reader(name, "team-b"))) == ""
        out = await first_is(stage, "quarantined", "recovering", "probation", "healthy")
        assert out.health == "quarantined"
        assert stage.kubelet.allocatable(RESOURCE) == 2


async def test_device_that_faults_in_use_is_withdrawn_stays_with_its_pod_and_counts_against_the_tenant(
    tmp_path: Path,
) -> None:
    async with health_stage(tmp_path) as stage:
        pod = await running(stage, writer("a", "team-a"))
        (device,) = pod.device_ids
        control.add_faults(stage.sim_dir, device, xid=95)
        await advertised(stage, 1)
        (out,) = await _rows(stage, "health.quarantined")
        assert (out["device"], out["tenant"]) == (device, "team-a")
        (blamed,) = await _rows(stage, "tenant.flagged")
        assert (blamed["tenant"], blamed["quarantines"]) == ("team-a", 1)
        assert pod.status.containers["main"].state is ContainerState.RUNNING
        await stage.kubelet.delete(pod, grace=0)
        await advertised(stage, 2)
        for name in ("b", "c"):
            assert await found_by(await stage.kubelet.run(reader(name, "team-b"))) == ""


def _other_is_clean(devices: Sequence[pb.Device]) -> bool:
    return any(each.index == "1" and each.state == "clean" for each in devices)


async def _rows(stage: Playground, name: str) -> list[dict[str, object]]:
    """The audit rows of that name, once there are some."""
    async with asyncio.timeout(SOON):
        while True:
            rows = await history(stage, name)
            if rows:
                return rows
            await asyncio.sleep(0.05)


async def _healths(stage: Playground, until: Callable[[Sequence[pb.Device]], bool]) -> list[str]:
    """Every health of device 0 that a service which has just been started tells of, from its first word on, each once in
    a row.
    """
    seen: list[str] = []

    def look(devices: Sequence[pb.Device]) -> bool:
        found = [each.health for each in devices if each.index == "0"]
        if found != seen[-1:]:
            seen.extend(found)
        return bool(found) and until(devices)

    await stage.wait_for_devices(look, SOON)
    return seen
