// Invocations on the CPU: before each one its inputs are filled afresh, at other addresses; around it the clock is read;
// after it its outputs are copied out before anything else can run on this thread.
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

// Where invocations run.
struct Place {
  virtual ~Place() = default;
  virtual Answer run(const Run& run, PyObject* callable, uint8_t* shared) = 0;
};

class Host : public Place {
 public:
  Host(const Workload& workload, const uint8_t* pool) : workload_(workload), pool_(pool), sets_(workload, at::kCPU, 64) {
    arena_ = Mapped(-1, sets_.total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS);
    sets_.begin(arena_.base);
  }

  Answer run(const Run& run, PyObject* callable, uint8_t* shared) override {
    Answer answer;
    auto* times = reinterpret_cast<uint64_t*>(shared + workload_.times_offset);
    uint64_t before = 0, last = 0;
    for (uint32_t i = 0; i < run.count; ++i) {
      uint32_t set = uint32_t((run.seed + i) % workload_.sets);
      fill(set, run, i);
      Owned arguments(sets_.arguments(set, run.upcast));
      uint64_t strays = other_threads();
      uint64_t start = now();
      Owned returned(PyObject_CallObject(callable, arguments.object));
      uint64_t end = now();
      if (i && strays > before) answer.stray_ns += strays - before;  // two clocks make it: it may seem to go back
      if (i) answer.outside_ns += start - last;
      before = other_threads(), last = end;
      times[2 * i] = start, times[2 * i + 1] = end;
      answer.elapsed_ns += end - start;
      if (!returned.object) throw Wrong(RAISED, exception());
      take(run, i, set, returned.object, shared);
    }
    return answer;
  }

 private:
  void fill(uint32_t set, const Run& run, uint32_t i) {
    for (size_t j = 0; j < workload_.inputs.size(); ++j)
      if (auto& input = workload_.inputs[j]; input.is_tensor())
        copy(sets_.inputs[set][j], sets_.content(pool_, run, i, j), input.bytes);
    for (size_t j = 0; workload_.destination && j < workload_.outputs.size(); ++j)
      poison(sets_.outputs[set][j], workload_.outputs[j].bytes);
  }

  void take(const Run& run, uint32_t i, uint32_t set, PyObject* returned, uint8_t* shared) {
    int32_t slot = run.slot[i];
    uint8_t* kept = slot < 0 ? nullptr : shared + uint64_t(slot) * workload_.slot_bytes;
    if (workload_.destination) {
      for (size_t j = 0; kept && j < workload_.outputs.size(); ++j)
        copy(kept + workload_.outputs[j].offset, sets_.outputs[set][j], workload_.outputs[j].bytes);
    } else {
      auto tensors = outputs_of(workload_, returned, at::kCPU, run.upcast != 0);
      for (size_t j = 0; kept && j < tensors.size(); ++j) keep(workload_.outputs[j], tensors[j], run, kept);
      if (kept) check_inputs(run, i, set);
      for (auto& tensor : tensors)  // what is freed next holds no earlier result
        if (!run.upcast && plain(tensor) && tensor.nbytes()) poison(tensor.mutable_data_ptr(), tensor.nbytes());
      return;
    }
    if (kept) check_inputs(run, i, set);
  }

  static void keep(const Output& output, const at::Tensor& tensor, const Run& run, uint8_t* kept) {
    auto row = whole(output, tensor, run);
    copy(kept + output.offset, row.const_data_ptr(), row.nbytes());
  }

  void check_inputs(const Run& run, uint32_t i, uint32_t set) const {
    for (size_t j = 0; j < workload_.inputs.size(); ++j)
      if (auto& input = workload_.inputs[j];
          input.is_tensor() && !same(sets_.inputs[set][j], sets_.content(pool_, run, i, j), input.bytes))
        throw Wrong(INPUT, "changed its input " + input.name);
  }

  const Workload& workload_;
  const uint8_t* pool_;
  Sets sets_;
  Mapped arena_;
};

}  // namespace kcap
