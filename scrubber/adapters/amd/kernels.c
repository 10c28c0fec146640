// The kernels that run on the GPU: clearing memory, proving it, and the diagnostics.
//
// Promise: a kernel counts what it finds and never stores it. Only numbers of bytes leave the GPU.
//
// Shipped as one code object for each instruction set beside this file, built by scripts/make_amd_kernels.py: there is no
// text that a driver would compile for the GPU at hand. Plain C, no headers; the tests compile this same file for the CPU,
// with a header that replaces the part between "the GPU" and "end of the GPU".
//
// Sizes of memory count units of 16 bytes (`n16`). Offsets are absolute: `base_offset` is the offset of the chunk in the
// whole run. Every loop is grid-stride; `threads` is the number of threads in the grid. Kernels add to counters; the
// caller zeroes them before the first chunk.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef u64 pair __attribute__((vector_size(16)));

#define MAP_PARTS 64

#ifndef HOST_AMD  // the GPU

#define GROUP 256
#define KERNEL __attribute__((amdgpu_kernel)) void
#define GLOBAL __attribute__((address_space(1)))
#define DEVICE static inline __attribute__((always_inline))

DEVICE u64 thread_of_grid(void) {
    return (u64)__builtin_amdgcn_workgroup_id_x() * GROUP + __builtin_amdgcn_workitem_id_x();
}
// The data is larger than any cache and read once: use streaming loads and stores.
DEVICE pair load16(const GLOBAL pair *p) { return __builtin_nontemporal_load(p); }
DEVICE void store16(GLOBAL pair *p, pair value) { __builtin_nontemporal_store(value, p); }
DEVICE void add(GLOBAL u64 *counter, u64 value) { __atomic_fetch_add(counter, value, __ATOMIC_RELAXED); }

#endif  // end of the GPU

#define EACH(i, n) (u64 i = thread_of_grid(); i < (n); i += threads)

// Returns how many of the 8 bytes are not zero: adding 0x7f to the low 7 bits of a byte carries into its highest bit,
// and no further, unless they are zero.
DEVICE u32 nonzero_bytes(u64 word) {
    const u64 low = 0x7f7f7f7f7f7f7f7full;
    return (u32)__builtin_popcountll((((word & low) + low) | word) & ~low);
}

DEVICE u32 nonzero_bytes_of(pair value) { return nonzero_bytes(value[0]) + nonzero_bytes(value[1]); }

// A 64-bit mix of the absolute offset and `nonce`, invertible for each nonce: no two offsets of a run have the same 16
// bytes, so a block that appears at another address, or one that an earlier run left, is detected.
DEVICE pair pattern_at(u64 offset, u64 nonce) {
    u64 mixed = (offset ^ nonce) * 0x9e3779b97f4a7c15ull;
    mixed ^= mixed >> 32;
    mixed *= 0xd6e8feb86659fd93ull;
    mixed ^= mixed >> 32;
    return (pair){mixed, ((mixed << 32) | (mixed >> 32)) ^ 0xa5a5a5a55a5a5a5aull};
}

KERNEL fill_zero(GLOBAL pair *p, u64 n16, u64 threads) {
    for EACH(i, n16) store16(p + i, (pair){0, 0});
}

KERNEL fill_pattern(GLOBAL pair *p, u64 n16, u64 threads, u64 base_offset, u64 nonce) {
    for EACH(i, n16) store16(p + i, pattern_at(base_offset + i * 16, nonce));
}

// Counts the bytes that differ from those of fill_pattern.
KERNEL check_pattern(const GLOBAL pair *p, u64 n16, u64 threads, u64 base_offset, u64 nonce, GLOBAL u64 *bad_bytes) {
    u64 bad = 0;
    for EACH(i, n16) bad += nonzero_bytes_of(load16(p + i) ^ pattern_at(base_offset + i * 16, nonce));
    if (bad != 0) add(bad_bytes, bad);
}

// Counts the bytes that are not zero: all, and those in each part of `map_part_bytes`, a multiple of 16 (0: no map);
// parts beyond the last of 64 count as the last.
KERNEL count_nonzero(const GLOBAL pair *p, u64 n16, u64 threads, u64 base_offset, GLOBAL u64 *count, GLOBAL u64 *map,
                     u64 map_part_bytes) {
    u64 all = 0, in_part = 0, part = 0;
    for EACH(i, n16) {
        u32 bytes = nonzero_bytes_of(load16(p + i));
        if (bytes == 0) continue;
        all += bytes;
        if (map_part_bytes == 0) continue;
        u64 here = (base_offset + i * 16) / map_part_bytes;
        if (here >= MAP_PARTS) here = MAP_PARTS - 1;
        if (here != part && in_part != 0) {
            add(map + part, in_part);
            in_part = 0;
        }
        part = here;
        in_part += bytes;
    }
    if (in_part != 0) add(map + part, in_part);
    if (all != 0) add(count, all);
}

// --- diagnostics -----------------------------------------------------------------------------------------------------

DEVICE u32 mix32(u64 seed) {
    seed = (seed ^ (seed >> 33)) * 0xff51afd7ed558ccdull;
    return (u32)((seed ^ (seed >> 29)) >> 16);
}

KERNEL fill_u32_mix(GLOBAL u32 *p, u64 n, u64 threads, u64 seed) {
    for EACH(i, n) p[i] = mix32(seed + i);
}

// The product of two n x n matrices modulo 2^32, by rows and in the opposite direction: both agree exactly unless
// something is broken.
KERNEL matmul_forward(const GLOBAL u32 *a, const GLOBAL u32 *b, GLOBAL u32 *product, u64 n, u64 threads) {
    for EACH(i, n * n) {
        u32 sum = 0;
        for (u64 k = 0; k < n; k++) sum += a[i / n * n + k] * b[k * n + i % n];
        product[i] = sum;
    }
}

KERNEL matmul_backward(const GLOBAL u32 *a, const GLOBAL u32 *b, GLOBAL u32 *product, u64 n, u64 threads) {
    for EACH(i, n * n) {
        u64 cell = n * n - 1 - i;
        u32 sum = 0;
        for (u64 k = n; k-- > 0;) sum += a[cell / n * n + k] * b[k * n + cell % n];
        product[cell] = sum;
    }
}

// Counts the numbers that differ.
KERNEL compare_u32(const GLOBAL u32 *a, const GLOBAL u32 *b, u64 n, u64 threads, GLOBAL u64 *errors) {
    u64 wrong = 0;
    for EACH(i, n) wrong += a[i] != b[i];
    if (wrong != 0) add(errors, wrong);
}
