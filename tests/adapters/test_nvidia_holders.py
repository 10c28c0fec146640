"""Every holder of an NVIDIA device is found: by the driver's lists, by its device node, or by unexplained memory."""

import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrubber.adapters.children.process import Children
from scrubber.adapters.children.request_pool import RequestPool
from scrubber.adapters.idle_memory import IdleMemory
from scrubber.adapters.nvidia.driver_requests import DRIVER_MODULE, driver_arguments
from scrubber.adapters.nvidia.holders import NvidiaHolders
from scrubber.adapters.nvidia.inventory import NvidiaInventory
from scrubber.domain.device import Access, AccessKind, Device
from scrubber.domain.errors import DeviceLost, Unavailable, Unreadable
from scrubber.domain.infrastructure import InfrastructureClass, InfrastructureProcess, infrastructure_kind
from scrubber.domain.telemetry import HolderKind, HolderReport
from tests.adapters.sim_rig import Tenant
from tests.nvidia.machine import MIB, Machine
from tests.walks import finished_report

ALLOWANCE, MARGIN = 4 * MIB, MIB
"""Smaller than in production, because the GPUs are."""

UNSEEN = (
    "holders: a walk over /proc does not detect descriptors in flight in sockets or moved while their "
    "process is inspected, files registered with io_uring, access through /dev/nvidia-uvm or /dev/dri only, "
    "and device nodes that are opened later without a driver context"
)
DRIVER = (InfrastructureClass.DRIVER, "nvidia-fabricmanager.service")
MONITOR = (InfrastructureClass.MONITORING, "gpu-operator/nvidia-dcgm-exporter-2jklm")
GONE = 4_000_000  # allowed, but beyond any PID that Linux assigns by default


class Node:
    """The machine, its tenants, and the holders under test. ``agents``: infrastructure by policy, by PID."""

    def __init__(self, machine: Machine, *, walk_deadline: float = 20.0, look_budget: float | None = None) -> None:
        self.machine = machine
        self.agents: dict[int, tuple[InfrastructureClass, str]] = {}
        self.children = Children()
        places = machine.places
        self._questions = RequestPool(
            self.children,
            DRIVER_MODULE,
            arguments=driver_arguments(places),
            environment=places.environment(),
            deadline=20.0,
        )
        self.inventory = NvidiaInventory(places, self.children, node="node-1")
        self.holders = NvidiaHolders(
            self.children,
            self._questions,
            places,
            infrastructure=self._find,
            walk_deadline=walk_deadline,
            process_budget=look_budget,
            idle=IdleMemory(ALLOWANCE, MARGIN),
            confirm_seconds=0.02,
        )
        self._tenants: list[Tenant] = []

    async def _find(self, pid: int, *, has_context: bool) -> InfrastructureProcess | None:
        agent = self.agents.get(pid)
        if agent is None:
            return None
        agent_class, owner = agent
        return InfrastructureProcess(infrastructure_kind(agent_class, has_context=has_context), owner)

    def run(self, program: str, *arguments: str) -> Tenant:
        self._tenants.append(Tenant([sys.executable, "-c", program, *arguments]))
        return self._tenants[-1].until_ready()

    def open(self, path: Path | str) -> Tenant:
        return self.run(OPEN, str(path))

    async def report(self, device: Device) -> HolderReport:
        """Return the report of a walk that inspected all processes except the test's own, and found no relay."""
        return await finished_report(self.holders, device, {tenant.pid for tenant in self._tenants})

    async def kinds(self, device: Device) -> dict[int, HolderKind]:
        return {holder.pid: holder.kind for holder in (await self.report(device)).holders}

    async def not_covered(self, device: Device) -> list[str]:
        """Return what the report does not cover, except entries about unrelated processes and limits of every walk."""
        messages = (await self.holders.list_holders(device)).not_covered
        others = ("could not be inspected", "short-lived", "in parts")
        return [each for each in messages if each != UNSEEN and not any(words in each for words in others)]

    async def close(self) -> None:
        for tenant in self._tenants:
            tenant.end()
        await self._questions.close()
        await self.holders.close()
        await self.inventory.close()
        await self.children.close()


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    with Machine.create(tmp_path / "world", mebibytes=64) as machine:
        made = Node(machine)
        yield made
        await made.close()


