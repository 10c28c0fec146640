// The kernels that run on the GPU: clearing memory and on-chip memory, proving it, and the diagnostics.
//
// Promise: a kernel counts what it finds and never stores it. No kernel writes residue anywhere; only numbers of bytes
// and offsets leave the GPU.
//
// Shipped as PTX text beside this file, built by scripts/make_kernels.py and compiled by the driver when it is loaded.
// Plain C, no headers: the runtime compiler of CUDA 11.8 accepts it unchanged, and the tests compile this same file for
// the CPU, with a header that replaces the part between "the GPU" and "end of the GPU".
//
// Sizes are 64-bit numbers. Sizes of memory count units of 16 bytes (`n16`): every pointer to memory is a multiple of
// 16, and so is the size of every chunk, so there are no tails. Offsets are absolute: `base_offset` is the offset of
// the chunk in the whole run, so that chunks with different addresses share one map, one pattern and one first offset.
// Every loop is grid-stride: any grid is correct, and the caller chooses a fast one. Kernels add to counters and lower
// `first`, and set neither: the caller zeroes the counters, and sets `first` to all ones, before the first chunk.

typedef unsigned int u32;
typedef unsigned long long u64;

#define NONE 0xffffffffffffffffull
#define MAP_PARTS 64
#define SM_LIMIT 1024      // bits of `seen`; an SM beyond this is not marked, which makes the step fail
#define REGISTERS 240      // of the 255 that a thread can have; the others hold addresses and counts meanwhile
#define REGISTER_THREADS 256  // times 256 registers: the whole register file of an SM, so that one block fits
#define TILE 16

#ifndef HOST_CUDA  // the GPU

#define KERNEL extern "C" __global__ void
#define KERNEL_OF(threads) extern "C" __global__ void __launch_bounds__(threads, 1)
#define DEVICE static __device__ __forceinline__
#define DYNAMIC_SHARED(type, name) extern __shared__ type name[]

// The data is larger than any cache and read once: use streaming loads and stores.
DEVICE ulonglong2 load16(const ulonglong2 *p) { return __ldcs(p); }
DEVICE void store16(ulonglong2 *p, ulonglong2 value) { __stcs(p, value); }

DEVICE u32 sm_id(void) {
    u32 id;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
    return id;
}

DEVICE u32 sm_ids(void) {
    u32 ids;
    asm volatile("mov.u32 %0, %%nsmid;" : "=r"(ids));
    return ids;
}

