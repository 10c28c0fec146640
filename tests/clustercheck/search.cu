// What the pods of the cluster check run on a GPU: one fills memory with a secret, the next one counts it.
//
// `find` writes nothing but its count, so that it counts what an earlier tenant left. Nothing here shares code with the
// kernels of the scrub. Plain C, no headers; compiled to PTX text by scripts/make_kernels.py. Any grid is correct;
// n counts words of 8 bytes, and the caller sets `found` to zero.

typedef unsigned long long u64;

#ifndef KERNEL  // the tests define it, and compile this for the CPU
#define KERNEL extern "C" __global__ void
#endif

KERNEL leave(u64 *p, u64 n, u64 secret) {
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) p[i] = secret;
}

KERNEL find(const u64 *p, u64 n, u64 secret, u64 *found) {
    u64 count = 0;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x)
        count += p[i] == secret;
    if (count != 0) atomicAdd(found, count);
}
