/*
 * A stand-in for NVIDIA's driver library, for machines without a GPU.
 *
 * The unmodified Python binding loads it by name and calls it as it calls the real one. Behind it there is no driver but
 * a directory of small text files, one an attribute, as in sysfs: tests/nvidia/machine.py makes them and says what each
 * one means. So what the project's children are told, and how they fail, is whatever a test wrote a moment ago.
 *
 * Kept as the real library is documented: reference-counted initialisation, which GPU a call attaches to, the protocol
 * of growing buffers, sizes of strings, the versions inside structures, who may be asked what about a MIG instance.
 */
#ifndef STANDIN_DRIVER_H
#define STANDIN_DRIVER_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))
#define UNUSED __attribute__((unused))

enum result {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    TIMEOUT = 10,
    FUNCTION_NOT_FOUND = 13,
    GPU_IS_LOST = 15,
    OUT_OF_MEMORY = 20,
    ARGUMENT_VERSION_MISMATCH = 25,
    UNKNOWN = 999,
};

enum init_flag { NO_GPUS = 1, NO_ATTACH = 2 };

/* Who may be asked: a MIG instance has a memory, a name and processes, and nearly nothing else. */
enum reach { GPU_ONLY, INSTANCE_ONLY, EITHER };

/* What NVML calls a device handle. One is made per GPU and instance and never freed, so that a stale one is told apart
 * from a live one and not from the memory of something else. */
struct handle {
    unsigned epoch; /* the initialisation that made it; any other one and it is stale */
    unsigned gpu;   /* the directory's number, not NVML's index */
    int instance;   /* the directory's number below mig/, or -1 */
    char uuid[96];
    char address[32];
};

/* --- the world of files (state.c) */

/* Path of a GPU's or an instance's attribute; false when it does not fit. */
bool attribute_path(const struct handle *device, const char *attribute, char path[PATH_MAX]);
bool node_path(const char *attribute, char path[PATH_MAX]);
bool gpu_path(unsigned gpu, const char *attribute, char path[PATH_MAX]);
bool world_path(const char *below, char path[PATH_MAX]);

bool exists(const char *path);

/* The first `size - 1` bytes of a file, without the line end; the length or -1 when there is no such file. */
long read_text(const char *path, char *text, size_t size);
int read_number(const char *path, unsigned long long *value);

/* SUCCESS, NOT_SUPPORTED when the attribute is absent, UNKNOWN when it is no number. */
int get_number(const struct handle *device, const char *attribute, unsigned long long *value);
int get_unsigned(const struct handle *device, const char *attribute, unsigned *value);
int get_text(const struct handle *device, const char *attribute, char *text, unsigned size);

/* Replaces an attribute as a whole, unless stubborn/<attribute> exists: then it only says so. */
int put_text(const struct handle *device, const char *attribute, const char *text);
int put_number(const struct handle *device, const char *attribute, unsigned long long value);

/* --- initialisation and handles (handles.c) */

/* Every call goes through one of these: initialised, a live handle, nothing that the world wants to go wrong. */
int enter_node(const char *function);
int enter(const struct handle *device, const char *function, enum reach reach);

#define NODE()                                                                                                         \
    do {                                                                                                               \
        int refusal = enter_node(__func__);                                                                            \
        if (refusal != SUCCESS) return refusal;                                                                        \
    } while (0)

#define DEVICE(device, reach)                                                                                          \
    do {                                                                                                               \
        int refusal = enter((device), __func__, (reach));                                                              \
        if (refusal != SUCCESS) return refusal;                                                                        \
    } while (0)

struct handle *handle_of_gpu(unsigned gpu);
struct handle *handle_of_instance(const struct handle *parent, int instance);

/* --- processes (processes.c) */

/* Bytes that the listed processes of this GPU or instance use. */
unsigned long long bytes_in_use(const struct handle *device);

#endif
