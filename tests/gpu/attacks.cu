// What a tenant can leave behind on a GPU, and what the next one can find: the attacks that a scrub must make useless.
//
// Each `leave_` kernel puts a secret somewhere and holds still until its process is killed (or `stop` is not zero, or
// `patience` clock ticks are over). Each `find_` kernel looks for the secret in the same place, without having written
// there first, and adds to `found` how often it is there. Nothing here shares code with the kernels of the scrub: a
// mistake in those must not hide itself.
//
// Plain C, no headers; compiled to PTX text by scripts/make_kernels.py, and for the CPU by the tests. One block fits an SM
// in the on-chip kernels: launch as many as there are SMs. `arrived` counts blocks, zeroed before each launch; when it
// reads as many as were launched, the secret is in place everywhere.

typedef unsigned int u32;
typedef unsigned long long u64;

#define REGISTERS 240
#define REGISTER_THREADS 256

#ifndef HOST_CUDA  // the GPU

#define KERNEL extern "C" __global__ void
#define KERNEL_OF(threads) extern "C" __global__ void __launch_bounds__(threads, 1)
#define DEVICE static __device__ __forceinline__
#define DYNAMIC_SHARED(type, name) extern __shared__ type name[]

#define TEN(each, tens) \
    each(tens##0) each(tens##1) each(tens##2) each(tens##3) each(tens##4) \
    each(tens##5) each(tens##6) each(tens##7) each(tens##8) each(tens##9)
#define ALL_REGISTERS(each) \
    TEN(each, ) TEN(each, 1) TEN(each, 2) TEN(each, 3) TEN(each, 4) TEN(each, 5) TEN(each, 6) TEN(each, 7) \
    TEN(each, 8) TEN(each, 9) TEN(each, 10) TEN(each, 11) TEN(each, 12) TEN(each, 13) TEN(each, 14) TEN(each, 15) \
    TEN(each, 16) TEN(each, 17) TEN(each, 18) TEN(each, 19) TEN(each, 20) TEN(each, 21) TEN(each, 22) TEN(each, 23)
#define LOAD(i) "ld.volatile.shared.u32 r" #i ", [s0];"
#define EQUAL(i) "and.b32 s0, r" #i ", s2; setp.eq.u32 p, s0, s3; selp.u32 s0, 1, 0, p; add.u32 s1, s1, s0;"

// Reading a register that nothing wrote is undefined in PTX, and an assembler then reads whichever it likes. A load into
// it that is skipped at run time makes each of them one that it must keep apart, with what it held before.
DEVICE void registers_keep(u32 load, const volatile u32 *shared) {
    asm volatile(".reg .pred p; .reg .b32 r<240>; .reg .b32 s<4>; setp.eq.u32 p, %0, 0; mov.u32 s0, %1; @p bra KEPT;"
                 ALL_REGISTERS(LOAD) "KEPT:"
                 :: "r"(load), "r"((u32)__cvta_generic_to_shared((const void *)shared)) : "memory");
}

DEVICE u32 registers_equal(u32 mask, u32 wanted) {
    u32 count;
    asm volatile("mov.u32 s1, 0; mov.u32 s2, %1; mov.u32 s3, %2;" ALL_REGISTERS(EQUAL) "mov.u32 %0, s1;"
                 : "=r"(count) : "r"(mask), "r"(wanted) : "memory");
    return count;
}

#endif  // end of the GPU

DEVICE void hold(const u32 *stop, u64 patience) {
    u64 start = clock64();
    while (*(const volatile u32 *)stop == 0 && (u64)clock64() - start < patience) continue;
}

DEVICE void wait_for_all(const u32 *arrived, u32 wanted, u64 patience) {
    u64 start = clock64();
    while (*(const volatile u32 *)arrived < wanted && (u64)clock64() - start < patience) continue;
}

// --- global memory: any grid; n counts words of 8 bytes

KERNEL leave_global(u64 *p, u64 n, u64 secret) {
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) p[i] = secret;
}

KERNEL find_global(const u64 *p, u64 n, u64 secret, u64 *found) {
    u64 count = 0;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x)
        count += p[i] == secret;
    if (count != 0) atomicAdd(found, count);
}

// --- shared memory: 1024 threads a block, and all the shared memory that a block can ask for

KERNEL_OF(1024) leave_shared(u64 secret, u32 shared_bytes, u32 *arrived, const u32 *stop, u64 patience) {
    DYNAMIC_SHARED(u64, words);
    volatile u64 *memory = words;
    for (u32 i = threadIdx.x; i < shared_bytes / 8; i += blockDim.x) memory[i] = secret;
    __syncthreads();
    if (threadIdx.x == 0) {
        atomicAdd(arrived, 1u);
        hold(stop, patience);
    }
    __syncthreads();
}

KERNEL_OF(1024) find_shared(u64 secret, u32 shared_bytes, u64 *found, u32 *arrived, u32 wanted, u64 patience) {
    DYNAMIC_SHARED(u64, words);
    const volatile u64 *memory = words;
    u64 count = 0;
    for (u32 i = threadIdx.x; i < shared_bytes / 8; i += blockDim.x) count += memory[i] == secret;
    if (count != 0) atomicAdd(found, count);
    if (threadIdx.x == 0) {
        atomicAdd(arrived, 1u);
        wait_for_all(arrived, wanted, patience);
    }
    __syncthreads();
}

// --- registers: 256 threads a block, 240 registers each; n counts registers

// `fill` is 1; the secret is a parameter like any other to the assembler, and held in 240 registers at once by being loaded
// 240 times. `held` counts the registers that still have it at the end, which a killed process does not see.
KERNEL_OF(REGISTER_THREADS) leave_registers(u32 secret, u32 fill, u64 *held, u32 *arrived, const u32 *stop,
                                            u64 patience) {
    __shared__ volatile u32 secret_and_ones[2];
    if (threadIdx.x == 0) {
        secret_and_ones[0] = secret;
        secret_and_ones[1] = 0xffffffff;
    }
    __syncthreads();
    registers_keep(fill, secret_and_ones);
    __syncthreads();
    if (threadIdx.x == 0) {
        atomicAdd(arrived, 1u);
        hold(stop, patience);
    }
    __syncthreads();
    atomicAdd(held, (u64)registers_equal(secret_and_ones[1], secret));
}

// `fill` is 0.
KERNEL_OF(REGISTER_THREADS) find_registers(u32 secret, u32 fill, u64 *found, u32 *arrived, u32 wanted, u64 patience) {
    __shared__ volatile u32 ones[1];
    registers_keep(fill, ones);
    if (threadIdx.x == 0) ones[0] = 0xffffffff;
    __syncthreads();
    u32 count = registers_equal(ones[0], secret);
    if (count != 0) atomicAdd(found, (u64)count);
    if (threadIdx.x == 0) {
        atomicAdd(arrived, 1u);
        wait_for_all(arrived, wanted, patience);
    }
    __syncthreads();
}
