/*
 * Initialisation, and which GPU a call touches.
 *
 * A GPU that a process has attached to has its node open in that process, as with the real driver: that is what blocks
 * a reset. Each attachment is also written down, so that a test can prove that no other GPU was touched.
 */
#define _GNU_SOURCE
#include "driver.h"

#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOST_GPUS 64
#define MOST_HANDLES 1024

struct gpu {
    unsigned number; /* of its directory */
    char address[32];
    int node; /* its open device node, or -1 when nobody asked for this GPU yet */
    bool attached;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned references;
static unsigned epoch;
static int control_node = -1;
static struct gpu gpus[MOST_GPUS];
static unsigned gpu_count;
static struct handle *handles[MOST_HANDLES];
static unsigned handle_count;

/* --- what the world wants to go wrong */

static void never_return(void)
{
    for (;;) pause();
}

static int node_refusal(const char *function)
{
    char path[PATH_MAX], below[NAME_MAX];
    unsigned long long code;
    snprintf(below, sizeof below, "hangs/%s", function);
    if (node_path(below, path) && exists(path)) never_return();
    snprintf(below, sizeof below, "missing/%s", function);
    if (node_path(below, path) && exists(path)) return FUNCTION_NOT_FOUND;
    snprintf(below, sizeof below, "errors/%s", function);
    if (node_path(below, path) && read_number(path, &code) == SUCCESS) return (int)code;
    if (node_path("init_error", path) && read_number(path, &code) == SUCCESS) return (int)code;
    return SUCCESS;
}

static int gpu_refusal(unsigned gpu, const char *function)
{
    char path[PATH_MAX], below[NAME_MAX];
    unsigned long long code;
    if (gpu_path(gpu, "uuid", path) && !exists(path)) return GPU_IS_LOST; /* it was taken out while we had it */
    snprintf(below, sizeof below, "hangs/%s", function);
    if ((gpu_path(gpu, "hang", path) && exists(path)) || (gpu_path(gpu, below, path) && exists(path))) never_return();
    snprintf(below, sizeof below, "errors/%s", function);
    if (gpu_path(gpu, below, path) && read_number(path, &code) == SUCCESS) return (int)code;
    if (gpu_path(gpu, "error", path) && read_number(path, &code) == SUCCESS) return (int)code;
    return SUCCESS;
}

int enter_node(const char *function)
{
    pthread_mutex_lock(&lock);
    bool ready = references > 0;
    pthread_mutex_unlock(&lock);
    return ready ? node_refusal(function) : UNINITIALIZED;
}

static bool still_there(const struct handle *device)
{
    char uuid[sizeof device->uuid];
    return get_text(device, "uuid", uuid, sizeof uuid) == SUCCESS && strcmp(uuid, device->uuid) == 0;
}

int enter(const struct handle *device, const char *function, enum reach reach)
{
    int refusal = enter_node(function);
    if (refusal != SUCCESS) return refusal;
    bool live = false;
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < handle_count && !live; i++) live = handles[i] == device && device->epoch == epoch;
    pthread_mutex_unlock(&lock);
    if (!live) return INVALID_ARGUMENT;
    refusal = gpu_refusal(device->gpu, function);
    if (refusal != SUCCESS) return refusal;
    if (reach == GPU_ONLY && device->instance >= 0) return NOT_SUPPORTED;
    if (reach == INSTANCE_ONLY && device->instance < 0) return NOT_SUPPORTED;
    return device->instance < 0 || still_there(device) ? SUCCESS : INVALID_ARGUMENT;
}

/* --- handles; all called with the lock held, but for the two that are exported */

static struct handle *make_handle(unsigned gpu, int instance)
{
    struct handle fresh = {.epoch = epoch, .gpu = gpu, .instance = instance};
    if (get_text(&fresh, "uuid", fresh.uuid, sizeof fresh.uuid) != SUCCESS) return NULL;
    for (unsigned i = 0; i < gpu_count; i++)
        if (gpus[i].number == gpu) memcpy(fresh.address, gpus[i].address, sizeof fresh.address);
    for (unsigned i = 0; i < handle_count; i++) {
        struct handle *known = handles[i];
        if (known->epoch == epoch && known->gpu == gpu && known->instance == instance &&
            strcmp(known->uuid, fresh.uuid) == 0)
            return known;
    }
    struct handle *kept = handle_count < MOST_HANDLES ? malloc(sizeof *kept) : NULL;
    if (kept == NULL) return NULL;
    *kept = fresh;
    handles[handle_count++] = kept;
    return kept;
}

