"""Resets of NVIDIA GPUs over the stand-ins: users release the GPU, settings are restored, other GPUs keep working."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from scrubber.adapters.children.process import Children
from scrubber.adapters.children.request_pool import RequestPool
from scrubber.adapters.nvidia.driver_paths import DriverPaths
from scrubber.adapters.nvidia.driver_requests import DRIVER_MODULE, device_request, driver_arguments
from scrubber.adapters.nvidia.event_watch import EventWatch, event_zygote
from scrubber.adapters.nvidia.inventory import NvidiaInventory
from scrubber.adapters.nvidia.resetter import NvidiaResetter
from scrubber.adapters.nvidia.smi import NvidiaSmi
from scrubber.domain.device import Device
from scrubber.domain.errors import DeviceBusy, DeviceLost, DriverTimeout, Unavailable, Unreadable
from scrubber.domain.telemetry import Holder, HolderKind, HolderReport
from tests.nvidia.machine import Gpu, Machine

LONG = 30.0
TRAIN = Holder(7, 1, HolderKind.PROCESS, "train")

WITNESS = """#!{python} -IS
import os, sys, time
from pathlib import Path
machine, gpu = Path({machine!r}), Path({gpu!r})
def lives(pid):
    try:
        return Path("/proc", pid, "stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False
attached = gpu / "attached"
with open(machine / "witness", "a") as log:
    print("persistence", (gpu / "persistence_mode").read_text().strip(), file=log)
    print("attached", *(pid for pid in (attached.read_text().split() if attached.exists() else ()) if lives(pid)), file=log)
    print("words", *sys.argv[1:], file=log)
    print("environment", *sorted(os.environ), file=log)
if (machine / "gate").exists():
    (machine / "began").write_bytes(b"")
    (machine / "gate").read_bytes()
{then}
"""
"""Replacement of nvidia-smi: it records the state that it finds, waits at the gate if there is one, and continues."""

ON = 'os.execv(str(machine / "usr/bin/the-real-one"), [str(machine / "usr/bin/nvidia-smi"), *sys.argv[1:]])'


class Seen:
    """:class:`scrubber.ports.Holders` that returns what a test sets; the last entry is repeated."""

    def __init__(self) -> None:
        self.looks: dict[str, list[tuple[Holder, ...] | Exception]] = {}

    def show(self, device: Device, *looks: tuple[Holder, ...] | Exception) -> None:
        self.looks[device.id] = list(looks)

    async def is_held(self, device: Device) -> bool:
        return bool((await self.list_holders(device)).holders)

    async def list_users(self, device: Device) -> tuple[Holder, ...]:
        return (await self.list_holders(device)).holders

    def not_covered(self, device: Device) -> tuple[str, ...]:
        return ()

    async def list_holders(
        self, device: Device, pod_uids: Collection[str] = (), scrub: str | None = None
    ) -> HolderReport:
        looks = self.looks.get(device.id, [()])
        look = looks.pop(0) if len(looks) > 1 else looks[0]
        if isinstance(look, Exception):
            raise look
        return HolderReport(look)


class Erasing:
    """The PIDs of the erasers of devices."""

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}

    async def find_orphan(self, device: Device) -> int | None:
        return self.pids.get(device.id)


class Bench:
    """The adapter under test, and all real components around it: children, pools, inventory, events, programs."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.places = DriverPaths(
            machine.root,
            machine.root / "dev",
            machine.root / "proc/driver/nvidia",
            machine.root / "sys",
            machine.root / "run",
        )
        self.children = Children()
        self.questions = RequestPool(
            self.children,
            DRIVER_MODULE,
            arguments=driver_arguments(self.places),
            deadline=LONG,
            environment=self.places.environment(),
        )
        self.inventory = NvidiaInventory(self.places, self.children, node="node-1")
        self.zygote = event_zygote(self.children, self.places)
        self.events = EventWatch(self.zygote, self.places, self.inventory.fingerprint)
        self.holders = Seen()
        self.erasing = Erasing()
        self.uid = 0
        self.devices: tuple[Device, ...] = ()
        self.stream = self.events.listen()
        self.resetter = NvidiaResetter(
            devices=lambda: self.devices,
            holders=self.holders,
            erasers=self.erasing,
            events=self.events,
            driver_pool=self.questions,
            suspendables=(self.inventory,),
            children=self.children,
            paths=self.places,
            uid=lambda: self.uid,
        )

    async def start(self) -> None:
        self.devices = await self.inventory.devices()
        self.events.follow(self.devices)
        await self.events.wait_until_ready(LONG)

    async def close(self) -> None:
        await self.events.close()
        await self.zygote.close()
        await self.questions.close()
        await self.inventory.close()
        await self.children.close()

    @property
    def gpu(self) -> Gpu:
        """The GPU that is reset."""
        return self.machine.gpus[0]

    def witnessed(self, word: str) -> list[list[str]]:
        lines = (self.machine.root / "witness").read_text().splitlines()
        return [line.split()[1:] for line in lines if line.startswith(word)]

    def replace_program(self, then: str = ON) -> None:
        real = self.machine.nvidia_smi
        if not real.with_name("the-real-one").exists():
            real.rename(real.with_name("the-real-one"))
        real.write_text(
            WITNESS.format(
                python=sys.executable, machine=str(self.machine.root), gpu=str(self.gpu.directory), then=then
            )
        )
        real.chmod(stat.S_IRWXU)

    async def query(
        self, device: Device, question: str = "used", *, deadline: float | None = None, **more: object
    ) -> Any:
        return await self.questions.request(device.id, device_request(device, question, **more), deadline=deadline)

    async def watched(self) -> None:
        """Return once the event stream of every GPU is open."""
        async with asyncio.timeout(LONG):
            while self.events.unwatched_gpus:
                await anext(self.stream)


