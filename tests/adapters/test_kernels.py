"""The GPU kernels, run on the CPU: their counts are exact, and what they clear is cleared."""

import ctypes
import mmap
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.nvidia.hostkernels import REGISTER_BYTES, HostKernels, Processor

NONE = 2**64 - 1
PTX = Path(__file__).parents[2] / "scrubber/adapters/cuda/kernels.ptx"
SHARED_BYTES = 16 * 1024
CLEARED_REGISTER_BYTES = 240 * 256 * 4
SMS = 3
SPIN_LIMIT = 10**9
SIZES = (16, 32, 16 * 31, 16 * 32, 16 * 33, 4096, 65536 + 16)
SHAPES = ((1, 1), (1, 32), (3, 7), (8, 64), (200, 256))
NONCE = 0x0123456789ABCDEF


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels.build(PTX, tmp_path_factory.mktemp("kernels"))


class Memory:
    """Bytes at an address that is a multiple of 16 (and of a page)."""

    def __init__(self, size: int, content: bytes = b"") -> None:
        self._map = mmap.mmap(-1, max(size, 1))
        self._map[: len(content)] = content
        self.size = size
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def __getitem__(self, part: slice) -> bytes:
        return bytes(self._map[: self.size][part])

    def __setitem__(self, offset: int, content: bytes) -> None:
        self._map[offset : offset + len(content)] = content

    def words(self) -> list[int]:
        return [int(each) for each in numpy.frombuffer(self[:], numpy.uint64)]


@dataclass
class Gpu:
    """SMs whose memories stay as the last kernel left them."""

    kernels: HostKernels
    dead: frozenset[int] = frozenset()
    stuck: dict[int, int] = field(default_factory=dict)  # SM -> address
    shared: list[Memory] = field(default_factory=lambda: [Memory(SHARED_BYTES) for _ in range(SMS)])
    registers: list[Memory] = field(default_factory=lambda: [Memory(REGISTER_BYTES) for _ in range(SMS)])

    def run(
        self, name: str, *values: int | Memory, grid: tuple[int, ...] = (3,), block: tuple[int, ...] = (32,)
    ) -> None:
        processors = [
            Processor(number, self.shared[number].address, self.registers[number].address, self.stuck.get(number, 0))
            for number in range(SMS)
            if number not in self.dead
        ]
        numbers = [value.address if isinstance(value, Memory) else value for value in values]
        arguments = [
            number.to_bytes(width, "little")
            for number, width in zip(numbers, self.kernels.entries[name].widths, strict=True)
        ]
        assert self.kernels.launch(name, grid, block, arguments, processors, SMS) is None


@pytest.fixture
def gpu(kernels: HostKernels) -> Gpu:
    return Gpu(kernels)


def u64(*values: int) -> Memory:
    return Memory(8 * len(values), numpy.array(values, numpy.uint64).tobytes())


@dataclass(frozen=True)
class Counted:
    bytes: int
    first: int | None
    parts: list[int]