struct handle *handle_of_gpu(unsigned gpu)
{
    pthread_mutex_lock(&lock);
    struct handle *made = make_handle(gpu, -1);
    pthread_mutex_unlock(&lock);
    return made;
}

struct handle *handle_of_instance(const struct handle *parent, int instance)
{
    pthread_mutex_lock(&lock);
    struct handle *made = make_handle(parent->gpu, instance);
    pthread_mutex_unlock(&lock);
    return made;
}

/* --- which GPUs there are */

/* Two forms of one address: "00000000:1B:00.0" in NVML, "0000:1b:00.0" in sysfs. */
static bool same_address(const char *one, const char *other)
{
    unsigned a[4], b[4];
    return sscanf(one, "%x:%x:%x.%x", &a[0], &a[1], &a[2], &a[3]) == 4 &&
           sscanf(other, "%x:%x:%x.%x", &b[0], &b[1], &b[2], &b[3]) == 4 && memcmp(a, b, sizeof a) == 0;
}

static int by_address(const void *one, const void *other)
{
    return strcasecmp(((const struct gpu *)one)->address, ((const struct gpu *)other)->address);
}

/* The GPUs are those that were there at initialisation, in the order of their addresses. */
static void enumerate(void)
{
    char path[PATH_MAX], attribute[PATH_MAX];
    gpu_count = 0;
    if (!world_path("state/gpus", path)) return;
    DIR *directory = opendir(path);
    if (directory == NULL) return;
    for (struct dirent *entry; (entry = readdir(directory)) != NULL && gpu_count < MOST_GPUS;) {
        if (!isdigit((unsigned char)entry->d_name[0])) continue;
        struct gpu *found = &gpus[gpu_count];
        *found = (struct gpu){.number = (unsigned)strtoul(entry->d_name, NULL, 10), .node = -1};
        if (gpu_path(found->number, "pci", attribute) &&
            read_text(attribute, found->address, sizeof found->address) > 0)
            gpu_count++;
    }
    closedir(directory);
    qsort(gpus, gpu_count, sizeof gpus[0], by_address);
}

