// What a hostile tenant runs on an AMD GPU: it leaves a secret in memory or local memory (LDS), or searches for one.
//
// It has nothing in common with the kernels of the scrub, so that a mistake in those cannot hide itself here. Shipped as one
// code object for each architecture, built by scripts/make_amd_kernels.py; the tests compile this file for the CPU too, with
// a header that replaces the part between "the GPU" and "end of the GPU".

typedef unsigned int u32;
typedef unsigned long long u64;

#define LOCAL_WORDS 8192  // 64 KiB: all that a compute unit of these architectures has, so that one group fits on each

#ifndef HOST_AMD  // the GPU

#define GROUP 256
#define KERNEL __attribute__((amdgpu_kernel)) void
#define GLOBAL __attribute__((address_space(1)))
#define DEVICE static inline __attribute__((always_inline))

DEVICE u64 thread_of_grid(void) {
    return (u64)__builtin_amdgcn_workgroup_id_x() * GROUP + __builtin_amdgcn_workitem_id_x();
}
DEVICE void add(GLOBAL u64 *counter, u64 value) { __atomic_fetch_add(counter, value, __ATOMIC_RELAXED); }
DEVICE void barrier(void) { __builtin_amdgcn_s_barrier(); }
DEVICE u64 clock(void) { return __builtin_readcyclecounter(); }
static volatile __attribute__((address_space(3), loader_uninitialized)) u64 local_memory[LOCAL_WORDS];

#endif  // end of the GPU

KERNEL leave_global(GLOBAL u64 *p, u64 n, u64 threads, u64 secret) {
    for (u64 i = thread_of_grid(); i < n; i += threads) p[i] = secret;
}

KERNEL find_global(const GLOBAL u64 *p, u64 n, u64 threads, u64 secret, GLOBAL u64 *found) {
    u64 count = 0;
    for (u64 i = thread_of_grid(); i < n; i += threads) count += p[i] == secret;
    if (count != 0) add(found, count);
}

// Groups wait for each other, so that all are on different compute units at the same time. `patience` clock ticks after its
// start a group waits no longer, and counts itself in `late`: then it may have shared a unit with an earlier one.
DEVICE void meet(GLOBAL u64 *arrived, GLOBAL u64 *late, u64 wanted, u64 patience) {
    if (thread_of_grid() % GROUP == 0) {
        u64 start = clock();
        add(arrived, 1);
        while (__atomic_load_n(arrived, __ATOMIC_RELAXED) < wanted) {
            if (clock() - start < patience) continue;
            add(late, 1);
            break;
        }
    }
    barrier();
}

KERNEL leave_local(u64 secret, GLOBAL u64 *arrived, GLOBAL u64 *late, u64 wanted, u64 patience) {
    for (u64 i = thread_of_grid() % GROUP; i < LOCAL_WORDS; i += GROUP) local_memory[i] = secret;
    meet(arrived, late, wanted, patience);
}

KERNEL find_local(u64 secret, GLOBAL u64 *found, GLOBAL u64 *arrived, GLOBAL u64 *late, u64 wanted, u64 patience) {
    u64 count = 0;
    for (u64 i = thread_of_grid() % GROUP; i < LOCAL_WORDS; i += GROUP) count += local_memory[i] == secret;
    if (count != 0) add(found, count);
    meet(arrived, late, wanted, patience);
}
