/* What a client may change. Every setter writes the attribute that its getter reads. */
#define _GNU_SOURCE
#include "driver.h"

#include <stdio.h>
#include <string.h>

#define GETTER(name, attribute)                                                                                        \
    API int name(const struct handle *device, unsigned *value)                                                         \
    {                                                                                                                  \
        DEVICE(device, GPU_ONLY);                                                                                      \
        return get_unsigned(device, attribute, value);                                                                 \
    }

#define SETTER(name, attribute, most)                                                                                  \
    API int name(const struct handle *device, unsigned value)                                                          \
    {                                                                                                                  \
        DEVICE(device, GPU_ONLY);                                                                                      \
        return value <= (most) ? put_number(device, attribute, value) : INVALID_ARGUMENT;                              \
    }

GETTER(nvmlDeviceGetPersistenceMode, "persistence_mode")
SETTER(nvmlDeviceSetPersistenceMode, "persistence_mode", 1)
GETTER(nvmlDeviceGetAccountingMode, "accounting_mode")
SETTER(nvmlDeviceSetAccountingMode, "accounting_mode", 1)
GETTER(nvmlDeviceGetDefaultEccMode, "ecc_mode_default")
SETTER(nvmlDeviceSetEccMode, "ecc_mode_pending", 1)

API int nvmlDeviceGetEccMode(const struct handle *device, unsigned *current, unsigned *pending)
{
    DEVICE(device, GPU_ONLY);
    int result = get_unsigned(device, "ecc_mode", current);
    return result == SUCCESS ? get_unsigned(device, "ecc_mode_pending", pending) : result;
}

/* --- who may open a context: 0 anybody, 2 nobody, 3 one process; 1 was taken out of NVML long ago */

GETTER(nvmlDeviceGetComputeMode, "compute_mode")

API int nvmlDeviceSetComputeMode(const struct handle *device, unsigned mode)
{
    DEVICE(device, GPU_ONLY);
    unsigned instances;
    if (mode > 3 || mode == 1) return INVALID_ARGUMENT;
    if (get_unsigned(device, "mig_mode", &instances) == SUCCESS && instances != 0) return NOT_SUPPORTED;
    return put_number(device, "compute_mode", mode);
}

/* --- application clocks: `MEMORY GRAPHICS` in MHz */

enum clock { GRAPHICS_CLOCK = 0, SM_CLOCK = 1, MEMORY_CLOCK = 2 };

static int application_clock(const struct handle *device, const char *attribute, unsigned type, unsigned *clock)
{
    char text[64];
    unsigned memory, graphics;
    if (type > MEMORY_CLOCK || clock == NULL) return INVALID_ARGUMENT;
    int result = get_text(device, attribute, text, sizeof text);
    if (result != SUCCESS) return result;
    if (sscanf(text, "%u %u", &memory, &graphics) != 2) return UNKNOWN;
    *clock = type == MEMORY_CLOCK ? memory : graphics;
    return SUCCESS;
}

API int nvmlDeviceGetApplicationsClock(const struct handle *device, unsigned type, unsigned *clock)
{
    DEVICE(device, GPU_ONLY);
    return application_clock(device, "application_clocks", type, clock);
}

API int nvmlDeviceGetDefaultApplicationsClock(const struct handle *device, unsigned type, unsigned *clock)
{
    DEVICE(device, GPU_ONLY);
    return application_clock(device, "application_clocks_default", type, clock);
}

API int nvmlDeviceSetApplicationsClocks(const struct handle *device, unsigned memory, unsigned graphics)
{
    DEVICE(device, GPU_ONLY);
    char text[64];
    snprintf(text, sizeof text, "%u %u", memory, graphics);
    return put_text(device, "application_clocks", text);
}

API int nvmlDeviceResetApplicationsClocks(const struct handle *device)
{
    DEVICE(device, GPU_ONLY);
    char text[64];
    int result = get_text(device, "application_clocks_default", text, sizeof text);
    return result == SUCCESS ? put_text(device, "application_clocks", text) : result;
}

/* --- locked clocks: `MIN MAX` in MHz or `none`; NVML has no getter for them */

static int lock_clocks(const struct handle *device, const char *attribute, unsigned least, unsigned most)
{
    char text[64];
    if (least > most) return INVALID_ARGUMENT;
    snprintf(text, sizeof text, "%u %u", least, most);
    return put_text(device, attribute, text);
}

API int nvmlDeviceSetGpuLockedClocks(const struct handle *device, unsigned least, unsigned most)
{
    DEVICE(device, GPU_ONLY);
    return lock_clocks(device, "gpu_locked_clocks", least, most);
}

API int nvmlDeviceSetMemoryLockedClocks(const struct handle *device, unsigned least, unsigned most)
{
    DEVICE(device, GPU_ONLY);
    return lock_clocks(device, "memory_locked_clocks", least, most);
}

API int nvmlDeviceResetGpuLockedClocks(const struct handle *device)
{
    DEVICE(device, GPU_ONLY);
    return put_text(device, "gpu_locked_clocks", "none");
}

