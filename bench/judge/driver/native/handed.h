// Inputs that are handed over as a run begins: the judge makes them where no code from elsewhere sees them, in memory that
// is new each time. So nobody can work on them before the judge's clock runs, and filling them is in no time.
#pragma once

#include <sys/mman.h>

#include "sets.h"

namespace kcap {

constexpr size_t HANDED_ALIGN = 64;

inline size_t whole_pages(size_t bytes) {
  static const size_t page = size_t(sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

// At most so many bytes hold the inputs of all sets, wherever chance lays them.
inline size_t most_handed(const Workload& workload) {
  size_t each = 0;
  for (auto& input : workload.inputs)
    if (input.is_tensor()) each += input.bytes + 66 * HANDED_ALIGN;
  return whole_pages(workload.sets * each + HANDED_ALIGN);
}

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
  bool holds(const void* at) const { return at >= base && at < base + size; }
};

// Where a candidate has them while it runs: in the same places each time, as serving has. What it kept of an earlier batch
// reads as zeros between two, and then as other inputs.
class Room {
 public:
  Room() = default;
  explicit Room(size_t bytes)
      : place_(-1, bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE) {}

  uint8_t* open(int descriptor, size_t bytes) {
    if (bytes > place_.size) throw std::runtime_error("the judge brings more than there is room for");
    put(place_.base, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor);
    open_ = true;
    return place_.base;
  }
  void close() {
    if (open_) put(place_.base, place_.size, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
    open_ = false;
  }
  bool holds(const void* at) const { return place_.holds(at); }

 private:
  static void put(uint8_t* at, size_t bytes, int protection, int flags, int descriptor) {
    if (bytes && mmap(at, bytes, protection, flags | MAP_FIXED, descriptor, 0) == MAP_FAILED)
      throw std::runtime_error("no memory for the inputs");
  }

  Mapped place_;
  bool open_ = false;
};

// The judge's side of it, in its own process.
class Filler {
 public:
  Filler(const uint8_t* opening, size_t size, int pool) {
    workload_.read(Reader{opening, opening + size});
    pool_ = Mapped(pool, workload_.pool_bytes, PROT_READ, MAP_SHARED);
    places_ = std::make_unique<Sets>(workload_, at::kCPU, HANDED_ALIGN, true, false);
  }

  size_t most() const { return most_handed(workload_); }

  // The inputs of `count` invocations at `base`; where they lie in it, and how many bytes there are.
  size_t fill(uint8_t* base, uint64_t seed, uint32_t first, uint32_t count, uint64_t* places) {
    if (count > workload_.sets) throw std::runtime_error("more invocations than sets of inputs");
    run_.seed = seed, run_.first = first, run_.count = count;
    sets_ = std::make_unique<Sets>(*places_);
    sets_->begin(base);
    size_t end = 0;
    for (uint32_t i = 0; i < count; ++i)
      for (size_t j = 0; j < workload_.inputs.size(); ++j, ++places) {
        auto& input = workload_.inputs[j];
        *places = 0;
        if (!input.is_tensor()) continue;
        sets_->fill(set_of(i), pool_.base, run_, i, j);
        *places = uint64_t(sets_->inputs[set_of(i)][j] - base), end = std::max(end, *places + input.bytes);
      }
    return whole_pages(end);
  }

  // The first input of invocation `i` that is not what it was; -1 where all are.
  int changed(uint32_t i) const {
    for (size_t j = 0; i < run_.count && j < workload_.inputs.size(); ++j)
      if (workload_.inputs[j].is_tensor() && !sets_->unchanged(set_of(i), pool_.base, run_, i, j)) return int(j);
    return -1;
  }

 private:
  // They take turns, and fill the memory from its beginning on.
  uint32_t set_of(uint32_t i) const { return uint32_t((run_.seed + i) % run_.count); }

  Workload workload_;
  Mapped pool_;
  Run run_;
  std::unique_ptr<Sets> places_, sets_;  // from 0 on, and in the memory of the last batch
};

}  // namespace kcap
