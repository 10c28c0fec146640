"""The kernels for AMD GPUs: their counts are exact on the CPU, and the shipped code objects are made from their source."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from scripts.make_amd_kernels import ARCHITECTURES, ROOT, SOURCES, compile_object, main, object_path
from scrubber.adapters.amd.hip import HipGpu, kernel_object
from scrubber.adapters.amd.kernel_files import AmdPaths
from scrubber.adapters.children.child import Fault
from tests.amd.machine import AmdMachine

ADDRESS = "0000:0c:00.0"


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_shipped_code_objects_are_those_that_the_compiler_makes_of_the_source(source: Path) -> None:
    shipped = {path.suffixes[0][1:]: path.read_bytes() for path in (ROOT / source).parent.glob(f"{source.stem}.*.co")}
    assert shipped == {each: compile_object(ROOT / source, each) for each in ARCHITECTURES}
    for architecture, content in shipped.items():
        assert f"amdgcn-amd-amdhsa--{architecture}".encode() in content


def test_code_object_of_another_source_is_reported(tmp_path: Path) -> None:
    source = tmp_path / "kernels.c"
    source.write_bytes((ROOT / SOURCES[0]).read_bytes())
    for architecture in ARCHITECTURES:
        content = compile_object(source, architecture)
        object_path(source, architecture).write_bytes(content)
    assert main(["--check", str(source)]) == 0
    source.write_text(source.read_text().replace("GROUP 256", "GROUP 128"))
    assert main(["--check", str(source)]) == 1


def test_missing_compiler_is_reported_with_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", "--compiler", "clang-0"]) == 1
    assert "apt-get install clang-19 lld-19" in capsys.readouterr().err


@pytest.mark.parametrize("architecture", ["gfx1100", "../kernels", ""])
def test_gpu_without_kernels_is_refused_by_its_architecture(architecture: str) -> None:
    with pytest.raises(Fault, match=r"no kernels .* this version has them for gfx90a, gfx942") as refused:
        kernel_object(architecture)
    assert refused.value.code == "away"


def test_missing_rocm_is_no_fault_of_the_device(tmp_path: Path) -> None:
    with pytest.raises(Fault, match="install the ROCm runtime") as refused:
        HipGpu(AmdPaths(tmp_path), address=ADDRESS, gpu_id=1, architecture="gfx942", units=1)
    assert refused.value.code == "away"


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HipGpu:
    with AmdMachine.create(tmp_path, gpus=1, mebibytes=2) as machine:
        monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0")
        (part,) = machine.parts.values()
        return HipGpu(AmdPaths(tmp_path), address=ADDRESS, gpu_id=part.gpu_id, architecture="gfx942", units=1)


def test_residue_is_counted_exactly_and_by_part(gpu: HipGpu) -> None:
    piece = gpu.allocate(4096)
    assert piece is not None
    content = bytes(1000) + b"\x01\xff" * 20 + bytes(4096 - 1040)
    gpu.copy_to_device(piece.pointer, content)
    gpu.launch("count_nonzero", (piece.pointer, 256), 0, gpu.counter(0), gpu.counter(4), 1008)
    counters = gpu.counters()
    assert counters[0] == 40
    assert counters[4:6] == [8, 32]
    gpu.launch("fill_zero", (piece.pointer, 256))
    assert gpu.copy_to_host(piece.pointer, 4096) == bytes(4096)


def test_pattern_differs_at_every_offset_and_a_changed_byte_is_detected(gpu: HipGpu) -> None:
    piece = gpu.allocate(4096)
    assert piece is not None
    gpu.launch("fill_pattern", (piece.pointer, 256), 1 << 40, 12345)
    written = gpu.copy_to_host(piece.pointer, 4096)
    assert len({written[at : at + 16] for at in range(0, 4096, 16)}) == 256
    gpu.launch("check_pattern", (piece.pointer, 256), 1 << 40, 12345, gpu.counter(0))
    assert gpu.counters()[0] == 0
    gpu.copy_to_device(piece.pointer + 77, bytes([written[77] ^ 1]))
    gpu.launch("check_pattern", (piece.pointer, 256), 1 << 40, 12345, gpu.counter(0))
    assert gpu.counters()[0] == 1


def test_products_in_both_directions_agree_with_arithmetic(gpu: HipGpu) -> None:
    piece = gpu.allocate(4096)
    assert piece is not None
    size, base = 5, piece.pointer
    a, b, one, other = (base + 4 * size * size * index for index in range(4))
    for matrix, seed in ((a, 1), (b, 2)):
        gpu.launch("fill_u32_mix", (matrix, size * size), seed)
    for name, product in (("matmul_forward", one), ("matmul_backward", other)):
        gpu.launch(name, (a, b, product, size))
    cells = ctypes.c_uint32 * (size * size)
    x, y, found, again = (
        list(cells.from_buffer_copy(gpu.copy_to_host(at, 4 * size * size))) for at in (a, b, one, other)
    )
    expected = [
        sum(x[row * size + k] * y[k * size + column] for k in range(size)) % 2**32
        for row in range(size)
        for column in range(size)
    ]
    assert found == again == expected
    assert len(set(x)) > 1


def test_memory_that_the_driver_attributes_to_another_device_is_not_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with AmdMachine.create(tmp_path, gpus=1, mebibytes=2):
        monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0")
        wrong = HipGpu(AmdPaths(tmp_path), address=ADDRESS, gpu_id=999, architecture="gfx942", units=1)
        with pytest.raises(Fault, match="HIP uses another one"):
            wrong.allocate_all(lambda: None)


def test_device_at_another_address_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with AmdMachine.create(tmp_path, gpus=2, mebibytes=2):
        monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "1")
        with pytest.raises(Fault, match=r"instead of the one at 0000:0c:00\.0"):
            HipGpu(AmdPaths(tmp_path), address=ADDRESS, gpu_id=1000, architecture="gfx942", units=1)
