/*
 * Stands in for ROCm's libamdhip64: a device is a directory, its memory a file, and the shipped kernels run on the CPU.
 *
 * The library lies in <root>/opt/rocm/lib of a machine (tests/amd/machine.py), and the device that the environment names
 * in <root>/standin/devices/<name>: memory, address, gpu_id, and "spoiled" if 64 bytes in the middle do not keep what is
 * written. As the driver does, it lists the process and its memory below <root>/sys/class/kfd/kfd/proc, counts that memory
 * as used, and undoes both when the process ends; when it is killed, only if <root>/standin/outlives exists. Local memory is a
 * file too ("lds"), which keeps its content until something was written to run_cleaner_shader.
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
#include <sys/prctl.h>
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

enum { GROUP = 256, LOCAL_BYTES = 65536 };
static unsigned char *local_memories;
static unsigned long long local_units = 1;
/* Threads run one after the other, so nothing waits. */
#define barrier() ((void)0)
#define clock() (~0ull)
#define local_memory ((volatile u64 *)(local_memories + host_thread / GROUP % local_units * LOCAL_BYTES))
#define __atomic_load_n(p, order) (~0ull)

#include ATTACKS

enum { SUCCESS, INVALID, OUT_OF_MEMORY, NO_DEVICE = 100, INVALID_IMAGE = 200, NOT_FOUND = 500 };
enum { PAGE = 4096, RESERVED = 256 * 1024, IDLE = 10 * 1024 * 1024 };

static char root[2048], device[3072], entry[3072], counter_file[4096], used_file[4096], address[64];
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

static void write_number(const char *path, size_t number)
{
    char draft[4096];
    snprintf(draft, sizeof draft, "%s/draft-%d", device, getpid());
    FILE *file = fopen(draft, "w");
    if (file == NULL) return;
    fprintf(file, "%zu\n", number);
    fclose(file);
    rename(draft, path);  /* no reader sees half of it */
}

static void count(void)
{
    write_number(used_file, IDLE + used);
    write_number(counter_file, used);
}

static void leave(void)
{
    unlink(counter_file);
    rmdir(entry);
    write_number(used_file, IDLE);
}

__attribute__((destructor)) static void leave_at_exit(void)
{
    if (*counter_file != 0) leave();
}

/* What the kernel does for a process that is killed: another process waits for that and cleans up. Only on request, because
 * it holds the locks of its parent for an instant. */
static bool leave_when_killed(void)
{
    char nothing, path[4096];
    snprintf(path, sizeof path, "%s/standin/outlives", root);
    if (access(path, F_OK) != 0) return true;
    int ends[2], ready[2];
    if (pipe2(ends, O_CLOEXEC) != 0 || pipe2(ready, O_CLOEXEC) != 0) return false;
    pid_t child = fork();
    if (child < 0) return false;
    if (child != 0) {
        close(ends[0]);
        close(ready[1]);
        while (read(ready[0], &nothing, 1) > 0) continue;  /* until it has no descriptor of ours: one may hold a lock */
        close(ready[0]);
        return true;
    }
    setsid();
    dup2(ends[0], 0);
    close_range(1, ~0u, 0);
    while (read(0, &nothing, 1) > 0) continue;
    leave();
    _exit(0);
}

/* The file that clears local memory when it is written. Returns whether it was. */
static bool cleaner_was_started(void)
{
    char path[4096];
    struct stat status;
    snprintf(path, sizeof path, "%s/sys/bus/pci/devices/%.*s0/run_cleaner_shader", root, (int)strlen(address) - 1, address);
    return stat(path, &status) == 0 && status.st_size > 0 && truncate(path, 0) == 0;
}

static bool map_local_memory(void)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/lds", device);
    if (cleaner_was_started()) unlink(path);
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, (off_t)(local_units * LOCAL_BYTES)) != 0) return false;
    local_memories = mmap(NULL, local_units * LOCAL_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return local_memories != MAP_FAILED;
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
    snprintf(counter_file, sizeof counter_file, "%s/vram_%s", entry, gpu_id);
    snprintf(used_file, sizeof used_file, "%s/sys/bus/pci/devices/%.*s0/mem_info_vram_used", root,
             (int)strlen(address) - 1, address);
    if (!map_local_memory() || !leave_when_killed()) return OUT_OF_MEMORY;
    mkdir(entry, 0755);
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

static void run_leave_global(void **arguments) { leave_global(P(0), N(1), N(2), N(3)); }
static void run_find_global(void **arguments) { find_global(P(0), N(1), N(2), N(3), P(4)); }
static void run_leave_local(void **arguments) { leave_local(N(0), P(1), P(2), N(3), N(4)); }
static void run_find_local(void **arguments) { find_local(N(0), P(1), P(2), P(3), N(4), N(5)); }

static const struct kernel {
    const char *name;
    void (*run)(void **arguments);
} kernels[] = {
    {"fill_zero", run_fill_zero},           {"fill_pattern", run_fill_pattern},
    {"check_pattern", run_check_pattern},   {"count_nonzero", run_count_nonzero},
    {"fill_u32_mix", run_fill_u32_mix},     {"matmul_forward", run_matmul_forward},
    {"matmul_backward", run_matmul_backward}, {"compare_u32", run_compare_u32},
    {"leave_global", run_leave_global},     {"find_global", run_find_global},
    {"leave_local", run_leave_local},       {"find_local", run_find_local},
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
