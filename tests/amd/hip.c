/*
 * Stands in for ROCm's libamdhip64: a device is a directory, its memory a file, and the shipped kernels run on the CPU.
 *
 * The library lies in <root>/opt/rocm/lib of a machine (tests/amd/machine.py), and the device that the environment names
 * in <root>/standin/devices/<name>: memory, address, gpu_id, and "spoiled" if 64 bytes in the middle do not keep what is
 * written. As the driver does, it lists the process and its memory below <root>/sys/class/kfd/kfd/proc.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <libgen.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define HOST_AMD
#define KERNEL static void
#define GLOBAL
#define DEVICE static inline __attribute__((unused))

static unsigned long long host_thread;
DEVICE unsigned long long thread_of_grid(void) { return host_thread; }
#define load16(p) (*(p))
#define store16(p, ...) (*(p) = (__VA_ARGS__))
#define add(counter, value) (*(counter) += (value))

#include KERNELS

enum { SUCCESS, INVALID, OUT_OF_MEMORY, NO_DEVICE = 100, INVALID_IMAGE = 200, NOT_FOUND = 500 };
enum { PAGE = 4096, RESERVED = 256 * 1024 };

static char root[2048], device[3072], entry[3072], counter_file[4096], address[64];
static unsigned char *memory;
static size_t size, used;

static bool read_text(const char *name, char *text, int length)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", device, name);
    FILE *file = fopen(path, "r");
    if (file == NULL) return false;
    bool ok = fgets(text, length, file) != NULL;
    fclose(file);
    text[strcspn(text, "\n")] = 0;
    return ok;
}

static void count(void)
{
    FILE *file = fopen(counter_file, "w");
    if (file == NULL) return;
    fprintf(file, "%zu\n", used);
    fclose(file);
}

__attribute__((destructor)) static void leave(void)
{
    if (*counter_file == 0) return;
    unlink(counter_file);
    rmdir(entry);
}

static void spoil(void)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/spoiled", device);
    if (access(path, F_OK) == 0) memset(memory + size / 2, 0xa5, 64);
}

int hipInit(unsigned flags)
{
    Dl_info self;
    const char *name = getenv("ROCR_VISIBLE_DEVICES");
    if (flags != 0 || name == NULL || !dladdr((void *)hipInit, &self)) return INVALID;
    snprintf(root, sizeof root, "%s", self.dli_fname);
    for (int i = 0; i < 4; i++) dirname(root);
    snprintf(device, sizeof device, "%s/standin/devices/%s", root, name);
    return SUCCESS;
}

int hipGetDeviceCount(int *found)
{
    *found = access(device, F_OK) == 0;
    return *found ? SUCCESS : NO_DEVICE;
}

int hipSetDevice(int number)
{
    char path[4096], gpu_id[64];
    struct stat status;
    snprintf(path, sizeof path, "%s/memory", device);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (number != 0 || file < 0 || fstat(file, &status) != 0) return NO_DEVICE;
    if (!read_text("address", address, sizeof address) || !read_text("gpu_id", gpu_id, sizeof gpu_id)) return NO_DEVICE;
    size = (size_t)status.st_size;
    memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED) return OUT_OF_MEMORY;
    snprintf(entry, sizeof entry, "%s/sys/class/kfd/kfd/proc/%d", root, getpid());
    mkdir(entry, 0755);
    snprintf(counter_file, sizeof counter_file, "%s/vram_%s", entry, gpu_id);
    count();
    return SUCCESS;
}

int hipDeviceGetPCIBusId(char *text, int length, int number)
{
    (void)number;
    snprintf(text, (size_t)length, "%s", address);
    return SUCCESS;
}

int hipMalloc(void **pointer, size_t wanted)
{
    wanted = (wanted + PAGE - 1) / PAGE * PAGE;
    if (wanted > size - RESERVED || used > size - RESERVED - wanted) return OUT_OF_MEMORY;
    *pointer = memory + used;
    used += wanted;
    count();
    return SUCCESS;
}

int hipFree(void *pointer) { return (unsigned char *)pointer < memory ? INVALID : SUCCESS; }

int hipMemcpy(void *to, const void *from, size_t length, int kind)
{
    (void)kind;
    memcpy(to, from, length);
    spoil();
    return SUCCESS;
}

int hipDeviceSynchronize(void) { return SUCCESS; }

const char *hipGetErrorString(int status)
{
    switch (status) {
    case SUCCESS: return "no error";
    case OUT_OF_MEMORY: return "out of memory";
    case NO_DEVICE: return "no ROCm-capable device is detected";
    default: return "invalid argument";
    }
}

/* --- kernels */

#define P(i) ((void *)*(u64 *)arguments[i])
#define N(i) (*(u64 *)arguments[i])

static void run_fill_zero(void **arguments) { fill_zero(P(0), N(1), N(2)); }
static void run_fill_pattern(void **arguments) { fill_pattern(P(0), N(1), N(2), N(3), N(4)); }
static void run_check_pattern(void **arguments) { check_pattern(P(0), N(1), N(2), N(3), N(4), P(5)); }
static void run_count_nonzero(void **arguments) { count_nonzero(P(0), N(1), N(2), N(3), P(4), P(5), N(6)); }
static void run_fill_u32_mix(void **arguments) { fill_u32_mix(P(0), N(1), N(2), N(3)); }
static void run_matmul_forward(void **arguments) { matmul_forward(P(0), P(1), P(2), N(3), N(4)); }
static void run_matmul_backward(void **arguments) { matmul_backward(P(0), P(1), P(2), N(3), N(4)); }
static void run_compare_u32(void **arguments) { compare_u32(P(0), P(1), N(2), N(3), P(4)); }

static const struct kernel {
    const char *name;
    void (*run)(void **arguments);
} kernels[] = {
    {"fill_zero", run_fill_zero},           {"fill_pattern", run_fill_pattern},
    {"check_pattern", run_check_pattern},   {"count_nonzero", run_count_nonzero},
    {"fill_u32_mix", run_fill_u32_mix},     {"matmul_forward", run_matmul_forward},
    {"matmul_backward", run_matmul_backward}, {"compare_u32", run_compare_u32},
};

/* The code object must be one for AMD's GPUs; what runs here was compiled from the same source for the CPU. */
int hipModuleLoadData(void **module, const void *image)
{
    const unsigned char *elf = image;
    *module = (void *)image;
    return memcmp(elf, "\177ELF", 4) == 0 && elf[7] == 64 && elf[18] == 224 ? SUCCESS : INVALID_IMAGE;
}

int hipModuleGetFunction(const void **function, void *module, const char *name)
{
    (void)module;
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++)
        if (strcmp(kernels[i].name, name) == 0) return *function = &kernels[i], SUCCESS;
    return NOT_FOUND;
}

int hipModuleLaunchKernel(const void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                          unsigned bz, unsigned shared, void *stream, void **arguments, void **extra)
{
    if (gy * gz * by * bz != 1 || shared != 0 || stream != NULL || extra != NULL) return INVALID;
    for (host_thread = 0; host_thread < (unsigned long long)gx * bx; host_thread++)
        ((const struct kernel *)function)->run(arguments);
    spoil();
    return SUCCESS;
}