def counted(
    gpu: Gpu,
    memory: Memory,
    *,
    base: int = 0,
    part: int = 0,
    grid: tuple[int, ...] = (3,),
    block: tuple[int, ...] = (32,),
) -> Counted:
    count, first, parts = u64(0), u64(NONE), u64(*[0] * 64)
    gpu.run("count_nonzero", memory, memory.size // 16, base, count, first, parts, part, grid=grid, block=block)
    [found] = first.words()
    return Counted(count.words()[0], None if found == NONE else found, parts.words())


def differing(gpu: Gpu, memory: Memory, *, base: int = 0, nonce: int = NONCE) -> tuple[int, int | None]:
    bad, first = u64(0), u64(NONE)
    gpu.run("check_pattern", memory, memory.size // 16, base, nonce, bad, first)
    [found] = first.words()
    return bad.words()[0], None if found == NONE else found


def patterned(gpu: Gpu, size: int, *, base: int = 0, nonce: int = NONCE) -> Memory:
    memory = Memory(size)
    gpu.run("fill_pattern", memory, size // 16, base, nonce)
    return memory


# --- clearing and counting


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("blocks", "threads"), SHAPES)
def test_clear_kernel_clears_every_byte_and_none_beyond_for_any_size_and_grid(
    gpu: Gpu, size: int, blocks: int, threads: int
) -> None:
    memory = Memory(size + 32, b"\xff" * (size + 32))
    gpu.run("fill_zero", memory.address + 16, size // 16, grid=(blocks,), block=(threads,))
    assert memory[:16] == b"\xff" * 16
    assert memory[16 : 16 + size] == bytes(size)
    assert memory[16 + size :] == b"\xff" * 16


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("blocks", "threads"), SHAPES)
def test_residue_is_counted_byte_by_byte_for_any_size_and_grid(gpu: Gpu, size: int, blocks: int, threads: int) -> None:
    content = numpy.random.default_rng(size).integers(0, 3, size, numpy.uint8).tobytes()
    found = counted(gpu, Memory(size, content), grid=(blocks,), block=(threads,))
    assert found.bytes == size - content.count(0)
    assert found.first == next(i for i, byte in enumerate(content) if byte)


@given(size=st.integers(1, 600), place=st.floats(0, 1, exclude_max=True), value=st.integers(1, 255))
@settings(max_examples=200, deadline=None)
def test_single_nonzero_byte_is_found_at_any_position(
    kernels: HostKernels, size: int, place: float, value: int
) -> None:
    memory = Memory(16 * size)
    offset = int(place * memory.size)
    memory[offset] = bytes([value])
    found = counted(Gpu(kernels), memory, base=1 << 40, part=(1 << 40) + 16 * 100)
    assert found.bytes == 1
    assert found.first == (1 << 40) + offset
    assert found.parts[0 if offset < 1600 else 1] == 1
    assert sum(found.parts) == 1


def test_clean_memory_counts_no_residue_and_touches_no_counter(gpu: Gpu) -> None:
    assert counted(gpu, Memory(65536), part=1024) == Counted(0, None, [0] * 64)


def test_chunks_share_one_count_one_first_offset_and_one_map(gpu: Gpu) -> None:
    """Chunks lie anywhere in memory; the offsets specify the position of each in the run."""
    chunks = [(8192, Memory(4096)), (0, Memory(8192))]
    chunks[0][1][5] = b"\x01\x02"
    chunks[1][1][8191] = b"\x03"
    count, first, parts = u64(0), u64(NONE), u64(*[0] * 64)
    for base, memory in chunks:
        gpu.run("count_nonzero", memory, memory.size // 16, base, count, first, parts, 4096)
    assert count.words() == [3]
    assert first.words() == [8191]
    assert parts.words()[:4] == [0, 1, 2, 0]


def test_map_of_memory_full_of_residue_adds_up(gpu: Gpu) -> None:
    size = 64 * 4096
    found = counted(gpu, Memory(size, b"\x01" * size), part=4096)
    assert found.parts == [4096] * 64
    assert found.bytes == size


def test_residue_beyond_the_last_map_part_counts_for_the_last_part(gpu: Gpu) -> None:
    memory = Memory(32 * 66, b"\x01" * (32 * 66))
    found = counted(gpu, memory, part=32)
    assert found.parts == [32] * 63 + [96]


def test_no_residue_map_is_written_when_none_is_requested(gpu: Gpu) -> None:
    count, first = u64(0), u64(NONE)
    memory = Memory(64, b"\x01" * 64)
    gpu.run("count_nonzero", memory, 4, 0, count, first, 0, 0)
    assert (count.words(), first.words()) == ([64], [0])


# --- the pattern


@pytest.mark.parametrize("size", SIZES)
def test_pattern_reads_back_as_written(gpu: Gpu, size: int) -> None:
    base = 7 * 2**33
    assert differing(gpu, patterned(gpu, size, base=base), base=base) == (0, None)


def test_no_two_offsets_have_the_same_sixteen_pattern_bytes(gpu: Gpu) -> None:
    content = patterned(gpu, 1 << 20)[:]
    assert len({content[i : i + 16] for i in range(0, len(content), 16)}) == (1 << 20) // 16


@pytest.mark.parametrize("distance", [16, 4096, 65536, 512 * 1024])
def test_swapped_pattern_blocks_are_detected(gpu: Gpu, distance: int) -> None:
    """Effect of a broken address line: each block is valid, but at the wrong address."""
    memory = patterned(gpu, 1 << 20)
    one, other = memory[0:16], memory[distance : distance + 16]
    memory[0], memory[distance] = other, one
    bad, first = differing(gpu, memory)
    assert bad > 16
    assert first is not None
    assert first < 16


def test_pattern_of_an_earlier_run_is_detected(gpu: Gpu) -> None:
    """A write that did not arrive leaves the pattern of another nonce."""
    memory, earlier = patterned(gpu, 4096), patterned(gpu, 4096, nonce=NONCE + 1)
    memory[1024] = earlier[1024:1088]
    bad, first = differing(gpu, memory)
    assert bad > 32
    assert first is not None
    assert 1024 <= first < 1032


@given(offset=st.integers(0, 4095), bit=st.integers(0, 7))
@settings(max_examples=100, deadline=None)
def test_single_flipped_bit_counts_as_one_bad_byte(kernels: HostKernels, offset: int, bit: int) -> None:
    gpu = Gpu(kernels)
    memory = patterned(gpu, 4096, base=2**37)
    memory[offset] = bytes([memory[offset : offset + 1][0] ^ (1 << bit)])
    assert differing(gpu, memory, base=2**37) == (1, 2**37 + offset)


def test_access_to_unmapped_memory_ends_the_launch_with_its_address(kernels: HostKernels) -> None:
    """A test can therefore give a GPU a bad page, and a kernel that reads past its chunk is detected."""
    nowhere = Memory(4096)
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(nowhere.address), ctypes.c_size_t(4096), 0)
    arguments = [nowhere.address.to_bytes(8, "little"), (16).to_bytes(8, "little")]
    assert kernels.launch("fill_zero", (1,), (1,), arguments, [Processor(0, 0, 0)], 1) == nowhere.address


# --- on-chip memory


@dataclass(frozen=True)
class OnChip:
    seen: set[int]
    ids: int
    residue: int
    failed: int


def on_chip(gpu: Gpu, kernel: str, *, rounds: int = 1, grid: int = SMS) -> OnChip:
    seen, residue, failed = u64(*[0] * 17), u64(0), u64(0)
    for _ in range(rounds):
        arrived = u64(0)
        last = (SHARED_BYTES,) if kernel == "onchip_shared" else ()
        block = 1024 if kernel == "onchip_shared" else 256
        gpu.run(kernel, seen, residue, failed, arrived, grid, SPIN_LIMIT, *last, grid=(grid,), block=(block,))
        assert arrived.words() == [grid]
    words = seen.words()
    marked = {64 * i + bit for i, word in enumerate(words[:16]) for bit in range(64) if word >> bit & 1}
    return OnChip(marked, words[16], residue.words()[0], failed.words()[0])


def memories(gpu: Gpu, kernel: str) -> list[tuple[Memory, int]]:
    """Return the memory of each SM that ``kernel`` processes, and how many bytes of it the kernel clears."""
    if kernel == "onchip_shared":
        return [(each, SHARED_BYTES) for each in gpu.shared]
    return [(each, CLEARED_REGISTER_BYTES) for each in gpu.registers]


BOTH = pytest.mark.parametrize("kernel", ["onchip_shared", "onchip_registers"])


@BOTH
def test_on_chip_kernel_reaches_every_sm(gpu: Gpu, kernel: str) -> None:
    assert on_chip(gpu, kernel) == OnChip({0, 1, 2}, SMS, 0, 0)


@BOTH
def test_on_chip_residue_is_counted_and_cleared(gpu: Gpu, kernel: str) -> None:
    for memory, _ in memories(gpu, kernel):
        memory[0] = b"\x7f" * memory.size
    found = on_chip(gpu, kernel)
    assert found.residue == sum(size for _, size in memories(gpu, kernel))
    assert found.failed == 0
    for memory, size in memories(gpu, kernel):
        assert memory.size - memory[:].count(0) == memory.size - size
    assert on_chip(gpu, kernel).residue == 0


@BOTH
def test_single_byte_left_on_one_sm_is_counted(gpu: Gpu, kernel: str) -> None:
    memory, _ = memories(gpu, kernel)[1]
    memory[memory.size // 2] = b"\x01"
    assert on_chip(gpu, kernel).residue == 1
    assert memory[:] == bytes(memory.size)


@BOTH
def test_sm_that_never_runs_is_never_counted_as_reached(kernels: HostKernels, kernel: str) -> None:
    gpu = Gpu(kernels, dead=frozenset({1}))
    found = on_chip(gpu, kernel, rounds=4)
    assert found.seen == {0, 2}
    assert found.ids == SMS


@BOTH
def test_shared_memory_byte_that_does_not_stay_cleared_is_counted_as_failed(kernels: HostKernels, kernel: str) -> None:
    gpu = Gpu(kernels)
    memory, size = memories(gpu, kernel)[2]
    gpu.stuck[2] = memory.address + size // 2
    found = on_chip(gpu, kernel)
    assert found.failed == 1
    assert found.seen == {0, 1, 2}


@BOTH
def test_on_chip_rounds_accumulate_when_one_launch_does_not_reach_every_sm(gpu: Gpu, kernel: str) -> None:
    """On a device that others use, blocks queue for an SM; the caller launches until every SM was seen."""
    assert on_chip(gpu, kernel, grid=2).seen == {0, 1}
    assert on_chip(gpu, kernel, grid=2, rounds=2).seen == {0, 1}
    assert on_chip(gpu, kernel, grid=3).seen == {0, 1, 2}


def test_registers_are_not_counted_when_the_launch_waits_for_no_sm(gpu: Gpu) -> None:
    """``wanted`` 0 overwrites the registers first; it keeps the assembler from choosing other registers to read."""
    for memory in gpu.registers:
        memory[0] = b"\x7f" * memory.size
    seen, residue, failed, arrived = u64(*[0] * 17), u64(0), u64(0), u64(0)
    gpu.run("onchip_registers", seen, residue, failed, arrived, 0, SPIN_LIMIT, grid=(SMS,), block=(256,))
    assert (residue.words(), failed.words()) == ([0], [0])


# --- diagnostics and reference rates


@pytest.fixture
def matrices(gpu: Gpu) -> tuple[Memory, Memory, int]:
    n = 48
    a, b = Memory(4 * n * n), Memory(4 * n * n)
    for seed, memory in ((1, a), (2, b)):
        gpu.run("fill_u32_mix", memory, n * n, seed)
    return a, b, n


def as_matrix(memory: Memory, n: int) -> "numpy.typing.NDArray[numpy.uint32]":
    return numpy.frombuffer(memory[: 4 * n * n], numpy.uint32).reshape(n, n)


def test_both_matrix_products_are_exact_and_compare_as_equal(gpu: Gpu, matrices: tuple[Memory, Memory, int]) -> None:
    a, b, n = matrices
    expected = as_matrix(a, n) @ as_matrix(b, n)
    tiled, naive, errors = Memory(4 * n * n), Memory(4 * n * n), u64(0)
    for kernel, product in (("matmul_tiled", tiled), ("matmul_naive", naive)):
        gpu.run(kernel, a, b, product, n, grid=(n // 16, n // 16), block=(16, 16))
        assert (as_matrix(product, n) == expected).all()
    gpu.run("compare_u32", tiled, naive, n * n, errors)
    assert errors.words() == [0]


def test_every_differing_matrix_element_is_counted(gpu: Gpu, matrices: tuple[Memory, Memory, int]) -> None:
    a, _, n = matrices
    other, errors = Memory(a.size, a[:]), u64(0)
    for place in (0, 4 * 17, a.size - 4):
        other[place] = bytes(4) if other[place : place + 4] != bytes(4) else b"\1\0\0\0"
    gpu.run("compare_u32", a, other, n * n, errors)
    assert errors.words() == [3]


def test_reference_kernels_copy_and_read_as_their_names_state(gpu: Gpu) -> None:
    source, target, sink = Memory(8192), Memory(8192), u64(0)
    gpu.run("write16", source, 512, 0x1122334455667788)
    gpu.run("copy16", target, source, 512)
    gpu.run("read16", target, 512, sink)
    assert target[:] == (0x1122334455667788).to_bytes(8, "little") * 1024
    assert sink.words() == [0]
