/* How a GPU is: errors, temperatures, links, what the driver itself asks for. */
#define _GNU_SOURCE
#include "driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_PAGES 256
#define NO_PERFORMANCE_STATE 32u

/* --- ECC: ecc_<corrected|uncorrected>_<volatile|aggregate> */

API int nvmlDeviceGetTotalEccErrors(const struct handle *device, unsigned type, unsigned counter,
                                    unsigned long long *errors)
{
    DEVICE(device, GPU_ONLY);
    char attribute[64];
    unsigned mode;
    if (type > 1 || counter > 1) return INVALID_ARGUMENT;
    if (get_unsigned(device, "ecc_mode", &mode) != SUCCESS || mode == 0) return NOT_SUPPORTED;
    snprintf(attribute, sizeof attribute, "ecc_%s_%s", type == 0 ? "corrected" : "uncorrected",
             counter == 0 ? "volatile" : "aggregate");
    return get_number(device, attribute, errors);
}

/* --- retired pages and remapped rows */

static int retired(const struct handle *device, unsigned cause, unsigned *count, unsigned long long *addresses,
                   unsigned long long *times)
{
    static _Thread_local unsigned long long found[MOST_PAGES];
    char attribute[32], text[PATH_MAX];
    unsigned here = 0;
    if (cause > 1 || count == NULL) return INVALID_ARGUMENT;
    snprintf(attribute, sizeof attribute, "retired_pages/%u", cause);
    int result = get_text(device, attribute, text, sizeof text);
    if (result != SUCCESS) return result;
    char *end = text;
    for (char *next = text; here < MOST_PAGES; next = end) {
        unsigned long long address = strtoull(next, &end, 0);
        if (end == next) break;
        found[here++] = address;
    }
    bool fits = here <= *count && (addresses != NULL || here == 0);
    *count = here;
    if (!fits) return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < here; i++) {
        addresses[i] = found[i];
        if (times != NULL) times[i] = 0;
    }
    return SUCCESS;
}

API int nvmlDeviceGetRetiredPages(const struct handle *device, unsigned cause, unsigned *count,
                                  unsigned long long *addresses)
{
    DEVICE(device, GPU_ONLY);
    return retired(device, cause, count, addresses, NULL);
}

API int nvmlDeviceGetRetiredPages_v2(const struct handle *device, unsigned cause, unsigned *count,
                                     unsigned long long *addresses, unsigned long long *times)
{
    DEVICE(device, GPU_ONLY);
    return retired(device, cause, count, addresses, times);
}

API int nvmlDeviceGetRetiredPagesPendingStatus(const struct handle *device, unsigned *pending)
{
    DEVICE(device, GPU_ONLY);
    return get_unsigned(device, "retired_pages_pending", pending);
}

API int nvmlDeviceGetRemappedRows(const struct handle *device, unsigned *correctable, unsigned *uncorrectable,
                                  unsigned *pending, unsigned *failed)
{
    DEVICE(device, GPU_ONLY);
    int result = get_unsigned(device, "remapped_rows_correctable", correctable);
    if (result == SUCCESS) result = get_unsigned(device, "remapped_rows_uncorrectable", uncorrectable);
    if (result == SUCCESS) result = get_unsigned(device, "remapped_rows_pending", pending);
    if (result == SUCCESS) result = get_unsigned(device, "remapped_rows_failure", failed);
    return result;
}

/* --- clocks, temperature, PCIe */

#define NUMBER(name, attribute)                                                                                        \
    API int name(const struct handle *device, unsigned *value)                                                         \
    {                                                                                                                  \
        DEVICE(device, GPU_ONLY);                                                                                      \
        return get_unsigned(device, attribute, value);                                                                 \
    }

NUMBER(nvmlDeviceGetPerformanceState, "performance_state")
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, "pcie_generation")
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, "pcie_width")
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, "pcie_generation_max")
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, "pcie_width_max")
NUMBER(nvmlDeviceGetPcieReplayCounter, "pcie_replays")

/* `0 2 8`: the array is filled up with what means "none". */
API int nvmlDeviceGetSupportedPerformanceStates(const struct handle *device, unsigned *states, unsigned size)
{
    DEVICE(device, GPU_ONLY);
    char text[128];
    if (states == NULL) return INVALID_ARGUMENT;
    int result = get_text(device, "performance_states", text, sizeof text);
    if (result != SUCCESS) return result;
    char *next = text;
    for (unsigned i = 0; i < size / sizeof *states; i++) {
        char *end = next;
        unsigned long state = strtoul(next, &end, 10);
        states[i] = end == next ? NO_PERFORMANCE_STATE : (unsigned)state;
        next = end;
    }
    return *next == '\0' ? SUCCESS : INSUFFICIENT_SIZE;
}

/* One mask under the old and the new name of the call. */
API int nvmlDeviceGetCurrentClocksEventReasons(const struct handle *device, unsigned long long *reasons)
{
    DEVICE(device, GPU_ONLY);
    return get_number(device, "clocks_event_reasons", reasons);
}

