"""Every GPU event is reported for the devices it concerns; a GPU that hangs, is lost or is reset silences no other."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml
import pytest

from scrubber.adapters.children.process import Child, Children
from scrubber.adapters.children.zygote_client import Zygote
from scrubber.adapters.nvidia.event_watch import EVENTS_MODULE, EventWatch, event_signal, event_zygote
from scrubber.adapters.nvidia.inventory import NvidiaInventory
from scrubber.domain.device import Device
from scrubber.domain.errors import DriverTimeout
from scrubber.domain.telemetry import Signal
from scrubber.ports.device import Inventory
from tests.nvidia.build import LIBRARY
from tests.nvidia.machine import Machine

ZYGOTE = "scrubber.adapters.nvidia.zygote"


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with Machine.create(tmp_path / "world") as made:
        yield made


def is_running(pid: int) -> bool:
    """Whether the process has not exited; the zygote reaps its exited children a moment later."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Node:
    """The machine, its devices, and the event watch under test."""

    def __init__(self, machine: Machine, children: Children, watch: EventWatch, inventory: Inventory) -> None:
        self.machine = machine
        self.children = children
        self.watch = watch
        self._inventory = inventory

    async def follow(self) -> tuple[Device, ...]:
        """Return all devices, once the state of each one's event stream is known."""
        devices = await self._inventory.devices()
        self.watch.follow(devices)
        await self.watch.wait_until_ready(20.0)
        return devices

    def child_of(self, device: Device) -> int:
        """Return the PID of the only child that has the GPU open."""
        (living,) = self.children_of(device)
        assert living.module == EVENTS_MODULE
        return living.pid

    def children_of(self, device: Device) -> list[Child]:
        return [child for child in self.children._live if child.device == (device.parent or device.id)]


class Gated(Zygote):
    """Forks a child when the gate is open."""

    def __init__(self, children: Children, machine: Machine) -> None:
        super().__init__(children, ZYGOTE, programs=(EVENTS_MODULE,), environment=machine.places.environment())
        self.requested = asyncio.Event()
        self.gate = asyncio.Event()

    async def fork(self, program: str, **how: Any) -> Child:
        self.requested.set()
        await self.gate.wait()
        return await super().fork(program, **how)


def event_children(children: Children) -> set[int]:
    """Return the PIDs of the children that wait for events, without the process that forks them."""
    return {each.pid for each in children._live if each.module == EVENTS_MODULE}


@pytest.fixture
async def node(machine: Machine) -> AsyncIterator[Node]:
    children = Children(kill_timeout=20.0)
    inventory = NvidiaInventory(machine.places, children, node="node-1")
    zygote = event_zygote(children, machine.places)
    watch = EventWatch(
        zygote,
        machine.places,
        inventory.fingerprint,
        poll_interval=0.05,
        silence_timeout=60.0,
        restart_delays=(0.01,),
    )
    yield Node(machine, children, watch, inventory)
    await watch.close()
    assert event_children(children) == set()
    await zygote.close()
    await inventory.close()
    assert children.pids() == frozenset()


async def until(signals: AsyncIterator[Signal], expected: Signal) -> list[Signal]:
    """Return the signals that came before ``expected``."""
    before: list[Signal] = []
    async with asyncio.timeout(20):
        async for signal in signals:
            if signal == expected:
                return before
            before.append(signal)
    raise AssertionError("the stream ended")


async def until_true(holds: Callable[[], bool]) -> None:
    """Poll for a condition of ``/proc`` or a file, which offers no notification."""
    loop = asyncio.get_running_loop()
    end = loop.time() + 20
    while not holds():
        assert loop.time() < end, "it did not happen in time"
        await asyncio.sleep(0.005)


# --- the meaning of events


@pytest.mark.parametrize(
    ("kind", "signal"),
    [
        (pynvml.nvmlEventTypeXidCriticalError, Signal("GPU", "xid", 79)),
        (pynvml.nvmlEventTypeSingleBitEccError, Signal("GPU", "ecc")),
        (pynvml.nvmlEventTypeDoubleBitEccError, Signal("GPU", "ecc")),
        (pynvml.nvmlEventTypeSingleBitEccErrorStorm, Signal("GPU", "ecc")),
        (pynvml.nvmlEventTypeDramRetirementEvent, Signal("GPU", "ecc")),
        (pynvml.nvmlEventTypeDramRetirementFailure, Signal("GPU", "ecc")),
        (pynvml.nvmlEventTypeNonFatalPoisonError, Signal("GPU", "ecc")),
        (pynvml.nvmlEventTypeFatalPoisonError, Signal("GPU", "ecc")),
        (pynvml.nvmlEventTypeGpuUnavailableError, Signal("GPU", "lost")),
        (pynvml.nvmlEventTypeGpuRecoveryAction, Signal("GPU", "changed")),
        (pynvml.nvmlEventMigConfigChange, Signal("GPU", "changed")),
        (1 << 40, Signal("GPU", "changed")),
    ],
)
def test_each_event_type_maps_to_its_signal(kind: int, signal: Signal) -> None:
    assert event_signal("GPU", kind, 79) == signal


