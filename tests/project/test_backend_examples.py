"""The programs in ``deploy/backends`` against fake tools and a fake sysfs: what they list, claim and refuse."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from scrubber.adapters.command.answers import API_VERSION, REQUIRED_VERBS, Answer
from scrubber.adapters.command.inventory import parse_devices

BACKENDS = Path(__file__).parents[2] / "deploy" / "backends"
EXAMPLES = sorted(path.name for path in BACKENDS.iterdir())


class Program:
    """One example, with an environment in which its tools are fakes."""

    def __init__(self, name: str, directory: Path) -> None:
        self.path = BACKENDS / name
        self.directory = directory
        self.environment = {"PATH": f"{directory}:{os.defpath}", "SYSFS": str(directory / "sys")}

    def tool(self, name: str, script: str) -> None:
        """Install a fake tool, a shell script; it logs its arguments."""
        file = self.directory / name
        file.write_text(f'#!/bin/sh\necho "$@" >> {self.directory}/calls\n{script}\n')
        file.chmod(0o755)

    def file(self, path: str, content: str) -> Path:
        file = self.directory / "sys" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        return file

    def ask(self, verb: str, device: Mapping[str, Any] | None = None, *, status: int = 0) -> dict[str, Any]:
        request: dict[str, Any] = {"apiVersion": API_VERSION, "kind": "Request", "id": "1", "verb": verb}
        request |= {} if device is None else {"device": device}
        done = subprocess.run(
            (self.path, verb),
            input=json.dumps(request),
            capture_output=True,
            text=True,
            env=self.environment,
            check=False,
        )
        assert done.returncode == status, done
        answer: dict[str, Any] = json.loads(done.stdout)
        assert (answer.pop("apiVersion"), answer.pop("kind"), answer.pop("id")) == (API_VERSION, "Response", "1")
        return answer

    def device(self) -> dict[str, Any]:
        """Return the first device, as the service passes it; the service accepts the list."""
        answer = self.ask("inventory")
        first, *_ = parse_devices(Answer(str(self.path), answer, 0.0))
        return {"id": first.id, "index": first.index, "pci": dict(first.traits).get("pci_address")}

    def calls(self) -> list[str]:
        return (self.directory / "calls").read_text().splitlines()


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_supports_what_every_backend_needs_and_refuses_unknown_verbs(name: str, tmp_path: Path) -> None:
    program = Program(name, tmp_path)
    program.environment["SIMULATED_NODE"] = str(tmp_path)
    assert {*program.ask("capabilities")["verbs"], "capabilities"} >= {each.value for each in REQUIRED_VERBS}
    done = subprocess.run((program.path, "no-such-verb"), input="{}", text=True, env=program.environment, check=False)
    assert done.returncode == 13


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_says_what_its_device_cannot_prove(name: str) -> None:
    text = (BACKENDS / name).read_text()
    assert name == "simulated-node" or ("cannot prove: " in text and "Cleared: " in text)


@pytest.mark.parametrize(
    ("name", "variable"),
    [
        ("pci-function", "PCI_FUNCTIONS"),
        ("fpga", "FPGA_CARDS"),
        ("rdma-nic", "RDMA_NICS"),
        ("simulated-node", "SIMULATED_NODE"),
    ],
)
def test_example_without_its_variable_names_it_and_blames_no_device(name: str, variable: str, tmp_path: Path) -> None:
    assert Program(name, tmp_path).ask("inventory", status=12)["message"] == (
        f"{variable} is not set; add it to environment in the file of the backend."
    )


ADDRESS = "0000:3b:00.1"


@pytest.fixture
def function(tmp_path: Path) -> Program:
    program = Program("pci-function", tmp_path)
    program.environment["PCI_FUNCTIONS"] = ADDRESS
    place = f"bus/pci/devices/{ADDRESS}"
    for name, content in {"vendor": "0x15b3\n", "device": "0x101e\n", "reset": "", "reset_method": "flr bus\n"}.items():
        program.file(f"{place}/{name}", content)
    program.file(f"{place}/aer_dev_fatal", "Undefined 0\nTOTAL_ERR_FATAL 2\n")
    (tmp_path / "sys" / place / "iommu_group").symlink_to(tmp_path / "sys/kernel/iommu_groups/17")
    (tmp_path / "sys/kernel/iommu_groups/17").mkdir(parents=True)
    return program


def place_of(function: Program) -> Path:
    return function.directory / "sys" / "bus" / "pci" / "devices" / ADDRESS


def bind(function: Program, driver: str) -> None:
    target = function.directory / "sys" / "drivers" / driver
    target.mkdir(parents=True)
    (place_of(function) / "driver").symlink_to(target)


def test_pci_function_is_reset_and_claims_no_cleared_byte(function: Program) -> None:
    bind(function, "vfio-pci")
    (listed,) = function.ask("inventory")["devices"]
    assert (listed["id"], listed["model"], listed["memoryBytes"]) == (f"pci-{ADDRESS}", "PCI 0x15b3:0x101e", 0)
    assert listed["nodes"] == [{"path": "/dev/vfio/17"}]
    device = function.device()
    assert function.ask("telemetry", device) == {"errors": {"1": 2, "2": 0}}
    assert function.ask("reset-plan", device)["method"] == "flr"
    report = function.ask("erase", device)
    assert (report["totalBytes"], report["clearedBytes"], len(report["notCovered"])) == (0, 0, 1)
    assert (place_of(function) / "reset").read_text() == "1"


def test_pci_function_with_a_driver_is_not_reset(function: Program) -> None:
    bind(function, "mlx5_core")
    device = function.device()
    assert function.ask("reset-plan", device)["blockers"] == [
        "The driver mlx5_core uses the function; unbind it first."
    ]
    assert "mlx5_core" in function.ask("erase", device, status=11)["message"]
    assert (place_of(function) / "reset").read_text() == ""


def test_pci_function_that_only_its_bus_can_reset_is_not_reset(function: Program) -> None:
    (place_of(function) / "reset_method").write_text("bus\n")
    assert "whole bus" in function.ask("reset-plan", function.device())["unavailable"]


def test_pci_function_that_left_the_bus_is_lost(function: Program) -> None:
    device = function.device()
    (place_of(function) / "vendor").write_text("0xffff\n")
    assert function.ask("telemetry", device, status=10)["code"] == "lost"


HL_SMI = """case "$1" in -Q) cat <<'CSV'
index, uuid, bus_id, name, memory.total [MiB], driver_version, temperature.aip [C]
0, 01P4-HL2080A0-15-TNBS34-21-02-00, 0000:B3:00.0, HL-225, 98304 MiB, 1.18.0-ee698fb, 33 C
CSV
esac"""


@pytest.fixture
def gaudi(tmp_path: Path) -> Program:
    program = Program("gaudi", tmp_path)
    program.tool("hl-smi", HL_SMI)
    return program


def test_gaudi_claims_cleared_memory_only_where_its_driver_clears_it(gaudi: Program) -> None:
    device = gaudi.device()
    assert gaudi.ask("telemetry", device) == {"temperatureCelsius": 33}
    assert "memory_scrub=1" in gaudi.ask("erase", device, status=12)["message"]
    gaudi.file("module/habanalabs/parameters/memory_scrub", "0\n")
    gaudi.ask("erase", device, status=12)
    assert not [each for each in gaudi.calls() if each.startswith("-r")]
    gaudi.file("module/habanalabs/parameters/memory_scrub", "1\n")
    report = gaudi.ask("erase", device)
    assert report["clearedBytes"] == report["totalBytes"] == 98304 << 20
    assert "verifiedBytes" not in report
    assert "-r -i 0000:B3:00.0" in gaudi.calls()


def test_gaudi_without_its_tool_cannot_answer_now(tmp_path: Path) -> None:
    assert Program("gaudi", tmp_path).ask("inventory", status=12)["message"] == "hl-smi is not installed."


TT_SMI = """case "$1" in -s) cat > "$3" <<'JSON'
{"host_info": {"Driver": "TT-KMD 1.29"}, "device_info": [{"board_info": {"bus_id": "0000:0a:00.0", "board_type": "n300 L"},
 "telemetry": {"asic_temperature": " 41.5"}}]}
