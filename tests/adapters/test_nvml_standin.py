"""The stand-in for the driver's library answers the unmodified binding as NVML is documented to.

Tests over the stand-in prove only as much as it resembles the real library. These tests therefore record every
behaviour on which the code under test relies: each line could be turned into a test of the real library.
"""

import ctypes
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from tests.nvidia.build import exported_functions, library
from tests.nvidia.console import Console, Handle, Refused, Struct, console
from tests.nvidia.machine import MIB, Machine


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with Machine.create(tmp_path / "world") as machine:
        yield machine


@pytest.fixture
def nvml(machine: Machine) -> Iterator[Console]:
    """Initialise NVML as the project's children do."""
    with console(machine.environment) as nvml:
        nvml.call("nvmlInitWithFlags", pynvml.NVML_INIT_FLAG_NO_GPUS)
        yield nvml


def gpu(nvml: Console, machine: Machine, number: int = 0) -> Handle:
    handle = nvml.call("nvmlDeviceGetHandleByPciBusId", machine.gpus[number].pci_address)
    assert isinstance(handle, Handle)
    return handle


POLL = 7
"""The number of the system call ``poll`` on x86-64."""


def refused(code: int) -> "pytest.RaisesExc[Refused]":
    return pytest.raises(Refused, check=lambda error: error.code == code)


# --- initialisation


def test_library_exports_every_function_named_in_its_source(tmp_path: Path) -> None:
    built = tmp_path / "library.so"
    built.write_bytes(library())
    loaded = ctypes.CDLL(str(built))
    assert [name for name in exported_functions() if not hasattr(loaded, name)] == []


