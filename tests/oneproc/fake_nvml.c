/* The part of NVIDIA's driver library (nvml.h) that elastic_ft.worker.device_events calls: one GPU,
 * whose events are the lines "TYPE DATA" that are written to the pipe FAKE_NVML_EVENTS. */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <fcntl.h>
#include <unistd.h>

enum { OK = 0, INVALID_ARGUMENT = 2, NOT_FOUND = 6, TIMEOUT = 10, GPU_IS_LOST = 15 };
typedef struct { void *device; unsigned long long type, data; unsigned gi, ci; } Event;
static int gpu, set, registered;

int nvmlInitWithFlags(unsigned flags) { return OK; }
int nvmlInit_v2(void) { return OK; }
const char *nvmlErrorString(int code) { return code == NOT_FOUND ? "Not Found" : "error"; }

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
  if (strcmp(uuid, getenv("FAKE_NVML_UUID"))) return NOT_FOUND;
  *device = &gpu;
  return OK;
}

int nvmlEventSetCreate(void **events) { *events = &set; return OK; }

int nvmlDeviceGetSupportedEventTypes(void *device, unsigned long long *types) {
  *types = 0x8 | 0x2 | 0x1;
  return device == &gpu ? OK : INVALID_ARGUMENT;
}

int nvmlDeviceRegisterEvents(void *device, unsigned long long types, void *events) {
  if (device != &gpu || events != &set || types != (0x8 | 0x2)) return INVALID_ARGUMENT;
  registered = 1;
  return OK;
}

int nvmlEventSetWait_v2(void *events, Event *event, unsigned timeout_ms) {
  static int pipe = -1;
  if (pipe < 0) pipe = open(getenv("FAKE_NVML_EVENTS"), O_RDWR);
  if (events != &set || !registered || pipe < 0) return INVALID_ARGUMENT;
  struct pollfd waits = {pipe, POLLIN, 0};
  if (poll(&waits, 1, timeout_ms) <= 0) return TIMEOUT;
  char line[64] = {0};
  for (size_t at = 0; at + 1 < sizeof line && read(pipe, line + at, 1) == 1; at++)
    if (line[at] == '\n') break;
  if (!strncmp(line, "lost", 4)) return GPU_IS_LOST;
  memset(event, 0, sizeof *event);
  event->device = &gpu;
  return sscanf(line, "%llu %llu", &event->type, &event->data) == 2 ? OK : INVALID_ARGUMENT;
}
