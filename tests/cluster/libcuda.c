/*
 * A stand-in for the driver's library: what tests/clustercheck/tenant.py calls of it, with one GPU whose memory is the file
 * CLUSTER_CHECK_TEST_GPU. It clears nothing: what a process leaves there, the next one finds.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct index { unsigned x, y, z; };
static struct index threadIdx, blockIdx, blockDim, gridDim;

static void atomicAdd(unsigned long long *at, unsigned long long value) { *at += value; }

#define KERNEL static void
#include "search.cu"

enum { OK, INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, INVALID_CONTEXT = 201, NOT_FOUND = 500 };
static char *memory;
static size_t total, used;
static int has_context;

int cuInit(unsigned flags) {
    int file = open(getenv("CLUSTER_CHECK_TEST_GPU"), O_RDWR);
    struct stat status;
    if (flags != 0 || file < 0 || fstat(file, &status) != 0) return NOT_INITIALIZED;
    total = status.st_size;
    memory = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return memory == MAP_FAILED ? NOT_INITIALIZED : OK;
}

int cuGetErrorName(int error, const char **name) {
    *name = error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR";
    return OK;
}

int cuDeviceGetCount(int *count) { return *count = 1, OK; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, ordinal == 0 ? OK : INVALID_VALUE; }
int cuDeviceGetUuid_v2(char *uuid, int device) { return memset(uuid, 0x5d, 16), device == 0 ? OK : INVALID_VALUE; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { return *bytes = total, device == 0 ? OK : INVALID_VALUE; }

int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = &has_context;
    return device == 0 ? OK : INVALID_VALUE;
}

int cuCtxSetCurrent(void *context) {
    has_context = context == &has_context;
    return has_context ? OK : INVALID_CONTEXT;
}

int cuModuleLoadData(void **module, const char *text) {
    *module = &total;
    return has_context && strstr(text, ".visible .entry find(") != NULL ? OK : INVALID_VALUE;
}

int cuMemGetInfo_v2(size_t *free_bytes, size_t *all) {
    *free_bytes = total - used;
    *all = total;
    return has_context ? OK : INVALID_CONTEXT;
}

/* Memory is in units of 2 MiB, and no more than a quarter of all is free in one piece. */
int cuMemAlloc_v2(unsigned long long *address, size_t bytes) {
    size_t taken = (bytes + (2u << 20) - 1) / (2u << 20) * (2u << 20);
    if (!has_context) return INVALID_CONTEXT;
    if (taken > total - used || taken > total / 4) return OUT_OF_MEMORY;
    *address = (unsigned long long)(memory + used);
    used += taken;
    return OK;
}

int cuMemsetD8_v2(unsigned long long address, unsigned char value, size_t bytes) {
    memset((void *)address, value, bytes);
    return OK;
}

int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t bytes) {
    memcpy(to, (void *)from, bytes);
    return OK;
}

int cuCtxSynchronize(void) { return has_context ? OK : INVALID_CONTEXT; }

int cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = strcmp(name, "leave") == 0 ? (void *)leave : strcmp(name, "find") == 0 ? (void *)find : NULL;
    return module == &total && *function != NULL ? OK : NOT_FOUND;
}

int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **arguments, void **extra) {
    if (!has_context || gy * gz * by * bz != 1 || shared != 0 || stream != NULL || extra != NULL) return INVALID_VALUE;
    gridDim = (struct index){gx, 1, 1};
    blockDim = (struct index){bx, 1, 1};
    for (blockIdx.x = 0; blockIdx.x < gx; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < bx; threadIdx.x++)
            if (function == (void *)leave)
                leave(*(u64 **)arguments[0], *(u64 *)arguments[1], *(u64 *)arguments[2]);
            else
                find(*(u64 **)arguments[0], *(u64 *)arguments[1], *(u64 *)arguments[2], *(u64 **)arguments[3]);
    return OK;
}
