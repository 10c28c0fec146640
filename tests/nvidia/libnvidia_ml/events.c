/*
 * Events: a set gets what is appended to the files of its GPUs after it registered, `TYPE DATA [GI CI]` a line.
 *
 * A wait sleeps until the kernel reports a change of the world (inotify), whichever process made it. Only where the user has
 * no inotify instance left does it look at the files again and again.
 */
#define _GNU_SOURCE
#include "driver.h"

#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MOST_REGISTRATIONS 64
#define MILLISECONDS_WITHOUT_INOTIFY 20
#define CHANGES (IN_CREATE | IN_DELETE | IN_MODIFY | IN_MOVE | IN_DELETE_SELF | IN_MOVE_SELF)
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
    int changes; /* the inotify instance; -1 when there is none */
    unsigned count;
    struct registration registrations[MOST_REGISTRATIONS];
};

API int nvmlEventSetCreate(struct event_set **set)
{
    NODE();
    if (set == NULL) return INVALID_ARGUMENT;
    *set = calloc(1, sizeof **set);
    if (*set == NULL) return OUT_OF_MEMORY;
    (*set)->changes = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    return SUCCESS;
}

API int nvmlEventSetFree(struct event_set *set)
{
    NODE();
    if (set == NULL) return INVALID_ARGUMENT;
    if (set->changes >= 0) close(set->changes);
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

/* Has the set hear of whatever could change what next_event answers. Directories that are not there yet appear in those
 * that are, and then this is called again. */
static void watch(const struct event_set *set)
{
    static const char *const below[] = {".", "errors", "hangs"};
    char path[PATH_MAX];
    for (unsigned part = 0; set->changes >= 0 && part < sizeof below / sizeof below[0]; part++) {
        if (node_path(below[part], path)) inotify_add_watch(set->changes, path, CHANGES);
        for (unsigned i = 0; i < set->count; i++)
            if (attribute_path(set->registrations[i].device, below[part], path))
                inotify_add_watch(set->changes, path, CHANGES);
    }
}

/* Sleeps until something changed after watch(), or `left` milliseconds are over. */
static void sleep_until_a_change(const struct event_set *set, long long left)
{
    struct pollfd changed = {.fd = set->changes, .events = POLLIN};
    char ignored[4096];
    if (left > INT_MAX) left = INT_MAX;
    if (set->changes < 0 && left > MILLISECONDS_WITHOUT_INOTIFY) left = MILLISECONDS_WITHOUT_INOTIFY;
    poll(&changed, 1, (int)left);
    while (set->changes >= 0 && read(set->changes, ignored, sizeof ignored) > 0) continue;
}

static int wait_for_event(struct event_set *set, struct event *event, unsigned timeout, const char *function)
{
    long long until = milliseconds() + timeout;
    if (set == NULL || event == NULL) return INVALID_ARGUMENT;
    for (;;) {
        watch(set); /* before the files are read, so that no change falls between */
        for (unsigned i = 0; i < set->count; i++) {
            int result = next_event(&set->registrations[i], function, event);
            if (result != TIMEOUT) return result;
        }
        long long left = until - milliseconds();
        if (left <= 0) return TIMEOUT;
        sleep_until_a_change(set, left);
    }
}

API int nvmlEventSetWait_v2(struct event_set *set, struct event *event, unsigned timeout)
{
    NODE();
    return wait_for_event(set, event, timeout, __func__);
}
