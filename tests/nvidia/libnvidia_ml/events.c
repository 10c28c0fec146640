/*
 * Events: a set hears what is appended to the files of its GPUs after it registered, `TYPE DATA [GI CI]` a line.
 *
 * Waiting looks at the files every few milliseconds, as nobody could interrupt a real wait either.
 */
#define _GNU_SOURCE
#include "driver.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MOST_REGISTRATIONS 64
#define POLL_MILLISECONDS 2
#define NO_INSTANCE 0xFFFFFFFFu

struct event {
    const struct handle *device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
};

struct registration {
    const struct handle *device;
    unsigned long long types;
    off_t read_to;
};

struct event_set {
    unsigned count;
    struct registration registrations[MOST_REGISTRATIONS];
};

API int nvmlEventSetCreate(struct event_set **set)
{
    NODE();
    if (set == NULL) return INVALID_ARGUMENT;
    *set = calloc(1, sizeof **set);
    return *set != NULL ? SUCCESS : OUT_OF_MEMORY;
}

API int nvmlEventSetFree(struct event_set *set)
{
    NODE();
    if (set == NULL) return INVALID_ARGUMENT;
    free(set);
    return SUCCESS;
}

API int nvmlDeviceGetSupportedEventTypes(const struct handle *device, unsigned long long *types)
{
    DEVICE(device, GPU_ONLY);
    return get_number(device, "event_types", types);
}

API int nvmlDeviceRegisterEvents(const struct handle *device, unsigned long long types, struct event_set *set)
{
    DEVICE(device, GPU_ONLY);
    unsigned long long supported;
    char path[PATH_MAX];
    struct stat events = {0};
    if (set == NULL || set->count == MOST_REGISTRATIONS) return INVALID_ARGUMENT;
    int result = get_number(device, "event_types", &supported);
    if (result != SUCCESS) return result;
    if (types == 0 || (types & ~supported) != 0) return NOT_SUPPORTED;
    if (!attribute_path(device, "events", path)) return UNKNOWN;
    if (stat(path, &events) != 0) events.st_size = 0;
    set->registrations[set->count++] = (struct registration){device, types, events.st_size};
    return SUCCESS;
}

/* The next event that was asked for; SUCCESS, TIMEOUT when there is none yet, or what is wrong with the GPU. */
static int next_event(struct registration *registration, const char *function, struct event *event)
{
    char path[PATH_MAX], text[256];
    int refusal = enter(registration->device, function, GPU_ONLY);
    if (refusal != SUCCESS) return refusal;
    for (;;) {
        int file = attribute_path(registration->device, "events", path) ? open(path, O_RDONLY | O_CLOEXEC) : -1;
        ssize_t got = file < 0 ? 0 : pread(file, text, sizeof text - 1, registration->read_to);
        if (file >= 0) close(file);
        text[got > 0 ? got : 0] = '\0';
        char *end = strchr(text, '\n');
        if (end == NULL) return TIMEOUT;
        *end = '\0';
        *event = (struct event){.device = registration->device,
                                .gpu_instance = NO_INSTANCE,
                                .compute_instance = NO_INSTANCE};
        int words =
            sscanf(text, "%llu %llu %u %u", &event->type, &event->data, &event->gpu_instance, &event->compute_instance);
        registration->read_to += end + 1 - text;
        if (words >= 2 && (event->type & registration->types) != 0) return SUCCESS;
    }
}

static long long milliseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

static int wait_for_event(struct event_set *set, struct event *event, unsigned timeout, const char *function)
{
    const struct timespec pause = {.tv_nsec = POLL_MILLISECONDS * 1000000L};
    long long until = milliseconds() + timeout;
    if (set == NULL || event == NULL) return INVALID_ARGUMENT;
    for (;;) {
        for (unsigned i = 0; i < set->count; i++) {
            int result = next_event(&set->registrations[i], function, event);
            if (result != TIMEOUT) return result;
        }
        if (milliseconds() >= until) return TIMEOUT;
        nanosleep(&pause, NULL);
    }
}

API int nvmlEventSetWait_v2(struct event_set *set, struct event *event, unsigned timeout)
{
    NODE();
    return wait_for_event(set, event, timeout, __func__);
}
