/* What a GPU is: names, versions, places, links. Nothing in here changes by itself. */
#define _GNU_SOURCE
#include "driver.h"

#include <stdio.h>
#include <string.h>

#define MOST_LINKS 36
#define MOST_LINK_COUNTERS 5

struct pci_info {
    char legacy_address[16];
    unsigned domain, bus, device, id, subsystem_id;
    char address[32];
};

struct attributes {
    unsigned multiprocessors, copy_engines, decoders, encoders, jpegs, flows, gpu_slices, compute_slices;
    unsigned long long megabytes;
};

API const char *nvmlErrorString(int code)
{
    static const char *const words[] = {
        "Success",
        "Uninitialized",
        "Invalid Argument",
        "Not Supported",
        "Insufficient Permissions",
        "Already Initialized",
        "Not Found",
        "Insufficient Size",
        "Insufficient External Power",
        "Driver Not Loaded",
        "Timeout",
        "Interrupt Request Issue",
        "NVML Shared Library Not Found",
        "Function Not Found",
        "Corrupted infoROM",
        "GPU is lost",
        "GPU requires reset",
        "GPU access blocked by the operating system",
        "Driver/library version mismatch",
        "In use by another client",
        "Insufficient Memory",
        "No data",
        "vGPU ECC not supported",
        "Insufficient Resources",
        "Invalid Frequency",
        "Argument version mismatch",
        "Requested functionality has been deprecated",
        "System is not in ready state",
    };
    return code >= 0 && code < (int)(sizeof words / sizeof words[0]) ? words[code] : "Unknown Error";
}

/* --- the node */

static int node_text(const char *attribute, char *text, unsigned size)
{
    char path[PATH_MAX], found[256];
    if (text == NULL) return INVALID_ARGUMENT;
    if (!node_path(attribute, path)) return UNKNOWN;
    long length = read_text(path, found, sizeof found);
    if (length < 0) return NOT_SUPPORTED;
    if ((unsigned long)length >= size) return INSUFFICIENT_SIZE;
    memcpy(text, found, (size_t)length + 1);
    return SUCCESS;
}

API int nvmlSystemGetDriverVersion(char *text, unsigned size)
{
    NODE();
    return node_text("driver_version", text, size);
}

/* The library's own version: told without a driver, too. */
API int nvmlSystemGetNVMLVersion(char *text, unsigned size)
{
    return node_text("nvml_version", text, size);
}

static int cuda_version(int *version)
{
    char path[PATH_MAX];
    unsigned long long found;
    if (version == NULL) return INVALID_ARGUMENT;
    int result = node_path("cuda_version", path) ? read_number(path, &found) : UNKNOWN;
    if (result == SUCCESS) *version = (int)found;
    return result;
}

API int nvmlSystemGetCudaDriverVersion(int *version)
{
    NODE();
    return cuda_version(version);
}

API int nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    NODE();
    return cuda_version(version);
}

/* --- one GPU */

#define TEXT(name, attribute, reach)                                                                                   \
    API int name(const struct handle *device, char *text, unsigned size)                                               \
    {                                                                                                                  \
        DEVICE(device, reach);                                                                                         \
        return get_text(device, attribute, text, size);                                                                \
    }

#define NUMBER(name, attribute, reach)                                                                                 \
    API int name(const struct handle *device, unsigned *value)                                                         \
    {                                                                                                                  \
        DEVICE(device, reach);                                                                                         \
        return get_unsigned(device, attribute, value);                                                                 \
    }

TEXT(nvmlDeviceGetUUID, "uuid", EITHER)
TEXT(nvmlDeviceGetName, "name", EITHER)
TEXT(nvmlDeviceGetSerial, "serial", GPU_ONLY)
TEXT(nvmlDeviceGetVbiosVersion, "vbios", GPU_ONLY)
TEXT(nvmlDeviceGetInforomImageVersion, "inforom", GPU_ONLY)

NUMBER(nvmlDeviceGetMinorNumber, "minor", GPU_ONLY)
NUMBER(nvmlDeviceGetArchitecture, "architecture", EITHER)
NUMBER(nvmlDeviceGetBrand, "brand", GPU_ONLY)
NUMBER(nvmlDeviceGetNumaNodeId, "numa_node", GPU_ONLY)
NUMBER(nvmlDeviceGetVirtualizationMode, "virtualization", GPU_ONLY)
NUMBER(nvmlDeviceGetMaxMigDeviceCount, "max_mig_devices", GPU_ONLY)
NUMBER(nvmlDeviceGetGpuInstanceId, "gi", INSTANCE_ONLY)
NUMBER(nvmlDeviceGetComputeInstanceId, "ci", INSTANCE_ONLY)

/* The one string whose size the caller cannot say. */
API int nvmlDeviceGetGspFirmwareVersion(const struct handle *device, char *text)
{
    DEVICE(device, GPU_ONLY);
    return get_text(device, "gsp_firmware", text, 64);
}

static int pci_info(const char *address, struct pci_info *pci)
{
    unsigned function;
    memset(pci, 0, sizeof *pci);
    if (sscanf(address, "%x:%x:%x.%x", &pci->domain, &pci->bus, &pci->device, &function) != 4) return UNKNOWN;
    snprintf(pci->address, sizeof pci->address, "%08X:%02X:%02X.%X", pci->domain, pci->bus & 0xFF, pci->device & 0xFF,
             function & 0xF);
    snprintf(pci->legacy_address, sizeof pci->legacy_address, "%04X:%02X:%02X.%X", pci->domain & 0xFFFF,
             pci->bus & 0xFF, pci->device & 0xFF, function & 0xF);
    return SUCCESS;
}

