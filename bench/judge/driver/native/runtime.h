// CUDA's runtime by its addresses, looked up once, before any code from elsewhere is in this process. Of the library
// that torch has loaded; no header and no compiler of CUDA is needed.
#pragma once

#include <dlfcn.h>

#include "message.h"

namespace kcap {

constexpr int PERSISTING_L2 = 6;  // cudaLimitPersistingL2CacheSize
constexpr int NO_TIMING = 2;      // cudaEventDisableTiming

struct Runtime {
  int (*set_device)(int) = nullptr;
  int (*fill)(void*, int, size_t, void*) = nullptr;
  int (*wait)() = nullptr;
  int (*get_limit)(size_t*, int) = nullptr;
  int (*reset_persisting)() = nullptr;
  int (*forget_error)() = nullptr;
  const char* (*words)(int) = nullptr;
  int (*make_event)(void**, unsigned) = nullptr;
  int (*record)(void*, void*) = nullptr;
  int (*wait_for)(void*, void*, unsigned) = nullptr;
  void* event = nullptr;
  size_t persisting_at_first = 0;

  explicit Runtime(const std::string& library) {
    void* found = dlopen(library.c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (!found) throw std::runtime_error(library + " is not loaded");
    auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(found, name));
      if (!function) throw std::runtime_error(library + " has no " + name);
    };
    find(set_device, "cudaSetDevice");
    find(fill, "cudaMemsetAsync");
    find(wait, "cudaDeviceSynchronize");
    find(get_limit, "cudaDeviceGetLimit");
    find(reset_persisting, "cudaCtxResetPersistingL2Cache");
    find(forget_error, "cudaGetLastError");
    find(words, "cudaGetErrorString");
    find(make_event, "cudaEventCreateWithFlags");
    find(record, "cudaEventRecord");
    find(wait_for, "cudaStreamWaitEvent");
    check(make_event(&event, NO_TIMING), "no event");
    persisting_at_first = persisting();
  }

  // What is asked of `second` from now on comes after what was asked of `first`: so it joins its capture.
  void follow(void* first, void* second) const {
    check(record(event, first), "an event"), check(wait_for(second, event, 0), "an event");
  }

  // Bytes of the L2 that are set aside for data that a program names.
  size_t persisting() const {
    size_t bytes = 0;
    return get_limit(&bytes, PERSISTING_L2) ? 0 : bytes;
  }

  void check(int result, const char* what) const {
    if (result) throw std::runtime_error(std::string("CUDA error: ") + what + ": " + words(result));
  }
};

}  // namespace kcap