# --- whole GPUs


async def test_xid_is_signalled_and_counted_for_its_gpu_alone(node: Node) -> None:
    first, second = await node.follow()
    signals = node.watch.listen()
    node.machine.gpus[0].raise_xid(79)
    node.machine.gpus[0].raise_xid(79)
    assert await until(signals, Signal(first.id, "xid", 79)) == []
    node.machine.gpus[0].raise_xid(31)
    await until(signals, Signal(first.id, "xid", 31))
    assert node.watch.xids(first.id) == {79: 2, 31: 1}
    assert node.watch.xids(second.id) == {}
    node.watch.forget(first.id)
    assert node.watch.xids(first.id) == {}


async def test_ecc_error_is_signalled(node: Node) -> None:
    _, second = await node.follow()
    signals = node.watch.listen()
    node.machine.gpus[1].add_ecc_errors(1)
    assert await until(signals, Signal(second.id, "ecc")) == []


async def test_unread_event_flood_collapses_to_one_signal_of_each_kind(node: Node) -> None:
    first, second = await node.follow()
    signals, witness = node.watch.listen(), node.watch.listen()
    for _ in range(200):
        node.machine.gpus[0].raise_xid(31)
    node.machine.gpus[0].raise_xid(48)
    await until(witness, Signal(first.id, "xid", 48))
    assert await until(signals, Signal(first.id, "xid", 48)) == [Signal(first.id, "xid", 31)]
    assert node.watch.xids(first.id)[31] == 200
    assert node.watch.xids(second.id) == {}


async def test_event_types_unrelated_to_health_are_not_registered(node: Node) -> None:
    gpu = node.machine.gpus[0]
    noise = (pynvml.nvmlEventTypePState, pynvml.nvmlEventTypeClock, pynvml.nvmlEventTypeSingleBitEccError)
    gpu.set("event_types", sum(noise) | pynvml.nvmlEventTypeXidCriticalError)
    first, _ = await node.follow()
    signals = node.watch.listen()
    for kind in noise:
        gpu.raise_event(kind)
    gpu.raise_xid(79)
    assert await until(signals, Signal(first.id, "xid", 79)) == []


async def test_corrupt_inforom_is_reported_for_its_gpu_alone(
    node: Node,
) -> None:
    node.machine.gpus[0].fail("nvmlDeviceValidateInforom", 14)
    signals = node.watch.listen()
    first, second = await node.follow()
    async with asyncio.timeout(20):
        while not node.watch.inforom_corrupt(first.id):
            await anext(signals)
    assert not node.watch.inforom_corrupt(second.id)


async def test_gpu_without_events_is_listed_as_unwatched_and_its_child_ends(node: Node) -> None:
    gpu = node.machine.gpus[0]
    gpu.unset("event_types")
    first, second = await node.follow()
    assert list(node.watch.unwatched_gpus) == [first.id]
    assert "reports no events" in node.watch.unwatched_gpus[first.id]
    assert node.watch.event_stream_error(first.id) is None
    for child in node.children_of(first):
        assert await child.wait(20.0)
    assert node.child_of(second)


# --- failures


async def test_hanging_gpu_does_not_silence_events_of_other_gpus(node: Node) -> None:
    devices = await node._inventory.devices()
    node.machine.gpus[0].hang("nvmlDeviceRegisterEvents")
    node.watch.follow(devices)
    signals = node.watch.listen()
    await until(signals, Signal(devices[1].id, "changed"))
    node.machine.gpus[1].raise_xid(79)
    await until(signals, Signal(devices[1].id, "xid", 79))
    assert list(node.watch.unwatched_gpus) == [devices[0].id]