API int nvmlDeviceResetMemoryLockedClocks(const struct handle *device)
{
    DEVICE(device, GPU_ONLY);
    return put_text(device, "memory_locked_clocks", "none");
}

/* --- clock offsets: clock_offsets/<type>.<pstate> holds `OFFSET MIN MAX` in MHz */

struct clock_offset {
    unsigned version, type, pstate;
    int offset, least, most;
};

static int offset_of(const struct handle *device, struct clock_offset *offset)
{
    char attribute[64], text[64];
    snprintf(attribute, sizeof attribute, "clock_offsets/%u.%u", offset->type, offset->pstate);
    int result = get_text(device, attribute, text, sizeof text);
    if (result != SUCCESS) return result;
    return sscanf(text, "%d %d %d", &offset->offset, &offset->least, &offset->most) == 3 ? SUCCESS : UNKNOWN;
}

static int set_offset(const struct handle *device, unsigned type, unsigned pstate, int value)
{
    struct clock_offset found = {.type = type, .pstate = pstate};
    char attribute[64], text[64];
    int result = offset_of(device, &found);
    if (result != SUCCESS) return result;
    if (value < found.least || value > found.most) return INVALID_ARGUMENT;
    snprintf(attribute, sizeof attribute, "clock_offsets/%u.%u", type, pstate);
    snprintf(text, sizeof text, "%d %d %d", value, found.least, found.most);
    return put_text(device, attribute, text);
}

static int check_version(const struct clock_offset *offset)
{
    if (offset == NULL) return INVALID_ARGUMENT;
    return offset->version == (sizeof *offset | 1u << 24) ? SUCCESS : ARGUMENT_VERSION_MISMATCH;
}

API int nvmlDeviceGetClockOffsets(const struct handle *device, struct clock_offset *offset)
{
    DEVICE(device, GPU_ONLY);
    int result = check_version(offset);
    return result == SUCCESS ? offset_of(device, offset) : result;
}

API int nvmlDeviceSetClockOffsets(const struct handle *device, struct clock_offset *offset)
{
    DEVICE(device, GPU_ONLY);
    int result = check_version(offset);
    return result == SUCCESS ? set_offset(device, offset->type, offset->pstate, offset->offset) : result;
}

/* --- power, in milliwatts */

GETTER(nvmlDeviceGetPowerManagementLimit, "power_limit")
GETTER(nvmlDeviceGetPowerManagementDefaultLimit, "power_limit_default")

API int nvmlDeviceGetPowerManagementLimitConstraints(const struct handle *device, unsigned *least, unsigned *most)
{
    DEVICE(device, GPU_ONLY);
    int result = get_unsigned(device, "power_limit_min", least);
    return result == SUCCESS ? get_unsigned(device, "power_limit_max", most) : result;
}

API int nvmlDeviceSetPowerManagementLimit(const struct handle *device, unsigned limit)
{
    DEVICE(device, GPU_ONLY);
    unsigned least, most;
    int result = get_unsigned(device, "power_limit_min", &least);
    if (result == SUCCESS) result = get_unsigned(device, "power_limit_max", &most);
    if (result != SUCCESS) return result;
    return limit >= least && limit <= most ? put_number(device, "power_limit", limit) : INVALID_ARGUMENT;
}

/* --- automatic boost */

API int nvmlDeviceGetAutoBoostedClocksEnabled(const struct handle *device, unsigned *enabled, unsigned *by_default)
{
    DEVICE(device, GPU_ONLY);
    int result = get_unsigned(device, "auto_boost", enabled);
    return result == SUCCESS ? get_unsigned(device, "auto_boost_default", by_default) : result;
}

SETTER(nvmlDeviceSetAutoBoostedClocksEnabled, "auto_boost", 1)

API int nvmlDeviceSetDefaultAutoBoostedClocksEnabled(const struct handle *device, unsigned enabled,
                                                     UNUSED unsigned flags)
{
    DEVICE(device, GPU_ONLY);
    if (enabled > 1) return INVALID_ARGUMENT;
    int result = put_number(device, "auto_boost_default", enabled);
    return result == SUCCESS ? put_number(device, "auto_boost", enabled) : result;
}

/* --- which calls are root's alone: api_restriction/<type>, 0 clocks, 1 automatic boost */

static int restriction(unsigned type, char attribute[32])
{
    if (type > 1) return INVALID_ARGUMENT;
    snprintf(attribute, 32, "api_restriction/%u", type);
    return SUCCESS;
}

API int nvmlDeviceGetAPIRestriction(const struct handle *device, unsigned type, unsigned *restricted)
{
    DEVICE(device, GPU_ONLY);
    char attribute[32];
    int result = restriction(type, attribute);
    return result == SUCCESS ? get_unsigned(device, attribute, restricted) : result;
}

API int nvmlDeviceSetAPIRestriction(const struct handle *device, unsigned type, unsigned restricted)
{
    DEVICE(device, GPU_ONLY);
    char attribute[32];
    int result = restriction(type, attribute);
    if (restricted > 1) return INVALID_ARGUMENT;
    return result == SUCCESS ? put_number(device, attribute, restricted) : result;
}