class Gate:
    """Makes a reset report that it began, and then wait for :meth:`open`."""

    def __init__(self, place: Path) -> None:
        self._began, self._gate = place / "began", place / "gate"
        os.mkfifo(self._began)
        os.mkfifo(self._gate)

    async def reached(self) -> None:
        await asyncio.to_thread(self._began.read_bytes)

    async def open(self) -> None:
        await asyncio.to_thread(self._gate.write_bytes, b"")


@pytest.fixture
def machine(request: pytest.FixtureRequest, short_tmp: Path) -> Iterator[Machine]:
    with Machine.create(short_tmp / "w", gpus=getattr(request, "param", 1), mebibytes=4) as made:
        yield made


TWO_GPUS = pytest.mark.parametrize("machine", [2], indirect=True)


@pytest.fixture
async def bench(machine: Machine) -> AsyncIterator[Bench]:
    made = Bench(machine)
    made.replace_program()
    await made.start()
    yield made
    await made.close()
    assert made.children.pids() == frozenset()


@pytest.fixture
def device(bench: Bench) -> Device:
    return bench.devices[0]


@pytest.fixture
def gate(bench: Bench) -> Gate:
    return Gate(bench.machine.root)


async def a_moment() -> None:
    """Let the event loop process what has happened."""
    await asyncio.to_thread(os.sched_yield)


# --- successful resets


@TWO_GPUS
async def test_reset_restores_the_gpu_and_clears_its_xid_counts(bench: Bench, device: Device) -> None:
    bench.gpu.add_ecc_errors(2)
    bench.gpu.raise_xid(95)
    async with asyncio.timeout(LONG):
        while not bench.events.xids(device.id):
            await anext(bench.stream)
    await bench.resetter.reset(device, LONG)
    assert bench.gpu.resets() == 1
    assert bench.machine.gpus[1].resets() == 0
    assert bench.gpu.number("ecc_uncorrected_volatile") == 0
    assert bench.events.xids(device.id) == {}
    assert bench.witnessed("words") == [["--gpu-reset", "-i", device.id]]


async def test_no_process_of_the_service_has_the_gpu_open_during_its_reset(bench: Bench, device: Device) -> None:
    await bench.query(device)
    assert bench.gpu.attached()
    await bench.resetter.reset(device, LONG)
    assert bench.witnessed("attached") == [[]]


