// What a callable returned, taken apart. What a tensor says of itself does not count: the judge reads its memory.
#pragma once

#include <ATen/ops/scalar_tensor.h>
#include <torch/csrc/autograd/python_variable.h>

#include "workload.h"

namespace kcap {

// What a Solution did wrong; the codes are kcap.bench.judge.driver.protocol's.
enum Code : uint32_t {
  FINE, RAISED, NO_TENSOR, COUNT, SHAPE, DTYPE, DEVICE, INPUT, DRIVER, NO_GRAPH, RESERVED
};

struct Wrong : std::runtime_error {
  Code code;
  Wrong(Code code, const std::string& text) : std::runtime_error(text), code(code) {}
};

inline std::string type_name(PyObject* value) { return Py_TYPE(value)->tp_name; }

inline at::Tensor tensor_of(const Tensor& output, PyObject* value) {
  bool number = PyBool_Check(value) || PyLong_CheckExact(value) || PyFloat_CheckExact(value);
  if (number && output.sizes.empty())
    return at::scalar_tensor(PyFloat_AsDouble(value), at::TensorOptions().dtype(output.dtype));
  if (!THPVariable_Check(value)) throw Wrong(NO_TENSOR, output.name + ": is a " + type_name(value) + ", no tensor");
  return THPVariable_Unpack(value);
}

inline std::string told(at::IntArrayRef sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
  return text + "]";
}

// `lenient`: floating outputs may have another floating dtype, as those of a reference in higher precision have.
inline void check(const Tensor& output, const at::Tensor& tensor, at::Device device, bool lenient) {
  if (tensor.layout() != at::kStrided || !tensor.has_storage() || tensor.is_meta() || tensor.is_quantized() || tensor.is_nested())
    throw Wrong(NO_TENSOR, output.name + ": is no plain tensor");
  if (tensor.sizes() != at::IntArrayRef(output.sizes))
    throw Wrong(SHAPE, output.name + ": has shape " + told(tensor.sizes()) + ", the Definition's is " +
                           told(at::IntArrayRef(output.sizes)));
  bool both = lenient && at::isFloatingType(tensor.scalar_type()) && at::isFloatingType(output.dtype);
  if (tensor.scalar_type() != output.dtype && !both)
    throw Wrong(DTYPE, output.name + ": is " + at::toString(tensor.scalar_type()) + ", the Definition's is " +
                           at::toString(output.dtype));
  if (tensor.device().type() != device.type() && tensor.dim() > 0)
    throw Wrong(DEVICE, output.name + ": is on " + tensor.device().str() + ", not on " + device.str());
}

inline std::vector<PyObject*> listed(const Workload& workload, PyObject* value) {
  std::vector<PyObject*> found;
  if (PyDict_Check(value)) {
    for (auto& output : workload.outputs)
      if (auto* one = PyDict_GetItemString(value, output.name.c_str())) found.push_back(one);
      else throw Wrong(COUNT, "returns no " + output.name);
  } else if (PyTuple_Check(value)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) found.push_back(PyTuple_GET_ITEM(value, i));
  } else if (PyList_Check(value)) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); ++i) found.push_back(PyList_GET_ITEM(value, i));
  } else {
    found.push_back(value);
  }
  if (found.size() != workload.outputs.size())
    throw Wrong(COUNT, "returns " + std::to_string(found.size()) + " outputs, the Definition has " +
                           std::to_string(workload.outputs.size()));
  return found;
}

inline std::vector<at::Tensor> outputs_of(const Workload& workload, PyObject* value, at::Device device, bool lenient) {
  std::vector<at::Tensor> tensors;
  auto values = listed(workload, value);
  for (size_t i = 0; i < values.size(); ++i) {
    tensors.push_back(tensor_of(workload.outputs[i], values[i]));
    check(workload.outputs[i], tensors.back(), device, lenient);
  }
  return tensors;
}

}  // namespace kcap