JSON
esac"""


def test_tenstorrent_card_is_reset_and_claims_no_cleared_byte(tmp_path: Path) -> None:
    program = Program("tenstorrent", tmp_path)
    program.tool("tt-smi", TT_SMI)
    device = program.device()
    assert device == {"id": "tt-0000:0a:00.0", "index": "0", "pci": "0000:0a:00.0"}
    assert program.ask("telemetry", device) == {"temperatureCelsius": 41}
    report = program.ask("erase", device)
    assert (report["totalBytes"], report["clearedBytes"], len(report["notCovered"])) == (0, 0, 1)
    assert "-r 0" in program.calls()


XPU_SMI = """case "$1" in
discovery) cat <<'JSON'
{"device_list": [{"device_id": 0, "device_name": "Intel(R) Data Center GPU Max 1100", "pci_bdf_address": "0000:4D:00.0"},
 {"device_id": 1, "device_name": "Intel(R) Data Center GPU Max 1100", "pci_bdf_address": "0000:9A:00.0"}]}
JSON
;; ps) echo '{"device_util_by_proc_list": [{"device_id": 0, "process_id": 4711}, {"device_id": 1, "process_id": 4712}]}'
;; health) echo '{"device_id": 0, "memory": {"status": "Critical"}, "core_temperature": {"status": "OK"}}'
esac"""


@pytest.fixture
def intel(tmp_path: Path) -> Program:
    program = Program("intel-gpu", tmp_path)
    program.tool("xpu-smi", XPU_SMI)
    for number, address in enumerate(("0000:4d:00.0", "0000:9a:00.0")):
        for name in (f"card{number}", f"renderD{128 + number}"):
            (tmp_path / "sys/bus/pci/devices" / address / "drm" / name).mkdir(parents=True)
    return program


def test_intel_gpu_is_reset_by_its_own_number_and_claims_no_cleared_byte(intel: Program) -> None:
    first, second = intel.ask("inventory")["devices"]
    assert (first["id"], first["memoryBytes"]) == ("intel-0000:4d:00.0", 0)
    assert second["nodes"] == [{"path": "/dev/dri/card1"}, {"path": "/dev/dri/renderD129"}]
    device = {"id": second["id"], "index": second["index"], "pci": second["pci"]}
    report = intel.ask("erase", device)
    assert (report["totalBytes"], report["clearedBytes"], len(report["notCovered"])) == (0, 0, 1)
    assert [each for each in intel.calls() if each.startswith("config")] == ["config -d 1 --reset"]


def test_intel_gpu_reports_its_own_processes_and_its_unhealthy_parts(intel: Program) -> None:
    device = intel.device()
    assert intel.ask("holders", device) == {"pids": [4711], "complete": False}
    assert intel.ask("telemetry", device) == {"conditions": {"health-memory": "Critical"}}


def test_intel_gpu_that_is_not_listed_any_more_is_lost(intel: Program) -> None:
    device = {**intel.device(), "pci": "0000:ff:00.0"}
    assert intel.ask("telemetry", device, status=10)["code"] == "lost"


@pytest.fixture
def fpga(tmp_path: Path) -> Program:
    program = Program("fpga", tmp_path)
    program.tool("xrt-smi", "")
    program.environment["FPGA_CARDS"] = ADDRESS
    program.file(f"bus/pci/devices/{ADDRESS}/vendor", "0x10ee\n")
    (place_of(program) / "drm" / "renderD128").mkdir(parents=True)
    return program


def test_fpga_is_reset_and_claims_no_cleared_byte(fpga: Program) -> None:
    (listed,) = fpga.ask("inventory")["devices"]
    assert (listed["id"], listed["nodes"]) == (f"fpga-{ADDRESS}", [{"path": "/dev/dri/renderD128"}])
    device = fpga.device()
    assert fpga.ask("telemetry", device) == {}
    report = fpga.ask("erase", device)
    assert (report["totalBytes"], report["clearedBytes"], len(report["notCovered"])) == (0, 0, 1)
    assert fpga.calls() == [f"reset -d {ADDRESS} --force"]


def test_fpga_whose_reset_fails_is_at_fault(fpga: Program) -> None:
    fpga.tool("xrt-smi", "exit 1")
    assert fpga.ask("reset", fpga.device(), status=10)["code"] == "failed"


def test_fpga_without_a_driver_is_not_listed(fpga: Program) -> None:
    (place_of(fpga) / "drm" / "renderD128").rmdir()
    assert "is XRT's driver loaded?" in fpga.ask("inventory", status=12)["message"]


@pytest.fixture
def nic(tmp_path: Path) -> Program:
    program = Program("rdma-nic", tmp_path)
    program.tool("devlink", "")
    program.environment["RDMA_NICS"] = ADDRESS
    for name, content in {"vendor": "0x15b3\n", "reset": "", "reset_method": "flr bus\n"}.items():
        program.file(f"bus/pci/devices/{ADDRESS}/{name}", content)
    for kind, name in {"infiniband_verbs": "uverbs0", "infiniband_mad": "umad0"}.items():
        (place_of(program) / kind / name).mkdir(parents=True)
    for name in ("bind", "unbind"):
        program.file(f"bus/pci/drivers/mlx5_core/{name}", "")
    (place_of(program) / "driver").symlink_to(tmp_path / "sys/bus/pci/drivers/mlx5_core")
    return program


def written_to(nic: Program) -> dict[str, str]:
    """Return what was written to the files that unbind, reset and bind the function."""
    driver = nic.directory / "sys/bus/pci/drivers/mlx5_core"
    files = {"unbind": driver / "unbind", "reset": place_of(nic) / "reset", "bind": driver / "bind"}
    return {name: file.read_text() for name, file in files.items()}


def test_rdma_nic_is_reloaded_and_reset_without_its_driver(nic: Program) -> None:
    (listed,) = nic.ask("inventory")["devices"]
    assert [each["path"] for each in listed["nodes"]] == ["/dev/infiniband/uverbs0", "/dev/infiniband/umad0"]
    report = nic.ask("erase", nic.device())
    assert (report["totalBytes"], report["clearedBytes"], len(report["notCovered"])) == (0, 0, 1)
    assert nic.calls() == [f"dev reload pci/{ADDRESS} action driver_reinit"]
    assert written_to(nic) == {"unbind": ADDRESS, "reset": "1", "bind": ADDRESS}


def test_rdma_nic_that_only_its_bus_can_reset_is_only_reloaded(nic: Program) -> None:
    (place_of(nic) / "reset_method").write_text("bus\n")
    assert nic.ask("reset-plan", nic.device())["method"] == "devlink reload"
    nic.ask("reset", nic.device())
    assert written_to(nic) == {"unbind": "", "reset": "", "bind": ""}


def test_rdma_nic_gets_its_driver_back_after_a_failed_reset(nic: Program) -> None:
    device = nic.device()
    (place_of(nic) / "reset").unlink()
    (place_of(nic) / "reset").mkdir()
    assert nic.ask("reset", device, status=10)["code"] == "failed"
    assert (nic.directory / "sys/bus/pci/drivers/mlx5_core/bind").read_text() == ADDRESS


def test_rdma_nic_without_a_driver_is_not_reset(nic: Program) -> None:
    device = nic.device()
    (place_of(nic) / "driver").unlink()
    assert "No driver is bound" in nic.ask("erase", device, status=11)["message"]
    assert not (nic.directory / "calls").exists()