@TWO_GPUS
async def test_persistence_mode_is_disabled_for_the_reset_and_restored_afterwards(bench: Bench, device: Device) -> None:
    bench.gpu.set("persistence_mode", 1)
    bench.machine.gpus[1].set("persistence_mode", 1)
    plan = await bench.resetter.plan(device)
    assert any("persistence mode" in act for act in plan.actions)
    await bench.resetter.reset(device, LONG)
    assert bench.witnessed("persistence") == [["0"]]
    assert [gpu.text("persistence_mode") for gpu in bench.machine.gpus] == ["1", "1"]


async def test_gpu_without_persistence_mode_stays_without_persistence_mode(bench: Bench, device: Device) -> None:
    await bench.resetter.reset(device, LONG)
    assert bench.gpu.text("persistence_mode") == "0"


@TWO_GPUS
async def test_requests_and_events_of_other_gpus_continue_during_a_reset(
    bench: Bench, device: Device, gate: Gate
) -> None:
    other = bench.devices[1]
    resetting = asyncio.create_task(bench.resetter.reset(device, LONG))
    await gate.reached()
    assert "total" in await bench.query(other)
    with pytest.raises(Unavailable, match="is being reset"):
        await bench.query(device)
    assert bench.events.unwatched_gpus.keys() == {device.id}
    assert await bench.inventory.devices() == bench.devices
    bench.machine.gpus[1].raise_xid(94)
    async with asyncio.timeout(LONG):
        while not bench.events.xids(other.id):
            await anext(bench.stream)
    await gate.open()
    await resetting
    assert bench.witnessed("attached") == [[]]
    assert "total" in await bench.query(device)
    await bench.watched()


@TWO_GPUS
async def test_all_children_end_before_a_reset_when_the_driver_opens_every_gpu(machine: Machine) -> None:
    machine.set("attaches_all", "")
    bench = Bench(machine)
    bench.replace_program()
    await bench.start()
    device, other = bench.devices
    await bench.query(other)
    await bench.resetter.reset(device, LONG)
    assert (bench.gpu.resets(), bench.witnessed("attached")) == (1, [[]])
    assert "total" in await bench.query(other)
    await bench.watched()
    await bench.close()