def test_library_copied_elsewhere_finds_no_driver(machine: Machine, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "libnvidia-ml.so.1").write_bytes(library())
    with console({"LD_LIBRARY_PATH": str(elsewhere)}) as nvml, refused(pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
        nvml.call("nvmlInit")


def test_every_function_fails_before_initialization_and_after_shutdown(machine: Machine) -> None:
    with console(machine.environment) as nvml:
        for _ in range(2):  # nested, as the real one counts
            nvml.call("nvmlInit")
        handle = gpu(nvml, machine)
        nvml.call("nvmlShutdown")
        assert nvml.call("nvmlDeviceGetUUID", handle) == machine.gpus[0].uuid
        nvml.call("nvmlShutdown")
        for function, arguments in (
            ("nvmlDeviceGetUUID", (handle,)),
            ("nvmlDeviceGetCount", ()),
            ("nvmlSystemGetDriverVersion", ()),
            ("nvmlEventSetCreate", ()),
        ):
            with refused(pynvml.NVML_ERROR_UNINITIALIZED):
                nvml.call(function, *arguments)
        nvml.call("nvmlInit")
        with refused(pynvml.NVML_ERROR_INVALID_ARGUMENT):
            nvml.call("nvmlDeviceGetUUID", handle)


@pytest.mark.parametrize("code", [4, 9, 18, 999])
def test_driver_error_is_reported_at_initialization_and_afterwards(machine: Machine, code: int) -> None:
    with console(machine.environment) as nvml:
        machine.init_error(code)
        with refused(code):
            nvml.call("nvmlInit")
        machine.bring_driver_back()
        nvml.call("nvmlInit")
        handle = gpu(nvml, machine)
        machine.init_error(code)
        with refused(code):
            nvml.call("nvmlDeviceGetUUID", handle)
        assert nvml.call("nvmlErrorString", 9) == "Driver Not Loaded"


def test_node_without_gpus_is_an_error_unless_allowed_by_flag(tmp_path: Path) -> None:
    with Machine.create(tmp_path / "world", gpus=0) as machine, console(machine.environment) as nvml:
        with refused(pynvml.NVML_ERROR_NOT_FOUND):
            nvml.call("nvmlInit")
        nvml.call("nvmlInitWithFlags", pynvml.NVML_INIT_FLAG_NO_GPUS)
        assert nvml.call("nvmlDeviceGetCount") == 0


def test_query_about_one_gpu_attaches_to_no_other(machine: Machine, nvml: Console) -> None:
    first, second = machine.gpus
    handle = gpu(nvml, machine, 1)
    assert nvml.call("nvmlDeviceGetUUID", handle) == second.uuid
    assert (first.attached(), second.attached()) == ((), (nvml.pid,))
    assert nvml.call("nvmlDeviceGetUUID", nvml.call("nvmlDeviceGetHandleByUUID", second.uuid)) == second.uuid
    assert first.attached() == (nvml.pid,), "a search by UUID passes every GPU on the way"


def test_initialization_attaches_to_no_gpu(machine: Machine) -> None:
    with console(machine.environment) as nvml:
        nvml.call("nvmlInit")
        assert nvml.call("nvmlDeviceGetCount") == 2
        assert [gpu.attached() for gpu in machine.gpus] == [()] * 2


def test_initialization_without_attach_lists_no_gpu(machine: Machine) -> None:
    with console(machine.environment) as nvml:
        nvml.call("nvmlInitWithFlags", pynvml.NVML_INIT_FLAG_NO_GPUS | pynvml.NVML_INIT_FLAG_NO_ATTACH)
        assert nvml.call("nvmlDeviceGetCount") == 0
        with refused(pynvml.NVML_ERROR_NOT_FOUND):
            gpu(nvml, machine)


def test_attached_gpu_stays_open_until_shutdown(machine: Machine, nvml: Console) -> None:
    def opened() -> bool:
        device_number = machine.gpus[0].node.stat().st_rdev
        return any(entry.stat().st_rdev == device_number for entry in Path(f"/proc/{nvml.pid}/fd").iterdir())

    assert not opened()
    gpu(nvml, machine)
    assert opened()
    nvml.call("nvmlShutdown")
    assert not opened()


def test_gpu_device_nodes_have_unique_device_numbers(machine: Machine) -> None:
    numbers = [machine.gpus[0].node.stat().st_rdev, machine.gpus[1].node.stat().st_rdev]
    numbers += [Path(f"/dev/{name}").stat().st_rdev for name in ("null", "zero", "full", "random", "tty")]
    assert len(set(numbers)) == len(numbers)


# --- errors of one GPU


def test_error_of_one_function_or_gpu_affects_no_other(machine: Machine, nvml: Console) -> None:
    first, second = gpu(nvml, machine, 0), gpu(nvml, machine, 1)
    machine.gpus[0].fail("nvmlDeviceGetName", 999)
    with refused(999):
        nvml.call("nvmlDeviceGetName", first)
    assert nvml.call("nvmlDeviceGetUUID", first)
    machine.gpus[0].lose()
    with refused(pynvml.NVML_ERROR_GPU_IS_LOST):
        nvml.call("nvmlDeviceGetUUID", first)
    with refused(pynvml.NVML_ERROR_GPU_IS_LOST):
        gpu(nvml, machine, 0)
    assert nvml.call("nvmlDeviceGetName", second) == "NVIDIA H200"
    machine.gpus[0].heal()
    assert nvml.call("nvmlDeviceGetName", first) == "NVIDIA H200"


def test_removed_gpu_is_lost_and_added_gpu_appears_after_reinitialization(machine: Machine, nvml: Console) -> None:
    first = gpu(nvml, machine, 0)
    machine.remove_gpu(machine.gpus[0])
    with refused(pynvml.NVML_ERROR_GPU_IS_LOST):
        nvml.call("nvmlDeviceGetUUID", first)
    added = machine.add_gpu()
    with refused(pynvml.NVML_ERROR_NOT_FOUND):
        nvml.call("nvmlDeviceGetHandleByPciBusId", added.pci_address)
    nvml.call("nvmlShutdown")
    nvml.call("nvmlInitWithFlags", pynvml.NVML_INIT_FLAG_NO_GPUS)
    assert nvml.call("nvmlDeviceGetUUID", gpu(nvml, machine, 1)) == added.uuid


def test_call_about_a_hanging_gpu_never_returns(machine: Machine, nvml: Console) -> None:
    handle = gpu(nvml, machine)
    machine.gpus[0].hang("nvmlDeviceGetTemperature")
    assert nvml.call("nvmlDeviceGetName", handle)
    nvml.send("nvmlDeviceGetTemperature", handle, 0)
    with console(machine.environment) as other:
        other.call("nvmlInitWithFlags", pynvml.NVML_INIT_FLAG_NO_GPUS)
        assert other.call("nvmlDeviceGetTemperature", gpu(other, machine, 1), 0) == 31
        other.send("nvmlDeviceGetTemperature", gpu(other, machine, 0), 0)
        assert not other.answers_within(0.2)
    assert not nvml.answers_within(0)


def test_older_driver_lacks_newer_functions(machine: Machine, nvml: Console) -> None:
    handle = gpu(nvml, machine)
    machine.age("nvmlDeviceGetMemoryInfo_v2")
    with refused(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND):
        nvml.call("nvmlDeviceGetMemoryInfo", handle, version=pynvml.nvmlMemory_v2)
    assert nvml.call("nvmlDeviceGetMemoryInfo", handle).total == 16 * MIB


def test_unsupported_gpu_features_return_not_supported(machine: Machine, nvml: Console) -> None:
    handle = gpu(nvml, machine)
    machine.gpus[0].unset("temperature", "ecc_mode")
    for function, arguments in (
        ("nvmlDeviceGetTemperature", (0,)),
        ("nvmlDeviceGetEccMode", ()),
        ("nvmlDeviceGetTotalEccErrors", (1, 0)),
        ("nvmlDeviceGetAutoBoostedClocksEnabled", ()),
        ("nvmlDeviceSetAutoBoostedClocksEnabled", (1,)),
        ("nvmlDeviceGetNvLinkState", (0,)),
        ("nvmlDeviceGetGpuInstanceId", ()),
    ):
        with refused(pynvml.NVML_ERROR_NOT_SUPPORTED):
            nvml.call(function, handle, *arguments)


# --- attributes of a GPU


def test_gpu_attributes_are_returned(machine: Machine, nvml: Console) -> None:
    handle, target = gpu(nvml, machine, 1), machine.gpus[1]
    answers = {
        "nvmlDeviceGetUUID": target.uuid,
        "nvmlDeviceGetName": "NVIDIA H200",
        "nvmlDeviceGetIndex": 1,
        "nvmlDeviceGetMinorNumber": 1,
        "nvmlDeviceGetNumaNodeId": 1,
        "nvmlDeviceGetArchitecture": pynvml.NVML_DEVICE_ARCH_HOPPER,
        "nvmlDeviceGetCudaComputeCapability": [9, 0],
        "nvmlDeviceGetVbiosVersion": "96.00.D0.00.01",
        "nvmlDeviceGetGspFirmwareVersion": "580.65.06",
        "nvmlDeviceGetMigMode": [0, 0],
        "nvmlDeviceGetEccMode": [1, 1],
        "nvmlDeviceGetSupportedPerformanceStates": [0],
        "nvmlDeviceGetRemappedRows": [0, 0, 0, 0],
        "nvmlDeviceGetPowerManagementLimitConstraints": [200000, 700000],
    }
    assert {function: nvml.call(function, handle) for function in answers} == answers
    pci = nvml.call("nvmlDeviceGetPciInfo", handle)
    assert (pci.busId, pci.busIdLegacy, pci.bus) == ("00000000:3B:00.0", "0000:3B:00.0", 0x3B)
    assert nvml.call("nvmlSystemGetDriverVersion") == "580.65.06"
    assert nvml.call("nvmlSystemGetCudaDriverVersion_v2") == 13000


def test_reserved_memory_counts_as_used_only_in_the_old_call(machine: Machine, nvml: Console) -> None:
    handle = gpu(nvml, machine)
    machine.gpus[0].set("used", 3 * MIB)
    old = nvml.call("nvmlDeviceGetMemoryInfo", handle)
    new = nvml.call("nvmlDeviceGetMemoryInfo", handle, version=pynvml.nvmlMemory_v2)
    assert (new.total, new.reserved, new.used, new.free) == (16 * MIB, 2 * MIB, 3 * MIB, 11 * MIB)
    assert (old.total, old.used, old.free) == (16 * MIB, 5 * MIB, 11 * MIB)
    with refused(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH):
        nvml.call("nvmlDeviceGetMemoryInfo", handle, version=0x1000018)


def test_each_field_value_has_its_own_status(machine: Machine, nvml: Console) -> None:
    machine.gpus[0].set("fields/230", 4)
    machine.gpus[0].set("fields/92", "18446744073709551615 3")
    fields = [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, 92, 7]
    action, large, absent = nvml.call("nvmlDeviceGetFieldValues", gpu(nvml, machine), fields)
    assert (action.nvmlReturn, action.value.uiVal) == (0, pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET)
    assert (large.valueType, large.value.ullVal) == (pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, 2**64 - 1)
    assert absent.nvmlReturn == pynvml.NVML_ERROR_NOT_SUPPORTED


def test_nvlinks_report_state_and_remote_device(machine: Machine, nvml: Console) -> None:
    first, second = machine.gpus
    first.link(0, second)
    first.link(1, "00000000:C0:00.0", active=False)
    handle = gpu(nvml, machine)
    assert [nvml.call("nvmlDeviceGetNvLinkState", handle, link) for link in (0, 1)] == [1, 0]
    assert nvml.call("nvmlDeviceGetNvLinkRemotePciInfo", handle, 0).busId == second.text("pci")
    types = [nvml.call("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link) for link in (0, 1)]
    assert types == [pynvml.NVML_NVLINK_DEVICE_TYPE_GPU, pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH]
    assert nvml.call("nvmlDeviceGetNvLinkErrorCounter", handle, 0, 0) == 0
    with refused(pynvml.NVML_ERROR_INVALID_ARGUMENT):
        nvml.call("nvmlDeviceGetNvLinkState", handle, pynvml.NVML_NVLINK_MAX_LINKS)


def test_topology_is_the_configured_level_or_derived_from_numa_nodes(machine: Machine, nvml: Console) -> None:
    first, second = gpu(nvml, machine, 0), gpu(nvml, machine, 1)

    def level(one: Handle, other: Handle) -> object:
        return nvml.call("nvmlDeviceGetTopologyCommonAncestor", one, other)

    machine.gpus[0].set("numa_node", 0)
    machine.gpus[1].set("numa_node", 1)
    assert (level(first, first), level(first, second)) == (pynvml.NVML_TOPOLOGY_INTERNAL, pynvml.NVML_TOPOLOGY_SYSTEM)
    machine.gpus[1].set("numa_node", 0)
    assert level(first, second) == pynvml.NVML_TOPOLOGY_NODE
    machine.gpus[0].place_near(machine.gpus[1], pynvml.NVML_TOPOLOGY_SINGLE)
    assert [level(first, second), level(second, first)] == [pynvml.NVML_TOPOLOGY_SINGLE] * 2


def test_retired_pages_are_returned_in_a_large_enough_buffer(machine: Machine, nvml: Console) -> None:
    handle = gpu(nvml, machine)
    machine.gpus[0].set("retired_pages/0", "")
    machine.gpus[0].set("retired_pages/1", " ".join(hex(0x1000 * page) for page in range(1, 9)))
    assert nvml.call("nvmlDeviceGetRetiredPages", handle, 0) == []
    assert nvml.call("nvmlDeviceGetRetiredPages", handle, 1) == [0x1000 * page for page in range(1, 9)]


def test_fabric_info_is_returned_in_each_version(machine: Machine, nvml: Console) -> None:
    handle, target = gpu(nvml, machine), machine.gpus[0]
    versions = {
        "c_nvmlGpuFabricInfo_v2_t": pynvml.nvmlGpuFabricInfo_v2,
        "c_nvmlGpuFabricInfo_v3_t": pynvml.nvmlGpuFabricInfo_v3,
    }
    target.set("fabric_state", pynvml.NVML_GPU_FABRIC_STATE_COMPLETED)
    target.set("fabric_status", 0)
    target.set("fabric_health_mask", 0x5)
    for name, version in versions.items():
        info = nvml.call("nvmlDeviceGetGpuFabricInfoV", handle, Struct(name, (("version", version),)))
        assert (info.state, info.status, info.healthMask) == (pynvml.NVML_GPU_FABRIC_STATE_COMPLETED, 0, 0x5)
    target.unset("fabric_state")
    with refused(pynvml.NVML_ERROR_NOT_SUPPORTED):
        nvml.call("nvmlDeviceGetGpuFabricInfo", handle, Struct("c_nvmlGpuFabricInfo_t", ()))


# --- processes


def test_processes_are_listed_by_kind_with_their_memory(machine: Machine, nvml: Console) -> None:
    handle, target = gpu(nvml, machine), machine.gpus[0]
    assert nvml.call("nvmlDeviceGetComputeRunningProcesses", handle) == []
    for pid in range(101, 121):
        target.add_process(pid, 4096)
    target.add_process(200, None, list_name="graphics")
    target.add_process(300, 0, list_name="mps")
    listed = nvml.call("nvmlDeviceGetComputeRunningProcesses", handle)
    assert [(each.pid, each.usedGpuMemory) for each in listed] == [(pid, 4096) for pid in range(101, 121)]
    assert {each.gpuInstanceId for each in listed} == {0xFFFFFFFF}
    (graphics,) = nvml.call("nvmlDeviceGetGraphicsRunningProcesses_v3", handle)
    assert (graphics.pid, graphics.usedGpuMemory) == (200, None)
    assert [each.pid for each in nvml.call("nvmlDeviceGetMPSComputeRunningProcesses_v3", handle)] == [300]
    assert nvml.call("nvmlDeviceGetMemoryInfo", handle, version=pynvml.nvmlMemory_v2).used == 20 * 4096
    target.remove_process(101)
    assert len(nvml.call("nvmlDeviceGetComputeRunningProcesses", handle)) == 19
    assert nvml.call("nvmlDeviceGetComputeRunningProcesses", gpu(nvml, machine, 1)) == []


CONTEXT = """
import fcntl, os, sys
file = open(sys.argv[1] + f"/{os.getpid()}", "w")
fcntl.flock(file, fcntl.LOCK_EX)
file.write("1048576"); file.flush()
print(1, flush=True); sys.stdin.read()
"""


def test_process_with_an_open_entry_is_listed_until_its_death(machine: Machine, nvml: Console) -> None:
    handle = gpu(nvml, machine)
    entries = machine.gpus[0].directory / "processes/compute.d"
    entries.mkdir(parents=True)
    holder = subprocess.Popen(
        [sys.executable, "-c", CONTEXT, str(entries)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    holder.stdout.readline()
    (listed,) = nvml.call("nvmlDeviceGetComputeRunningProcesses", handle)
    assert (listed.pid, listed.usedGpuMemory) == (holder.pid, MIB)
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # dead and not reaped
    assert nvml.call("nvmlDeviceGetComputeRunningProcesses", handle) == []
    assert nvml.call("nvmlDeviceGetMemoryInfo", handle, version=pynvml.nvmlMemory_v2).used == 0
    holder.wait()
    holder.stdin.close()
    holder.stdout.close()


# --- MIG


@pytest.fixture
def split(tmp_path: Path) -> Iterator[Machine]:
    """Provide one GPU with three instances, beside a whole one."""
    with Machine.create(tmp_path / "world", mebibytes=66) as machine:
        machine.gpus[0].split("1g.18gb", "1g.18gb", "2g.35gb")
        yield machine


@pytest.fixture
def split_nvml(split: Machine) -> Iterator[Console]:
    with console(split.environment) as nvml:
        nvml.call("nvmlInitWithFlags", pynvml.NVML_INIT_FLAG_NO_GPUS)
        yield nvml


def test_mig_instances_are_found_through_their_gpu(split: Machine, split_nvml: Console) -> None:
    nvml, parent = split_nvml, gpu(split_nvml, split)
    assert nvml.call("nvmlDeviceGetMigMode", parent) == [1, 1]
    handles = [nvml.call("nvmlDeviceGetMigDeviceHandleByIndex", parent, index) for index in range(3)]
    uuids = [nvml.call("nvmlDeviceGetUUID", handle) for handle in handles]
    assert uuids == [instance.uuid for instance in split.gpus[0].instances]
    assert all(uuid.startswith("MIG-") for uuid in uuids)
    with refused(pynvml.NVML_ERROR_NOT_FOUND):
        nvml.call("nvmlDeviceGetMigDeviceHandleByIndex", parent, 3)
    with refused(pynvml.NVML_ERROR_NOT_FOUND):
        nvml.call("nvmlDeviceGetMigDeviceHandleByIndex", gpu(nvml, split, 1), 0)
    assert [nvml.call("nvmlDeviceIsMigDeviceHandle", each) for each in (parent, handles[0])] == [0, 1]
    assert nvml.call("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handles[2]) is not None


def test_mig_instance_reports_its_share_and_refuses_gpu_settings(split: Machine, split_nvml: Console) -> None:
    nvml = split_nvml
    handle = nvml.call("nvmlDeviceGetMigDeviceHandleByIndex", gpu(nvml, split), 2)
    memory = nvml.call("nvmlDeviceGetMemoryInfo", handle, version=pynvml.nvmlMemory_v2)
    assert memory.total - memory.reserved == split.gpus[0].instances[2].usable_bytes == 16 * MIB
    attributes = nvml.call("nvmlDeviceGetAttributes", handle)
    assert (attributes.gpuInstanceSliceCount, attributes.computeInstanceSliceCount) == (2, 2)
    assert nvml.call("nvmlDeviceGetName", handle) == "NVIDIA H200 MIG 2g.35gb"
    for function in ("nvmlDeviceGetComputeMode", "nvmlDeviceGetEccMode", "nvmlDeviceGetMinorNumber"):
        with refused(pynvml.NVML_ERROR_NOT_SUPPORTED):
            nvml.call(function, handle)
    with refused(pynvml.NVML_ERROR_NOT_SUPPORTED):
        nvml.call("nvmlDeviceSetComputeMode", gpu(nvml, split), 3)


def test_process_on_an_instance_is_listed_on_the_instance_and_on_its_gpu(split: Machine, split_nvml: Console) -> None:
    nvml, parent = split_nvml, gpu(split_nvml, split)
    first, second, _ = split.gpus[0].instances
    split.gpus[0].add_process(101, MIB, instance=second)
    handles = [nvml.call("nvmlDeviceGetMigDeviceHandleByIndex", parent, index) for index in (0, 1)]
    listed = [nvml.call("nvmlDeviceGetComputeRunningProcesses", each) for each in (parent, *handles)]
    assert [[(each.pid, each.gpuInstanceId) for each in some] for some in listed] == [[(101, 2)], [], [(101, 2)]]
    assert first.ids != second.ids == (2, 0)


def test_destroyed_mig_instance_is_no_longer_a_device(split: Machine, split_nvml: Console) -> None:
    nvml = split_nvml
    handle = nvml.call("nvmlDeviceGetMigDeviceHandleByIndex", gpu(nvml, split), 0)
    split.gpus[0].merge()
    with refused(pynvml.NVML_ERROR_INVALID_ARGUMENT):
        nvml.call("nvmlDeviceGetUUID", handle)
    split.gpus[0].split("7g.141gb")
    with refused(pynvml.NVML_ERROR_INVALID_ARGUMENT):
        nvml.call("nvmlDeviceGetUUID", handle)


# --- settings


@pytest.mark.parametrize(
    ("setter", "arguments", "getter", "expected"),
    [
        ("nvmlDeviceSetComputeMode", (3,), "nvmlDeviceGetComputeMode", 3),
        ("nvmlDeviceSetPersistenceMode", (1,), "nvmlDeviceGetPersistenceMode", 1),
        ("nvmlDeviceSetAccountingMode", (1,), "nvmlDeviceGetAccountingMode", 1),
        ("nvmlDeviceSetPowerManagementLimit", (300000,), "nvmlDeviceGetPowerManagementLimit", 300000),
        ("nvmlDeviceSetEccMode", (0,), "nvmlDeviceGetEccMode", [1, 0]),
        ("nvmlDeviceSetMigMode", (1,), "nvmlDeviceGetMigMode", [0, 1]),
    ],
)
def test_written_settings_are_read_back(
    machine: Machine, nvml: Console, setter: str, arguments: tuple[int, ...], getter: str, expected: object
) -> None:
    handle = gpu(nvml, machine)
    nvml.call(setter, handle, *arguments)
    assert nvml.call(getter, handle) == expected
    assert nvml.call(getter, gpu(nvml, machine, 1)) != expected


def test_application_clocks_are_set_as_a_pair_and_reset(machine: Machine, nvml: Console) -> None:
    handle = gpu(nvml, machine)
    nvml.call("nvmlDeviceSetApplicationsClocks", handle, 2619, 1200)

    def clocks() -> list[int]:
        kinds = (pynvml.NVML_CLOCK_MEM, pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_GRAPHICS)
        return [nvml.call("nvmlDeviceGetApplicationsClock", handle, kind) for kind in kinds]

    assert clocks() == [2619, 1200, 1200]
    nvml.call("nvmlDeviceResetApplicationsClocks", handle)
    assert clocks() == [3201, 1980, 1980]
    nvml.call("nvmlDeviceSetGpuLockedClocks", handle, 300, 600)
    assert machine.gpus[0].text("gpu_locked_clocks") == "300 600"
    nvml.call("nvmlDeviceResetGpuLockedClocks", handle)
    assert machine.gpus[0].text("gpu_locked_clocks") == "none"


def test_restrictions_and_clock_offsets_are_stored_by_kind(machine: Machine, nvml: Console) -> None:
    handle = gpu(nvml, machine)
    nvml.call("nvmlDeviceSetAPIRestriction", handle, 0, 0)
    assert nvml.call("nvmlDeviceGetAPIRestriction", handle, 0) == 0
    with refused(pynvml.NVML_ERROR_NOT_SUPPORTED):
        nvml.call("nvmlDeviceGetAPIRestriction", handle, 1)
    memory = (("version", pynvml.nvmlClockOffset_v1), ("type", pynvml.NVML_CLOCK_MEM))
    offset = Struct("c_nvmlClockOffset_t", (*memory, ("clockOffsetMHz", -200)))
    nvml.call("nvmlDeviceSetClockOffsets", handle, offset)
    read = nvml.call("nvmlDeviceGetClockOffsets", handle, Struct("c_nvmlClockOffset_t", memory))
    assert (read.clockOffsetMHz, read.minClockOffsetMHz, read.maxClockOffsetMHz) == (-200, -500, 500)


def test_accounted_processes_are_listed_until_cleared(machine: Machine, nvml: Console) -> None:
    handle = gpu(nvml, machine)
    machine.gpus[0].set("accounting_pids", "101\n102")
    with refused(pynvml.NVML_ERROR_NOT_SUPPORTED):
        nvml.call("nvmlDeviceGetAccountingPids", handle)
    nvml.call("nvmlDeviceSetAccountingMode", handle, 1)
    assert nvml.call("nvmlDeviceGetAccountingPids", handle) == [101, 102]
    nvml.call("nvmlDeviceClearAccountingPids", handle)
    assert nvml.call("nvmlDeviceGetAccountingPids", handle) == []


def test_out_of_range_setting_is_refused_and_a_stubborn_setting_does_not_change(
    machine: Machine, nvml: Console
) -> None:
    handle, target = gpu(nvml, machine), machine.gpus[0]
    for setter, value in (("nvmlDeviceSetPowerManagementLimit", 900000), ("nvmlDeviceSetComputeMode", 1)):
        with refused(pynvml.NVML_ERROR_INVALID_ARGUMENT):
            nvml.call(setter, handle, value)
    target.refuse_changes("compute_mode")
    nvml.call("nvmlDeviceSetComputeMode", handle, 3)
    assert nvml.call("nvmlDeviceGetComputeMode", handle) == 0
    target.fail("nvmlDeviceSetComputeMode", pynvml.NVML_ERROR_NO_PERMISSION)
    with refused(pynvml.NVML_ERROR_NO_PERMISSION):
        nvml.call("nvmlDeviceSetComputeMode", handle, 3)


# --- events


def test_event_set_receives_only_events_after_registration(machine: Machine, nvml: Console) -> None:
    handle, target = gpu(nvml, machine), machine.gpus[0]
    target.raise_xid(13)
    events = nvml.call("nvmlEventSetCreate")
    types = nvml.call("nvmlDeviceGetSupportedEventTypes", handle)
    nvml.call("nvmlDeviceRegisterEvents", handle, types, events)
    with refused(pynvml.NVML_ERROR_TIMEOUT):
        nvml.call("nvmlEventSetWait_v2", events, 1)
    nvml.send("nvmlEventSetWait_v2", events, 10_000)
    target.raise_xid(95)
    target.add_ecc_errors(2)
    machine.gpus[1].raise_xid(79)
    first = nvml.answer()
    second = nvml.call("nvmlEventSetWait_v2", events, 10_000)
    assert (first.eventType, first.eventData, first.gpuInstanceId) == (
        pynvml.nvmlEventTypeXidCriticalError,
        95,
        0xFFFFFFFF,
    )
    assert second.eventType == pynvml.nvmlEventTypeDoubleBitEccError
    assert nvml.call("nvmlDeviceGetTotalEccErrors", handle, 1, 0) == 2
    with refused(pynvml.NVML_ERROR_TIMEOUT):
        nvml.call("nvmlEventSetWait_v2", events, 1)
    nvml.call("nvmlEventSetFree", events)


def test_only_supported_and_registered_events_are_delivered(machine: Machine, nvml: Console) -> None:
    handle, target = gpu(nvml, machine), machine.gpus[0]
    events = nvml.call("nvmlEventSetCreate")
    with refused(pynvml.NVML_ERROR_NOT_SUPPORTED):
        nvml.call("nvmlDeviceRegisterEvents", handle, pynvml.nvmlEventTypeClock, events)
    nvml.call("nvmlDeviceRegisterEvents", handle, pynvml.nvmlEventTypeXidCriticalError, events)
    target.add_ecc_errors(1)
    target.raise_xid(48)
    assert nvml.call("nvmlEventSetWait_v2", events, 10_000).eventData == 48


def test_event_names_the_instance_concerned(split: Machine, split_nvml: Console) -> None:
    nvml, handle = split_nvml, gpu(split_nvml, split)
    events = nvml.call("nvmlEventSetCreate")
    nvml.call("nvmlDeviceRegisterEvents", handle, pynvml.nvmlEventTypeXidCriticalError, events)
    split.gpus[0].raise_xid(43, split.gpus[0].instances[1])
    event = nvml.call("nvmlEventSetWait_v2", events, 10_000)
    assert (event.gpuInstanceId, event.computeInstanceId) == (2, 0)


def asleep_in_one_wait(pid: int) -> bool:
    """Whether the process sleeps in one ``poll`` of at least a minute."""
    called, *arguments = Path(f"/proc/{pid}/syscall").read_text().split()
    return called == str(POLL) and int(arguments[2], 16) >= 60_000


def test_event_wait_sleeps_until_any_process_writes_an_event(machine: Machine, nvml: Console) -> None:
    handle, target = gpu(nvml, machine), machine.gpus[0]
    events = nvml.call("nvmlEventSetCreate")
    nvml.call("nvmlDeviceRegisterEvents", handle, pynvml.nvmlEventTypeXidCriticalError, events)
    nvml.send("nvmlEventSetWait_v2", events, 600_000)
    while not asleep_in_one_wait(nvml.pid):
        os.sched_yield()
    subprocess.run(["sh", "-c", 'echo "8 95" >> "$0"', target.directory / "events"], check=True)
    assert nvml.answer().eventData == 95


def test_waits_of_several_processes_all_receive_an_event(machine: Machine) -> None:
    with console(machine.environment) as one, console(machine.environment) as other:
        for nvml in (one, other):
            nvml.call("nvmlInitWithFlags", pynvml.NVML_INIT_FLAG_NO_GPUS)
            events = nvml.call("nvmlEventSetCreate")
            nvml.call("nvmlDeviceRegisterEvents", gpu(nvml, machine), pynvml.nvmlEventTypeXidCriticalError, events)
            nvml.send("nvmlEventSetWait_v2", events, 60_000)
        machine.gpus[0].raise_xid(79)
        assert [nvml.answer().eventData for nvml in (one, other)] == [79, 79]


def test_newly_set_error_ends_an_event_wait(machine: Machine, nvml: Console) -> None:
    events = nvml.call("nvmlEventSetCreate")
    nvml.call("nvmlDeviceRegisterEvents", gpu(nvml, machine), pynvml.nvmlEventTypeXidCriticalError, events)
    nvml.send("nvmlEventSetWait_v2", events, 600_000)
    while not asleep_in_one_wait(nvml.pid):
        os.sched_yield()
    machine.gpus[0].fail("nvmlEventSetWait_v2", 999)
    with refused(999):
        nvml.answer()


def test_event_wait_on_a_lost_gpu_returns_an_error(machine: Machine, nvml: Console) -> None:
    handle = gpu(nvml, machine)
    events = nvml.call("nvmlEventSetCreate")
    nvml.call("nvmlDeviceRegisterEvents", handle, pynvml.nvmlEventTypeXidCriticalError, events)
    nvml.send("nvmlEventSetWait_v2", events, 60_000)
    machine.gpus[0].lose()
    with refused(pynvml.NVML_ERROR_GPU_IS_LOST):
        nvml.answer()


def test_device_node_can_be_opened_like_any_other(machine: Machine) -> None:
    descriptor = os.open(machine.gpus[0].node, os.O_RDWR | os.O_NOCTTY)
    assert os.fstat(descriptor).st_rdev == machine.gpus[0].node.stat().st_rdev
    os.close(descriptor)
    machine.close()
    with pytest.raises(OSError, check=lambda error: error.errno in (errno.EIO, errno.ENOENT, errno.ENXIO)):
        os.open(machine.gpus[0].node, os.O_RDWR | os.O_NOCTTY)
