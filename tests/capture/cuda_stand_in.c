// A CUDA runtime and driver for one device that has no GPU: its memory is the host's, and its kernels do nothing.
//
// What it runs is counted by the kernel's name, a graph's kernels at each launch of the graph, and written to the file
// that CUDA_STAND_IN_COUNTS names when the process ends. It is both libraries, under two names.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_NAMES 1024
#define MOST_NODES 4096

typedef struct { char name[256]; long ran; } Kernel;
typedef struct { Kernel* nodes[MOST_NODES]; int count; } Graph;

static Kernel kernels[MOST_NAMES];
static int kernel_count;
static Graph* capture;       // under way
static void* capture_stream;

__attribute__((destructor)) static void write_counts(void) {
  const char* path = getenv("CUDA_STAND_IN_COUNTS");
  FILE* file = path ? fopen(path, "w") : NULL;
  if (!file) return;
  for (int i = 0; i < kernel_count; i++) if (kernels[i].ran) fprintf(file, "%s %ld\n", kernels[i].name, kernels[i].ran);
  fclose(file);
}

// ---- the runtime ----
int cudaGetDeviceCount(int* count) { *count = 1; return 0; }
int cudaGetDevice(int* device) { *device = 0; return 0; }
int cudaSetDevice(int device) { return device; }
int cudaDeviceGetAttribute(int* value, int attribute, int device) { (void)device; *value = attribute == 75 ? 9 : attribute == 10 ? 32 : 0; return 0; }
int cudaGetDeviceProperties(void* properties, int device) { (void)device; memset(properties, 0, 256); return 0; }
const char* cudaGetErrorName(int error) { (void)error; return "error"; }
const char* cudaGetErrorString(int error) { (void)error; return "an error of the stand-in"; }
int cudaGetLastError(void) { return 0; }
int cudaPeekAtLastError(void) { return 0; }
int cudaMalloc(void** memory, size_t bytes) { *memory = calloc(1, bytes ? bytes : 1); return capture ? 900 : 0; }
int cudaMallocHost(void** memory, size_t bytes) { return cudaMalloc(memory, bytes); }
int cudaFree(void* memory) { free(memory); return 0; }
int cudaFreeHost(void* memory) { free(memory); return 0; }
int cudaMemGetInfo(size_t* unused, size_t* total) { *unused = *total = (size_t)1 << 30; return 0; }
int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void* stream) { (void)kind; (void)stream; memcpy(to, from, bytes); return 0; }
int cudaMemcpyPeerAsync(void* to, int d, const void* from, int f, size_t bytes, void* stream) { (void)d; (void)f; (void)stream; memcpy(to, from, bytes); return 0; }
int cudaEventCreate(void** event) { *event = &kernel_count; return 0; }
int cudaEventDestroy(void* event) { (void)event; return 0; }
int cudaEventElapsedTime(float* ms, void* from, void* to) { (void)from; (void)to; *ms = 1; return 0; }
int cudaEventRecord(void* event, void* stream) { (void)event; (void)stream; return 0; }
int cudaEventSynchronize(void* event) { (void)event; return 0; }
int cudaStreamCreate(void** stream) { *stream = malloc(1); return 0; }
int cudaStreamCreateWithFlags(void** stream, unsigned flags) { (void)flags; return cudaStreamCreate(stream); }
int cudaStreamDestroy(void* stream) { free(stream); return 0; }
int cudaStreamSynchronize(void* stream) { (void)stream; return 0; }
int cudaStreamWaitEvent(void* stream, void* event, unsigned flags) { (void)stream; (void)event; (void)flags; return 0; }
int cudaStreamBeginCapture(void* stream, int mode) { (void)mode; capture = calloc(1, sizeof(Graph)); capture_stream = stream; return 0; }
int cudaStreamEndCapture(void* stream, void** graph) { (void)stream; *graph = capture; capture = NULL; return 0; }
int cudaGraphInstantiate(void** exec, void* graph, unsigned long long flags) { (void)flags; *exec = memcpy(malloc(sizeof(Graph)), graph, sizeof(Graph)); return 0; }
int cudaGraphDestroy(void* graph) { free(graph); return 0; }
int cudaGraphExecDestroy(void* exec) { free(exec); return 0; }
int cudaGraphLaunch(void* exec, void* stream) { (void)stream; Graph* graph = exec; for (int i = 0; i < graph->count; i++) graph->nodes[i]->ran++; return 0; }

// ---- the driver ----
int cuDeviceGetName(char* name, int length, int device) { (void)device; snprintf(name, (size_t)length, "stand-in"); return 0; }
int cuFuncSetAttribute(void* function, int attribute, int value) { (void)function; (void)attribute; (void)value; return 0; }
int cuGetErrorName(int error, const char** name) { (void)error; *name = "error"; return 0; }
int cuGetErrorString(int error, const char** text) { (void)error; *text = "an error of the stand-in"; return 0; }
int cuModuleLoadData(void** module, const void* image) { (void)image; *module = &kernel_count; return 0; }
int cuModuleUnload(void* module) { (void)module; return 0; }
int cuModuleGetFunction(void** function, void* module, const char* name) {
  (void)module;
  if (kernel_count == MOST_NAMES) return 2;
  Kernel* kernel = &kernels[kernel_count++];
  snprintf(kernel->name, sizeof kernel->name, "%s", name);
  *function = kernel;
  return 0;
}
int cuTensorMapEncodeTiled(void) { return 1; }
typedef struct { unsigned grid[3], block[3], shared; void* stream; } Configuration;
int cuLaunchKernelEx(const Configuration* configuration, void* function, void** parameters, void** extra) {
  (void)parameters; (void)extra;
  if (!capture) ((Kernel*)function)->ran++;
  else if (configuration->stream != capture_stream || capture->count == MOST_NODES) return 900;
  else capture->nodes[capture->count++] = function;
  return 0;
}