@pytest.fixture
async def device(node: Node) -> Device:
    return (await node.inventory.devices())[0]


OPEN = """
import json, os, signal, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_NOCTTY)
print(json.dumps({"ready": True}), flush=True)
signal.pause()
"""


# --- the driver's lists


async def test_idle_device_has_no_holders(node: Node, device: Device) -> None:
    assert not await node.holders.is_held(device)
    assert (await node.holders.list_holders(device)).holders == ()


async def test_process_list_with_oversized_rows_loses_no_holder(node: Node, device: Device) -> None:
    node.machine.set("long_process_rows", "")
    tenants = [node.open("/dev/null") for _ in range(3)]
    for tenant in tenants:
        node.machine.gpus[0].add_process(tenant.pid, MIB)
    assert await node.kinds(device) == {tenant.pid: HolderKind.PROCESS for tenant in tenants}


@pytest.mark.parametrize("list_name", ["compute", "graphics", "mps"])
async def test_process_in_any_driver_list_holds_the_device(node: Node, device: Device, list_name: str) -> None:
    tenant = node.open("/dev/null")
    node.machine.gpus[0].add_process(tenant.pid, MIB, list_name=list_name)
    assert await node.holders.is_held(device)
    (holder,) = (await node.holders.list_holders(device)).holders
    assert (holder.pid, holder.kind) == (tenant.pid, HolderKind.PROCESS)
    assert holder.started > 0
    assert "signal.pause" in holder.command
    _, other = await node.inventory.devices()
    assert not await node.holders.is_held(other)
    assert await node.kinds(other) == {}


async def test_process_in_two_driver_lists_is_one_holder(node: Node, device: Device) -> None:
    tenant = node.open("/dev/null")
    node.machine.gpus[0].add_process(tenant.pid, MIB)
    node.machine.gpus[0].add_process(tenant.pid, None, list_name="graphics")
    assert await node.kinds(device) == {tenant.pid: HolderKind.PROCESS}


async def test_services_own_children_are_no_holders(node: Node, device: Device) -> None:
    await node.holders.list_holders(device)
    assert len(node.children.pids()) == 2
    for pid in (os.getpid(), *node.children.pids()):
        node.machine.gpus[0].add_process(pid, 0)
    assert not await node.holders.is_held(device)
    assert await node.kinds(device) == {}


# --- device nodes


async def test_process_with_only_the_device_node_open_is_found_by_the_walk(node: Node, device: Device) -> None:
    tenant = node.open(node.machine.gpus[0].node)
    assert await node.kinds(device) == {tenant.pid: HolderKind.PROCESS}
    _, other = await node.inventory.devices()
    assert await node.kinds(other) == {}


async def test_shared_device_nodes_make_no_process_a_holder(node: Node, device: Device) -> None:
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"):
        node.open(node.machine.root / "dev" / name)
    assert await node.kinds(device) == {}
    assert await node.not_covered(device) == []


async def test_holders_are_unreadable_without_the_gpus_device_node(node: Node, device: Device) -> None:
    node.machine.gpus[0].node.unlink()
    with pytest.raises(Unreadable, match="it is unknown which processes have it open"):
        await node.holders.list_holders(device)
    node.machine.gpus[0].node.write_text("no device")
    with pytest.raises(Unreadable, match="is not a device node"):
        await node.holders.list_holders(device)
    with pytest.raises(Unreadable, match="has no device node"):
        await node.holders.list_holders(replace(device, access=()))


# --- ghosts


async def test_listed_process_that_no_longer_exists_is_an_untraceable_holder(node: Node, device: Device) -> None:
    node.machine.gpus[0].add_process(GONE, MIB)
    assert await node.holders.is_held(device)
    (ghost,) = (await node.report(device)).holders
    assert (ghost.pid, ghost.kind) == (0, HolderKind.UNTRACEABLE)
    assert str(GONE) in ghost.command


async def test_process_without_a_pid_in_the_driver_list_is_an_untraceable_holder(node: Node, device: Device) -> None:
    node.machine.gpus[0].add_process(0, MIB)
    assert await node.holders.is_held(device)
    assert await node.kinds(device) == {0: HolderKind.UNTRACEABLE}


