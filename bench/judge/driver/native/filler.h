// The judge's side of an arena, in its own process: it alone has the pool, and fills inputs from it where no code from
// elsewhere runs meanwhile.
#pragma once

#include "place.h"

namespace kcap {

class Filler {
 public:
  Filler(const uint8_t* opening, size_t size, int pool) {
    workload_.read(Reader{opening, opening + size});
    pool_ = Mapped(pool, workload_.pool_bytes, PROT_READ, MAP_SHARED);
    sets_ = std::make_unique<Sets>(workload_, at::kCPU, 64);
  }

  size_t bytes() const { return sets_->total; }

  void begin(uint8_t* base) { base_ = base, sets_->begin(base); }

  // From the arena's beginning to output `j` of set `i`, in destination passing style.
  size_t output(uint32_t i, size_t j) const { return size_t(sets_->outputs.at(i).at(j) - base_); }

  // The inputs of `count` invocations; outputs hold what nobody would compute.
  void fill(uint64_t seed, uint32_t first, uint32_t count) {
    if (count > workload_.sets) throw std::runtime_error("more invocations than sets of inputs");
    run_.seed = seed, run_.first = first, run_.count = count;
    for (uint32_t i = 0; i < count; ++i) {
      for (size_t j = 0; j < workload_.inputs.size(); ++j)
        if (workload_.inputs[j].is_tensor()) sets_->fill(i, pool_.base, run_, i, j);
      for (size_t j = 0; workload_.destination && j < workload_.outputs.size(); ++j)
        poison(sets_->outputs[i][j], workload_.outputs[j].bytes);
    }
  }

  // The first input of invocation `i` that is not what it was; -1 where all are.
  int changed(uint32_t i) const {
    for (size_t j = 0; i < run_.count && j < workload_.inputs.size(); ++j)
      if (workload_.inputs[j].is_tensor() && !sets_->unchanged(i, pool_.base, run_, i, j)) return int(j);
    return -1;
  }

 private:
  Workload workload_;
  Mapped pool_;
  Run run_;
  std::unique_ptr<Sets> sets_;
  uint8_t* base_ = nullptr;
};

}  // namespace kcap
