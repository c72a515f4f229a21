// Stands for CUDA's runtime where there is no GPU: device memory is host memory, and all is done at once.
#include <chrono>
#include <cstdlib>
#include <cstring>

extern "C" {
int cudaSetDevice(int) { return 0; }
int cudaMalloc(void** to, size_t size) { *to = std::malloc(size); return 0; }
int cudaFree(void* memory) { std::free(memory); return 0; }
int cudaMallocHost(void** to, size_t size) { *to = std::malloc(size); return 0; }
int cudaFreeHost(void* memory) { std::free(memory); return 0; }
int cudaMemcpyAsync(void* to, const void* from, size_t size, int, void*) { std::memcpy(to, from, size); return 0; }
int cudaMemsetAsync(void* to, int value, size_t size, void*) { std::memset(to, value, size); return 0; }
int cudaDeviceSynchronize() { return 0; }
int cudaEventCreate(void** event) { *event = new std::chrono::steady_clock::time_point; return 0; }
int cudaEventRecord(void* event, void*) {
  *static_cast<std::chrono::steady_clock::time_point*>(event) = std::chrono::steady_clock::now();
  return 0;
}
int cudaEventSynchronize(void*) { return 0; }
int cudaEventElapsedTime(float* out, void* a, void* b) {
  using point = std::chrono::steady_clock::time_point;
  *out = std::chrono::duration<float, std::milli>(*static_cast<point*>(b) - *static_cast<point*>(a)).count();
  return 0;
}
static size_t limit = 0;
int cudaDeviceSetLimit(int, size_t bytes) { limit = bytes; return 0; }
int cudaDeviceGetLimit(size_t* bytes, int) { *bytes = limit; return 0; }
int cudaCtxResetPersistingL2Cache() { return 0; }
int cudaGetLastError() { return 0; }
const char* cudaGetErrorString(int) { return "no error"; }
}