async def test_listed_zombie_counts_as_gone(node: Node, device: Device) -> None:
    tenant = node.open("/dev/null")
    node.machine.gpus[0].add_process(tenant.pid, MIB)
    kill_without_reaping(tenant)
    assert await node.kinds(device) == {0: HolderKind.UNTRACEABLE}


def kill_without_reaping(tenant: Tenant) -> None:
    pidfd = os.pidfd_open(tenant.pid)
    tenant.process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
    os.close(pidfd)


async def test_memory_in_use_without_a_process_is_an_untraceable_holder(node: Node, device: Device) -> None:
    node.machine.gpus[0].set("used", ALLOWANCE + 5)
    assert await node.holders.is_held(device)
    (ghost,) = (await node.report(device)).holders
    assert ghost.kind is HolderKind.UNTRACEABLE
    assert "5 bytes of memory above the idle level are in use" in ghost.command


async def test_untraceable_memory_and_process_are_one_untraceable_holder(node: Node, device: Device) -> None:
    node.machine.gpus[0].set("used", ALLOWANCE + 5)
    node.machine.gpus[0].add_process(GONE, MIB)
    assert await node.kinds(device) == {0: HolderKind.UNTRACEABLE}
    assert len((await node.report(device)).holders) == 1


async def test_memory_of_an_existing_process_is_no_untraceable_holder(node: Node, device: Device) -> None:
    tenant = node.open(node.machine.gpus[0].node)
    node.machine.gpus[0].set("used", ALLOWANCE + MIB)
    assert await node.kinds(device) == {tenant.pid: HolderKind.PROCESS}


@pytest.mark.parametrize("expected", [2, 4])
async def test_process_whose_memory_is_being_released_is_no_untraceable_holder(
    node: Node, device: Device, expected: int
) -> None:
    """Until the release ends, the process is listed but no longer exists; the check is repeated until then."""
    gpu, usage, looks = node.machine.gpus[0], node.holders._read_usage, 0
    gpu.add_process(GONE, MIB)
    gpu.set("used", ALLOWANCE + MIB)
    node.holders._confirm_seconds = 60.0

    async def looking(each: Device) -> object:
        nonlocal looks
        looks += 1
        if looks == expected:
            gpu.remove_process(GONE)
            gpu.set("used", 0)
        return await usage(each)

    node.holders._read_usage = looking  # type: ignore[method-assign, assignment]
    assert (await node.holders.list_holders(device)).holders == ()
    assert looks == expected


# --- unkillable


DEAD_LEADER = """
import ctypes, json, os, platform, sys, threading
fd = os.open(sys.argv[1], os.O_RDWR | os.O_NOCTTY)
threading.Thread(target=threading.Event().wait).start()
print(json.dumps({"ready": True}), flush=True)
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # ends this thread alone
"""


async def test_dead_leader_with_live_threads_is_unkillable(node: Node, device: Device) -> None:
    tenant = node.run(DEAD_LEADER, str(node.machine.gpus[0].node)).until_its_leader_is_dead()
    assert await node.kinds(device) == {tenant.pid: HolderKind.UNKILLABLE}


async def test_stopped_holder_is_reported_as_a_process(node: Node, device: Device) -> None:
    tenant = node.open(node.machine.gpus[0].node)
    os.kill(tenant.pid, signal.SIGSTOP)
    assert await node.kinds(device) == {tenant.pid: HolderKind.PROCESS}


# --- infrastructure


async def test_infrastructure_process_is_named_and_does_not_hold_the_device(node: Node, device: Device) -> None:
    daemon = node.open(node.machine.gpus[0].node)
    node.agents[daemon.pid] = DRIVER
    node.machine.gpus[0].add_process(daemon.pid, 2 * ALLOWANCE)
    assert not await node.holders.is_held(device)
    (holder,) = (await node.holders.list_holders(device)).holders
    assert (holder.kind, holder.owner, holder.memory_bytes) == (HolderKind.INFRASTRUCTURE, DRIVER[1], 2 * ALLOWANCE)


