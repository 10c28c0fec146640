"""Every way of holding a simulated device is detected, and each holder is classified correctly."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from scrubber.adapters.children.process import Children
from scrubber.adapters.procwalk import Budget
from scrubber.adapters.sim import control, lease
from scrubber.adapters.sim.backend import SimBackend
from scrubber.adapters.sim.layout import load_node, write_json
from scrubber.domain.device import Device
from scrubber.domain.errors import DeviceLost, Unavailable, Unreadable
from scrubber.domain.infrastructure import InfrastructureClass, InfrastructureProcess, infrastructure_kind
from scrubber.domain.telemetry import HolderKind
from tests.adapters.sim_rig import Sim, Tenant, make
from tests.walks import finished_report


@pytest.fixture
async def sim(tmp_path: Path) -> AsyncIterator[Sim]:
    backend = SimBackend(make(tmp_path / "sim", mebibytes=1), confirm_seconds=0.05)
    await backend.start()
    made = Sim(tmp_path / "sim", backend)
    yield made
    made.close()
    await backend.close()


@pytest.fixture
async def device(sim: Sim) -> Device:
    return (await sim.backend.inventory.devices())[0]


async def kinds(sim: Sim, device: Device) -> dict[int, HolderKind]:
    assert await sim.backend.holders.is_held(device)
    return {holder.pid: holder.kind for holder in (await finished_report(sim.backend.holders, device)).holders}


async def test_process_with_only_a_mapping_is_a_holder(sim: Sim, device: Device) -> None:
    tenant = sim.start(device, "--mmap", "--hold", "forever").until_ready()
    assert await kinds(sim, device) == {tenant.pid: HolderKind.PROCESS}


async def test_descriptor_in_flight_is_an_untraceable_holder(sim: Sim, device: Device) -> None:
    tenant = sim.start(device, "--in-flight", "--hold", "forever").until_ready()
    assert await kinds(sim, device) == {0: HolderKind.UNTRACEABLE}
    tenant.end()
    assert not await sim.backend.holders.is_held(device)


async def test_reset_plan_names_the_holders_once_or_says_that_they_were_not_identified(
    sim: Sim, device: Device
) -> None:
    tenant = sim.start(device, "--hold", "forever").until_ready()
    (blocker,) = (await sim.backend.resetter.plan(device)).blockers
    assert blocker.endswith(f" (PID {tenant.pid}) holds device 0: it must end first.")
    tenant.end()
    sim.start(device, "--in-flight", "--hold", "forever").until_ready()
    assert (await sim.backend.resetter.plan(device)).blockers == ("A process that was not identified holds device 0.",)


async def test_holder_without_time_for_inspection_is_named_as_uninspected(sim: Sim, device: Device) -> None:
    sim.backend.holders._walks._budget = Budget(per_process=0.0, total=10.0)
    with sim.hold(device) as pid:
        report = await sim.backend.holders.list_holders(device)
        assert report.holders == ()
        (left_out,) = (each for each in report.uninspected if each.pid == pid)
        assert left_out.started > 0
        assert f"of uid {os.geteuid()}: there was no time to scan its" in left_out.command
    assert (await sim.backend.holders.list_holders(device)).uninspected == ()  # the lease shows it, without a walk


async def test_unanswered_walk_is_no_device_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scrubber.adapters.shared_walks.WALKER_MODULE", "tests.adapters.wayward_child")
    backend = SimBackend(make(tmp_path / "sim", mebibytes=1), walk_timeout=0.05)
    await backend.start()
    sim = Sim(tmp_path / "sim", backend)
    device, _ = await backend.inventory.devices()
    with sim.hold(device):
        for query in (backend.holders.list_holders, backend.holders.list_users):
            with pytest.raises(Unavailable):
                await query(device)
    sim.close()
    await backend.close()


async def test_quick_holder_check_of_a_simulated_device_has_no_coverage_gap(sim: Sim, device: Device) -> None:
    assert sim.backend.holders.not_covered(device) == ()


async def test_free_device_is_reported_without_waiting_for_a_confirmation(sim: Sim, device: Device) -> None:
    sim.backend.holders._confirm_seconds = 1e6
    assert (await sim.backend.holders.list_holders(device)).holders == ()


async def test_path_only_descriptor_counts_as_a_holder_only_once_reopened(sim: Sim, device: Device) -> None:
    """A descriptor opened with ``O_PATH`` is the only kind that the lease does not detect."""
    path_only = os.open(sim.files(device).memory, os.O_PATH)
    try:
        assert not await sim.backend.holders.is_held(device)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.read(path_only, 1)
        reopened = os.open(f"/proc/self/fd/{path_only}", os.O_RDONLY)
        assert await sim.backend.holders.is_held(device)
        os.close(reopened)
    finally:
        os.close(path_only)


async def test_child_of_a_killed_parent_is_a_holder(sim: Sim, device: Device) -> None:
    tenant = sim.start(device, "--leave-leftover", "--sigkill").until_ready()
    assert tenant.process.wait() == -signal.SIGKILL
    child = tenant.message["child_pid"]
    assert isinstance(child, int)
    pidfd = os.pidfd_open(child)
    try:
        assert await kinds(sim, device) == {child: HolderKind.PROCESS}
    finally:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)


DEAD_LEADER = """
import ctypes, json, os, platform, sys, threading
fd = os.open(sys.argv[1], os.O_RDWR)
threading.Thread(target=threading.Event().wait).start()
print(json.dumps({"ready": True}), flush=True)
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # ends this thread alone
"""


async def test_thread_that_outlives_its_process_leader_is_a_holder(sim: Sim, device: Device) -> None:
    tenant = sim.run([sys.executable, "-c", DEAD_LEADER, str(sim.files(device).memory)]).until_ready()
    tenant.until_its_leader_is_dead()
    assert await kinds(sim, device) == {tenant.pid: HolderKind.UNKILLABLE}


RENAMED = """
import json, os, signal, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
os.link(sys.argv[1], "other-name")
other = os.open("other-name", os.O_RDONLY)
os.unlink("other-name")
os.close(fd)
print(json.dumps({"ready": True}), flush=True)
signal.pause()
"""


async def test_holder_is_found_by_inode_under_any_name(
    sim: Sim, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tenant = sim.run([sys.executable, "-c", RENAMED, str(sim.files(device).memory)]).until_ready()
    assert await kinds(sim, device) == {tenant.pid: HolderKind.PROCESS}


async def test_holder_is_shown_to_the_operator_with_its_command(sim: Sim, device: Device) -> None:
    with sim.hold(device):
        (holder,) = (await sim.backend.holders.list_holders(device)).holders
        assert "--hold forever" in holder.command


async def test_stopped_holder_is_reported_as_a_process(sim: Sim, device: Device) -> None:
    with sim.hold(device) as pid:
        os.kill(pid, signal.SIGSTOP)
        assert await kinds(sim, device) == {pid: HolderKind.PROCESS}


async def test_ghost_fault_is_an_untraceable_holder(sim: Sim, device: Device) -> None:
    control.add_faults(sim.directory, device.id, ghost=True)
    assert await kinds(sim, device) == {0: HolderKind.UNTRACEABLE}
    control.clear_faults(sim.directory, device.id)
    assert not await sim.backend.holders.is_held(device)


async def test_unkillable_fault_names_the_real_holder(sim: Sim, device: Device) -> None:
    control.add_faults(sim.directory, device.id, unkillable=True)
    assert not await sim.backend.holders.is_held(device)
    with sim.hold(device) as pid:
        assert await kinds(sim, device) == {pid: HolderKind.UNKILLABLE}


LEASING = """
import fcntl, json, os, signal, sys
fd = os.open(sys.argv[1], os.O_RDWR)
signal.signal(signal.SIGIO, signal.SIG_IGN)
fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print(json.dumps({"ready": True}), flush=True)
signal.pause()
"""


async def test_tenants_own_lease_cannot_delay_the_holder_check(sim: Sim, device: Device) -> None:
    tenant = sim.run([sys.executable, "-c", LEASING, str(sim.files(device).memory)]).until_ready()
    assert await kinds(sim, device) == {tenant.pid: HolderKind.PROCESS}


OPENING = """
import json, os, sys
print(json.dumps({"ready": True}), flush=True)
while not os.path.exists(sys.argv[2]):
    for _ in range(100):
        os.close(os.open(sys.argv[1], os.O_RDWR))
