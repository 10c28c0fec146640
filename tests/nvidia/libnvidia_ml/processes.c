/*
 * Who uses a GPU, and how much memory is in use.
 *
 * Two sources for each of the three lists: the file processes/<list>, whose lines `PID BYTES [GI CI]` stand until
 * somebody takes them out (so that a PID can outlive its process, as it does when a driver leaks), and one file a
 * process, processes/<list>.d/<PID> with `BYTES [GI CI]`, which counts only while somebody holds an exclusive lock on it.
 */
#define _GNU_SOURCE
#include "driver.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#define MOST_PROCESSES 1024
#define NO_INSTANCE 0xFFFFFFFFu
#define NOT_AVAILABLE UINT64_MAX

struct process {
    unsigned pid;
    uint64_t bytes;
    unsigned gpu_instance;
    unsigned compute_instance;
};

struct memory {
    unsigned long long total, free, used;
};

struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

static const unsigned MEMORY_V2 = sizeof(struct memory_v2) | 2u << 24;
static const char *const LISTS[] = {"compute", "graphics", "mps"};

/* Whoever is in the list keeps its file locked until it ends, however it ends. /proc would still show a killed process
 * that nobody has waited for. */
static bool lives(const char *path)
{
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return false;
    bool free = flock(file, LOCK_SH | LOCK_NB) == 0;
    close(file);
    return !free;
}

static bool parse(const char *text, struct process *process)
{
    char bytes[32];
    process->gpu_instance = process->compute_instance = NO_INSTANCE;
    int words = sscanf(text, "%31s %u %u", bytes, &process->gpu_instance, &process->compute_instance);
    process->bytes = strcmp(bytes, "-") == 0 ? NOT_AVAILABLE : strtoull(bytes, NULL, 0);
    return words >= 1;
}

static unsigned listed(unsigned gpu, const char *list, struct process *found, unsigned most)
{
    char path[PATH_MAX], below[NAME_MAX], line[256];
    unsigned count = 0;
    snprintf(below, sizeof below, "processes/%s", list);
    FILE *file = gpu_path(gpu, below, path) ? fopen(path, "re") : NULL;
    while (file != NULL && count < most && fgets(line, sizeof line, file) != NULL) {
        int pid_length = 0;
        if (sscanf(line, "%u %n", &found[count].pid, &pid_length) == 1 && parse(line + pid_length, &found[count])) count++;
    }
    if (file != NULL) fclose(file);
    snprintf(below, sizeof below, "processes/%s.d", list);
    DIR *directory = gpu_path(gpu, below, path) ? opendir(path) : NULL;
    if (directory == NULL) return count;
    for (struct dirent *entry; (entry = readdir(directory)) != NULL && count < most;) {
        char *end = NULL;
        unsigned pid = (unsigned)strtoul(entry->d_name, &end, 10);
        char one[PATH_MAX];
        if (*end != '\0' || pid == 0 || snprintf(one, sizeof one, "%s/%u", path, pid) >= (int)sizeof one) continue;
        if (read_text(one, line, sizeof line) <= 0 || !lives(one) || !parse(line, &found[count])) continue;
        found[count++].pid = pid;
    }
    closedir(directory);
    return count;
}

static bool concerns(const struct handle *device, const struct process *process)
{
    unsigned gpu_instance, compute_instance;
    if (device->instance < 0) return true;
    return get_unsigned(device, "gi", &gpu_instance) == SUCCESS && gpu_instance == process->gpu_instance &&
           get_unsigned(device, "ci", &compute_instance) == SUCCESS && compute_instance == process->compute_instance;
}

unsigned long long bytes_in_use(const struct handle *device)
{
    static _Thread_local struct process found[MOST_PROCESSES];
    unsigned long long bytes = 0;
    for (unsigned list = 0; list < sizeof LISTS / sizeof LISTS[0]; list++) {
        unsigned count = listed(device->gpu, LISTS[list], found, MOST_PROCESSES);
        for (unsigned i = 0; i < count; i++)
            if (concerns(device, &found[i]) && found[i].bytes != NOT_AVAILABLE) bytes += found[i].bytes;
    }
    return bytes;
}