async def test_monitoring_agent_with_the_device_node_open_does_not_hold_the_device(node: Node, device: Device) -> None:
    agent = node.open(node.machine.gpus[0].node)
    node.agents[agent.pid] = MONITOR
    assert not await node.holders.is_held(device)
    (holder,) = (await node.holders.list_holders(device)).holders
    assert (holder.kind, holder.owner) == (HolderKind.INFRASTRUCTURE, MONITOR[1])
    assert await node.holders.list_users(device) == ()


async def test_monitoring_agent_with_a_context_holds_the_device_as_validation(node: Node, device: Device) -> None:
    """Memory that it uses is neither free nor explained away: the device is not cleared beside it."""
    agent = node.open(node.machine.gpus[0].node)
    node.agents[agent.pid] = MONITOR
    node.machine.gpus[0].add_process(agent.pid, 2 * ALLOWANCE)
    assert await node.holders.is_held(device)
    assert await node.kinds(device) == {agent.pid: HolderKind.VALIDATION}
    (user,) = await node.holders.list_users(device)
    assert (user.kind, user.owner, user.memory_bytes) == (HolderKind.VALIDATION, MONITOR[1], 2 * ALLOWANCE)
    assert await node.holders.wait_until_idle(device, 0.0) == ALLOWANCE


async def test_memory_that_infrastructure_does_not_account_for_is_an_untraceable_holder(
    node: Node, device: Device
) -> None:
    daemon = node.open(node.machine.gpus[0].node)
    node.agents[daemon.pid] = DRIVER
    node.machine.gpus[0].add_process(daemon.pid, None)
    node.machine.gpus[0].set("used", ALLOWANCE + MIB)
    assert await node.holders.is_held(device)
    assert await node.kinds(device) == {daemon.pid: HolderKind.INFRASTRUCTURE, 0: HolderKind.UNTRACEABLE}


async def test_tenant_beside_infrastructure_holds_the_device(node: Node, device: Device) -> None:
    daemon, tenant = node.open(node.machine.gpus[0].node), node.open(node.machine.gpus[0].node)
    node.agents[daemon.pid] = DRIVER
    node.machine.gpus[0].add_process(daemon.pid, 0)
    node.machine.gpus[0].add_process(tenant.pid, 0)
    assert await node.holders.is_held(device)
    assert await node.kinds(device) == {daemon.pid: HolderKind.INFRASTRUCTURE, tenant.pid: HolderKind.PROCESS}