// The 240 registers of onchip_registers, by name. They are declared once, in PTX, and belong to no C variable.
#define TEN(each, tens) \
    each(tens##0) each(tens##1) each(tens##2) each(tens##3) each(tens##4) \
    each(tens##5) each(tens##6) each(tens##7) each(tens##8) each(tens##9)
#define ALL_REGISTERS(each) \
    TEN(each, ) TEN(each, 1) TEN(each, 2) TEN(each, 3) TEN(each, 4) TEN(each, 5) TEN(each, 6) TEN(each, 7) \
    TEN(each, 8) TEN(each, 9) TEN(each, 10) TEN(each, 11) TEN(each, 12) TEN(each, 13) TEN(each, 14) TEN(each, 15) \
    TEN(each, 16) TEN(each, 17) TEN(each, 18) TEN(each, 19) TEN(each, 20) TEN(each, 21) TEN(each, 22) TEN(each, 23)
#define LOAD(i) "ld.volatile.shared.u32 q" #i ", [t0];"
#define COUNT(i) /* non-zero bytes, as in nonzero_bytes below; `and` with the mask t2 first */ \
    "and.b32 t0, q" #i ", t2; and.b32 t1, t0, 0x7f7f7f7f; add.u32 t1, t1, 0x7f7f7f7f; or.b32 t1, t1, t0;" \
    "and.b32 t1, t1, 0x80808080; popc.b32 t1, t1; add.u32 t3, t3, t1;"

DEVICE u32 shared_address(const volatile u32 *word) { return (u32)__cvta_generic_to_shared((const void *)word); }

// Loads all of them if `load` is set, which no caller does: for a read of a register that nothing can have written,
// the assembler may choose any register, even the same one 240 times. Registers that may have been loaded it keeps
// separate.
DEVICE void registers_keep(u32 load, const volatile u32 *shared) {
    asm volatile(".reg .pred p; .reg .b32 q<240>; .reg .b32 t<4>; setp.eq.u32 p, %0, 0; mov.u32 t0, %1; @p bra KEPT;"
                 ALL_REGISTERS(LOAD) "KEPT:" :: "r"(load), "r"(shared_address(shared)) : "memory");
}

DEVICE void registers_load(const volatile u32 *shared) {
    asm volatile("mov.u32 t0, %0;" ALL_REGISTERS(LOAD) :: "r"(shared_address(shared)) : "memory");
}

DEVICE u32 registers_nonzero(u32 mask) {
    u32 bytes;
    asm volatile("mov.u32 t2, %1; mov.u32 t3, 0;" ALL_REGISTERS(COUNT) "mov.u32 %0, t3;"
                 : "=r"(bytes) : "r"(mask) : "memory");
    return bytes;
}

#endif  // end of the GPU

// --- memory ---------------------------------------------------------------------------------------------------------

DEVICE u64 thread_of_grid(void) { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
DEVICE u64 threads_of_grid(void) { return (u64)gridDim.x * blockDim.x; }

// Returns how many of the 8 bytes are not zero: adding 0x7f to the low 7 bits of a byte carries into its highest bit,
// and no further, unless they are zero.
DEVICE u32 nonzero_bytes(u64 word) {
    const u64 low = 0x7f7f7f7f7f7f7f7full;
    return __popcll((((word & low) + low) | word) & ~low);
}

// What one thread has found. It is added to the caller's counters at the end of each part of the map, and at the end of
// the kernel: memory full of residue then costs a few atomics per thread, and clean memory none.
typedef struct {
    u64 count, first, in_part, part, part_end;
} Tally;

DEVICE Tally tally_nothing(void) {
    Tally tally;
    tally.count = 0;
    tally.first = NONE;
    tally.in_part = 0;
    tally.part = 0;
    tally.part_end = 0;
    return tally;
}

DEVICE void tally_part(Tally *tally, u64 *map) {
    if (tally->in_part != 0) atomicAdd(&map[tally->part], tally->in_part);
    tally->in_part = 0;
}

DEVICE void tally_add(Tally *tally, ulonglong2 found, u64 offset, u64 *map, u64 map_part_bytes) {
    if ((found.x | found.y) == 0) return;
    u32 bytes = nonzero_bytes(found.x) + nonzero_bytes(found.y);
    if (tally->first == NONE) {  // within a thread, offsets only increase
        u64 word = found.x != 0 ? found.x : found.y;
        tally->first = offset + (found.x != 0 ? 0 : 8) + (__ffsll((long long)word) - 1) / 8;
    }
    tally->count += bytes;
    if (map_part_bytes == 0) return;
    if (offset >= tally->part_end) {
        tally_part(tally, map);
        tally->part = offset / map_part_bytes;
        if (tally->part >= MAP_PARTS) tally->part = MAP_PARTS - 1;
        tally->part_end = tally->part == MAP_PARTS - 1 ? NONE : (tally->part + 1) * map_part_bytes;
    }
    tally->in_part += bytes;
}

DEVICE void tally_end(Tally *tally, u64 *count, u64 *first, u64 *map) {
    if (tally->count == 0) return;
    atomicAdd(count, tally->count);
    atomicMin(first, tally->first);
    tally_part(tally, map);
}

DEVICE ulonglong2 load_or_zero(const ulonglong2 *p, u64 i, u64 n16) {
    ulonglong2 value;
    value.x = 0;
    value.y = 0;
    if (i < n16) value = load16(p + i);
    return value;
}

// A 64-bit mix of the absolute offset and `nonce`, invertible for each nonce: no two offsets of a run have the same 16
// bytes, so a block that appears at another address, or one that an earlier run left, is detected.
DEVICE ulonglong2 pattern_at(u64 offset, u64 nonce) {
    u64 mixed = (offset ^ nonce) * 0x9e3779b97f4a7c15ull;
    mixed ^= mixed >> 32;
    mixed *= 0xd6e8feb86659fd93ull;
    mixed ^= mixed >> 32;
    ulonglong2 value;
    value.x = mixed;
    value.y = ((mixed << 32) | (mixed >> 32)) ^ 0xa5a5a5a55a5a5a5aull;
    return value;
}

KERNEL fill_zero(ulonglong2 *p, u64 n16) {
    ulonglong2 zero;
    zero.x = 0;
    zero.y = 0;
    for (u64 i = thread_of_grid(), step = threads_of_grid(); i < n16; i += step) store16(p + i, zero);
}

KERNEL fill_pattern(ulonglong2 *p, u64 n16, u64 base_offset, u64 nonce) {
    for (u64 i = thread_of_grid(), step = threads_of_grid(); i < n16; i += step)
        store16(p + i, pattern_at(base_offset + i * 16, nonce));
}

// Counts the bytes that differ from those of fill_pattern, and finds the absolute offset of the first.
KERNEL check_pattern(const ulonglong2 *p, u64 n16, u64 base_offset, u64 nonce, u64 *bad_bytes, u64 *first) {
    Tally tally = tally_nothing();
    for (u64 i = thread_of_grid(), step = threads_of_grid(); i < n16; i += step) {
        u64 offset = base_offset + i * 16;
        ulonglong2 wanted = pattern_at(offset, nonce);
        ulonglong2 found = load16(p + i);
        found.x ^= wanted.x;
        found.y ^= wanted.y;
        tally_add(&tally, found, offset, 0, 0);
    }
    tally_end(&tally, bad_bytes, first, 0);
}

// Counts the bytes that are not zero: all, and those in each part of `map_part_bytes` (a multiple of 16; 0: no map;
// parts beyond the last of 64 count as the last). Finds the absolute offset of the first.
KERNEL count_nonzero(const ulonglong2 *p, u64 n16, u64 base_offset, u64 *count, u64 *first, u64 *map,
                     u64 map_part_bytes) {
    Tally tally = tally_nothing();
    u64 step = threads_of_grid();
    for (u64 i = thread_of_grid(); i < n16; i += 4 * step) {  // four loads in flight
        ulonglong2 a = load16(p + i);
        ulonglong2 b = load_or_zero(p, i + step, n16);
        ulonglong2 c = load_or_zero(p, i + 2 * step, n16);
        ulonglong2 d = load_or_zero(p, i + 3 * step, n16);
        if ((a.x | a.y | b.x | b.y | c.x | c.y | d.x | d.y) == 0) continue;
        tally_add(&tally, a, base_offset + i * 16, map, map_part_bytes);
        tally_add(&tally, b, base_offset + (i + step) * 16, map, map_part_bytes);
        tally_add(&tally, c, base_offset + (i + 2 * step) * 16, map, map_part_bytes);
        tally_add(&tally, d, base_offset + (i + 3 * step) * 16, map, map_part_bytes);
    }
    tally_end(&tally, count, first, map);
}

// --- on-chip memory --------------------------------------------------------------------------------------------------
//
// A block occupies all of an SM's memory of the kind that it clears, so that one block fits an SM, and as many blocks
// as SMs, each waiting for the others, run on all SMs at the same time. `arrived` counts them (zeroed by the caller
// before each launch), `wanted` is how many to wait for, and `patience` the maximum wait in clock ticks: on a device
// that other processes use, blocks can queue for an SM, and the caller launches again until every SM was seen. `seen`
// has 17 words: one bit per %smid, and %nsmid in the last. An SM is marked only when the block began and ended on it,
// and after it was cleared and read back.

DEVICE void stay(u32 *arrived, u32 wanted, u64 patience) {
    u64 start = clock64();
    while (*(volatile u32 *)arrived < wanted && (u64)clock64() - start < patience) continue;
}

DEVICE void mark(u64 *seen, u32 sm) {
    atomicMax(&seen[SM_LIMIT / 64], (u64)sm_ids());
    if (sm == sm_id() && sm < SM_LIMIT) atomicOr(&seen[sm / 64], 1ull << (sm % 64));
}

// Clears all dynamic shared memory of every SM: counts the non-zero bytes in it, writes zeros, reads them back. The
// kernel declares no other shared memory. Not reached: the 1 KiB per block that the system reserves, and the part of
// the same memory that serves as L1 cache.
KERNEL_OF(1024) onchip_shared(u64 *seen, u64 *residue_bytes, u64 *failed_bytes, u32 *arrived, u32 wanted, u64 patience,
                              u32 shared_bytes) {
    DYNAMIC_SHARED(u64, words);
    volatile u64 *memory = words;
    u32 sm = sm_id();
    u32 n = shared_bytes / 8;
    u64 residue = 0, failed = 0;
    if (threadIdx.x == 0) atomicAdd(arrived, 1u);
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) {
        residue += nonzero_bytes(memory[i]);
        memory[i] = 0;
    }
    __syncthreads();
    for (u32 i = blockDim.x - 1 - threadIdx.x; i < n; i += blockDim.x) failed += nonzero_bytes(memory[i]);
    if (residue != 0) atomicAdd(residue_bytes, residue);
    if (failed != 0) atomicAdd(failed_bytes, failed);
    __syncthreads();
    if (threadIdx.x == 0) {
        stay(arrived, wanted, patience);
        mark(seen, sm);
    }
    __syncthreads();
}

// Clears 240 of the 256 registers of each of 256 threads, on every SM: counts the non-zero bytes in them, then loads
// zeros into all of them at once and reads them back.
//
// What the count can show, and what it cannot: in PTX the value of a register that nothing wrote is undefined. In the
// machine code that was inspected (ptxas 12.9 for sm_80, 90, 100 and 120) all but one of the 240 are read as the
// previous kernel left them, whether that was a tenant's or one of ours. A driver's compiler may do otherwise, so a
// count of 0 proves nothing. The clearing does not depend on it: the loads are volatile, each into a separate
// register, and all are live across a barrier. The other 16 hold this kernel's addresses and counts, or cannot be
// named by any thread.
KERNEL_OF(REGISTER_THREADS) onchip_registers(u64 *seen, u64 *residue_bytes, u64 *failed_bytes, u32 *arrived, u32 wanted,
                                             u64 patience) {
    __shared__ volatile u32 zero_and_ones[2];
    registers_keep(wanted == 0, zero_and_ones);
    u32 sm = sm_id();
    if (threadIdx.x == 0) {
        atomicAdd(arrived, 1u);
        zero_and_ones[0] = 0;
        zero_and_ones[1] = 0xffffffff;
    }
    __syncthreads();
    u32 residue = registers_nonzero(zero_and_ones[1]);
    if (residue != 0 && wanted != 0) atomicAdd(residue_bytes, (u64)residue);
    registers_load(zero_and_ones);
    __syncthreads();
    u32 left = registers_nonzero(zero_and_ones[1]);
    if (left != 0) atomicAdd(failed_bytes, (u64)left);
    __syncthreads();
    if (threadIdx.x == 0) {
        stay(arrived, wanted, patience);
        mark(seen, sm);
    }
    __syncthreads();
}

// --- diagnostics -----------------------------------------------------------------------------------------------------

DEVICE u32 mix32(u64 seed) {
    seed = (seed ^ (seed >> 33)) * 0xff51afd7ed558ccdull;
    return (u32)((seed ^ (seed >> 29)) >> 16);
}

KERNEL fill_u32_mix(u32 *p, u64 n, u64 seed) {
    for (u64 i = thread_of_grid(), step = threads_of_grid(); i < n; i += step) p[i] = mix32(seed + i);
}

// The product of two n x n matrices modulo 2^32, so that both kernels agree exactly unless something is broken. `n` is
// a multiple of 16; a block is 16 x 16 threads, and the grid n/16 x n/16.
KERNEL_OF(TILE *TILE) matmul_tiled(const u32 *a, const u32 *b, u32 *product, u32 n) {
    __shared__ u32 of_a[TILE][TILE];
    __shared__ u32 of_b[TILE][TILE];
    u32 x = threadIdx.x, y = threadIdx.y, sum = 0;
    u64 row = (u64)blockIdx.y * TILE + y, column = (u64)blockIdx.x * TILE + x;
    for (u32 tile = 0; tile < n; tile += TILE) {
        of_a[y][x] = a[row * n + tile + x];
        of_b[y][x] = b[(u64)(tile + y) * n + column];
        __syncthreads();
        for (u32 k = 0; k < TILE; k++) sum += of_a[y][k] * of_b[k][x];
        __syncthreads();
    }
    product[row * n + column] = sum;
}

KERNEL_OF(TILE *TILE) matmul_naive(const u32 *a, const u32 *b, u32 *product, u32 n) {
    u64 row = (u64)blockIdx.y * TILE + threadIdx.y, column = (u64)blockIdx.x * TILE + threadIdx.x;
    u32 sum = 0;
    for (u32 k = n; k-- > 0;) sum += a[row * n + k] * b[(u64)k * n + column];
    product[row * n + column] = sum;
}

KERNEL compare_u32(const u32 *a, const u32 *b, u64 n, u64 *errors) {
    u64 wrong = 0;
    for (u64 i = thread_of_grid(), step = threads_of_grid(); i < n; i += step) wrong += a[i] != b[i];
    if (wrong != 0) atomicAdd(errors, wrong);
}

// --- reference rates: how fast this device reads, writes and copies when it does nothing else ------------------------

// The sink is written only if all bytes together give one improbable value, so that the loads cannot be optimised away.
KERNEL read16(const ulonglong2 *p, u64 n16, u64 *sink) {
    u64 x = 0, y = 0, step = threads_of_grid();
    for (u64 i = thread_of_grid(); i < n16; i += 4 * step) {
        ulonglong2 a = load16(p + i);
        ulonglong2 b = load_or_zero(p, i + step, n16);
        ulonglong2 c = load_or_zero(p, i + 2 * step, n16);
        ulonglong2 d = load_or_zero(p, i + 3 * step, n16);
        x ^= a.x ^ b.x ^ c.x ^ d.x;
        y ^= a.y ^ b.y ^ c.y ^ d.y;
    }
    if (x == 0x5bd1e9955bd1e995ull && y == ~x) atomicAdd(sink, 1ull);
}

KERNEL write16(ulonglong2 *p, u64 n16, u64 value) {
    ulonglong2 both;
    both.x = value;
    both.y = value;
    for (u64 i = thread_of_grid(), step = threads_of_grid(); i < n16; i += step) store16(p + i, both);
}

KERNEL copy16(ulonglong2 *to, const ulonglong2 *from, u64 n16) {
    for (u64 i = thread_of_grid(), step = threads_of_grid(); i < n16; i += step) store16(to + i, load16(from + i));
}
