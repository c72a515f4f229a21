// Invocations on the CPU: before each one its inputs are filled afresh, at other addresses, unless the judge brings them;
// around it the clock is read; after it its outputs are copied out before anything else can run on this thread.
#pragma once

#include "handed.h"

namespace kcap {

// Where invocations run.
struct Place {
  virtual ~Place() = default;
  // Takes in what `run` brings with it.
  virtual void bring(const Run& run) {}
  // Runs invocations, and keeps the outputs of all of them: which are asked for, nobody knows yet.
  virtual Answer run(const Run& run, PyObject* callable, uint8_t* shared) = 0;
  // Of the last run: shares the outputs of invocation `i` with the judge, and checks its inputs if they are still there.
  virtual void deliver(uint32_t i, uint8_t* shared) = 0;
  // Once the judge has its answer.
  virtual void rest() {}
};

class Host : public Place {
 public:
  Host(const Workload& workload, const uint8_t* pool)
      : workload_(workload), pool_(pool), sets_(workload, at::kCPU, 64, !workload.handed) {
    if (workload.handed) room_ = Room(most_handed(workload));
    arena_ = Mapped(-1, sets_.total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS);
    sets_.begin(arena_.base);
  }

  void bring(const Run& run) override {
    others_ = other_threads();
    if (!workload_.handed || !run.count) return;
    uint8_t* base = room_.open(run.descriptor, run.bytes);
    auto place = run.places.begin();
    for (uint32_t i = 0; i < run.count; ++i)
      for (size_t j = 0; j < workload_.inputs.size(); ++j, ++place) sets_.inputs[i][j] = base + *place;
  }

  Answer run(const Run& run, PyObject* callable, uint8_t* shared) override {
    Answer answer;
    last_ = run;
    auto* times = reinterpret_cast<uint64_t*>(shared + workload_.times_offset);
    uint64_t before = others_, last = 0;
    NoCollection still;  // with the inputs there, and no clock running
    for (uint32_t i = 0; i < run.count; ++i) {
      uint32_t set = set_of(run, i);
      fill(set, run, i);
      Owned arguments(sets_.arguments(set, run.upcast));
      still.wake();
      uint64_t strays = other_threads();
      uint64_t start = now();
      Owned returned(PyObject_CallObject(callable, arguments.object));
      uint64_t end = now();
      still.rest();
      if (strays > before) answer.stray_ns += strays - before;  // two clocks make it: it may seem to go back
      if (i) answer.outside_ns += start - last;
      before = other_threads(), last = end;
      if (uint64_t most = (end - start) * workload_.threads; before > strays + most)  // not all of it within the call
        answer.stray_ns += before - strays - most;
      times[2 * i] = start, times[2 * i + 1] = end;
      answer.elapsed_ns += end - start;
      if (!returned.object) throw Wrong(RAISED, exception());
      take(run, i, set, returned.object, shared + i * workload_.slot_bytes);
    }
    return answer;
  }

  void deliver(uint32_t i, uint8_t* shared) override {
    for (size_t j = 0; j < workload_.outputs.size(); ++j)
      if (size_t at = i * workload_.outputs.size() + j; at < laid_.size() && !laid_[at].empty()) {
        auto& output = workload_.outputs[j];
        auto* kept = shared + i * workload_.slot_bytes + output.offset;
        auto row = at::for_blob(kept, output.sizes).strides(laid_[at]).options(output.dtype).make_tensor().contiguous();
        copy(kept, row.const_data_ptr(), row.nbytes());
        laid_[at].clear();
      }
    if (workload_.handed || i + workload_.sets < last_.count) return;
    for (size_t j = 0; j < workload_.inputs.size(); ++j)
      if (workload_.inputs[j].is_tensor() && !sets_.unchanged(set_of(last_, i), pool_, last_, i, j))
        throw Wrong(INPUT, "changed its input " + workload_.inputs[j].name);
  }

  void rest() override { room_.close(); }

 private:
  uint32_t set_of(const Run& run, uint32_t i) const {
    return workload_.handed ? i : uint32_t((run.seed + i) % workload_.sets);
  }

  void fill(uint32_t set, const Run& run, uint32_t i) {
    for (size_t j = 0; !workload_.handed && j < workload_.inputs.size(); ++j)
      if (workload_.inputs[j].is_tensor()) sets_.fill(set, pool_, run, i, j);
    for (size_t j = 0; workload_.destination && j < workload_.outputs.size(); ++j)
      poison(sets_.outputs[set][j], workload_.outputs[j].bytes);
  }

  void take(const Run& run, uint32_t i, uint32_t set, PyObject* returned, uint8_t* kept) {
    if (workload_.destination) {
      for (size_t j = 0; j < workload_.outputs.size(); ++j)
        copy(kept + workload_.outputs[j].offset, sets_.outputs[set][j], workload_.outputs[j].bytes);
      return;
    }
    auto tensors = outputs_of(workload_, returned, at::kCPU, run.upcast != 0);
    laid_.resize(std::max<size_t>(laid_.size(), (i + 1) * tensors.size()));
    for (size_t j = 0; j < tensors.size(); ++j) {
      bool dense = !run.upcast && tensors[j].is_non_overlapping_and_dense() && !tensors[j].is_neg();
      auto row = dense ? tensors[j] : whole(workload_.outputs[j], tensors[j], run);
      copy(kept + workload_.outputs[j].offset, row.const_data_ptr(), row.nbytes());
      laid_[i * tensors.size() + j] = row.is_contiguous() ? std::vector<int64_t>() : row.strides().vec();
    }
    for (auto& tensor : tensors)  // what is freed next holds no earlier result
      if (!run.upcast && plain(tensor) && tensor.nbytes() && !is_input(tensor.const_data_ptr()))
        poison(tensor.mutable_data_ptr(), tensor.nbytes());
  }

  bool is_input(const void* at) const { return arena_.holds(at) || room_.holds(at); }

  const Workload& workload_;
  const uint8_t* pool_;
  Sets sets_;
  Mapped arena_;
  Room room_;
  Run last_;
  uint64_t others_ = 0;  // CPU time that they had had when the run came
  std::vector<std::vector<int64_t>> laid_;  // strides of outputs in the shared memory that do not lie in a row
};

}  // namespace kcap
