"""The stand-in for ``nvidia-smi`` refuses, resets and hangs as the real one does."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from tests.nvidia.console import console
from tests.nvidia.machine import Machine

OPENER = "import os, sys; os.open(sys.argv[1], os.O_RDWR | os.O_NOCTTY); print(1, flush=True); sys.stdin.read()"


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with Machine.create(tmp_path / "world") as machine:
        yield machine


def smi(machine: Machine, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([machine.nvidia_smi, *words], capture_output=True, text=True, check=False)


def test_nvidia_smi_reset_clears_conditions_and_settings_but_not_memory(machine: Machine) -> None:
    gpu = machine.gpus[0]
    gpu.fill("secret")
    gpu.add_ecc_errors(3)
    gpu.need_reset()
    for attribute, value in {"fields/230": 1, "compute_mode": 3, "power_limit": 300000, "mig_mode_pending": 1}.items():
        gpu.set(attribute, value)
    gpu.set("clock_offsets/2.0", "-200 -500 500")
    done = smi(machine, "--gpu-reset", "-i", gpu.uuid)
    assert (done.returncode, gpu.resets()) == (0, 1), done.stdout
    assert "successfully reset" in done.stdout
    read = {name: gpu.text(name) for name in ("ecc_uncorrected_volatile", "fields/230", "compute_mode", "power_limit")}
    assert read == {
        "ecc_uncorrected_volatile": "0",
        "fields/230": "0",
        "compute_mode": "0",
        "power_limit": "700000",
    }
    assert (gpu.text("ecc_uncorrected_aggregate"), gpu.text("mig_mode")) == ("3", "1")
    assert gpu.text("clock_offsets/2.0") == "0 -500 500"
    assert gpu.get("error") is None
    assert gpu.content().startswith(b"secret")


def test_nvidia_smi_reset_is_refused_while_a_process_has_the_gpu(machine: Machine) -> None:
    gpu, other = machine.gpus
    opener = [sys.executable, "-c", OPENER, str(gpu.node)]
    with subprocess.Popen(opener, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        refusal = smi(machine, "--gpu-reset", "-i", gpu.uuid)
        assert (refusal.returncode, gpu.resets()) == (255, 0)
        assert "In use by another client" in refusal.stdout
        assert smi(machine, "-r", "bus", "-i", "1").returncode == 0
        assert other.resets() == 1
        holder.kill()
    gpu.add_process(os.getpid())
    assert smi(machine, "--gpu-reset", "-i", gpu.uuid).returncode == 255
    gpu.remove_process(os.getpid())
    assert smi(machine, "-pm", "1", "-i", gpu.uuid).returncode == 0
    assert smi(machine, "--gpu-reset", "-i", gpu.uuid).returncode == 255
    assert smi(machine, "-pm", "0", "-i", gpu.uuid).returncode == 0
    assert smi(machine, "--gpu-reset", "-i", gpu.uuid).returncode == 0


def test_open_nvml_handle_blocks_a_nvidia_smi_reset(machine: Machine) -> None:
    first, second = machine.gpus
    with console(machine.environment) as nvml:
        nvml.call("nvmlInitWithFlags", pynvml.NVML_INIT_FLAG_NO_GPUS)
        nvml.call("nvmlDeviceGetHandleByPciBusId", first.pci_address)
        assert smi(machine, "--gpu-reset", "-i", first.uuid).returncode == 255
        assert smi(machine, "--gpu-reset", "-i", second.uuid).returncode == 0
        nvml.call("nvmlShutdown")
        assert smi(machine, "--gpu-reset", "-i", first.uuid).returncode == 0


def test_nvidia_smi_fails_with_the_documented_exit_codes(machine: Machine) -> None:
    first, second = machine.gpus
    first.fail_resets()
    failed = smi(machine, "--gpu-reset", "-i", first.uuid)
    assert (failed.returncode, first.resets()) == (255, 0)
    second.lose()
    assert smi(machine, "--gpu-reset", "-i", second.uuid).returncode == 15
    assert smi(machine, "--gpu-reset", "-i", "GPU-unknown").returncode == 6
    assert smi(machine, "--no-such-flag").returncode == 2
    machine.remove_driver()
    assert smi(machine, "--gpu-reset", "-i", first.uuid).returncode == 9


def test_hanging_nvidia_smi_reset_ends_only_by_a_signal(machine: Machine) -> None:
    machine.gpus[0].hang_resets()
    with subprocess.Popen([machine.nvidia_smi, "--gpu-reset", "-i", "0"]) as stuck:
        with pytest.raises(subprocess.TimeoutExpired):
            stuck.wait(0.3)
        stuck.kill()
        assert stuck.wait() == -signal.SIGKILL


def test_nvidia_smi_reset_keeps_mig_mode_and_removes_all_instances(tmp_path: Path) -> None:
    with Machine.create(tmp_path / "split", gpus=1, mebibytes=34) as machine:
        gpu = machine.gpus[0]
        gpu.split("1g.18gb", "1g.18gb")
        assert smi(machine, "--gpu-reset", "-i", gpu.uuid).returncode == 0
        assert (gpu.text("mig_mode"), gpu.instances) == ("1", ())
