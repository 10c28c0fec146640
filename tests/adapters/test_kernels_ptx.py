"""The shipped PTX text matches its source, loads on old drivers, and fulfils the requirements of the on-chip pass."""

import functools
import hashlib
import re
import subprocess
import tempfile
from importlib.metadata import files
from pathlib import Path

import pytest

from scripts.make_kernels import NEWEST_VERSION, ROOT, SOURCES, KernelError, compile_ptx, main, source_heading

ARCHITECTURES = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
KERNELS = ROOT / SOURCES[0]
each_source = pytest.mark.parametrize("source", [ROOT / path for path in SOURCES], ids=lambda path: path.name)


@functools.cache
def assembled(text: Path, architecture: str) -> dict[str, str]:
    """Return the report of the CUDA toolkit's assembler, a development dependency, on each kernel of ``text``."""
    found = [file for file in files("nvidia-cuda-nvcc-cu12") or [] if file.name == "ptxas"]
    assert found, "ptxas is missing; install the development dependencies (nvidia-cuda-nvcc-cu12)"
    with tempfile.TemporaryDirectory() as out:
        command = [str(found[0].locate()), "-v", f"-arch={architecture}", str(text), "-o", f"{out}/kernels.cubin"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    parts = re.split(r"Compiling entry function '(\w+)'", done.stderr)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@each_source
def test_shipped_ptx_names_its_source_by_digest(source: Path) -> None:
    first = source.with_suffix(".ptx").read_bytes().split(b"\n", 1)[0]
    assert first.decode() == f"// {source.name} sha256:{hashlib.sha256(source.read_bytes()).hexdigest()}"


@each_source
def test_source_compiles_to_the_shipped_ptx_byte_for_byte(source: Path) -> None:
    assert source.with_suffix(".ptx").read_bytes() == compile_ptx(source)


@each_source
def test_shipped_ptx_loads_on_every_cuda_12_driver_and_every_gpu_since_volta(source: Path) -> None:
    text = source.with_suffix(".ptx").read_text("ascii")
    version = re.search(r"^\.version (\d+)\.(\d+)$", text, re.MULTILINE)
    assert version is not None
    assert (int(version[1]), int(version[2])) <= NEWEST_VERSION == (7, 8)
    assert re.findall(r"^\.target (.+)$", text, re.MULTILINE) == ["sm_70"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@each_source
def test_ptx_assembles_for_every_architecture_without_register_spills(source: Path, architecture: str) -> None:
    """A spilled value of the on-chip pass would mean a register that was not cleared, and a copy of it in memory."""
    output = assembled(source.with_suffix(".ptx"), architecture)
    assert output
    for kernel, words in output.items():
        assert "0 bytes spill stores, 0 bytes spill loads" in words, kernel


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_register_pass_uses_all_registers_of_a_thread_at_once(architecture: str) -> None:
    """Above 248, a thread is given 256 registers, and 256 threads use the whole register file: one block fits an SM."""
    words = assembled(KERNELS.with_suffix(".ptx"), architecture)["onchip_registers"]
    used = re.search(r"Used (\d+) registers", words)
    assert used is not None
    assert int(used[1]) > 248


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_shared_memory_pass_reserves_no_shared_memory_for_itself(architecture: str) -> None:
    """Shared memory that the kernel itself reserves would be missing from what the caller can request."""
    words = assembled(KERNELS.with_suffix(".ptx"), architecture)["onchip_shared"]
    assert "bytes smem" not in words


def test_changed_kernel_source_no_longer_matches_its_ptx(tmp_path: Path) -> None:
    source = tmp_path / "kernels.cu"
    source.write_text('extern "C" __global__ void one(int *p) { *p = 1; }\n')
    assert main([str(source)]) == 0
    assert main(["--check", str(source)]) == 0
    source.write_text('extern "C" __global__ void one(int *p) { *p = 2; }\n')
    assert main(["--check", str(source)]) == 1
    assert source.with_suffix(".ptx").read_bytes().split(b"\n", 1)[0] + b"\n" != source_heading(source)


def test_source_that_does_not_compile_is_refused_with_the_compilers_message(tmp_path: Path) -> None:
    source = tmp_path / "kernels.cu"
    source.write_text("this is no CUDA\n")
    with pytest.raises(KernelError, match=r"kernels\.cu.*\n.*error"):
        compile_ptx(source)
