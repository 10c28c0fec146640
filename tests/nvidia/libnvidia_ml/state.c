/* The world of files: where it is, and how an attribute is read and replaced. */
#define _GNU_SOURCE
#include "driver.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The directory above the one that this library was loaded from in which there is a `state`. The path is the one that
 * the loader used: a library that is a link to somewhere else still belongs to the world that holds the link. */
static const char *world(void)
{
    static char root[PATH_MAX];
    if (root[0] != '\0') return root;
    Dl_info self;
    if (!dladdr((const void *)(uintptr_t)&world, &self) || self.dli_fname == NULL) return NULL;
    char candidate[PATH_MAX];
    if (snprintf(candidate, sizeof candidate, "%s", self.dli_fname) >= (int)sizeof candidate) return NULL;
    for (char *slash = strrchr(candidate, '/'); slash != NULL; slash = strrchr(candidate, '/')) {
        *slash = '\0';
        char state[PATH_MAX];
        if (snprintf(state, sizeof state, "%s/state", candidate) < (int)sizeof state && exists(state)) {
            memcpy(root, candidate, sizeof root);
            return root;
        }
    }
    return NULL;
}

bool world_path(const char *below, char path[PATH_MAX])
{
    const char *root = world();
    return root != NULL && snprintf(path, PATH_MAX, "%s/%s", root, below) < PATH_MAX;
}

bool node_path(const char *attribute, char path[PATH_MAX])
{
    const char *root = world();
    return root != NULL && snprintf(path, PATH_MAX, "%s/state/node/%s", root, attribute) < PATH_MAX;
}

bool gpu_path(unsigned gpu, const char *attribute, char path[PATH_MAX])
{
    const char *root = world();
    return root != NULL && snprintf(path, PATH_MAX, "%s/state/gpus/%u/%s", root, gpu, attribute) < PATH_MAX;
}

bool attribute_path(const struct handle *device, const char *attribute, char path[PATH_MAX])
{
    if (device->instance < 0) return gpu_path(device->gpu, attribute, path);
    char below[NAME_MAX];
    return snprintf(below, sizeof below, "mig/%d/%s", device->instance, attribute) < (int)sizeof below &&
           gpu_path(device->gpu, below, path);
}

bool exists(const char *path)
{
    struct stat found;
    return stat(path, &found) == 0;
}

long read_text(const char *path, char *text, size_t size)
{
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return -1;
    size_t length = 0;
    ssize_t got = 0;
    while (length < size - 1 && (got = read(file, text + length, size - 1 - length)) > 0) length += (size_t)got;
    close(file);
    if (got < 0) return -1;
    while (length > 0 && text[length - 1] == '\n') length--;
    text[length] = '\0';
    return (long)length;
}

int read_number(const char *path, unsigned long long *value)
{
    char text[64];
    if (read_text(path, text, sizeof text) < 0) return NOT_SUPPORTED;
    char *end = NULL;
    errno = 0;
    unsigned long long number = strtoull(text, &end, 0);
    if (end == text || *end != '\0' || errno != 0) return UNKNOWN;
    *value = number;
    return SUCCESS;
}

int get_number(const struct handle *device, const char *attribute, unsigned long long *value)
{
    char path[PATH_MAX];
    if (value == NULL) return INVALID_ARGUMENT;
    return attribute_path(device, attribute, path) ? read_number(path, value) : UNKNOWN;
}

int get_unsigned(const struct handle *device, const char *attribute, unsigned *value)
{
    unsigned long long number;
    if (value == NULL) return INVALID_ARGUMENT;
    int result = get_number(device, attribute, &number);
    if (result == SUCCESS) *value = (unsigned)number;
    return result;
}

int get_text(const struct handle *device, const char *attribute, char *text, unsigned size)
{
    char path[PATH_MAX], found[PATH_MAX];
    if (text == NULL) return INVALID_ARGUMENT;
    if (!attribute_path(device, attribute, path)) return UNKNOWN;
    long length = read_text(path, found, sizeof found);
    if (length < 0) return NOT_SUPPORTED;
    if ((unsigned long)length >= size) return INSUFFICIENT_SIZE;
    memcpy(text, found, (size_t)length + 1);
    return SUCCESS;
}

int put_text(const struct handle *device, const char *attribute, const char *text)
{
    char path[PATH_MAX], stubborn[NAME_MAX], ignored[PATH_MAX], fresh[PATH_MAX];
    if (!attribute_path(device, attribute, path)) return UNKNOWN;
    if (!exists(path)) return NOT_SUPPORTED;
    if (snprintf(stubborn, sizeof stubborn, "stubborn/%s", attribute) < (int)sizeof stubborn &&
        attribute_path(device, stubborn, ignored) && exists(ignored))
        return SUCCESS;
    if (snprintf(fresh, sizeof fresh, "%s.%d", path, (int)getpid()) >= (int)sizeof fresh) return UNKNOWN;
    FILE *file = fopen(fresh, "we");
    if (file == NULL) return UNKNOWN;
    bool written = fputs(text, file) >= 0;
    written = fclose(file) == 0 && written;
    return written && rename(fresh, path) == 0 ? SUCCESS : UNKNOWN;
}

int put_number(const struct handle *device, const char *attribute, unsigned long long value)
{
    char text[32];
    snprintf(text, sizeof text, "%llu", value);
    return put_text(device, attribute, text);
}