/* The protocol of a growing buffer: too small a one is told how large it should have been, and gets nothing. */
static int processes_of(const struct handle *device, const char *list, unsigned *count, struct process *processes)
{
    static _Thread_local struct process found[MOST_PROCESSES];
    if (count == NULL) return INVALID_ARGUMENT;
    unsigned all = listed(device->gpu, list, found, MOST_PROCESSES), here = 0;
    for (unsigned i = 0; i < all; i++)
        if (concerns(device, &found[i])) found[here++] = found[i];
    bool fits = here <= *count && (processes != NULL || here == 0);
    *count = here;
    if (!fits) return INSUFFICIENT_SIZE;
    if (here > 0) memcpy(processes, found, here * sizeof found[0]);
    return SUCCESS;
}

#define PROCESSES(name, list, read)                                                                                    \
    API int name(const struct handle *device, unsigned *count, struct process *processes)                              \
    {                                                                                                                  \
        DEVICE(device, EITHER);                                                                                        \
        return read(device, list, count, processes);                                                                   \
    }

/* The drivers 535.43 to 535.86 wrote longer rows for the third version of the calls, and nothing tells. */
static int newer_processes_of(const struct handle *device, const char *list, unsigned *count, struct process *processes)
{
    struct longer {
        struct process process;
        uint64_t protected_bytes;
    };
    char path[PATH_MAX];
    int result = processes_of(device, list, count, processes);
    if (result != SUCCESS || !node_path("long_process_rows", path) || !exists(path)) return result;
    for (unsigned i = *count; i-- > 0;) {
        struct longer row = {.process = processes[i]};
        memcpy((char *)processes + i * sizeof row, &row, sizeof row);
    }
    return SUCCESS;
}

PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, "compute", processes_of)
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, "compute", newer_processes_of)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, "graphics", processes_of)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, "graphics", newer_processes_of)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2, "mps", processes_of)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, "mps", newer_processes_of)

static int memory_of(const struct handle *device, struct memory_v2 *memory)
{
    unsigned long long idle = 0;
    int result = get_number(device, "total", &memory->total);
    if (result == SUCCESS) result = get_number(device, "reserved", &memory->reserved);
    if (result == SUCCESS) result = get_number(device, "used", &idle);
    if (result != SUCCESS) return result;
    unsigned long long usable = memory->total - memory->reserved;
    memory->used = idle + bytes_in_use(device);
    if (memory->used > usable) memory->used = usable;
    memory->free = usable - memory->used;
    return SUCCESS;
}

/* The old call counts what the driver keeps for itself as used; the new one tells the two apart. */
API int nvmlDeviceGetMemoryInfo(const struct handle *device, struct memory *memory)
{
    DEVICE(device, EITHER);
    struct memory_v2 found = {0};
    if (memory == NULL) return INVALID_ARGUMENT;
    int result = memory_of(device, &found);
    if (result == SUCCESS) *memory = (struct memory){found.total, found.free, found.used + found.reserved};
    return result;
}

API int nvmlDeviceGetMemoryInfo_v2(const struct handle *device, struct memory_v2 *memory)
{
    DEVICE(device, EITHER);
    if (memory == NULL) return INVALID_ARGUMENT;
    if (memory->version != MEMORY_V2) return ARGUMENT_VERSION_MISMATCH;
    return memory_of(device, memory);
}

/* --- accounting: a list of PIDs that outlives its processes until somebody clears it */

API int nvmlDeviceGetAccountingBufferSize(const struct handle *device, unsigned *size)
{
    DEVICE(device, GPU_ONLY);
    return get_unsigned(device, "accounting_buffer_size", size);
}

API int nvmlDeviceGetAccountingPids(const struct handle *device, unsigned *count, unsigned *pids)
{
    DEVICE(device, GPU_ONLY);
    static _Thread_local unsigned found[MOST_PROCESSES];
    char path[PATH_MAX];
    unsigned mode, here = 0;
    if (count == NULL) return INVALID_ARGUMENT;
    if (get_unsigned(device, "accounting_mode", &mode) != SUCCESS || mode == 0) return NOT_SUPPORTED;
    FILE *file = attribute_path(device, "accounting_pids", path) ? fopen(path, "re") : NULL;
    while (file != NULL && here < MOST_PROCESSES && fscanf(file, "%u", &found[here]) == 1) here++;
    if (file != NULL) fclose(file);
    bool fits = here <= *count && (pids != NULL || here == 0);
    *count = here;
    if (!fits) return INSUFFICIENT_SIZE;
    if (here > 0) memcpy(pids, found, here * sizeof found[0]);
    return SUCCESS;
}

API int nvmlDeviceClearAccountingPids(const struct handle *device)
{
    DEVICE(device, GPU_ONLY);
    return put_text(device, "accounting_pids", "");
}