async def test_nvidia_smi_runs_with_a_clean_environment(
    bench: Bench, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET_OF_THE_SERVICE", "x")
    await bench.resetter.reset(device, LONG)
    (names,) = bench.witnessed("environment")
    assert set(names) - {"LC_CTYPE"} == {"LANG", "LD_LIBRARY_PATH", "PATH"}


async def test_gpu_that_answers_only_after_a_reset_is_reset(bench: Bench, device: Device) -> None:
    bench.gpu.need_reset()
    bench.holders.show(device, Unreadable("The GPU does not respond until it is reset."), ())
    assert (await bench.resetter.plan(device)).blockers == ()
    await bench.resetter.reset(device, LONG)
    assert bench.gpu.resets() == 1
    assert "total" in await bench.query(device)


async def test_two_resets_of_one_gpu_never_overlap(bench: Bench, device: Device, gate: Gate) -> None:
    both = [asyncio.create_task(bench.resetter.reset(device, LONG)) for _ in range(2)]
    await gate.reached()
    for number in (1, 2):
        assert (len(bench.witnessed("words")), bench.gpu.resets()) == (number, number - 1)
        await gate.open()
        if number == 1:
            await gate.reached()
    await asyncio.gather(*both)
    assert bench.gpu.resets() == 2


@TWO_GPUS
async def test_nvlink_peers_before_ampere_are_reset_in_one_command(bench: Bench) -> None:
    for one, other in (bench.machine.gpus, bench.machine.gpus[::-1]):
        one.set("architecture", 5)
        one.link(0, other)
    bench.replace_program(then="")
    bench.devices = await bench.inventory.devices()
    first, second = bench.devices
    assert (await bench.resetter.plan(second)).also_reset == (first.id,)
    await bench.resetter.reset(second, LONG)
    assert bench.witnessed("words") == [["--gpu-reset", "-i", f"{second.id},{first.id}"]]
    assert bench.witnessed("attached") == [[]]
    bench.holders.show(first, (TRAIN,))
    with pytest.raises(DeviceBusy, match=r"train \(PID 7\) holds device 0"):
        await bench.resetter.reset(second, 5.0)


# --- blockers


def nothing_was_done(bench: Bench) -> bool:
    return not (bench.machine.root / "witness").exists() and bench.gpu.resets() == 0 and not bench.events.unwatched_gpus


async def test_held_gpu_is_not_reset(bench: Bench, device: Device) -> None:
    bench.holders.show(device, (TRAIN,))
    assert (await bench.resetter.plan(device)).blockers == ("train (PID 7) holds device 0: it must end first.",)
    with pytest.raises(DeviceBusy, match=r"train \(PID 7\)"):
        await bench.resetter.reset(device, LONG)
    assert nothing_was_done(bench)


async def test_gpu_with_a_running_eraser_is_not_reset(bench: Bench, device: Device) -> None:
    bench.erasing.pids[device.id] = 99
    with pytest.raises(DeviceBusy, match="PID 99"):
        await bench.resetter.reset(device, LONG)
    assert nothing_was_done(bench)


async def test_holder_that_appears_after_planning_blocks_the_reset_and_settings_are_restored(
    bench: Bench, device: Device
) -> None:
    bench.gpu.set("persistence_mode", 1)
    bench.holders.show(device, (), (TRAIN,))
    with pytest.raises(DeviceBusy, match=r"train \(PID 7\)"):
        await bench.resetter.reset(device, LONG)
    await bench.watched()
    assert nothing_was_done(bench)
    assert bench.gpu.text("persistence_mode") == "1"


async def test_reset_waits_for_a_daemon_to_close_the_gpu_after_persistence_mode_is_disabled(
    bench: Bench, device: Device
) -> None:
    bench.gpu.set("persistence_mode", 1)
    daemon = (Holder(10, 1, HolderKind.INFRASTRUCTURE, "nvidia-persistenced.service"),)
    bench.holders.show(device, daemon, daemon, ())
    await bench.resetter.reset(device, LONG)
    assert bench.gpu.resets() == 1


async def test_gpu_in_use_by_a_client_known_only_to_the_driver_is_busy_not_faulty(bench: Bench, device: Device) -> None:
    bench.gpu.set("persistence_mode", 1)
    bench.gpu.add_process(os.getpid(), 4096)
    with pytest.raises(DeviceBusy, match="In use by another client"):
        await bench.resetter.reset(device, LONG)
    assert (bench.gpu.resets(), bench.gpu.text("persistence_mode")) == (0, "1")


async def test_child_that_cannot_be_killed_blocks_the_reset(machine: Machine) -> None:
    bench = Bench(machine)
    kill, bench.children.send_signal = bench.children.send_signal, lambda pidfd, number: None
    bench.children.kill_timeout = 0.05
    await bench.start()
    (device,) = bench.devices
    await bench.query(device)
    bench.gpu.hang("nvmlDeviceGetMemoryInfo_v2")
    with pytest.raises(DriverTimeout, match="did not answer"):
        await bench.query(device, deadline=0.05)
    async with asyncio.timeout(LONG):
        while not bench.children.abandoned:
            await a_moment()
    with pytest.raises(DriverTimeout, match="cannot be killed"):
        await bench.resetter.reset(device, LONG)
    assert bench.gpu.resets() == 0
    bench.children.send_signal = kill
    for undying in bench.children.abandoned:
        os.kill(undying.pid, signal.SIGKILL)
    await bench.close()
    async with asyncio.timeout(LONG):
        while bench.children.pids():  # until their ends are noticed
            await a_moment()


@pytest.mark.parametrize("why", ["unprivileged", "uninstalled", "guest"])
async def test_unavailable_reset_is_refused_with_the_reason_and_nothing_is_changed(bench: Bench, why: str) -> None:
    if why == "unprivileged":
        bench.uid = 65534
    elif why == "uninstalled":
        bench.machine.nvidia_smi.unlink()
    else:
        bench.gpu.set("virtualization", 1)
        (bench.gpu.pci_device / "reset").unlink()
    bench.devices = await bench.inventory.devices()
    plan = await bench.resetter.plan(bench.devices[0])
    assert plan.unavailable is not None
    with pytest.raises(Unreadable, match=r"Device 0 "):
        await bench.resetter.reset(bench.devices[0], LONG)
    assert nothing_was_done(bench)


async def test_mig_instance_is_not_reset_because_its_gpu_would_lose_all_instances(short_tmp: Path) -> None:
    with Machine.create(short_tmp / "w", gpus=1, mebibytes=64) as machine:
        machine.gpus[0].split("1g.18gb", "1g.18gb")
        bench = Bench(machine)
        bench.replace_program()
        await bench.start()
        first, second = bench.devices
        bench.holders.show(second, (TRAIN,))
        plan = await bench.resetter.plan(first)
        assert plan.also_reset == (second.id,)
        assert plan.unavailable is not None
        assert len(plan.blockers) == 1
        with pytest.raises(Unreadable, match="MIG instance"):
            await bench.resetter.reset(first, LONG)
        assert nothing_was_done(bench)
        await bench.close()


@pytest.mark.parametrize("running", [False, True])
async def test_fabric_manager_is_found_by_its_pid_file(bench: Bench, running: bool) -> None:
    bench.gpu.set("architecture", 7)
    switch = bench.machine.root / "sys/bus/pci/devices/0000:c1:00.0"
    switch.mkdir()
    (switch / "vendor").write_text("0x10de\n")
    (switch / "class").write_text("0x068000\n")
    place = bench.machine.root / "run/nvidia-fabricmanager"
    place.mkdir()
    (place / "nv-fabricmanager.pid").write_text(f"{os.getpid() if running else 4194304}\n")
    bench.devices = await bench.inventory.devices()
    blockers = (await bench.resetter.plan(bench.devices[0])).blockers
    assert [("Fabric Manager" in blocker) for blocker in blockers] == ([] if running else [True])


async def test_reset_plan_is_blocked_while_the_driver_is_missing(bench: Bench, device: Device) -> None:
    bench.machine.remove_driver()
    assert any("load it (modprobe nvidia)" in each for each in (await bench.resetter.plan(device)).blockers)
    bench.machine.bring_driver_back()
    assert (await bench.resetter.plan(device)).blockers == ()


# --- failed resets


async def test_failed_reset_reports_the_cause_and_restores_settings(bench: Bench, device: Device) -> None:
    bench.gpu.set("persistence_mode", 1)
    bench.gpu.fail_resets()
    bench.gpu.raise_xid(95)
    async with asyncio.timeout(LONG):
        while not bench.events.xids(device.id):
            await anext(bench.stream)
    with pytest.raises(Unreadable, match=r"status 255: GPU Reset couldn't run .* Unknown Error\); reboot the node"):
        await bench.resetter.reset(device, LONG)
    assert bench.gpu.text("persistence_mode") == "1"
    assert bench.events.xids(device.id) == {95: 1}
    assert "total" in await bench.query(device)


async def test_gpu_that_fell_off_the_bus_requires_a_reboot(bench: Bench, device: Device) -> None:
    bench.gpu.lose()
    bench.holders.show(device, DeviceLost("It fell off the bus."))
    with pytest.raises(Unreadable, match=r"the GPU has fallen off the bus.*reboot the node"):
        await bench.resetter.reset(device, LONG)


async def test_hanging_reset_is_killed_at_its_deadline_and_settings_are_restored(bench: Bench, device: Device) -> None:
    bench.gpu.set("persistence_mode", 1)
    bench.gpu.hang_resets()
    smi, limits = bench.resetter._smi, list[float]()
    run = smi.reset

    async def soon_over(gpus: Sequence[str], subject: str, deadline: float) -> None:
        limits.append(deadline)
        await run(gpus, subject, 0.5)

    smi.reset = soon_over  # type: ignore[method-assign]
    with pytest.raises(DriverTimeout, match="was killed"):
        await bench.resetter.reset(device, LONG)
    (limit,) = limits
    assert LONG / 2 <= limit < LONG, "what was left of its own deadline"
    assert bench.gpu.text("persistence_mode") == "1"
    assert bench.resetter.abandoned == ()
    assert "total" in await bench.query(device)


async def test_driver_hanging_on_the_gpu_is_reported_stuck_at_the_deadline_without_changes(
    bench: Bench, device: Device
) -> None:
    bench.gpu.hang()
    with pytest.raises(DriverTimeout):
        await bench.resetter.reset(device, 0.2)
    assert not (bench.machine.root / "witness").exists()


@TWO_GPUS
async def test_reset_that_could_not_finish_before_its_deadline_is_not_begun(bench: Bench, device: Device) -> None:
    """One of our processes may have the GPU open for as long as another GPU hangs."""
    bench.gpu.set("persistence_mode", 1)
    assert (await bench.resetter.plan(device)).blockers == ()  # the child that collects the facts is started now
    bench.machine.gpus[1].hang("nvmlDeviceGetName")
    listing = asyncio.create_task(bench.inventory.devices())
    await asyncio.sleep(0)  # the listing is in progress
    with pytest.raises(DeviceBusy, match="its handles were not released before the deadline"):
        await bench.resetter.reset(device, 5.0)
    listing.cancel()
    assert not (bench.machine.root / "witness").exists()
    assert bench.gpu.text("persistence_mode") == "1"
    await bench.watched()


@TWO_GPUS
async def test_gpus_reset_together_each_get_their_persistence_mode_back(bench: Bench) -> None:
    """This also holds when the mode of the other GPU could not be changed, and the reset does not happen."""
    for one, other in (bench.machine.gpus, bench.machine.gpus[::-1]):
        one.set("architecture", 5)
        one.set("persistence_mode", 1)
        one.link(0, other)
    bench.devices = await bench.inventory.devices()
    bench.machine.gpus[1].fail("nvmlDeviceSetPersistenceMode", 999)
    bench.gpu.fail_resets()
    with pytest.raises(Unreadable):
        await bench.resetter.reset(bench.devices[0], LONG)
    assert [gpu.text("persistence_mode") for gpu in bench.machine.gpus] == ["1", "1"]


async def test_gpu_that_does_not_return_after_a_reset_is_reported_unreadable(bench: Bench, device: Device) -> None:
    bench.replace_program(then='(gpu / "error").write_text("15\\n")')
    with pytest.raises(Unreadable, match=r"was reset, but .* does not describe the device"):
        await bench.resetter.reset(device, LONG)


async def test_persistence_mode_that_cannot_be_restored_is_reported(bench: Bench, device: Device) -> None:
    bench.gpu.set("persistence_mode", 1)
    bench.replace_program(
        then='(gpu / "errors").mkdir(); (gpu / "errors/nvmlDeviceSetPersistenceMode").write_text("4\\n")'
    )
    with pytest.raises(Unreadable, match=r"was reset, but .*Persistence mode could not be enabled again"):
        await bench.resetter.reset(device, LONG)


# --- a stalled service


@pytest.fixture
async def stand_still(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let so many seconds pass during which this process does not run."""
    loop = asyncio.get_running_loop()

    def passed(seconds: float) -> None:
        before = loop.time
        monkeypatch.setattr(loop, "time", lambda: before() + seconds)

    return passed


@pytest.mark.parametrize("seconds", [LONG / 2 + 1, LONG - 0.1, LONG + 1, 100 * LONG])
async def test_process_stall_while_planning_does_not_fail_the_reset(
    bench: Bench,
    device: Device,
    stand_still: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
) -> None:
    stalls = [seconds]

    async def holders(_: Device) -> HolderReport:
        while stalls:
            stand_still(stalls.pop())
            await a_moment()
        return HolderReport(())

    monkeypatch.setattr(bench.holders, "list_holders", holders)
    await bench.resetter.reset(device, LONG)
    assert bench.gpu.resets() == 1


async def test_driver_is_not_reported_stuck_after_a_process_stall_consumed_the_time(
    bench: Bench, device: Device, stand_still: Callable[[float], None]
) -> None:
    bench.gpu.set("persistence_mode", 1)
    kill, stalls = bench.children.send_signal, [LONG / 2 + 1]

    def kill_and_stand_still(pidfd: int, number: int) -> None:
        kill(pidfd, number)
        while stalls:
            stand_still(stalls.pop())

    bench.children.send_signal = kill_and_stand_still
    with pytest.raises(DeviceBusy, match="its handles were not released before the deadline"):
        await bench.resetter.reset(device, LONG)
    assert not stalls
    assert not (bench.machine.root / "witness").exists()
    assert bench.gpu.text("persistence_mode") == "1"


async def test_cancelled_reset_finishes_and_restores_settings(bench: Bench, device: Device, gate: Gate) -> None:
    bench.gpu.set("persistence_mode", 1)
    resetting = asyncio.create_task(bench.resetter.reset(device, LONG))
    await gate.reached()
    resetting.cancel()
    resetting.cancel()
    await gate.open()
    with pytest.raises(asyncio.CancelledError):
        await resetting
    assert (bench.gpu.resets(), bench.gpu.text("persistence_mode")) == (1, "1")
    assert "total" in await bench.query(device)
    await bench.watched()


# --- nvidia-smi that cannot be killed


async def test_unkillable_nvidia_smi_is_abandoned_and_no_second_one_is_started(machine: Machine) -> None:
    gpu = machine.gpus[0]
    gpu.hang_resets()
    children = Children(kill_timeout=0.05)
    smi = NvidiaSmi(DriverPaths(machine.root), children, kill=lambda group, number: None)
    with pytest.raises(DriverTimeout, match="cannot be killed"):
        await smi.reset([gpu.uuid], "Device 0", 0.5)
    (run,) = smi.abandoned
    assert run.device == gpu.uuid
    assert children.pids() == frozenset({run.pid}), "a yield reports it"
    assert children.abandoned_total == 1
    with pytest.raises(DriverTimeout, match=str(run.pid)):
        await smi.reset([gpu.uuid], "Device 0", LONG)
    os.kill(run.pid, signal.SIGKILL)
    gpu.heal()
    async with asyncio.timeout(LONG):
        while smi.abandoned:  # until its end is noticed
            await a_moment()
    await smi.reset([gpu.uuid], "Device 0", LONG)
    assert gpu.resets() == 1
    assert children.pids() == frozenset()


async def test_endless_nvidia_smi_output_is_bounded_and_its_end_is_reported(machine: Machine) -> None:
    machine.nvidia_smi.write_text(
        f"#!{sys.executable} -IS\nimport sys\n"
        "for _ in range(2000):\n    print('x' * 1000)\nprint('The last word. ' * 100)\nsys.exit(3)\n"
    )
    smi = NvidiaSmi(DriverPaths(machine.root), Children())
    with pytest.raises(Unreadable, match=r"this GPU does not support this reset: The last word\.") as failure:
        await smi.reset([machine.gpus[0].uuid], "Device 0", LONG)
    assert len(str(failure.value)) < 500


async def test_ended_nvidia_smi_is_not_waited_for_because_a_child_keeps_its_output_open(machine: Machine) -> None:
    left = machine.root / "left"
    machine.nvidia_smi.write_text(
        f"#!/bin/sh\nsleep 600 &\necho $! > {left}.new; mv {left}.new {left}\nsleep 0.1\necho 'Done, all but one.'; exit 3\n"
    )
    smi = NvidiaSmi(DriverPaths(machine.root), Children(kill_timeout=0.05))
    try:
        with pytest.raises(Unreadable, match=r"this GPU does not support this reset: Done, all but one\."):
            await smi.reset([machine.gpus[0].uuid], "Device 0", LONG)
    finally:
        os.kill(int(left.read_text()), signal.SIGKILL)
