/*
 * Confidential computing: the mode, the ready state of all GPUs together, and attestation reports.
 *
 * Only a node with the attribute `confidential` has the mode. While `gpus_ready` is 0, the stand-in for CUDA opens no
 * context. A report is an SPDM request with the nonce, followed by what names the GPU: enough to tell reports apart.
 */
#define _GNU_SOURCE
#include "driver.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define NONCE_BYTES 0x20
#define REPORT_BYTES 0x2000
#define CEC_REPORT_BYTES 0x1000
#define SETTINGS_VERSION 0x1000014

struct system_state {
    unsigned environment, feature, devtools;
};

struct settings {
    unsigned version, environment, feature, devtools, multi_gpu;
};

struct report {
    unsigned cec_present, size, cec_size;
    unsigned char nonce[NONCE_BYTES], report[REPORT_BYTES], cec_report[CEC_REPORT_BYTES];
};

static int node_number(const char *attribute, unsigned *value)
{
    char path[PATH_MAX];
    unsigned long long number;
    if (!node_path(attribute, path)) return UNKNOWN;
    int result = read_number(path, &number);
    if (result == SUCCESS) *value = (unsigned)number;
    return result;
}

static int read_state(struct system_state *state)
{
    *state = (struct system_state){.environment = 2};
    int result = node_number("confidential", &state->feature);
    if (result == SUCCESS && node_number("confidential_devtools", &state->devtools) != SUCCESS) state->devtools = 0;
    return result;
}

API int nvmlSystemGetConfComputeState(struct system_state *state)
{
    NODE();
    return state == NULL ? INVALID_ARGUMENT : read_state(state);
}

API int nvmlSystemGetConfComputeSettings(struct settings *settings)
{
    NODE();
    struct system_state state;
    if (settings == NULL) return INVALID_ARGUMENT;
    if (settings->version != SETTINGS_VERSION) return ARGUMENT_VERSION_MISMATCH;
    int result = read_state(&state);
    if (result != SUCCESS) return result;
    *settings = (struct settings){SETTINGS_VERSION, state.environment, state.feature, state.devtools, 0};
    if (node_number("confidential_multi_gpu", &settings->multi_gpu) != SUCCESS) settings->multi_gpu = 0;
    return SUCCESS;
}

API int nvmlSystemGetConfComputeGpusReadyState(unsigned *ready)
{
    NODE();
    return ready == NULL ? INVALID_ARGUMENT : node_number("gpus_ready", ready);
}

API int nvmlSystemSetConfComputeGpusReadyState(unsigned ready)
{
    NODE();
    char path[PATH_MAX], fresh[PATH_MAX];
    unsigned ignored;
    if (ready > 1) return INVALID_ARGUMENT;
    int result = node_number("gpus_ready", &ignored);
    if (result != SUCCESS) return result;
    if (node_path("stubborn/gpus_ready", path) && exists(path)) return SUCCESS;
    if (!node_path("gpus_ready", path)) return UNKNOWN;
    if (snprintf(fresh, sizeof fresh, "%s.%d", path, (int)getpid()) >= (int)sizeof fresh) return UNKNOWN;
    FILE *file = fopen(fresh, "we");
    if (file == NULL) return UNKNOWN;
    bool written = fprintf(file, "%u\n", ready) > 0;
    written = fclose(file) == 0 && written;
    return written && rename(fresh, path) == 0 ? SUCCESS : UNKNOWN;
}

API int nvmlDeviceGetConfComputeGpuAttestationReport(const struct handle *device, struct report *report)
{
    DEVICE(device, GPU_ONLY);
    static const unsigned char request[] = {0x11, 0xE0, 0x01, 0xFF};
    char path[PATH_MAX];
    struct system_state state;
    if (report == NULL) return INVALID_ARGUMENT;
    int result = read_state(&state);
    if (result != SUCCESS) return result;
    report->cec_present = report->cec_size = report->size = 0;
    if (attribute_path(device, "report_is_empty", path) && exists(path)) return SUCCESS;
    memcpy(report->report, request, sizeof request);
    /* A GPU that repeats an old report has this attribute. */
    bool stale = attribute_path(device, "report_is_stale", path) && exists(path);
    memset(report->report + sizeof request, 0x5A, NONCE_BYTES);
    if (!stale) memcpy(report->report + sizeof request, report->nonce, NONCE_BYTES);
    unsigned length = sizeof request + NONCE_BYTES;
    length += (unsigned)snprintf((char *)report->report + length, sizeof device->uuid, "%s", device->uuid);
    report->size = length;
    return SUCCESS;
}
