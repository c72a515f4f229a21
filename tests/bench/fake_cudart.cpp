// Stands for CUDA's runtime and driver where there is no GPU: device memory is host memory. Memory that processes share is a
// file in memory, and its handle the file's descriptor. It refuses what CUDA refuses: memory of no whole pages, memory that
// is mapped in part or where it was not reserved, and, while a stream is captured, to wait and to change what is mapped. What
// waits at a gate (`later`) is done when somebody waits for everything. Who unmaps memory with a kernel under way (`launch`) has
// no GPU any more.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

namespace {
constexpr size_t PAGE = 2 << 20;
constexpr int INVALID = 1, NO_MEMORY = 2, ILLEGAL_ADDRESS = 700, CAPTURING = 900, UNKNOWN = 999, RELAXED = 2;
struct Range { size_t size; bool mapped; };
std::map<uint64_t, Range> reserved;
size_t limit = 0;
bool capturing = false, under_way = false;
int lost = 0, mode = 0, refused = 0;
// What is to be done in one stream: wait for a value, write one, or work.
struct Step { uint32_t* place; uint32_t value; bool writes; void (*work)(); };
std::vector<Step> steps;

bool refuses() { return refused && !--refused; }
bool forbidden() { return capturing && mode != RELAXED; }
bool is_whole(size_t size) { return size && size % PAGE == 0; }
Range* range(uint64_t base, size_t size) {
  auto found = reserved.find(base);
  return found != reserved.end() && found->second.size == size ? &found->second : nullptr;
}
void* place(uint64_t base) { return reinterpret_cast<void*>(base); }
bool cover(uint64_t base, size_t size, int protection, int flags, int file) {
  return mmap(place(base), size, protection, flags | MAP_FIXED, file, 0) == place(base);
}
int wait() {
  if (capturing) return CAPTURING;
  for (auto& step : std::exchange(steps, {})) {
    if (step.work) step.work();
    else if (step.writes) *step.place = step.value;
    else while (*const_cast<const volatile uint32_t*>(step.place) < step.value) usleep(100);
  }
  under_way = false;
  return lost;
}
}  // namespace

extern "C" {
void launch() { under_way = true; }
void capture(int begins) { capturing = begins; }
void refuse(int call) { refused = call; }  // the n-th from now on that makes, maps, allows or exports memory

bool waits() { return !steps.empty(); }
void later(void (*work)()) { steps.push_back({nullptr, 0, false, work}); }

int cuStreamWaitValue32_v2(void*, uint64_t at, uint32_t value, unsigned) {
  steps.push_back({static_cast<uint32_t*>(place(at)), value, false, nullptr});
  return 0;
}
int cuStreamWriteValue32_v2(void*, uint64_t at, uint32_t value, unsigned) {
  steps.push_back({static_cast<uint32_t*>(place(at)), value, true, nullptr});
  return 0;
}

int cudaSetDevice(int) { return 0; }
int cudaMemsetAsync(void* to, int value, size_t size, void*) { std::memset(to, value, size); return 0; }
int cudaDeviceSynchronize() { return wait(); }
int cudaEventCreateWithFlags(void**, unsigned) { return 0; }
int cudaEventRecord(void*, void*) { return 0; }
int cudaStreamWaitEvent(void*, void*, unsigned) { return 0; }
int cudaDeviceSetLimit(int, size_t bytes) { limit = bytes; return 0; }
int cudaDeviceGetLimit(size_t* bytes, int) { *bytes = limit; return 0; }
int cudaCtxResetPersistingL2Cache() { return 0; }
int cudaGetLastError() { return 0; }
const char* cudaGetErrorString(int error) { return error ? "an illegal memory access was encountered" : "no error"; }

int cuCtxSynchronize() { return wait(); }
int cuThreadExchangeStreamCaptureMode(int* to) { std::swap(mode, *to); return 0; }
int cuMemGetAllocationGranularity(size_t* to, const void*, int) { *to = PAGE; return 0; }
int cuMemCreate(uint64_t* to, size_t size, const void*, unsigned long long) {
  if (forbidden()) return CAPTURING;
  if (!is_whole(size)) return INVALID;
  if (refuses()) return NO_MEMORY;
  int file = memfd_create("of a GPU", MFD_CLOEXEC);
  *to = uint64_t(file);
  return file < 0 || ftruncate(file, long(size)) ? NO_MEMORY : 0;
}
int cuMemExportToShareableHandle(int* to, uint64_t handle, int, unsigned long long) {
  if (refuses()) return UNKNOWN;
  return (*to = fcntl(int(handle), F_DUPFD_CLOEXEC, 0)) < 0 ? INVALID : 0;
}
int cuMemImportFromShareableHandle(uint64_t* to, void* descriptor, int) {
  int file = fcntl(int(intptr_t(descriptor)), F_DUPFD_CLOEXEC, 0);
  *to = uint64_t(file);
  return file < 0 || fcntl(file, F_GET_SEALS) < 0 ? UNKNOWN : 0;
}
int cuMemRelease(uint64_t handle) { return close(int(handle)) ? INVALID : 0; }
int cuMemAddressReserve(uint64_t* to, size_t size, size_t, uint64_t, unsigned long long) {
  if (!is_whole(size)) return INVALID;
  void* found = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) return NO_MEMORY;
  reserved[*to = uint64_t(found)] = {size, false};
  return 0;
}
int cuMemMap(uint64_t base, size_t size, size_t, uint64_t handle, unsigned long long) {
  auto* to = range(base, size);
  if (forbidden()) return CAPTURING;
  if (!to || to->mapped || lseek(int(handle), 0, SEEK_END) != long(size) || refuses()) return INVALID;
  return (to->mapped = cover(base, size, PROT_NONE, MAP_SHARED, int(handle))) ? 0 : INVALID;
}
int cuMemSetAccess(uint64_t base, size_t size, const void*, size_t) {
  auto* to = range(base, size);
  if (!to || !to->mapped || refuses()) return INVALID;
  return mprotect(place(base), size, PROT_READ | PROT_WRITE) ? INVALID : 0;
}
int cuMemUnmap(uint64_t base, size_t size) {
  auto* from = range(base, size);
  if (forbidden()) return CAPTURING;
  if (!from || !from->mapped) return INVALID;
  if (under_way) lost = ILLEGAL_ADDRESS;
  from->mapped = false;
  return cover(base, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1) ? 0 : INVALID;
}
int cuMemAddressFree(uint64_t base, size_t size) {
  auto* from = range(base, size);
  if (!from || from->mapped) return INVALID;
  reserved.erase(base);
  return munmap(place(base), size) ? INVALID : 0;
}
}
