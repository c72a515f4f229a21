// Invocations on the CPU: before each one its inputs are filled afresh, at other addresses; around it the clock is read;
// after it its outputs are copied out before anything else can run on this thread.
#pragma once

#include <sys/mman.h>

#include "python.h"

namespace kcap {

constexpr size_t ALIGN = 64;  // of tensors on the CPU: at::empty's

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

class Host {
 public:
  Host(const Workload& workload, const uint8_t* pool) : workload_(workload), pool_(pool) {
    std::vector<std::pair<size_t, uint8_t**>> wanted;
    inputs_.resize(workload.sets), outputs_.resize(workload.sets);
    size_t total = 0;
    auto place = [&](const Tensor& tensor, uint8_t** slot) {
      total += ALIGN * (kcap::random_bits() % 64);  // no two sets lie alike
      wanted.emplace_back(total, slot);
      total += (tensor.bytes + ALIGN - 1) / ALIGN * ALIGN + ALIGN;
    };
    for (auto& set : inputs_) set.resize(workload.inputs.size());
    for (auto& set : outputs_) set.resize(workload.outputs.size());
    for (uint32_t s = 0; s < workload.sets; ++s) {
      for (size_t j = 0; j < workload.inputs.size(); ++j)
        if (workload.inputs[j].is_tensor()) place(workload.inputs[j], &inputs_[s][j]);
      for (size_t j = 0; workload.destination && j < workload.outputs.size(); ++j)
        place(workload.outputs[j], &outputs_[s][j]);
    }
    arena_ = Mapped(-1, total + ALIGN, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS);
    for (auto& [offset, slot] : wanted) *slot = arena_.base + offset;
  }

  Answer run(const Run& run, PyObject* callable, uint8_t* shared) {
    Answer answer;
    auto* times = reinterpret_cast<uint64_t*>(shared + workload_.times_offset);
    uint64_t before = 0, last = 0;
    for (uint32_t i = 0; i < run.count; ++i) {
      answer.iteration = i;
      uint32_t set = uint32_t((run.seed + i) % workload_.sets);
      fill(set, run, i);
      Owned arguments(tuple(set, run.upcast));
      uint64_t strays = other_threads();
      uint64_t start = now();
      Owned returned(PyObject_CallObject(callable, arguments.object));
      uint64_t end = now();
      if (i) answer.stray_ns += strays - before, answer.outside_ns += start - last;
      before = other_threads(), last = end;
      times[2 * i] = start, times[2 * i + 1] = end;
      answer.elapsed_ns += end - start;
      if (!returned.object) throw Wrong(RAISED, exception());
      take(run, i, set, returned.object, shared);
    }
    return answer;
  }

 private:
  const uint8_t* content(const Input& input, const Run& run, uint32_t i, size_t j) const {
    uint64_t number = run.first + i;
    return pool_ + input.begin(run.seed, number, j, workload_.variant(run.seed, number));
  }

  void fill(uint32_t set, const Run& run, uint32_t i) {
    for (size_t j = 0; j < workload_.inputs.size(); ++j)
      if (auto& input = workload_.inputs[j]; input.is_tensor())
        copy(inputs_[set][j], content(input, run, i, j), input.bytes);
    for (size_t j = 0; workload_.destination && j < workload_.outputs.size(); ++j)
      poison(outputs_[set][j], workload_.outputs[j].bytes);
  }

  // Every tensor is a new object on the same memory.
  PyObject* tuple(uint32_t set, uint32_t upcast) const {
    auto& w = workload_;
    PyObject* made = PyTuple_New(Py_ssize_t(w.inputs.size() + (w.destination ? w.outputs.size() : 0)));
    for (size_t j = 0; j < w.inputs.size(); ++j)
      PyTuple_SET_ITEM(made, j, w.inputs[j].is_tensor() ? wrapped(w.inputs[j], inputs_[set][j], upcast)
                                                        : w.inputs[j].scalar());
    for (size_t j = 0; w.destination && j < w.outputs.size(); ++j)
      PyTuple_SET_ITEM(made, w.inputs.size() + j, wrapped(w.outputs[j], outputs_[set][j], 0));
    return made;
  }

  static PyObject* wrapped(const Tensor& tensor, uint8_t* memory, uint32_t upcast) {
    auto made = at::from_blob(memory, tensor.sizes, at::TensorOptions().dtype(tensor.dtype));
    bool plain = at::isFloatingType(tensor.dtype) && tensor.dtype != at::ScalarType::Float4_e2m1fn_x2;
    if (upcast && plain) made = made.to(upcast == 64 ? at::kDouble : at::kFloat);
    return THPVariable_Wrap(made);
  }

  void take(const Run& run, uint32_t i, uint32_t set, PyObject* returned, uint8_t* shared) {
    int32_t slot = run.slot[i];
    uint8_t* kept = slot < 0 ? nullptr : shared + uint64_t(slot) * workload_.slot_bytes;
    if (workload_.destination) {
      for (size_t j = 0; kept && j < workload_.outputs.size(); ++j)
        copy(kept + workload_.outputs[j].offset, outputs_[set][j], workload_.outputs[j].bytes);
    } else {
      auto tensors = outputs_of(workload_, returned, at::kCPU, run.upcast != 0);
      for (size_t j = 0; j < tensors.size(); ++j) keep(workload_.outputs[j], tensors[j], run, kept);
    }
    if (kept) check_inputs(run, i, set);
  }

  static void keep(const Output& output, const at::Tensor& tensor, const Run& run, uint8_t* kept) {
    bool plain = tensor.is_contiguous() && !tensor.is_neg() && !tensor.is_conj();
    auto whole = plain ? tensor : tensor.detach().clone(at::MemoryFormat::Contiguous);
    if (run.upcast && at::isFloatingType(output.dtype)) whole = whole.detach().to(at::kDouble);
    if (kept) copy(kept + output.offset, whole.const_data_ptr(), whole.nbytes());
    if (!run.upcast && plain && whole.nbytes()) poison(tensor.mutable_data_ptr(), whole.nbytes());
  }

  void check_inputs(const Run& run, uint32_t i, uint32_t set) const {
    for (size_t j = 0; j < workload_.inputs.size(); ++j)
      if (auto& input = workload_.inputs[j];
          input.is_tensor() && !same(inputs_[set][j], content(input, run, i, j), input.bytes))
        throw Wrong(INPUT, "changed its input " + input.name);
  }

  const Workload& workload_;
  const uint8_t* pool_;
  Mapped arena_;
  std::vector<std::vector<uint8_t*>> inputs_, outputs_;
};

}  // namespace kcap