async def test_hanging_gpu_is_watched_once_it_answers(machine: Machine) -> None:
    children = Children(kill_timeout=20.0)
    inventory = NvidiaInventory(machine.places, children, node="node-1")
    zygote = event_zygote(children, machine.places)
    watch = EventWatch(zygote, machine.places, inventory.fingerprint, silence_timeout=2.0, restart_delays=(0.01,))
    devices = await inventory.devices()
    machine.gpus[0].hang("nvmlDeviceRegisterEvents")
    watch.follow(devices)
    await watch.wait_until_ready(20.0)
    assert "did not respond about its events" in watch.unwatched_gpus[devices[0].id]
    assert watch.event_stream_error(devices[0].id) == watch.unwatched_gpus[devices[0].id]
    signals = watch.listen()
    machine.gpus[0].heal()
    await until(signals, Signal(devices[0].id, "changed"))
    assert watch.event_stream_error(devices[0].id) is None
    await watch.close()
    await inventory.close()
    await children.close()


async def test_lost_gpu_is_signalled_and_watched_again_later(node: Node) -> None:
    first, second = await node.follow()
    signals = node.watch.listen()
    node.machine.gpus[0].lose()
    assert await until(signals, Signal(first.id, "lost")) == []
    assert "fallen off the bus" in node.watch.unwatched_gpus[first.id]
    node.machine.gpus[0].unset("error")
    await until(signals, Signal(first.id, "changed"))
    node.machine.gpus[0].raise_xid(79)
    await until(signals, Signal(first.id, "xid", 79))
    assert node.watch.unwatched_gpus == {}
    assert node.watch.xids(second.id) == {}


async def test_killed_event_child_is_replaced_and_the_watch_gap_is_signalled(node: Node) -> None:
    first, _ = await node.follow()
    signals = node.watch.listen()
    node.machine.gpus[0].raise_xid(79)
    await until(signals, Signal(first.id, "xid", 79))
    os.kill(node.child_of(first), 9)
    await until(signals, Signal(first.id, "changed"))
    assert node.watch.xids(first.id) == {79: 1}
    node.machine.gpus[0].raise_xid(48)
    await until(signals, Signal(first.id, "xid", 48))


async def test_watching_one_gpu_attaches_to_no_other(node: Node) -> None:
    devices = await node._inventory.devices()
    for gpu in node.machine.gpus:
        gpu.unset("attached")
    node.watch.follow(devices)
    await node.watch.wait_until_ready(20.0)
    attached = [{int(pid) for pid in (gpu.get("attached") or "").split()} for gpu in node.machine.gpus]
    assert attached == [{node.child_of(device)} for device in devices]


async def test_end_of_the_zygote_ends_the_event_children_and_all_gpus_are_watched_again(node: Node) -> None:
    devices = await node.follow()
    (zygote,) = node.children.pids() - event_children(node.children)
    before = event_children(node.children)
    signals = node.watch.listen()
    os.kill(zygote, 9)
    waiting = {Signal(device.id, "changed") for device in devices}  # the gap is signalled for each of them
    async with asyncio.timeout(20):
        while waiting:
            waiting.discard(await anext(signals))
    assert not any(is_running(pid) for pid in before)
    node.machine.gpus[1].raise_xid(79)
    await until(signals, Signal(devices[1].id, "xid", 79))


async def test_zygote_of_event_children_opens_no_gpu_and_loads_no_driver_library(node: Node) -> None:
    await node.follow()
    (zygote,) = node.children.pids() - event_children(node.children)
    assert LIBRARY not in Path(f"/proc/{zygote}/maps").read_text()
    assert not any(zygote in gpu.attached() for gpu in node.machine.gpus)


# --- resets


async def test_pause_ends_only_its_gpus_child_and_resume_signals_the_watch_gap(node: Node) -> None:
    first, second = await node.follow()
    child, other = node.child_of(first), node.child_of(second)
    await node.watch.pause(first.id)
    assert not is_running(child)
    assert node.child_of(second) == other
    assert list(node.watch.unwatched_gpus) == [first.id]
    node.watch.follow([first, second])  # as when the inventory is read meanwhile
    await node.watch.wait_until_ready(20.0)
    assert event_children(node.children) == {other}
    signals = node.watch.listen()
    await node.watch.resume(first.id, 20.0)
    assert node.watch.event_stream_error(first.id) is None
    node.machine.gpus[0].raise_xid(79)  # at once: nothing is missed after the return
    assert await until(signals, Signal(first.id, "xid", 79)) == [Signal(first.id, "changed")]


async def test_gpu_paused_by_two_resets_is_watched_again_after_the_second(node: Node) -> None:
    first, second = await node.follow()
    other = node.child_of(second)
    await node.watch.pause(first.id)
    await node.watch.pause(first.id)
    await node.watch.resume(first.id, 20.0)
    assert event_children(node.children) == {other}
    assert node.watch.event_stream_error(first.id) is not None
    await node.watch.resume(first.id, 20.0)
    assert node.watch.event_stream_error(first.id) is None


