// Invocations on the CPU: before each one its inputs are filled afresh, at other addresses, unless the judge brings them;
// around it the clock is read, and within that its outputs are brought into rows; after it they are copied out before
// anything else can run on this thread.
#pragma once

#include <ATen/ops/empty.h>

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
      Owned returned(run.empty ? uncalled() : PyObject_CallObject(callable, arguments.object));
      if (!returned.object) throw Wrong(RAISED, exception());
      auto rows = workload_.destination ? Rows() : rows_of(workload_, run, returned.object, at::kCPU);
      uint64_t end = now();
      still.rest();
      if (strays > before) answer.stray_ns += strays - before;  // two clocks make it: it may seem to go back
      if (i) answer.outside_ns += start - last;
      before = other_threads(), last = end;
      if (uint64_t most = (end - start) * workload_.threads; before > strays + most)  // not all of it within the call
        answer.stray_ns += before - strays - most;
      times[2 * i] = start, times[2 * i + 1] = end;
      answer.elapsed_ns += end - start;
      take(run, set, rows, shared + i * workload_.slot_bytes);
    }
    return answer;
  }

  void deliver(uint32_t i, uint8_t* shared) override {
    if (workload_.handed || i + workload_.sets < last_.count) return;
    for (size_t j = 0; j < workload_.inputs.size(); ++j)
      if (workload_.inputs[j].is_tensor() && !sets_.unchanged(set_of(last_, i), pool_, last_, i, j))
        throw Wrong(INPUT, "changed its input " + workload_.inputs[j].name);
  }

  void rest() override { room_.close(); }

 private:
  using Rows = std::vector<at::Tensor>;

  uint32_t set_of(const Run& run, uint32_t i) const {
    return workload_.handed ? i : uint32_t((run.seed + i) % workload_.sets);
  }

  void fill(uint32_t set, const Run& run, uint32_t i) {
    for (size_t j = 0; !workload_.handed && j < workload_.inputs.size(); ++j)
      if (workload_.inputs[j].is_tensor()) sets_.fill(set, pool_, run, i, j);
    for (size_t j = 0; workload_.destination && j < workload_.outputs.size(); ++j)
      poison(sets_.outputs[set][j], workload_.outputs[j].bytes);
  }

  // Outputs in the place of a call's: new memory that was written to.
  PyObject* uncalled() const {
    PyObject* made = PyTuple_New(Py_ssize_t(workload_.outputs.size()));
    for (size_t j = 0; j < workload_.outputs.size(); ++j) {
      auto tensor = at::empty(workload_.outputs[j].sizes, workload_.outputs[j].dtype);
      poison(tensor.mutable_data_ptr(), tensor.nbytes());
      PyTuple_SET_ITEM(made, Py_ssize_t(j), THPVariable_Wrap(tensor));
    }
    return made;
  }

  void take(const Run& run, uint32_t set, const Rows& rows, uint8_t* kept) {
    for (size_t j = 0; j < workload_.outputs.size(); ++j) {
      auto& output = workload_.outputs[j];
      if (workload_.destination) copy(kept + output.offset, sets_.outputs[set][j], output.bytes);
      else copy(kept + output.offset, rows[j].const_data_ptr(), rows[j].nbytes());
    }
    for (auto& row : rows)  // what is freed next holds no earlier result
      if (!run.upcast && row.nbytes() && !is_input(row.const_data_ptr()))
        poison(row.mutable_data_ptr(), row.nbytes());
  }

  bool is_input(const void* at) const { return arena_.holds(at) || room_.holds(at); }

  const Workload& workload_;
  const uint8_t* pool_;
  Sets sets_;
  Mapped arena_;
  Room room_;
  Run last_;
  uint64_t others_ = 0;  // CPU time that they had had when the run came
};

}  // namespace kcap
