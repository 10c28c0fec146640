"""Starts under another pod's name, calls that no kubelet made, and a kubelet whose list flickers or is missing."""

from __future__ import annotations

import asyncio

import pytest

from scrubber.domain.assignment import KubeletReading, Pod, PodAbsence, Trust
from scrubber.domain.errors import ScrubberError
from scrubber.domain.handover_kind import Basis
from scrubber.domain.policy import Policy
from scrubber.domain.record import Grant
from tests.world.asking import STRICT, TRUSTED, admitted, answered, ask, started
from tests.world.kubelet import Tenant
from tests.world.matter import Proc
from tests.world.timeline import in_virtual_time
from tests.world.world import DEFAULT, World, a_world


def last_grant(world: World) -> Grant:
    grant = world.record().last_grant
    assert grant is not None
    return grant


# -- a start under another pod's name ----------------------------------------------------------------------------------


async def started_in_the_name_of_another(world: World) -> tuple[Proc, Tenant]:
    """The kubelet gives a pod's device to another, and still requests and starts the first: its call names only ids.

    Returns:
        The running process, and the pod to which the device was granted instead.
    """
    first = await admitted(world, "acme", "train-0")
    await world.run(1.2 - world.clock.monotonic() % 1.0)  # the usage check has just run
    world.kubelet.force_delete(first, lives_on=0.0)
    second = await admitted(world, "umbrella", "serve-0")
    await ask(world, first)
    assert last_grant(world).pod == second.pod
    container = f"{first.uid}/main#1"
    proc = world.matter.start(first.uid, container, f"acme/{container}", mounted=frozenset(first.devices), first=True)
    world.matter.open(proc, world.gpu().id)
    world.matter.write(proc, world.gpu().id)
    return proc, second


@in_virtual_time
async def test_call_whose_device_is_allocated_to_another_pod_meanwhile_is_refused() -> None:
    """The kubelet is first read after the change, so that the reading never changes: it always names the other pod."""
    async with a_world(devices=1) as world:
        first = await admitted(world, "acme", "train-0")
        world.kubelet.delay = 0.2
        call = ask(world, first)
        await world.run(0.01)
        world.kubelet.force_delete(first, lives_on=0.0)
        second = await admitted(world, "umbrella", "serve-0")
        assert (await answered(call)).code == "reassigned"
        world.kubelet.delay = 0.0
        world.kubelet.ask_again(second)
        await world.until(lambda: second.running)


@pytest.mark.parametrize("seconds", [3.0, 0.3], ids=["seen-by-the-watch", "between-two-looks"])
def test_restart_after_a_start_in_another_pods_name_needs_a_certificate(seconds: float) -> None:
    @in_virtual_time
    async def follow() -> None:
        async with a_world(devices=1) as world:
            proc, second = await started_in_the_name_of_another(world)
            await world.run(seconds)
            world.matter.end(proc)
            world.kubelet.ask_again(second)
            await world.until(lambda: second.running)
            await world.run(0.1)
            assert last_grant(world).basis is Basis.CERTIFICATE
            assert world.gpu().cells == [""] * 4

    follow()


@in_virtual_time
async def test_sandbox_created_after_a_grant_in_another_pods_name_is_no_container_run_and_blocks_no_start() -> None:
    """The named pod has just been admitted: none of its processes existed yet."""
    async with a_world(devices=1) as world:
        first = await admitted(world, "acme", "train-0")
        await world.run(1.2 - world.clock.monotonic() % 1.0)  # the usage check has just run
        world.kubelet.force_delete(first, lives_on=0.0)
        second = await admitted(world, "umbrella", "serve-0")
        assert second.sandbox is not None
        world.matter.end(second.sandbox)
        await ask(world, first)
        assert last_grant(world).baseline == ()
        container = f"{first.uid}/main#1"
        proc = world.matter.start(first.uid, container, f"acme/{container}", mounted=frozenset(first.devices))
        world.matter.open(proc, world.gpu().id)
        world.matter.write(proc, world.gpu().id)
        world.matter.end(proc)
        world.kubelet.remake_sandbox(second)
        await world.run(5.0)
        world.kubelet.ask_again(second)
        await world.until(lambda: second.running, within=60.0)
        await world.run(0.1)
        assert last_grant(world).basis is Basis.CERTIFICATE


@in_virtual_time
async def test_process_started_in_another_pods_name_is_waited_for_and_neither_signalled_nor_cleared() -> None:
    async with a_world(devices=1) as world:
        proc, second = await started_in_the_name_of_another(world)
        world.kubelet.ask_again(second)
        await world.run(60.0)
        assert proc.alive
        assert world.gpu().cells == [proc.label] * 4
        assert not second.running
        world.matter.end(proc)
        await world.until(lambda: second.running, within=120.0)


# -- calls that no kubelet made ----------------------------------------------------------------------------------------


async def quietly(call: asyncio.Task[object]) -> None:
    try:
        await call
    except ScrubberError:
        return


@pytest.mark.parametrize("policy", [DEFAULT, STRICT, TRUSTED], ids=["default", "strict", "trusted"])
def test_forged_kubelet_calls_clear_and_signal_no_tenant_and_expose_no_other_tenants_bytes(
    policy: Policy,
) -> None:
    @in_virtual_time
    async def call_in() -> None:
        async with a_world(policy=policy) as world:
            tenant = await started(world)
            first, written = tenant.first, list(world.gpu().cells)
            for _ in range(20):
                hostile = asyncio.create_task(quietly(ask(world, tenant, wait=1.0)))
                await world.node.reserve([world.gpu().id])
                await world.run(0.7)
                await hostile
            assert first is not None
            assert first.alive
            assert world.gpu().cells == written
            world.kubelet.delete(tenant)
            follower = await started(world, "umbrella", "serve-0")
            assert follower.running

    call_in()


