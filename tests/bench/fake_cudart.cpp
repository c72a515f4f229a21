// Stands for CUDA's runtime and driver where there is no GPU: device memory is host memory, and all is done at once.
// Memory that processes share is a file in memory, and its handle the file's descriptor.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

extern "C" {
int cudaSetDevice(int) { return 0; }
int cudaMemsetAsync(void* to, int value, size_t size, void*) { std::memset(to, value, size); return 0; }
int cudaDeviceSynchronize() { return 0; }
static size_t limit = 0;
int cudaDeviceSetLimit(int, size_t bytes) { limit = bytes; return 0; }
int cudaDeviceGetLimit(size_t* bytes, int) { *bytes = limit; return 0; }
int cudaCtxResetPersistingL2Cache() { return 0; }
int cudaGetLastError() { return 0; }
const char* cudaGetErrorString(int) { return "no error"; }

int cuMemGetAllocationGranularity(size_t* to, const void*, int) { *to = 4096; return 0; }
int cuMemCreate(uint64_t* to, size_t size, const void*, unsigned long long) {
  int file = memfd_create("of a GPU", MFD_CLOEXEC);
  *to = uint64_t(file);
  return file < 0 || ftruncate(file, long(size)) ? 2 : 0;
}
int cuMemExportToShareableHandle(int* to, uint64_t handle, int, unsigned long long) {
  return (*to = fcntl(int(handle), F_DUPFD_CLOEXEC, 0)) < 0 ? 1 : 0;
}
int cuMemImportFromShareableHandle(uint64_t* to, void* descriptor, int) {
  int file = fcntl(int(intptr_t(descriptor)), F_DUPFD_CLOEXEC, 0);
  *to = uint64_t(file);
  return file < 0 || fcntl(file, F_GET_SEALS) < 0 ? 999 : 0;
}
int cuMemRelease(uint64_t handle) { return close(int(handle)) ? 1 : 0; }
int cuMemAddressReserve(uint64_t* to, size_t size, size_t, uint64_t, unsigned long long) {
  void* found = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  *to = uint64_t(found);
  return found == MAP_FAILED ? 2 : 0;
}
int cuMemMap(uint64_t base, size_t size, size_t, uint64_t handle, unsigned long long) {
  void* place = reinterpret_cast<void*>(base);
  bool enough = lseek(int(handle), 0, SEEK_END) >= long(size);
  return enough && mmap(place, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, int(handle), 0) == place ? 0 : 1;
}
int cuMemSetAccess(uint64_t, size_t, const void*, size_t) { return 0; }
int cuMemUnmap(uint64_t base, size_t size) { return munmap(reinterpret_cast<void*>(base), size) ? 1 : 0; }
int cuMemAddressFree(uint64_t, size_t) { return 0; }
}