async def test_event_stream_of_a_gpu_counts_as_lost_until_watching_resumes(node: Node) -> None:
    first, second = await node.follow()
    await node.watch.pause(first.id)
    signals = node.watch.listen()
    await node.watch.resume(first.id, 0.0)
    assert node.watch.event_stream_error(first.id) == "Its events have not been watched since it was reset."
    assert node.watch.event_stream_error(second.id) is None
    await until(signals, Signal(first.id, "changed"))
    assert node.watch.event_stream_error(first.id) is None


async def test_pause_during_an_event_childs_start_leaves_no_child(node: Node) -> None:
    devices = await node._inventory.devices()
    node.watch.follow(devices[:1])
    await asyncio.sleep(0)  # its start is in progress
    await node.watch.pause(devices[0].id)
    assert event_children(node.children) == set()


@pytest.mark.parametrize("then", ["resumed at once", "resumed once it has ended", "closed"])
async def test_cancelled_pause_during_an_event_childs_start_leaves_no_child(machine: Machine, then: str) -> None:
    children, others = Children(kill_timeout=20.0), Children()
    zygote = Gated(children, machine)
    inventory = NvidiaInventory(machine.places, others, node="node-1")
    watch = EventWatch(zygote, machine.places, inventory.fingerprint, silence_timeout=60.0, restart_delays=(0.01,))
    (first, _) = await inventory.devices()
    watch.follow([first])
    await zygote.requested.wait()
    pausing = asyncio.create_task(watch.pause(first.id))
    await asyncio.sleep(0)
    pausing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pausing
    if then == "resumed once it has ended":
        zygote.gate.set()
        await until_true(lambda: children.starts[EVENTS_MODULE] == 1 and not event_children(children))
    if then != "closed":
        resuming = asyncio.create_task(watch.resume(first.id, 20.0))
        await asyncio.sleep(0)
        zygote.gate.set()
        await resuming
        assert watch.event_stream_error(first.id) is None
        assert len(event_children(children)) == 1
        signals = watch.listen()
        machine.gpus[0].raise_xid(79)
        await until(signals, Signal(first.id, "xid", 79))
        await watch.pause(first.id)
        assert event_children(children) == set()
    zygote.gate.set()
    await watch.close()
    assert event_children(children) == set()
    await zygote.close()
    await inventory.close()
    await others.close()


async def test_resume_overtaken_by_another_reset_does_not_wait_for_that_reset(node: Node) -> None:
    first, _ = await node.follow()
    await node.watch.pause(first.id)
    resuming = asyncio.create_task(node.watch.resume(first.id, 3600.0))
    await asyncio.sleep(0)
    await node.watch.pause(first.id)
    async with asyncio.timeout(20):
        await resuming
    assert node.watch.event_stream_error(first.id) == "Its events have not been watched since it was reset."
    await node.watch.resume(first.id, 20.0)
    assert node.watch.event_stream_error(first.id) is None


async def test_pause_of_an_unwatched_gpu_returns_at_once(node: Node) -> None:
    await node.watch.pause("GPU-unknown")
    await node.watch.resume("GPU-unknown", 20.0)
    await node.watch.resume("GPU-unknown", 20.0)


async def test_unkillable_event_child_is_reported_and_not_replaced(machine: Machine) -> None:
    children = Children(kill_timeout=0.1, send_signal=lambda *_: None)
    zygote = Gated(children, machine)
    zygote.gate.set()
    inventory = NvidiaInventory(machine.places, Children(), node="node-1")
    watch = EventWatch(zygote, machine.places, inventory.fingerprint, restart_delays=(0.01,))
    (first, _) = await inventory.devices()
    machine.gpus[0].hang("nvmlDeviceGetSupportedEventTypes")
    machine.gpus[0].unset("attached")
    watch.follow([first])
    await until_true(lambda: machine.gpus[0].get("attached") is not None)
    with pytest.raises(DriverTimeout, match="cannot be killed"):
        await watch.pause(first.id)
    (abandoned,) = children.abandoned
    assert abandoned.device == first.id
    zygote.requested.clear()
    await watch.resume(first.id, 20.0)
    await asyncio.sleep(0)  # by now every task that it started is running
    assert not zygote.requested.is_set()
    assert "cannot be killed" in (watch.event_stream_error(first.id) or "")
    children.send_signal = signal.pidfd_send_signal
    os.kill(abandoned.pid, 9)  # while it hangs: a child that does not hang ends without a signal
    machine.gpus[0].heal()
    await until_true(lambda: not children.abandoned)
    await until_true(lambda: watch.event_stream_error(first.id) is None)
    await watch.close()
    await zygote.close()
    await inventory.close()


