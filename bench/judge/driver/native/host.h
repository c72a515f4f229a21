// Invocations on the CPU. Their inputs lie in the arena, which the judge fills while this process stands still; so do their
// outputs in destination passing style. Others stay where the Solution made them until the next run has its own: the judge
// reads them there, by the addresses that it finds in `addresses`.
#pragma once

#include "place.h"

namespace kcap {

class Host : public Place {
 public:
  // `addresses`: of each output of each invocation.
  Host(const Workload& workload, int arena, uint64_t* addresses)
      : workload_(workload), addresses_(addresses), sets_(workload, at::kCPU), kept_(workload.sets) {
    auto mapped = std::make_shared<Mapped>(arena, sets_.bytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE);
    sets_.base = mapped->base, sets_.memory = mapped;
  }

  Report prepare(const Run& run, PyObject*) override {
    arguments_.clear();
    for (uint32_t i = 0; !run.upcast && i < run.count; ++i) arguments_.emplace_back(sets_.arguments(i, 0));
    return {};
  }

  Report run(const Run& run, PyObject* callable) override {
    call(run, callable);
    if (run.count > most_ && !returns_one_memory && share_memory(kept_)) {
      returns_one_memory = true;
      call(run, callable);
    }
    most_ = std::max(most_, run.count);
    return {};
  }

 private:
  using Rows = std::vector<at::Tensor>;

  void call(const Run& run, PyObject* callable) {
    for (uint32_t i = 0; i < run.count; ++i) {
      invocation = i;
      Owned more(run.upcast ? sets_.arguments(i, run.upcast) : nullptr);
      PyObject* arguments = run.upcast ? more.object : arguments_[i].object;
      Owned returned(PyObject_CallObject(callable, arguments));
      if (!returned.object) throw Wrong(RAISED, exception());
      if (!workload_.destination) keep(run, i, returned.object);
    }
  }

  void keep(const Run& run, uint32_t i, PyObject* returned) {
    auto rows = rows_of(workload_, run, returned, at::kCPU);
    size_t count = workload_.outputs.size();
    for (size_t j = 0; j < count; ++j) {
      if (returns_one_memory) rows[j] = rows[j].detach().clone();  // in its time
      addresses_[i * count + j] = reinterpret_cast<uint64_t>(rows[j].const_data_ptr());
    }
    kept_[i] = std::move(rows);
  }

  const Workload& workload_;
  uint64_t* addresses_;
  Sets sets_;
  std::vector<Owned> arguments_;
  std::vector<Rows> kept_;
  uint32_t most_ = 0;  // invocations of a run so far: the judge times none that is longer than those before
};

}  // namespace kcap
