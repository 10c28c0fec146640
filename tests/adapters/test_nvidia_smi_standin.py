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
from tests.nvidia.world import World

OPENER = "import os, sys; os.open(sys.argv[1], os.O_RDWR | os.O_NOCTTY); print(1, flush=True); sys.stdin.read()"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World.create(tmp_path / "world") as world:
        yield world


def smi(world: World, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([world.nvidia_smi, *words], capture_output=True, text=True, check=False)


def test_nvidia_smi_reset_clears_conditions_and_settings_but_not_memory(world: World) -> None:
    there = world.gpus[0]
    there.fill("secret")
    there.add_ecc_errors(3)
    there.need_reset()
    for attribute, value in {"fields/230": 1, "compute_mode": 3, "power_limit": 300000, "mig_mode_pending": 1}.items():
        there.set(attribute, value)
    there.set("clock_offsets/2.0", "-200 -500 500")
    done = smi(world, "--gpu-reset", "-i", there.uuid)
    assert (done.returncode, there.resets()) == (0, 1), done.stdout
    assert "successfully reset" in done.stdout
    read = {
        name: there.text(name) for name in ("ecc_uncorrected_volatile", "fields/230", "compute_mode", "power_limit")
    }
    assert read == {
        "ecc_uncorrected_volatile": "0",
        "fields/230": "0",
        "compute_mode": "0",
        "power_limit": "700000",
    }
    assert (there.text("ecc_uncorrected_aggregate"), there.text("mig_mode")) == ("3", "1")
    assert there.text("clock_offsets/2.0") == "0 -500 500"
    assert there.get("error") is None
    assert there.content().startswith(b"secret")


def test_nvidia_smi_reset_is_refused_while_a_process_has_the_gpu(world: World) -> None:
    there, other = world.gpus
    opener = [sys.executable, "-c", OPENER, str(there.node)]
    with subprocess.Popen(opener, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        refusal = smi(world, "--gpu-reset", "-i", there.uuid)
        assert (refusal.returncode, there.resets()) == (255, 0)
        assert "In use by another client" in refusal.stdout
        assert smi(world, "-r", "bus", "-i", "1").returncode == 0
        assert other.resets() == 1
        holder.kill()
    there.add_process(os.getpid())
    assert smi(world, "--gpu-reset", "-i", there.uuid).returncode == 255
    there.remove_process(os.getpid())
    assert smi(world, "-pm", "1", "-i", there.uuid).returncode == 0
    assert smi(world, "--gpu-reset", "-i", there.uuid).returncode == 255
    assert smi(world, "-pm", "0", "-i", there.uuid).returncode == 0
    assert smi(world, "--gpu-reset", "-i", there.uuid).returncode == 0


def test_open_nvml_handle_blocks_a_nvidia_smi_reset(world: World) -> None:
    first, second = world.gpus
    with console(world.environment) as nvml:
        nvml.call("nvmlInitWithFlags", pynvml.NVML_INIT_FLAG_NO_GPUS)
        nvml.call("nvmlDeviceGetHandleByPciBusId", first.pci_address)
        assert smi(world, "--gpu-reset", "-i", first.uuid).returncode == 255
        assert smi(world, "--gpu-reset", "-i", second.uuid).returncode == 0
        nvml.call("nvmlShutdown")
        assert smi(world, "--gpu-reset", "-i", first.uuid).returncode == 0


def test_nvidia_smi_fails_with_the_documented_exit_codes(world: World) -> None:
    first, second = world.gpus
    first.fail_resets()
    failed = smi(world, "--gpu-reset", "-i", first.uuid)
    assert (failed.returncode, first.resets()) == (255, 0)
    second.lose()
    assert smi(world, "--gpu-reset", "-i", second.uuid).returncode == 15
    assert smi(world, "--gpu-reset", "-i", "GPU-nobody").returncode == 6
    assert smi(world, "--no-such-flag").returncode == 2
    world.remove_driver()
    assert smi(world, "--gpu-reset", "-i", first.uuid).returncode == 9


def test_hanging_nvidia_smi_reset_ends_only_by_a_signal(world: World) -> None:
    world.gpus[0].hang_resets()
    with subprocess.Popen([world.nvidia_smi, "--gpu-reset", "-i", "0"]) as stuck:
        with pytest.raises(subprocess.TimeoutExpired):
            stuck.wait(0.3)
        stuck.kill()
        assert stuck.wait() == -signal.SIGKILL


def test_nvidia_smi_reset_keeps_mig_mode_and_removes_all_instances(tmp_path: Path) -> None:
    with World.create(tmp_path / "split", gpus=1, mebibytes=34) as world:
        there = world.gpus[0]
        there.split("1g.18gb", "1g.18gb")
        assert smi(world, "--gpu-reset", "-i", there.uuid).returncode == 0
        assert (there.text("mig_mode"), there.instances) == ("1", ())
