/* A libnvidia-ml.so.1 whose devices, figures and failures a test sets through the stub_* functions below.
   Only what watchdog/nvml.py calls is here: a call of anything else is "function not found", as with an old driver. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
enum { DEVICES = 16, PROCESSES = 8, FAULTS = 16, ANY = -1 };

typedef struct { unsigned long long total, free, used; } memory_v1;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2;
typedef struct { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; } process;
typedef struct {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
} pci;

typedef struct {
    char uuid[96], name[96], bus_id[32];
    memory_v2 memory;
    process processes[PROCESSES];
    unsigned count, mig, addressing;
    int parent; /* index of the card that a MIG instance is part of; -1 for a card */
} device;

static device devices[DEVICES];
static int device_count, initialised, inits;
static struct { char call[64]; int device, code; double sleep_s; int times; } faults[FAULTS];
static int fault_count;

/* What tests call. */

int stub_device(const char *uuid, const char *name, const char *bus_id, int parent) {
    device *d = &devices[device_count];
    memset(d, 0, sizeof *d);
    strcpy(d->uuid, uuid), strcpy(d->name, name), strcpy(d->bus_id, bus_id);
    d->parent = parent;
    if (parent >= 0) devices[parent].mig = 1;
    return device_count++;
}

void stub_memory(int i, unsigned long long total, unsigned long long reserved, unsigned long long free,
                 unsigned long long used) {
    devices[i].memory = (memory_v2){0, total, reserved, free, used};
}

void stub_process(int i, unsigned pid, unsigned long long bytes) {
    devices[i].processes[devices[i].count++] = (process){pid, bytes, 0, 0};
}

void stub_no_processes(int i) { devices[i].count = 0; }

void stub_addressing(int i, unsigned mode) { devices[i].addressing = mode; }

/* The next `times` calls (-1: all) of `call` for a device (-1: any) take `sleep_s` and return `code`. */
void stub_fault(const char *call, int i, int code, double sleep_s, int times) {
    strcpy(faults[fault_count].call, call);
    faults[fault_count].device = i, faults[fault_count].code = code;
    faults[fault_count].sleep_s = sleep_s, faults[fault_count++].times = times;
}

void stub_no_faults(void) { fault_count = 0; }

int stub_inits(void) { return inits; }

/* What NVML has. */

static int failed(const char *call, const device *d) {
    for (int k = 0; k < fault_count; k++) {
        if (strcmp(faults[k].call, call) || faults[k].times == 0) continue;
        if (faults[k].device != ANY && (!d || d != &devices[faults[k].device])) continue;
        if (faults[k].times > 0) faults[k].times--;
        double s = faults[k].sleep_s;
        struct timespec wait = {(time_t)s, (long)((s - (time_t)s) * 1e9)};
        nanosleep(&wait, NULL);
        return faults[k].code;
    }
    return strcmp(call, "nvmlInitWithFlags") && !initialised ? UNINITIALIZED : SUCCESS;
}

#define ENTER(d) do { int code = failed(__func__, d); if (code) return code; } while (0)

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    inits++;
    ENTER(NULL);
    initialised++;
    return SUCCESS;
}

int nvmlShutdown(void) {
    ENTER(NULL);
    initialised--;
    return SUCCESS;
}

const char *nvmlErrorString(int code) { return code == 4 ? "Insufficient Permissions" : "an error of the stub"; }

int nvmlSystemGetDriverVersion(char *text, unsigned length) {
    ENTER(NULL);
    strncpy(text, "580.159.01", length);
    return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion(int *version) {
    ENTER(NULL);
    *version = 13020;
    return SUCCESS;
}

static int cards(void) {
    int count = 0;
    for (int i = 0; i < device_count; i++) count += devices[i].parent < 0;
    return count;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    ENTER(NULL);
    *count = cards();
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device **d) {
    ENTER(NULL);
    for (int i = 0; i < device_count; i++)
        if (devices[i].parent < 0 && index-- == 0) return *d = &devices[i], SUCCESS;
    return INVALID_ARGUMENT;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, device **d) {
    device *found = NULL;
    for (int i = 0; i < device_count; i++)
        if (!strcmp(devices[i].uuid, uuid)) found = &devices[i];
    ENTER(found);
    return (*d = found) ? SUCCESS : NOT_FOUND;
}

int nvmlDeviceGetUUID(device *d, char *text, unsigned length) {
    ENTER(d);
    strncpy(text, d->uuid, length);
    return SUCCESS;
}

int nvmlDeviceGetName(device *d, char *text, unsigned length) {
    ENTER(d);
    strncpy(text, d->name, length);
    return SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(device *d, pci *info) {
    ENTER(d);
    memset(info, 0, sizeof *info);
    strcpy(info->bus_id, d->bus_id);
    return SUCCESS;
}

int nvmlDeviceGetMigMode(device *d, unsigned *current, unsigned *pending) {
    ENTER(d);
    *current = *pending = d->mig;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(device *d, unsigned *count) {
    ENTER(d);
    *count = 7;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(device *d, unsigned index, device **instance) {
    ENTER(d);
    for (int i = 0; i < device_count; i++)
        if (devices[i].parent == d - devices && index-- == 0) return *instance = &devices[i], SUCCESS;
    return NOT_FOUND;
}

int nvmlDeviceGetMemoryInfo_v2(device *d, memory_v2 *memory) {
    ENTER(d);
    if (memory->version != (sizeof(memory_v2) | 2u << 24)) return 25; /* argument version mismatch */
    memory->total = d->memory.total, memory->reserved = d->memory.reserved;
    memory->free = d->memory.free, memory->used = d->memory.used;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(device *d, memory_v1 *memory) {
    ENTER(d);
    *memory = (memory_v1){d->memory.total, d->memory.free, d->memory.used + d->memory.reserved};
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(device *d, unsigned *count, process *list) {
    ENTER(d);
    unsigned room = *count;
    *count = d->count;
    if (!d->count) return SUCCESS;
    if (!list || room < d->count) return INSUFFICIENT_SIZE;
    memcpy(list, d->processes, d->count * sizeof *list);
    return SUCCESS;
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(device *d, unsigned *count, process *list) {
    (void)list;
    ENTER(d);
    *count = 0;
    return SUCCESS;
}

int nvmlDeviceGetAddressingMode(device *d, unsigned *mode) {
    ENTER(d);
    mode[1] = d->addressing; /* after the version */
    return SUCCESS;
}
