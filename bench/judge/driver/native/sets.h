// Sets of inputs and, in destination passing style, of outputs: one for each invocation of a run. No two lie alike.
#pragma once

#include <ATen/ops/from_blob.h>

#include "python.h"

namespace kcap {

struct Sets {
  const Workload& workload;
  at::Device device;
  size_t align;  // bytes: of what the device's own allocator gives
  size_t total = 0;
  std::vector<std::vector<uint8_t*>> inputs, outputs;

  Sets(const Workload& workload, at::Device device, size_t align) : workload(workload), device(device), align(align) {
    inputs.resize(workload.sets), outputs.resize(workload.sets);
    for (uint32_t s = 0; s < workload.sets; ++s) {
      for (auto& input : workload.inputs) inputs[s].push_back(input.is_tensor() ? place(input) : nullptr);
      for (auto& output : workload.outputs) outputs[s].push_back(workload.destination ? place(output) : nullptr);
    }
    total += align;
  }

  // The places so far count from 0: they begin at `base`.
  void begin(uint8_t* base) {
    for (auto* both : {&inputs, &outputs})
      for (auto& set : *both)
        for (auto& one : set) one = base + reinterpret_cast<size_t>(one);
  }

  const uint8_t* content(const uint8_t* pool, const Run& run, uint32_t i, size_t j) const {
    uint64_t number = run.first + i;
    return pool + workload.inputs[j].begin(run.seed, number, j, workload.variant(run.seed, number));
  }

  // Its input in `set`, filled, or compared with what it was filled with; both from memory of the host.
  void fill(uint32_t set, const uint8_t* pool, const Run& run, uint32_t i, size_t j) const {
    each_piece(pool, run, i, j, [&](size_t at, const uint8_t* from, size_t count) {
      copy_piece(inputs[set][j] + at, from, count);
      return true;
    });
  }
  bool unchanged(uint32_t set, const uint8_t* pool, const Run& run, uint32_t i, size_t j) const {
    return each_piece(pool, run, i, j, [&](size_t at, const uint8_t* from, size_t count) {
      return same(inputs[set][j] + at, from, count);
    });
  }

  // The arguments of one invocation: every tensor is a new object on the same memory.
  PyObject* arguments(uint32_t set, uint32_t upcast) const {
    size_t count = workload.inputs.size();
    PyObject* made = PyTuple_New(Py_ssize_t(count + (workload.destination ? workload.outputs.size() : 0)));
    for (size_t j = 0; j < count; ++j) {
      auto& input = workload.inputs[j];
      PyTuple_SET_ITEM(made, j, input.is_tensor() ? wrapped(input, inputs[set][j], upcast) : input.scalar());
    }
    for (size_t j = 0; workload.destination && j < workload.outputs.size(); ++j)
      PyTuple_SET_ITEM(made, count + j, wrapped(workload.outputs[j], outputs[set][j], 0));
    return made;
  }

 private:
  uint64_t placed_ = 0;

  // Calls `use(where in the input, its content, bytes)` until that gives false.
  template <typename Use>
  bool each_piece(const uint8_t* pool, const Run& run, uint32_t i, size_t j, Use use) const {
    auto& input = workload.inputs[j];
    if (input.kind != POOLED) return use(0, content(pool, run, i, j), input.bytes);
    Pieces pieces(input, mixed(run.seed, run.first + i, j));
    constexpr size_t AHEAD = 32;  // pieces that memory is asked for at a time
    const uint8_t* from[AHEAD];
    for (size_t at = 0, k = 0; at < input.bytes; at += Pieces::SIZE, ++k) {
      for (size_t i = 0; k % AHEAD == 0 && i < AHEAD && at + i * Pieces::SIZE < input.bytes; ++i) {
        from[i] = pool + input.offset + pieces.at(k + i);
        for (size_t line = 0; line < Pieces::SIZE; line += 64) __builtin_prefetch(from[i] + line);
      }
      if (!use(at, from[k % AHEAD], std::min(Pieces::SIZE, input.bytes - at))) return false;
    }
    return true;
  }

  static void copy_piece(uint8_t* to, const uint8_t* from, size_t count) {
    if (count == Pieces::SIZE) __builtin_memcpy(to, from, Pieces::SIZE);  // of constant size: no call
    else copy(to, from, count);
  }

  uint8_t* place(const Tensor& tensor) {
    total += align * (mixed(workload.places, placed_++, 0) % 64);
    size_t at = total;
    total += (tensor.bytes + align - 1) / align * align + align;
    return reinterpret_cast<uint8_t*>(at);
  }

  PyObject* wrapped(const Tensor& tensor, uint8_t* memory, uint32_t upcast) const {
    auto made = at::for_blob(memory, tensor.sizes)
                    .options(at::TensorOptions().dtype(tensor.dtype).device(device))
                    .target_device(device)
                    .make_tensor();
    bool plain = at::isFloatingType(tensor.dtype) && tensor.dtype != at::ScalarType::Float4_e2m1fn_x2;
    if (upcast && plain) made = made.to(upcast == 64 ? at::kDouble : at::kFloat);
    return THPVariable_Wrap(made);
  }
};

// Whether its bytes lie in a row as its numbers say.
inline bool plain(const at::Tensor& tensor) { return tensor.is_contiguous() && !tensor.is_neg() && !tensor.is_conj(); }

// The outputs of one invocation, each with its bytes in a row. What that takes is the Solution's: views are no work done.
inline std::vector<at::Tensor> rows_of(const Workload& workload, const Run& run, PyObject* returned, at::Device device) {
  auto tensors = outputs_of(workload, returned, device, run.upcast != 0);
  for (size_t j = 0; j < tensors.size(); ++j) {
    if (!plain(tensors[j])) tensors[j] = tensors[j].detach().clone(at::MemoryFormat::Contiguous);
    if (run.upcast && at::isFloatingType(workload.outputs[j].dtype)) tensors[j] = tensors[j].detach().to(at::kDouble);
  }
  return tensors;
}

}  // namespace kcap