@pytest.mark.parametrize("starts_after", [0.4, 3.0], ids=["within-a-scrub", "after-it"])
@pytest.mark.parametrize("policy", [DEFAULT, STRICT, TRUSTED], ids=["default", "strict", "trusted"])
def test_forged_kubelet_calls_between_a_grant_and_its_first_process_clear_and_signal_no_tenant(
    policy: Policy, starts_after: float
) -> None:
    """A scrub may have begun by then. Its fence makes the container or the scrub fail: no data of others is read."""

    @in_virtual_time
    async def call_in() -> None:
        world = World(1, policy)
        await world.start_service()
        await world.until(world.settled)
        earlier = await started(world, "umbrella", "serve-0")
        world.kubelet.delete(earlier)
        tenant = await world.admit("acme", "train-0", starts_after=starts_after)
        assert tenant is not None
        await world.until(lambda: tenant.starting)
        hostile = asyncio.create_task(quietly(ask(world, tenant, wait=1.0)))
        await world.until(lambda: tenant.running)
        first = tenant.first
        await hostile
        await world.run(30.0)
        assert [each for each in world.laws.breaches if ": 1: " in each or "signalled" in each] == []
        assert first is not None
        assert first.alive
        world.kubelet.delete(tenant)
        await world.until(world.settled)
        await world.end()

    call_in()


# -- a kubelet that flickers, or does not answer -----------------------------------------------------------------------


def test_two_absences_within_one_flicker_of_the_kubelets_list_count_as_one() -> None:
    gone = Pod("acme", "train-0", "uid-1")
    absence = PodAbsence()
    for at in (10.0, 10.02, 10.04, 10.1, 10.19):
        absence = absence.with_reading(KubeletReading(Trust.TRUSTED, started_at=at), gone)
    assert not absence.proved
    assert absence.with_reading(KubeletReading(Trust.TRUSTED, started_at=10.25), gone).proved


@in_virtual_time
async def test_pod_that_flickers_while_another_pod_waits_for_its_device_loses_no_process() -> None:
    """Between two starts only a child of the pod lives, so that one more absence would prove it a leftover."""
    async with a_world(devices=1) as world:
        tenant = await started(world)
        await world.run(40.0)  # no start on its grant is pending any more
        assert tenant.first is not None
        assert tenant.worker is not None
        child = world.matter.fork(tenant.first)
        tenant.worker.cancel()
        world.kubelet.exit(tenant, again=True)
        waits = await admitted(world)
        for _ in range(4):
            tenant.gone_since = world.clock.monotonic()
            call = asyncio.create_task(quietly(ask(world, waits, wait=0.12)))
            await world.run(0.15)
            tenant.gone_since = None
            await call
            await world.run(1.2)  # the usage check finds it again
        assert child.alive


@in_virtual_time
async def test_unauthorized_use_is_found_within_two_seconds_although_the_kubelet_hangs() -> None:
    async with a_world() as world:
        await started(world)
        world.kubelet.delay = 1_000.0
        host = world.matter.start(None, "", "host")
        world.matter.open(host, world.gpu().id)
        await world.run(2.0)
        assert any(event.name == "unauthorized.use.detected" for event in world.vault.events)
        assert not world.record().exclusive_use


@in_virtual_time
async def test_certificate_of_a_device_used_while_the_kubelet_hangs_is_voided() -> None:
    async with a_world() as world:
        world.kubelet.delay = 1_000.0
        host = world.matter.start(None, "", "host")
        world.matter.open(host, world.gpu().id)
        await world.run(2.0)
        assert world.record().certificate is None


# -- a pod that waits for itself ---------------------------------------------------------------------------------------


@in_virtual_time
async def test_plain_container_of_a_pod_does_not_block_the_restart_of_its_gpu_container() -> None:
    async with a_world(devices=1, policy=STRICT) as world:
        tenant = await started(world)
        world.matter.start(tenant.uid, f"{tenant.uid}/sidecar#1", "acme/sidecar")
        world.kubelet.exit(tenant, again=True)
        await world.until(lambda: tenant.running, within=60.0)
        fast = world.vault.certificates[last_grant(world).certificate or ""]
        slow = world.vault.certificates[fast.rests_on or ""]
        assert any("pod's other containers" in each for each in slow.not_covered)


@in_virtual_time
async def test_refusal_names_another_container_of_the_pod_that_holds_the_device() -> None:
    async with a_world(devices=1, policy=STRICT) as world:
        tenant = await started(world)
        mounted = frozenset(tenant.devices)
        sidecar = world.matter.start(tenant.uid, f"{tenant.uid}/sidecar#1", "acme/sidecar", mounted=mounted)
        world.matter.open(sidecar, world.gpu().id)
        world.kubelet.exit(tenant, again=True)
        await world.run(60.0)
        assert not tenant.running
        assert any(
            f"PID {sidecar.pid} (python train.py) in container {sidecar.container}" in str(refusal)
            for refusal in tenant.refusals
        )
        world.matter.end(sidecar)
        await world.until(lambda: tenant.running, within=90.0)
