"""The program of the cluster check's pods on a GPU: a stand-in for the driver's library whose memory is a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clustercheck import tenant

ROOT = Path(__file__).parents[2]
MEMORY = 16 << 20
REACHED = 14 << 20
"""All but the 2 MiB of the counter."""
SECRET = "0123456789abcdef"


class Gpu:
    """One GPU that several processes use, one after the other."""

    def __init__(self, directory: Path) -> None:
        self.memory = directory / "gpu"
        self.memory.write_bytes(bytes(MEMORY))
        flags = "-std=gnu11", "-O2", "-shared", "-fPIC", "-Wall", "-Werror", f"-I{ROOT / 'tests/clustercheck'}"
        library = directory / "libcuda.so.1"
        subprocess.run(["gcc", *flags, "-o", library, ROOT / "tests/cluster/libcuda.c"], check=True)
        self._environment = {
            "PATH": os.defpath,
            "LD_LIBRARY_PATH": str(directory),
            "CLUSTER_CHECK_TEST_GPU": str(self.memory),
            "CLUSTER_CHECK_PROGRAM": (ROOT / "tests/clustercheck/tenant.py").read_text(),
            "CLUSTER_CHECK_KERNELS": (ROOT / "tests/clustercheck/search.ptx").read_text(),
        }
        self._directory = directory

    def start(self, **options: Any) -> subprocess.Popen[str]:
        options = {"secret": SECRET, "memoryLimit": 1 << 40, **options}
        environment = {**self._environment, "CLUSTER_CHECK_OPTIONS": json.dumps(options)}
        return subprocess.Popen(
            [sys.executable, "-c", tenant.BOOT], env=environment, cwd=self._directory, stdout=subprocess.PIPE, text=True
        )

    def search(self) -> dict[str, Any]:
        """Return what the next tenant finds."""
        with self.start(role="search", end="hold") as process:
            assert process.stdout is not None
            (found,) = json.loads(process.stdout.readline())["devices"]
            process.terminate()
        assert process.returncode == 128 + 9
        return dict(found)


@pytest.fixture
def gpu(tmp_path: Path) -> Gpu:
    return Gpu(tmp_path)


@pytest.mark.parametrize(("end", "code"), [("exit", 0), ("kill", 137), ("crash", 134)])
def test_next_process_finds_the_whole_secret_in_the_memory_of_an_ungated_gpu(gpu: Gpu, end: str, code: int) -> None:
    with gpu.start(role="write", end=end) as process:
        assert process.stdout is not None
        (written,) = json.loads(process.stdout.readline())["devices"]
    assert process.returncode == code
    assert written["writtenBytes"] == written["foundBytes"] == REACHED
    found = gpu.search()
    assert (found["name"], found["memoryBytes"]) == ("5d5d5d5d-5d5d-5d5d-5d5d-5d5d5d5d5d5d", MEMORY)
    assert found["foundBytes"] == found["searchedBytes"] == REACHED


def test_search_of_a_cleared_gpu_finds_nothing_and_then_its_own_secret(gpu: Gpu) -> None:
    with gpu.start(role="write", end="exit") as process:
        process.communicate()
    gpu.memory.write_bytes(bytes(MEMORY))
    found = gpu.search()
    assert (found["foundBytes"], found["searchedBytes"]) == (0, REACHED)
    assert found["ownFoundBytes"] == found["ownWrittenBytes"] == REACHED


def test_gpu_that_cannot_be_used_is_reported_with_the_call_that_failed(gpu: Gpu) -> None:
    gpu.memory.unlink()
    with gpu.start(role="write", end="exit") as process:
        output, _ = process.communicate()
    assert process.returncode == tenant.FAILED
    assert json.loads(output) == {"event": "failed", "message": "CudaError: cuInit failed: CUDA_ERROR"}


def test_container_without_a_memory_limit_of_its_own_is_not_filled(gpu: Gpu) -> None:
    with gpu.start(role="write", end="out-of-memory") as process:
        output, _ = process.communicate()
    assert process.returncode == 0
    assert json.loads(output.splitlines()[-1])["event"] == "not-covered"