API int nvmlDeviceGetPciInfo_v3(const struct handle *device, struct pci_info *pci)
{
    DEVICE(device, EITHER);
    if (pci == NULL) return INVALID_ARGUMENT;
    int result = pci_info(device->address, pci);
    unsigned id;
    if (result == SUCCESS && device->instance < 0 && get_unsigned(device, "pci_id", &id) == SUCCESS) pci->id = id;
    return result;
}

API int nvmlDeviceGetCudaComputeCapability(const struct handle *device, int *major, int *minor)
{
    DEVICE(device, EITHER);
    char text[16];
    if (major == NULL || minor == NULL) return INVALID_ARGUMENT;
    int result = get_text(device, "compute_capability", text, sizeof text);
    if (result != SUCCESS) return result;
    return sscanf(text, "%d.%d", major, minor) == 2 ? SUCCESS : UNKNOWN;
}

/* --- MIG */

API int nvmlDeviceGetMigMode(const struct handle *device, unsigned *current, unsigned *pending)
{
    DEVICE(device, GPU_ONLY);
    int result = get_unsigned(device, "mig_mode", current);
    return result == SUCCESS ? get_unsigned(device, "mig_mode_pending", pending) : result;
}

API int nvmlDeviceSetMigMode(const struct handle *device, unsigned mode, int *activation)
{
    DEVICE(device, GPU_ONLY);
    if (mode > 1 || activation == NULL) return INVALID_ARGUMENT;
    *activation = SUCCESS;
    return put_number(device, "mig_mode_pending", mode);
}

API int nvmlDeviceGetAttributes_v2(const struct handle *device, struct attributes *attributes)
{
    DEVICE(device, INSTANCE_ONLY);
    unsigned long long bytes = 0;
    if (attributes == NULL) return INVALID_ARGUMENT;
    memset(attributes, 0, sizeof *attributes);
    int result = get_unsigned(device, "multiprocessors", &attributes->multiprocessors);
    if (result == SUCCESS) result = get_unsigned(device, "gpu_slices", &attributes->gpu_slices);
    if (result == SUCCESS) result = get_unsigned(device, "compute_slices", &attributes->compute_slices);
    if (result == SUCCESS && get_number(device, "profile_megabytes", &attributes->megabytes) != SUCCESS) {
        result = get_number(device, "total", &bytes);
        attributes->megabytes = bytes >> 20;
    }
    return result;
}

/* --- NVLink: nvlink/<n> holds `ACTIVE REMOTE [TYPE [ERRORS...]]`; a link without a file does not exist */

struct link {
    unsigned active;
    char remote[32];
    unsigned type;
    unsigned long long errors[MOST_LINK_COUNTERS];
};

static int get_link(const struct handle *device, unsigned number, struct link *link)
{
    char attribute[32], text[256];
    if (number >= MOST_LINKS) return INVALID_ARGUMENT;
    snprintf(attribute, sizeof attribute, "nvlink/%u", number);
    int result = get_text(device, attribute, text, sizeof text);
    if (result != SUCCESS) return result;
    *link = (struct link){0};
    int words = sscanf(text, "%u %31s %u %llu %llu %llu %llu %llu", &link->active, link->remote, &link->type,
                       &link->errors[0], &link->errors[1], &link->errors[2], &link->errors[3], &link->errors[4]);
    return words >= 2 ? SUCCESS : UNKNOWN;
}

/* How near two GPUs are on the PCI bus. Where nothing is written they are of one NUMA node, or only of one machine. */
API int nvmlDeviceGetTopologyCommonAncestor(const struct handle *device, const struct handle *other, unsigned *level)
{
    enum level { INTERNAL = 0, NODE = 40, SYSTEM = 50 };
    DEVICE(device, GPU_ONLY);
    DEVICE(other, GPU_ONLY);
    char attribute[NAME_MAX];
    unsigned here, there;
    if (level == NULL) return INVALID_ARGUMENT;
    snprintf(attribute, sizeof attribute, "topology/%u", other->gpu);
    int result = get_unsigned(device, attribute, level);
    if (result != NOT_SUPPORTED) return result;
    bool known = get_unsigned(device, "numa_node", &here) == SUCCESS && get_unsigned(other, "numa_node", &there) == SUCCESS;
    *level = device == other ? INTERNAL : known && here == there ? NODE : SYSTEM;
    return SUCCESS;
}

API int nvmlDeviceGetNvLinkState(const struct handle *device, unsigned number, unsigned *active)
{
    DEVICE(device, GPU_ONLY);
    struct link link;
    if (active == NULL) return INVALID_ARGUMENT;
    int result = get_link(device, number, &link);
    if (result == SUCCESS) *active = link.active;
    return result;
}

API int nvmlDeviceGetNvLinkRemotePciInfo_v2(const struct handle *device, unsigned number, struct pci_info *pci)
{
    DEVICE(device, GPU_ONLY);
    struct link link;
    if (pci == NULL) return INVALID_ARGUMENT;
    int result = get_link(device, number, &link);
    return result == SUCCESS ? pci_info(link.remote, pci) : result;
}

API int nvmlDeviceGetNvLinkRemoteDeviceType(const struct handle *device, unsigned number, unsigned *type)
{
    DEVICE(device, GPU_ONLY);
    struct link link;
    if (type == NULL) return INVALID_ARGUMENT;
    int result = get_link(device, number, &link);
    if (result == SUCCESS) *type = link.type;
    return result;
}

API int nvmlDeviceGetNvLinkErrorCounter(const struct handle *device, unsigned number, unsigned counter,
                                        unsigned long long *errors)
{
    DEVICE(device, GPU_ONLY);
    struct link link;
    if (errors == NULL || counter >= MOST_LINK_COUNTERS) return INVALID_ARGUMENT;
    int result = get_link(device, number, &link);
    if (result == SUCCESS) *errors = link.errors[counter];
    return result;
}