async def test_process_with_a_reused_pid_does_not_inherit_an_infrastructure_name(
    node: Node, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name belonged to an earlier process with that PID: the one that was found has another start time."""
    tenant = node.open(node.machine.gpus[0].node)
    node.agents[tenant.pid] = DRIVER
    monkeypatch.setattr("scrubber.adapters.nvidia.holders.start_time", lambda _: 1)
    assert await node.kinds(device) == {tenant.pid: HolderKind.PROCESS}


# --- instances


@pytest.fixture
async def instances(node: Node) -> tuple[Device, Device]:
    node.machine.gpus[0].split("1g.18gb", "1g.18gb")
    first, second, *_ = await node.inventory.devices()
    assert first.parent == second.parent == node.machine.gpus[0].uuid
    return first, second


async def test_instance_has_its_own_process_list(node: Node, instances: tuple[Device, Device]) -> None:
    tenant = node.open("/dev/null")
    gpu = node.machine.gpus[0]
    gpu.add_process(tenant.pid, MIB, instance=gpu.instances[1])
    assert [await node.holders.is_held(each) for each in instances] == [False, True]
    assert [await node.kinds(each) for each in instances] == [{}, {tenant.pid: HolderKind.PROCESS}]


async def test_open_gpu_node_makes_a_process_holder_of_no_instance(
    node: Node, instances: tuple[Device, Device]
) -> None:
    node.open(node.machine.gpus[0].node)
    for each in instances:
        assert await node.kinds(each) == {}
        assert await node.not_covered(each) == [
            "holders: 1 process(es) have only the whole GPU's node open, which does not show which instance they use"
        ]


async def test_open_capability_node_makes_a_process_holder_of_its_instance_alone(
    node: Node, instances: tuple[Device, Device]
) -> None:
    first, second = instances
    capability = next(each.host_path for each in first.access if "nvidia-cap" in each.host_path)
    tenant = node.open(capability)
    assert await node.kinds(first) == {tenant.pid: HolderKind.PROCESS}
    assert await node.kinds(second) == {}


async def test_unknown_capability_nodes_of_an_instance_are_reported_as_not_covered(
    node: Node, instances: tuple[Device, Device]
) -> None:
    first, _ = instances
    bare = replace(first, access=tuple(each for each in first.access if "nvidia-cap" not in each.host_path))
    (message,) = await node.not_covered(bare)
    assert "capability nodes of the instance" in message


async def test_capability_node_present_only_in_a_container_is_found_by_its_device_number(
    node: Node, instances: tuple[Device, Device]
) -> None:
    first, _ = instances
    terminal = Path(next(each.host_path for each in first.access if "nvidia-cap" in each.host_path)).resolve()
    number = terminal.stat().st_rdev
    name = f"nvidia-caps/nvidia-cap{os.minor(number)}"
    unmade = Access(AccessKind.DEVICE_NODE, str(node.machine.root / "unmade" / name), f"/dev/{name}")
    instance = replace(first, access=(first.access[0], unmade))
    tenant = node.open(terminal)
    (message,) = await node.not_covered(instance)
    assert "capability nodes of the instance" in message
    (node.machine.root / "proc/devices").write_text(f"Character devices:\n  1 mem\n{os.major(number)} nvidia-caps\n")
    assert await node.not_covered(instance) == []
    assert await node.kinds(instance) == {tenant.pid: HolderKind.PROCESS}


async def test_memory_of_one_instance_does_not_count_for_its_sibling(
    node: Node, instances: tuple[Device, Device]
) -> None:
    node.machine.gpus[0].instances[0].set("used", ALLOWANCE + MIB)
    assert [await node.holders.is_held(each) for each in instances] == [True, False]
    assert await node.kinds(instances[0]) == {0: HolderKind.UNTRACEABLE}


async def test_idle_memory_allowance_of_an_instance_grows_with_its_slices(tmp_path: Path) -> None:
    with Machine.create(tmp_path / "world", mebibytes=258) as machine:
        machine.gpus[0].split("3g.71gb", "1g.18gb")
        node = Node(machine)
        large, small, _ = await node.inventory.devices()
        for instance in machine.gpus[0].instances:
            instance.set("used", 3 * ALLOWANCE)
        assert [await node.holders.is_held(each) for each in (large, small)] == [False, True]
        machine.gpus[0].instances[0].set("used", 3 * ALLOWANCE + MARGIN + 1)
        assert await node.holders.is_held(large)
        await node.close()


# --- users, and missing queries


@pytest.mark.parametrize("list_name", ["compute", "graphics", "mps"])
async def test_process_in_any_driver_list_is_a_user_of_the_device(node: Node, device: Device, list_name: str) -> None:
    tenant = node.open("/dev/null")
    node.machine.gpus[0].add_process(tenant.pid, MIB, list_name=list_name)
    (user,) = await node.holders.list_users(device)
    assert (user.pid, user.kind) == (tenant.pid, HolderKind.PROCESS)
    assert user.command.startswith("python")
    assert [each.identity for each in (await node.holders.list_holders(device)).holders] == [user.identity]
    _, other = await node.inventory.devices()
    assert await node.holders.list_users(other) == ()


async def test_infrastructure_users_are_marked_as_infrastructure(node: Node, device: Device) -> None:
    daemon, tenant = node.open("/dev/null"), node.open("/dev/null")
    node.agents[daemon.pid] = DRIVER
    for each in (daemon, tenant):
        node.machine.gpus[0].add_process(each.pid, MIB)
    users = {user.pid: (user.kind, user.owner) for user in await node.holders.list_users(device)}
    assert users[daemon.pid] == (HolderKind.INFRASTRUCTURE, DRIVER[1])
    assert users[tenant.pid][0] is HolderKind.PROCESS


async def test_gone_unnamed_and_own_processes_are_no_users(node: Node, device: Device) -> None:
    zombie = node.open("/dev/null")
    kill_without_reaping(zombie)
    for pid in (0, GONE, zombie.pid, os.getpid()):
        node.machine.gpus[0].add_process(pid, MIB)
    assert await node.holders.list_users(device) == ()


async def test_listing_users_queries_the_driver_without_a_walk(node: Node, device: Device) -> None:
    """Cheap enough for every second: no child walks ``/proc``."""
    node.open(node.machine.gpus[0].node)
    assert await node.holders.list_users(device) == ()
    assert len(node.children.pids()) == 1


async def test_fast_path_reports_open_device_nodes_as_not_covered(
    node: Node, device: Device, instances: tuple[Device, Device]
) -> None:
    unasked = "open without a driver context were not searched for on this path"
    assert node.holders.not_covered(device) == (f"holders: processes that have the device's node {unasked}",)
    (message,) = node.holders.not_covered(instances[0])
    assert message == f"holders: processes that have the instance's or its GPU's nodes {unasked}"


async def test_gap_in_walk_coverage_is_reported_once(
    node: Node, device: Device, instances: tuple[Device, Device]
) -> None:
    for each in (device, *instances):
        assert (await node.holders.list_holders(each)).not_covered.count(UNSEEN) == 1


# --- walks under attack


CROWDED = """
import ctypes, os, resource, signal, threading
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
null, ready = os.open("/dev/null", os.O_RDONLY), threading.Semaphore(0)
for _ in range(12_000):
    os.dup(null)
def work():
    assert ctypes.CDLL(None).unshare(0x400) == 0  # CLONE_FILES: a table of its own
    ready.release()
    threading.Event().wait()
for _ in range(40):
    threading.Thread(target=work, daemon=True).start()
    ready.acquire()
print('{"ready": true}', flush=True)
signal.pause()
"""
"""Half a million descriptors, for a few megabytes of memory."""


async def test_tenant_that_slows_the_walk_takes_no_device_out_of_service(tmp_path: Path) -> None:
    with Machine.create(tmp_path / "world", mebibytes=64) as machine:
        node = Node(machine, look_budget=1.0)
        devices = await node.inventory.devices()
        crowd, holder = node.run(CROWDED), node.open(machine.gpus[0].node)
        reports = [await node.holders.list_holders(device) for device in devices]
        assert [[each.pid for each in report.holders] for report in reports] == [[holder.pid], []]
        for report in reports:
            (left_out,) = (each for each in report.uninspected if each.pid == crowd.pid)
            assert left_out.started > 0
            assert f"of uid {os.geteuid()}: there was no time to scan its" in left_out.command
        crowd.end()
        for device in devices:
            assert crowd.pid not in {each.pid for each in (await node.holders.list_holders(device)).uninspected}
        await node.close()


async def test_listed_process_without_time_for_inspection_is_a_holder_and_not_untraceable(tmp_path: Path) -> None:
    with Machine.create(tmp_path / "world", mebibytes=64) as machine:
        node = Node(machine, look_budget=0.0)
        device, _ = await node.inventory.devices()
        tenant = node.open("/dev/null")
        machine.gpus[0].add_process(tenant.pid, MIB)
        report = await node.holders.list_holders(device)
        assert [(each.pid, each.kind) for each in report.holders] == [(tenant.pid, HolderKind.PROCESS)]
        assert tenant.pid not in {each.pid for each in report.uninspected}
        await node.close()


async def test_memory_possibly_used_by_an_uninspected_process_is_no_untraceable_holder(tmp_path: Path) -> None:
    with Machine.create(tmp_path / "world", mebibytes=64) as machine:
        node = Node(machine, look_budget=0.0)
        device, _ = await node.inventory.devices()
        machine.gpus[0].set("used", ALLOWANCE + MIB)
        node.open(machine.gpus[0].node)
        report = await node.holders.list_holders(device)
        assert report.holders == ()
        assert report.uninspected
        await node.close()


async def test_uninspected_infrastructure_process_blocks_no_device(tmp_path: Path) -> None:
    with Machine.create(tmp_path / "world", mebibytes=64) as machine:
        node = Node(machine, look_budget=0.0)
        device, _ = await node.inventory.devices()
        daemon = node.open(machine.gpus[0].node)
        assert daemon.pid in {each.pid for each in (await node.holders.list_holders(device)).uninspected}
        node.agents[daemon.pid] = DRIVER
        assert daemon.pid not in {each.pid for each in (await node.holders.list_holders(device)).uninspected}
        await node.close()


async def test_unanswered_walk_is_no_device_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scrubber.adapters.shared_walks.WALKER_MODULE", "tests.adapters.wayward_child")
    with Machine.create(tmp_path / "world", mebibytes=64) as machine:
        node = Node(machine, walk_deadline=0.05)
        for device in await node.inventory.devices():
            with pytest.raises(Unavailable):
                await node.holders.list_holders(device)
            assert not await node.holders.is_held(device)
        await node.close()


TWO_TABLES = CROWDED.replace("range(40)", "range(2)").replace(
    "print(", "import sys\nheld = os.open(sys.argv[1], os.O_RDWR | os.O_NOCTTY)\nprint("
)
"""The device is opened last, behind thousands of other descriptors."""


async def test_holder_behind_many_descriptors_is_found_by_subsequent_walks(
    tmp_path: Path,
) -> None:
    with Machine.create(tmp_path / "world", mebibytes=64) as machine:
        node = Node(machine, look_budget=0.02)
        device, _ = await node.inventory.devices()
        holder = node.run(TWO_TABLES, str(machine.gpus[0].node))
        found: list[int] = []
        while holder.pid not in found:
            found = [each.pid for each in (await node.holders.list_holders(device, scrub="scrub-1")).holders]
        await node.close()


# --- the idle level


async def test_idle_wait_lasts_until_the_memory_is_released(node: Node, device: Device) -> None:
    gpu = node.machine.gpus[0]
    assert await node.holders.wait_until_idle(device, 20.0) == 0
    gpu.set("used", MARGIN + 7)
    assert await node.holders.wait_until_idle(device, 0.0) == 7
    with freeing(node):
        assert await node.holders.wait_until_idle(device, 20.0) == 0


@contextmanager
def freeing(node: Node) -> Iterator[None]:
    """Release the memory during the wait: at the third query of the driver."""
    usage, queries = node.holders._read_usage, 0

    async def counting(device: Device) -> object:
        nonlocal queries
        queries += 1
        if queries == 3:
            node.machine.gpus[0].set("used", 0)
        return await usage(device)

    node.holders._read_usage = counting  # type: ignore[method-assign, assignment]
    yield
    assert queries == 3


async def test_holders_of_a_lost_device_raise_device_lost(node: Node, device: Device) -> None:
    node.machine.gpus[0].lose()
    for query in (node.holders.is_held, node.holders.list_holders):
        with pytest.raises(DeviceLost):
            await query(device)


def test_idle_level_is_not_raised_by_the_first_measurement() -> None:
    idle = IdleMemory(ALLOWANCE, MARGIN)
    idle.record_idle("GPU", ALLOWANCE * 3)
    assert idle.limit("GPU") == ALLOWANCE
    assert idle.excess("GPU", ALLOWANCE * 3) == ALLOWANCE * 2


def test_idle_level_falls_with_measurements_and_is_forgotten_with_the_driver() -> None:
    idle = IdleMemory(ALLOWANCE, MARGIN)
    idle.record_idle("GPU", MIB)
    idle.record_idle("GPU", 3 * MIB)
    assert idle.limit("GPU") == MIB + MARGIN
    assert (idle.limit("other"), idle.limit("other", 3)) == (ALLOWANCE, 3 * ALLOWANCE)
    idle.forget("GPU")
    assert idle.limit("GPU") == ALLOWANCE


@given(st.lists(st.integers(0, 1 << 40)), st.integers(0, 1 << 40))
def test_idle_level_never_exceeds_the_allowance(seen: list[int], used: int) -> None:
    idle = IdleMemory(ALLOWANCE, MARGIN)
    for each in seen:
        before = idle.limit("GPU")
        idle.record_idle("GPU", each)
        assert MARGIN <= idle.limit("GPU") <= before <= ALLOWANCE
    assert idle.excess("GPU", used) == max(0, used - idle.limit("GPU")) >= used - ALLOWANCE
