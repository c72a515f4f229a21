// Where invocations run, and the memory that the judge shares.
#pragma once

#include <sys/mman.h>

#include "sets.h"

namespace kcap {

struct Mapped {
  uint8_t* base = nullptr;
  size_t size = 0;
  Mapped() = default;
  Mapped(int descriptor, size_t size, int protection, int flags) : size(size) {
    void* found = size ? mmap(nullptr, size, protection, flags, descriptor, 0) : nullptr;
    if (found == MAP_FAILED) throw std::runtime_error("no memory for the inputs");
    base = static_cast<uint8_t*>(found);
  }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(Mapped&& other) noexcept {
    std::swap(base, other.base), std::swap(size, other.size);
    return *this;
  }
  ~Mapped() { if (base) munmap(base, size); }
};

// Whether what this process runs returns the same memory in several invocations, as a first run of a FEW shows.
inline bool returns_one_memory = false;
constexpr uint32_t FEW = 8;

inline bool share_memory(const std::vector<std::vector<at::Tensor>>& outputs) {
  std::unordered_map<const void*, size_t> owner;
  for (size_t i = 0; i < outputs.size(); ++i)
    for (auto& tensor : outputs[i])
      if (tensor.nbytes() && owner.emplace(tensor.storage().data(), i).first->second != i) return true;
  return false;
}

struct Place {
  uint32_t invocation = 0;  // that is under way, or was the last

  virtual ~Place() = default;
  // What can be done for `run` before its inputs are there.
  virtual Report prepare(const Run& run, PyObject* callable) = 0;
  // Runs invocations, and keeps the outputs of all of them: which are looked at, nobody knows yet.
  virtual Report run(const Run& run, PyObject* callable) = 0;
};

}  // namespace kcap