"""


async def test_holder_check_tolerates_a_concurrent_open_of_the_device(sim: Sim, device: Device, tmp_path: Path) -> None:
    enough = tmp_path / "enough"
    tenant = sim.run([sys.executable, "-c", OPENING, str(sim.files(device).memory), str(enough)]).until_ready()
    answers = [await sim.backend.holders.is_held(device) for _ in range(300)]
    async with asyncio.timeout(60):
        while not answers[-1]:
            answers.append(await sim.backend.holders.is_held(device))
    enough.touch()
    assert tenant.process.wait(60) == 0


async def test_file_mode_changed_by_a_tenant_does_not_hide_holders_or_disable_the_device(
    sim: Sim, device: Device
) -> None:
    sim.files(device).memory.chmod(0)
    assert not await sim.backend.holders.is_held(device)
    with sim.hold(device) as pid:
        sim.files(device).memory.chmod(0)
        assert await kinds(sim, device) == {pid: HolderKind.PROCESS}


async def test_device_with_a_missing_or_swapped_file_is_never_free(sim: Sim, device: Device) -> None:
    memory = sim.files(device).memory
    memory.rename(memory.with_name("hidden"))
    with pytest.raises(DeviceLost):
        await sim.backend.holders.is_held(device)
    memory.write_bytes(bytes(device.memory_bytes))
    with pytest.raises(Unreadable, match="memory was replaced"):
        await sim.backend.holders.is_held(device)


async def test_device_with_a_malformed_control_file_is_never_free(sim: Sim, device: Device) -> None:
    write_json(sim.files(device).directory / "control.json", {"ghost": "perhaps"})
    with pytest.raises(Unreadable, match="ghost"):
        await sim.backend.holders.is_held(device)


async def test_service_and_its_children_are_no_holders(tmp_path: Path) -> None:
    children = Children()
    backend = SimBackend(make(tmp_path / "sim"), children=children, confirm_seconds=0.0)
    device = (await backend.inventory.devices())[0]
    with backend.inventory.find_sim_device(device).memory.open("rb"):
        (holder,) = (await finished_report(backend.holders, device)).holders
        assert holder.kind is HolderKind.UNTRACEABLE
    assert not await backend.holders.is_held(device)
    await backend.close()


def test_broken_lease_does_not_kill_the_checking_process(tmp_path: Path) -> None:
    """The checking process handles no signal at all; the service does not handle SIGIO either."""
    path = tmp_path / "file"
    path.write_bytes(b"x")
    script = (
        "import sys; from pathlib import Path; from scrubber.adapters.sim import lease\n"
        "path = Path(sys.argv[1]); inode = path.stat().st_ino\n"
        "for _ in range(20000): lease.is_held(path, inode)"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(path)]) as checking:
        while checking.poll() is None:
            os.close(os.open(path, os.O_RDONLY))
        assert checking.returncode == 0
    assert not lease.is_held(path, path.stat().st_ino)


def test_holder_check_does_not_kill_a_process_that_changes_the_device_layout(tmp_path: Path) -> None:
    directory = make(tmp_path / "sim")
    memory = load_node(directory).devices[0].memory
    script = (
        "import sys; from contextlib import suppress; from pathlib import Path\n"
        "from scrubber.adapters.sim import shape; from scrubber.domain.errors import DeviceBusy\n"
        "directory, shapes = Path(sys.argv[1]), 0\n"
        "while shapes < 20:\n"
        "    with suppress(DeviceBusy):\n"
        "        shape.split(directory, '0', 2) if shapes % 2 == 0 else shape.merge(directory, '0')\n"
        "        shapes += 1"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(directory)]) as changing:
        while changing.poll() is None:
            with suppress(BlockingIOError):
                os.close(os.open(memory, os.O_RDONLY | os.O_NONBLOCK))
        assert changing.returncode == 0


# --- infrastructure, and processes that have only the device's node open


KEEP_OPEN = """
import json, os, signal, sys
kept = [os.open(path, os.O_RDWR) for path in sys.argv[1:]]
print(json.dumps({"ready": True}), flush=True)
signal.pause()
"""


class Agents:
    """A backend with a lookup that knows the PIDs in ``owners``."""

    def __init__(self) -> None:
        self.owners: dict[int, str] = {}

    async def __call__(self, pid: int, *, has_context: bool) -> InfrastructureProcess | None:
        owner = self.owners.get(pid)
        kind = infrastructure_kind(InfrastructureClass.MONITORING, has_context=has_context)
        return None if owner is None else InfrastructureProcess(kind, owner)


@pytest.fixture
def agents(sim: Sim) -> Agents:
    made = Agents()
    sim.backend.holders._infrastructure = made
    return made


def keep_open(sim: Sim, *paths: Path) -> Tenant:
    return sim.run([sys.executable, "-c", KEEP_OPEN, *map(str, paths)]).until_ready()


async def test_process_with_only_the_node_open_is_a_holder(sim: Sim, device: Device) -> None:
    tenant = keep_open(sim, sim.files(device).node)
    assert await kinds(sim, device) == {tenant.pid: HolderKind.PROCESS}
    assert [user.pid for user in await sim.backend.holders.list_users(device)] == [tenant.pid]


async def test_monitoring_agent_with_the_node_open_does_not_hold_the_device(
    sim: Sim, device: Device, agents: Agents
) -> None:
    agent = keep_open(sim, sim.files(device).node)
    agents.owners[agent.pid] = "gpu-operator/exporter-x"
    assert not await sim.backend.holders.is_held(device)
    line = f"holders: gpu-operator/exporter-x (PID {agent.pid}) has the device open, as the policy allows"
    assert sim.backend.holders.not_covered(device) == (line,)
    (holder,) = (await finished_report(sim.backend.holders, device)).holders
    assert (holder.pid, holder.kind, holder.owner) == (
        agent.pid,
        HolderKind.INFRASTRUCTURE,
        "gpu-operator/exporter-x",
    )
    agent.end()
    assert not await sim.backend.holders.is_held(device)
    assert sim.backend.holders.not_covered(device) == ()


async def test_unknown_process_beside_a_monitoring_agent_holds_the_device(
    sim: Sim, device: Device, agents: Agents
) -> None:
    agent, tenant = (keep_open(sim, sim.files(device).node) for _ in range(2))
    agents.owners[agent.pid] = "gpu-operator/exporter-x"
    assert await kinds(sim, device) == {agent.pid: HolderKind.INFRASTRUCTURE, tenant.pid: HolderKind.PROCESS}


async def test_infrastructure_with_the_memory_open_holds_the_device_as_validation(
    sim: Sim, device: Device, agents: Agents
) -> None:
    agent = keep_open(sim, sim.files(device).node, sim.files(device).memory)
    agents.owners[agent.pid] = "gpu-operator/validator-x"
    assert await kinds(sim, device) == {agent.pid: HolderKind.VALIDATION}
    (user,) = await sim.backend.holders.list_users(device)
    assert (user.kind, user.owner) == (HolderKind.VALIDATION, "gpu-operator/validator-x")


async def test_descriptor_in_flight_beside_a_monitoring_agent_is_an_untraceable_holder(
    sim: Sim, device: Device, agents: Agents
) -> None:
    agent = keep_open(sim, sim.files(device).node)
    agents.owners[agent.pid] = "gpu-operator/exporter-x"
    sim.start(device, "--in-flight", "--hold", "forever").until_ready()
    assert await kinds(sim, device) == {agent.pid: HolderKind.INFRASTRUCTURE, 0: HolderKind.UNTRACEABLE}


async def test_missing_node_is_a_lost_device(sim: Sim, device: Device) -> None:
    sim.files(device).node.unlink()
    with pytest.raises(DeviceLost, match="is gone"):
        await sim.backend.holders.is_held(device)


async def test_monitoring_agent_without_time_for_inspection_blocks_no_device(
    sim: Sim, device: Device, agents: Agents
) -> None:
    agent = keep_open(sim, sim.files(device).node)
    sim.backend.holders._walks._budget = Budget(per_process=0.0, total=10.0)
    assert agent.pid in {each.pid for each in (await sim.backend.holders.list_holders(device)).uninspected}
    agents.owners[agent.pid] = "gpu-operator/exporter-x"
    assert agent.pid not in {each.pid for each in (await sim.backend.holders.list_holders(device)).uninspected}
    with sim.hold(device):
        assert agent.pid in {each.pid for each in (await sim.backend.holders.list_holders(device)).uninspected}