static void attach(struct gpu *gpu)
{
    char path[PATH_MAX], below[NAME_MAX];
    unsigned long long minor;
    if (gpu->attached) return;
    gpu->attached = true;
    if (gpu_path(gpu->number, "attached", path)) {
        FILE *record = fopen(path, "ae");
        if (record != NULL) {
            fprintf(record, "%d\n", (int)getpid());
            fclose(record);
        }
    }
    if (!gpu_path(gpu->number, "minor", path) || read_number(path, &minor) != SUCCESS) return;
    snprintf(below, sizeof below, "dev/nvidia%llu", minor);
    /* A node of the stand-in may be a terminal, which must not become this process's own. */
    if (world_path(below, path)) gpu->node = open(path, O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
}

/* Attaches outside the lock's reach of other GPUs: a GPU that hangs here hangs its caller alone. */
static int open_gpu(struct gpu *gpu, const char *function, struct handle **device)
{
    pthread_mutex_lock(&lock);
    attach(gpu);
    pthread_mutex_unlock(&lock);
    int refusal = gpu_refusal(gpu->number, function);
    if (refusal != SUCCESS) return refusal;
    *device = handle_of_gpu(gpu->number);
    return *device != NULL ? SUCCESS : GPU_IS_LOST;
}

/* --- the functions */

/* Finds the GPUs and attaches to none: each is attached to by whoever first asks for its handle. So it is documented; some
 * report that all are opened here, which a world can have (`attaches_all`). NO_ATTACH goes further, as far as NVIDIA's own
 * users of it report: the library then knows no GPU. */
API int nvmlInitWithFlags(unsigned flags)
{
    int refusal = node_refusal(__func__);
    if (refusal != SUCCESS) return refusal;
    char path[PATH_MAX];
    if (!world_path("state/node", path) || !exists(path)) return DRIVER_NOT_LOADED;
    pthread_mutex_lock(&lock);
    if (references == 0) {
        gpu_count = 0;
        if (!(flags & NO_ATTACH)) enumerate();
        if (gpu_count == 0 && !(flags & NO_GPUS)) {
            pthread_mutex_unlock(&lock);
            return NOT_FOUND;
        }
        epoch++;
        if (world_path("dev/nvidiactl", path)) control_node = open(path, O_RDWR | O_CLOEXEC | O_NOCTTY);
    }
    references++;
    for (unsigned i = 0; i < gpu_count && node_path("attaches_all", path) && exists(path); i++) attach(&gpus[i]);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

API int nvmlInit_v2(void)
{
    return nvmlInitWithFlags(0);
}

API int nvmlInit(void)
{
    return nvmlInitWithFlags(0);
}

/* Once too often is a success, whatever the documentation says. */
API int nvmlShutdown(void)
{
    pthread_mutex_lock(&lock);
    if (references > 0 && --references == 0) {
        for (unsigned i = 0; i < gpu_count; i++)
            if (gpus[i].node >= 0) close(gpus[i].node);
        if (control_node >= 0) close(control_node);
        control_node = -1;
        gpu_count = 0;
        epoch++;
    }
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

API int nvmlDeviceGetCount_v2(unsigned *count)
{
    NODE();
    if (count == NULL) return INVALID_ARGUMENT;
    *count = gpu_count;
    return SUCCESS;
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct handle **device)
{
    NODE();
    if (device == NULL || index >= gpu_count) return INVALID_ARGUMENT;
    return open_gpu(&gpus[index], __func__, device);
}

API int nvmlDeviceGetHandleByPciBusId_v2(const char *address, struct handle **device)
{
    NODE();
    if (address == NULL || device == NULL) return INVALID_ARGUMENT;
    for (unsigned i = 0; i < gpu_count; i++)
        if (same_address(gpus[i].address, address)) return open_gpu(&gpus[i], __func__, device);
    return NOT_FOUND;
}

/* A search: every GPU on the way is attached to, as the real one is documented to do. */
API int nvmlDeviceGetHandleByUUID(const char *uuid, struct handle **device)
{
    NODE();
    if (uuid == NULL || device == NULL) return INVALID_ARGUMENT;
    for (unsigned i = 0; i < gpu_count; i++) {
        struct handle *gpu;
        if (open_gpu(&gpus[i], __func__, &gpu) != SUCCESS) continue;
        if (strcmp(gpu->uuid, uuid) == 0) {
            *device = gpu;
            return SUCCESS;
        }
        for (int instance = 0; instance < 16; instance++) {
            struct handle *found = handle_of_instance(gpu, instance);
            if (found != NULL && strcmp(found->uuid, uuid) == 0) {
                *device = found;
                return SUCCESS;
            }
        }
    }
    return NOT_FOUND;
}

API int nvmlDeviceGetIndex(const struct handle *device, unsigned *index)
{
    DEVICE(device, EITHER);
    if (index == NULL) return INVALID_ARGUMENT;
    if (device->instance >= 0) {
        *index = (unsigned)device->instance;
        return SUCCESS;
    }
    for (unsigned i = 0; i < gpu_count; i++) {
        if (gpus[i].number == device->gpu) {
            *index = i;
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}

/* --- MIG: a GPU's instances are what mig/ holds now, whatever it held at initialisation */

API int nvmlDeviceGetMigDeviceHandleByIndex(const struct handle *parent, unsigned index, struct handle **device)
{
    DEVICE(parent, GPU_ONLY);
    unsigned mode;
    if (device == NULL) return INVALID_ARGUMENT;
    if (get_unsigned(parent, "mig_mode", &mode) != SUCCESS) return NOT_SUPPORTED;
    *device = mode != 0 ? handle_of_instance(parent, (int)index) : NULL;
    return *device != NULL ? SUCCESS : NOT_FOUND;
}

API int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(const struct handle *instance, struct handle **device)
{
    DEVICE(instance, INSTANCE_ONLY);
    if (device == NULL) return INVALID_ARGUMENT;
    *device = handle_of_gpu(instance->gpu);
    return *device != NULL ? SUCCESS : GPU_IS_LOST;
}

API int nvmlDeviceIsMigDeviceHandle(const struct handle *device, unsigned *is_instance)
{
    DEVICE(device, EITHER);
    if (is_instance == NULL) return INVALID_ARGUMENT;
    *is_instance = device->instance >= 0;
    return SUCCESS;
}
