// Sets of inputs and, in destination passing style, of outputs: one for each invocation of a run.
#pragma once

#include <ATen/ops/from_blob.h>

#include <memory>

#include "python.h"

namespace kcap {

struct Sets {
  const Workload& workload;
  at::Device device;
  uint8_t* base = nullptr;
  std::shared_ptr<void> memory;  // lives on with the tensors that a Solution keeps

  Sets(const Workload& workload, at::Device device) : workload(workload), device(device) {}

  size_t bytes() const { return workload.sets * workload.stride; }
  uint8_t* input(uint32_t set, size_t j) const { return base + set * workload.stride + workload.places[j]; }
  uint8_t* output(uint32_t set, size_t j) const { return input(set, workload.inputs.size() + j); }

  // The arguments of one invocation: every tensor is a new object on the same memory.
  PyObject* arguments(uint32_t set, uint32_t upcast) const {
    size_t count = workload.inputs.size();
    PyObject* made = PyTuple_New(Py_ssize_t(count + (workload.destination ? workload.outputs.size() : 0)));
    for (size_t j = 0; j < count; ++j) {
      auto& given = workload.inputs[j];
      PyTuple_SET_ITEM(made, j, given.is_tensor() ? wrapped(given, input(set, j), upcast) : given.scalar());
    }
    for (size_t j = 0; workload.destination && j < workload.outputs.size(); ++j)
      PyTuple_SET_ITEM(made, count + j, wrapped(workload.outputs[j], output(set, j), 0));
    return made;
  }

 private:
  PyObject* wrapped(const Tensor& tensor, uint8_t* place, uint32_t upcast) const {
    auto made = at::for_blob(place, tensor.sizes)
                    .options(at::TensorOptions().dtype(tensor.dtype).device(device))
                    .target_device(device)
                    .deleter([kept = this->memory](void*) {})
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