# --- instances


async def test_instance_event_concerns_the_instance_and_gpu_event_all_instances(node: Node) -> None:
    gpu = node.machine.gpus[0]
    instances = gpu.split("1g.18gb", "1g.18gb")
    first, second, _ = await node.follow()
    signals = node.watch.listen()
    gpu.raise_xid(31, instances[1])
    assert await until(signals, Signal(second.id, "xid", 31)) == []
    gpu.raise_xid(79)
    assert await until(signals, Signal(second.id, "xid", 79)) == [Signal(first.id, "xid", 79)]
    assert node.watch.xids(first.id) == {79: 1}
    assert node.watch.xids(second.id) == {31: 1, 79: 1}
    node.watch.forget(first.id)
    assert node.watch.xids(second.id) == {}


async def test_gpu_xid_applies_to_an_instance_created_later(node: Node) -> None:
    first, _ = await node.follow()
    signals = node.watch.listen()
    node.machine.gpus[0].raise_xid(79)
    await until(signals, Signal(first.id, "xid", 79))
    node.machine.gpus[0].split("1g.18gb", "1g.18gb")
    one, two, _ = await node.follow()
    assert node.watch.xids(one.id) == node.watch.xids(two.id) == {79: 1}
    assert node.watch.xids(first.id) == {}


async def test_gpu_instance_event_concerns_all_its_compute_instances(node: Node) -> None:
    node.machine.gpus[0].split("1g.18gb", "1g.18gb")
    first, second, _ = await node.follow()
    shared = dict(first.traits) | {"compute_instance": "1"}
    beside = replace(first, id="MIG-beside", index="0:7", traits=tuple(shared.items()))
    node.watch.follow([first, second, beside])
    signals = node.watch.listen()
    gi, _ = node.machine.gpus[0].instances[0].ids
    with (node.machine.gpus[0].directory / "events").open("a") as events:
        events.write(f"8 94 {gi} {0xFFFFFFFF}\n")
    await until(signals, Signal(beside.id, "xid", 94))
    assert (node.watch.xids(first.id), node.watch.xids(second.id)) == ({94: 1}, {})


async def test_mig_configuration_change_is_signalled_for_the_node(node: Node) -> None:
    gpu = node.machine.gpus[0]
    gpu.set("event_types", pynvml.nvmlEventMigConfigChange)
    await node.follow()
    signals = node.watch.listen()
    gpu.raise_event(pynvml.nvmlEventMigConfigChange)
    await until(signals, Signal(None, "changed"))


# --- GPUs that come and go


async def test_added_or_removed_gpu_is_signalled_for_the_node(node: Node) -> None:
    node.watch.start()
    await node.follow()
    signals = node.watch.listen()
    gpu = node.machine.add_gpu()
    await until(signals, Signal(None, "changed"))
    devices = await node.follow()
    assert len(devices) == len(event_children(node.children)) == 3
    node.machine.remove_gpu(gpu)
    await until(signals, Signal(None, "changed"))


async def test_temporarily_unreadable_kernel_files_signal_a_change_and_do_not_stop_the_watch(machine: Machine) -> None:
    answers: Iterator[object] = iter(["as ever", OSError("gone"), "as ever"])

    async def fingerprint() -> str:
        found = next(answers, "as ever")
        if isinstance(found, OSError):
            raise found
        return str(found)

    watch = EventWatch(event_zygote(Children(), machine.places), machine.places, fingerprint, poll_interval=0.01)
    signals = watch.listen()
    watch.start()
    for _ in range(2):
        assert await until(signals, Signal(None, "changed")) == []
    await watch.close()


async def test_unfollowed_gpu_is_released_and_its_xid_counts_are_kept(node: Node) -> None:
    first, second = await node.follow()
    signals = node.watch.listen()
    node.machine.gpus[0].raise_xid(79)
    await until(signals, Signal(first.id, "xid", 79))
    other = node.child_of(second)
    node.watch.follow([second])
    for child in node.children_of(first):
        assert await child.wait(20.0)
    assert event_children(node.children) == {other}
    assert node.watch.xids(first.id) == {}
    node.watch.follow([first, second])
    assert node.watch.xids(first.id) == {79: 1}


async def test_closing_the_watch_ends_the_stream_and_every_child(node: Node) -> None:
    node.watch.start()
    await node.follow()
    signals = node.watch.listen()
    await node.watch.close()
    assert [signal async for signal in signals] == []
    assert event_children(node.children) == set()