API int nvmlDeviceGetCurrentClocksThrottleReasons(const struct handle *device, unsigned long long *reasons)
{
    DEVICE(device, GPU_ONLY);
    return get_number(device, "clocks_event_reasons", reasons);
}

struct temperature {
    unsigned version, sensor;
    int degrees;
};

API int nvmlDeviceGetTemperature(const struct handle *device, unsigned sensor, unsigned *degrees)
{
    DEVICE(device, GPU_ONLY);
    return sensor == 0 ? get_unsigned(device, "temperature", degrees) : INVALID_ARGUMENT;
}

API int nvmlDeviceGetTemperatureV(const struct handle *device, struct temperature *temperature)
{
    DEVICE(device, GPU_ONLY);
    unsigned degrees;
    if (temperature == NULL || temperature->sensor != 0) return INVALID_ARGUMENT;
    if (temperature->version != (sizeof *temperature | 1u << 24)) return ARGUMENT_VERSION_MISMATCH;
    int result = get_unsigned(device, "temperature", &degrees);
    if (result == SUCCESS) temperature->degrees = (int)degrees;
    return result;
}

/* --- field values: fields/<id> or fields/<id>.<scope> holds `VALUE [TYPE]`; each field fails for itself */

struct field {
    unsigned id, scope;
    long long timestamp, latency;
    unsigned type, result;
    union {
        double real;
        unsigned number;
        unsigned long long large;
    } value;
};

enum { REAL = 0, UNSIGNED = 1 };

static int field_value(const struct handle *device, struct field *field)
{
    char attribute[64], text[64];
    snprintf(attribute, sizeof attribute, "fields/%u.%u", field->id, field->scope);
    int result = get_text(device, attribute, text, sizeof text);
    if (result == NOT_SUPPORTED && field->scope == 0) {
        snprintf(attribute, sizeof attribute, "fields/%u", field->id);
        result = get_text(device, attribute, text, sizeof text);
    }
    if (result != SUCCESS) return result;
    char value[32];
    field->type = UNSIGNED;
    if (sscanf(text, "%31s %u", value, &field->type) < 1) return UNKNOWN;
    field->value.large = 0;
    if (field->type == REAL)
        field->value.real = strtod(value, NULL);
    else
        field->value.large = strtoull(value, NULL, 0);
    return SUCCESS;
}

API int nvmlDeviceGetFieldValues(const struct handle *device, int count, struct field *fields)
{
    DEVICE(device, GPU_ONLY);
    if (count <= 0 || fields == NULL) return INVALID_ARGUMENT;
    for (int i = 0; i < count; i++) fields[i].result = (unsigned)field_value(device, &fields[i]);
    return SUCCESS;
}

/* --- the NVLink fabric; absent fabric_state is a platform without one */

struct fabric {
    unsigned char cluster[16];
    unsigned status, clique, state;
};

struct fabric_v {
    unsigned version;
    unsigned char cluster[16];
    unsigned status, clique, state, health_mask;
    unsigned char health_summary; /* from version 3 on */
};

static int fabric_of(const struct handle *device, struct fabric *fabric)
{
    memset(fabric, 0, sizeof *fabric);
    int result = get_unsigned(device, "fabric_state", &fabric->state);
    if (result == SUCCESS) result = get_unsigned(device, "fabric_status", &fabric->status);
    return result;
}

API int nvmlDeviceGetGpuFabricInfo(const struct handle *device, struct fabric *fabric)
{
    DEVICE(device, GPU_ONLY);
    return fabric != NULL ? fabric_of(device, fabric) : INVALID_ARGUMENT;
}

API int nvmlDeviceGetGpuFabricInfoV(const struct handle *device, struct fabric_v *info)
{
    DEVICE(device, GPU_ONLY);
    struct fabric fabric;
    unsigned mask = 0, summary = 0;
    if (info == NULL) return INVALID_ARGUMENT;
    const unsigned v2 = 36u | 2u << 24, v3 = 40u | 3u << 24;
    if (info->version != v2 && info->version != v3) return ARGUMENT_VERSION_MISMATCH;
    int result = fabric_of(device, &fabric);
    if (result != SUCCESS) return result;
    if (get_unsigned(device, "fabric_health_mask", &mask) == UNKNOWN) return UNKNOWN;
    if (get_unsigned(device, "fabric_health_summary", &summary) == UNKNOWN) return UNKNOWN;
    memcpy(info->cluster, fabric.cluster, sizeof info->cluster);
    info->status = fabric.status;
    info->clique = fabric.clique;
    info->state = fabric.state;
    info->health_mask = mask;
    if (info->version == v3) info->health_summary = (unsigned char)summary;
    return SUCCESS;
}

/* --- the InfoROM's checksum */

API int nvmlDeviceValidateInforom(const struct handle *device)
{
    DEVICE(device, GPU_ONLY);
    char version[16];
    return get_text(device, "inforom", version, sizeof version);
}
