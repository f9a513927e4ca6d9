// The part of NVIDIA's driver that CUDA IPC needs, over POSIX shared memory: "device memory" is a segment, its handle
// the segment's name.  As the real one it refuses calls without a current context, handles of the own process, and
// copies out of bounds.
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef unsigned long long address;
typedef struct { unsigned char reserved[64]; } handle;
typedef struct { unsigned char bytes[16]; } identity;
typedef struct { address base; size_t size; char name[64]; int exported; } region;

enum { OK = 0, INVALID_VALUE = 1, NO_DEVICE = 100, INVALID_CONTEXT = 201, INVALID_HANDLE = 400 };
enum { MAX_REGIONS = 4096 };

static region regions[MAX_REGIONS];
static int retained;
static unsigned made;
static __thread int depth;

static int devices(void) {
  const char* count = getenv("FAKE_CUDA_DEVICES");
  return count ? atoi(count) : 2;
}

static region* region_of(address at) {
  for (int i = 0; i < MAX_REGIONS; i++)
    if (regions[i].base && at >= regions[i].base && at < regions[i].base + regions[i].size) return &regions[i];
  return NULL;
}

static int map(const char* name, size_t size, int create, address* base) {
  int file = shm_open(name, create ? O_RDWR | O_CREAT | O_EXCL : O_RDWR, 0600);
  struct stat state;
  if (file < 0) return INVALID_HANDLE;
  if (create && ftruncate(file, (off_t)size)) return INVALID_VALUE;
  if (fstat(file, &state)) return INVALID_VALUE;
  void* memory = mmap(NULL, (size_t)state.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return INVALID_VALUE;
  for (int i = 0; i < MAX_REGIONS; i++)
    if (!regions[i].base) {
      regions[i] = (region){(address)(size_t)memory, (size_t)state.st_size, "", create};
      strncpy(regions[i].name, name, 63);
      *base = regions[i].base;
      return OK;
    }
  return INVALID_VALUE;
}

static int unmap(address base, int exported) {
  region* one = region_of(base);
  if (!depth) return INVALID_CONTEXT;
  if (!one || one->base != base || one->exported != exported) return INVALID_VALUE;
  munmap((void*)(size_t)base, one->size);
  if (exported) shm_unlink(one->name);
  *one = (region){0};
  return OK;
}

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : devices() ? OK : NO_DEVICE; }
int cuDeviceGetCount(int* count) { *count = devices(); return OK; }
int cuDeviceGet(int* device, int number) { *device = number; return number < devices() ? OK : INVALID_VALUE; }

int cuDeviceGetUuid_v2(identity* value, int device) {
  memset(value->bytes, 0xA0 + device, 16);
  return OK;
}

int cuGetErrorName(int code, const char** name) {
  *name = code == NO_DEVICE         ? "CUDA_ERROR_NO_DEVICE"
          : code == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT"
          : code == INVALID_HANDLE  ? "CUDA_ERROR_INVALID_HANDLE"
                                    : "CUDA_ERROR_INVALID_VALUE";
  return OK;
}

int cuDevicePrimaryCtxRetain(void** context, int device) { retained++; *context = &regions[device]; return OK; }
int cuDevicePrimaryCtxRelease_v2(int device) { return --retained < 0 ? INVALID_CONTEXT : device * OK; }
int cuCtxPushCurrent_v2(void* context) { depth++; return context && retained ? OK : INVALID_CONTEXT; }
int cuCtxPopCurrent_v2(void** context) { *context = NULL; return depth-- > 0 ? OK : INVALID_CONTEXT; }
int cuCtxSynchronize(void) { return depth ? OK : INVALID_CONTEXT; }

int cuMemAlloc_v2(address* base, size_t size) {
  char name[64];
  snprintf(name, sizeof name, "/fake-cuda-%d-%u", (int)getpid(), made++);
  return depth ? map(name, size, 1, base) : INVALID_CONTEXT;
}

int cuMemFree_v2(address base) { return unmap(base, 1); }

int cuMemGetAddressRange_v2(address* base, size_t* size, address at) {
  region* one = region_of(at);
  if (!one) return INVALID_VALUE;
  *base = one->base;
  *size = one->size;
  return OK;
}

int cuMemcpy(address target, address source, size_t size) {
  const address ends[] = {target, source};
  if (!depth) return INVALID_CONTEXT;
  for (int i = 0; i < 2; i++) {
    region* one = region_of(ends[i]);
    if (one && ends[i] + size > one->base + one->size) return INVALID_VALUE;
  }
  memcpy((void*)(size_t)target, (void*)(size_t)source, size);
  return OK;
}

int cuIpcGetMemHandle(handle* value, address base) {
  region* one = region_of(base);
  if (!depth || !one) return depth ? INVALID_VALUE : INVALID_CONTEXT;
  memcpy(value->reserved, one->name, 64);
  return OK;
}

int cuIpcOpenMemHandle_v2(address* base, handle value, unsigned flags) {
  char name[65] = {0}, local[64];
  memcpy(name, value.reserved, 64);
  snprintf(local, sizeof local, "/fake-cuda-%d-", (int)getpid());
  if (!depth || flags != 1) return depth ? INVALID_VALUE : INVALID_CONTEXT;
  if (strncmp(name, "/fake-cuda-", 11) || !strncmp(name, local, strlen(local))) return INVALID_HANDLE;
  return map(name, 0, 0, base);
}

int cuIpcCloseMemHandle(address base) { return unmap(base, 0); }
