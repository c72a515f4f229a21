// A Workload as the judge describes it: its inputs, its outputs, and where they lie.
#pragma once

#include <Python.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <unordered_map>

#include "message.h"

namespace kcap {

enum Kind : uint32_t { TENSOR, INTEGER, REAL, BOOLEAN, NOTHING };
enum Operation : uint32_t { OPEN = 1, PREPARE = 2, RUN = 3 };
enum Flag : uint32_t { DESTINATION = 1, GRAPHS = 2 };

inline at::ScalarType dtype_of(const std::string& name) {
  static const std::unordered_map<std::string, at::ScalarType> known = {
      {"float64", at::kDouble},       {"float32", at::kFloat},
      {"float16", at::kHalf},         {"bfloat16", at::kBFloat16},
      {"float8_e4m3fn", at::kFloat8_e4m3fn}, {"float8_e5m2", at::kFloat8_e5m2},
      {"float4_e2m1fn_x2", at::ScalarType::Float4_e2m1fn_x2},
      {"int64", at::kLong},           {"int32", at::kInt},
      {"int16", at::kShort},          {"int8", at::kChar},
      {"uint8", at::kByte},           {"bool", at::kBool}};
  auto found = known.find(name);
  if (found == known.end()) throw std::runtime_error("the driver knows no dtype " + name);
  return found->second;
}

struct Tensor {
  std::string name;
  at::ScalarType dtype;
  std::vector<int64_t> sizes;
  size_t bytes = 0;

  void read(Reader& from) {
    name = from.text();
    dtype = dtype_of(from.text());
    bytes = c10::elementSize(dtype);
    sizes.resize(from.u32());
    for (auto& size : sizes) bytes *= size_t(size = from.take<int64_t>());
  }
};

struct Input : Tensor {
  Kind kind;
  int64_t integer = 0;
  double real = 0;

  bool is_tensor() const { return kind == TENSOR; }

  PyObject* scalar() const {
    switch (kind) {
      case INTEGER: return PyLong_FromLongLong(integer);
      case REAL: return PyFloat_FromDouble(real);
      case BOOLEAN: return PyBool_FromLong(integer != 0);
      default: Py_RETURN_NONE;
    }
  }

  void read(Reader& from) {
    kind = Kind(from.u32());
    integer = from.take<int64_t>();
    real = from.take<double>();
    if (is_tensor()) Tensor::read(from);
  }
};

struct Workload {
  bool destination = false;
  bool graphs = false;  // on a GPU: batches are captured
  uint32_t sets = 1;  // of inputs: as many as there are invocations in a run at most
  uint64_t stride = 0;           // bytes from one set to the next
  std::vector<uint64_t> places;  // in a set: of each input, and in destination passing style of each output
  std::vector<Input> inputs;
  std::vector<Tensor> outputs;

  void read(Reader from) {
    from.u32();
    uint32_t flags = from.u32();
    destination = flags & DESTINATION, graphs = flags & GRAPHS;
    sets = from.u32(), stride = from.u64();
    inputs.resize(from.u32());
    for (auto& input : inputs) input.read(from);
    outputs.resize(from.u32());
    for (auto& output : outputs) output.read(from);
    places.resize(from.u32());
    for (auto& place : places) place = from.u64();
  }
};

struct Run {
  uint32_t count = 0;
  uint32_t upcast = 0;  // 0, or the bits of the dtype that floating inputs are given in
  uint32_t gate = 0;    // on a GPU: the value that opens it for this run; 0, if there is none

  Run() = default;
  Run(Reader from, const Workload& workload) {
    from.u32();
    count = from.u32(), upcast = from.u32(), gate = from.u32();
    if (count > workload.sets) throw std::runtime_error("more invocations than sets of inputs");
  }
};

}  // namespace kcap
